"""What papers print of a run beside its accuracy: what a target costs, how unequally clients fare, what they forget."""

import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from fedcog.experiments.run import Run


class Cost(NamedTuple):
    """What a run had spent at the end of a round: bytes of all clients, both ways, and wall-clock seconds."""

    round: int
    bytes: int
    seconds: float


class Fairness(NamedTuple):
    """How clients' own models do on their clients' own mix of labels: mean, that of the worst tenth, and deviation."""

    mean: float
    worst: float
    deviation: float
    clients: int


def cost_to(run: Run, target: float) -> Cost | None:
    """What it took until the score on the test set first reached `target`; None if it never did."""
    reached = next((round for round, score in run.scores if score >= target), None)
    if reached is None:
        return None
    lines = [line for line in run.lines if line["round"] <= reached]
    sent = sum(int(one.get(way) or 0) for line in lines for one in line["local"] for way in ("down", "up"))
    return Cost(reached, sent, sum((line.get("seconds") or {}).get("total") or 0.0 for line in lines))


def typical_cost(runs: Sequence[Run], target: float) -> tuple[list[float], int]:
    """The median over runs of rounds, bytes and seconds to `target`, and how many of them reached it.

    One that never did counts as beyond all that did, so a median may be infinite.
    """
    found = [cost_to(run, target) for run in runs]
    beyond = math.inf, math.inf, math.inf
    medians = [statistics.median(values) for values in zip(*(cost or beyond for cost in found), strict=True)]
    return medians, sum(cost is not None for cost in found)


def fairness(run: Run) -> Fairness | None:
    """Of the last round in which clients' models were evaluated; None if there is none."""
    own = sorted(one for one in _last(run, f"own_{run.measure}") if one is not None)
    if not own:
        return None
    tenth = own[: math.ceil(len(own) / 10)]
    return Fairness(statistics.fmean(own), statistics.fmean(tenth), statistics.pstdev(own), len(own))


def forgetting(run: Run) -> float | None:
    """What of its accuracy on classes that a client lacks the model it was sent loses by local training there.

    Mean over the clients of the last evaluated round; None where nobody lacks a class, or it was not measured.
    """
    names = f"absent_{run.measure}_before", f"absent_{run.measure}"
    pairs = zip(*(_last(run, name) for name in names), strict=True)
    lost = [before - after for before, after in pairs if before is not None and after is not None]
    return statistics.fmean(lost) if lost else None


def _last(run: Run, name: str) -> list[Any]:
    """A quantity of every client of the last round that has it."""
    lines = (line["local"] for line in reversed(run.lines))
    return next(([one.get(name) for one in each] for each in lines if any(name in one for one in each)), [])
