"""Several algorithms over several seeds, on the same partitions."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import nn

from fedcog.data import Dataset
from fedcog.experiments.config import Experiment, name_of
from fedcog.experiments.record import RunDirectory
from fedcog.experiments.run import Run, Watch, run


def place(out: str | Path, experiment: Experiment, seed: int) -> Path:
    """Where a run of a comparison lives."""
    return Path(out) / name_of(experiment.algorithm) / f"seed-{seed}"


def compare(
    experiments: Sequence[Experiment],
    seeds: Sequence[int],
    out: str | Path,
    *,
    data: Dataset | None = None,
    model: nn.Module | None = None,
    watch: Watch | None = None,
    stopping: Callable[[], bool] | None = None,
    command: str | None = None,
) -> list[Run]:
    """Every experiment with every seed, in OUT/ALGORITHM/seed-N, and one report of all.

    What is already there is continued or, where finished, only read: a comparison may be stopped and started again.
    """
    runs = [
        run(
            dataclasses.replace(experiment, seed=seed),
            place(out, experiment, seed),
            data=data,
            model=model,
            resume=True,
            report=False,
            watch=watch,
            stopping=stopping,
            command=command,
        )
        for experiment in experiments
        for seed in seeds
    ]
    from fedcog.experiments.report import page  # draws: loads matplotlib

    RunDirectory(out).save_report(page([one.path for one in runs]))
    return runs
