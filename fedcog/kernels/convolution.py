"""Convolutions of many models at once, by Triton; imported only where that is.

Products are made in float32 on tensor cores from three terms (`tf32x3`: as exact as float32), from one with TF32, or
natively in 16 bits; sums are float32 always.
"""

from typing import Any

import torch
import triton
from torch import Tensor

from fedcog.kernels import programs, taps
from fedcog.kernels.shapes import Blocks, Shape


def numbers(shape: Shape) -> dict[str, Any]:
    """A shape by the names that programs have for its parts."""
    (P, Q), s = shape.out, shape
    return {
        **{"C": s.channels, "H": s.height, "W": s.width, "O": s.outputs, "R": s.rows, "S": s.columns, "P": P, "Q": Q},
        **{"SH": s.stride[0], "SW": s.stride[1], "PH": s.padding[0], "PW": s.padding[1]},
        **{"DH": s.dilation[0], "DW": s.dilation[1]},
    }


def _precision(x: Tensor, tf32: bool) -> str:
    return "tf32" if tf32 or x.dtype != torch.float32 else "tf32x3"


def convolve(x: Tensor, w: Tensor, shape: Shape, blocks: Blocks, tf32: bool) -> Tensor:
    """y, where x or w may be one for all models (a model stride of 0)."""
    (P, Q), s = shape.out, shape
    y = x.new_empty((s.models, s.batch, s.outputs, P, Q))
    if not blocks.stages:
        return _directly(x, w, y, s, blocks, w.stride()[1:3], reverse=False)
    grid = (triton.cdiv(s.batch * P * Q, blocks.rows), s.models, triton.cdiv(s.outputs, blocks.columns))
    program = programs.convolve
    if s.channels % blocks.terms == 0:
        program, w = taps.convolve, _packed(w, s, (0, 1, 3, 2))
    program[grid](
        x, w, y, x.stride(0), w.stride(0), y.stride(0), s.batch, **numbers(s),
        BM=blocks.rows, BN=blocks.columns, BK=blocks.terms, PRECISION=_precision(x, tf32),
        num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip
    return y


def convolve_input(g: Tensor, w: Tensor, shape: Shape, blocks: Blocks, tf32: bool) -> Tensor:
    """The gradient by x, where w may be one for all models."""
    s = shape
    x = g.new_empty((s.models, s.batch, s.channels, s.height, s.width))
    if not blocks.stages:
        return _directly(g, w, x, s.turned, blocks, (w.stride(2), w.stride(1)), reverse=True)
    if s.outputs % blocks.terms == 0 and s.dilation == (1, 1):
        return _input_by_taps(g, w, x, s, blocks, tf32)
    if s.turnable:
        own = w if w.stride(0) or s.models == 1 else w[:1]
        turned = own.transpose(1, 2).flip(3, 4).contiguous()
        return convolve(g, turned.expand(s.models, *turned.shape[1:]), s.turned, blocks, tf32)
    positions = triton.cdiv(s.batch * s.height * s.width, blocks.rows)
    programs.convolve_input[positions, s.models, triton.cdiv(s.channels, blocks.columns)](
        g, w, x, g.stride(0), w.stride(0), x.stride(0), s.batch, **numbers(s),
        BM=blocks.rows, BN=blocks.columns, BK=blocks.terms, PRECISION=_precision(g, tf32),
        num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip
    return x


def _input_by_taps(g: Tensor, w: Tensor, x: Tensor, s: Shape, blocks: Blocks, tf32: bool) -> Tensor:
    (down, across), w = s.stride, _packed(w, s, (0, 2, 3, 1))
    count = triton.cdiv(s.batch * triton.cdiv(s.height, down) * triton.cdiv(s.width, across), blocks.rows)
    taps.convolve_input[count * down * across, s.models, triton.cdiv(s.channels, blocks.columns)](
        g, w, x, g.stride(0), w.stride(0), x.stride(0), s.batch, count, **numbers(s),
        BM=blocks.rows, BN=blocks.columns, BK=blocks.terms, PRECISION=_precision(g, tf32),
        num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip
    return x


def _packed(w: Tensor, s: Shape, order: tuple[int, ...]) -> Tensor:
    """Weights [models, outputs, channels, taps] in another order; one for all models stays one."""
    own = w if w.stride(0) or s.models == 1 else w[:1]
    found = own.flatten(3).permute(order).contiguous()
    return found.expand(s.models, *found.shape[1:])


def _directly(
    x: Tensor, w: Tensor, y: Tensor, s: Shape, blocks: Blocks, strides: tuple[int, ...], reverse: bool
) -> Tensor:
    taps, outputs = s.rows * s.columns, triton.cdiv(s.outputs, blocks.columns) * blocks.columns
    own = s.models if w.stride(0) or s.models == 1 else 1
    packed = torch.empty((own, s.channels, taps, outputs), dtype=torch.float32, device=x.device)
    size = s.channels * taps * outputs
    programs.pack[triton.cdiv(size, 256), own](
        w, packed, w.stride(0), *strides, size,
        C=s.channels, N=outputs, O=s.outputs, T=taps, REVERSED=reverse, BLOCK=256,
    )  # fmt: skip
    positions = triton.cdiv(s.batch * s.out[0] * s.out[1], blocks.rows)
    programs.direct[positions, s.models, outputs // blocks.columns](
        x, packed, y, x.stride(0), size if own > 1 else 0, y.stride(0), s.batch, **numbers(s),
        N=outputs, BM=blocks.rows, BN=blocks.columns, num_warps=blocks.warps,
    )  # fmt: skip
    return y


def convolve_weight(g: Tensor, x: Tensor, shape: Shape, blocks: Blocks, tf32: bool) -> Tensor:
    """The gradient by w, where x may be one for all models; it is summed over positions in parts."""
    (P, Q), s = shape.out, shape
    program = programs.convolve_weight if s.channels % blocks.rows else taps.convolve_weight
    tiles = triton.cdiv(s.channels * s.rows * s.columns, blocks.rows) * triton.cdiv(s.outputs, blocks.columns)
    parts = min(max(1, PROGRAMS // (s.models * tiles)), triton.cdiv(s.batch * P * Q, 4 * blocks.terms))
    share = triton.cdiv(triton.cdiv(s.batch * P * Q, parts), blocks.terms) * blocks.terms
    parts = triton.cdiv(s.batch * P * Q, share)
    w = torch.empty((s.models, parts, s.outputs, s.channels, s.rows, s.columns), dtype=torch.float32, device=g.device)
    program[tiles * parts, s.models](
        g, x, w, g.stride(0), x.stride(0), parts, s.batch, **numbers(s), SHARE=share,
        BM=blocks.rows, BN=blocks.columns, BK=blocks.terms, PRECISION=_precision(g, tf32),
        num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip
    return w.sum(1).to(g.dtype) if parts > 1 else w[:, 0].to(g.dtype)


PROGRAMS = 1056
"""About how many programs a weight gradient is cut into: eight for each multiprocessor of a large GPU."""

KINDS = {"output": convolve, "input": convolve_input, "weight": convolve_weight}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
