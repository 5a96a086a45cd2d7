"""Krum and multi-Krum (Blanchard et al., NeurIPS 2017, section 4)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedcog.algorithms.robust_rule import RobustRule, sum_selected
from fedcog.core.settings import setting
from fedcog.core.tree import State


@dataclass(frozen=True)
class Krum(RobustRule):
    """Any algorithm, whose server applies the update that is nearest to most others.

    The score of an update is the sum of its squared distances to its K - f - 2 nearest others, with
    K clients in the round, f of them attackers; the lowest wins. A round needs 2 f + 3 clients; if
    fewer answer, f is lowered to fit.
    Under label skew honest updates are far apart too, and classes that few clients have are lost.
    """

    attackers: int = setting(1, "number of attackers among a round's clients", ">= 0")

    @property
    def min_clients(self) -> int:
        """Two attackers' worth of clients and three more."""
        return 2 * self.attackers + 3

    def combine(self, updates: State, weights: Tensor) -> State:
        """Return the total weight times the chosen update, or the mean of the chosen ones.

        Args:
            updates: `"delta"` and `"buffers"` of the clients, weighted and stacked.
            weights: The clients' weights, `(K,)`.

        Returns:
            `"delta"` and `"buffers"`.
        """
        num_clients = len(weights)
        order = self.scores(updates, weights).argsort(stable=True)
        chosen = torch.zeros_like(weights, dtype=torch.bool)
        chosen[order[: self.num_chosen(num_clients)]] = True
        return sum_selected(updates, weights, chosen)

    def num_chosen(self, num_clients: int) -> int:
        """Return how many updates are averaged."""
        return 1

    def _num_attackers(self, num_clients: int) -> int:
        """Return how many attackers to expect: fewer if too few clients answered."""
        return max(min(self.attackers, (num_clients - 3) // 2), 0)

    def scores(self, updates: State, weights: Tensor) -> Tensor:
        """Compute the sum of squared distances to the K - f - 2 nearest others.

        Args:
            updates: `"delta"` and `"buffers"` of the clients, weighted and stacked.
            weights: The clients' weights, `(K,)`.

        Returns:
            A score for each client, `(K,)`.
        """
        parts = [value.flatten(1) for value in updates["delta"].values()]
        rows = torch.cat(parts, 1) / weights[:, None]
        distances = torch.stack([(rows - row).square().sum(1) for row in rows])
        distances.fill_diagonal_(torch.inf)
        num_nearest = max(len(weights) - self._num_attackers(len(weights)) - 2, 1)
        return distances.sort(1).values[:, :num_nearest].sum(1)


@dataclass(frozen=True)
class MultiKrum(Krum):
    """Any algorithm, whose server averages the updates that are nearest to most others.

    As Krum, with the weighted mean of the `keep` lowest scores.
    """

    keep: int = setting(0, "number of updates to average; 0: all but the attackers'", ">= 0")

    @property
    def min_clients(self) -> int:
        """As many as Krum needs, and one more than are averaged."""
        return max(super().min_clients, self.keep)

    def num_chosen(self, num_clients: int) -> int:
        """Return how many updates are averaged."""
        return min(self.keep or num_clients - self._num_attackers(num_clients), num_clients)
