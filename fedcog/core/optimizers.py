"""Local optimizers as functions of tensors, with or without a client axis."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fedcog.core import tree
from fedcog.core.tree import Params

OptimizerKind = Literal["sgd", "adam", "adamw"]
Moved = tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]
"""New parameters, first moments and second moments, in the order of the parameters."""


class OptimizerState(NamedTuple):
    """What an optimizer remembers between steps.

    Attributes:
        first: Momentum (SGD) or first moments (Adam), by parameter.
        second: Second moments, by parameter; empty for SGD.
        step: Number of steps taken, a 0-d tensor.
    """

    first: Params
    second: Params
    step: Tensor


@dataclass(frozen=True)
class Optimizer:
    """SGD with momentum and weight decay, Adam or AdamW, as in torch.optim.

    Clients start a new optimizer in every round.

    Attributes:
        kind: The update rule.
        momentum: Momentum of SGD.
        weight_decay: Weight decay; decoupled for AdamW.
    """

    kind: OptimizerKind = "sgd"
    momentum: float = 0.9
    weight_decay: float = 1e-5

    def init(self, params: Params) -> OptimizerState:
        """Return the state of an optimizer before its first step."""
        device = next(iter(params.values())).device
        second = {} if self.kind == "sgd" else tree.zeros(params)
        step = torch.zeros((), dtype=torch.int64, device=device)
        return OptimizerState(tree.zeros(params), second, step)

    def step(
        self, params: Params, grads: Params, state: OptimizerState, lr: Tensor
    ) -> tuple[Params, OptimizerState]:
        """Take one step.

        Args:
            params: Parameters by name, of one model or stacked along a client axis.
            grads: Gradients by the same names.
            state: State before the step.
            lr: Learning rate of the round, already decayed by the server's `Schedule`: 0-d, or
                one per stacked model.

        Returns:
            (parameters, state) after the step.
        """
        values = list(params.values())
        slopes = [grads[name] for name in params]
        if self.weight_decay and self.kind != "adamw":
            slopes = list(torch._foreach_add(slopes, values, alpha=self.weight_decay))
        moved, first, second = _RULES[self.kind](self, values, slopes, state, lr)
        after = OptimizerState(
            dict(zip(params, first, strict=True)),
            dict(zip(state.second, second, strict=True)),
            state.step + 1,
        )
        return dict(zip(params, moved, strict=True)), after

    def effective_step_size(self, num_steps: Tensor, lr: float | Tensor) -> Tensor:
        """Return how far a constant gradient of 1 moves a parameter, momentum included.

        Args:
            num_steps: Number of steps, of any shape.
            lr: Learning rate.

        Returns:
            A float64 tensor in the shape of `num_steps`.
        """
        count = num_steps.double()
        m = self.momentum
        if self.kind != "sgd" or not m:
            return lr * count
        return lr * (count - m * (1 - m**count) / (1 - m)) / (1 - m)

    def _sgd(
        self, values: list[Tensor], slopes: list[Tensor], state: OptimizerState, lr: Tensor
    ) -> Moved:
        first: list[Tensor] | tuple[Tensor, ...] = slopes
        if self.momentum:
            first = torch._foreach_add(slopes, list(state.first.values()), alpha=self.momentum)
        return torch._foreach_sub(values, _scaled(first, lr)), first, []

    def _adam(
        self, values: list[Tensor], slopes: list[Tensor], state: OptimizerState, lr: Tensor
    ) -> Moved:
        beta1 = 0.9
        beta2 = 0.999
        epsilon = 1e-8
        step = (state.step + 1).double()
        if self.kind == "adamw" and self.weight_decay:
            values = _scaled(values, 1 - lr * self.weight_decay)
        first = torch._foreach_lerp(list(state.first.values()), slopes, 1 - beta1)
        second = torch._foreach_mul(list(state.second.values()), beta2)
        second = torch._foreach_add(second, torch._foreach_mul(slopes, slopes), alpha=1 - beta2)
        correction = (1 - beta2**step).rsqrt().to(lr.dtype)
        scale = torch._foreach_mul(torch._foreach_sqrt(second), correction)
        direction = torch._foreach_div(first, torch._foreach_add(scale, epsilon))
        step_size = (lr / (1 - beta1**step)).to(lr.dtype)
        return torch._foreach_sub(values, _scaled(direction, step_size)), first, second


def _scaled(values: list[Tensor] | tuple[Tensor, ...], factor: Tensor) -> list[Tensor]:
    """Multiply by a factor: 0-d, or one per entry of the leading axis."""
    if not factor.dim():
        return list(torch._foreach_mul(values, factor))
    factors = [factor.reshape(-1, *[1] * (value.dim() - 1)) for value in values]
    return list(torch._foreach_mul(values, factors))


_RULES: dict[OptimizerKind, Callable[..., Moved]] = {
    "sgd": Optimizer._sgd,
    "adam": Optimizer._adam,
    "adamw": Optimizer._adam,
}


def clip_grads(grads: Params, max_norm: float) -> Params:
    """Scale the gradients of one client down to an L2 norm of at most `max_norm`.

    Args:
        grads: Gradients by name. A secondary model (`aside..name`) is
            clipped separately.
        max_norm: Largest L2 norm over a whole model.

    Returns:
        The scaled gradients.
    """
    models: dict[str, Params] = {}
    for name, value in grads.items():
        model = name.partition("..")[0] if ".." in name else ""
        models.setdefault(model, {})[name] = value
    clipped: Params = {}
    for model_grads in models.values():
        squares = [(value * value).sum() for value in model_grads.values()]
        norm = torch.stack(squares).sum().sqrt()
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        clipped |= {name: factor * value for name, value in model_grads.items()}
    return {name: clipped[name] for name in grads}
