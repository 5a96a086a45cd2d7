"""A job queue: resumable, within a time budget, shared by processes, with stacked runs."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from fedcog.core.errors import Interrupted
from fedcog.core.settings import ConfigError
from fedcog.data import DataError, Dataset, PartitionError
from fedcog.federation.backend import Diverged
from fedcog.models.checks import ModelError
from fedcog.runs.config.composition import algorithm_name
from fedcog.runs.config.experiment import Experiment
from fedcog.runs.config.user_objects import UserObjects
from fedcog.runs.environment import find_device, torch_settings
from fedcog.runs.experiment_data import data_settings
from fedcog.runs.records.checkpoint import LARGE_CHECKPOINT_BYTES
from fedcog.runs.records.provenance import provenance
from fedcog.runs.records.recorded_run import Run, read
from fedcog.runs.records.run_directory import DirectoryBusy, RecordError, RunDirectory
from fedcog.runs.runner import Callback, Runner, RunOptions, run_all
from fedcog.runs.setup import load_data
from fedcog.runs.warm_start import MissingStart
from fedcog.studies.job_planning import is_done, is_prefix, stack_jobs
from fedcog.studies.probes import measure
from fedcog.studies.result_store import Job, Results, summarize_run

RESERVED_SECONDS = 8.0
"""Part of a time budget that is kept for writing checkpoints and results."""

JOB_ERRORS = (
    ConfigError,
    DataError,
    ModelError,
    PartitionError,
    RecordError,
    torch.OutOfMemoryError,
)
"""Errors that fail one stack; the queue continues with the next."""


class QueueOutcome(NamedTuple):
    """How a queue ended: the failures with their reasons, and the number of jobs left."""

    failures: list[str]
    num_left: int


class Deadline:
    """A deadline that also covers the next round.

    The next round is expected to take as long as the last one. The first round also compiles and
    loads, so it is a poor estimate.
    """

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds - RESERVED_SECONDS
        self.start_stack()

    def start_stack(self) -> None:
        """Forget the duration of earlier rounds: other runs start now."""
        self._stack_started = time.monotonic()
        self._round_ended = dict[object, float]()
        self._round_seconds = 0.0

    def round_finished(self, run: object) -> None:
        """Note the end of a round of one of the runs."""
        now = time.monotonic()
        self._round_seconds = now - self._round_ended.get(run, self._stack_started)
        self._round_ended[run] = now

    def is_over(self) -> bool:
        """Whether another round might end after the deadline."""
        return time.monotonic() + 1.5 * self._round_seconds > self._end


@dataclass(eq=False)
class JobQueue:
    """Runs jobs and stores their results.

    Args:
        results: The folder of results.
        budget: Time budget in seconds; None: no limit.
        callbacks: Called with the experiment and the record of every finished round.
        should_stop: The queue stops after the current round once this returns True.
        say: Called with every progress message.
        command: The command line, for the provenance of results.
        objects: Objects of the user, as in `fedcog.run`.
        planned: All jobs that are planned, now or later. The large checkpoint of a warm start is
            deleted once every planned job that needs it is done. None: keep all of them.
    """

    results: Results
    budget: float | None = None
    callbacks: Sequence[Callback] = ()
    should_stop: Callable[[], bool] | None = None
    say: Callable[[str], None] = lambda text: None
    command: str | None = None
    objects: UserObjects = field(default_factory=UserObjects)
    planned: Sequence[Job] | None = None
    _deadline: Deadline | None = field(init=False, default=None)
    _requested: list[Job] = field(init=False, default_factory=list)
    _loaded: tuple[tuple[int | str, ...], Dataset] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        """Start the clock."""
        if self.budget is not None:
            self._deadline = Deadline(self.budget)

    def work(self, stacks: Sequence[list[Job]]) -> QueueOutcome:
        """Run all jobs whose results are missing.

        Jobs that another process is running are skipped, and taken over if that process stops. A
        stack that fails does not stop the others.
        """
        failures = list[str]()
        waiting = list[list[Job]]()
        self._requested = [job for stack in stacks for job in stack]
        for stack in stacks:
            if all(is_done(job, self.results) for job in stack):
                self._drop_warm_starts(stack)  # a process killed earlier may not have done it
            else:
                waiting.append(stack)
        while waiting and not self._is_stopping():
            postponed = self._pass_over(waiting, failures)
            if len(postponed) == len(waiting) and not self._is_stopping():
                time.sleep(1)  # other processes are running all that is left
            waiting = postponed
        num_left = sum(not is_done(job, self.results) for stack in waiting for job in stack)
        return QueueOutcome(failures, num_left)

    def _pass_over(self, stacks: list[list[Job]], failures: list[str]) -> list[list[Job]]:
        """Try every stack once; return those that were busy or interrupted."""
        postponed = list[list[Job]]()
        for index, stack in enumerate(stacks):
            if self._is_stopping():
                return postponed + stacks[index:]
            try:
                with self._locked(stack):
                    self._run_stack(stack)
            except (DirectoryBusy, Interrupted):
                postponed.append(stack)
            except JOB_ERRORS as error:
                failures.append(f"{stack[0].name}: {error}")
                self.say(f"failed: {failures[-1]}")
        return postponed

    def _missing(self, stack: list[Job]) -> list[Job]:
        return [job for job in stack if not self.results.has(job)]

    def _is_stopping(self) -> bool:
        if self.should_stop is not None and self.should_stop():
            return True
        return self._deadline is not None and self._deadline.is_over()

    @contextlib.contextmanager
    def _locked(self, stack: list[Job]) -> Iterator[None]:
        """Lock the jobs of a stack; raise Busy if another process holds one of them."""
        locks = self.results.path / "runs" / ".claims"
        with contextlib.ExitStack() as exit_stack:
            for name in sorted({f"{job.key}-{job.seed}" for job in stack}):
                exit_stack.enter_context(RunDirectory(locks / name).locked())
            yield

    def _run_stack(self, stack: list[Job]) -> None:
        """Run a stack and its warm starts.

        Repeat if another process deletes a warm start before this one has read it.
        """
        while missing := self._missing(stack):
            self._run_warm_starts([Job(job.warm_start) for job in missing if job.warm_start])
            with contextlib.suppress(MissingStart):
                self._run_after_warm_starts(missing)
        self._drop_warm_starts(stack)

    def _run_warm_starts(self, jobs: Sequence[Job]) -> None:
        """Run the warm starts that are not finished."""
        unfinished = [job for job in dict.fromkeys(jobs) if not self._is_finished(job)]
        for stack in stack_jobs(unfinished):
            with self._locked(stack):
                # Another process may have finished some while this one waited for the lock.
                still_unfinished = [job for job in stack if not self._is_finished(job)]
                if still_unfinished:
                    self._train(still_unfinished)

    def _run_after_warm_starts(self, jobs: list[Job]) -> None:
        """Run jobs whose warm starts are finished, and store their results."""
        runnable = list[Job]()
        for job in jobs:
            if job.warm_start is not None and self._has_diverged(Job(job.warm_start)):
                diverged_run = read(self.results.run_directory(Job(job.warm_start)))
                self.results.add(job, summarize_run(diverged_run))
            else:
                runnable.append(job)
        for job in runnable:
            if job.probe:
                self._measure(job)
        to_train = [job for job in runnable if not job.probe]
        if not to_train:
            return
        for job, run in zip(to_train, self._train(to_train), strict=True):
            self.results.add(job, summarize_run(run))
            for other in self._requested:
                if is_prefix(other, job):
                    self._add_prefix(other, run)

    def _add_prefix(self, job: Job, run: Run) -> None:
        """Store the result of a shorter job, taken from the first rounds of a longer run."""
        rounds = job.experiment.rounds
        if len(run.lines) >= rounds:
            prefix = Run(run.path, job.experiment, run.lines[:rounds])
            self.results.add(job, summarize_run(prefix))

    def _drop_warm_starts(self, done: Sequence[Job]) -> None:
        """Delete the large checkpoints of warm starts that no planned job needs any more."""
        if self.planned is None:
            return
        for warm_start in dict.fromkeys(job.warm_start for job in done if job.warm_start):
            directory = RunDirectory(self.results.run_directory(Job(warm_start)))
            if not directory.has_checkpoint_of(LARGE_CHECKPOINT_BYTES):
                continue
            dependents = [job for job in self.planned if job.warm_start == warm_start]
            if dependents and all(is_done(job, self.results) for job in dependents):
                directory.delete_checkpoint()

    def _has_diverged(self, job: Job) -> bool:
        return bool(RunDirectory(self.results.run_directory(job)).failure())

    def _is_finished(self, job: Job) -> bool:
        """Whether the run directory of a job holds all rounds, or a run that diverged."""
        directory = RunDirectory(self.results.run_directory(job))
        if not directory.exists():
            return False
        return bool(directory.failure()) or directory.checkpoint_round() >= job.experiment.rounds

    def _train(self, stack: list[Job]) -> list[Run]:
        """Train the runs of a stack together."""
        first = stack[0].experiment
        self.say(f"{algorithm_name(first.algorithm)} on {first.dataset}, {_describe(stack)}")
        if self._deadline:
            self._deadline.start_stack()
        objects = self.objects._replace(preloaded=self._load(first))
        if first.algorithm.generator_config.kind != "custom":
            objects = objects._replace(generator=None)
        options = RunOptions(
            resume=True,
            callbacks=[self._round_finished],
            should_stop=self._is_stopping,
            command=self.command,
        )
        directories = [self.results.run_directory(job) for job in stack]
        with torch_settings(first), contextlib.ExitStack() as exits:
            runners = []
            for job, directory in zip(stack, directories, strict=True):
                start_from = self._warm_start_directory(job)
                runner = Runner(job.experiment, directory, objects, options, start_from=start_from)
                runners.append(exits.enter_context(runner))
            outcomes = run_all(runners)
        return [
            read(directory) if isinstance(outcome, Diverged) else outcome
            for directory, outcome in zip(directories, outcomes, strict=True)
        ]

    def _warm_start_directory(self, job: Job) -> Path | None:
        if job.warm_start is None:
            return None
        return self.results.run_directory(Job(job.warm_start))

    def _measure(self, job: Job) -> None:
        """Run a probe and store what it measures."""
        experiment = job.experiment
        assert job.probe is not None
        name = algorithm_name(experiment.algorithm)
        self.say(f"{job.probe}: {name} on {experiment.dataset}, seed {job.seed}")
        with torch_settings(experiment):
            dataset = self._load(experiment)
            found = measure(job.probe, experiment, self._warm_start_directory(job), dataset)
        origin = provenance(self.command, find_device(experiment.device))
        self.results.add(job, {"found": found, "provenance": origin})

    def _load(self, experiment: Experiment) -> Dataset:
        """Load the data set, once for consecutive jobs on the same one."""
        key = data_settings(experiment)
        if self._loaded is None or self._loaded[0] != key:
            self._loaded = (key, load_data(experiment, self.objects))
        return self._loaded[1]

    def _round_finished(self, experiment: Experiment, line: dict[str, object]) -> None:
        if self._deadline:
            self._deadline.round_finished(experiment)
        for callback in self.callbacks:
            callback(experiment, line)


def _describe(stack: list[Job]) -> str:
    """Name the partitions and seeds of a stack."""
    partitions = list(dict.fromkeys(job.experiment.partition_rule for job in stack))
    seeds = list(dict.fromkeys(str(job.seed) for job in stack))
    noun = "seeds" if len(seeds) > 1 else "seed"
    return f"{'; '.join(partitions)}, {noun} {' '.join(seeds)}"
