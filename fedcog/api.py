"""The functions that users call: they carry out experiments and write the reports."""

import contextlib
import dataclasses
import difflib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack, get_type_hints

from torch import Tensor, nn

from fedcog.algorithms import Algorithm
from fedcog.core.metrics import MetricFunctions
from fedcog.core.settings import ConfigError
from fedcog.data import Dataset
from fedcog.data.client_batches import Augmentation
from fedcog.federation import torchrun
from fedcog.models.initialization import Network
from fedcog.runs.compare import plan_runs, run_comparison
from fedcog.runs.config.experiment import Experiment
from fedcog.runs.config.notes import warn_about_settings
from fedcog.runs.config.user_objects import UserObjects
from fedcog.runs.environment import torch_settings
from fedcog.runs.experiment_data import split_dataset
from fedcog.runs.records.files import without_nan
from fedcog.runs.records.frames import Runs
from fedcog.runs.records.recorded_run import Run
from fedcog.runs.records.run_directory import RunDirectory, write_file
from fedcog.runs.runner import (
    Callback,
    Runner,
    RunOptions,
    default_directory,
    round_loop,
    with_user_objects,
)
from fedcog.runs.torchrun_runs import follow
from fedcog.runs.tracking import Tracker
from fedcog.studies.audit.audit import Audit, AuditSettings, audit_run
from fedcog.studies.audit.inversion import LabelAttack
from fedcog.studies.tuning.sweep import (
    SearchOptions,
    Sweep,
    SweepPlan,
    Tuned,
    plan_sweep,
    run_sweep,
)


class ObjectKeywords(TypedDict, total=False):
    """Your own objects, instead of what the experiment names.

    Attributes:
        data: Your data set.
        model: Your network: its class or a function that builds it, which starts from the
            experiment's seed, or an instance, whose weights are the start.
        generator: Your generator, for FedCOG(generator="custom").
        augmentation: Your augmentation: a function of a batch of one client and a source of keyed
            random numbers, which returns the changed batch.
    """

    data: Dataset | None
    model: Network | None
    generator: nn.Module | None
    augmentation: Augmentation | None


class LoopKeywords(ObjectKeywords, total=False):
    """Your own objects, and functions that are called during training.

    Attributes:
        callbacks: A function, or several, called after every round with the experiment and the
            round's line of `rounds.jsonl`.
        should_stop: Called after every round; if it returns true, the run saves a checkpoint and
            raises `Interrupted`.
        command: The command line to record in `provenance.json`.
        progress: Whether to show progress on stderr. By default it is shown on a terminal and in a
            notebook. False: never. True: in plain lines where there is neither.
    """

    callbacks: Callback | Sequence[Callback]
    should_stop: Callable[[], bool] | None
    command: str | None
    progress: bool | None


class SweepKeywords(LoopKeywords, SearchOptions, total=False):
    """Keyword arguments of `sweep`: those of `LoopKeywords` and of the search."""


class CompareKeywords(LoopKeywords, total=False):
    """Keyword arguments of `compare`: those of `LoopKeywords`, trackers and metrics.

    Attributes:
        track: A tracker or several: "tensorboard", "mlflow", "wandb", or a `Tracker` object.
        metrics: Metrics of your own by name: functions of logits `(N, C)` and labels `(N,)` that
            return one number. They are recorded after every evaluated round.
    """

    track: str | Tracker | Sequence[str | Tracker]
    metrics: MetricFunctions


class RunKeywords(CompareKeywords, total=False):
    """Keyword arguments of `run`: those of `compare`, and how the directory is used.

    Attributes:
        resume: Whether to continue a run that is already in the directory.
        report: Whether to write report.html; True by default.
    """

    resume: bool
    report: bool


def run(
    experiment: Experiment, out: str | Path | None = None, **keywords: Unpack[RunKeywords]
) -> Run:
    """Carry out an experiment and record it.

    Args:
        experiment: The experiment.
        out: The run directory; runs/DATASET-ALGORITHM-SEED by default.
        **keywords: `data`, `model`, `generator`: your own objects instead of what the experiment
            names. `model` is a class or function, which starts from the experiment's seed and is
            called with `num_classes` and `input_shape` if it names them as parameters, or an
            instance, whose weights are the start. `augmentation`: a function of (x, random) that
            returns the changed training examples of a batch; see `docs/howto/augmentation.md`.
            `resume`: continue the run in the directory after its last checkpoint; a finished one is
            only read. `report`: write report.html (default). `callbacks`: functions of
            (experiment, line), called after every round. `should_stop`: asked after every round; if
            true, the run stops with `Interrupted`. `track`: trackers, which change no result.
            `metrics`: functions of logits and labels by name, recorded after every evaluated round.
            `command`: the command line to record. `progress`: whether to show progress on stderr;
            by default on a terminal and in a notebook only.

    Returns:
        The recorded run.

    Raises:
        ConfigError: If the experiment cannot run.
        RecordError: If the directory holds another run.
        Diverged: If training diverged; the last good checkpoint is saved.
        Interrupted: If the run was asked to stop.

    Example:
        ```python
        import fedcog

        experiment = fedcog.Experiment(fedcog.FedProx(mu=0.1), clients=5, rounds=2, local_steps=5)
        run = fedcog.run(experiment, "runs/prox")
        print(run.last, run.best)
        ```
    """
    _check_keywords("run", keywords, RunKeywords)
    objects = _with_metrics(_objects(keywords), keywords)
    options = _options(keywords)._replace(
        resume=keywords.get("resume", False), trackers=_trackers(keywords)
    )
    warn_about_settings([experiment])
    complete = round_loop(experiment)
    directory = Path(out or default_directory(experiment))
    with torch_settings(experiment):
        if torchrun.is_follower():
            experiment = with_user_objects(experiment, objects)
            return follow(experiment, directory, objects)
        num_done = RunDirectory(directory).checkpoint_round() if options.resume else 0
        with (
            _shown(options, keywords, experiment.rounds, num_done) as shown_options,
            Runner(experiment, out, objects, shown_options) as runner,
        ):
            finished = complete(runner)
    if keywords.get("report", True):
        write_report([finished.path], finished.path)
    return finished


def compare(
    experiments: Sequence[Experiment],
    seeds: Sequence[int],
    out: str | Path,
    **keywords: Unpack[CompareKeywords],
) -> list[Run]:
    """Run every experiment with every seed, in OUT/ALGORITHM/seed-N, and write one report.

    Existing runs are continued, finished ones only read, so a comparison may be stopped and started
    again. A run that diverges does not stop the others: its `diverged` says why. On a GPU the seeds
    of an experiment train as one cohort; results equal single runs up to rounding.

    Args:
        experiments: The experiments; their seeds are ignored.
        seeds: The seeds.
        out: Folder of the comparison.
        **keywords: `data`, `model`, `generator`, `augmentation`, `callbacks`, `should_stop`,
            `track`, `metrics`, `command`, `progress`: see `run`. With several seeds, `model` is a
            class or a function, not an instance.

    Returns:
        All runs.

    Raises:
        ConfigError: If an experiment cannot run, or one network is given for several seeds.
        Interrupted: If the comparison was asked to stop.

    Example:
        ```python
        import fedcog

        algorithms = [fedcog.FedAvg(), fedcog.FedProx(mu=0.1)]
        experiments = [fedcog.Experiment(one, rounds=2, local_steps=5) for one in algorithms]
        runs = fedcog.compare(experiments, seeds=[0, 1], out="runs/two")
        ```
    """
    _check_keywords("compare", keywords, CompareKeywords)
    options = _options(keywords)._replace(trackers=_trackers(keywords))
    objects = _with_metrics(_objects(keywords), keywords)
    warn_about_settings(experiments)
    planned = plan_runs(out, experiments, seeds)
    num_rounds = sum(experiment.rounds for experiment, _ in planned)
    num_done = sum(RunDirectory(path).checkpoint_round() for _, path in planned)
    with _shown(options, keywords, num_rounds, num_done) as shown_options:
        runs = run_comparison(experiments, seeds, out, objects, shown_options)
    write_report([one.path for one in runs], Path(out))
    return runs


def sweep(
    experiments: Sequence[Experiment],
    space: Mapping[str, Any],
    out: str | Path,
    **keywords: Unpack[SweepKeywords],
) -> list[Tuned]:
    """Tune every algorithm with the same number of trials, then evaluate the chosen settings.

    Trials are scored after their last round, on validation examples that each client holds out. No
    trial uses the test set. The best settings of each algorithm then train on all examples. A
    stopped sweep resumes: finished runs in `out` are only read.

    Args:
        experiments: One experiment per algorithm.
        space: The settings to tune, with a list or a range in place of a value:
            `{"lr": {"low": 0.001, "high": 0.1, "log": True}, "fedprox": {"mu": [0.01, 0.1]}}`.
        out: Folder of results and report.
        **keywords: `search` ("grid", "random" or "optuna"; default "random"), `trials` per
            algorithm (8), `seed` of the search (0), `trial_seeds` ((100,)), `seeds` of the final
            runs ((0, 1, 2)); `data`, `model`, `generator`, `augmentation`, `callbacks`,
            `should_stop`, `command` and `progress`: see `run`.

    Returns:
        Each algorithm with its trials and final runs.

    Raises:
        ConfigError: If the sweep cannot work or would be unfair; it lists all problems at once.
        RecordError: If `out` holds another sweep.
        Interrupted: If the sweep was asked to stop.

    Example:
        ```python
        import fedcog

        experiment = fedcog.Experiment(fedcog.FedProx(), rounds=2, local_steps=5)
        space = {"lr": [0.01, 0.1], "fedprox": {"mu": [0.01, 0.1]}}
        (tuned,) = fedcog.sweep([experiment], space, "runs/tuned", trials=2, seeds=[0])
        print(tuned.chosen, tuned.group.last.percent())
        ```
    """
    _check_keywords("sweep", keywords, SweepKeywords)
    objects = _objects(keywords)
    options = _options(keywords)
    warn_about_settings(experiments)
    search: SearchOptions = {}
    for name in SearchOptions.__annotations__:
        if name in keywords:
            search[name] = keywords[name]  # type: ignore[literal-required]
    plan = plan_sweep(experiments, space, data=objects.data, model=objects.model, **search)
    num_done = plan.total_rounds - Sweep(plan, out).rounds_left()
    varying = tuple(plan.space)
    with _shown(options, keywords, plan.total_rounds, num_done, varying) as shown_options:
        return run_planned_sweep(plan, out, objects, shown_options)


class PartitionKeywords(TypedDict, total=False):
    """Keyword arguments of `partition`: settings of an experiment.

    Attributes:
        clients: Number of clients; by default 10, or all users of the data set.
        seed: Seed of the partition.
        beta: Concentration of the Dirichlet distribution.
        balance: dirichlet: whether a client that has its even share gets no further classes.
        classes_per_client: label-skew, label-quantity: maximum number of classes per client.
        min_examples: Minimum number of examples per client.
        partition_args: flwr-shard, flwr-pathological: further arguments.
    """

    clients: int
    seed: int
    beta: float
    balance: bool
    classes_per_client: int
    min_examples: int
    partition_args: str


def partition(
    dataset: Dataset, name: str = "auto", **keywords: Unpack[PartitionKeywords]
) -> list[Tensor]:
    """Split the training examples of a data set among clients, as a run with these settings does.

    Args:
        dataset: The data set.
        name: Name of the partition, as `fedcog list partitions` shows it: "dirichlet", "natural",
            "published" (the FedCOG authors' own draw), "given" (the data set's `indices`), ...
        **keywords: `clients` (10, or all users), `seed` (0), `beta` (0.1), `balance`,
            `classes_per_client` (2), `min_examples` (10), `partition_args`.

    Returns:
        For each client, the positions of its training examples, int64.

    Raises:
        ConfigError: If a setting is invalid.
        PartitionError: If the partition is impossible.

    Example:
        ```python
        import fedcog

        data = fedcog.load_dataset("digits")
        parts = fedcog.partition(data, "published", clients=10, beta=0.1, seed=0)
        print([len(part) for part in parts])
        ```
    """
    _check_keywords("partition", keywords, PartitionKeywords)
    if not isinstance(dataset, Dataset):
        raise ConfigError(
            [
                f"partition needs a Dataset, not {type(dataset).__name__}: read one with "
                "fedcog.load_dataset(...)."
            ]
        )
    experiment = Experiment(partition=name, dataset="custom", **keywords)
    return split_dataset(experiment, dataset)


class AuditKeywords(ObjectKeywords, total=False):
    """Keyword arguments of `audit`: how to audit, and what the run used of your own.

    Attributes:
        algorithm: Your algorithm, if the run used one.
        client: The client whose update is attacked; by default the first that the server samples.
        steps: Number of local steps of audited clients, instead of the usual cases.
        examples: Number of examples in a local step, instead of the usual cases.
        iterations: Number of iterations of every attack; 1500 by default.
        tv: Weight of the total variation in the attack on images; 0.01 by default.
        labels: Where the attacker's labels come from: "inferred" (from the head's gradient) or
            "optimized".
        seed: Seed of the attacks; 0 by default.
        device: Where to compute; by default as the run.
        data_dir: Folder with the data sets; by default as the run.
        command: The command line to record.
        progress: Whether to show progress on stderr; by default on a terminal only.
    """

    algorithm: Algorithm | None
    client: int | None
    steps: int | None
    examples: int | None
    iterations: int
    tv: float
    labels: LabelAttack
    seed: int
    device: str
    data_dir: str
    command: str | None
    progress: bool | None


def audit(run: str | Path, **keywords: Unpack[AuditKeywords]) -> Audit:
    """Measure what a run leaks, and write audit.json and audit.html beside it.

    Gradient inversion attacks the update of one client and the sum of the round's updates, as a
    server without and with secure aggregation sees them in the round after the last checkpoint.
    Membership inference examines the global model and the inputs that FedCOG generates.

    Args:
        run: The run directory.
        **keywords: `client`, `steps`, `examples`, `iterations`, `tv`, `labels`, `seed`, `device`,
            `data_dir`: how to audit. `data`, `model`, `generator`, `augmentation`, `algorithm`:
            your own objects that the run used. `command`, `progress`: see `run`.

    Returns:
        The audit.

    Raises:
        ConfigError: If a setting is invalid, the client is unknown, or an object is missing.
        RecordError: If there is no run or no checkpoint, or data or network are not the run's.

    Example:
        ```python
        import fedcog

        run = fedcog.run(fedcog.Experiment(rounds=1, local_steps=2), "runs/audited")
        found = fedcog.audit(run.path, steps=1, examples=1, iterations=20)
        print([(attack.target, attack.psnr) for attack in found.attacks])
        ```
    """
    _check_keywords("audit", keywords, AuditKeywords)
    chosen: dict[str, Any] = {
        field.name: keywords[field.name]  # type: ignore[literal-required]
        for field in dataclasses.fields(AuditSettings)
        if field.name in keywords
    }
    settings = AuditSettings(**chosen)
    from fedcog.runs.progress import AuditProgress, choose_display  # imports rich

    with AuditProgress(choose_display(keywords.get("progress"))) as progress:
        found = audit_run(
            run,
            settings,
            _objects(keywords),
            keywords.get("algorithm"),
            command=keywords.get("command"),
            on_progress=progress.show,
        )
    write_audit(found)
    return found


def write_audit(found: Audit) -> tuple[Path, Path]:
    """Write an audit beside its run.

    Args:
        found: The audit.

    Returns:
        The paths of audit.json and audit.html.
    """
    from fedcog.report.audit.page import page  # imports Pillow

    text = json.dumps(without_nan(found.to_dict()), indent=1, allow_nan=False) + "\n"
    write_file(found.run / "audit.json", text.encode())
    write_file(found.run / "audit.html", page(found).encode())
    return found.run / "audit.json", found.run / "audit.html"


def run_planned_sweep(
    plan: SweepPlan, out: str | Path, objects: UserObjects, options: RunOptions
) -> list[Tuned]:
    """Run or resume a planned sweep, and write its report.

    Args:
        plan: The plan.
        out: Folder of results and report.
        objects: Objects of the user.
        options: How the runs are carried out.

    Returns:
        Each algorithm with its trials and final runs.
    """
    tuned = run_sweep(
        plan,
        out,
        objects,
        callbacks=options.callbacks,
        should_stop=options.should_stop,
        command=options.command,
    )
    from fedcog.report import sweep_page  # imports matplotlib, which takes a second

    sweep_page.write(plan, tuned, Path(out))
    return tuned


def write_report(paths: Sequence[Path], out: Path) -> Path:
    """Write the report of some runs.

    Args:
        paths: Run directories.
        out: Folder of the report.

    Returns:
        The path of report.html.
    """
    from fedcog.report import page  # imports matplotlib, which takes a second

    return RunDirectory(out).save_report(page(paths))


def plot(runs: Runs, out: str | Path, metric: str = "") -> Path:
    """Draw the learning curves of some runs, for one column of a paper.

    A line is the mean over seeds, its band ± one sample standard deviation.

    Args:
        runs: A folder with runs below it, or runs and folders.
        out: The file, whose suffix decides the format: .pdf, .svg, or .png (300 dpi).
        metric: Key as in `fedcog.frame`, such as "loss" or "local_test/accuracy_mean"; by default
            the main metric on the test set.

    Returns:
        The path of the file. Equal runs give equal files.

    Raises:
        ConfigError: If no run has the metric, or the suffix is unknown.
        RecordError: If the folder holds no run that can be read, or the file cannot be written.

    Example:
        ```python
        import fedcog

        algorithms = [fedcog.FedAvg(), fedcog.FedProx(mu=0.1)]
        experiments = [fedcog.Experiment(one, rounds=2, local_steps=5) for one in algorithms]
        runs = fedcog.compare(experiments, seeds=[0, 1], out="runs/two")
        fedcog.plot(runs, "curves.pdf")
        ```
    """
    from fedcog.report.paper_plot import write_curves  # imports matplotlib, which takes a second

    return write_curves(runs, out, metric)


@contextlib.contextmanager
def _shown(
    options: RunOptions,
    keywords: LoopKeywords,
    num_rounds: int,
    num_done: int,
    varying: Sequence[str] = (),
) -> Iterator[RunOptions]:
    """Show progress until the end of the block, if it is wanted and rounds are left.

    Args:
        options: How the runs are carried out.
        keywords: Keyword arguments of the user.
        num_rounds: Number of all rounds.
        num_done: Number of rounds that are already finished.
        varying: Settings that differ between runs, to show with each.

    Yields:
        The options, with a callback that shows each round.
    """
    from fedcog.runs.progress import RunProgress, choose_display  # imports rich

    display = choose_display(keywords.get("progress"))
    if display == "none" or num_done >= num_rounds:
        yield options
        return
    with RunProgress(num_rounds, num_done, display, varying=varying) as progress:
        yield options._replace(callbacks=(progress.show_round, *options.callbacks))


def _objects(keywords: ObjectKeywords) -> UserObjects:
    data = keywords.get("data")
    if data is not None and not isinstance(data, Dataset):
        raise ConfigError(
            [
                f"data is {type(data).__name__}, not a fedcog.Dataset: make one with "
                "fedcog.from_arrays, from_torch or from_folder, or read one with "
                "fedcog.load_dataset(...)."
            ]
        )
    augmentation = keywords.get("augmentation")
    if augmentation is not None and not callable(augmentation):
        raise ConfigError(
            [f"augmentation={augmentation!r} is no function: give a function of (x, random)."]
        )
    return UserObjects(
        data=data,
        model=keywords.get("model"),
        generator=keywords.get("generator"),
        augmentation=keywords.get("augmentation"),
    )


def _with_metrics(objects: UserObjects, keywords: CompareKeywords) -> UserObjects:
    metrics = keywords.get("metrics", {})
    if isinstance(metrics, str):
        raise ConfigError([f"metrics={metrics!r} is a setting: Experiment(metrics={metrics!r})."])
    if not isinstance(metrics, Mapping):
        raise ConfigError(['metrics needs functions by name, such as {"name": function}.'])
    return objects._replace(metrics=dict(metrics))


def _options(keywords: LoopKeywords) -> RunOptions:
    callbacks = keywords.get("callbacks", ())
    return RunOptions(
        callbacks=(callbacks,) if callable(callbacks) else tuple(callbacks or ()),
        should_stop=keywords.get("should_stop"),
        command=keywords.get("command"),
    )


def _trackers(keywords: CompareKeywords) -> tuple[str | Tracker, ...]:
    trackers = keywords.get("track", ())
    return (trackers,) if isinstance(trackers, str | Tracker) else tuple(trackers)


def _check_keywords(function: str, keywords: Mapping[str, Any], known: type) -> None:
    """Refuse unknown keyword arguments, as Python does for functions that list theirs."""
    names = get_type_hints(known)
    for name in keywords:
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1, cutoff=0.7)
            hint = f" Did you mean {close[0]!r}?" if close else f" It accepts {', '.join(names)}."
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}.{hint}")
