"""FedSOL (Lee et al., CVPR 2024): local steps that hardly move the global model's opinion."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedcog.algorithms.base import Algorithm
from fedcog.algorithms.types import Batch, ClientContext, Loss, StepGradient
from fedcog.core import tree
from fedcog.core.settings import setting
from fedcog.core.tree import Params


@dataclass(frozen=True)
class FedSOL(Algorithm):
    """FedAvg whose clients take the gradient at theta + rho A r / |r|.

    r is the gradient of the distillation loss KL(global || local) at temperature T, without the
    factor T^2. A scales each weight: by its distance to the global model, with length 1 along the
    first dimension of every tensor (`adaptive`, the authors'), or by 1 (`fixed`). At the global
    model r is rounding noise; a fixed perturbation is then left out (|r| < 1e-6). Running
    statistics are those of the perturbed pass.
    """

    single_label_reason: ClassVar[str] = (
        "fedsol distills one distribution over classes, so an example must have exactly one class."
    )
    rho: float = setting(1.0, "length of the perturbation; 0 is FedAvg", ">= 0")
    temperature: float = setting(3.0, "temperature of both softmaxes", "> 0")
    scaling: Literal["adaptive", "fixed"] = setting(
        "adaptive", "scale of the perturbation: distance to the global model, or 1"
    )

    def local_grad(
        self, loss: Loss, params: Params, batch: Batch, client: ClientContext
    ) -> StepGradient:
        """Return the gradient of the given loss at the perturbed parameters.

        Returns:
            Gradient, loss and running statistics.
        """
        teacher = client.teacher_logits(batch["x"]) / self.temperature

        def distillation_loss(params: Params, batch: Batch) -> Tensor:
            student = client.forward(params, batch["x"]).logits / self.temperature
            return client.task.distillation_loss(teacher, student).mean()

        toward, _ = client.gradient(distillation_loss, params, batch)
        perturbed = tree.add(params, self.perturbation(toward, params, client))
        return super().local_grad(loss, perturbed, batch, client)

    def perturbation(self, toward: Params, params: Params, client: ClientContext) -> Params:
        """Compute rho A r / |r|.

        Args:
            toward: The gradient r of the distillation loss.
            params: Parameters of the client's model.
            client: The client.

        Returns:
            The perturbation by name.
        """
        norm = tree.norm(toward)
        if self.scaling == "fixed":
            return tree.scale(torch.where(norm < 1e-6, 0, self.rho / norm), toward)
        unit = tree.scale(self.rho / (norm + torch.finfo(norm.dtype).tiny), toward)
        drift = tree.change(client.broadcast["params"], params)
        scales = {name: _unit_columns(value.abs()) for name, value in drift.items()}
        return {name: value * scales[name] for name, value in unit.items()}


def _unit_columns(value: Tensor) -> Tensor:
    """Scale a tensor to L2 norm 1 along its first dimension; zeros stay."""
    flat = value.reshape(1) if value.dim() == 0 else value
    return F.normalize(flat, dim=0).reshape(value.shape)
