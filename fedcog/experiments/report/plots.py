"""The figures of a reproduction: ours beside the paper's, values over what is varied, clients, and generated images."""

import base64
import io
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from PIL import Image

from fedcog.experiments.report.figures import COLOURS, Plot, drawing_of, look, stroke
from fedcog.experiments.summary import Spread


class Beside(NamedTuple):
    """A method's number here and in the paper; None where there is none."""

    name: str
    ours: Spread | None
    paper: float | None


def beside_figure(blocks: Mapping[str, Sequence[Beside]], label: str) -> Plot:
    """For every setting a column of methods: the paper's number as a ring, ours as a dot with its deviation."""
    names = list(dict.fromkeys(one.name for rows in blocks.values() for one in rows))
    about = f"{label}, here and in the paper, in {len(blocks)} settings: {', '.join(names)}"
    with drawing_of((2.1 + 1.75 * len(blocks), 0.24 * len(names) + 1.1), about) as drawing:
        columns = drawing.figure.subplots(1, len(blocks), sharey=True, squeeze=False)[0]
        for axes, (title, rows) in zip(columns, blocks.items(), strict=True):
            for one in rows:
                place = names.index(one.name)
                if one.ours is not None:
                    mean, span = one.ours.mean, one.ours.deviation or 0
                    axes.hlines(place, mean - span, mean + span, color=COLOURS[0], linewidth=1.6)
                    axes.plot(mean, place, "o", color=COLOURS[0], markersize=5)
                if one.paper is not None:
                    axes.plot(one.paper, place, "o", mfc="none", mec=COLOURS[1], mew=1.5, markersize=6.5)
            axes.set_title(title.replace(", ", "\n"))
            axes.grid(axis="x")
            axes.xaxis.set_major_locator(MaxNLocator(nbins=4))
        columns[0].set_yticks(range(len(names)), names)
        columns[0].set_ylim(len(names) - 0.4, -0.6)
        drawing.figure.supxlabel(label, fontsize=9)
        handles = [
            Line2D([], [], marker="o", linestyle="-", color=COLOURS[0], markersize=5),
            Line2D([], [], marker="o", linestyle="", mfc="none", mec=COLOURS[1], mew=1.5, markersize=6.5),
        ]
        words = ["ours, best round, ± deviation over seeds", "the paper"]
        drawing.figure.legend(handles, words, loc="outside upper left", ncols=2, borderpad=0, columnspacing=1.5)
    return drawing.svg


def lines_figure(
    rows: Mapping[str, Sequence[tuple[float, Spread]]],
    paper: Mapping[str, Sequence[tuple[float, float]]],
    axis: str,
    label: str,
) -> Plot:
    """Values over what is varied, one line a row with bars for deviations; the paper's as thin dotted ones."""
    about = f"{label} over {axis}: {', '.join(rows)}"
    with drawing_of((4.8, 3.3 + 0.17 * (len(rows) // 2)), about) as drawing:
        axes = drawing.figure.subplots()
        places = sorted({x for points in [*rows.values(), *paper.values()] for x, _ in points})
        at = {x: number for number, x in enumerate(places)}  # evenly spaced, whatever the values are
        for number, (name, points) in enumerate(rows.items()):
            dress = stroke(look(number))
            shift = 0.06 * (number - (len(rows) - 1) / 2)
            if points:
                axes.errorbar(
                    [at[x] + shift for x, _ in points],
                    [one.mean for _, one in points],
                    yerr=[one.deviation or 0 for _, one in points],
                    capsize=2,
                    marker="o",
                    markersize=4,
                    **dress,
                )
            if theirs := paper.get(name):
                there = [at[x] + shift for x, _ in theirs]
                values = [value for _, value in theirs]
                axes.plot(there, values, ":", color=dress["color"], linewidth=1, marker="o", mfc="none", markersize=4)
        axes.set_xticks(range(len(places)), [f"{x:g}" for x in places])
        axes.set_xlabel(axis)
        axes.set_ylabel(label)
        axes.grid(axis="y")
        handles = [Line2D([], [], **stroke(look(number))) for number in range(len(rows))]
        names = list(rows)
        if any(paper.values()):
            handles.append(Line2D([], [], linestyle=":", color="#666666", marker="o", mfc="none", markersize=4))
            names.append("the paper")
        drawing.figure.legend(handles, names, loc="outside upper left", ncols=3, borderpad=0, columnspacing=1.5)
    return drawing.svg


def clients_figure(panels: Mapping[str, Mapping[str, Sequence[float]]]) -> Plot:
    """For every quantity a panel: each method's clients as dots, in order of the client."""
    names = list(dict.fromkeys(name for rows in panels.values() for name in rows))
    about = f"{', '.join(panels)} of each client: {', '.join(names)}"
    with drawing_of((3.1 * len(panels), 3.0), about) as drawing:
        every: Sequence[Axes] = drawing.figure.subplots(1, len(panels), squeeze=False)[0]
        for axes, (title, rows) in zip(every, panels.items(), strict=True):
            for name, values in rows.items():
                colour = look(names.index(name)).colour
                marker = "os^D"[names.index(name) % 4]
                axes.plot(range(len(values)), values, marker, color=colour, markersize=5, alpha=0.85)
            axes.set_xlabel("client")
            axes.set_title(title)
            axes.grid(axis="y")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10))
        handles = [
            Line2D([], [], marker="os^D"[number % 4], linestyle="", color=look(number).colour, markersize=5)
            for number in range(len(names))
        ]
        drawing.figure.legend(handles, names, loc="outside upper left", ncols=len(names), borderpad=0)
    return drawing.svg


def pictures_figure(rows: Mapping[str, str], classes: Sequence[str]) -> Plot:
    """Strips of images, each a PNG in base64, one below the other; a class stands above each column."""
    about = f"Generated images of {', '.join(classes)}: {', '.join(rows)}"
    with drawing_of((0.62 * len(classes) + 0.9, 0.62 * len(rows) + 0.6), about) as drawing:
        every: list[Axes] = list(drawing.figure.subplots(len(rows), 1, squeeze=False)[:, 0])
        for number, (axes, (name, strip)) in enumerate(zip(every, rows.items(), strict=True)):
            with Image.open(io.BytesIO(base64.b64decode(strip))) as image:
                width = image.width / len(classes)
                axes.imshow(image, cmap="gray" if image.mode == "L" else None, interpolation="nearest")
            axes.spines[:].set_visible(False)
            axes.set_yticks([])
            axes.set_ylabel(name, rotation=0, ha="right", va="center")
            axes.set_xticks(
                [(place + 0.5) * width for place in range(len(classes))],
                classes if number == 0 else [""] * len(classes),
            )
            axes.tick_params(length=0, top=number == 0, labeltop=number == 0, labelbottom=False)
    return drawing.svg
