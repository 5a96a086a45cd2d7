"""Tests of `compare` with stacked seeds, as on a GPU: every run equals the one alone."""

from pathlib import Path
from typing import Any

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
ALGORITHMS = [FedAvg(), FedCOG(count=8, steps=3, start_round=1)]
NAMES = ["fedavg", "fedavg+fedcog"]
SEEDS = [0, 1, 2]


@pytest.fixture(autouse=True)
def stacked_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "stacks_seeds", lambda experiment: True)


def experiments() -> list[Experiment]:
    return [
        Experiment(algorithm=algorithm, **SMALL)  # type: ignore[arg-type]
        for algorithm in ALGORITHMS
    ]


def assert_runs_agree(actual: Run, expected: Run, rel: float = 1e-4) -> None:
    assert actual.experiment == expected.experiment and len(actual.lines) == len(expected.lines)
    for actual_line, expected_line in zip(actual.lines, expected.lines, strict=True):
        assert actual_line["loss"] == pytest.approx(expected_line["loss"], rel=rel)
        assert actual_line["accuracy"] == pytest.approx(expected_line["accuracy"], abs=0.02)
        assert actual_line["clients"] == expected_line["clients"]


@pytest.mark.slow
def test_stacked_seeds_equal_separate_runs(tmp_path: Path) -> None:
    calls: list[tuple[int, str, int]] = []

    def record_call(experiment: Experiment, line: dict[str, Any]) -> None:
        calls.append((line["round"], algorithm_name(experiment.algorithm), experiment.seed))

    runs = compare(experiments(), SEEDS, tmp_path / "all", callbacks=record_call)
    assert calls == [(round, name, seed) for name in NAMES for round in (1, 2, 3) for seed in SEEDS]
    for number, stacked in enumerate(runs):
        assert_runs_agree(stacked, run(stacked.experiment, tmp_path / f"alone-{number}"))
    assert (tmp_path / "all" / "report.html").exists()


@pytest.mark.slow
def test_stopped_stacked_seeds_resume(tmp_path: Path) -> None:
    calls = []

    def should_stop() -> bool:
        calls.append(1)
        return len(calls) >= 4  # after the first seed's second round

    with pytest.raises(Interrupted):
        compare(experiments(), SEEDS, tmp_path / "all", should_stop=should_stop)
    directories = [RunDirectory(tmp_path / "all" / "fedavg" / f"seed-{seed}") for seed in SEEDS]
    # The round in progress is finished and recorded for all seeds.
    assert [len(directory.lines()) for directory in directories] == [2, 2, 2]
    rounds = [directory.load().round for directory in directories]  # type: ignore[union-attr]
    assert rounds == [2, 2, 2]
    for number, resumed in enumerate(compare(experiments(), SEEDS, tmp_path / "all")):
        assert len(resumed.lines) == 3
        assert_runs_agree(resumed, run(resumed.experiment, tmp_path / f"alone-{number}"))


@pytest.mark.slow
def test_diverged_seed_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedcog.federation.backend import Diverged
    from fedcog.federation.server import Server

    finish_round = Server.finish_round

    def diverge_seed_1(self, request, result):  # type: ignore[no-untyped-def]
        if request.round == 1 and self.schedule.sampling.seed == 1:
            raise Diverged([2], request.round)
        return finish_round(self, request, result)

    monkeypatch.setattr(Server, "finish_round", diverge_seed_1)
    with pytest.warns(UserWarning, match="seed 1: training diverged in round 2"):
        runs = compare(experiments()[:1], SEEDS, tmp_path / "all")
    assert [len(run.lines) for run in runs] == [3, 1, 3]
    assert runs[1].diverged and not runs[0].diverged


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["fedavg+fedcog", "scaffold"])
def test_stacked_seeds_equal_separate_runs_on_a_gpu(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    # Steps are still captured as graphs, but not compiled, which saves time.
    monkeypatch.setattr(cuda_graphs, "compile_step", lambda buffers: buffers.write_step)
    algorithm = make_algorithm(name, {"fedcog": {"count": 8, "steps": 3, "start_round": 1}})
    settings = SMALL | {"mapping": "auto", "device": "cuda", "local_steps": 40}
    experiment = Experiment(algorithm=algorithm, **settings)  # type: ignore[arg-type]
    for number, stacked in enumerate(compare([experiment], [0, 1], tmp_path / "all")):
        separate = run(stacked.experiment, tmp_path / f"alone-{number}")
        # Rounding errors grow over 120 steps, and other cohort sizes may use other kernels.
        assert_runs_agree(stacked, separate, rel=1e-3)
