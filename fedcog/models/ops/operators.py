"""Convolutions of many models, and their gradients, as torch operators.

There are three operators, and each is a gradient of the other two: the output (of input and
weight), the gradient with respect to the input (of the output's gradient and the weight), and the
gradient with respect to the weight (of the output's gradient and the input). Operands have a
leading model axis, with stride 0 where all models have the same tensor. On a GPU, the fastest
implementation for the shape runs: Triton kernels for all models at once, a matrix product of
unfolded columns, or torch's grouped convolution, which launches one kernel per model.
"""

import functools
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.library import custom_op

from fedcog.models.ops import autotune
from fedcog.models.ops.kernels import ahead_of_time
from fedcog.models.ops.kernels.shapes import Shape, block_choices

try:
    if not (torch.version.cuda or torch.version.hip):
        raise ImportError("no GPU for kernels, and Triton is slow to import")
    from fedcog.models.ops.kernels import launchers as kernels
    from fedcog.models.ops.kernels import matmul
except ImportError:
    kernels = None  # type: ignore[assignment]

Ints = Sequence[int]

MAX_ELEMENTS = 2**31
"""Tensors of one model must be smaller than this: kernels use 32-bit offsets."""


@custom_op("fedcog::convolve", mutates_args=())
def convolve(
    x: Tensor, w: Tensor, stride: Ints, padding: Ints, dilation: Ints, batch_invariant: bool
) -> Tensor:
    """Convolve the images of every model.

    Args:
        x: Images `(M, N, C, H, W)`.
        w: Weights `(M, O, C, R, S)`.
        stride: Stride of rows and columns.
        padding: Padding of rows and columns.
        dilation: Dilation of rows and columns.
        batch_invariant: Whether results for an image must not depend on N, to the last bit.

    Returns:
        Images `(M, N, O, P, Q)`.
    """
    return _compute("output", x, w, _output_shape(x, w, stride, padding, dilation), batch_invariant)


@custom_op("fedcog::convolve_input", mutates_args=())
def convolve_input(
    g: Tensor,
    w: Tensor,
    size: Ints,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    batch_invariant: bool,
) -> Tensor:
    """Compute every model's gradient with respect to its images.

    Args:
        g: Gradient with respect to the output, `(M, N, O, P, Q)`.
        w: Weights `(M, O, C, R, S)`.
        size: Height and width of the images.
        stride: Stride of rows and columns.
        padding: Padding of rows and columns.
        dilation: Dilation of rows and columns.
        batch_invariant: Whether results for an image must not depend on N, to the last bit.

    Returns:
        Gradients `(M, N, C, H, W)`.
    """
    shape = _input_shape(g, w, size, stride, padding, dilation)
    return _compute("input", g, w, shape, batch_invariant)


@custom_op("fedcog::convolve_weight", mutates_args=())
def convolve_weight(
    g: Tensor,
    x: Tensor,
    size: Ints,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    batch_invariant: bool,
) -> Tensor:
    """Compute every model's gradient with respect to its weights.

    Args:
        g: Gradient with respect to the output, `(M, N, O, P, Q)`.
        x: Images `(M, N, C, H, W)`.
        size: Rows and columns of the weights.
        stride: Stride of rows and columns.
        padding: Padding of rows and columns.
        dilation: Dilation of rows and columns.
        batch_invariant: Whether to use the implementation that is used for all batch sizes.

    Returns:
        Gradients `(M, O, C, R, S)`.
    """
    shape = _weight_shape(g, x, size, stride, padding, dilation)
    return _compute("weight", g, x, shape, batch_invariant)


def grouped_convolution(kind: str, left: Tensor, right: Tensor, shape: Shape) -> Tensor:
    """Compute a convolution or a gradient with torch, with one group per model.

    Args:
        kind: "output", "input" or "weight".
        left: Images, or the gradient with respect to the output.
        right: Weights, or images if `kind` is "weight".
        shape: Shape of the convolution.

    Returns:
        The result, with a leading model axis.
    """
    s = shape
    groups = shape.models
    geometry = (s.stride, s.padding, s.dilation, False, (0, 0), groups)
    if kind == "output":
        y = torch.ops.aten.convolution(_join(left), right.flatten(0, 1), None, *geometry)
        return _separate(y, groups)
    g = _join(left)
    backward = torch.ops.aten.convolution_backward
    if kind == "input":
        # Of the images, only the shape is used.
        x = g.new_empty((s.batch, groups * s.channels, s.height, s.width))
        outputs = [True, False, False]
        grad_x = backward(g, x, right.flatten(0, 1), None, *geometry, outputs)[0]
        return _separate(grad_x, groups)
    w = g.new_empty((groups * s.outputs, s.channels, s.rows, s.columns))
    grad_w: Tensor = backward(g, _join(right), w, None, *geometry, [False, True, False])[1]
    return grad_w.reshape(groups, s.outputs, *w.shape[1:]).contiguous()


def _join(x: Tensor) -> Tensor:
    """Reshape `(M, N, C, ...)` to `(N, M * C, ...)`, for a grouped convolution."""
    return x.transpose(0, 1).flatten(1, 2)


def _separate(y: Tensor, models: int) -> Tensor:
    """Undo `_join`."""
    by_model = y.reshape(len(y), models, y.shape[1] // models, *y.shape[2:])
    return by_model.transpose(0, 1).contiguous()


def _pairs(*geometry: Ints) -> list[tuple[int, int]]:
    return [(int(first), int(last)) for first, last in geometry]


def _output_shape(x: Tensor, w: Tensor, *geometry: Ints) -> Shape:
    return Shape(*x.shape, w.shape[1], *w.shape[3:], *_pairs(*geometry))  # type: ignore[call-arg]


def _input_shape(g: Tensor, w: Tensor, size: Ints, *geometry: Ints) -> Shape:
    _, outputs, channels, rows, columns = w.shape
    sizes = (*g.shape[:2], channels, *size, outputs, rows, columns)
    return Shape(*sizes, *_pairs(*geometry))


def _weight_shape(g: Tensor, x: Tensor, size: Ints, *geometry: Ints) -> Shape:
    return Shape(*x.shape, g.shape[2], *size, *_pairs(*geometry))  # type: ignore[call-arg]


def _compute(kind: str, left: Tensor, right: Tensor, shape: Shape, batch_invariant: bool) -> Tensor:
    """Compute a convolution or a gradient by the fastest implementation for the shape.

    If results must be batch invariant, the first kernel runs: it is the same for all batch sizes,
    and adds the terms of an example in a fixed order.
    """
    if kernels is None and left.device.type == "cuda":
        warnings.warn(
            "without Triton, convolutions run one kernel per client: pip install triton.",
            stacklevel=2,
        )
    case, launches = _kernel_launches(kind, left, right, shape)
    reference = functools.partial(grouped_convolution, kind, left, right, shape)
    if not launches:
        return reference()
    if batch_invariant:
        return next(iter(launches.values()))()
    candidates: dict[str, Callable[[], Tensor]] = {"torch": reference, **launches}
    return candidates[autotune.fastest(case, candidates)]()


def _kernel_launches(
    kind: str, left: Tensor, right: Tensor, shape: Shape
) -> tuple[str, dict[str, functools.partial[Tensor]]]:
    """Return the name of this case for autotuning, and a launch of each kernel that applies."""
    num_outputs = shape.batch * shape.outputs * shape.out[0] * shape.out[1]
    is_small = max(left[0].numel(), right[0].numel(), num_outputs) < MAX_ELEMENTS
    if kernels is None or left.device.type != "cuda" or left.dtype not in kernels.DTYPES:
        return "", {}
    if not (is_small and shape.batch):
        return "", {}
    first, second = (
        value if value[0].is_contiguous() else value.contiguous() for value in (left, right)
    )
    tf32 = torch.backends.cuda.matmul.allow_tf32
    sharing = "".join(
        "-" if value.stride(0) == 0 and shape.models > 1 else "+" for value in (first, second)
    )
    launch = functools.partial(kernels.LAUNCHERS[kind], first, second, shape)
    launches = {
        ",".join(map(str, blocks)): functools.partial(launch, blocks, tf32)
        for blocks in block_choices(kind, shape)
    }
    if matmul.fits_in_memory(kind, shape):
        launches["product"] = functools.partial(
            matmul.convolve_by_matmul, kind, first, second, shape
        )
    precision = "tf32 " if tf32 else ""
    names = " or ".join(launches)
    case = f"{kind}{sharing} {left.dtype} {precision}{list(shape)} by {names}"
    return case, launches


def _precompile(
    kind: str, left: Tensor, right: Tensor, shape: Shape, batch_invariant: bool
) -> None:
    """Start to compile the kernels that will be tried: tracing precedes computing."""
    case, launches = _kernel_launches(kind, left, right, shape)
    if launches and (batch_invariant or not autotune.cached_choice(case)):
        for launch in list(launches.values())[: 1 if batch_invariant else None]:
            ahead_of_time.start_compiling(left.device, launch.func, *launch.args)


# Shapes of the results, for tracing without computing.


@convolve.register_fake
def _(
    x: Tensor, w: Tensor, stride: Ints, padding: Ints, dilation: Ints, batch_invariant: bool
) -> Tensor:
    shape = _output_shape(x, w, stride, padding, dilation)
    _precompile("output", x, w, shape, batch_invariant)
    return x.new_empty((*x.shape[:2], w.shape[1], *shape.out))


@convolve_input.register_fake
def _(
    g: Tensor,
    w: Tensor,
    size: Ints,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    batch_invariant: bool,
) -> Tensor:
    shape = _input_shape(g, w, size, stride, padding, dilation)
    _precompile("input", g, w, shape, batch_invariant)
    return g.new_empty((*g.shape[:2], w.shape[2], *size))


@convolve_weight.register_fake
def _(
    g: Tensor,
    x: Tensor,
    size: Ints,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    batch_invariant: bool,
) -> Tensor:
    shape = _weight_shape(g, x, size, stride, padding, dilation)
    _precompile("weight", g, x, shape, batch_invariant)
    return g.new_empty((len(g), g.shape[2], x.shape[2], *size))
