"""FedRS (Li and Zhan, KDD 2021): restricted softmax for classes that a client lacks."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedcog.algorithms.calibrated_softmax import CalibratedSoftmax
from fedcog.algorithms.types import ClientContext
from fedcog.core.settings import setting


@dataclass(frozen=True)
class FedRS(CalibratedSoftmax):
    """FedAvg whose clients multiply logit c by a_c: 1 for classes they have, alpha for others.

    So the head's weights of absent classes move less. The published code is softer: a_c grows from
    alpha to 1 with the share of class c (`rule` soft). That the paper's rule is the hard one is
    known here from other implementations of it, not from the paper. The authors' last layer has no
    bias; here the bias is scaled too. A negative logit times alpha rises, so the restriction can
    act against itself.
    """

    alpha: float = setting(0.5, "factor on the logits of absent classes; 1 is FedAvg", "> 0")
    rule: Literal["hard", "soft"] = setting(
        "hard", "which logits are scaled: of absent classes, or of all by their share"
    )

    def calibrate(self, logits: Tensor, client: ClientContext) -> Tensor:
        """Return a_c z_c.

        Args:
            logits: `(B, C)`.
            client: The client.

        Returns:
            Adjusted logits `(B, C)`.
        """
        counts = client.class_counts.to(logits.dtype)
        presence = counts / counts.max().clamp(min=1)
        if self.rule == "hard":
            presence = (counts > 0).to(logits.dtype)
        return torch.lerp(logits * self.alpha, logits, presence)
