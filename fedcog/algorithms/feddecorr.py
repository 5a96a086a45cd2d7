"""FedDecorr (Shi et al., ICLR 2023, eq. 7): features kept from collapsing into a few directions."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from fedcog.algorithms.base import Algorithm, Batch, Site
from fedcog.settings import setting
from fedcog.tree import Params, State


@dataclass(frozen=True)
class FedDecorr(Algorithm):
    """FedAvg with a penalty on correlated penultimate features.

    Paper and published code differ in scale: the paper's |corr|_F^2 / d^2 has about 1/n of the gradient of the code's,
    (n - 1)^2 / n times the mean squared correlation of different features in a batch of n. Beta was tuned with the
    code's, which is the default.
    """

    needs_head: ClassVar[bool] = True
    beta: float = setting(0.01, "weight of the penalty", ">= 0")
    normalisation: Literal["code", "paper"] = setting(
        "code", "scale of the penalty: the published code's or the paper's"
    )

    def penalty(self, params: Params, outputs: State, batch: Batch, site: Site) -> Tensor:
        """beta * R(features)."""
        before = super().penalty(params, outputs, batch, site)
        return before + self.beta * self.correlation(outputs["features"])

    def correlation(self, features: Tensor) -> Tensor:
        """How correlated the columns are; a column that stands still counts nothing, nor does a batch of one."""
        number, width = features.shape
        if number == 1:
            return features.sum() * 0
        centred = features - features.mean(0)
        z = centred / (centred.square().sum(0) / (number - 1) + 1e-8).sqrt()
        product = z.T @ z
        if self.normalisation == "paper":
            return (product / (number - 1)).square().sum() / width**2
        squares = product.square()
        return (squares.sum() - squares.diagonal().sum()) / (max(1, width * (width - 1)) * number)
