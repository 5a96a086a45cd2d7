"""An algorithm of your own: FedAvg whose clients forget weights that hardly matter.

fedcog run --algorithm examples/my_method.py:Sparse --Sparse.strength 0.001
fedcog run --algorithm examples/my_method.py:Sparse+fedcog --start-round 5
python examples/my_method.py          # puts it to every test of the contract
"""

from dataclasses import dataclass

from torch import Tensor

from fedcog import Algorithm
from fedcog.algorithms import Batch, Site
from fedcog.settings import setting
from fedcog.testing import check_algorithm
from fedcog.tree import Params, State


@dataclass(frozen=True)
class Sparse(Algorithm):
    """FedAvg with a penalty on the sum of the weights' sizes."""

    strength: float = setting(1e-4, "weight of the penalty", ">= 0")

    def penalty(self, params: Params, outputs: State, batch: Batch, site: Site) -> Tensor:
        """strength * |theta|_1."""
        size = sum((value.abs().sum() for value in params.values()), start=site.lr * 0)
        return super().penalty(params, outputs, batch, site) + self.strength * size


if __name__ == "__main__":
    check_algorithm(Sparse(strength=0.1), neutral=Sparse(strength=0.0))
    print("Sparse keeps the contract")
