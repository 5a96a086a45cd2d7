"""One metric of a run over its rounds, by its key in the rounds' lines."""

import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from fedcog.core.settings import ConfigError, unknown_name
from fedcog.core.tasks import EXTRA_METRICS, METRIC_LABELS
from fedcog.runs.records.recorded_run import Run
from fedcog.runs.tracking.values import round_metrics

SCORE_WORDS = ("accuracy", "f1")
"""A key whose last part has one of these words, or is in `EXTRA_METRICS`, is a score."""
COST_WORDS = {
    "loss",
    "ece",
    "error",
    "mse",
    "rmse",
    "mae",
    "nll",
    "brier",
    "perplexity",
    "fpr",
    "fnr",
    "distance",
    "deviation",
    "seconds",
    "bytes",
    "epsilon",
    "skipped",
    "refused",
    "forgot",
    "attack",
}
"""Of a metric whose key has one of these words, less is better."""


def series(run: Run, metric: str = "") -> list[tuple[int, float]]:
    """Return a metric of every round that has it.

    Args:
        run: The run.
        metric: Key as in `fedcog.frame`, such as "loss" or "local_test/accuracy_mean"; by default
            the main metric on the test set.

    Returns:
        (round, value), rounds from 1.
    """
    if not metric:
        return run.scores
    values = [(line["round"], round_metrics(line).get(metric)) for line in run.lines]
    return [(round, value) for round, value in values if value is not None]


def last_value(run: Run, metric: str = "") -> float | None:
    """Return a metric of the last round that recorded it.

    Args:
        run: The run.
        metric: Key as in `series`.

    Returns:
        The value; None if no round has it, or if it was NaN or infinite in the last one, which a
        warning says.
    """
    values = series(run, metric)
    last_line = next((line for line in reversed(run.lines) if _is_recorded(line, metric)), None)
    if values and last_line is not None and last_line["round"] > values[-1][0]:
        warnings.warn(
            f"{run.path}: {metric} was NaN or infinite in the last evaluated round, "
            f"{last_line['round']}, so the run has no last value of it.",
            stacklevel=3,
        )
        return None
    return values[-1][1] if values else None


def with_values(runs: Sequence[Run], metric: str = "") -> list[Run]:
    """Return the runs that have a metric, or diverged before they could have it.

    The trials of a sweep, which never use the test set, have no scores on it.

    Args:
        runs: The runs.
        metric: Key as in `series`.

    Returns:
        The runs; at least one has the metric.

    Raises:
        ConfigError: If no run has the metric; the error names close ones.
    """
    if not runs:
        raise ConfigError(["there are no runs: give some, or a folder with runs below it."])
    found = [
        run
        for run in runs
        if series(run, metric) or (run.diverged and run.experiment.evaluate_test)
    ]
    if any(series(run, metric) for run in found):
        if metric and len(found) < len(runs):
            missing = next(run.path for run in runs if run not in found)
            warnings.warn(
                f"{len(runs) - len(found)} of {len(runs)} runs have no {metric} and are left out, "
                f"such as {missing}.",
                stacklevel=3,
            )
        return found
    known = dict.fromkeys(key for run in runs for line in run.lines for key in round_metrics(line))
    if not metric:
        example = next((key for key in known if key.startswith("validation_")), "loss")
        raise ConfigError(
            [f"no round has been evaluated on test examples: name a metric, such as {example}."]
        )
    if parts := [key for key in known if key.startswith(f"{metric}/")]:
        raise ConfigError([f"metric '{metric}' has several values: choose {', '.join(parts[:5])}."])
    if any(_is_recorded(line, metric) for run in runs for line in run.lines):
        raise ConfigError([f"metric '{metric}' is no number, or NaN or infinite in every round."])
    raise ConfigError([unknown_name("metric", metric, list(known))])


def _is_recorded(line: Mapping[str, Any], metric: str) -> bool:
    """Return whether a line has a metric, even if it is no number."""
    place, _, name = metric.rpartition("/")
    return name in (line.get(place, {}) if place else line)


def metric_label(runs: Sequence[Run], metric: str = "") -> str:
    """Return a metric's name for people: 'test accuracy', or its key.

    Args:
        runs: The runs.
        metric: Key as in `series`.

    Returns:
        The name, without a unit.
    """
    if metric and metric not in METRIC_LABELS:
        return metric
    scored = [run for run in runs if run.scores]
    names = []
    for run in scored:
        label = METRIC_LABELS[run.metric]
        is_by_server = run.test_examples == "the test set"
        names.append(f"test {label}" if is_by_server else f"{label} on {run.test_examples}")
    return " or ".join(dict.fromkeys(names))


def is_score(metric: str) -> bool:
    """Return whether a metric is a score from 0 to 1, which is printed in percent."""
    name = next((part for part in reversed(metric.split("/")) if not part.isdigit()), "")
    return not metric or name in EXTRA_METRICS or any(word in name for word in SCORE_WORDS)


def is_cost(metric: str) -> bool:
    """Return whether less of a metric is better."""
    return not COST_WORDS.isdisjoint(re.split(r"[/_]", metric))
