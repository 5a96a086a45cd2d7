"""The local optimiser as a function: one update of all tensors at once, with or without a client axis."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fedcog.tree import Params

Kind = Literal["sgd", "adam", "adamw"]


class Motion(NamedTuple):
    """What an optimiser remembers between steps: decayed means (and squares) of the gradients, and its step count."""

    first: list[Tensor]
    second: list[Tensor]
    step: int


@dataclass(frozen=True)
class Optimiser:
    """SGD (with momentum and weight decay), Adam or AdamW, as in torch.optim, started afresh each round."""

    kind: Kind = "sgd"
    momentum: float = 0.9
    weight_decay: float = 1e-5

    def start(self, params: Params) -> Motion:
        """The memory of an optimiser that has done nothing."""
        zeros = [torch.zeros_like(value) for value in params.values()]
        return Motion(zeros, [] if self.kind == "sgd" else [torch.zeros_like(value) for value in zeros], 0)

    def step(self, params: Params, grads: Params, motion: Motion, lr: float) -> tuple[Params, Motion]:
        """The parameters one step further, and what is remembered of it."""
        now, slopes = list(params.values()), [grads[name] for name in params]
        if self.weight_decay and self.kind != "adamw":
            slopes = list(torch._foreach_add(slopes, now, alpha=self.weight_decay))
        moved, motion = _MOVES[self.kind](self, now, slopes, motion, lr)
        return dict(zip(params, moved, strict=True)), motion

    def length(self, steps: Tensor, lr: float) -> Tensor:
        """How far a constant gradient of 1 would move a parameter in so many steps, momentum included."""
        steps, m = steps.double(), self.momentum
        if self.kind != "sgd" or not m:
            return lr * steps
        return lr * (steps - m * (1 - m**steps) / (1 - m)) / (1 - m)

    def _sgd(self, now: list[Tensor], slopes: list[Tensor], motion: Motion, lr: float) -> tuple[list[Tensor], Motion]:
        first = torch._foreach_add(slopes, motion.first, alpha=self.momentum) if self.momentum else slopes
        return list(torch._foreach_add(now, first, alpha=-lr)), Motion(list(first), [], motion.step + 1)

    def _adam(self, now: list[Tensor], slopes: list[Tensor], motion: Motion, lr: float) -> tuple[list[Tensor], Motion]:
        beta1, beta2, epsilon, step = 0.9, 0.999, 1e-8, motion.step + 1
        if self.kind == "adamw" and self.weight_decay:
            now = list(torch._foreach_mul(now, 1 - lr * self.weight_decay))
        first = torch._foreach_lerp(motion.first, slopes, 1 - beta1)
        second = torch._foreach_mul(motion.second, beta2)
        torch._foreach_addcmul_(second, slopes, slopes, value=1 - beta2)
        size = torch._foreach_sqrt(second)
        torch._foreach_div_(size, (1 - beta2**step) ** 0.5)
        torch._foreach_add_(size, epsilon)
        moved = torch._foreach_addcdiv(now, first, size, value=-lr / (1 - beta1**step))
        return list(moved), Motion(list(first), list(second), step)


_MOVES: dict[Kind, Callable[..., tuple[list[Tensor], Motion]]] = {
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
