"""The paper's experiments as a queue: stopped, killed, shared out, and done in the end as if nothing had happened."""

import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedcog.algorithms import FedCOG
from fedcog.experiments import paper, reproduce
from fedcog.experiments.record import RecordError, RunDirectory
from fedcog.experiments.reproduce import Deadline, Queue, jobs, share, stacks
from fedcog.experiments.results import Job, Results
from fedcog.settings import ConfigError

STUDIES = {name: paper.tiny(study) for name, study in paper.studies().items()}
BLOCKS = ("CIFAR-10, NIID-1", "CIFAR-10, NIID-2")
FEW = STUDIES["main"]._replace(
    cells=tuple(
        cell for cell in STUDIES["main"].cells if cell.block in BLOCKS and cell.row in ("FedAvg", "SCAFFOLD", "FedCOG")
    )
)


def found(results: Results, all_: list[Job]) -> dict[tuple[str, int], Any]:
    """What came of jobs, without when and how fast."""
    told = {(job.name, job.seed): dict(results.of(job)[job.seed]) for job in all_}
    for line in told.values():
        del line["seconds"], line["provenance"]
    return told


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The few, worked off in one go, each run alone."""
    results = Results(tmp_path_factory.mktemp("done"))
    ended = Queue(results, command="fedcog reproduce main").work(stacks(jobs(FEW)))
    assert ended == ([], 0)
    return results


def test_every_job_of_a_study_is_counted_once(done: Results) -> None:
    all_ = jobs(FEW)
    assert len(all_) == 3 * 2 * 2 == len({(job.name, job.seed) for job in all_})
    assert reproduce.status([FEW], done) == [("main", 12, 12)]
    assert reproduce.status([FEW], Results(done.path / "elsewhere")) == [("main", 0, 12)]
    assert reproduce.rounds_left([all_], done) == 0
    # from nothing: 12 runs of two rounds after a start of one, and eight starts: FedAvg's is FedCOG's, too
    assert reproduce.rounds_left([all_], Results(done.path / "elsewhere")) == 12 * 2 + 8


def test_runs_share_their_start_in_fact(done: Results) -> None:
    by_row = {cell.row: reproduce.job(cell, 0) for cell in FEW.cells if cell.block == BLOCKS[0]}
    assert by_row["FedAvg"].start == by_row["FedCOG"].start != by_row["SCAFFOLD"].start
    first = [RunDirectory(done.run_directory(job)).lines()[0] for job in (by_row["FedAvg"], by_row["FedCOG"])]
    begun = by_row["FedAvg"].start
    assert begun is not None
    assert first[0] == first[1] == RunDirectory(done.run_directory(Job(begun))).lines()[0]  # seconds and all


def test_what_trains_as_one_comes_to_the_same(done: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reproduce, "stacked", lambda experiment: True)
    grouped = stacks(jobs(FEW))
    assert [len(stack) for stack in grouped] == [4, 4, 4]  # two seeds of two partitions
    results = Results(tmp_path)
    assert Queue(results).work(grouped) == ([], 0)
    mine, theirs = (found(one, jobs(FEW)) for one in (results, done))
    for name, line in mine.items():
        assert line["loss"] == pytest.approx(theirs[name]["loss"], rel=1e-4)
        assert line["accuracy"] == pytest.approx(theirs[name]["accuracy"], abs=0.01)


def test_stopped_after_every_round_it_gets_there_all_the_same(done: Results, tmp_path: Path) -> None:
    results, all_ = Results(tmp_path), stacks(jobs(FEW))
    stops = 0
    while True:
        asked = iter([False, False, True])
        ended = Queue(results, stopping=lambda asked=asked: next(asked, True)).work(all_)  # type: ignore[misc]
        assert ended.failed == []
        if not ended.left:
            break
        stops += 1
    assert stops > 5
    assert found(results, jobs(FEW)) == found(done, jobs(FEW))


def command(out: Path, *words: str) -> list[str]:
    named = [sys.executable, "-m", "fedcog", "reproduce", "steps", "--smoke", "--plain", "--results", str(out)]
    return [*named, *words]


def wait_for(what: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.02)


def test_killed_with_no_chance_to_say_anything_it_goes_on(tmp_path: Path) -> None:
    killed, whole = Results(tmp_path / "killed"), Results(tmp_path / "whole")
    wanted = jobs(STUDIES["steps"])
    for count in (1, 3):  # results that are there when it is killed
        process = subprocess.Popen(command(killed.path), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            wait_for(lambda count=count: sum(killed.has(job) for job in wanted) >= count)  # type: ignore[misc]
        finally:
            os.kill(process.pid, signal.SIGKILL)
            process.wait(30)
    assert not all(killed.has(job) for job in wanted)
    for results in (killed, whole):
        subprocess.run(command(results.path), check=True, capture_output=True, timeout=120)
    assert found(killed, wanted) == found(whole, wanted)
    assert (whole.path / "results.html").exists()


def test_two_at_once_share_the_work_and_do_nothing_twice(done: Results, tmp_path: Path) -> None:
    out = tmp_path / "both"
    words = [sys.executable, "-m", "fedcog", "reproduce", "steps", "--smoke", "--plain", "--results", str(out)]
    both = [subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    told = [process.communicate(timeout=120)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], told
    files = [file for file in out.rglob("*.jsonl") if "runs" not in file.parts]
    assert len(files) == 4
    for file in files:
        seeds = [json.loads(line)["seed"] for line in file.read_text().splitlines()[1:]]
        assert sorted(seeds) == [0, 1]
    rounds = [sum(", round " in line for line in text.splitlines()) for text in told]
    assert sum(rounds) == 2 + 8 * 2  # two starts of a round, and eight runs of two rounds more


def test_a_budget_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(reproduce.time, "monotonic", lambda: now[0])
    deadline = Deadline(100)
    deadline.begin()
    now[0] = 20
    deadline.round()  # took 20 s: the next may take half as long again, and 8 s are kept back
    assert not deadline.over()
    now[0] = 61.9
    assert not deadline.over()
    now[0] = 62.1
    assert deadline.over()
    deadline.begin()  # what comes next may be quicker
    assert not deadline.over()
    results, all_ = Results(tmp_path), stacks(jobs(FEW))
    ended = Queue(results, budget=1).work(all_)  # less than what is kept back
    assert ended == ([], 12) and not results.path.joinpath("runs").exists()


def test_shards_are_all_of_it_and_keep_together_what_shares_a_start() -> None:
    every = [job for study in STUDIES.values() for job in jobs(study)]
    all_ = stacks(list(dict.fromkeys(every)))
    parts = [share(all_, part, 3) for part in range(3)]
    assert sorted(id(stack) for part in parts for stack in part) == sorted(id(stack) for stack in all_)
    assert all(len(part) > 10 for part in parts)
    starts = [{job.start for stack in part for job in stack if job.start is not None} for part in parts]
    assert not any(one & other for one, other in itertools.combinations(starts, 2))


def test_what_fails_stops_nothing_and_is_told(tmp_path: Path) -> None:
    impossible = dataclasses.replace(jobs(FEW)[0].experiment, partition="label-skew", clients=3)
    told: list[str] = []
    ended = Queue(Results(tmp_path), say=told.append).work([[Job(impossible)], [jobs(FEW)[0]]])
    assert ended.left == 0 and "3 clients cannot hold them all" in ended.failed[0]
    assert Results(tmp_path).has(jobs(FEW)[0])
    assert any(line.startswith("failed: ") for line in told)


def test_a_run_that_diverges_is_a_result(tmp_path: Path) -> None:
    wild = dataclasses.replace(jobs(FEW)[0].experiment, lr=1e15)
    results = Results(tmp_path)
    assert Queue(results).work([[Job(wild)]]) == ([], 0)
    assert "diverged" in results.of(Job(wild))[0]


def test_a_result_is_known_by_what_is_unusual_about_it() -> None:
    one = jobs(FEW)[-1]
    assert isinstance(one.experiment.algorithm, FedCOG)
    other = dataclasses.replace(one.experiment, algorithm=dataclasses.replace(one.experiment.algorithm, lambda_dis=0.2))
    assert one._replace(experiment=other).key != one.key
    assert (
        one._replace(experiment=dataclasses.replace(one.experiment, seed=9, data_dir="x", device="cuda")).key == one.key
    )
    assert one._replace(start=None).key != one.key != one._replace(probe="pictures").key


def test_results_made_under_other_defaults_are_not_taken_for_these(done: Results, tmp_path: Path) -> None:
    one = jobs(FEW)[0]
    file = tmp_path / f"{one.name}.jsonl"
    file.parent.mkdir(parents=True)
    text = (done.path / f"{one.name}.jsonl").read_text()
    file.write_text(text)
    assert Results(tmp_path).has(one)
    file.write_text(text.replace('"momentum":0.9', '"momentum":0.8'))
    with pytest.raises(RecordError, match="momentum had other defaults"):
        Results(tmp_path).has(one)
    file.write_text(text[: text.rfind('"provenance"')])  # a kill in the midst of the last line
    assert list(Results(tmp_path).of(one)) == [0]
    Results(tmp_path).add(jobs(FEW, seeds=[1])[0], {"accuracy": [0.5]})
    assert list(Results(tmp_path).of(one)) == [0, 1]


def test_data_sets_that_are_not_here_are_told_before_anything_runs(tmp_path: Path) -> None:
    from fedcog.cli import _check_there

    with pytest.raises(ConfigError, match=r"cifar100 is not here: fedcog data get cifar100 --data-dir .*\n?"):
        _check_there({"cifar100", "digits"}, str(tmp_path))
