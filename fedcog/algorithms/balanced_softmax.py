"""Balanced softmax (Ren et al., NeurIPS 2020, eq. 4; as logit adjustment: Menon et al., 2021)."""

from dataclasses import dataclass

from torch import Tensor

from fedcog.algorithms.calibrated_softmax import EXCLUDED, CalibratedSoftmax
from fedcog.algorithms.types import ClientContext
from fedcog.core.settings import setting


@dataclass(frozen=True)
class BalancedSoftmax(CalibratedSoftmax):
    """FedAvg whose clients add strength * log n_c to logit c, with n_c examples of class c.

    So a client does not learn its own class frequencies. A class that the client lacks gets no
    gradient at all; with `smoothing`, which is added to every n_c, it is pushed down again. At
    strength 1 and without smoothing the loss is consistent with balanced accuracy.
    """

    strength: float = setting(1.0, "factor on the logarithm of the counts; 0 is FedAvg", ">= 0")
    smoothing: float = setting(0.0, "added to the number of examples of every class", ">= 0")

    def calibrate(self, logits: Tensor, client: ClientContext) -> Tensor:
        """Return z_c + strength * log p_c, where p_c is the share of class c.

        Args:
            logits: `(B, C)`.
            client: The client.

        Returns:
            Adjusted logits `(B, C)`.
        """
        if self.strength == 0:
            return logits
        counts = client.class_counts.to(logits.dtype) + self.smoothing
        log_share = (counts / counts.sum()).clamp(min=1e-30).log()
        return (logits + self.strength * log_share).masked_fill(counts == 0, EXCLUDED)
