"""Tests of the job queue: restarts, parallel processes, budgets, warm starts, damaged results."""

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

pytestmark = pytest.mark.slow

STUDIES = {name: smoke.smoke_version(study) for name, study in paper.studies().items()}
BLOCKS = ("CIFAR-10, NIID-1", "CIFAR-10, NIID-2")
SMALL_STUDY = STUDIES["main"]._replace(
    cells=tuple(
        cell
        for cell in STUDIES["main"].cells
        if cell.block in BLOCKS and cell.row in ("FedAvg", "SCAFFOLD", "FedCOG")
    )
)


def untimed_results(results: Results, jobs: list[Job]) -> dict[tuple[str, int], Any]:
    """Results of the jobs, without seconds and provenance."""
    lines = {(job.name, job.seed): dict(results.by_seed(job)[job.seed]) for job in jobs}
    for line in lines.values():
        del line["seconds"]
        del line["provenance"]
    return lines


@pytest.fixture(scope="module")
def reference_results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Results of the small study from one uninterrupted queue, without stacking."""
    results = Results(tmp_path_factory.mktemp("done"))
    outcome = JobQueue(results, command="fedcog reproduce main").work(
        stack_jobs(jobs_of(SMALL_STUDY))
    )
    assert outcome == ([], 0)
    return results


def test_progress_counts_each_job_once(reference_results: Results) -> None:
    jobs = jobs_of(SMALL_STUDY)
    assert len(jobs) == 3 * 2 * 2 == len({(job.name, job.seed) for job in jobs})
    assert job_planning.progress_of([SMALL_STUDY], reference_results) == [("main", 12, 12)]
    assert job_planning.progress_of(
        [SMALL_STUDY], Results(reference_results.path / "elsewhere")
    ) == [("main", 0, 12)]
    assert job_planning.rounds_left([jobs], reference_results) == 0
    # 12 runs of two rounds after the warm start, and eight warm starts of one round.
    # FedAvg and FedCOG share theirs.
    assert (
        job_planning.rounds_left([jobs], Results(reference_results.path / "elsewhere"))
        == 12 * 2 + 8
    )


def test_algorithms_option_selects_jobs(
    reference_results: Results, capsys: pytest.CaptureFixture[str]
) -> None:
    assert {
        algorithm_name(job.experiment.algorithm)
        for job in jobs_of(SMALL_STUDY, algorithms=["scaffold"])
    } == {"scaffold"}
    assert {
        algorithm_name(job.experiment.algorithm)
        for job in jobs_of(SMALL_STUDY, algorithms=["fedcog"])
    } == {"fedavg+fedcog"}
    assert (
        len(jobs_of(SMALL_STUDY, algorithms=["fedavg"]))
        == 2 * len(jobs_of(SMALL_STUDY, algorithms=["scaffold"]))
        == 8
    )
    assert job_planning.progress_of([SMALL_STUDY], reference_results, algorithms=["scaffold"]) == [
        ("main", 4, 4)
    ]
    arguments = [
        "reproduce",
        "main",
        "--status",
        "--smoke",
        "--results",
        str(reference_results.path),
    ]
    assert main([*arguments, "--algorithms", "scaffold"]) == 0
    assert "4/4" in capsys.readouterr().out
    assert (
        main(["reproduce", "--algorithms", "scaffold"]) == 2
        and "name what to run" in capsys.readouterr().err
    )
    assert (
        main(["reproduce", "main", "--algorithms", "nonsense"]) == 2
        and "nonsense" in capsys.readouterr().err
    )


def test_runs_share_a_warm_start(reference_results: Results) -> None:
    by_row = {
        cell.row: job_planning.job_of(cell, 0)
        for cell in SMALL_STUDY.cells
        if cell.block == BLOCKS[0]
    }
    assert (
        by_row["FedAvg"].warm_start == by_row["FedCOG"].warm_start != by_row["SCAFFOLD"].warm_start
    )
    first_lines = [
        RunDirectory(reference_results.run_directory(job)).lines()[0]
        for job in (by_row["FedAvg"], by_row["FedCOG"])
    ]
    warm_start = by_row["FedAvg"].warm_start
    assert warm_start is not None
    # Equal including seconds: the line was copied, not computed again.
    assert (
        first_lines[0]
        == first_lines[1]
        == RunDirectory(reference_results.run_directory(Job(warm_start))).lines()[0]
    )


def test_stacked_jobs_match_separate_jobs(
    reference_results: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_planning, "stacks_seeds", lambda experiment: True)
    stacks = stack_jobs(jobs_of(SMALL_STUDY))
    assert [len(stack) for stack in stacks] == [4, 4, 4]  # two seeds x two partitions
    results = Results(tmp_path)
    assert JobQueue(results).work(stacks) == ([], 0)
    stacked = untimed_results(results, jobs_of(SMALL_STUDY))
    separate = untimed_results(reference_results, jobs_of(SMALL_STUDY))
    for name, line in stacked.items():
        assert line["loss"] == pytest.approx(separate[name]["loss"], rel=1e-4)
        assert line["accuracy"] == pytest.approx(separate[name]["accuracy"], abs=0.01)


def test_stack_size_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_planning, "stacks_seeds", lambda experiment: True)

    def sizes(num_seeds: int, **settings: Any) -> list[int]:
        jobs = [Job(Experiment(seed=seed, **settings)) for seed in range(num_seeds)]
        return [len(stack) for stack in stack_jobs(jobs)]

    assert sizes(40, clients=3) == [16, 16, 8]
    assert sizes(30, clients=10) == [12, 12, 6]  # at most 128 clients in a stack
    assert sizes(3, clients=50) == [2, 1] and sizes(3, clients=50, participation=0.5) == [3]
    assert sizes(2, clients=500) == [1, 1]


def test_stacked_seeds_with_different_users_match_separate_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = [
        cell
        for cell in STUDIES["flair"].cells
        if cell.block == "Mosaics, O-F1" and cell.row in ("FedSAM", "FedCOG")
    ]
    study = STUDIES["flair"]._replace(cells=tuple(cells))
    separate_results = Results(tmp_path / "alone")
    stacked_results = Results(tmp_path / "together")
    assert JobQueue(separate_results).work(stack_jobs(jobs_of(study))) == ([], 0)
    monkeypatch.setattr(job_planning, "stacks_seeds", lambda experiment: True)
    assert [len(stack) for stack in stack_jobs(jobs_of(study))] == [2, 2]
    assert JobQueue(stacked_results).work(stack_jobs(jobs_of(study))) == ([], 0)
    stacked = untimed_results(stacked_results, jobs_of(study))
    separate = untimed_results(separate_results, jobs_of(study))
    for name, line in stacked.items():
        assert line["loss"] == pytest.approx(separate[name]["loss"], rel=1e-4)
        assert (
            line["o_f1"] == pytest.approx(separate[name]["o_f1"], abs=0.01)
            and line["c_p"]
            and "accuracy" not in line
        )


def test_longer_run_supplies_the_shorter_result(tmp_path: Path) -> None:
    """Two studies train the same experiments, one of them for two more rounds."""
    study = STUDIES["flair"]
    cells = [
        cell
        for cell in study.cells
        if cell.block == "Mosaics, O-F1" and cell.row in ("FedAvg", "FedCOG")
    ]
    short_jobs = jobs_of(study._replace(cells=tuple(cells)))
    long_jobs = [
        job._replace(
            experiment=dataclasses.replace(job.experiment, rounds=job.experiment.rounds + 2)
        )
        for job in short_jobs
    ]
    stacks = stack_jobs([*short_jobs, *long_jobs])
    # Longer runs come first.
    assert [stack[0] in long_jobs for stack in stacks] == [True, False] * 4
    shared_results = Results(tmp_path / "done")
    separate_results = Results(tmp_path / "apart")
    assert JobQueue(shared_results).work(stacks) == ([], 0)
    assert JobQueue(separate_results).work(stack_jobs(short_jobs)) == ([], 0)
    assert untimed_results(shared_results, short_jobs) == untimed_results(
        separate_results, short_jobs
    )
    assert not any(shared_results.run_directory(job).exists() for job in short_jobs)


def test_dataset_without_download_is_planned_only_if_present(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = paper.studies()["flair"]
    mosaics_jobs = jobs_of(study, data_dir=str(tmp_path))
    assert {job.experiment.dataset for job in mosaics_jobs} == {"mosaics"} and len(
        mosaics_jobs
    ) == 11 * 3
    assert job_planning.progress_of([study], Results(tmp_path), data_dir=str(tmp_path)) == [
        ("flair", 0, 33)
    ]
    arguments = [
        "reproduce",
        "flair",
        "--datasets",
        "flair",
        "--data-dir",
        str(tmp_path),
        "--results",
        str(tmp_path / "x"),
    ]
    assert main(arguments) == 2
    assert "flair is missing: fedcog data get flair" in capsys.readouterr().err
    (tmp_path / "flair" / "small_images").mkdir(parents=True)
    (tmp_path / "flair" / "labels_and_metadata.json").write_text("[]")
    all_jobs = jobs_of(study, data_dir=str(tmp_path))
    assert len(all_jobs) == 2 * len(mosaics_jobs)
    experiments = {
        name: {
            dataclasses.replace(job.experiment, dataset="digits")
            for job in all_jobs
            if job.experiment.dataset == name
        }
        for name in ("flair", "mosaics")
    }
    assert experiments["flair"] == experiments["mosaics"]


def test_multi_label_studies_share_warm_starts() -> None:
    studies = paper.studies()
    warm_starts = {
        name: {job.warm_start for job in jobs_of(studies[name], ("mosaics",))}
        for name in ("flair", "plug-and-play")
    }
    # eight algorithms x three seeds
    assert (
        warm_starts["plug-and-play"] < warm_starts["flair"] and len(warm_starts["flair"]) == 8 * 3
    )
    names = {job.name for job in jobs_of(studies["flair"], ("mosaics",))}
    assert len(names) == 11 and not names & {
        job.name for job in jobs_of(studies["plug-and-play"], ("mosaics",))
    }


def test_repeatedly_stopped_queue_gives_the_same_results(
    reference_results: Results, tmp_path: Path
) -> None:
    results = Results(tmp_path)
    stacks = stack_jobs(jobs_of(SMALL_STUDY))
    num_stops = 0
    while num_stops < 60:
        answers = iter([False, False, True])
        outcome = JobQueue(results, should_stop=lambda answers=answers: next(answers, True)).work(
            stacks
        )  # type: ignore[misc]
        assert outcome.failures == []
        if not outcome.num_left:
            break
        num_stops += 1
    assert num_stops > 5
    assert untimed_results(results, jobs_of(SMALL_STUDY)) == untimed_results(
        reference_results, jobs_of(SMALL_STUDY)
    )


def steps_arguments(out: Path) -> list[str]:
    return ["reproduce", "steps", "--smoke", "--plain", "--results", str(out)]


def steps_command(out: Path) -> list[str]:
    return [sys.executable, "-m", "fedcog", *steps_arguments(out)]


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)


def test_killed_queue_resumes_with_the_same_results(tmp_path: Path) -> None:
    killed = Results(tmp_path / "killed")
    uninterrupted = Results(tmp_path / "whole")
    jobs = jobs_of(STUDIES["steps"])
    for num_results in (1, 3):  # results stored before the kill
        process = subprocess.Popen(
            steps_command(killed.path), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            wait_for(
                lambda num_results=num_results: sum(killed.has(job) for job in jobs) >= num_results
            )  # type: ignore[misc]
        finally:
            os.kill(process.pid, signal.SIGKILL)
            process.wait(30)
    assert not all(killed.has(job) for job in jobs)
    for results in (killed, uninterrupted):
        assert main(steps_arguments(results.path)) == 0
    assert untimed_results(killed, jobs) == untimed_results(uninterrupted, jobs)
    assert (uninterrupted.path / "results.html").exists()


def test_parallel_processes_divide_jobs_without_repeats(tmp_path: Path) -> None:
    out = tmp_path / "both"
    processes = [
        subprocess.Popen(
            steps_command(out), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    logs = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], logs
    files = [file for file in out.rglob("*.jsonl") if "runs" not in file.parts]
    assert len(files) == 4
    for file in files:
        seeds = [json.loads(line)["seed"] for line in file.read_text().splitlines()[1:]]
        assert sorted(seeds) == [0, 1]
    num_rounds = [sum(", round " in line for line in log.splitlines()) for log in logs]
    assert sum(num_rounds) == 2 + 8 * 2  # two warm starts of one round; eight runs of two more


def test_warm_start_finished_by_another_process_is_reused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [job for job in jobs_of(STUDIES["steps"]) if job.seed == 0][:1]
    JobQueue(Results(tmp_path)).work(stack_jobs(jobs))
    results = Results(tmp_path / "again")
    is_finished = JobQueue._is_finished
    shutil.copytree(tmp_path / "runs", tmp_path / "again" / "runs")
    answers: list[bool] = []

    def false_at_first(self: JobQueue, job: Job) -> bool:
        answers.append(bool(answers) and is_finished(self, job))
        return answers[-1]

    monkeypatch.setattr(JobQueue, "_is_finished", false_at_first)
    assert JobQueue(results).work(stack_jobs(jobs)) == ([], 0) and answers[:2] == [False, True]


def test_queue_keeps_its_time_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(job_queue.time, "monotonic", lambda: now[0])
    deadline = Deadline(200)
    deadline.start_stack()
    now[0] = 80
    deadline.round_finished("one")
    # Each took 80 s. The next may take 1.5 times that, and 8 s are reserved.
    deadline.round_finished("other")
    assert deadline.is_over()
    now[0] = 100
    deadline.round_finished("one")
    deadline.round_finished("other")  # took 20 s: only the first round pays for the setup
    assert not deadline.is_over()
    now[0] = 161.9
    assert not deadline.is_over()
    now[0] = 162.1
    assert deadline.is_over()
    deadline.start_stack()  # forgets how long the rounds of the previous stack took
    assert not deadline.is_over()
    results = Results(tmp_path)
    stacks = stack_jobs(jobs_of(SMALL_STUDY))
    outcome = JobQueue(results, budget=1).work(stacks)  # less than the reserved 8 s
    assert outcome == ([], 12) and not results.path.joinpath("runs").exists()


def test_slow_first_round_does_not_exhaust_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    round_seconds = [80.0, 5.0, 5.0, 5.0]
    monkeypatch.setattr(job_queue.time, "monotonic", lambda: now[0])
    start_round = Server.start_round

    def slow_start_round(self: Server, round: int) -> Any:
        now[0] += round_seconds[round]
        return start_round(self, round)

    monkeypatch.setattr(Server, "start_round", slow_start_round)
    job = Job(dataclasses.replace(jobs_of(SMALL_STUDY)[0].experiment, rounds=4))
    # After 85 s a round like the first would not fit, but one like the second does.
    messages: list[str] = []
    queue = JobQueue(Results(tmp_path / "enough"), budget=210, say=messages.append)
    assert queue.work([[job]]) == ([], 0)
    assert len(messages) == 1  # started once
    now[0] = 0
    assert JobQueue(Results(tmp_path / "too little"), budget=90).work([[job]]) == ([], 1)


def test_shards_cover_all_jobs_and_share_no_warm_start() -> None:
    jobs = [job for study in STUDIES.values() for job in jobs_of(study)]
    stacks = stack_jobs(list(dict.fromkeys(jobs)))
    shards = [shard(stacks, part, 3) for part in range(3)]
    assert sorted(id(stack) for part in shards for stack in part) == sorted(
        id(stack) for stack in stacks
    )
    assert all(len(part) > 10 for part in shards)
    warm_starts = [
        {job.warm_start for stack in part for job in stack if job.warm_start is not None}
        for part in shards
    ]
    assert not any(a & b for a, b in itertools.combinations(warm_starts, 2))


def test_failed_job_is_reported_and_others_continue(tmp_path: Path) -> None:
    impossible = dataclasses.replace(
        jobs_of(SMALL_STUDY)[0].experiment, partition="label-skew", clients=3
    )
    messages: list[str] = []
    outcome = JobQueue(Results(tmp_path), say=messages.append).work(
        [[Job(impossible)], [jobs_of(SMALL_STUDY)[0]]]
    )
    assert outcome.num_left == 0 and "3 clients cannot hold them all" in outcome.failures[0]
    assert Results(tmp_path).has(jobs_of(SMALL_STUDY)[0])
    assert any(line.startswith("failed: ") for line in messages)


def test_out_of_memory_job_does_not_stop_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = JobQueue._train
    (first, second) = jobs_of(SMALL_STUDY)[:2]

    def train_or_fail(self: JobQueue, stack: list[Job]) -> Any:
        if stack[0] == first:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return train(self, stack)

    monkeypatch.setattr(JobQueue, "_train", train_or_fail)
    outcome = JobQueue(Results(tmp_path)).work([[first], [second]])
    assert outcome.num_left == 0 and outcome.failures == [f"{first.name}: CUDA out of memory"]
    assert Results(tmp_path).has(second) and not Results(tmp_path).has(first)


def test_diverged_run_is_stored_as_a_result(tmp_path: Path) -> None:
    diverging = dataclasses.replace(jobs_of(SMALL_STUDY)[0].experiment, lr=1e15)
    results = Results(tmp_path)
    assert JobQueue(results).work([[Job(diverging)]]) == ([], 0)
    assert "diverged" in results.by_seed(Job(diverging))[0]


def test_queues_with_overlapping_stacks_repeat_no_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stacks that share some jobs: one queue waits for the other, and no job runs twice."""
    monkeypatch.setattr(job_planning, "stacks_seeds", lambda experiment: True)
    study = SMALL_STUDY._replace(
        cells=tuple(cell for cell in SMALL_STUDY.cells if cell.row == "FedAvg")
    )
    stacks = stack_jobs(jobs_of(study))
    other_stacks = stack_jobs(jobs_of(study._replace(seeds=(1, 2))))
    results = Results(tmp_path)
    other_outcomes: list[Any] = []
    other_queue = threading.Thread(
        target=lambda: other_outcomes.append(JobQueue(Results(tmp_path)).work(other_stacks))
    )
    started = threading.Event()

    def start_other_queue(*_: object) -> None:
        if not started.is_set():
            started.set()
            other_queue.start()
            time.sleep(0.5)  # the other queue finds some of its jobs locked

    assert JobQueue(results, callbacks=[start_other_queue]).work(stacks) == ([], 0)
    other_queue.join(120)
    assert other_outcomes == [([], 0)]
    for file in tmp_path.glob("*/*.jsonl"):
        seeds = [json.loads(line)["seed"] for line in file.read_text().splitlines()[1:]]
        assert sorted(seeds) == [0, 1, 2]


def test_large_checkpoint_after_warm_start_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (job, *_) = jobs_of(SMALL_STUDY)
    assert job.warm_start is not None
    lines = []
    for threshold in (1 << 30, 1):
        monkeypatch.setattr(checkpoint, "LARGE_CHECKPOINT_BYTES", threshold)
        results = Results(tmp_path / str(threshold))
        assert JobQueue(results).work([[job]]) == ([], 0)
        checkpoints = [
            RunDirectory(results.run_directory(run)).load() for run in (Job(job.warm_start), job)
        ]
        assert checkpoints[0] is not None and (checkpoints[1] is None) == (threshold == 1)
        lines.append(untimed_results(results, [job]))
    assert lines[0] == lines[1]
    with pytest.raises(RecordError, match="continues another run, and only the command"):
        fedcog.run(job.experiment, results.run_directory(job), resume=True)
    # A lost result is computed again from its warm start.
    (results.path / f"{job.name}.jsonl").unlink()
    assert (
        JobQueue(results).work([[job]]) == ([], 0) and untimed_results(results, [job]) == lines[0]
    )


@pytest.mark.parametrize(("pause_factor", "checkpoint_round"), [(0.0, 2), (1e9, 0)])
def test_killed_job_resumes_from_checkpoint_or_warm_start(
    pause_factor: float,
    checkpoint_round: int,
    reference_results: Results,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It resumes from its own checkpoint if one was written, else from the warm start."""
    (first, *_) = jobs_of(SMALL_STUDY)
    job = first._replace(experiment=dataclasses.replace(first.experiment, checkpoint_every=1))
    monkeypatch.setattr(checkpoint, "LARGE_CHECKPOINT_BYTES", 1)
    monkeypatch.setattr(run_directory, "CHECKPOINT_PAUSE_FACTOR", pause_factor)
    results = Results(tmp_path)
    rounds = list[int]()

    def interrupt_last_round(experiment: Experiment, line: dict[str, Any]) -> None:
        if line["round"] == job.experiment.rounds:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        JobQueue(results, callbacks=[interrupt_last_round]).work([[job]])
    saved = RunDirectory(results.run_directory(job)).load()
    assert (saved.round if saved else 0) == checkpoint_round
    outcome = JobQueue(
        results, callbacks=[lambda experiment, line: rounds.append(line["round"])]
    ).work([[job]])
    assert outcome == ([], 0) and untimed_results(results, [job]) == untimed_results(
        reference_results, [job]
    )
    assert job.warm_start is not None and rounds == list(
        range((checkpoint_round or job.warm_start.rounds) + 1, job.experiment.rounds + 1)
    )
    # The finished job leaves no large checkpoint behind.
    assert not RunDirectory(results.run_directory(job)).has_checkpoint_of(1)


def test_large_warm_start_is_deleted_after_its_last_planned_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_queue, "LARGE_CHECKPOINT_BYTES", 1)
    jobs = [
        job
        for job in jobs_of(SMALL_STUDY)
        if job.seed == 0 and job.warm_start == jobs_of(SMALL_STUDY)[0].warm_start
    ]
    assert len(jobs) > 1 and jobs[0].warm_start is not None
    results = Results(tmp_path)
    warm_start_run = RunDirectory(results.run_directory(Job(jobs[0].warm_start)))
    for i, job in enumerate(jobs):
        assert JobQueue(results, planned=jobs_of(SMALL_STUDY)).work([[job]]) == ([], 0)
        assert warm_start_run.checkpoint_round() == (
            jobs[0].warm_start.rounds if i < len(jobs) - 1 else 0
        )
    before = untimed_results(results, jobs)
    # The warm start is run again if a job needs it after all.
    (results.path / f"{jobs[0].name}.jsonl").unlink()
    assert (
        JobQueue(results, planned=jobs_of(SMALL_STUDY)).work([[jobs[0]]]) == ([], 0)
        and untimed_results(results, jobs) == before
    )


def test_warm_start_deleted_by_another_process_is_rerun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (job, *_) = jobs_of(SMALL_STUDY)
    assert job.warm_start is not None
    results = Results(tmp_path)
    deleted = list[Path]()
    warm_start_run = RunDirectory(results.run_directory(Job(job.warm_start)))
    run_after_warm_starts = JobQueue._run_after_warm_starts

    def delete_then_run(self: JobQueue, jobs: list[Job]) -> None:
        if not deleted:
            warm_start_run.delete_checkpoint()  # after the queue checked for it, before it is read
            deleted.append(warm_start_run.path)
        run_after_warm_starts(self, jobs)

    monkeypatch.setattr(JobQueue, "_run_after_warm_starts", delete_then_run)
    assert JobQueue(results).work([[job]]) == ([], 0) and deleted and results.has(job)


def test_later_queue_deletes_unneeded_warm_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_queue, "LARGE_CHECKPOINT_BYTES", 1)
    jobs = [
        job
        for job in jobs_of(SMALL_STUDY)
        if job.seed == 0 and job.warm_start == jobs_of(SMALL_STUDY)[0].warm_start
    ]
    assert jobs[0].warm_start is not None
    results = Results(tmp_path)
    stacks = [[job] for job in jobs]
    # Without planned jobs the queue deletes nothing.
    assert JobQueue(results).work(stacks) == ([], 0)
    warm_start_run = RunDirectory(results.run_directory(Job(jobs[0].warm_start)))
    assert warm_start_run.has_checkpoint_of(1)
    queue = JobQueue(results, planned=[*jobs, *jobs_of(SMALL_STUDY)])
    assert queue.work(stacks) == ([], 0) and not warm_start_run.has_checkpoint_of(1)


def test_diverged_warm_start_fails_only_its_own_runs(tmp_path: Path) -> None:
    results = Results(tmp_path)
    study = SMALL_STUDY._replace(
        cells=tuple(cell for cell in SMALL_STUDY.cells if cell.block == BLOCKS[0])
    )
    warm_start = jobs_of(study)[0].warm_start
    assert warm_start is not None
    diverged_run = RunDirectory(results.run_directory(Job(warm_start)))
    diverged_run.begin(warm_start, {"command": "x"})
    diverged_run.record_failure("training diverged in round 1")
    assert JobQueue(results).work(stack_jobs(jobs_of(study))) == ([], 0)
    diverged_jobs = [job for job in jobs_of(study) if "diverged" in results.by_seed(job)[job.seed]]
    assert [job.warm_start for job in diverged_jobs] == [warm_start, warm_start] and len(
        diverged_jobs
    ) < len(jobs_of(study))
    grid = tables.tables_of(study, results)[0]
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
def test_damaged_result_is_reported_and_others_continue(
    old: str, new: str, reference_results: Results, tmp_path: Path
) -> None:
    shutil.copytree(reference_results.path, tmp_path, dirs_exist_ok=True)
    first = jobs_of(SMALL_STUDY)[0]
    file = tmp_path / f"{first.name}.jsonl"
    head, rest = file.read_text().split("\n", 1)
    if old.startswith('{"settings'):
        text = f"{head}\n{rest}".replace(old, new, 1)
    else:
        text = f"{head}\n{rest.replace(old, new, 1)}"
    file.write_text(text)
    results = Results(tmp_path)
    with pytest.raises(RecordError, match="is damaged"):
        results.by_seed(first)
    outcome = JobQueue(results).work(stack_jobs(jobs_of(SMALL_STUDY)))
    assert len(outcome.failures) == 2  # one for each seed
    assert all("is damaged" in line for line in outcome.failures)
    assert job_planning.rounds_left(stack_jobs(jobs_of(SMALL_STUDY)), results) >= 0


def test_job_key_depends_only_on_what_changes_results() -> None:
    job = jobs_of(SMALL_STUDY)[-1]
    assert isinstance(job.experiment.algorithm, FedCOG)
    changed = dataclasses.replace(
        job.experiment, algorithm=dataclasses.replace(job.experiment.algorithm, lambda_dis=0.2)
    )
    assert job._replace(experiment=changed).key != job.key
    assert (
        job._replace(
            experiment=dataclasses.replace(job.experiment, seed=9, data_dir="x", device="cuda")
        ).key
        == job.key
    )
    assert job._replace(warm_start=None).key != job.key != job._replace(probe="pictures").key


def test_results_with_other_defaults_are_refused(
    reference_results: Results, tmp_path: Path
) -> None:
    job = jobs_of(SMALL_STUDY)[0]
    file = tmp_path / f"{job.name}.jsonl"
    file.parent.mkdir(parents=True)
    text = (reference_results.path / f"{job.name}.jsonl").read_text()
    file.write_text(text)
    assert Results(tmp_path).has(job)
    file.write_text(text.replace('"momentum":0.9', '"momentum":0.8'))
    with pytest.raises(RecordError, match="momentum had other defaults"):
        Results(tmp_path).has(job)
    file.write_text(text[: text.rfind('"provenance"')])  # as if killed while writing the last line
    assert list(Results(tmp_path).by_seed(job)) == [0]
    Results(tmp_path).add(
        jobs_of(SMALL_STUDY._replace(seeds=(1,)))[0],
        {"accuracy": [0.5], "clients": [], "provenance": {}},
    )
    assert list(Results(tmp_path).by_seed(job)) == [0, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
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
def test_reproduce_reports_faults_before_running(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "FILE").write_text("")
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "results").exists()


def test_tables_show_chosen_seeds_and_notes_are_checked(tmp_path: Path) -> None:
    arguments = [
        "reproduce",
        "lambda-dis",
        "--smoke",
        "--results",
        str(tmp_path),
        "--seeds",
        "7",
        "--quiet",
    ]
    assert main(arguments) == 0
    text = (tmp_path / "results.md").read_text(encoding="utf-8")
    assert (
        "Seed 7;" in text
        and "not run" not in text
        and "by `fedcog reproduce lambda-dis --smoke`" in text
    )
    (tmp_path / "notes.md").write_text(
        "See {{main | CIFAR-10, NIID-1 | FedAvg | last}}.\n\n## lambda-dis\n\nWords.\n"
    )
    assert main([*arguments, "--render"]) == 0
    assert "See not run." in (tmp_path / "results.md").read_text(encoding="utf-8")
    for notes, message in (
        ("## nobody\n", "there is no study nobody"),
        ("{{mian | a | b | last}}", "no study mian"),
    ):
        (tmp_path / "notes.md").write_text(notes)
        with pytest.raises(RecordError, match=message):
            (
                reproduction.parts_of([STUDIES["lambda-dis"]], Results(tmp_path)),
                reproduction.markdown([], Results(tmp_path)),
            )


def test_sigterm_ends_reproduce_with_code_130(tmp_path: Path) -> None:
    process = subprocess.Popen(
        steps_command(tmp_path), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    wait_for(lambda: any(tmp_path.glob("runs/*/*/seed-*/rounds.jsonl")))
    process.send_signal(signal.SIGTERM)
    stderr = process.communicate(timeout=60)[1]
    assert process.returncode == 130, stderr
    assert "left; continue with: fedcog reproduce steps" in stderr


def test_missing_dataset_is_reported_before_running(tmp_path: Path) -> None:
    from fedcog.cli.commands.studies import _check_datasets

    with pytest.raises(
        ConfigError, match=r"cifar100 is missing: fedcog data get cifar100 --data-dir .*\n?"
    ):
        _check_datasets({"cifar100", "digits"}, str(tmp_path))


def test_flwr_partitions_are_stacked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_planning, "stacks_seeds", lambda experiment: True)
    base = jobs_of(SMALL_STUDY)[0].experiment
    experiments = [
        base,
        dataclasses.replace(base, partition="flwr-shard", partition_args="shard_size=50", lr=0.5),
    ]
    assert [
        len(stack) for stack in stack_jobs([Job(experiment) for experiment in experiments])
    ] == [2]
    jobs = [Job(dataclasses.replace(base, seed=seed)) for seed in range(20)]
    assert [len(stack) for stack in stack_jobs(jobs)] == [16, 4]
