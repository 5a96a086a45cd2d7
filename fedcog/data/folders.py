"""Folders of pictures, one folder for each class, as a data set."""

from __future__ import annotations

import struct
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcog.data.datasets import DataError, Dataset, from_arrays

PICTURES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp"}
LARGEST = 1 << 26  # pixels of one picture, before it is decoded
MOST = 1 << 31  # bytes of all pictures, decoded
EVERY = 5  # without a folder of tests, every fifth picture of a class is one


def from_folder(
    train: str | Path,
    test: str | Path | None = None,
    *,
    size: int | tuple[int, int] | None = None,
    classes: Sequence[str] | None = None,
    users: Callable[[Path], Hashable] | None = None,
    **keywords: Any,
) -> Dataset:
    """Your own pictures as a data set: a folder that holds a folder for each class, with its pictures at any depth.

    Without a `test` folder of the same form, every fifth picture of each class, by name, is for testing. Pictures are
    of one size, or are brought to `size`, (height, width) or one number for both. If all are grey they have one
    channel, else three. `classes` are all folders' names, in order; of those you give, other folders are left out.
    `users` tells from a picture's path whose it is, for `partition="natural"`. Other keywords: as in `from_arrays`.
    """
    places = [Path(train)] if test is None else [Path(train), Path(test)]
    names = sorted({name for place in places for name in _in(place)}) if classes is None else list(classes)
    parts = [[(file, name) for name in names for file in found(place, name)] for place in places]
    if test is None:
        every = [(file, name) for name in names for file in found(places[0], name)[EVERY - 1 :: EVERY]]
        taken = {file for file, _ in every}
        parts = [[one for one in parts[0] if one[0] not in taken], every]
    if not all(parts):
        few = f": at least {EVERY} of a class, for every {EVERY}th is for testing" if test is None else ""
        raise DataError(
            f"{places[0] if not parts[0] else places[-1]} holds too few pictures in folders of classes{few}."
        )
    x = decoded([file for part in parts for file, _ in part], size)
    labels = [[name for _, name in part] for part in parts]
    owners = None if users is None else [users(file) for file, _ in parts[0]]
    cut = len(parts[0])
    return from_arrays(x[:cut], labels[0], x[cut:], labels[1], classes=names, users=owners, **keywords)


def _in(folder: Path) -> list[str]:
    """The names of the classes that a folder holds."""
    try:
        return [one.name for one in folder.iterdir() if one.is_dir() and not one.name.startswith(".")]
    except OSError as error:
        raise DataError(f"{folder} is no folder that can be read: {error.strerror or error}.") from error


def found(folder: Path, name: str) -> list[Path]:
    """The pictures of a class, by name."""
    inside = sorted((folder / name).rglob("*"))
    return [file for file in inside if file.suffix.lower() in PICTURES and file.is_file()]


def decoded(files: Sequence[Path], size: int | tuple[int, int] | None = None) -> Tensor:
    """Pictures as bytes [n, C, H, W]. What each would take is told by its head, before anything is decoded."""
    from PIL import Image  # which a program without pictures need not load

    faults = (OSError, ValueError, SyntaxError, EOFError, struct.error, Image.DecompressionBombError)
    wanted = (size, size) if isinstance(size, int) else size
    if wanted is not None and min(wanted) < 1:
        raise DataError(f"size is {size}: give a height and a width of 1 or more.")
    grey, shape = True, wanted
    for file in files:
        try:
            with Image.open(file) as image:
                across, down, mode = image.width, image.height, image.mode
        except faults as error:
            raise DataError(f"{file} is no image that can be read: {error}.") from error
        if across * down > LARGEST:
            raise DataError(f"{file} has {across} x {down} pixels, more than {LARGEST:,}: make it smaller.")
        if mode[0] in "IF":
            raise DataError(f"{file} has more than 8 bits a channel (mode {mode}): save it with 8.")
        shape = shape or (down, across)
        if wanted is None and (down, across) != shape:
            here, there = f"{down}x{across}", f"{shape[0]}x{shape[1]}"
            raise DataError(f"{file} is {here}, and {files[0]} is {there}: bring all images to one size.")
        grey = grey and mode in ("1", "L")
    height, width = shape or (0, 0)
    channels = 1 if grey else 3
    if len(files) * channels * height * width > MOST:
        raise DataError(f"{len(files):,} pictures of {height}x{width} are more than {MOST:,} bytes: make them smaller.")
    pixels = np.empty((len(files), channels, height, width), np.uint8)
    for place, file in enumerate(files):
        try:
            with Image.open(file) as image:
                plain = image.convert("L" if grey else "RGB")
        except faults as error:
            raise DataError(f"{file} is no image that can be read: {error}.") from error
        if plain.size != (width, height):
            plain = plain.resize((width, height), Image.Resampling.BOX)
        pixels[place] = np.asarray(plain).reshape(height, width, channels).transpose(2, 0, 1)
    return torch.from_numpy(pixels)
