"""FedDecorr (Shi et al., ICLR 2023, eq. 7): a penalty against dimensional collapse."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from fedcog.algorithms.base import Algorithm
from fedcog.algorithms.types import Batch, ClientContext
from fedcog.core.settings import setting
from fedcog.core.tree import Params, State


@dataclass(frozen=True)
class FedDecorr(Algorithm):
    """FedAvg with a penalty on correlated penultimate features.

    Paper and published code scale the penalty differently. The paper's |corr|_F^2 / d^2 has about
    1/n of the gradient of the code's: (n - 1)^2 / n times the mean squared correlation of different
    features in a batch of n. The authors tuned beta with the code's scale, which is the default.
    """

    needs_features: ClassVar[bool] = True
    beta: float = setting(0.01, "weight of the penalty", ">= 0")
    normalisation: Literal["code", "paper"] = setting(
        "code", "scale of the penalty: the published code's or the paper's"
    )

    def penalty(
        self, params: Params, outputs: State, batch: Batch, client: ClientContext
    ) -> Tensor:
        """Return beta * correlation(features).

        Returns:
            A 0-d tensor.
        """
        inherited = super().penalty(params, outputs, batch, client)
        return inherited + self.beta * self.correlation(outputs["features"])

    def correlation(self, features: Tensor) -> Tensor:
        """Measure how correlated the columns of `features` `(B, F)` are, as a 0-d tensor.

        Constant columns contribute 0, and so does a batch of one.
        """
        batch_size, width = features.shape
        if batch_size == 1:
            return features.sum() * 0
        centered = features - features.mean(0)
        variance = centered.square().sum(0) / (batch_size - 1)
        z = centered / (variance + 1e-8).sqrt()
        product = z.T @ z
        if self.normalisation == "paper":
            return (product / (batch_size - 1)).square().sum() / width**2
        squares = product.square()
        off_diagonal = squares.sum() - squares.diagonal().sum()
        return off_diagonal / (max(1, width * (width - 1)) * batch_size)
