"""FLAIR (Song et al., 2022): multi-label photographs of 51,414 users, resized once into a store."""

import contextlib
import hashlib
import itertools
import warnings
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from fedcog.data import array_store
from fedcog.data.datasets import DataError, Dataset, DataWarning
from fedcog.data.fetching import Progress
from fedcog.data.flair.hdf5 import Hdf5Layout
from fedcog.data.flair.layouts import (
    IMAGE_FOLDER,
    LABELS,
    METADATA_FILE,
    ImageEntry,
    ImageFault,
    Layout,
    MlFlairLayout,
)

IMAGE_SIZE = 64
"""Height and width of images after resizing."""
MAX_FAULTY_FRACTION = 0.05
"""Largest fraction of all images that may be unusable."""
DECODE_BATCH = 256
"""Images that are decoded before they are written."""
MAX_NAMES_SHOWN = 5
"""Names per kind of fault in messages; the manifest of the store has all names."""
STORE_VERSION = 1
"""Version of the decoding; stores of other versions are rebuilt."""
# ImageNet's statistics, as in pfl-research.
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)

Faults = dict[str, list[str]]
"""Names of unusable images by kind of fault."""


def read_flair(folder: str | Path, *, size: int = IMAGE_SIZE) -> Dataset:
    """Read FLAIR's training and test images with the 17 coarse labels.

    Unusable images are left out with a warning. Users of the validation split are not read.

    Args:
        folder: Folder of ml-flair's or pfl-research's files.
        size: Height and width of images.

    Returns:
        The data set, multi-label and with users.

    Raises:
        DataError: If files are missing or damaged, or too many images are unusable.
    """
    stored = prepare(folder, size=size)
    if message := describe_unusable(folder, stored):
        warnings.warn(message, DataWarning, stacklevel=2)
    tensors = {name: torch.from_numpy(array) for name, array in stored.arrays.items()}
    return Dataset(
        "flair",
        tensors["train_x"],
        tensors["train_y"],
        tensors["test_x"],
        tensors["test_y"],
        LABELS,
        MEAN,
        STD,
        augment=True,
        users=tensors["train_users"],
        digest=stored.digest,
    )


def prepare(
    folder: str | Path, progress: Progress | None = None, *, size: int = IMAGE_SIZE
) -> array_store.StoredArrays:
    """Decode and resize all images into a store; it is rebuilt when the files change.

    Args:
        folder: Folder of ml-flair's or pfl-research's files.
        progress: Called with "flair", the bytes written and the total bytes.
        size: Height and width of images.

    Returns:
        The stored arrays.

    Raises:
        DataError: If files are missing or damaged, or too many images are unusable.
    """
    folder = Path(folder)
    with contextlib.closing(open_layout(folder)) as layout:
        try:
            identity = f"{STORE_VERSION} {LABELS} {size} {layout.stamp()}"
        except OSError as error:
            raise DataError(f"{folder} cannot be read ({error})") from error
        stamp = hashlib.sha256(identity.encode()).hexdigest()
        return array_store.open_or_build(
            _store_path(folder, size), stamp, lambda part: _build(layout, part, size, progress)
        )


def describe_unusable(folder: str | Path, stored: array_store.StoredArrays) -> str:
    """Describe the images that were left out.

    Args:
        folder: Folder of FLAIR.
        stored: Its store.

    Returns:
        Their number, and the first names of each kind; empty if all images were usable.
    """
    notes = stored.notes
    if not notes["faults"]:
        return ""
    return f"FLAIR in {folder}{_describe_faults(notes['faults'], notes['listed'])}"


def missing_files(folder: Path) -> list[str]:
    """List what a folder lacks to hold FLAIR in one of its layouts."""
    if (folder / METADATA_FILE).is_file():
        return [] if (folder / IMAGE_FOLDER).is_dir() else [IMAGE_FOLDER]
    if _hdf5_files(folder):
        return []
    return [f"{METADATA_FILE} with {IMAGE_FOLDER}, or a .hdf5 file"]


def open_layout(folder: Path) -> Layout:
    """Open FLAIR in the layout of a folder; ml-flair's has precedence."""
    if missing := missing_files(folder):
        raise DataError(f"{folder} lacks {missing[0]}: get FLAIR from github.com/apple/ml-flair")
    if (folder / METADATA_FILE).is_file():
        return MlFlairLayout(folder)
    files = _hdf5_files(folder)
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:5])
        raise DataError(f"{folder} holds {names}: leave one of them there")
    return Hdf5Layout(files[0])


def _hdf5_files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.glob("*.hdf5") if file.is_file())


def list_images(layout: Layout) -> tuple[dict[str, list[ImageEntry]], Faults]:
    """List the images of both splits, sorted by user and name, and the unusable ones."""
    splits: dict[str, dict[str, ImageEntry]] = {"train": {}, "test": {}}
    faults: Faults = defaultdict(list)
    for entry in layout.entries():
        if isinstance(entry, ImageFault):
            faults[entry.kind].append(entry.name)
        elif any(entry.image_id in split for split in splits.values()):
            faults["repeated"].append(entry.image_id)
        elif entry.split in splits:
            splits[entry.split][entry.image_id] = entry
    ordered = {
        name: sorted(split.values(), key=lambda entry: (entry.user, entry.image_id))
        for name, split in splits.items()
    }
    return ordered, faults


def _build(
    layout: Layout, folder: Path, size: int, progress: Progress | None
) -> array_store.BuildResult:
    """Write the arrays of both splits into a folder."""
    splits, faults = list_images(layout)
    image_bytes = 3 * size * size
    num_images = sum(map(len, splits.values()))
    num_listed = num_images + sum(map(len, faults.values()))
    _check_faults(faults, num_listed)
    num_done = 0
    formats: dict[str, tuple[str, tuple[int, ...]]] = {}

    def advance(count: int) -> None:
        nonlocal num_done
        num_done += count
        if progress is not None:
            progress("flair", num_done * image_bytes, num_images * image_bytes)

    for split, entries in splits.items():
        usable = []
        with open(folder / f"{split}_x", "wb") as file:
            for start in range(0, len(entries), DECODE_BATCH):
                batch = entries[start : start + DECODE_BATCH]
                for entry, pixels in zip(batch, _decode(layout, batch, size), strict=True):
                    if isinstance(pixels, ImageFault):
                        faults[pixels.kind].append(pixels.name)
                    else:
                        usable.append(entry)
                        file.write(pixels)
                advance(len(batch))
        if not usable:
            details = _describe_faults(faults, num_listed)
            raise DataError(f"FLAIR has no {split} images here{details}")
        formats[f"{split}_x"] = ("uint8", (len(usable), 3, size, size))
        formats |= _write_labels_and_users(folder, split, usable)
    _check_faults(faults, num_listed)
    return array_store.BuildResult(formats, {"listed": num_listed, "faults": faults})


def _write_labels_and_users(
    folder: Path, split: str, entries: list[ImageEntry]
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Write labels and users of a split; return the formats of these arrays."""
    by_user = itertools.groupby(entries, lambda entry: entry.user)
    users = [number for number, (_, images) in enumerate(by_user) for _ in images]
    labels = np.zeros((len(entries), len(LABELS)), dtype=bool)
    for row, entry in enumerate(entries):
        labels[row, list(entry.labels)] = True
    labels.tofile(folder / f"{split}_y")
    np.array(users, dtype=np.int64).tofile(folder / f"{split}_users")
    return {
        f"{split}_y": ("bool", labels.shape),
        f"{split}_users": ("int64", (len(entries),)),
    }


def _decode(layout: Layout, entries: list[ImageEntry], size: int) -> list[bytes | ImageFault]:
    """Decode and resize images, channels first, in threads: Pillow releases the GIL."""

    def decode(entry: ImageEntry) -> bytes | ImageFault:
        try:
            image = layout.read_image(entry)
        except ImageFault as fault:
            return fault
        resized = np.asarray(image.resize((size, size), Image.Resampling.BOX))
        return resized.transpose(2, 0, 1).tobytes()

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        return list(pool.map(decode, entries))


def _check_faults(faults: Faults, num_listed: int) -> None:
    """Refuse to continue if too many images are unusable."""
    if sum(map(len, faults.values())) > MAX_FAULTY_FRACTION * num_listed:
        raise DataError(
            f"too much of FLAIR cannot be used{_describe_faults(faults, num_listed)}. "
            "Get it again, or what it lacks"
        )


def _describe_faults(faults: Faults, num_listed: int) -> str:
    """Count the images that are left out, and name the first of each kind."""
    lines = []
    for kind, names in faults.items():
        more = ""
        if len(names) > MAX_NAMES_SHOWN:
            more = f", and {len(names) - MAX_NAMES_SHOWN:,} more"
        lines.append(f"\n  {len(names):,} {kind}: {'; '.join(names[:MAX_NAMES_SHOWN])}{more}")
    total = sum(map(len, faults.values()))
    return f": of {num_listed:,} images {total:,} are left out" + "".join(lines)


def _store_path(folder: Path, size: int) -> Path:
    """Return the store of a folder and size; a changed folder's store replaces the old one."""
    key = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:12]
    return array_store.cache_dir() / "stores" / f"flair-{key}-{size}"
