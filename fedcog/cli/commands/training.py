"""Commands that train: run, compare, sweep."""

import argparse
import contextlib
import shlex
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fedcog
from fedcog.api import run_planned_sweep
from fedcog.cli import flags, output
from fedcog.cli.commands.common import (
    code_flags,
    command_text,
    explains_continuation,
    not_ready_faults,
    object_keywords,
    prepare_dataset,
    print_diverged,
    ready_experiment,
)
from fedcog.cli.console import print_result
from fedcog.cli.progress import CommandProgress
from fedcog.core.errors import Interrupted
from fedcog.core.settings import ConfigError
from fedcog.core.toml import read_toml
from fedcog.data.datasets import DataWarning
from fedcog.data.sources.locations import short_name
from fedcog.federation import torchrun
from fedcog.federation.backend import Diverged
from fedcog.runs.compare import plan_runs
from fedcog.runs.config.device_config import without_algorithms
from fedcog.runs.config.experiment import Experiment, read_experiment
from fedcog.runs.config.notes import SettingWarning
from fedcog.runs.config.user_objects import check_runnable, missing_objects
from fedcog.runs.experiment_data import resolve_before_loading
from fedcog.runs.records.run_directory import RunDirectory, check_writable
from fedcog.runs.runner import NetworkNote, RunOptions, default_directory
from fedcog.runs.tracking import TrackerWarning, check_trackers
from fedcog.studies.tuning import sweep


def run_command(options: argparse.Namespace, rest: list[str]) -> int:
    """Run one experiment, or continue one.

    Args:
        options: The parsed command line.
        rest: What no flag took.

    Returns:
        The exit code.
    """
    values, faults = flags.read_values(options, rest)
    if options.resume is not None:
        recorded = RunDirectory(options.resume).experiment(options.known)
        missing = check_runnable(recorded) + missing_objects(recorded, options.user_objects)
        if missing:
            raise ConfigError(missing)
        if options.out:
            faults.append(f"--resume continues the run in {options.resume}: remove --out.")
        values = flags.merge(recorded.to_dict(), values)
    experiment = ready_experiment(values, faults, options.known)
    trackers = _trackers(options)
    out = Path(options.resume or options.out or default_directory(experiment))
    if torchrun.is_follower():
        with contextlib.suppress(Diverged, Interrupted):  # the leader reports them
            fedcog.run(experiment, out, report=False, **object_keywords(options))
        return 0
    track_flags = [word for name in trackers for word in ("--track", name)]
    further_flags = [*code_flags(options), *track_flags]
    resume_command = shlex.join(["fedcog", "run", "--resume", str(out), *further_flags])
    num_done = RunDirectory(out).checkpoint_round()
    with CommandProgress(experiment.rounds, num_done, options.style) as progress:
        output.print_experiment(experiment, out, options.style)
        with explains_continuation(resume_command), _every_tracker_warning():
            warnings.simplefilter("ignore", SettingWarning)  # already printed
            run = fedcog.run(
                experiment,
                out,
                resume=options.resume is not None,
                callbacks=progress.show_round,
                should_stop=progress.should_stop,
                command=command_text(options),
                track=trackers,
                progress=False,
                **object_keywords(options),
            )
    output.print_results([run], options.style)
    print_result(f"report: {out / 'report.html'}", options.style)
    return 0


def compare_command(options: argparse.Namespace, rest: list[str]) -> int:
    """Run several algorithms over several seeds.

    Args:
        options: The parsed command line.
        rest: What no flag took.

    Returns:
        The exit code.
    """
    values, faults = flags.read_values(options, rest)
    if torchrun.is_started():
        raise ConfigError(
            ["torchrun is for one run: use fedcog run with it, run by run, or compare without it."]
        )
    if options.fedcog or options.algorithm is not None or options.seed is not None:
        faults.append(
            "compare takes --algorithms and --seeds, not --algorithm, --fedcog or --seed."
        )
    if not options.algorithms:
        faults.append(
            "compare needs at least one algorithm, such as: --algorithms fedavg fedprox "
            "fedprox+fedcog."
        )
    experiments = _experiments(options, values, faults)
    seeds = flags.read_seeds(options.seeds, faults)
    if experiments and not faults:
        faults = not_ready_faults(experiments)
    if faults:
        raise ConfigError(faults)
    trackers = _trackers(options)
    prepare_dataset(experiments[0])
    out = Path(options.out or Path("runs") / f"compare-{short_name(experiments[0].dataset)}")
    planned = plan_runs(out, experiments, seeds)
    num_rounds = sum(experiment.rounds for experiment, _ in planned)
    num_done = sum(RunDirectory(path).checkpoint_round() for _, path in planned)
    with CommandProgress(num_rounds, num_done, options.style) as progress:
        output.print_comparison(experiments, seeds, out, options.style)
        with explains_continuation(command_text(options)), _comparison_warnings():
            runs = fedcog.compare(
                experiments,
                seeds,
                out,
                callbacks=progress.show_round,
                should_stop=progress.should_stop,
                command=command_text(options),
                track=trackers,
                progress=False,
                **object_keywords(options),
            )
    output.print_results(runs, options.style)
    print_result(f"report: {out / 'report.html'}", options.style)
    return print_diverged(runs)


def sweep_command(options: argparse.Namespace, rest: list[str]) -> int:
    """Tune several algorithms with equal budgets.

    Args:
        options: The parsed command line.
        rest: What no flag took.

    Returns:
        The exit code.
    """
    values, faults = flags.read_values(options, rest)
    if torchrun.is_started():
        raise ConfigError(["torchrun is for one run: use fedcog sweep without it."])
    if options.fedcog or options.algorithm is not None:
        faults.append("sweep takes --algorithms, not --algorithm or --fedcog.")
    if not options.algorithms:
        faults.append(
            "sweep needs at least one algorithm, such as: --algorithms fedavg fedprox fedcog."
        )
    if values.get("validation") == 0:
        faults.append(
            "trials are scored on held-out examples: set --validation above 0, such as "
            f"{sweep.DEFAULT_VALIDATION:g}."
        )
    experiments = _experiments(options, values, faults)
    space = _read_space(options.space, faults)
    seeds = flags.read_seeds(options.seeds, faults)
    trial_seeds = flags.read_seeds(options.trial_seeds, faults)
    if faults:
        raise ConfigError(faults)
    plan = sweep.plan_sweep(
        experiments,
        space,
        search=options.search,
        trials=options.trials,
        seed=int(values.get("seed", 0)),
        trial_seeds=trial_seeds,
        seeds=seeds,
        data=options.user_objects.data,
        model=options.user_objects.model,
    )
    if not_ready := not_ready_faults(experiments):
        raise ConfigError(not_ready)
    prepare_dataset(experiments[0])
    out = Path(options.out or Path("runs") / f"sweep-{short_name(experiments[0].dataset)}")
    check_writable(out, "--out")
    num_done = plan.total_rounds - sweep.Sweep(plan, out).rounds_left()
    with CommandProgress(plan.total_rounds, num_done, options.style, tuple(plan.space)) as progress:
        output.print_sweep_plan(plan, out, options.style)
        run_options = RunOptions(
            callbacks=[progress.show_round],
            should_stop=progress.should_stop,
            command=command_text(options),
        )
        with explains_continuation(command_text(options)):
            tuned = run_planned_sweep(plan, out, options.user_objects, run_options)
    output.print_tuned(plan, tuned, options.style)
    print_result(f"report: {out / 'report.html'}; all trials: {out / 'sweep.md'}", options.style)
    return print_diverged([run for one in tuned for run in one.runs])


def _experiments(
    options: argparse.Namespace, values: dict[str, Any], faults: list[str]
) -> list[Experiment]:
    """Create an experiment per algorithm; problems are appended to the faults, each once."""
    experiments = []
    parts = {name: set(name.split("+")) for name in options.algorithms or []}
    all_parts = set[str]().union(*parts.values())
    new_faults: dict[str, None] = {}
    for name, own_parts in parts.items():
        own_values = values | {"algorithm": name}
        if isinstance(devices := values.get("devices"), str):
            own_values["devices"] = without_algorithms(devices, all_parts - own_parts)
        try:
            experiment = read_experiment(own_values, known=options.known)
            experiments.append(resolve_before_loading(experiment))
        except ConfigError as error:
            new_faults |= dict.fromkeys(error.faults)
    faults += new_faults
    return experiments


def _read_space(path: str | None, faults: list[str]) -> dict[str, Any]:
    if path is None:
        faults.append(
            "sweep needs a search space: --space FILE.toml, with lists or ranges for settings."
        )
        return {}
    try:
        return read_toml(path)
    except ConfigError as error:
        faults += error.faults
        return {}


def _trackers(options: argparse.Namespace) -> list[str]:
    trackers = list(dict.fromkeys(options.track))
    check_trackers(trackers)
    return trackers


@contextlib.contextmanager
def _every_tracker_warning() -> Iterator[None]:
    """Show warnings of trackers every time."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", TrackerWarning)
        yield


@contextlib.contextmanager
def _comparison_warnings() -> Iterator[None]:
    """Show only warnings of data and trackers; diverged runs are printed at the end."""
    with warnings.catch_warnings(action="ignore"):
        warnings.simplefilter("default", DataWarning)
        warnings.simplefilter("default", NetworkNote)
        with _every_tracker_warning():
            yield
