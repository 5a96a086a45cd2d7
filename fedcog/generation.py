"""Inputs that the global model is sure of and the client's previous model is not (FedCOG, section 4.1)."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fedcog.models import Model
from fedcog.task import Task
from fedcog.tree import Params

Gradient = Callable[[Callable[[Params, Params], Tensor], Params, Params], tuple[Params, Tensor]]


class Recipe(NamedTuple):
    """How inputs are optimised, and which of them are shown after which steps."""

    steps: int
    lr: float
    betas: tuple[float, float]
    disagreement: float  # lambda_dis
    batch: int = 0  # how many inputs are optimised at a time; 0: all
    marks: tuple[int, ...] = ()
    shown: tuple[int, ...] = ()


def generate(
    task: Task,
    model: Model,
    teacher: Params,
    student: Params,
    labels: Tensor,
    noise: Tensor,
    recipe: Recipe,
    gradient: Gradient,
) -> Params:
    """Inputs {"x"} made of `noise` that `teacher` gives `labels` to and on which `student` disagrees (eq. 1)."""
    made = begin(noise, labels, recipe)
    loss = objective(task, model, teacher, student, recipe.disagreement, len(noise))
    for step in torch.arange(recipe.steps, device=noise.device):
        made = improve(loss, made, step, recipe, gradient)
    return made


def begin(noise: Tensor, labels: Tensor, recipe: Recipe) -> Params:
    """Inputs {"x"} for the labels {"y"} as they begin; in their trail [marks, shown, ...] those that are shown."""
    marks, shown = (
        torch.tensor(numbers, dtype=torch.int64, device=noise.device) for numbers in (recipe.marks, recipe.shown)
    )
    trail = noise[shown].expand(len(marks), *noise[shown].shape)
    still = {"mean": torch.zeros_like(noise), "square": torch.zeros_like(noise)}
    return {"x": noise, "y": labels, "trail": trail, "shown": shown, "marks": marks} | still


def objective(
    task: Task, model: Model, teacher: Params, student: Params, disagreement: float, number: int
) -> Callable[[Params, Params], Tensor]:
    """The loss of generated inputs {"x"} for the labels {"y"}: task loss + disagreement * (1 - divergence).

    It is divided by their whole `number`, never by the batch, so that the batch decides about memory alone.
    """

    def loss(inputs: Params, batch: Params) -> Tensor:
        sure = model.predict(teacher, inputs["x"])
        each = task.loss(sure, batch["y"])
        if disagreement:
            each = each + disagreement * (1 - task.divergence(sure, model.predict(student, inputs["x"])))
        return each.sum() / number

    return loss


def improve(
    loss: Callable[[Params, Params], Tensor], made: Params, step: Tensor, recipe: Recipe, gradient: Gradient
) -> Params:
    """The inputs after one more step of Adam (Kingma & Ba, ICLR 2015); `step` counts from 0, and only inputs learn."""
    (first, second), epsilon, count = recipe.betas, 1e-8, (step + 1).double()
    size = recipe.batch or len(made["x"])
    parts = zip(torch.split(made["x"], size), torch.split(made["y"], size), strict=True)
    slope = torch.cat([gradient(loss, {"x": x}, {"y": y})[0]["x"] for x, y in parts])
    mean = first * made["mean"] + (1 - first) * slope
    square = second * made["square"] + (1 - second) * slope * slope
    length = (square / (1 - second**count).to(square.dtype)).sqrt() + epsilon
    x = made["x"] - (recipe.lr / (1 - first**count)).to(mean.dtype) * mean / length
    due = (made["marks"] == step + 1).reshape(-1, *[1] * x.dim())
    trail = torch.where(due, x[made["shown"]], made["trail"])
    return made | {"x": x, "mean": mean, "square": square, "trail": trail}
