"""Figures of reproduced studies: comparison with the paper, lines, clients, generated images."""

import base64
import io
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from PIL import Image

from fedcog.report.figures import COLORS, Plot, line_options, line_style, new_drawing
from fedcog.runs.records.summary import Spread

MARKERS = "os^D"


class ScoreWithPaper(NamedTuple):
    """A method's score here and in the paper; None where there is none."""

    name: str
    ours: Spread | None
    paper: float | None


def comparison_figure(blocks: Mapping[str, Sequence[ScoreWithPaper]], label: str) -> Plot:
    """Draw a column of methods for every setting: our scores as dots, the paper's as rings.

    Args:
        blocks: The scores by setting.
        label: Label of the x axis.

    Returns:
        The figure.
    """
    names = list(dict.fromkeys(score.name for scores in blocks.values() for score in scores))
    about = f"{label}, here and in the paper, in {len(blocks)} settings: {', '.join(names)}"
    with new_drawing((2.1 + 1.75 * len(blocks), 0.24 * len(names) + 1.1), about) as drawing:
        columns = drawing.figure.subplots(1, len(blocks), sharey=True, squeeze=False)[0]
        for axes, (title, scores) in zip(columns, blocks.items(), strict=True):
            for score in scores:
                _draw_score(axes, names.index(score.name), score)
            axes.set_title(title.replace(", ", "\n"))
            axes.grid(axis="x")
            axes.xaxis.set_major_locator(MaxNLocator(nbins=4))
        columns[0].set_yticks(range(len(names)), names)
        columns[0].set_ylim(len(names) - 0.4, -0.6)
        drawing.figure.supxlabel(label, fontsize=9)
        handles = [
            Line2D([], [], marker="o", linestyle="-", color=COLORS[0], markersize=5),
            Line2D(
                [],
                [],
                marker="o",
                linestyle="",
                mfc="none",
                mec=COLORS[1],
                mew=1.5,
                markersize=6.5,
            ),
        ]
        legend = ["ours, best round, ± deviation over seeds", "the paper"]
        drawing.figure.legend(
            handles, legend, loc="outside upper left", ncols=2, borderpad=0, columnspacing=1.5
        )
    return drawing.svg


def _draw_score(axes: Axes, row: int, score: ScoreWithPaper) -> None:
    """Draw our score as a dot with its standard deviation, and the paper's as a ring."""
    if score.ours is not None:
        mean = score.ours.mean
        deviation = score.ours.deviation or 0
        axes.hlines(row, mean - deviation, mean + deviation, color=COLORS[0], linewidth=1.6)
        axes.plot(mean, row, "o", color=COLORS[0], markersize=5)
    if score.paper is not None:
        axes.plot(score.paper, row, "o", mfc="none", mec=COLORS[1], mew=1.5, markersize=6.5)


def lines_figure(
    ours: Mapping[str, Sequence[tuple[float, Spread]]],
    paper: Mapping[str, Sequence[tuple[float, float]]],
    axis: str,
    label: str,
) -> Plot:
    """Draw values over a varied setting, with the paper's as thin dotted lines.

    Args:
        ours: Our values by row: the value of the setting, mean and standard deviation.
        paper: The paper's values by row.
        axis: Label of the x axis.
        label: Label of the y axis.

    Returns:
        The figure. The values of the setting are evenly spaced.
    """
    about = f"{label} over {axis}: {', '.join(ours)}"
    with new_drawing((4.8, 3.3 + 0.17 * (len(ours) // 2)), about) as drawing:
        axes = drawing.figure.subplots()
        values = sorted({x for points in [*ours.values(), *paper.values()] for x, _ in points})
        for index, (name, points) in enumerate(ours.items()):
            options = line_options(line_style(index))
            shift = 0.06 * (index - (len(ours) - 1) / 2)
            if points:
                axes.errorbar(
                    [values.index(x) + shift for x, _ in points],
                    [spread.mean for _, spread in points],
                    yerr=[spread.deviation or 0 for _, spread in points],
                    capsize=2,
                    marker="o",
                    markersize=4,
                    **options,
                )
            paper_points = paper.get(name)
            if paper_points:
                axes.plot(
                    [values.index(x) + shift for x, _ in paper_points],
                    [value for _, value in paper_points],
                    ":",
                    color=options["color"],
                    linewidth=1,
                    marker="o",
                    mfc="none",
                    markersize=4,
                )
        axes.set_xticks(range(len(values)), [f"{x:g}" for x in values])
        axes.set_xlabel(axis)
        axes.set_ylabel(label)
        axes.grid(axis="y")
        _draw_lines_legend(drawing.figure, list(ours), has_paper=any(paper.values()))
    return drawing.svg


def _draw_lines_legend(figure: Figure, names: Sequence[str], *, has_paper: bool) -> None:
    handles = [Line2D([], [], **line_options(line_style(index))) for index in range(len(names))]
    labels = list(names)
    if has_paper:
        handles.append(
            Line2D([], [], linestyle=":", color="#666666", marker="o", mfc="none", markersize=4)
        )
        labels.append("the paper")
    figure.legend(
        handles, labels, loc="outside upper left", ncols=3, borderpad=0, columnspacing=1.5
    )


def clients_figure(panels: Mapping[str, Mapping[str, Sequence[float]]]) -> Plot:
    """Draw a panel for every quantity, with the clients of each method as dots.

    Args:
        panels: The values of all clients by title and method.

    Returns:
        The figure.
    """
    names = list(dict.fromkeys(name for rows in panels.values() for name in rows))
    about = f"{', '.join(panels)} of each client: {', '.join(names)}"
    with new_drawing((3.1 * len(panels), 3.0), about) as drawing:
        all_axes: Sequence[Axes] = drawing.figure.subplots(1, len(panels), squeeze=False)[0]
        for axes, (title, rows) in zip(all_axes, panels.items(), strict=True):
            for name, values in rows.items():
                index = names.index(name)
                axes.plot(
                    range(len(values)),
                    values,
                    MARKERS[index % len(MARKERS)],
                    color=line_style(index).color,
                    markersize=5,
                    alpha=0.85,
                )
            axes.set_xlabel("client")
            axes.set_title(title)
            axes.grid(axis="y")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10))
        handles = [
            Line2D(
                [],
                [],
                marker=MARKERS[index % len(MARKERS)],
                linestyle="",
                color=line_style(index).color,
                markersize=5,
            )
            for index in range(len(names))
        ]
        drawing.figure.legend(
            handles, names, loc="outside upper left", ncols=len(names), borderpad=0
        )
    return drawing.svg


def pictures_figure(rows: Mapping[str, str], classes: Sequence[str]) -> Plot:
    """Draw strips of images below each other, with the classes above the columns.

    Args:
        rows: For each row the images of all classes side by side, as a PNG in base64.
        classes: The class of each column.

    Returns:
        The figure.
    """
    about = f"Generated images of {', '.join(classes)}: {', '.join(rows)}"
    with new_drawing((0.62 * len(classes) + 0.9, 0.62 * len(rows) + 0.6), about) as drawing:
        all_axes: list[Axes] = list(drawing.figure.subplots(len(rows), 1, squeeze=False)[:, 0])
        for index, (axes, (name, strip)) in enumerate(zip(all_axes, rows.items(), strict=True)):
            is_first = index == 0
            with Image.open(io.BytesIO(base64.b64decode(strip))) as image:
                width = image.width / len(classes)
                color_map = "gray" if image.mode == "L" else None
                axes.imshow(image, cmap=color_map, interpolation="nearest")
            axes.spines[:].set_visible(False)
            axes.set_yticks([])
            axes.set_ylabel(name, rotation=0, ha="right", va="center")
            axes.set_xticks(
                [(column + 0.5) * width for column in range(len(classes))],
                classes if is_first else [""] * len(classes),
            )
            axes.tick_params(length=0, top=is_first, labeltop=is_first, labelbottom=False)
    return drawing.svg
