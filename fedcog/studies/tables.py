"""Tables of a study in Markdown and LaTeX, their captions, and numbers inside notes."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from fedcog.runs.records.run_directory import RecordError
from fedcog.runs.records.summary import Spread, spread
from fedcog.studies.result_store import Results
from fedcog.studies.statistics import (
    UNITS,
    Block,
    Row,
    cell_values,
    differing_warm_starts,
    paired_difference,
    provenances,
    results_of,
    table_blocks,
)
from fedcog.studies.study import Study

NOT_RUN = "not run"


class Table(NamedTuple):
    """A table as it is printed.

    Attributes:
        title: The title; may be empty.
        header: Names of the columns.
        rows: Cells, row by row.
        bold: (row, column) of cells in bold.
    """

    title: str
    header: list[str]
    rows: list[list[str]]
    bold: frozenset[tuple[int, int]] = frozenset()


def tables_of(study: Study, results: Results) -> list[Table]:
    """Build the printed tables of a study.

    Args:
        study: The study.
        results: The stored results.

    Returns:
        The tables; none if the study is only a figure.
    """
    if study.figure in ("curves", "partition", "pictures"):
        return []
    if study.figure == "privacy":
        return [_privacy_table(study, results)]
    blocks = table_blocks(study, results)
    if study.axis and all(len(block.rows) == 1 for block in blocks):
        rows = [block.rows[0]._replace(name=block.title) for block in blocks]
        merged = Block("", blocks[0].unit, rows)
        return [_table(study._replace(reference_row=""), merged, study.axis)]
    if study.axis:
        blocks = [block._replace(title=f"{study.axis} = {block.title}") for block in blocks]
    return [_table(study, block) for block in blocks]


def _table(study: Study, block: Block, first_header: str = "") -> Table:
    difference = [f"{study.reference_row} - this"] if study.reference_row else []
    headers = {
        "%": [first_header, "last", "best", "paper", "best - paper", *difference],
        "s": [first_header, "ours (s)", "paper (s)"],
        "": [first_header, "ours", *difference],
    }
    rows = [_table_row(study, block.unit, row) for row in block.rows]
    return Table(block.title, headers[block.unit], rows)


def _table_row(study: Study, unit: str, row: Row) -> list[str]:
    """Format a row, in the order of the header."""
    last = NOT_RUN if row.last is None else _format_spread(row.last, unit)
    best = NOT_RUN if row.best is None else _format_spread(row.best, unit)
    paper = "" if row.paper is None else f"{row.paper:.2f}"
    if row.paper_std is not None:
        paper += f" ± {row.paper_std:.2f}"
    name = f"{row.name} ({row.note})" if row.note else row.name
    to_paper = "" if row.difference_to_paper is None else f"{row.difference_to_paper:+.2f}"
    difference = []
    if study.reference_row:
        difference = [row.difference.text() if row.difference else ""]
    cells = {
        "%": [name, last, best, paper, to_paper, *difference],
        "s": [name, last, paper],
        "": [name, last, *difference],
    }
    return cells[unit]


def _format_spread(value: Spread, unit: str) -> str:
    digits = 2 if value.mean >= 1 or unit == "%" else 3
    text = f"{value.mean:.{digits}f}"
    if value.deviation is not None:
        text += f" ± {value.deviation:.{digits}f}"
    return text


def _privacy_table(study: Study, results: Results) -> Table:
    """Distances of generated images to training and test images, and membership AUCs."""
    header = [
        "",
        "seen as",
        "to the nearest member",
        "to the nearest other",
        "nearer to a member",
        "by chance",
        "AUC",
    ]
    rows = []
    for cell in study.cells:
        measurements = [result["found"] for result in results_of(cell, results, study.seeds)]
        if not measurements:
            rows.append([cell.block, *[NOT_RUN] * 6])
        for measurement in measurements:
            rows += _privacy_rows(cell.block, measurement)
    return Table("", header, rows)


def _privacy_rows(block: str, measurement: dict[str, Any]) -> list[list[str]]:
    rows = []
    for view in ("pixels", "features"):
        values = measurement[view]
        rows.append(
            [
                block,
                view,
                f"{values['to_members']:.3f}",
                f"{values['to_others']:.3f}",
                f"{100 * values['nearer_to_members']:.1f} %",
                f"{100 * values['nearer_by_chance']:.1f} %",
                f"{values['auc']:.3f}",
            ]
        )
    model_auc = f"{measurement['model']['auc']:.3f}"
    rows.append([block, "the model's own loss", "", "", "", "", model_auc])
    return rows


def caption(study: Study, results: Results) -> str:
    """Say what was run, when, on which device, by which command and at which commit.

    Args:
        study: The study.
        results: The stored results.

    Returns:
        The caption in Markdown, on one line.
    """
    origins = provenances(study, results)
    description = f"{study.source}. {study.description}"
    if not origins:
        return description + " Nothing of it was run yet."
    seeds = sorted(
        {
            result["seed"]
            for cell in study.cells
            for result in results_of(cell, results, study.seeds)
        }
    )
    numbers = ", ".join(str(seed) for seed in seeds)
    seeds_text = f"Seed {numbers}" if len(seeds) == 1 else f"Seeds {numbers}"
    days = sorted({_plain(str(one["started"]))[:10] for one in origins if one.get("started")})
    period = " to ".join(dict.fromkeys([*days[:1], *days[-1:]]))
    device = _join_unique(_plain_values(origins, "device"))
    torch_version = _join_unique(_plain_values(origins, "torch"))
    commit = _join_unique(_plain_values(origins, "commit"))
    commands = _join_unique(f"`{command}`" for command in _plain_values(origins, "command"))
    return (
        f"{description} {seeds_text}; {period}, {device}, torch {torch_version}, "
        f"commit {commit}, by {commands}.{_warm_start_remark(study, results, seeds)}"
    )


def _warm_start_remark(study: Study, results: Results, seeds: list[int]) -> str:
    """Name the rows that continue another run of a warm start than the others."""
    remarks = []
    for row, row_seeds in differing_warm_starts(study, results).items():
        which = "all seeds" if row_seeds == seeds else f"seeds {_join_unique(map(str, row_seeds))}"
        remarks.append(f"{row}, {which}")
    if not remarks:
        return ""
    return (
        " From another run of their start than the others, with its own rounding: "
        f"{'; '.join(remarks)}."
    )


def _plain_values(origins: list[dict[str, Any]], name: str) -> list[str]:
    return [_plain(str(origin[name])) for origin in origins if origin.get(name)]


def _join_unique(words: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(words))


EXPLANATION = (
    "Test accuracy in %, or the score that a heading names, mean ± sample standard deviation over "
    "seeds. *last*: after the last round, the honest number; *best*: the highest of all rounds, "
    "chosen on the test set, which is what the paper prints; where five rounds or fewer follow a "
    "start, the highest of those. *FedCOG - this*: the difference of the last scores, seed by seed "
    "on the same partitions, with its 95 % interval (Student's t); a test (Wilcoxon's signed "
    "ranks) only from six pairs on. In an average over settings the pairs of all settings that "
    "were run are pooled as if they were independent. Every seed has a partition of its own here, "
    "which deviations include; whether the paper's do is not said."
)


def markdown(study: Study, results: Results) -> str:
    """Format the tables of a study in Markdown.

    Args:
        study: The study.
        results: The stored results.

    Returns:
        The tables, each below its title.
    """
    parts = []
    for table in tables_of(study, results):
        title = f"**{table.title}**\n\n" if table.title else ""
        parts.append(title + markdown_table(table))
    return "\n\n".join(parts)


def markdown_table(table: Table) -> str:
    """Format one table in Markdown, without its title."""
    rows = _cells(table, lambda text: text.replace("|", "\\|"), "**{}**")
    header = [" ".join(name.split()).replace("|", "\\|") for name in table.header]
    lines = [header, ["---"] * len(table.header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cells(table: Table, escape: Callable[[str], str], bold: str) -> list[list[str]]:
    """Return the cells on one line each, escaped, and those in bold marked.

    Args:
        table: The table.
        escape: Escapes the text of a cell.
        bold: Format of a cell in bold.

    Returns:
        Cells, row by row.
    """
    rows = []
    for row_index, row in enumerate(table.rows):
        texts = [escape(" ".join(text.split())) for text in row]
        rows.append(
            [
                bold.format(text) if (row_index, column) in table.bold else text
                for column, text in enumerate(texts)
            ]
        )
    return rows


def latex(study: Study, results: Results) -> str:
    """Format the tables of a study in LaTeX, for the package booktabs.

    Args:
        study: The study.
        results: The stored results.

    Returns:
        The tables, below a comment with title and caption.
    """
    parts = []
    for table in tables_of(study, results):
        title = f"% {table.title}\n" if table.title else ""
        parts.append(title + latex_table(table))
    comment = _escape_latex(re.sub("[`*]", "", caption(study, results)))
    return "\n\n".join([f"% {study.title}. {comment}", *parts]) + "\n"


def latex_table(table: Table) -> str:
    """Format one table in LaTeX, for the package booktabs, without its title."""
    lines = [f"\\begin{{tabular}}{{l{'r' * (len(table.header) - 1)}}}", "\\toprule"]
    lines += [f"{' & '.join(_escape_latex(word) for word in table.header)} \\\\", "\\midrule"]
    rows = _cells(table, _escape_latex, "\\textbf{{{}}}")
    lines += [f"{' & '.join(row)} \\\\" for row in rows]
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}"])


def _escape_latex(text: str) -> str:
    """Escape all special characters of LaTeX; the result is one line."""
    escapes = {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "±": r"$\pm$",
    }
    escapes |= {character: f"\\{character}" for character in "&%_#{}$"}
    one_line = re.sub(r"\s+", " ", text)
    escaped = "".join(escapes.get(character, character) for character in one_line)
    return re.sub(r"^([+-])(?=\d)", r"$\1$", escaped)


def _plain(text: str) -> str:
    """Remove line breaks and Markdown markup from a text of a result file."""
    return re.sub(r"[<>|`*]", "", re.sub(r"\s+", " ", text))


def fill_notes(notes: str, studies: Mapping[str, Study], results: Results) -> str:
    """Replace placeholders in notes by numbers.

    Args:
        notes: Text with `{{study | block | row | last}}`, or `best`. In place of a row,
            `row - other row` stands for their paired difference.
        studies: The studies by name.
        results: The stored results.

    Returns:
        The text with numbers.

    Raises:
        RecordError: A placeholder is malformed, or names something that does not exist.
    """

    def number(match: re.Match[str]) -> str:
        return _placeholder_value(match, studies, results)

    return re.sub(r"\{\{(.*?)\}\}", number, notes, flags=re.DOTALL)


def _placeholder_value(match: re.Match[str], studies: Mapping[str, Study], results: Results) -> str:
    parts = [part.strip() for part in re.sub(r"\s+", " ", match[1]).split("|")]
    if len(parts) != 4 or parts[3] not in ("last", "best"):
        raise RecordError(
            f"notes.md: {match[0]} is not of the form study | block | row | last (or best)."
        )
    name, block, row, which = parts
    if name not in studies:
        raise RecordError(f"notes.md: {match[0]}: there is no study {name}.")
    study = studies[name]
    cells = {cell.row: cell for cell in study.cells if cell.block == block}
    rows = [row] if row in cells else row.split(" - ")
    missing = [one for one in rows if one not in cells]
    if missing:
        raise RecordError(
            f"notes.md: {match[0]}: {name} has no row {', '.join(missing)} in a block {block}."
        )
    values = [getattr(cell_values(cells[one], results, study.seeds), which) for one in rows]
    if not all(values):
        return NOT_RUN
    if len(values) == 1:
        unit = UNITS.get(cells[row].metric, "%")
        return _format_spread(spread(list(values[0].values())), unit)
    difference = paired_difference(values[0], values[1])
    return NOT_RUN if difference is None else difference.text()
