"""What is to be done for some studies: jobs, those that are done in one go, a machine's share, and how much is left."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

from fedcog.data import sources
from fedcog.experiments.config import Experiment, layers
from fedcog.experiments.prepare import stacked
from fedcog.experiments.record import RecordError, RunDirectory
from fedcog.experiments.results import Job, Results
from fedcog.experiments.study import Cell, Study

ABREAST, CROWD = 16, 128
"""Runs that train as one, at most, and clients of theirs in a round: more fill no GPU, and put off all results."""


class Done(NamedTuple):
    """How much of a study is done."""

    name: str
    done: int
    total: int


@functools.lru_cache(maxsize=8192)  # tables ask for the same again and again, and every experiment is checked
def job(cell: Cell, seed: int, data_dir: str = "") -> Job:
    """A cell's work for one seed."""
    one = dataclasses.replace(cell.experiment, seed=seed, data_dir=data_dir)
    return Job(one, cell.start.of(one) if cell.start else None, cell.probe)


def jobs(study: Study, datasets: Sequence[str] = (), data_dir: str = "", algorithms: Sequence[str] = ()) -> list[Job]:
    """All work of a study, each thing once; on some data sets only, if asked, else on all that can be had.

    Of `algorithms`, only what one of them takes part in.
    """
    there = {cell.experiment.dataset for cell in study.cells}
    chosen = there & {*datasets} if datasets else {name for name in there if _to_be_had(name, data_dir)}
    wanted = [cell for cell in study.cells if cell.experiment.dataset in chosen]
    if algorithms:
        wanted = [cell for cell in wanted if {*algorithms} & {name for name, _ in layers(cell.experiment.algorithm)}]
    first = study.seeds[0]  # what is measured beside training is measured once
    found = [job(cell, seed, data_dir) for seed in study.seeds for cell in wanted if not cell.probe or seed == first]
    return list(dict.fromkeys(found))


def _to_be_had(dataset: str, data_dir: str) -> bool:
    """Is a data set here, or can it be fetched? What cannot is no work where it is not."""
    return not sources.source_named(dataset).by_hand or sources.locate(dataset, data_dir or None) is not None


def status(
    studies: Sequence[Study],
    results: Results,
    datasets: Sequence[str] = (),
    data_dir: str = "",
    algorithms: Sequence[str] = (),
) -> list[Done]:
    """How much of each study is done, or of that part of it which runs on some data sets, or of some algorithms."""
    found = []
    for study in studies:
        all_ = jobs(study, datasets, data_dir, algorithms)
        found.append(Done(study.name, sum(results.has(one) for one in all_), len(all_)))
    return found


def stacks(all_: Sequence[Job]) -> list[list[Job]]:
    """Work that is done in one go: runs that differ in seed, partition and learning rate alone, where that is faster.

    All else is done one by one. No more go together than ABREAST, for each keeps what it trains on at hand, or CROWD.
    Of runs that differ in how many rounds they have the longest come first: the others are known by then.
    """
    found: dict[object, dict[object, list[Job]]] = {}
    for one in all_:
        mates, lengths = (
            _mates(each) if stacked(one.experiment) and not one.probe else each for each in (one, _endless(one))
        )
        found.setdefault(lengths, {}).setdefault(mates, []).append(one)
    alike = (sorted(mates.values(), key=lambda some: -some[0].experiment.rounds) for mates in found.values())
    return [part for lengths in alike for some in lengths for part in _parts(some)]


def part_of(one: Job, other: Job) -> bool:
    """Is the first run the beginning of the second, and its last round evaluated there, too?"""
    plain = not one.probe and one.experiment.evaluate_every == 1 and not one.experiment.evaluate_local
    return plain and one.experiment.rounds < other.experiment.rounds and _endless(one) == _endless(other)


def _endless(one: Job) -> Job:
    """A job, whatever its number of rounds: shorter and longer runs are the same as far as they go."""
    return one._replace(experiment=dataclasses.replace(one.experiment, rounds=1))


def _parts(some: Sequence[Job]) -> list[list[Job]]:
    """Work that could be done in one go, in parts that are small enough."""
    parts, crowd = list[list[Job]](), 0
    for one in some:
        clients = math.ceil(one.experiment.clients * one.experiment.participation)
        if not parts or len(parts[-1]) == ABREAST or crowd + clients > CROWD:
            parts, crowd = [*parts, []], 0
        parts[-1].append(one)
        crowd += clients
    return parts


def _mates(one: Job) -> object:
    """What runs that train as one have in common: all but their seed, who holds what, and their learning rate."""

    def common(experiment: Experiment) -> Experiment:
        usual = Experiment(dataset=experiment.dataset)
        names = ["seed", "partition", "beta", "classes_per_client", "partition_seed", "clients", "participation"]
        names += ["partition_args", "lr", "lr_decay"]
        return dataclasses.replace(experiment, **{name: getattr(usual, name) for name in names})

    return common(one.experiment), one.start and common(one.start)


def rounds_left(all_: Sequence[list[Job]], results: Results) -> int:
    """How many rounds there are still to run, those of starts counted once."""
    left = [one for stack in all_ for one in stack if not known(one, results)]
    starts = {Job(one.start) for one in left if one.start is not None}
    return sum(_ahead(one, results) for one in (*left, *starts))


def _ahead(one: Job, results: Results) -> int:
    """The rounds that a job has before it."""
    if one.probe:
        return 0
    before = one.start.rounds if one.start is not None else 0
    with contextlib.suppress(RecordError):  # what is damaged is told when its turn comes
        before = max(before, RunDirectory(results.run_directory(one)).rounds())
    return max(0, one.experiment.rounds - before)


def known(one: Job, results: Results) -> bool:
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
