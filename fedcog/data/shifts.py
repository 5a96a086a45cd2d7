"""What else may set clients' data apart: inputs turned, tinted or noisy, each client's in its own way; wrong labels."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedcog import streams
from fedcog.data.datasets import Dataset
from fedcog.data.rules import PartitionError

Shift = Literal["none", "rotation", "noise", "colour"]
Draw = np.random.Generator


def shifted(
    dataset: Dataset, shares: Sequence[Tensor], shift: Shift, strength: float, label_noise: float, seed: int
) -> Dataset:
    """The data set with every client's training examples changed in that client's own way; the test set stays.

    Each of its labels is replaced with probability `label_noise`, by one of the other classes.
    """
    if shift == "none" and not label_noise:
        return dataset
    if max(torch.cat(list(shares)).bincount().tolist(), default=0) > 1:
        raise PartitionError("clients share examples, and each would change them: set --shift none, --label-noise 0.")
    if label_noise and dataset.several:
        raise PartitionError("label noise is for examples of one label each: set --label-noise 0.")
    images = dataset.train_x.dim() == 4 and dataset.train_x.dtype == torch.uint8
    if shift in ("rotation", "colour") and not images:
        raise PartitionError(f"shift '{shift}' is for images, and these examples are none: choose noise, or none.")
    x, y = dataset.train_x.clone(), dataset.train_y.clone()
    span = 255.0 if images else float(x.max() - x.min()) or 1.0
    for client, own in enumerate(shares):
        draw = _generator(seed, client)
        if shift != "none":
            made = SHIFTS[shift]((x[own].float() if images else x[own]) / span, strength, draw) * span
            x[own] = (made.round().clamp(0, 255) if images else made).to(x.dtype)
        if label_noise:
            wrong = torch.from_numpy(draw.random(len(own)) < label_noise)
            others = torch.from_numpy(draw.integers(1, len(dataset.classes), len(own)))
            y[own] = torch.where(wrong, (y[own] + others) % len(dataset.classes), y[own])
    return dataclasses.replace(dataset, train_x=x, train_y=y, digest="")


def rotation(x: Tensor, strength: float, draw: Draw) -> Tensor:
    """All of a client's images turned by one angle, at most strength * 180 degrees either way; corners are black."""
    angle = math.pi * strength * float(draw.uniform(-1, 1))
    turn = torch.tensor([[math.cos(angle), -math.sin(angle), 0], [math.sin(angle), math.cos(angle), 0]])
    grid = F.affine_grid(turn.expand(len(x), 2, 3), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, align_corners=False)


def noise(x: Tensor, strength: float, draw: Draw) -> Tensor:
    """Gaussian noise on every number, of a deviation that is the client's: at most half of strength, of the range."""
    deviation = 0.5 * strength * float(draw.uniform(0, 1))
    return x + deviation * torch.from_numpy(draw.standard_normal(x.shape, dtype=np.float32)).to(x.dtype)


def colour(x: Tensor, strength: float, draw: Draw) -> Tensor:
    """Every channel scaled by the client's own factor, from 1 - strength to 1 + strength."""
    factors = torch.from_numpy(draw.uniform(1 - strength, 1 + strength, x.shape[1])).to(x.dtype)
    return (x * factors[:, None, None]).clamp(0, 1)


SHIFTS: dict[str, Callable[[Tensor, float, Draw], Tensor]] = {"rotation": rotation, "noise": noise, "colour": colour}


def _generator(seed: int, client: int) -> Draw:
    low, high = streams.key(seed, f"shift/{client}")
    return np.random.Generator(np.random.Philox(key=low | high << 32))
