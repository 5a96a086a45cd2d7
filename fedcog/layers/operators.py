"""Convolutions of many models and their gradients as operators.

Three operators belong together, for each is a gradient of the others: the output of input and weight, the input's
gradient of the output's and the weight, the weight's gradient of the output's and the input. Their arguments have a
leading model axis; what all models share has a stride of 0 there. On a GPU they run whichever is fastest for the shape:
Triton kernels that take the models side by side, a matrix product of columns, or torch's grouped convolution, which is
one kernel a model.
"""

import functools
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.library import custom_op

from fedcog.kernels import ahead
from fedcog.kernels.shapes import Shape, choices
from fedcog.layers import tuning

try:
    if not (torch.version.cuda or torch.version.hip):
        raise ImportError("no GPU for kernels, and Triton takes a while to load")
    from fedcog.kernels import convolution as kernels
    from fedcog.kernels import products
except ImportError:  # or there is no Triton here
    kernels = None  # type: ignore[assignment]

Ints = Sequence[int]


@custom_op("fedcog::convolve", mutates_args=())
def convolve(x: Tensor, w: Tensor, stride: Ints, padding: Ints, dilation: Ints, steady: bool) -> Tensor:
    """The convolution of every model's x with its w."""
    return _best("output", x, w, _of_output(x, w, stride, padding, dilation), steady)


@custom_op("fedcog::convolve_input", mutates_args=())
def convolve_input(
    g: Tensor, w: Tensor, size: Ints, stride: Ints, padding: Ints, dilation: Ints, steady: bool
) -> Tensor:
    """Every model's gradient by an input of height and width `size`, from its gradient `g` by the output."""
    return _best("input", g, w, _of_input(g, w, size, stride, padding, dilation), steady)


@custom_op("fedcog::convolve_weight", mutates_args=())
def convolve_weight(
    g: Tensor, x: Tensor, size: Ints, stride: Ints, padding: Ints, dilation: Ints, steady: bool
) -> Tensor:
    """Every model's gradient by a weight of `size` rows and columns, from its gradient `g` by the output."""
    return _best("weight", g, x, _of_weight(g, x, size, stride, padding, dilation), steady)


def grouped(kind: str, one: Tensor, other: Tensor, shape: Shape) -> Tensor:
    """torch's own way to the convolution or gradient of `kind`: one of as many groups as there are models."""
    s, groups = shape, shape.models
    how = s.stride, s.padding, s.dilation, False, (0, 0), groups
    if kind == "output":
        return _parted(torch.ops.aten.convolution(_joined(one), other.flatten(0, 1), None, *how), groups)
    g, backward = _joined(one), torch.ops.aten.convolution_backward
    if kind == "input":  # of the input itself, only the shape is looked at
        x = g.new_empty((s.batch, groups * s.channels, s.height, s.width))
        return _parted(backward(g, x, other.flatten(0, 1), None, *how, [True, False, False])[0], groups)
    w = g.new_empty((groups * s.outputs, s.channels, s.rows, s.columns))
    by_w: Tensor = backward(g, _joined(other), w, None, *how, [False, True, False])[1]
    return by_w.reshape(groups, s.outputs, *w.shape[1:]).contiguous()


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


def _of_weight(g: Tensor, x: Tensor, size: Ints, *rest: Ints) -> Shape:
    return Shape(*x.shape, g.shape[2], *size, *_pairs(*rest))  # type: ignore[call-arg]


def _best(kind: str, one: Tensor, other: Tensor, shape: Shape, steady: bool) -> Tensor:
    """The convolution or gradient of `kind`, computed in the way that is fastest for the shape.

    What is to be steady is computed in the first of our own, which is one for all batches and adds up an example's
    terms in one order.
    """
    if kernels is None and one.device.type == "cuda":
        warnings.warn("without Triton, convolutions run one kernel a client: pip install triton.", stacklevel=2)
    case, launches = _launches(kind, one, other, shape)
    plain = functools.partial(grouped, kind, one, other, shape)
    if not launches:
        return plain()
    if steady:
        return next(iter(launches.values()))()
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
    if products.fits(kind, shape):
        ways["product"] = functools.partial(products.multiply, kind, first, second, shape)
    case = f"{kind}{sharing} {one.dtype} {'tf32 ' if tf32 else ''}{list(shape)} by {' or '.join(ways)}"
    return case, ways


def _foresee(kind: str, one: Tensor, other: Tensor, shape: Shape, steady: bool) -> None:
    """Have compiled what will be tried: whoever traces is about to compute."""
    case, launches = _launches(kind, one, other, shape)
    if launches and (steady or not tuning.known(case)):
        for launch in list(launches.values())[: 1 if steady else None]:
            ahead.begin(one.device, launch.func, *launch.args)


# The shape of what comes out, for whoever traces without computing.


@convolve.register_fake
def _(x: Tensor, w: Tensor, stride: Ints, padding: Ints, dilation: Ints, steady: bool) -> Tensor:
    shape = _of_output(x, w, stride, padding, dilation)
    _foresee("output", x, w, shape, steady)
    return x.new_empty((*x.shape[:2], w.shape[1], *shape.out))


@convolve_input.register_fake
def _(g: Tensor, w: Tensor, size: Ints, stride: Ints, padding: Ints, dilation: Ints, steady: bool) -> Tensor:
    _foresee("input", g, w, _of_input(g, w, size, stride, padding, dilation), steady)
    return g.new_empty((*g.shape[:2], w.shape[2], *size))


@convolve_weight.register_fake
def _(g: Tensor, x: Tensor, size: Ints, stride: Ints, padding: Ints, dilation: Ints, steady: bool) -> Tensor:
    _foresee("weight", g, x, _of_weight(g, x, size, stride, padding, dilation), steady)
    return g.new_empty((len(g), g.shape[2], x.shape[2], *size))
