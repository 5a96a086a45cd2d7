"""Coordinate-wise median (Yin et al., ICML 2018, definition 1)."""

from dataclasses import dataclass

from torch import Tensor

from fedcog.algorithms.robust_rule import RobustRule, map_coordinates
from fedcog.core.tree import State


@dataclass(frozen=True)
class Median(RobustRule):
    """Any algorithm, whose server applies the median over clients of every number.

    Clients count alike, whatever their weights. Of an even number of clients it is the mean of the
    two middle values. It is never the weighted mean, so no setting makes it FedAvg.
    """

    def combine(self, updates: State, weights: Tensor) -> State:
        """Return the total weight times the median.

        Args:
            updates: `"delta"` and `"buffers"` of the clients, weighted and stacked.
            weights: The clients' weights, `(K,)`.

        Returns:
            `"delta"` and `"buffers"`.
        """
        return map_coordinates(_median, updates, weights)


def _median(values: Tensor) -> Tensor:
    """Return the median over the first dimension."""
    ascending = values.sort(0).values
    num_clients = len(values)
    return (ascending[(num_clients - 1) // 2] + ascending[num_clients // 2]) / 2
