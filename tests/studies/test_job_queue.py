"""The paper's experiments as a queue: stopped, killed, shared out, and done in the end as if
nothing had happened.
"""

import dataclasses
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fedcog
from fedcog.algorithms import FedCOG
from fedcog.cli.main import main
from fedcog.core.settings import ConfigError
from fedcog.federation.server import Server
from fedcog.report import reproduction
from fedcog.runs.config.composition import algorithm_name
from fedcog.runs.config.experiment import Experiment
from fedcog.runs.records import checkpoint, run_directory
from fedcog.runs.records.run_directory import RecordError, RunDirectory
from fedcog.studies import job_planning, job_queue, paper, smoke, tables
from fedcog.studies.job_planning import jobs_of, shard, stack_jobs
from fedcog.studies.job_queue import Deadline, JobQueue
from fedcog.studies.result_store import Job, Results

STUDIES = {name: smoke.smoke_version(study) for name, study in paper.studies().items()}
BLOCKS = ("CIFAR-10, NIID-1", "CIFAR-10, NIID-2")
FEW = STUDIES["main"]._replace(
    cells=tuple(
        cell
        for cell in STUDIES["main"].cells
        if cell.block in BLOCKS and cell.row in ("FedAvg", "SCAFFOLD", "FedCOG")
    )
)


def found(results: Results, all_: list[Job]) -> dict[tuple[str, int], Any]:
    """What came of jobs, without when and how fast."""
    told = {(job.name, job.seed): dict(results.by_seed(job)[job.seed]) for job in all_}
    for line in told.values():
        del line["seconds"], line["provenance"]
    return told


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The few, worked off in one go, each run alone."""
    results = Results(tmp_path_factory.mktemp("done"))
    ended = JobQueue(results, command="fedcog reproduce main").work(stack_jobs(jobs_of(FEW)))
    assert ended == ([], 0)
    return results


def test_every_job_of_a_study_is_counted_once(done: Results) -> None:
    all_ = jobs_of(FEW)
    assert len(all_) == 3 * 2 * 2 == len({(job.name, job.seed) for job in all_})
    assert job_planning.progress_of([FEW], done) == [("main", 12, 12)]
    assert job_planning.progress_of([FEW], Results(done.path / "elsewhere")) == [("main", 0, 12)]
    assert job_planning.rounds_left([all_], done) == 0
    # from nothing: 12 runs of two rounds after a start of one, and eight starts: FedAvg's is
    # FedCOG's, too
    assert job_planning.rounds_left([all_], Results(done.path / "elsewhere")) == 12 * 2 + 8


def test_some_algorithms_alone(done: Results, capsys: pytest.CaptureFixture[str]) -> None:
    assert {
        algorithm_name(job.experiment.algorithm) for job in jobs_of(FEW, algorithms=["scaffold"])
    } == {"scaffold"}
    assert {
        algorithm_name(job.experiment.algorithm) for job in jobs_of(FEW, algorithms=["fedcog"])
    } == {"fedavg+fedcog"}
    assert (
        len(jobs_of(FEW, algorithms=["fedavg"]))
        == 2 * len(jobs_of(FEW, algorithms=["scaffold"]))
        == 8
    )
    assert job_planning.progress_of([FEW], done, algorithms=["scaffold"]) == [("main", 4, 4)]
    words = ["reproduce", "main", "--status", "--smoke", "--results", str(done.path)]
    assert main([*words, "--algorithms", "scaffold"]) == 0
    assert "4/4" in capsys.readouterr().out
    assert (
        main(["reproduce", "--algorithms", "scaffold"]) == 2
        and "name what to run" in capsys.readouterr().err
    )
    assert (
        main(["reproduce", "main", "--algorithms", "nonsense"]) == 2
        and "nonsense" in capsys.readouterr().err
    )


def test_runs_share_their_start_in_fact(done: Results) -> None:
    by_row = {
        cell.row: job_planning.job_of(cell, 0) for cell in FEW.cells if cell.block == BLOCKS[0]
    }
    assert (
        by_row["FedAvg"].warm_start == by_row["FedCOG"].warm_start != by_row["SCAFFOLD"].warm_start
    )
    first = [
        RunDirectory(done.run_directory(job)).lines()[0]
        for job in (by_row["FedAvg"], by_row["FedCOG"])
    ]
    begun = by_row["FedAvg"].warm_start
    assert begun is not None
    assert (
        first[0] == first[1] == RunDirectory(done.run_directory(Job(begun))).lines()[0]
    )  # seconds and all


def test_what_trains_as_one_comes_to_the_same(
    done: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_planning, "stacks_seeds", lambda experiment: True)
    grouped = stack_jobs(jobs_of(FEW))
    assert [len(stack) for stack in grouped] == [4, 4, 4]  # two seeds of two partitions
    results = Results(tmp_path)
    assert JobQueue(results).work(grouped) == ([], 0)
    mine, theirs = (found(one, jobs_of(FEW)) for one in (results, done))
    for name, line in mine.items():
        assert line["loss"] == pytest.approx(theirs[name]["loss"], rel=1e-4)
        assert line["accuracy"] == pytest.approx(theirs[name]["accuracy"], abs=0.01)


def test_no_more_train_as_one_than_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_planning, "stacks_seeds", lambda experiment: True)

    def sizes(count: int, **who: Any) -> list[int]:
        return [
            len(part)
            for part in stack_jobs([Job(Experiment(seed=seed, **who)) for seed in range(count)])
        ]

    assert sizes(40, clients=3) == [16, 16, 8]
    assert sizes(30, clients=10) == [12, 12, 6]  # of 128 clients
    assert sizes(3, clients=50) == [2, 1] and sizes(3, clients=50, participation=0.5) == [3]
    assert sizes(2, clients=500) == [1, 1]


def test_users_of_several_seeds_train_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = [
        cell
        for cell in STUDIES["flair"].cells
        if cell.block == "Mosaics, O-F1" and cell.row in ("FedSAM", "FedCOG")
    ]
    study = STUDIES["flair"]._replace(cells=tuple(few))
    alone = Results(tmp_path / "alone")
    together = Results(tmp_path / "together")
    assert JobQueue(alone).work(stack_jobs(jobs_of(study))) == ([], 0)
    monkeypatch.setattr(job_planning, "stacks_seeds", lambda experiment: True)
    assert [len(stack) for stack in stack_jobs(jobs_of(study))] == [
        2,
        2,
    ]  # two seeds, whose users are not the same
    assert JobQueue(together).work(stack_jobs(jobs_of(study))) == ([], 0)
    mine, theirs = (found(one, jobs_of(study)) for one in (together, alone))
    for name, line in mine.items():
        assert line["loss"] == pytest.approx(theirs[name]["loss"], rel=1e-4)
        assert (
            line["o_f1"] == pytest.approx(theirs[name]["o_f1"], abs=0.01)
            and line["c_p"]
            and "accuracy" not in line
        )


def test_the_beginning_of_a_longer_run_is_not_run_again(tmp_path: Path) -> None:
    """Users' images are in two tables, of which one asks for two rounds more."""
    study = STUDIES["flair"]
    few = [
        cell
        for cell in study.cells
        if cell.block == "Mosaics, O-F1" and cell.row in ("FedAvg", "FedCOG")
    ]
    short = jobs_of(study._replace(cells=tuple(few)))
    long = [
        job._replace(
            experiment=dataclasses.replace(job.experiment, rounds=job.experiment.rounds + 2)
        )
        for job in short
    ]
    work = stack_jobs([*short, *long])
    assert [stack[0] in long for stack in work] == [True, False] * 4  # the longer ones first
    done = Results(tmp_path / "done")
    apart = Results(tmp_path / "apart")
    assert JobQueue(done).work(work) == ([], 0)
    assert JobQueue(apart).work(stack_jobs(short)) == ([], 0)
    assert found(done, short) == found(apart, short)
    assert not any(done.run_directory(job).exists() for job in short)


def test_what_nobody_can_fetch_is_work_only_where_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = paper.studies()["flair"]
    here = jobs_of(study, data_dir=str(tmp_path))
    assert {job.experiment.dataset for job in here} == {"mosaics"} and len(here) == 11 * 3
    assert job_planning.progress_of([study], Results(tmp_path), data_dir=str(tmp_path)) == [
        ("flair", 0, 33)
    ]
    words = [
        "reproduce",
        "flair",
        "--datasets",
        "flair",
        "--data-dir",
        str(tmp_path),
        "--results",
        str(tmp_path / "x"),
    ]
    assert main(words) == 2  # asked for by its name, it is told to be missing
    assert "flair is missing: fedcog data get flair" in capsys.readouterr().err
    (tmp_path / "flair" / "small_images").mkdir(parents=True)
    (tmp_path / "flair" / "labels_and_metadata.json").write_text("[]")
    both = jobs_of(study, data_dir=str(tmp_path))
    assert len(both) == 2 * len(here)
    sets = {
        name: {
            dataclasses.replace(job.experiment, dataset="digits")
            for job in both
            if job.experiment.dataset == name
        }
        for name in ("flair", "mosaics")
    }
    assert sets["flair"] == sets["mosaics"]  # the same experiments


def test_the_tables_of_several_labels_share_their_starts() -> None:
    known = paper.studies()
    starts = {
        name: {job.warm_start for job in jobs_of(known[name], ("mosaics",))}
        for name in ("flair", "plug-and-play")
    }
    assert (
        starts["plug-and-play"] < starts["flair"] and len(starts["flair"]) == 8 * 3
    )  # methods and seeds
    runs = {job.name for job in jobs_of(known["flair"], ("mosaics",))}
    assert len(runs) == 11 and not runs & {
        job.name for job in jobs_of(known["plug-and-play"], ("mosaics",))
    }


def test_stopped_after_every_round_it_gets_there_all_the_same(
    done: Results, tmp_path: Path
) -> None:
    results = Results(tmp_path)
    all_ = stack_jobs(jobs_of(FEW))
    stops = 0
    while stops < 60:
        asked = iter([False, False, True])
        ended = JobQueue(results, should_stop=lambda asked=asked: next(asked, True)).work(all_)  # type: ignore[misc]
        assert ended.failures == []
        if not ended.num_left:
            break
        stops += 1
    assert stops > 5
    assert found(results, jobs_of(FEW)) == found(done, jobs_of(FEW))


def steps(out: Path) -> list[str]:
    return ["reproduce", "steps", "--smoke", "--plain", "--results", str(out)]


def command(out: Path) -> list[str]:
    return [sys.executable, "-m", "fedcog", *steps(out)]


def wait_for(what: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.02)


def test_killed_with_no_chance_to_say_anything_it_goes_on(tmp_path: Path) -> None:
    killed = Results(tmp_path / "killed")
    whole = Results(tmp_path / "whole")
    wanted = jobs_of(STUDIES["steps"])
    for count in (1, 3):  # results that are there when it is killed
        process = subprocess.Popen(
            command(killed.path), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            wait_for(lambda count=count: sum(killed.has(job) for job in wanted) >= count)  # type: ignore[misc]
        finally:
            os.kill(process.pid, signal.SIGKILL)
            process.wait(30)
    assert not all(killed.has(job) for job in wanted)
    for results in (killed, whole):
        assert main(steps(results.path)) == 0
    assert found(killed, wanted) == found(whole, wanted)
    assert (whole.path / "results.html").exists()


def test_two_at_once_share_the_work_and_do_nothing_twice(tmp_path: Path) -> None:
    out = tmp_path / "both"
    both = [
        subprocess.Popen(command(out), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    told = [process.communicate(timeout=120)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], told
    files = [file for file in out.rglob("*.jsonl") if "runs" not in file.parts]
    assert len(files) == 4
    for file in files:
        seeds = [json.loads(line)["seed"] for line in file.read_text().splitlines()[1:]]
        assert sorted(seeds) == [0, 1]
    rounds = [sum(", round " in line for line in text.splitlines()) for text in told]
    assert sum(rounds) == 2 + 8 * 2  # two starts of a round, and eight runs of two rounds more


def test_a_start_that_somebody_else_has_just_finished_is_not_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = [one for one in jobs_of(STUDIES["steps"]) if one.seed == 0][:1]
    JobQueue(Results(tmp_path)).work(stack_jobs(few))
    results = Results(tmp_path / "again")
    finished = JobQueue._is_finished
    shutil.copytree(tmp_path / "runs", tmp_path / "again" / "runs")
    said: list[bool] = []

    def not_at_first(self: JobQueue, one: Job) -> bool:
        said.append(bool(said) and finished(self, one))
        return said[-1]

    monkeypatch.setattr(JobQueue, "_is_finished", not_at_first)
    assert JobQueue(results).work(stack_jobs(few)) == ([], 0) and said[:2] == [False, True]


def test_a_budget_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(job_queue.time, "monotonic", lambda: now[0])
    deadline = Deadline(200)
    deadline.start_stack()
    now[0] = 80
    deadline.round_finished("one")
    deadline.round_finished(
        "other"
    )  # took 80 s, as one did: the next may take half as long again, and 8 s are kept back
    assert deadline.is_over()
    now[0] = 100
    deadline.round_finished("one")
    deadline.round_finished("other")  # took 20 s: the first had much to prepare
    assert not deadline.is_over()
    now[0] = 161.9
    assert not deadline.is_over()
    now[0] = 162.1
    assert deadline.is_over()
    deadline.start_stack()  # what comes next may be quicker
    assert not deadline.is_over()
    results = Results(tmp_path)
    all_ = stack_jobs(jobs_of(FEW))
    ended = JobQueue(results, budget=1).work(all_)  # less than what is kept back
    assert ended == ([], 12) and not results.path.joinpath("runs").exists()


def test_a_long_first_round_does_not_stop_a_run_after_a_short_second_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    rounds = [80.0, 5.0, 5.0, 5.0]
    monkeypatch.setattr(job_queue.time, "monotonic", lambda: now[0])
    start_round = Server.start_round

    def slow(self: Server, round: int) -> Any:
        now[0] += rounds[round]
        return start_round(self, round)

    monkeypatch.setattr(Server, "start_round", slow)
    one = Job(dataclasses.replace(jobs_of(FEW)[0].experiment, rounds=4))
    # after 85 s another round like the first would not fit, but the second says what a round takes
    said: list[str] = []
    assert JobQueue(Results(tmp_path / "enough"), budget=210, say=said.append).work([[one]]) == (
        [],
        0,
    )
    assert len(said) == 1  # begun once
    now[0] = 0
    assert JobQueue(Results(tmp_path / "too little"), budget=90).work([[one]]) == ([], 1)


def test_shards_are_all_of_it_and_keep_together_what_shares_a_start() -> None:
    every = [job for study in STUDIES.values() for job in jobs_of(study)]
    all_ = stack_jobs(list(dict.fromkeys(every)))
    parts = [shard(all_, part, 3) for part in range(3)]
    assert sorted(id(stack) for part in parts for stack in part) == sorted(
        id(stack) for stack in all_
    )
    assert all(len(part) > 10 for part in parts)
    starts = [
        {job.warm_start for stack in part for job in stack if job.warm_start is not None}
        for part in parts
    ]
    assert not any(one & other for one, other in itertools.combinations(starts, 2))


def test_what_fails_stops_nothing_and_is_told(tmp_path: Path) -> None:
    impossible = dataclasses.replace(jobs_of(FEW)[0].experiment, partition="label-skew", clients=3)
    told: list[str] = []
    ended = JobQueue(Results(tmp_path), say=told.append).work(
        [[Job(impossible)], [jobs_of(FEW)[0]]]
    )
    assert ended.num_left == 0 and "3 clients cannot hold them all" in ended.failures[0]
    assert Results(tmp_path).has(jobs_of(FEW)[0])
    assert any(line.startswith("failed: ") for line in told)


def test_too_little_memory_for_one_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    carry_out = JobQueue._train
    (first, second) = jobs_of(FEW)[:2]

    def narrow(self: JobQueue, stack: list[Job]) -> Any:
        if stack[0] == first:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return carry_out(self, stack)

    monkeypatch.setattr(JobQueue, "_train", narrow)
    ended = JobQueue(Results(tmp_path)).work([[first], [second]])
    assert ended.num_left == 0 and ended.failures == [f"{first.name}: CUDA out of memory"]
    assert Results(tmp_path).has(second) and not Results(tmp_path).has(first)


def test_a_run_that_diverges_is_a_result(tmp_path: Path) -> None:
    wild = dataclasses.replace(jobs_of(FEW)[0].experiment, lr=1e15)
    results = Results(tmp_path)
    assert JobQueue(results).work([[Job(wild)]]) == ([], 0)
    assert "diverged" in results.by_seed(Job(wild))[0]


def test_overlapping_stacks_of_two_queues_get_in_nobodys_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two queues whose stacks share jobs but are not the same: the one waits for the other, and
    nothing comes twice.
    """
    monkeypatch.setattr(job_planning, "stacks_seeds", lambda experiment: True)
    small = FEW._replace(cells=tuple(cell for cell in FEW.cells if cell.row == "FedAvg"))
    one = stack_jobs(jobs_of(small))
    other = stack_jobs(jobs_of(small._replace(seeds=(1, 2))))
    results = Results(tmp_path)
    ended: list[Any] = []
    mate = threading.Thread(target=lambda: ended.append(JobQueue(Results(tmp_path)).work(other)))
    started = threading.Event()

    def watch(*_: object) -> None:
        if not started.is_set():
            started.set()
            mate.start()
            time.sleep(0.5)  # while the other comes and finds some of its jobs taken

    assert JobQueue(results, callbacks=[watch]).work(one) == ([], 0)
    mate.join(120)
    assert ended == [([], 0)]
    for file in tmp_path.glob("*/*.jsonl"):
        assert sorted(json.loads(line)["seed"] for line in file.read_text().splitlines()[1:]) == [
            0,
            1,
            2,
        ]


def test_a_heavy_checkpoint_is_not_kept_beside_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (one, *_) = jobs_of(FEW)
    assert one.warm_start is not None
    told = []
    for heavy in (1 << 30, 1):
        monkeypatch.setattr(checkpoint, "LARGE_CHECKPOINT_BYTES", heavy)
        results = Results(tmp_path / str(heavy))
        assert JobQueue(results).work([[one]]) == ([], 0)
        kept = [
            RunDirectory(results.run_directory(each)).load() for each in (Job(one.warm_start), one)
        ]
        assert kept[0] is not None and (kept[1] is None) == (heavy == 1)
        told.append(found(results, [one]))
    assert told[0] == told[1]
    with pytest.raises(RecordError, match="continues another run, and only the command"):
        fedcog.run(one.experiment, results.run_directory(one), resume=True)
    (
        results.path / f"{one.name}.jsonl"
    ).unlink()  # a result that is lost is made again, from its start
    assert JobQueue(results).work([[one]]) == ([], 0) and found(results, [one]) == told[0]


@pytest.mark.parametrize(("rest", "left"), [(0.0, 2), (1e9, 0)])
def test_what_is_killed_goes_on_from_a_heavy_checkpoint_too(
    rest: float, left: int, done: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a run after a start, too, if there was time to write one; else from that start."""
    (first, *_) = jobs_of(FEW)
    one = first._replace(experiment=dataclasses.replace(first.experiment, checkpoint_every=1))
    monkeypatch.setattr(checkpoint, "LARGE_CHECKPOINT_BYTES", 1)
    monkeypatch.setattr(run_directory, "CHECKPOINT_PAUSE_FACTOR", rest)
    results = Results(tmp_path)
    rounds = list[int]()

    def killed(experiment: Experiment, line: dict[str, Any]) -> None:
        if line["round"] == one.experiment.rounds:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        JobQueue(results, callbacks=[killed]).work([[one]])
    begun = RunDirectory(results.run_directory(one)).load()
    assert (begun.round if begun else 0) == left
    again = JobQueue(
        results, callbacks=[lambda experiment, line: rounds.append(line["round"])]
    ).work([[one]])
    assert again == ([], 0) and found(results, [one]) == found(done, [one])
    assert one.warm_start is not None and rounds == list(
        range((left or one.warm_start.rounds) + 1, one.experiment.rounds + 1)
    )
    assert not RunDirectory(results.run_directory(one)).has_checkpoint_of(
        1
    )  # and leaves none behind


def test_a_heavy_start_goes_when_nothing_that_is_planned_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_queue, "LARGE_CHECKPOINT_BYTES", 1)
    several = [
        one
        for one in jobs_of(FEW)
        if one.seed == 0 and one.warm_start == jobs_of(FEW)[0].warm_start
    ]
    assert len(several) > 1 and several[0].warm_start is not None
    results = Results(tmp_path)
    start = RunDirectory(results.run_directory(Job(several[0].warm_start)))
    for place, one in enumerate(several):
        assert JobQueue(results, planned=jobs_of(FEW)).work([[one]]) == ([], 0)
        assert start.checkpoint_round() == (
            several[0].warm_start.rounds if place < len(several) - 1 else 0
        )
    before = found(results, several)
    (
        results.path / f"{several[0].name}.jsonl"
    ).unlink()  # and is run again if it is needed after all
    assert (
        JobQueue(results, planned=jobs_of(FEW)).work([[several[0]]]) == ([], 0)
        and found(results, several) == before
    )


def test_a_start_that_another_process_lets_go_is_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (one, *_) = jobs_of(FEW)
    assert one.warm_start is not None
    results = Results(tmp_path)
    gone = list[Path]()
    start = RunDirectory(results.run_directory(Job(one.warm_start)))
    going_on = JobQueue._run_after_warm_starts

    def late(self: JobQueue, left: list[Job]) -> None:
        if not gone:
            start.delete_checkpoint()  # after it is seen to be there, and before it is read
            gone.append(start.path)
        going_on(self, left)

    monkeypatch.setattr(JobQueue, "_run_after_warm_starts", late)
    assert JobQueue(results).work([[one]]) == ([], 0) and gone and results.has(one)


def test_a_start_that_was_to_go_when_we_were_killed_goes_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_queue, "LARGE_CHECKPOINT_BYTES", 1)
    several = [
        one
        for one in jobs_of(FEW)
        if one.seed == 0 and one.warm_start == jobs_of(FEW)[0].warm_start
    ]
    assert several[0].warm_start is not None
    results = Results(tmp_path)
    stack = [[one] for one in several]
    assert JobQueue(results).work(stack) == (
        [],
        0,
    )  # which knows of no plan, and so lets nothing go
    start = RunDirectory(results.run_directory(Job(several[0].warm_start)))
    assert start.has_checkpoint_of(1)
    assert JobQueue(results, planned=[*several, *jobs_of(FEW)]).work(stack) == (
        [],
        0,
    ) and not start.has_checkpoint_of(1)


def test_a_start_that_diverges_costs_its_own_runs_alone(tmp_path: Path) -> None:
    results = Results(tmp_path)
    small = FEW._replace(cells=tuple(cell for cell in FEW.cells if cell.block == BLOCKS[0]))
    begun = jobs_of(small)[0].warm_start
    assert begun is not None
    diverged = RunDirectory(results.run_directory(Job(begun)))
    diverged.begin(begun, {"command": "x"})
    diverged.record_failure("training diverged in round 1")
    assert JobQueue(results).work(stack_jobs(jobs_of(small))) == ([], 0)
    lost = [job for job in jobs_of(small) if "diverged" in results.by_seed(job)[job.seed]]
    assert [job.warm_start for job in lost] == [begun, begun] and len(lost) < len(jobs_of(small))
    grid = tables.tables_of(small, results)[0]
    assert any("1 of 2 seeds diverged" in row[0] for row in grid.rows)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"accuracy":[', '"accuracy":["x",'),
        ('"accuracy":[', '"accuracy":[NaN,'),
        ('"accuracy":[', '"accuracy":[1e308,'),
        ('"loss":[', '"loss":[],"x":['),
        ('"clients":[', '"clients":3,"x":['),
        ('"clients":[', '"clients":["y",'),
        ('"provenance":{', '"provenance":"y","x":{'),
        ('"seed":', '"seed":"0","x":'),
        ('{"settings":{', '{"settings":[],"x":{'),
        ('{"seed"', '["seed"'),
    ],
)
def test_a_damaged_result_is_told_and_stops_nothing_else(
    old: str, new: str, done: Results, tmp_path: Path
) -> None:
    shutil.copytree(done.path, tmp_path, dirs_exist_ok=True)
    first = jobs_of(FEW)[0]
    file = tmp_path / f"{first.name}.jsonl"
    head, rest = file.read_text().split("\n", 1)
    text = (
        f"{head}\n{rest}".replace(old, new, 1)
        if old.startswith('{"settings')
        else f"{head}\n{rest.replace(old, new, 1)}"
    )
    file.write_text(text)
    results = Results(tmp_path)
    with pytest.raises(RecordError, match="is damaged"):
        results.by_seed(first)
    ended = JobQueue(results).work(stack_jobs(jobs_of(FEW)))
    assert len(ended.failures) == 2 and all(
        "is damaged" in line for line in ended.failures
    )  # its two seeds
    assert job_planning.rounds_left(stack_jobs(jobs_of(FEW)), results) >= 0


def test_a_result_is_known_by_what_is_unusual_about_it() -> None:
    one = jobs_of(FEW)[-1]
    assert isinstance(one.experiment.algorithm, FedCOG)
    other = dataclasses.replace(
        one.experiment, algorithm=dataclasses.replace(one.experiment.algorithm, lambda_dis=0.2)
    )
    assert one._replace(experiment=other).key != one.key
    assert (
        one._replace(
            experiment=dataclasses.replace(one.experiment, seed=9, data_dir="x", device="cuda")
        ).key
        == one.key
    )
    assert one._replace(warm_start=None).key != one.key != one._replace(probe="pictures").key


def test_results_made_under_other_defaults_are_not_taken_for_these(
    done: Results, tmp_path: Path
) -> None:
    one = jobs_of(FEW)[0]
    file = tmp_path / f"{one.name}.jsonl"
    file.parent.mkdir(parents=True)
    text = (done.path / f"{one.name}.jsonl").read_text()
    file.write_text(text)
    assert Results(tmp_path).has(one)
    file.write_text(text.replace('"momentum":0.9', '"momentum":0.8'))
    with pytest.raises(RecordError, match="momentum had other defaults"):
        Results(tmp_path).has(one)
    file.write_text(text[: text.rfind('"provenance"')])  # a kill in the midst of the last line
    assert list(Results(tmp_path).by_seed(one)) == [0]
    Results(tmp_path).add(
        jobs_of(FEW._replace(seeds=(1,)))[0], {"accuracy": [0.5], "clients": [], "provenance": {}}
    )
    assert list(Results(tmp_path).by_seed(one)) == [0, 1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nothing"], "unknown table or figure 'nothing'"),
        (["main", "--shard", "2/2"], "shard needs i/n"),
        (["main", "--shard", "9" * 5000 + "/2"], "shard needs i/n"),
        (["main", "--time-budget", "5"], "time-budget needs more than the 8 seconds"),
        (["main", "--time-budget", "nan"], "time-budget needs more than the 8 seconds"),
        (["main", "--seeds", "-1"], "seeds needs integers"),
        (["--smoke"], "name what to run"),
        (["main", "--smoke", "--datasets", "cifar10"], "remove --datasets"),
        (["main", "--smoke", "--results", "FILE"], "choose another --results"),
        (["main", "--smoke", "--render", "--out", "FILE"], "choose another --out"),
    ],
)
def test_faults_are_told_before_anything_runs(
    words: list[str],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "FILE").write_text("")
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", *words]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "results").exists()


def test_other_seeds_are_in_the_tables_and_a_part_tells_of_the_whole(tmp_path: Path) -> None:
    words = [
        "reproduce",
        "lambda-dis",
        "--smoke",
        "--results",
        str(tmp_path),
        "--seeds",
        "7",
        "--quiet",
    ]
    assert main(words) == 0
    text = (tmp_path / "results.md").read_text(encoding="utf-8")
    assert (
        "Seed 7;" in text
        and "not run" not in text
        and "by `fedcog reproduce lambda-dis --smoke`" in text
    )
    (tmp_path / "notes.md").write_text(
        "See {{main | CIFAR-10, NIID-1 | FedAvg | last}}.\n\n## lambda-dis\n\nWords.\n"
    )
    assert main([*words, "--render"]) == 0
    assert "See not run." in (tmp_path / "results.md").read_text(encoding="utf-8")
    for notes, said in (
        ("## nobody\n", "there is no study nobody"),
        ("{{mian | a | b | last}}", "no study mian"),
    ):
        (tmp_path / "notes.md").write_text(notes)
        with pytest.raises(RecordError, match=said):
            (
                reproduction.parts_of([STUDIES["lambda-dis"]], Results(tmp_path)),
                reproduction.markdown([], Results(tmp_path)),
            )


def test_a_signal_ends_it_with_the_usual_code(tmp_path: Path) -> None:
    process = subprocess.Popen(
        command(tmp_path), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    wait_for(lambda: any(tmp_path.glob("runs/*/*/seed-*/rounds.jsonl")))
    process.send_signal(signal.SIGTERM)
    told = process.communicate(timeout=60)[1]
    assert process.returncode == 130, told
    assert "left; continue with: fedcog reproduce steps" in told


def test_data_sets_that_are_not_here_are_told_before_anything_runs(tmp_path: Path) -> None:
    from fedcog.cli.commands.studies import _check_datasets

    with pytest.raises(
        ConfigError, match=r"cifar100 is missing: fedcog data get cifar100 --data-dir .*\n?"
    ):
        _check_datasets({"cifar100", "digits"}, str(tmp_path))


def test_borrowed_partitions_train_as_one_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_planning, "stacks_seeds", lambda experiment: True)
    usual = jobs_of(FEW)[0].experiment
    both = [
        usual,
        dataclasses.replace(usual, partition="flwr-shard", partition_args="shard_size=50", lr=0.5),
    ]
    assert [len(stack) for stack in stack_jobs([Job(one) for one in both])] == [2]
    assert [
        len(stack)
        for stack in stack_jobs([Job(dataclasses.replace(usual, seed=seed)) for seed in range(20)])
    ] == [
        16,
        4,
    ]
