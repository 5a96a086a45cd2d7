"""Results beside the paper's, as tables: means, deviations, differences with their intervals; Markdown and LaTeX."""

import functools
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from fedcog.experiments.paper import MAIN_AVERAGES, Cell, Study
from fedcog.experiments.plan import job
from fedcog.experiments.record import RecordError
from fedcog.experiments.results import Results
from fedcog.experiments.summary import Spread, spread

NOT_RUN = "not run"
ENOUGH = 6  # pairs from which on a test is worth its name


class Paired(NamedTuple):
    """How much better one row is than another, seed by seed: mean, half a 95 % interval, and a test where it may be."""

    mean: float
    half: float | None
    pairs: int
    p: float | None  # Wilcoxon's signed-rank test, two-sided
    pooled: int = 1  # settings that the pairs are of

    def words(self) -> str:
        """As printed."""
        half = "" if self.half is None else f" ± {self.half:.2f}"
        where = f" in {self.pooled} settings" if self.pooled > 1 else ""
        p = "" if self.p is None else f" (p = {self.p:.2g}, n = {self.pairs}{where})"
        return f"{self.mean:+.2f}{half}{p}"


class Row(NamedTuple):
    """A row of a block: what was measured last and at best, and the paper's number; None: not run."""

    name: str
    last: Spread | None
    best: Spread | None
    paper: float | None
    paper_deviation: float | None
    lead: Paired | None  # of the study's own row over this one
    note: str = ""

    @property
    def difference(self) -> float | None:
        """The best beside the paper's, which is the best over rounds as well."""
        return None if self.best is None or self.paper is None else self.best.mean - self.paper


class Block(NamedTuple):
    """A part of a table: one setting, or one value of what is varied."""

    title: str
    unit: str
    rows: list[Row]


class Values(NamedTuple):
    """What the seeds of a cell came to, in per cent or seconds."""

    last: dict[int, float]
    best: dict[int, float]
    note: str = ""


def values(cell: Cell, results: Results, seeds: Sequence[int]) -> Values:
    """What is known of a cell."""
    found = {line["seed"]: line for line in lines_of(cell, results, seeds)}
    if cell.probe:
        taken = {seed: line["found"].get("seconds", []) for seed, line in found.items()}
        each = {client: value for listed in taken.values() for client, value in enumerate(listed)}
        return Values(each, each)
    name = {"personal": "personal_accuracy", "validation": "validation_accuracy"}.get(cell.measure, "accuracy")
    one_more = (
        cell.start is not None and cell.experiment is not None and cell.experiment.rounds == cell.start.rounds + 1
    )
    since = -1 if one_more else 0  # where a single round is looked at, those before it are not its own
    series = {seed: [100 * value for value in line[name][since:] if value is not None] for seed, line in found.items()}
    series = {seed: numbers for seed, numbers in series.items() if numbers}
    lost = sum(bool(line.get("diverged")) for line in found.values())
    note = f"{lost} of {len(found)} seeds diverged" if lost else ""
    whole = {seed: numbers for seed, numbers in series.items() if not found[seed].get("diverged")}
    return Values(
        {seed: numbers[-1] for seed, numbers in whole.items()},
        {seed: max(numbers) for seed, numbers in series.items()},
        note,
    )


def blocks(study: Study, results: Results) -> list[Block]:
    """A study's table, block by block."""
    known = {(cell.block, cell.row): values(cell, results, study.seeds) for cell in study.cells}
    found = []
    for title in dict.fromkeys(cell.block for cell in study.cells):
        cells = [cell for cell in study.cells if cell.block == title]
        ours = known.get((title, study.ours))
        rows = []
        for cell in cells:
            own = known[cell.block, cell.row]
            lead = paired(ours.last, own.last) if ours and cell.row != study.ours and not cell.probe else None
            told = _spread(own.last), _spread(own.best)
            rows.append(Row(cell.row, *told, cell.paper, cell.paper_deviation, lead, own.note))
        found.append(Block(title, "s" if cells[0].measure == "seconds" else "%", rows))
    return found + ([average(study, known)] if study.name == "main" else [])


def average(study: Study, known: dict[tuple[str, str], Values]) -> Block:
    """The mean over all settings of a study, and who leads over all pairs of settings and seeds there are."""
    titles = list(dict.fromkeys(cell.block for cell in study.cells))
    rows = []
    for name in dict.fromkeys(cell.row for cell in study.cells):
        taken = [known[title, name] for title in titles]
        told = (
            _spread(_mean_by_seed([one.last for one in taken])),
            _spread(_mean_by_seed([one.best for one in taken])),
        )
        ours, theirs = (
            {(title, seed): value for title in titles for seed, value in known[title, row].last.items()}
            for row in (study.ours, name)
        )
        lead = paired(ours, theirs) if name != study.ours else None
        lead = lead and lead._replace(pooled=len({title for title, _ in ours.keys() & theirs.keys()}))
        rows.append(Row(name, *told, MAIN_AVERAGES.get(name.split(",")[0]), None, lead))
    return Block("Average over the settings", "%", rows)


def _spread(taken: dict[int, float]) -> Spread | None:
    return spread(list(taken.values())) if taken else None


def _mean_by_seed(taken: Sequence[dict[int, float]]) -> dict[int, float]:
    """The mean over settings of every seed that all of them have."""
    seeds = set.intersection(*(set(one) for one in taken))
    return {seed: statistics.fmean(one[seed] for one in taken) for seed in sorted(seeds)}


def paired(ours: dict[Any, float], theirs: dict[Any, float]) -> Paired | None:
    """The mean difference over what both have, with its interval from Student's t."""
    gaps = tuple(ours[key] - theirs[key] for key in ours if key in theirs)
    return _lead(gaps) if gaps else None


@functools.cache
def _lead(gaps: tuple[float, ...]) -> Paired:
    from scipy import stats  # takes a second to load

    half = p = None
    if len(gaps) > 1:
        error = statistics.stdev(gaps) / math.sqrt(len(gaps))
        half = float(stats.t.ppf(0.975, len(gaps) - 1)) * error
    if len(gaps) >= ENOUGH and any(gaps):
        alike = len({abs(gap) for gap in gaps} - {0.0}) < len(gaps)  # then there is no table of exact values
        p = float(stats.wilcoxon(gaps, method="asymptotic" if alike else "exact").pvalue)
    return Paired(statistics.fmean(gaps), half, len(gaps), p)


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
    heads = [first, "ours (s)", "paper (s)"]
    if block.unit != "s":
        heads = [first, "last", "best", "paper", "best - paper", *([f"{study.ours} - this"] if study.ours else [])]
    return Grid(block.title, heads, [_cells(study, block, row) for row in block.rows])


def _cells(study: Study, block: Block, row: Row) -> list[str]:
    """A row as printed, in the order of the heads."""
    told = [NOT_RUN if one is None else _number(one) for one in (row.last, row.best)]
    paper = "" if row.paper is None else f"{row.paper:.2f}"
    paper += "" if row.paper_deviation is None else f" ± {row.paper_deviation:.2f}"
    name = f"{row.name} ({row.note})" if row.note else row.name
    if block.unit == "s":
        return [name, told[0], paper]
    gap = "" if row.difference is None else f"{row.difference:+.2f}"
    return [name, *told, paper, gap, *([row.lead.words() if row.lead else ""] if study.ours else [])]


def _number(one: Spread) -> str:
    digits = 2 if one.mean >= 1 else 3
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
    return (
        f"{words} {number[0].upper()}{number[1:]}; {when}, {told['device']}, torch {told['torch']}, commit "
        f"{told['commit']}, by {commands}."
    )


def provenances(study: Study, results: Results) -> list[dict[str, Any]]:
    """Where each result of a study came from."""
    return [line["provenance"] for cell in study.cells for line in lines_of(cell, results, study.seeds)]


def lines_of(cell: Cell, results: Results, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """What came of a cell, seed by seed."""
    if cell.experiment is None:
        return []
    found = [results.of(job(cell, seed)).get(seed) for seed in seeds]
    return [line for line in found if line is not None]


def _listed(words: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(words))


EXPLAINED = (
    "Test accuracy in %, mean ± sample standard deviation over seeds. *last*: after the last round, the honest number; "
    "*best*: the highest of all rounds, chosen on the test set, which is what the paper prints. *FedCOG - this*: the "
    "difference of the last accuracies, seed by seed on the same partitions, with its 95 % interval (Student's t); a "
    "test (Wilcoxon's signed ranks) only from six pairs on. In an average over settings the pairs of all settings that "
    "were run are pooled as if they were independent. Here every seed has a partition of its own, so deviations are "
    "larger than the paper's. Where one round follows a shared start, *best* is of that round alone."
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
            return _number(spread(list(taken[0].values())))
        lead = paired(taken[0], taken[1])
        return NOT_RUN if lead is None else lead.words()

    return re.sub(r"\{\{(.*?)\}\}", number, notes, flags=re.DOTALL)
