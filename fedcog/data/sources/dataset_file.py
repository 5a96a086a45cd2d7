"""A whole data set in one .npz file, for processes that need the same data."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcog.data.datasets import Dataset
from fedcog.data.sources.array_files import read_arrays

TENSORS = ("train_x", "train_y", "test_x", "test_y", "users", "test_users")
TEXTS = ("name", "classes", "mean", "std", "augment", "digest", "user_names")


def save_dataset(dataset: Dataset, path: Path) -> None:
    """Write a data set to a file.

    Args:
        dataset: The data set.
        path: The file, which ends in .npz.
    """
    arrays: dict[str, Any] = {}
    for name in TENSORS:
        value = getattr(dataset, name)
        if value is not None:
            arrays[name] = value.cpu().numpy()
    for client, own in enumerate(dataset.indices or ()):
        arrays[f"indices_{client}"] = own.numpy()
    texts = {name: getattr(dataset, name) for name in TEXTS}
    texts["clients"] = None if dataset.indices is None else len(dataset.indices)
    arrays["texts"] = np.frombuffer(json.dumps(texts).encode(), np.uint8)
    np.savez(path, **arrays)


def open_dataset(path: Path) -> Dataset:
    """Read a data set that `save_dataset` wrote.

    Args:
        path: The file.

    Returns:
        The data set.
    """
    arrays = read_arrays(path)
    texts = json.loads(arrays["texts"].tobytes())
    num_clients = texts.pop("clients")
    indices: tuple[Tensor, ...] | None = None
    if num_clients is not None:
        indices = tuple(torch.from_numpy(arrays[f"indices_{i}"]) for i in range(num_clients))
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in texts.items()
    }
    fields |= {name: torch.from_numpy(arrays[name]) for name in TENSORS if name in arrays}
    return Dataset(**fields, indices=indices)
