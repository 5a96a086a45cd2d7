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
) -> tuple[Tensor, Tensor]:
    """Inputs made of `noise` that `teacher` gives `labels` to and on which `student` disagrees with it (eq. 1).

    Only the inputs learn. The loss is divided by their whole number, never by the batch, so that the batch decides
    about memory alone. Beside them, [marks, shown, ...]: the shown inputs as they were after the marked steps.
    """
    loss = objective(task, model, teacher, student, recipe.disagreement, len(noise))
    batch = recipe.batch or len(noise)
    made, trails = [], []
    for start in range(0, len(noise), batch):
        shown = [place - start for place in recipe.shown if start <= place < start + batch]
        x, trail = descend(loss, noise[start : start + batch], labels[start : start + batch], recipe, gradient, shown)
        made.append(x)
        trails.append(trail)
    return torch.cat(made), torch.cat(trails, dim=1)


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


def descend(
    loss: Callable[[Params, Params], Tensor],
    x: Tensor,
    labels: Tensor,
    recipe: Recipe,
    gradient: Gradient,
    shown: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """The inputs after all steps of Adam (Kingma & Ba, ICLR 2015), and those shown after the marked ones."""
    (first, second), epsilon = recipe.betas, 1e-8
    mean, square = torch.zeros_like(x), torch.zeros_like(x)
    trail = []
    for step in range(recipe.steps + 1):
        if step:
            slope = gradient(loss, {"x": x}, {"y": labels})[0]["x"]
            mean = first * mean + (1 - first) * slope
            square = second * square + (1 - second) * slope * slope
            size = (square / (1 - second**step)).sqrt() + epsilon
            x = x - recipe.lr / (1 - first**step) * mean / size
        if step in recipe.marks:
            trail.append(x[list(shown)])
    return x, torch.stack(trail) if trail else x[:0][None]
