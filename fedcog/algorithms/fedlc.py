"""FedLC (Zhang et al., ICML 2022, eq. 7): logits calibrated by label counts."""

from dataclasses import dataclass

from torch import Tensor

from fedcog.algorithms.calibrated_softmax import EXCLUDED, CalibratedSoftmax
from fedcog.algorithms.types import ClientContext
from fedcog.core.settings import setting


@dataclass(frozen=True)
class FedLC(CalibratedSoftmax):
    """FedAvg whose clients subtract tau / n_c^(1/4) from logit c, with n_c examples of class c.

    A class that the client lacks gets no gradient. The loss is the cross-entropy of these logits,
    as in all public implementations. The paper's formula omits the true class from the denominator;
    its gradient for that logit is -1 however large the logit is, so it has no minimum.
    """

    tau: float = setting(1.0, "strength of the calibration; 0 is FedAvg", ">= 0")

    def calibrate(self, logits: Tensor, client: ClientContext) -> Tensor:
        """Return z_c - tau / n_c^(1/4).

        Args:
            logits: `(B, C)`.
            client: The client.

        Returns:
            Adjusted logits `(B, C)`.
        """
        if self.tau == 0:
            return logits
        counts = client.class_counts.to(logits.dtype)
        margin = self.tau * counts.clamp(min=1).pow(-0.25)
        return (logits - margin).masked_fill(counts == 0, EXCLUDED)
