"""SCAFFOLD (Karimireddy et al., ICML 2020, algorithm 1, option II): control variates."""

from dataclasses import dataclass
from typing import ClassVar

from fedcog.algorithms.base import Algorithm
from fedcog.algorithms.types import (
    Batch,
    ClientContext,
    FederationInit,
    LocalWork,
    Loss,
    StepGradient,
)
from fedcog.core import tree
from fedcog.core.settings import setting
from fedcog.core.tree import Params, State


@dataclass(frozen=True)
class SCAFFOLD(Algorithm):
    """FedAvg whose clients step along g - c_k + c, with their own and the server's control variate.

    The new c_k is the client's mean gradient: (G - theta) / effective step size, minus the
    correction. The effective step size includes momentum; without it the variates would be ten
    times too large at momentum 0.9. The model moves by the weighted mean update as in FedAvg (a
    global step size of 1). The server's c is the plain mean of all clients' c_k, whatever their
    weights: it moves by the sum of their changes divided by the number of all clients.
    """

    needs_sgd: ClassVar[bool] = True
    needs_full_model: ClassVar[bool] = True
    payload_bounds: ClassVar[dict[str, float]] = Algorithm.payload_bounds | {"control": 1024.0}
    strength: float = setting(
        1.0, "fraction of the correction that is applied; 0 is FedAvg", ">= 0", "<= 1"
    )

    def server_init(self, init: FederationInit) -> State:
        """Start with c = 0."""
        return super().server_init(init) | {
            "control": tree.zeros(init.params),
            "population": init.num_clients,
        }

    def broadcast(self, server: State) -> State:
        """Send the model and c."""
        return super().broadcast(server) | {"control": server["control"]}

    def server_update(self, server: State, total: State, draws: State) -> State:
        """Move c by the sum of the clients' changes divided by the number of clients.

        Returns:
            The server state after the round.
        """
        step = tree.scale(1 / server["population"], total["control"])
        return super().server_update(server, total, draws) | {
            "control": tree.add(server["control"], step)
        }

    def client_init(self, broadcast: State) -> State:
        """Start with c_k = 0."""
        return super().client_init(broadcast) | {"control": tree.zeros(broadcast["control"])}

    def local_grad(
        self, loss: Loss, params: Params, batch: Batch, client: ClientContext
    ) -> StepGradient:
        """Return g - c_k + c.

        Returns:
            Gradient, loss and running statistics.
        """
        step = super().local_grad(loss, params, batch, client)
        return step._replace(grads=tree.add(step.grads, self._correction(client)))

    def client_update(
        self, params: Params, client: ClientContext, work: LocalWork
    ) -> tuple[State, State]:
        """Keep the new c_k, and send its change unweighted.

        Returns:
            (state, payload).
        """
        state, payload = super().client_update(params, client, work)
        update = tree.change(client.broadcast["params"], params)
        mean_grad = tree.scale(-1 / work.effective_step_size, update)
        control = tree.subtract(mean_grad, self._correction(client))
        change = tree.change(client.state["control"], control)
        return state | {"control": control}, payload | {"control": change}

    def _correction(self, client: ClientContext) -> Params:
        """Return strength * (c - c_k)."""
        difference = tree.change(client.state["control"], client.broadcast["control"])
        return tree.scale(self.strength, difference)
