"""FLAIR in both layouts, from small files: reading, the store, faults, and memory use."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import fedcog
from fedcog import Experiment, FedAvg
from fedcog.cli import main
from fedcog.data import (
    DataError,
    Dataset,
    FederatedData,
    array_store,
    client_batches,
    registry,
)
from fedcog.data.datasets import DataWarning
from fedcog.data.flair import dataset
from fedcog.data.flair.hdf5 import Hdf5Layout
from fedcog.data.flair.layouts import LABELS, ImageEntry, ImageFault, MlFlairLayout
from fedcog.data.partitions.schemes import PartitionConfig, make_partition

Record = dict[str, Any]
USERS = {
    "train": {"9@N00": 7, "10@N01": 5, "a@N02": 1, "b@N02": 12},
    "val": {"v@N00": 2},
    "test": {"t@N00": 4, "u@N00": 3},
}


def records() -> list[Record]:
    """Records as ml-flair writes them, users in turns, image numbers in no order."""
    draw = np.random.default_rng(0)
    found = list[Record]()
    for part, sizes in USERS.items():
        for user, size in sizes.items():
            for _ in range(size):
                labels = sorted(draw.choice(LABELS, draw.integers(0, 5), replace=False).tolist())
                found.append(
                    {
                        "user_id": user,
                        "fine_grained_labels": [f"{one}_fine" for one in labels],
                        "labels": labels,
                    }
                )
                found[-1] |= {"image_id": str(draw.integers(10**9, 10**10)), "partition": part}
    return [found[place] for place in draw.permutation(len(found))]


RECORDS = records()
TRAIN = [one for one in RECORDS if one["partition"] == "train"]
SEEN = [one for one in RECORDS if one["partition"] != "val"]


def photograph(name: str, side: int = 256) -> bytes:
    """A JPEG of coloured squares, each image its own."""
    squares = np.random.default_rng(int(name)).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    return jpeg(squares.repeat(side // 8, 0).repeat(side // 8, 1))


def jpeg(pixels: np.ndarray, kind: str = "JPEG") -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, format=kind, quality=90)
    return out.getvalue()


def as_ml_flair(folder: Path, listed: list[Any] = RECORDS) -> Path:
    """ml-flair's layout."""
    (folder / "small_images").mkdir(parents=True)
    (folder / "labels_and_metadata.json").write_text(json.dumps(listed))
    (folder / "label_relationship.txt").write_text("".join(f"{one}_fine,{one}\n" for one in LABELS))
    for one in RECORDS:
        (folder / "small_images" / f"{one['image_id']}.jpg").write_bytes(
            photograph(one["image_id"])
        )
    return folder


def as_pfl(folder: Path) -> Path:
    """pfl-research's layout, with the types its script gives."""
    folder.mkdir(parents=True)
    of_user = defaultdict(list)
    for one in RECORDS:
        of_user[one["user_id"]].append(one)
    fine = sorted(f"{one}_fine" for one in LABELS)
    with h5py.File(folder / "flair_federated.hdf5", "w") as file:
        for user, own in of_user.items():
            place = f"/{own[0]['partition']}/{user}"
            for name, names, kind in (
                ("labels", list(LABELS), np.uint8),
                ("fine_grained_labels", fine, np.uint16),
            ):
                pairs = [
                    (row, names.index(label)) for row, one in enumerate(own) for label in one[name]
                ]
                file[f"{place}/{name}_row"] = np.asarray([row for row, _ in pairs], dtype=np.uint16)
                file[f"{place}/{name}_col"] = np.asarray(
                    [column for _, column in pairs], dtype=kind
                )
            file[f"{place}/image_ids"] = np.asarray([one["image_id"] for one in own], dtype="S")
            images = [
                np.asarray(Image.open(io.BytesIO(photograph(one["image_id"])))) for one in own
            ]
            file.create_dataset(f"{place}/images", data=np.stack(images))
        file["/metadata/label_mapping"] = json.dumps(
            {label: place for place, label in enumerate(LABELS)}
        )
        file["/metadata/fine_grained_label_mapping"] = json.dumps(
            {label: place for place, label in enumerate(fine)}
        )
    return folder


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with ml-flair's layout, which no test changes."""
    root = tmp_path_factory.mktemp("published")
    as_ml_flair(root / "flair")
    return root


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDCOG_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(array_store, "_digests", {})
    return tmp_path / "cache" / "stores"


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each image was decoded."""
    counts: Counter[str] = Counter()
    real = MlFlairLayout.read_image
    alone = threading.Lock()

    def counted(self: MlFlairLayout, entry: ImageEntry) -> Image.Image:
        with alone:
            counts[entry.image_id] += 1
        return real(self, entry)

    monkeypatch.setattr(MlFlairLayout, "read_image", counted)
    return counts


def same(one: Dataset, other: Dataset) -> bool:
    parts = ("train_x", "train_y", "test_x", "test_y", "users")
    return all(torch.equal(getattr(one, part), getattr(other, part)) for part in parts)


def test_images_labels_and_users_are_those_of_the_files(published: Path) -> None:
    data = registry.load("flair", published)
    assert (
        data.classes == LABELS == tuple(sorted(LABELS))
        and data.multi_label
        and data.input_shape == (3, 64, 64)
    )
    expected = sorted(TRAIN, key=lambda one: (one["user_id"], one["image_id"]))
    assert len(data.train_y) == len(expected) == 25 and len(data.test_y) == 7
    names = sorted(USERS["train"])
    assert data.users is not None
    for row, one in enumerate(expected):
        assert [LABELS[label] for label in data.train_y[row].nonzero()[:, 0]] == one["labels"]
        assert names[data.users[row]] == one["user_id"]
        pixels = np.asarray(Image.open(io.BytesIO(photograph(one["image_id"])))).astype(float)
        means = pixels.reshape(64, 4, 64, 4, 3).mean((1, 3)).transpose(2, 0, 1)
        assert (
            np.abs(data.train_x[row].numpy() - means).max() <= 1
        )  # the mean of every 4 x 4, rounded down and across


def test_both_layouts_are_one_data_set(published: Path, tmp_path: Path) -> None:
    one = registry.load("flair", published)
    other = dataset.read_flair(as_pfl(tmp_path / "flair"))
    assert same(one, other) and one.fingerprint == other.fingerprint
    small = dataset.read_flair(published / "flair", size=8)
    assert small.input_shape == (3, 8, 8) and small.fingerprint != one.fingerprint


def test_the_natural_partition_is_by_users(published: Path) -> None:
    data = registry.load("flair", published)
    assert data.users is not None
    shares = make_partition(
        "natural", data.train_y.numpy(), data.users.numpy(), PartitionConfig(3, min_examples=2), 0
    )
    assert sorted(map(len, shares)) == [5, 7, 12]
    assert all(len(set(data.users[share].tolist())) == 1 for share in shares)


def test_a_store_is_made_once_and_changes_with_the_size_asked_for(
    published: Path, decoded: Counter[str]
) -> None:
    first = registry.load("flair", published)
    assert set(decoded.values()) == {1} and len(decoded) == len(SEEN)
    array_store._digests.clear()
    second = registry.load("flair", published)
    assert (
        same(first, second)
        and first.fingerprint == second.fingerprint
        and set(decoded.values()) == {1}
    )
    first.train_x.zero_()  # memory is this process's own
    assert same(second, registry.load("flair", published)) and second.train_x.any()


def damage(place: Path, how: str) -> None:
    path, _, what = how.partition(" ")
    file = place / path
    if what == "cut":
        os.truncate(file, file.stat().st_size // 2)
    elif what == "longer":
        file.write_bytes(file.read_bytes() + b"\0")
    elif what == "gone":
        file.unlink()
    elif what == "flipped":
        content = bytearray(file.read_bytes())
        content[len(content) // 3] ^= 1
        file.write_bytes(content)
    else:
        file.write_text(what)


@pytest.mark.parametrize(
    "how",
    [
        *(f"train_x {what}" for what in ("cut", "longer", "gone", "flipped")),
        *(f"{name} flipped" for name in ("test_x", "train_y", "train_users", "manifest.json")),
        *(
            f"manifest.json {what}"
            for what in ("cut", "gone", "[]", "{}", '{"stamp": 1, "digest": []}', "[" * 100_000)
        ),
    ],
)
def test_a_damaged_store_is_made_again(
    published: Path, cache: Path, decoded: Counter[str], how: str
) -> None:
    whole = registry.load("flair", published).train_x.clone()
    (place,) = (one for one in cache.iterdir() if one.is_dir())
    damage(place, how)
    assert torch.equal(registry.load("flair", published).train_x, whole)
    assert set(decoded.values()) == {2}
    assert torch.equal(registry.load("flair", published).train_x, whole) and set(
        decoded.values()
    ) == {2}


def test_a_hostile_manifest_leads_nowhere(published: Path, cache: Path, tmp_path: Path) -> None:
    data = registry.load("flair", published)
    (place,) = (one for one in cache.iterdir() if one.is_dir())
    found = json.loads((place / "manifest.json").read_text())
    del found["digest"]
    found["arrays"]["../../secret"] = found["arrays"].pop("train_x")
    (place / "manifest.json").write_text(
        json.dumps(found | {"digest": array_store._json_digest(found)})
    )
    (cache.parent / "secret").write_bytes((place / "train_x").read_bytes())
    assert same(data, registry.load("flair", published))


def test_other_files_make_another_store_in_the_same_place(tmp_path: Path, cache: Path) -> None:
    folder = as_ml_flair(tmp_path / "flair")
    before = dataset.read_flair(folder)
    name = sorted(TRAIN, key=lambda one: (one["user_id"], one["image_id"]))[3]["image_id"]
    (folder / "small_images" / f"{name}.jpg").write_bytes(photograph("1"))
    after = dataset.read_flair(folder)
    changed = (before.train_x != after.train_x).flatten(1).any(1)
    assert changed.nonzero().flatten().tolist() == [3] and before.fingerprint != after.fingerprint
    (folder / "labels_and_metadata.json").write_text(
        json.dumps([one for one in RECORDS if one["image_id"] != name])
    )
    assert len(dataset.read_flair(folder).train_y) == 24
    assert len([one for one in cache.iterdir() if one.is_dir()]) == 1


BUILD = """
import sys, time
from pathlib import Path
from fedcog.data.flair import dataset
dataset.DECODE_BATCH = 4

def stall(name, done, total):
    Path(sys.argv[2]).touch()
    time.sleep(60)

dataset.prepare(sys.argv[1], stall)
"""


def test_a_build_that_is_killed_leaves_nothing_that_is_used(
    published: Path, cache: Path, tmp_path: Path
) -> None:
    begun = tmp_path / "begun"
    process = subprocess.Popen([sys.executable, "-c", BUILD, str(published / "flair"), str(begun)])
    until = time.monotonic() + 60
    while not begun.exists() and time.monotonic() < until:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    (left,) = cache.glob("*.part")
    assert (left / "train_x").exists() and not [
        one for one in cache.iterdir() if one.is_dir() and one != left
    ]
    assert len(registry.load("flair", published).train_y) == 25
    assert not left.exists()


@pytest.mark.filterwarnings("ignore:another process is building")
def test_builders_at_once_make_one_store(published: Path, decoded: Counter[str]) -> None:
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: dataset.read_flair(published / "flair"), range(4)))
    assert all(same(found[0], one) for one in found) and set(decoded.values()) == {1}


def test_a_cache_that_cannot_be_written_is_said(
    published: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDCOG_CACHE", "/proc/nowhere")
    with pytest.raises(DataError, match="choose another folder with FEDCOG_CACHE"):
        registry.load("flair", published)


def test_progress_goes_from_nothing_to_all(
    published: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset, "DECODE_BATCH", 8)
    calls: list[tuple[str, int, int | None]] = []
    registry.prepare("flair", published, progress=lambda *call: calls.append(call))
    done = [call[1] for call in calls]
    assert done == sorted(set(done)) and done[-1] == calls[-1][2] == 32 * 3 * 64 * 64


@pytest.fixture
def lenient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset, "MAX_FAULTY_FRACTION", 1.0)


BOMB = jpeg(np.zeros((4200, 4200, 3), np.uint8))
SPOILT = {
    "missing": (None, r"1 missing: {0}\.jpg$"),
    "cut short": (lambda whole: whole[: len(whole) // 2], r"1 corrupt: {0}\.jpg: .*truncated"),
    "text": (lambda whole: b"<html>not found</html>", r"1 corrupt: {0}\.jpg: cannot identify"),
    "empty": (lambda whole: b"", r"1 corrupt: {0}\.jpg: cannot identify"),
    "another format": (
        lambda whole: jpeg(np.zeros((8, 8, 3), np.uint8), "PNG"),
        r"1 corrupt: {0}\.jpg: cannot identify",
    ),
    "a bomb": (lambda whole: BOMB, r"1 corrupt: {0}\.jpg: 4200 x 4200 pixels"),
}


@pytest.mark.parametrize("fault", SPOILT)
def test_a_spoilt_image_is_named_counted_and_left_out(fault: str, tmp_path: Path) -> None:
    spoil, text = SPOILT[fault]
    folder = as_ml_flair(tmp_path / "flair")
    name = TRAIN[4]["image_id"]
    path = folder / "small_images" / f"{name}.jpg"
    if spoil is None:
        path.unlink()
    else:
        path.write_bytes(spoil(path.read_bytes()))
    for _ in range(2):  # a store remembers what was wrong
        with pytest.warns(DataWarning, match="of 32 images 1 are left out\n  " + text.format(name)):
            data = dataset.read_flair(folder)
    rest = as_ml_flair(
        tmp_path / "rest" / "flair", [one for one in RECORDS if one["image_id"] != name]
    )
    assert same(data, dataset.read_flair(rest))


def test_grey_images_are_read_as_coloured_ones(tmp_path: Path) -> None:
    folder = as_ml_flair(tmp_path / "flair", SEEN)
    first = min(TRAIN, key=lambda one: (one["user_id"], one["image_id"]))
    (folder / "small_images" / f"{first['image_id']}.jpg").write_bytes(
        jpeg(np.full((16, 24), 77, np.uint8))
    )
    assert dataset.read_flair(folder).train_x[0].unique().tolist() == [77]


WRONG: dict[str, tuple[Any, str]] = {
    "unknown label": ({"labels": ["art", "unicorn"]}, "{0}: 'unicorn'"),
    "labels of no list": ({"labels": "art"}, "{0}: labels 'art'"),
    "no labels": ({"labels": None}, "{0}: labels None"),
    "labels of no strings": ({"labels": [["art"], 3]}, r"{0}: \['art'\]"),
    "no user": ({"user_id": None}, "{0}: user_id None"),
    "part unheard of": ({"partition": "training"}, "{0}: partition 'training'"),
    "part of no string": ({"partition": ["train"]}, r"{0}: partition \['train'\]"),
    "a number": ({"image_id": 12}, "image_id 12"),
    "a way out": ({"image_id": "../../secret"}, r"image_id '\.\./\.\./secret'"),
    "a way to anywhere": ({"image_id": "/etc/hostname"}, "image_id '/etc/hostname'"),
    "a name for the terminal": ({"image_id": "\x1b[2J"}, "image_id '.x1b"),
    "no record": (["art"], r"record 3: \['art'\]"),
    "a record in a record": ({"labels": {"labels": []}}, "{0}: "),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_record_is_named_counted_and_left_out(
    fault: str, tmp_path: Path, lenient: None
) -> None:
    change, text = WRONG[fault]
    (tmp_path / "secret.jpg").write_bytes(photograph("5"))
    wrong = change if isinstance(change, list) else SEEN[3] | change
    folder = as_ml_flair(tmp_path / "set" / "flair", [*SEEN[:3], wrong, *SEEN[4:]])
    with pytest.warns(DataWarning, match="1 mislabelled: " + text.format(SEEN[3]["image_id"])):
        data = dataset.read_flair(folder)
    assert same(
        data, dataset.read_flair(as_ml_flair(tmp_path / "rest" / "flair", [*SEEN[:3], *SEEN[4:]]))
    )


def test_an_image_listed_twice_counts_once(tmp_path: Path, published: Path) -> None:
    folder = as_ml_flair(tmp_path / "flair", [*RECORDS, TRAIN[0] | {"labels": [], "user_id": "z"}])
    with pytest.warns(DataWarning, match=f"1 repeated: {TRAIN[0]['image_id']}"):
        assert same(dataset.read_flair(folder), registry.load("flair", published))


def test_too_many_faults_are_refused_with_their_names(tmp_path: Path, cache: Path) -> None:
    folder = as_ml_flair(tmp_path / "flair")
    for one in sorted(TRAIN, key=lambda one: (one["user_id"], one["image_id"]))[:8]:
        (folder / "small_images" / f"{one['image_id']}.jpg").unlink()
    with pytest.raises(
        DataError,
        match=r"too much of FLAIR .* of 32 images 8 .*\n  8 missing: (\d+\.jpg; ){4}.*, and 3 more",
    ):
        dataset.read_flair(folder)
    assert not [one for one in cache.iterdir() if one.is_dir()]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{}", "not a list of records"),
        ('[{"image_id": "1"', "cannot be read"),
        ("\udcff", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        ("[]", "no train images"),
    ],
)
def test_a_list_that_is_none_is_refused(text: str, reason: str, tmp_path: Path) -> None:
    folder = as_ml_flair(tmp_path / "flair", [])
    (folder / "labels_and_metadata.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(DataError, match=reason):
        dataset.read_flair(folder)


@settings(max_examples=150)
@given(
    changes=st.lists(
        st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=30
    ),
    cut=st.booleans(),
)
def test_whatever_a_jpeg_holds_it_is_an_image_or_a_fault(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int]], cut: bool
) -> None:
    folder = tmp_path_factory.mktemp("spoilt")
    (folder / "small_images").mkdir()
    content = bytearray(photograph("7", 32))
    for place, value in changes:
        content[place % len(content)] = value
    (folder / "small_images" / "7.jpg").write_bytes(
        content[: changes[0][0] % len(content)] if cut else content
    )
    found: Image.Image | ImageFault
    try:
        found = MlFlairLayout(folder).read_image(ImageEntry("train", "user", "7", ()))
    except ImageFault as fault:
        found = fault
    if isinstance(found, ImageFault):
        assert found.kind == "corrupt" and found.name.startswith("7.jpg")
    else:
        assert found.mode == "RGB"


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=5)
    | st.sampled_from([*LABELS[:3], "train", "test", "1"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
)
KEYS = st.sampled_from(["image_id", "user_id", "labels", "partition"])


@settings(max_examples=200)
@given(listed=st.lists(JSON | st.dictionaries(KEYS, JSON, min_size=3), max_size=5))
def test_whatever_a_record_holds_it_is_an_entry_or_a_fault(
    tmp_path_factory: pytest.TempPathFactory, listed: list[Any]
) -> None:
    folder = tmp_path_factory.mktemp("listed")
    (folder / "labels_and_metadata.json").write_text(json.dumps(listed))
    found = list(MlFlairLayout(folder).entries())
    assert len(found) == len(listed)
    for entry in found:
        assert isinstance(entry, ImageFault) or all(0 <= label < 17 for label in entry.labels)


def out_of(folder: Path) -> Path:
    """Another HDF5 file, with a user's group in it."""
    with h5py.File(folder / "elsewhere.h5", "w") as other:
        other["user/images"] = np.zeros((1, 256, 256, 3), np.uint8)
    return folder / "elsewhere.h5"


def group_of(file: Any) -> Any:
    return file["train/b@N02"]


def renew(group: Any, name: str, value: Any, **keywords: Any) -> None:
    del group[name]
    group.create_dataset(name, data=value, **keywords)


def link_user(file: Any, folder: Path) -> None:
    del file["train/b@N02"]
    file["train/b@N02"] = h5py.ExternalLink(str(out_of(folder)), "/user")


def link_softly(file: Any, folder: Path) -> None:
    del group_of(file)["images"]
    group_of(file)["images"] = h5py.SoftLink("/test/t@N00/images")


def store_outside(file: Any, folder: Path) -> None:
    (folder / "secret").write_bytes(b"s" * 12 * 256 * 256 * 3)
    del group_of(file)["images"]
    outside = [(str(folder / "secret"), 0, h5py.h5f.UNLIMITED)]
    group_of(file).create_dataset(
        "images", shape=(12, 256, 256, 3), dtype=np.uint8, external=outside
    )


def store_virtually(file: Any, folder: Path) -> None:
    layout = h5py.VirtualLayout((12, 256, 256, 3), np.uint8)
    layout[:1] = h5py.VirtualSource(out_of(folder), "user/images", (1, 256, 256, 3))
    del group_of(file)["images"]
    group_of(file).create_virtual_dataset("images", layout)


def promise_much(file: Any, folder: Path) -> None:
    for name, kind in (("images", np.uint8), ("image_ids", "S10")):
        del group_of(file)[name]
        shape = (10**9, 256, 256, 3) if name == "images" else (10**9,)
        group_of(file).create_dataset(name, shape=shape, dtype=kind, chunks=(1, *shape[1:]))


def have_huge_chunks(file: Any, folder: Path) -> None:
    renew(group_of(file), "labels_row", np.zeros(3, np.uint16), chunks=(10**8,), maxshape=(None,))


UNSOUND = {
    "a link to another file": (link_user, "corrupt: /train/b@N02 is missing, or a link"),
    "a link": (link_softly, "corrupt: /train/b@N02/images is missing, or a link"),
    "pixels of another file": (
        store_outside,
        "corrupt: /train/b@N02/images is stored in another file",
    ),
    "pixels of other files": (
        store_virtually,
        "corrupt: /train/b@N02/images is stored in another file",
    ),
    "a promise": (promise_much, r"corrupt: train/b@N02/images: uint8 \[1000000000"),
    "chunks": (have_huge_chunks, "corrupt: /train/b@N02/labels_row has chunks"),
    "no group": (
        lambda file, _: renew(file, "train/b@N02", 3),
        "corrupt: /train/b@N02 is a Dataset",
    ),
    "no images": (
        lambda file, _: group_of(file).pop("images"),
        "corrupt: /train/b@N02/images is missing",
    ),
    "floats": (
        lambda f, _: renew(group_of(f), "images", np.zeros((12, 8, 8, 3))),
        "/train/b@N02/images holds float64",
    ),
    "16 bits": (
        lambda f, _: renew(group_of(f), "images", np.zeros((12, 8, 8, 3), np.uint16)),
        "images: uint16",
    ),
    "flat images": (
        lambda f, _: renew(group_of(f), "images", np.zeros((12, 9), np.uint8)),
        r"images is \(12, 9\)",
    ),
    "no pixels": (
        lambda f, _: renew(group_of(f), "images", np.zeros((12, 0, 8, 3), np.uint8)),
        "images: uint8",
    ),
    "few names": (
        lambda f, _: renew(group_of(f), "image_ids", np.array([b"1"])),
        r"image_ids is \(1,\)",
    ),
    "long names": (
        lambda f, _: renew(group_of(f), "image_ids", np.array([b"1" * 99] * 12)),
        r"image_ids: \|S99",
    ),
    "rows too high": (
        lambda f, _: (
            renew(group_of(f), "labels_row", np.array([12], np.uint16)),
            renew(group_of(f), "labels_col", np.array([1], np.uint8)),
        ),
        "mislabelled: train/b@N02: labels of more than its 12 images",
    ),
    "too many rows": (
        lambda f, _: renew(group_of(f), "labels_row", np.zeros(300, np.uint16)),
        "mislabelled: train/b@N02: 300 labels of 12 images",
    ),
    "other columns": (
        lambda f, _: renew(group_of(f), "labels_col", np.zeros(3, np.uint8)),
        r"labels_col is \(3,\)",
    ),
}


@pytest.mark.parametrize("fault", UNSOUND)
def test_an_unsound_user_is_named_counted_and_left_out(
    fault: str, tmp_path: Path, lenient: None
) -> None:
    spoil, text = UNSOUND[fault]
    folder = as_pfl(tmp_path / "flair")
    with h5py.File(folder / "flair_federated.hdf5", "a") as file:
        spoil(file, tmp_path)
    lost = (
        1 if fault in ("a link to another file", "no group", "a promise") else 12
    )  # as far as one can tell
    with pytest.warns(
        DataWarning, match=f"of {20 + lost} images {lost} are left out\n  {lost} .*" + text
    ):
        data = dataset.read_flair(folder)
    others = [one for one in RECORDS if one["user_id"] != "b@N02"]
    assert same(data, dataset.read_flair(as_ml_flair(tmp_path / "rest" / "flair", others)))


def test_an_unknown_column_affects_its_image_only(tmp_path: Path, lenient: None) -> None:
    folder = as_pfl(tmp_path / "flair")
    with h5py.File(folder / "flair_federated.hdf5", "a") as file:
        group = group_of(file)
        group["labels_col"][0] = 200
        spoilt = group["image_ids"][int(group["labels_row"][0])].decode()
    with pytest.warns(DataWarning, match=f"1 mislabelled: train/b@N02/{spoilt}: label 200"):
        data = dataset.read_flair(folder)
    others = [one for one in RECORDS if one["image_id"] != spoilt]
    assert same(data, dataset.read_flair(as_ml_flair(tmp_path / "rest" / "flair", others)))


def test_columns_mean_what_the_file_says(tmp_path: Path, published: Path) -> None:
    folder = as_pfl(tmp_path / "flair")
    with h5py.File(folder / "flair_federated.hdf5", "a") as file:
        renew(
            file,
            "metadata/label_mapping",
            json.dumps({label: 16 - place for place, label in enumerate(LABELS)}),
        )
        for part in ("train", "test"):
            for group in file[part].values():
                group["labels_col"][:] = 16 - group["labels_col"][:]
    assert same(dataset.read_flair(folder), registry.load("flair", published))


@pytest.mark.parametrize(
    ("mapping", "reason"),
    [
        ("[]", "which column each label has"),
        ('{"art": "1"}', "which column each label has"),
        ("{", "label_mapping"),
        (json.dumps(dict.fromkeys(LABELS, 3)), "two labels in one column"),
        (None, "label_mapping is missing"),
        (3, "label_mapping holds"),
    ],
)
def test_a_file_of_another_layout_is_refused(
    mapping: str | int | None, reason: str, tmp_path: Path
) -> None:
    folder = as_pfl(tmp_path / "flair")
    with h5py.File(folder / "flair_federated.hdf5", "a") as file:
        del file["metadata/label_mapping"]
        if mapping is not None:
            file["metadata/label_mapping"] = mapping
    with pytest.raises(DataError, match=f"does not have pfl-research.s layout: .*{reason}"):
        dataset.read_flair(folder)


def test_an_hdf5_file_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    path = as_pfl(tmp_path / "flair") / "flair_federated.hdf5"
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(DataError, match=r"flair_federated\.hdf5 cannot be read"):
        dataset.read_flair(path.parent)


def test_two_hdf5_files_are_one_too_many(tmp_path: Path) -> None:
    folder = as_pfl(tmp_path / "flair")
    (folder / "flair_federated_small.hdf5").write_bytes(b"")
    with pytest.raises(DataError, match="leave one of them"):
        dataset.read_flair(folder)


def test_without_h5py_it_is_said_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(DataError, match=r"pip install 'fedcog\[flair\]'"):
        Hdf5Layout(tmp_path / "flair_federated.hdf5")


def test_a_missing_data_set_says_where_to_get_it(tmp_path: Path) -> None:
    for call in (registry.load, registry.fetch):
        with pytest.raises(
            DataError, match=r"(?s)github\.com/apple/ml-flair.*put it there by hand"
        ):
            call("flair", tmp_path)
    (tmp_path / "flair").mkdir()
    (tmp_path / "flair" / "labels_and_metadata.json").write_text("[]")
    with pytest.raises(DataError, match="lacks small_images"):
        registry.load("flair", tmp_path)
    with pytest.raises(DataError, match="lacks small_images"):
        dataset.open_layout(tmp_path / "flair")


def test_the_command_line_lists_prepares_and_tells(
    published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], decoded: Counter[str]
) -> None:
    assert main.main(["data", "list", "--data-dir", str(tmp_path)]) == 0
    assert "fedcog data get flair" in capsys.readouterr().out.replace("\n", " ")
    assert main.main(["data", "get", "flair", "--data-dir", str(tmp_path)]) != 0
    assert "github.com/apple/ml-flair" in capsys.readouterr().err.replace("\n", "")
    assert main.main(["data", "get", "flair", "--data-dir", str(published)]) == 0
    assert (
        f"flair: {published / 'flair'}" in capsys.readouterr().out.replace("\n", "")
        and len(decoded) == 32
    )


def test_unusable_images_are_reported_when_decoded(
    tmp_path: Path, lenient: None, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = as_ml_flair(tmp_path / "flair", [*SEEN, {}])
    for _ in range(2):
        assert main.main(["data", "get", "flair", "--data-dir", str(folder.parent)]) == 0
        assert "1 mislabelled: image_id None" in " ".join(capsys.readouterr().err.split())


def test_what_the_system_does_not_let_us_read_is_no_fault_of_an_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be mended, and must not be remembered."""
    folder = as_ml_flair(tmp_path / "flair")
    opened = Image.open

    def barred(path: Any, **how: Any) -> Any:
        if path.name == f"{TRAIN[4]['image_id']}.jpg":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, **how)

    with monkeypatch.context() as patch:
        patch.setattr(Image, "open", barred)
        with pytest.raises(
            DataError, match=f"{TRAIN[4]['image_id']}.jpg cannot be read .Permission denied."
        ):
            dataset.read_flair(folder)
    assert len(dataset.read_flair(folder).train_x) == len(TRAIN)


def test_a_comparison_tells_what_is_left_out(
    tmp_path: Path, lenient: None, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = as_ml_flair(tmp_path / "flair", [*SEEN, {}])
    words = f"compare --dataset flair --data-dir {folder.parent} --partition natural"
    words += " --clients 3 --min-examples 2 --rounds 1 --local-steps 1 --batch-size 2"
    words += " --model mlp --threads 1 --algorithms fedavg --seeds 0 --quiet"
    words += f" --out {tmp_path}/out"
    assert main.main(words.split()) == 0
    stderr = capsys.readouterr().err
    assert (
        stderr.startswith("fedcog: FLAIR in ")
        and "1 mislabelled: image_id None" in stderr
        and "Warning" not in stderr
    )


@pytest.mark.parametrize("model", ["cnn3", "resnet18"])
def test_a_round_on_it_is_run(published: Path, tmp_path: Path, model: str) -> None:
    experiment = Experiment(
        algorithm=FedAvg(),
        dataset="flair",
        data_dir=str(published),
        partition="natural",
        clients=3,
        min_examples=2,
        rounds=1,
        local_steps=2,
        batch_size=4,
        model=model,
        threads=1,
    )
    done = fedcog.run(experiment, tmp_path / "run", report=False)
    assert done.metric == "o_f1" and len(done.scores) == 1 and done.lines[0]["loss"] > 0


def in_a_process(program: str, *arguments: str) -> list[int]:
    """Run a program in a new process, and return the numbers that it prints.

    A shell starts it: the peak memory of a process is at least that of the process it is a copy of.
    """
    command = [
        "sh",
        "-c",
        '"$0" "$@"; exit $?',
        sys.executable,
        "-c",
        textwrap.dedent(program),
        *arguments,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.split()]


def many_records(images: int, users: int) -> Iterator[str]:
    """The lines of a list as long as FLAIR's, its users' sizes with FLAIR's long tail."""
    level = (np.arange(users) + 0.5) / users
    sizes = (1 + 1.8 * ((1 - level) ** (-1 / 1.16) - 1)).clip(max=4151).astype(int)
    sizes[-200:] += (images - sizes.sum()) // 200
    sizes[-1] += images - sizes.sum()
    draw = np.random.default_rng(0)
    many = [
        json.dumps([LABELS[label] for label in draw.permutation(17)[:count]])
        for count in draw.integers(1, 6, 1000)
    ]
    fine = [
        json.dumps([f"fine_grained_{label}" for label in draw.integers(0, 1628, count)])
        for count in (3, 4, 5, 6, 7)
    ]
    image = 10**10
    for user, size in enumerate(sizes.tolist()):
        part = ("val", "test")[user % 10] if user % 10 < 2 else "train"
        for _ in range(size):
            image += 7
            yield (
                f'{{"user_id": "{10**7 + user}@N00", "image_id": "{image}", '
                f'"fine_grained_labels": {fine[image % 5]}, '
                f'"labels": {many[image % 1000]}, "partition": "{part}"}}'
            )


def test_all_of_flair_is_listed_in_less_than_two_gigabytes(tmp_path: Path) -> None:
    path = tmp_path / "labels_and_metadata.json"
    lines = list(many_records(429_078, 51_414))
    path.write_text("[" + ", ".join(lines) + "]")
    assert len(lines) == 429_078 and len({line[:27] for line in lines}) == 51_414
    program = """
        import resource, sys
        from pathlib import Path
        import fedcog
        from fedcog.data.flair import dataset, layouts
        parts, faults = dataset.list_images(layouts.MlFlairLayout(Path(sys.argv[1])))
        for entries in parts.values():
            print(len(entries), len({entry.user for entry in entries}))
        print(len(faults), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    """
    train, train_users, test, test_users, faults, peak = in_a_process(program, str(tmp_path))
    assert (train, test) == tuple(
        sum(f'"{part}"}}' in line for line in lines) for part in ("train", "test")
    )
    assert (train_users, test_users, faults) == (41_130, 5_142, 0)
    assert peak < 2_000_000  # kilobytes


def test_a_store_is_trained_from_without_being_copied_into_memory() -> None:
    """Two gigabytes of images, of which a round needs a few."""
    program = """
        import os, resource, torch
        from pathlib import Path
        from fedcog.data import Dataset, FederatedData, array_store, client_batches
        torch.set_num_threads(1)
        forms = {"x": ("uint8", (163_840, 3, 64, 64)), "y": ("bool", (163_840, 17))}

        def build(folder):
            for name, size in (("x", 163_840 * 3 * 64 * 64), ("y", 163_840 * 17)):
                with open(folder / name, "wb") as file:
                    file.truncate(size)
            return array_store.BuildResult(forms, None)

        place = array_store.cache_dir() / "stores" / "large"
        kept = array_store.open_or_build(place, "stamp", build)
        x, y = (torch.from_numpy(kept.arrays[name]) for name in ("x", "y"))
        names, middle = tuple(map(str, range(17))), (0.5, 0.5, 0.5)
        data = Dataset("large", x, y, x[:8], y[:8], names, middle, middle, True, digest=kept.digest)
        data.fingerprint
        parts = list(torch.arange(163_840).split(8))
        for max_bytes in (2**60, 1000):
            client_batches.max_device_bytes = lambda device: max_bytes
            shared = FederatedData(data, parts, seed=0, augment=True)
            assert shared.is_streamed == (max_bytes == 1000)
            assert shared.train_x.data_ptr() == x.data_ptr()
            plan = shared.plan_batches(0, torch.arange(50), 2, 8)
            made = shared.examples(plan.indices, plan.crops)
            assert made["x"].shape == (50, 2, 8, 3, 64, 64) and "x" in shared.stage(plan.indices)
        print(x.nbytes // 1024, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    """
    size, peak = in_a_process(program)
    assert size > 1_900_000 and peak < 1_300_000


def test_streamed_batches_of_a_store_are_those_of_its_images(
    published: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = registry.load("flair", published)
    parts = [torch.arange(0, 12), torch.arange(12, 25)]
    held = FederatedData(data, parts, seed=1, augment=True)
    monkeypatch.setattr(client_batches, "max_device_bytes", lambda device: 10)
    streamed = FederatedData(data, parts, seed=1, augment=True)
    assert streamed.is_streamed and not held.is_streamed
    plan = held.plan_batches(0, torch.arange(2), 3, 4)
    one, other = (shared.examples(plan.indices, plan.crops) for shared in (held, streamed))
    assert torch.equal(one["x"], other["x"]) and torch.equal(one["y"], other["y"])
