"""FedLESAM (Fan et al., ICML 2024): sharpness-aware steps from the change of the global model."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from fedcog.algorithms.types import Batch, ClientContext, LocalWork, Loss, StepGradient
from fedcog.algorithms.wrapper import Wrapper
from fedcog.core import tree
from fedcog.core.settings import setting
from fedcog.core.tree import Params, State


@dataclass(frozen=True)
class FedLESAM(Wrapper):
    """Any algorithm, whose clients take gradients at theta + rho (G_old - G) / |G_old - G|.

    G_old is the model that the client received when it last took part; a client that takes part for
    the first time is not perturbed. The perturbation is constant during a round, so a step needs
    one gradient. `scaffold+fedlesam` and `feddyn+fedlesam` are the paper's two variants. This is
    the method as the paper and the authors' README describe it; their code shifts every tensor by
    one scalar.
    """

    implies_fedavg: ClassVar[bool] = True
    rho: float = setting(0.1, "L2 norm of the perturbation; 0 changes nothing", ">= 0")

    def client_init(self, broadcast: State) -> State:
        """Start with the first received model as the last one."""
        return self.inner.client_init(broadcast) | {"received": broadcast["params"]}

    def local_grad(
        self, loss: Loss, params: Params, batch: Batch, client: ClientContext
    ) -> StepGradient:
        """Return the inner direction for the loss at the perturbed parameters.

        Returns:
            Gradient, loss and running statistics.
        """
        direction = tree.change(client.broadcast["params"], client.state["received"])
        norm = tree.norm(direction).clamp(min=1e-30)  # 0 for new clients; rho / 1e-30 is finite
        perturbation = tree.scale(self.rho / norm, direction)
        return self.inner.local_grad(_shifted(loss, perturbation), params, batch, client)

    def client_update(
        self, params: Params, client: ClientContext, work: LocalWork
    ) -> tuple[State, State]:
        """Keep the received model.

        Returns:
            (state, payload).
        """
        state, payload = self.inner.client_update(params, client, work)
        return state | {"received": client.broadcast["params"]}, payload


def _shifted(loss: Loss, perturbation: Params) -> Loss:
    """Return the loss at shifted parameters; names without a perturbation stay."""

    def shifted_loss(params: Params, batch: Batch) -> tuple[torch.Tensor, Params]:
        near = {name: params[name] + perturbation[name] for name in perturbation if name in params}
        return loss(params | near, batch)

    return shifted_loss
