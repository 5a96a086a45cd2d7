"""What the sections read in the records of runs: names, curves over rounds, seconds, and where FedCOG wakes."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fedcog.algorithms import FedCOG
from fedcog.experiments.config import Experiment, layers, name_of
from fedcog.experiments.record import RecordError, RunDirectory
from fedcog.experiments.report.figures import Curve, look
from fedcog.experiments.run import Run
from fedcog.experiments.summary import Group, Spread, spread

Line = dict[str, Any]
Federation = tuple[dict[str, Tensor], Line]  # what federation.safetensors holds, and says about itself


def federation(run: Run) -> Federation:
    """What the run recorded of its clients and data."""
    try:
        return RunDirectory(run.path).tensors("federation.safetensors")
    except RecordError:  # not there yet, or damaged: the section about it says so
        return {}, {}


def datasets(runs: Sequence[Run], federations: Sequence[Federation]) -> list[str]:
    """The data set of each run, by the name it was recorded under."""
    return [
        str(about.get("dataset", run.experiment.dataset)) for run, (_, about) in zip(runs, federations, strict=True)
    ]


def name(run: Run) -> str:
    """What the run's algorithm is called."""
    return name_of(run.experiment.algorithm)


def over_rounds(runs: Sequence[Run], values: Callable[[Line], Sequence[float | None]]) -> list[tuple[int, Spread]]:
    """(round, mean and deviation over all values that the runs have of it)."""
    found: dict[int, list[float]] = {}
    for run in runs:
        for line in run.lines:
            found.setdefault(line["round"], []).extend(value for value in values(line) if value is not None)
    return [(round, spread(numbers)) for round, numbers in sorted(found.items()) if numbers]


def curves(groups: Sequence[Group], values: Callable[[Line], Sequence[float | None]]) -> list[Curve]:
    """A curve for each group that has values."""
    found = [Curve(each.label, over_rounds(each.runs, values), look(n)) for n, each in enumerate(groups)]
    return [curve for curve in found if curve.points]


def local(line: Line, name: str) -> list[float | None]:
    """A quantity of every client of the round."""
    return [client.get(name) for client in line.get("local", ())]


def seconds(lines: Sequence[Line]) -> dict[str, float]:
    """Mean seconds of a round by what they went into; empty where none were measured."""
    timed = [line["seconds"] for line in lines if line.get("seconds")]
    if not timed:
        return {}
    parts = {
        part: statistics.fmean(each.get(part) or 0.0 for each in timed)
        for part in ("generation", "training", "evaluation")
    }
    total = statistics.fmean(each.get("total") or 0.0 for each in timed)
    return parts | {"other": max(0.0, total - sum(parts.values()))}


def wake(experiment: Experiment) -> int | None:
    """The first round, from 1, in which FedCOG generates."""
    found = [layer.start_round + 1 for _, layer in layers(experiment.algorithm) if isinstance(layer, FedCOG)]
    return found[0] if found else None


def wakes(groups: Sequence[Group]) -> list[int]:
    """Where FedCOG wakes between two rounds that are there."""
    found = {
        first
        for each in groups
        for run in each.runs
        if (first := wake(run.experiment)) is not None and 1 < first <= len(run.lines)
    }
    return sorted(found)
