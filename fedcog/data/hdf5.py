"""FLAIR in pfl-research's layout: one HDF5 file with a group for each user."""

import contextlib
import functools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fedcog.data.datasets import DataError
from fedcog.data.layouts import LABELS, LARGEST, Entry, Fault, stamp_of

MOST = 1 << 16  # images of a user: rows are 16 bits here
BROKEN = (OSError, RuntimeError, KeyError, ValueError, AttributeError)  # what h5py raises over a damaged file
LONGEST_ID, LONGEST_MAPPING = 64, 1 << 16  # bytes


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
        return stamp_of([(self.path.name, self.path.stat())])

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
        """As `Layout` says. A user whose group is unsound is as many faults as it lists images."""
        try:
            columns = self._columns()
            parts = {part: self._inside(self.file, part, self.h5py.Group) for part in ("train", "test")}
            users = [(part, group, user) for part, group in parts.items() for user in group]
        except (Fault, *BROKEN) as error:
            raise DataError(f"{self.path} is not laid out as pfl-research does it: {error}") from error
        for part, group, user in users:
            try:
                yield from self._user(part, user, group, columns)
            except (Fault, *BROKEN) as error:
                first = error if isinstance(error, Fault) else Fault("corrupt", f"{part}/{user}: {error}")
                yield first
                for row in range(1, self._listed(group, user)):
                    yield Fault(first.kind, f"{part}/{user}, image {row + 1}")

    def image(self, entry: Entry) -> Image.Image:
        """As `Layout` says."""
        try:
            return Image.fromarray(self.file[f"{entry.part}/{entry.user}/images"][entry.row])
        except BROKEN as error:
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
        if len({*found.values()}) < len(found):
            raise Fault("corrupt", "label_mapping has two labels in one column")
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

    def _listed(self, users: Any, user: str) -> int:
        """How many images a user has whose group is unsound, as far as that can be told and believed."""
        found = [1]
        for name in ("image_ids", "images"):
            with contextlib.suppress(Fault, *BROKEN):
                array = self._inside(self._inside(users, user, self.h5py.Group), name, self.h5py.Dataset)
                found += [count for count in array.shape[:1] if count <= MOST]
        return max(found)

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
