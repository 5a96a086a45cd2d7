"""FedExP (Jhunjhunwala et al., ICLR 2023, eq. 11): an adaptive server step size."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from fedcog.algorithms.server_rule import ServerRule
from fedcog.algorithms.types import ClientContext, FederationInit, LocalWork
from fedcog.core import tree
from fedcog.core.settings import setting
from fedcog.core.tree import Params, State


@dataclass(frozen=True)
class FedExP(ServerRule):
    """Any algorithm, with a server step size that grows as the clients' updates disagree.

    The step size is max(1, mean |update|^2 / (2 (|mean update|^2 + epsilon))). Published for 20
    local steps. With hundreds, updates are long and nearly orthogonal, and the step size grows
    until training is unstable, as the FedCOG paper reports. It is recorded every round. The authors
    evaluate the mean of the last two models, which hides half of the oscillation; `average` does
    the same.
    """

    needs_mean: ClassVar[bool] = True

    epsilon: float = setting(
        1e-3, "added to the squared norm of the mean update; large is FedAvg", ">= 0"
    )
    average: bool = setting(False, "evaluate the mean of the last two models")

    @property
    def payload_bounds(self) -> dict[str, float]:  # type: ignore[override]
        """The inner bounds, and that of the squared norm."""
        return self.inner.payload_bounds | {"square": 1024.0}

    def server_init(self, init: FederationInit) -> State:
        """Start with a step size of 1."""
        step_size = torch.ones_like(init.num_clients)
        server = self.inner.server_init(init)
        return server | {
            "before": server["params"],
            "readings": server.get("readings", {}) | {"server_step": step_size},
        }

    def client_update(
        self, params: Params, client: ClientContext, work: LocalWork
    ) -> tuple[State, State]:
        """Send the squared norm of the update too.

        Returns:
            (state, payload).
        """
        state, payload = self.inner.client_update(params, client, work)
        update = tree.change(client.broadcast["params"], params)
        return state, payload | {"square": client.weight * tree.dot(update, update)}

    def server_update(self, server: State, total: State, draws: State) -> State:
        """Move the model by the mean update times the step size.

        Returns:
            The server state after the round.
        """
        mean = self.mean_update(total)["delta"]
        mean_square = total["square"] / total["weight"]
        step_size = (mean_square / (2 * (tree.dot(mean, mean) + self.epsilon))).clamp(min=1)
        after = self.inner.server_update(server, total, draws)
        return after | {
            "params": tree.add(server["params"], tree.scale(step_size, mean)),
            "before": server["params"],
            "readings": after.get("readings", {}) | {"server_step": step_size},
        }

    def server_model(self, server: State) -> Params:
        """Return the last model, or the mean of the last two."""
        if not self.average:
            return self.inner.server_model(server)
        mean = tree.scale(0.5, tree.add(server["params"], server["before"]))
        return self.inner.server_model(server | {"params": mean})
