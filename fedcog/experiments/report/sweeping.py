"""A sweep as a page for a browser and in Markdown: the budget, what was chosen, and every trial."""

import itertools
from collections.abc import Sequence
from pathlib import Path

from fedcog.experiments import tuning
from fedcog.experiments.record import write_file
from fedcog.experiments.report.figures import Curve, Plot, curves_figure, look
from fedcog.experiments.report.markup import document, figure, numbered, table, text
from fedcog.experiments.report.page import page as page_of_runs
from fedcog.experiments.summary import spread
from fedcog.experiments.sweep import Plan, Tuned
from fedcog.experiments.tables import Grid


def write(plan: Plan, found: Sequence[Tuned], out: Path) -> None:
    """report.html and sweep.md in the folder `out`, and chosen.html about the runs of what was chosen."""
    write_file(out / "sweep.md", tuning.markdown(plan, found).encode())
    write_file(out / "chosen.html", page_of_runs([run.path for one in found for run in one.runs]).encode())
    write_file(out / "report.html", page(plan, found).encode())


def page(plan: Plan, found: Sequence[Tuned]) -> str:
    """The page in HTML."""
    title = f"{', '.join(one.name for one in found)}: tuned alike, {plan.trials} trials each"
    body = "".join(f"<p>{text(sentence)}</p>" for sentence in tuning.words(plan, found))
    body += f'<section id="chosen"><h2>What was chosen</h2>{_table(tuning.chosen(found), wide=2)}'
    body += (
        '<p class="note">Scores in %, the test set\'s as mean ± sample standard deviation over seeds. '
        '<a href="chosen.html">These runs in full.</a></p></section>'
    )
    caption = "The best score on validation after so many trials."
    body += (
        f'<section id="budget"><h2>What trials bought</h2>{figure(numbered(_progress(found), 1), caption)}</section>'
    )
    for one in found:
        offered = "; ".join(f"{key}: {what.words()}" for key, what in one.space.items())
        body += f"<section><h2>Trials of {text(one.name)}</h2><p>Offered: {text(offered)}.</p>"
        body += f"{_table(tuning.trials(one), wide=0)}</section>"
    return document(title, body)


def _progress(found: Sequence[Tuned]) -> Plot:
    lines = []
    for number, one in enumerate(found):
        best = itertools.accumulate((trial.value for trial in one.trials), max)
        points = [(trial, spread([value])) for trial, value in enumerate(best, 1)]
        lines.append(Curve(one.name, points, look(number)))
    return curves_figure(lines, "best in validation (%)", size=(6.4, 3.3), percent=True, axis="trial")


def _table(grid: Grid, wide: int) -> str:
    """A grid as HTML: the first column heads rows, the next `wide` - 1 are words, all others numbers."""
    kind = ["" if place < wide else ' class="number"' for place in range(len(grid.heads))]
    head = "".join(f'<th scope="col"{one}>{text(name)}</th>' for one, name in zip(kind, grid.heads, strict=True))
    rows = ""
    for first, *others in grid.rows:
        cells = "".join(f"<td{one}>{text(cell)}</td>" for one, cell in zip(kind[1:], others, strict=True))
        rows += f'<tr><th scope="row"{kind[0]}>{text(first)}</th>{cells}</tr>'
    return table(head, rows)
