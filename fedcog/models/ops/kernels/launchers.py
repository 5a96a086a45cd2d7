"""Launchers of the Triton kernels for convolutions; import them only where Triton is installed.

Float32 products are computed on tensor cores from three terms (`tf32x3`, as exact as float32), or
from one term with TF32. 16-bit products are native. Sums are always float32.
"""

from typing import Any

import torch
import triton
from torch import Tensor

from fedcog.models.ops.kernels import programs, taps
from fedcog.models.ops.kernels.shapes import Blocks, Shape


def shape_constants(shape: Shape) -> dict[str, Any]:
    """Return the sizes of a convolution by their names in Triton programs."""
    (P, Q) = shape.out
    s = shape
    return {
        "C": s.channels,
        "H": s.height,
        "W": s.width,
        "O": s.outputs,
        "R": s.rows,
        "S": s.columns,
        "P": P,
        "Q": Q,
        "SH": s.stride[0],
        "SW": s.stride[1],
        "PH": s.padding[0],
        "PW": s.padding[1],
        "DH": s.dilation[0],
        "DW": s.dilation[1],
    }


def _precision(x: Tensor, tf32: bool) -> str:
    return "tf32" if tf32 or x.dtype != torch.float32 else "tf32x3"


def convolve(x: Tensor, w: Tensor, shape: Shape, blocks: Blocks, tf32: bool) -> Tensor:
    """Convolve images; a tensor common to all models has a model stride of 0.

    Args:
        x: Images `(M, N, C, H, W)`.
        w: Weights `(M, O, C, R, S)`.
        shape: Shape of the convolution.
        blocks: Block sizes.
        tf32: Whether products may be computed in TF32.

    Returns:
        Images `(M, N, O, P, Q)`.
    """
    (P, Q) = shape.out
    s = shape
    y = x.new_empty((s.models, s.batch, s.outputs, P, Q))
    if not blocks.stages:
        return _convolve_directly(x, w, y, s, blocks, w.stride()[1:3], reverse=False)
    grid = (
        triton.cdiv(s.batch * P * Q, blocks.rows),
        s.models,
        triton.cdiv(s.outputs, blocks.columns),
    )
    program = programs.convolve
    if s.channels % blocks.terms == 0:
        program = taps.convolve
        w = _pack(w, s, (0, 1, 3, 2))
    program[grid](
        x, w, y, x.stride(0), w.stride(0), y.stride(0), s.batch, **shape_constants(s),
        BM=blocks.rows, BN=blocks.columns, BK=blocks.terms, PRECISION=_precision(x, tf32),
        num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip
    return y


def convolve_input(g: Tensor, w: Tensor, shape: Shape, blocks: Blocks, tf32: bool) -> Tensor:
    """Compute the gradient with respect to images; weights may be common to all models.

    Args:
        g: Gradient with respect to the output, `(M, N, O, P, Q)`.
        w: Weights `(M, O, C, R, S)`.
        shape: Shape of the convolution.
        blocks: Block sizes.
        tf32: Whether products may be computed in TF32.

    Returns:
        Gradients `(M, N, C, H, W)`.
    """
    s = shape
    x = g.new_empty((s.models, s.batch, s.channels, s.height, s.width))
    if not blocks.stages:
        strides = (w.stride(2), w.stride(1))
        return _convolve_directly(g, w, x, s.transposed, blocks, strides, reverse=True)
    if s.outputs % blocks.terms == 0 and s.dilation == (1, 1):
        return _input_by_taps(g, w, x, s, blocks, tf32)
    if s.is_transposable:
        flipped = _distinct(w, s).transpose(1, 2).flip(3, 4).contiguous()
        flipped = flipped.expand(s.models, *flipped.shape[1:])
        return convolve(g, flipped, s.transposed, blocks, tf32)
    positions = triton.cdiv(s.batch * s.height * s.width, blocks.rows)
    programs.convolve_input[positions, s.models, triton.cdiv(s.channels, blocks.columns)](
        g, w, x, g.stride(0), w.stride(0), x.stride(0), s.batch, **shape_constants(s),
        BM=blocks.rows, BN=blocks.columns, BK=blocks.terms, PRECISION=_precision(g, tf32),
        num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip
    return x


def _input_by_taps(g: Tensor, w: Tensor, x: Tensor, s: Shape, blocks: Blocks, tf32: bool) -> Tensor:
    """Compute the gradient with respect to images by the programs for many channels."""
    (down, across) = s.stride
    w = _pack(w, s, (0, 2, 3, 1))
    count = triton.cdiv(
        s.batch * triton.cdiv(s.height, down) * triton.cdiv(s.width, across), blocks.rows
    )
    taps.convolve_input[count * down * across, s.models, triton.cdiv(s.channels, blocks.columns)](
        g, w, x, g.stride(0), w.stride(0), x.stride(0), s.batch, count, **shape_constants(s),
        BM=blocks.rows, BN=blocks.columns, BK=blocks.terms, PRECISION=_precision(g, tf32),
        num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip
    return x


def _distinct(w: Tensor, s: Shape) -> Tensor:
    """Return the distinct weights: one model's if they are common to all models."""
    return w if w.stride(0) or s.models == 1 else w[:1]


def _pack(w: Tensor, s: Shape, order: tuple[int, ...]) -> Tensor:
    """Permute weights `(models, outputs, channels, taps)`; common weights stay common."""
    packed = _distinct(w, s).flatten(3).permute(order).contiguous()
    return packed.expand(s.models, *packed.shape[1:])


def _convolve_directly(
    x: Tensor,
    w: Tensor,
    y: Tensor,
    s: Shape,
    blocks: Blocks,
    strides: tuple[int, ...],
    reverse: bool,
) -> Tensor:
    """Convolve few channels tap by tap, without tensor cores."""
    taps = s.rows * s.columns
    outputs = triton.cdiv(s.outputs, blocks.columns) * blocks.columns
    num_distinct = len(_distinct(w, s))
    packed_shape = (num_distinct, s.channels, taps, outputs)
    packed = torch.empty(packed_shape, dtype=torch.float32, device=x.device)
    size = s.channels * taps * outputs
    programs.pack[triton.cdiv(size, 256), num_distinct](
        w, packed, w.stride(0), *strides, size,
        C=s.channels, N=outputs, O=s.outputs, T=taps, REVERSED=reverse, BLOCK=256,
    )  # fmt: skip
    positions = triton.cdiv(s.batch * s.out[0] * s.out[1], blocks.rows)
    programs.direct[positions, s.models, outputs // blocks.columns](
        x, packed, y, x.stride(0), size if num_distinct > 1 else 0, y.stride(0), s.batch,
        **shape_constants(s), N=outputs, BM=blocks.rows, BN=blocks.columns, num_warps=blocks.warps,
    )  # fmt: skip
    return y


def convolve_weight(g: Tensor, x: Tensor, shape: Shape, blocks: Blocks, tf32: bool) -> Tensor:
    """Compute the gradient with respect to weights; images may be common to all models.

    Programs sum over parts of the positions, and the parts are added afterwards.

    Args:
        g: Gradient with respect to the output, `(M, N, O, P, Q)`.
        x: Images `(M, N, C, H, W)`.
        shape: Shape of the convolution.
        blocks: Block sizes.
        tf32: Whether products may be computed in TF32.

    Returns:
        Gradients `(M, O, C, R, S)`.
    """
    (P, Q) = shape.out
    s = shape
    program = programs.convolve_weight if s.channels % blocks.rows else taps.convolve_weight
    tiles = triton.cdiv(s.channels * s.rows * s.columns, blocks.rows) * triton.cdiv(
        s.outputs, blocks.columns
    )
    parts = min(
        max(1, TARGET_PROGRAMS // (s.models * tiles)),
        triton.cdiv(s.batch * P * Q, 4 * blocks.terms),
    )
    share = triton.cdiv(triton.cdiv(s.batch * P * Q, parts), blocks.terms) * blocks.terms
    parts = triton.cdiv(s.batch * P * Q, share)
    w = torch.empty(
        (s.models, parts, s.outputs, s.channels, s.rows, s.columns),
        dtype=torch.float32,
        device=g.device,
    )
    program[tiles * parts, s.models](
        g, x, w, g.stride(0), x.stride(0), parts, s.batch, **shape_constants(s), SHARE=share,
        BM=blocks.rows, BN=blocks.columns, BK=blocks.terms, PRECISION=_precision(g, tf32),
        num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip
    return w.sum(1).to(g.dtype) if parts > 1 else w[:, 0].to(g.dtype)


TARGET_PROGRAMS = 1056
"""Approximate number of programs of a weight gradient: eight per multiprocessor of a large GPU."""

LAUNCHERS = {"output": convolve, "input": convolve_input, "weight": convolve_weight}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
