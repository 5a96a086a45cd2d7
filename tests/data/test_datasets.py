"""Tests of data sets from arrays and torch data sets, and of file readers."""

from __future__ import annotations

import gzip
import importlib.util
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset

from fedcog.data import formats
from fedcog.data.datasets import DataError, Dataset, from_arrays, from_torch
from fedcog.data.formats import read_idx

torch.set_num_threads(1)

rng = np.random.default_rng(0)
IMAGES = rng.integers(0, 256, (6, 5, 7, 3), dtype=np.uint8)
LABELS = np.array([0, 1, 2, 0, 1, 2])


def idx_bytes(array: np.ndarray[Any, Any]) -> bytes:
    return (
        bytes([0, 0, 8, array.ndim])
        + struct.pack(f">{array.ndim}I", *array.shape)
        + array.tobytes()
    )


def dataset_arguments(**changes: Any) -> dict[str, Any]:
    x = torch.zeros(4, 1, 2, 2, dtype=torch.uint8)
    y = torch.tensor([0, 1, 0, 1])
    arrays = {"train_x": x, "train_y": y, "test_x": x[:2], "test_y": y[:2]}
    return {
        "name": "mine",
        **arrays,
        "classes": ("a", "b"),
        "mean": (0.5,),
        "std": (0.5,),
    } | changes


# The data set itself


def test_test_set_may_be_empty() -> None:
    pixels = np.arange(24, dtype=np.uint8).reshape(6, 2, 2)
    data = from_arrays(pixels, ["cat", "ant", "cat", "ant", "cat", "bee"])
    assert data.test_x.shape == (0, 1, 2, 2) and data.test_x.dtype == torch.uint8
    assert data.test_y.shape == (0,) and data.test_y.dtype == torch.int64
    assert data.classes == ("ant", "bee", "cat") and data.train_y.tolist() == [2, 0, 2, 0, 2, 1]
    assert data.fingerprint != from_arrays(pixels, list("aababc")).fingerprint
    rows = from_arrays(torch.rand(3, 2), [{"a"}, {"a", "b"}, set()])
    assert rows.test_y.shape == (0, 2) and rows.test_y.dtype == torch.bool
    pairs = TensorDataset(torch.rand(4, 3), torch.tensor([0, 1, 0, 1]))
    assert from_torch(pairs).test_x.shape == (0, 3)
    with pytest.raises(DataError, match="test_x is given without test_y: give both, or neither"):
        from_arrays(torch.rand(3, 2), [0, 1, 0], torch.rand(1, 2))


def test_users_keep_their_names_in_both_splits() -> None:
    x = torch.rand(4, 2)
    data = from_arrays(
        x, [0, 1, 0, 1], x[:2], [0, 1], users=[30, 7, 30, 7], test_users=np.array([7, 100])
    )
    assert data.user_names == ("7", "30", "100")
    assert data.users is not None and data.users.tolist() == [1, 0, 1, 0]
    assert data.test_users is not None and data.test_users.tolist() == [0, 2]
    other = from_arrays(x, [0, 1, 0, 1], x[:2], [0, 1], users=[30, 7, 30, 7], test_users=[100, 7])
    assert other.fingerprint != data.fingerprint
    with pytest.raises(DataError, match="test_users is given without users"):
        from_arrays(x, [0, 1, 0, 1], x[:2], [0, 1], test_users=[7, 7])


def test_unknown_keyword_is_refused_with_a_suggestion() -> None:
    with pytest.raises(TypeError, match="unknown keyword argument 'user': did you mean users"):
        from_arrays(torch.rand(2, 2), [0, 1], user=[0, 1])  # type: ignore[call-arg]


def test_dataset_has_input_shape() -> None:
    assert Dataset(**dataset_arguments()).input_shape == (1, 2, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_y": torch.tensor([0, 1])}, "train_y is [2]"),
        ({"test_y": torch.tensor([[0], [1]])}, "test_y is [2, 1]"),
        ({"train_y": torch.tensor([0, 1, 0, 2])}, "train_y has labels 0 to 2: 2 classes are 0..1"),
        ({"test_y": torch.tensor([0, -1])}, "test_y has labels -1 to 0"),
        ({"train_y": torch.tensor([0, 1, 0, 1], dtype=torch.int32)}, "labels are int64"),
        ({"test_x": torch.zeros(2, 1, 2, 3, dtype=torch.uint8)}, "give both the same shape"),
        ({"test_x": torch.zeros(2, 1, 2, 2)}, "the same type"),
        ({"test_x": torch.zeros(0, 1, 2, 2, dtype=torch.uint8)}, "give one label per example"),
        ({"train_x": torch.zeros(0, 1, 2, 2, dtype=torch.uint8)}, "give at least one example"),
        ({"mean": ()}, "mean is ()"),
        ({"mean": (float("nan"),)}, "finite"),
        ({"std": (0.0,)}, "above 0"),
        ({"std": (0.5, 0.5)}, "std is (0.5, 0.5)"),
        ({"classes": ()}, "classes is empty"),
        ({"train_x": torch.zeros(4, 2, 2, dtype=torch.uint8)}, "[n, C, H, W]"),
        ({"train_x": torch.zeros(4, 1, 2, 2, dtype=torch.int32)}, "train_x is int32"),
        ({"train_x": torch.full((4, 1, 2, 2), torch.nan)}, "train_x holds NaN"),
        ({"train_x": torch.zeros(4, 3)}, "leave both empty"),
        ({"users": torch.tensor([0, 1])}, "users has 2 entries"),
        ({"users": torch.tensor([0, 1, 2, -1])}, "number the users from 0"),
        ({"test_users": torch.tensor([0, 1])}, "test_users is given without users"),
        (
            {"users": torch.tensor([0, 1, 2, 0]), "test_users": torch.tensor([0])},
            "test_users has 1 entries: give one for each of 2 test examples",
        ),
        ({"users": torch.tensor([0, 1, 2, 0]), "user_names": ("a", "b")}, "name every user"),
        ({"indices": ()}, "indices is empty"),
        (
            {"indices": (torch.tensor([0]), torch.tensor([], dtype=torch.int64))},
            "client 1 are empty",
        ),
        ({"indices": (torch.tensor([0, 4]),)}, "client 0 leave 0..3: 0 to 4"),
        ({"indices": (torch.tensor([0, 2]), torch.tensor([1, 2]))}, "example 2 twice"),
        ({"indices": (torch.tensor([0.0]),)}, "give int64 in one dimension"),
    ],
)
def test_error_names_the_fault_and_the_dataset(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError) as caught:
        Dataset(**dataset_arguments(**changes))
    assert message in str(caught.value) and "'mine'" in str(caught.value)


def test_all_faults_are_reported_at_once() -> None:
    with pytest.raises(DataError) as caught:
        Dataset(
            **dataset_arguments(
                train_y=torch.tensor([0, 1, 0, 9]), std=(-1.0,), indices=(torch.tensor([7]),)
            )
        )
    assert str(caught.value).count("\n  - ") == 3


# User data


def test_all_image_layouts_give_the_same_dataset() -> None:
    channel_first = IMAGES.transpose(0, 3, 1, 2)
    layouts: list[Any] = [
        IMAGES,
        np.asfortranarray(IMAGES),
        IMAGES[::-1].copy()[::-1],
        channel_first,
    ]
    layouts.append(torch.from_numpy(channel_first.copy()))
    for images in layouts:
        data = from_arrays(images, LABELS, images[:2], LABELS[:2])
        assert torch.equal(data.train_x, torch.from_numpy(channel_first.copy()))
        assert data.train_x.is_contiguous() and data.classes == ("0", "1", "2")
    grayscale = from_arrays(IMAGES[..., 0], LABELS, IMAGES[:1, ..., 0], LABELS[:1])
    assert grayscale.input_shape == (1, 5, 7) and torch.equal(
        grayscale.train_x[:, 0], torch.from_numpy(IMAGES[..., 0])
    )


def test_ambiguous_layout_is_refused() -> None:
    with pytest.raises(DataError, match=r"train_x .*tensor \[n, C, H, W\]"):
        from_arrays(IMAGES[:, :3], LABELS, IMAGES[:, :3], LABELS)


def test_mean_and_std_come_from_training_images() -> None:
    data = from_arrays(IMAGES, LABELS, IMAGES[:1] * 0, LABELS[:1])
    assert data.mean == pytest.approx((IMAGES / 255).mean((0, 1, 2)))
    assert data.std == pytest.approx((IMAGES / 255).std((0, 1, 2)))
    normalized = from_arrays(IMAGES, LABELS, IMAGES, LABELS, mean=[0, 0, 0], std=[1, 1, 1])
    assert normalized.std == (1.0, 1.0, 1.0)
    assert from_arrays(IMAGES * 0, LABELS, IMAGES, LABELS).std == (1.0, 1.0, 1.0)


def test_float_inputs_are_unchanged() -> None:
    x = rng.normal(size=(6, 9)).astype(">f8")
    data = from_arrays(x, LABELS.astype(np.uint8), x[:2], LABELS[:2])
    assert data.train_x.dtype == torch.float32 and data.mean == () and data.input_shape == (9,)
    assert np.allclose(data.train_x.numpy(), x)


def test_label_names_and_user_names_become_numbers() -> None:
    x = np.zeros((3, 2), np.float32)
    users = ["zoe", "ann", "zoe"]
    data = from_arrays(x, ["cat", "ant", "cat"], x[:1], np.array(["bee"], object), users=users)
    assert data.classes == ("ant", "bee", "cat")
    assert data.train_y.tolist() == [2, 0, 2] and data.test_y.tolist() == [1]
    assert data.users is not None and data.users.tolist() == [1, 0, 1]
    with_classes = from_arrays(
        x, ["cat", "ant", "cat"], x[:1], ["ant"], classes=["cat", "ant"], indices=[[0, 2], [1]]
    )
    assert with_classes.train_y.tolist() == [0, 1, 0]
    assert with_classes.indices is not None and [
        indices.tolist() for indices in with_classes.indices
    ] == [[0, 2], [1]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: from_arrays(x, ["cat"] * 6, x, ["dog"] * 6, classes=["cat"]), "dog"),
        (lambda x: from_arrays(x, LABELS + 0.5, x, LABELS), "train_y holds float64"),
        (lambda x: from_arrays(x, LABELS * 10**9, x, LABELS), "number the classes from 0"),
        (
            lambda x: from_arrays(x, LABELS, x, LABELS, users=["a", 1, "a", 1, "a", 1]),
            "put in order",
        ),
        (lambda x: from_arrays(x, LABELS, x, LABELS, indices=[[0.5]]), "indices holds float64"),
        (lambda x: from_arrays(x.astype(complex), LABELS, x, LABELS), "train_x holds complex128"),
        (lambda x: from_arrays([[1.0], [1.0, 2.0]], [0, 1]), "examples of several shapes"),
        (lambda x: from_arrays(torch.from_numpy(x).to_sparse(), LABELS), "to_dense"),
        (lambda x: from_arrays(x, LABELS, users=["a", pd.NA] * 3), "users holds None or NaN"),
        (lambda x: from_arrays(x, LABELS, indices=[LABELS == 0]), "indices hold True and False"),
        (lambda x: from_torch(DataLoader(Pairs(x, LABELS))), "loader.dataset"),
        (lambda x: from_torch([(0.0, 1, 2)]), "example 0 is no pair"),
    ],
)
def test_invalid_values_are_refused(call: Callable[[Any], Dataset], message: str) -> None:
    with pytest.raises(DataError, match=message):
        call(np.zeros((6, 2)))


class Pairs(torch.utils.data.Dataset[Any]):
    def __init__(self, inputs: Any, labels: Any) -> None:
        self.inputs = inputs
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Any:
        return self.inputs[index], self.labels[index]


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(zip(torch.from_numpy(IMAGES).permute(0, 3, 1, 2), LABELS, strict=True))


def test_torch_datasets_of_images_arrays_and_tensors() -> None:
    expected = from_arrays(IMAGES, LABELS, IMAGES, LABELS)
    images = Pairs([Image.fromarray(image) for image in IMAGES], torch.tensor(LABELS))
    for source in (images, Pairs(IMAGES, LABELS.tolist()), Stream()):
        data = from_torch(source, source, name="pairs", augment=True)
        assert torch.equal(data.train_x, expected.train_x) and torch.equal(
            data.test_y, expected.test_y
        )
        assert data.mean == expected.mean and data.name == "pairs" and data.augment
    floats = Pairs(torch.rand(6, 3, 5, 7), LABELS)
    assert torch.equal(from_torch(floats, floats).train_x, floats.inputs)


def test_torch_dataset_of_mixed_shapes_is_refused() -> None:
    uneven = Pairs([torch.zeros(2), torch.zeros(2), torch.zeros(3)], [0, 0, 0])
    with pytest.raises(DataError, match="example 2"):
        from_torch(uneven, uneven)
    with pytest.raises(DataError, match="no examples"):
        from_torch(Pairs([], []), uneven)


# IDX files

shapes = st.lists(st.integers(0, 5), min_size=1, max_size=4)


@given(shape=shapes, seed=st.integers(0, 9), zipped=st.booleans())
@settings(max_examples=40, deadline=None)
def test_idx_round_trip(shape: list[int], seed: int, zipped: bool) -> None:
    array = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x-ubyte"
        path.write_bytes(gzip.compress(idx_bytes(array)) if zipped else idx_bytes(array))
        assert torch.equal(read_idx(path), torch.from_numpy(array))
        assert torch.equal(read_idx(path, tuple(shape)), torch.from_numpy(array))


@pytest.mark.parametrize("zipped", [False, True])
def test_truncated_idx_file_is_refused(tmp_path: Path, zipped: bool) -> None:
    content = idx_bytes(IMAGES[:2, :3, :3, 0])
    if zipped:
        content = gzip.compress(content)
    path = tmp_path / "cut-ubyte"
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(DataError, match="cut-ubyte"):
            read_idx(path)
    path.write_bytes(content + b"!")
    with pytest.raises(DataError, match="cut-ubyte"):
        read_idx(path)


@given(position=st.integers(0, 200), value=st.integers(1, 255))
@settings(max_examples=60, deadline=None)
def test_damaged_gzip_never_changes_values(position: int, value: int) -> None:
    array = IMAGES[:2, :, :, 0]
    content = bytearray(gzip.compress(idx_bytes(array), mtime=0))
    content[position % len(content)] ^= value
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "damaged"
        path.write_bytes(content)
        try:
            # The damaged byte may be one of the header that the reader ignores.
            assert torch.equal(read_idx(path), torch.from_numpy(array))
        except DataError as error:
            assert "damaged" in str(error)  # noqa: PT017


def test_idx_header_cannot_claim_more_than_the_file(tmp_path: Path) -> None:
    huge = bytes([0, 0, 8, 3]) + struct.pack(">3I", 2**32 - 1, 2**32 - 1, 2**32 - 1)
    for content in (huge, gzip.compress(huge + bytes(10**6))):
        (tmp_path / "bomb").write_bytes(content)
        with pytest.raises(DataError, match="more than it can hold"):
            read_idx(tmp_path / "bomb")
    (tmp_path / "bomb").write_bytes(gzip.compress(idx_bytes(np.zeros(3, np.uint8)) + bytes(10**8)))
    with pytest.raises(DataError, match="continues after its end"):
        read_idx(tmp_path / "bomb")


@pytest.mark.parametrize(
    "content", [b"", b"\0\0\x0d\x01\0\0\0\0", b"\0\0\x08\0", b"<html>not found</html>"]
)
def test_error_names_files_that_are_not_idx(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "foreign").write_bytes(content)
    with pytest.raises(DataError, match=r"foreign.*not an IDX file"):
        read_idx(tmp_path / "foreign")
    with pytest.raises(DataError, match="absent"):
        read_idx(tmp_path / "absent")


# The publishers' layouts


def write_fashion(folder: Path, suffix: str, labels: list[int]) -> np.ndarray[Any, Any]:
    folder.mkdir(parents=True)
    compress = gzip.compress if suffix else bytes
    images = rng.integers(0, 256, (len(labels), 28, 28), dtype=np.uint8)
    for part in ("train", "t10k"):
        (folder / f"{part}-images-idx3-ubyte{suffix}").write_bytes(compress(idx_bytes(images)))
        (folder / f"{part}-labels-idx1-ubyte{suffix}").write_bytes(
            compress(idx_bytes(np.array(labels, np.uint8)))
        )
    return images


@pytest.mark.parametrize(("subfolder", "suffix"), [("", ""), ("raw", ".gz")])
def test_fashion_mnist_reads_both_layouts(tmp_path: Path, subfolder: str, suffix: str) -> None:
    images = write_fashion(tmp_path / "set" / subfolder, suffix, [9, 0, 3])
    data = formats.read_fashion_mnist(tmp_path / "set", sizes=(3, 3))
    assert torch.equal(data.train_x[:, 0], torch.from_numpy(images))
    assert data.test_y.tolist() == [9, 0, 3]
    assert (
        data.classes[0] == "T-shirt/top"
        and data.classes[9] == "Ankle boot"
        and len(data.classes) == 10
    )
    with pytest.raises(DataError, match=r"train-images.*\[3, 28, 28\] where \[60000, 28, 28\]"):
        formats.read_fashion_mnist(tmp_path / "set")


def test_fashion_mnist_refuses_bad_labels_and_missing_files(tmp_path: Path) -> None:
    write_fashion(tmp_path / "set", "", [0, 10])
    with pytest.raises(DataError, match=r"train-labels-idx1-ubyte: example 1 has label 10"):
        formats.read_fashion_mnist(tmp_path / "set", sizes=(2, 2))
    (tmp_path / "set" / "train-labels-idx1-ubyte").unlink()
    with pytest.raises(DataError, match="train-labels-idx1-ubyte is missing"):
        formats.read_fashion_mnist(tmp_path / "set", sizes=(2, 2))


def write_cifar10(folder: Path) -> np.ndarray[Any, Any]:
    """Two records per file. All labels are even, so a reader that is one byte off fails."""
    folder.mkdir()
    records = rng.integers(0, 256, (12, 3073), dtype=np.uint8)
    records[:, 0] = np.arange(12) * 2 % 10
    for file_index, name in enumerate(
        [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
    ):
        records[2 * file_index : 2 * file_index + 2].tofile(folder / name)
    return records


def test_cifar10_reads_records_and_class_names(tmp_path: Path) -> None:
    records = write_cifar10(tmp_path / "set")
    data = formats.read_cifar10(tmp_path / "set", sizes=(10, 2))
    assert data.train_y.tolist() == [0, 2, 4, 6, 8] * 2 and data.test_y.tolist() == [0, 2]
    assert data.input_shape == (3, 32, 32) and data.classes[0] == "airplane" and data.augment
    assert int(data.train_x[3, 1, 2, 5]) == records[3, 1 + 1024 + 2 * 32 + 5]
    (tmp_path / "set" / "batches.meta.txt").write_text("a\nb\nc\nd\ne\nf\ng\nh\ni\nj\n\n")
    assert formats.read_cifar10(tmp_path / "set", sizes=(10, 2)).classes == tuple("abcdefghij")
    (tmp_path / "set" / "batches.meta.txt").write_text("a\n")
    with pytest.raises(DataError, match=r"batches\.meta\.txt names 1 classes"):
        formats.read_cifar10(tmp_path / "set", sizes=(10, 2))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: content[:-1], "is cut short"),
        (lambda content: b"", "is cut short"),
        (lambda content: content + b"!", "is not the publisher's file"),
        (lambda content: content[:3073] + b"\x0a" + content[3074:], "example 1 has label 10"),
    ],
)
def test_error_names_the_damaged_cifar_file(
    tmp_path: Path, damage: Callable[[bytes], bytes], message: str
) -> None:
    write_cifar10(tmp_path / "set")
    path = tmp_path / "set" / "data_batch_4.bin"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError) as caught:
        formats.read_cifar10(tmp_path / "set", sizes=(10, 2))
    assert str(path) in str(caught.value) and message in str(caught.value)
    path.unlink()
    with pytest.raises(DataError, match=r"data_batch_4\.bin cannot be read"):
        formats.read_cifar10(tmp_path / "set", sizes=(10, 2))


def test_cifar100_uses_fine_labels(tmp_path: Path) -> None:
    records = rng.integers(0, 256, (3, 3074), dtype=np.uint8)
    records[:, 0] = 19
    records[:, 1] = [99, 0, 7]
    for name in ("train.bin", "test.bin"):
        records.tofile(tmp_path / name)
    data = formats.read_cifar100(tmp_path, sizes=(3, 3))
    assert data.train_y.tolist() == [99, 0, 7] and int(data.train_x[0, 2, 31, 31]) == records[0, -1]
    assert (
        len(set(data.classes)) == 100 and data.classes[0] == "apple" and data.classes[99] == "worm"
    )
    records[2, 1] = 100
    records.tofile(tmp_path / "test.bin")
    with pytest.raises(DataError, match=r"test\.bin: example 2 has label 100"):
        formats.read_cifar100(tmp_path, sizes=(3, 3))


def test_digits_split_is_stratified_and_scaled() -> None:
    data = formats.read_digits()
    assert len(data.train_y) + len(data.test_y) == 1797 and data.input_shape == (1, 8, 8)
    counts = (data.train_y.bincount() + data.test_y.bincount()).tolist()
    assert data.test_y.bincount().tolist() == [count // 5 for count in counts]
    assert int(data.train_x.max()) == 255 and set(data.train_x.unique().tolist()) <= {
        round(value * 255 / 16) for value in range(17)
    }
    scaled = data.train_x.double() / 255
    assert data.mean[0] == pytest.approx(float(scaled.mean()))
    assert data.std[0] == pytest.approx(float(scaled.std(correction=0)))


def test_digits_match_scikit_learn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from sklearn.datasets import load_digits

    # The first ten digits of scikit-learn are one of each class.
    data = formats.read_digits()
    expected = load_digits()
    assert np.array_equal(data.train_x[:10, 0].numpy(), np.rint(expected.images[:10] * 255 / 16))
    assert data.train_y[:10].tolist() == expected.target[:10].tolist() == list(range(10))
    monkeypatch.setattr(formats.Path, "exists", lambda path: False)
    from_function = formats.read_digits()
    for name in ("train_x", "train_y", "test_x", "test_y"):
        assert torch.equal(getattr(data, name), getattr(from_function, name))


def test_digits_need_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match="pip install scikit-learn"):
        formats.read_digits()


def test_likely_mistakes_in_layouts_and_labels_are_refused() -> None:
    x = np.zeros((6, 16, 16, 3), np.float32)
    y = np.arange(6) % 3
    with pytest.raises(DataError, match="channels last"):
        from_arrays(x, y, x, y)
    flat = np.zeros((6, 4), np.float32)
    with pytest.raises(DataError, match="labels count from 0"):
        from_arrays(flat, y + 1, flat, y + 1)
    from_arrays(flat, y + 1, flat, y + 1, classes=["nothing", "a", "b", "c"])
    with pytest.raises(DataError, match="argmax"):
        from_arrays(flat, np.eye(3)[y], flat, np.eye(3)[y])
    with pytest.raises(DataError, match=r"give \[n, 1\]"):
        from_arrays(np.zeros(6, np.float32), y, np.zeros(6, np.float32), y)


def test_pictures_with_palettes_are_read_as_colors() -> None:
    colors = ["red", "blue", "red", "blue"]
    pictures = [Image.new("RGB", (6, 5), color).quantize(4) for color in colors]
    assert pictures[0].mode == "P"
    data = from_torch(Pairs(pictures, [0, 1, 0, 1]))
    assert data.train_x[:2, :, 0, 0].tolist() == [[255, 0, 0], [0, 0, 255]]
    deep = Pairs([Image.new("I;16", (6, 5))] * 2, [0, 1])
    with pytest.raises(DataError, match="train example 0 has more than 8 bits"):
        from_torch(deep)


def test_statistics_may_be_arrays_and_floats_of_16_bits() -> None:
    given = torch.full((3,), 0.5)
    data = from_arrays(IMAGES, LABELS, mean=given, std=given.numpy())  # type: ignore[arg-type]
    assert data.mean == data.std == (0.5, 0.5, 0.5)
    floats = torch.rand(6, 2).bfloat16()
    assert torch.equal(from_arrays(floats, LABELS).train_x, floats.float())


def test_full_fingerprint_knows_users_and_indices() -> None:
    x = np.zeros((6, 2), "f4")
    plain = from_arrays(x, LABELS)
    assert plain.full_fingerprint == plain.fingerprint
    others = [
        from_arrays(x, LABELS, users=list("aabbcc")),
        from_arrays(x, LABELS, users=list("abbbcc")),
        from_arrays(x, LABELS, indices=[[0, 1], [2]]),
        from_arrays(x, LABELS, indices=[[0], [1, 2]]),
    ]
    assert len({data.full_fingerprint for data in (plain, *others)}) == 5
    assert len({data.fingerprint for data in (plain, *others)}) == 1, "as older runs recorded it"
