"""The report about a sweep, in HTML and Markdown: budget, chosen settings, and every trial."""

import itertools
from collections.abc import Sequence
from pathlib import Path

from fedcog.report.figures import Curve, Plot, curves_figure, line_style
from fedcog.report.markup import document, figure, table, text, with_unique_ids
from fedcog.report.page import page as page_of_runs
from fedcog.runs.records.run_directory import write_file
from fedcog.runs.records.summary import spread
from fedcog.studies.tables import Table
from fedcog.studies.tuning import sweep_tables
from fedcog.studies.tuning.sweep import SweepPlan, Tuned


def write(plan: SweepPlan, tuned: Sequence[Tuned], out: Path) -> None:
    """Write report.html, sweep.md, and chosen.html about the final runs.

    Args:
        plan: The plan of the sweep.
        tuned: The tuned algorithms.
        out: The folder.
    """
    final_runs = [run.path for one in tuned for run in one.runs]
    write_file(out / "sweep.md", sweep_tables.markdown(plan, tuned).encode())
    write_file(out / "chosen.html", page_of_runs(final_runs).encode())
    write_file(out / "report.html", page(plan, tuned).encode())


def page(plan: SweepPlan, tuned: Sequence[Tuned]) -> str:
    """Build the page in HTML.

    Args:
        plan: The plan of the sweep.
        tuned: The tuned algorithms.

    Returns:
        A self-contained page.
    """
    names = ", ".join(one.name for one in tuned)
    title = f"{names}: tuned with equal budgets, {plan.trials} trials each"
    sentences = sweep_tables.summary_sentences(plan, tuned)
    body = "".join(f"<p>{text(sentence)}</p>" for sentence in sentences)
    chosen = _html_table(sweep_tables.chosen_table(tuned), num_text_columns=2)
    body += (
        f'<section id="chosen"><h2>Chosen settings</h2>{chosen}'
        '<p class="note">Scores in %; of the test set mean ± sample standard deviation over seeds. '
        '<a href="chosen.html">All about these runs.</a></p></section>'
    )
    caption = "The best validation score by number of trials."
    progress = figure(with_unique_ids(_progress_figure(tuned), 1), caption)
    body += f'<section id="budget"><h2>Progress of the search</h2>{progress}</section>'
    for one in tuned:
        domains = "; ".join(f"{name}: {domain.text()}" for name, domain in one.space.items())
        body += (
            f"<section><h2>Trials of {text(one.name)}</h2><p>Search space: {text(domains)}.</p>"
            f"{_html_table(sweep_tables.trials_table(one), num_text_columns=0)}</section>"
        )
    return document(title, body)


def _progress_figure(tuned: Sequence[Tuned]) -> Plot:
    """The best validation score so far, by trial."""
    lines = []
    for index, one in enumerate(tuned):
        best_so_far = itertools.accumulate((trial.score for trial in one.trials), max)
        points = [(number, spread([score])) for number, score in enumerate(best_so_far, 1)]
        lines.append(Curve(one.name, points, line_style(index)))
    return curves_figure(
        lines, "best in validation (%)", size=(6.4, 3.3), percent=True, axis="trial"
    )


def _html_table(content: Table, num_text_columns: int) -> str:
    """Format a table in HTML; the columns after the first `num_text_columns` are numbers."""
    attributes = [
        "" if column < num_text_columns else ' class="number"'
        for column in range(len(content.header))
    ]
    head = "".join(
        f'<th scope="col"{attribute}>{text(name)}</th>'
        for attribute, name in zip(attributes, content.header, strict=True)
    )
    rows = ""
    for name, *values in content.rows:
        cells = "".join(
            f"<td{attribute}>{text(value)}</td>"
            for attribute, value in zip(attributes[1:], values, strict=True)
        )
        rows += f'<tr><th scope="row"{attributes[0]}>{text(name)}</th>{cells}</tr>'
    return table(head, rows)
