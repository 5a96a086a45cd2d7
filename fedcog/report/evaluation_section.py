"""The section about the clients' own test examples, and the table of further metrics."""

from collections.abc import Mapping, Sequence

from fedcog.core.tasks import METRIC_LABELS
from fedcog.report import figures, run_values
from fedcog.report.figures import Curve, line_style
from fedcog.report.markup import NO_VALUE, figure, table
from fedcog.report.run_values import RoundLine
from fedcog.report.sections import table_head, table_row
from fedcog.runs.records.recorded_run import Run
from fedcog.runs.records.summary import Group, spread

SUFFIXES = ("", "_mean", "_worst", "_deviation")
"""Suffixes of the scores on the clients' test examples, in the order of the table."""
MAX_CLIENT_ROWS = 1000
"""A table by client with more rows is left out."""


def client_tests(groups: Sequence[Group]) -> str:
    """Show how models do on the clients' own test examples; empty if it was not measured."""
    rows = ""
    for each in groups:
        metric = each.runs[0].metric
        for model, prefix in (("global model", ""), ("personal models", "personal_")):
            names = [f"{prefix}{metric}{suffix}" for suffix in SUFFIXES]
            values = [each.local_test(name) for name in names]
            if values[0] is not None:
                cells = [NO_VALUE if value is None else value.percent() for value in values]
                rows += table_row(f"{each.label}, {model}", cells)
    if not rows:
        return ""
    head = table_head(
        "", "all examples (%)", "mean of clients (%)", "worst tenth (%)", "deviation (points)"
    )
    content = (
        "<p>Every client has test examples of its own, and all clients are evaluated, not only "
        "those of the round. <em>All examples</em> weighs clients by their number of test "
        "examples, <em>mean of clients</em> weighs them alike, <em>worst tenth</em> is the mean "
        "over the tenth of the clients with the lowest scores, <em>deviation</em> is the standard "
        "deviation over clients. After the last evaluated round; mean ± sample standard deviation "
        f"over seeds.</p>{table(head, rows)}"
    )
    label = METRIC_LABELS[groups[0].runs[0].metric]
    curves = _client_test_curves(groups, "")
    for index, curve in enumerate(_client_test_curves(groups, "personal_"), len(groups)):
        curves.append(curve._replace(style=line_style(index)))
    plot = figures.curves_figure(curves, f"{label} (%)", percent=True)
    caption = "Mean over clients, on their own test examples; band ± one deviation over seeds."
    return content + figure(plot, caption) + _scores_by_client(groups)


def _scores_by_client(groups: Sequence[Group]) -> str:
    """The global model's score on every client's test examples, folded away."""
    rows: dict[str, dict[str, list[float]]] = {}
    for each in groups:
        for run in each.runs:
            scores = _last_client_scores(run)
            labels = run_values.client_labels(run, run.experiment.num_clients)
            for client_id, score in scores.items():
                label = labels[client_id] if client_id < len(labels) else str(client_id)
                rows.setdefault(label, {}).setdefault(each.label, []).append(score)
    if not rows or len(rows) > MAX_CLIENT_ROWS:
        return ""
    lines = "".join(
        table_row(
            label,
            [
                spread(scores[each.label]).percent() if each.label in scores else NO_VALUE
                for each in groups
            ],
        )
        for label, scores in rows.items()
    )
    head = table_head("client", *(f"{each.label} (%)" for each in groups))
    return f"<details><summary>By client</summary>{table(head, lines)}</details>"


def _last_client_scores(run: Run) -> dict[int, float]:
    """Return the score of the global model by client, after the last evaluated round."""
    for line in reversed(run.lines):
        clients = (line.get("local_test") or {}).get("clients") or {}
        scores = clients.get(run.metric)
        if scores:
            pairs = zip(clients["ids"], scores, strict=False)
            return {client_id: score for client_id, score in pairs if score is not None}
    return {}


def _client_test_curves(groups: Sequence[Group], prefix: str) -> list[Curve]:
    """Curves of the mean over clients, for the global model or personal models."""

    def _value(record: RoundLine) -> list[float | None]:
        local_test = record.get("local_test") or {}
        return [local_test.get(f"{prefix}{name}_mean") for name in METRIC_LABELS]

    name = "personal models" if prefix else "global model"
    return [
        curve._replace(label=f"{curve.label}, {name}")
        for curve in run_values.curves(groups, _value)
    ]


def metrics_table(groups: Sequence[Group]) -> str:
    """Show further metrics on the test set after the last round; empty if there are none."""
    values = [[_last_metrics(run) for run in each.runs] for each in groups]
    names = list(dict.fromkeys(name for own in values for metrics in own for name in metrics))
    if not names:
        return ""
    rows = "".join(
        table_row(each.label, [_metric_cell(own, name) for name in names])
        for each, own in zip(groups, values, strict=True)
    )
    return (
        "<h3>Further metrics</h3><p>After the last evaluated round; mean ± sample standard "
        f"deviation over seeds.</p>{table(table_head('', *names), rows)}"
    )


def _metric_cell(values: Sequence[Mapping[str, float]], name: str) -> str:
    """Return mean and deviation of a metric over the runs that have it."""
    numbers = [metrics[name] for metrics in values if name in metrics]
    if not numbers:
        return NO_VALUE
    value = spread(numbers)
    deviation = "" if value.deviation is None else f" ± {value.deviation:.4f}"
    return f"{value.mean:.4f}{deviation}"


def _last_metrics(run: Run) -> dict[str, float]:
    """Return the further metrics of the last round that has any."""
    for line in reversed(run.lines):
        metrics = line.get("metrics") or {}
        numbers = {
            name: float(value) for name, value in metrics.items() if isinstance(value, float | int)
        }
        if numbers:
            return numbers
    return {}
