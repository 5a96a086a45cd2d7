"""Arrays kept on disk: built once and out of sight, put in place whole, checked to the last byte when opened."""

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

BLOCK = 1 << 24  # bytes hashed at a time, by each thread
MANIFEST = "manifest.json"
TYPES = ("bool", "int64", "uint8")
_digests: dict[tuple[int, ...], str] = {}


class Kept(NamedTuple):
    """Arrays mapped from their files, which costs no memory; what their maker noted; a digest of the arrays."""

    arrays: dict[str, NDArray[Any]]
    notes: Any
    digest: str


class Built(NamedTuple):
    """What a builder has written: type and shape of the array in each file, plain bytes in C order, and its notes."""

    forms: dict[str, tuple[str, tuple[int, ...]]]
    notes: Any


def cache() -> Path:
    """The folder for what can be made again: $FEDCOG_CACHE, or ~/.cache/fedcog."""
    return Path(os.path.expanduser(os.environ.get("FEDCOG_CACHE", "~/.cache/fedcog")))


def keep(place: Path, stamp: str, build: Callable[[Path], Built]) -> Kept:
    """The arrays at a place; built there first, where there are none, or damaged ones, or those of another stamp.

    A builder writes into a folder of its own, which gets its name by one rename when all is written: whoever is killed
    leaves nothing that would be taken for arrays, and the next builder clears it away.
    """
    if found := opened(place, stamp):
        return found
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with locked(place.with_suffix(".lock"), lambda: _tell(f"another process is building {place}: waiting for it")):
            if found := opened(place, stamp):
                return found
            for left in place.parent.glob(f"{place.name}.*.part"):
                shutil.rmtree(left)
            part = Path(tempfile.mkdtemp(prefix=f"{place.name}.", suffix=".part", dir=place.parent))
            try:
                _write_manifest(part, stamp, build(part))
                shutil.rmtree(place, ignore_errors=True)
                part.rename(place)
            finally:
                shutil.rmtree(part, ignore_errors=True)
            if found := opened(place, stamp):
                return found
    except OSError as error:
        raise DataError(
            f"{place} cannot be written ({error}): make room, or choose another folder with FEDCOG_CACHE=DIR"
        ) from error
    raise DataError(f"{place} does not hold what was written to it: look after the disk, or choose FEDCOG_CACHE=DIR")


def opened(place: Path, stamp: str) -> Kept | None:
    """The arrays at a place, if they bear that stamp and every byte is as it was written; else None."""
    try:
        found = json.loads((place / MANIFEST).read_bytes())
        if found.pop("digest") != _of_json(found) or found["stamp"] != stamp:
            return None
        arrays = dict[str, NDArray[Any]]()
        for name, (kind, shape, expected) in found["arrays"].items():
            path = place / Path(name).name
            if kind not in TYPES or not all(type(side) is int and side > 0 for side in shape):
                return None
            if path.stat().st_size != math.prod(shape) * np.dtype(kind).itemsize or digest(path) != expected:
                return None
            # Copy on write: torch wants memory that it could write to, and the file is not to change.
            arrays[name] = np.memmap(path, kind, mode="c", shape=tuple(shape))
        return Kept(arrays, found["notes"], _of_json(found["arrays"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def digest(path: Path) -> str:
    """A digest of a file: sha256 over the sha256 of each of its blocks. A process reads a file once for it."""
    about = path.stat()
    which = about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns
    if which not in _digests:

        def of_block(at: int) -> bytes:
            with open(path, "rb") as file:
                file.seek(at)
                return hashlib.sha256(file.read(BLOCK)).digest()

        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            blocks = b"".join(pool.map(of_block, range(0, about.st_size, BLOCK)))
        _digests[which] = hashlib.sha256(blocks).hexdigest()
    return _digests[which]


@contextlib.contextmanager
def locked(path: Path, waits: Callable[[], None]) -> Iterator[None]:
    """Alone with a lock file; `waits` is called if somebody else has it."""
    with open(path, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waits()
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write_manifest(folder: Path, stamp: str, built: Built) -> None:
    """Describe what lies in a folder, once it has reached the disk."""
    for name in built.forms:
        with open(folder / name, "rb") as file:
            os.fsync(file.fileno())
    arrays = {name: [kind, list(shape), digest(folder / name)] for name, (kind, shape) in built.forms.items()}
    found = {"stamp": stamp, "arrays": arrays, "notes": built.notes}
    with open(folder / MANIFEST, "w", encoding="utf-8") as file:
        json.dump(found | {"digest": _of_json(found)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _of_json(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _tell(text: str) -> None:
    warnings.warn(text, DataWarning, stacklevel=2)
