"""Calibrated softmax: cross-entropy on logits that are adjusted by the client's class counts."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedcog.algorithms.base import Algorithm
from fedcog.algorithms.types import Batch, ClientContext
from fedcog.core.tree import State

EXCLUDED = -1e9
"""Logit of a class that must not take part: its probability and its gradient are 0."""


@dataclass(frozen=True)
class CalibratedSoftmax(Algorithm):
    """Base class of algorithms whose clients train on adjusted logits.

    Only the loss on the client's own examples is adjusted. Evaluation, teachers and the loss on
    generated inputs use the logits as they are.
    """

    single_label_reason: ClassVar[str] = (
        "a calibrated softmax adjusts one distribution over classes, so an example must have "
        "exactly one class."
    )

    def calibrate(self, logits: Tensor, client: ClientContext) -> Tensor:
        """Adjust the logits by the client's class counts.

        Args:
            logits: `(B, C)`.
            client: The client.

        Returns:
            Adjusted logits `(B, C)`.
        """
        raise NotImplementedError

    def data_loss(self, outputs: State, batch: Batch, client: ClientContext) -> Tensor:
        """Return the loss on adjusted logits.

        Returns:
            A 0-d tensor.
        """
        num_classes = client.model.num_classes
        natural = self.calibrate(outputs["logits"][..., :num_classes], client)
        added = outputs["logits"][..., num_classes:]  # a wrapper such as VHL may add outputs
        adjusted = torch.cat([natural, added], -1)
        return super().data_loss(outputs | {"logits": adjusted}, batch, client)
