"""Convolution with rules of its own: mapped over models by vmap, it is one operator for all of them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedcog.layers.operators import convolve, convolve_input, convolve_weight

Ints = Sequence[int]


def convolution(x: Tensor, w: Tensor, b: Tensor | None, stride: Ints, padding: Ints, dilation: Ints) -> Tensor:
    """The convolution of x [batch, channels, height, width] with w [outputs, channels, rows, columns], plus b."""
    found: Tensor
    if b is None or b.dtype != w.dtype:
        found = Output.apply(x, w, stride, padding, dilation)  # type: ignore[no-untyped-call]
        return found if b is None else found + b[:, None, None]
    found = Biased.apply(x, w, b, stride, padding, dilation)  # type: ignore[no-untyped-call]
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
        by_w = _by_weight(g, x, w, rest)[0] if right else None
        return by_x, by_w, None, None, None


class Biased(torch.autograd.Function):
    """`convolve` of one model, and a number added to each of its outputs."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, b: Tensor, *rest: Any) -> Tensor:
        """The operator's result, plus b."""
        return Output.alone(x, w, *rest) + b[:, None, None]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """b is not needed again."""
        x, w, _, *ctx.numbers = inputs
        ctx.save_for_backward(x, w)

    @staticmethod
    def vmap(
        info: Any, dims: tuple[int | None, ...], x: Tensor, w: Tensor, b: Tensor, *rest: Any
    ) -> tuple[Tensor, int]:
        """Over models."""
        if dims[0] is None and dims[1] is None:
            y = Output.apply(x, w, *rest)[None]  # type: ignore[no-untyped-call]
        else:
            y, _ = Output.over(info, dims[:2], x, w, *rest)
        b = b[None] if dims[2] is None else b.movedim(dims[2], 0)
        return y + b[:, None, :, None, None], 0

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        """By input, weight and bias."""
        (x, w), rest, (left, middle, right, *_) = ctx.saved_tensors, ctx.numbers, ctx.needs_input_grad
        by_x = Input.apply(g, w, x.shape[-2:], *rest) if left else None  # type: ignore[no-untyped-call]
        by_w, by_b = _by_weight(g, x, w, rest, bias=True) if middle or right else (None, None)
        return by_x, by_w, by_b, None, None, None


def _by_weight(
    g: Tensor, x: Tensor, w: Tensor, rest: Sequence[Ints], bias: bool = False
) -> tuple[Tensor, Tensor | None]:
    """One model's gradients by weight and bias; `rest` is stride, padding and dilation."""
    both = Weight.apply(g, x, w.shape[-2:], *rest, bias)  # type: ignore[no-untyped-call]
    return (both[:, :-1].reshape(w.shape), both[:, -1]) if bias else (both.reshape(w.shape), None)


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
        by_w = _by_weight(g, slope, w, rest)[0] if right else None
        return by_g, by_w, None, None, None, None


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
        (g, x), (size, *rest, bias), (left, right, *_) = ctx.saved_tensors, ctx.numbers, ctx.needs_input_grad
        by_w = (slope[:, :-1] if bias else slope).reshape(g.shape[1], x.shape[1], *size)
        by_x = Input.apply(g, by_w, x.shape[-2:], *rest) if right else None  # type: ignore[no-untyped-call]
        by_g = None
        if left:
            by_g = convolution(x, by_w, slope[:, -1] if bias else None, *rest)
        return by_g, by_x, None, None, None, None, None
