"""The report about reproduced studies: a page in HTML, Markdown and LaTeX, and all figures."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from fedcog.report.figures import Curve, Plot, curves_figure, line_style, partition_figure
from fedcog.report.markup import document, text, with_unique_ids
from fedcog.report.reproduction_figures import (
    ScoreWithPaper,
    clients_figure,
    comparison_figure,
    lines_figure,
    pictures_figure,
)
from fedcog.runs.records.run_directory import RecordError, write_file
from fedcog.runs.records.summary import Spread, spread
from fedcog.studies import statistics, tables
from fedcog.studies.paper import studies
from fedcog.studies.result_store import Results
from fedcog.studies.study import WARM_START_ROUNDS, Study

SORT_SCRIPT = """
document.querySelectorAll("table.sortable").forEach(table => {
  const value = (row, column) => {
    const words = row.cells[column].textContent.trim();
    const number = parseFloat(words.replace("\\u2212", "-"));
    return isNaN(number) ? words.toLowerCase() : number;
  };
  table.querySelectorAll("thead th").forEach((head, column) => {
    const button = head.querySelector("button");
    button.addEventListener("click", () => {
      const ascending = head.getAttribute("aria-sort") !== "ascending";
      const body = table.tBodies[0];
      table.querySelectorAll("thead th").forEach(other => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", ascending ? "ascending" : "descending");
      const order = (a, b) => {
        const [x, y] = [value(a, column), value(b, column)];
        if (typeof x !== typeof y) return typeof x === "number" ? -1 : 1;
        return (x < y ? -1 : x > y ? 1 : 0) * (ascending ? 1 : -1);
      };
      [...body.rows].sort(order).forEach(row => body.append(row));
    });
  });
});
"""


class Part(NamedTuple):
    """A study with everything that is shown of it."""

    study: Study
    figures: dict[str, Plot]  # by file name without suffix
    caption: str
    notes: str


def parts_of(chosen: Sequence[Study], results: Results) -> list[Part]:
    """Draw the figures of studies, and write their captions and notes.

    Args:
        chosen: The studies.
        results: The stored results.

    Returns:
        One part per study.
    """
    return [
        Part(
            study,
            _figures(study, results),
            tables.caption(study, results),
            _notes(study.name, results),
        )
        for study in chosen
    ]


def _notes(name: str, results: Results) -> str:
    """The notes about a study with numbers filled in; name "": the notes about all of them."""
    known = studies()
    notes = results.notes()
    unknown = [heading for heading in notes if heading not in ("", *known)]
    if unknown:
        raise RecordError(
            f"notes.md: there is no study {', '.join(unknown)}: its headings are names of studies."
        )
    return tables.fill_notes(notes.get(name, ""), known, results)


def write(chosen: Sequence[Study], results: Results, out: Path) -> list[Path]:
    """Write results.html, results.md, results.tex and figures/.

    Args:
        chosen: The studies.
        results: The stored results.
        out: The folder to write to.

    Returns:
        The files.
    """
    parts = parts_of(chosen, results)
    files: dict[Path, bytes] = {
        out / "results.html": page(parts, results).encode(),
        out / "results.md": markdown(parts, results).encode(),
        out / "results.tex": latex(parts, results).encode(),
    }
    for part in parts:
        for name, plot in part.figures.items():
            files[out / "figures" / f"{name}.svg"] = plot.encode()
            files[out / "figures" / f"{name}.png"] = plot.png()
    for path, content in files.items():
        write_file(path, content)
    return list(files)


def latex(parts: Sequence[Part], results: Results) -> str:
    """Format all tables in LaTeX.

    Args:
        parts: The studies.
        results: The stored results.

    Returns:
        The text of results.tex.
    """
    return "\n".join(tables.latex(part.study, results) for part in parts)


def markdown(parts: Sequence[Part], results: Results) -> str:
    """Format the report in Markdown.

    Args:
        parts: The studies.
        results: The stored results.

    Returns:
        The text of results.md.
    """
    paragraphs = ["# The paper, reproduced", _notes("", results), tables.EXPLANATION]
    for part in parts:
        paragraphs += [f"## {part.study.title}", part.notes]
        paragraphs += [f"![{part.study.title}](figures/{name}.svg)" for name in part.figures]
        paragraphs += [tables.markdown(part.study, results), f"*{part.caption}*"]
    return "\n\n".join(paragraph for paragraph in paragraphs if paragraph) + "\n"


def page(parts: Sequence[Part], results: Results) -> str:
    """Build the report as a page in HTML.

    Args:
        parts: The studies.
        results: The stored results.

    Returns:
        A self-contained page.
    """
    body = ""
    number = 0
    for part in parts:
        title = text(part.study.title)
        drawn = ""
        for plot in part.figures.values():
            number += 1
            svg = with_unique_ids(plot, number)
            drawn += f"<figure>{svg}<figcaption>{title}</figcaption></figure>"
        body += (
            f'<section id="{part.study.name}"><h2>{title}</h2>{_paragraphs(part.notes)}'
            f'<div class="figures wide">{drawn}</div>{_tables(part.study, results)}'
            f'<p class="note">{_inline(part.caption)}</p></section>'
        )
    links = "".join(f'<a href="#{part.study.name}">{text(part.study.title)}</a>' for part in parts)
    introduction = _paragraphs(_notes("", results))
    lead = f"{introduction}<p>{_inline(tables.EXPLANATION)}</p>"
    return document(
        "The paper, reproduced",
        f'{lead}<nav aria-label="Contents">{links}</nav>{body}',
        SORT_SCRIPT,
    )


def _tables(study: Study, results: Results) -> str:
    """The tables of a study in HTML."""
    return "".join(_html_table(table) for table in tables.tables_of(study, results))


def _html_table(content: tables.Table) -> str:
    """A table whose columns can be sorted."""
    head = ""
    for column, name in enumerate(content.header):
        attribute = " class=number" if column else ""
        button = f'<button type="button">{text(name or "row")}</button>'
        head += f'<th scope="col"{attribute}>{button}</th>'
    rows = ""
    for name, *values in content.rows:
        cells = "".join(f'<td class="number">{text(_with_minus(value))}</td>' for value in values)
        rows += f'<tr><th scope="row">{text(name)}</th>{cells}</tr>'
    table = f'<table class="sortable"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'
    title = f"<h3>{text(content.title)}</h3>" if content.title else ""
    return f'{title}<div class="scroll" tabindex="0">{table}</div>'


def _with_minus(cell: str) -> str:
    """Replace the hyphen of a negative number by a minus sign."""
    return re.sub(r"^-(?=\d)", "\N{MINUS SIGN}", cell)


def _paragraphs(notes: str) -> str:
    """Convert a subset of Markdown to HTML: paragraphs, lists, code and emphasis."""
    content = ""
    for block in re.split(r"\n\s*\n", notes.strip()):
        lines = block.strip().splitlines()
        if lines and all(line.startswith(("- ", "  ")) for line in lines):
            items = re.split(r"\n- ", "\n" + "\n".join(lines))[1:]
            content += "<ul>" + "".join(f"<li>{_inline(item)}</li>" for item in items) + "</ul>"
        elif lines:
            content += f"<p>{_inline(block)}</p>"
    return content


def _inline(markdown: str) -> str:
    """Convert code and emphasis to HTML."""
    content = text(re.sub(r"\s+", " ", markdown).strip())
    content = re.sub(r"`(.+?)`", r"<code>\1</code>", content)
    content = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", content)
    return re.sub(r"\*(.+?)\*", r"<em>\1</em>", content)


def _figures(study: Study, results: Results) -> dict[str, Plot]:
    """The figures of a study by file name; none if nothing was run."""
    draw: dict[str, Callable[[Study, Results], dict[str, Plot]]] = {
        "comparison": _comparison,
        "curves": _curves,
        "lines": _lines,
        "clients": _clients,
        "partition": _partitions,
        "pictures": _pictures,
    }
    return draw[study.figure](study, results) if study.figure in draw else {}


def _comparison(study: Study, results: Results) -> dict[str, Plot]:
    blocks = {}
    for block in statistics.table_blocks(study, results):
        scores = [ScoreWithPaper(row.name, row.best, row.paper) for row in block.rows]
        if any(score.ours is not None for score in scores):
            blocks[block.title] = scores
    return {study.name: comparison_figure(blocks, "test accuracy (%)")} if blocks else {}


def _curves(study: Study, results: Results) -> dict[str, Plot]:
    plots = {}
    for block in dict.fromkeys(cell.block for cell in study.cells):
        lines = []
        for index, cell in enumerate(cell for cell in study.cells if cell.block == block):
            runs = statistics.results_of(cell, results, study.seeds)
            points = _mean_accuracies([run["accuracy"] for run in runs])
            if points:
                lines.append(Curve(cell.row, points, line_style(index)))
        if lines:
            plots[_file_name(study, block)] = curves_figure(
                lines,
                f"{block}: test accuracy (%)",
                size=(6.4, 3.6),
                percent=True,
                marks=[WARM_START_ROUNDS + 1],
            )
    return plots


def _mean_accuracies(runs: Sequence[Sequence[float | None]]) -> list[tuple[int, Spread]]:
    """Mean and standard deviation over runs, by round, of the rounds that all runs have."""
    points = []
    for index in range(min((len(run) for run in runs), default=0)):
        values = [value for run in runs if (value := run[index]) is not None]
        if values:
            points.append((index + 1, spread(values)))
    return points


def _file_name(study: Study, block: str) -> str:
    return f"{study.name}-{re.sub(r'[^a-z0-9]+', '-', block.lower())}"


def _lines(study: Study, results: Results) -> dict[str, Plot]:
    ours: dict[str, list[tuple[float, Spread]]] = {}
    paper: dict[str, list[tuple[float, float]]] = {}
    for cell in study.cells:
        x = float(cell.block)
        our_points = ours.setdefault(cell.row, [])
        paper_points = paper.setdefault(cell.row, [])
        best = statistics.cell_values(cell, results, study.seeds).best
        if best:
            our_points.append((x, spread(list(best.values()))))
        if cell.paper is not None:
            paper_points.append((x, cell.paper))
    if not any(ours.values()):
        return {}
    label = "seconds" if study.cells[0].metric == "seconds" else "test accuracy, best (%)"
    return {study.name: lines_figure(ours, paper, study.axis, label)}


def _clients(study: Study, results: Results) -> dict[str, Plot]:
    titles = {
        "gap": ("distance to the mean model", 1.0),
        "accuracy": ("accuracy, whole test set (%)", 100.0),
        "own_accuracy": ("accuracy, own label mix (%)", 100.0),
    }
    panels: dict[str, dict[str, list[float]]] = {title: {} for title, _ in titles.values()}
    for cell in study.cells:
        runs = statistics.results_of(cell, results, study.seeds)
        if not runs:
            continue
        clients = sorted(runs[0]["clients"], key=lambda client: client["client"])
        for key, (title, factor) in titles.items():
            values = [factor * client[key] for client in clients if key in client]
            panels[title][cell.row] = values
    return {study.name: clients_figure(panels)} if all(panels.values()) else {}


def _partitions(study: Study, results: Results) -> dict[str, Plot]:
    plots = {}
    for cell in study.cells:
        for result in statistics.results_of(cell, results, study.seeds):
            counts = torch.tensor(result["found"]["counts"])
            plot = partition_figure(counts, result["found"]["classes"])
            plots[_file_name(study, cell.block)] = plot
    return plots


def _pictures(study: Study, results: Results) -> dict[str, Plot]:
    for cell in study.cells:
        for result in statistics.results_of(cell, results, study.seeds):
            found = result["found"]
            try:
                return {study.name: pictures_figure(found["rows"], found["classes"])}
            except (OSError, ValueError, KeyError, AttributeError) as error:
                raise RecordError(
                    f"the pictures in {results.path} are damaged ({error}): delete them."
                ) from error
    return {}
