"""Coordinate-wise trimmed mean (Yin et al., ICML 2018, definition 2)."""

from dataclasses import dataclass

from torch import Tensor

from fedcog.algorithms.robust_rule import RobustRule, map_coordinates, sum_selected
from fedcog.core.settings import setting
from fedcog.core.tree import State


@dataclass(frozen=True)
class TrimmedMean(RobustRule):
    """Any algorithm, whose server drops the largest and smallest values of every number.

    The mean of the others counts clients alike, whatever their weights. With nothing dropped it is
    the weighted mean. If too few clients answer, fewer values are dropped.
    """

    trim: int = setting(
        1, "number of clients dropped at either end, for every number; 0 is FedAvg", ">= 0"
    )

    @property
    def min_clients(self) -> int:
        """One more than it drops."""
        return 2 * self.trim + 1

    def combine(self, updates: State, weights: Tensor) -> State:
        """Return the total weight times the trimmed mean.

        Args:
            updates: `"delta"` and `"buffers"` of the clients, weighted and stacked.
            weights: The clients' weights, `(K,)`.

        Returns:
            `"delta"` and `"buffers"`.
        """
        if self.trim == 0:
            return sum_selected(updates, weights, weights > 0)
        return map_coordinates(self._trimmed_mean, updates, weights)

    def _trimmed_mean(self, values: Tensor) -> Tensor:
        """Return the mean over the first dimension without the extreme values."""
        trim = min(self.trim, (len(values) - 1) // 2)
        return values.sort(0).values[trim : len(values) - trim].mean(0)
