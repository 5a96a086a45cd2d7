"""Readers of publishers' files: IDX, CIFAR's binary format and scikit-learn's digits; no pickle."""

import gzip
import importlib.util
import math
import zlib
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from fedcog.data.datasets import DataError, Dataset, channel_statistics

FASHION_MNIST_CLASSES = (
    "T-shirt/top,Trouser,Pullover,Dress,Coat,Sandal,Shirt,Sneaker,Bag,Ankle boot"
)
CIFAR10_CLASSES = "airplane automobile bird cat deer dog frog horse ship truck"
CIFAR100_CLASSES = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly
camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup
dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower
leopard lion lizard lobster man maple motorcycle mountain mouse mushroom oak orange orchid otter
palm pear pickup_truck pine plain plate poppy porcupine possum rabbit raccoon ray road rocket rose
sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper
table tank telephone television tiger tractor train trout tulip turtle wardrobe whale willow wolf
woman worm
"""
CIFAR100_MEAN = (0.5071, 0.4865, 0.4409)
CIFAR100_STD = (0.2673, 0.2564, 0.2762)

MAX_DEFLATE_RATIO = 1032
"""DEFLATE compresses by at most this factor, so a header that promises more is wrong."""
CIFAR_IMAGE_BYTES = 3072


def read_idx(path: str | Path, shape: tuple[int, ...] | None = None) -> Tensor:
    """Read a uint8 tensor from an IDX file, gzipped or not.

    Args:
        path: The file.
        shape: The expected shape, if known.

    Returns:
        The tensor.

    Raises:
        DataError: If the file is missing, damaged, or has another shape.
    """
    path = Path(path)
    try:
        with open(path, "rb") as file:
            is_zipped = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            max_bytes = path.stat().st_size * (MAX_DEFLATE_RATIO if is_zipped else 1)
            if not is_zipped:
                return _read_idx(path, file, shape, max_bytes)
            with gzip.open(file) as unzipped:
                return _read_idx(path, cast(BinaryIO, unzipped), shape, max_bytes)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read ({error}): remove it and fetch it again") from error


def _read_idx(path: Path, file: BinaryIO, shape: tuple[int, ...] | None, max_bytes: int) -> Tensor:
    magic = file.read(4)
    if magic[:3] != b"\0\0\x08" or len(magic) < 4 or not 1 <= magic[3] <= 8:
        raise DataError(
            f"{path} begins with {magic!r}: not an IDX file of bytes; remove it and fetch it again"
        )
    header = file.read(4 * magic[3])
    file_shape = tuple(int.from_bytes(header[i : i + 4], "big") for i in range(0, len(header), 4))
    if len(header) < 4 * magic[3]:
        raise DataError(f"{path} ends within its header: remove it and fetch it again")
    if shape is not None and file_shape != shape:
        raise DataError(
            f"{path} holds {list(file_shape)} where {list(shape)} is expected: "
            "put the publisher's file there"
        )
    length = math.prod(file_shape)
    if length > max_bytes:
        raise DataError(
            f"{path} promises {length:,} bytes, more than it can hold: remove it and fetch it again"
        )
    body = bytearray()
    while len(body) <= length and (block := file.read(min(1 << 20, length + 1 - len(body)))):
        body += block
    if len(body) != length:
        fault = "is cut short" if len(body) < length else "continues after its end"
        raise DataError(
            f"{path} {fault} (its header promises {length:,} bytes): remove it and fetch it again"
        )
    return torch.from_numpy(np.frombuffer(body, np.uint8).reshape(file_shape))


def find_idx(folder: Path, name: str) -> Path:
    """Find an IDX file in a folder or its subfolder `raw`.

    Args:
        folder: The folder.
        name: Name of the file, without the suffix .gz that it may have.

    Returns:
        Path of the file.

    Raises:
        DataError: If there is no such file.
    """
    candidates = [
        parent / (name + suffix) for parent in (folder, folder / "raw") for suffix in ("", ".gz")
    ]
    for path in candidates:
        if path.is_file():
            return path
    raise DataError(
        f"{name} is missing: looked for {', '.join(map(str, candidates))}; fetch it again"
    )


def read_fashion_mnist(folder: str | Path, *, sizes: tuple[int, int] = (60_000, 10_000)) -> Dataset:
    """Read Fashion-MNIST from its four IDX files.

    Args:
        folder: The folder of the files.
        sizes: Expected numbers of training and test examples.

    Returns:
        The data set.

    Raises:
        DataError: If a file is missing or damaged.
    """
    classes = tuple(FASHION_MNIST_CLASSES.split(","))

    def _read_split(prefix: str, size: int) -> tuple[Tensor, Tensor]:
        images = read_idx(find_idx(Path(folder), f"{prefix}-images-idx3-ubyte"), (size, 28, 28))
        path = find_idx(Path(folder), f"{prefix}-labels-idx1-ubyte")
        return images.unsqueeze(1), _check_labels(path, read_idx(path, (size,)), len(classes))

    train = _read_split("train", sizes[0])
    test = _read_split("t10k", sizes[1])
    return Dataset("fashion-mnist", *train, *test, classes, (0.5,), (0.5,), augment=True)


def _check_labels(path: Path, labels: Tensor, num_classes: int) -> Tensor:
    """Return labels as int64, if all are below the number of classes."""
    if len(labels) and int(labels.max()) >= num_classes:
        position = int((labels >= num_classes).nonzero()[0])
        raise DataError(
            f"{path}: example {position} has label {int(labels[position])}, "
            f"and there are {num_classes} classes: remove the file and fetch it again"
        )
    return labels.long()


class _RecordFormat(NamedTuple):
    """The label bytes before each image of a CIFAR file."""

    label_bytes: int
    label_byte: int  # position of the label that is read
    num_classes: int


_CIFAR10 = _RecordFormat(1, 0, 10)
_CIFAR100 = {"fine": _RecordFormat(2, 1, 100), "coarse": _RecordFormat(2, 0, 20)}


def _read_records(path: Path, count: int, format: _RecordFormat) -> tuple[Tensor, Tensor]:
    """Read images and labels from a CIFAR file."""
    record_bytes = format.label_bytes + CIFAR_IMAGE_BYTES
    num_bytes = count * record_bytes
    try:
        size = path.stat().st_size
        if size != num_bytes:
            fault = "is cut short" if size < num_bytes else "is not the publisher's file"
            raise DataError(
                f"{path} {fault} ({size:,} bytes, not {num_bytes:,}): remove it and fetch it again"
            )
        array = np.fromfile(path, np.uint8, num_bytes).reshape(count, record_bytes)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}): fetch it again") from error
    records = torch.from_numpy(array)
    labels = _check_labels(path, records[:, format.label_byte], format.num_classes)
    return records[:, format.label_bytes :].reshape(count, 3, 32, 32), labels


def _read_class_names(path: Path, default: str) -> tuple[str, ...]:
    """Read class names from the publisher's file, if it is there."""
    names = default.split()
    if path.is_file():
        names = path.read_text(encoding="utf-8", errors="replace").split()
    if len(names) != len(default.split()):
        raise DataError(
            f"{path} names {len(names)} classes, not {len(default.split())}: "
            "remove it and fetch it again"
        )
    return tuple(names)


def read_cifar10(folder: str | Path, *, sizes: tuple[int, int] = (50_000, 10_000)) -> Dataset:
    """Read CIFAR-10 from its six binary files.

    Args:
        folder: The folder of the files.
        sizes: Expected numbers of training examples (in five files) and test examples.

    Returns:
        The data set.

    Raises:
        DataError: If a file is missing or damaged.
    """
    folder = Path(folder)
    batches = [
        _read_records(folder / f"data_batch_{i}.bin", sizes[0] // 5, _CIFAR10) for i in range(1, 6)
    ]
    images, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    test = _read_records(folder / "test_batch.bin", sizes[1], _CIFAR10)
    classes = _read_class_names(folder / "batches.meta.txt", CIFAR10_CLASSES)
    mean = (0.4914, 0.4822, 0.4465)
    std = (0.2470, 0.2435, 0.2616)
    return Dataset("cifar10", images, labels, *test, classes, mean, std, augment=True)


def read_cifar100(folder: str | Path, *, sizes: tuple[int, int] = (50_000, 10_000)) -> Dataset:
    """Read CIFAR-100 with fine labels from its two binary files.

    Args:
        folder: The folder of the files.
        sizes: Expected numbers of training and test examples.

    Returns:
        The data set.

    Raises:
        DataError: If a file is missing or damaged.
    """
    folder = Path(folder)
    train = cifar100_records(folder / "train.bin", sizes[0], "fine")
    test = cifar100_records(folder / "test.bin", sizes[1], "fine")
    classes = _read_class_names(folder / "fine_label_names.txt", CIFAR100_CLASSES)
    return Dataset("cifar100", *train, *test, classes, CIFAR100_MEAN, CIFAR100_STD, augment=True)


def cifar100_records(
    path: Path, count: int, labels: Literal["fine", "coarse"]
) -> tuple[Tensor, Tensor]:
    """Read images and labels from a CIFAR-100 file.

    Args:
        path: The file.
        count: Number of images in it.
        labels: Whether to read the 100 classes ("fine") or the 20 superclasses ("coarse").

    Returns:
        Images `(count, 3, 32, 32)`, uint8, and labels `(count,)`, int64.

    Raises:
        DataError: If the file is missing or damaged.
    """
    return _read_records(path, count, _CIFAR100[labels])


def read_digits() -> Dataset:
    """Read scikit-learn's handwritten digits (8 x 8); every fifth of a class is for testing."""
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise DataError(
            "digits comes with scikit-learn, which is not installed: pip install scikit-learn"
        )
    file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    if file.exists():
        # Importing scikit-learn takes over a second.
        table = np.loadtxt(file, delimiter=",")
    else:
        from sklearn.datasets import load_digits

        table = np.column_stack(load_digits(return_X_y=True))
    pixels = np.rint(table[:, :64] * 255 / 16).astype(np.uint8)
    images = torch.from_numpy(pixels).reshape(-1, 1, 8, 8)
    labels = torch.from_numpy(table[:, 64].astype(np.int64))
    is_test = torch.zeros(len(labels), dtype=torch.bool)
    for label in range(10):
        is_test[(labels == label).nonzero().flatten()[4::5]] = True
    mean, std = channel_statistics(images[~is_test])
    return Dataset(
        "digits",
        images[~is_test],
        labels[~is_test],
        images[is_test],
        labels[is_test],
        tuple(map(str, range(10))),
        mean,
        std,
    )
