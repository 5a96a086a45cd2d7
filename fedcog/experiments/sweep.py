"""Methods tuned alike: as many trials for each, judged on validation examples; then the chosen ones on the test set.

OUT/sweep.json says what is tuned and how. All runs, of trials and of chosen settings, are jobs of a folder of results,
so that a sweep may be stopped, killed, started again and shared by processes as any queue may.
"""

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from fedcog import settings
from fedcog.algorithms import ALGORITHMS
from fedcog.data import Dataset
from fedcog.experiments import plan
from fedcog.experiments import search as searching
from fedcog.experiments import space as spaces
from fedcog.experiments.config import Experiment, layers, name_of
from fedcog.experiments.own import known_by, own_code
from fedcog.experiments.record import RecordError, RunDirectory, write_file
from fedcog.experiments.reproduce import Queue
from fedcog.experiments.results import Job, Results
from fedcog.experiments.run import Run, Watch, read, with_own
from fedcog.experiments.search import Search
from fedcog.experiments.space import Point, Space
from fedcog.experiments.summary import Group
from fedcog.experiments.turns import Interrupted
from fedcog.settings import ConfigError
from fedcog.task import MEASURES

SHARE = 0.2
"""Of each client's training examples, what trials hold out for validation unless told otherwise."""
MOST = 1000
"""Trials of a method, at most."""
SEED = settings.settings(Experiment)["seed"]
WORST = 0.0
"""What a trial counts as that diverges with any of its seeds: no score is lower."""


class Trial(NamedTuple):
    """Settings that were tried, and what came of them on the validation examples: mean over seeds, after all rounds."""

    number: int
    point: Point
    experiment: Experiment
    value: float
    rounds: int
    diverged: bool


class Tuned(NamedTuple):
    """A method with all its trials, the one that is chosen, and that one's runs on the test set."""

    experiment: Experiment
    space: Space
    trials: list[Trial]
    chosen: Trial
    runs: list[Run]

    @property
    def name(self) -> str:
        """The method's."""
        return name_of(self.experiment.algorithm)

    @property
    def group(self) -> Group:
        """The runs of the chosen settings together."""
        return Group(self.name, self.runs)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is tuned and how: one experiment a method, what may be chosen, and how many trials each gets."""

    experiments: tuple[Experiment, ...]
    space: Space
    search: Search = "random"
    trials: int = 8
    seed: int = 0
    trial_seeds: tuple[int, ...] = (100,)
    seeds: tuple[int, ...] = (0, 1, 2)

    def __post_init__(self) -> None:
        """Refuse what could not be fair, or not work, all faults at once."""
        faults = searching.missing(self.search)
        for name, seeds in {"seed": (self.seed,), "trial_seeds": self.trial_seeds, "seeds": self.seeds}.items():
            strange = [told for seed in seeds if (told := settings.fault(SEED, seed))]
            faults += [f"{name} {told}." for told in strange[:1]]
        names = [name_of(one.algorithm) for one in self.experiments]
        if not names or len(set(names)) < len(names):
            faults.append("a sweep needs algorithms, each once, such as: --algorithms fedavg fedprox fedcog.")
        if type(self.trials) is not int or not 1 <= self.trials <= MOST:
            faults.append(f"trials needs a whole number from 1 to {MOST}, not {self.trials}.")
        if not self.trial_seeds or not self.seeds:
            faults.append("a sweep needs at least one seed for trials and one for what is chosen.")
        if not faults:
            faults = spaces.check(self.space, self.experiments, self.trials, self.search == "grid")
        if faults:
            raise ConfigError(faults)
        for experiment in self.experiments:  # what cannot be made is told now, and not in the last trial
            own = self.space_of(experiment)
            if (known := self.ahead(experiment)) is None:  # there must be points enough for any search
                known = [*spaces.corners(own, self.seed), *itertools.islice(spaces.points(own, self.seed), self.trials)]
            for point in known:
                self.trial(experiment, point)

    def space_of(self, experiment: Experiment) -> Space:
        """What may be chosen for a method."""
        return spaces.of_method(self.space, experiment)

    def ahead(self, experiment: Experiment) -> list[Point] | None:
        """All points that a method tries, where they are known beforehand."""
        return searching.ahead(self.search, self.space_of(experiment), self.trials, self.seed)

    def trial(self, experiment: Experiment, point: Point) -> Experiment:
        """An experiment that tries a point: it never looks at the test set."""
        blind = dataclasses.replace(experiment, evaluate_local=False, evaluate_test=False, seed=0)
        return spaces.settled(blind, point)

    def final(self, experiment: Experiment, point: Point) -> Experiment:
        """An experiment with the point that was chosen: it trains on all examples, and is tried on the test set."""
        return spaces.settled(dataclasses.replace(experiment, validation=0.0, evaluate_test=True, seed=0), point)

    @property
    def rounds(self) -> int:
        """The rounds of all runs together."""
        each = self.trials * len(self.trial_seeds) + len(self.seeds)
        return each * sum(one.rounds for one in self.experiments)

    def told(self) -> dict[str, Any]:
        """All that decides which trials there are, to be written down."""
        return {
            "experiments": [{"settings": one.telling(), "rounds": one.rounds} for one in self.experiments],
            "space": spaces.told(self.space),
            "search": self.search,
            "trials": self.trials,
            "seed": self.seed,
            "trial_seeds": list(self.trial_seeds),
        }


class Sweep:
    """A plan on its way, in the folder `out`."""

    def __init__(self, what: Plan, out: str | Path, about: str = "") -> None:
        self.plan, self.results = what, Results(out)
        self._about = about  # your own data, networks and algorithms, which no setting tells apart
        self._memory: dict[tuple[str, int], Point] = {}

    def begin(self) -> None:
        """Write down what is tuned; a folder that holds another sweep is refused, or trials would go uncounted."""
        file, mine = self.results.path / "sweep.json", self.plan.told() | {"about": self._about}
        mine = json.loads(json.dumps(mine))
        try:
            there = json.loads(file.read_text(encoding="utf-8"))
            if not isinstance(there, dict):
                raise ValueError("no table")
        except FileNotFoundError:
            write_file(file, json.dumps(mine, indent=1).encode() + b"\n")
            return
        except (OSError, ValueError, RecursionError) as error:
            raise RecordError(f"{file} is damaged ({error}): choose another --out.") from error
        if differ := [name for name in mine if mine[name] != there.get(name)]:
            names = [name if name != "about" else "data, networks or algorithms of your own" for name in differ]
            raise RecordError(
                f"{self.results.path} holds another sweep (it differs in {', '.join(names)}), whose trials would go "
                "uncounted: choose another --out."
            )

    def next_trials(self) -> list[tuple[Experiment, Point]]:
        """Every method with each point that can be tried now, those included that were tried."""
        return [(one, point) for one in self.plan.experiments for point in self._points(one)]

    def _points(self, experiment: Experiment) -> list[Point]:
        """What a method has tried, and what it can try now."""
        points = self.plan.ahead(experiment)
        if points is not None:
            return points
        done = self._replayed(experiment)
        more = [self._proposed(experiment, done)] if len(done) < self.plan.trials else []
        return [trial.point for trial in done] + more

    def _proposed(self, experiment: Experiment, done: Sequence[Trial]) -> Point:
        """What is tried after so many trials, which are the same whenever this is asked."""
        key = name_of(experiment.algorithm), len(done)
        if key not in self._memory:
            known = [(trial.point, trial.value) for trial in done]
            own = self.plan.space_of(experiment)
            self._memory[key] = searching.after(own, known, self.plan.trials, self.plan.seed)
        return self._memory[key]

    def _replayed(self, experiment: Experiment) -> list[Trial]:
        """A method's trials as far as they are done, proposed again one after another."""
        done = list[Trial]()
        while len(done) < self.plan.trials:
            point = self._proposed(experiment, done)
            trial = self._tried(experiment, point, len(done) + 1)
            if trial is None:
                break
            done.append(trial)
        return done

    def jobs(self, trials: Sequence[tuple[Experiment, Point]]) -> list[Job]:
        """The work of some trials."""
        return [self._job(self.plan.trial(*one), seed) for one in trials for seed in self.plan.trial_seeds]

    def final_jobs(self) -> list[Job]:
        """The work of what was chosen, once every trial is done."""
        chosen = [(one, _best(self.trials(one)).point) for one in self.plan.experiments]
        return [self._job(self.plan.final(*one), seed) for one in chosen for seed in self.plan.seeds]

    def _job(self, experiment: Experiment, seed: int) -> Job:
        return Job(dataclasses.replace(experiment, seed=seed))

    def trials(self, experiment: Experiment) -> list[Trial]:
        """A method's trials that are done, in their order."""
        points = self.plan.ahead(experiment)
        if points is None:
            return self._replayed(experiment)
        found = (self._tried(experiment, point, number) for number, point in enumerate(points, 1))
        return [trial for trial in found if trial is not None]

    def _tried(self, experiment: Experiment, point: Point, number: int) -> Trial | None:
        """What came of a trial, if it is done."""
        one = self.plan.trial(experiment, point)
        jobs = [self._job(one, seed) for seed in self.plan.trial_seeds]
        if not all(self.results.has(job) for job in jobs):
            return None
        lines = [self.results.of(job)[job.seed] for job in jobs]
        diverged = any("diverged" in line for line in lines)
        value = (
            WORST if diverged else sum(_judged(line, job) for line, job in zip(lines, jobs, strict=True)) / len(jobs)
        )
        return Trial(number, point, one, value, min(len(line["loss"]) for line in lines), diverged)

    def done(self) -> list[Tuned]:
        """Every method with all its trials, its choice and that one's runs; all of them must be done."""
        found = []
        for experiment in self.plan.experiments:
            trials = self.trials(experiment)
            chosen = _best(trials)
            final = self.plan.final(experiment, chosen.point)
            runs = [self._ran(self._job(final, seed)) for seed in self.plan.seeds]
            found.append(Tuned(experiment, self.plan.space_of(experiment), trials, chosen, runs))
        return found

    def _ran(self, job: Job) -> Run:
        """A run that is done, from its own folder."""
        place = self.results.run_directory(job)
        if not RunDirectory(place).exists():
            raise RecordError(
                f"the run in {place} is gone, but not what came of it: put it back, or delete "
                f"{self.results.path / job.name}.jsonl and have it run again."
            )
        return read(place)

    def left(self) -> int:
        """How many rounds there are still to run."""
        found, per = 0, len(self.plan.trial_seeds)
        waiting = False
        for experiment in self.plan.experiments:
            points = self._points(experiment)
            jobs = self.jobs([(experiment, point) for point in points])
            found += plan.rounds_left([jobs], self.results)
            found += (self.plan.trials - len(points)) * per * experiment.rounds
            waiting |= len(self.trials(experiment)) < self.plan.trials
        if waiting:
            return found + len(self.plan.seeds) * sum(one.rounds for one in self.plan.experiments)
        return found + plan.rounds_left([self.final_jobs()], self.results)

    def work(self, queue: Queue) -> None:
        """Carry out what is not done: trials first, and then what was chosen."""
        while any(len(self.trials(one)) < self.plan.trials for one in self.plan.experiments):
            self._work(queue, self.jobs(self.next_trials()))
        self._work(queue, self.final_jobs())

    def _work(self, queue: Queue, jobs: Sequence[Job]) -> None:
        ended = queue.work(plan.stacks(jobs))
        if ended.failed:
            raise ConfigError(ended.failed)
        if ended.left:
            raise Interrupted(f"stopped, and {ended.left} of the {len(jobs)} runs at hand are left")


def sweep(
    experiments: Sequence[Experiment],
    space: Mapping[str, Any],
    out: str | Path,
    *,
    search: Search = "random",
    trials: int = 8,
    seed: int = 0,
    trial_seeds: Sequence[int] = (100,),
    seeds: Sequence[int] = (0, 1, 2),
    data: Dataset | None = None,
    model: nn.Module | None = None,
    generator: nn.Module | None = None,
    watch: Watch | None = None,
    stopping: Callable[[], bool] | None = None,
    command: str | None = None,
) -> list[Tuned]:
    """Every experiment's method tuned by as many trials, and what is chosen tried on the test set; with a report.

    `space` says what may be chosen, as an experiment's settings with a list or a range in place of a value:
    `{"lr": {"low": 0.001, "high": 0.1, "log": True}, "fedprox": {"mu": [0.01, 0.1]}}`. Trials run with `trial_seeds`
    and are judged after their last round by the examples that clients hold out (a fifth, where experiments say nothing
    of validation); they never look at the test set. The best settings of each method then train on all examples, with
    `seeds`. A sweep may be stopped and started again: what is done in OUT is only read.
    """
    how: dict[str, Any] = {"search": search, "trials": trials, "seed": seed}
    how |= {"trial_seeds": trial_seeds, "seeds": seeds, "data": data, "model": model}
    own: dict[str, Any] = {"data": data, "model": model, "generator": generator}
    told: dict[str, Any] = {"watch": watch, "stopping": stopping, "command": command}
    return carry_out(planned(experiments, space, **how), out, **own, **told)


def carry_out(
    what: Plan,
    out: str | Path,
    *,
    data: Dataset | None = None,
    model: nn.Module | None = None,
    generator: nn.Module | None = None,
    **told: Any,
) -> list[Tuned]:
    """A plan carried out in the folder `out`, or gone on with, and its report; `told` is as in `sweep`."""
    own: dict[str, Any] = {"data": data, "model": model, "generator": generator}
    about = [data.fingerprint if data is not None else "", *(known_by(one) for one in (model, generator))]
    about += [own_code([type(layer) for _, layer in layers(one.algorithm)]) for one in what.experiments]
    running = Sweep(what, out, hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16] if any(about) else "")
    running.begin()
    running.work(Queue(running.results, **own, **told))
    found = running.done()
    from fedcog.experiments.report import sweeping  # draws: loads matplotlib

    sweeping.write(what, found, Path(out))
    return found


def planned(
    experiments: Sequence[Experiment],
    space: Mapping[str, Any],
    *,
    data: Dataset | None = None,
    model: nn.Module | None = None,
    **how: Any,
) -> Plan:
    """The plan of a sweep; what cannot work is told at once. `how` is as in `sweep`."""
    known = ALGORITHMS | {name: type(layer) for one in experiments for name, layer in layers(one.algorithm)}
    ready = [
        with_own(dataclasses.replace(one, validation=one.validation or SHARE, seed=0), data, model)
        for one in experiments
    ]
    how |= {name: tuple(dict.fromkeys(how[name])) for name in ("trial_seeds", "seeds") if name in how}
    return Plan(tuple(ready), spaces.read(space, known), **how)


def _best(trials: Sequence[Trial]) -> Trial:
    """The trial with the highest value; of equals the first, and one that diverged only if all did."""
    return max(trials, key=lambda trial: (not trial.diverged, trial.value, -trial.number))


def _judged(line: dict[str, Any], job: Job) -> float:
    """A run's score on the validation examples after its last round."""
    for name in MEASURES:
        values = line.get(f"validation_{name}") or [None]
        if values[-1] is not None:
            return float(values[-1])
    raise RecordError(f"{job.name}, seed {job.seed}: no score on validation examples is kept of it.")
