"""Tables of runs for a paper: methods by data set, with paired differences from a baseline."""

import csv
import io
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from fedcog.core.settings import ConfigError, unknown_name
from fedcog.runs.records.frames import Runs, as_runs
from fedcog.runs.records.metric_series import (
    is_cost,
    is_score,
    last_value,
    metric_label,
    series,
    with_values,
)
from fedcog.runs.records.recorded_run import Run
from fedcog.runs.records.summary import (
    Spread,
    data_names,
    differing,
    run_settings,
    settings_label,
    spread,
)
from fedcog.studies.tables import Table, latex_table, markdown_table

TableFormat = Literal["latex", "markdown", "csv"]
SUFFIXES: dict[TableFormat, str] = {"latex": ".tex", "markdown": ".md", "csv": ".csv"}
"""Suffixes of files by format."""
DEFAULT_BASELINE = "fedavg"
NO_VALUE = "-"
MAX_NAME_LENGTH = 24
"""A header names a baseline of up to this many characters; the note names any."""
CSV_COLUMNS = (
    "method",
    "setting",
    "metric",
    "round",
    "unit",
    "mean",
    "std",
    "n",
    "diverged",
    "baseline",
    "difference",
    "difference_std",
    "pairs",
)


class Cell(NamedTuple):
    """The runs of one method in one setting, which differ in their seed.

    Attributes:
        value: Mean and deviation over seeds; None if no run has the metric.
        num_diverged: Number of runs that diverged, which have no last value.
        num_runs: Number of runs.
        difference: Mean and deviation of the paired differences from the baseline; None for the
            baseline itself, and without a common seed.
    """

    value: Spread | None
    num_diverged: int
    num_runs: int
    difference: Spread | None


class Comparison(NamedTuple):
    """Methods by setting.

    Attributes:
        metric: Name of the metric.
        is_score: Whether the values are fractions to print in percent.
        is_cost: Whether less is better.
        is_best: Whether the values are of the best round, not of the last.
        settings: Names of the columns: data set and partition.
        baseline: The method that others are compared with.
        cells: Cells by method and setting.
    """

    metric: str
    is_score: bool
    is_cost: bool
    is_best: bool
    settings: list[str]
    baseline: str
    cells: dict[str, dict[str, Cell]]


def table(
    runs: Runs,
    format: TableFormat = "markdown",
    *,
    metric: str = "",
    best: bool = False,
    baseline: str = "",
) -> str:
    """Return a table of runs: methods by data set and partition.

    A row is an algorithm, with the settings that differ between runs on the same data. A cell is
    the mean ± sample standard deviation over seeds; scores are in percent, and the best of a column
    is bold. A further column has the differences from the baseline, seed by seed: mean ± sample
    standard deviation, and the number of pairs.

    Args:
        runs: A folder with runs below it, or runs and folders.
        format: "markdown", "latex" (for the package booktabs) or "csv" (one line per cell, plain
            numbers).
        metric: Key as in `fedcog.frame`, such as "loss" or "local_test/accuracy_mean"; by default
            the main metric on the test set.
        best: Whether to show the best round, which is chosen on the test set and therefore
            optimistic, in place of the last.
        baseline: A row's label; by default "fedavg" if there is one, else the first row.

    Returns:
        The text.

    Raises:
        ConfigError: If no run has the metric, or there is no such format or baseline.
        RecordError: If the folder holds no run that can be read.

    Example:
        ```python
        import fedcog

        algorithms = [fedcog.FedAvg(), fedcog.FedProx(mu=0.1)]
        experiments = [fedcog.Experiment(one, rounds=2, local_steps=5) for one in algorithms]
        runs = fedcog.compare(experiments, seeds=[0, 1], out="runs/two")
        print(fedcog.table(runs, format="latex"))
        ```
    """
    if format not in get_args(TableFormat):
        raise ConfigError([unknown_name("format", str(format), get_args(TableFormat))])
    chosen = _finished(with_values(as_runs(runs), metric))
    for warning in _warnings(chosen, metric):
        warnings.warn(warning, stacklevel=2)
    comparison = compare_runs(chosen, metric, best, baseline)
    if format == "csv":
        return _csv(comparison)
    printed = _printed_table(comparison)
    note = _note(comparison)
    if format == "latex":
        return f"% {note}\n% It needs \\usepackage{{booktabs}}.\n{latex_table(printed)}\n"
    return f"{markdown_table(printed)}\n\n{note}\n"


def table_format(path: str | Path, format: str | None = None) -> TableFormat:
    """Return the format that a file's suffix stands for.

    Args:
        path: The file.
        format: The format that was asked for, if any.

    Returns:
        The format.

    Raises:
        ConfigError: If the suffix is unknown, or stands for another format.
    """
    suffix = Path(path).suffix.lower()
    for name, own_suffix in SUFFIXES.items():
        if suffix != own_suffix:
            continue
        if format not in (None, name):
            raise ConfigError(
                [f"{path} ends in {suffix}, which is {name}, not {format}: remove --format."]
            )
        return name
    plot_hint = " For a figure, use fedcog plot." if suffix in (".pdf", ".svg", ".png") else ""
    raise ConfigError(
        [f"{path} is no table: choose a name that ends in .tex, .md or .csv.{plot_hint}"]
    )


def compare_runs(
    runs: Sequence[Run], metric: str = "", best: bool = False, baseline: str = ""
) -> Comparison:
    """Compute means and paired differences of methods by setting.

    Args:
        runs: The runs.
        metric: Key as in `fedcog.frame`; by default the main metric on the test set.
        best: Whether to take the best round, not the last.
        baseline: A method's label; by default "fedavg" if there is one, else the first.

    Returns:
        The comparison.

    Raises:
        ConfigError: If no run has the metric, or there is no such baseline.
    """
    runs = with_values(runs, metric)
    members = _members(runs, metric)
    methods = list(dict.fromkeys(method for method, _ in members))
    chosen_baseline = _baseline(methods, baseline)
    settings = list(dict.fromkeys(setting for _, setting in members))
    values = {key: _values_by_seed(own, metric, best) for key, own in members.items()}
    cells: dict[str, dict[str, Cell]] = {method: {} for method in methods}
    for (method, setting), own in members.items():
        by_seed = values[method, setting]
        difference = None
        if method != chosen_baseline:
            difference = _difference(by_seed, values.get((chosen_baseline, setting), {}))
        value = spread(list(by_seed.values())) if by_seed else None
        num_diverged = sum(bool(run.diverged) for run in own)
        cells[method][setting] = Cell(value, num_diverged, len(own), difference)
    return Comparison(
        metric_label(runs, metric),
        is_score(metric),
        is_cost(metric),
        best,
        settings,
        chosen_baseline,
        cells,
    )


def _members(runs: Sequence[Run], metric: str) -> dict[tuple[str, str], list[Run]]:
    """Return the runs by method and setting.

    A setting of the experiment belongs to the method if it differs between runs on the same data.
    Scores on the server's test set, and on the clients' own, are in columns of their own.
    """
    places = [
        f"{name}, {run.experiment.partition_rule}"
        for name, run in zip(data_names(runs), runs, strict=True)
    ]
    examples = [run.test_examples for run in runs]
    if not metric and len({*examples}) > 1:
        places = [f"{place}, {own}" for place, own in zip(places, examples, strict=True)]
    settings = [run_settings(run) for run in runs]
    names = set[str]()
    for place in dict.fromkeys(places):
        own = [table for table, other in zip(settings, places, strict=True) if other == place]
        names |= {*differing(own)}
    members: dict[tuple[str, str], list[Run]] = {}
    for run, own_settings, place in zip(runs, settings, places, strict=True):
        method = settings_label(run.experiment, own_settings, sorted(names))
        members.setdefault((method, place), []).append(run)
    return members


def _baseline(methods: Sequence[str], name: str) -> str:
    """Return the label of the baseline."""
    if name in methods:
        return name
    wanted = name or DEFAULT_BASELINE
    found = [method for method in methods if method.partition(" (")[0] == wanted]
    if name and len(found) != 1:
        raise ConfigError([unknown_name("baseline", name, found or methods)])
    return (found or methods)[0]


def _finished(runs: Sequence[Run]) -> list[Run]:
    """Return the runs without unfinished ones, unless all are; warn of these."""
    unfinished = [
        run for run in runs if len(run.lines) < run.experiment.rounds and not run.diverged
    ]
    is_left_out = len(unfinished) < len(runs)
    for run in unfinished:
        progress = f"{len(run.lines)} of {run.experiment.rounds} rounds"
        consequence = " It is left out." if is_left_out else ""
        text = f"{run.path} is not finished: {progress}.{consequence}"
        warnings.warn(text, stacklevel=3)
    return [run for run in runs if run not in unfinished] if is_left_out else list(runs)


def _warnings(runs: Sequence[Run], metric: str) -> list[str]:
    """Return what to know about the runs: repeated seeds."""
    found = []
    for key, own in _members(runs, metric).items():
        seeds = [run.experiment.seed for run in own]
        repeated = dict.fromkeys(seed for seed in seeds if seeds.count(seed) > 1)
        for seed in repeated:
            found.append(f"{' on '.join(key)}: of several runs with seed {seed}, the first counts.")
    return found


def _values_by_seed(runs: Sequence[Run], metric: str, best: bool) -> dict[int, float]:
    """Return the last or best value of each seed; a diverged run has no last one."""
    choose = min if is_cost(metric) else max
    by_seed: dict[int, float] = {}
    for run in runs:
        if best:
            value = choose([value for _, value in series(run, metric)], default=None)
        else:
            value = None if run.diverged else last_value(run, metric)
        if value is not None:
            by_seed.setdefault(run.experiment.seed, value)
    return by_seed


def _difference(own: Mapping[int, float], baseline: Mapping[int, float]) -> Spread | None:
    """Return the spread of the differences over the seeds that both have."""
    differences = [own[seed] - baseline[seed] for seed in own if seed in baseline]
    return spread(differences) if differences else None


def _printed_table(comparison: Comparison) -> Table:
    """Return the table as text, with the best cell of each column in bold."""
    has_differences = len(comparison.cells) > 1
    unit = " (%)" if comparison.is_score else ""
    header = ["method"]
    for setting in comparison.settings:
        header.append(f"{setting}{unit}")
        if has_differences:
            name = comparison.baseline
            header.append(f"minus {name if len(name) <= MAX_NAME_LENGTH else 'baseline'}")
    rows = []
    bold = set[tuple[int, int]]()
    for row_index, (method, cells) in enumerate(comparison.cells.items()):
        row = [method]
        for setting in comparison.settings:
            cell = cells.get(setting)
            if has_differences and cell and _is_best(comparison, setting, cell):
                bold.add((row_index, len(row)))
            row.append(_value_text(comparison, cell))
            if has_differences:
                row.append(_difference_text(comparison, cell))
        rows.append(row)
    return Table("", header, rows, frozenset(bold))


def _is_best(comparison: Comparison, setting: str, cell: Cell) -> bool:
    """Return whether no method has a better mean in a setting, as it is printed."""
    if cell.value is None:
        return False
    cells = [cells[setting] for cells in comparison.cells.values() if setting in cells]
    means = [other.value.mean for other in cells if other.value is not None]
    best = min(means) if comparison.is_cost else max(means)
    return _number(comparison, cell.value.mean) == _number(comparison, best)


def _number(comparison: Comparison, value: float, sign: str = "") -> str:
    if not comparison.is_score:
        return f"{value:{sign}.4g}"
    return f"{round(100 * value, 2) + 0.0:{sign}.2f}"  # never -0.00


def _spread_text(comparison: Comparison, value: Spread, sign: str = "") -> str:
    text = _number(comparison, value.mean, sign)
    if value.deviation is None:
        return text
    return f"{text} ± {_number(comparison, value.deviation)}"


def _value_text(comparison: Comparison, cell: Cell | None) -> str:
    if cell is None:
        return NO_VALUE
    parts = [] if cell.value is None else [_spread_text(comparison, cell.value)]
    if cell.num_diverged:
        parts.append(f"({cell.num_diverged} of {cell.num_runs} diverged)")
    return " ".join(parts)


def _difference_text(comparison: Comparison, cell: Cell | None) -> str:
    if cell is None or cell.difference is None:
        return ""
    return f"{_spread_text(comparison, cell.difference, '+')} (n = {cell.difference.number})"


def _note(comparison: Comparison) -> str:
    """Say in one line what the numbers are."""
    numbers = {
        cell.value.number
        for cells in comparison.cells.values()
        for cell in cells.values()
        if cell.value is not None
    }
    seeds = " to ".join(str(number) for number in sorted({min(numbers), max(numbers)}))
    noun = "seed" if seeds == "1" else "seeds"
    which = "best round" if comparison.is_best else "last evaluated round"
    unit = " in %" if comparison.is_score else ""
    sentences = [
        f"Values are {comparison.metric}{unit}, {which}: mean ± sample standard deviation over "
        f"{seeds} {noun}."
    ]
    if len(comparison.cells) > 1:
        sentences.append(
            f"Differences from the baseline, {comparison.baseline}, seed by seed: mean ± sample "
            "standard deviation, n pairs."
        )
    return " ".join(" ".join(sentences).split())


def _csv(comparison: Comparison) -> str:
    """Return a line for every cell, with plain numbers."""
    file = io.StringIO()
    writer = csv.DictWriter(file, CSV_COLUMNS, lineterminator="\n")
    writer.writeheader()
    factor = 100 if comparison.is_score else 1
    shared = {
        "metric": comparison.metric,
        "round": "best" if comparison.is_best else "last",
        "unit": "%" if comparison.is_score else "",
        "baseline": comparison.baseline,
    }
    for method, cells in comparison.cells.items():
        for setting, cell in cells.items():
            line: dict[str, Any] = shared | {"method": method, "setting": setting}
            line |= {"diverged": cell.num_diverged, "n": 0, "pairs": 0}
            if cell.value is not None:
                line |= _csv_numbers(cell.value, factor, ("mean", "std", "n"))
            if cell.difference is not None:
                names = ("difference", "difference_std", "pairs")
                line |= _csv_numbers(cell.difference, factor, names)
            writer.writerow(line)
    return file.getvalue()


def _csv_numbers(value: Spread, factor: int, names: tuple[str, str, str]) -> dict[str, Any]:
    deviation = None if value.deviation is None else factor * value.deviation
    return dict(zip(names, (factor * value.mean, deviation, value.number), strict=True))
