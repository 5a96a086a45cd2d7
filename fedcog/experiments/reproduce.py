"""A long list of experiments worked off: resumable, in time, on several machines, alike runs trained as one."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from fedcog.data import DataError, Dataset, PartitionError, sources
from fedcog.experiments.config import Experiment, name_of
from fedcog.experiments.paper import Cell, Study
from fedcog.experiments.prepare import find_device, stacked, surroundings
from fedcog.experiments.probes import measure
from fedcog.experiments.provenance import provenance
from fedcog.experiments.record import Busy, RecordError, RunDirectory
from fedcog.experiments.results import Job, Results, digest
from fedcog.experiments.run import Run, Watch, carry_out, finish, read
from fedcog.experiments.turns import Interrupted
from fedcog.federation.rounds import Diverged
from fedcog.models import ModelError
from fedcog.settings import ConfigError

RESERVE = 8.0
"""Seconds kept back from a time budget, for writing down where things stand."""


class Done(NamedTuple):
    """How much of a study is done."""

    name: str
    done: int
    total: int


class Ended(NamedTuple):
    """How working off a list ended: what failed and why, and what is left for another time."""

    failed: list[str]
    left: int


class Deadline:
    """A time to be done by. A round is not begun that may not end in time, nor a stack that has hardly any left."""

    def __init__(self, seconds: float) -> None:
        self._end, self._last, self._longest = time.monotonic() + seconds - RESERVE, time.monotonic(), 0.0

    def round(self) -> None:
        """A round has ended."""
        now = time.monotonic()
        self._longest, self._last = max(self._longest, now - self._last), now

    def begin(self) -> None:
        """Something else begins, that rounds are not to be measured by."""
        self._last, self._longest = time.monotonic(), 0.0

    def over(self) -> bool:
        """Would another round be too late?"""
        return time.monotonic() + 1.5 * self._longest > self._end


def job(cell: Cell, seed: int, data_dir: str = "") -> Job:
    """A cell's work for one seed; only for cells that can be run."""
    assert cell.experiment is not None
    one = dataclasses.replace(cell.experiment, seed=seed, data_dir=data_dir)
    return Job(one, cell.start.of(one) if cell.start else None, cell.probe)


def jobs(study: Study, datasets: Sequence[str] = (), data_dir: str = "") -> list[Job]:
    """All work of a study, each thing once; on some data sets only, if asked."""
    wanted = [cell for cell in study.cells if cell.experiment is not None]
    wanted = [cell for cell in wanted if not datasets or (cell.experiment and cell.experiment.dataset in datasets)]
    first = study.seeds[0]  # what is measured beside training is measured once
    found = [job(cell, seed, data_dir) for seed in study.seeds for cell in wanted if not cell.probe or seed == first]
    return list(dict.fromkeys(found))


def status(studies: Sequence[Study], results: Results, datasets: Sequence[str] = ()) -> list[Done]:
    """How much of each study is done, or of that part of it which runs on some data sets."""
    found = []
    for study in studies:
        all_ = jobs(study, datasets=datasets)
        found.append(Done(study.name, sum(results.has(one) for one in all_), len(all_)))
    return found


def stacks(all_: Sequence[Job]) -> list[list[Job]]:
    """Work that is done in one go: runs that differ in seed and partition alone, where that is faster; else each."""
    found: dict[object, list[Job]] = {}
    for one in all_:
        mates = _mates(one) if stacked(one.experiment) and not one.probe else one
        found.setdefault(mates, []).append(one)
    return list(found.values())


def _mates(one: Job) -> object:
    """What runs that train as one have in common: all but their seed, and who holds what."""

    def common(experiment: Experiment) -> Experiment:
        usual = Experiment(dataset=experiment.dataset)
        names = ("seed", "partition", "beta", "classes_per_client", "partition_seed", "clients", "participation")
        return dataclasses.replace(experiment, **{name: getattr(usual, name) for name in names})

    return common(one.experiment), one.start and common(one.start)


def rounds_left(all_: Sequence[list[Job]], results: Results) -> int:
    """How many rounds there are still to run, those of starts counted once."""
    left = [one for stack in all_ for one in stack if not _known(one, results)]
    starts = {Job(one.start) for one in left if one.start is not None}
    return sum(_ahead(one, results) for one in (*left, *starts))


def _ahead(one: Job, results: Results) -> int:
    """The rounds that a job has before it."""
    if one.probe:
        return 0
    before = one.start.rounds if one.start is not None else 0
    with contextlib.suppress(RecordError):  # what is damaged is told when its turn comes
        before = max(before, len(RunDirectory(results.run_directory(one)).lines()))
    return max(0, one.experiment.rounds - before)


def _known(one: Job, results: Results) -> bool:
    """Is it done, as far as can be told?"""
    try:
        return results.has(one)
    except RecordError:
        return False


def share(all_: Sequence[list[Job]], part: int, parts: int) -> list[list[Job]]:
    """This machine's part of the work, which keeps together what shares a start; parts are about as long."""
    families: dict[str, list[list[Job]]] = {}
    for stack in all_:
        families.setdefault(_family(stack), []).append(stack)
    loads, mine = [0] * parts, set[str]()
    for name, stacks_ in sorted(families.items(), key=lambda pair: (-_rounds(pair[1]), pair[0])):
        place = loads.index(min(loads))
        loads[place] += _rounds(stacks_)
        mine |= {name} if place == part else set()
    return [stack for stack in all_ if _family(stack) in mine]


def _rounds(all_: Sequence[list[Job]]) -> int:
    """The rounds of some work, none of which is done."""
    return sum(one.experiment.rounds for stack in all_ for one in stack)


def _family(stack: list[Job]) -> str:
    first = stack[0]
    begun = Job(first.start) if first.start is not None else first
    return str(_mates(begun._replace(probe=None)))


class Queue:
    """Work on its way into a folder of results."""

    def __init__(
        self,
        results: Results,
        *,
        budget: float | None = None,
        watch: Watch | None = None,
        stopping: Callable[[], bool] | None = None,
        say: Callable[[str], None] = lambda text: None,
        command: str | None = None,
    ) -> None:
        self.results, self.say, self.command = results, say, command
        self.deadline = Deadline(budget) if budget is not None else None
        self._watch, self._asked = watch, stopping
        self._shelf: tuple[str, Dataset] | None = None

    def work(self, all_: Sequence[list[Job]]) -> Ended:
        """Do what is not done. What another process is at is left to it, unless it stops; what fails stops nothing."""
        failed, waiting = list[str](), [stack for stack in all_ if not all(_known(one, self.results) for one in stack)]
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
                except (ConfigError, DataError, ModelError, PartitionError, RecordError) as error:
                    failed.append(f"{stack[0].name}: {error}")
                    self.say(f"failed: {failed[-1]}")
            if len(later) == len(waiting) and not self._stopping():
                time.sleep(1)  # somebody else is at all that is left
            waiting = later
        return Ended(failed, sum(not _known(one, self.results) for stack in waiting for one in stack))

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
        """A stack, and what it starts from."""
        left = self._left(stack)
        starts = list(dict.fromkeys(Job(one.start) for one in left if one.start is not None))
        for begun in stacks([one for one in starts if not self._finished(one)]):
            with self._claimed(begun):
                self._carry_out([one for one in begun if not self._finished(one)])
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

    def _diverged(self, one: Job) -> bool:
        return bool(RunDirectory(self.results.run_directory(one)).failure())

    def _finished(self, one: Job) -> bool:
        place = RunDirectory(self.results.run_directory(one))
        if not place.exists():
            return False
        if place.failure():  # it went as far as it goes
            return True
        checkpoint = place.load()
        return checkpoint is not None and checkpoint.round >= one.experiment.rounds

    def _carry_out(self, stack: list[Job]) -> list[Run]:
        """The runs of a stack, in step."""
        first = stack[0].experiment
        self.say(f"{name_of(first.algorithm)} on {first.dataset}, {_who(stack)}")
        if self.deadline:
            self.deadline.begin()
        data = self._loaded(first)
        with surroundings(first.threads, first.tf32):
            running = [
                carry_out(
                    one.experiment,
                    self.results.run_directory(one),
                    loaded=data,
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
            self.deadline.round()
        if self._watch:
            self._watch(experiment, line)


def _who(stack: list[Job]) -> str:
    parts = list(dict.fromkeys(one.experiment.partition_rule for one in stack))
    seeds = list(dict.fromkeys(str(one.seed) for one in stack))
    return f"{'; '.join(parts)}, seed{'s' if len(seeds) > 1 else ''} {' '.join(seeds)}"
