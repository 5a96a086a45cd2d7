"""Everything that was reproduced: a page for a browser, the same in Markdown and LaTeX, and every figure by itself."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fedcog.experiments import findings, tables
from fedcog.experiments.paper import studies
from fedcog.experiments.record import RecordError, write_file
from fedcog.experiments.report.figures import Curve, Plot, curves_figure, look, partition_figure
from fedcog.experiments.report.markup import document, numbered, text
from fedcog.experiments.report.plots import Beside, beside_figure, clients_figure, lines_figure, pictures_figure
from fedcog.experiments.results import Results
from fedcog.experiments.study import Study
from fedcog.experiments.summary import spread

SORTING = """
document.querySelectorAll("table.sortable").forEach(table => {
  const value = (row, place) => {
    const words = row.cells[place].textContent.trim(), number = parseFloat(words.replace("\\u2212", "-"));
    return isNaN(number) ? words.toLowerCase() : number;
  };
  table.querySelectorAll("thead th").forEach((head, place) => {
    const button = head.querySelector("button");
    button.addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") !== "ascending", body = table.tBodies[0];
      table.querySelectorAll("thead th").forEach(other => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const order = (a, b) => {
        const [x, y] = [value(a, place), value(b, place)];
        if (typeof x !== typeof y) return typeof x === "number" ? -1 : 1;
        return (x < y ? -1 : x > y ? 1 : 0) * (up ? 1 : -1);
      };
      [...body.rows].sort(order).forEach(row => body.append(row));
    });
  });
});
"""


class Part(NamedTuple):
    """A study as it is shown: its figures by file name, its words."""

    study: Study
    figures: dict[str, Plot]
    caption: str
    notes: str


def parts(shown: Sequence[Study], results: Results) -> list[Part]:
    """Studies with all that is shown of them."""
    return [
        Part(study, _figures(study, results), tables.caption(study, results), _notes(study.name, results))
        for study in shown
    ]


def _notes(name: str, results: Results) -> str:
    """What the folder of results has to say about a study, numbers filled in; under no name: about all of them."""
    known, notes = studies(), results.notes()
    if strange := [heading for heading in notes if heading not in ("", *known)]:
        raise RecordError(f"notes.md: there is no study {', '.join(strange)}: its headings are names of studies.")
    return tables.filled(notes.get(name, ""), known, results)


def write(chosen: Sequence[Study], results: Results, out: Path) -> list[Path]:
    """All of it in the folder `out`: results.html, results.md, results.tex and figures/."""
    shown = parts(chosen, results)
    files: dict[Path, bytes] = {
        out / "results.html": page(shown, results).encode(),
        out / "results.md": markdown(shown, results).encode(),
        out / "results.tex": latex(shown, results).encode(),
    }
    for part in shown:
        for name, plot in part.figures.items():
            files[out / "figures" / f"{name}.svg"] = plot.encode()
            files[out / "figures" / f"{name}.png"] = plot.png()
    for path, content in files.items():
        write_file(path, content)
    return list(files)


def latex(parts: Sequence[Part], results: Results) -> str:
    """All tables in LaTeX."""
    return "\n".join(tables.latex(part.study, results) for part in parts)


def markdown(parts: Sequence[Part], results: Results) -> str:
    """The page in Markdown."""
    opening = _notes("", results)
    found = ["# The paper, reproduced", opening, tables.EXPLAINED]
    for part in parts:
        found += [f"## {part.study.title}", part.notes]
        found += [f"![{part.study.title}](figures/{name}.svg)" for name in part.figures]
        found += [tables.markdown(part.study, results), f"*{part.caption}*"]
    return "\n\n".join(word for word in found if word) + "\n"


def page(parts: Sequence[Part], results: Results) -> str:
    """The page in HTML, whole in itself."""
    body, number, opening = "", 0, _notes("", results)
    for part in parts:
        drawn = ""
        for plot in part.figures.values():
            number += 1
            drawn += f"<figure>{numbered(plot, number)}<figcaption>{text(part.study.title)}</figcaption></figure>"
        body += (
            f'<section id="{part.study.name}"><h2>{text(part.study.title)}</h2>{_paragraphs(part.notes)}'
            f'<div class="figures wide">{drawn}</div>{_tables(part.study, results)}'
            f'<p class="note">{_inline(part.caption)}</p></section>'
        )
    links = "".join(f'<a href="#{part.study.name}">{text(part.study.title)}</a>' for part in parts)
    lead = f"{_paragraphs(opening)}<p>{_inline(tables.EXPLAINED)}</p>"
    return document("The paper, reproduced", f'{lead}<nav aria-label="Contents">{links}</nav>{body}', SORTING)


def _tables(study: Study, results: Results) -> str:
    found = ""
    for grid in tables.grids(study, results):
        head = "".join(
            f'<th scope="col"{" class=number" * bool(place)}><button type="button">{text(name or "row")}</button></th>'
            for place, name in enumerate(grid.heads)
        )
        rows = ""
        for name, *others in grid.rows:
            cells = "".join(f'<td class="number">{text(_minus(cell))}</td>' for cell in others)
            rows += f'<tr><th scope="row">{text(name)}</th>{cells}</tr>'
        table = f'<table class="sortable"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'
        title = f"<h3>{text(grid.title)}</h3>" if grid.title else ""
        found += f'{title}<div class="scroll" tabindex="0">{table}</div>'
    return found


def _minus(cell: str) -> str:
    """A number with a minus sign in place of a hyphen."""
    return re.sub(r"^-(?=\d)", "\N{MINUS SIGN}", cell)


def _paragraphs(notes: str) -> str:
    """A little Markdown as HTML: paragraphs, lists, code and emphasis."""
    found = ""
    for block in re.split(r"\n\s*\n", notes.strip()):
        lines = block.strip().splitlines()
        if lines and all(line.startswith(("- ", "  ")) for line in lines):
            items = re.split(r"\n- ", "\n" + "\n".join(lines))[1:]
            found += "<ul>" + "".join(f"<li>{_inline(item)}</li>" for item in items) + "</ul>"
        elif lines:
            found += f"<p>{_inline(block)}</p>"
    return found


def _inline(words: str) -> str:
    words = text(re.sub(r"\s+", " ", words).strip())
    words = re.sub(r"`(.+?)`", r"<code>\1</code>", words)
    words = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", words)
    return re.sub(r"\*(.+?)\*", r"<em>\1</em>", words)


def _figures(study: Study, results: Results) -> dict[str, Plot]:
    drawn = {
        "beside": _beside,
        "curves": _curves,
        "lines": _lines,
        "clients": _clients,
        "partition": _partitions,
        "pictures": _pictures,
    }
    return drawn[study.figure](study, results) if study.figure in drawn else {}


def _beside(study: Study, results: Results) -> dict[str, Plot]:
    found = {}
    for block in findings.blocks(study, results):
        rows = [Beside(row.name, row.best, row.paper) for row in block.rows]
        if any(row.ours is not None for row in rows):
            found[block.title] = rows
    return {study.name: beside_figure(found, "test accuracy (%)")} if found else {}


def _curves(study: Study, results: Results) -> dict[str, Plot]:
    found = {}
    for block in dict.fromkeys(cell.block for cell in study.cells):
        lines = []
        for number, cell in enumerate(cell for cell in study.cells if cell.block == block):
            series = [line["accuracy"] for line in findings.lines_of(cell, results, study.seeds)]
            rounds = min((len(one) for one in series), default=0)
            points = [(at + 1, [one[at] for one in series if one[at] is not None]) for at in range(rounds)]
            drawn = [(round, spread(values)) for round, values in points if values]
            if drawn:
                lines.append(Curve(cell.row, drawn, look(number)))
        if lines:
            name = f"{study.name}-{re.sub(r'[^a-z0-9]+', '-', block.lower())}"
            found[name] = curves_figure(lines, f"{block}: test accuracy (%)", size=(6.4, 3.6), percent=True, marks=[51])
    return found


def _lines(study: Study, results: Results) -> dict[str, Plot]:
    rows: dict[str, list[tuple[float, Any]]] = {}
    paper: dict[str, list[tuple[float, float]]] = {}
    for cell in study.cells:
        known = findings.values(cell, results, study.seeds)
        row, x = rows.setdefault(cell.row, []), float(cell.block)
        row += [(x, spread(list(known.best.values())))] if known.best else []
        paper.setdefault(cell.row, []).extend([(x, cell.paper)] if cell.paper is not None else [])
    if not any(rows.values()):
        return {}
    label = "seconds" if study.cells[0].measure == "seconds" else "test accuracy, best (%)"
    return {study.name: lines_figure(rows, paper, study.axis, label)}


def _clients(study: Study, results: Results) -> dict[str, Plot]:
    titles = {
        "gap": ("distance to the mean model", 1.0),
        "accuracy": ("accuracy, whole test set (%)", 100.0),
        "own_accuracy": ("accuracy, own label mix (%)", 100.0),
    }
    panels: dict[str, dict[str, list[float]]] = {title: {} for title, _ in titles.values()}
    for cell in study.cells:
        runs = findings.lines_of(cell, results, study.seeds)
        if not runs:
            continue
        first = sorted(runs[0]["clients"], key=lambda one: one["client"])
        for name, (title, factor) in titles.items():
            panels[title][cell.row] = [factor * one[name] for one in first if name in one]
    return {study.name: clients_figure(panels)} if any(panels.values()) and all(panels.values()) else {}


def _partitions(study: Study, results: Results) -> dict[str, Plot]:
    found = {}
    for cell in study.cells:
        for line in findings.lines_of(cell, results, study.seeds):
            name = f"{study.name}-{re.sub(r'[^a-z0-9]+', '-', cell.block.lower())}"
            found[name] = partition_figure(torch.tensor(line["found"]["counts"]), line["found"]["classes"])
    return found


def _pictures(study: Study, results: Results) -> dict[str, Plot]:
    for cell in study.cells:
        for line in findings.lines_of(cell, results, study.seeds):
            try:
                return {study.name: pictures_figure(line["found"]["rows"], line["found"]["classes"])}
            except (OSError, ValueError, KeyError, AttributeError) as error:
                raise RecordError(f"the pictures in {results.path} are damaged ({error}): delete them.") from error
    return {}
