"""The publishers' own files as data sets: IDX, CIFAR's binary version, scikit-learn's digits. No pickle."""

import gzip
import importlib.util
import math
import zlib
from pathlib import Path
from typing import BinaryIO, Literal, cast

import numpy as np
import torch
from torch import Tensor

from fedcog.data.datasets import DataError, Dataset, channel_statistics

FASHION_NAMES = "T-shirt/top,Trouser,Pullover,Dress,Coat,Sandal,Shirt,Sneaker,Bag,Ankle boot"
CIFAR10_NAMES = "airplane automobile bird cat deer dog frog horse ship truck"
CIFAR100_NAMES = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard
lobster man maple motorcycle mountain mouse mushroom oak orange orchid otter palm pear pickup_truck pine
plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper
snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor
train trout tulip turtle wardrobe whale willow wolf woman worm
"""


def read_idx(path: str | Path, shape: tuple[int, ...] | None = None) -> Tensor:
    """The uint8 tensor in an IDX file, gzipped or not; `shape`, where given, is what it must have."""
    path = Path(path)
    try:
        with open(path, "rb") as file:
            zipped = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            # DEFLATE packs 1032:1 at best, so a header that promises more lies, whatever follows it.
            room = path.stat().st_size * (1032 if zipped else 1)
            if not zipped:
                return _read_idx(path, file, shape, room)
            with gzip.open(file) as unzipped:
                return _read_idx(path, cast(BinaryIO, unzipped), shape, room)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read ({error}): remove it and fetch it again") from error


def _read_idx(path: Path, file: BinaryIO, shape: tuple[int, ...] | None, room: int) -> Tensor:
    magic = file.read(4)
    if magic[:3] != b"\0\0\x08" or len(magic) < 4 or not 1 <= magic[3] <= 8:
        raise DataError(f"{path} begins with {magic!r}: not an IDX file of bytes; remove it and fetch it again")
    sizes = file.read(4 * magic[3])
    found = tuple(int.from_bytes(sizes[i : i + 4], "big") for i in range(0, len(sizes), 4))
    if len(sizes) < 4 * magic[3]:
        raise DataError(f"{path} ends within its header: remove it and fetch it again")
    if shape is not None and found != shape:
        raise DataError(f"{path} holds {list(found)} where {list(shape)} is expected: put the publisher's file there")
    length = math.prod(found)
    if length > room:
        raise DataError(f"{path} promises {length:,} bytes, more than it can hold: remove it and fetch it again")
    body = bytearray()
    while len(body) <= length and (block := file.read(min(1 << 20, length + 1 - len(body)))):
        body += block
    if len(body) != length:
        fault = "is cut short" if len(body) < length else "goes on after its end"
        raise DataError(f"{path} {fault} (its header promises {length:,} bytes): remove it and fetch it again")
    return torch.from_numpy(np.frombuffer(body, np.uint8).reshape(found))


def find_idx(folder: Path, name: str) -> Path:
    """Where the IDX file `name` lies: in the folder or its `raw`, plain or with `.gz`."""
    places = [place / (name + end) for place in (folder, folder / "raw") for end in ("", ".gz")]
    for path in places:
        if path.is_file():
            return path
    raise DataError(f"{name} is missing: looked for {', '.join(map(str, places))}; fetch it again")


def read_fashion_mnist(folder: str | Path, *, sizes: tuple[int, int] = (60_000, 10_000)) -> Dataset:
    """Fashion-MNIST from its four IDX files; sizes: training and test examples expected."""
    names = tuple(FASHION_NAMES.split(","))

    def part(prefix: str, size: int) -> tuple[Tensor, Tensor]:
        images = read_idx(find_idx(Path(folder), f"{prefix}-images-idx3-ubyte"), (size, 28, 28))
        path = find_idx(Path(folder), f"{prefix}-labels-idx1-ubyte")
        return images.unsqueeze(1), _checked(path, read_idx(path, (size,)), len(names))

    train, test = part("train", sizes[0]), part("t10k", sizes[1])
    return Dataset("fashion-mnist", *train, *test, names, (0.5,), (0.5,), augment=True)


def _checked(path: Path, labels: Tensor, classes: int) -> Tensor:
    if len(labels) and int(labels.max()) >= classes:
        place = int((labels >= classes).nonzero()[0])
        raise DataError(
            f"{path}: example {place} has label {int(labels[place])}, and there are {classes} classes: "
            "remove the file and fetch it again"
        )
    return labels.long()


def _records(path: Path, count: int, heads: int, wanted: int, classes: int) -> tuple[Tensor, Tensor]:
    """Images and labels of a CIFAR file: `heads` label bytes, one of them wanted, then the pixels."""
    width = heads + 3072
    try:
        size = path.stat().st_size
        if size != count * width:
            fault = "is cut short" if size < count * width else "is not the publisher's file"
            raise DataError(f"{path} {fault} ({size:,} bytes, not {count * width:,}): remove it and fetch it again")
        records = torch.from_numpy(np.fromfile(path, np.uint8, count * width).reshape(count, width))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}): fetch it again") from error
    labels = _checked(path, records[:, wanted], classes)
    return records[:, heads:].reshape(count, 3, 32, 32), labels


def _names(path: Path, known: str) -> tuple[str, ...]:
    names = path.read_text(encoding="utf-8", errors="replace").split() if path.is_file() else known.split()
    if len(names) != len(known.split()):
        raise DataError(f"{path} names {len(names)} classes, not {len(known.split())}: remove it and fetch it again")
    return tuple(names)


def read_cifar10(folder: str | Path, *, sizes: tuple[int, int] = (50_000, 10_000)) -> Dataset:
    """CIFAR-10 from its six binary files; sizes: training (over five files) and test examples expected."""
    folder = Path(folder)
    batches = [_records(folder / f"data_batch_{i}.bin", sizes[0] // 5, 1, 0, 10) for i in range(1, 6)]
    images, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    test = _records(folder / "test_batch.bin", sizes[1], 1, 0, 10)
    names = _names(folder / "batches.meta.txt", CIFAR10_NAMES)
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    return Dataset("cifar10", images, labels, *test, names, mean, std, augment=True)


def read_cifar100(folder: str | Path, *, sizes: tuple[int, int] = (50_000, 10_000)) -> Dataset:
    """CIFAR-100, fine labels, from its two binary files; sizes: training and test examples expected."""
    folder = Path(folder)
    train, test = (
        cifar100_records(folder / name, size, "fine")
        for name, size in zip(("train.bin", "test.bin"), sizes, strict=True)
    )
    names = _names(folder / "fine_label_names.txt", CIFAR100_NAMES)
    mean, std = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
    return Dataset("cifar100", *train, *test, names, mean, std, augment=True)


def cifar100_records(path: Path, count: int, labels: Literal["fine", "coarse"]) -> tuple[Tensor, Tensor]:
    """So many images of a CIFAR-100 file, with their classes or with their superclasses."""
    return _records(path, count, 2, 1, 100) if labels == "fine" else _records(path, count, 2, 0, 20)


def read_digits() -> Dataset:
    """scikit-learn's 1,797 handwritten digits of 8 x 8; every fifth of each class is for testing."""
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise DataError("digits comes with scikit-learn, which is not installed: pip install scikit-learn")
    file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    if file.exists():  # read without its package, which takes a second and more to load
        table = np.loadtxt(file, delimiter=",")
    else:
        from sklearn.datasets import load_digits

        table = np.column_stack(load_digits(return_X_y=True))
    images = torch.from_numpy(np.rint(table[:, :64] * 255 / 16).astype(np.uint8)).reshape(-1, 1, 8, 8)
    labels = torch.from_numpy(table[:, 64].astype(np.int64))
    test = torch.zeros(len(labels), dtype=torch.bool)
    for label in range(10):
        test[(labels == label).nonzero().flatten()[4::5]] = True
    mean, std = channel_statistics(images[~test])
    names = tuple(map(str, range(10)))
    return Dataset("digits", images[~test], labels[~test], images[test], labels[test], names, mean, std)
