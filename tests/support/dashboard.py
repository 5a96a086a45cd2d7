"""A dashboard server in a thread, and run directories for it."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import fedcog
from fedcog import Experiment, FedAvg, FedCOG
from fedcog.report.dashboard import DashboardServer, run_index
from fedcog.runs.records.run_directory import RunDirectory

QUICK: dict[str, Any] = {
    "dataset": "digits",
    "partition": "label-skew",
    "clients": 5,
    "local_steps": 2,
    "lr": 0.05,
    "batch_size": 8,
    "threads": 1,
    "mapping": "vmap",
    "rounds": 4,
    "evaluate_local": False,
}


FEDCOG = FedCOG(FedAvg(), start_round=1, count=8, steps=4)


@contextmanager
def serve(*roots: Path) -> Iterator[DashboardServer]:
    """Serve the runs below these folders in a thread."""
    server = DashboardServer(roots, 0)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(timeout=10)
        assert not thread.is_alive()


@pytest.fixture(autouse=True)
def refresh_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the server's caches of runs."""
    monkeypatch.setattr(run_index, "REFRESH_SECONDS", 0.0)
    monkeypatch.setattr(run_index, "SEARCH_SECONDS", 0.0)


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with generated images."""
    path = tmp_path_factory.mktemp("runs") / "a"
    return fedcog.run(Experiment(algorithm=FEDCOG, **QUICK), path, report=False).path


def write_run(path: Path, rounds: int, total: int) -> RunDirectory:
    """Write the record of a run with some of its `total` rounds."""
    directory = RunDirectory(path)
    directory.path.mkdir(parents=True)
    directory.begin(Experiment(**QUICK | {"rounds": total}), {})
    lines = [
        {"round": n, "loss": 1 / n, "accuracy": 1 - 1 / n, "local": [], "seconds": {"total": 2.0}}
        for n in range(1, rounds + 1)
    ]
    (path / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory


def wait_for(condition: Callable[[], Any], what: str, seconds: float = 25) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)
