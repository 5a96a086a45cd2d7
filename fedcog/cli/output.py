"""Tables and summaries that the command line prints."""

import math
import textwrap
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from rich.console import JustifyMethod
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from fedcog.cli.console import Style, out, print_note, print_result
from fedcog.cli.doctor import Check
from fedcog.cli.schema import load_schema
from fedcog.core.settings import settings
from fedcog.core.tasks import METRIC_LABELS
from fedcog.data import DATASETS, registry
from fedcog.data.partitions.flwr_partitions import FLWR_PARTITIONS
from fedcog.data.partitions.schemes import PARTITIONS
from fedcog.data.sources.locations import short_name
from fedcog.models.zoo import MODELS
from fedcog.runs.config.composition import algorithm_name, named_layers
from fedcog.runs.config.experiment import LIBRARY_NAMES, Experiment
from fedcog.runs.config.notes import experiment_notes
from fedcog.runs.records import summary
from fedcog.runs.records.derived_metrics import median_cost
from fedcog.runs.records.export import Exported
from fedcog.runs.records.metric_series import metric_label
from fedcog.runs.records.recorded_run import Run
from fedcog.studies.catalog import AlgorithmInfo, Sizes, describe_algorithms
from fedcog.studies.job_planning import StudyProgress
from fedcog.studies.paper.gains import Gain
from fedcog.studies.study import Study
from fedcog.studies.theory import TheoryPlan, TheoryResult
from fedcog.studies.tuning import sweep_tables
from fedcog.studies.tuning.sweep import SweepPlan, Tuned

MIN_CATALOG_WIDTH = 120
"""Columns of a terminal from which the catalog of algorithms is a table."""
PARTITIONS_OF_DATA = ("auto", "natural", "given")
"""Partitions whose number of clients may follow from the data."""
MAX_TABLES = 4
"""Results are printed as lines rather than as more tables than this."""
MAX_NAME_LENGTH = 30
"""A table shows this many characters of a user's name."""


def print_experiment(
    experiment: Experiment, directory: Any, style: Style, seeds: Sequence[int] = ()
) -> None:
    """Print the settings of a run before it starts, or of several that differ in seed.

    Args:
        experiment: The experiment.
        directory: The run directory.
        style: How much to print.
        seeds: The seeds, if there are several runs.
    """
    if style == "quiet":
        return
    work = f"{experiment.local_steps} steps"
    if experiment.local_epochs:
        work = f"{experiment.local_epochs:g} epochs"
    participation = ""
    if experiment.participation < 1:
        participation = f" by {experiment.participation:.0%} of them ({experiment.selection})"
    seed_text = f"seed {experiment.seed}"
    if seeds:
        seed_text = f"seeds {', '.join(map(str, seeds))}"
    print_result(
        f"{algorithm_name(experiment.algorithm)} on {short_name(experiment.dataset)}: "
        f"{_describe_clients(experiment)}, {experiment.rounds} rounds of "
        f"{work}{participation}, batch {experiment.batch_size}, {experiment.optimizer} lr "
        f"{experiment.lr:g}, {seed_text}",
        style,
    )
    for name, layer in named_layers(experiment.algorithm):
        if layer_values := layer.setting_values:
            values = ", ".join(f"{key} {value}" for key, value in layer_values.items())
            print_result(f"  {name}: {values}", style)
    first = 0
    for device in experiment.device_types:
        last = first + device.num_clients - 1
        print_result(f"  {device.name} (clients {first} to {last}): {device.description}", style)
        first = last + 1
    if experiment.async_buffer:
        print_result(
            f"  asynchronous: the server aggregates {experiment.async_buffer} answers at a time",
            style,
        )
    for note in experiment_notes(experiment):
        print_note(note)
    print_result(f"  run directory: {directory}", style)


def _describe_clients(experiment: Experiment) -> str:
    """Describe number and partition of the clients, as far as they are known before loading."""
    is_open = not experiment.clients and experiment.partition in PARTITIONS_OF_DATA
    count = f"{experiment.num_clients} clients"
    if is_open:
        count = "all clients of the data"
        if experiment.partition == "auto":
            count = f"the clients of the data, or else {experiment.num_clients}"
    is_known = experiment.partition != "auto"
    return f"{count} ({experiment.partition_rule})" if is_known else count


def print_comparison(
    experiments: Sequence[Experiment], seeds: Sequence[int], out_folder: Any, style: Style
) -> None:
    """Print the settings of a comparison before it starts.

    Args:
        experiments: The experiments.
        seeds: The seeds.
        out_folder: Folder of the comparison.
        style: How much to print.
    """
    names = [algorithm_name(experiment.algorithm) for experiment in experiments]
    print_result(f"comparing {', '.join(names)} over seeds {', '.join(map(str, seeds))}", style)
    for name, experiment in zip(names, experiments, strict=True):
        print_experiment(experiment, f"{out_folder}/{name}/seed-N", style, seeds)


def print_sweep_plan(plan: SweepPlan, out_folder: Any, style: Style) -> None:
    """Print what a sweep tunes before it starts.

    Args:
        plan: The plan.
        out_folder: Folder of the sweep.
        style: How much to print.
    """
    names = ", ".join(algorithm_name(one.algorithm) for one in plan.experiments)
    print_result(
        f"tuning {names}: {plan.trials} trials each ({plan.search}, seed {plan.seed})", style
    )
    for name, dimension in plan.space.items():
        print_result(f"  {name}: {dimension.text()}", style)
    for experiment in plan.experiments:
        print_experiment(experiment, out_folder, style, plan.trial_seeds)


def print_tuned(plan: SweepPlan, tuned: Sequence[Tuned], style: Style) -> None:
    """Print the chosen settings of each algorithm and their test scores.

    Args:
        plan: The plan.
        tuned: The tuned algorithms.
        style: How much to print.
    """
    chosen = sweep_tables.chosen_table(tuned)
    columns = range(len(chosen.header))
    if style == "plain" or _table_width([chosen.header, *chosen.rows], columns) > out.width:
        for row in chosen.rows:
            cells = zip(chosen.header, row, strict=True)
            print_result("; ".join(f"{head} {cell}" for head, cell in cells), style)
    elif style != "quiet":
        title = "in %, test as mean ± standard deviation over seeds"
        table = _new_table(*chosen.header, title=title, right=chosen.header[2:])
        for row in chosen.rows:
            table.add_row(*(escape(cell) for cell in row))
        out.print(table)
    for sentence in sweep_tables.summary_sentences(plan, tuned):
        print_result(sentence, style)


def print_results(runs: Sequence[Run], style: Style) -> None:
    """Print last and best score of every group of runs, and the privacy budget spent.

    Args:
        runs: The runs.
        style: How much to print.
    """
    if style == "quiet":
        return
    for text in dict.fromkeys(run.privacy for run in runs if run.privacy):
        print_result(text, style)
    scored = [run for run in runs if run.scores or run.diverged]
    if not scored:
        for group in summary.group(runs):
            print_result(f"{group.label}: {_validation_score(group)}", style)
        return
    rows = summary.rows(scored)
    title = f"{metric_label(scored)} in %"
    if any(len(group.runs) > 1 for group in summary.group(scored)):
        title += ", mean ± standard deviation over seeds"
    columns = summary.used_columns(rows)
    blocks = _column_blocks([summary.COLUMNS, *rows], columns, out.width)
    if style == "plain" or not blocks:
        print_result(title, style)
        for row in rows:
            print_result(_plain_row(row, columns), style)
    else:
        _print_blocks(title, rows, blocks)
    if style != "plain":
        for column in columns:
            if note := summary.NOTES.get(summary.COLUMNS[column]):
                out.print(note, markup=False)


def _validation_score(group: summary.Group) -> str:
    """Return the last score on validation examples of a group without test scores."""
    lines = [run.lines[-1] for run in group.runs if run.lines]
    for metric, label in METRIC_LABELS.items():
        scores = [line[key] for line in lines if (key := f"validation_{metric}") in line]
        if scores:
            return f"validation {label} {summary.spread(scores).percent()} %"
    return "no round has been evaluated yet"


def _new_table(*columns: str, title: str = "", right: Collection[str] = ()) -> Table:
    """Return an empty table that never cuts a text short: it breaks lines.

    Args:
        columns: Names of the columns; the first holds names, which stay on one line.
        title: The title; may be empty.
        right: Names of the columns that are aligned to the right.

    Returns:
        The table.
    """
    table = Table(title=title or None, title_justify="left")
    for index, name in enumerate(columns):
        justify: JustifyMethod = "right" if name in right else "left"
        table.add_column(name, justify=justify, overflow="fold", no_wrap=index == 0)
    return table


def _table_width(lines: Sequence[Sequence[str]], columns: Sequence[int]) -> int:
    """Return the width of a table in characters: a cell has two blanks and a border."""
    return 1 + sum(3 + max(len(line[column]) for line in lines) for column in columns)


def _column_blocks(
    lines: Sequence[Sequence[str]], columns: Sequence[int], width: int
) -> list[list[int]]:
    """Divide the columns of a table into blocks that fit into a terminal, if one table does not.

    Args:
        lines: The header and the rows.
        columns: The columns to show; the first holds names and begins every block.
        width: Characters of a line.

    Returns:
        The columns of each block; none if a column does not fit beside the names, or if there would
        be more than `MAX_TABLES` blocks.
    """
    if _table_width(lines, columns) <= width:
        return [list(columns)]
    header, *rows = lines
    broken_header = [max(name.split(), key=len) for name in header]
    blocks = [[columns[0]]]
    for column in columns[1:]:
        if _table_width([broken_header, *rows], [*blocks[-1], column]) > width:
            blocks.append([columns[0]])
        blocks[-1].append(column)
    fits = all(_table_width([broken_header, *rows], block) <= width for block in blocks)
    return blocks if fits and len(blocks) <= MAX_TABLES else []


def _print_blocks(
    title: str, rows: Sequence[Sequence[str]], blocks: Sequence[Sequence[int]]
) -> None:
    """Print results as one table per block of columns.

    Args:
        title: Title of the first table.
        rows: The rows of `summary.COLUMNS`.
        blocks: The columns of each table.
    """
    for block in blocks:
        header = [summary.COLUMNS[column] for column in block]
        table = _new_table(*header, title=title if block is blocks[0] else "", right=header[1:])
        for row in rows:
            table.add_row(*(escape(row[column]) for column in block))
        out.print(table)


def _plain_row(row: Sequence[str], columns: Sequence[int]) -> str:
    """Return a row in words, such as 'fedavg: last 61.25, best 62.01, seeds 3'."""
    values = {summary.COLUMNS[column]: row[column] for column in columns}
    label = values.pop("algorithm")
    rounds = values.pop("rounds", "")
    parts = [f"{name} {value}" for name, value in values.items() if value]
    if not row[1]:
        parts.insert(0, "last none, best none")
    if "diverged" in rounds:
        parts.append(f"rounds {rounds}")
    return f"{label}: {', '.join(parts)}"


def print_costs(runs: Sequence[Run], target: float, style: Style) -> None:
    """Print what every group of runs used until it reached a score.

    Args:
        runs: The runs.
        target: The score, between 0 and 1.
        style: How much to print.
    """
    for group in summary.group([run for run in runs if run.scores]):
        (rounds, num_bytes, seconds), num_reached = median_cost(group.runs, target)
        cost = "not reached"
        if math.isfinite(rounds):
            cost = f"{rounds:g} rounds, {num_bytes / 1e6:,.1f} MB, {seconds:,.1f} s"
        if len(group.runs) > 1:
            cost += f" ({num_reached} of {len(group.runs)} seeds reached it)"
        print_result(f"to {100 * target:g} %, {group.label}: {cost}", style)


def print_exported(exported: Exported, experiment: Experiment, style: Style) -> None:
    """Print where a model was written, and what it lacks.

    Args:
        exported: The model's file.
        experiment: The experiment of the run.
        style: How much to print.
    """
    round = exported.about["round"]
    num_rounds = exported.about["rounds"]
    name = exported.about["model"]
    print_result(f"model: {exported.path} ({name}, after round {round} of {num_rounds})", style)
    if round < num_rounds:
        print_note(f"the run is not finished: this is its model after round {round}.", style)
    for name, layer in named_layers(experiment.algorithm):
        if layer.is_personalized:
            print_note(
                f"{name} trains personal models: this is the model that clients share.", style
            )


def print_study_progress(
    studies: Sequence[Study], progress: Sequence[StudyProgress], folder: Path
) -> None:
    """Print how much of each table and figure is done.

    Args:
        studies: The tables and figures.
        progress: Their progress.
        folder: Folder of the results.
    """
    columns = ("name", "title", "in the paper", "done")
    table = _new_table(*columns, title=f"The paper in {folder}", right=("done",))
    for study, own in zip(studies, progress, strict=True):
        done = f"{own.num_done}/{own.num_jobs}"
        table.add_row(study.name, escape(study.title), study.source, done)
    num_done = sum(own.num_done for own in progress)
    num_jobs = sum(own.num_jobs for own in progress)
    table.add_row("", "", "", f"{num_done}/{num_jobs}")
    out.print(table)


def print_checks(checks: Sequence[Check], style: Style) -> None:
    """Print what works, what is missing, and what to do.

    Args:
        checks: The results of the checks.
        style: How much to print.
    """
    if style == "plain":
        for check in checks:
            remedy = f" ({check.remedy})" if check.remedy else ""
            print_result(f"{check.name}: {check.state}: {check.facts}{remedy}", style)
    elif style != "quiet":
        colors = {"ok": "green", "missing": "yellow", "broken": "red"}
        table = _new_table("part", "state", "facts", "what to do")
        for check in checks:
            state = f"[{colors[check.state]}]{check.state}[/]"
            table.add_row(check.name, state, escape(check.facts), escape(check.remedy))
        out.print(table)


def print_catalog(kind: str | None, data_dir: str | None) -> None:
    """Print everything that can be chosen, or one kind of it.

    Args:
        kind: algorithms, data, models, partitions or settings; None prints all but settings.
        data_dir: Folder with the data sets.
    """
    printers: dict[str, Callable[[], None]] = {
        "algorithms": _print_algorithms,
        "data": lambda: print_datasets(data_dir),
        "models": _print_models,
        "partitions": _print_partitions,
        "settings": _print_settings,
    }
    for name, printer in printers.items():
        if kind == name or (kind is None and name != "settings"):
            printer()
    if kind is None:
        out.print(
            "All settings of an experiment with their defaults: fedcog list settings", markup=False
        )


def print_datasets(data_dir: str | None) -> None:
    """Print all data sets and where they are."""
    columns = ("data set", "train", "test", "shape", "classes", "where")
    table = _new_table(*columns, title="Data sets")
    for name, source in DATASETS.items():
        where = "embedded (scikit-learn)"
        if not source.package:
            hint = " explains how" if source.manual_instructions else ""
            missing = f"missing; fedcog data get {name}{hint}"
            where = str(registry.locate(name, data_dir) or missing)
        table.add_row(
            name,
            f"{source.train_size:,}",
            f"{source.test_size:,}",
            "x".join(str(side) for side in source.input_shape),
            str(source.num_classes),
            where,
        )
    out.print(table)


def print_theory(result: TheoryResult, plan: TheoryPlan, style: Style) -> None:
    """Print the theorem's constants and bound besides what was measured.

    Args:
        result: The measurement.
        plan: What was measured.
        style: How much to print.
    """
    is_convex = result.network == "linear"
    name = "linear model (convex)" if is_convex else "small network"
    title = (
        f"{name}: {plan.rounds} rounds of {plan.steps} steps, {plan.clients} clients with two "
        "classes of digits each"
    )
    rows = _theory_rows(result, plan, is_convex)
    if style == "plain":
        print_result(title, style)
        for label, (value, text) in rows.items():
            print_result(f"{label}: {value:.4g}, {text}", style)
    elif style != "quiet":
        table = _new_table("", "", "", title=title)
        table.show_header = False
        for label, (value, text) in rows.items():
            table.add_row(label, f"{value:.4g}", text)
        out.print(table)


def _theory_rows(
    result: TheoryResult, plan: TheoryPlan, is_convex: bool
) -> dict[str, tuple[float, str]]:
    """Return value and meaning of every row."""
    constants = result.constants
    max_step = constants.largest_step(plan.steps)
    step_text = "used"
    if result.lr > max_step * (1 + 1e-9):
        step_text += ", more than allowed: the bound need not hold"
    kind = "a bound" if is_convex else "largest measured"
    return {
        "L": (constants.smoothness, f"smoothness of every client's loss, {kind}"),
        "sigma^2": (constants.variance, "variance of a batch gradient, largest measured"),
        "kappa^2": (
            constants.kappa_squared,
            "dissimilarity of the clients' gradients, largest measured; beta^2 = 1",
        ),
        "Phi - inf": (constants.initial_gap, "initial loss, which is never below 0"),
        "largest step": (max_step, "allowed by the theorem with these constants"),
        "step": (result.lr, step_text),
        "bound": (result.bound, "on the smallest squared gradient norm, by the theorem"),
        "smallest": (
            result.min_gradient,
            f"squared gradient norm of any round, mean over {plan.repeats} runs",
        ),
        "mean": (result.mean_gradient, "over all rounds"),
        "Q": (
            result.max_distillation,
            "distillation loss at the start of a round; 0 by the lemma",
        ),
        "rises": (
            result.num_increases,
            "of the loss when inputs are regenerated; 0 by the lemma",
        ),
    }


def print_partition(
    counts: Tensor, classes: Sequence[str], noun: str = "examples", names: Sequence[str] = ()
) -> None:
    """Print examples per client and class; if that is too wide, a summary per client.

    Args:
        counts: `(K, C)`.
        classes: Names of the classes.
        noun: What is counted.
        names: Names of the clients, if they are users.
    """
    labels = [str(client_id) for client_id in range(len(counts))]
    if names:
        short = [textwrap.shorten(name, MAX_NAME_LENGTH, placeholder="...") for name in names]
        labels = [f"{label} {escape(name)}" for label, name in zip(labels, short, strict=True)]
    classes = [escape(name) for name in classes]
    width = sum(max(len(name), 4) + 3 for name in classes) + 20
    if width > out.width:
        table = _new_table("client", noun, "classes", "largest", "share", title="per client")
        for client_id, row in enumerate(counts.tolist()):
            largest = max(range(len(row)), key=row.__getitem__)
            share = f"{100 * row[largest] / max(1, sum(row)):.0f}%"
            num_classes = sum(count > 0 for count in row)
            table.add_row(
                labels[client_id], str(sum(row)), str(num_classes), classes[largest], share
            )
        out.print(table)
        return
    title = f"{noun} per client and class"
    table = _new_table("client", *classes, "all", title=title)
    for client_id, row in enumerate(counts.tolist()):
        cells = [str(count) if count else "·" for count in row]
        table.add_row(labels[client_id], *cells, str(sum(row)))
    totals = [str(count) for count in counts.sum(0).tolist()]
    table.add_row("all", *totals, str(int(counts.sum())), style="bold")
    out.print(table)


def described_algorithms() -> list[AlgorithmInfo]:
    """Describe every algorithm, with the sizes that were measured for the schema."""
    sizes = {name: Sizes(**own) for name, own in load_schema().sizes.items()}
    gains = {name: [Gain(*one) for one in own] for name, own in load_schema().gains.items()}
    return describe_algorithms(sizes, gains)


def _print_algorithms() -> None:
    if out.width < MIN_CATALOG_WIDTH:
        for entry in described_algorithms():
            _print_algorithm(entry)
    else:
        _print_algorithm_table()
    out.print(
        "sends, receives, keeps: bytes per client and round, measured on the paper's CNN, relative "
        "to one model. sums: whether the server needs only the sum of the payloads. best for: "
        "measured points of test accuracy above FedAvg on CIFAR-10, ten clients, at the defaults.",
        markup=False,
    )


def _print_algorithm(entry: AlgorithmInfo) -> None:
    """Print an algorithm and its settings as lines of text."""
    name = f"{entry.name} (wrapper)" if entry.is_wrapper else entry.name
    sums = "enough" if entry.needs_only_sums else "not enough"
    sizes = f"sends {entry.sizes.sends:.2f}, receives {entry.sizes.receives:.2f}"
    out.print(f"[bold]{name}[/]: {escape(entry.summary)}")
    out.print(f"  {sizes}, keeps {entry.kept}, sums {sums}", markup=False)
    out.print(f"  best for: {entry.best_for}", markup=False)
    for setting in entry.settings:
        choices = f" [{' | '.join(setting.choices)}]" if setting.choices else ""
        text = f"{setting.help}{choices} (default: {setting.default_text})"
        out.print(f"  --{entry.name}.{setting.flag}: {text}", markup=False)


def _print_algorithm_table() -> None:
    columns = ("algorithm", "description and settings", "default", "best for", "sends", "receives")
    table = _new_table(*columns, "keeps", "sums", title="Algorithms", right=("sends", "receives"))
    for entry in described_algorithms():
        name = f"{entry.name} (wrapper)" if entry.is_wrapper else entry.name
        sums = "enough" if entry.needs_only_sums else "not enough"
        sizes = (f"{entry.sizes.sends:.2f}", f"{entry.sizes.receives:.2f}")
        cells = (entry.best_for, *sizes, entry.kept, sums)
        table.add_row(name, entry.summary, "", *cells, style="bold")
        for setting in entry.settings:
            choices = f" [{' | '.join(setting.choices)}]" if setting.choices else ""
            text = f"--{entry.name}.{setting.flag}: {escape(setting.help + choices)}"
            table.add_row("", text, setting.default_text)
    out.print(table)


def _print_settings() -> None:
    columns = ("setting", "meaning", "value", "default")
    table = _new_table(*columns, title="Settings of an experiment")
    for setting in settings(Experiment).values():
        cells = (setting.help, setting.expected, setting.default_text)
        table.add_row(setting.name, *(escape(cell) for cell in cells))
    out.print(table)


def _print_models() -> None:
    table = _new_table("model", "description", title="Models")
    for name, build in MODELS.items():
        table.add_row(name, (build.__doc__ or "").strip().splitlines()[0])
    for name in LIBRARY_NAMES:
        table.add_row(name, f"A network of {name.partition(':')[0]}, with new weights.")
    out.print(table)


def _print_partitions() -> None:
    table = _new_table("partition", "description", "settings", title="Partitions")
    for name, partition in PARTITIONS.items():
        table.add_row(name, partition.summary, partition.settings)
    for name, entry in FLWR_PARTITIONS.items():
        flags = f"{entry.settings} --partition-args" if entry.options else entry.settings
        table.add_row(name, f"{entry.summary} (flwr-datasets' {entry.partitioner})", flags)
    table.add_row("given", "The `indices` per client of your own data set.", "")
    out.print(table)
