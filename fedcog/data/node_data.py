"""The local examples of one federation node: a folder of images, a NumPy file, or a function."""

import importlib
import math
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from fedcog.data.datasets import DataError, Dataset, Values, from_arrays
from fedcog.data.folders import find_images, read_images
from fedcog.data.sources.array_files import read_arrays

MAX_INPUT_NUMBERS = 1 << 26
"""Most numbers of one input that a server accepts in its settings."""
NORMALIZATION = 0.5
"""Mean and standard deviation of every channel.

All nodes must normalize alike, and no node knows the statistics of all data.
"""


def read(location: str, classes: Sequence[str]) -> Dataset:
    """Read the examples of a node.

    Args:
        location: A folder with one folder of images per class, a .npz file with arrays `x` and
            `y`, or MODULE:FUNCTION, which is imported and called, and returns (x, y).
        classes: Names of all classes of the federation.

    Returns:
        A data set whose training set and test set both are the node's examples.

    Raises:
        DataError: If `classes` or `location` is empty, or the examples cannot be read.
    """
    if not classes:
        raise DataError(
            "no classes are given: name all of them in the settings, classes = 'cat,dog'."
        )
    if not location:
        raise DataError(
            "no location of this node's examples is given: "
            "give a folder, a .npz file or MODULE:FUNCTION."
        )
    path = Path(location).expanduser()
    x: Values
    y: Values
    if path.is_dir():
        x, y = _read_folder(path, classes)
    elif path.suffix == ".npz":
        x, y = _read_numpy(path)
    elif re.fullmatch(r"[\w.]+:\w+", location):
        x, y = _call_function(location)
    else:
        raise DataError(
            f"there is no folder {path}, and it is neither a .npz file nor MODULE:FUNCTION."
        )
    dataset = from_arrays(x, y, x, y, classes=classes)
    if dataset.mean:
        statistics = (NORMALIZATION,) * len(dataset.mean)
        images = dataset.train_x
        dataset = from_arrays(
            images, y, images, y, classes=classes, mean=statistics, std=statistics
        )
    return dataset


def without_examples(shape: str, classes: Sequence[str]) -> Dataset:
    """Make the data set of a server that has no examples: one blank input, which is not used.

    Args:
        shape: Shape of one input, such as "3x32x32" for images or "12" for vectors.
        classes: Names of all classes of the federation.

    Returns:
        A data set without test examples.

    Raises:
        DataError: If the shape is not valid.
    """
    if not re.fullmatch(r"\d{1,6}(x\d{1,6}){0,3}", shape):
        raise DataError(
            f"shape is {shape!r}: give the shape of one input, such as 3x32x32 for color images."
        )
    sizes = tuple(int(part) for part in shape.split("x"))
    if not 0 < math.prod(sizes) <= MAX_INPUT_NUMBERS:
        raise DataError(f"shape is {shape}: give 1 to {MAX_INPUT_NUMBERS:,} numbers per input.")
    dtype = torch.uint8 if len(sizes) == 3 else torch.float32
    statistics = (NORMALIZATION,) * sizes[0] if len(sizes) == 3 else None
    return from_arrays(
        torch.zeros(1, *sizes, dtype=dtype),
        torch.zeros(1, dtype=torch.int64),
        classes=list(classes),
        mean=statistics,
        std=statistics,
    )


def _read_folder(folder: Path, classes: Sequence[str]) -> tuple[Tensor, list[str]]:
    unknown = sorted(
        entry.name for entry in folder.iterdir() if entry.is_dir() and entry.name not in classes
    )
    if unknown:
        raise DataError(
            f"{folder / unknown[0]} is not a class of this federation, "
            f"which has {', '.join(classes)}."
        )
    files = [(file, name) for name in classes for file in find_images(folder, name)]
    if not files:
        raise DataError(
            f"{folder} holds no images in folders named like classes, such as "
            f"{folder / classes[0]}."
        )
    return read_images([file for file, _ in files]), [name for _, name in files]


def _read_numpy(path: Path) -> tuple[Values, Values]:
    arrays = read_arrays(path)
    for name in ("x", "y"):
        if name not in arrays:
            raise DataError(
                f"{path} holds no array called {name}: "
                f"save it with np.savez({path.name!r}, x=..., y=...)."
            )
    return arrays["x"], arrays["y"]


def _call_function(location: str) -> tuple[Values, Values]:
    module, name = location.split(":")
    try:
        x, y = getattr(importlib.import_module(module), name)()
    except Exception as error:
        raise DataError(
            f"{location} did not return (x, y): {type(error).__name__}: {error}."
        ) from error
    return x, y
