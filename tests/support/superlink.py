"""Start Flower's SuperLink and nodes as real processes, from a `fedcog deploy init` project."""

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

from fedcog.cli.main import main
from fedcog.runs.records.run_directory import RunDirectory
from tests.support.paths import REPO

HOST = "127.0.0.1"
PORTS = 8
PORTS_PER_WORKER = 1500
MAX_WORKERS = 8
"""With these, ports lie between 20000 and 32000, below those that systems give to clients."""


class Link:
    """A SuperLink and its nodes; each is a process session that is killed with its children."""

    def __init__(self, folder: Path, nodes: int, *settings: str) -> None:
        self.folder = folder
        self.out = folder / "record"
        self.port = free_ports(PORTS)
        flags = [
            "--clients",
            str(nodes),
            "--port",
            str(self.port),
            "--host",
            HOST,
            *settings,
            "--quiet",
        ]
        assert main(["deploy", "init", str(folder / "fed"), *flags]) == 0
        self.sessions: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for name in list(self.sessions):
            self.kill(name)
        kill_flower_processes(self.port, PORTS)  # processes that a finished node left behind

    def start(self, name: str, script: str, *arguments: str, **environment: str) -> None:
        """Start a script of the project; its output goes to NAME.log."""
        defaults = {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": os.pathsep.join([str(REPO), os.environ.get("PYTHONPATH", "")]),
        }
        with open(self.folder / f"{name}.log", "ab") as log:
            self.sessions[name] = subprocess.Popen(
                ["sh", str(self.folder / "fed" / script), *arguments],
                env=os.environ | defaults | environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def start_server(self) -> None:
        """Start the server and wait until it listens."""
        self.start("server", "server/start.sh")

        def listening() -> bool:
            with (
                contextlib.suppress(OSError),
                socket.create_connection((HOST, self.port), timeout=1),
            ):
                return True
            return False

        self.wait(listening, 60, "the server listens")

    def register(self) -> None:
        """Register the nodes with the server."""
        self.start("register", "admin/register.sh")
        assert self.sessions.pop("register").wait(timeout=60) == 0, self.log("register")

    def run(self, **settings: Any) -> None:
        """Start the run, or resume it."""
        values = {"out": str(self.out)} | settings
        text = " ".join(
            f"{name}='{value}'" if isinstance(value, str) else f"{name}={value}"
            for name, value in values.items()
        )
        self.start("run", "admin/run.sh", "--run-config", text)

    def stop(self, name: str) -> None:
        """Terminate a session and wait for its end."""
        process = self.sessions.pop(name)
        process.terminate()
        process.wait(timeout=60)

    def kill(self, name: str) -> None:
        """Kill a session and its children without warning, as a power cut does."""
        process = self.sessions.pop(name)
        pids = [process.pid, *_descendants(process.pid)]
        deadline = time.monotonic() + 30
        # Repeat: a child that starts meanwhile would survive and hold its port.
        while pids and time.monotonic() < deadline:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            pids = _session(process.pid)
        process.wait(timeout=30)

    def log(self, name: str) -> str:
        """Return the output of a session."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def lines(self, out: Path | None = None) -> list[dict[str, Any]]:
        """Return the recorded rounds."""
        return RunDirectory(out or self.out).lines()

    def wait(self, condition: Callable[[], bool], seconds: float, description: str) -> None:
        """Wait until the condition holds; fail with the logs after `seconds`."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, (
                f"{description}: not within {seconds} s.\n{self.log('server')[-3000:]}\n"
                + (self.log("run")[-3000:] if (self.folder / "run.log").exists() else "")
            )
            time.sleep(0.25)

    def wait_for_rounds(self, count: int, seconds: float = 600, out: Path | None = None) -> None:
        """Wait until `count` rounds are recorded.

        The limit is long because a node that cannot connect at once retries only after minutes.
        """
        self.wait(lambda: len(self.lines(out)) >= count, seconds, f"round {count}")


def kill_flower_processes(first: int, count: int) -> list[int]:
    """Kill Flower's processes that use one of `count` ports from `first`; return their ids."""
    addresses = [f"{HOST}:{first + offset}".encode() for offset in range(count)]
    killed = []
    for cmdline in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            arguments = cmdline.read_bytes().split(b"\0")
            uses_port = any(argument in addresses for argument in arguments)
            if uses_port and any(b"flower-super" in argument for argument in arguments):
                pid = int(cmdline.parent.name)
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
    return killed


def _descendants(pid: int) -> list[int]:
    """Return the ids of all descendants of a process."""
    pids: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                pids += [child, *_descendants(child)]
    return pids


def _session(leader: int) -> list[int]:
    """Return the ids of the live processes of a session."""
    pids = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, session = stat.read_text().rpartition(")")[2].split()[:4]
            if int(session) == leader and state not in "ZX":
                pids.append(int(stat.parent.name))
    return pids


def free_ports(count: int) -> int:
    """Return the first of `count` consecutive free ports.

    Each worker of xdist has a range of its own, because the ports are bound only later.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    start = 20_000 + PORTS_PER_WORKER * (worker % MAX_WORKERS)
    offset = os.getpid() % (PORTS_PER_WORKER // 2)  # another session may run at the same time
    for first in range(start + offset, start + PORTS_PER_WORKER - count, count):
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.socket()).bind((HOST, port))
            except OSError:
                continue
            return first
    raise RuntimeError("no free ports")


@contextlib.contextmanager
def federation(folder: Path, nodes: int, *settings: str) -> Iterator[Link]:
    """Start a server and register its nodes, without starting them."""
    with Link(folder, nodes, *settings) as link:
        link.start_server()
        link.register()
        yield link
