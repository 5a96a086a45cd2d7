"""Data sets from folders of images, with one folder per class."""

from __future__ import annotations

import difflib
import struct
import warnings
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedcog.data.datasets import (
    DataError,
    Dataset,
    DataWarning,
    from_arrays,
    warn_about_untrained,
)

if TYPE_CHECKING:
    from PIL.Image import Image as PillowImage

IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp"}
IMAGE_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP")
"""Formats that are decoded, whatever a file is called: others may start programs."""
MAX_IMAGE_PIXELS = 1 << 26
"""Largest image that is decoded, in pixels."""
MAX_TOTAL_BYTES = 1 << 31
"""Largest size of all decoded images together."""
TEST_STRIDE = 5
"""Without a test folder, every image at this stride of a class is for testing."""
TRAIN_NAMES = ("train", "training")
TEST_NAMES = ("test", "testing", "val", "valid", "validation")
"""Names of the folders of a split; the first one that is there is used."""

LabeledFile = tuple[Path, str]


class ImageFormat(NamedTuple):
    """The common format of all images of a data set."""

    channels: int
    height: int
    width: int


def from_folder(
    train: str | Path,
    test: str | Path | None = None,
    *,
    size: int | tuple[int, int] | None = None,
    classes: Sequence[str] | None = None,
    users: Callable[[Path], Hashable] | None = None,
    **options: Any,
) -> Dataset:
    """Make a data set from a folder that holds one folder of images per class.

    Images may lie at any depth below the folder of their class. If all are grayscale they have one
    channel, else three. A folder that holds `train` and `test` (or `val`) with the folders of the
    classes below each is split so already.

    Args:
        train: Folder of training images, or of both splits.
        test: Folder of test images; without it, and without a `test` folder, every fifth image of
            each class, by name, is for testing.
        size: Height and width to resize to, or one number for both; by default all images must
            have the same size.
        classes: Class names, in order; by default all folder names, sorted. Other folders are
            ignored.
        users: Returns the user of an image, given its path, for `partition="natural"`.
        **options: Further keyword arguments of `from_arrays`.

    Returns:
        The data set.

    Raises:
        DataError: If a folder or an image cannot be read, or there are too few images.
    """
    folders = [Path(train)] if test is None else [Path(train), Path(test)]
    if test is None:
        folders = _split_folders(Path(train), classes)
    elif classes is None and folders[1].resolve().parent == folders[0].resolve():
        raise DataError(
            f"{folders[1]} lies in {folders[0]}, where it would be a class: give the folder of the "
            "training images, or only the folder of both."
        )
    if classes is None:
        classes = sorted({name for folder in folders for name in _class_names(folder)})
    splits = _splits(folders, classes)
    _warn_about_empty(classes, folders, splits)
    x = read_images([file for split in splits for file, _ in split], size)
    labels = [[name for _, name in split] for split in splits]
    num_train = len(splits[0])
    return from_arrays(
        x[:num_train],
        labels[0],
        x[num_train:],
        labels[1],
        classes=list(classes),
        users=None if users is None else [users(file) for file, _ in splits[0]],
        test_users=None if users is None else [users(file) for file, _ in splits[1]],
        **options,
    )


def _split_folders(folder: Path, classes: Sequence[str] | None) -> list[Path]:
    """Return the folders of both splits, or the folder itself if it holds classes.

    A folder called `train` that directly holds images is a class. The test folder is the first one
    that holds folders of the training classes.
    """
    names = {name.lower(): folder / name for name in _class_names(folder)}
    train = next((names[name] for name in TRAIN_NAMES if name in names), None)
    if train is None and classes is None and names and not names.keys() - TEST_NAMES:
        raise DataError(
            f"{folder} holds {' and '.join(sorted(names))} and no training images: add a folder "
            "'train', or give the folder of the classes."
        )
    if train is None or not _class_names(train):
        return [folder]
    others = sorted(names.keys() - {*TRAIN_NAMES, *TEST_NAMES})
    if others:
        raise DataError(
            f"{folder} holds both {train.name} with folders below it and {names[others[0]].name}: "
            f"give the folder of the training images, {train}, and that of the test images."
        )
    candidates = [names[name] for name in TEST_NAMES if name in names]
    known = set(_class_names(train)) if classes is None else set(classes)
    labeled = [candidate for candidate in candidates if known & set(_class_names(candidate))]
    if candidates and not labeled:
        raise DataError(
            f"{candidates[0]} holds no folder of a class of {train}: sort the images, or give the "
            "folder of the training images alone."
        )
    return [train, *labeled[:1]]


def _splits(folders: Sequence[Path], classes: Sequence[str]) -> list[list[LabeledFile]]:
    """List the labeled files of training and test images; refuse a split without any."""
    if len(folders) == 1:
        splits = _hold_out_test(folders[0], classes)
    else:
        splits = [_labeled_files(folder, classes) for folder in folders]
    if not all(splits):
        hint = ""
        if any(file.suffix.lower() in IMAGE_SUFFIXES for file in folders[0].iterdir()):
            hint = ": images lie in it directly, so move them to a folder named after their class"
        elif len(folders) == 1:
            hint = (
                f": give at least {TEST_STRIDE} per class, "
                f"because every {TEST_STRIDE}th is for testing"
            )
        empty = folders[-1] if splits[0] else folders[0]
        raise DataError(f"{empty} holds too few images in folders of classes{hint}.")
    return splits


def _warn_about_empty(
    classes: Sequence[str], folders: Sequence[Path], splits: Sequence[Sequence[LabeledFile]]
) -> None:
    """Name classes without images: they may be misspelled, or held by other clients."""
    train_names, test_names = ({name for _, name in split} for split in splits)
    warn_about_untrained(sorted(test_names - train_names))
    found = train_names | test_names
    others = {name for folder in folders for name in _class_names(folder)} - set(classes)
    for name in classes:
        if name not in found:
            close = difflib.get_close_matches(name, sorted(others), 1)
            hint = f" Did you mean '{close[0]}'?" if close else ""
            text = f"class '{name}' has no images in {folders[0]}.{hint}"
            warnings.warn(text, DataWarning, stacklevel=3)


def _labeled_files(folder: Path, classes: Sequence[str]) -> list[LabeledFile]:
    return [(file, name) for name in classes for file in find_images(folder, name)]


def _hold_out_test(folder: Path, classes: Sequence[str]) -> list[list[LabeledFile]]:
    """Split the images of one folder into training and test images."""
    train: list[LabeledFile] = []
    test: list[LabeledFile] = []
    for name in classes:
        files = find_images(folder, name)
        for index, file in enumerate(files):
            is_test = index % TEST_STRIDE == TEST_STRIDE - 1
            (test if is_test else train).append((file, name))
    return [train, test]


def _class_names(folder: Path) -> list[str]:
    """List the names of the folders in a folder."""
    try:
        return [
            entry.name
            for entry in folder.iterdir()
            if entry.is_dir() and not entry.name.startswith((".", "__"))
        ]
    except OSError as error:
        raise DataError(f"{folder} is not a readable folder: {error.strerror or error}.") from error


def find_images(folder: Path, class_name: str) -> list[Path]:
    """List the images of a class.

    Args:
        folder: Folder that holds the folders of classes.
        class_name: Name of the class.

    Returns:
        Paths of images at any depth, sorted.
    """
    files = sorted((folder / class_name).rglob("*"))
    return [file for file in files if file.suffix.lower() in IMAGE_SUFFIXES and file.is_file()]


def read_images(files: Sequence[Path], size: int | tuple[int, int] | None = None) -> Tensor:
    """Decode image files to one tensor.

    The headers of all files are checked before anything is decoded.

    Args:
        files: The image files.
        size: Height and width to resize to, or one number for both; by default all images must
            have the same size.

    Returns:
        Images `(N, C, H, W)`, uint8.

    Raises:
        DataError: If an image is damaged, too large, of another size, or has over 8 bits a channel.
    """
    from PIL import Image  # slow to import

    target = (size, size) if isinstance(size, int) else size
    if target is not None and (
        len(target) != 2
        or not all(isinstance(side, int | np.integer) and side > 0 for side in target)
    ):
        raise DataError(f"size is {size}: give a height and a width of 1 or more.")
    channels, height, width = _check_headers(files, target)
    if len(files) * channels * height * width > MAX_TOTAL_BYTES:
        raise DataError(
            f"{len(files):,} images of {height}x{width} are more than {MAX_TOTAL_BYTES:,} bytes: "
            "make them smaller."
        )
    pixels = np.empty((len(files), channels, height, width), np.uint8)
    for index, file in enumerate(files):
        try:
            with Image.open(file, formats=IMAGE_FORMATS) as image:
                pixels[index] = to_pixels(image, channels, (height, width))
        except decoding_errors() as error:
            raise DataError(f"{file} is not a readable image: {error}.") from error
    return torch.from_numpy(pixels)


def to_pixels(image: PillowImage, channels: int, size: tuple[int, int]) -> npt.NDArray[np.uint8]:
    """Decode an image, convert it to grayscale or RGB, and resize it.

    Args:
        image: The image.
        channels: 1 or 3.
        size: Height and width.

    Returns:
        Pixels `(channels, height, width)`.
    """
    from PIL import Image

    height, width = size
    decoded = image.convert("L" if channels == 1 else "RGB")
    if decoded.size != (width, height):
        decoded = decoded.resize((width, height), Image.Resampling.BOX)
    return np.asarray(decoded).reshape(height, width, channels).transpose(2, 0, 1)


def check_image(name: str, image: PillowImage) -> None:
    """Refuse an image that is too large or has over 8 bits a channel; it need not be decoded.

    Args:
        name: Name for messages.
        image: The image.

    Raises:
        DataError: If it cannot be used.
    """
    width, height = image.size
    if width * height > MAX_IMAGE_PIXELS:
        raise DataError(
            f"{name} has {width} x {height} pixels, more than {MAX_IMAGE_PIXELS:,}: "
            "make it smaller."
        )
    if image.mode[0] in "IF":
        raise DataError(
            f"{name} has more than 8 bits per channel (mode {image.mode}): save it with 8."
        )


def resize_images(images: Tensor, size: int | tuple[int, int]) -> Tensor:
    """Resize images, as `read_images` does.

    Args:
        images: `(N, C, H, W)`, uint8, with any number of channels.
        size: Height and width, or one number for both.

    Returns:
        Images of the new size.
    """
    from PIL import Image

    height, width = (size, size) if isinstance(size, int) else size
    if images.shape[2:] == (height, width):
        return images
    resized = np.empty((*images.shape[:2], height, width), np.uint8)
    for index, image in enumerate(images.numpy()):
        for channel, plane in enumerate(image):
            smaller = Image.fromarray(plane).resize((width, height), Image.Resampling.BOX)
            resized[index, channel] = np.asarray(smaller)
    return torch.from_numpy(resized)


def _check_headers(files: Sequence[Path], target: tuple[int, int] | None) -> ImageFormat:
    """Find the common format of images from their headers."""
    from PIL import Image

    is_grayscale = True
    shape = target
    for file in files:
        try:
            with Image.open(file, formats=IMAGE_FORMATS) as image:
                width, height = image.size
                mode = image.mode
                check_image(str(file), image)
        except decoding_errors() as error:
            raise DataError(f"{file} is not a readable image: {error}.") from error
        shape = shape or (height, width)
        if target is None and (height, width) != shape:
            raise DataError(
                f"{file} is {height}x{width}, and {files[0]} is {shape[0]}x{shape[1]}: "
                "bring all images to one size, or give a size to resize to (--image-size)."
            )
        is_grayscale = is_grayscale and mode in ("1", "L")
    return ImageFormat(1 if is_grayscale else 3, *(shape or (0, 0)))


def decoding_errors() -> tuple[type[Exception], ...]:
    """Return the errors that Pillow raises for damaged files."""
    from PIL import Image

    return (OSError, ValueError, SyntaxError, EOFError, struct.error, Image.DecompressionBombError)
