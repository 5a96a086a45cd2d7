"""Robust means that need the update of every client."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedcog.algorithms.mean_rule import MeanRule
from fedcog.algorithms.types import UPDATE_PARTS, ClientContext, LocalWork, Uplink
from fedcog.core import tree
from fedcog.core.tree import Params, State


@dataclass(frozen=True)
class RobustRule(MeanRule):
    """Base class of wrappers whose server sees every update and combines them robustly."""

    @property
    def uplink(self) -> Uplink:  # type: ignore[override]
        """The server needs every client's update."""
        return "per_client"

    def client_update(
        self, params: Params, client: ClientContext, work: LocalWork
    ) -> tuple[State, State]:
        """Send the update and the weight for the server to see.

        Returns:
            (state, payload).
        """
        state, payload = self.inner.client_update(params, client, work)
        visible = {key: payload[key] for key in (*UPDATE_PARTS, "weight")}
        rest = {key: value for key, value in payload.items() if key not in UPDATE_PARTS}
        per_client = payload.get("per_client", {})
        return state, rest | {"per_client": per_client | {"robust": visible}}

    def aggregate(self, total: State) -> State:
        """Replace the sum of the updates by the total weight times their robust mean."""
        per_client = dict(total["per_client"])
        visible = per_client.pop("robust")
        updates = {key: visible[key] for key in UPDATE_PARTS}
        rest = {key: value for key, value in total.items() if key != "per_client"}
        if per_client:
            rest["per_client"] = per_client
        return self.inner.aggregate(rest | self.combine(updates, visible["weight"]))

    def combine(self, updates: State, weights: Tensor) -> State:
        """Combine the updates of a round.

        Args:
            updates: `"delta"` and `"buffers"` of the clients, each times the client's weight,
                stacked.
            weights: The clients' weights, `(K,)`.

        Returns:
            `"delta"` and `"buffers"`: the total weight times the robust mean.
        """
        raise NotImplementedError


def map_coordinates(rule: Callable[[Tensor], Tensor], updates: State, weights: Tensor) -> State:
    """Apply a rule over clients to every number of the unweighted updates.

    Args:
        rule: Maps `(K, ...)` to `(...)`.
        updates: Weighted updates, stacked.
        weights: The clients' weights, `(K,)`.

    Returns:
        The total weight times the result.
    """

    def combined(value: Tensor) -> Tensor:
        column = weights.reshape(-1, *[1] * (value.dim() - 1))
        return weights.sum() * rule(value / column)

    return tree.apply(combined, updates)


def sum_selected(updates: State, weights: Tensor, selected: Tensor) -> State:
    """Return the total weight times the weighted mean of the selected clients' updates.

    Args:
        updates: Weighted updates, stacked.
        weights: The clients' weights, `(K,)`.
        selected: Which clients count, `(K,)`.

    Returns:
        `"delta"` and `"buffers"`.
    """
    factor = weights.sum() / torch.where(selected, weights, 0).sum()

    def total(value: Tensor) -> Tensor:
        mask = selected.reshape(-1, *[1] * (value.dim() - 1))
        return factor * torch.where(mask, value, 0).sum(0)

    return tree.apply(total, updates)
