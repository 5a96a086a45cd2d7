"""Downloads from publishers: resumed after a broken connection, verified, and unpacked safely."""

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
"""Receives the name of a file, the bytes received, and the total bytes if known."""

NETWORK_TIMEOUT_SECONDS = 10.0
"""Limit on the wait for a server's answer, and for the next bytes."""
MAX_CONNECTIONS = 4
"""Connections per file; each must add bytes to it."""


@dataclass(frozen=True)
class RemoteFile:
    """A file as its publisher serves it.

    Attributes:
        url: Its address.
        md5: Its MD5 checksum.
        size: Its approximate size in bytes.
    """

    url: str
    md5: str
    size: int

    @property
    def name(self) -> str:
        """The last part of the address."""
        return self.url.rpartition("/")[2]


def extract(archive: Path, members: Mapping[str, int], folder: Path) -> None:
    """Extract regular files from a .tar.gz archive, and ignore all other members.

    Args:
        archive: The archive.
        members: Names of the members to extract, and the largest size in bytes of each.
        folder: Where to put them, without their folders.

    Raises:
        DataError: If the archive is damaged, or a member is too large or not a regular file.
    """
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                if member.name not in members:
                    continue
                content = tar.extractfile(member) if member.isreg() else None
                if content is None or member.size > members[member.name]:
                    raise DataError(
                        f"{archive.name}: {member.name} is not the plain file it should be"
                    )
                with open(folder / Path(member.name).name, "wb") as out:
                    shutil.copyfileobj(content, out)
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise DataError(f"{archive.name} cannot be unpacked ({error})") from error


def download(file: RemoteFile, folder: Path, progress: Progress | None) -> Path:
    """Download a file and verify its checksum.

    A partial download is kept with the suffix .part and resumed.

    Args:
        file: The file.
        folder: Where to put it.
        progress: Called as bytes arrive.

    Returns:
        Path of the complete file.

    Raises:
        DataError: If the checksum is wrong, the file is too long, or connections keep breaking.
        OSError: If the server cannot be reached.
        HTTPException: If the server's answer is not HTTP.
    """
    target = folder / file.name
    part = folder / (file.name + ".part")
    if target.is_file() and _md5(target) == file.md5:
        return target
    last_error: Exception | None = None
    for _ in range(MAX_CONNECTIONS):
        received = part.stat().st_size if part.exists() else 0
        try:
            _receive(file, part, received, progress)
        except (OSError, HTTPException) as error:
            if not part.exists() or part.stat().st_size <= received:
                raise
            last_error = error
            continue
        if _md5(part) == file.md5:
            return part.replace(target)
        part.unlink()
        if not received:
            raise DataError(
                f"{file.url} serves other bytes than its publisher's (md5 is not {file.md5})"
            )
    raise DataError(f"{file.url} broke off {MAX_CONNECTIONS} times ({last_error})")


def _receive(file: RemoteFile, part: Path, received: int, progress: Progress | None) -> None:
    """Append what is missing to a partial download, over one connection."""
    request = Request(file.url, headers={"User-Agent": "fedcog"})
    if received:
        request.add_header("Range", f"bytes={received}-")
    try:
        response = _open(request)
    except HTTPError as error:
        error.close()
        if error.code == 416 and received:
            return  # the file has no further bytes; the checksum decides
        raise
    with response:
        content_range = response.headers.get("Content-Range", "")
        if response.status != 206 or not content_range.startswith(f"bytes {received}-"):
            received = 0
        length = response.headers.get("Content-Length", "")
        total = received + int(length) if length.isdigit() else None
        with open(part, "ab" if received else "wb") as out:
            while block := response.read1(1 << 18):
                out.write(block)
                received += len(block)
                if received > 2 * file.size:
                    part.unlink()
                    raise DataError(
                        f"{file.url} sent more than {received:,} bytes; {file.size:,} were expected"
                    )
                if progress is not None:
                    progress(file.name, received, total)
    if total is not None and received < total:
        raise ConnectionError(f"connection cut after {received:,} of {total:,} bytes")


def _open(request: Request) -> HTTPResponse:
    """Call urlopen in a thread, because its timeout does not cover the lookup of the host name."""
    outcome: list[HTTPResponse | Exception] = []

    def connect() -> None:
        try:
            outcome.append(urlopen(request, timeout=NETWORK_TIMEOUT_SECONDS))
        except Exception as error:  # raised again in the calling thread
            outcome.append(error)

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(NETWORK_TIMEOUT_SECONDS)
    if not outcome:
        raise TimeoutError(f"no answer within {NETWORK_TIMEOUT_SECONDS:g} s")
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]


def _md5(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
