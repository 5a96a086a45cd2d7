"""Metrics derived from a finished run: cost to a target, fairness, forgetting.

What every round records is `RoundRecord` in `fedcog/federation/server.py`.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from fedcog.runs.records.recorded_run import Run


class Cost(NamedTuple):
    """What a run has used by the end of a round.

    Attributes:
        round: The round, from 1.
        bytes: Bytes received and sent by all clients.
        seconds: Wall-clock seconds.
    """

    round: int
    bytes: int
    seconds: float


class Fairness(NamedTuple):
    """Scores of the clients' own models on their own label mix.

    Attributes:
        mean: Mean over clients.
        worst: Mean over the worst tenth of the clients.
        deviation: Standard deviation over clients.
        clients: Number of clients.
    """

    mean: float
    worst: float
    deviation: float
    clients: int


def cost_to(run: Run, target: float) -> Cost | None:
    """Return the cost until the score on the test set first reached a target.

    Args:
        run: The run.
        target: The score, between 0 and 1.

    Returns:
        The cost; None if the target was never reached.
    """
    reached = next((round for round, score in run.scores if score >= target), None)
    if reached is None:
        return None
    lines = [line for line in run.lines if line["round"] <= reached]
    num_bytes = sum(
        int(client.get(way) or 0)
        for line in lines
        for client in line["local"]
        for way in ("down", "up")
    )
    seconds = sum((line.get("seconds") or {}).get("total") or 0.0 for line in lines)
    return Cost(reached, num_bytes, seconds)


def median_cost(runs: Sequence[Run], target: float) -> tuple[list[float], int]:
    """Return the median cost over runs until a target is reached.

    A run that never reaches it counts as infinite cost.

    Args:
        runs: The runs.
        target: The score, between 0 and 1.

    Returns:
        Medians of rounds, bytes and seconds, and the number of runs that reached the target.
    """
    costs = [cost_to(run, target) for run in runs]
    never = (math.inf, math.inf, math.inf)
    columns = zip(*(cost or never for cost in costs), strict=True)
    medians = [statistics.median(values) for values in columns]
    return medians, sum(cost is not None for cost in costs)


def fairness(run: Run) -> Fairness | None:
    """Return the fairness in the last round that evaluated local models; None if there is none."""
    values = _last_values(run, f"own_{run.metric}")
    scores = sorted(score for score in values if score is not None)
    if not scores:
        return None
    worst_tenth = scores[: math.ceil(len(scores) / 10)]
    return Fairness(
        mean=statistics.fmean(scores),
        worst=statistics.fmean(worst_tenth),
        deviation=statistics.pstdev(scores),
        clients=len(scores),
    )


def forgetting(run: Run) -> float | None:
    """Return how much accuracy on absent classes local training loses.

    Returns:
        The loss against the received model, averaged over the clients of the last evaluated round;
        None if no client lacks a class, or it was not measured.
    """
    before = _last_values(run, f"absent_{run.metric}_before")
    after = _last_values(run, f"absent_{run.metric}")
    losses = [
        first - second
        for first, second in zip(before, after, strict=True)
        if first is not None and second is not None
    ]
    return statistics.fmean(losses) if losses else None


def _last_values(run: Run, name: str) -> list[Any]:
    """Return a value of every client in the last round that has it."""
    for line in reversed(run.lines):
        if any(name in client for client in line["local"]):
            return [client.get(name) for client in line["local"]]
    return []
