"""Sections of a page: who holds what, what becomes of the clients' models, what was sent, and where time goes."""

import math
import statistics
from collections.abc import Sequence

from torch import Tensor

from fedcog.experiments.measures import fairness, forgetting, typical_cost
from fedcog.experiments.report import figures, readings
from fedcog.experiments.report.figures import Curve, look, partition_figure
from fedcog.experiments.report.markup import NONE, figure, listed, table, text
from fedcog.experiments.report.readings import Federation
from fedcog.experiments.run import Run
from fedcog.experiments.summary import Group, spread
from fedcog.task import MEASURES

PARTITIONS = 6  # more are only counted
CELLS = 20_000  # a table of more is left out: it weighs megabytes, and nobody reads it


def partition(runs: Sequence[Run], federations: Sequence[Federation]) -> str:
    """Examples per client and class: a figure and a table of each partition, with the seeds that share it."""
    found: dict[str, tuple[Tensor, list[str], list[Run], str]] = {}
    for run, (tensors, about) in zip(runs, federations, strict=True):
        if "counts" in tensors and tensors["counts"].dim() == 2 and tensors["counts"].numel():
            counts = tensors["counts"]
            names = [str(name) for name in about.get("classes", ())]
            names += [str(label) for label in range(len(names), counts.shape[1])]
            noun = "labels" if about.get("several") else "examples"
            found.setdefault(repr((counts.tolist(), names)), (counts, names, [], noun))[2].append(run)
    if found and not any(int(counts.sum()) for counts, *_ in found.values()):
        return "<p>Nobody but the clients knows what they hold.</p>"
    if not found:
        return "<p>The runs have not recorded who holds what (federation.safetensors is missing or empty).</p>"
    drawn = ""
    for counts, names, members, noun in list(found.values())[:PARTITIONS]:
        seeds = dict.fromkeys(run.experiment.seed for run in members)
        caption = (
            f"Training {noun} per client and class (white: none), and each client's total above. "
            f"{int(counts.sum()):,} {noun}, {counts.shape[0]} clients, {counts.shape[1]} classes; "
            f"{members[0].experiment.partition_rule}; {'seeds' if len(seeds) > 1 else 'seed'} {listed(seeds)}."
        )
        drawn += figure(partition_figure(counts, names, noun), caption, _counts(counts, names))
    more = len(found) - PARTITIONS
    rest = f"<p>{more} more partition{'s are' if more > 1 else ' is'} not shown.</p>" if more > 0 else ""
    return f'<div class="figures">{drawn}</div>{rest}'


def _counts(counts: Tensor, names: Sequence[str]) -> str:
    if counts.numel() > CELLS:
        left_out = f"A table of {counts.numel():,} numbers is left out; they are in federation.safetensors."
        return f'<p class="note">{left_out}</p>'
    head = "".join(f'<th class="number" scope="col">{text(name)}</th>' for name in ("total", *names))
    rows = "".join(
        f'<tr><th scope="row">{client}</th><td class="number">{sum(row)}</td>'
        + "".join(f'<td class="number">{count}</td>' if count else '<td class="number zero">0</td>' for count in row)
        + "</tr>"
        for client, row in enumerate(counts.tolist())
    )
    whole = f'<table><thead><tr><th scope="col">client</th>{head}</tr></thead><tbody>{rows}</tbody></table>'
    return f'<details><summary>As a table</summary><div class="scroll counts" tabindex="0">{whole}</div></details>'


def clients(groups: Sequence[Group]) -> str:
    """How far local models go, and how good they are at the client's own mix of classes and at all."""
    distance = readings.curves(groups, lambda line: readings.local(line, "distance"))
    if not distance:
        done = any(run.lines for each in groups for run in each.runs)
        told = "What clients did was not told to the server" if done else "No round is finished"
        return f"<p>{told}, so there is nothing to say about clients.</p>"
    drawn = figure(
        figures.curves_figure(distance, "distance from the global model", marks=readings.wakes(groups)),
        "Length of the way a local model goes from the global model it received, in parameter space: mean over the "
        "round's clients and seeds, band ± one standard deviation over them.",
    )
    content = f'<div class="figures">{drawn}</div>'
    scored = [(each, _local_curves(each)) for each in groups]
    if not any(curves for _, curves in scored):
        return content + "<p>The clients' local models were not evaluated, so there is nothing to compare.</p>"
    content += (
        "<p><em>Own label mix</em> is the score on the test set with every class weighted by its share of the client's "
        "examples. <em>Before</em> is the global model as the client received it, <em>after</em> the local model that "
        "came of it.</p>"
    )
    content += _fairness(groups)
    for each, curves in scored:
        if curves:
            drawn = figure(
                figures.curves_figure(curves, f"{MEASURES[each.runs[0].measure]} (%)", percent=True, whole_range=True),
                "Mean over the round's clients and seeds; band ± one standard deviation.",
            )
            content += f'<h3>{text(each.label)}</h3><div class="figures">{drawn}{_dumbbell(each)}</div>'
    return content


def _local_curves(each: Group) -> list[Curve]:
    measure = each.runs[0].measure
    named = {
        "own label mix, before": f"own_{measure}_before",
        "own label mix, after": f"own_{measure}",
        "whole test set, after": measure,
    }
    found = [
        Curve(label, readings.over_rounds(each.runs, lambda line, name=name: readings.local(line, name)), look(number))  # type: ignore[misc]
        for number, (label, name) in enumerate(named.items())
    ]
    return [curve for curve in found if curve.points]


def _dumbbell(each: Group) -> str:
    """Before and after for every client of the last evaluated round of the group's first run that has one."""
    for run in each.runs:
        own, name = f"own_{run.measure}", MEASURES[run.measure]
        for line in reversed(run.lines):
            clients = [
                (local["client"], local[f"{own}_before"], local[own])
                for local in line.get("local", ())
                if local.get(own) is not None and local.get(f"{own}_before") is not None
            ]
            if clients:
                words = f"Each client of round {line['round']} (seed {run.experiment.seed}): {name} before and after."
                return figure(figures.dumbbell_figure(clients, name), words)
    return ""


def traffic(groups: Sequence[Group]) -> str:
    """Bytes that a client is sent and sends in a round, by algorithm."""
    first: float | None = None
    rows = ""
    for each in groups:
        down, up = (
            [size for run in each.runs for line in run.lines for size in readings.local(line, way) if size is not None]
            for way in ("down", "up")
        )
        if not down or not up:
            continue
        mean, whole = statistics.fmean(up), sum(down) + sum(up)
        first = mean if first is None else first
        cells = f"{statistics.fmean(down):,.0f}", f"{mean:,.0f}", f"{mean / first:.2f} x", f"{whole / 1e6:,.1f}"
        rows += _row(each.label, cells)
    if not rows:
        return "<p>No round is finished, so nothing has been sent.</p>"
    heads = "", "bytes down", "bytes up", "up, beside the first", "all runs, MB"
    words = (
        "Bytes that a client is sent and sends in a round, mean over clients, rounds and seeds. On Flower they are "
        "measured on the wire; in the simulator they are those of the numbers themselves, as they would be sent."
    )
    return f"<p>{words}</p>{table(_head(*heads), rows)}"


def costs(groups: Sequence[Group], target: float | None) -> str:
    """What it took to reach the target, by algorithm."""
    rows = ""
    for each in groups:
        middle, there = typical_cost(each.runs, target) if target else ([], 0)
        if there:
            rounds, sent, seconds = middle
            costs = (f"{rounds:g}", f"{sent / 1e6:,.1f}", f"{seconds:,.1f}") if math.isfinite(rounds) else (NONE,) * 3
            rows += _row(each.label, (*costs, f"{there} of {len(each.runs)}"))
    if not rows or not target:
        return ""
    heads = "", "rounds", "MB, all clients", "seconds", "seeds that got there"
    words = (
        f"What it took to reach {100 * target:g} %, median over seeds: one that never did counts as beyond all others. "
        "Seconds are those of this machine."
    )
    return f"<h3>To the target</h3><p>{words}</p>{table(_head(*heads), rows)}"


def _fairness(groups: Sequence[Group]) -> str:
    """How unequally clients fare, and what they forget, by algorithm."""
    rows = ""
    for each in groups:
        fair = [one for run in each.runs if (one := fairness(run))]
        lost = [share for run in each.runs if (share := forgetting(run)) is not None]
        if not fair:
            continue
        cells = [spread(list(values)).percent() for values in list(zip(*fair, strict=True))[:3]]
        cells.append(spread(lost).percent() if lost else NONE)
        rows += _row(each.label, cells)
    heads = "", "mean (%)", "worst tenth (%)", "deviation", "forgotten (points)"
    words = (
        "Clients' own models on their own label mix, in the last evaluated round: mean over its clients, mean of the "
        "worst tenth of them, and their standard deviation. <em>Forgotten</em> is what the model that a client was "
        "sent loses by local training on classes of which it has no example. Mean ± deviation over seeds."
    )
    return f"<h3>How clients fare</h3><p>{words}</p>{table(_head(*heads), rows)}" if rows else ""


def _row(label: str, cells: Sequence[str]) -> str:
    numbers = "".join(f'<td class="number">{cell}</td>' for cell in cells)
    return f'<tr><th scope="row">{text(label)}</th>{numbers}</tr>'


def _head(*names: str) -> str:
    return "".join(f'<th class="number" scope="col">{name}</th>' for name in names)


def time(groups: Sequence[Group]) -> str:
    """Seconds of a round by what they went into, before and after FedCOG wakes."""
    bars = []
    for each in groups:
        lines, wake = [line for run in each.runs for line in run.lines], readings.wake(each.runs[0].experiment)
        phases = {each.label: lines}
        if wake is not None and any(line["round"] >= wake for line in lines) and wake > 1:
            phases = {
                f"{each.label}, rounds 1 to {wake - 1}": [line for line in lines if line["round"] < wake],
                f"{each.label}, from round {wake}": [line for line in lines if line["round"] >= wake],
            }
        bars += [(label, seconds) for label, lines in phases.items() if (seconds := readings.seconds(lines))]
    if not bars:
        return "<p>No round is finished, so no time has been measured.</p>"
    words = "Mean wall-clock seconds of a round, over rounds and seeds. Other: sampling, aggregation, bookkeeping."
    return figure(figures.time_figure(bars), words)
