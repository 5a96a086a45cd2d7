"""FedNTD (Lee et al., NeurIPS 2022, eq. 5): distillation of the global model's wrong classes."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedcog.algorithms.base import Algorithm
from fedcog.algorithms.distillation import masked_kl
from fedcog.algorithms.types import Batch, ClientContext
from fedcog.core.settings import setting
from fedcog.core.tree import Params, State


@dataclass(frozen=True)
class FedNTD(Algorithm):
    """FedAvg whose clients distill what the global model says of the classes that are not true.

    The penalty is beta T^2 KL(global || local), both softmaxes over the C - 1 wrong classes of an
    example at temperature T. It leaves the true class's logit alone. The defaults are those of the
    published experiments.
    """

    single_label_reason: ClassVar[str] = (
        "fedntd leaves out the true class, so an example must have exactly one class."
    )
    beta: float = setting(1.0, "weight of the distillation; 0 is FedAvg", ">= 0")
    temperature: float = setting(1.0, "temperature of both softmaxes", "> 0")

    def penalty(
        self, params: Params, outputs: State, batch: Batch, client: ClientContext
    ) -> Tensor:
        """Add beta T^2 KL(global || local) over the wrong classes.

        Returns:
            A 0-d tensor.
        """
        inherited = super().penalty(params, outputs, batch, client)
        teacher = client.teacher_logits(batch["x"]) / self.temperature
        student = outputs["logits"] / self.temperature
        classes = torch.arange(student.shape[-1], device=student.device)
        divergence = masked_kl(teacher, student, classes == batch["y"][:, None]).mean()
        return inherited + self.beta * self.temperature**2 * divergence
