"""A comparison whose seeds run in step, as on a GPU: every run is what it would have been alone."""

from pathlib import Path

import pytest
import torch

from fedcog import Experiment, compare, run
from fedcog.algorithms import FedAvg, FedCOG
from fedcog.core.errors import Interrupted
from fedcog.engine import cuda_graphs
from fedcog.runs import compare as comparing
from fedcog.runs.config.composition import algorithm_name, make_algorithm
from fedcog.runs.records.recorded_run import Run
from fedcog.runs.records.run_directory import RunDirectory

SMALL = {
    "rounds": 3,
    "local_steps": 4,
    "batch_size": 8,
    "clients": 4,
    "mapping": "vmap",
    "threads": 1,
    "lr": 0.05,
}
METHODS = [FedAvg(), FedCOG(count=8, steps=3, start_round=1)]
NAMES = ["fedavg", "fedavg+fedcog"]
SEEDS = [0, 1, 2]


@pytest.fixture(autouse=True)
def in_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "stacks_seeds", lambda experiment: True)


def experiments() -> list[Experiment]:
    return [Experiment(algorithm=one, **SMALL) for one in METHODS]  # type: ignore[arg-type]


def same(one: Run, other: Run, rel: float = 1e-4) -> None:
    assert one.experiment == other.experiment and len(one.lines) == len(other.lines)
    for mine, theirs in zip(one.lines, other.lines, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=rel)
        assert mine["accuracy"] == pytest.approx(theirs["accuracy"], abs=0.02)
        assert mine["clients"] == theirs["clients"]


def test_seeds_in_step_are_the_runs_they_would_be_alone(tmp_path: Path) -> None:
    calls = []
    together = compare(
        *(experiments(), SEEDS, tmp_path / "all"),
        callbacks=lambda one, line: calls.append(
            (line["round"], algorithm_name(one.algorithm), one.seed)
        ),
    )
    assert calls == [(round, name, seed) for name in NAMES for round in (1, 2, 3) for seed in SEEDS]
    for number, one in enumerate(together):
        same(one, run(one.experiment, tmp_path / f"alone-{number}"))
    assert (tmp_path / "all" / "report.html").exists()


def test_stopped_and_started_again_they_go_on_in_step(tmp_path: Path) -> None:
    count = []

    def stopping() -> bool:
        count.append(1)
        return len(count) >= 4  # after the first seed's second round

    with pytest.raises(Interrupted):
        compare(experiments(), SEEDS, tmp_path / "all", should_stop=stopping)
    directories = [RunDirectory(tmp_path / "all" / "fedavg" / f"seed-{seed}") for seed in SEEDS]
    assert [len(one.lines()) for one in directories] == [
        2,
        2,
        2,
    ]  # what had begun is finished and kept
    assert [one.load().round for one in directories] == [2, 2, 2]  # type: ignore[union-attr]
    for number, one in enumerate(compare(experiments(), SEEDS, tmp_path / "all")):
        assert len(one.lines) == 3
        same(one, run(one.experiment, tmp_path / f"alone-{number}"))


def test_a_seed_that_diverges_ends_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedcog.federation.backend import Diverged
    from fedcog.federation.server import Server

    finish_round = Server.finish_round

    def failing(self, request, result):  # type: ignore[no-untyped-def]
        if request.round == 1 and self.schedule.sampling.seed == 1:
            raise Diverged([2], request.round)
        return finish_round(self, request, result)

    monkeypatch.setattr(Server, "finish_round", failing)
    with pytest.warns(UserWarning, match="seed 1: training diverged in round 2"):
        runs = compare(experiments()[:1], SEEDS, tmp_path / "all")
    assert [len(one.lines) for one in runs] == [3, 1, 3]
    assert runs[1].diverged and not runs[0].diverged


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["fedavg+fedcog", "scaffold"])
def test_on_a_gpu_seeds_in_step_are_the_runs_they_would_be_alone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(
        cuda_graphs, "compile_step", lambda buffers: buffers.write_step
    )  # captured all the same, and much sooner
    algorithm = make_algorithm(name, {"fedcog": {"count": 8, "steps": 3, "start_round": 1}})
    chosen = SMALL | {"mapping": "auto", "device": "cuda", "local_steps": 40}
    for number, one in enumerate(
        compare([Experiment(algorithm=algorithm, **chosen)], [0, 1], tmp_path / "all")
    ):  # type: ignore[arg-type]
        alone = run(one.experiment, tmp_path / f"alone-{number}")
        same(
            one, alone, rel=1e-3
        )  # in 120 steps rounding grows, and a cohort of another size may take another kernel
