"""Sections of a report: partition, clients, communication and time."""

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from fedcog.core.tasks import METRIC_LABELS
from fedcog.report import figures, run_values
from fedcog.report.figures import Curve, line_style, partition_figure
from fedcog.report.markup import NO_VALUE, figure, join_words, table, text
from fedcog.report.run_values import FederationRecord, RoundLine
from fedcog.runs.records.derived_metrics import fairness, forgetting, median_cost
from fedcog.runs.records.recorded_run import Run
from fedcog.runs.records.summary import Group, spread

MAX_PARTITIONS = 6
"""Number of partitions that are shown."""
MAX_TABLE_CELLS = 20_000
"""A larger table is left out: it would take megabytes."""


@dataclass
class Partition:
    """Examples per client and class, and the runs that have this partition."""

    counts: Tensor
    classes: list[str]
    noun: str
    clients: list[str]
    runs: list[Run] = field(default_factory=list)


def partition(runs: Sequence[Run], federations: Sequence[FederationRecord]) -> str:
    """Show examples per client and class, as figure and table, for each partition.

    Args:
        runs: The runs.
        federations: The federation record of each run.

    Returns:
        HTML.
    """
    partitions = _different_partitions(runs, federations)
    if not partitions:
        return (
            "<p>The runs have not recorded their partition (federation.safetensors is missing or "
            "empty).</p>"
        )
    if not any(int(each.counts.sum()) for each in partitions):
        return "<p>Only the clients know what data they hold.</p>"
    drawn = ""
    for each in partitions[:MAX_PARTITIONS]:
        num_clients, num_classes = each.counts.shape
        seeds = dict.fromkeys(run.experiment.seed for run in each.runs)
        caption = (
            f"Training {each.noun} per client and class (white: none); above, the total of each "
            f"client. {int(each.counts.sum()):,} {each.noun}, {num_clients} clients, "
            f"{num_classes} classes; {each.runs[0].experiment.partition_rule}; "
            f"{'seeds' if len(seeds) > 1 else 'seed'} {join_words(seeds)}."
        )
        names = each.runs[0].client_names
        plot = partition_figure(each.counts, each.classes, each.noun, names)
        drawn += figure(plot, caption, _counts_table(each))
    num_hidden = len(partitions) - MAX_PARTITIONS
    remark = ""
    if num_hidden > 0:
        noun = "partition is" if num_hidden == 1 else "partitions are"
        remark = f"<p>{num_hidden} more {noun} not shown.</p>"
    return f'<div class="figures">{drawn}</div>{remark}'


def _different_partitions(
    runs: Sequence[Run], federations: Sequence[FederationRecord]
) -> list[Partition]:
    """The different partitions of the runs, each with the runs that have it."""
    partitions: dict[str, Partition] = {}
    for run, (tensors, about) in zip(runs, federations, strict=True):
        counts = tensors.get("counts")
        if counts is None or counts.dim() != 2 or not counts.numel():
            continue
        classes = [str(name) for name in about.get("classes", ())]
        classes += [str(label) for label in range(len(classes), counts.shape[1])]
        noun = "labels" if about.get("several") else "examples"
        key = repr((counts.tolist(), classes))
        clients = run_values.client_labels(run, len(counts))
        partitions.setdefault(key, Partition(counts, classes, noun, clients)).runs.append(run)
    return list(partitions.values())


def _counts_table(partition: Partition) -> str:
    """The numbers behind the figure, folded away."""
    counts = partition.counts
    if counts.numel() > MAX_TABLE_CELLS:
        return (
            f'<p class="note">A table of {counts.numel():,} numbers is left out; they are in '
            "federation.safetensors.</p>"
        )
    columns = ("total", *partition.classes)
    head = "".join(f'<th class="number" scope="col">{text(name)}</th>' for name in columns)
    rows = ""
    for client, row in zip(partition.clients, counts.tolist(), strict=True):
        cells = "".join(
            f'<td class="number">{count}</td>' if count else '<td class="number zero">0</td>'
            for count in row
        )
        total = f'<td class="number">{sum(row)}</td>'
        rows += f'<tr><th scope="row">{text(client)}</th>{total}{cells}</tr>'
    return (
        '<details><summary>As a table</summary><div class="scroll counts" tabindex="0">'
        f'<table><thead><tr><th scope="col">client</th>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div></details>"
    )


def clients(groups: Sequence[Group]) -> str:
    """Show how far local models move, and their scores on own label mix and whole test set."""
    distances = run_values.curves(
        groups, lambda record: run_values.client_values(record, "distance")
    )
    if not distances:
        has_rounds = any(run.lines for each in groups for run in each.runs)
        reason = "No round is finished"
        if has_rounds:
            reason = "The server received no measurements of the clients"
        return f"<p>{reason}, so there is nothing to show about clients.</p>"
    plot = figures.curves_figure(
        distances,
        "distance from the global model",
        marks=run_values.generation_starts(groups),
    )
    drawn = figure(
        plot,
        "L2 distance between a local model and the global model it started from: mean over the "
        "round's clients and seeds, band ± one standard deviation over them.",
    )
    content = f'<div class="figures">{drawn}</div>'
    local_curves = [_local_curves(each) for each in groups]
    if not any(local_curves):
        return content + "<p>The clients' local models were not evaluated.</p>"
    content += (
        "<p><em>Own label mix</em> is the score on the test set with every class weighted by its "
        "share of the client's examples. <em>Before</em> is the global model as the client "
        "received it, <em>after</em> is the local model after training.</p>"
    )
    content += _fairness_table(groups)
    for each, curves in zip(groups, local_curves, strict=True):
        if curves:
            label = f"{METRIC_LABELS[each.runs[0].metric]} (%)"
            plot = figures.curves_figure(curves, label, percent=True, whole_range=True)
            drawn = figure(
                plot, "Mean over the round's clients and seeds; band ± one standard deviation."
            )
            content += (
                f'<h3>{text(each.label)}</h3><div class="figures">{drawn}{_dumbbell(each)}</div>'
            )
    return content


def _local_curves(each: Group) -> list[Curve]:
    """Curves of the clients' scores before and after local training."""
    metric = each.runs[0].metric
    keys = {
        "own label mix, before": f"own_{metric}_before",
        "own label mix, after": f"own_{metric}",
        "whole test set, after": metric,
    }
    curves = []
    for index, (label, key) in enumerate(keys.items()):
        values = functools.partial(run_values.client_values, name=key)
        points = run_values.over_rounds(each.runs, values)
        if points:
            curves.append(Curve(label, points, line_style(index)))
    return curves


def _dumbbell(each: Group) -> str:
    """Scores before and after for each client of the last evaluated round of one run."""
    for run in each.runs:
        key = f"own_{run.metric}"
        name = METRIC_LABELS[run.metric]
        labels = dict(enumerate(run_values.client_labels(run, run.experiment.num_clients)))
        for record in reversed(run.lines):
            scores = [
                (
                    labels.get(client["client"], str(client["client"])),
                    client[f"{key}_before"],
                    client[key],
                )
                for client in record.get("local", ())
                if client.get(key) is not None and client.get(f"{key}_before") is not None
            ]
            if scores:
                caption = (
                    f"Each client of round {record['round']} (seed {run.experiment.seed}): {name} "
                    "before and after."
                )
                return figure(figures.dumbbell_figure(scores, name), caption)
    return ""


def traffic(groups: Sequence[Group]) -> str:
    """Show the bytes that a client receives and sends in a round, by algorithm."""
    first_mean: float | None = None
    rows = ""
    for each in groups:
        received = _client_numbers(each, "down")
        sent = _client_numbers(each, "up")
        if not received or not sent:
            continue
        mean_sent = statistics.fmean(sent)
        if first_mean is None:
            first_mean = mean_sent
        cells = (
            f"{statistics.fmean(received):,.0f}",
            f"{mean_sent:,.0f}",
            f"{mean_sent / first_mean:.2f} x",
            f"{(sum(received) + sum(sent)) / 1e6:,.1f}",
        )
        rows += table_row(each.label, cells)
    if not rows:
        return "<p>No round is finished, so nothing has been sent.</p>"
    head = table_head("", "bytes down", "bytes up", "up, relative to the first", "all runs, MB")
    return (
        "<p>Bytes that a client receives (down) and sends (up) in a round, mean over clients, "
        "rounds and seeds. On Flower they are measured on the wire; in the simulator they are the "
        f"size of the tensors that would be sent.</p>{table(head, rows)}"
    )


def _client_numbers(each: Group, name: str) -> list[float]:
    """A value of all clients in all rounds of all runs."""
    return [
        value
        for run in each.runs
        for record in run.lines
        for value in run_values.client_values(record, name)
        if value is not None
    ]


def costs(groups: Sequence[Group], target: float | None) -> str:
    """Show what it took to reach a target score, by algorithm.

    Args:
        groups: The groups of runs.
        target: The score, from 0 to 1; None: show nothing.

    Returns:
        HTML.
    """
    if not target:
        return ""
    rows = ""
    for each in groups:
        medians, num_reached = median_cost(each.runs, target)
        if not num_reached:
            continue
        rounds, num_bytes, seconds = medians
        cells = [NO_VALUE, NO_VALUE, NO_VALUE]
        if math.isfinite(rounds):
            cells = [f"{rounds:g}", f"{num_bytes / 1e6:,.1f}", f"{seconds:,.1f}"]
        rows += table_row(each.label, (*cells, f"{num_reached} of {len(each.runs)}"))
    if not rows:
        return ""
    head = table_head("", "rounds", "MB, all clients", "seconds", "seeds that reached it")
    return (
        f"<h3>To the target</h3><p>Cost of reaching {100 * target:g} %, median over seeds; a seed "
        "that never reached it counts as infinite. Seconds depend on the machine.</p>"
        f"{table(head, rows)}"
    )


def _fairness_table(groups: Sequence[Group]) -> str:
    """How scores differ between clients, and what local training forgets, by algorithm."""
    rows = ""
    for each in groups:
        fairness_values = [values for run in each.runs if (values := fairness(run))]
        forgotten = [share for run in each.runs if (share := forgetting(run)) is not None]
        if not fairness_values:
            continue
        columns = list(zip(*fairness_values, strict=True))[:3]
        cells = [spread(list(column)).percent() for column in columns]
        cells.append(spread(forgotten).percent() if forgotten else NO_VALUE)
        rows += table_row(each.label, cells)
    if not rows:
        return ""
    head = table_head("", "mean (%)", "worst tenth (%)", "deviation", "forgotten (points)")
    return (
        "<h3>Fairness</h3><p>Clients' own models on their own label mix, in the last evaluated "
        "round: mean over its clients, mean of the worst tenth of them, and their standard "
        "deviation. <em>Forgotten</em> is what the received model loses by local training on "
        "classes of which the client has no example. Mean ± standard deviation over seeds.</p>"
        f"{table(head, rows)}"
    )


def table_row(label: str, cells: Sequence[str]) -> str:
    """Return a row of a table: a label, and cells with numbers.

    Args:
        label: Head of the row.
        cells: The numbers as text.

    Returns:
        HTML.
    """
    numbers = "".join(f'<td class="number">{cell}</td>' for cell in cells)
    return f'<tr><th scope="row">{text(label)}</th>{numbers}</tr>'


def table_head(*names: str) -> str:
    """Return the head of a table of numbers."""
    return "".join(f'<th class="number" scope="col">{text(name)}</th>' for name in names)


def time(groups: Sequence[Group]) -> str:
    """Show the seconds of a round by part, before and after FedCOG begins to generate."""
    bars = []
    for each in groups:
        for label, records in _phases(each).items():
            seconds = run_values.mean_seconds(records)
            if seconds:
                bars.append((label, seconds))
    if not bars:
        return "<p>No round is finished, so no time has been measured.</p>"
    caption = (
        "Mean wall-clock seconds of a round, over rounds and seeds. Other: sampling, aggregation, "
        "bookkeeping."
    )
    return figure(figures.time_figure(bars), caption)


def _phases(each: Group) -> dict[str, list[RoundLine]]:
    """The rounds of a group; two phases if FedCOG begins to generate in between."""
    records = [record for run in each.runs for record in run.lines]
    first = run_values.first_generating_round(each.runs[0].experiment)
    if first is None or first <= 1 or not any(record["round"] >= first for record in records):
        return {each.label: records}
    return {
        f"{each.label}, rounds 1 to {first - 1}": [
            record for record in records if record["round"] < first
        ],
        f"{each.label}, from round {first}": [
            record for record in records if record["round"] >= first
        ],
    }
