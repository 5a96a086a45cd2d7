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
from fedcog.data.flair.layouts import LABELS, MAX_IMAGE_PIXELS, ImageEntry, ImageFault, stamp_of

MAX_USER_IMAGES = 1 << 16
"""Images per user; the layout stores rows in 16 bits."""
MAX_ID_BYTES = 64
MAX_MAPPING_BYTES = 1 << 16
MAX_CHUNK_BYTES = 8 * MAX_IMAGE_PIXELS
HDF5_ERRORS = (OSError, RuntimeError, KeyError, ValueError, AttributeError)
"""What h5py raises for a damaged file."""


class Hdf5Layout:
    """pfl-research's layout: images, image_ids and sparse labels in the group /SPLIT/USER.

    Links and external storage are refused, and sizes and types are checked before anything is read.
    """

    def __init__(self, path: Path) -> None:
        try:
            import h5py
        except ImportError as error:
            raise DataError(
                f"reading {path.name} needs h5py: pip install 'fedcog[flair]'"
            ) from error
        self.h5py = h5py
        self.path = path

    def stamp(self) -> str:
        """See `Layout`."""
        return stamp_of([(self.path.name, self.path.stat())])

    @functools.cached_property
    def file(self) -> Any:
        """The open file."""
        try:
            return self.h5py.File(self.path, "r", locking=False)
        except OSError as error:
            raise DataError(f"{self.path} cannot be read ({error}): make it again") from error

    def close(self) -> None:
        """See `Layout`."""
        if "file" in self.__dict__:
            self.file.close()

    def entries(self) -> Iterator[ImageEntry | ImageFault]:
        """See `Layout`. A damaged group yields one fault for each image that it lists."""
        try:
            columns = self._label_columns()
            groups = {
                split: self._member(self.file, split, self.h5py.Group)
                for split in ("train", "test")
            }
            users = [(split, group, user) for split, group in groups.items() for user in group]
        except (ImageFault, *HDF5_ERRORS) as error:
            raise DataError(f"{self.path} does not have pfl-research's layout: {error}") from error
        for split, group, user in users:
            try:
                yield from self._user_entries(split, user, group, columns)
            except (ImageFault, *HDF5_ERRORS) as error:
                fault = error
                if not isinstance(fault, ImageFault):
                    fault = ImageFault("corrupt", f"{split}/{user}: {error}")
                yield fault
                for row in range(1, self._count_images(group, user)):
                    yield ImageFault(fault.kind, f"{split}/{user}, image {row + 1}")

    def read_image(self, entry: ImageEntry) -> Image.Image:
        """See `Layout`."""
        user = f"{entry.split}/{entry.user}"
        try:
            return Image.fromarray(self.file[f"{user}/images"][entry.row])
        except HDF5_ERRORS as error:
            raise ImageFault("corrupt", f"{user}/{entry.image_id}: {error}") from error

    def _label_columns(self) -> dict[int, int]:
        """Map columns of the sparse labels to positions in `LABELS`."""
        metadata = self._member(self.file, "metadata", self.h5py.Group)
        text = self._array(metadata, "label_mapping", "OS", ())[()]
        try:
            mapping = json.loads(text) if len(text) <= MAX_MAPPING_BYTES else None
        except (ValueError, TypeError, RecursionError) as error:
            raise ImageFault("corrupt", f"label_mapping: {error}") from error
        if not isinstance(mapping, dict) or not all(type(c) is int for c in mapping.values()):
            raise ImageFault("corrupt", "label_mapping does not say which column each label has")
        if len({*mapping.values()}) < len(mapping):
            raise ImageFault("corrupt", "label_mapping has two labels in one column")
        return {column: LABELS.index(label) for label, column in mapping.items() if label in LABELS}

    def _user_entries(
        self, split: str, user: str, users: Any, columns: dict[int, int]
    ) -> list[ImageEntry | ImageFault]:
        group = self._member(users, user, self.h5py.Group)
        name = f"{split}/{user}"
        images = self._array(group, "images", "u", (-1, -1, -1, 3))
        count = len(images)
        pixels = images.shape[1] * images.shape[2]
        is_valid = count <= MAX_USER_IMAGES and 0 < pixels <= MAX_IMAGE_PIXELS
        if images.dtype != np.uint8 or not is_valid:
            raise ImageFault("corrupt", f"{name}/images: {images.dtype} {list(images.shape)}")
        image_ids = self._array(group, "image_ids", "S", (count,))
        if image_ids.dtype.itemsize > MAX_ID_BYTES:
            raise ImageFault("corrupt", f"{name}/image_ids: {image_ids.dtype}")
        labels: list[list[int]] = [[] for _ in range(count)]
        unknown: dict[int, int] = {}
        for row, column in self._sparse_labels(group, name, count):
            if column in columns:
                labels[row].append(columns[column])
            else:
                unknown[row] = column
        entries: list[ImageEntry | ImageFault] = []
        for row, encoded in enumerate(image_ids[:].tolist()):
            image_id = encoded.decode(errors="replace")
            if row in unknown:
                fault = ImageFault("mislabelled", f"{name}/{image_id}: label {unknown[row]}")
                entries.append(fault)
            else:
                entries.append(ImageEntry(split, user, image_id, tuple(labels[row]), row))
        return entries

    def _sparse_labels(self, group: Any, name: str, count: int) -> list[tuple[int, int]]:
        """Read the (row, column) pairs of a user's labels."""
        rows = self._array(group, "labels_row", "u", (-1,))
        if len(rows) > len(LABELS) * count:
            raise ImageFault("mislabelled", f"{name}: {len(rows)} labels of {count} images")
        columns = self._array(group, "labels_col", "u", rows.shape)
        pairs = list(zip(rows[:].tolist(), columns[:].tolist(), strict=True))
        if any(row >= count for row, _ in pairs):
            raise ImageFault("mislabelled", f"{name}: labels of more than its {count} images")
        return pairs

    def _count_images(self, users: Any, user: str) -> int:
        """Count the images of a user whose group is damaged, as far as possible; at least 1."""
        counts = [1]
        for name in ("image_ids", "images"):
            with contextlib.suppress(ImageFault, *HDF5_ERRORS):
                group = self._member(users, user, self.h5py.Group)
                array = self._member(group, name, self.h5py.Dataset)
                counts += [count for count in array.shape[:1] if count <= MAX_USER_IMAGES]
        return max(counts)

    def _member(self, group: Any, name: str, kind: type) -> Any:
        """Return a member of a group that is stored in this file; links are refused."""
        links = group.id.links
        key = name.encode()
        if not links.exists(key) or links.get_info(key).type != self.h5py.h5l.TYPE_HARD:
            raise ImageFault("corrupt", f"{group.name.rstrip('/')}/{name} is missing, or a link")
        member = group[name]
        if not isinstance(member, kind):
            raise ImageFault("corrupt", f"{member.name} is a {type(member).__name__}")
        return member

    def _array(self, group: Any, name: str, kinds: str, shape: tuple[int, ...]) -> Any:
        """Return an array of given dtype kinds and shape (-1 for any length), of small chunks."""
        array = self._member(group, name, self.h5py.Dataset)
        has_rank = array.shape is not None and len(array.shape) == len(shape)
        if not has_rank or any(
            expected not in (-1, size) for expected, size in zip(shape, array.shape, strict=True)
        ):
            raise ImageFault("corrupt", f"{array.name} is {array.shape}")
        if array.dtype.kind not in kinds:
            raise ImageFault("corrupt", f"{array.name} holds {array.dtype}")
        if array.external or array.is_virtual:
            raise ImageFault("corrupt", f"{array.name} is stored in another file")
        if array.chunks and math.prod(array.chunks) * array.dtype.itemsize > MAX_CHUNK_BYTES:
            raise ImageFault("corrupt", f"{array.name} has chunks of {array.chunks}")
        return array
