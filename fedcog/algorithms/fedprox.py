"""FedProx (Li et al., MLSys 2020, eq. 2): the local loss plus mu/2 |theta - G|^2."""

from dataclasses import dataclass

from torch import Tensor

from fedcog import tree
from fedcog.algorithms.base import Algorithm, Batch, Site
from fedcog.settings import setting
from fedcog.tree import Params, State


@dataclass(frozen=True)
class FedProx(Algorithm):
    """FedAvg whose clients are pulled back towards the model they were sent."""

    mu: float = setting(0.01, "strength of the pull towards the global model", ">= 0")

    def stiffness(self) -> dict[str, float]:
        """The pull's own curvature."""
        return {"mu": self.mu}

    def penalty(self, params: Params, outputs: State, batch: Batch, site: Site) -> Tensor:
        """mu/2 |theta - G|^2."""
        drift = tree.subtract(params, site.shared["params"])
        return super().penalty(params, outputs, batch, site) + self.mu / 2 * tree.dot(drift, drift)
