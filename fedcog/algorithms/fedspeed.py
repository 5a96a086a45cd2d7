"""FedSpeed (Sun et al., ICLR 2023, algorithm 1): prox-correction and a perturbed gradient."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedcog.algorithms.base import Algorithm
from fedcog.algorithms.feddyn import FedDyn
from fedcog.algorithms.types import Batch, ClientContext, Loss, StepGradient
from fedcog.core import tree
from fedcog.core.settings import setting
from fedcog.core.tree import Params, State


@dataclass(frozen=True)
class FedSpeed(FedDyn):
    """FedDyn whose gradient of the data is partly that at theta + rho g / |g|, as in FedSAM.

    A client steps along (1 - mix) g + mix g' + alpha (theta - G + h_k), where g' is the perturbed
    gradient and h_k the sum of the client's updates. Only the data's gradient is perturbed, not the
    quadratic term. Server and memory are FedDyn's, as in the published code, which also takes mix
    1; that the paper mixes both gradients is from memory.
    """

    alpha: float = setting(0.1, "weight of the prox-correction", ">= 0")
    rho: float = setting(
        0.1, "L2 norm of the perturbation; 0 with alpha 0 and correction 0 is FedAvg", ">= 0"
    )
    mix: float = setting(1.0, "share of the perturbed gradient", ">= 0", "<= 1")

    def penalty(
        self, params: Params, outputs: State, batch: Batch, client: ClientContext
    ) -> Tensor:
        """Add nothing: `local_grad` adds the gradient of FedDyn's penalty.

        Returns:
            A 0-d tensor.
        """
        return Algorithm.penalty(self, params, outputs, batch, client)

    def local_grad(
        self, loss: Loss, params: Params, batch: Batch, client: ClientContext
    ) -> StepGradient:
        """Return (1 - mix) g + mix g' + alpha (theta - G + h_k).

        Returns:
            Gradient, loss and running statistics.
        """
        step = super().local_grad(loss, params, batch, client)
        norm = tree.norm(step.grads) + torch.finfo(step.loss.dtype).tiny
        perturbed = tree.add(params, tree.scale(self.rho / norm, step.grads))
        second = client.step_gradient(loss, perturbed, batch)
        mixed = tree.add(tree.scale(1 - self.mix, step.grads), tree.scale(self.mix, second.grads))
        drift = tree.subtract(params, client.broadcast["params"])
        pull = tree.subtract(drift, client.state["memory"])
        return step._replace(grads=tree.add(mixed, tree.scale(self.alpha, pull)))
