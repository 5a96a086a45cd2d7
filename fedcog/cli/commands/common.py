"""What several commands share: checks before a run, and how to continue it."""

import argparse
import contextlib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedcog.algorithms import Algorithm
from fedcog.api import ObjectKeywords
from fedcog.cli import console
from fedcog.cli.progress import DownloadProgress
from fedcog.core.errors import Interrupted
from fedcog.core.settings import ConfigError
from fedcog.data import DATASETS, registry
from fedcog.data.sources.locations import location_kind
from fedcog.runs.config.composition import algorithm_name
from fedcog.runs.config.experiment import Experiment, read_experiment
from fedcog.runs.environment import torch_settings
from fedcog.runs.experiment_data import resolve_before_loading
from fedcog.runs.records.recorded_run import Run
from fedcog.runs.setup import check_ready


def command_text(options: argparse.Namespace) -> str:
    """Return the command line as a user would type it."""
    return shlex.join(["fedcog", *options.words])


def object_keywords(options: argparse.Namespace) -> ObjectKeywords:
    """Return the objects that the command line names, as arguments of `fedcog.run`."""
    objects = options.user_objects
    return {
        "data": objects.data,
        "model": objects.model,
        "generator": objects.generator,
        "augmentation": objects.augmentation,
    }


def code_flags(options: argparse.Namespace) -> list[str]:
    """Return the flags that name code, which a command that resumes must repeat."""
    values = {
        "--dataset": options.data_function,
        "--model": options.user_objects.model,
        "--augmentation": options.user_objects.augmentation,
    }
    return [word for flag, value in values.items() if value for word in (flag, str(value))]


def ready_experiment(
    values: dict[str, Any], faults: list[str], known: Mapping[str, type[Algorithm]]
) -> Experiment:
    """Create an experiment whose data and device are available.

    Args:
        values: Settings by name.
        faults: Problems that were already found.
        known: Algorithm classes by name.

    Returns:
        The experiment.

    Raises:
        ConfigError: If it cannot run; it lists all problems at once.
    """
    try:
        experiment = read_experiment(values, faults, known)
    except ConfigError as error:
        texts = {
            key: values[key]
            for key in ("dataset", "data_dir", "device", "model")
            if isinstance(values.get(key), str)
        }
        more: list[str] = []
        if location_kind(str(values.get("dataset", "digits"))) in ("name", "folder", "file"):
            with contextlib.suppress(ConfigError):  # its faults are known
                more = check_ready(Experiment(**texts))
        raise ConfigError(error.faults + more) from None
    if not_ready := check_ready(experiment):
        raise ConfigError(not_ready)
    prepare_dataset(experiment)
    return resolve_before_loading(experiment)


def not_ready_faults(experiments: Sequence[Experiment]) -> list[str]:
    """Return what prevents any of some experiments, each problem once."""
    return list(dict.fromkeys(fault for one in experiments for fault in check_ready(one)))


def prepare_dataset(experiment: Experiment) -> None:
    """Prepare the data set on its first use, with a progress bar."""
    if experiment.dataset in DATASETS:
        with torch_settings(experiment), DownloadProgress() as progress:
            registry.prepare(
                experiment.dataset, experiment.data_dir or None, progress=progress.show
            )


@contextlib.contextmanager
def explains_continuation(command: str) -> Iterator[None]:
    """Add to an interruption how to continue."""
    try:
        yield
    except (Interrupted, KeyboardInterrupt) as stop:
        reason = str(stop) or "stopped at once"
        raise Interrupted(f"{reason}; continue with: {command}") from None


def print_diverged(runs: Sequence[Run]) -> int:
    """Print the runs that diverged, and return the exit code."""
    diverged = [run for run in runs if run.diverged]
    console.print_faults(
        [
            f"{algorithm_name(run.experiment.algorithm)}, seed {run.experiment.seed}: "
            f"{run.diverged}"
            for run in diverged
        ]
    )
    return 1 if diverged else 0
