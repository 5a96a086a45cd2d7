"""A federation of real processes on this machine: Flower's SuperLink and SuperNodes, as `fedcog deploy init` lays them
out."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fedcog.cli import main
from fedcog.experiments.record import RunDirectory

HOST, PORTS = "127.0.0.1", 8


class Link:
    """A server and its nodes in a folder, each a session of its own that is ended with everything it has started."""

    def __init__(self, folder: Path, nodes: int, *settings: str) -> None:
        self.folder, self.out, self.port = folder, folder / "record", free_ports(PORTS)
        words = ["--clients", str(nodes), "--port", str(self.port), "--host", HOST, *settings, "--quiet"]
        assert main(["deploy", "init", str(folder / "fed"), *words]) == 0
        self.sessions: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for name in list(self.sessions):
            self.end(name)
        ended(self.port, PORTS)  # what a node that ended by itself has left behind

    def start(self, name: str, script: str, *words: str, **environment: str) -> None:
        """Start one of the scripts; what it says goes to NAME.log."""
        own = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "PYTHONUNBUFFERED": "1"}
        own |= {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])}
        with open(self.folder / f"{name}.log", "ab") as log:
            self.sessions[name] = subprocess.Popen(
                ["sh", str(self.folder / "fed" / script), *words],
                env=os.environ | own | environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def serve(self) -> None:
        """Start the server and wait until it listens."""
        self.start("server", "server/start.sh")

        def listening() -> bool:
            with contextlib.suppress(OSError), socket.create_connection((HOST, self.port), timeout=1):
                return True
            return False

        self.wait(listening, 60, "the server listens")

    def register(self) -> None:
        """Make the nodes known."""
        self.start("register", "admin/register.sh")
        assert self.sessions.pop("register").wait(timeout=60) == 0, self.said("register")

    def run(self, **settings: Any) -> None:
        """Begin the run, or go on with it."""
        values = {"out": str(self.out)} | settings
        text = " ".join(
            f"{name}='{value}'" if isinstance(value, str) else f"{name}={value}" for name, value in values.items()
        )
        self.start("run", "admin/run.sh", "--run-config", text)

    def stop(self, name: str) -> None:
        """Ask a session to end, and wait until it has."""
        process = self.sessions.pop(name)
        process.terminate()
        process.wait(timeout=60)

    def end(self, name: str) -> None:
        """End a session, and all that it has started, as a power cut would."""
        process = self.sessions.pop(name)
        lost, end = [process.pid, *_descendants(process.pid)], time.monotonic() + 30
        while lost and time.monotonic() < end:  # what is started meanwhile would go on, and hold its port
            for pid in lost:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            lost = _session(process.pid)
        process.wait(timeout=30)

    def said(self, name: str) -> str:
        """All that a session has said."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def lines(self, out: Path | None = None) -> list[dict[str, Any]]:
        """The rounds that the server has recorded."""
        return RunDirectory(out or self.out).lines()

    def wait(self, when: Callable[[], bool], seconds: float, what: str) -> None:
        """Wait until something is so."""
        end = time.monotonic() + seconds
        while not when():
            assert time.monotonic() < end, f"{what}: not within {seconds} s.\n{self.said('server')[-3000:]}\n" + (
                self.said("run")[-3000:] if (self.folder / "run.log").exists() else ""
            )
            time.sleep(0.25)

    def wait_for_rounds(self, count: int, seconds: float = 600, out: Path | None = None) -> None:
        """Wait until so many rounds are recorded. A node that could not connect at once tries again after minutes."""
        self.wait(lambda: len(self.lines(out)) >= count, seconds, f"round {count}")


def ended(first: int, count: int) -> list[int]:
    """The processes of Flower's that speak to one of these ports, each ended."""
    ours, found = [f"{HOST}:{first + number}".encode() for number in range(count)], []
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = line.read_bytes().split(b"\0")
            if any(word in ours for word in words) and any(b"flower-super" in word for word in words):
                os.kill(int(line.parent.name), signal.SIGKILL)
                found.append(int(line.parent.name))
    return found


def _descendants(pid: int) -> list[int]:
    """The processes that a process has started, and those that they have."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                found += [child, *_descendants(child)]
    return found


def _session(leader: int) -> list[int]:
    """The processes of a session that have not ended."""
    found = []
    for line in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, session = line.read_text().rpartition(")")[2].split()[:4]
            found += [int(line.parent.name)] if int(session) == leader and state not in "ZX" else []
    return found


def free_ports(count: int) -> int:
    """The first of so many ports in a row that nobody uses."""
    for first in range(20_000 + os.getpid() % 10_000, 60_000, count):
        with contextlib.ExitStack() as around:
            try:
                for port in range(first, first + count):
                    around.enter_context(socket.socket()).bind((HOST, port))
            except OSError:
                continue
            return first
    raise RuntimeError("no free ports")


@contextlib.contextmanager
def federation(folder: Path, nodes: int, *settings: str) -> Iterator[Link]:
    """A federation whose server runs and knows its nodes; they are not started yet."""
    with Link(folder, nodes, *settings) as link:
        link.serve()
        link.register()
        yield link
