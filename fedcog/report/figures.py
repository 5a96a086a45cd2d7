"""The figures of a report as SVG: readable in print, on a phone, and by the color-blind."""

import contextlib
import io
import statistics
import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, PowerNorm
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from fedcog.report.markup import printable
from fedcog.runs.records.summary import Spread

# The palette of Okabe and Ito.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#666666")
DASHES: tuple[tuple[float, ...], ...] = ((), (4, 1.5), (1.2, 1.2), (6, 1.5, 1.2, 1.5))
HATCHES = ("", "////", "....", "xxxx")
LOG_SCALE_RATIO = 100
"""An axis is logarithmic if the largest value is this many times the median."""
MIN_CELL_FONT_SIZE = 5.5
"""Numbers that would be smaller (in points) are left out of a heat map."""
MAX_NAME_LENGTH = 16
MAX_MARKED_ROUNDS = 15
"""A line of up to this many rounds has a dot for each; on more, dots would hide the dashes."""
TEXT_COLOR = "#333333"
FAINT_COLOR = "#d9d9d9"
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "fedcog",
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 9,
    "axes.labelsize": 9,
    "axes.titlesize": 9,
    "axes.edgecolor": "#888888",
    "axes.labelcolor": TEXT_COLOR,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "text.color": TEXT_COLOR,
    "xtick.color": TEXT_COLOR,
    "ytick.color": TEXT_COLOR,
    "grid.color": "#e8e8e8",
    "hatch.linewidth": 0.5,
    "legend.frameon": False,
    "legend.handlelength": 2.8,
    "legend.fontsize": 9,
}
HEAT_COLORS = LinearSegmentedColormap.from_list(
    "heat", ["#cfe4f3", "#64a8d8", "#1f77b4", "#0b4a78"]
).with_extremes(under="#ffffff")


class Plot(str):
    """A figure as the text of its SVG."""

    figure: Figure

    def png(self) -> bytes:
        """Return the figure as a PNG."""
        file = io.BytesIO()
        with matplotlib.rc_context(STYLE):
            self.figure.savefig(file, format="png", dpi=160, metadata={"Software": None})
        return file.getvalue()


class LineStyle(NamedTuple):
    """Color and dashes of a line; each of them alone is enough to recognize it."""

    color: str
    dashes: tuple[float, ...]


class Curve(NamedTuple):
    """A quantity over rounds or virtual seconds: mean and standard deviation, name and style."""

    label: str
    points: Sequence[tuple[float, Spread]]
    style: LineStyle


def line_style(index: int) -> LineStyle:
    """Return the style of a line; the first 28 differ."""
    return LineStyle(COLORS[index % len(COLORS)], DASHES[index % len(DASHES)])


def curves_figure(
    lines: Sequence[Curve],
    label: str,
    *,
    size: tuple[float, float] = (4.4, 3.1),
    percent: bool = False,
    whole_range: bool = False,
    marks: Sequence[int] = (),
    axis: str = "round",
) -> Plot:
    """Draw lines over rounds, with their standard deviation as a band.

    Args:
        lines: The curves.
        label: Label of the y axis.
        size: Width and height in inches.
        percent: Whether values are fractions to show in percent.
        whole_range: Whether the y axis always goes from 0 to 100.
        marks: Rounds before which to draw a thin vertical line: there FedCOG begins.
        axis: Label of the x axis, in the singular or plural.

    Returns:
        The figure.
    """
    names = ["\n".join(wrap_label(line.label, int(11 * size[0]))) for line in lines]
    name_width = 0.085 * max(len(name) for name in names) + 0.6
    num_columns = max(1, min(len(names), 4, int(size[0] / name_width)))
    num_rows = sum(name.count("\n") + 1 for name in names) / num_columns
    over = axis if axis.endswith("s") else f"{axis}s"
    about = f"{label} over {over}: {', '.join(line.label for line in lines)}"
    with new_drawing((size[0], size[1] + 0.17 * (num_rows - 1)), about) as drawing:
        axes = drawing.figure.subplots()
        draw_curves(axes, lines, label, percent=percent, whole_range=whole_range, marks=marks)
        axes.set_xlabel(axis)
        handles = [Line2D([], [], **line_options(line.style)) for line in lines]
        drawing.figure.legend(
            handles,
            names,
            loc="outside upper left",
            ncols=num_columns,
            borderpad=0,
            columnspacing=1.5,
        )
    return drawing.svg


def draw_curves(
    axes: Axes,
    lines: Sequence[Curve],
    label: str,
    *,
    percent: bool = False,
    whole_range: bool = False,
    marks: Sequence[int] = (),
) -> None:
    """Draw lines over rounds, with their standard deviation as a band, without a legend.

    Args:
        axes: Where to draw.
        lines: The curves.
        label: Label of the y axis.
        percent: Whether values are fractions to show in percent.
        whole_range: Whether the y axis always goes from 0 to 100.
        marks: Rounds before which to draw a thin vertical line: there FedCOG begins.
    """
    factor = 100 if percent else 1
    for line in lines:
        _draw_curve(axes, line, factor)
    last_round = max((round for round, _ in lines[-1].points), default=0)
    for mark in marks:
        _draw_mark(axes, mark, is_only=len(marks) == 1, last_round=last_round)
    is_whole = all(float(x).is_integer() for line in lines for x, _ in line.points)
    axes.xaxis.set_major_locator(MaxNLocator(integer=is_whole, nbins=8))
    if all(len(line.points) < 2 for line in lines) and not marks:
        rounds = [round for line in lines for round, _ in line.points]
        axes.set_xlim(min(rounds) - 1, max(rounds) + 1)
        axes.set_xticks(sorted({*rounds}))
    if whole_range:
        axes.set_ylim(-3, 103)
    elif percent:
        _limit_to_percent(axes)
    else:
        _scale_values(axes, [spread.mean for line in lines for _, spread in line.points])
    axes.grid(axis="y")
    axes.set_ylabel(label)


def _draw_curve(axes: Axes, line: Curve, factor: float) -> None:
    """Draw one line and its band."""
    rounds = [round for round, _ in line.points]
    means = [factor * spread.mean for _, spread in line.points]
    deviations = [factor * (spread.deviation or 0) for _, spread in line.points]
    if any(deviations):
        low = [mean - width for mean, width in zip(means, deviations, strict=True)]
        high = [mean + width for mean, width in zip(means, deviations, strict=True)]
        axes.fill_between(rounds, low, high, color=line.style.color, alpha=0.16, linewidth=0)
    if len(rounds) == 1 and any(deviations):  # a band needs two rounds
        axes.errorbar(rounds, means, deviations, color=line.style.color, capsize=3, linewidth=1)
    marker = "o" if len(rounds) <= MAX_MARKED_ROUNDS else ""
    axes.plot(rounds, means, marker=marker, markersize=2.8, **line_options(line.style))


def _draw_mark(axes: Axes, mark: int, *, is_only: bool, last_round: float) -> None:
    """Draw a vertical line before a round, with a label above it."""
    axes.axvline(mark - 0.5, color="#777777", linewidth=0.8)
    text = f"FedCOG from round {mark}" if is_only else str(mark)
    alignment = "right" if is_only and 2 * mark > last_round else "center"
    axes.annotate(
        text,
        (mark - 0.5, 1),
        (0, 2),
        xycoords=axes.get_xaxis_transform(),
        textcoords="offset points",
        ha=alignment,
        fontsize=8,
        color="#555555",
    )


def _limit_to_percent(axes: Axes) -> None:
    """Leave out what is below 0 % or above 100 %."""
    bottom, top = axes.get_ylim()
    axes.set_ylim(max(bottom, -2), min(top, 102))


def _scale_values(axes: Axes, values: Sequence[float]) -> None:
    """Use a logarithmic axis if one value, as of a diverging run, would flatten all others."""
    least = min(values, default=0.0)
    if least > 0 and max(values) > LOG_SCALE_RATIO * statistics.median(values):
        axes.set_yscale("log", nonpositive="clip")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")
        axes.set_ylim(bottom=least / 2)


def partition_figure(
    counts: Tensor, classes: Sequence[str], noun: str = "examples", names: Sequence[str] = ()
) -> Plot:
    """Draw a heat map of examples per client and class, below the clients' totals.

    Args:
        counts: Number of examples (clients, classes).
        classes: Names of the classes.
        noun: What is counted.
        names: Names of the clients' users, if clients are users.

    Returns:
        The figure. It shows the numbers where they fit.
    """
    num_clients, num_classes = counts.shape
    labels = [str(client) for client in range(num_clients)]
    has_names = len(names) == num_clients
    if has_names:
        labels = [_shorten(f"{client} {name}") for client, name in enumerate(names)]
    width = 4.4
    height = min(max(0.24 * num_classes, 1.2), 4.2)
    about = (
        f"{noun.title()} per client and class: {num_clients} clients, {num_classes} classes, "
        f"{int(counts.sum())} {noun}"
    )
    label_height = 0.08 * max(map(len, labels)) if has_names else 0.0
    with new_drawing((width, height + 1.5 + label_height), about) as drawing:
        above, axes = drawing.figure.subplots(2, 1, sharex=True, height_ratios=[0.7, height])
        _draw_totals(above, counts)
        largest = max(int(counts.max()), 1)
        norm = PowerNorm(0.5, 0.5, largest)
        image = axes.imshow(
            counts.T.tolist(), cmap=HEAT_COLORS, norm=norm, aspect="auto", interpolation="none"
        )
        cell_width = 74 * (width - 1.6) / num_clients / (0.62 * len(str(largest)))
        font_size = min(cell_width, 50 * height / num_classes, 8)
        shows_numbers = font_size >= MIN_CELL_FONT_SIZE
        if shows_numbers:
            _draw_numbers(axes, counts, norm, font_size)
        _set_sparse_ticks(axes, "x", labels, width - 1.4, 0.15 if has_names else 0.24)
        if has_names:
            axes.tick_params(axis="x", labelrotation=90)
        _set_sparse_ticks(axes, "y", [_shorten(name) for name in classes], height, 0.15)
        if shows_numbers:
            axes.set_xticks([client - 0.5 for client in range(num_clients + 1)], minor=True)
            axes.set_yticks([label - 0.5 for label in range(num_classes + 1)], minor=True)
            axes.grid(which="minor", color="#e4e4e4", linewidth=0.6)
            axes.tick_params(which="minor", length=0)
            axes.set_axisbelow(False)
        axes.spines[:].set_visible(not shows_numbers)
        axes.spines[:].set_color(FAINT_COLOR)
        axes.tick_params(length=2)
        axes.set_xlabel("client")
        axes.set_ylabel("class")
        if not shows_numbers:
            _draw_color_bar(drawing.figure, image, [above, axes], noun, largest)
    return drawing.svg


def _draw_totals(axes: Axes, counts: Tensor) -> None:
    """Draw the number of examples of each client as bars."""
    num_clients = len(counts)
    axes.bar(
        range(num_clients),
        counts.sum(1).tolist(),
        width=0.8 if num_clients <= 60 else 1.0,
        color="#8a8a8a",
    )
    axes.set_ylabel("total", rotation=0, ha="right", va="center")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=2))
    axes.tick_params(which="both", bottom=False, labelbottom=False)


def _draw_numbers(axes: Axes, counts: Tensor, norm: PowerNorm, font_size: float) -> None:
    """Write the number of examples into each cell of the heat map."""
    for row, values in enumerate(counts.T.tolist()):
        for column, count in enumerate(values):
            if count:
                color = "#ffffff" if norm(count) > 0.55 else TEXT_COLOR
                axes.text(
                    column,
                    row,
                    str(count),
                    ha="center",
                    va="center",
                    fontsize=font_size,
                    color=color,
                )


def _draw_color_bar(
    figure: Figure, image: AxesImage, axes: list[Axes], noun: str, largest: int
) -> None:
    bar = figure.colorbar(image, ax=axes, shrink=0.6, aspect=28, pad=0.02)
    bar.set_label(noun)
    ticks = MaxNLocator(5, integer=True).tick_values(1, largest)
    bar.set_ticks([1, *(tick for tick in ticks if 1 < tick <= largest)])
    bar.outline.set_visible(False)


def dumbbell_figure(clients: Sequence[tuple[str, float, float]], name: str = "accuracy") -> Plot:
    """Draw each client's score before and after local training as two joined dots.

    Args:
        clients: Label of the client, score before and score after, as fractions.
        name: Name of the score.

    Returns:
        The figure.
    """
    height = min(max(0.2 * len(clients), 0.6), 5.0)
    about = (
        f"{name[0].upper()}{name[1:]} on the own label mix before and after local training, of "
        f"{len(clients)} clients"
    )
    is_small = len(clients) > 40
    with new_drawing((4.4, height + 1.0), about) as drawing:
        axes = drawing.figure.subplots()
        rows = range(len(clients))
        before = [100 * score for _, score, _ in clients]
        after = [100 * score for _, _, score in clients]
        line_width = 1 if is_small else 2.2
        axes.hlines(rows, before, after, color="#bbbbbb", linewidth=line_width, zorder=1)
        dots: dict[str, Any] = {"marker": "o", "s": 8 if is_small else 24, "linewidths": 1.2}
        axes.scatter(
            before,
            rows,
            facecolors="#ffffff",
            edgecolors=COLORS[0],
            label="before",
            **dots,
            zorder=2,
        )
        axes.scatter(
            after,
            rows,
            facecolors=COLORS[1],
            edgecolors=COLORS[1],
            label="after",
            **dots,
            zorder=3,
        )
        _set_sparse_ticks(axes, "y", [_shorten(label) for label, _, _ in clients], height, 0.15)
        axes.set_ylim(len(clients) - 0.4, -0.6)
        axes.set_xlim(-3, 103)
        axes.grid(axis="x")
        axes.set_xlabel(f"{name} on own label mix (%)")
        axes.set_ylabel("client")
        drawing.figure.legend(
            loc="outside upper left", ncols=2, handlelength=1, borderpad=0, columnspacing=1.5
        )
    return drawing.svg


def time_figure(bars: Sequence[tuple[str, Mapping[str, float]]]) -> Plot:
    """Draw seconds per round as stacked bars.

    Args:
        bars: Label and seconds by part of the round; all bars have the same four parts.

    Returns:
        The figure.
    """
    parts = list(bars[0][1])
    totals = [f"{label} {sum(seconds.values()):.3g}" for label, seconds in bars]
    names = ["\n".join(wrap_label(label, 24)) for label, _ in bars]
    num_lines = sum(name.count("\n") + 2 for name in names)
    about = f"Mean seconds per round: {'; '.join(totals)}"
    with new_drawing((4.4, 0.17 * num_lines + 1.1), about) as drawing:
        axes = drawing.figure.subplots()
        ends = [0.0] * len(bars)
        part_colors = (COLORS[1], COLORS[0], COLORS[2], "#bbbbbb")
        for part, color, hatch in zip(parts, part_colors, HATCHES, strict=False):
            seconds = [bar[part] for _, bar in bars]
            axes.barh(
                range(len(bars)),
                seconds,
                left=ends,
                height=0.6,
                label=part,
                edgecolor="#ffffff",
                lw=0,
                facecolor=color,
                hatch=hatch,
            )
            ends = [end + more for end, more in zip(ends, seconds, strict=True)]
        for row, end in enumerate(ends):
            axes.annotate(
                f"{end:.3g} s",
                (end, row),
                (4, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )
        axes.set_yticks(range(len(bars)), names)
        axes.set_ylim(len(bars) - 0.4, -0.6)
        axes.set_xlim(0, 1.16 * max(*ends, 1e-9))
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x")
        axes.set_xlabel("seconds per round")
        drawing.figure.legend(
            loc="outside upper left", ncols=4, handlelength=1.2, borderpad=0, columnspacing=1.2
        )
    return drawing.svg


class Drawing:
    """A figure to draw on; `svg` is set when it is complete."""

    def __init__(self, size: tuple[float, float]) -> None:
        self.figure = Figure(figsize=size, layout="constrained")
        self.svg = Plot()


@contextlib.contextmanager
def new_drawing(size: tuple[float, float], about: str) -> Iterator[Drawing]:
    """Open a figure to draw on, and convert it to SVG at the end.

    Args:
        size: Width and height in inches.
        about: Description for screen readers.

    Yields:
        The drawing. Equal figures give equal texts.
    """
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        # The browser draws letters that matplotlib's font lacks; here they are only measured.
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        drawing = Drawing(size)
        yield drawing
        file = io.StringIO()
        no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        drawing.figure.savefig(file, format="svg", metadata=no_metadata)
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :].strip()
    label = escape(printable(about))
    drawing.svg = Plot(svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1))
    drawing.svg.figure = drawing.figure


def line_options(style: LineStyle) -> dict[str, Any]:
    """Return the matplotlib options of a line with this style."""
    return {
        "color": style.color,
        "linestyle": (0, style.dashes) if style.dashes else "-",
        "linewidth": 1.7,
    }


def _set_sparse_ticks(
    axes: Axes, side: str, names: Sequence[str], length: float, space: float
) -> None:
    """Label every n-th tick so that labels of `space` inches fit into `length` inches."""
    steps = (1, 2, 5, 10, 20, 50, 100, 200, 500, 10**9)
    step = next(step for step in steps if len(names) * space / step <= length)
    ticks = range(0, len(names), step)
    set_ticks = axes.set_xticks if side == "x" else axes.set_yticks
    set_ticks(ticks, [names[tick] for tick in ticks])


def _shorten(name: str) -> str:
    name = printable(name)
    return name if len(name) <= MAX_NAME_LENGTH else name[: MAX_NAME_LENGTH - 1] + "…"


def wrap_label(label: str, width: int) -> list[str]:
    """Break a label into lines.

    Args:
        label: The label.
        width: Maximal number of characters in a line.

    Returns:
        The lines; at least one.
    """
    return textwrap.wrap(printable(label), width) or [""]
