"""The networks that are available by name: those of `MODELS`, and of torchvision and timm.

To add a network, write a function that builds it, and an entry in `MODELS`.
"""

import contextlib
import math
from collections.abc import Callable

import torch
from torch import nn

from fedcog.models.checks import ModelError
from fedcog.models.initialization import initialize
from fedcog.models.libraries import build_from_library, is_library_name
from fedcog.models.resnet import resnet18, resnet18_gn


def cnn(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Two 5x5 convolutions and three linear layers: the paper's for Fashion-MNIST and CIFAR-10.

    Args:
        input_shape: Shape of one input, `(C, H, W)`.
        num_classes: Number of classes.

    Returns:
        The network.

    Raises:
        ValueError: If the images are too small.
    """
    channels, height, width = input_shape
    num_flat = 16 * _pooled_size(height, 5, 2) * _pooled_size(width, 5, 2)
    return nn.Sequential(
        nn.Conv2d(channels, 6, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(num_flat, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, num_classes),
    )


def cnn3(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Three 3x3 convolutions and two linear layers: the paper's network for CIFAR-100.

    Args:
        input_shape: Shape of one input, `(C, H, W)`.
        num_classes: Number of classes.

    Returns:
        The network.

    Raises:
        ValueError: If the images are too small.
    """
    channels, height, width = input_shape
    num_flat = 64 * _pooled_size(height, 3, 3) * _pooled_size(width, 3, 3)
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(num_flat, 128),
        nn.ReLU(),
        nn.Linear(128, num_classes),
    )


def small(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """A small convolutional network for 8x8 digits.

    Args:
        input_shape: Shape of one input, `(C, H, W)`.
        num_classes: Number of classes.

    Returns:
        The network.
    """
    channels, height, width = input_shape
    return nn.Sequential(
        nn.Conv2d(channels, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * (height // 4) * (width // 4), 32),
        nn.ReLU(),
        nn.Linear(32, num_classes),
    )


def mlp(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """One hidden layer of 128 units, for inputs of any shape.

    Args:
        input_shape: Shape of one input.
        num_classes: Number of classes.

    Returns:
        The network.
    """
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(math.prod(input_shape), 128),
        nn.ReLU(),
        nn.Linear(128, num_classes),
    )


def _pooled_size(size: int, kernel: int, times: int) -> int:
    """Return the size of an image after unpadded convolutions, each followed by 2x2 pooling."""
    for _ in range(times):
        size = (size - kernel + 1) // 2
    if size < 1:
        raise ValueError("the images are too small for its convolutions")
    return size


MODELS: dict[str, Callable[[tuple[int, ...], int], nn.Module]] = {
    "cnn": cnn,
    "cnn3": cnn3,
    "small": small,
    "mlp": mlp,
    "resnet18": resnet18,
    "resnet18-gn": resnet18_gn,
}
"""The networks by name; the first line of a function's docstring describes the network to users."""


def is_network_name(name: str) -> bool:
    """Return whether a name is in `MODELS`, or has the form of a library's, as `timm:NAME`."""
    return name in MODELS or is_library_name(name)


def build(name: str, input_shape: tuple[int, ...], num_classes: int, seed: int) -> nn.Module:
    """Build a network whose initial weights depend on the seed only.

    Args:
        name: Name of the network, in `MODELS` or of a library, such as `timm:resnet10t`.
        input_shape: Shape of one input.
        num_classes: Number of classes.
        seed: Seed of the initial weights.

    Returns:
        The network.

    Raises:
        ModelError: If the network does not fit the inputs.
    """
    if is_library_name(name):
        return build_from_library(name, input_shape, num_classes, seed)
    try:
        return initialize(lambda: MODELS[name](input_shape, num_classes), seed)
    except (RuntimeError, ValueError) as error:
        reason = str(error)
        if len(input_shape) != 3 and name != "mlp":
            reason = "it takes images, (C, H, W)"
        raise ModelError(
            f"model '{name}' cannot be built for inputs of shape {input_shape}: {reason}. "
            f"Choose another: {', '.join(_fitting(input_shape, num_classes)) or 'your own'}."
        ) from error


def _fitting(input_shape: tuple[int, ...], num_classes: int) -> list[str]:
    """Return the names of the networks that can be built for inputs of this shape."""
    names = []
    networks = MODELS if len(input_shape) == 3 else {"mlp": mlp}
    for name, build_network in networks.items():
        with contextlib.suppress(RuntimeError, ValueError), torch.device("meta"):
            build_network(input_shape, num_classes)
            names.append(name)
    return names
