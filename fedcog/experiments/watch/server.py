"""The server of the page: for this machine alone, to read alone, and with no way from a request to a file's name."""

import contextlib
import hashlib
import json
import re
import socket
import sys
from collections.abc import Callable, Sequence
from functools import cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

from fedcog.experiments.record import RecordError
from fedcog.experiments.watch.collection import Collection
from fedcog.experiments.watch.pictures import Pictures

HOST = "127.0.0.1"
NAMES = {"127.0.0.1", "localhost"}
"""Who this server answers as: a page elsewhere that has its name point here would come under that name."""
VISITORS = 200  # lines that are open at once
PATIENCE = 20  # seconds that a visitor may say nothing
LOCKED = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
POLICY = f"{LOCKED}; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'"
DRAWING = f"{LOCKED}; style-src 'unsafe-inline'"
PAGES = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}


class Answer(NamedTuple):
    """What is sent back."""

    body: bytes
    kind: str
    status: HTTPStatus = HTTPStatus.OK
    policy: str = POLICY


MISSING = Answer(b"there is no such page.\n", "text/plain; charset=utf-8", HTTPStatus.NOT_FOUND)


class Server:
    """The page about the runs below some folders, at 127.0.0.1 and a port (0: any that is free) until it is closed."""

    def __init__(self, roots: Sequence[str | Path], port: int) -> None:
        folders = [Path(root) for root in roots]
        if missing := [str(folder) for folder in folders if not folder.is_dir()]:
            raise RecordError(f"there is no folder {', '.join(missing)}: say where runs are, or will be.")
        self.runs, self.pictures = Collection(folders), Pictures()
        try:
            self._http = _Quiet((HOST, port), _handler(self.answer))
        except OSError as error:
            raise RecordError(
                f"cannot serve at {HOST}:{port} ({error.strerror or error}): choose another --port, or 0 for any."
            ) from error
        self.url = f"http://{HOST}:{self._http.server_address[1]}/"

    def serve(self) -> None:
        """Answer until `stop`, or until something is raised here."""
        try:
            self._http.serve_forever(poll_interval=0.2)
        finally:
            self._http.server_close()

    def stop(self) -> None:
        """From another thread: answer no more."""
        self._http.shutdown()

    def answer(self, target: str) -> Answer:
        """What a request's target is answered."""
        parts = urlsplit(target)
        if parts.path in PAGES:
            name, kind = PAGES[parts.path]
            return Answer(_resource(name), kind)
        if parts.path == "/runs.json":
            return _json(self.runs.page())
        found = re.fullmatch(r"/runs/(\d{1,9})/(curves\.json|partition\.svg|generated/(\d{1,9})\.json)", parts.path)
        if not found or not self.runs.knows(int(found[1])):
            return MISSING
        run = self.runs.find(int(found[1]))
        if found[2] == "partition.svg":
            drawn = None if run is None else self.pictures.partition(run)
            nothing = b'<svg xmlns="http://www.w3.org/2000/svg" width="0" height="0"/>'
            return Answer(drawn or nothing, "image/svg+xml; charset=utf-8", policy=DRAWING)
        if run is None:
            return _json({"gone": True})
        if found[2] == "curves.json":
            asked = parse_qs(parts.query, max_num_fields=4)
            return _json(self.runs.curves(run, _whole(asked.get("generation")), _whole(asked.get("first"))))
        return _json(self.pictures.generated(run, int(found[3])) or {"none": True})


def _json(value: dict[str, Any]) -> Answer:
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return Answer(text.encode("ascii"), "application/json")


def _whole(texts: list[str] | None) -> int:
    """The number that was asked for; 0 where it is none."""
    text = texts[0] if texts else ""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0


@cache
def _resource(name: str) -> bytes:
    return resources.files("fedcog.experiments.watch").joinpath(name).read_bytes()


class _Quiet(ThreadingHTTPServer):
    """A server whose visitors may leave in the midst of an answer without anybody hearing of it."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, *place: Any) -> None:
        self._open: dict[Any, None] = {}  # in the order they came
        super().__init__(*place)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Remember it, until it is over; who came first leaves if there is no room: a page comes back, if it lives."""
        if len(self._open) >= VISITORS:
            self._hang_up(next(iter(self._open)))
        self._open[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Forget it."""
        self._open.pop(request, None)
        super().shutdown_request(request)

    def server_close(self) -> None:
        """Hang up on everybody: a page's line is kept open between its questions."""
        super().server_close()
        for request in list(self._open):
            self._hang_up(request)

    def _hang_up(self, request: Any) -> None:
        self._open.pop(request, None)
        with contextlib.suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Tell of faults of our own; a page that was closed is none."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


def _handler(answer: Callable[[str], Answer]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version, server_version, sys_version = "HTTP/1.1", "fedcog", ""
        timeout = PATIENCE
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            if self.headers.get("Content-Length", "0") != "0" or "Transfer-Encoding" in self.headers:
                self.close_connection = True  # what it came with is not read, least of all as another request
            host = self.headers.get("Host", "")
            if re.sub(r":\d{1,5}$", "", host) not in NAMES:
                words = b"this server answers as 127.0.0.1 or localhost alone.\n"
                self._send(Answer(words, "text/plain; charset=utf-8", HTTPStatus.MISDIRECTED_REQUEST))
                return
            try:
                found = answer(self.path)
            except ValueError:  # an address that is none
                found = MISSING
            self._send(found)

        do_HEAD = do_GET

        def _refuse(self) -> None:
            self.close_connection = True  # whatever it came with is not read
            words = b"these runs can be looked at, not changed: GET and HEAD alone.\n"
            self._send(Answer(words, "text/plain; charset=utf-8", HTTPStatus.METHOD_NOT_ALLOWED))

        do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = _refuse

        def _send(self, what: Answer) -> None:
            mark = f'"{hashlib.sha256(what.body).hexdigest()[:32]}"'
            same = what.status == HTTPStatus.OK and self.headers.get("If-None-Match") == mark
            self.send_response(HTTPStatus.NOT_MODIFIED if same else what.status)
            if what.status == HTTPStatus.METHOD_NOT_ALLOWED:
                self.send_header("Allow", "GET, HEAD")
            if self.close_connection:
                self.send_header("Connection", "close")
            if not same:
                self.send_header("Content-Type", what.kind)
                self.send_header("Content-Length", str(len(what.body)))
            for name, value in {
                "ETag": mark,
                "Cache-Control": "no-cache",
                "Content-Security-Policy": what.policy,
                "Cross-Origin-Resource-Policy": "same-origin",
                "Cross-Origin-Opener-Policy": "same-origin",
                "Referrer-Policy": "no-referrer",
                "X-Content-Type-Options": "nosniff",
            }.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD" and not same:
                self.wfile.write(what.body)

        def log_message(self, format: str, *values: object) -> None:
            pass

    return Handler
