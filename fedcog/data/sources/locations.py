"""Where a data set comes from: a registered name, a folder, a .npz file, or the Hugging Face hub.

A location may stand wherever a data set's name does. It names data only; code that makes a data set
(MODULE:FUNCTION) is accepted on the command line alone, and by `load_dataset`.
"""

import dataclasses
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict, Unpack

import torch

from fedcog.core import rng, settings
from fedcog.data import registry
from fedcog.data.datasets import (
    DataError,
    Dataset,
    DataWarning,
    channel_statistics,
    from_arrays,
)
from fedcog.data.folders import from_folder, resize_images
from fedcog.data.sources.array_files import read_array_file
from fedcog.data.sources.hub import Columns, read_hub
from fedcog.data.sources.named_code import find_code, names_code

HUB_PREFIX = "hub:"
HUB_FILES = ("dataset_dict.json", "dataset_info.json")
"""Files of which `save_to_disk` writes one."""
Kind = Literal["name", "folder", "file", "hub", "code", "unknown"]
FORMS = "a folder of images, a .npz file, or hub:NAME"
"""The locations that a settings file may name, for messages."""


class ReadOptions(NamedTuple):
    """How a data set is read.

    Attributes:
        image_size: Side in pixels to resize images to; 0 leaves them as they are.
        subset: Number of training examples to keep, and of test examples at most; 0 keeps all.
        input_column: hub: column of images or arrays; empty: found by its type.
        label_column: hub: column of labels; empty: found by its type or name.
        user_column: hub: column of users; empty: none.
    """

    image_size: int = 0
    subset: int = 0
    input_column: str = ""
    label_column: str = ""
    user_column: str = ""


class ReadKeywords(TypedDict, total=False):
    """Keyword arguments of `load_dataset`: the fields of `ReadOptions`."""

    image_size: int
    subset: int
    input_column: str
    label_column: str
    user_column: str


def location_kind(text: str) -> Kind:
    """Return what a data set's name or location is.

    Args:
        text: What the user wrote.

    Returns:
        "name" for a registered data set, "folder", "file" (.npz), "hub", "code" for
        MODULE:FUNCTION and FILE.py:FUNCTION, else "unknown".
    """
    if text in registry.DATASETS:
        return "name"
    if text.startswith(HUB_PREFIX) and len(text) > len(HUB_PREFIX):
        return "hub"
    if text.endswith(".npz"):
        return "file"
    if names_code(text):
        return "code"
    is_path = os.sep in text or text.startswith(("~", "."))
    return "folder" if is_path or (text and Path(text).is_dir()) else "unknown"


def absolute_location(text: str) -> str:
    """Return a location with an absolute path, because a run may resume from anywhere."""
    kind = location_kind(text)
    if kind in ("folder", "file"):
        return str(Path(text).expanduser().resolve())
    if kind == "hub":
        folder = Path(text.removeprefix(HUB_PREFIX)).expanduser()
        return f"{HUB_PREFIX}{folder.resolve()}" if folder.is_dir() else text
    return text


def short_name(text: str) -> str:
    """Return a name for a location, such as 'photos' for '/data/photos', for paths and tables."""
    kind = location_kind(text)
    if kind in ("name", "unknown"):
        return text
    name = Path(text.removeprefix(HUB_PREFIX)).name
    if kind in ("hub", "code"):
        name = name.partition(":")[0]
    return name.removesuffix(".npz") or "data"


def distinct_names(texts: Sequence[str]) -> list[str]:
    """Return short names of locations, which differ where locations do.

    Args:
        texts: Names or locations.

    Returns:
        `short_name` of each; where several locations share it, with as many folders above it as
        tell them apart, such as 'a/data' and 'b/data'.
    """
    candidates = {text: _names_by_length(text) for text in texts}
    return [
        next(
            (
                name
                for name in candidates[text]
                if not any(name in candidates[other] for other in candidates if other != text)
            ),
            text,
        )
        for text in texts
    ]


def _names_by_length(text: str) -> list[str]:
    """Return the short name of a location, then with one folder above it, and so on."""
    short = short_name(text)
    if location_kind(text) in ("name", "unknown"):
        return [short]
    folders = Path(text.removeprefix(HUB_PREFIX)).parts[:-1]
    numbers = range(len(folders) + 1)
    return ["/".join([*folders[len(folders) - number :], short]) for number in numbers]


def missing_location(text: str) -> str:
    """Return why there is no data at a location, as far as a glance tells; empty if there may be.

    Args:
        text: A location that is no registered name.

    Returns:
        The problem and a remedy, or an empty string.
    """
    kind = location_kind(text)
    path = Path(text).expanduser()
    hint = (
        f"give {FORMS}, or a name that `fedcog data list` shows. If the data have moved, name "
        "their new place with --dataset."
    )
    if kind == "folder" and path.is_file():
        return f"{path} is a file that is not read: {hint}"
    if kind == "folder" and not path.is_dir():
        return f"there is no folder {path}: {hint}"
    if kind == "folder" and any((path / name).is_file() for name in HUB_FILES):
        return f"{path} was written by Hugging Face datasets: give {HUB_PREFIX}{path}."
    if kind == "file" and not path.is_file():
        return f"there is no file {path}: {hint}"
    return ""


def load_dataset(
    name: str | Path, folder: str | Path | None = None, **options: Unpack[ReadKeywords]
) -> Dataset:
    """Read a data set by name or location; only `hub:` may download anything.

    Args:
        name: A name that `fedcog data list` shows, a folder with one folder of images per class
            (or with `train` and `test` above these), a .npz file with arrays `train_x`, `train_y`
            and so on, `hub:NAME` for Hugging Face `datasets`, or MODULE:FUNCTION or
            FILE.py:FUNCTION, which is called and returns a `Dataset` or the arguments of
            `from_arrays`.
        folder: The folder in which registered data sets lie; by default $FEDCOG_DATA, then
            ~/.cache/fedcog.
        **options: Optional settings, by keyword.
            image_size: Side in pixels to resize images to.
            subset: Number of training examples to keep, and of test examples at most.
            input_column: hub: column of images or arrays; by default found by its type.
            label_column: hub: column of labels; by default found by its type or name.
            user_column: hub: column of users, each of whom becomes a client.

    Returns:
        The data set.

    Raises:
        DataError: If it is unknown, missing or damaged.
        TypeError: If a keyword argument is unknown.

    Example:
        ```python
        import fedcog

        data = fedcog.load_dataset("digits")
        parts = fedcog.partition(data, "dirichlet", clients=5, beta=0.5, seed=0)
        ```
    """
    for option in options:
        if option not in ReadOptions._fields:
            text = settings.unknown_name("keyword argument", option, ReadOptions._fields)
            raise TypeError(f"load_dataset: {text}")
    wanted = ReadOptions(**options)
    for option in ("image_size", "subset"):
        if getattr(wanted, option) < 0:
            raise DataError(f"{option} is {getattr(wanted, option)}: give 0 or more.")
    if isinstance(name, os.PathLike):
        name = str(Path(name).expanduser().resolve())
    kind = location_kind(name)
    if kind == "folder":
        size = wanted.image_size or None
        dataset = from_folder(Path(name).expanduser(), size=size, name=short_name(name))
    elif kind == "file":
        dataset = read_array_file(Path(name).expanduser())
    elif kind == "hub":
        location = name.removeprefix(HUB_PREFIX)
        columns = Columns(wanted.input_column, wanted.label_column, wanted.user_column)
        dataset = read_hub(location, columns, wanted.image_size)
    elif kind == "code":
        dataset = _call(name)
    else:
        dataset = registry.load(name, folder or None)
    return adapt_dataset(dataset, wanted)


def adapt_dataset(dataset: Dataset, options: ReadOptions) -> Dataset:
    """Resize images and keep a subset of the examples.

    Args:
        dataset: The data set.
        options: Image size and subset.

    Returns:
        The changed data set, or the same one if nothing changes.

    Raises:
        DataError: If the inputs are no images, or a subset is asked of fixed `indices`.
    """
    if options.image_size:
        dataset = _resize(dataset, options.image_size)
    if options.subset:
        dataset = _take_subset(dataset, options.subset)
    return dataset


def _resize(dataset: Dataset, size: int) -> Dataset:
    if dataset.train_x.dtype != torch.uint8 or dataset.train_x.dim() != 4:
        raise DataError(
            f"the examples of {dataset.name!r} are no uint8 images: remove the image size."
        )
    train_x = resize_images(dataset.train_x, size)
    if train_x is dataset.train_x:
        return dataset
    changes: dict[str, Any] = {}
    if (dataset.mean, dataset.std) == channel_statistics(dataset.train_x):
        mean, std = channel_statistics(train_x)  # measured before, so measured again
        changes = {"mean": mean, "std": std}
    test_x = resize_images(dataset.test_x, size)
    return dataclasses.replace(dataset, train_x=train_x, test_x=test_x, digest="", **changes)


def _take_subset(dataset: Dataset, count: int) -> Dataset:
    """Keep some training examples and at most as many test examples, chosen at random."""
    if dataset.indices is not None:
        raise DataError("the data set has fixed `indices` per client: remove them, or the subset.")
    train = _random_rows(len(dataset.train_y), count, "train")
    test = _random_rows(len(dataset.test_y), count, "test")
    users = dataset.users
    test_users = dataset.test_users
    if users is not None:
        _warn_about_lost_users(users, train)
    return dataclasses.replace(
        dataset,
        train_x=dataset.train_x[train],
        train_y=dataset.train_y[train],
        test_x=dataset.test_x[test],
        test_y=dataset.test_y[test],
        users=None if users is None else users[train],
        test_users=None if test_users is None else test_users[test],
        digest="",
    )


def _warn_about_lost_users(users: torch.Tensor, rows: torch.Tensor) -> None:
    num_users = len(torch.unique(users))
    num_lost = num_users - len(torch.unique(users[rows]))
    if num_lost:
        warnings.warn(
            f"{num_lost} of {num_users} users have none of the {len(rows)} training examples of "
            "the subset and are left out: raise --subset.",
            DataWarning,
            stacklevel=4,
        )


def _random_rows(num_rows: int, count: int, split: str) -> torch.Tensor:
    """Choose rows, in order; the choice is the same for every seed of an experiment."""
    order = rng.permutation(0, f"subset/{split}", 0, num_rows)
    return order[:count].sort()[0]


def _call(name: str) -> Dataset:
    """Call the user's function and make a data set of what it returns."""
    try:
        function = find_code(name)
    except settings.ConfigError as error:
        raise DataError(str(error)) from error
    try:
        made = function()
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{name} failed: {type(error).__name__}: {error}.") from error
    if isinstance(made, Dataset):
        return made
    try:
        if isinstance(made, Mapping):
            return from_arrays(**made)
        if isinstance(made, tuple) and len(made) in (2, 4):
            return from_arrays(*made)
    except TypeError as error:
        raise DataError(f"{name} returned something else than data: {error}.") from error
    raise DataError(
        f"{name} returned {type(made).__name__}: return a fedcog.Dataset, or (train_x, train_y) or "
        "(train_x, train_y, test_x, test_y), or a dict of the arguments of fedcog.from_arrays."
    )
