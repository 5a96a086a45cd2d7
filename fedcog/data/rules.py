"""What every way of sharing out examples goes by: its settings, and what it may not do."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


class PartitionError(Exception):
    """A way of sharing out that cannot work: says which setting is to blame, and what to do."""


@dataclass(frozen=True)
class Rule:
    """The settings of a partition; each kind reads those it needs."""

    clients: int
    beta: float = 0.1
    balance: bool = True
    classes_per_client: int = 2
    min_examples: int = 10
    arguments: str = ""


def check_sizes(shares: Sequence[Indices], rule: Rule, what: str, remedy: str) -> None:
    """Every client has enough examples; else who has not, and what to do."""
    smallest = min(len(share) for share in shares)
    if smallest < rule.min_examples:
        raise PartitionError(
            f"{what} over {rule.clients} clients leaves one with {smallest} examples, fewer than {rule.min_examples}: "
            f"{remedy}."
        )
