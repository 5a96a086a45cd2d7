"""FedUV (Son et al., CVPR 2024): uniform features and varied predictions at every client."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedcog.algorithms.base import Algorithm
from fedcog.algorithms.types import Batch, ClientContext
from fedcog.core.settings import setting
from fedcog.core.tree import Params, State


@dataclass(frozen=True)
class FedUV(Algorithm):
    """FedAvg with two penalties that make a client's batch look like balanced data.

    The first wants predictions of every class to vary over the batch as much as one-hot labels of
    balanced classes do (standard deviation 1 / sqrt(C)). The second spreads the penultimate
    features: mean e^(-d / s) over all pairs, with squared distances d and their median s. The
    authors use the features of a projection head instead. Their weight of the first for 10 classes
    is 2.5.
    """

    needs_features: ClassVar[bool] = True
    single_label_reason: ClassVar[str] = (
        "feduv compares predictions with one-hot labels, so an example must have one class."
    )
    variance: float = setting(2.5, "weight of varied predictions", ">= 0")
    uniformity: float = setting(
        0.5, "weight of spread features; 0 with variance 0 is FedAvg", ">= 0"
    )

    def penalty(
        self, params: Params, outputs: State, batch: Batch, client: ClientContext
    ) -> Tensor:
        """Add both penalties.

        Returns:
            A 0-d tensor.
        """
        inherited = super().penalty(params, outputs, batch, client)
        varied = self.variance * self.lacking_variance(outputs["logits"])
        return inherited + varied + self.uniformity * self.crowding(outputs["features"])

    @staticmethod
    def lacking_variance(logits: Tensor) -> Tensor:
        """Compute mean_c max(0, 1 / sqrt(C) - std of p_c) over a batch of logits `(B, C)`.

        Returns:
            A 0-d tensor; 0 for a batch of one.
        """
        batch_size, num_classes = logits.shape
        if batch_size == 1:
            return logits.sum() * 0
        deviation = logits.softmax(-1).var(0).clamp(min=1e-12).sqrt()
        lacking: Tensor = (num_classes**-0.5 - deviation).relu()
        return lacking.mean()

    @staticmethod
    def crowding(features: Tensor) -> Tensor:
        """Compute mean e^(-d / median d) over all pairs of features `(B, F)`.

        Returns:
            A 0-d tensor; 0 for a batch of one. The median is of the distances above rounding
            error: an example that is twice in a batch may have two slightly different features,
            and a median of such distances would have a huge gradient.
        """
        batch_size = len(features)
        if batch_size == 1:
            return features.sum() * 0
        first, second = torch.triu_indices(batch_size, batch_size, 1, device=features.device)
        distance = (features[first] - features[second]).square().sum(-1)
        rounding = 100 * torch.finfo(features.dtype).eps
        is_apart = distance > rounding**2 * features.detach().square().sum(-1).amax()
        ascending = distance.masked_fill(~is_apart, torch.inf).sort().values
        middle = (is_apart.sum() - 1).clamp(min=0) // 2
        median = ascending.gather(0, middle[None])[0]
        scale = torch.where(is_apart.any(), median, 1)
        return (-distance / scale).exp().mean()
