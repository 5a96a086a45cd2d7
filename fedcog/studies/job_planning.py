"""Planning of jobs: which jobs studies need, which train stacked, and how machines share them."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

from fedcog.data import registry
from fedcog.runs.config.composition import named_layers
from fedcog.runs.config.experiment import Experiment
from fedcog.runs.environment import stacks_seeds
from fedcog.runs.records.run_directory import RecordError, RunDirectory
from fedcog.studies.result_store import Job, Results
from fedcog.studies.study import Cell, Study

# Larger stacks do not use a GPU any better, and they delay the first result.
MAX_STACKED_RUNS = 16
MAX_STACKED_CLIENTS = 128
"""Upper bounds of a stack: its runs, and the clients that take part in one round of all of them."""

STACKABLE_SETTINGS = (
    "seed",
    "partition",
    "beta",
    "classes_per_client",
    "partition_seed",
    "clients",
    "participation",
    "partition_args",
    "lr",
    "lr_decay",
    "lr_schedule",
    "lr_warmup",
    "lr_step",
    "lr_final",
    "server_lr_schedule",
    "server_lr_decay",
    "server_lr_warmup",
)
"""Settings in which the runs of one stack may differ."""


class StudyProgress(NamedTuple):
    """How many jobs of a study are done."""

    name: str
    num_done: int
    num_jobs: int


# Tables ask for the same jobs many times, and each new Experiment validates its settings.
@functools.lru_cache(maxsize=8192)
def job_of(cell: Cell, seed: int, data_dir: str = "") -> Job:
    """Return the job that fills a cell for one seed.

    Args:
        cell: The cell.
        seed: The seed of the experiment.
        data_dir: Folder of the data sets; the default folder if empty.

    Returns:
        The job.
    """
    experiment = dataclasses.replace(cell.experiment, seed=seed, data_dir=data_dir)
    warm_start = cell.warm_start.experiment_before(experiment) if cell.warm_start else None
    return Job(experiment, warm_start, cell.probe)


def jobs_of(
    study: Study, datasets: Sequence[str] = (), data_dir: str = "", algorithms: Sequence[str] = ()
) -> list[Job]:
    """List the jobs of a study, each once.

    Args:
        study: The study.
        datasets: Data sets to include; if empty, all that are present or can be downloaded.
        data_dir: Folder of the data sets; the default folder if empty.
        algorithms: Include only jobs in which one of these algorithms takes part, if not empty.

    Returns:
        The jobs in the order of seeds, then cells.
    """
    study_datasets = {cell.experiment.dataset for cell in study.cells}
    if datasets:
        chosen = study_datasets & {*datasets}
    else:
        chosen = {name for name in study_datasets if _is_available(name, data_dir)}
    cells = [cell for cell in study.cells if cell.experiment.dataset in chosen]
    if algorithms:
        cells = [
            cell
            for cell in cells
            if {*algorithms} & {name for name, _ in named_layers(cell.experiment.algorithm)}
        ]
    probe_seed = study.seeds[0]  # probes run with one seed only
    jobs = [
        job_of(cell, seed, data_dir)
        for seed in study.seeds
        for cell in cells
        if not cell.probe or seed == probe_seed
    ]
    return list(dict.fromkeys(jobs))


def _is_available(dataset: str, data_dir: str) -> bool:
    """Whether a data set is present or can be downloaded."""
    if not registry.find_source(dataset).manual_instructions:
        return True
    return registry.locate(dataset, data_dir or None) is not None


def progress_of(
    studies: Sequence[Study],
    results: Results,
    datasets: Sequence[str] = (),
    data_dir: str = "",
    algorithms: Sequence[str] = (),
) -> list[StudyProgress]:
    """Count the finished jobs of each study.

    Args:
        studies: The studies.
        results: The stored results.
        datasets: As in `jobs_of`.
        data_dir: As in `jobs_of`.
        algorithms: As in `jobs_of`.

    Returns:
        One entry per study, in the same order.
    """
    progress = []
    for study in studies:
        jobs = jobs_of(study, datasets, data_dir, algorithms)
        num_done = sum(results.has(job) for job in jobs)
        progress.append(StudyProgress(study.name, num_done, len(jobs)))
    return progress


def stack_jobs(jobs: Sequence[Job]) -> list[list[Job]]:
    """Group jobs into stacks: lists of runs that train together where that is faster.

    The runs of a stack differ only in `STACKABLE_SETTINGS`, and a stack stays within
    `MAX_STACKED_RUNS` and `MAX_STACKED_CLIENTS`. All other jobs form a stack of one. Of runs that
    differ only in their number of rounds the longest come first: they contain the shorter ones.
    """
    families: dict[object, dict[object, list[Job]]] = {}
    for job in jobs:
        key: object = job
        family_key: object = _ignoring_rounds(job)
        if stacks_seeds(job.experiment) and not job.probe:
            key = _stack_key(job)
            family_key = _stack_key(_ignoring_rounds(job))
        families.setdefault(family_key, {}).setdefault(key, []).append(job)
    stacks = list[list[Job]]()
    for family in families.values():
        for group in sorted(family.values(), key=lambda group: -group[0].experiment.rounds):
            stacks += _split_stack(group)
    return stacks


def is_prefix(job: Job, other: Job) -> bool:
    """Whether a longer run contains a shorter one, with its last round evaluated.

    Args:
        job: The shorter run.
        other: The longer run.

    Returns:
        True if the first rounds of `other` give the result of `job`.
    """
    experiment = job.experiment
    if job.probe or experiment.evaluate_every != 1 or experiment.evaluate_local:
        return False
    is_shorter = experiment.rounds < other.experiment.rounds
    return is_shorter and _ignoring_rounds(job) == _ignoring_rounds(other)


def _ignoring_rounds(job: Job) -> Job:
    """Replace the number of rounds by one; what schedules make of it stays."""
    experiment = job.experiment
    horizon = experiment.lr_rounds
    if experiment.client_lr.uses_horizon or experiment.server_lr.uses_horizon:
        horizon = experiment.client_lr.horizon
    return job._replace(experiment=dataclasses.replace(experiment, rounds=1, lr_rounds=horizon))


def _split_stack(jobs: Sequence[Job]) -> list[list[Job]]:
    """Split jobs that could train together into stacks within the upper bounds."""
    stacks = list[list[Job]]()
    num_clients = 0
    for job in jobs:
        participants = math.ceil(job.experiment.clients * job.experiment.participation)
        is_full = not stacks or len(stacks[-1]) == MAX_STACKED_RUNS
        if is_full or num_clients + participants > MAX_STACKED_CLIENTS:
            stacks.append([])
            num_clients = 0
        stacks[-1].append(job)
        num_clients += participants
    return stacks


def _stack_key(job: Job) -> tuple[Experiment, Experiment | None]:
    """What the runs of one stack have in common."""
    warm_start = _without_stackable(job.warm_start) if job.warm_start else None
    return _without_stackable(job.experiment), warm_start


def _without_stackable(experiment: Experiment) -> Experiment:
    """Reset the settings in which stacked runs may differ."""
    defaults = Experiment(dataset=experiment.dataset)
    reset = {name: getattr(defaults, name) for name in STACKABLE_SETTINGS}
    return dataclasses.replace(experiment, **reset)


def rounds_left(stacks: Sequence[list[Job]], results: Results) -> int:
    """Count the rounds that are still to run; a shared warm start counts once.

    Args:
        stacks: The jobs, in stacks.
        results: The stored results.

    Returns:
        The number of rounds.
    """
    jobs_left = [job for stack in stacks for job in stack if not is_done(job, results)]
    warm_starts = {Job(job.warm_start) for job in jobs_left if job.warm_start is not None}
    return sum(_rounds_left_of(job, results) for job in (*jobs_left, *warm_starts))


def _rounds_left_of(job: Job, results: Results) -> int:
    """The rounds that one job has left after its warm start and its last checkpoint."""
    if job.probe:
        return 0
    rounds_done = job.warm_start.rounds if job.warm_start is not None else 0
    with contextlib.suppress(RecordError):  # the queue reports a damaged run when it reaches it
        rounds_done = max(rounds_done, RunDirectory(results.run_directory(job)).checkpoint_round())
    return max(0, job.experiment.rounds - rounds_done)


def is_done(job: Job, results: Results) -> bool:
    """Whether the result of a job is stored and readable.

    Args:
        job: The job.
        results: The stored results.

    Returns:
        False also if the result file is damaged.
    """
    try:
        return results.has(job)
    except RecordError:
        return False


def shard(stacks: Sequence[list[Job]], index: int, num_shards: int) -> list[list[Job]]:
    """Select one machine's share of the work.

    Args:
        stacks: All stacks.
        index: Which share, from 0.
        num_shards: Number of shares. They take about equally many rounds.

    Returns:
        The stacks of the share. Stacks with the same warm start are in the same share.
    """
    families: dict[str, list[list[Job]]] = {}
    for stack in stacks:
        families.setdefault(_warm_start_family(stack), []).append(stack)
    loads = [0] * num_shards
    selected = set[str]()
    by_length = sorted(families.items(), key=lambda item: (-_total_rounds(item[1]), item[0]))
    for name, members in by_length:
        lightest = loads.index(min(loads))
        loads[lightest] += _total_rounds(members)
        if lightest == index:
            selected.add(name)
    return [stack for stack in stacks if _warm_start_family(stack) in selected]


def _total_rounds(stacks: Sequence[list[Job]]) -> int:
    return sum(job.experiment.rounds for stack in stacks for job in stack)


def _warm_start_family(stack: list[Job]) -> str:
    """A name that stacks with the same warm start share."""
    first = stack[0]
    start = Job(first.warm_start) if first.warm_start is not None else first
    return str(_stack_key(start._replace(probe=None)))
