"""The page as a whole: what was run, what to beware of, the results, the curves, and then the sections."""

import itertools
import math
import re
import statistics
from collections.abc import Sequence
from pathlib import Path

from fedcog.experiments.measures import cost_to
from fedcog.experiments.report import figures, pictures, provenance, readings, sections
from fedcog.experiments.report.figures import look
from fedcog.experiments.report.markup import NONE, document, figure, key, listed, numbered, short, table, text
from fedcog.experiments.report.readings import Federation
from fedcog.experiments.run import Run, read
from fedcog.experiments.summary import Group, group, spread
from fedcog.task import MEASURES, measure_of

NAMES = 6  # of more, a title only tells how many
LABEL = 40  # a longer one is written out in the table only, and a number stands for it elsewhere


def page(paths: Sequence[Path], *, title: str | None = None, target: float | None = None) -> str:
    """One HTML page about the runs in `paths`, several seeds of several algorithms together.

    `target` is the share of right answers that rounds are counted to; without it, what the first group nearly reached.
    """
    if not paths:
        raise ValueError("a page needs at least one run directory.")
    if target is not None and not 0 < target <= 1:
        raise ValueError(f"the target is a share above 0 and up to 1, such as 0.6, not {target:g}.")
    runs = [read(path) for path in dict.fromkeys(Path(path).resolve() for path in paths)]
    groups, federations = group(runs), [readings.federation(run) for run in runs]
    aim = target or _target(groups)
    full = [each.label for each in groups]
    if max(len(label) for label in full) > LABEL:
        groups = [Group(f"{n}: {readings.name(each.runs[0])}", each.runs) for n, each in enumerate(groups, 1)]
    names = list(dict.fromkeys(readings.name(run) for run in runs))
    shown = listed(names) if len(names) <= NAMES else f"{len(names)} algorithms"
    title = title or f"{shown} on {listed(readings.datasets(runs, federations))}"
    parts = [
        ("scores", f"{_capital(_measure(groups))} over rounds", _scores(groups)),
        ("partition", "Who holds what", sections.partition(runs, federations)),
        ("generated", "Generated inputs", pictures.generated(runs)),
        ("clients", "Clients", sections.clients(groups)),
        ("traffic", "What was sent", sections.traffic(groups) + sections.costs(groups, aim)),
        ("time", "Where time goes", sections.time(groups)),
        ("settings", "Settings", provenance.choices(groups) + provenance.making(runs)),
    ]
    links = "".join(f'<a href="#{name}">{heading}</a>' for name, heading, _ in parts)
    body = "".join(f'<section id="{name}"><h2>{heading}</h2>{content}</section>' for name, heading, content in parts)
    number = itertools.count(1)
    body = re.sub('<svg role="img".*?</svg>', lambda svg: numbered(svg[0], next(number)), body, flags=re.DOTALL)
    lead = f"{_words(groups, runs, federations)}{_faults(groups)}{_results(groups, full, target)}"
    return document(title, f'{lead}<nav aria-label="Contents">{links}</nav>{body}')


def _words(groups: Sequence[Group], runs: Sequence[Run], federations: Sequence[Federation]) -> str:
    """What was run, in sentences."""
    experiments, names = [run.experiment for run in runs], {readings.name(run): None for run in runs}
    several = f"{len(groups)} settings of " if len(groups) > len(names) else ""
    compared = f"Compared here: {several}{listed(names)}. " if len(groups) > 1 and len(names) <= NAMES else ""
    clients = listed(
        tensors["counts"].shape[0] if "counts" in tensors else experiment.clients
        for experiment, (tensors, _) in zip(experiments, federations, strict=True)
    )
    tests = listed(about["test_examples"] for _, about in federations if "test_examples" in about)
    data = f"{listed(readings.datasets(runs, federations))}" + (f" ({tests} test examples)" if tests else "")
    networks = listed(
        f"{about['model']} ({about['parameters']:,} parameters)"
        for _, about in federations
        if {"model", "parameters"} <= about.keys()
    )
    effort = listed(
        f"{each.local_epochs:g} local epochs" if each.local_epochs else f"{each.local_steps} local steps"
        for each in experiments
    )
    shares = listed(f"{100 * each.participation:g} %" for each in experiments)
    words = (
        f"{compared}Data: {data}, shared out among {clients} clients "
        f"({listed(each.partition_rule for each in experiments)}). "
        f"{listed(each.rounds for each in experiments)} rounds of {effort} in batches of "
        f"{listed(each.batch_size for each in experiments)}; {shares} of the clients take part in a round. "
        + (f"Network: {networks}." if networks else "")
    )
    return f"<p>{text(words)}</p>"


def _faults(groups: Sequence[Group]) -> str:
    """What a reader must know before believing the table: rounds that are missing, seeds that come twice."""
    behind = [
        f"{each.label}, seed {run.experiment.seed}: {len(run.lines)} of {run.experiment.rounds} rounds"
        for each in groups
        for run in each.runs
        if len(run.lines) < run.experiment.rounds
    ]
    found = [f"Unfinished: {'; '.join(behind)}."] if behind else []
    found += [
        f"{e.label}, seed {run.experiment.seed}: {run.diverged}" for e in groups for run in e.runs if run.diverged
    ]
    for each in groups:
        seeds = {run.experiment.seed for run in each.runs}
        if len(seeds) < len(each.runs):
            words = (
                f"{each.label}: {len(each.runs)} runs but {len(seeds)} different seeds, so they are not independent."
            )
            found.append(words)
        left_out = sum(len(line.get("skipped", ())) for run in each.runs for line in run.lines)
        if left_out:
            found.append(f"{each.label}: {left_out} times a client was left out of a round: its update was not finite.")
        refused = [one for run in each.runs for line in run.lines for one in line.get("refused", ())]
        if refused:
            found.append(
                f"{each.label}: {len(refused)} times a round went on without a client; the first time, client "
                f"{refused[0]['client']}: {refused[0]['why']}"
            )
    return "".join(f'<p class="warning">{text(words)}</p>' for words in found)


def _results(groups: Sequence[Group], full: Sequence[str], target: float | None) -> str:
    """The table of results, a row for each group."""
    if not any(run.scores for each in groups for run in each.runs):
        return "<p>No round has been evaluated yet, so there are no results.</p>"
    given, target = target is not None, target or _target(groups)
    rows = []
    for number, (each, label) in enumerate(zip(groups, full, strict=True)):
        scored = [run for run in each.runs if run.scores]
        last, best = (_percent([getattr(run, name) for run in scored]) for name in ("last", "best"))
        own = each.personal[0].percent() if each.personal else NONE
        seconds = readings.seconds([line for run in each.runs for line in run.lines])
        whole = short(sum(seconds.values())) if seconds else NONE
        reached = _rounds_to(scored, target) if target else NONE
        seeds = listed(run.experiment.seed for run in each.runs)
        cells = "".join(f'<td class="number">{cell}</td>' for cell in (last, best, own, reached, seeds, whole))
        more = "" if each.label == label else f"<br><small>{text(label)}</small>"
        rows.append(f'<tr><th scope="row" class="keyed">{key(*look(number))}{text(each.label)}{more}</th>{cells}</tr>')
    aim = f"Rounds to {100 * target:g}\N{NO-BREAK SPACE}%" if target else "Rounds to target"
    name = _measure(groups)
    heads = [f"Last {name} (%)", f"Best {name} (%)", "Personal, last (%)", aim, "Seeds"]
    heads += ["Seconds per round"]
    head = "<th>Algorithm</th>" + "".join(f'<th class="number" scope="col">{name}</th>' for name in heads)
    chosen = "as asked for" if given else f"the last {name} of {text(groups[0].label)}, rounded down"
    every = sorted({run.experiment.evaluate_every for each in groups for run in each.runs} - {1})
    coarse = f" Evaluated only every {listed(every)} rounds: it may have been met earlier." if every else ""
    return (
        f"{table(head, ''.join(rows))}"
        f'<p class="note">{_capital(name)} on the test set: mean ± sample standard deviation over seeds. '
        "<em>Last</em> is after the last round evaluated. <em>Best</em> is the highest of all rounds, chosen on the "
        "test set itself, and therefore optimistic: read it as what papers print, not as what to expect. "
        "<em>Personal</em> is the clients' own models (of a method that has none, the global one after local training: "
        "fine-tuned), each on its client's own label mix, mean over the round's clients. "
        + (f"Rounds to the target ({chosen}): median over seeds.{coarse}" if target else "")
        + "</p>"
    )


def _target(groups: Sequence[Group]) -> float | None:
    """What the first group nearly reached: its last score rounded down to 5 %, or to 1 % below that."""
    first = next((each for each in groups if any(run.scores for run in each.runs)), None)
    if first is None:
        return None
    percent = 100 * statistics.fmean(run.last for run in first.runs if run.scores)
    return next((step * (percent // step) / 100 for step in (5, 1) if percent >= step), None)


def _rounds_to(runs: Sequence[Run], target: float) -> str:
    """The median over seeds; a seed that never got there counts as beyond its last round."""
    found = [cost.round if (cost := cost_to(run, target)) else None for run in runs]
    reached = [round for round in found if round is not None]
    if not reached:
        unfinished = any(len(run.lines) < run.experiment.rounds for run in runs)
        return ("not yet" if unfinished else "never") if runs else NONE
    middle = statistics.median(math.inf if round is None else round for round in found)
    beyond = min((run.scores[-1][0] for run, round in zip(runs, found, strict=True) if round is None), default=0)
    words = f"{middle:g}" if math.isfinite(middle) else f"&gt; {beyond}"
    return words if len(reached) == len(found) else f"{words} ({len(reached)} of {len(found)} seeds)"


def _percent(values: Sequence[float]) -> str:
    return spread(values).percent() if values else NONE


def _measure(groups: Sequence[Group]) -> str:
    """What the runs are judged by."""
    return " or ".join(dict.fromkeys(MEASURES[run.measure] for each in groups for run in each.runs))


def _capital(words: str) -> str:
    return words[0].upper() + words[1:]


def _scores(groups: Sequence[Group]) -> str:
    wakes, name = readings.wakes(groups), _measure(groups)
    scores = readings.curves(groups, lambda line: [line.get(measure_of(line))])
    if not scores:
        return "<p>No round has been evaluated yet.</p>"
    band = " The band is ± one standard deviation over seeds." if any(len(each.runs) > 1 for each in groups) else ""
    ragged = any(len({len(run.lines) for run in each.runs}) > 1 for each in groups)
    uneven = " Some seeds have fewer rounds than others: late means are over fewer seeds." if ragged else ""
    mark = f" FedCOG begins to generate in round {listed(wakes)} (upright line)." if wakes else ""
    drawn = figure(
        figures.curves_figure(scores, f"test {name} (%)", size=(4.8, 3.3), percent=True, marks=wakes),
        f"{_capital(name)} of the global model on the test set after each round, mean over seeds.{band}{mark}{uneven}",
    )
    spent = readings.curves(groups, lambda line: [(line.get("privacy") or {}).get("epsilon")])
    words = dict.fromkeys(run.privacy for each in groups for run in each.runs if run.privacy)
    private = "".join(f"<p>{text(_capital(one))}.</p>" for one in words)
    loss = readings.curves(groups, lambda line: [line.get("loss")])
    if loss:
        drawn += figure(
            figures.curves_figure(loss, "training loss", size=(4.0, 3.3), marks=wakes),
            "Loss in local training, averaged over the round's clients by their weight."
            + (" Once FedCOG generates, it is the weighted sum of two losses: another scale." if wakes else ""),
        )
    if spent:
        drawn += figure(
            figures.curves_figure(spent, "epsilon", size=(4.0, 3.3)),
            "What of a client's differential privacy is spent after each round, at the delta told above.",
        )
    return f'{private}<div class="figures uneven">{drawn}</div>'
