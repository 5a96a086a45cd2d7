"""Augment training images with a function of your own, and keyed random numbers.

python examples/own_augmentation.py
"""

import torch
import torch.nn.functional as F

import fedcog
from fedcog import KeyedRandom


def rotate_and_fade(x: torch.Tensor, random: KeyedRandom) -> torch.Tensor:
    """Change one client's batch of images (B, C, H, W) in [0, 1]; return the same shape.

    All random numbers come from `random`, so runs repeat and resume exactly, whether clients train
    one by one, at once, in worker processes, as CUDA graphs or on Flower nodes.
    """
    count = len(x)
    angle = 0.5 * (random.uniform(count) - 0.5)  # up to 14 degrees
    rotation = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], 1)
    matrix = F.pad(rotation.reshape(count, 2, 2), (0, 1)).to(x.dtype)
    grid = F.affine_grid(matrix, list(x.shape), align_corners=False)
    x = F.grid_sample(x, grid, align_corners=False)
    brightness = 0.8 + 0.4 * random.uniform(count, 1, 1, 1)
    return (x * brightness.to(x.dtype)).clamp(0, 1)


experiment = fedcog.Experiment(
    dataset="digits", partition="iid", clients=4, rounds=8, local_steps=20, lr=0.05, threads=1
)
for name, augmentation in {"plain": None, "augmented": rotate_and_fade}.items():
    run = fedcog.run(
        experiment, f"runs/augmentation/{name}", augmentation=augmentation, resume=True
    )
    print(f"{name}: last {run.last:.1%}")
