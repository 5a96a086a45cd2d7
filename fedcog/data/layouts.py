"""FLAIR as it is published: ml-flair's JSON with a JPEG for each image, and pfl-research's HDF5 with a group a user."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from PIL import Image

from fedcog.data.datasets import DataError

LABELS = (
    *("animal", "art", "celebration", "equipment", "fire", "food", "games", "interior_room", "light", "liquid"),
    *("material", "music", "outdoor", "plant", "recreation", "religion", "structure"),
)
PARTS = ("train", "val", "dev", "test")  # ml-flair calls the second by both names
LONGEST_LIST, LONGEST_MAPPING = 1 << 30, 1 << 16  # bytes
LARGEST = 1 << 24  # pixels of an image, before it is decoded
LONGEST_NAME = 120
MOST, LONGEST_ID = 1 << 16, 64  # images of a user in HDF5, whose rows are 16 bits there; bytes of an image's name

Kind = Literal["missing", "corrupt", "mislabelled", "repeated"]


class Entry(NamedTuple):
    """An image that is listed: its part of the data set, whose it is, its name, its labels, its row in HDF5."""

    part: str
    user: str
    image: str
    labels: tuple[int, ...]
    row: int = 0


class Fault(Exception):
    """An image that cannot be used: in what way, and which."""

    def __init__(self, kind: Kind, name: str) -> None:
        super().__init__(kind, name)
        self.kind, self.name = kind, "".join(c if c.isprintable() else "?" for c in name[:LONGEST_NAME])


class Layout(Protocol):
    """A published form of FLAIR."""

    def stamp(self) -> str:
        """A digest of names, sizes and times of change: another one means other files."""

    def entries(self) -> Iterator[Entry | Fault]:
        """All that is listed, in no particular order."""

    def image(self, entry: Entry) -> Image.Image:
        """An image that was listed, decoded; or its fault is raised."""

    def close(self) -> None:
        """Let go of open files."""


def lacking(folder: Path) -> list[str]:
    """What a folder lacks to be FLAIR in one layout or the other."""
    if (folder / Folder.LIST).is_file():
        return [] if (folder / Folder.IMAGES).is_dir() else [Folder.IMAGES]
    return [] if _hdf5(folder) else [f"{Folder.LIST} with {Folder.IMAGES}, or a .hdf5 file"]


def find(folder: Path) -> Layout:
    """FLAIR in the layout that a folder has; of both, ml-flair's own."""
    if missing := lacking(folder):
        raise DataError(f"{folder} lacks {missing[0]}: get FLAIR from github.com/apple/ml-flair")
    if (folder / Folder.LIST).is_file():
        return Folder(folder)
    files = _hdf5(folder)
    if len(files) > 1:
        raise DataError(f"{folder} holds {', '.join(file.name for file in files[:5])}: leave one of them there")
    return Hdf5(files[0])


def _hdf5(folder: Path) -> list[Path]:
    return sorted(file for file in folder.glob("*.hdf5") if file.is_file())


class Folder:
    """ml-flair's layout: a JSON list of records, and a folder of images."""

    LIST, IMAGES = "labels_and_metadata.json", "small_images"

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def stamp(self) -> str:
        """As `Layout` says."""
        with os.scandir(self.folder / self.IMAGES) as found:
            images = sorted((one.name, one.stat()) for one in found if one.is_file())
        return _stamp([(self.LIST, (self.folder / self.LIST).stat()), *images])

    def entries(self) -> Iterator[Entry | Fault]:
        """As `Layout` says. A record becomes an entry as soon as it is read, which keeps memory low."""
        path = self.folder / self.LIST
        if path.stat().st_size > LONGEST_LIST:
            raise DataError(f"{path} is longer than {LONGEST_LIST:,} bytes: not the publisher's file")
        try:
            with open(path, encoding="utf-8") as file:
                found = json.load(file, object_hook=_entry)
        except (OSError, ValueError, RecursionError) as error:
            raise DataError(f"{path} cannot be read ({error}): fetch it again") from error
        if not isinstance(found, list):
            raise DataError(f"{path} is not a list of records: fetch it again")
        for place, one in enumerate(found):
            yield one if isinstance(one, Entry | Fault) else Fault("mislabelled", f"record {place}: {one!r}")

    def image(self, entry: Entry) -> Image.Image:
        """As `Layout` says. The size is looked at before anything is decoded."""
        path = self.folder / self.IMAGES / f"{entry.image}.jpg"
        if not path.is_file():
            raise Fault("missing", path.name)
        try:
            with Image.open(path, formats=["JPEG"]) as image:
                if image.width * image.height > LARGEST:
                    raise Fault("corrupt", f"{path.name}: {image.width} x {image.height} pixels")
                return image.convert("RGB")
        except (OSError, ValueError, SyntaxError, EOFError, struct.error, Image.DecompressionBombError) as error:
            raise Fault("corrupt", f"{path.name}: {error}") from error

    def close(self) -> None:
        """As `Layout` says: none is open."""


def _entry(record: dict[str, Any]) -> Entry | Fault:
    """A record of the JSON list, if all of it can be understood. An image's name must not lead out of its folder."""
    image, user, part, labels = (record.get(key) for key in ("image_id", "user_id", "partition", "labels"))
    if not isinstance(image, str) or not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", image):
        return Fault("mislabelled", f"image_id {image!r}")
    if not isinstance(user, str) or not user:
        return Fault("mislabelled", f"{image}: user_id {user!r}")
    if part not in PARTS:
        return Fault("mislabelled", f"{image}: partition {part!r}")
    if not isinstance(labels, list) or (strange := [label for label in labels if label not in LABELS]):
        return Fault("mislabelled", f"{image}: {labels if not isinstance(labels, list) else strange[0]!r}")
    return Entry(part, user, image, tuple(LABELS.index(label) for label in labels))


class Hdf5:
    """pfl-research's layout: /PART/USER/ with images, image_ids, and labels as rows and columns of a sparse matrix.

    Nothing outside the file is followed to, and every size and type is looked at before anything is read.
    """

    def __init__(self, path: Path) -> None:
        try:
            import h5py
        except ImportError as error:
            raise DataError(f"reading {path.name} needs h5py: pip install 'fedcog[flair]'") from error
        self.h5py, self.path = h5py, path

    def stamp(self) -> str:
        """As `Layout` says."""
        return _stamp([(self.path.name, self.path.stat())])

    @functools.cached_property
    def file(self) -> Any:
        """The open file."""
        try:
            return self.h5py.File(self.path, "r", locking=False)
        except OSError as error:
            raise DataError(f"{self.path} cannot be read ({error}): make it again") from error

    def close(self) -> None:
        """As `Layout` says."""
        if "file" in self.__dict__:
            self.file.close()

    def entries(self) -> Iterator[Entry | Fault]:
        """As `Layout` says. A user whose group is unsound is one fault."""
        try:
            columns = self._columns()
            users = {part: self._inside(self.file, part, self.h5py.Group) for part in ("train", "test")}
        except Fault as fault:
            raise DataError(f"{self.path} is not laid out as pfl-research does it: {fault.name}") from fault
        for part, group in users.items():
            for user in group:
                try:
                    yield from self._user(part, user, group, columns)
                except Fault as fault:
                    yield fault
                except (OSError, RuntimeError, KeyError, ValueError) as error:
                    yield Fault("corrupt", f"{part}/{user}: {error}")

    def image(self, entry: Entry) -> Image.Image:
        """As `Layout` says."""
        try:
            return Image.fromarray(self.file[f"{entry.part}/{entry.user}/images"][entry.row])
        except (OSError, RuntimeError, KeyError, ValueError) as error:
            raise Fault("corrupt", f"{entry.part}/{entry.user}/{entry.image}: {error}") from error

    def _columns(self) -> dict[int, int]:
        """Which of our labels each column stands for."""
        text = self._array(self._inside(self.file, "metadata", self.h5py.Group), "label_mapping", "OS", ())[()]
        try:
            found = json.loads(text) if len(text) <= LONGEST_MAPPING else None
        except (ValueError, TypeError, RecursionError) as error:
            raise Fault("corrupt", f"label_mapping: {error}") from error
        if not isinstance(found, dict) or not all(type(column) is int for column in found.values()):
            raise Fault("corrupt", "label_mapping does not say which column each label has")
        return {column: LABELS.index(label) for label, column in found.items() if label in LABELS}

    def _user(self, part: str, user: str, users: Any, columns: dict[int, int]) -> list[Entry | Fault]:
        group, name = self._inside(users, user, self.h5py.Group), f"{part}/{user}"
        images = self._array(group, "images", "u", (-1, -1, -1, 3))
        count, pixels = len(images), images.shape[1] * images.shape[2]
        if images.dtype != np.uint8 or count > MOST or not 0 < pixels <= LARGEST:
            raise Fault("corrupt", f"{name}/images: {images.dtype} {list(images.shape)}")
        names = self._array(group, "image_ids", "S", (count,))
        if names.dtype.itemsize > LONGEST_ID:
            raise Fault("corrupt", f"{name}/image_ids: {names.dtype}")
        rows = self._array(group, "labels_row", "u", (-1,))
        if len(rows) > len(LABELS) * count:
            raise Fault("mislabelled", f"{name}: {len(rows)} labels of {count} images")
        pairs = list(zip(rows[:].tolist(), self._array(group, "labels_col", "u", rows.shape)[:].tolist(), strict=True))
        if any(row >= count for row, _ in pairs):
            raise Fault("mislabelled", f"{name}: labels of more than its {count} images")
        labels: list[list[int]] = [[] for _ in range(count)]
        strange = dict[int, int]()
        for row, column in pairs:
            if column in columns:
                labels[row].append(columns[column])
            else:
                strange[row] = column
        return [
            Fault("mislabelled", f"{name}/{image.decode(errors='replace')}: label {strange[row]}")
            if row in strange
            else Entry(part, user, image.decode(errors="replace"), tuple(labels[row]), row)
            for row, image in enumerate(names[:].tolist())
        ]

    def _inside(self, group: Any, name: str, kind: type) -> Any:
        """A member of a group that lies in this very file; links are not followed."""
        links, key = group.id.links, name.encode()
        if not links.exists(key) or links.get_info(key).type != self.h5py.h5l.TYPE_HARD:
            raise Fault("corrupt", f"{group.name.rstrip('/')}/{name} is missing, or a link")
        found = group[name]
        if not isinstance(found, kind):
            raise Fault("corrupt", f"{found.name} is a {type(found).__name__}")
        return found

    def _array(self, group: Any, name: str, kinds: str, shape: tuple[int, ...]) -> Any:
        """A member that is an array of a kind and a shape (-1: of any length), and of chunks that fit into memory."""
        found = self._inside(group, name, self.h5py.Dataset)
        fits = len(found.shape or ()) == len(shape) and found.shape is not None
        if not fits or any(side not in (-1, real) for side, real in zip(shape, found.shape, strict=True)):
            raise Fault("corrupt", f"{found.name} is {found.shape}")
        if found.dtype.kind not in kinds:
            raise Fault("corrupt", f"{found.name} holds {found.dtype}")
        if found.external or found.is_virtual:
            raise Fault("corrupt", f"{found.name} lies in another file")
        if found.chunks and math.prod(found.chunks) * found.dtype.itemsize > 8 * LARGEST:
            raise Fault("corrupt", f"{found.name} has chunks of {found.chunks}")
        return found


def _stamp(files: list[tuple[str, os.stat_result]]) -> str:
    found = hashlib.sha256()
    for name, about in files:
        found.update(f"{name}/{about.st_size}/{about.st_mtime_ns}\n".encode(errors="surrogateescape"))
    return found.hexdigest()
