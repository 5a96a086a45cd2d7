"""FLAIR (Song et al., 2022): photographs of 51,414 users, several labels each, shrunk once and kept on disk."""

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

from fedcog.data import store
from fedcog.data.datasets import DataError, Dataset, DataWarning
from fedcog.data.download import Progress
from fedcog.data.hdf5 import Hdf5
from fedcog.data.layouts import IMAGES, LABELS, LIST, Entry, Fault, Folder, Layout

SIDE = 64
TOLERATED = 0.05
"""The share of all images that may be left out for their faults."""
AT_ONCE = 256  # images that are decoded before any is written
SHOWN = 5  # names of each kind of fault; the store's manifest has all
VERSION = 1  # of how images are made: a store made otherwise is made again
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's, as pfl-research has it by default

Faults = dict[str, list[str]]


def read_flair(folder: str | Path, *, side: int = SIDE) -> Dataset:
    """FLAIR's training and test images, side x side, with the 17 coarse labels, and whose each is.

    What cannot be used is left out, and told by a warning. Validation users are not read.
    """
    kept = prepare(folder, side=side)
    if told := left_out(folder, kept):
        warnings.warn(told, DataWarning, stacklevel=2)
    order = ("train_x", "train_y", "test_x", "test_y", "train_users")
    train_x, train_y, test_x, test_y, users = (torch.from_numpy(kept.arrays[name]) for name in order)
    return Dataset("flair", train_x, train_y, test_x, test_y, LABELS, MEAN, STD, True, users, digest=kept.digest)


def prepare(folder: str | Path, progress: Progress | None = None, *, side: int = SIDE) -> store.Kept:
    """The images decoded and shrunk into a store, which is mapped into memory: made once, and again for other files."""
    folder = Path(folder)
    with contextlib.closing(find(folder)) as layout:
        try:
            stamp = hashlib.sha256(f"{VERSION} {LABELS} {side} {layout.stamp()}".encode()).hexdigest()
        except OSError as error:
            raise DataError(f"{folder} cannot be read ({error})") from error
        return store.keep(_place(folder, side), stamp, lambda part: _build(layout, part, side, progress))


def left_out(folder: str | Path, kept: store.Kept) -> str:
    """How many images were left out, and the first of each kind by name; nothing, if none was."""
    return f"FLAIR in {folder}{_told(**kept.notes)}" if kept.notes["faults"] else ""


def lacking(folder: Path) -> list[str]:
    """What a folder lacks to be FLAIR in one layout or the other."""
    if (folder / LIST).is_file():
        return [] if (folder / IMAGES).is_dir() else [IMAGES]
    return [] if _hdf5(folder) else [f"{LIST} with {IMAGES}, or a .hdf5 file"]


def find(folder: Path) -> Layout:
    """FLAIR in the layout that a folder has; of both, ml-flair's own."""
    if missing := lacking(folder):
        raise DataError(f"{folder} lacks {missing[0]}: get FLAIR from github.com/apple/ml-flair")
    if (folder / LIST).is_file():
        return Folder(folder)
    files = _hdf5(folder)
    if len(files) > 1:
        raise DataError(f"{folder} holds {', '.join(file.name for file in files[:5])}: leave one of them there")
    return Hdf5(files[0])


def _hdf5(folder: Path) -> list[Path]:
    return sorted(file for file in folder.glob("*.hdf5") if file.is_file())


def listing(layout: Layout) -> tuple[dict[str, list[Entry]], Faults]:
    """The images of both parts by user and name, which is the same order for both layouts; and what is wrong."""
    parts: dict[str, dict[str, Entry]] = {"train": {}, "test": {}}
    faults: Faults = defaultdict(list)
    for one in layout.entries():
        if isinstance(one, Fault):
            faults[one.kind].append(one.name)
        elif any(one.image in part for part in parts.values()):
            faults["repeated"].append(one.image)
        elif one.part in parts:
            parts[one.part][one.image] = one
    return {name: sorted(part.values(), key=lambda one: (one.user, one.image)) for name, part in parts.items()}, faults


def _build(layout: Layout, folder: Path, side: int, progress: Progress | None) -> store.Built:
    """Writes both parts into files of a folder."""
    parts, faults = listing(layout)
    images, done = sum(map(len, parts.values())), 0
    listed = images + sum(map(len, faults.values()))
    _check(faults, listed)
    forms: dict[str, tuple[str, tuple[int, ...]]] = {}
    for part, entries in parts.items():
        kept = list[Entry]()
        with open(folder / f"{part}_x", "wb") as file:
            for at in range(0, len(entries), AT_ONCE):
                batch = entries[at : at + AT_ONCE]
                for entry, made in zip(batch, _decoded(layout, batch, side), strict=True):
                    if isinstance(made, Fault):
                        faults[made.kind].append(made.name)
                    else:
                        kept.append(entry)
                        file.write(made)
                done += len(batch)
                if progress is not None:
                    progress("flair", done * 3 * side * side, images * 3 * side * side)
        if not kept:
            raise DataError(f"FLAIR has no {part} images here{_told(faults, listed)}")
        users = [number for number, (_, own) in enumerate(itertools.groupby(kept, _owner)) for _ in own]
        labels = np.zeros((len(kept), len(LABELS)), dtype=bool)
        for row, entry in enumerate(kept):
            labels[row, list(entry.labels)] = True
        labels.tofile(folder / f"{part}_y")
        np.array(users, dtype=np.int64).tofile(folder / f"{part}_users")
        forms[f"{part}_x"] = "uint8", (len(kept), 3, side, side)
        forms[f"{part}_y"] = "bool", labels.shape
        forms[f"{part}_users"] = "int64", (len(kept),)
    _check(faults, listed)
    return store.Built(forms, {"listed": listed, "faults": faults})


def _owner(entry: Entry) -> str:
    return entry.user


def _decoded(layout: Layout, entries: list[Entry], side: int) -> list[bytes | Fault]:
    """Images, channels first, or what is wrong with them. Pillow works without Python's lock, so threads share it."""

    def one(entry: Entry) -> bytes | Fault:
        try:
            image = layout.image(entry)
        except Fault as fault:
            return fault
        return np.asarray(image.resize((side, side), Image.Resampling.BOX)).transpose(2, 0, 1).tobytes()

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        return list(pool.map(one, entries))


def _check(faults: Faults, listed: int) -> None:
    if sum(map(len, faults.values())) > TOLERATED * listed:
        raise DataError(f"too much of FLAIR cannot be used{_told(faults, listed)}. Get it again, or what it lacks")


def _told(faults: Faults, listed: int) -> str:
    """How many images are left out, and the first of each kind by name."""
    kinds = []
    for kind, names in faults.items():
        more = f", and {len(names) - SHOWN:,} more" if len(names) > SHOWN else ""
        kinds.append(f"\n  {len(names):,} {kind}: {'; '.join(names[:SHOWN])}{more}")
    return f": of {listed:,} images {sum(map(len, faults.values())):,} are left out" + "".join(kinds)


def _place(folder: Path, side: int) -> Path:
    """Where the store of a folder lies: one for each folder and size, so that a changed folder's takes its place."""
    which = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:12]
    return store.cache() / "stores" / f"flair-{which}-{side}"
