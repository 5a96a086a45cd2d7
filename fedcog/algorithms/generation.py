"""Generation of inputs that the global and the previous local model disagree on (FedCOG, sec. 4.1).

The generation state is a dict: `"optimized"` holds the tensors that are optimized (the inputs
`"x"`, or the parameters and noise of a generator), `"y"` the target labels, `"mean"` and `"square"`
Adam's moments. `"trail"` `(M, S, *input_shape)` holds S inputs (indices `"shown"`) after M steps
(`"marks"`) for the report.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fedcog.algorithms.types import Gradient
from fedcog.core import tree
from fedcog.core.integers import ceil_div
from fedcog.core.tasks import Task
from fedcog.core.tree import Params, State
from fedcog.models.functional import Model
from fedcog.models.ops.batch_invariant import ROW_MULTIPLE, pad_rows, pad_single

Loss = Callable[[Params, Params], Tensor]
"""The loss of (optimized tensors, batch)."""

Render = Callable[[Params], Tensor]
"""Turns optimized tensors into inputs `(N, *input_shape)`."""

SHOWN = ".shown"
"""Name of a zero tensor added to the optimized ones. Its gradient is the rendered inputs to show,
so a generator need not render them twice."""

EPSILON = 1e-8
"""Adam's epsilon."""


class GenerationConfig(NamedTuple):
    """How inputs are optimized, and which of them are recorded.

    Attributes:
        steps: Number of Adam steps for every batch of inputs.
        lr: Learning rate of the inputs.
        betas: Adam's decay rates.
        disagreement: Weight of the disagreement term, lambda_dis.
        batchnorm_weight: Weight of the BatchNorm term, lambda_bn.
        batch: Number of inputs optimized at a time, one batch after another; 0 means all.
        marks: Steps after which inputs are recorded.
        shown: Indices of the inputs that are recorded.
    """

    steps: int
    lr: float
    betas: tuple[float, float]
    disagreement: float
    batchnorm_weight: float = 0.0
    batch: int = 0
    marks: tuple[int, ...] = ()
    shown: tuple[int, ...] = ()

    def num_steps(self, num_inputs: int) -> int:
        """Return the number of Adam steps for `num_inputs` inputs, batch after batch."""
        return self.steps * ceil_div(num_inputs, self.batch or num_inputs)


class Models(NamedTuple):
    """The models that shape generated inputs.

    Attributes:
        task: What a label means.
        model: The network.
        teacher: Weights of the global model.
        student: Weights of the client's previous local model.
    """

    task: Task
    model: Model
    teacher: Params
    student: Params


def identity(optimized: Params) -> Tensor:
    """Render inputs that are optimized directly."""
    return optimized["x"]


def generate(
    models: Models, labels: Tensor, noise: Tensor, config: GenerationConfig, gradient: Gradient
) -> State:
    """Optimize noise into inputs (eq. 1).

    Args:
        models: The models that shape the inputs.
        labels: Target labels, `(N,)` or `(N, C)`.
        noise: Initial inputs `(N, *input_shape)`.
        config: How to optimize.
        gradient: Differentiates the loss.

    Returns:
        The generation state with the inputs under `"x"`.
    """
    gen_state = begin({"x": noise}, labels, config)
    loss = objective(models, config, len(noise))
    for step in torch.arange(config.num_steps(len(noise)), device=noise.device):
        gen_state = adam_step(loss, gen_state, step, config, gradient)
    return end(gen_state, gen_state["optimized"]["x"], config)


def begin(
    optimized: Params, labels: Tensor, config: GenerationConfig, render: Render = identity
) -> State:
    """Create the generation state.

    Args:
        optimized: The tensors to optimize, by name.
        labels: Target labels, `(N,)` or `(N, C)`.
        config: How to optimize.
        render: Turns `optimized` into inputs.

    Returns:
        The generation state before the first step.
    """
    x = render(optimized)
    marks = torch.tensor(config.marks, dtype=torch.int64, device=x.device)
    shown = torch.tensor(config.shown, dtype=torch.int64, device=x.device)
    batch = {"x": x[: config.batch]} if _by_batches(optimized, config) else optimized
    return {
        "optimized": optimized,
        "y": labels,
        "trail": x[shown].expand(len(marks), *x[shown].shape),
        "shown": shown,
        "marks": marks,
        "mean": tree.zeros(batch),
        "square": tree.zeros(batch),
    }


def objective(
    models: Models, config: GenerationConfig, num_inputs: int, render: Render = identity
) -> Loss:
    """Return the loss of generated inputs: task loss + lambda_dis * (1 - divergence).

    The loss is divided by the number of all inputs, never by the batch, so the batch size affects
    memory only. The BatchNorm term is the exception: its statistics are those of the batch. Nor
    does the batch size affect rounding, which optimizer steps would amplify: see
    `fedcog.models.ops.batch_invariant`.

    Args:
        models: The models that shape the inputs.
        config: The weights of the terms.
        num_inputs: Number of all generated inputs.
        render: Turns optimized tensors into inputs.

    Returns:
        The loss of (optimized tensors, {"y": labels, "shown": indices}).
    """
    task, model, teacher, student = models
    model = model.batch_invariant
    num_rows = ceil_div(num_inputs, ROW_MULTIPLE) * ROW_MULTIPLE

    def _loss(optimized: Params, batch: Params) -> Tensor:
        x = render(optimized)
        if config.batchnorm_weight:
            inputs = x
            teacher_logits, batchnorm_loss = model.batchnorm_loss(teacher, inputs)
        else:
            inputs = pad_single(x)
            teacher_logits = model.predict(teacher, inputs)
            batchnorm_loss = 0.0  # type: ignore[assignment]
        padded = pad_rows(teacher_logits, num_rows)
        losses = task.loss(padded, pad_rows(batch["y"], num_rows))
        if config.disagreement:
            student_logits = model.predict(student, inputs)
            divergence = task.divergence(padded, pad_rows(student_logits, num_rows))
            losses = losses + config.disagreement * (1 - divergence)
        total = (losses[: len(x)] + config.batchnorm_weight * batchnorm_loss).sum() / num_inputs
        if SHOWN not in optimized:
            return total
        return total + (optimized[SHOWN] * x[batch["shown"]].detach()).sum()

    return _loss


def adam_step(
    loss: Loss, gen_state: State, step: Tensor, config: GenerationConfig, gradient: Gradient
) -> State:
    """Take one step of Adam (Kingma & Ba, ICLR 2015) on the inputs; no model is trained.

    With batches, all steps of a batch come before those of the next one, so that Adam's moments
    need memory for one batch only.

    Args:
        loss: Result of `objective`.
        gen_state: The generation state.
        step: Generation step from 0, a 0-d tensor.
        config: How to optimize.
        gradient: Differentiates the loss.

    Returns:
        The generation state after the step.
    """
    everything: Params = gen_state["optimized"]
    optimized = everything
    labels = gen_state["y"]
    mean = gen_state["mean"]
    square = gen_state["square"]
    is_current = torch.ones_like(gen_state["shown"], dtype=torch.bool)
    rows = torch.empty(0, dtype=torch.int64, device=labels.device)
    if _by_batches(everything, config):
        batch_index = step // config.steps
        step = step % config.steps
        rows = torch.arange(config.batch, device=labels.device) + batch_index * config.batch
        rows = rows.clamp(max=len(labels) - 1)  # a last, smaller batch repeats the last input
        optimized = {"x": everything["x"].index_select(0, rows)}
        labels = labels.index_select(0, rows)
        mean = tree.apply(lambda value: torch.where(step > 0, value, 0), mean)
        square = tree.apply(lambda value: torch.where(step > 0, value, 0), square)
        is_current = gen_state["shown"] // config.batch == batch_index
    extra = {}
    if everything.keys() != {"x"}:
        extra = {SHOWN: torch.zeros_like(gen_state["trail"].sum(0))}
    data = {"y": labels, "shown": gen_state["shown"]}
    grads, _ = gradient(loss, optimized | extra, data)
    shown_inputs = grads.pop(SHOWN) if extra else everything["x"][gen_state["shown"]]
    mean, square = _moments(mean, square, grads, config)
    after = _moved(optimized, mean, square, step, config)
    if optimized is not everything:
        after = {"x": everything["x"].index_copy(0, rows, after["x"])}
    is_due = (gen_state["marks"] == step)[:, None] & is_current
    is_due = is_due.reshape(*is_due.shape, *[1] * (shown_inputs.dim() - 1))
    trail = torch.where(is_due, shown_inputs, gen_state["trail"])
    return gen_state | {"optimized": after, "mean": mean, "square": square, "trail": trail}


def end(gen_state: State, x: Tensor, config: GenerationConfig) -> State:
    """Add the generated inputs to the generation state.

    Args:
        gen_state: The generation state after the last step.
        x: The generated inputs `(N, *input_shape)`.
        config: How they were optimized.

    Returns:
        The generation state with `"x"`, and a trail that ends with these inputs.
    """
    is_last = (gen_state["marks"] == config.steps).reshape(-1, *[1] * x.dim())
    trail = torch.where(is_last, x[gen_state["shown"]], gen_state["trail"])
    return gen_state | {"x": x, "trail": trail}


def _moments(
    mean: Params, square: Params, grads: Params, config: GenerationConfig
) -> tuple[Params, Params]:
    """Update Adam's first and second moments."""
    beta1, beta2 = config.betas
    mean = tree.add(tree.scale(beta1, mean), tree.scale(1 - beta1, grads))
    square = {
        name: beta2 * square[name] + (1 - beta2) * grad * grad for name, grad in grads.items()
    }
    return mean, square


def _moved(
    optimized: Params, mean: Params, square: Params, step: Tensor, config: GenerationConfig
) -> Params:
    """Move the optimized tensors by Adam's bias-corrected step."""
    beta1, beta2 = config.betas
    count = (step + 1).double()

    def _move(value: Tensor, mean: Tensor, square: Tensor) -> Tensor:
        scale = (square / (1 - beta2**count).to(square.dtype)).sqrt() + EPSILON
        return value - (config.lr / (1 - beta1**count)).to(mean.dtype) * mean / scale

    return tree.apply(_move, optimized, mean, square)


def _by_batches(optimized: Params, config: GenerationConfig) -> bool:
    """Return whether inputs are optimized batch by batch, which a generator never is."""
    return optimized.keys() == {"x"} and 0 < config.batch < len(optimized["x"])
