"""Data sets from NumPy's .npz files; nothing is unpickled."""

import tokenize
import warnings
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcog.data.datasets import DataError, Dataset, DataWarning, from_arrays

MAX_FILE_BYTES = 1 << 34
"""Largest size of all arrays of a file together, uncompressed."""
NAMES: dict[str, tuple[str, ...]] = {
    "train_x": ("train_x", "x_train", "train_images", "x"),
    "train_y": ("train_y", "y_train", "train_labels", "y"),
    "test_x": ("test_x", "x_test", "test_images"),
    "test_y": ("test_y", "y_test", "test_labels"),
    "users": ("users",),
    "test_users": ("test_users",),
    "classes": ("classes",),
}
"""Names of arrays in a file, by argument of `from_arrays`; the first one that is there counts."""

Arrays = dict[str, NDArray[Any]]


def read_arrays(path: Path) -> Arrays:
    """Read all arrays of a .npz file.

    Args:
        path: The file.

    Returns:
        Arrays by name.

    Raises:
        DataError: If the file cannot be read, is too large, or holds Python objects.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            num_bytes = sum(member.file_size for member in archive.infolist())
        if num_bytes > MAX_FILE_BYTES:
            raise DataError(
                f"{path} holds {num_bytes:,} bytes, more than {MAX_FILE_BYTES:,}: store less in it."
            )
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: _read_array(path, file, name) for name in file.files}
    except (
        OSError,
        ValueError,
        EOFError,
        KeyError,
        MemoryError,
        RuntimeError,  # an encrypted member
        NotImplementedError,  # an unknown compression
        SyntaxError,  # a damaged header
        tokenize.TokenError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        raise DataError(
            f"{path} cannot be read: {str(error).rstrip('.')}. Save it with np.savez."
        ) from error
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise DataError(f"{path}: '{name}' is no array: save the file with np.savez.")
    return arrays


def _read_array(path: Path, file: Any, name: str) -> Any:
    try:
        return file[name]
    except ValueError as error:
        if "allow_pickle" not in str(error):
            raise
        raise DataError(
            f"{path}: '{name}' holds Python objects, which are not read: save texts with "
            f"{name}.astype(str)."
        ) from error


def read_array_file(path: Path) -> Dataset:
    """Read a data set from a .npz file.

    Args:
        path: A file with arrays `train_x`, `train_y`, and possibly `test_x`, `test_y`, `users`,
            `test_users` and `classes`: see `from_arrays`. The names of Keras (`x_train`) and
            MedMNIST (`train_images`) are known too.

    Returns:
        The data set, named after the file.

    Raises:
        DataError: If the file cannot be read, lacks an array, or its arrays do not fit together.
    """
    arrays = read_arrays(path)
    found: dict[str, Any] = {}
    for argument, names in NAMES.items():
        for name in names:
            if name in arrays:
                found[argument] = arrays[name]
                break
    known = {name for names in NAMES.values() for name in names}
    if ignored := sorted(arrays.keys() - known):
        warnings.warn(
            f"{path}: arrays {', '.join(ignored)} are ignored; known are {', '.join(NAMES)}.",
            DataWarning,
            stacklevel=2,
        )
    for argument in ("train_x", "train_y"):
        if argument not in found:
            raise DataError(
                f"{path} holds {', '.join(arrays) or 'nothing'}, and no array called {argument}: "
                f"save it with np.savez({path.name!r}, train_x=..., train_y=..., test_x=..., "
                "test_y=...)."
            )
    for argument in ("train_y", "test_y"):
        labels = found.get(argument)
        if labels is not None and labels.ndim == 2 and labels.shape[1] == 1:
            found[argument] = labels[:, 0]
    if "classes" in found:
        if found["classes"].ndim != 1:
            raise DataError(f"{path}: classes is no list of names: store an array of them.")
        found["classes"] = [str(name) for name in found["classes"].tolist()]
    return from_arrays(
        found.pop("train_x"),
        found.pop("train_y"),
        found.pop("test_x", None),
        found.pop("test_y", None),
        name=path.stem,
        **found,
    )
