"""What FLAIR's files list, in any layout; and its publisher's own, ml-flair: JSON with a JPEG for each image."""

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
    *("animal", "art", "celebration", "equipment", "fire", "food", "games", "interior_room", "light", "liquid"),
    *("material", "music", "outdoor", "plant", "recreation", "religion", "structure"),
)
LIST, IMAGES = "labels_and_metadata.json", "small_images"
PARTS = ("train", "val", "dev", "test")  # ml-flair calls the second by both names
LONGEST_LIST = 1 << 30  # bytes
LARGEST = 1 << 24  # pixels of an image, before it is decoded
LONGEST_NAME = 120

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
        self.kind, self.name = kind, "".join(c if c.isprintable() else "?" for c in name[:LONGEST_NAME])
        super().__init__(self.name)


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


class Folder:
    """ml-flair's layout: a JSON list of records, and a folder of images."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def stamp(self) -> str:
        """As `Layout` says."""
        with os.scandir(self.folder / IMAGES) as found:
            images = sorted((one.name, one.stat()) for one in found if one.is_file())
        return stamp_of([(LIST, (self.folder / LIST).stat()), *images])

    def entries(self) -> Iterator[Entry | Fault]:
        """As `Layout` says. A record becomes an entry as soon as it is read, which keeps memory low."""
        path = self.folder / LIST
        try:
            if path.stat().st_size > LONGEST_LIST:
                raise DataError(f"{path} is longer than {LONGEST_LIST:,} bytes: not the publisher's file")
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
        path = self.folder / IMAGES / f"{entry.image}.jpg"
        if not path.is_file():
            raise Fault("missing", path.name)
        try:
            with Image.open(path, formats=["JPEG"]) as image:
                if image.width * image.height > LARGEST:
                    raise Fault("corrupt", f"{path.name}: {image.width} x {image.height} pixels")
                return image.convert("RGB")
        except (OSError, ValueError, SyntaxError, EOFError, struct.error, Image.DecompressionBombError) as error:
            if isinstance(error, OSError) and error.errno is not None:  # the system's, which somebody can mend
                raise DataError(f"{path} cannot be read ({error.strerror}): see to it, and begin again") from error
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
    if not isinstance(labels, list):
        return Fault("mislabelled", f"{image}: labels {labels!r}")
    if strange := [label for label in labels if label not in LABELS]:
        return Fault("mislabelled", f"{image}: {strange[0]!r}")
    return Entry(part, user, image, tuple(LABELS.index(label) for label in labels))


def stamp_of(files: list[tuple[str, os.stat_result]]) -> str:
    """A digest of names, sizes and times of change."""
    found = hashlib.sha256()
    for name, about in files:
        found.update(f"{name}/{about.st_size}/{about.st_mtime_ns}\n".encode(errors="surrogateescape"))
    return found.hexdigest()
