"""A comparison whose seeds run in step, as on a GPU: every run is what it would have been alone."""

from pathlib import Path

import pytest

from fedcog import Experiment, compare, run
from fedcog.algorithms import FedAvg, FedCOG
from fedcog.experiments import compare as comparing
from fedcog.experiments.run import Interrupted, Run, read

SMALL = {"rounds": 3, "local_steps": 4, "batch_size": 8, "clients": 4, "mapping": "vmap", "threads": 1, "lr": 0.05}
METHODS = [FedAvg(), FedCOG(count=8, steps=3, start_round=1)]
SEEDS = [0, 1, 2]


@pytest.fixture(autouse=True)
def in_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "_stacked", lambda experiment: True)


def experiments() -> list[Experiment]:
    return [Experiment(algorithm=one, **SMALL) for one in METHODS]  # type: ignore[arg-type]


def same(one: Run, other: Run) -> None:
    assert one.experiment == other.experiment and len(one.lines) == len(other.lines)
    for mine, theirs in zip(one.lines, other.lines, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        assert mine["accuracy"] == pytest.approx(theirs["accuracy"], abs=0.02)
        assert mine["clients"] == theirs["clients"]


def test_seeds_in_step_are_the_runs_they_would_be_alone(tmp_path: Path) -> None:
    calls = []
    together = compare(
        experiments(), SEEDS, tmp_path / "all", watch=lambda one, line: calls.append((one.seed, line["round"]))
    )
    assert calls[:6] == [(0, 1), (1, 1), (2, 1), (0, 2), (1, 2), (2, 2)]
    for number, one in enumerate(together):
        same(one, run(one.experiment, tmp_path / f"alone-{number}"))
    assert (tmp_path / "all" / "report.html").exists()


def test_stopped_and_started_again_they_go_on_in_step(tmp_path: Path) -> None:
    count = []

    def stopping() -> bool:
        count.append(1)
        return len(count) >= 4  # after the first seed's second round

    with pytest.raises(Interrupted):
        compare(experiments(), SEEDS, tmp_path / "all", stopping=stopping)
    assert [len(read(tmp_path / "all" / "fedavg" / f"seed-{seed}").lines) for seed in SEEDS] == [2, 1, 1]
    for number, one in enumerate(compare(experiments(), SEEDS, tmp_path / "all")):
        assert len(one.lines) == 3
        same(one, run(one.experiment, tmp_path / f"alone-{number}"))


def test_a_seed_that_diverges_ends_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedcog.federation.rounds import Diverged, Federation

    answer = Federation.answer

    def failing(self, work, gathered):  # type: ignore[no-untyped-def]
        if work.round == 1 and self.schedule.selection.seed == 1:
            raise Diverged([2], work.round)
        return answer(self, work, gathered)

    monkeypatch.setattr(Federation, "answer", failing)
    with pytest.warns(UserWarning, match="seed 1: training diverged in round 2"):
        runs = compare(experiments()[:1], SEEDS, tmp_path / "all")
    assert [len(one.lines) for one in runs] == [3, 1, 3]
    assert runs[1].diverged and not runs[0].diverged
