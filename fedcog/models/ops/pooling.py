"""Max pooling over windows that tile an image, in plain operators.

A compiler can fuse these operators; torch's own gradient scatters into zeros, which it cannot fuse.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_WINDOW_SIZE = 8
"""Largest number of elements of a window; compilers do not unroll larger ones."""


def max_pool(x: Tensor, rows: int, columns: int) -> Tensor:
    """Take the maximum over each window; a remainder at the edges is ignored.

    Args:
        x: Images `(..., H, W)`.
        rows: Height of a window.
        columns: Width of a window.

    Returns:
        Maxima `(..., H // rows, W // columns)`.
    """
    values, _ = MaxPool.apply(x, rows, columns)  # type: ignore[no-untyped-call]
    maxima: Tensor = values
    return maxima


class MaxPool(torch.autograd.Function):
    """The maximum of each window, and its position; of equal values, the first counts."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        """Compute maxima and their positions.

        Args:
            x: Images `(..., H, W)`.
            rows: Height of a window.
            columns: Width of a window.

        Returns:
            Maxima and their positions within windows, both `(..., H // rows, W // columns)`.
        """
        down = x.shape[-2] // rows
        across = x.shape[-1] // columns
        cropped = x[..., : down * rows, : across * columns]
        windows = cropped.reshape(*x.shape[:-2], down, rows, across, columns)
        value, position = windows.movedim(-3, -2).flatten(-2).max(-1)
        return value, position.to(torch.int8)

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Tensor, int, int], output: tuple[Tensor, Tensor]
    ) -> None:
        """Save what the gradient needs: the positions only.

        Args:
            ctx: Context of the call.
            inputs: Arguments of `forward`.
            output: Results of `forward`.
        """
        ctx.window = inputs[1:]
        ctx.size = inputs[0].shape[-2:]
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        """Assign the gradient of each window to its maximum.

        Args:
            ctx: Context of the call.
            grad: Gradient with respect to the maxima.

        Returns:
            Gradient with respect to the images.
        """
        (position,) = ctx.saved_tensors
        rows, columns = ctx.window
        height, width = ctx.size
        elements = torch.arange(rows * columns, dtype=position.dtype, device=position.device)
        zero = torch.zeros((), dtype=grad.dtype, device=grad.device)
        spread = torch.where(position[..., None] == elements, grad[..., None], zero)
        windows = spread.reshape(*position.shape, rows, columns)
        grad_x = windows.movedim(-3, -2).flatten(-4, -3).flatten(-2)
        padding = (0, width - grad_x.shape[-1], 0, height - grad_x.shape[-2])
        return F.pad(grad_x, padding), None, None
