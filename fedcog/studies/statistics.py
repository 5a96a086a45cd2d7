"""Statistics of a study: means and standard deviations over seeds, and paired differences."""

import collections
import functools
import itertools
import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from fedcog.runs.config.experiment import Experiment
from fedcog.runs.records.summary import Spread, spread
from fedcog.studies.job_planning import job_of
from fedcog.studies.result_store import Job, Result, Results
from fedcog.studies.study import Cell, CellMetric, Study

MIN_PAIRS_FOR_TEST = 6
"""A significance test of fewer pairs cannot reach p < 0.05."""

ROUNDING_ERROR = 1e-9
"""Differences of scores up to this size are rounding errors."""


class PairedDifference(NamedTuple):
    """How much better one row is than another, seed by seed."""

    mean: float
    half_width: float | None  # of the 95 % confidence interval; None for a single pair
    num_pairs: int
    p_value: float | None  # Wilcoxon signed-rank test, two-sided
    num_settings: int = 1  # settings that the pairs come from

    def text(self) -> str:
        """Format it for a table."""
        text = f"{self.mean:+.2f}"
        if self.half_width is not None:
            text += f" ± {self.half_width:.2f}"
        if self.p_value is not None:
            where = f" in {self.num_settings} settings" if self.num_settings > 1 else ""
            text += f" (p = {self.p_value:.2g}, n = {self.num_pairs}{where})"
        return text


class Row(NamedTuple):
    """A row of a block: the last and the best score, and the paper's number; None: not run."""

    name: str
    last: Spread | None
    best: Spread | None
    paper: float | None
    paper_std: float | None
    difference: PairedDifference | None  # of the study's reference row and this one
    note: str = ""

    @property
    def difference_to_paper(self) -> float | None:
        """Our best score minus the paper's, which is the best over rounds as well."""
        if self.best is None or self.paper is None:
            return None
        return self.best.mean - self.paper


class Block(NamedTuple):
    """A part of a table: one setting, or one value of the quantity that is varied."""

    title: str
    unit: str
    rows: list[Row]


UNITS: dict[CellMetric, str] = {"seconds": "s", "seconds_all_rounds": "s", "distance_to_mean": ""}
"""Units of the metrics that are not in percent."""


class ClientMetric(NamedTuple):
    """A metric that is a mean over clients."""

    key: str  # in the client's record
    factor: float


CLIENT_METRICS: dict[CellMetric, ClientMetric] = {
    "distance_to_mean": ClientMetric("gap", 1),
    "local_accuracy": ClientMetric("accuracy", 100),
    "own_label_accuracy": ClientMetric("own_accuracy", 100),
}


class CellValues(NamedTuple):
    """The values of a cell by seed (of a time: by client), in percent or seconds."""

    last: dict[int, float]
    best: dict[int, float]
    note: str = ""


def cell_values(cell: Cell, results: Results, seeds: Sequence[int]) -> CellValues:
    """Compute the values of a cell from the stored results.

    Args:
        cell: The cell.
        results: The stored results.
        seeds: Seeds to look for.

    Returns:
        The values; empty where nothing was run.
    """
    by_seed = {result["seed"]: result for result in results_of(cell, results, seeds)}
    if cell.probe:
        return _client_seconds(cell, [result["found"] for result in by_seed.values()])
    if cell.metric in CLIENT_METRICS:
        return _client_means(cell, by_seed)
    return _scores(cell, by_seed)


def _client_seconds(cell: Cell, measurements: list[dict[str, Any]]) -> CellValues:
    """Seconds by client."""
    key = "seconds"
    factor = 1
    if cell.metric == "seconds_all_rounds":
        key = "round"
        factor = cell.experiment.rounds
    seconds = {
        client: factor * value
        for measurement in measurements
        for client, value in enumerate(measurement.get(key, []))
    }
    return CellValues(seconds, seconds)


def _client_means(cell: Cell, by_seed: dict[int, Result]) -> CellValues:
    """Means over clients after the last round, by seed."""
    key, factor = CLIENT_METRICS[cell.metric]
    means = {}
    for seed, result in by_seed.items():
        values = [client[key] for client in result["clients"] if key in client]
        if values:
            means[seed] = factor * statistics.fmean(values)
    return CellValues(means, means)


def _scores(cell: Cell, by_seed: dict[int, Result]) -> CellValues:
    """Scores after the last round and in the best round, by seed."""
    first_round = cell.warm_start.rounds if cell.warm_start and cell.is_short else 0
    last = {}
    best = {}
    for seed, result in by_seed.items():
        values = result.get(cell.metric, [])[first_round:]
        percents = [100 * value for value in values if value is not None]
        if not percents:
            continue
        best[seed] = max(percents)
        if not result.get("diverged"):
            last[seed] = percents[-1]
    num_diverged = sum(bool(result.get("diverged")) for result in by_seed.values())
    note = f"{num_diverged} of {len(by_seed)} seeds diverged" if num_diverged else ""
    return CellValues(last, best, note)


def table_blocks(study: Study, results: Results) -> list[Block]:
    """Compute the blocks of a study's table.

    Args:
        study: The study.
        results: The stored results.

    Returns:
        One block per setting, and the average over settings if the paper has it.
    """
    values = {
        (cell.block, cell.row): cell_values(cell, results, study.seeds) for cell in study.cells
    }
    blocks = []
    for title in dict.fromkeys(cell.block for cell in study.cells):
        cells = [cell for cell in study.cells if cell.block == title]
        reference = values.get((title, study.reference_row))
        rows = []
        for cell in cells:
            last, best, note = values[cell.block, cell.row]
            difference = None
            if reference and cell.row != study.reference_row and not cell.probe:
                difference = paired_difference(reference.last, last)
            spreads = (_spread(last), _spread(best))
            rows.append(Row(cell.row, *spreads, cell.paper, cell.paper_std, difference, note))
        blocks.append(Block(title, UNITS.get(cells[0].metric, "%"), rows))
    if study.paper_averages:
        blocks.append(average_block(study, values))
    return blocks


def average_block(study: Study, values: Mapping[tuple[str, str], CellValues]) -> Block:
    """Average every row over all settings of a study.

    Args:
        study: The study.
        values: The values of every cell, by block and row.

    Returns:
        A block whose differences pool the pairs of all settings and seeds.
    """
    titles = list(dict.fromkeys(cell.block for cell in study.cells))
    paper_averages = dict(study.paper_averages)
    reference = _last_by_setting_and_seed(values, titles, study.reference_row)
    rows = []
    for name in dict.fromkeys(cell.row for cell in study.cells):
        last = _mean_by_seed([values[title, name].last for title in titles])
        best = _mean_by_seed([values[title, name].best for title in titles])
        difference = None
        if name != study.reference_row:
            compared = _last_by_setting_and_seed(values, titles, name)
            difference = paired_difference(reference, compared)
            if difference is not None:
                common_titles = {title for title, _ in reference.keys() & compared.keys()}
                difference = difference._replace(num_settings=len(common_titles))
        paper = paper_averages.get(name)
        rows.append(Row(name, _spread(last), _spread(best), paper, None, difference))
    return Block("Average over the settings", "%", rows)


def _last_by_setting_and_seed(
    values: Mapping[tuple[str, str], CellValues], titles: Sequence[str], row: str
) -> dict[tuple[str, int], float]:
    return {
        (title, seed): value for title in titles for seed, value in values[title, row].last.items()
    }


def _spread(by_seed: dict[int, float]) -> Spread | None:
    return spread(list(by_seed.values())) if by_seed else None


def _mean_by_seed(settings: Sequence[dict[int, float]]) -> dict[int, float]:
    """The mean over settings, for every seed that all settings have."""
    seeds = set.intersection(*(set(by_seed) for by_seed in settings))
    return {seed: statistics.fmean(by_seed[seed] for by_seed in settings) for seed in sorted(seeds)}


def paired_difference(
    reference: Mapping[Any, float], compared: Mapping[Any, float]
) -> PairedDifference | None:
    """Compute the mean difference over the keys that both have.

    Args:
        reference: Values by seed, or by setting and seed.
        compared: Values that are subtracted, by the same kind of key.

    Returns:
        The difference with a 95 % confidence interval from Student's t; None without any pair.
    """
    differences = tuple(reference[key] - compared[key] for key in reference if key in compared)
    return _summarize_differences(differences) if differences else None


@functools.cache
def _summarize_differences(differences: tuple[float, ...]) -> PairedDifference:
    from scipy import stats  # imported here: loading it takes a second

    half_width = None
    p_value = None
    num_pairs = len(differences)
    if num_pairs > 1:
        standard_error = statistics.stdev(differences) / math.sqrt(num_pairs)
        half_width = float(stats.t.ppf(0.975, num_pairs - 1)) * standard_error
    if num_pairs >= MIN_PAIRS_FOR_TEST and any(differences):
        p_value = signed_rank_p_value(differences)
    return PairedDifference(statistics.fmean(differences), half_width, num_pairs, p_value)


def signed_rank_p_value(differences: Sequence[float]) -> float:
    """Return the exact two-sided p-value of the Wilcoxon signed-rank test, also with ties.

    It counts over all ways to sign the differences; zeros are left out. scipy is exact only
    without ties, or by enumerating all ways.
    """
    import numpy as np
    from scipy import stats

    nonzero = np.round([value for value in differences if abs(value) > ROUNDING_ERROR], 9)
    ranks = (2 * stats.rankdata(np.abs(nonzero))).astype(int)  # doubled: ties have half ranks
    probabilities = np.ones(1)  # of each possible sum of the positive ranks
    for rank in ranks:
        probabilities = 0.5 * (np.pad(probabilities, (0, rank)) + np.pad(probabilities, (rank, 0)))
    observed = int(ranks[nonzero > 0].sum())
    lower_tail = probabilities[: observed + 1].sum()
    upper_tail = probabilities[observed:].sum()
    return float(min(1.0, 2 * lower_tail, 2 * upper_tail))


def differing_warm_starts(study: Study, results: Results) -> dict[str, list[int]]:
    """Find rows that continue another run of a warm start than most rows do.

    A warm start that is run twice on a GPU differs in the order of its sums. Its rounds amplify
    the difference, so runs after two copies are less alike than runs after the same copy.

    Args:
        study: The study.
        results: The stored results.

    Returns:
        The seeds concerned, by row.
    """
    by_start: dict[tuple[Experiment, int], dict[Job, tuple[str, tuple[float, ...]]]] = {}
    for cell, seed in itertools.product(study.cells, study.seeds):
        job = job_of(cell, seed)
        result = results.by_seed(job).get(seed)
        if job.warm_start is None or result is None or "loss" not in result:
            continue
        label = cell.row if cell.row == cell.block else f"{cell.row} ({cell.block})"
        losses = tuple(result["loss"][: job.warm_start.rounds])
        by_start.setdefault((job.warm_start, seed), {}).setdefault(job, (label, losses))
    differing = dict[str, list[int]]()
    for (_, seed), runs in by_start.items():
        counts: collections.Counter[Hashable] = collections.Counter(
            losses for _, losses in runs.values()
        )
        most_common = counts.most_common(1)[0][0]
        for label, losses in runs.values():
            if losses != most_common:
                differing.setdefault(label, []).append(seed)
    return differing


def provenances(study: Study, results: Results) -> list[dict[str, Any]]:
    """List the provenance of every result of a study.

    Args:
        study: The study.
        results: The stored results.

    Returns:
        One table per result.
    """
    return [
        result["provenance"]
        for cell in study.cells
        for result in results_of(cell, results, study.seeds)
    ]


def results_of(cell: Cell, results: Results, seeds: Sequence[int]) -> list[Result]:
    """List the stored results of a cell.

    Args:
        cell: The cell.
        results: The stored results.
        seeds: Seeds to look for.

    Returns:
        The results in the order of seeds, without those that are missing.
    """
    by_seed = [results.by_seed(job_of(cell, seed)).get(seed) for seed in seeds]
    return [result for result in by_seed if result is not None]
