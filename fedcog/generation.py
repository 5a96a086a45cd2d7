"""Inputs that the global model is sure of and the client's previous model is not (FedCOG, section 4.1)."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fedcog import tree
from fedcog.layers.rows import ROWS, accompanied, filled
from fedcog.models import Model
from fedcog.task import Task
from fedcog.tree import Params, State

Gradient = Callable[[Callable[[Params, Params], Tensor], Params, Params], tuple[Params, Tensor]]
Loss = Callable[[Params, Params], Tensor]
Render = Callable[[Params], Tensor]

SHOWN = ".shown"
"""Zeros that weigh the inputs which are shown: the gradient by them is those inputs, made once and not twice."""


class Recipe(NamedTuple):
    """How inputs are optimised, and which of them are shown after which steps."""

    steps: int
    lr: float
    betas: tuple[float, float]
    disagreement: float  # lambda_dis
    statistics: float = 0.0  # lambda_bn
    batch: int = 0  # how many inputs are optimised at a time, one batch after another; 0: all
    marks: tuple[int, ...] = ()
    shown: tuple[int, ...] = ()

    def length(self, inputs: int) -> int:
        """The steps of so many inputs' optimisation, batch after batch."""
        return self.steps * -(-inputs // (self.batch or inputs))


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
    for step in torch.arange(recipe.length(len(noise)), device=noise.device):
        made = improve(loss, made, step, recipe, gradient)
    return end(made, made["learnt"]["x"], recipe)


def begin(learnt: Params, labels: Tensor, recipe: Recipe, render: Render = as_they_are) -> State:
    """What is learnt for the labels {"y"}, as it begins; in the trail [marks, shown, ...] inputs that are shown.

    It is the inputs {"x"} themselves, or whatever `render` makes inputs of.
    """
    x = render(learnt)
    marks, shown = (
        torch.tensor(numbers, dtype=torch.int64, device=x.device) for numbers in (recipe.marks, recipe.shown)
    )
    trail = x[shown].expand(len(marks), *x[shown].shape)
    some = {"x": x[: recipe.batch]} if _by_batches(learnt, recipe) else learnt
    still = {"mean": tree.zeros(some), "square": tree.zeros(some)}
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
    Nor does the batch decide about rounding, which steps of an optimiser would enlarge: see `fedcog.layers.rows`.
    """
    model, rows = model.steady, -(-number // ROWS) * ROWS

    def loss(learnt: Params, batch: Params) -> Tensor:
        x = render(learnt)
        seen = x if statistics else accompanied(x)
        sure, strangeness = model.strangeness(teacher, seen) if statistics else (model.predict(teacher, seen), 0.0)
        other = model.predict(student, seen) if disagreement else sure
        each = task.loss(filled(sure, rows), filled(batch["y"], rows))
        if disagreement:
            each = each + disagreement * (1 - task.divergence(filled(sure, rows), filled(other, rows)))
        whole = (each[: len(x)] + statistics * strangeness).sum() / number
        return whole + (learnt[SHOWN] * x[batch["shown"]].detach()).sum() if SHOWN in learnt else whole

    return loss


def improve(loss: Loss, made: State, step: Tensor, recipe: Recipe, gradient: Gradient) -> State:
    """The inputs after one more step of Adam (Kingma & Ba, ICLR 2015); `step` counts from 0, and no model learns.

    By batches, the first is done with before the second begins: no more is remembered than of one.
    """
    (first, second), epsilon = recipe.betas, 1e-8
    whole: Params = made["learnt"]
    learnt, labels, mean, square = whole, made["y"], made["mean"], made["square"]
    seen = torch.ones_like(made["shown"], dtype=torch.bool)
    if _by_batches(whole, recipe):
        turn, step = step // recipe.steps, step % recipe.steps
        rows = torch.arange(recipe.batch, device=labels.device) + turn * recipe.batch
        rows = rows.clamp(max=len(labels) - 1)  # in a last batch that is not full the last input stands several times
        learnt, labels = {"x": whole["x"].index_select(0, rows)}, labels.index_select(0, rows)
        mean, square = (tree.apply(lambda value: torch.where(step > 0, value, 0), state) for state in (mean, square))
        seen = made["shown"] // recipe.batch == turn
    aside = {} if whole.keys() == {"x"} else {SHOWN: torch.zeros_like(made["trail"].sum(0))}
    slope, _ = gradient(loss, learnt | aside, {"y": labels, "shown": made["shown"]})
    now, count = slope.pop(SHOWN) if aside else whole["x"][made["shown"]], (step + 1).double()
    due = (made["marks"] == step)[:, None] & seen
    trail = torch.where(due.reshape(*due.shape, *[1] * (now.dim() - 1)), now, made["trail"])
    mean = tree.add(tree.scale(first, mean), tree.scale(1 - first, slope))
    square = {name: second * square[name] + (1 - second) * value * value for name, value in slope.items()}

    def moved(value: Tensor, mean: Tensor, square: Tensor) -> Tensor:
        length = (square / (1 - second**count).to(square.dtype)).sqrt() + epsilon
        return value - (recipe.lr / (1 - first**count)).to(mean.dtype) * mean / length

    after = tree.apply(moved, learnt, mean, square)
    if learnt is not whole:
        after = {"x": whole["x"].index_copy(0, rows, after["x"])}
    return made | {"learnt": after, "mean": mean, "square": square, "trail": trail}


def end(made: State, x: Tensor, recipe: Recipe) -> State:
    """What was made, with the inputs {"x"} that came of it, in the trail too."""
    last = (made["marks"] == recipe.steps).reshape(-1, *[1] * x.dim())
    return made | {"x": x, "trail": torch.where(last, x[made["shown"]], made["trail"])}


def _by_batches(learnt: Params, recipe: Recipe) -> bool:
    """Are inputs optimised some at a time? So they may be if they are learnt themselves."""
    return learnt.keys() == {"x"} and 0 < recipe.batch < len(learnt["x"])
