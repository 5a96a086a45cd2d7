"""Convolution with rules of its own: mapped over models by vmap, it is one operator for all of them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedcog.layers.operators import convolve, convolve_input, convolve_weight

Ints = Sequence[int]


def convolution(x: Tensor, w: Tensor, stride: Ints, padding: Ints, dilation: Ints, steady: bool = False) -> Tensor:
    """The convolution of x [batch, channels, height, width] with w [outputs, channels, rows, columns].

    If it is steady, an example's numbers are the same to the last bit however many there are beside it.
    """
    found: Tensor = Output.apply(x, w, stride, padding, dilation, steady)  # type: ignore[no-untyped-call]
    return found


# The rules for one model. Each of the three is linear in both its arguments, and its gradients are the other two.


class _Rule(torch.autograd.Function):
    """What the three have in common."""

    operator: Any
    folds = True  # where all models share the second argument, they are one model with a larger batch

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        one, other, *ctx.numbers = inputs
        ctx.save_for_backward(one, other)

    @classmethod
    def alone(cls, one: Tensor, other: Tensor, *rest: Any) -> Tensor:
        found: Tensor = cls.operator(one[None], other[None], *rest)
        return found[0]

    @classmethod
    def over(
        cls, info: Any, dims: tuple[int | None, ...], one: Tensor, other: Tensor, *rest: Any
    ) -> tuple[Tensor, int]:
        if cls.folds and dims[0] is not None and dims[1] is None:
            together = one.movedim(dims[0], 0)
            found: Tensor = cls.apply(together.flatten(0, 1), other, *rest)  # type: ignore[no-untyped-call]
            return found.reshape(*together.shape[:2], *found.shape[1:]), 0
        one, other = (
            value.expand(info.batch_size, *value.shape) if dim is None else value.movedim(dim, 0)
            for value, dim in ((one, dims[0]), (other, dims[1]))
        )
        return cls.operator(one, other, *rest), 0


class Output(_Rule):
    """`convolve` of one model."""

    operator = convolve

    @staticmethod
    def forward(*given: Any) -> Tensor:
        """The operator."""
        return Output.alone(*given)

    @staticmethod
    def vmap(*given: Any) -> tuple[Tensor, int]:
        """Over models."""
        return Output.over(*given)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        """By input and weight."""
        (x, w), rest, (left, right, *_) = ctx.saved_tensors, ctx.numbers, ctx.needs_input_grad
        by_x = Input.apply(g, w, x.shape[-2:], *rest) if left else None  # type: ignore[no-untyped-call]
        by_w = Weight.apply(g, x, w.shape[-2:], *rest) if right else None  # type: ignore[no-untyped-call]
        return by_x, by_w, None, None, None, None


class Input(_Rule):
    """`convolve_input` of one model."""

    operator = convolve_input

    @staticmethod
    def forward(*given: Any) -> Tensor:
        """The operator."""
        return Input.alone(*given)

    @staticmethod
    def vmap(*given: Any) -> tuple[Tensor, int]:
        """Over models."""
        return Input.over(*given)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Any, ...]:
        """By the output's gradient and the weight."""
        (g, w), (_, *rest), (left, right, *_) = ctx.saved_tensors, ctx.numbers, ctx.needs_input_grad
        by_g = Output.apply(slope, w, *rest) if left else None  # type: ignore[no-untyped-call]
        by_w = Weight.apply(g, slope, w.shape[-2:], *rest) if right else None  # type: ignore[no-untyped-call]
        return by_g, by_w, None, None, None, None, None


class Weight(_Rule):
    """`convolve_weight` of one model."""

    operator = convolve_weight
    folds = False

    @staticmethod
    def forward(*given: Any) -> Tensor:
        """The operator."""
        return Weight.alone(*given)

    @staticmethod
    def vmap(*given: Any) -> tuple[Tensor, int]:
        """Over models."""
        return Weight.over(*given)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Any, ...]:
        """By the output's gradient and the input."""
        (g, x), (_, *rest), (left, right, *_) = ctx.saved_tensors, ctx.numbers, ctx.needs_input_grad
        by_g = Output.apply(x, slope, *rest) if left else None  # type: ignore[no-untyped-call]
        by_x = Input.apply(g, slope, x.shape[-2:], *rest) if right else None  # type: ignore[no-untyped-call]
        return by_g, by_x, None, None, None, None, None
