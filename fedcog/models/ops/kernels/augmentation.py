"""Launcher of the Triton kernel for augmented images; import it only where Triton is installed."""

import triton
from torch import Tensor

from fedcog.models.ops.kernels import programs


def cropped_images(
    stored: Tensor, indices: Tensor, crops: Tensor, mean: Tensor, std: Tensor, padding: int
) -> Tensor:
    """Gather, crop, flip and normalize uint8 images.

    Args:
        stored: Stored images `(N, C, H, W)`, uint8.
        indices: Positions in `stored`, of any shape.
        crops: Row offset, column offset and flip per image, `(*indices.shape, 3)`.
        mean: Mean per channel; empty for no normalization.
        std: Standard deviation per channel.
        padding: Width in pixels of the black border that images are cropped from.

    Returns:
        Inputs `(*indices.shape, C, H, W)`, in the dtype of `mean`.
    """
    channels, height, width = stored.shape[1:]
    inputs = mean.new_empty((*indices.shape, channels, height, width))
    size = channels * height * width
    block = min(1024, triton.next_power_of_2(size))
    programs.moved_images[indices.numel(), triton.cdiv(size, block)](
        stored, indices.contiguous(), crops.contiguous(), mean, std, inputs,
        C=channels, H=height, W=width,
        PADDING=padding, NORMAL=mean.numel() > 0, BLOCK=block,
    )  # fmt: skip
    return inputs
