"""The report about one run or several: summary, warnings, results, curves, and further sections."""

import itertools
import math
import re
import statistics
from collections.abc import Sequence
from pathlib import Path

from fedcog.core.tasks import METRIC_LABELS, metric_of
from fedcog.report import evaluation_section, figures, run_values, sections
from fedcog.report.figures import line_style
from fedcog.report.image_section import generated_section
from fedcog.report.markup import (
    NO_VALUE,
    document,
    figure,
    format_seconds,
    join_words,
    line_sample,
    table,
    text,
    with_unique_ids,
)
from fedcog.report.provenance_section import provenance_section, settings_section
from fedcog.report.run_values import FederationRecord
from fedcog.runs.records.derived_metrics import cost_to
from fedcog.runs.records.recorded_run import Run, read
from fedcog.runs.records.summary import Group, group, spread

MAX_NAMES = 6
"""A title names up to this many algorithms."""
MAX_LABEL_LENGTH = 40
"""If a label is longer, only the table of results has it in full."""


def page(paths: Sequence[Path], *, title: str | None = None, target: float | None = None) -> str:
    """Build one HTML page about several runs: seeds of the same settings form a group.

    Args:
        paths: The run directories.
        title: Title of the page; by default the algorithms and data sets.
        target: The score, from 0 to 1, to which rounds are counted. By default slightly less than
            the last score of the first group.

    Returns:
        A self-contained page.

    Raises:
        ValueError: There is no run, or the target is out of range.
        RecordError: A run directory cannot be read.
    """
    if not paths:
        raise ValueError("a page needs at least one run directory.")
    if target is not None and not 0 < target <= 1:
        raise ValueError(f"target needs a share above 0 and up to 1, such as 0.6, not {target:g}.")
    runs = [read(path) for path in dict.fromkeys(Path(path).resolve() for path in paths)]
    groups = group(runs)
    federations = [run_values.federation(run) for run in runs]
    effective_target = target or _default_target(groups)
    full_labels = [each.label for each in groups]
    if max(len(label) for label in full_labels) > MAX_LABEL_LENGTH:
        groups = [
            each._replace(label=f"{number}: {run_values.algorithm_of(each.runs[0])}")
            for number, each in enumerate(groups, 1)
        ]
    parts = _parts(groups, runs, federations, effective_target)
    links = "".join(f'<a href="#{name}">{heading}</a>' for name, heading, _ in parts)
    body = "".join(
        f'<section id="{name}"><h2>{heading}</h2>{content}</section>'
        for name, heading, content in parts
    )
    lead = (
        f"{_summary(groups, runs, federations)}{_warnings(groups)}"
        f"{_results(groups, full_labels, target)}"
    )
    return document(
        title or _default_title(runs, federations),
        f'{lead}<nav aria-label="Contents">{links}</nav>{_with_unique_ids(body)}',
    )


def _parts(
    groups: list[Group],
    runs: list[Run],
    federations: list[FederationRecord],
    target: float | None,
) -> list[tuple[str, str, str]]:
    """Return the id, heading and content of each section that is not empty."""
    parts = [
        (
            "scores",
            f"{_capitalize(_metric_name(groups))} over rounds",
            _scores_section(groups) + evaluation_section.metrics_table(groups),
        ),
        ("partition", "Partition", sections.partition(runs, federations)),
        ("generated", "Generated inputs", generated_section(runs)),
        ("client-tests", "Clients' own test examples", evaluation_section.client_tests(groups)),
        ("clients", "Clients", sections.clients(groups)),
        (
            "traffic",
            "Communication",
            sections.traffic(groups) + sections.costs(groups, target),
        ),
        ("time", "Time", sections.time(groups)),
        (
            "settings",
            "Settings",
            settings_section(groups) + provenance_section(runs, federations),
        ),
    ]
    return [part for part in parts if part[2]]


def _with_unique_ids(body: str) -> str:
    """Number the figures of a page, and make their ids unique."""
    number = itertools.count(1)
    return re.sub(
        '<svg role="img".*?</svg>',
        lambda svg: with_unique_ids(svg[0], next(number)),
        body,
        flags=re.DOTALL,
    )


def _default_title(runs: Sequence[Run], federations: Sequence[FederationRecord]) -> str:
    names = list(dict.fromkeys(run_values.algorithm_of(run) for run in runs))
    shown = join_words(names) if len(names) <= MAX_NAMES else f"{len(names)} algorithms"
    return f"{shown} on {join_words(run_values.datasets(runs, federations))}"


def _summary(
    groups: Sequence[Group], runs: Sequence[Run], federations: Sequence[FederationRecord]
) -> str:
    """Say what was run, in sentences."""
    experiments = [run.experiment for run in runs]
    names = {run_values.algorithm_of(run): None for run in runs}
    compared = ""
    if len(groups) > 1 and len(names) <= MAX_NAMES:
        count = f"{len(groups)} settings of " if len(groups) > len(names) else ""
        compared = f"Compared here: {count}{join_words(names)}. "
    clients = join_words(
        tensors["counts"].shape[0] if "counts" in tensors else experiment.clients
        for experiment, (tensors, _) in zip(experiments, federations, strict=True)
    )
    data = join_words(run_values.datasets(runs, federations))
    tests = join_words(
        about["test_examples"] for _, about in federations if "test_examples" in about
    )
    if tests:
        data += f" ({tests} test examples)"
    networks = join_words(
        f"{about['model']} ({about['parameters']:,} parameters)"
        for _, about in federations
        if {"model", "parameters"} <= about.keys()
    )
    work = join_words(
        f"{each.local_epochs:g} local epochs"
        if each.local_epochs
        else f"{each.local_steps} local steps"
        for each in experiments
    )
    shares = join_words(f"{100 * each.participation:g} %" for each in experiments)
    sentences = (
        f"{compared}Data: {data}, split among {clients} clients "
        f"({join_words(each.partition_rule for each in experiments)}). "
        f"{join_words(each.rounds for each in experiments)} rounds of {work} with batch size "
        f"{join_words(each.batch_size for each in experiments)}; {shares} of the clients take "
        "part in a round. "
    )
    if networks:
        sentences += f"Network: {networks}."
    return f"<p>{text(sentences)}</p>"


def _warnings(groups: Sequence[Group]) -> str:
    """Warn of missing rounds, divergence, repeated seeds and clients left out."""
    unfinished = [
        f"{each.label}, seed {run.experiment.seed}: {len(run.lines)} of "
        f"{run.experiment.rounds} rounds"
        for each in groups
        for run in each.runs
        if len(run.lines) < run.experiment.rounds
    ]
    warnings = [f"Unfinished: {'; '.join(unfinished)}."] if unfinished else []
    warnings += [
        f"{each.label}, seed {run.experiment.seed}: {run.diverged}"
        for each in groups
        for run in each.runs
        if run.diverged
    ]
    for each in groups:
        warnings += _group_warnings(each)
    return "".join(f'<p class="warning">{text(warning)}</p>' for warning in warnings)


def _group_warnings(each: Group) -> list[str]:
    warnings = []
    for run in each.repeated:
        warnings.append(
            f"{each.label}: of several runs with seed {run.experiment.seed}, the first counts; "
            f"{run.path} does not."
        )
    records = [record for run in each.runs for record in run.lines]
    num_skipped = sum(len(record.get("skipped", ())) for record in records)
    if num_skipped:
        warnings.append(
            f"{each.label}: {num_skipped} updates were left out because they were not finite."
        )
    refused = [client for record in records for client in record.get("refused", ())]
    if refused:
        warnings.append(
            f"{each.label}: {len(refused)} times a round continued without a client; the first "
            f"time without client {refused[0]['client']}: {refused[0]['why']}"
        )
    return warnings


def _results(groups: Sequence[Group], full_labels: Sequence[str], target: float | None) -> str:
    """The table of results, with one row for each group."""
    if not any(run.scores for each in groups for run in each.runs):
        return "<p>No round has been evaluated yet, so there are no results.</p>"
    effective_target = target or _default_target(groups)
    rows = ""
    for index, (each, full_label) in enumerate(zip(groups, full_labels, strict=True)):
        cells = "".join(
            f'<td class="number">{cell}</td>' for cell in _result_cells(each, effective_target)
        )
        more = "" if each.label == full_label else f"<br><small>{text(full_label)}</small>"
        rows += (
            f'<tr><th scope="row" class="keyed">{line_sample(*line_style(index))}'
            f"{text(each.label)}{more}</th>{cells}</tr>"
        )
    name = _metric_name(groups)
    target_head = "Rounds to target"
    if effective_target:
        target_head = f"Rounds to {100 * effective_target:g}\N{NO-BREAK SPACE}%"
    heads = [
        f"Last {name} (%)",
        f"Best {name} (%)",
        "Label mix, last (%)",
        target_head,
        "Seeds",
        "Seconds per round",
    ]
    head = "<th>Algorithm</th>" + "".join(
        f'<th class="number" scope="col">{word}</th>' for word in heads
    )
    target_note = _target_note(groups, target) if effective_target else ""
    return (
        f"{table(head, rows)}"
        f'<p class="note">{_capitalize(name)} on {text(_test_examples(groups))}: mean ± sample '
        "standard deviation over seeds. <em>Last</em> is after the last evaluated round. "
        "<em>Best</em> is the highest of all rounds. It is chosen on the test set and therefore "
        "optimistic; papers often report it. <em>Label mix</em> is the score of the clients' "
        "models on the test set, with every class weighted by its share of the client's "
        "examples, averaged over the clients of a round: personal models if the method has them, "
        f"else local models. {target_note}</p>"
    )


def _test_examples(groups: Sequence[Group]) -> str:
    """Name the examples that scores are of."""
    names = dict.fromkeys(run.test_examples for each in groups for run in each.runs)
    return " or ".join(names)


def _result_cells(each: Group, target: float | None) -> list[str]:
    """The cells of one group, without its label."""
    scored = [run for run in each.runs if run.scores]
    seconds = run_values.mean_seconds([record for run in each.runs for record in run.lines])
    return [
        _percent([run.last for run in scored]),
        _percent([run.best for run in scored]),
        each.label_mix[0].percent() if each.label_mix else NO_VALUE,
        _rounds_to(scored, target) if target else NO_VALUE,
        join_words(run.experiment.seed for run in each.runs),
        format_seconds(sum(seconds.values())) if seconds else NO_VALUE,
    ]


def _target_note(groups: Sequence[Group], target: float | None) -> str:
    """Explain the column of rounds to the target."""
    origin = "as requested"
    if target is None:
        origin = f"the last {_metric_name(groups)} of {text(groups[0].label)}, rounded down"
    note = f"Rounds to the target ({origin}): median over seeds."
    intervals = {run.experiment.evaluate_every for each in groups for run in each.runs}
    coarse = sorted(intervals - {1})
    if coarse:
        note += (
            f" Evaluated only every {join_words(coarse)} rounds: it may have been reached earlier."
        )
    return note


def _default_target(groups: Sequence[Group]) -> float | None:
    """The last score of the first group, rounded down to 5 %, or to 1 % below that."""
    first = next((each for each in groups if any(run.scores for run in each.runs)), None)
    if first is None:
        return None
    percent = 100 * statistics.fmean(run.last for run in first.runs if run.scores)
    return next((step * (percent // step) / 100 for step in (5, 1) if percent >= step), None)


def _rounds_to(runs: Sequence[Run], target: float) -> str:
    """The median over seeds; a seed that never reached it counts as beyond its last round."""
    if not runs:
        return NO_VALUE
    costs = [cost_to(run, target) for run in runs]
    rounds = [math.inf if cost is None else cost.round for cost in costs]
    num_reached = sum(math.isfinite(round) for round in rounds)
    if not num_reached:
        is_unfinished = any(len(run.lines) < run.experiment.rounds for run in runs)
        return "not yet" if is_unfinished else "never"
    median = statistics.median(rounds)
    words = f"{median:g}"
    if math.isinf(median):
        last_rounds = [
            run.scores[-1][0] for run, cost in zip(runs, costs, strict=True) if cost is None
        ]
        words = f"&gt; {min(last_rounds)}"
    if num_reached < len(runs):
        words += f" ({num_reached} of {len(runs)} seeds)"
    return words


def _percent(values: Sequence[float]) -> str:
    return spread(values).percent() if values else NO_VALUE


def _metric_name(groups: Sequence[Group]) -> str:
    """The score that the runs are judged by."""
    names = dict.fromkeys(METRIC_LABELS[run.metric] for each in groups for run in each.runs)
    return " or ".join(names)


def _capitalize(words: str) -> str:
    return words[0].upper() + words[1:]


def _scores_section(groups: Sequence[Group]) -> str:
    """Curves of the score, the training loss and the spent privacy."""
    starts = run_values.generation_starts(groups)
    name = _metric_name(groups)
    scores = run_values.curves(groups, lambda record: [record.get(metric_of(record))])
    if not scores:
        return "<p>No round has been evaluated yet.</p>"
    score_plot = figures.curves_figure(
        scores, f"test {name} (%)", size=(4.8, 3.3), percent=True, marks=starts
    )
    drawn = figure(score_plot, _score_caption(groups, name, starts))
    drawn += _virtual_time_figure(groups, name)
    drawn += _attack_figure(groups, starts)
    losses = run_values.curves(groups, lambda record: [record.get("loss")])
    if losses:
        caption = "Loss in local training, weighted mean over the round's clients."
        if starts:
            caption += (
                " Once FedCOG generates, it is the weighted sum of two losses: another scale."
            )
        plot = figures.curves_figure(losses, "training loss", size=(4.0, 3.3), marks=starts)
        drawn += figure(plot, caption)
    if rates := run_values.curves(groups, lambda record: [record.get("lr")]):
        plot = figures.curves_figure(rates, "learning rate", size=(4.0, 3.3))
        drawn += figure(plot, "Local learning rate of each round.")
    epsilons = run_values.curves(
        groups, lambda record: [(record.get("privacy") or {}).get("epsilon")]
    )
    if epsilons:
        drawn += figure(
            figures.curves_figure(epsilons, "epsilon", size=(4.0, 3.3)),
            "Differential privacy of a client that is spent after each round, at the delta above.",
        )
    sentences = dict.fromkeys(run.privacy for each in groups for run in each.runs if run.privacy)
    privacy = "".join(f"<p>{text(_capitalize(sentence))}.</p>" for sentence in sentences)
    return f'{privacy}<div class="figures uneven">{drawn}</div>'


def _virtual_time_figure(groups: Sequence[Group], name: str) -> str:
    """Curves of the score over virtual seconds; empty if no run has recorded them."""
    scores = run_values.curves_over_virtual_time(
        groups, lambda record: [record.get(metric_of(record))]
    )
    if not scores:
        return ""
    plot = figures.curves_figure(
        scores, f"test {name} (%)", size=(4.8, 3.3), percent=True, axis="virtual seconds"
    )
    caption = (
        f"{_capitalize(name)} against virtual time, in which a client takes its number of local "
        "steps divided by its speed. A synchronous round ends with its slowest client, an "
        "asynchronous one when enough answers have arrived. Mean over seeds of each round, at "
        "their mean time."
    )
    return figure(plot, caption)


def _attack_figure(groups: Sequence[Group], starts: Sequence[int]) -> str:
    """Curves of the attacks' success; empty if no run has recorded it."""
    successes = run_values.curves(groups, lambda record: [record.get("attack_success")])
    if not successes:
        return ""
    plot = figures.curves_figure(
        successes, "attack success (%)", size=(4.8, 3.3), percent=True, marks=starts
    )
    caption = (
        "Share of test examples that the global model decides as the attack wants, among those "
        "whose label it wants changed: with the trigger for a backdoor, as they are for a label "
        "flip. The accuracy beside is that on clean test examples."
    )
    return figure(plot, caption)


def _score_caption(groups: Sequence[Group], name: str, starts: Sequence[int]) -> str:
    caption = (
        f"{_capitalize(name)} of the global model on {_test_examples(groups)} after each round, "
        "mean over seeds."
    )
    if any(len(each.runs) > 1 for each in groups):
        caption += " The band is ± one standard deviation over seeds."
    if starts:
        caption += f" FedCOG begins to generate in round {join_words(starts)} (vertical line)."
    if any(len({len(run.lines) for run in each.runs}) > 1 for each in groups):
        caption += " Some seeds have fewer rounds than others: late means are over fewer seeds."
    return caption
