"""The training examples of each client, from a file."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcog.data.datasets import DataError
from fedcog.data.sources.array_files import read_arrays

MAX_JSON_BYTES = 1 << 30
"""Largest .json file that is read."""


def read_client_indices(path: Path) -> tuple[Tensor, ...]:
    """Read which training examples each client has.

    Args:
        path: A .json file with a list of positions for each client, or an object that has such
            lists; or a .npz file with an array of positions for each client, in the order of the
            numbers in their names, as `np.savez(file, *parts)` writes it.

    Returns:
        Positions of training examples, int64, one tensor per client.

    Raises:
        DataError: If the file cannot be read, or does not hold lists of positions.
    """
    if path.suffix == ".json":
        lists = _read_json(path)
    elif path.suffix == ".npz":
        arrays = read_arrays(path)
        lists = [arrays[name] for name in sorted(arrays, key=_natural_key)]
    else:
        raise DataError(f"{path} is neither .json nor .npz: give one list of positions per client.")
    if not lists:
        raise DataError(f"{path} holds no client: give one list of positions per client.")
    return tuple(_to_positions(path, number, values) for number, values in enumerate(lists))


def _read_json(path: Path) -> list[Any]:
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise DataError(f"{path} is larger than {MAX_JSON_BYTES:,} bytes: save it as .npz.")
        content = json.loads(path.read_text(), object_pairs_hook=_unique)
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read: {error}.") from error
    lists = list(content.values()) if isinstance(content, dict) else content
    if not isinstance(lists, list):
        raise DataError(f"{path} holds no lists: give one list of positions per client.")
    return lists


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dict; refuse one that names a client twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"it names '{twice}' twice")
    return found


def _natural_key(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts arr_2 before arr_10."""
    parts = re.split(r"(\d+)", name)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]


def _to_positions(path: Path, client: int, values: Any) -> Tensor:
    is_list = isinstance(values, list) and all(type(value) is int for value in values)
    is_array = isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind in "iu"
    try:
        if is_list or is_array:
            return torch.from_numpy(np.array(values, dtype=np.int64))
    except (OverflowError, ValueError) as error:
        raise DataError(f"{path}: positions of client {client}: {error}.") from error
    raise DataError(f"{path}: client {client} has no list of integers: give positions from 0.")
