"""Learning curves for a paper: one column wide, as PDF, SVG or PNG."""

import functools
import io
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fedcog.core.settings import ConfigError
from fedcog.report.figures import (
    STYLE,
    Curve,
    draw_curves,
    line_options,
    line_style,
    wrap_label,
)
from fedcog.report.run_values import RoundLine, over_rounds
from fedcog.runs.records.frames import Runs, as_runs
from fedcog.runs.records.metric_series import is_score, metric_label, with_values
from fedcog.runs.records.run_directory import write_file
from fedcog.runs.records.summary import group
from fedcog.runs.tracking.values import round_metrics

WIDTH = 3.3
"""Inches: one column of a paper."""
HEIGHT = 2.1
"""Inches, with one row of the legend."""
FONT_SIZE = 8
DPI = 300
"""Dots per inch of a PNG."""
ROW_HEIGHT = 0.155
"""Inches of a line of the legend."""
MAX_LINE_LENGTH = 44
"""Characters of a label that fit into one line."""
CHARACTER_WIDTH = 0.066
"""Inches of a character, on average."""
MAX_AXIS_LENGTH = 26
"""Characters of the vertical axis' label that fit into one line."""
HANDLE_WIDTH = 0.6
"""Inches of a line sample and the space around it."""
PAPER_STYLE: dict[Any, Any] = STYLE | {
    "font.size": FONT_SIZE,
    "axes.labelsize": FONT_SIZE,
    "legend.fontsize": FONT_SIZE,
    "legend.handlelength": 2.2,
    "xtick.labelsize": FONT_SIZE,
    "ytick.labelsize": FONT_SIZE,
    "pdf.fonttype": 42,  # TrueType, which publishers accept
    "svg.fonttype": "path",  # looks the same without the font
}
METADATA: dict[str, dict[str, None]] = {
    ".pdf": dict.fromkeys(("CreationDate", "Creator", "Producer")),
    ".svg": dict.fromkeys(("Date", "Creator", "Format", "Type")),
    ".png": {"Software": None},
}
"""By suffix: entries that are left out, so that equal figures are equal files."""


def check_figure_name(path: str | Path) -> str:
    """Return the suffix of a figure's file, in lower case.

    Raises:
        ConfigError: If it is not .pdf, .svg or .png.
    """
    suffix = Path(path).suffix.lower()
    if suffix in METADATA:
        return suffix
    table_hint = " For a table, use fedcog table." if suffix in (".tex", ".md", ".csv") else ""
    raise ConfigError(
        [f"{path} is no figure: choose a name that ends in .pdf, .svg or .png.{table_hint}"]
    )


def write_curves(runs: Runs, out: str | Path, metric: str = "") -> Path:
    """Draw the learning curves of some runs, as `fedcog.plot`.

    Args:
        runs: A folder with runs below it, or runs and folders.
        out: The file, whose suffix decides the format: .pdf, .svg or .png.
        metric: Key as in `fedcog.frame`; by default the main metric on the test set.

    Returns:
        The path of the file.

    Raises:
        ConfigError: If no run has the metric, or the suffix is unknown.
        RecordError: If no run can be read, or the file cannot be written.
    """
    suffix = check_figure_name(out)
    chosen = with_values(as_runs(runs), metric)
    curves: list[Curve] = []
    groups = group(chosen)
    for label, each in zip(_short_labels([one.label for one in groups]), groups, strict=True):
        key = metric or each.runs[0].metric
        points = over_rounds(each.runs, functools.partial(_values, key))
        if points:
            curves.append(Curve(label, points, line_style(len(curves))))
    name = metric_label(chosen, metric)
    percent = is_score(metric)
    figure = curves_figure(curves, f"{name} (%)" if percent else name, percent=percent)
    with matplotlib.rc_context(PAPER_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        file = io.BytesIO()
        figure.savefig(file, format=suffix[1:], dpi=DPI, metadata=METADATA[suffix])
    write_file(Path(out), file.getvalue())
    return Path(out)


def _short_labels(labels: Sequence[str]) -> list[str]:
    """Return labels such as 'fedprox (mu=0.1)', without algorithms before settings if possible."""
    short = [re.sub(r"([(,] ?)(?:[\w-]+\.)?(\w+) ", r"\1\2=", label) for label in labels]
    return short if len(set(short)) == len(labels) else list(labels)


def _values(key: str, line: RoundLine) -> list[float | None]:
    """Return a metric of a round, in a list."""
    return [round_metrics(line).get(key)]


def _axis_label(label: str) -> str:
    """Break a label such as 'local_test/accuracy_worst (%)' into lines, also after a slash."""
    lines = wrap_label(label.replace("/", "/ "), MAX_AXIS_LENGTH)
    return "\n".join(lines).replace("/ ", "/")


def curves_figure(curves: Sequence[Curve], label: str, *, percent: bool) -> Figure:
    """Draw curves over rounds, with a legend above them if there are several.

    Args:
        curves: The curves; at least one.
        label: Label of the y axis.
        percent: Whether values are fractions to show in percent.

    Returns:
        The figure.
    """
    names = ["\n".join(wrap_label(curve.label, MAX_LINE_LENGTH)) for curve in curves]
    name_width = CHARACTER_WIDTH * max(len(line) for name in names for line in name.split("\n"))
    num_columns = max(1, min(len(names), int(WIDTH / (name_width + HANDLE_WIDTH))))
    num_rows = sum(name.count("\n") + 1 for name in names) / num_columns
    with matplotlib.rc_context(PAPER_STYLE):
        size = (WIDTH, HEIGHT + ROW_HEIGHT * max(0.0, num_rows - 1))
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots()
        draw_curves(axes, curves, _axis_label(label), percent=percent)
        axes.set_xlabel("round")
        handles = [Line2D([], [], **line_options(curve.style)) for curve in curves]
        figure.legend(
            handles,
            names,
            loc="outside upper center",
            ncols=num_columns,
            borderpad=0,
            columnspacing=1.2,
            handletextpad=0.5,
        )
    return figure
