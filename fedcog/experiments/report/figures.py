"""The figures of a report, each as the text of an SVG: readable in print, on a phone and for the colour-blind."""

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
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from fedcog.experiments.report.markup import printable
from fedcog.experiments.summary import Spread

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#666666")  # Okabe and Ito's
DASHES: tuple[tuple[float, ...], ...] = ((), (4, 1.5), (1.2, 1.2), (6, 1.5, 1.2, 1.5))
HATCHES = ("", "////", "....", "xxxx")
FLAT = 100  # times the middle value, from which on an axis is logarithmic
INK, FAINT = "#333333", "#d9d9d9"
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "fedcog",
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 9,
    "axes.labelsize": 9,
    "axes.titlesize": 9,
    "axes.edgecolor": "#888888",
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": "#e8e8e8",
    "hatch.linewidth": 0.5,
    "legend.frameon": False,
    "legend.handlelength": 2.8,
    "legend.fontsize": 9,
}
HEAT = LinearSegmentedColormap.from_list("heat", ["#cfe4f3", "#64a8d8", "#1f77b4", "#0b4a78"]).with_extremes(
    under="#ffffff"
)


class Plot(str):
    """A figure as the text of its SVG, which can be had as pixels, too."""

    figure: Figure

    def png(self) -> bytes:
        """The same as a PNG."""
        file = io.BytesIO()
        with matplotlib.rc_context(STYLE):
            self.figure.savefig(file, format="png", dpi=160, metadata={"Software": None})
        return file.getvalue()


class Look(NamedTuple):
    """How a line is told from the others: by colour and by dashes, so that one of them is enough."""

    colour: str
    dashes: tuple[float, ...]


class Curve(NamedTuple):
    """A quantity over rounds: (round, mean and deviation), its name and its look."""

    label: str
    points: Sequence[tuple[int, Spread]]
    look: Look


def look(number: int) -> Look:
    """The look of the line with this number; the first 28 all differ."""
    return Look(COLOURS[number % len(COLOURS)], DASHES[number % len(DASHES)])


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
    """Lines over rounds with their deviation as a band, and a thin upright one before each round in `marks`."""
    names = ["\n".join(wrapped(line.label, int(11 * size[0]))) for line in lines]
    columns = max(1, min(len(names), 4, int(size[0] / (0.085 * max(len(name) for name in names) + 0.6))))
    rows = sum(name.count("\n") + 1 for name in names) / columns
    about = f"{label} over {axis}s: {', '.join(line.label for line in lines)}"
    with drawing_of((size[0], size[1] + 0.17 * (rows - 1)), about) as drawing:
        axes = drawing.figure.subplots()
        factor = 100 if percent else 1
        for line in lines:
            rounds = [round for round, _ in line.points]
            means = [factor * spread.mean for _, spread in line.points]
            spans = [factor * (spread.deviation or 0) for _, spread in line.points]
            if any(spans):
                low = [mean - span for mean, span in zip(means, spans, strict=True)]
                high = [mean + span for mean, span in zip(means, spans, strict=True)]
                axes.fill_between(rounds, low, high, color=line.look.colour, alpha=0.16, linewidth=0)
            axes.plot(rounds, means, marker="o" if len(rounds) <= 30 else "", markersize=2.8, **stroke(line.look))
        for mark in marks:
            axes.axvline(mark - 0.5, color="#777777", linewidth=0.8)
            words = f"FedCOG from round {mark}" if len(marks) == 1 else str(mark)
            place: dict[str, Any] = {"xycoords": axes.get_xaxis_transform(), "textcoords": "offset points"}
            side = "right" if len(marks) == 1 and 2 * mark > max(rounds) else "center"
            axes.annotate(words, (mark - 0.5, 1), (0, 2), **place, ha=side, fontsize=8, color="#555555")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
        if all(len(line.points) < 2 for line in lines) and not marks:
            rounds = [round for line in lines for round, _ in line.points]
            axes.set_xlim(min(rounds) - 1, max(rounds) + 1)
        if whole_range:
            axes.set_ylim(-3, 103)
        elif percent:
            bottom, top = axes.get_ylim()
            axes.set_ylim(max(bottom, -2), min(top, 102))
        elif least := _far_apart([spread.mean for line in lines for _, spread in line.points]):
            axes.set_yscale("log", nonpositive="clip")
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter("")
            axes.set_ylim(bottom=least / 2)
        axes.grid(axis="y")
        axes.set_xlabel(axis)
        axes.set_ylabel(label)
        handles = [Line2D([], [], **stroke(line.look)) for line in lines]
        drawing.figure.legend(handles, names, loc="outside upper left", ncols=columns, borderpad=0, columnspacing=1.5)
    return drawing.svg


def partition_figure(counts: Tensor, classes: Sequence[str], noun: str = "examples") -> Plot:
    """Examples or labels per client and class as a heat map, with the numbers where they fit, under clients' totals."""
    clients, labels = counts.shape
    width, rows = 4.4, min(max(0.24 * labels, 1.2), 4.2)
    names = [_short(name) for name in classes]
    about = f"{noun.title()} per client and class: {clients} clients, {labels} classes, {int(counts.sum())} {noun}"
    with drawing_of((width, rows + 1.5), about) as drawing:
        figure = drawing.figure
        above, axes = figure.subplots(2, 1, sharex=True, height_ratios=[0.7, rows])
        above.bar(range(clients), counts.sum(1).tolist(), width=0.8 if clients <= 60 else 1.0, color="#8a8a8a")
        above.set_ylabel("total", rotation=0, ha="right", va="center")
        above.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=2))
        above.tick_params(bottom=False, labelbottom=False)
        values, most = counts.T.tolist(), max(int(counts.max()), 1)
        colours = PowerNorm(0.5, 0.5, most)
        picture = axes.imshow(values, cmap=HEAT, norm=colours, aspect="auto", interpolation="none")
        room = min(74 * (width - 1.6) / clients / (0.62 * len(str(most))), 50 * rows / labels, 8)
        if room >= 5.5:
            for row, line in enumerate(values):
                for column, count in enumerate(line):
                    ink = "#ffffff" if colours(count) > 0.55 else INK
                    if count:
                        axes.text(column, row, str(count), ha="center", va="center", fontsize=room, color=ink)
        _sparse(axes, "x", [str(client) for client in range(clients)], width - 1.4, 0.24)
        _sparse(axes, "y", names, rows, 0.15)
        if room >= 5.5:
            axes.set_xticks([client - 0.5 for client in range(clients + 1)], minor=True)
            axes.set_yticks([label - 0.5 for label in range(labels + 1)], minor=True)
            axes.grid(which="minor", color="#e4e4e4", linewidth=0.6)
            axes.tick_params(which="minor", length=0)
            axes.set_axisbelow(False)
        axes.spines[:].set_visible(room < 5.5)
        axes.spines[:].set_color(FAINT)
        axes.tick_params(length=2)
        axes.set_xlabel("client")
        axes.set_ylabel("class")
        if room < 5.5:
            bar = figure.colorbar(picture, ax=[above, axes], shrink=0.6, aspect=28, pad=0.02)
            bar.set_label(noun)
            bar.set_ticks(
                [1, *(tick for tick in MaxNLocator(5, integer=True).tick_values(1, most) if 1 < tick <= most)]
            )
            bar.outline.set_visible(False)
    return drawing.svg


def dumbbell_figure(clients: Sequence[tuple[int, float, float]], name: str = "accuracy") -> Plot:
    """Each client's score before and after local training, as two dots joined by a bar: (client, before, after)."""
    rows = min(max(0.2 * len(clients), 0.6), 5.0)
    about = (
        f"{name[0].upper()}{name[1:]} on the own label mix before and after local training, of {len(clients)} clients"
    )
    small = len(clients) > 40
    with drawing_of((4.4, rows + 1.0), about) as drawing:
        axes = drawing.figure.subplots()
        places = range(len(clients))
        before, after = ([100 * client[end] for client in clients] for end in (1, 2))
        axes.hlines(places, before, after, color="#bbbbbb", linewidth=1 if small else 2.2, zorder=1)
        dots: dict[str, Any] = {"marker": "o", "s": 8 if small else 24, "linewidths": 1.2}
        axes.scatter(before, places, facecolors="#ffffff", edgecolors=COLOURS[0], label="before", **dots, zorder=2)
        axes.scatter(after, places, facecolors=COLOURS[1], edgecolors=COLOURS[1], label="after", **dots, zorder=3)
        _sparse(axes, "y", [str(client) for client, _, _ in clients], rows, 0.15)
        axes.set_ylim(len(clients) - 0.4, -0.6)
        axes.set_xlim(-3, 103)
        axes.grid(axis="x")
        axes.set_xlabel(f"{name} on own label mix (%)")
        axes.set_ylabel("client")
        drawing.figure.legend(loc="outside upper left", ncols=2, handlelength=1, borderpad=0, columnspacing=1.5)
    return drawing.svg


def time_figure(bars: Sequence[tuple[str, Mapping[str, float]]]) -> Plot:
    """Seconds per round as stacked bars, one part after another: (label, seconds by part)."""
    parts = list(bars[0][1])
    about = "Mean seconds per round: " + "; ".join(f"{label} {sum(parts.values()):.3g}" for label, parts in bars)
    names = ["\n".join(wrapped(label, 24)) for label, _ in bars]
    lines = sum(name.count("\n") + 2 for name in names)
    with drawing_of((4.4, 0.17 * lines + 1.1), about) as drawing:
        axes = drawing.figure.subplots()
        left = [0.0] * len(bars)
        for number, part in enumerate(parts):
            seconds = [bar[part] for _, bar in bars]
            dress: dict[str, Any] = {
                "facecolor": (COLOURS[1], COLOURS[0], COLOURS[2], "#bbbbbb")[number],
                "hatch": HATCHES[number],
            }
            axes.barh(range(len(bars)), seconds, left=left, height=0.6, label=part, edgecolor="#ffffff", lw=0, **dress)
            left = [start + more for start, more in zip(left, seconds, strict=True)]
        for row, end in enumerate(left):
            axes.annotate(f"{end:.3g} s", (end, row), (4, 0), textcoords="offset points", va="center", fontsize=8)
        axes.set_yticks(range(len(bars)), names)
        axes.set_ylim(len(bars) - 0.4, -0.6)
        axes.set_xlim(0, 1.16 * max(*left, 1e-9))
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x")
        axes.set_xlabel("seconds per round")
        drawing.figure.legend(loc="outside upper left", ncols=4, handlelength=1.2, borderpad=0, columnspacing=1.2)
    return drawing.svg


class Drawing:
    """A figure in the making, and once it is done the text of its SVG."""

    def __init__(self, size: tuple[float, float]) -> None:
        self.figure = Figure(figsize=size, layout="constrained")
        self.svg = Plot()


@contextlib.contextmanager
def drawing_of(size: tuple[float, float], about: str) -> Iterator[Drawing]:
    """A figure to draw on, turned into SVG in the end: equal figures are equal texts, and say what they show."""
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        # Letters that matplotlib's font lacks are the browser's to draw; here they are only measured.
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        drawing = Drawing(size)
        yield drawing
        file = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        drawing.figure.savefig(file, format="svg", metadata=nothing)
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :].strip()
    drawing.svg = Plot(svg.replace("<svg", f'<svg role="img" aria-label="{escape(printable(about))}"', 1))
    drawing.svg.figure = drawing.figure


def stroke(look: Look) -> dict[str, Any]:
    """How a line of that look is drawn."""
    return {"color": look.colour, "linestyle": (0, look.dashes) if look.dashes else "-", "linewidth": 1.7}


def _far_apart(values: Sequence[float]) -> float:
    """The least of some positive values, if the largest would flatten the others: a run that diverges; 0 if not."""
    least = min(values, default=0.0)
    return least if least > 0 and max(values) > FLAT * statistics.median(values) else 0.0


def _sparse(axes: Axes, side: str, names: Sequence[str], inches: float, each: float) -> None:
    """As many of the names along a side as have room, evenly spaced."""
    step = next(step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500, 10**9) if len(names) * each / step <= inches)
    places = range(0, len(names), step)
    (axes.set_xticks if side == "x" else axes.set_yticks)(places, [names[place] for place in places])


def _short(name: str) -> str:
    name = printable(name)
    return name if len(name) <= 16 else name[:15] + "…"


def wrapped(label: str, width: int) -> list[str]:
    """A label in lines of so many letters."""
    return textwrap.wrap(printable(label), width) or [""]


__all__ = [
    "Curve",
    "Drawing",
    "Look",
    "Plot",
    "curves_figure",
    "drawing_of",
    "dumbbell_figure",
    "look",
    "partition_figure",
    "stroke",
    "time_figure",
    "wrapped",
]
