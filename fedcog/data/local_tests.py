"""Every client's own test examples: held out of its training data, or given by the data set."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedcog.core import rng
from fedcog.data.datasets import Dataset

ShiftClient = Callable[[Tensor, int], Tensor]
"""Changes stored inputs as the training inputs of a client are changed."""


class LocalTests(NamedTuple):
    """The test examples of all clients, one client after another.

    Attributes:
        x: Stored inputs `(N, ...)`, shifted as the client's training data is.
        y: Labels, `(N,)`, or `(N, C)` booleans if multi-label.
        sizes: Number of test examples of each client, `(K,)`, in host memory.
    """

    x: Tensor
    y: Tensor
    sizes: Tensor

    @property
    def client_ids(self) -> Tensor:
        """The clients that have test examples, in host memory."""
        return self.sizes.nonzero()[:, 0]

    @property
    def owners(self) -> Tensor:
        """The client of each example, `(N,)`, in host memory."""
        return torch.arange(len(self.sizes)).repeat_interleave(self.sizes)

    def rows(self, client_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return where the examples of some clients are, as one matrix.

        Args:
            client_ids: `(K,)`, in host memory.

        Returns:
            Positions in `x`, `(K, M)`, and which of them exist, `(K, M)`, for M the largest number
            of examples. Missing positions are 0.
        """
        sizes = self.sizes[client_ids]
        starts = (self.sizes.cumsum(0) - self.sizes)[client_ids]
        offsets = torch.arange(int(sizes.max()))
        exists = offsets < sizes[:, None]
        return torch.where(exists, starts[:, None] + offsets, 0), exists

    def to(self, input_device: torch.device, label_device: torch.device) -> "LocalTests":
        """Return the same examples with inputs and labels on other devices.

        Args:
            input_device: Device of inputs.
            label_device: Device of labels.
        """
        return LocalTests(self.x.to(input_device), self.y.to(label_device), self.sizes)


def hold_out(
    client_indices: Sequence[Tensor], fraction: float, seed: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Split each client's examples into training and test examples.

    Args:
        client_indices: Training examples of each client.
        fraction: Fraction to hold out; every client keeps at least one for training.
        seed: Seed of the choice.

    Returns:
        (examples that stay, examples that are held out), one tensor per client each.
    """
    kept = []
    held_out = []
    for client, indices in enumerate(client_indices):
        count = min(round(len(indices) * fraction), len(indices) - 1)
        if count <= 0:
            kept.append(indices)
            held_out.append(indices[:0])
            continue
        order = rng.permutation(seed, f"local-test/{client}", 0, len(indices))
        kept.append(indices[order[count:].sort()[0]])
        held_out.append(indices[order[:count].sort()[0]])
    return kept, held_out


def from_training(dataset: Dataset, labels: Tensor, held_out: Sequence[Tensor]) -> LocalTests:
    """Make test sets of examples that were held out of the clients' training data.

    Args:
        dataset: The data set, with inputs as the clients have them.
        labels: Labels of the training examples without label noise.
        held_out: Positions of the examples of each client.

    Returns:
        The test sets.
    """
    positions = torch.cat(list(held_out))
    sizes = torch.tensor([len(own) for own in held_out])
    return LocalTests(dataset.train_x[positions], labels[positions], sizes)


def from_test_set(
    dataset: Dataset, client_indices: Sequence[Tensor], shift: ShiftClient
) -> LocalTests:
    """Give each client the test examples of its user.

    Args:
        dataset: The data set, with users of training and test examples.
        client_indices: Training examples of each client, all of one user.
        shift: Changes a client's inputs as its training data are changed.

    Returns:
        The test sets; a client without training examples here has none.
    """
    assert dataset.users is not None and dataset.test_users is not None
    order = dataset.test_users.argsort(stable=True)
    sorted_users = dataset.test_users[order]
    parts = []
    labels = []
    for client, indices in enumerate(client_indices):
        user = dataset.users[indices[:1]]
        start = torch.searchsorted(sorted_users, user)
        end = torch.searchsorted(sorted_users, user, right=True)
        own = order[int(start) : int(end)] if len(user) else order[:0]
        parts.append(shift(dataset.test_x[own], client))
        labels.append(dataset.test_y[own])
    sizes = torch.tensor([len(own) for own in labels])
    return LocalTests(torch.cat(parts), torch.cat(labels), sizes)
