"""One party's own examples, from wherever it keeps them: a folder of images, a NumPy file, or a Python function."""

import importlib
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from fedcog.data.datasets import DataError, Dataset, Values, from_arrays
from fedcog.data.folders import decoded, found

MIDDLE = 0.5  # of all images: what they are normalised by must be the same everywhere, and nobody knows everybody's


def read(place: str, classes: Sequence[str]) -> Dataset:
    """The examples at a place, as both halves of a data set; `classes` names all there are, here or elsewhere.

    A folder holds a folder for each class, named like it, with images of one size in it. A .npz file holds `x` and
    `y`. MODULE:FUNCTION is imported and called, and gives (x, y).
    """
    if not classes:
        raise DataError("nobody has said which classes there are: name them all in the settings, classes = 'cat,dog'.")
    path = Path(place).expanduser()
    if not place:
        raise DataError(
            "nobody has said where this party's examples lie: give a folder, a .npz file or MODULE:FUNCTION."
        )
    x: Values
    y: Values
    if path.is_dir():
        x, y = _folder(path, classes)
    elif path.suffix == ".npz":
        x, y = _numpy(path)
    elif re.fullmatch(r"[\w.]+:\w+", place):
        x, y = _function(place)
    else:
        raise DataError(f"there is no folder {path}, and it is no .npz file and no MODULE:FUNCTION either.")
    dataset = from_arrays(x, y, x, y, classes=classes)
    if dataset.mean:
        same = (MIDDLE,) * len(dataset.mean)
        dataset = from_arrays(dataset.train_x, y, dataset.train_x, y, classes=classes, mean=same, std=same)
    return dataset


def _folder(folder: Path, classes: Sequence[str]) -> tuple[Tensor, list[str]]:
    strangers = sorted(one.name for one in folder.iterdir() if one.is_dir() and one.name not in classes)
    if strangers:
        raise DataError(f"{folder / strangers[0]} is no class of this federation, which has {', '.join(classes)}.")
    files = [(file, name) for name in classes for file in found(folder, name)]
    if not files:
        raise DataError(f"{folder} holds no images in folders named like classes, such as {folder / classes[0]}.")
    return decoded([file for file, _ in files]), [name for _, name in files]


def _numpy(path: Path) -> tuple[Values, Values]:
    try:
        with np.load(path, allow_pickle=False) as file:
            return file["x"], file["y"]
    except KeyError as error:
        raise DataError(
            f"{path} holds no array called {error}: save it with np.savez({path.name!r}, x=..., y=...)."
        ) from None
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path} cannot be read: {error}.") from error


def _function(place: str) -> tuple[Values, Values]:
    module, name = place.split(":")
    try:
        x, y = getattr(importlib.import_module(module), name)()
    except Exception as error:
        raise DataError(f"{place} gave no (x, y): {type(error).__name__}: {error}.") from error
    return x, y
