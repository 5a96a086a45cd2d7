"""Convolution as an operator with rules of its own: mapped over models by vmap, it is one kernel for all of them.

Three operators belong together, for each is a gradient of the others: the output of input and weight, the input's
gradient of the output's and the weight, the weight's gradient of the output's and the input (and with it the gradient
of a bias, for which it need not be read again). Their arguments have a leading model axis; what all models share has a
stride of 0 there. On a GPU they run whichever is fastest for the shape: Triton kernels that take the models side by
side, or torch's grouped convolution, which is one kernel a model.
"""

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from fedcog.kernels import ahead
from fedcog.kernels.shapes import Shape, choices
from fedcog.layers import tuning

try:
    from fedcog.kernels import convolution as kernels
except ImportError:  # there is no Triton here
    kernels = None  # type: ignore[assignment]

Ints = Sequence[int]


def convolution(x: Tensor, w: Tensor, b: Tensor | None, stride: Ints, padding: Ints, dilation: Ints) -> Tensor:
    """The convolution of x [batch, channels, height, width] with w [outputs, channels, rows, columns], plus b."""
    found: Tensor
    if b is None or b.dtype != w.dtype:
        found = Output.apply(x, w, stride, padding, dilation)  # type: ignore[no-untyped-call]
        return found if b is None else found + b[:, None, None]
    found = Biased.apply(x, w, b, stride, padding, dilation)  # type: ignore[no-untyped-call]
    return found


@custom_op("fedcog::convolve", mutates_args=())
def convolve(x: Tensor, w: Tensor, stride: Ints, padding: Ints, dilation: Ints) -> Tensor:
    """The convolution of every model's x with its w."""

    def plain() -> Tensor:
        weights = w.flatten(0, 1)
        y = torch.ops.aten.convolution(_joined(x), weights, None, stride, padding, dilation, False, [0, 0], len(w))
        return _parted(y, len(w))

    return _best("output", x, w, _of_output(x, w, stride, padding, dilation), plain)


@custom_op("fedcog::convolve_input", mutates_args=())
def convolve_input(g: Tensor, w: Tensor, size: Ints, stride: Ints, padding: Ints, dilation: Ints) -> Tensor:
    """Every model's gradient by an input of height and width `size`, from its gradient `g` by the output."""

    def plain() -> Tensor:
        x = g.new_empty((g.shape[1], len(w) * w.shape[2], *size))
        return _parted(_backward(0, _joined(g), x, w.flatten(0, 1), stride, padding, dilation, len(w)), len(w))

    return _best("input", g, w, _of_input(g, w, size, stride, padding, dilation), plain)


@custom_op("fedcog::convolve_weight", mutates_args=())
def convolve_weight(
    g: Tensor, x: Tensor, size: Ints, stride: Ints, padding: Ints, dilation: Ints, bias: bool
) -> Tensor:
    """Every model's gradient by a weight of `size` rows and columns, from its gradient `g` by the output.

    It is [models, outputs, channels * rows * columns]; with `bias` the gradient by an added number comes last.
    """

    def plain() -> Tensor:
        w = g.new_empty((len(g) * g.shape[2], x.shape[2], *size))
        found = _backward(1, _joined(g), _joined(x), w, stride, padding, dilation, len(g))
        by_w = found.reshape(len(g), g.shape[2], -1)
        return torch.cat([by_w, g.sum((1, 3, 4))[..., None]], -1) if bias else by_w

    return _best("weight", g, x, _of_weight(g, x, size, stride, padding, dilation, bias), plain)


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
    return y.reshape(len(y), models, y.shape[1] // models, *y.shape[2:]).transpose(0, 1).contiguous()


def _pairs(*given: Ints) -> list[tuple[int, int]]:
    return [(int(first), int(last)) for first, last in given]


def _of_output(x: Tensor, w: Tensor, stride: Ints, padding: Ints, dilation: Ints) -> Shape:
    return Shape(*x.shape, w.shape[1], *w.shape[3:], *_pairs(stride, padding, dilation))  # type: ignore[call-arg]


def _of_input(g: Tensor, w: Tensor, size: Ints, *rest: Ints) -> Shape:
    (_, outputs, channels, rows, columns), pairs = w.shape, _pairs(*rest)
    return Shape(*g.shape[:2], channels, *size, outputs, rows, columns, *pairs)  # type: ignore[call-arg]


def _of_weight(g: Tensor, x: Tensor, size: Ints, stride: Ints, padding: Ints, dilation: Ints, bias: bool) -> Shape:
    return Shape(*x.shape, g.shape[2], *size, *_pairs(stride, padding, dilation), bias)  # type: ignore[call-arg]


def _best(kind: str, one: Tensor, other: Tensor, shape: Shape, plain: Callable[[], Tensor]) -> Tensor:
    """The convolution or gradient of `kind`, computed in the way that is fastest for the shape."""
    if kernels is None and one.device.type == "cuda":
        warnings.warn("without Triton, convolutions run one kernel a client: pip install triton.", stacklevel=2)
    case, launches = _launches(kind, one, other, shape)
    if not launches:
        return plain()
    ways: dict[str, Callable[[], Tensor]] = {"torch": plain, **launches}
    return ways[tuning.fastest(case, ways)]()


def _launches(kind: str, one: Tensor, other: Tensor, shape: Shape) -> tuple[str, dict[str, functools.partial[Tensor]]]:
    """What distinguishes this case from others, and the launch of each kernel that could do it."""
    small = max(one[0].numel(), other[0].numel(), shape.batch * shape.outputs * shape.out[0] * shape.out[1]) < 2**31
    if kernels is None or one.device.type != "cuda" or one.dtype not in kernels.DTYPES or not (small and shape.batch):
        return "", {}
    first, second = (value if value[0].is_contiguous() else value.contiguous() for value in (one, other))
    tf32 = torch.backends.cuda.matmul.allow_tf32
    sharing = "".join("-" if value.stride(0) == 0 and shape.models > 1 else "+" for value in (first, second))
    launch = functools.partial(kernels.KINDS[kind], first, second, shape)
    ways = {",".join(map(str, blocks)): functools.partial(launch, blocks, tf32) for blocks in choices(kind, shape)}
    case = f"{kind}{sharing} {one.dtype} {'tf32 ' if tf32 else ''}{list(shape)} by {' or '.join(ways)}"
    return case, ways


def _foresee(kind: str, one: Tensor, other: Tensor, shape: Shape) -> None:
    """Have compiled what will be tried: whoever traces is about to compute."""
    case, launches = _launches(kind, one, other, shape)
    if launches and not tuning.known(case):
        for launch in launches.values():
            ahead.begin(one.device, launch.func, *launch.args)


# The shape of what comes out, for whoever traces without computing.


@convolve.register_fake
def _(x: Tensor, w: Tensor, stride: Ints, padding: Ints, dilation: Ints) -> Tensor:
    shape = _of_output(x, w, stride, padding, dilation)
    _foresee("output", x, w, shape)
    return x.new_empty((*x.shape[:2], w.shape[1], *shape.out))


@convolve_input.register_fake
def _(g: Tensor, w: Tensor, size: Ints, stride: Ints, padding: Ints, dilation: Ints) -> Tensor:
    _foresee("input", g, w, _of_input(g, w, size, stride, padding, dilation))
    return g.new_empty((*g.shape[:2], w.shape[2], *size))


@convolve_weight.register_fake
def _(g: Tensor, x: Tensor, size: Ints, stride: Ints, padding: Ints, dilation: Ints, bias: bool) -> Tensor:
    shape = _of_weight(g, x, size, stride, padding, dilation, bias)
    _foresee("weight", g, x, shape)
    return g.new_empty((len(g), g.shape[2], shape.terms))


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
