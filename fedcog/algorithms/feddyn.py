"""FedDyn (Acar et al., ICLR 2021, algorithm 1): dynamic regularization."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedcog.algorithms.base import Algorithm
from fedcog.algorithms.types import Batch, ClientContext, FederationInit, LocalWork
from fedcog.core import tree
from fedcog.core.settings import setting
from fedcog.core.tree import Params, State


@dataclass(frozen=True)
class FedDyn(Algorithm):
    """FedAvg with a linear and a quadratic penalty that align local optima with the global one.

    Client and server memory are stored divided by alpha: g_k / alpha is minus the sum of the
    client's past updates, h / alpha the same of the mean updates. h moves by |S|/N of the round's
    weighted mean update, so that both agree; with equal weights that is the published rule. The
    model that the server sends is evaluated, not the clients' mean. The rule assumes that clients
    come near their minimum; if they stop early, an alpha above the authors' stabilizes it.
    """

    needs_full_model: ClassVar[bool] = True
    has_server_step: ClassVar[bool] = False  # the model is the mean minus h / alpha, not a step
    alpha: float = setting(0.01, "weight of the linear and quadratic penalty", ">= 0")
    correction: float = setting(
        1.0,
        "fraction of h / alpha that the server subtracts; 0 with alpha 0 is FedAvg",
        ">= 0",
        "<= 1",
    )

    def penalty_curvature(self) -> dict[str, float]:
        """Return the curvature of the quadratic term."""
        return {"alpha": self.alpha}

    def server_init(self, init: FederationInit) -> State:
        """Start with h = 0."""
        return super().server_init(init) | {
            "memory": tree.zeros(init.params),
            "population": init.num_clients,
        }

    def server_update(self, server: State, total: State, draws: State) -> State:
        """Subtract the new h / alpha from the mean model.

        Returns:
            The server state after the round.
        """
        participation = total["count"] / server["population"]
        mean_delta = self.mean_update(total)["delta"]
        memory = tree.subtract(server["memory"], tree.scale(participation, mean_delta))
        server = super().server_update(server, total, draws)
        params = tree.subtract(server["params"], tree.scale(self.correction, memory))
        return server | {"params": params, "memory": memory}

    def client_init(self, broadcast: State) -> State:
        """Start with g_k = 0."""
        return super().client_init(broadcast) | {"memory": tree.zeros(broadcast["params"])}

    def penalty(
        self, params: Params, outputs: State, batch: Batch, client: ClientContext
    ) -> Tensor:
        """Return alpha/2 |theta - G|^2 - <g_k, theta>.

        Returns:
            A 0-d tensor.
        """
        drift = tree.subtract(params, client.broadcast["params"])
        pull = tree.dot(drift, drift) / 2 - tree.dot(params, client.state["memory"])
        return super().penalty(params, outputs, batch, client) + self.alpha * pull

    def client_update(
        self, params: Params, client: ClientContext, work: LocalWork
    ) -> tuple[State, State]:
        """Subtract the client's update from g_k / alpha.

        Returns:
            (state, payload).
        """
        state, payload = super().client_update(params, client, work)
        update = tree.change(client.broadcast["params"], params)
        return state | {"memory": tree.subtract(client.state["memory"], update)}, payload
