"""What came of a study: means and deviations over seeds, and differences between rows with their intervals."""

import collections
import functools
import itertools
import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from fedcog.experiments.config import Experiment
from fedcog.experiments.plan import job
from fedcog.experiments.results import Job, Results
from fedcog.experiments.study import Cell, Measure, Study
from fedcog.experiments.summary import Spread, spread

ENOUGH = 6  # pairs from which on a test is worth its name


class Paired(NamedTuple):
    """How much better one row is than another, seed by seed: mean, half a 95 % interval, and a test where it may be."""

    mean: float
    half: float | None
    pairs: int
    p: float | None  # Wilcoxon's signed-rank test, two-sided
    pooled: int = 1  # settings that the pairs are of

    def words(self) -> str:
        """As printed."""
        half = "" if self.half is None else f" ± {self.half:.2f}"
        where = f" in {self.pooled} settings" if self.pooled > 1 else ""
        p = "" if self.p is None else f" (p = {self.p:.2g}, n = {self.pairs}{where})"
        return f"{self.mean:+.2f}{half}{p}"


class Row(NamedTuple):
    """A row of a block: what was measured last and at best, and the paper's number; None: not run."""

    name: str
    last: Spread | None
    best: Spread | None
    paper: float | None
    paper_deviation: float | None
    lead: Paired | None  # of the study's own row over this one
    note: str = ""

    @property
    def difference(self) -> float | None:
        """The best beside the paper's, which is the best over rounds as well."""
        return None if self.best is None or self.paper is None else self.best.mean - self.paper


UNITS: dict[Measure, str] = {"seconds": "s", "every": "s", "gap": ""}
"""What is not in per cent."""


class Block(NamedTuple):
    """A part of a table: one setting, or one value of what is varied."""

    title: str
    unit: str
    rows: list[Row]


OF_CLIENTS: dict[Measure, tuple[str, float]] = {
    "gap": ("gap", 1),
    "general": ("accuracy", 100),
    "own": ("own_accuracy", 100),
}
"""What is a mean over clients: its name in their records, and what it is multiplied with."""


class Values(NamedTuple):
    """What the seeds of a cell came to, in per cent or seconds."""

    last: dict[int, float]
    best: dict[int, float]
    note: str = ""


def values(cell: Cell, results: Results, seeds: Sequence[int]) -> Values:
    """What is known of a cell."""
    found = {line["seed"]: line for line in lines_of(cell, results, seeds)}
    if cell.probe:
        return _seconds(cell, [line["found"] for line in found.values()])
    return _of_clients(cell, found) if cell.measure in OF_CLIENTS else _scores(cell, found)


def _seconds(cell: Cell, found: list[dict[str, Any]]) -> Values:
    """Seconds by client."""
    every = cell.measure == "every"
    rounds = cell.experiment.rounds if every else 1
    taken = [one.get("round" if every else "seconds", []) for one in found]
    each = {client: rounds * value for listed in taken for client, value in enumerate(listed)}
    return Values(each, each)


def _of_clients(cell: Cell, found: dict[int, dict[str, Any]]) -> Values:
    """Means over clients after the last round."""
    name, factor = OF_CLIENTS[cell.measure]
    told = {seed: [one[name] for one in line["clients"] if name in one] for seed, line in found.items()}
    means = {seed: factor * statistics.fmean(each) for seed, each in told.items() if each}
    return Values(means, means)


def _scores(cell: Cell, found: dict[int, dict[str, Any]]) -> Values:
    """Scores after the last round and at best."""
    name = {"personal": "personal_accuracy", "validation": "validation_accuracy"}.get(cell.measure, cell.measure)
    since = cell.start.rounds if cell.start and cell.short else 0
    told = {seed: line.get(name, [])[since:] for seed, line in found.items()}
    series = {seed: [100 * value for value in values if value is not None] for seed, values in told.items()}
    series = {seed: numbers for seed, numbers in series.items() if numbers}
    lost = sum(bool(line.get("diverged")) for line in found.values())
    note = f"{lost} of {len(found)} seeds diverged" if lost else ""
    whole = {seed: numbers for seed, numbers in series.items() if not found[seed].get("diverged")}
    return Values(
        {seed: numbers[-1] for seed, numbers in whole.items()},
        {seed: max(numbers) for seed, numbers in series.items()},
        note,
    )


def blocks(study: Study, results: Results) -> list[Block]:
    """A study's table, block by block."""
    known = {(cell.block, cell.row): values(cell, results, study.seeds) for cell in study.cells}
    found = []
    for title in dict.fromkeys(cell.block for cell in study.cells):
        cells = [cell for cell in study.cells if cell.block == title]
        ours = known.get((title, study.ours))
        rows = []
        for cell in cells:
            own = known[cell.block, cell.row]
            lead = paired(ours.last, own.last) if ours and cell.row != study.ours and not cell.probe else None
            told = _spread(own.last), _spread(own.best)
            rows.append(Row(cell.row, *told, cell.paper, cell.paper_deviation, lead, own.note))
        found.append(Block(title, UNITS.get(cells[0].measure, "%"), rows))
    return found + ([average(study, known)] if study.averages else [])


def average(study: Study, known: dict[tuple[str, str], Values]) -> Block:
    """The mean over all settings of a study, and who leads over all pairs of settings and seeds there are."""
    titles = list(dict.fromkeys(cell.block for cell in study.cells))
    averages, rows = dict(study.averages), []
    for name in dict.fromkeys(cell.row for cell in study.cells):
        taken = [known[title, name] for title in titles]
        told = (
            _spread(_mean_by_seed([one.last for one in taken])),
            _spread(_mean_by_seed([one.best for one in taken])),
        )
        ours, theirs = (
            {(title, seed): value for title in titles for seed, value in known[title, row].last.items()}
            for row in (study.ours, name)
        )
        lead = paired(ours, theirs) if name != study.ours else None
        lead = lead and lead._replace(pooled=len({title for title, _ in ours.keys() & theirs.keys()}))
        rows.append(Row(name, *told, averages.get(name), None, lead))
    return Block("Average over the settings", "%", rows)


def _spread(taken: dict[int, float]) -> Spread | None:
    return spread(list(taken.values())) if taken else None


def _mean_by_seed(taken: Sequence[dict[int, float]]) -> dict[int, float]:
    """The mean over settings of every seed that all of them have."""
    seeds = set.intersection(*(set(one) for one in taken))
    return {seed: statistics.fmean(one[seed] for one in taken) for seed in sorted(seeds)}


def paired(ours: dict[Any, float], theirs: dict[Any, float]) -> Paired | None:
    """The mean difference over what both have, with its interval from Student's t."""
    gaps = tuple(ours[key] - theirs[key] for key in ours if key in theirs)
    return _lead(gaps) if gaps else None


@functools.cache
def _lead(gaps: tuple[float, ...]) -> Paired:
    from scipy import stats  # takes a second to load

    half = p = None
    if len(gaps) > 1:
        error = statistics.stdev(gaps) / math.sqrt(len(gaps))
        half = float(stats.t.ppf(0.975, len(gaps) - 1)) * error
    if len(gaps) >= ENOUGH and any(gaps):
        p = signed_rank(gaps)
    return Paired(statistics.fmean(gaps), half, len(gaps), p)


def signed_rank(gaps: Sequence[float]) -> float:
    """The two-sided p of Wilcoxon's signed-rank test, exactly, also where gaps are alike: over all ways to sign them.

    Gaps of nothing are left out. scipy has exact values without ties alone, or by trying all ways one after another.
    """
    import numpy as np
    from scipy import stats

    some = np.round([gap for gap in gaps if abs(gap) > 1e-9], 9)  # what is alike but for rounding is alike
    ranks = (2 * stats.rankdata(np.abs(some))).astype(int)  # of two that are alike, each has the middle
    chances = np.ones(1)  # of every sum of the ranks above zero
    for rank in ranks:
        chances = 0.5 * (np.pad(chances, (0, rank)) + np.pad(chances, (rank, 0)))
    found = int(ranks[some > 0].sum())
    return float(min(1.0, 2 * chances[: found + 1].sum(), 2 * chances[found:].sum()))


def elsewhere(study: Study, results: Results) -> dict[str, list[int]]:
    """The rows and seeds that began with another run of a start than most that have it.

    What is run on two occasions is the same experiment, but for the order of sums on a GPU; a start's rounds make much
    of that, and what goes on from two of them is not as alike as what goes on from one.
    """
    begun: dict[tuple[Experiment, int], dict[Job, tuple[str, tuple[float, ...]]]] = {}
    for cell, seed in itertools.product(study.cells, study.seeds):
        one = job(cell, seed)
        line = results.of(one).get(seed)
        if one.start is not None and line is not None and "loss" in line:
            run = cell.row if cell.row == cell.block else f"{cell.row} ({cell.block})"
            begun.setdefault((one.start, seed), {}).setdefault(one, (run, tuple(line["loss"][: one.start.rounds])))
    found = dict[str, list[int]]()
    for (_, seed), same in begun.items():
        usual = collections.Counter(losses for _, losses in same.values()).most_common(1)[0][0]
        for run, losses in same.values():
            if losses != usual:
                found.setdefault(run, []).append(seed)
    return found


def provenances(study: Study, results: Results) -> list[dict[str, Any]]:
    """Where each result of a study came from."""
    return [line["provenance"] for cell in study.cells for line in lines_of(cell, results, study.seeds)]


def lines_of(cell: Cell, results: Results, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """What came of a cell, seed by seed."""
    found = [results.of(job(cell, seed)).get(seed) for seed in seeds]
    return [line for line in found if line is not None]
