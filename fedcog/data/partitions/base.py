"""What all partitions have in common: configuration, table entry, errors and checks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


class PartitionError(Exception):
    """A partition that is impossible; the message names the setting and the remedy."""


@dataclass(frozen=True)
class PartitionConfig:
    """The settings of a partition; each partition reads those that it needs.

    Attributes:
        clients: Number of clients.
        beta: Concentration of the Dirichlet distribution.
        balance: Whether a client with its even share gets no examples of further classes.
        classes_per_client: Number of classes each client holds.
        min_examples: Smallest number of examples a client may have.
        arguments: Additional arguments of a flwr-datasets partitioner, such as 'shard_size=50'.
    """

    clients: int
    beta: float = 0.1
    balance: bool = True
    classes_per_client: int = 2
    min_examples: int = 10
    arguments: str = ""


class Examples(NamedTuple):
    """What a partition is computed from.

    Attributes:
        labels: Class of each training example `(N,)`, or boolean rows `(N, num_classes)`.
        users: User of each training example `(N,)`, if known.
    """

    labels: Indices
    users: Indices | None = None


class Partition(NamedTuple):
    """An entry of the table of partitions.

    Attributes:
        assign: Returns the examples of each client, given the examples, the configuration and a
            seed. The first line of its docstring describes the partition to users.
        settings: Command-line flags of the settings that it reads.
        by_label: Whether it needs exactly one label per example.
        by_user: Whether it needs the user of each example.
        keeps_order: Whether the order of a client's examples is part of the partition; if not, they
            are sorted.
        describe: Returns the values of its settings in words, such as 'beta 0.1'.
    """

    assign: Callable[[Examples, PartitionConfig, int], list[Indices]]
    settings: str = ""
    by_label: bool = False
    by_user: bool = False
    keeps_order: bool = False
    describe: Callable[[PartitionConfig], str] = lambda config: ""

    @property
    def summary(self) -> str:
        """The first line of the docstring of `assign`."""
        return (self.assign.__doc__ or "").strip().splitlines()[0]


def check_sizes(
    client_indices: Sequence[Indices], config: PartitionConfig, name: str, remedy: str
) -> None:
    """Check that every client has enough examples.

    Args:
        client_indices: Examples of each client.
        config: The configuration of the partition.
        name: Name of the partition, for the error message.
        remedy: What the user can do, for the error message.

    Raises:
        PartitionError: If a client has fewer than `config.min_examples` examples.
    """
    smallest = min(len(indices) for indices in client_indices)
    if smallest < config.min_examples:
        raise PartitionError(
            f"{name} over {config.clients} clients leaves one with {smallest} examples, "
            f"fewer than {config.min_examples}: {remedy}."
        )
