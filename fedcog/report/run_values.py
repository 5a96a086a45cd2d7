"""Values that the sections of a report read from run records."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fedcog.report.figures import Curve, line_style
from fedcog.runs.config.composition import algorithm_name
from fedcog.runs.config.experiment import Experiment
from fedcog.runs.records.recorded_run import Run
from fedcog.runs.records.run_directory import RecordError, RunDirectory
from fedcog.runs.records.summary import Group, Spread, spread

RoundLine = dict[str, Any]
"""One line of rounds.jsonl."""

FederationRecord = tuple[dict[str, Tensor], dict[str, Any]]
"""The tensors of federation.safetensors, and its metadata."""

TIMED_PARTS = ("generation", "training", "evaluation")


def federation(run: Run) -> FederationRecord:
    """Read what a run recorded about its clients and data; empty if missing or damaged."""
    try:
        return RunDirectory(run.path).tensors("federation.safetensors")
    except RecordError:  # the section about the partition reports it
        return {}, {}


def client_labels(run: Run, num_clients: int) -> list[str]:
    """Return a label for each client: its number, and the name of its user if there is one.

    Args:
        run: The run.
        num_clients: Number of clients.
    """
    names = run.client_names
    if len(names) != num_clients:
        return [str(client_id) for client_id in range(num_clients)]
    return [f"{client_id} {name}".strip() for client_id, name in enumerate(names)]


def datasets(runs: Sequence[Run], federations: Sequence[FederationRecord]) -> list[str]:
    """Return the name of each run's data set.

    Args:
        runs: The runs.
        federations: The federation record of each run.

    Returns:
        The recorded names, or those in the settings.
    """
    return [
        str(about.get("dataset", run.experiment.dataset))
        for run, (_, about) in zip(runs, federations, strict=True)
    ]


def algorithm_of(run: Run) -> str:
    """Return the name of a run's algorithm."""
    return algorithm_name(run.experiment.algorithm)


def over_rounds(
    runs: Sequence[Run], values: Callable[[RoundLine], Sequence[float | None]]
) -> list[tuple[int, Spread]]:
    """Average values by round.

    Args:
        runs: The runs.
        values: Reads the values of a round from its record.

    Returns:
        Round, and mean and standard deviation over all values of all runs.
    """
    by_round: dict[int, list[float]] = {}
    for run in runs:
        for record in run.lines:
            numbers = [value for value in values(record) if value is not None]
            by_round.setdefault(record["round"], []).extend(numbers)
    return [(round, spread(numbers)) for round, numbers in sorted(by_round.items()) if numbers]


def curves(
    groups: Sequence[Group], values: Callable[[RoundLine], Sequence[float | None]]
) -> list[Curve]:
    """Return a curve for each group that has values.

    Args:
        groups: The groups of runs.
        values: Reads the values of a round from its record.

    Returns:
        The curves, in the style of their group.
    """
    all_curves = [
        Curve(group.label, over_rounds(group.runs, values), line_style(index))
        for index, group in enumerate(groups)
    ]
    return [curve for curve in all_curves if curve.points]


def curves_over_virtual_time(
    groups: Sequence[Group], values: Callable[[RoundLine], Sequence[float | None]]
) -> list[Curve]:
    """Return a curve over virtual seconds for each group that has recorded them.

    Args:
        groups: The groups of runs.
        values: Reads the values of a round from its record.

    Returns:
        The curves, in the style of their group. A point is a round: the mean over the runs of its
        values, at the mean of their virtual times.
    """
    drawn = []
    for index, group in enumerate(groups):
        times = dict(over_rounds(group.runs, lambda record: [record.get("virtual_seconds")]))
        points = [
            (times[round].mean, value)
            for round, value in over_rounds(group.runs, values)
            if round in times
        ]
        drawn.append(Curve(group.label, points, line_style(index)))
    return [curve for curve in drawn if curve.points]


def client_values(record: RoundLine, name: str) -> list[float | None]:
    """Return a value of every client in a round.

    Args:
        record: The record of the round.
        name: The key of the value.

    Returns:
        The values; None where a client has none.
    """
    return [client.get(name) for client in record.get("local", ())]


def mean_seconds(records: Sequence[RoundLine]) -> dict[str, float]:
    """Return the mean seconds of a round by part; empty if no time was recorded."""
    timed = [record["seconds"] for record in records if record.get("seconds")]
    if not timed:
        return {}
    parts = {
        part: statistics.fmean(seconds.get(part) or 0.0 for seconds in timed)
        for part in TIMED_PARTS
    }
    total = statistics.fmean(seconds.get("total") or 0.0 for seconds in timed)
    parts["other"] = max(0.0, total - sum(parts.values()))
    return parts


def first_generating_round(experiment: Experiment) -> int | None:
    """Return the first round, from 1, in which FedCOG generates inputs; None without FedCOG."""
    start = experiment.algorithm.generation_start
    return None if start is None else start + 1


def generation_starts(groups: Sequence[Group]) -> list[int]:
    """Return the rounds in which FedCOG begins to generate, after other recorded rounds."""
    starts = set[int]()
    for group in groups:
        for run in group.runs:
            first = first_generating_round(run.experiment)
            if first is not None and 1 < first <= len(run.lines):
                starts.add(first)
    return sorted(starts)
