"""Comparisons: several algorithms over several seeds, on the same partitions."""

import dataclasses
import re
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from fedcog.data import Dataset
from fedcog.federation.backend import Diverged
from fedcog.runs.config.composition import algorithm_name
from fedcog.runs.config.experiment import Experiment
from fedcog.runs.config.user_objects import UserObjects, check_seeds
from fedcog.runs.environment import stacks_seeds, torch_settings
from fedcog.runs.experiment_data import data_settings
from fedcog.runs.records.recorded_run import Run, read
from fedcog.runs.records.summary import labels
from fedcog.runs.runner import Runner, RunOptions, run_all
from fedcog.runs.setup import load_data

PlannedRun = tuple[Experiment, Path]
"""An experiment with its seed, and its run directory."""


def plan_runs(
    out: str | Path, experiments: Sequence[Experiment], seeds: Sequence[int]
) -> list[PlannedRun]:
    """Return every run of a comparison with its directory, OUT/ALGORITHM/seed-N.

    Experiments with the same algorithm are named after the settings in which they differ.

    Args:
        out: Folder of the comparison.
        experiments: The experiments; their seeds are ignored.
        seeds: The seeds.

    Returns:
        The runs.
    """
    unique = dict.fromkeys(dataclasses.replace(experiment, seed=0) for experiment in experiments)
    experiments = list(unique)
    names = [algorithm_name(experiment.algorithm) for experiment in experiments]
    safe_labels = [re.sub(r"[^\w.+-]+", "_", label).strip("_") for label in labels(experiments)]
    folders = [
        label if names.count(name) > 1 else name
        for name, label in zip(names, safe_labels, strict=True)
    ]
    return [
        (dataclasses.replace(experiment, seed=seed), Path(out) / folder / f"seed-{seed}")
        for experiment, folder in zip(experiments, folders, strict=True)
        for seed in dict.fromkeys(seeds)
    ]


def run_comparison(
    experiments: Sequence[Experiment],
    seeds: Sequence[int],
    out: str | Path,
    objects: UserObjects | None = None,
    options: RunOptions | None = None,
) -> list[Run]:
    """Run every experiment with every seed; what exists is continued, or only read.

    Args:
        experiments: The experiments.
        seeds: The seeds.
        out: Folder of the comparison.
        objects: Objects of the user.
        options: How the runs are carried out.

    Returns:
        The runs; a diverged one has its `diverged` set and does not stop the others.

    Raises:
        ConfigError: If an experiment cannot run, or one network is given for several seeds.
    """
    objects = objects or UserObjects()
    check_seeds(objects.model, seeds)
    options = (options or RunOptions())._replace(resume=True)
    runs: list[Run] = []
    loaded: dict[tuple[int | str, ...], Dataset] = {}
    for group in _stackable_groups(plan_runs(out, experiments, seeds)):
        first = group[0][0]
        own_objects = objects
        if first.algorithm.generator_config.kind != "custom":
            own_objects = objects._replace(generator=None)
        key = data_settings(first)
        with torch_settings(first), ExitStack() as stack:
            if key not in loaded:
                loaded = {key: load_data(first, objects)}
            own_objects = own_objects._replace(preloaded=loaded[key])
            runners = [
                stack.enter_context(Runner(experiment, path, own_objects, options))
                for experiment, path in group
            ]
            outcomes = run_all(runners)
        for (experiment, path), outcome in zip(group, outcomes, strict=True):
            if isinstance(outcome, Diverged):
                outcome = read(path)
                name = algorithm_name(experiment.algorithm)
                warnings.warn(f"{name}, seed {experiment.seed}: {outcome.diverged}", stacklevel=3)
            runs.append(outcome)
    return runs


def _stackable_groups(runs: list[PlannedRun]) -> list[list[PlannedRun]]:
    """Group runs whose clients train together: seeds of one experiment, if stacking pays."""
    groups: dict[object, list[PlannedRun]] = {}
    for experiment, path in runs:
        key: object = path
        if stacks_seeds(experiment):
            key = dataclasses.replace(experiment, seed=0)
        groups.setdefault(key, []).append((experiment, path))
    return list(groups.values())
