"""Layouts of FLAIR's files: the interface, and ml-flair's layout of a JSON list and JPEG files."""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from PIL import Image

from fedcog.data.datasets import DataError

LABELS = (
    "animal",
    "art",
    "celebration",
    "equipment",
    "fire",
    "food",
    "games",
    "interior_room",
    "light",
    "liquid",
    "material",
    "music",
    "outdoor",
    "plant",
    "recreation",
    "religion",
    "structure",
)
METADATA_FILE = "labels_and_metadata.json"
IMAGE_FOLDER = "small_images"
SPLITS = ("train", "val", "dev", "test")  # ml-flair calls the second split by both names
MAX_METADATA_BYTES = 1 << 30
MAX_IMAGE_PIXELS = 1 << 24
"""Largest image that is decoded."""
MAX_NAME_LENGTH = 120
"""Characters of a name that messages show."""

FaultKind = Literal["missing", "corrupt", "mislabelled", "repeated"]


class ImageEntry(NamedTuple):
    """An image that a layout lists.

    Attributes:
        split: Its split: train, val, dev or test.
        user: Its user.
        image_id: Its name.
        labels: Positions of its labels in `LABELS`.
        row: Its row in the user's HDF5 group.
    """

    split: str
    user: str
    image_id: str
    labels: tuple[int, ...]
    row: int = 0


class ImageFault(Exception):
    """An image that cannot be used: the kind of fault, and the name of the image."""

    def __init__(self, kind: FaultKind, name: str) -> None:
        """Record a fault.

        Args:
            kind: The kind of fault.
            name: Name of the image, with details; unprintable characters are replaced.
        """
        self.kind = kind
        self.name = "".join(c if c.isprintable() else "?" for c in name[:MAX_NAME_LENGTH])
        super().__init__(self.name)


class Layout(Protocol):
    """A published layout of FLAIR's files."""

    def stamp(self) -> str:
        """Return a digest of names, sizes and modification times of all files."""

    def entries(self) -> Iterator[ImageEntry | ImageFault]:
        """Yield all images in any order, and a fault for each that cannot be used."""

    def read_image(self, entry: ImageEntry) -> Image.Image:
        """Decode an image; raise an ImageFault if that is impossible."""

    def close(self) -> None:
        """Close open files."""


class MlFlairLayout:
    """ml-flair's layout: a JSON list of records, and a folder of JPEG files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def stamp(self) -> str:
        """See `Layout`."""
        with os.scandir(self.folder / IMAGE_FOLDER) as entries:
            images = sorted((entry.name, entry.stat()) for entry in entries if entry.is_file())
        return stamp_of([(METADATA_FILE, (self.folder / METADATA_FILE).stat()), *images])

    def entries(self) -> Iterator[ImageEntry | ImageFault]:
        """See `Layout`. Records are converted while the JSON is parsed, to save memory."""
        path = self.folder / METADATA_FILE
        try:
            if path.stat().st_size > MAX_METADATA_BYTES:
                raise DataError(
                    f"{path} is longer than {MAX_METADATA_BYTES:,} bytes: not the publisher's file"
                )
            with open(path, encoding="utf-8") as file:
                records = json.load(file, object_hook=_parse_record)
        except (OSError, ValueError, RecursionError) as error:
            raise DataError(f"{path} cannot be read ({error}): fetch it again") from error
        if not isinstance(records, list):
            raise DataError(f"{path} is not a list of records: fetch it again")
        for position, record in enumerate(records):
            if isinstance(record, ImageEntry | ImageFault):
                yield record
            else:
                yield ImageFault("mislabelled", f"record {position}: {record!r}")

    def read_image(self, entry: ImageEntry) -> Image.Image:
        """See `Layout`. The size is checked before anything is decoded."""
        path = self.folder / IMAGE_FOLDER / f"{entry.image_id}.jpg"
        if not path.is_file():
            raise ImageFault("missing", path.name)
        try:
            with Image.open(path, formats=["JPEG"]) as image:
                if image.width * image.height > MAX_IMAGE_PIXELS:
                    raise ImageFault(
                        "corrupt", f"{path.name}: {image.width} x {image.height} pixels"
                    )
                return image.convert("RGB")
        except (
            OSError,
            ValueError,
            SyntaxError,
            EOFError,
            struct.error,
            Image.DecompressionBombError,
        ) as error:
            # An error of the operating system, unlike a damaged image, can be repaired.
            if isinstance(error, OSError) and error.errno is not None:
                raise DataError(
                    f"{path} cannot be read ({error.strerror}): repair this, and start again"
                ) from error
            raise ImageFault("corrupt", f"{path.name}: {error}") from error

    def close(self) -> None:
        """See `Layout`. No file stays open."""


def _parse_record(record: dict[str, Any]) -> ImageEntry | ImageFault:
    """Convert a record of the JSON list; an image's name must not lead out of its folder."""
    image_id = record.get("image_id")
    user = record.get("user_id")
    split = record.get("partition")
    labels = record.get("labels")
    if not isinstance(image_id, str) or not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", image_id):
        return ImageFault("mislabelled", f"image_id {image_id!r}")
    if not isinstance(user, str) or not user:
        return ImageFault("mislabelled", f"{image_id}: user_id {user!r}")
    if split not in SPLITS:
        return ImageFault("mislabelled", f"{image_id}: partition {split!r}")
    if not isinstance(labels, list):
        return ImageFault("mislabelled", f"{image_id}: labels {labels!r}")
    if unknown := [label for label in labels if label not in LABELS]:
        return ImageFault("mislabelled", f"{image_id}: {unknown[0]!r}")
    return ImageEntry(split, user, image_id, tuple(LABELS.index(label) for label in labels))


def stamp_of(files: list[tuple[str, os.stat_result]]) -> str:
    """Compute a digest of names, sizes and modification times."""
    sha256 = hashlib.sha256()
    for name, status in files:
        line = f"{name}/{status.st_size}/{status.st_mtime_ns}\n"
        sha256.update(line.encode(errors="surrogateescape"))
    return sha256.hexdigest()
