"""FedProx (Li et al., MLSys 2020, eq. 2): the local loss plus mu/2 |theta - G|^2."""

from dataclasses import dataclass

from torch import Tensor

from fedcog.algorithms.base import Algorithm
from fedcog.algorithms.types import Batch, ClientContext
from fedcog.core import tree
from fedcog.core.settings import setting
from fedcog.core.tree import Params, State


@dataclass(frozen=True)
class FedProx(Algorithm):
    """FedAvg with a proximal term that pulls each client toward the global model."""

    mu: float = setting(0.01, "weight of the proximal term", ">= 0")

    def penalty_curvature(self) -> dict[str, float]:
        """Return the curvature of the proximal term."""
        return {"mu": self.mu}

    def penalty(
        self, params: Params, outputs: State, batch: Batch, client: ClientContext
    ) -> Tensor:
        """Return mu/2 |theta - G|^2.

        Returns:
            A 0-d tensor.
        """
        drift = tree.subtract(params, client.broadcast["params"])
        proximal = self.mu / 2 * tree.dot(drift, drift)
        return super().penalty(params, outputs, batch, client) + proximal
