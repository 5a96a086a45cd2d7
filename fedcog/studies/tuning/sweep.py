"""Hyperparameter sweeps: equal budgets, choice by validation examples, final runs on the test set.

OUT/sweep.json describes the sweep. All runs, of trials and of chosen settings, are jobs in a
folder of results. A sweep can therefore be stopped, killed, resumed, and shared by processes.
"""

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, Unpack

from fedcog.algorithms import ALGORITHMS
from fedcog.core import settings
from fedcog.core.errors import Interrupted
from fedcog.core.settings import ConfigError
from fedcog.core.tasks import METRIC_LABELS
from fedcog.data import DATASETS, Dataset
from fedcog.models.initialization import Network
from fedcog.runs.config.composition import algorithm_name, named_layers
from fedcog.runs.config.experiment import Experiment
from fedcog.runs.config.object_names import object_names
from fedcog.runs.config.user_code import describe_network, user_source
from fedcog.runs.config.user_objects import UserObjects, check_seeds
from fedcog.runs.experiment_data import (
    adapt_dataset,
    data_settings,
    resolve_before_loading,
    resolve_clients,
)
from fedcog.runs.records.recorded_run import Run, read
from fedcog.runs.records.run_directory import RecordError, RunDirectory, write_file
from fedcog.runs.records.summary import Group
from fedcog.runs.runner import Callback, with_user_objects
from fedcog.runs.setup import load_data
from fedcog.studies import job_planning
from fedcog.studies.job_queue import JobQueue
from fedcog.studies.result_store import Job, Result, Results
from fedcog.studies.tuning.search import Search, next_point, planned_points, search_faults
from fedcog.studies.tuning.search_space import (
    Point,
    SearchSpace,
    corner_points,
    edge_sentences,
    points,
    read_space,
    space_faults,
    space_of,
    to_json,
    with_point,
)

DEFAULT_VALIDATION = 0.2
"""Share of each client's training examples that trials hold out, unless the experiment says so."""
MAX_TRIALS = 1000
"""Maximal number of trials per algorithm."""
DIVERGED_SCORE = 0.0
"""Score of a trial that diverges with any of its seeds; no score is lower."""
SEED_SETTING = settings.settings(Experiment)["seed"]


class Trial(NamedTuple):
    """A point that was tried, and its score on the validation examples."""

    number: int  # from 1
    point: Point
    experiment: Experiment
    score: float  # mean over seeds after the last round
    rounds: int
    diverged: bool


class Tuned(NamedTuple):
    """An algorithm with all its trials, the chosen one, and the final runs with its settings.

    Attributes:
        experiment: The experiment before tuning.
        space: The settings that were tuned, and their values.
        trials: All trials, in the order in which they ran.
        chosen: The trial with the best validation score.
        runs: The final runs with the chosen settings, one per seed.
    """

    experiment: Experiment
    space: SearchSpace
    trials: list[Trial]
    chosen: Trial
    runs: list[Run]

    @property
    def name(self) -> str:
        """Name of the algorithm."""
        return algorithm_name(self.experiment.algorithm)

    @property
    def group(self) -> Group:
        """The final runs as a group."""
        return Group(self.name, self.runs)

    @property
    def edges(self) -> list[str]:
        """Which chosen values lie at an edge of what was searched, with a remedy; often empty.

        The best value may then lie outside. If all trials score alike, none is best.
        """
        is_tied = len(self.trials) > 1 and len({trial.score for trial in self.trials}) == 1
        if self.chosen.diverged or is_tied:
            return []
        return edge_sentences(self.experiment, self.space, self.chosen.point)


@dataclasses.dataclass(frozen=True)
class SweepPlan:
    """What is tuned and how: one experiment per algorithm, the space, and the budget.

    Raises:
        ConfigError: All faults at once; among them everything that could fail in a later trial.
    """

    experiments: tuple[Experiment, ...]
    space: SearchSpace
    search: Search = "random"
    trials: int = 8
    seed: int = 0
    trial_seeds: tuple[int, ...] = (100,)
    seeds: tuple[int, ...] = (0, 1, 2)

    def __post_init__(self) -> None:
        """Refuse a plan that is unfair or cannot work."""
        faults = self._faults()
        if not faults:
            is_grid = self.search == "grid"
            faults = space_faults(self.space, self.experiments, self.trials, lists_only=is_grid)
        if faults:
            raise ConfigError(faults)
        for experiment in self.experiments:
            trial_points = self.planned_points(experiment)
            if trial_points is None:
                space = self.space_of(experiment)
                random_points = itertools.islice(points(space, self.seed), self.trials)
                trial_points = [*corner_points(space, self.seed), *random_points]
            for point in trial_points:
                self.trial_experiment(experiment, point)  # raises if the settings do not fit

    def _faults(self) -> list[str]:
        """Faults of everything but the space."""
        faults = search_faults(self.search)
        seeds_by_name = {
            "seed": (self.seed,),
            "trial_seeds": self.trial_seeds,
            "seeds": self.seeds,
        }
        for name, seeds in seeds_by_name.items():
            seed_faults = [settings.fault(SEED_SETTING, seed) for seed in seeds]
            faults += [f"{name} {fault}." for fault in seed_faults if fault][:1]
        names = [algorithm_name(experiment.algorithm) for experiment in self.experiments]
        if not names or len(set(names)) < len(names):
            faults.append(
                "a sweep needs algorithms, each once, such as: --algorithms fedavg fedprox fedcog."
            )
        if type(self.trials) is not int or not 1 <= self.trials <= MAX_TRIALS:
            faults.append(f"trials needs an integer from 1 to {MAX_TRIALS}, not {self.trials}.")
        if not self.trial_seeds or not self.seeds:
            faults.append("a sweep needs at least one seed for trials and one for final runs.")
        return faults

    def space_of(self, experiment: Experiment) -> SearchSpace:
        """Return the search space of one algorithm."""
        return space_of(self.space, experiment)

    def planned_points(self, experiment: Experiment) -> list[Point] | None:
        """Return all points of one algorithm, or None if they depend on results."""
        return planned_points(self.search, self.space_of(experiment), self.trials, self.seed)

    def trial_experiment(self, experiment: Experiment, point: Point) -> Experiment:
        """Return the experiment of a trial, which never uses the test set.

        Args:
            experiment: The experiment of the algorithm.
            point: The settings to try.

        Returns:
            The experiment, with seed 0.
        """
        without_test = dataclasses.replace(
            experiment, evaluate_local=False, evaluate_test=False, seed=0
        )
        return with_point(without_test, point)

    def final_experiment(self, experiment: Experiment, point: Point) -> Experiment:
        """Return the experiment of a final run: all training examples, and the test set.

        Args:
            experiment: The experiment of the algorithm.
            point: The chosen settings.

        Returns:
            The experiment, with seed 0.
        """
        final = dataclasses.replace(experiment, validation=0.0, evaluate_test=True, seed=0)
        return with_point(final, point)

    @property
    def total_rounds(self) -> int:
        """The number of rounds of all runs together."""
        num_runs = self.trials * len(self.trial_seeds) + len(self.seeds)
        return num_runs * sum(experiment.rounds for experiment in self.experiments)

    def to_json(self) -> dict[str, Any]:
        """Return everything that decides which trials there are, as sweep.json stores it."""
        return {
            "experiments": [
                {"settings": experiment.identifying_settings(), "rounds": experiment.rounds}
                for experiment in self.experiments
            ],
            "space": to_json(self.space),
            "search": self.search,
            "trials": self.trials,
            "seed": self.seed,
            "trial_seeds": list(self.trial_seeds),
        }


class Sweep:
    """A plan in progress.

    Args:
        plan: The plan.
        out: The folder of results.
        user_objects_hash: Identifies the user's own data, networks and algorithms, which the
            settings do not describe; "" without any.
    """

    def __init__(self, plan: SweepPlan, out: str | Path, user_objects_hash: str = "") -> None:
        self.plan = plan
        self.results = Results(out)
        self._user_objects_hash = user_objects_hash
        self._proposals: dict[tuple[str, int], Point] = {}

    def write_plan(self) -> None:
        """Write sweep.json.

        Raises:
            RecordError: The folder holds another sweep, or its sweep.json is damaged.
        """
        file = self.results.path / "sweep.json"
        plan = self.plan.to_json() | {"about": self._user_objects_hash}
        plan = json.loads(json.dumps(plan))
        try:
            stored = json.loads(file.read_text(encoding="utf-8"))
            if not isinstance(stored, dict):
                raise ValueError("it is not a table")
        except FileNotFoundError:
            write_file(file, json.dumps(plan, indent=1).encode() + b"\n")
            return
        except (OSError, ValueError, RecursionError) as error:
            raise RecordError(f"{file} is damaged ({error}): choose another --out.") from error
        differing = [name for name in plan if plan[name] != stored.get(name)]
        if differing:
            names = [
                "data, networks or algorithms of your own" if name == "about" else name
                for name in differing
            ]
            raise RecordError(
                f"{self.results.path} holds another sweep (it differs in {', '.join(names)}), "
                "whose trials would not count against the budget: choose another --out."
            )

    def available_trials(self) -> list[tuple[Experiment, Point]]:
        """Return every algorithm with each point that was tried or can be tried now."""
        return [
            (experiment, point)
            for experiment in self.plan.experiments
            for point in self._available_points(experiment)
        ]

    def _available_points(self, experiment: Experiment) -> list[Point]:
        """The points that an algorithm has tried, and those that it can try now."""
        planned = self.plan.planned_points(experiment)
        if planned is not None:
            return planned
        done = self._replay(experiment)
        available = [trial.point for trial in done]
        if len(done) < self.plan.trials:
            available.append(self._propose(experiment, done))
        return available

    def _propose(self, experiment: Experiment, done: Sequence[Trial]) -> Point:
        """The point after the finished trials; it is the same on every call."""
        key = (algorithm_name(experiment.algorithm), len(done))
        if key not in self._proposals:
            scores = [(trial.point, trial.score) for trial in done]
            space = self.plan.space_of(experiment)
            self._proposals[key] = next_point(space, scores, self.plan.trials, self.plan.seed)
        return self._proposals[key]

    def _replay(self, experiment: Experiment) -> list[Trial]:
        """The finished trials of an algorithm, each proposed again from those before it."""
        done = list[Trial]()
        while len(done) < self.plan.trials:
            point = self._propose(experiment, done)
            trial = self._finished_trial(experiment, point, len(done) + 1)
            if trial is None:
                break
            done.append(trial)
        return done

    def jobs(self, trials: Sequence[tuple[Experiment, Point]]) -> list[Job]:
        """Return the jobs of some trials."""
        return [
            _job(self.plan.trial_experiment(experiment, point), seed)
            for experiment, point in trials
            for seed in self.plan.trial_seeds
        ]

    def final_jobs(self) -> list[Job]:
        """Return the jobs of the final runs; every trial must be finished."""
        jobs = []
        for experiment in self.plan.experiments:
            chosen = _best(self.trials(experiment))
            final = self.plan.final_experiment(experiment, chosen.point)
            jobs += [_job(final, seed) for seed in self.plan.seeds]
        return jobs

    def trials(self, experiment: Experiment) -> list[Trial]:
        """Return the finished trials of an algorithm in order."""
        planned = self.plan.planned_points(experiment)
        if planned is None:
            return self._replay(experiment)
        trials = [
            self._finished_trial(experiment, point, number)
            for number, point in enumerate(planned, 1)
        ]
        return [trial for trial in trials if trial is not None]

    def _finished_trial(self, experiment: Experiment, point: Point, number: int) -> Trial | None:
        """The trial of a point, if it is finished."""
        trial_experiment = self.plan.trial_experiment(experiment, point)
        jobs = [_job(trial_experiment, seed) for seed in self.plan.trial_seeds]
        if not all(self.results.has(job) for job in jobs):
            return None
        results = [self.results.by_seed(job)[job.seed] for job in jobs]
        diverged = any("diverged" in result for result in results)
        score = DIVERGED_SCORE
        if not diverged:
            scores = [_validation_score(*pair) for pair in zip(results, jobs, strict=True)]
            score = sum(scores) / len(scores)
        rounds = min(len(result["loss"]) for result in results)
        return Trial(number, point, trial_experiment, score, rounds, diverged)

    def tuned(self) -> list[Tuned]:
        """Return every algorithm with its trials and final runs; all must be finished."""
        tuned = []
        for experiment in self.plan.experiments:
            trials = self.trials(experiment)
            chosen = _best(trials)
            final = self.plan.final_experiment(experiment, chosen.point)
            runs = [self._read_run(_job(final, seed)) for seed in self.plan.seeds]
            tuned.append(Tuned(experiment, self.plan.space_of(experiment), trials, chosen, runs))
        return tuned

    def _read_run(self, job: Job) -> Run:
        """Read a finished run from its run directory."""
        directory = self.results.run_directory(job)
        if not RunDirectory(directory).exists():
            raise RecordError(
                f"the run in {directory} is missing, but its result is stored: restore the run, "
                f"or delete {self.results.path / job.name}.jsonl and start the sweep again."
            )
        return read(directory)

    def rounds_left(self) -> int:
        """Return the number of rounds that are still to run."""
        rounds = 0
        all_tried = True
        for experiment in self.plan.experiments:
            available = self._available_points(experiment)
            jobs = self.jobs([(experiment, point) for point in available])
            rounds += job_planning.rounds_left([jobs], self.results)
            num_later = self.plan.trials - len(available)
            rounds += num_later * len(self.plan.trial_seeds) * experiment.rounds
            all_tried &= len(self.trials(experiment)) == self.plan.trials
        if all_tried:
            return rounds + job_planning.rounds_left([self.final_jobs()], self.results)
        final_rounds = sum(experiment.rounds for experiment in self.plan.experiments)
        return rounds + len(self.plan.seeds) * final_rounds

    def run(self, queue: JobQueue) -> None:
        """Run all jobs that are left: the trials, then the final runs.

        Raises:
            ConfigError: A job failed.
            Interrupted: The queue was stopped.
        """
        plan = self.plan
        while any(len(self.trials(one)) < plan.trials for one in plan.experiments):
            _run_jobs(queue, self.jobs(self.available_trials()))
        _run_jobs(queue, self.final_jobs())


def _job(experiment: Experiment, seed: int) -> Job:
    return Job(dataclasses.replace(experiment, seed=seed))


def _run_jobs(queue: JobQueue, jobs: Sequence[Job]) -> None:
    outcome = queue.work(job_planning.stack_jobs(jobs))
    if outcome.failures:
        raise ConfigError(outcome.failures)
    if outcome.num_left:
        raise Interrupted(f"stopped: {outcome.num_left} of {len(jobs)} runs are left")


class SearchOptions(TypedDict, total=False):
    """Options of `plan_sweep`; the defaults are those of `SweepPlan`.

    Attributes:
        search: How trials are drawn: "grid", "random" or "optuna".
        trials: Number of trials per algorithm.
        seed: Seed of the search.
        trial_seeds: Seeds of every trial; its score is their mean.
        seeds: Seeds of the final runs.
    """

    search: Search
    trials: int
    seed: int
    trial_seeds: Sequence[int]
    seeds: Sequence[int]


class QueueOptions(TypedDict, total=False):
    """Options of `run_sweep`, as in `JobQueue`."""

    callbacks: Sequence[Callback]
    should_stop: Callable[[], bool] | None
    command: str | None


class SweepOptions(SearchOptions, QueueOptions, total=False):
    """Options of `sweep`."""


def run_sweep(
    plan: SweepPlan,
    out: str | Path,
    objects: UserObjects | None = None,
    **options: Unpack[QueueOptions],
) -> list[Tuned]:
    """Run or resume a sweep.

    Args:
        plan: The plan.
        out: Folder of the results.
        objects: Objects of the user, as in `fedcog.sweep`.
        options: `callbacks`, `should_stop` and `command`, as in `fedcog.sweep`.

    Returns:
        Each algorithm with its trials and final runs.
    """
    objects = objects or UserObjects()
    datasets = _load_user_data(plan, objects)
    _check_test_set(plan, datasets)
    running = Sweep(plan, out, _hash_user_objects(plan, objects, datasets))
    running.write_plan()
    queue = JobQueue(running.results, objects=objects, **options)
    running.run(queue)
    return running.tuned()


def _load_user_data(plan: SweepPlan, objects: UserObjects) -> list[Dataset]:
    """Load the user's own data, of which settings say little; a registered data set is left."""
    loaded: dict[tuple[int | str, ...], Dataset] = {}
    for experiment in plan.experiments:
        is_own = objects.data is not None or experiment.dataset not in DATASETS
        key = data_settings(experiment)
        if key not in loaded and (is_own or experiment.indices):
            loaded[key] = load_data(experiment, objects)
    return list(loaded.values())


def _check_test_set(plan: SweepPlan, datasets: Sequence[Dataset]) -> None:
    """Refuse data on which the final runs could not be evaluated.

    Raises:
        ConfigError: If there are no test examples.
    """
    if all(one.local_test for one in plan.experiments) or "local_test" in plan.space:
        return
    for dataset in datasets:
        if not len(dataset.test_y):
            raise ConfigError(
                [
                    f"the data set '{dataset.name}' has no test set, and the final runs of a sweep "
                    "need one: hold out test examples at every client with --local-test 0.2."
                ]
            )


def _hash_user_objects(plan: SweepPlan, objects: UserObjects, datasets: Sequence[Dataset]) -> str:
    """Identify the user's own data, networks and algorithms; "" without any."""
    network_text = describe_network(objects.model)
    data_text = " ".join(dataset.full_fingerprint for dataset in datasets)
    parts = [data_text, network_text, describe_network(objects.generator)]
    for experiment in plan.experiments:
        parts.append(user_source([type(layer) for _, layer in named_layers(experiment.algorithm)]))
    first = plan.experiments[0]
    if datasets or objects.model is not None or objects.augmentation is not None:
        dataset = datasets[0] if datasets else load_data(first, objects)
        names = object_names(first, objects, dataset, network_text)
        parts += [names[role] for role in ("network", "augmentation") if role in names]
    if not any(parts):
        return ""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def plan_sweep(
    experiments: Sequence[Experiment],
    space: Mapping[str, Any],
    *,
    data: Dataset | None = None,
    model: Network | None = None,
    **options: Unpack[SearchOptions],
) -> SweepPlan:
    """Plan a sweep, and check everything that can be checked before the first trial.

    Args:
        experiments: As in `fedcog.sweep`.
        space: As in `fedcog.sweep`.
        data: As in `fedcog.sweep`.
        model: As in `fedcog.sweep`.
        options: `search`, `trials`, `seed`, `trial_seeds` and `seeds`, as in `fedcog.sweep`.

    Returns:
        The plan.

    Raises:
        ConfigError: All faults at once.
    """
    algorithms = dict(ALGORITHMS)
    for experiment in experiments:
        algorithms |= {name: type(layer) for name, layer in named_layers(experiment.algorithm)}
    complete = []
    for experiment in experiments:
        validation = experiment.validation or DEFAULT_VALIDATION
        with_validation = dataclasses.replace(experiment, validation=validation, seed=0)
        recorded = with_user_objects(with_validation, UserObjects(data, model))
        if data is None:
            complete.append(resolve_before_loading(recorded))
        else:
            complete.append(resolve_clients(recorded, adapt_dataset(data, recorded)))
    arguments: dict[str, Any] = dict(options)
    for name in ("trial_seeds", "seeds"):
        if name in arguments:
            arguments[name] = tuple(dict.fromkeys(arguments[name]))
    plan = SweepPlan(tuple(complete), read_space(space, algorithms), **arguments)
    check_seeds(model, [*plan.trial_seeds, *plan.seeds])
    return plan


def _best(trials: Sequence[Trial]) -> Trial:
    """The trial with the highest score; the first of equals; a diverged one only if all did."""
    return max(trials, key=lambda trial: (not trial.diverged, trial.score, -trial.number))


def _validation_score(result: Result, job: Job) -> float:
    """The score of a run on the validation examples after its last round."""
    for metric in METRIC_LABELS:
        values = result.get(f"validation_{metric}") or [None]
        if values[-1] is not None:
            return float(values[-1])
    raise RecordError(
        f"{job.name}, seed {job.seed}: the result has no validation score: delete it and run again."
    )
