"""Arrays cached on disk: built once, published by one rename, and verified when opened."""

import contextlib
import fcntl
import hashlib
import json
import math
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fedcog.data.datasets import DataError, DataWarning

HASH_BLOCK_BYTES = 1 << 24
"""Bytes that a thread hashes at a time."""
MANIFEST = "manifest.json"
DTYPES = ("bool", "int64", "uint8")
_digests: dict[tuple[int, ...], str] = {}


class StoredArrays(NamedTuple):
    """Arrays mapped from files, which takes no memory.

    Attributes:
        arrays: The arrays by name.
        notes: JSON value that the builder recorded.
        digest: Digest of all arrays.
    """

    arrays: dict[str, NDArray[Any]]
    notes: Any
    digest: str


class BuildResult(NamedTuple):
    """What a builder wrote.

    Attributes:
        formats: Type and shape of the array in each file, by file name; files hold plain bytes in
            C order.
        notes: JSON value to record.
    """

    formats: dict[str, tuple[str, tuple[int, ...]]]
    notes: Any


def cache_dir() -> Path:
    """Return the folder for data that can be rebuilt: $FEDCOG_CACHE, or ~/.cache/fedcog."""
    return Path(os.path.expanduser(os.environ.get("FEDCOG_CACHE", "~/.cache/fedcog")))


def open_or_build(path: Path, stamp: str, build: Callable[[Path], BuildResult]) -> StoredArrays:
    """Open a store, or build it if it is missing, damaged, or has another stamp.

    The builder writes into a temporary folder, which is renamed when all is written. A killed
    builder therefore leaves nothing that could be mistaken for a store; the next one removes it.

    Args:
        path: Folder of the store.
        stamp: Identifies the content that the store should have.
        build: Writes the arrays into a folder.

    Returns:
        The arrays.

    Raises:
        DataError: If the store cannot be written, or does not read back as written.
    """
    if stored := open_store(path, stamp):
        return stored
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(
            path.with_suffix(".lock"),
            lambda: _warn(f"another process is building {path}: waiting for it"),
        ):
            if stored := open_store(path, stamp):
                return stored
            for leftover in path.parent.glob(f"{path.name}.*.part"):
                shutil.rmtree(leftover)
            part = Path(tempfile.mkdtemp(prefix=f"{path.name}.", suffix=".part", dir=path.parent))
            try:
                _write_manifest(part, stamp, build(part))
                shutil.rmtree(path, ignore_errors=True)
                part.rename(path)
            finally:
                shutil.rmtree(part, ignore_errors=True)
            if stored := open_store(path, stamp):
                return stored
    except OSError as error:
        raise DataError(
            f"{path} cannot be written ({error}): "
            "make room, or choose another folder with FEDCOG_CACHE=DIR"
        ) from error
    raise DataError(
        f"{path} does not hold what was written to it: check the disk, or choose FEDCOG_CACHE=DIR"
    )


def open_store(path: Path, stamp: str) -> StoredArrays | None:
    """Open a store and verify every byte of it.

    Args:
        path: Folder of the store.
        stamp: The stamp that it must have.

    Returns:
        The arrays, or None if the store is missing, damaged, or has another stamp.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        if manifest.pop("digest") != _json_digest(manifest) or manifest["stamp"] != stamp:
            return None
        arrays: dict[str, NDArray[Any]] = {}
        for name, (dtype, shape, expected) in manifest["arrays"].items():
            file = path / Path(name).name
            if dtype not in DTYPES or not all(type(side) is int and side > 0 for side in shape):
                return None
            if file.stat().st_size != math.prod(shape) * np.dtype(dtype).itemsize:
                return None
            if file_digest(file) != expected:
                return None
            # Copy on write: torch wants writable memory, and the file must not change.
            arrays[name] = np.memmap(file, dtype, mode="c", shape=tuple(shape))
        return StoredArrays(arrays, manifest["notes"], _json_digest(manifest["arrays"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def file_digest(path: Path) -> str:
    """Compute SHA-256 over the SHA-256 of each block of a file; cached while it is unchanged."""
    status = path.stat()
    key = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    if key not in _digests:

        def block_digest(offset: int) -> bytes:
            with open(path, "rb") as file:
                file.seek(offset)
                return hashlib.sha256(file.read(HASH_BLOCK_BYTES)).digest()

        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            offsets = range(0, status.st_size, HASH_BLOCK_BYTES)
            blocks = b"".join(pool.map(block_digest, offsets))
        _digests[key] = hashlib.sha256(blocks).hexdigest()
    return _digests[key]


@contextlib.contextmanager
def locked(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold an exclusive lock on a file.

    Args:
        path: The lock file; it is created if missing.
        on_wait: Called once if another process holds the lock.

    Yields:
        Nothing, while the lock is held.
    """
    with open(path, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write_manifest(folder: Path, stamp: str, built: BuildResult) -> None:
    """Flush the arrays to disk, then describe them in a manifest."""
    for name in built.formats:
        with open(folder / name, "rb") as file:
            os.fsync(file.fileno())
    arrays = {
        name: [dtype, list(shape), file_digest(folder / name)]
        for name, (dtype, shape) in built.formats.items()
    }
    manifest = {"stamp": stamp, "arrays": arrays, "notes": built.notes}
    with open(folder / MANIFEST, "w", encoding="utf-8") as file:
        json.dump(manifest | {"digest": _json_digest(manifest)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _json_digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _warn(text: str) -> None:
    warnings.warn(text, DataWarning, stacklevel=2)
