"""Convolutions of many models as matrix products; import only where Triton is installed.

Triton unfolds images into columns, one for every position, and cuBLAS computes the product. A
gradient with respect to images is folded back from columns. This is fastest for small images with
many channels, and for strides, which leave most terms of a gradient out.
"""

from collections.abc import Iterator

import torch
import triton
from torch import Tensor

from fedcog.models.ops.kernels import programs
from fedcog.models.ops.kernels.launchers import shape_constants
from fedcog.models.ops.kernels.shapes import Shape

MAX_COLUMN_ELEMENTS = 2**28
"""Largest number of elements of all columns at a time; models beyond it are computed in turns."""


def convolve_by_matmul(kind: str, left: Tensor, right: Tensor, shape: Shape) -> Tensor:
    """Compute a convolution or a gradient of all models.

    Args:
        kind: "output", "input" or "weight".
        left: Images, or the gradient with respect to the output.
        right: Weights, or images if `kind` is "weight".
        shape: Shape of the convolution.

    Returns:
        The result, with a leading model axis.
    """
    s = shape
    parts = _num_parts(kind, shape)
    if parts > 1:
        part_shape = s._replace(models=parts, batch=s.batch // parts)
        result = convolve_by_matmul(
            kind,
            left.reshape(parts, -1, *left.shape[2:]),
            right.expand(parts, *right.shape[1:]),
            part_shape,
        )
        return result.reshape(1, s.batch, *result.shape[2:])
    if kind == "output":
        y = left.new_empty((s.models, s.outputs, s.batch, *s.out))
        for models, chunk in _model_chunks(s):
            out = y[models].flatten(2)
            torch.bmm(right[models].flatten(2), _unfold(left[models], chunk), out=out)
        return y.transpose(1, 2).contiguous()
    g = left.transpose(1, 2).flatten(2)
    if kind == "input":
        x = left.new_empty((s.models, s.batch, s.channels, s.height, s.width))
        for models, chunk in _model_chunks(s):
            transposed = right[models].flatten(2).transpose(1, 2)
            _fold(torch.bmm(transposed, g[models]), x[models], chunk)
        return x
    w = left.new_empty((s.models, s.outputs, s.channels, s.rows, s.columns))
    for models, chunk in _model_chunks(s):
        out = w[models].flatten(2)
        torch.bmm(g[models], _unfold(right[models], chunk).transpose(1, 2), out=out)
    return w


def num_terms(shape: Shape) -> int:
    """Return the number of weights per output."""
    return shape.channels * shape.rows * shape.columns


def fits_in_memory(kind: str, shape: Shape) -> bool:
    """Whether the columns of one model, or of a part of its examples, are small enough.

    Args:
        kind: "output", "input" or "weight".
        shape: Shape of the convolution.

    Returns:
        True if `convolve_by_matmul` can compute it.
    """
    return _column_elements(shape) <= MAX_COLUMN_ELEMENTS * _num_parts(kind, shape)


def _column_elements(shape: Shape) -> int:
    """Return the number of elements of one model's columns."""
    return num_terms(shape) * shape.batch * shape.out[0] * shape.out[1]


def _num_parts(kind: str, shape: Shape) -> int:
    """Return the number of parts, a power of two, that a single model's batch is split into.

    Each part is computed as if it were a model.
    """
    parts = 1
    if shape.models != 1 or kind == "weight":
        return parts
    elements = _column_elements(shape)
    while elements > MAX_COLUMN_ELEMENTS * parts and not shape.batch % (2 * parts):
        parts *= 2
    return parts


def _model_chunks(shape: Shape) -> Iterator[tuple[slice, Shape]]:
    """Yield chunks of models whose columns fit, with their shapes."""
    size = max(1, MAX_COLUMN_ELEMENTS // _column_elements(shape))
    for start in range(0, shape.models, size):
        end = min(start + size, shape.models)
        yield slice(start, end), shape._replace(models=end - start)


def _unfold(x: Tensor, s: Shape) -> Tensor:
    """Unfold images into columns `(models, terms, positions)`."""
    count = num_terms(s)
    positions = s.batch * s.out[0] * s.out[1]
    block = (16, 128)
    columns = x.new_empty((s.models, count, positions))
    programs.unfold[triton.cdiv(positions, block[1]), s.models, triton.cdiv(count, block[0])](
        x, columns, x.stride(0), s.batch, count, **shape_constants(s), BK=block[0], BM=block[1]
    )
    return columns


def _fold(columns: Tensor, x: Tensor, s: Shape) -> None:
    """Add the elements of columns to the positions that they were unfolded from."""
    block = 256
    size = s.batch * s.channels * s.height * s.width
    programs.fold[triton.cdiv(size, block), s.models](
        columns, x, s.batch, num_terms(s), **shape_constants(s), BLOCK=block
    )
