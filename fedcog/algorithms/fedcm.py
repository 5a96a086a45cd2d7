"""FedCM (Xu et al., 2021, algorithm 1): the global momentum in every local step."""

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
class FedCM(Algorithm):
    """FedAvg whose clients step along alpha g + (1 - alpha) V, V the last round's mean gradient.

    V is minus the mean update divided by the mean effective step size, momentum included, and 0 in
    the first round. The whole loss counts as g, penalties included; weight decay does not. alpha
    0.1 is that of a public simulator, the authors' code was not found.
    """

    needs_sgd: ClassVar[bool] = True
    needs_full_model: ClassVar[bool] = True
    payload_bounds: ClassVar[dict[str, float]] = Algorithm.payload_bounds | {"step_size": 65536.0}
    alpha: float = setting(0.1, "weight of the client's own gradient; 1 is FedAvg", "> 0", "<= 1")

    def server_init(self, init: FederationInit) -> State:
        """Start with V = 0."""
        return super().server_init(init) | {"direction": tree.zeros(init.params)}

    def broadcast(self, server: State) -> State:
        """Send the model and V."""
        return super().broadcast(server) | {"direction": server["direction"]}

    def server_update(self, server: State, total: State, draws: State) -> State:
        """Set V to the mean gradient of the round.

        Returns:
            The server state after the round.
        """
        update = self.mean_update(total)["delta"]
        mean_step_size = total["step_size"] / total["weight"]
        direction = tree.scale(-1 / mean_step_size, update)
        return super().server_update(server, total, draws) | {"direction": direction}

    def local_grad(
        self, loss: Loss, params: Params, batch: Batch, client: ClientContext
    ) -> StepGradient:
        """Return alpha g + (1 - alpha) V.

        Returns:
            Gradient, loss and running statistics.
        """
        step = super().local_grad(loss, params, batch, client)
        momentum = tree.scale(1 - self.alpha, client.broadcast["direction"])
        return step._replace(grads=tree.add(tree.scale(self.alpha, step.grads), momentum))

    def client_update(
        self, params: Params, client: ClientContext, work: LocalWork
    ) -> tuple[State, State]:
        """Also send the effective step size.

        Returns:
            (state, payload).
        """
        state, payload = super().client_update(params, client, work)
        return state, payload | {"step_size": client.weight * work.effective_step_size}
