"""The local optimiser as a function: one update of all tensors at once, with or without a client axis."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fedcog import tree
from fedcog.tree import Params

Kind = Literal["sgd", "adam", "adamw"]
Moved = tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]


class Motion(NamedTuple):
    """What an optimiser remembers between steps: decayed means (and squares) of the gradients, and its step count."""

    first: Params
    second: Params
    step: Tensor


@dataclass(frozen=True)
class Optimiser:
    """SGD (with momentum and weight decay), Adam or AdamW, as in torch.optim, started afresh each round."""

    kind: Kind = "sgd"
    momentum: float = 0.9
    weight_decay: float = 1e-5

    def start(self, params: Params) -> Motion:
        """The memory of an optimiser that has done nothing."""
        device = next(iter(params.values())).device
        second = {} if self.kind == "sgd" else tree.zeros(params)
        return Motion(tree.zeros(params), second, torch.zeros((), dtype=torch.int64, device=device))

    def step(self, params: Params, grads: Params, motion: Motion, lr: Tensor) -> tuple[Params, Motion]:
        """The parameters one step of length `lr` further, and what is remembered of it.

        Of several models stacked, `lr` is one for all, or one for each.
        """
        now, slopes = list(params.values()), [grads[name] for name in params]
        if self.weight_decay and self.kind != "adamw":
            slopes = list(torch._foreach_add(slopes, now, alpha=self.weight_decay))
        moved, first, second = _MOVES[self.kind](self, now, slopes, motion, lr)
        remembered = dict(zip(params, first, strict=True)), dict(zip(motion.second, second, strict=True))
        return dict(zip(params, moved, strict=True)), Motion(*remembered, motion.step + 1)

    def length(self, steps: Tensor, lr: float | Tensor) -> Tensor:
        """How far a constant gradient of 1 would move a parameter in so many steps, momentum included."""
        steps, m = steps.double(), self.momentum
        if self.kind != "sgd" or not m:
            return lr * steps
        return lr * (steps - m * (1 - m**steps) / (1 - m)) / (1 - m)

    def _sgd(self, now: list[Tensor], slopes: list[Tensor], motion: Motion, lr: Tensor) -> Moved:
        before = list(motion.first.values())
        first = torch._foreach_add(slopes, before, alpha=self.momentum) if self.momentum else slopes
        return torch._foreach_sub(now, _times(first, lr)), first, []

    def _adam(self, now: list[Tensor], slopes: list[Tensor], motion: Motion, lr: Tensor) -> Moved:
        beta1, beta2, epsilon, step = 0.9, 0.999, 1e-8, (motion.step + 1).double()
        if self.kind == "adamw" and self.weight_decay:
            now = _times(now, 1 - lr * self.weight_decay)
        first = torch._foreach_lerp(list(motion.first.values()), slopes, 1 - beta1)
        second = torch._foreach_mul(list(motion.second.values()), beta2)
        second = torch._foreach_add(second, torch._foreach_mul(slopes, slopes), alpha=1 - beta2)
        size = torch._foreach_mul(torch._foreach_sqrt(second), (1 - beta2**step).rsqrt().to(lr.dtype))
        way = torch._foreach_div(first, torch._foreach_add(size, epsilon))
        return torch._foreach_sub(now, _times(way, (lr / (1 - beta1**step)).to(lr.dtype))), first, second


def _times(values: list[Tensor] | tuple[Tensor, ...], factor: Tensor) -> list[Tensor]:
    """Values times a factor: one for all, or along their first axis one for each."""
    if not factor.dim():
        return list(torch._foreach_mul(values, factor))
    return list(torch._foreach_mul(values, [factor.reshape(-1, *[1] * (value.dim() - 1)) for value in values]))


_MOVES: dict[Kind, Callable[..., Moved]] = {
    "sgd": Optimiser._sgd,
    "adam": Optimiser._adam,
    "adamw": Optimiser._adam,
}


def clip(grads: Params, limit: float) -> Params:
    """The gradients of one client, scaled down to at most `limit` in length over the whole model.

    A model that rides along ("ASIDE..name") is measured and scaled apart.
    """
    models: dict[str, Params] = {}
    for name, value in grads.items():
        models.setdefault(name.partition("..")[0] if ".." in name else "", {})[name] = value
    scaled: Params = {}
    for model in models.values():
        length = torch.stack([(value * value).sum() for value in model.values()]).sum().sqrt()
        factor = (limit / (length + 1e-6)).clamp(max=1.0)
        scaled |= {name: factor * value for name, value in model.items()}
    return {name: scaled[name] for name in grads}
