"""Several algorithms over several seeds, on the same partitions."""

import dataclasses
import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import nn

from fedcog.data import Dataset
from fedcog.experiments.config import Experiment, name_of
from fedcog.experiments.record import RunDirectory
from fedcog.experiments.run import Run, Watch, read, run
from fedcog.experiments.summary import labels
from fedcog.federation.rounds import Diverged


def places(out: str | Path, experiments: Sequence[Experiment], seeds: Sequence[int]) -> list[tuple[Experiment, Path]]:
    """Every run of a comparison and where it lives: by algorithm, and by what else differs where that is not enough."""
    experiments = list(dict.fromkeys(dataclasses.replace(experiment, seed=0) for experiment in experiments))
    names = [name_of(experiment.algorithm) for experiment in experiments]
    told = [re.sub(r"[^\w.+-]+", "_", label).strip("_") for label in labels(experiments)]
    folders = [label if names.count(name) > 1 else name for name, label in zip(names, told, strict=True)]
    return [
        (dataclasses.replace(experiment, seed=seed), Path(out) / folder / f"seed-{seed}")
        for experiment, folder in zip(experiments, folders, strict=True)
        for seed in dict.fromkeys(seeds)
    ]


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

    What is already there is continued or, where finished, only read: a comparison may be stopped and started again. A
    run that diverges does not keep the others from running: its `diverged` says why it ended early.
    """
    runs = []
    for experiment, place in places(out, experiments, seeds):
        try:
            done = run(
                experiment,
                place,
                data=data,
                model=model,
                resume=True,
                report=False,
                watch=watch,
                stopping=stopping,
                command=command,
            )
        except Diverged:  # the others are worth having all the same; the run says what happened
            done = read(place)
            warnings.warn(f"{name_of(experiment.algorithm)}, seed {experiment.seed}: {done.diverged}", stacklevel=2)
        runs.append(done)
    from fedcog.experiments.report import page  # draws: loads matplotlib

    RunDirectory(out).save_report(page([one.path for one in runs]))
    return runs
