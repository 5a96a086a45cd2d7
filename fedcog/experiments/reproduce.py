"""A long list of jobs worked off: resumable, in time, by several processes, alike runs trained as one."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from fedcog.data import DataError, Dataset, PartitionError, sources
from fedcog.experiments.config import Experiment, generating, name_of
from fedcog.experiments.plan import known, part_of, stacks
from fedcog.experiments.prepare import find_device, surroundings
from fedcog.experiments.probes import measure
from fedcog.experiments.provenance import provenance
from fedcog.experiments.record import HEAVY, Busy, RecordError, RunDirectory
from fedcog.experiments.results import Job, Results, digest
from fedcog.experiments.run import Run, Watch, carry_out, finish, read
from fedcog.experiments.turns import Interrupted
from fedcog.experiments.warm import NoStart
from fedcog.federation.rounds import Diverged
from fedcog.fitness import ModelError
from fedcog.settings import ConfigError

RESERVE = 8.0
"""Seconds kept back from a time budget, for writing down where things stand."""

FAULTS = ConfigError, DataError, ModelError, PartitionError, RecordError, torch.OutOfMemoryError
"""What one of many jobs may fail with, and the others go on."""


class Ended(NamedTuple):
    """How working off a list ended: what failed and why, and what is left for another time."""

    failed: list[str]
    left: int


class Deadline:
    """A time to be done by. A round is not begun that may not end in time, nor a stack that has hardly any left.

    A round is expected to take what the last one took, for the first has much to prepare.
    """

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds - RESERVE
        self.begin()

    def begin(self) -> None:
        """Something else begins, that rounds are not to be measured by."""
        self._begun, self._ended, self._length = time.monotonic(), dict[object, float](), 0.0

    def round(self, run: object) -> None:
        """A round of one of the runs has ended."""
        now = time.monotonic()
        self._length, self._ended[run] = now - self._ended.get(run, self._begun), now

    def over(self) -> bool:
        """Would another round be too late?"""
        return time.monotonic() + 1.5 * self._length > self._end


class Queue:
    """Work on its way into a folder of results; `data`, `model` and `generator` are your own, as in `run`.

    A start whose checkpoint is heavy goes when all is done that is `planned` from it, now or later.
    """

    def __init__(
        self,
        results: Results,
        *,
        budget: float | None = None,
        watch: Watch | None = None,
        stopping: Callable[[], bool] | None = None,
        say: Callable[[str], None] = lambda text: None,
        command: str | None = None,
        data: Dataset | None = None,
        model: nn.Module | None = None,
        generator: nn.Module | None = None,
        planned: Sequence[Job] | None = None,
    ) -> None:
        self._planned, self._wanted = planned, list[Job]()
        self.results, self.say, self.command = results, say, command
        self._own, self._generator = {"data": data, "model": model}, generator
        self.deadline = Deadline(budget) if budget is not None else None
        self._watch, self._asked = watch, stopping
        self._shelf: tuple[str, Dataset] | None = None

    def work(self, all_: Sequence[list[Job]]) -> Ended:
        """Do what is not done. What another process is at is left to it, unless it stops; what fails stops nothing."""
        failed, waiting = list[str](), list[list[Job]]()
        self._wanted = [one for stack in all_ for one in stack]
        for stack in all_:
            if all(known(one, self.results) for one in stack):
                self._let_go(stack)  # who was killed may have had no time for it
            else:
                waiting.append(stack)
        while waiting and not self._stopping():
            later = []
            for place, stack in enumerate(waiting):
                if self._stopping():
                    later += waiting[place:]
                    break
                try:
                    with self._claimed(stack):
                        self._do(stack)
                except (Busy, Interrupted):
                    later.append(stack)
                except FAULTS as error:
                    failed.append(f"{stack[0].name}: {error}")
                    self.say(f"failed: {failed[-1]}")
            if len(later) == len(waiting) and not self._stopping():
                time.sleep(1)  # somebody else is at all that is left
            waiting = later
        return Ended(failed, sum(not known(one, self.results) for stack in waiting for one in stack))

    def _left(self, stack: list[Job]) -> list[Job]:
        return [one for one in stack if not self.results.has(one)]

    def _stopping(self) -> bool:
        asked = self._asked is not None and self._asked()
        return asked or (self.deadline is not None and self.deadline.over())

    @contextlib.contextmanager
    def _claimed(self, stack: list[Job]) -> Iterator[None]:
        """These jobs for ourselves, whatever becomes of us; Busy if somebody else has one of them."""
        with contextlib.ExitStack() as held:
            for name in sorted({f"{one.key}-{one.seed}" for one in stack}):
                held.enter_context(RunDirectory(self.results.path / "runs" / ".claims" / name).locked())
            yield

    def _do(self, stack: list[Job]) -> None:
        """A stack, and what it starts from; once more, if another process lets a start go before it is read."""
        while left := self._left(stack):
            self._start([Job(one.start) for one in left if one.start is not None])
            with contextlib.suppress(NoStart):
                self._go_on(left)
        self._let_go(stack)

    def _start(self, starts: Sequence[Job]) -> None:
        """What others start from, as far as it is not done."""
        for begun in stacks([one for one in dict.fromkeys(starts) if not self._finished(one)]):
            with self._claimed(begun):
                if missing := [one for one in begun if not self._finished(one)]:  # somebody may have been quicker
                    self._carry_out(missing)

    def _go_on(self, left: list[Job]) -> None:
        """What is not done of a stack, once its starts are."""
        lost = [one for one in left if one.start is not None and self._diverged(Job(one.start))]
        for one in lost:
            assert one.start is not None
            self.results.add(one, digest(read(self.results.run_directory(Job(one.start)))))
        left = [one for one in left if one not in lost]
        for one in (one for one in left if one.probe):
            self._measure(one)
        runs = [one for one in left if not one.probe]
        for one, run in zip(runs, self._carry_out(runs) if runs else [], strict=True):
            self.results.add(one, digest(run))
            for other in (other for other in self._wanted if part_of(other, one)):
                self._cut(other, run)

    def _cut(self, one: Job, run: Run) -> None:
        """What came of a job that a longer run went through on its way, unless it did not get so far."""
        if len(run.lines) >= one.experiment.rounds:
            self.results.add(one, digest(Run(run.path, one.experiment, run.lines[: one.experiment.rounds])))

    def _let_go(self, done: Sequence[Job]) -> None:
        """Do without the heavy checkpoints of starts that nothing planned needs any more."""
        if self._planned is None:
            return
        for start in dict.fromkeys(one.start for one in done if one.start is not None):
            place = RunDirectory(self.results.run_directory(Job(start)))
            needing = [one for one in self._planned if one.start == start] if place.weighs(HEAVY) else []
            if needing and all(known(one, self.results) for one in needing):
                place.lighten()

    def _diverged(self, one: Job) -> bool:
        return bool(RunDirectory(self.results.run_directory(one)).failure())

    def _finished(self, one: Job) -> bool:
        place = RunDirectory(self.results.run_directory(one))
        if not place.exists():
            return False
        return bool(place.failure()) or place.rounds() >= one.experiment.rounds  # or it went as far as it goes

    def _carry_out(self, stack: list[Job]) -> list[Run]:
        """The runs of a stack, in step."""
        first = stack[0].experiment
        self.say(f"{name_of(first.algorithm)} on {first.dataset}, {_who(stack)}")
        if self.deadline:
            self.deadline.begin()
        own: dict[str, Any] = {"loaded": self._loaded(first)} if self._own["data"] is None else {}
        own |= self._own
        if generating(first.algorithm).generator == "custom":
            own |= {"generator": self._generator}
        with surroundings(first.threads, first.tf32):
            running = [
                carry_out(
                    one.experiment,
                    self.results.run_directory(one),
                    **own,
                    resume=True,
                    watch=self._told,
                    stopping=self._stopping,
                    command=self.command,
                    after=self.results.run_directory(Job(one.start)) if one.start is not None else None,
                )
                for one in stack
            ]
            ended = finish(first, running)
        places = [self.results.run_directory(one) for one in stack]
        return [read(place) if isinstance(run, Diverged) else run for place, run in zip(places, ended, strict=True)]

    def _measure(self, one: Job) -> None:
        self.say(f"{one.probe}: {name_of(one.experiment.algorithm)} on {one.experiment.dataset}, seed {one.seed}")
        after: Path | None = self.results.run_directory(Job(one.start)) if one.start is not None else None
        with surroundings(one.experiment.threads, one.experiment.tf32):
            assert one.probe is not None
            found = measure(one.probe, one.experiment, after, self._loaded(one.experiment))
        told = provenance(self.command, find_device(one.experiment.device))
        self.results.add(one, {"found": found, "provenance": told})

    def _loaded(self, experiment: Experiment) -> Dataset:
        """The data set, read once for runs that follow each other."""
        if self._shelf is None or self._shelf[0] != experiment.dataset:
            self._shelf = experiment.dataset, sources.load(experiment.dataset, experiment.data_dir or None)
        return self._shelf[1]

    def _told(self, experiment: Experiment, line: dict[str, object]) -> None:
        if self.deadline:
            self.deadline.round(experiment)
        if self._watch:
            self._watch(experiment, line)


def _who(stack: list[Job]) -> str:
    parts = list(dict.fromkeys(one.experiment.partition_rule for one in stack))
    seeds = list(dict.fromkeys(str(one.seed) for one in stack))
    return f"{'; '.join(parts)}, seed{'s' if len(seeds) > 1 else ''} {' '.join(seeds)}"
