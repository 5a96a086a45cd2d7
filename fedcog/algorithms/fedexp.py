"""FedExP (Jhunjhunwala et al., ICLR 2023, eq. 11): an adaptive server step size."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from fedcog.algorithms.base import Algorithm
from fedcog.algorithms.types import ClientContext, FederationInit, LocalWork
from fedcog.core import tree
from fedcog.core.settings import setting
from fedcog.core.tree import Params, State


@dataclass(frozen=True)
class FedExP(Algorithm):
    """FedAvg with server step size max(1, mean |update|^2 / (2 (|mean update|^2 + epsilon))).

    Published for 20 local steps. With hundreds, updates are long and nearly orthogonal, and the
    step size grows until training is unstable, as the FedCOG paper reports. The step size is
    recorded every round. The authors evaluate the mean of the last two models, which hides half of
    the oscillation; `average` does the same.
    """

    payload_bounds: ClassVar[dict[str, float]] = Algorithm.payload_bounds | {"square": 1024.0}
    epsilon: float = setting(
        1e-3, "added to the squared norm of the mean update; large is FedAvg", ">= 0"
    )
    average: bool = setting(False, "evaluate the mean of the last two models")

    def server_init(self, init: FederationInit) -> State:
        """Start with a step size of 1."""
        step_size = torch.ones_like(init.num_clients)
        return super().server_init(init) | {
            "before": init.params,
            "readings": {"server_step": step_size},
        }

    def client_update(
        self, params: Params, client: ClientContext, work: LocalWork
    ) -> tuple[State, State]:
        """Send the squared norm of the update too.

        Returns:
            (state, payload).
        """
        state, payload = super().client_update(params, client, work)
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
        after = super().server_update(server, total, draws)
        return after | {
            "params": tree.add(server["params"], tree.scale(step_size, mean)),
            "before": server["params"],
            "readings": {"server_step": step_size},
        }

    def server_model(self, server: State) -> Params:
        """Return the last model, or the mean of the last two."""
        weights = super().server_model(server)
        if not self.average:
            return weights
        return weights | tree.scale(0.5, tree.add(server["params"], server["before"]))
