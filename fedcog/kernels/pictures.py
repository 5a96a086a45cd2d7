"""Training images as a model sees them, by Triton; imported only where that is."""

import triton
from torch import Tensor

from fedcog.kernels import programs


def moved_images(stored: Tensor, index: Tensor, moves: Tensor, mean: Tensor, std: Tensor, padding: int) -> Tensor:
    """The stored uint8 images at `index`, each out of a black frame at its place, mirrored where asked, as inputs."""
    channels, height, width = stored.shape[1:]
    made = mean.new_empty((*index.shape, channels, height, width))
    size = channels * height * width
    block = min(1024, triton.next_power_of_2(size))
    programs.moved_images[index.numel(), triton.cdiv(size, block)](
        stored, index.contiguous(), moves.contiguous(), mean, std, made, C=channels, H=height, W=width,
        PADDING=padding, NORMAL=mean.numel() > 0, BLOCK=block,
    )  # fmt: skip
    return made
