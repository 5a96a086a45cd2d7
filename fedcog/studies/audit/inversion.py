"""Gradient inversion: training inputs reconstructed from a mean gradient.

The attack is that of Geiping et al. (NeurIPS 2020): minimize 1 - cos(simulated gradient, observed
gradient) + tv * TV(x) with Adam on the sign of the gradient. Labels are inferred from the head's
gradient, as in iDLG (Zhao et al., 2020), or optimized. A network that begins with a linear layer
gives a single input away in closed form.
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedcog.core import rng
from fedcog.core.tree import Params
from fedcog.models.checks import ModelError
from fedcog.models.functional import Model

LabelAttack = Literal["inferred", "optimized"]
"""Where the attacker's labels come from: the head's gradient, or the optimization."""
DECAY_AT = (3 / 8, 5 / 8, 7 / 8)
"""Fractions of the iterations after which the step size is divided by 10."""
CLOSED_FORM_COST = 1e-4
"""Cosine cost up to which an input in closed form is taken as it is."""
DERIVATIVE_ERROR_WORDS = ("derivative", "differentiate", "require grad", "not implemented")
"""Words in torch's errors about functions without second derivatives."""
NUM_REPORTS = 50
"""Number of times that an attack reports its progress."""

OnIteration = Callable[[int, float], None]
"""Called with the number of finished iterations and the cosine cost."""


class AttackConfig(NamedTuple):
    """How an attacker optimizes inputs.

    Attributes:
        iterations: Number of iterations.
        lr: Step size of Adam.
        tv: Weight of the total variation; ignored for inputs that are not images.
        labels: Where the labels come from.
        seed: Seed of the noise that the attack starts from.
    """

    iterations: int = 1500
    lr: float = 0.1
    tv: float = 0.01
    labels: LabelAttack = "inferred"
    seed: int = 0


class Knowledge(NamedTuple):
    """What an attacker knows.

    Attributes:
        model: The network.
        params: Its parameters before the observed step.
        buffers: Its running statistics before the observed step.
        multi_label: Whether an example may have several labels.
        gradient: The observed mean gradient, by parameter; its scale does not matter.
        low: Smallest possible input, broadcastable to one input.
        high: Largest possible input, broadcastable to one input.
        is_image: Whether inputs are images `(C, H, W)`.
    """

    model: Model
    params: Params
    buffers: Params
    multi_label: bool
    gradient: Params
    low: Tensor
    high: Tensor
    is_image: bool


class Reconstruction(NamedTuple):
    """What an attack ends with.

    Attributes:
        inputs: `(N, *input_shape)`.
        labels: Labels of the inputs, `(N,)`; rows of booleans `(N, C)` if multi-label.
        cost: Cosine cost, from 0 (parallel gradients) to 2.
        is_closed_form: Whether the input was computed instead of optimized.
    """

    inputs: Tensor
    labels: Tensor
    cost: float
    is_closed_form: bool = False


def cosine_cost(simulated: Params, observed: Params) -> Tensor:
    """Return 1 - cos of two gradients, over all parameters together.

    Args:
        simulated: Gradient by parameter.
        observed: Gradient by the same names.

    Returns:
        A 0-d tensor: 0 for parallel, 1 for orthogonal, 2 for opposite gradients.
    """
    product = _dot(simulated, observed)
    norms = _dot(simulated, simulated) * _dot(observed, observed)
    return 1 - product / norms.clamp(min=torch.finfo(product.dtype).tiny).sqrt()


def total_variation(images: Tensor) -> Tensor:
    """Return the mean absolute difference of neighboring pixels, across plus down.

    Args:
        images: `(N, C, H, W)`.

    Returns:
        A 0-d tensor.
    """
    across = (images[..., :, 1:] - images[..., :, :-1]).abs()
    down = (images[..., 1:, :] - images[..., :-1, :]).abs()
    return across.mean() + down.mean()


def head_scores(model: Model, gradient: Params) -> Tensor | None:
    """Return what the head's gradient says about each class: the lower, the likelier it occurred.

    With a bias it is the bias's gradient, mean probability minus share of the labels. Without one
    it is the sum of the weights' gradient over each row, which has the same sign if features are
    not negative.

    Args:
        model: The network.
        gradient: The observed gradient.

    Returns:
        `(C,)`; None if the network has no head.
    """
    head = model.head_of(gradient) if model.head_names else {}
    if "bias" in head:
        return head["bias"]
    return head["weight"].sum(1) if "weight" in head else None


def infer_labels(scores: Tensor, count: int) -> Tensor:
    """Infer the labels of a batch from the head's gradient.

    For one example it is the row that sums lowest (iDLG). For several, every class with a negative
    sum occurs; further labels are those of the lowest sums, after the mean effect of one example
    is taken off for each label found (LLG; Wainakh et al., PETS 2022).

    Args:
        scores: Sum of the head's gradient for each class, `(C,)`.
        count: Number of labels.

    Returns:
        Labels in ascending order, `(count,)`.
    """
    left = scores.clone()
    effect = left.clamp(max=0).sum() * (1 + 1 / len(left)) / count
    certain = (left < 0).nonzero()[:, 0]
    found = certain[left[certain].argsort()][:count].tolist()
    left[found] -= effect
    while len(found) < count:
        label = int(left.argmin())
        found.append(label)
        left[label] -= effect
    return torch.tensor(sorted(found), device=scores.device)


def closed_form_inputs(gradient: Params, input_shape: tuple[int, ...]) -> list[Tensor]:
    """Compute the input of a linear layer with bias from its gradient: (row of dW) / db.

    It is exact if the layer sees one example. The row with the largest |db| is used.

    Args:
        gradient: The observed gradient.
        input_shape: Shape of one input.

    Returns:
        One candidate `(1, *input_shape)` for each layer that could be the first.
    """
    size = math.prod(input_shape)
    candidates = []
    for name, weight in gradient.items():
        bias = gradient.get(f"{name.removesuffix('weight')}bias")
        if bias is None or weight.dim() != 2 or weight.shape[1] != size or not bias.any():
            continue
        row = int(bias.abs().argmax())
        candidates.append((weight[row] / bias[row]).reshape(1, *input_shape))
    return candidates


def invert(
    known: Knowledge,
    num_inputs: int,
    config: AttackConfig,
    on_iteration: OnIteration = lambda step, cost: None,
) -> Reconstruction:
    """Reconstruct the inputs that an observed gradient was computed on.

    Args:
        known: What the attacker knows.
        num_inputs: Number of inputs to reconstruct.
        config: How to optimize them.
        on_iteration: Called now and then with (iterations, cosine cost).

    Returns:
        Inputs, labels and the cost reached.

    Raises:
        ModelError: If the network has no second derivatives.
    """
    inputs = _noise(known, "inputs", (num_inputs, *known.model.input_shape), config.seed)
    targets = _Targets(known, num_inputs, config)
    try:
        # Fused kernels of attention have no second derivatives.
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
            if num_inputs == 1 and (found := _closed_form(known, targets)):
                return found
            return _optimize(known, inputs, targets, config, on_iteration)
    except (NotImplementedError, RuntimeError) as error:
        if not any(words in str(error) for words in DERIVATIVE_ERROR_WORDS):
            raise
        reason = str(error).strip().splitlines()[0]
        raise ModelError(f"this network has no second derivatives ({reason}).") from error


class _Targets:
    """The labels of an attack as probabilities: fixed, or functions of numbers to optimize."""

    def __init__(self, known: Knowledge, num_inputs: int, config: AttackConfig) -> None:
        self.multi_label = known.multi_label
        num_classes = known.model.num_classes
        scores = head_scores(known.model, known.gradient)
        is_inferred = config.labels == "inferred" and not known.multi_label and scores is not None
        self.logits: Tensor | None = None
        if is_inferred:
            assert scores is not None
            self.labels = infer_labels(scores, num_inputs)
            self._fixed = F.one_hot(self.labels, num_classes).to(scores.dtype)
        else:
            noise = _noise(known, "labels", (num_inputs, num_classes), config.seed)
            self.logits = noise.requires_grad_()

    def probabilities(self) -> Tensor:
        """Return the probability of each class, `(N, C)`."""
        if self.logits is None:
            return self._fixed
        return self.logits.sigmoid() if self.multi_label else self.logits.softmax(-1)

    def decided(self) -> Tensor:
        """Return the labels as the data set has them."""
        if self.logits is None:
            return self.labels
        return self.logits.detach() > 0 if self.multi_label else self.logits.detach().argmax(-1)


def simulated_gradient(
    known: Knowledge, inputs: Tensor, probabilities: Tensor, *, differentiable: bool = False
) -> Params:
    """Return the mean gradient of the plain loss on some inputs, as the client would compute it.

    BatchNorm uses the statistics of these inputs, as in training. A network with dropout is
    simulated in evaluation mode, because the attacker does not know the client's masks.

    Args:
        known: What the attacker knows.
        inputs: `(N, *input_shape)`.
        probabilities: Probability of each class, `(N, C)`.
        differentiable: Whether the gradient itself will be differentiated.

    Returns:
        The gradient by parameter.
    """
    leaves = {name: value.detach().requires_grad_() for name, value in known.params.items()}
    if known.model.uses_dropout:
        logits = known.model.predict(leaves | known.buffers, inputs)
    else:
        logits = known.model.forward(leaves, known.buffers, inputs).logits
    if known.multi_label:
        loss = F.binary_cross_entropy_with_logits(logits, probabilities)
    else:
        loss = -(probabilities * logits.log_softmax(-1)).sum(-1).mean()
    grads = torch.autograd.grad(
        loss,
        list(leaves.values()),
        create_graph=differentiable,
        allow_unused=True,
        materialize_grads=True,
    )
    return dict(zip(leaves, grads, strict=True))


def _closed_form(known: Knowledge, targets: _Targets) -> Reconstruction | None:
    """Return the input of a first linear layer, if its gradient is the observed one."""
    if targets.logits is not None:
        return None
    for candidate in closed_form_inputs(known.gradient, known.model.input_shape):
        inputs = candidate.clamp(known.low, known.high)
        gradient = simulated_gradient(known, inputs, targets.probabilities())
        cost = float(cosine_cost(gradient, known.gradient))
        if cost <= CLOSED_FORM_COST:
            return Reconstruction(inputs, targets.decided(), cost, is_closed_form=True)
    return None


def _optimize(
    known: Knowledge,
    inputs: Tensor,
    targets: _Targets,
    config: AttackConfig,
    on_iteration: OnIteration,
) -> Reconstruction:
    """Minimize the cosine cost and the total variation."""
    inputs = inputs.clamp(known.low, known.high).requires_grad_()
    optimized = [inputs] if targets.logits is None else [inputs, targets.logits]
    optimizer = torch.optim.Adam(optimized, config.lr)
    milestones = [int(share * config.iterations) for share in DECAY_AT]
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones)
    report_every = max(config.iterations // NUM_REPORTS, 1)
    cost = torch.ones(())
    for step in range(1, config.iterations + 1):
        probabilities = targets.probabilities()
        gradient = simulated_gradient(known, inputs, probabilities, differentiable=True)
        cost = cosine_cost(gradient, known.gradient)
        total = cost
        if known.is_image and config.tv:
            total = cost + config.tv * total_variation(inputs)
        slopes = torch.autograd.grad(total, optimized)
        for value, slope in zip(optimized, slopes, strict=True):
            value.grad = slope.sign() if value is inputs else slope
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            inputs.copy_(inputs.clamp(known.low, known.high))
        if step % report_every == 0 or step == config.iterations:
            on_iteration(step, float(cost.detach()))
    gradient = simulated_gradient(known, inputs.detach(), targets.probabilities().detach())
    cost = cosine_cost(gradient, known.gradient)
    return Reconstruction(inputs.detach(), targets.decided(), float(cost))


def _noise(known: Knowledge, what: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Return standard normal noise on the attacker's device."""
    like = next(iter(known.params.values()))
    zero = torch.zeros(1, dtype=torch.int64)
    return rng.normal(seed, f"audit/{what}", 0, zero, shape)[0].to(like)


def _dot(first: Params, second: Params) -> Tensor:
    return torch.stack([(value * first[name]).sum() for name, value in second.items()]).sum()
