"""Results beside the paper's, as tables in Markdown and LaTeX, and numbers in the text around them."""

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from fedcog.experiments.findings import UNITS, Block, Row, blocks, elsewhere, lines_of, paired, provenances, values
from fedcog.experiments.record import RecordError
from fedcog.experiments.results import Results
from fedcog.experiments.study import Study
from fedcog.experiments.summary import Spread, spread

NOT_RUN = "not run"


class Grid(NamedTuple):
    """A table as it is printed."""

    title: str
    heads: list[str]
    rows: list[list[str]]


def grids(study: Study, results: Results) -> list[Grid]:
    """A study's tables as they are printed; none where it is a figure alone."""
    if study.figure in ("curves", "partition", "pictures"):
        return []
    if study.figure == "privacy":
        return [_privacy(study, results)]
    found = blocks(study, results)
    if study.axis and all(len(block.rows) == 1 for block in found):  # nothing but what is varied tells rows apart
        rows = [block.rows[0]._replace(name=block.title) for block in found]
        return [_grid(study._replace(ours=""), Block("", found[0].unit, rows), study.axis)]
    return [
        _grid(study, block._replace(title=f"{study.axis} = {block.title}" if study.axis else block.title))
        for block in found
    ]


def _grid(study: Study, block: Block, first: str = "") -> Grid:
    lead = [f"{study.ours} - this"] if study.ours else []
    heads = {
        "%": [first, "last", "best", "paper", "best - paper", *lead],
        "s": [first, "ours (s)", "paper (s)"],
        "": [first, "ours", *lead],
    }[block.unit]
    return Grid(block.title, heads, [_cells(study, block, row) for row in block.rows])


def _cells(study: Study, block: Block, row: Row) -> list[str]:
    """A row as printed, in the order of the heads."""
    told = [NOT_RUN if one is None else _number(one, block.unit) for one in (row.last, row.best)]
    paper = "" if row.paper is None else f"{row.paper:.2f}"
    paper += "" if row.paper_deviation is None else f" ± {row.paper_deviation:.2f}"
    name = f"{row.name} ({row.note})" if row.note else row.name
    gap = "" if row.difference is None else f"{row.difference:+.2f}"
    lead = [row.lead.words() if row.lead else ""] if study.ours else []
    return {
        "%": [name, *told, paper, gap, *lead],
        "s": [name, told[0], paper],
        "": [name, told[0], *lead],
    }[block.unit]


def _number(one: Spread, unit: str) -> str:
    digits = 2 if one.mean >= 1 or unit == "%" else 3
    return f"{one.mean:.{digits}f}" + ("" if one.deviation is None else f" ± {one.deviation:.{digits}f}")


def _privacy(study: Study, results: Results) -> Grid:
    """How near generated images come to members and to others, and what that tells of membership."""
    heads = ["", "seen as", "to the nearest member", "to the nearest other", "nearer to a member", "by chance", "AUC"]
    rows = []
    for cell in study.cells:
        found = [line["found"] for line in lines_of(cell, results, study.seeds)]
        if not found:
            rows.append([cell.block, *[NOT_RUN] * 6])
        for one in found:
            for view in ("pixels", "features"):
                gaps = one[view]
                near = f"{gaps['to_members']:.3f}", f"{gaps['to_others']:.3f}"
                shares = (f"{100 * gaps[name]:.1f} %" for name in ("nearer_to_members", "nearer_by_chance"))
                rows.append([cell.block, view, *near, *shares, f"{gaps['auc']:.3f}"])
            rows.append([cell.block, "the model's own loss", "", "", "", "", f"{one['model']['auc']:.3f}"])
    return Grid("", heads, rows)


def caption(study: Study, results: Results) -> str:
    """What was run, when, on what, with which command and commit."""
    found = provenances(study, results)
    words = f"{study.place}. {study.words}"
    if not found:
        return words + " Nothing of it was run yet."
    seeds = sorted({line["seed"] for cell in study.cells for line in lines_of(cell, results, study.seeds)})
    told = {
        name: _listed(_plain(str(one[name])) for one in found if one.get(name))
        for name in ("device", "torch", "commit")
    }
    days = sorted({_plain(str(one["started"]))[:10] for one in found if one.get("started")})
    when = " to ".join(dict.fromkeys([*days[:1], *days[-1:]]))
    commands = _listed(f"`{_plain(str(one['command']))}`" for one in found if one.get("command"))
    number = f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {', '.join(str(seed) for seed in seeds)}"
    other = "; ".join(
        f"{run}, {'all seeds' if among == seeds else 'seeds ' + _listed(map(str, among))}"
        for run, among in elsewhere(study, results).items()
    )
    return (
        f"{words} {number[0].upper()}{number[1:]}; {when}, {told['device']}, torch {told['torch']}, commit "
        f"{told['commit']}, by {commands}."
    ) + (f" From another run of their start than the others, with its own rounding: {other}." if other else "")


def _listed(words: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(words))


EXPLAINED = (
    "Test accuracy in %, or the score that a heading names, mean ± sample standard deviation over seeds. *last*: after "
    "the last round, the honest number; *best*: the highest of all rounds, chosen on the test set, which is what the "
    "paper prints; where five rounds or fewer follow a start, the highest of those. *FedCOG - this*: the difference of "
    "the last scores, seed by seed on the same partitions, with its 95 % interval (Student's t); a test (Wilcoxon's "
    "signed ranks) only from six pairs on. In an average over settings the pairs of all settings that were run are "
    "pooled as if they were independent. Every seed has a partition of its own here, which deviations include; whether "
    "the paper's do is not said."
)


def markdown(study: Study, results: Results) -> str:
    """A study's tables in Markdown."""
    parts = []
    for grid in grids(study, results):
        lines = [grid.heads, ["---"] * len(grid.heads), *grid.rows]
        above = f"**{grid.title}**\n\n" if grid.title else ""
        parts.append(above + "\n".join(f"| {' | '.join(line)} |" for line in lines))
    return "\n\n".join(parts)


def latex(study: Study, results: Results) -> str:
    """A study's tables in LaTeX, for booktabs."""
    parts = []
    for grid in grids(study, results):
        lines = [f"% {grid.title}"] if grid.title else []
        lines += [f"\\begin{{tabular}}{{l{'r' * (len(grid.heads) - 1)}}}", "\\toprule"]
        lines += [f"{' & '.join(_tex(word) for word in grid.heads)} \\\\", "\\midrule"]
        lines += [f"{' & '.join(_tex(word) for word in row)} \\\\" for row in grid.rows]
        parts.append("\n".join([*lines, "\\bottomrule", "\\end{tabular}"]))
    words = _tex(re.sub("[`*]", "", caption(study, results)))
    return "\n\n".join([f"% {study.title}. {words}", *parts]) + "\n"


def _tex(word: str) -> str:
    """Text as LaTeX, on one line; whatever means something there is taken for what it looks like."""
    signs = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$"}
    signs |= {sign: f"\\{sign}" for sign in "&%_#{}$"}
    written = "".join(signs.get(sign, sign) for sign in re.sub(r"\s+", " ", word))
    return re.sub(r"^([+-])(?=\d)", r"$\1$", written)


def _plain(words: str) -> str:
    """Text from a file of results as Markdown, on one line and without markup."""
    return re.sub(r"[<>|`*]", "", re.sub(r"\s+", " ", words))


def filled(notes: str, studies: Mapping[str, Study], results: Results) -> str:
    """Notes with numbers in place of {{study | block | row | last}}, or row - row for a difference by seed."""

    def number(found: re.Match[str]) -> str:
        parts = [part.strip() for part in re.sub(r"\s+", " ", found[1]).split("|")]
        if len(parts) != 4 or parts[3] not in ("last", "best"):
            raise RecordError(f"notes.md: {found[0]} is not of the form study | block | row | last (or best).")
        name, block, row, which = parts
        if name not in studies:
            raise RecordError(f"notes.md: {found[0]}: there is no study {name}.")
        study = studies[name]
        cells = {cell.row: cell for cell in study.cells if cell.block == block}
        rows = [row] if row in cells else row.split(" - ")
        if lacking := [one for one in rows if one not in cells]:
            raise RecordError(f"notes.md: {found[0]}: {name} has no row {', '.join(lacking)} in a block {block}.")
        taken = [getattr(values(cells[one], results, study.seeds), which) for one in rows]
        if not all(taken):
            return NOT_RUN
        if len(taken) == 1:
            return _number(spread(list(taken[0].values())), UNITS.get(cells[row].measure, "%"))
        lead = paired(taken[0], taken[1])
        return NOT_RUN if lead is None else lead.words()

    return re.sub(r"\{\{(.*?)\}\}", number, notes, flags=re.DOTALL)
