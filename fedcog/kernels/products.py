"""Convolutions of many models as plain matrix products, by Triton and cuBLAS; imported only where Triton is.

What every weight meets at every position is laid out in columns, the product is left to cuBLAS, and a gradient by the
input is added up out of columns again. That pays where images are small and channels many, or strides leave most of a
gradient's terms out: nothing is multiplied that is no term.
"""

from collections.abc import Iterator

import torch
import triton
from torch import Tensor

from fedcog.kernels import programs
from fedcog.kernels.convolution import numbers
from fedcog.kernels.shapes import Shape

ROOM = 2**28
"""Columns' numbers that are laid out at a time, at most: models take turns, where all of theirs are more."""


def multiply(kind: str, one: Tensor, other: Tensor, shape: Shape) -> Tensor:
    """The convolution ("output"), its gradient by the input or by the weight, of all models."""
    s, parts = shape, _parts(kind, shape)
    if parts > 1:
        finer = s._replace(models=parts, batch=s.batch // parts)
        found = multiply(kind, one.reshape(parts, -1, *one.shape[2:]), other.expand(parts, *other.shape[1:]), finer)
        return found.reshape(1, s.batch, *found.shape[2:])
    if kind == "output":
        y = one.new_empty((s.models, s.outputs, s.batch, *s.out))
        for some, own in _turns(s):
            torch.bmm(other[some].flatten(2), _unfolded(one[some], own), out=y[some].flatten(2))
        return y.transpose(1, 2).contiguous()
    g = one.transpose(1, 2).flatten(2)
    if kind == "input":
        x = one.new_empty((s.models, s.batch, s.channels, s.height, s.width))
        for some, own in _turns(s):
            _fold(torch.bmm(other[some].flatten(2).transpose(1, 2), g[some]), x[some], own)
        return x
    w = one.new_empty((s.models, s.outputs, s.channels, s.rows, s.columns))
    for some, own in _turns(s):
        torch.bmm(g[some], _unfolded(other[some], own).transpose(1, 2), out=w[some].flatten(2))
    return w


def terms(shape: Shape) -> int:
    """How many weights an output has."""
    return shape.channels * shape.rows * shape.columns


def fits(kind: str, shape: Shape) -> bool:
    """Is there room for one model's columns, or for those of a part of its examples?"""
    return _each(shape) <= ROOM * _parts(kind, shape)


def _each(shape: Shape) -> int:
    """The numbers in one model's columns."""
    return terms(shape) * shape.batch * shape.out[0] * shape.out[1]


def _parts(kind: str, shape: Shape) -> int:
    """In how many parts one model's examples are taken as if each part were a model's; halves are halved."""
    parts = 1
    while shape.models == 1 and kind != "weight" and _each(shape) > ROOM * parts and not shape.batch % (2 * parts):
        parts *= 2
    return parts


def _turns(shape: Shape) -> Iterator[tuple[slice, Shape]]:
    """Models that take their turn together, and the shape of their part."""
    size = max(1, ROOM // _each(shape))
    for start in range(0, shape.models, size):
        end = min(start + size, shape.models)
        yield slice(start, end), shape._replace(models=end - start)


def _unfolded(x: Tensor, s: Shape) -> Tensor:
    """[models, weights of an output, positions]."""
    count, places, block = terms(s), s.batch * s.out[0] * s.out[1], (16, 128)
    columns = x.new_empty((s.models, count, places))
    programs.unfold[triton.cdiv(places, block[1]), s.models, triton.cdiv(count, block[0])](
        x, columns, x.stride(0), s.batch, count, **numbers(s), BK=block[0], BM=block[1]
    )
    return columns


def _fold(columns: Tensor, x: Tensor, s: Shape) -> None:
    block = 256
    size = s.batch * s.channels * s.height * s.width
    programs.fold[triton.cdiv(size, block), s.models](columns, x, s.batch, terms(s), **numbers(s), BLOCK=block)
