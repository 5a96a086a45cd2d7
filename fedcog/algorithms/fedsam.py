"""FedSAM (Qu et al., ICML 2022, algorithm 1): sharpness-aware minimization at the clients."""

from dataclasses import dataclass

import torch

from fedcog.algorithms.base import Algorithm
from fedcog.algorithms.types import Batch, ClientContext, Loss, StepGradient
from fedcog.core import tree
from fedcog.core.settings import setting
from fedcog.core.tree import Params


@dataclass(frozen=True)
class FedSAM(Algorithm):
    """FedAvg whose clients use the gradient at theta + rho g / |g|, on the same batch.

    |g| is the L2 norm over the whole model. The second pass leaves running statistics unchanged.
    The default is what the FedCOG paper states; its code uses 0.05, and small networks learn well
    only with that (docs/study.md).
    """

    rho: float = setting(0.5, "L2 norm of the perturbation", ">= 0")

    def local_grad(
        self, loss: Loss, params: Params, batch: Batch, client: ClientContext
    ) -> StepGradient:
        """Return the gradient of the given loss at theta + rho g / |g|.

        Returns:
            Gradient, loss and running statistics.
        """
        step = super().local_grad(loss, params, batch, client)
        norm = tree.norm(step.grads) + torch.finfo(step.loss.dtype).tiny
        perturbed = tree.add(params, tree.scale(self.rho / norm, step.grads))
        second = client.step_gradient(loss, perturbed, batch)
        return step._replace(grads=second.grads)
