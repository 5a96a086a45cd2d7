"""Stored examples as a model sees them: picked, cropped and flipped, scaled and normalised."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import custom_op

try:
    if not (torch.version.cuda or torch.version.hip):
        raise ImportError("no GPU for kernels, and Triton takes a while to load")
    from fedcog.kernels import pictures as kernels
except ImportError:  # or there is no Triton here
    kernels = None  # type: ignore[assignment]

PADDING = 4


def inputs(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Examples in the precision of `mean`: images scaled to [0, 1]; normalised, if there is anything to do it by."""
    if x.is_floating_point() and not mean.numel():
        return x.to(mean.dtype)
    scaled = x.to(mean.dtype, copy=True)
    if not x.is_floating_point():
        scaled.div_(255)
    return scaled.sub_(mean).div_(std) if mean.numel() else scaled


def examples(stored: Tensor, index: Tensor, moves: Tensor | None, mean: Tensor, std: Tensor) -> Tensor:
    """The stored examples at `index` (of any shape), each moved as `moves` (down, right, flip) says, as inputs."""
    if stored.device.type == "cuda" and moves is not None and kernels is not None and mean.dtype == torch.float32:
        made: Tensor = moved_images(stored, index, moves, mean, std)
        return made
    x = stored[index.flatten()]
    if moves is not None:
        x = _move(x, moves.reshape(-1, 3))
    return inputs(x, mean, std).reshape(*index.shape, *x.shape[1:])


@custom_op("fedcog::moved_images", mutates_args=())
def moved_images(stored: Tensor, index: Tensor, moves: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """`examples` of moved images on a GPU, in one kernel."""
    return kernels.moved_images(stored, index, moves, mean, std, PADDING)


@moved_images.register_fake
def _(stored: Tensor, index: Tensor, moves: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    return mean.new_empty((*index.shape, *stored.shape[1:]))


def _move(x: Tensor, moves: Tensor) -> Tensor:
    """Each image cropped at its own place out of a black frame, and mirrored where asked: one gather for the batch."""
    count, channels, height, width = x.shape
    framed = F.pad(x, (PADDING,) * 4)
    across = torch.arange(width, device=x.device)
    down, right, flip = moves[:, :1], moves[:, 1:2], moves[:, 2:]
    rows = torch.arange(height, device=x.device) + down
    columns = torch.where(flip == 1, width - 1 - across, across) + right
    places = rows[:, :, None] * framed.shape[-1] + columns[:, None, :]
    pixels = framed.flatten(2).gather(2, places.flatten(1)[:, None].expand(-1, channels, -1))
    return pixels.reshape(count, channels, height, width)
