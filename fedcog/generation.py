"""Inputs that the global model is sure of and the client's previous model is not (FedCOG, section 4.1)."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fedcog import tree
from fedcog.models import Model
from fedcog.task import Task
from fedcog.tree import Params, State

Gradient = Callable[[Callable[[Params, Params], Tensor], Params, Params], tuple[Params, Tensor]]
Loss = Callable[[Params, Params], Tensor]
Render = Callable[[Params], Tensor]


class Recipe(NamedTuple):
    """How inputs are optimised, and which of them are shown after which steps."""

    steps: int
    lr: float
    betas: tuple[float, float]
    disagreement: float  # lambda_dis
    statistics: float = 0.0  # lambda_bn
    batch: int = 0  # how many inputs are optimised at a time; 0: all
    marks: tuple[int, ...] = ()
    shown: tuple[int, ...] = ()


def as_they_are(learnt: Params) -> Tensor:
    """Inputs that are learnt themselves."""
    return learnt["x"]


def generate(
    task: Task,
    model: Model,
    teacher: Params,
    student: Params,
    labels: Tensor,
    noise: Tensor,
    recipe: Recipe,
    gradient: Gradient,
) -> State:
    """Inputs {"x"} made of `noise` that `teacher` gives `labels` to and on which `student` disagrees (eq. 1)."""
    made = begin({"x": noise}, labels, recipe)
    loss = objective(task, model, teacher, student, recipe.disagreement, len(noise), statistics=recipe.statistics)
    for step in torch.arange(recipe.steps, device=noise.device):
        made = improve(loss, made, step, recipe, gradient)
    return made | {"x": made["learnt"]["x"]}


def begin(learnt: Params, labels: Tensor, recipe: Recipe, render: Render = as_they_are) -> State:
    """What is learnt for the labels {"y"}, as it begins; in the trail [marks, shown, ...] inputs that are shown.

    It is the inputs {"x"} themselves, or whatever `render` makes inputs of.
    """
    x = render(learnt)
    marks, shown = (
        torch.tensor(numbers, dtype=torch.int64, device=x.device) for numbers in (recipe.marks, recipe.shown)
    )
    trail = x[shown].expand(len(marks), *x[shown].shape)
    still = {"mean": tree.zeros(learnt), "square": tree.zeros(learnt)}
    return {"learnt": learnt, "y": labels, "trail": trail, "shown": shown, "marks": marks} | still


def objective(
    task: Task,
    model: Model,
    teacher: Params,
    student: Params,
    disagreement: float,
    number: int,
    render: Render = as_they_are,
    statistics: float = 0.0,
) -> Loss:
    """The loss of generated inputs {"x"} for the labels {"y"}: task loss + disagreement * (1 - divergence).

    It is divided by their whole `number`, never by the batch, so that the batch decides about memory alone. Only what
    `statistics` weighs, how strange a batch is to the teacher's BatchNorm, is of the batch and counts for all in it.
    """

    def loss(learnt: Params, batch: Params) -> Tensor:
        x = render(learnt)
        sure, strangeness = model.strangeness(teacher, x) if statistics else (model.predict(teacher, x), 0.0)
        each = task.loss(sure, batch["y"])
        if disagreement:
            each = each + disagreement * (1 - task.divergence(sure, model.predict(student, x)))
        if statistics:
            each = each + statistics * strangeness
        return each.sum() / number

    return loss


def improve(
    loss: Loss, made: State, step: Tensor, recipe: Recipe, gradient: Gradient, render: Render = as_they_are
) -> State:
    """The inputs after one more step of Adam (Kingma & Ba, ICLR 2015); `step` counts from 0, and no model learns."""
    (first, second), epsilon, count = recipe.betas, 1e-8, (step + 1).double()
    learnt: Params = made["learnt"]
    slope = _slope(loss, learnt, made["y"], recipe.batch, gradient)
    mean = tree.add(tree.scale(first, made["mean"]), tree.scale(1 - first, slope))
    square = {name: second * made["square"][name] + (1 - second) * value * value for name, value in slope.items()}

    def moved(value: Tensor, mean: Tensor, square: Tensor) -> Tensor:
        length = (square / (1 - second**count).to(square.dtype)).sqrt() + epsilon
        return value - (recipe.lr / (1 - first**count)).to(mean.dtype) * mean / length

    after = tree.apply(moved, learnt, mean, square)
    x = render(after)
    due = (made["marks"] == step + 1).reshape(-1, *[1] * x.dim())
    trail = torch.where(due, x[made["shown"]], made["trail"])
    return made | {"learnt": after, "mean": mean, "square": square, "trail": trail}


def _slope(loss: Loss, learnt: Params, labels: Tensor, batch: int, gradient: Gradient) -> Params:
    """The gradient of what is learnt; of inputs themselves so many at a time."""
    if learnt.keys() != {"x"} or not batch:
        return gradient(loss, learnt, {"y": labels})[0]
    parts = zip(torch.split(learnt["x"], batch), torch.split(labels, batch), strict=True)
    return {"x": torch.cat([gradient(loss, {"x": x}, {"y": y})[0]["x"] for x, y in parts])}
