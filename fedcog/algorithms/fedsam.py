"""FedSAM (Qu et al., ICML 2022, algorithm 1): clients seek flat minima."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedcog import tree
from fedcog.algorithms.base import Algorithm, Batch, Loss, Site
from fedcog.settings import setting
from fedcog.tree import Params


@dataclass(frozen=True)
class FedSAM(Algorithm):
    """FedAvg whose clients step along the gradient found uphill, at theta + rho g / |g|, on the same batch.

    |g| is the length over the whole model. The second pass leaves running statistics alone. The default is what the
    FedCOG paper states; its code has 0.05, and with small networks only that learns well (docs/study.md).
    """

    rho: float = setting(0.5, "how far uphill the gradient is taken", ">= 0")

    def local_grad(self, loss: Loss, params: Params, batch: Batch, site: Site) -> tuple[Params, Tensor]:
        """The gradient of the given loss at theta + rho g / |g|."""
        grads, value = super().local_grad(loss, params, batch, site)
        length = tree.norm(grads) + torch.finfo(value.dtype).tiny
        uphill = tree.add(params, tree.scale(self.rho / length, grads))
        return site.gradient(loss, uphill, batch, track=False)[0], value
