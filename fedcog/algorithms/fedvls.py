"""FedVLS (Guo et al., 2024, eqs. 2 to 5): distillation of classes that a client lacks."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedcog.algorithms.balanced_softmax import BalancedSoftmax
from fedcog.algorithms.distillation import masked_kl
from fedcog.algorithms.types import Batch, ClientContext
from fedcog.core.settings import setting
from fedcog.core.tree import Params, State


@dataclass(frozen=True)
class FedVLS(BalancedSoftmax):
    """Balanced softmax whose clients distill the global model over the classes they lack.

    A second penalty, suppression * sum_c p_c log mean e^(z_c), lowers the logits of classes that
    are not true, the more the more examples of a class the client has. The mean is over a batch,
    where an example of class c counts as 1; the logits are calibrated by the class shares. The
    paper leaves those examples out, which is infinite for a batch of one class, so the published
    code's form and weight are used here.
    """

    lambda_vacant: float = setting(
        0.1, "weight of the distillation over classes that the client lacks", ">= 0"
    )
    suppression: float = setting(
        0.005, "weight of lowering wrong logits; with strength 0 and lambda 0, 0 is FedAvg", ">= 0"
    )

    def penalty(
        self, params: Params, outputs: State, batch: Batch, client: ClientContext
    ) -> Tensor:
        """Add the distillation over absent classes and the suppression of wrong logits.

        Returns:
            A 0-d tensor.
        """
        logits = outputs["logits"]
        teacher = client.teacher_logits(batch["x"])
        vacant = masked_kl(teacher, logits, client.class_counts > 0).mean()
        penalty = super().penalty(params, outputs, batch, client) + self.lambda_vacant * vacant
        return penalty + self.suppression * self.wrong_logits(logits, batch["y"], client)

    def wrong_logits(self, logits: Tensor, labels: Tensor, client: ClientContext) -> Tensor:
        """Compute sum_c p_c log mean e^(z_c) over a batch, true logits counted as 0.

        Args:
            logits: `(B, C)`.
            labels: `(B,)`.
            client: The client.

        Returns:
            A 0-d tensor.
        """
        num_classes = logits.shape[-1]
        counts = client.class_counts.to(logits.dtype)
        share = counts / counts.sum()
        calibrated = logits - (share + 1e-9).log() - math.log(num_classes)
        is_true = torch.arange(num_classes, device=logits.device) == labels[:, None]
        wrong = torch.where(is_true, 0, calibrated)
        return (share * (wrong.logsumexp(0) - math.log(len(labels)))).sum()
