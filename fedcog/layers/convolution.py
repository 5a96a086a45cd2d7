"""Convolution as an operator: of one model torch's own; mapped over models by vmap, one kernel for all of them.

Three operators belong together, for each is a gradient of the others: the output of input and weight, the input's
gradient of the output's and the weight, the weight's gradient of the output's and the input. `convolve_many` and its
like have a leading model axis on both arguments; what all models share has a stride of 0 there. On a GPU they run
whichever is faster for the shape, Triton kernels that take the models side by side or torch's grouped convolution.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from fedcog.layers import tuning
from fedcog.layers.shapes import Shape, choices

try:
    from fedcog.layers import kernels
except ImportError:  # there is no Triton here
    kernels = None  # type: ignore[assignment]

Ints = Sequence[int]


@custom_op("fedcog::convolve", mutates_args=())
def convolve(x: Tensor, w: Tensor, stride: Ints, padding: Ints, dilation: Ints) -> Tensor:
    """The convolution of x [batch, channels, height, width] with w [outputs, channels, rows, columns]."""
    return torch.ops.aten.convolution(x, w, None, stride, padding, dilation, False, [0, 0], 1).contiguous()


@custom_op("fedcog::convolve_input", mutates_args=())
def convolve_input(g: Tensor, w: Tensor, size: Ints, stride: Ints, padding: Ints, dilation: Ints) -> Tensor:
    """The gradient by an input of height and width `size`, from the gradient `g` by the output."""
    x = g.new_empty((g.shape[0], w.shape[1], *size))
    return _backward(0, g, x, w, stride, padding, dilation, 1)


@custom_op("fedcog::convolve_weight", mutates_args=())
def convolve_weight(g: Tensor, x: Tensor, size: Ints, stride: Ints, padding: Ints, dilation: Ints) -> Tensor:
    """The gradient by a weight of `size` rows and columns, from the gradient `g` by the output."""
    w = g.new_empty((g.shape[1], x.shape[1], *size))
    return _backward(1, g, x, w, stride, padding, dilation, 1)


@custom_op("fedcog::convolve_many", mutates_args=())
def convolve_many(x: Tensor, w: Tensor, stride: Ints, padding: Ints, dilation: Ints) -> Tensor:
    """`convolve` of every x with its w."""

    def plain() -> Tensor:
        weights = w.flatten(0, 1)
        y = torch.ops.aten.convolution(_joined(x), weights, None, stride, padding, dilation, False, [0, 0], len(w))
        return _parted(y, len(w))

    return _best("output", x, w, Shape(*x.shape, w.shape[1], *w.shape[3:], *_pairs(stride, padding, dilation)), plain)


@custom_op("fedcog::convolve_input_many", mutates_args=())
def convolve_input_many(g: Tensor, w: Tensor, size: Ints, stride: Ints, padding: Ints, dilation: Ints) -> Tensor:
    """`convolve_input` of every g with its w."""

    def plain() -> Tensor:
        x = g.new_empty((g.shape[1], len(w) * w.shape[2], *size))
        return _parted(_backward(0, _joined(g), x, w.flatten(0, 1), stride, padding, dilation, len(w)), len(w))

    shape = Shape(*g.shape[:2], w.shape[2], *size, w.shape[1], *w.shape[3:], *_pairs(stride, padding, dilation))
    return _best("input", g, w, shape, plain)


@custom_op("fedcog::convolve_weight_many", mutates_args=())
def convolve_weight_many(g: Tensor, x: Tensor, size: Ints, stride: Ints, padding: Ints, dilation: Ints) -> Tensor:
    """`convolve_weight` of every g with its x."""

    def plain() -> Tensor:
        w = g.new_empty((len(g) * g.shape[2], x.shape[2], *size))
        found = _backward(1, _joined(g), _joined(x), w, stride, padding, dilation, len(g))
        return found.unflatten(0, (len(g), g.shape[2]))

    return _best("weight", g, x, Shape(*x.shape, g.shape[2], *size, *_pairs(stride, padding, dilation)), plain)


def _backward(
    which: int, g: Tensor, x: Tensor, w: Tensor, stride: Ints, padding: Ints, dilation: Ints, groups: int
) -> Tensor:
    """torch's gradient by the input (0) or by the weight (1); the other of the two lends only its shape."""
    wanted = [which == 0, which == 1, False]
    found: list[Tensor] = torch.ops.aten.convolution_backward(
        *(g, x, w, None, stride, padding, dilation, False, [0, 0], groups, wanted)
    )
    return found[which].contiguous()


def _joined(x: Tensor) -> Tensor:
    """[models, batch, channels, ...] as [batch, models * channels, ...], the form of a grouped convolution."""
    return x.transpose(0, 1).flatten(1, 2)


def _parted(y: Tensor, models: int) -> Tensor:
    """The reverse."""
    return y.unflatten(1, (models, -1)).transpose(0, 1).contiguous()


def _pairs(*given: Ints) -> list[tuple[int, int]]:
    return [(int(first), int(last)) for first, last in given]


def _best(kind: str, one: Tensor, other: Tensor, shape: Shape, plain: Callable[[], Tensor]) -> Tensor:
    """The convolution or gradient of `kind`, computed in the way that is fastest for the shape."""
    small = max(one[0].numel(), other[0].numel(), shape.batch * shape.outputs * shape.out[0] * shape.out[1]) < 2**31
    if kernels is None or one.device.type != "cuda" or one.dtype not in kernels.DTYPES or not small:
        return plain()
    one, other = (value if value[0].is_contiguous() else value.contiguous() for value in (one, other))
    tf32 = torch.backends.cuda.matmul.allow_tf32
    ways: dict[str, Callable[[], Tensor]] = {"torch": plain}
    for blocks in choices(kind, shape):
        ways[",".join(map(str, blocks))] = lambda blocks=blocks: kernels.KINDS[kind](one, other, shape, blocks, tf32)
    sharing = "".join("-" if value.stride(0) == 0 and shape.models > 1 else "+" for value in (one, other))
    case = f"{kind}{sharing} {one.dtype} {'tf32 ' if tf32 else ''}{list(shape)}"
    return ways[tuning.fastest(case, ways)]()


def convolution(x: Tensor, w: Tensor, stride: Ints, padding: Ints, dilation: Ints) -> Tensor:
    """`convolve`, with its rules for autograd and vmap."""
    found: Tensor = Output.apply(x, w, stride, padding, dilation)  # type: ignore[no-untyped-call]
    return found


# The shape of what comes out, for whoever traces without computing.


@convolve.register_fake
def _(x: Tensor, w: Tensor, stride: Ints, padding: Ints, dilation: Ints) -> Tensor:
    shape = Shape(1, *x.shape, w.shape[0], *w.shape[2:], *_pairs(stride, padding, dilation))
    return x.new_empty((x.shape[0], w.shape[0], *shape.out))


@convolve_many.register_fake
def _(x: Tensor, w: Tensor, stride: Ints, padding: Ints, dilation: Ints) -> Tensor:
    shape = Shape(*x.shape, w.shape[1], *w.shape[3:], *_pairs(stride, padding, dilation))
    return x.new_empty((*x.shape[:2], w.shape[1], *shape.out))


@convolve_input.register_fake
def _(g: Tensor, w: Tensor, size: Ints, stride: Ints, padding: Ints, dilation: Ints) -> Tensor:
    return g.new_empty((g.shape[0], w.shape[1], *size))


@convolve_input_many.register_fake
def _(g: Tensor, w: Tensor, size: Ints, stride: Ints, padding: Ints, dilation: Ints) -> Tensor:
    return g.new_empty((*g.shape[:2], w.shape[2], *size))


@convolve_weight.register_fake
def _(g: Tensor, x: Tensor, size: Ints, stride: Ints, padding: Ints, dilation: Ints) -> Tensor:
    return g.new_empty((g.shape[1], x.shape[1], *size))


@convolve_weight_many.register_fake
def _(g: Tensor, x: Tensor, size: Ints, stride: Ints, padding: Ints, dilation: Ints) -> Tensor:
    return g.new_empty((len(g), g.shape[2], x.shape[2], *size))


# The rules. Each of the three is linear in both its arguments, and its gradients are the other two. Mapped over models
# that share a weight, they are one model with a larger batch.


class _Rule(torch.autograd.Function):
    """What the three have in common."""

    many_models: Any
    folds = True

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        one, other, *ctx.numbers = inputs
        ctx.save_for_backward(one, other)

    @classmethod
    def over(
        cls, info: Any, dims: tuple[int | None, ...], one: Tensor, other: Tensor, *rest: Any
    ) -> tuple[Tensor, int]:
        """Mapped over models."""
        if cls.folds and dims[0] is not None and dims[1] is None:
            together = one.movedim(dims[0], 0)
            return cls.apply(together.flatten(0, 1), other, *rest).unflatten(0, together.shape[:2]), 0
        one, other = (
            value.expand(info.batch_size, *value.shape) if dim is None else value.movedim(dim, 0)
            for value, dim in ((one, dims[0]), (other, dims[1]))
        )
        return cls.many_models(one, other, *rest), 0


class Output(_Rule):
    """`convolve`, with its rules."""

    many_models = convolve_many

    @staticmethod
    def forward(x: Tensor, w: Tensor, stride: Ints, padding: Ints, dilation: Ints) -> Tensor:
        """The operator."""
        return convolve(x, w, stride, padding, dilation)

    @staticmethod
    def vmap(*given: Any) -> tuple[Tensor, int]:
        """Over models."""
        return Output.over(*given)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        """By input and weight."""
        (x, w), rest, (left, right, *_) = ctx.saved_tensors, ctx.numbers, ctx.needs_input_grad
        by_x = Input.apply(g, w, x.shape[-2:], *rest) if left else None
        return by_x, Weight.apply(g, x, w.shape[-2:], *rest) if right else None, None, None, None


class Input(_Rule):
    """`convolve_input`, with its rules."""

    many_models = convolve_input_many

    @staticmethod
    def forward(g: Tensor, w: Tensor, size: Ints, stride: Ints, padding: Ints, dilation: Ints) -> Tensor:
        """The operator."""
        return convolve_input(g, w, size, stride, padding, dilation)

    @staticmethod
    def vmap(*given: Any) -> tuple[Tensor, int]:
        """Over models."""
        return Input.over(*given)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Any, ...]:
        """By the output's gradient and the weight."""
        (g, w), (_, *rest), (left, right, *_) = ctx.saved_tensors, ctx.numbers, ctx.needs_input_grad
        by_g = Output.apply(slope, w, *rest) if left else None
        return by_g, Weight.apply(g, slope, w.shape[-2:], *rest) if right else None, None, None, None, None


class Weight(_Rule):
    """`convolve_weight`, with its rules."""

    many_models = convolve_weight_many
    folds = False

    @staticmethod
    def forward(g: Tensor, x: Tensor, size: Ints, stride: Ints, padding: Ints, dilation: Ints) -> Tensor:
        """The operator."""
        return convolve_weight(g, x, size, stride, padding, dilation)

    @staticmethod
    def vmap(*given: Any) -> tuple[Tensor, int]:
        """Over models."""
        return Weight.over(*given)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Any, ...]:
        """By the output's gradient and the input."""
        (g, x), (_, *rest), (left, right, *_) = ctx.saved_tensors, ctx.numbers, ctx.needs_input_grad
        by_g = Output.apply(x, slope, *rest) if left else None
        return by_g, Input.apply(g, slope, x.shape[-2:], *rest) if right else None, None, None, None, None
