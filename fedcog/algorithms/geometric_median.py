"""Geometric median, RFA (Pillutla et al., IEEE TSP 2022, algorithm 2), by repeated sums."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedcog.algorithms.mean_rule import MeanRule
from fedcog.algorithms.payloads import scaled_update
from fedcog.algorithms.types import UPDATE_PARTS, ClientContext, LocalWork
from fedcog.core import tree
from fedcog.core.settings import setting
from fedcog.core.tree import Params, State

MAX_WEIGHT = 64.0
"""Largest weight of a client, where the mean is near 1: secure aggregation needs a bound."""


@dataclass(frozen=True)
class GeometricMedian(MeanRule):
    """Any algorithm, whose server applies the geometric median of the clients' updates.

    The median is approached by the smoothed Weiszfeld algorithm, from the weighted mean v: every
    client weights its update by w / max(epsilon, |v - update|), and the weighted mean of these is
    the next v. Each pass is a sum, so it works under secure aggregation: the server sends v and
    sees sums only. Weights are relative to the last pass's mean distance and at most 64, which only
    matters for updates 64 times nearer to v than that. All passes are made; the authors stop early
    when v hardly moves. With few passes a very large update still moves v. A client that lies about
    its own weight is not found out. Distances are over all parameters, without running statistics.
    """

    passes: int = setting(4, "number of passes; 0 is the weighted mean", ">= 0")
    epsilon: float = setting(1e-5, "smallest distance that a weight is divided by", "> 0")

    @property
    def payload_bounds(self) -> dict[str, float]:  # type: ignore[override]
        """The inner bounds, those of the new weights, and of updates that are weighted by them."""
        bounds = self.inner.payload_bounds
        weighted = {key: bounds[key] * MAX_WEIGHT for key in UPDATE_PARTS}
        own = {"median_weight": MAX_WEIGHT, "closeness": 1 / self.epsilon}
        return bounds | weighted | own

    @property
    def num_resums(self) -> int:
        """The number of passes."""
        return self.passes

    def client_update(
        self, params: Params, client: ClientContext, work: LocalWork
    ) -> tuple[State, State]:
        """Start with the client's weight.

        Returns:
            (state, payload).
        """
        state, payload = self.inner.client_update(params, client, work)
        update = tree.scale(1 / client.weight, payload["delta"])
        closeness = client.weight / self._length(update)
        return state, payload | {"median_weight": client.weight, "closeness": closeness}

    def resum_broadcast(self, total: State) -> State:
        """Send v, the mean of the last pass, and the mean distance from the one before.

        The distance is the harmonic mean. All weights are multiplied by it, which changes no mean
        and keeps them near 1.
        """
        center = tree.scale(1 / total["median_weight"], total["delta"])
        return {"center": center, "distance": total["weight"] / total["closeness"]}

    def resum_payload(self, payload: State, broadcast: State) -> State:
        """Weight the update by w / max(epsilon, |v - update|).

        Returns:
            The weighted update and its weight, times the mean distance, and the weight as it is.
        """
        last_weight = payload["median_weight"]
        update = tree.scale(1 / last_weight, payload["delta"])
        distance = self._length(tree.subtract(update, broadcast["center"]))
        closeness = payload["weight"] / distance
        weight = (closeness * broadcast["distance"]).clamp(max=MAX_WEIGHT)
        scaled = scaled_update(weight / last_weight, payload)
        return scaled | {"median_weight": weight, "closeness": closeness}

    def aggregate(self, total: State) -> State:
        """Divide the weighted updates by the sum of their weights."""
        factor = total["weight"] / total["median_weight"]
        rest = {key: value for key, value in total.items() if key not in _OWN_KEYS}
        return self.inner.aggregate(rest | scaled_update(factor, total))

    def _length(self, update: Params) -> Tensor:
        """Return the L2 norm, at least epsilon, without overflow of its square."""
        exact = tree.apply(torch.Tensor.double, update)
        length = tree.norm(exact).clamp(min=self.epsilon)
        return length.to(next(iter(update.values())).dtype)


_OWN_KEYS = ("median_weight", "closeness")
