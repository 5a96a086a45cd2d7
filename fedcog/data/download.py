"""Files from their publishers: resumed where cut, checked, unpacked with care."""

import hashlib
import shutil
import tarfile
import threading
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from fedcog.data.datasets import DataError

Progress = Callable[[str, int, int | None], None]

REACH_SECONDS = 10.0  # to be answered by a server, and between two of its bytes
GOES = 4  # connections tried for one file while each brings it further


@dataclass(frozen=True)
class File:
    """A file as its publisher serves it; the size is approximate."""

    url: str
    md5: str
    size: int

    @property
    def name(self) -> str:
        """What it is called."""
        return self.url.rpartition("/")[2]


def extract(archive: Path, wanted: Mapping[str, int], folder: Path) -> None:
    """Take the wanted members, each a plain file of so many bytes at most, and nothing else."""
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                if member.name not in wanted:
                    continue
                content = tar.extractfile(member) if member.isreg() else None
                if content is None or member.size > wanted[member.name]:
                    raise DataError(f"{archive.name}: {member.name} is not the plain file it should be")
                with open(folder / Path(member.name).name, "wb") as out:
                    shutil.copyfileobj(content, out)
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise DataError(f"{archive.name} cannot be unpacked ({error})") from error


def download(file: File, folder: Path, progress: Progress | None) -> Path:
    """The file with its right checksum; what a broken connection left in `.part` is gone on from."""
    target, part = folder / file.name, folder / (file.name + ".part")
    if target.is_file() and _md5(target) == file.md5:
        return target
    broken: Exception | None = None
    for _ in range(GOES):
        had = part.stat().st_size if part.exists() else 0
        try:
            _stream(file, part, had, progress)
        except (OSError, HTTPException) as error:
            if not part.exists() or part.stat().st_size <= had:
                raise
            broken = error
            continue
        if _md5(part) == file.md5:
            return part.replace(target)
        part.unlink()
        if not had:
            raise DataError(f"{file.url} serves other bytes than its publisher's (md5 is not {file.md5})")
    raise DataError(f"{file.url} broke off {GOES} times ({broken})")


def _stream(file: File, part: Path, had: int, progress: Progress | None) -> None:
    request = Request(file.url, headers={"User-Agent": "fedcog"})
    if had:
        request.add_header("Range", f"bytes={had}-")
    try:
        response = _open(request)
    except HTTPError as error:
        error.close()
        if error.code == 416 and had:
            return  # nothing lies beyond what is there: the checksum decides
        raise
    with response:
        if response.status != 206 or not response.headers.get("Content-Range", "").startswith(f"bytes {had}-"):
            had = 0
        length = response.headers.get("Content-Length", "")
        total = had + int(length) if length.isdigit() else None
        with open(part, "ab" if had else "wb") as out:
            while block := response.read1(1 << 18):
                out.write(block)
                had += len(block)
                if had > 2 * file.size:
                    part.unlink()
                    raise DataError(f"{file.url} goes on beyond {had:,} bytes; {file.size:,} were expected")
                if progress is not None:
                    progress(file.name, had, total)
    if total is not None and had < total:
        raise ConnectionError(f"connection cut after {had:,} of {total:,} bytes")


def _open(request: Request) -> HTTPResponse:
    """urlopen within REACH_SECONDS all in all: its own limit leaves out the look-up of the host's name."""
    answer: list[HTTPResponse | Exception] = []

    def ask() -> None:
        try:
            answer.append(urlopen(request, timeout=REACH_SECONDS))
        except Exception as error:  # handed over to the thread that asked
            answer.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(REACH_SECONDS)
    if not answer:
        raise TimeoutError(f"no answer within {REACH_SECONDS:g} s")
    if isinstance(answer[0], Exception):
        raise answer[0]
    return answer[0]


def _md5(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
