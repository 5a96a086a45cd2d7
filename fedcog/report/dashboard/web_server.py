"""The web server of the dashboard: local and read-only; requests never contain file names."""

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
from typing import Any, ClassVar, NamedTuple
from urllib.parse import parse_qs, urlsplit

from fedcog.report.dashboard.run_images import ImageCache
from fedcog.report.dashboard.run_index import RunIndex
from fedcog.runs.records.run_directory import RecordError

HOST = "127.0.0.1"
HOST_NAMES = {"127.0.0.1", "localhost"}
"""Host names of valid requests.

Another site could let its own name point to this machine (DNS rebinding). Its requests would have
that name, and are refused.
"""
MAX_CONNECTIONS = 200
READ_TIMEOUT_SECONDS = 20
BASE_POLICY = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
PAGE_POLICY = (
    f"{BASE_POLICY}; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'"
)
SVG_POLICY = f"{BASE_POLICY}; style-src 'unsafe-inline'"
TEXT = "text/plain; charset=utf-8"
EMPTY_SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="0" height="0"/>'
STATIC_FILES = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
RUN_TARGET = re.compile(r"/runs/(\d{1,9})/(curves\.json|partition\.svg|generated/(\d{1,9})\.json)")


class Response(NamedTuple):
    """An HTTP response."""

    body: bytes
    content_type: str
    status: HTTPStatus = HTTPStatus.OK
    policy: str = PAGE_POLICY  # Content-Security-Policy


NOT_FOUND = Response(b"there is no such page.\n", TEXT, HTTPStatus.NOT_FOUND)
WRONG_HOST = Response(
    b"this server only answers to the names 127.0.0.1 and localhost.\n",
    TEXT,
    HTTPStatus.MISDIRECTED_REQUEST,
)
READ_ONLY = Response(
    b"runs can be read, not changed: only GET and HEAD are allowed.\n",
    TEXT,
    HTTPStatus.METHOD_NOT_ALLOWED,
)


class DashboardServer:
    """Serves the dashboard about the runs below some folders.

    Args:
        roots: The folders.
        port: Port at 127.0.0.1; 0: any free port.

    Raises:
        RecordError: A folder does not exist, or the port is taken.
    """

    def __init__(self, roots: Sequence[str | Path], port: int) -> None:
        folders = [Path(root) for root in roots]
        missing = [str(folder) for folder in folders if not folder.is_dir()]
        if missing:
            raise RecordError(
                f"there is no folder {', '.join(missing)}: name a folder that has runs, or will."
            )
        self.runs = RunIndex(folders)
        self.images = ImageCache()
        try:
            self._http = _HTTPServer((HOST, port), _handler_class(self.answer))
        except OSError as error:
            raise RecordError(
                f"cannot serve at {HOST}:{port} ({error.strerror or error}): choose another "
                "--port, or 0 for any free one."
            ) from error
        self.url = f"http://{HOST}:{self._http.server_address[1]}/"

    def serve(self) -> None:
        """Answer requests until `stop` is called or an exception is raised."""
        try:
            self._http.serve_forever(poll_interval=0.2)
        finally:
            self._http.server_close()

    def stop(self) -> None:
        """Stop serving; call it from another thread."""
        self._http.shutdown()

    def answer(self, target: str) -> Response:
        """Return the response to a GET request."""
        parts = urlsplit(target)
        if parts.path in STATIC_FILES:
            name, content_type = STATIC_FILES[parts.path]
            return Response(_resource(name), content_type)
        if parts.path == "/runs.json":
            return _json_response(self.runs.overview())
        match = RUN_TARGET.fullmatch(parts.path)
        if not match or not self.runs.knows(int(match[1])):
            return NOT_FOUND
        run = self.runs.find(int(match[1]))
        if match[2] == "partition.svg":
            svg = None if run is None else self.images.partition(run)
            return Response(svg or EMPTY_SVG, "image/svg+xml; charset=utf-8", policy=SVG_POLICY)
        if run is None:
            return _json_response({"gone": True})
        if match[2] == "curves.json":
            query = parse_qs(parts.query, max_num_fields=4)
            generation = _query_number(query.get("generation"))
            first = _query_number(query.get("first"))
            return _json_response(self.runs.curves(run, generation, first))
        return _json_response(self.images.generated(run, int(match[3])) or {"none": True})


def _json_response(value: dict[str, Any]) -> Response:
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return Response(text.encode("ascii"), "application/json")


def _query_number(values: list[str] | None) -> int:
    """The number in a query; 0 if it is missing or malformed."""
    text = values[0] if values else ""
    is_number = text.isascii() and text.isdigit() and len(text) < 10
    return int(text) if is_number else 0


@cache
def _resource(name: str) -> bytes:
    return resources.files("fedcog.report.dashboard").joinpath(name).read_bytes()


class _HTTPServer(ThreadingHTTPServer):
    """A server with a limited number of connections that ignores disconnecting clients."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, *arguments: Any) -> None:
        self._connections: dict[Any, None] = {}  # oldest first
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Accept a connection; above the limit, close the oldest (an open page reconnects).

        Args:
            request: The connection's socket.
            client_address: Host and port of the other side.
        """
        if len(self._connections) >= MAX_CONNECTIONS:
            self._disconnect(next(iter(self._connections)))
        self._connections[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Forget a connection."""
        self._connections.pop(request, None)
        super().shutdown_request(request)

    def server_close(self) -> None:
        """Close all connections, which pages keep open between requests."""
        super().server_close()
        for request in list(self._connections):
            self._disconnect(request)

    def _disconnect(self, request: Any) -> None:
        self._connections.pop(request, None)
        with contextlib.suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report errors of the server; a client that disconnects is no error.

        Args:
            request: The connection's socket.
            client_address: Host and port of the other side.
        """
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """Handles the requests of one connection; `_handler_class` sets `answer`."""

    answer: ClassVar[Callable[[str], Response]]
    protocol_version = "HTTP/1.1"
    server_version = "fedcog"
    sys_version = ""
    timeout = READ_TIMEOUT_SECONDS
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        """Answer a request, if its host name is valid."""
        has_body = self.headers.get("Content-Length", "0") != "0"
        if has_body or "Transfer-Encoding" in self.headers:
            self.close_connection = True  # the body is not read, so it must not become a request
        host = self.headers.get("Host", "")
        if re.sub(r":\d{1,5}$", "", host) not in HOST_NAMES:
            self._send(WRONG_HOST)
            return
        try:
            response = type(self).answer(self.path)
        except ValueError:  # the target is not a valid address
            response = NOT_FOUND
        self._send(response)

    do_HEAD = do_GET

    def _refuse(self) -> None:
        self.close_connection = True  # the body is not read
        self._send(READ_ONLY)

    do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = _refuse

    def _send(self, response: Response) -> None:
        etag = f'"{hashlib.sha256(response.body).hexdigest()[:32]}"'
        is_ok = response.status == HTTPStatus.OK
        is_unchanged = is_ok and self.headers.get("If-None-Match") == etag
        self.send_response(HTTPStatus.NOT_MODIFIED if is_unchanged else response.status)
        if response.status == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET, HEAD")
        if self.close_connection:
            self.send_header("Connection", "close")
        if not is_unchanged:
            self.send_header("Content-Type", response.content_type)
            self.send_header("Content-Length", str(len(response.body)))
        headers = {
            "ETag": etag,
            "Cache-Control": "no-cache",
            "Content-Security-Policy": response.policy,
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cross-Origin-Opener-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD" and not is_unchanged:
            self.wfile.write(response.body)

    def log_message(self, format: str, *values: object) -> None:
        """Log nothing."""


def _handler_class(answer: Callable[[str], Response]) -> type[BaseHTTPRequestHandler]:
    """Bind the handler to a server."""
    return type("Handler", (_Handler,), {"answer": staticmethod(answer)})
