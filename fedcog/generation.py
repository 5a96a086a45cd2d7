"""Inputs that the global model is sure of and the client's previous model is not (FedCOG, section 4.1)."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedcog.models import Model
from fedcog.task import Task
from fedcog.tree import Params

Gradient = Callable[[Callable[[Params, Params], Tensor], Params, Params], tuple[Params, Tensor]]


class Recipe(NamedTuple):
    """How inputs are optimised: Adam's settings, and the weight of the disagreement."""

    steps: int
    lr: float
    betas: tuple[float, float]
    disagreement: float
    batch: int  # how many inputs are optimised at a time; 0: all


def generate(
    task: Task,
    model: Model,
    teacher: Params,
    student: Params,
    labels: Tensor,
    noise: Tensor,
    recipe: Recipe,
    gradient: Gradient,
) -> Tensor:
    """Inputs made of `noise` that `teacher` gives `labels` to and on which `student` disagrees with it (eq. 1).

    Only the inputs learn. The loss is divided by their whole number, never by the batch, so that the batch decides
    about memory alone.
    """
    loss = objective(task, model, teacher, student, recipe.disagreement, len(noise))
    batch = recipe.batch or len(noise)
    parts = [
        trail(loss, x, y, recipe, gradient, [recipe.steps])[0]
        for x, y in zip(torch.split(noise, batch), torch.split(labels, batch), strict=True)
    ]
    return torch.cat(parts)


def objective(
    task: Task, model: Model, teacher: Params, student: Params, disagreement: float, number: int
) -> Callable[[Params, Params], Tensor]:
    """The loss of generated inputs {"x"} for the labels {"y"}: task loss + disagreement * (1 - divergence)."""

    def loss(inputs: Params, batch: Params) -> Tensor:
        sure = model.predict(teacher, inputs["x"])
        each = task.loss(sure, batch["y"])
        if disagreement:
            each = each + disagreement * (1 - task.divergence(sure, model.predict(student, inputs["x"])))
        return each.sum() / number

    return loss


def trail(
    loss: Callable[[Params, Params], Tensor],
    x: Tensor,
    labels: Tensor,
    recipe: Recipe,
    gradient: Gradient,
    marks: Sequence[int],
) -> list[Tensor]:
    """The inputs as they are after each of the `marks` steps of Adam (Kingma & Ba, ICLR 2015)."""
    (first, second), epsilon = recipe.betas, 1e-8
    mean, square = torch.zeros_like(x), torch.zeros_like(x)
    seen = {0: x}
    for step in range(1, recipe.steps + 1):
        slope = gradient(loss, {"x": x}, {"y": labels})[0]["x"]
        mean = first * mean + (1 - first) * slope
        square = second * square + (1 - second) * slope * slope
        size = (square / (1 - second**step)).sqrt() + epsilon
        x = x - recipe.lr / (1 - first**step) * mean / size
        if step in marks:
            seen[step] = x
    return [seen[mark] for mark in marks]
