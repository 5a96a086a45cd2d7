"""Feature shift and label noise: changes to the training examples that differ by client."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedcog.core import rng
from fedcog.data.datasets import Dataset
from fedcog.data.partitions.base import PartitionError

Shift = Literal["none", "rotation", "noise", "colour"]
Generator = np.random.Generator


def apply_shift(
    dataset: Dataset,
    client_indices: Sequence[Tensor],
    shift: Shift,
    strength: float,
    label_noise: float,
    seed: int,
) -> Dataset:
    """Change the training examples of every client; the test set stays unchanged.

    Args:
        dataset: The data set.
        client_indices: Training examples of each client.
        shift: How inputs change; "none" leaves them unchanged.
        strength: Strength of the shift, from 0 to 1.
        label_noise: Probability that a label is replaced by a random other class.
        seed: The seed.

    Returns:
        The changed data set.

    Raises:
        PartitionError: If clients have examples in common, label noise meets multi-label examples,
            or the shift needs images.
    """
    if shift == "none" and not label_noise:
        return dataset
    if max(torch.cat(list(client_indices)).bincount().tolist(), default=0) > 1:
        raise PartitionError(
            "clients share examples, and each would change them: set --shift none, --label-noise 0."
        )
    if label_noise and dataset.multi_label:
        raise PartitionError("label noise is for examples of one label each: set --label-noise 0.")
    if shift != "none" and dataset.train_x.dtype == torch.int64:
        raise PartitionError(
            f"shift '{shift}' changes values, and these examples are tokens: set --shift none."
        )
    is_image = dataset.train_x.dim() == 4 and dataset.train_x.dtype == torch.uint8
    if shift in ("rotation", "colour") and not is_image:
        raise PartitionError(
            f"shift '{shift}' is for images, and these examples are not: choose noise, or none."
        )
    x = dataset.train_x.clone()
    y = dataset.train_y.clone()
    scale = _scale(dataset)
    num_classes = len(dataset.classes)
    for client, indices in enumerate(client_indices):
        generator = _generator(seed, client)
        if shift != "none":
            x[indices] = _shift(x[indices], shift, strength, scale, generator)
        if label_noise:
            is_wrong = torch.from_numpy(generator.random(len(indices)) < label_noise)
            offsets = torch.from_numpy(generator.integers(1, num_classes, len(indices)))
            y[indices] = torch.where(is_wrong, (y[indices] + offsets) % num_classes, y[indices])
    return dataclasses.replace(dataset, train_x=x, train_y=y, digest="")


def shift_inputs(
    dataset: Dataset, x: Tensor, client: int, shift: Shift, strength: float, seed: int
) -> Tensor:
    """Change further inputs of a client as `apply_shift` changes its training inputs.

    Args:
        dataset: The data set, before the shift.
        x: Stored inputs `(N, ...)`.
        client: The client.
        shift: How inputs change.
        strength: Strength of the shift, from 0 to 1.
        seed: The seed.

    Returns:
        Inputs of the same shape and dtype. Angle, noise level and color factors are the client's.
    """
    if shift == "none" or not len(x):
        return x
    return _shift(x, shift, strength, _scale(dataset), _generator(seed, client))


def _scale(dataset: Dataset) -> float:
    """Return the range of inputs."""
    x = dataset.train_x
    return 255.0 if x.dtype == torch.uint8 else float(x.max() - x.min()) or 1.0


def _shift(x: Tensor, shift: Shift, strength: float, scale: float, generator: Generator) -> Tensor:
    """Shift stored inputs of one client."""
    is_image = x.dtype == torch.uint8
    inputs = (x.float() if is_image else x) / scale
    shifted = SHIFTS[shift](inputs, strength, generator) * scale
    return (shifted.round().clamp(0, 255) if is_image else shifted).to(x.dtype)


def rotate(x: Tensor, strength: float, generator: Generator) -> Tensor:
    """Rotate all images of a client by one random angle; corners are black.

    Args:
        x: Images `(N, C, H, W)` in [0, 1].
        strength: The angle is at most `strength * 180` degrees in either direction.
        generator: Source of the angle.

    Returns:
        Images of the same shape.
    """
    angle = math.pi * strength * float(generator.uniform(-1, 1))
    cosine = math.cos(angle)
    sine = math.sin(angle)
    matrix = torch.tensor([[cosine, -sine, 0], [sine, cosine, 0]])
    grid = F.affine_grid(matrix.expand(len(x), 2, 3), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, align_corners=False)


def add_noise(x: Tensor, strength: float, generator: Generator) -> Tensor:
    """Add Gaussian noise with a random standard deviation per client.

    Args:
        x: Inputs `(N, ...)`, scaled to a range of 1.
        strength: The standard deviation is at most `strength / 2`.
        generator: Source of the standard deviation and the noise.

    Returns:
        Inputs of the same shape.
    """
    deviation = 0.5 * strength * float(generator.uniform(0, 1))
    noise = torch.from_numpy(generator.standard_normal(x.shape, dtype=np.float32))
    return x + deviation * noise.to(x.dtype)


def tint(x: Tensor, strength: float, generator: Generator) -> Tensor:
    """Scale every channel by a random factor per client.

    Args:
        x: Images `(N, C, H, W)` in [0, 1].
        strength: Factors lie between `1 - strength` and `1 + strength`.
        generator: Source of the factors.

    Returns:
        Images of the same shape, clipped to [0, 1].
    """
    factors = generator.uniform(1 - strength, 1 + strength, x.shape[1])
    return (x * torch.from_numpy(factors).to(x.dtype)[:, None, None]).clamp(0, 1)


SHIFTS: dict[str, Callable[[Tensor, float, Generator], Tensor]] = {
    "rotation": rotate,
    "noise": add_noise,
    "colour": tint,
}


def _generator(seed: int, client: int) -> Generator:
    low, high = rng.key(seed, f"shift/{client}")
    return np.random.Generator(np.random.Philox(key=low | high << 32))
