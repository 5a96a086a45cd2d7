"""Tests of worker processes: equal results, errors passed on, no process left behind."""

import dataclasses
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import fedcog
from fedcog.algorithms import SCAFFOLD, Algorithm, Ditto, FedAvg, FedCOG, FedGen, FedProx
from fedcog.core import tree
from fedcog.core.tree import Params, State
from fedcog.engine.workers import WorkerDied, WorkerPool
from fedcog.federation.backend import Diverged
from fedcog.models.checks import ModelError
from fedcog.runs.config.experiment import Experiment
from fedcog.runs.environment import num_workers, torch_settings
from fedcog.runs.records.run_directory import RunDirectory
from fedcog.testing import NUM_CLASSES, PARTIAL, ToyFederation

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(
        sys.platform != "linux", reason="workers are forks, which are safe on Linux"
    ),
]

FEDCOG = FedCOG(FedProx(mu=0.1), count=8, steps=3, start_round=1, lr=0.1)


@pytest.fixture(autouse=True)
def time_limit() -> Iterator[None]:
    """Stop a test that hangs; fail one that leaves a process behind."""

    def raise_timeout(number: int, frame: object) -> None:
        raise TimeoutError("the test took more than 120 s")

    before = signal.signal(signal.SIGALRM, raise_timeout)
    signal.alarm(120)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    gc.collect()
    assert not multiprocessing.active_children()


def with_workers(toy: ToyFederation, count: int = 2) -> ToyFederation:
    cohort = toy.simulator.cohort
    cohort.config = cohort.config._replace(num_workers=count)
    return toy


def run_and_close(toy: ToyFederation) -> Params:
    try:
        return toy.final_state()
    finally:
        toy.simulator.cohort.close()


@pytest.mark.parametrize(
    "algorithm",
    [FedAvg(), SCAFFOLD(), FEDCOG, Ditto(FedProx()), FedGen()],
    ids=["fedavg", "scaffold", "fedcog", "ditto", "fedgen"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_workers_give_bit_identical_results(algorithm: Algorithm, dtype: torch.dtype) -> None:
    network = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, NUM_CLASSES)
    )
    options = PARTIAL | {"epochs": 1.5, "dtype": dtype, "module": network}  # unequal steps
    serial = ToyFederation(algorithm, **options)
    parallel = with_workers(ToyFederation(algorithm, **options))
    lines = [[round.record.to_line() for round in toy.run()] for toy in (serial, parallel)]
    for expected, actual in zip(*lines, strict=True):
        assert expected | {"seconds": 0} == actual | {"seconds": 0}
        # The parts are shares of the elapsed time, not sums over workers.
        total = actual["seconds"].pop("total")
        assert sum(actual["seconds"].values()) <= 1.01 * total
    parallel.simulator.cohort.close()
    serial_state, parallel_state = (
        tree.flatten({"server": toy.server.state, "clients": toy.simulator.client_states.flatten()})
        for toy in (serial, parallel)
    )
    assert list(serial_state) == list(parallel_state)
    assert all(torch.equal(serial_state[name], parallel_state[name]) for name in serial_state)


def test_workers_can_use_threads_after_the_parent_did() -> None:
    with torch_settings(Experiment(threads=4)):
        torch.randn(512, 512) @ torch.randn(512, 512)  # starts the parent's threads
        state = run_and_close(with_workers(ToyFederation(FedAvg())))
    assert all(value.isfinite().all() for value in state.values())


def test_run_with_workers_writes_the_same_checkpoints(tmp_path: Path) -> None:
    experiment = Experiment(
        rounds=2, local_steps=3, batch_size=8, clients=4, partition="iid", threads=1
    )
    checkpoints = []
    for count in (1, 2):
        fedcog.compare(
            [dataclasses.replace(experiment, workers=count)], [0, 1], tmp_path / str(count)
        )
        assert not multiprocessing.active_children()
        checkpoints.append(
            [
                (tmp_path / f"{count}/fedavg/seed-{seed}/checkpoint.safetensors").read_bytes()
                for seed in (0, 1)
            ]
        )
    assert checkpoints[0] == checkpoints[1]


@dataclasses.dataclass(frozen=True)
class AlgorithmWithCallback(Algorithm):
    """Calls a function after every local step."""

    callback: Callable[[], None] = lambda: None

    def after_step(self, before, after, batch, client):  # type: ignore[no-untyped-def]
        self.callback()
        return after


def raises(error: BaseException) -> Callable[[], None]:
    def call() -> None:
        raise error

    return call


class Odd(Exception):
    """An exception that cannot be created again from its message."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (ModelError("the network is odd"), ModelError, "the network is odd"),
        (RuntimeError("no such thing"), RuntimeError, "no such thing"),
        (KeyError("name"), KeyError, "'name'"),
        (MemoryError(), MemoryError, ""),
        (Odd(1, 2), RuntimeError, "Odd: 1 and 2"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_exceptions_of_workers_are_raised_in_the_parent(
    error: Exception, kind: type[Exception], text: str
) -> None:
    toy = with_workers(ToyFederation(AlgorithmWithCallback(callback=raises(error))))
    with pytest.raises(kind) as caught:
        toy.run()
    assert type(caught.value) is kind and str(caught.value) == text
    assert "in call" in caught.value.__notes__[0]  # where it happened
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    ("end", "text"),
    [
        (
            lambda: os.kill(os.getpid(), signal.SIGKILL),
            "killed by SIGKILL, probably because memory ran out",
        ),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), "killed by SIGTERM: try"),
        (lambda: os._exit(3), "exit code 3"),
    ],
    ids=["SIGKILL", "SIGTERM", "exit"],
)
def test_death_of_a_worker_is_reported_at_once(end: Callable[[], None], text: str) -> None:
    toy = with_workers(ToyFederation(AlgorithmWithCallback(callback=end)))
    start = time.monotonic()
    with pytest.raises(WorkerDied, match=text):
        toy.run()
    assert time.monotonic() - start < 20
    assert not multiprocessing.active_children()


def test_death_of_an_idle_worker_is_reported() -> None:
    toy = with_workers(ToyFederation(FedAvg()))
    toy.run()
    for process in multiprocessing.active_children():
        process.kill()
        process.join()
    with pytest.raises(WorkerDied, match="SIGKILL"):
        toy.run()
    toy.run()  # starts new workers
    toy.simulator.cohort.close()


def test_divergence_in_workers_is_reported() -> None:
    toy = with_workers(ToyFederation(FedAvg(), lr=1e30, dtype=torch.float32))
    with pytest.raises(Diverged, match="clients 0, 1, 2"):
        toy.run()
    toy.simulator.cohort.close()


def test_workers_end_with_their_federation() -> None:
    toy = with_workers(ToyFederation(FedAvg()))
    toy.run()
    assert len(multiprocessing.active_children()) == 2
    del toy
    gc.collect()
    assert not multiprocessing.active_children()


INTERRUPTED_PROGRAM = """
    import dataclasses, multiprocessing, os, signal, time
    from fedcog.algorithms import Algorithm
    from fedcog.testing import ToyFederation

    @dataclasses.dataclass(frozen=True)
    class Slow(Algorithm):
        def after_step(self, before, after, batch, client):
            time.sleep(0.2)
            return after

    # A process that starts in the background ignores SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGALRM})
    toy = ToyFederation(Slow())
    cohort = toy.simulator.cohort
    cohort.config = cohort.config._replace(num_workers=2)
    toy.run()
    workers = multiprocessing.active_children()
    for process in workers:
        os.kill(process.pid, signal.SIGINT)
    toy.run()
    print(len(workers), "workers ignored SIGINT")
    signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    # Repeat: Python drops an exception that a signal raises inside a finalizer.
    signal.setitimer(signal.ITIMER_REAL, 0.1, 5)
    try:
        for _ in range(20):
            toy.run()
    except KeyboardInterrupt:
        print("KeyboardInterrupt")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    print(len(multiprocessing.active_children()), "workers left")
"""


def test_interrupt_reaches_only_the_parent() -> None:
    # In its own process: a stray SIGINT would end a worker of pytest.
    finished = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(INTERRUPTED_PROGRAM)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    lines = ["2 workers ignored SIGINT", "KeyboardInterrupt", "0 workers left"]
    assert finished.stdout.splitlines() == lines, finished.stderr
    assert finished.returncode == 0, finished.stderr


KILLED_PROGRAM = """
    import dataclasses, multiprocessing, threading, time
    from fedcog.algorithms import Algorithm
    from fedcog.runs.config.experiment import Experiment
    import fedcog

    @dataclasses.dataclass(frozen=True)
    class Slow(Algorithm):  # a class of __main__, which could not be sent to a spawned process
        def after_step(self, before, after, batch, client):
            time.sleep(0.5)
            return after

    def print_worker_pids():
        while len(multiprocessing.active_children()) < 2:
            time.sleep(0.05)
        time.sleep(0.3)
        print(*[process.pid for process in multiprocessing.active_children()], flush=True)

    threading.Thread(target=print_worker_pids, daemon=True).start()
    fedcog.run(Experiment(algorithm=Slow(), workers=2, partition="iid"), {out!r})
"""


def test_killed_parent_leaves_no_worker_and_no_lock(tmp_path: Path) -> None:
    program = textwrap.dedent(KILLED_PROGRAM).format(out=str(tmp_path / "run"))
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2
        parent.kill()
        parent.wait()
        with RunDirectory(tmp_path / "run").locked():  # fails if a worker holds the lock
            pass
    deadline = time.monotonic() + 20
    while any(_is_running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(_is_running(pid) for pid in pids)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_pool_processes_every_item_once_in_any_order() -> None:
    def start_round(common: State) -> Callable[[State], State]:
        return lambda item: {
            "sum": item["x"] + common["y"],
            "empty": {},
            "none": None,
            "of": item["name"],
        }

    pool = WorkerPool(3, 1, start_round)
    shared = torch.arange(6.0).reshape(2, 3).T  # not contiguous
    for count in (1, 2, 7):
        items = [{"x": torch.tensor(row), "name": str(row)} for row in range(count)]
        results = pool.map({"y": shared}, items, list(reversed(range(count))))
        assert [result["of"] for result in results] == [str(row) for row in range(count)]
        for row, result in enumerate(results):
            assert torch.equal(result["sum"], shared + row)
            assert list(result) == ["sum", "empty", "none", "of"]
            assert result["empty"] == {}
    pool.close()
    assert pool.has_ended


def test_default_number_of_workers_follows_threads_and_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    for threads, expected in ((1, 1), (3, 3), (8, 4)):
        with torch_settings(Experiment(threads=threads)):
            assert num_workers(0) == expected
    assert num_workers(7) == 7
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    with torch_settings(Experiment(threads=4)):
        assert num_workers(0) == 1 and num_workers(2) == 2
    monkeypatch.setattr(sys, "platform", "darwin")
    assert num_workers(0) == num_workers(1) == 1
    with pytest.raises(fedcog.ConfigError, match="set --workers 1"):
        num_workers(2)
