"""Several algorithms over several seeds, on the same partitions."""

import dataclasses
import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from fedcog.data import Dataset
from fedcog.experiments.config import Experiment, generating, name_of
from fedcog.experiments.prepare import stacked, surroundings
from fedcog.experiments.record import RunDirectory
from fedcog.experiments.run import Run, Watch, carry_out, finish, read
from fedcog.experiments.summary import labels
from fedcog.experiments.track import chosen
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
    generator: nn.Module | None = None,
    watch: Watch | None = None,
    stopping: Callable[[], bool] | None = None,
    command: str | None = None,
    track: str | Sequence[str] = (),
) -> list[Run]:
    """Every experiment with every seed, in OUT/ALGORITHM/seed-N, and one report of all.

    What is already there is continued or, where finished, only read: a comparison may be stopped and started again. A
    run that diverges does not keep the others from running: its `diverged` says why it ended early. On a GPU the seeds
    of an experiment run in step, their clients as one larger cohort: each ends as it would alone, but for rounding.
    `track` names trackers that follow every run.
    """
    runs, trackers = list[Run](), chosen(track)
    common: dict[str, Any] = {"data": data, "model": model, "resume": True, "watch": watch, "stopping": stopping}
    common |= {"command": command, "track": trackers}
    for experiment, group in _groups(places(out, experiments, seeds)):
        own = common | ({"generator": generator} if generating(experiment.algorithm).generator == "custom" else {})
        with surroundings(experiment.threads, experiment.tf32):
            steps = [carry_out(one, place, **own) for one, place in group]
            done = finish(experiment, steps)
        for (one, place), ended in zip(group, done, strict=True):
            if isinstance(ended, Diverged):  # the others are worth having all the same; the run says what happened
                ended = read(place)
                warnings.warn(f"{name_of(one.algorithm)}, seed {one.seed}: {ended.diverged}", stacklevel=2)
            runs.append(ended)
    from fedcog.experiments.report import page  # draws: loads matplotlib

    RunDirectory(out).save_report(page([one.path for one in runs]))
    return runs


def _groups(all_: list[tuple[Experiment, Path]]) -> list[tuple[Experiment, list[tuple[Experiment, Path]]]]:
    """Runs that are carried out in step: seeds of one experiment whose clients train together; else each alone."""
    groups: dict[object, list[tuple[Experiment, Path]]] = {}
    for experiment, place in all_:
        mates = dataclasses.replace(experiment, seed=0) if stacked(experiment) else place
        groups.setdefault(mates, []).append((experiment, place))
    return [(group[0][0], group) for group in groups.values()]
