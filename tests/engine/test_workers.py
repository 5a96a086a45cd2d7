"""Clients trained side by side in worker processes: the same results, and nothing left behind
however it ends.
"""

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

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="workers are forks, which are safe on Linux"
)

COG = FedCOG(FedProx(mu=0.1), count=8, steps=3, start_round=1, lr=0.1)


@pytest.fixture(autouse=True)
def bounded() -> Iterator[None]:
    """No test here may hang, and none may leave a process behind."""

    def too_long(number: int, frame: object) -> None:
        raise TimeoutError("this should have been over long ago")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(120)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    gc.collect()
    assert not multiprocessing.active_children()


def side_by_side(toy: ToyFederation, count: int = 2) -> ToyFederation:
    cohort = toy.simulator.cohort
    cohort.config = cohort.config._replace(num_workers=count)
    return toy


def everything(toy: ToyFederation) -> Params:
    try:
        return toy.final_state()
    finally:
        toy.simulator.cohort.close()


@pytest.mark.parametrize(
    "algorithm",
    [FedAvg(), SCAFFOLD(), COG, Ditto(FedProx()), FedGen()],
    ids=["fedavg", "scaffold", "fedcog", "ditto", "fedgen"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_workers_change_no_bit(algorithm: Algorithm, dtype: torch.dtype) -> None:
    network = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, NUM_CLASSES)
    )
    options = PARTIAL | {"epochs": 1.5, "dtype": dtype, "module": network}  # unequal steps
    alone = ToyFederation(algorithm, **options)
    beside = side_by_side(ToyFederation(algorithm, **options))
    lines = [[round.record.to_line() for round in toy.run()] for toy in (alone, beside)]
    for one, other in zip(*lines, strict=True):
        assert one | {"seconds": 0} == other | {"seconds": 0}
        total = other["seconds"].pop("total")
        assert (
            sum(other["seconds"].values()) <= 1.01 * total
        )  # parts are shares of the clock's time
    beside.simulator.cohort.close()
    kept = [
        {"server": toy.server.state, "clients": toy.simulator.client_states.flatten()}
        for toy in (alone, beside)
    ]
    one, other = (tree.flatten(state) for state in kept)
    assert list(one) == list(other)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_threads_in_a_worker_start_although_the_parent_had_some() -> None:
    with torch_settings(
        Experiment(threads=4)
    ):  # two workers of two threads; the parent has used its four
        torch.randn(512, 512) @ torch.randn(512, 512)
        found = everything(side_by_side(ToyFederation(FedAvg())))
    assert all(value.isfinite().all() for value in found.values())


def test_a_run_with_workers_is_the_run_without_and_leaves_none(tmp_path: Path) -> None:
    experiment = Experiment(
        rounds=2, local_steps=3, batch_size=8, clients=4, partition="iid", threads=1
    )
    files = []
    for count in (1, 2):
        fedcog.compare(
            [dataclasses.replace(experiment, workers=count)], [0, 1], tmp_path / str(count)
        )
        assert not multiprocessing.active_children()
        files.append(
            [
                (tmp_path / f"{count}/fedavg/seed-{seed}/checkpoint.safetensors").read_bytes()
                for seed in (0, 1)
            ]
        )
    assert files[0] == files[1]


@dataclasses.dataclass(frozen=True)
class Calls(Algorithm):
    """Calls something while a client trains."""

    what: Callable[[], None] = lambda: None

    def after_step(self, before, after, batch, client):  # type: ignore[no-untyped-def]
        self.what()
        return after


def raises(error: BaseException) -> Callable[[], None]:
    def call() -> None:
        raise error

    return call


class Odd(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


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
def test_what_a_worker_raises_is_raised_here(
    error: Exception, kind: type[Exception], text: str
) -> None:
    toy = side_by_side(ToyFederation(Calls(what=raises(error))))
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
def test_a_worker_that_dies_is_told_of_at_once(end: Callable[[], None], text: str) -> None:
    toy = side_by_side(ToyFederation(Calls(what=end)))
    began = time.monotonic()
    with pytest.raises(WorkerDied, match=text):
        toy.run()
    assert time.monotonic() - began < 20
    assert not multiprocessing.active_children()


def test_an_idle_worker_that_was_killed_is_told_of_too() -> None:
    toy = side_by_side(ToyFederation(FedAvg()))
    toy.run()
    for process in multiprocessing.active_children():
        process.kill()
        process.join()
    with pytest.raises(WorkerDied, match="SIGKILL"):
        toy.run()
    toy.run()  # others are started
    toy.simulator.cohort.close()


def test_divergence_is_caught_as_ever() -> None:
    toy = side_by_side(ToyFederation(FedAvg(), lr=1e30, dtype=torch.float32))
    with pytest.raises(Diverged, match="clients 0, 1, 2"):
        toy.run()
    toy.simulator.cohort.close()


def test_workers_go_with_whoever_asked_for_them() -> None:
    toy = side_by_side(ToyFederation(FedAvg()))
    toy.run()
    assert len(multiprocessing.active_children()) == 2
    del toy
    gc.collect()
    assert not multiprocessing.active_children()


def test_an_interrupt_reaches_the_parent_alone() -> None:
    interrupt = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # one started in the background ignores it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGALRM})
    toy = side_by_side(ToyFederation(Calls(what=lambda: time.sleep(0.2))))
    toy.run()
    for process in multiprocessing.active_children():
        os.kill(process.pid or 0, signal.SIGINT)
    toy.run()
    alarm = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    signal.setitimer(
        signal.ITIMER_REAL, 0.1, 5
    )  # again, should one come where nobody can raise; not while it ends
    try:
        with pytest.raises(KeyboardInterrupt):
            [toy.run() for _ in range(20)]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, alarm)
        signal.signal(signal.SIGINT, interrupt)
    assert not multiprocessing.active_children()


PARENT = """
    import dataclasses, multiprocessing, threading, time
    from fedcog.algorithms import Algorithm
    from fedcog.runs.config.experiment import Experiment
    import fedcog

    @dataclasses.dataclass(frozen=True)
    class Slow(Algorithm):  # of a program that is __main__: nothing of it could be sent
        def after_step(self, before, after, batch, client):
            time.sleep(0.5)
            return after

    def tell():
        while len(multiprocessing.active_children()) < 2:
            time.sleep(0.05)
        time.sleep(0.3)
        print(*[process.pid for process in multiprocessing.active_children()], flush=True)

    threading.Thread(target=tell, daemon=True).start()
    fedcog.run(Experiment(algorithm=Slow(), workers=2, partition="iid"), {out!r})
"""


def test_a_parent_that_is_killed_leaves_no_worker_and_no_lock(tmp_path: Path) -> None:
    program = textwrap.dedent(PARENT).format(out=str(tmp_path / "run"))
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2
        parent.kill()
        parent.wait()
        with RunDirectory(tmp_path / "run").locked():  # at once
            pass
    deadline = time.monotonic() + 20
    while any(_runs(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(_runs(pid) for pid in pids)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_every_item_is_done_once_in_any_order() -> None:
    def begin(
        common: State,
    ) -> Callable[[State], State]:
        return lambda item: {
            "sum": item["x"] + common["y"],
            "empty": {},
            "none": None,
            "of": item["name"],
        }

    crew = WorkerPool(3, 1, begin)
    shared = torch.arange(6.0).reshape(2, 3).T  # neither contiguous nor alone in its memory
    for count in (1, 2, 7):
        items = [{"x": torch.tensor(row), "name": str(row)} for row in range(count)]
        found = crew.map({"y": shared}, items, list(reversed(range(count))))
        assert [one["of"] for one in found] == [str(row) for row in range(count)]
        assert all(torch.equal(one["sum"], shared + row) for row, one in enumerate(found))
        assert all(
            list(one) == ["sum", "empty", "none", "of"] and one["empty"] == {} for one in found
        )
    crew.close()
    assert crew.has_ended


def test_as_many_workers_as_there_are_threads_and_cores(monkeypatch: pytest.MonkeyPatch) -> None:
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
