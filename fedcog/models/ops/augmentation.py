"""Model inputs from stored examples: gathered, cropped and flipped, scaled and normalized."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import custom_op

try:
    if not (torch.version.cuda or torch.version.hip):
        raise ImportError("no GPU for kernels, and Triton is slow to import")
    from fedcog.models.ops.kernels import augmentation as kernels
except ImportError:
    kernels = None  # type: ignore[assignment]

PADDING = 4
"""Width in pixels of the black border that images are cropped from."""


def normalize(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Scale images to [0, 1] and normalize them.

    Args:
        x: Stored examples `(N, ...)`, uint8 or floating; int64 tokens are returned unchanged.
        mean: Mean per channel, which broadcasts against `x`; empty for no normalization.
        std: Standard deviation per channel, of the same shape.

    Returns:
        Inputs of the same shape, in the dtype of `mean`.
    """
    if x.dtype == torch.int64:  # tokens
        return x
    if x.is_floating_point() and not mean.numel():
        return x.to(mean.dtype)
    scaled = x.to(mean.dtype, copy=True)
    if not x.is_floating_point():
        scaled.div_(255)
    return scaled.sub_(mean).div_(std) if mean.numel() else scaled


def gather_inputs(
    stored: Tensor, indices: Tensor, crops: Tensor | None, mean: Tensor, std: Tensor
) -> Tensor:
    """Gather stored examples, augment and normalize them.

    Args:
        stored: Stored examples `(N, ...)`.
        indices: Positions in `stored`, of any shape.
        crops: Row offset, column offset and flip per example, `(*indices.shape, 3)`, or None.
        mean: Mean per channel; empty for no normalization.
        std: Standard deviation per channel.

    Returns:
        Inputs `(*indices.shape, ...)`.
    """
    has_kernel = stored.device.type == "cuda" and kernels is not None
    if has_kernel and crops is not None and mean.dtype == torch.float32:
        inputs: Tensor = cropped_images(stored, indices, crops, mean, std)
        return inputs
    x = stored[indices.flatten()]
    if crops is not None:
        x = _crop(x, crops.reshape(-1, 3))
    return normalize(x, mean, std).reshape(*indices.shape, *x.shape[1:])


@custom_op("fedcog::moved_images", mutates_args=())
def cropped_images(
    stored: Tensor, indices: Tensor, crops: Tensor, mean: Tensor, std: Tensor
) -> Tensor:
    """Gather cropped and flipped images on a GPU, in one kernel.

    Args:
        stored: Stored images `(N, C, H, W)`, uint8.
        indices: Positions in `stored`, of any shape.
        crops: Row offset, column offset and flip per image, `(*indices.shape, 3)`.
        mean: Mean per channel; empty for no normalization.
        std: Standard deviation per channel.

    Returns:
        Inputs `(*indices.shape, C, H, W)`.
    """
    return kernels.cropped_images(stored, indices, crops, mean, std, PADDING)


@cropped_images.register_fake
def _(stored: Tensor, indices: Tensor, crops: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    return mean.new_empty((*indices.shape, *stored.shape[1:]))


def _crop(x: Tensor, crops: Tensor) -> Tensor:
    """Crop each image out of its padded self, and flip it if asked: one gather per batch."""
    count, channels, height, width = x.shape
    padded = F.pad(x, (PADDING,) * 4)
    positions = torch.arange(width, device=x.device)
    row_offset = crops[:, :1]
    column_offset = crops[:, 1:2]
    flip = crops[:, 2:]
    rows = torch.arange(height, device=x.device) + row_offset
    columns = torch.where(flip == 1, width - 1 - positions, positions) + column_offset
    pixels = rows[:, :, None] * padded.shape[-1] + columns[:, None, :]
    cropped = padded.flatten(2).gather(2, pixels.flatten(1)[:, None].expand(-1, channels, -1))
    return cropped.reshape(count, channels, height, width)
