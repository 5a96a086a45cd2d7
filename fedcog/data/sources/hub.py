"""Data sets of the Hugging Face hub, of its cache, or saved to disk with `save_to_disk`."""

import importlib.util
import io
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from fedcog.data.datasets import DataError, Dataset, Values, from_arrays
from fedcog.data.folders import (
    IMAGE_FORMATS,
    MAX_TOTAL_BYTES,
    check_image,
    decoding_errors,
    to_pixels,
)

if TYPE_CHECKING:
    from PIL.Image import Image as PillowImage

TEST_SPLITS = ("test", "validation", "valid", "val")
"""Names of the split that tests; the first one that is there is used."""
LABEL_NAMES = ("label", "labels", "y", "target", "class")
"""Names of a column of labels, if none has the type ClassLabel."""
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(:.+)?")
"""OWNER/NAME or OWNER/NAME:CONFIGURATION."""
BATCH_SIZE = 1000
"""Number of rows read at a time."""


class Columns(NamedTuple):
    """The columns of a table that a data set is made from.

    Attributes:
        inputs: Column of images, or of lists of numbers.
        labels: Column of labels.
        users: Column of users; empty without.
    """

    inputs: str = ""
    labels: str = ""
    users: str = ""


def read_hub(name: str, columns: Columns, image_size: int = 0) -> Dataset:
    """Read a data set through Hugging Face `datasets`.

    Args:
        name: `OWNER/NAME` or `OWNER/NAME:CONFIGURATION` on the hub, which is downloaded or read
            from the cache; or a folder that `save_to_disk` wrote.
        columns: The columns to use; those without a name are found by type.
        image_size: Side in pixels to resize images to; 0 leaves them as they are.

    Returns:
        The data set, with users if their column is given.

    Raises:
        DataError: If `datasets` is not installed, the data set cannot be found, or its columns do
            not hold inputs and labels.
    """
    if importlib.util.find_spec("datasets") is None:
        raise DataError(f"hub:{name} needs Hugging Face datasets: pip install 'fedcog[hub]'.")
    splits = _open_splits(name)
    train = splits["train"]
    chosen = _choose_columns(name, train, columns)
    fields: dict[str, Any] = {"name": Path(name).name.partition(":")[0]}
    if classes := _class_names(train, chosen.labels):
        fields["classes"] = list(classes)
    tables = [train]
    test_name = next((split for split in TEST_SPLITS if split in splits), None)
    if test_name is not None:
        tables.append(splits[test_name])
    for column in (chosen.inputs, chosen.labels):
        if column not in tables[-1].features:
            raise DataError(
                f"split '{test_name}' of hub:{name} has no column '{column}', as the training "
                "split has: remove that split, or name columns that both have."
            )
    inputs = _read_inputs(name, tables, chosen.inputs, image_size)
    labels = [_read_labels(name, table, chosen.labels, classes) for table in tables]
    if chosen.users:
        fields["users"] = list(train[chosen.users])
        if test_name is not None and chosen.users in splits[test_name].features:
            fields["test_users"] = list(splits[test_name][chosen.users])
    arguments = [part for pair in zip(inputs, labels, strict=True) for part in pair]
    return from_arrays(*arguments, **fields)


def _open_splits(name: str) -> dict[str, Any]:
    """Open all splits of a data set; those of the hub are downloaded or found in the cache."""
    import datasets

    folder = Path(name).expanduser()
    if not folder.is_dir() and (name.startswith((".", "~", os.sep)) or name.count(os.sep) > 1):
        raise DataError(f"there is no folder {folder}: give one that save_to_disk wrote.")
    if not folder.is_dir() and not HUB_NAME.fullmatch(name):
        # A name without an owner may be one of the loaders of `datasets`: that called pandas
        # unpickles files of the current folder.
        raise DataError(
            f"hub:{name} names no data set of the hub: write hub:OWNER/NAME, such as "
            "hub:ylecun/mnist, or a folder that save_to_disk wrote."
        )
    try:
        if folder.is_dir():
            opened = datasets.load_from_disk(str(folder))
        else:
            repository, _, configuration = name.partition(":")
            opened = datasets.load_dataset(repository, configuration or None)
    except Exception as error:
        first_line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise DataError(
            f"hub:{name} cannot be read ({first_line}). Give the name of a data set on the Hugging "
            "Face hub, such as hub:ylecun/mnist, or a folder that save_to_disk wrote."
        ) from error
    if isinstance(opened, datasets.Dataset):
        return {"train": opened}
    if not isinstance(opened, datasets.DatasetDict) or "train" not in opened:
        found = ", ".join(opened) if isinstance(opened, dict) else type(opened).__name__
        raise DataError(f"hub:{name} has no split called train, but {found}.")
    return dict(opened)


def _choose_columns(name: str, table: Any, columns: Columns) -> Columns:
    """Check the named columns, and find the others by type."""
    features = table.features
    given = {
        "--input-column": columns.inputs,
        "--label-column": columns.labels,
        "--user-column": columns.users,
    }
    for flag, column in given.items():
        if column and column not in features:
            raise DataError(
                f"hub:{name} has no column '{column}', but {', '.join(features)}: change {flag}."
            )
    taken = set(given.values())
    free = {key: value for key, value in features.items() if key not in taken}
    labels = columns.labels
    if not labels:
        typed = [key for key, value in free.items() if type(value).__name__ == "ClassLabel"]
        named = [key for key in LABEL_NAMES if key in free]
        labels = _only(name, "labels", "--label-column", typed or named[:1], features)
    free.pop(labels, None)
    inputs = columns.inputs
    if not inputs:
        images = [key for key, value in free.items() if type(value).__name__ == "Image"]
        arrays = [key for key, value in free.items() if _is_array(value)]
        inputs = _only(name, "inputs", "--input-column", images or arrays, features)
    return Columns(inputs, labels, columns.users)


def _only(name: str, role: str, flag: str, found: Sequence[str], features: Any) -> str:
    if len(found) != 1:
        count = f"{len(found)} columns that may be" if found else "no column of"
        raise DataError(
            f"hub:{name} has {count} {role} among {', '.join(features)}: name one with {flag}."
        )
    return found[0]


def _element_type(feature: Any) -> str:
    """Return the type of the elements of an array, or of lists at any depth."""
    while hasattr(feature, "feature"):
        feature = feature.feature
    return str(getattr(feature, "dtype", ""))


def _is_array(feature: Any) -> bool:
    """Return whether a column holds arrays or lists, of numbers as far as can be seen."""
    kind = type(feature).__name__
    is_text = _element_type(feature) in ("string", "large_string")
    return kind.startswith("Array") or (kind in ("List", "LargeList", "Sequence") and not is_text)


def _read_inputs(name: str, tables: Sequence[Any], column: str, image_size: int) -> list[Values]:
    """Read the inputs of all splits, in one format."""
    if type(tables[0].features[column]).__name__ == "Image":
        return _read_images(name, tables, column, image_size)
    return [_read_numbers(name, table, column) for table in tables]


def _read_numbers(name: str, table: Any, column: str) -> Values:
    parts: list[npt.NDArray[Any]] = []
    rows = table.select_columns([column]).with_format("numpy")
    for start in range(0, len(rows), BATCH_SIZE):
        try:
            values = np.asarray(rows[start : start + BATCH_SIZE][column])
        except (ValueError, TypeError, AttributeError):  # rows of several lengths, or none
            values = np.empty(0, object)
        if values.dtype.kind not in "uifb" or (parts and values.shape[1:] != parts[0].shape[1:]):
            raise DataError(
                f"column '{column}' of hub:{name} holds no arrays of numbers of one shape: turn "
                "text into lists of token numbers of one length, and save the result with "
                "save_to_disk."
            )
        is_image = values.ndim > 2 and _element_type(table.features[column]) == "uint8"
        parts.append(values.astype(np.uint8) if is_image else values)
    return np.concatenate(parts)


def _read_images(name: str, tables: Sequence[Any], column: str, image_size: int) -> list[Values]:
    """Decode the images of all splits."""
    sizes: set[tuple[int, int]] = set()
    modes: set[str] = set()
    for table in tables:
        for label, image in _images(name, table, column):
            check_image(label, image)
            sizes.add((image.height, image.width))
            modes.add(image.mode)
    if not image_size and len(sizes) > 1:
        examples = " and ".join(f"{height}x{width}" for height, width in sorted(sizes)[:2])
        raise DataError(
            f"hub:{name} has images of {len(sizes)} sizes, such as {examples}: give a size to "
            "resize to (--image-size)."
        )
    size = (image_size, image_size) if image_size else next(iter(sizes))
    channels = 1 if modes <= {"1", "L"} else 3
    num_images = sum(len(table) for table in tables)
    if num_images * channels * size[0] * size[1] > MAX_TOTAL_BYTES:
        raise DataError(
            f"{num_images:,} images of {size[0]}x{size[1]} are more than {MAX_TOTAL_BYTES:,} "
            "bytes: make them smaller with --image-size."
        )
    splits: list[Values] = []
    for table in tables:
        pixels = np.empty((len(table), channels, *size), np.uint8)
        for index, (label, image) in enumerate(_images(name, table, column)):
            try:
                pixels[index] = to_pixels(image, channels, size)
            except decoding_errors() as error:
                raise DataError(f"{label} is not a readable image: {error}.") from error
        splits.append(torch.from_numpy(pixels))
    return splits


def _images(name: str, table: Any, column: str) -> "Iterator[tuple[str, PillowImage]]":
    """Open the images of a table one by one, with a name for messages. They are not decoded yet."""
    import datasets
    from PIL import Image

    rows = table.select_columns([column]).cast_column(column, datasets.Image(decode=False))
    for index, row in enumerate(rows):
        label = f"image {index} of hub:{name}"
        stored = row[column] or {}
        if not (stored.get("bytes") or stored.get("path")):
            raise DataError(f"{label} is missing: remove its row.")
        try:
            content = stored.get("bytes")
            file = io.BytesIO(content) if content else stored.get("path", "")
            with Image.open(file, formats=IMAGE_FORMATS) as image:
                yield label, image
        except decoding_errors() as error:
            raise DataError(f"{label} is not a readable image: {error}.") from error


def _class_names(table: Any, column: str) -> list[str]:
    """Return the names of the classes in the order of a table; empty if they have none."""
    return list(getattr(table.features[column], "names", None) or ())


def _read_labels(name: str, table: Any, column: str, classes: Sequence[str]) -> list[Any]:
    """Read the labels of a split; its own order of classes is changed to that of `classes`."""
    labels = list(table[column])
    if any(label is None for label in labels):
        raise DataError(f"column '{column}' of hub:{name} lacks a label in some row: remove it.")
    own_classes = _class_names(table, column)
    if own_classes == list(classes):
        return labels
    if not own_classes or not classes:
        raise DataError(
            f"column '{column}' of hub:{name} names its classes in one split only: give both "
            "splits the same type."
        )
    if unknown := sorted(set(own_classes) - set(classes)):
        raise DataError(
            f"column '{column}' of hub:{name} has class '{unknown[0]}' in the test split, and not "
            "in the training split: give both the same classes."
        )
    return [classes.index(own_classes[label]) if label >= 0 else label for label in labels]
