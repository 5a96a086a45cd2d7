"""Tests of FLAIR in both layouts: reading, the array store, faulty images, and memory use."""

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


def make_records() -> list[Record]:
    """Records in ml-flair's format, shuffled over users and image ids."""
    rng = np.random.default_rng(0)
    ordered = list[Record]()
    for part, sizes in USERS.items():
        for user, size in sizes.items():
            for _ in range(size):
                labels = sorted(rng.choice(LABELS, rng.integers(0, 5), replace=False).tolist())
                ordered.append(
                    {
                        "user_id": user,
                        "fine_grained_labels": [f"{label}_fine" for label in labels],
                        "labels": labels,
                        "image_id": str(rng.integers(10**9, 10**10)),
                        "partition": part,
                    }
                )
    return [ordered[i] for i in rng.permutation(len(ordered))]


RECORDS = make_records()
TRAIN = [record for record in RECORDS if record["partition"] == "train"]
USED_RECORDS = [record for record in RECORDS if record["partition"] != "val"]


def by_user(record: Record) -> tuple[str, str]:
    return record["user_id"], record["image_id"]


def image_bytes(image_id: str, side: int = 256) -> bytes:
    """A JPEG of colored squares, different for every image id."""
    squares = np.random.default_rng(int(image_id)).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    return encode_image(squares.repeat(side // 8, 0).repeat(side // 8, 1))


def encode_image(pixels: np.ndarray, kind: str = "JPEG") -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, format=kind, quality=90)
    return out.getvalue()


def write_ml_flair(folder: Path, listed: list[Any] = RECORDS) -> Path:
    """Write a data set in ml-flair's layout."""
    (folder / "small_images").mkdir(parents=True)
    (folder / "labels_and_metadata.json").write_text(json.dumps(listed))
    (folder / "label_relationship.txt").write_text(
        "".join(f"{label}_fine,{label}\n" for label in LABELS)
    )
    for record in RECORDS:
        (folder / "small_images" / f"{record['image_id']}.jpg").write_bytes(
            image_bytes(record["image_id"])
        )
    return folder


def write_pfl(folder: Path) -> Path:
    """Write a data set in pfl-research's layout, with the dtypes of its script."""
    folder.mkdir(parents=True)
    records_by_user = defaultdict(list)
    for record in RECORDS:
        records_by_user[record["user_id"]].append(record)
    fine_labels = sorted(f"{label}_fine" for label in LABELS)
    with h5py.File(folder / "flair_federated.hdf5", "w") as file:
        for user, user_records in records_by_user.items():
            group = f"/{user_records[0]['partition']}/{user}"
            for name, label_names, dtype in (
                ("labels", list(LABELS), np.uint8),
                ("fine_grained_labels", fine_labels, np.uint16),
            ):
                label_positions = [
                    (row, label_names.index(label))
                    for row, record in enumerate(user_records)
                    for label in record[name]
                ]
                file[f"{group}/{name}_row"] = np.asarray(
                    [row for row, _ in label_positions], dtype=np.uint16
                )
                file[f"{group}/{name}_col"] = np.asarray(
                    [column for _, column in label_positions], dtype=dtype
                )
            file[f"{group}/image_ids"] = np.asarray(
                [record["image_id"] for record in user_records], dtype="S"
            )
            images = [
                np.asarray(Image.open(io.BytesIO(image_bytes(record["image_id"]))))
                for record in user_records
            ]
            file.create_dataset(f"{group}/images", data=np.stack(images))
        file["/metadata/label_mapping"] = json.dumps(
            {label: column for column, label in enumerate(LABELS)}
        )
        file["/metadata/fine_grained_label_mapping"] = json.dumps(
            {label: column for column, label in enumerate(fine_labels)}
        )
    return folder


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A read-only data folder with ml-flair's layout."""
    root = tmp_path_factory.mktemp("published")
    write_ml_flair(root / "flair")
    return root


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDCOG_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(array_store, "_digests", {})
    return tmp_path / "cache" / "stores"


@pytest.fixture
def decode_counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each image was decoded."""
    counts: Counter[str] = Counter()
    read_image = MlFlairLayout.read_image
    lock = threading.Lock()

    def counting_read_image(self: MlFlairLayout, entry: ImageEntry) -> Image.Image:
        with lock:
            counts[entry.image_id] += 1
        return read_image(self, entry)

    monkeypatch.setattr(MlFlairLayout, "read_image", counting_read_image)
    return counts


def same_data(a: Dataset, b: Dataset) -> bool:
    parts = ("train_x", "train_y", "test_x", "test_y", "users")
    return all(torch.equal(getattr(a, part), getattr(b, part)) for part in parts)


def test_images_labels_and_users_match_the_files(data_dir: Path) -> None:
    data = registry.load("flair", data_dir)
    assert (
        data.classes == LABELS == tuple(sorted(LABELS))
        and data.multi_label
        and data.input_shape == (3, 64, 64)
    )
    expected = sorted(TRAIN, key=by_user)
    assert len(data.train_y) == len(expected) == 25 and len(data.test_y) == 7
    names = sorted(USERS["train"])
    assert data.users is not None
    for row, record in enumerate(expected):
        assert [LABELS[label] for label in data.train_y[row].nonzero()[:, 0]] == record["labels"]
        assert names[data.users[row]] == record["user_id"]
        pixels = np.asarray(Image.open(io.BytesIO(image_bytes(record["image_id"])))).astype(float)
        means = pixels.reshape(64, 4, 64, 4, 3).mean((1, 3)).transpose(2, 0, 1)
        # Each pixel is the mean of 4 x 4 pixels, up to rounding.
        assert np.abs(data.train_x[row].numpy() - means).max() <= 1


def test_both_layouts_give_the_same_dataset(data_dir: Path, tmp_path: Path) -> None:
    ml_flair = registry.load("flair", data_dir)
    pfl = dataset.read_flair(write_pfl(tmp_path / "flair"))
    assert same_data(ml_flair, pfl) and ml_flair.fingerprint == pfl.fingerprint
    small = dataset.read_flair(data_dir / "flair", size=8)
    assert small.input_shape == (3, 8, 8) and small.fingerprint != ml_flair.fingerprint


def test_natural_partition_assigns_one_user_per_client(data_dir: Path) -> None:
    data = registry.load("flair", data_dir)
    assert data.users is not None
    shares = make_partition(
        "natural", data.train_y.numpy(), data.users.numpy(), PartitionConfig(3, min_examples=2), 0
    )
    assert sorted(map(len, shares)) == [5, 7, 12]
    assert all(len(set(data.users[share].tolist())) == 1 for share in shares)


def test_store_is_built_once_and_not_modified(data_dir: Path, decode_counts: Counter[str]) -> None:
    first = registry.load("flair", data_dir)
    assert set(decode_counts.values()) == {1} and len(decode_counts) == len(USED_RECORDS)
    array_store._digests.clear()
    second = registry.load("flair", data_dir)
    assert (
        same_data(first, second)
        and first.fingerprint == second.fingerprint
        and set(decode_counts.values()) == {1}
    )
    first.train_x.zero_()  # writes to private memory, not to the store
    assert same_data(second, registry.load("flair", data_dir)) and second.train_x.any()


def damage_store(store: Path, fault: str) -> None:
    path, _, change = fault.partition(" ")
    file = store / path
    if change == "cut":
        os.truncate(file, file.stat().st_size // 2)
    elif change == "longer":
        file.write_bytes(file.read_bytes() + b"\0")
    elif change == "gone":
        file.unlink()
    elif change == "flipped":
        content = bytearray(file.read_bytes())
        content[len(content) // 3] ^= 1
        file.write_bytes(content)
    else:
        file.write_text(change)


@pytest.mark.parametrize(
    "fault",
    [
        *(f"train_x {change}" for change in ("cut", "longer", "gone", "flipped")),
        *(f"{name} flipped" for name in ("test_x", "train_y", "train_users", "manifest.json")),
        *(
            f"manifest.json {change}"
            for change in ("cut", "gone", "[]", "{}", '{"stamp": 1, "digest": []}', "[" * 100_000)
        ),
    ],
)
def test_damaged_store_is_rebuilt(
    data_dir: Path, cache: Path, decode_counts: Counter[str], fault: str
) -> None:
    expected = registry.load("flair", data_dir).train_x.clone()
    (store,) = (path for path in cache.iterdir() if path.is_dir())
    damage_store(store, fault)
    assert torch.equal(registry.load("flair", data_dir).train_x, expected)
    assert set(decode_counts.values()) == {2}
    assert torch.equal(registry.load("flair", data_dir).train_x, expected)
    assert set(decode_counts.values()) == {2}


def test_manifest_cannot_point_outside_the_store(
    data_dir: Path, cache: Path, tmp_path: Path
) -> None:
    data = registry.load("flair", data_dir)
    (store,) = (path for path in cache.iterdir() if path.is_dir())
    manifest = json.loads((store / "manifest.json").read_text())
    del manifest["digest"]
    manifest["arrays"]["../../secret"] = manifest["arrays"].pop("train_x")
    (store / "manifest.json").write_text(
        json.dumps(manifest | {"digest": array_store._json_digest(manifest)})
    )
    (cache.parent / "secret").write_bytes((store / "train_x").read_bytes())
    assert same_data(data, registry.load("flair", data_dir))


def test_changed_files_rebuild_the_store_in_place(tmp_path: Path, cache: Path) -> None:
    folder = write_ml_flair(tmp_path / "flair")
    before = dataset.read_flair(folder)
    image_id = sorted(TRAIN, key=by_user)[3]["image_id"]
    (folder / "small_images" / f"{image_id}.jpg").write_bytes(image_bytes("1"))
    after = dataset.read_flair(folder)
    changed = (before.train_x != after.train_x).flatten(1).any(1)
    assert changed.nonzero().flatten().tolist() == [3] and before.fingerprint != after.fingerprint
    (folder / "labels_and_metadata.json").write_text(
        json.dumps([record for record in RECORDS if record["image_id"] != image_id])
    )
    assert len(dataset.read_flair(folder).train_y) == 24
    assert len([path for path in cache.iterdir() if path.is_dir()]) == 1


STALLING_BUILD = """
import sys, time
from pathlib import Path
from fedcog.data.flair import dataset
dataset.DECODE_BATCH = 4

def stall(name, done, total):
    Path(sys.argv[2]).touch()
    time.sleep(60)

dataset.prepare(sys.argv[1], stall)
"""


@pytest.mark.slow
def test_killed_build_leaves_only_a_discarded_part(
    data_dir: Path, cache: Path, tmp_path: Path
) -> None:
    started = tmp_path / "begun"
    process = subprocess.Popen(
        [sys.executable, "-c", STALLING_BUILD, str(data_dir / "flair"), str(started)]
    )
    deadline = time.monotonic() + 60
    while not started.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    (partial,) = cache.glob("*.part")
    assert (partial / "train_x").exists() and not [
        path for path in cache.iterdir() if path.is_dir() and path != partial
    ]
    assert len(registry.load("flair", data_dir).train_y) == 25
    assert not partial.exists()


@pytest.mark.filterwarnings("ignore:another process is building")
def test_concurrent_builds_make_one_store(data_dir: Path, decode_counts: Counter[str]) -> None:
    with ThreadPoolExecutor(4) as pool:
        datasets = list(pool.map(lambda _: dataset.read_flair(data_dir / "flair"), range(4)))
    assert all(same_data(datasets[0], data) for data in datasets)
    assert set(decode_counts.values()) == {1}


def test_unwritable_cache_is_reported(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDCOG_CACHE", "/proc/nowhere")
    with pytest.raises(DataError, match="choose another folder with FEDCOG_CACHE"):
        registry.load("flair", data_dir)


def test_progress_increases_to_the_total(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset, "DECODE_BATCH", 8)
    calls: list[tuple[str, int, int | None]] = []
    registry.prepare("flair", data_dir, progress=lambda *call: calls.append(call))
    done = [call[1] for call in calls]
    assert done == sorted(set(done)) and done[-1] == calls[-1][2] == 32 * 3 * 64 * 64


@pytest.fixture
def allow_all_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset, "MAX_FAULTY_FRACTION", 1.0)


BOMB = encode_image(np.zeros((4200, 4200, 3), np.uint8))
FAULTY_IMAGES = {
    "missing": (None, r"1 missing: {0}\.jpg$"),
    "cut short": (
        lambda content: content[: len(content) // 2],
        r"1 corrupt: {0}\.jpg: .*truncated",
    ),
    "text": (lambda content: b"<html>not found</html>", r"1 corrupt: {0}\.jpg: cannot identify"),
    "empty": (lambda content: b"", r"1 corrupt: {0}\.jpg: cannot identify"),
    "another format": (
        lambda content: encode_image(np.zeros((8, 8, 3), np.uint8), "PNG"),
        r"1 corrupt: {0}\.jpg: cannot identify",
    ),
    "a bomb": (lambda content: BOMB, r"1 corrupt: {0}\.jpg: 4200 x 4200 pixels"),
}


@pytest.mark.parametrize("fault", FAULTY_IMAGES)
def test_faulty_image_is_reported_and_excluded(fault: str, tmp_path: Path) -> None:
    spoil, message = FAULTY_IMAGES[fault]
    folder = write_ml_flair(tmp_path / "flair")
    image_id = TRAIN[4]["image_id"]
    path = folder / "small_images" / f"{image_id}.jpg"
    if spoil is None:
        path.unlink()
    else:
        path.write_bytes(spoil(path.read_bytes()))
    for _ in range(2):  # the store records faults, so the second read warns too
        with pytest.warns(
            DataWarning, match="of 32 images 1 are left out\n  " + message.format(image_id)
        ):
            data = dataset.read_flair(folder)
    rest = write_ml_flair(
        tmp_path / "rest" / "flair",
        [record for record in RECORDS if record["image_id"] != image_id],
    )
    assert same_data(data, dataset.read_flair(rest))


def test_grayscale_images_are_read_as_rgb(tmp_path: Path) -> None:
    folder = write_ml_flair(tmp_path / "flair", USED_RECORDS)
    first = min(TRAIN, key=by_user)
    (folder / "small_images" / f"{first['image_id']}.jpg").write_bytes(
        encode_image(np.full((16, 24), 77, np.uint8))
    )
    assert dataset.read_flair(folder).train_x[0].unique().tolist() == [77]


FAULTY_RECORDS: dict[str, tuple[Any, str]] = {
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


@pytest.mark.parametrize("fault", FAULTY_RECORDS)
def test_faulty_record_is_reported_and_excluded(
    fault: str, tmp_path: Path, allow_all_faults: None
) -> None:
    change, message = FAULTY_RECORDS[fault]
    (tmp_path / "secret.jpg").write_bytes(image_bytes("5"))
    faulty = change if isinstance(change, list) else USED_RECORDS[3] | change
    folder = write_ml_flair(
        tmp_path / "set" / "flair", [*USED_RECORDS[:3], faulty, *USED_RECORDS[4:]]
    )
    with pytest.warns(
        DataWarning, match="1 mislabelled: " + message.format(USED_RECORDS[3]["image_id"])
    ):
        data = dataset.read_flair(folder)
    assert same_data(
        data,
        dataset.read_flair(
            write_ml_flair(tmp_path / "rest" / "flair", [*USED_RECORDS[:3], *USED_RECORDS[4:]])
        ),
    )


def test_duplicate_image_counts_once(tmp_path: Path, data_dir: Path) -> None:
    folder = write_ml_flair(
        tmp_path / "flair", [*RECORDS, TRAIN[0] | {"labels": [], "user_id": "z"}]
    )
    with pytest.warns(DataWarning, match=f"1 repeated: {TRAIN[0]['image_id']}"):
        assert same_data(dataset.read_flair(folder), registry.load("flair", data_dir))


def test_too_many_faults_are_refused(tmp_path: Path, cache: Path) -> None:
    folder = write_ml_flair(tmp_path / "flair")
    for record in sorted(TRAIN, key=by_user)[:8]:
        (folder / "small_images" / f"{record['image_id']}.jpg").unlink()
    with pytest.raises(
        DataError,
        match=r"too much of FLAIR .* of 32 images 8 .*\n  8 missing: (\d+\.jpg; ){4}.*, and 3 more",
    ):
        dataset.read_flair(folder)
    assert not [path for path in cache.iterdir() if path.is_dir()]


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
def test_invalid_record_list_is_refused(text: str, reason: str, tmp_path: Path) -> None:
    folder = write_ml_flair(tmp_path / "flair", [])
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
def test_any_jpeg_bytes_give_an_image_or_a_fault(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int]], cut: bool
) -> None:
    folder = tmp_path_factory.mktemp("spoilt")
    (folder / "small_images").mkdir()
    content = bytearray(image_bytes("7", 32))
    for position, value in changes:
        content[position % len(content)] = value
    (folder / "small_images" / "7.jpg").write_bytes(
        content[: changes[0][0] % len(content)] if cut else content
    )
    outcome: Image.Image | ImageFault
    try:
        outcome = MlFlairLayout(folder).read_image(ImageEntry("train", "user", "7", ()))
    except ImageFault as fault:
        outcome = fault
    if isinstance(outcome, ImageFault):
        assert outcome.kind == "corrupt" and outcome.name.startswith("7.jpg")
    else:
        assert outcome.mode == "RGB"


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


@pytest.mark.slow
@settings(max_examples=200)
@given(listed=st.lists(JSON | st.dictionaries(KEYS, JSON, min_size=3), max_size=5))
def test_any_record_gives_an_entry_or_a_fault(
    tmp_path_factory: pytest.TempPathFactory, listed: list[Any]
) -> None:
    folder = tmp_path_factory.mktemp("listed")
    (folder / "labels_and_metadata.json").write_text(json.dumps(listed))
    entries = list(MlFlairLayout(folder).entries())
    assert len(entries) == len(listed)
    for entry in entries:
        assert isinstance(entry, ImageFault) or all(0 <= label < 17 for label in entry.labels)


def write_other_file(folder: Path) -> Path:
    """Write another HDF5 file with the group of a user."""
    with h5py.File(folder / "elsewhere.h5", "w") as other:
        other["user/images"] = np.zeros((1, 256, 256, 3), np.uint8)
    return folder / "elsewhere.h5"


def user_group(file: Any) -> Any:
    return file["train/b@N02"]


def replace_dataset(group: Any, name: str, value: Any, **keywords: Any) -> None:
    del group[name]
    group.create_dataset(name, data=value, **keywords)


def link_user_to_other_file(file: Any, folder: Path) -> None:
    del file["train/b@N02"]
    file["train/b@N02"] = h5py.ExternalLink(str(write_other_file(folder)), "/user")


def link_images(file: Any, folder: Path) -> None:
    del user_group(file)["images"]
    user_group(file)["images"] = h5py.SoftLink("/test/t@N00/images")


def store_images_externally(file: Any, folder: Path) -> None:
    (folder / "secret").write_bytes(b"s" * 12 * 256 * 256 * 3)
    del user_group(file)["images"]
    outside = [(str(folder / "secret"), 0, h5py.h5f.UNLIMITED)]
    user_group(file).create_dataset(
        "images", shape=(12, 256, 256, 3), dtype=np.uint8, external=outside
    )


def store_images_virtually(file: Any, folder: Path) -> None:
    layout = h5py.VirtualLayout((12, 256, 256, 3), np.uint8)
    layout[:1] = h5py.VirtualSource(write_other_file(folder), "user/images", (1, 256, 256, 3))
    del user_group(file)["images"]
    user_group(file).create_virtual_dataset("images", layout)


def claim_huge_size(file: Any, folder: Path) -> None:
    for name, kind in (("images", np.uint8), ("image_ids", "S10")):
        del user_group(file)[name]
        shape = (10**9, 256, 256, 3) if name == "images" else (10**9,)
        user_group(file).create_dataset(name, shape=shape, dtype=kind, chunks=(1, *shape[1:]))


def use_huge_chunks(file: Any, folder: Path) -> None:
    replace_dataset(
        user_group(file), "labels_row", np.zeros(3, np.uint16), chunks=(10**8,), maxshape=(None,)
    )


FAULTY_USERS = {
    "a link to another file": (
        link_user_to_other_file,
        "corrupt: /train/b@N02 is missing, or a link",
    ),
    "a link": (link_images, "corrupt: /train/b@N02/images is missing, or a link"),
    "pixels of another file": (
        store_images_externally,
        "corrupt: /train/b@N02/images is stored in another file",
    ),
    "pixels of other files": (
        store_images_virtually,
        "corrupt: /train/b@N02/images is stored in another file",
    ),
    "a promise": (claim_huge_size, r"corrupt: train/b@N02/images: uint8 \[1000000000"),
    "chunks": (use_huge_chunks, "corrupt: /train/b@N02/labels_row has chunks"),
    "no group": (
        lambda file, _: replace_dataset(file, "train/b@N02", 3),
        "corrupt: /train/b@N02 is a Dataset",
    ),
    "no images": (
        lambda file, _: user_group(file).pop("images"),
        "corrupt: /train/b@N02/images is missing",
    ),
    "floats": (
        lambda f, _: replace_dataset(user_group(f), "images", np.zeros((12, 8, 8, 3))),
        "/train/b@N02/images holds float64",
    ),
    "16 bits": (
        lambda f, _: replace_dataset(user_group(f), "images", np.zeros((12, 8, 8, 3), np.uint16)),
        "images: uint16",
    ),
    "flat images": (
        lambda f, _: replace_dataset(user_group(f), "images", np.zeros((12, 9), np.uint8)),
        r"images is \(12, 9\)",
    ),
    "no pixels": (
        lambda f, _: replace_dataset(user_group(f), "images", np.zeros((12, 0, 8, 3), np.uint8)),
        "images: uint8",
    ),
    "few names": (
        lambda f, _: replace_dataset(user_group(f), "image_ids", np.array([b"1"])),
        r"image_ids is \(1,\)",
    ),
    "long names": (
        lambda f, _: replace_dataset(user_group(f), "image_ids", np.array([b"1" * 99] * 12)),
        r"image_ids: \|S99",
    ),
    "rows too high": (
        lambda f, _: (
            replace_dataset(user_group(f), "labels_row", np.array([12], np.uint16)),
            replace_dataset(user_group(f), "labels_col", np.array([1], np.uint8)),
        ),
        "mislabelled: train/b@N02: labels of more than its 12 images",
    ),
    "too many rows": (
        lambda f, _: replace_dataset(user_group(f), "labels_row", np.zeros(300, np.uint16)),
        "mislabelled: train/b@N02: 300 labels of 12 images",
    ),
    "other columns": (
        lambda f, _: replace_dataset(user_group(f), "labels_col", np.zeros(3, np.uint8)),
        r"labels_col is \(3,\)",
    ),
}


@pytest.mark.parametrize("fault", FAULTY_USERS)
def test_faulty_user_is_reported_and_excluded(
    fault: str, tmp_path: Path, allow_all_faults: None
) -> None:
    spoil, message = FAULTY_USERS[fault]
    folder = write_pfl(tmp_path / "flair")
    with h5py.File(folder / "flair_federated.hdf5", "a") as file:
        spoil(file, tmp_path)
    # Without a readable group the number of its images is unknown, and counts as one.
    num_lost = 1 if fault in ("a link to another file", "no group", "a promise") else 12
    with pytest.warns(
        DataWarning,
        match=f"of {20 + num_lost} images {num_lost} are left out\n  {num_lost} .*" + message,
    ):
        data = dataset.read_flair(folder)
    other_records = [record for record in RECORDS if record["user_id"] != "b@N02"]
    assert same_data(
        data, dataset.read_flair(write_ml_flair(tmp_path / "rest" / "flair", other_records))
    )


def test_unknown_label_column_excludes_one_image(tmp_path: Path, allow_all_faults: None) -> None:
    folder = write_pfl(tmp_path / "flair")
    with h5py.File(folder / "flair_federated.hdf5", "a") as file:
        group = user_group(file)
        group["labels_col"][0] = 200
        image_id = group["image_ids"][int(group["labels_row"][0])].decode()
    with pytest.warns(DataWarning, match=f"1 mislabelled: train/b@N02/{image_id}: label 200"):
        data = dataset.read_flair(folder)
    other_records = [record for record in RECORDS if record["image_id"] != image_id]
    assert same_data(
        data, dataset.read_flair(write_ml_flair(tmp_path / "rest" / "flair", other_records))
    )


def test_label_columns_follow_the_mapping_of_the_file(tmp_path: Path, data_dir: Path) -> None:
    folder = write_pfl(tmp_path / "flair")
    with h5py.File(folder / "flair_federated.hdf5", "a") as file:
        replace_dataset(
            file,
            "metadata/label_mapping",
            json.dumps({label: 16 - i for i, label in enumerate(LABELS)}),
        )
        for part in ("train", "test"):
            for group in file[part].values():
                group["labels_col"][:] = 16 - group["labels_col"][:]
    assert same_data(dataset.read_flair(folder), registry.load("flair", data_dir))


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
def test_hdf5_file_with_another_layout_is_refused(
    mapping: str | int | None, reason: str, tmp_path: Path
) -> None:
    folder = write_pfl(tmp_path / "flair")
    with h5py.File(folder / "flair_federated.hdf5", "a") as file:
        del file["metadata/label_mapping"]
        if mapping is not None:
            file["metadata/label_mapping"] = mapping
    with pytest.raises(DataError, match=f"does not have pfl-research.s layout: .*{reason}"):
        dataset.read_flair(folder)


def test_truncated_hdf5_file_is_refused(tmp_path: Path) -> None:
    path = write_pfl(tmp_path / "flair") / "flair_federated.hdf5"
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(DataError, match=r"flair_federated\.hdf5 cannot be read"):
        dataset.read_flair(path.parent)


def test_two_hdf5_files_are_refused(tmp_path: Path) -> None:
    folder = write_pfl(tmp_path / "flair")
    (folder / "flair_federated_small.hdf5").write_bytes(b"")
    with pytest.raises(DataError, match="leave one of them"):
        dataset.read_flair(folder)


def test_missing_h5py_error_names_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(DataError, match=r"pip install 'fedcog\[flair\]'"):
        Hdf5Layout(tmp_path / "flair_federated.hdf5")


def test_missing_dataset_error_says_where_to_get_it(tmp_path: Path) -> None:
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


def test_data_commands_list_and_prepare_flair(
    data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], decode_counts: Counter[str]
) -> None:
    assert main.main(["data", "list", "--data-dir", str(tmp_path)]) == 0
    assert "fedcog data get flair" in capsys.readouterr().out.replace("\n", " ")
    assert main.main(["data", "get", "flair", "--data-dir", str(tmp_path)]) != 0
    assert "github.com/apple/ml-flair" in capsys.readouterr().err.replace("\n", "")
    assert main.main(["data", "get", "flair", "--data-dir", str(data_dir)]) == 0
    assert (
        f"flair: {data_dir / 'flair'}" in capsys.readouterr().out.replace("\n", "")
        and len(decode_counts) == 32
    )


def test_unusable_images_are_reported_when_decoded(
    tmp_path: Path, allow_all_faults: None, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_ml_flair(tmp_path / "flair", [*USED_RECORDS, {}])
    for _ in range(2):
        assert main.main(["data", "get", "flair", "--data-dir", str(folder.parent)]) == 0
        assert "1 mislabelled: image_id None" in " ".join(capsys.readouterr().err.split())


def test_permission_error_is_not_an_image_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A permission may be fixed later, so the store must not record a fault."""
    folder = write_ml_flair(tmp_path / "flair")
    open_image = Image.open

    def denied_open(path: Any, **options: Any) -> Any:
        if path.name == f"{TRAIN[4]['image_id']}.jpg":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return open_image(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Image, "open", denied_open)
        with pytest.raises(
            DataError, match=f"{TRAIN[4]['image_id']}.jpg cannot be read .Permission denied."
        ):
            dataset.read_flair(folder)
    assert len(dataset.read_flair(folder).train_x) == len(TRAIN)


def test_compare_reports_excluded_images(
    tmp_path: Path, allow_all_faults: None, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_ml_flair(tmp_path / "flair", [*USED_RECORDS, {}])
    command = f"compare --dataset flair --data-dir {folder.parent} --partition natural"
    command += " --clients 3 --min-examples 2 --rounds 1 --local-steps 1 --batch-size 2"
    command += " --model mlp --threads 1 --algorithms fedavg --seeds 0 --quiet"
    command += f" --out {tmp_path}/out"
    assert main.main(command.split()) == 0
    stderr = capsys.readouterr().err
    assert (
        stderr.startswith("fedcog: FLAIR in ")
        and "1 mislabelled: image_id None" in stderr
        and "Warning" not in stderr
    )


@pytest.mark.slow
@pytest.mark.parametrize("model", ["cnn3", "resnet18"])
def test_round_on_flair_runs(data_dir: Path, tmp_path: Path, model: str) -> None:
    experiment = Experiment(
        algorithm=FedAvg(),
        dataset="flair",
        data_dir=str(data_dir),
        partition="natural",
        clients=3,
        min_examples=2,
        rounds=1,
        local_steps=2,
        batch_size=4,
        model=model,
        threads=1,
    )
    run = fedcog.run(experiment, tmp_path / "run", report=False)
    assert run.metric == "o_f1" and len(run.scores) == 1 and run.lines[0]["loss"] > 0


def run_in_process(program: str, *arguments: str) -> list[int]:
    """Run a program in a new process, and return the numbers that it prints.

    A shell starts it, because a forked process inherits the peak memory of its parent.
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
    process = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert process.returncode == 0, process.stderr
    return [int(word) for word in process.stdout.split()]


def flair_sized_records(images: int, users: int) -> Iterator[str]:
    """Records of a list as long as FLAIR's, with FLAIR's long tail of user sizes."""
    quantile = (np.arange(users) + 0.5) / users
    sizes = (1 + 1.8 * ((1 - quantile) ** (-1 / 1.16) - 1)).clip(max=4151).astype(int)
    sizes[-200:] += (images - sizes.sum()) // 200
    sizes[-1] += images - sizes.sum()
    rng = np.random.default_rng(0)
    label_lists = [
        json.dumps([LABELS[label] for label in rng.permutation(17)[:count]])
        for count in rng.integers(1, 6, 1000)
    ]
    fine_label_lists = [
        json.dumps([f"fine_grained_{label}" for label in rng.integers(0, 1628, count)])
        for count in (3, 4, 5, 6, 7)
    ]
    image = 10**10
    for user, size in enumerate(sizes.tolist()):
        part = ("val", "test")[user % 10] if user % 10 < 2 else "train"
        for _ in range(size):
            image += 7
            yield (
                f'{{"user_id": "{10**7 + user}@N00", "image_id": "{image}", '
                f'"fine_grained_labels": {fine_label_lists[image % 5]}, '
                f'"labels": {label_lists[image % 1000]}, "partition": "{part}"}}'
            )


@pytest.mark.slow
def test_listing_full_flair_uses_less_than_two_gigabytes(tmp_path: Path) -> None:
    path = tmp_path / "labels_and_metadata.json"
    lines = list(flair_sized_records(429_078, 51_414))
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
    train, train_users, test, test_users, faults, peak = run_in_process(program, str(tmp_path))
    assert (train, test) == tuple(
        sum(f'"{part}"}}' in line for line in lines) for part in ("train", "test")
    )
    assert (train_users, test_users, faults) == (41_130, 5_142, 0)
    assert peak < 2_000_000  # kilobytes


@pytest.mark.slow
def test_training_does_not_copy_the_store_into_memory() -> None:
    """The store has two gigabytes of images; a round needs a few of them."""
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

        folder = array_store.cache_dir() / "stores" / "large"
        store = array_store.open_or_build(folder, "stamp", build)
        x = torch.from_numpy(store.arrays["x"])
        y = torch.from_numpy(store.arrays["y"])
        names = tuple(map(str, range(17)))
        mean = std = (0.5, 0.5, 0.5)
        data = Dataset("large", x, y, x[:8], y[:8], names, mean, std, True, digest=store.digest)
        data.fingerprint
        parts = list(torch.arange(163_840).split(8))
        for max_bytes in (2**60, 1000):
            client_batches.max_device_bytes = lambda device: max_bytes
            shared = FederatedData(data, parts, seed=0, augment=True)
            assert shared.is_streamed == (max_bytes == 1000)
            assert shared.train_x.data_ptr() == x.data_ptr()
            plan = shared.plan_batches(0, torch.arange(50), 2, 8)
            batch = shared.examples(plan.indices, plan.crops)
            assert batch["x"].shape == (50, 2, 8, 3, 64, 64) and "x" in shared.stage(plan.indices)
        print(x.nbytes // 1024, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    """
    size, peak = run_in_process(program)
    assert size > 1_900_000 and peak < 1_300_000


def test_streamed_batches_equal_resident_batches(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = registry.load("flair", data_dir)
    parts = [torch.arange(0, 12), torch.arange(12, 25)]
    resident = FederatedData(data, parts, seed=1, augment=True)
    monkeypatch.setattr(client_batches, "max_device_bytes", lambda device: 10)
    streamed = FederatedData(data, parts, seed=1, augment=True)
    assert streamed.is_streamed and not resident.is_streamed
    plan = resident.plan_batches(0, torch.arange(2), 3, 4)
    expected = resident.examples(plan.indices, plan.crops)
    batch = streamed.examples(plan.indices, plan.crops)
    assert torch.equal(expected["x"], batch["x"]) and torch.equal(expected["y"], batch["y"])
