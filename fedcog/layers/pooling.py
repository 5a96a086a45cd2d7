"""Max pooling of windows that tile an image, in plain operators: torch's own scatters its gradient into zeros, which a
compiler can fuse with nothing."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

TAPS = 8  # in a larger window, more than a compiler unrolls


def max_pool(x: Tensor, rows: int, columns: int) -> Tensor:
    """The largest value of each window of [..., height, width]; what is left over at the edges is left out."""
    found: tuple[Tensor, Tensor] = Largest.apply(x, rows, columns)  # type: ignore[no-untyped-call]
    return found[0]


class Largest(torch.autograd.Function):
    """Each window's largest value, and which of its places that is: the first, if there are several."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        """Windows side by side, each with its places in one row."""
        down, across = x.shape[-2] // rows, x.shape[-1] // columns
        whole = x[..., : down * rows, : across * columns]
        tiled = whole.reshape(*x.shape[:-2], down, rows, across, columns)
        value, place = tiled.movedim(-3, -2).flatten(-2).max(-1)
        return value, place.to(torch.int8)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int, int], output: tuple[Tensor, Tensor]) -> None:
        """The places alone are needed again."""
        ctx.window, ctx.size = inputs[1:], inputs[0].shape[-2:]
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        """A window's gradient is its largest value's."""
        (place,), (rows, columns), (height, width) = ctx.saved_tensors, ctx.window, ctx.size
        taps = torch.arange(rows * columns, dtype=place.dtype, device=place.device)
        spread = torch.where(place[..., None] == taps, g[..., None], torch.zeros((), dtype=g.dtype, device=g.device))
        by_x = spread.reshape(*place.shape, rows, columns).movedim(-3, -2).flatten(-4, -3).flatten(-2)
        return F.pad(by_x, (0, width - by_x.shape[-1], 0, height - by_x.shape[-2])), None, None
