"""Recorded runs as a table of rounds: a pandas DataFrame."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcog.core.settings import ConfigError
from fedcog.runs.config.composition import algorithm_name
from fedcog.runs.records.recorded_run import Run, read_all
from fedcog.runs.records.summary import data_names, differing, group, run_settings
from fedcog.runs.tracking.values import round_metrics

if TYPE_CHECKING:
    from pandas import DataFrame

COLUMNS = ("algorithm", "dataset", "partition", "seed", "group", "round")
"""The first columns of a frame."""

Runs = Run | str | Path | Sequence[Run | str | Path]
"""A run, a folder with runs below it, or several of both."""


def frame(runs: Runs) -> "DataFrame":
    """Return the rounds of some runs as a pandas DataFrame, one row per round.

    Args:
        runs: A folder with runs below it, or runs and folders.

    Returns:
        The columns `algorithm`, `dataset`, `partition`, `seed`, `group` (the label of
        `fedcog.group`) and `round`, from 1; then every setting that differs between the runs;
        then every number of a round's line in `rounds.jsonl`, such as `accuracy`, `loss`,
        `local_test/accuracy_mean` and `metrics/ece`. `bytes/` is the sum, `clients/` the mean over
        the round's clients. Scores are fractions. What a round lacks is NaN.

    Raises:
        ConfigError: If pandas is not installed.
        RecordError: If the folder holds no run that can be read.

    Example:
        ```python
        import fedcog

        experiments = [fedcog.Experiment(lr=lr, rounds=2, local_steps=5) for lr in (0.01, 0.1)]
        runs = fedcog.compare(experiments, seeds=[0, 1], out="runs/rates")
        rounds = fedcog.frame(runs)
        print(rounds.groupby(["lr", "round"])["accuracy"].agg(["mean", "std"]))
        ```
    """
    try:
        from pandas import DataFrame  # optional, and takes half a second
    except ImportError:
        raise ConfigError(["a frame needs pandas: pip install 'fedcog[pandas]'."]) from None
    chosen = as_runs(runs)
    settings = [run_settings(run) for run in chosen]
    names = [name for name in differing(settings) if name not in COLUMNS]
    labels = {
        run.path: each.label for each in group(chosen) for run in (*each.runs, *each.repeated)
    }
    rows = []
    for run, own, dataset in zip(chosen, settings, data_names(chosen), strict=True):
        first = _identity(run, dataset, labels[run.path])
        first |= {name: own.get(name) for name in names}
        rows += [first | {"round": line["round"]} | round_metrics(line) for line in run.lines]
    columns = dict.fromkeys([*COLUMNS, *names])
    for row in rows:
        columns |= dict.fromkeys(row)
    return DataFrame(rows, columns=list(columns))


def as_runs(runs: Runs) -> list[Run]:
    """Return runs, which are read if folders are given.

    Args:
        runs: A run, a folder with runs below it, or several of both.

    Returns:
        The runs; each path once.

    Raises:
        RecordError: If a folder holds no run that can be read.
    """
    if isinstance(runs, str | Path | Run):
        runs = [runs]
    found: list[Run] = []
    for one in runs:
        found += read_all(one) if isinstance(one, str | Path) else [one]
    return list({run.path: run for run in found}.values())


def _identity(run: Run, dataset: str, label: str) -> dict[str, Any]:
    """Return the columns that say which run a row is of."""
    experiment = run.experiment
    return {
        "algorithm": algorithm_name(experiment.algorithm),
        "dataset": dataset,
        "partition": experiment.partition_rule,
        "seed": experiment.seed,
        "group": label,
    }
