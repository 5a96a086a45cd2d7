"""A page about one run or several, whole in itself: read from run files, with nothing computed and nothing fetched."""

import base64
import html
import io
import itertools
import math
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor

from fedcog import settings
from fedcog.algorithms import FedCOG
from fedcog.experiments import figures
from fedcog.experiments.config import Experiment, layers, name_of
from fedcog.experiments.figures import Curve, look, partition_figure, printable
from fedcog.experiments.record import RecordError, RunDirectory
from fedcog.experiments.run import Run, read
from fedcog.experiments.summary import Group, Spread, group, rounds_to, spread

Line = dict[str, Any]

NONE = "\N{EN DASH}"
LABEL = 40  # a longer one is written out in the table only, and a number stands for it elsewhere
PARTITIONS = 6  # more are only counted
CELLS = 20_000  # a table of more is left out: it weighs megabytes, and nobody reads it

CSS = """
:root { color-scheme: light dark; --ink: #1f2328; --soft: #59636e; --line: #d6dade; --paper: #fff; --mark: #fff4d6; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8ea; --soft: #a0a8b0; --line: #3b4148; --paper: #16191d; --mark: #4a3c12; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 62rem; color: var(--ink); background: var(--paper);
  font: 1rem/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  overflow-wrap: break-word; -webkit-text-size-adjust: 100%; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 .6rem; }
h2 { font-size: 1.25rem; margin: 2.8rem 0 .8rem; padding-top: 1rem; border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.8rem 0 .6rem; }
p { max-width: 44rem; margin: .6rem 0; }
p.note, figcaption { color: var(--soft); font-size: .875rem; line-height: 1.45; }
p.warning { padding: .5rem .8rem; border-left: 3px solid #d55e00; background: var(--mark); }
code { font: .875em/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; overflow-wrap: anywhere; }
nav { font-size: .875rem; margin: 1rem 0; }
nav a { color: inherit; margin-right: 1rem; white-space: nowrap; }
.figures { display: grid; gap: 1.2rem; align-items: start; }
.figures { grid-template-columns: repeat(auto-fill, minmax(min(100%, 24rem), 1fr)); }
.figures.uneven { grid-template-columns: 1fr; }
figure { margin: 0; max-width: 36rem; min-width: 0; }
figure > svg { display: block; width: 100%; height: auto; background: #fff; border: 1px solid var(--line);
  border-radius: .5rem; padding: .5rem; }
figure > svg text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif !important; }
figcaption { margin-top: .4rem; }
.scroll { overflow-x: auto; max-width: 100%; margin: .8rem 0; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .9rem .35rem 0; border-bottom: 1px solid var(--line); text-align: left; }
th, td { vertical-align: baseline; }
small { font-weight: 400; color: var(--soft); }
thead th { font-weight: 600; color: var(--soft); font-size: .8rem; line-height: 1.3; vertical-align: bottom; }
tbody th { font-weight: 600; }
th code { white-space: nowrap; font-weight: 400; }
td.number, th.number { text-align: right; white-space: nowrap; }
th.number { white-space: normal; }
tr.differs th, tr.differs td { background: var(--mark); }
tr.differs th { padding-left: .5rem; }
.counts table { font-size: .75rem; }
.counts th, .counts td { padding: .15rem .6rem .15rem 0; }
th.keyed { padding-left: 36px; }
.key { vertical-align: middle; margin: 0 8px 0 -36px; }
.zero { color: var(--soft); opacity: .5; }
details { margin: .6rem 0; }
summary { cursor: pointer; font-size: .875rem; color: var(--soft); }
.pictures { width: 100%; table-layout: fixed; }
.pictures th, .pictures td { border: 0; padding: 1px; text-align: center; font-size: .75rem; line-height: 1.2;
  font-weight: 400; hyphens: auto; overflow-wrap: anywhere; vertical-align: middle; color: var(--soft); }
.pictures thead th { vertical-align: bottom; padding-bottom: .25rem; font-size: .66rem; }
.pictures tbody th { text-align: right; padding-right: .4rem; }
.pictures tr.real td, .pictures tr.real th { padding-top: .6rem; }
.pictures img { display: block; width: 100%; height: auto; border-radius: 2px; }
.pictures img.small { image-rendering: pixelated; }
@media (min-width: 52rem) { .figures.uneven { grid-template-columns: 3fr 2fr; } }
@media (max-width: 30rem) { h1 { font-size: 1.4rem; } th, td { padding-right: .7rem; } table { font-size: .82rem; } }
@media print {
  :root { color-scheme: light; --ink: #000; --soft: #444; --line: #bbb; --paper: #fff; --mark: #f3ecd8; }
  @page { size: A4; margin: 16mm; }
  body { max-width: none; padding: 0; font-size: 10pt; }
  nav { display: none; }
  h2, h3 { break-after: avoid; }
  h2 { margin-top: 1.2rem; }
  tr, figure { break-inside: avoid; }
  .figures { grid-template-columns: 1fr 1fr; gap: .6rem; }
  .figures.uneven { grid-template-columns: 3fr 2fr; }
  .scroll { overflow: visible; }
  .counts table { font-size: 5.5pt; }
}
"""


def page(paths: Sequence[Path], *, title: str | None = None, target: float | None = None) -> str:
    """One HTML page about the runs in `paths`, several seeds of several algorithms together.

    `target` is the share of right answers that rounds are counted to; without it, what the first group nearly reached.
    """
    if not paths:
        raise ValueError("a page needs at least one run directory.")
    if target is not None and not 0 < target <= 1:
        raise ValueError(f"the target is a share above 0 and up to 1, such as 0.6, not {target:g}.")
    runs = [read(path) for path in dict.fromkeys(Path(path).resolve() for path in paths)]
    groups, federations = group(runs), [_federation(run) for run in runs]
    full = [each.label for each in groups]
    if max(len(label) for label in full) > LABEL:
        groups = [Group(f"{n}: {_name(each.runs[0])}", each.runs) for n, each in enumerate(groups, 1)]
    title = title or f"{_and(_name(run) for run in runs)} on {_and(_datasets(runs, federations))}"
    sections = [
        ("accuracy", "Accuracy over rounds", _accuracy(groups)),
        ("partition", "Who holds what", _partition(runs, federations)),
        ("generated", "Generated inputs", _generated(runs)),
        ("clients", "Clients", _clients(groups)),
        ("time", "Where time goes", _time(groups)),
        ("settings", "Settings", _settings(groups) + _provenance(runs)),
    ]
    links = "".join(f'<a href="#{name}">{heading}</a>' for name, heading, _ in sections)
    body = "".join(f'<section id="{name}"><h2>{heading}</h2>{content}</section>' for name, heading, content in sections)
    number = itertools.count(1)
    body = re.sub('<svg role="img".*?</svg>', lambda svg: _numbered(svg[0], next(number)), body, flags=re.DOTALL)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(title)}</title><style>{CSS}</style></head>\n"
        f"<body><main><h1>{_text(title)}</h1>{_words(runs, federations)}{_faults(groups)}"
        f"{_results(groups, full, target)}"
        f'<nav aria-label="Contents">{links}</nav>{body}</main></body></html>\n'
    )


# Headline


def _words(runs: Sequence[Run], federations: Sequence[tuple[dict[str, Tensor], Line]]) -> str:
    """What was run, in sentences."""
    experiments = [run.experiment for run in runs]
    clients = _and(
        tensors["counts"].shape[0] if "counts" in tensors else experiment.clients
        for experiment, (tensors, _) in zip(experiments, federations, strict=True)
    )
    tests = _and(about["test_examples"] for _, about in federations if "test_examples" in about)
    data = f"{_and(_datasets(runs, federations))}" + (f" ({tests} test examples)" if tests else "")
    networks = _and(
        f"{about['model']} ({about['parameters']:,} parameters)"
        for _, about in federations
        if {"model", "parameters"} <= about.keys()
    )
    effort = _and(
        f"{each.local_epochs:g} local epochs" if each.local_epochs else f"{each.local_steps} local steps"
        for each in experiments
    )
    shares = _and(f"{100 * each.participation:g} %" for each in experiments)
    words = (
        f"Data: {data}, shared out among {clients} clients ({_and(_rule(each) for each in experiments)}). "
        f"{_and(each.rounds for each in experiments)} rounds of {effort} in batches of "
        f"{_and(each.batch_size for each in experiments)}; {shares} of the clients take part in a round. "
        + (f"Network: {networks}." if networks else "")
    )
    return f"<p>{_text(words)}</p>"


def _faults(groups: Sequence[Group]) -> str:
    """What a reader must know before believing the table: rounds that are missing, seeds that come twice."""
    behind = [
        f"{each.label}, seed {run.experiment.seed}: {len(run.lines)} of {run.experiment.rounds} rounds"
        for each in groups
        for run in each.runs
        if len(run.lines) < run.experiment.rounds
    ]
    found = [f"Unfinished: {'; '.join(behind)}."] if behind else []
    for each in groups:
        seeds = {run.experiment.seed for run in each.runs}
        if len(seeds) < len(each.runs):
            words = (
                f"{each.label}: {len(each.runs)} runs but {len(seeds)} different seeds, so they are not independent."
            )
            found.append(words)
    return "".join(f'<p class="warning">{_text(words)}</p>' for words in found)


def _rule(experiment: Experiment) -> str:
    concentration = f"{experiment.partition}, beta {experiment.beta:g}"
    words = {"dirichlet": concentration, "quantity": concentration}
    words["label-skew"] = f"label-skew, {experiment.classes_per_client} classes each"
    return words.get(experiment.partition, experiment.partition)


def _results(groups: Sequence[Group], full: Sequence[str], target: float | None) -> str:
    """The table of results, a row for each group."""
    if not any(run.accuracies for each in groups for run in each.runs):
        return "<p>No round has been evaluated yet, so there are no results.</p>"
    given, target = target is not None, target or _target(groups)
    rows = []
    for number, (each, label) in enumerate(zip(groups, full, strict=True)):
        scored = [run for run in each.runs if run.accuracies]
        last, best = (_percent([getattr(run, name) for run in scored]) for name in ("last", "best"))
        seconds = _seconds([line for run in each.runs for line in run.lines])
        whole = _short(sum(seconds.values())) if seconds else NONE
        generation = _short(seconds["generation"]) if seconds else NONE
        reached = _rounds_to(scored, target) if target else NONE
        seeds = _and(run.experiment.seed for run in each.runs)
        cells = "".join(f'<td class="number">{cell}</td>' for cell in (last, best, reached, seeds, whole, generation))
        more = "" if each.label == label else f"<br><small>{_text(label)}</small>"
        rows.append(f'<tr><th scope="row" class="keyed">{_key(number)}{_text(each.label)}{more}</th>{cells}</tr>')
    aim = f"Rounds to {100 * target:g}\N{NO-BREAK SPACE}%" if target else "Rounds to target"
    heads = ("Last accuracy (%)", "Best accuracy (%)", aim, "Seeds", "Seconds per round", "of which generation")
    head = "<th>Algorithm</th>" + "".join(f'<th class="number" scope="col">{name}</th>' for name in heads)
    chosen = "as asked for" if given else f"the last accuracy of {_text(groups[0].label)}, rounded down"
    every = sorted({run.experiment.evaluate_every for each in groups for run in each.runs} - {1})
    coarse = f" Evaluated only every {_and(every)} rounds: it may have been met earlier." if every else ""
    return (
        f"{_table(head, ''.join(rows))}"
        '<p class="note">Accuracy on the test set: mean ± sample standard deviation over seeds. <em>Last</em> is after '
        "the last round evaluated. <em>Best</em> is the highest of all rounds, chosen on the test set itself, and "
        "therefore optimistic: read it as what papers print, not as what to expect. "
        + (f"Rounds to the target ({chosen}): median over seeds.{coarse}" if target else "")
        + "</p>"
    )


def _target(groups: Sequence[Group]) -> float | None:
    """What the first group nearly reached: its last accuracy rounded down to 5 %, or to 1 % below that."""
    first = next(each for each in groups if any(run.accuracies for run in each.runs))
    percent = 100 * statistics.fmean(run.last for run in first.runs if run.accuracies)
    return next((step * (percent // step) / 100 for step in (5, 1) if percent >= step), None)


def _rounds_to(runs: Sequence[Run], target: float) -> str:
    """The median over seeds; a seed that never got there counts as beyond its last round."""
    found = [rounds_to(run, target) for run in runs]
    reached = [round for round in found if round is not None]
    if not reached:
        unfinished = any(len(run.lines) < run.experiment.rounds for run in runs)
        return ("not yet" if unfinished else "never") if runs else NONE
    middle = statistics.median(math.inf if round is None else round for round in found)
    beyond = min((run.accuracies[-1][0] for run, round in zip(runs, found, strict=True) if round is None), default=0)
    words = f"{middle:g}" if math.isfinite(middle) else f"&gt; {beyond}"
    return words if len(reached) == len(found) else f"{words} ({len(reached)} of {len(found)} seeds)"


# Sections


def _accuracy(groups: Sequence[Group]) -> str:
    wakes = _wakes(groups)
    accuracy = _curves(groups, lambda line: [line.get("accuracy")])
    if not accuracy:
        return "<p>No round has been evaluated yet.</p>"
    band = " The band is ± one standard deviation over seeds." if any(len(each.runs) > 1 for each in groups) else ""
    ragged = any(len({len(run.lines) for run in each.runs}) > 1 for each in groups)
    uneven = " Some seeds have fewer rounds than others: late means are over fewer seeds." if ragged else ""
    mark = f" FedCOG begins to generate in round {_and(wakes)} (upright line)." if wakes else ""
    drawn = _figure(
        figures.curves_figure(accuracy, "test accuracy (%)", size=(4.8, 3.3), percent=True, marks=wakes),
        f"Accuracy of the global model on the test set after each round, mean over seeds.{band}{mark}{uneven}",
    )
    loss = _curves(groups, lambda line: [line.get("loss")])
    if loss:
        drawn += _figure(
            figures.curves_figure(loss, "training loss", size=(4.0, 3.3), marks=wakes),
            "Loss in local training, averaged over the round's clients by their weight.",
        )
    return f'<div class="figures uneven">{drawn}</div>'


def _partition(runs: Sequence[Run], federations: Sequence[tuple[dict[str, Tensor], Line]]) -> str:
    found: dict[str, tuple[Tensor, list[str], list[Run]]] = {}
    for run, (tensors, about) in zip(runs, federations, strict=True):
        if "counts" in tensors and tensors["counts"].dim() == 2 and tensors["counts"].numel():
            counts = tensors["counts"]
            names = [str(name) for name in about.get("classes", ())]
            names += [str(label) for label in range(len(names), counts.shape[1])]
            found.setdefault(repr((counts.tolist(), names)), (counts, names, []))[2].append(run)
    if not found:
        return "<p>The runs have not recorded who holds what (federation.safetensors is missing or empty).</p>"
    drawn = ""
    for counts, names, members in list(found.values())[:PARTITIONS]:
        seeds = dict.fromkeys(run.experiment.seed for run in members)
        caption = (
            f"Training examples per client and class (white: none), and each client's total above. "
            f"{int(counts.sum()):,} examples, {counts.shape[0]} clients, {counts.shape[1]} classes; "
            f"{_rule(members[0].experiment)}; seed {_and(seeds)}."
        )
        drawn += _figure(partition_figure(counts, names), caption, _counts(counts, names))
    more = len(found) - PARTITIONS
    rest = f"<p>{more} more partition{'s are' if more > 1 else ' is'} not shown.</p>" if more > 0 else ""
    return f'<div class="figures">{drawn}</div>{rest}'


def _counts(counts: Tensor, names: Sequence[str]) -> str:
    if counts.numel() > CELLS:
        left_out = f"A table of {counts.numel():,} numbers is left out; they are in federation.safetensors."
        return f'<p class="note">{left_out}</p>'
    head = "".join(f'<th class="number" scope="col">{_text(name)}</th>' for name in ("total", *names))
    rows = "".join(
        f'<tr><th scope="row">{client}</th><td class="number">{sum(row)}</td>'
        + "".join(f'<td class="number">{count}</td>' if count else '<td class="number zero">0</td>' for count in row)
        + "</tr>"
        for client, row in enumerate(counts.tolist())
    )
    table = f'<table><thead><tr><th scope="col">client</th>{head}</tr></thead><tbody>{rows}</tbody></table>'
    return f'<details><summary>As a table</summary><div class="scroll counts" tabindex="0">{table}</div></details>'


def _generated(runs: Sequence[Run]) -> str:
    why = "No run here has generated inputs."
    for run in runs:
        directory = RunDirectory(run.path)
        for name in directory.exhibits()[-1:]:
            try:
                shown = directory.tensors(name)[0]
            except RecordError as error:
                why = str(error)
                continue
            if {"images", "labels", "steps"} <= shown.keys() and shown["images"].dim() == 5:
                return _pictures(run, int(Path(name).stem), shown)
            why = "The inputs of this data set are not pictures, so the generated ones are not shown."
    return f"<p>{_text(why)}</p>"


def _pictures(run: Run, round: int, shown: dict[str, Tensor]) -> str:
    """Generated pictures, a row for each mark on the way and a column for each target, with real ones below."""
    tensors, about = _federation(run)
    known, labels = about.get("classes", ()), shown["labels"].tolist()
    names = [str(known[label]) if label < len(known) else str(label) for label in labels]
    rows = [
        _row(f"step {step}", "", images, names)
        for step, images in zip(shown["steps"].tolist(), shown["images"], strict=True)
    ]
    real = "No real pictures were recorded to compare with; values outside 0 to 1 are clipped."
    if {"real_images", "real_labels"} <= tensors.keys():
        places = [(tensors["real_labels"] == label).nonzero()[:, 0].tolist() for label in labels]
        chosen = [found[labels[:n].count(labels[n]) % len(found)] if found else None for n, found in enumerate(places)]
        pictures = [None if place is None else tensors["real_images"][place] for place in chosen]
        rows.append(_row("real", ' class="real"', pictures, names))
        real = "The last row holds real pictures of the same classes."
    client = next((line["clients"][0] for line in run.lines if line["round"] == round and line.get("clients")), None)
    maker = "one client" if client is None else f"client {client}"
    head = "".join(f'<th scope="col">{_text(name)}</th>' for name in names)
    caption = (
        f"What {maker} generated in round {round} ({_name(run)}, seed {run.experiment.seed}): from noise, step by "
        f"step, towards the class named above each column. {real}"
    )
    return (
        f'<figure><table class="pictures"><thead><tr><td></td>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
        f"<figcaption>{_text(caption)}</figcaption></figure>"
    )


def _row(name: str, mark: str, images: Iterable[Tensor | None], classes: Sequence[str]) -> str:
    cells = "".join(
        f"<td>{NONE}</td>" if image is None else f"<td>{_picture(image, f'{label}, {name}')}</td>"
        for image, label in zip(images, classes, strict=True)
    )
    return f'<tr{mark}><th scope="row">{name}</th>{cells}</tr>'


def _picture(image: Tensor, words: str) -> str:
    """A uint8 image [C, H, W] as a PNG in the page."""
    channels = image if image.shape[0] in (3, 4) else image[:1]
    pixels = channels.permute(1, 2, 0).contiguous().numpy()
    file = io.BytesIO()
    Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(file, format="PNG")
    small = ' class="small"' if max(image.shape[1:]) < 64 else ""
    data = base64.b64encode(file.getvalue()).decode()
    return f'<img{small} alt="{_text(words)}" src="data:image/png;base64,{data}">'


def _clients(groups: Sequence[Group]) -> str:
    distance = _curves(groups, lambda line: _local(line, "distance"))
    if not distance:
        return "<p>No round is finished, so there is nothing to say about clients yet.</p>"
    drawn = _figure(
        figures.curves_figure(distance, "distance from the global model", marks=_wakes(groups)),
        "Length of the way a local model goes from the global model it received, in parameter space: mean over the "
        "round's clients and seeds, band ± one standard deviation over them.",
    )
    content = f'<div class="figures">{drawn}</div>'
    scored = [(each, _local_curves(each)) for each in groups]
    if not any(curves for _, curves in scored):
        return content + "<p>The clients' local models were not evaluated, so there is nothing to compare.</p>"
    content += (
        "<p><em>Own label mix</em> is accuracy on the test set with every class weighted by its share of the client's "
        "examples. <em>Before</em> is the global model as the client received it, <em>after</em> the local model that "
        "came of it.</p>"
    )
    for each, curves in scored:
        if curves:
            drawn = _figure(
                figures.curves_figure(curves, "accuracy (%)", percent=True, whole_range=True),
                "Mean over the round's clients and seeds; band ± one standard deviation.",
            )
            content += f'<h3>{_text(each.label)}</h3><div class="figures">{drawn}{_dumbbell(each)}</div>'
    return content


def _local_curves(each: Group) -> list[Curve]:
    named = {
        "own label mix, before": "own_accuracy_before",
        "own label mix, after": "own_accuracy",
        "whole test set, after": "accuracy",
    }
    found = [
        Curve(label, _over_rounds(each.runs, lambda line, name=name: _local(line, name)), look(number))  # type: ignore[misc]
        for number, (label, name) in enumerate(named.items())
    ]
    return [curve for curve in found if curve.points]


def _dumbbell(each: Group) -> str:
    """Before and after for every client of the last evaluated round of the group's first run that has one."""
    for run in each.runs:
        for line in reversed(run.lines):
            clients = [
                (local["client"], local["own_accuracy_before"], local["own_accuracy"])
                for local in line.get("local", ())
                if local.get("own_accuracy") is not None and local.get("own_accuracy_before") is not None
            ]
            if clients:
                words = f"Each client of round {line['round']} (seed {run.experiment.seed}): accuracy before and after."
                return _figure(figures.dumbbell_figure(clients), words)
    return ""


def _time(groups: Sequence[Group]) -> str:
    bars = []
    for each in groups:
        lines, wake = [line for run in each.runs for line in run.lines], _wake(each.runs[0].experiment)
        phases = {each.label: lines}
        if wake is not None and any(line["round"] >= wake for line in lines) and wake > 1:
            phases = {
                f"{each.label}, rounds 1 to {wake - 1}": [line for line in lines if line["round"] < wake],
                f"{each.label}, from round {wake}": [line for line in lines if line["round"] >= wake],
            }
        bars += [(label, seconds) for label, lines in phases.items() if (seconds := _seconds(lines))]
    if not bars:
        return "<p>No round is finished, so no time has been measured.</p>"
    words = "Mean wall-clock seconds of a round, over rounds and seeds. Other: sampling, aggregation, bookkeeping."
    return _figure(figures.time_figure(bars), words)


def _settings(groups: Sequence[Group]) -> str:
    """Every setting: those in which the groups differ first, then the rest with their meaning."""
    meaning = {name: known.help for name, known in settings.settings(Experiment).items()}
    values: list[dict[str, str]] = []
    for each in groups:
        said: dict[str, dict[str, None]] = {}
        for run in each.runs:
            flat = {"algorithm": _name(run)}
            flat |= {name: getattr(run.experiment, name) for name in settings.settings(Experiment)}
            for layer, algorithm in layers(run.experiment.algorithm):
                own = settings.settings(type(algorithm))
                flat |= {f"{layer}.{name}": getattr(algorithm, name) for name in own}
                meaning |= {f"{layer}.{name}": known.help for name, known in own.items()}
            for name, value in flat.items():
                said.setdefault(name, {})[_value(value)] = None
        values.append({name: ", ".join(found) for name, found in said.items()})
    names = list(dict.fromkeys(name for found in values for name in found))
    differing = [name for name in names if len({found.get(name) for found in values}) > 1]
    content = ""
    if differing:
        head = "".join(
            f'<th scope="col" class="keyed">{_key(n)}{_text(each.label)}</th>' for n, each in enumerate(groups)
        )
        rows = "".join(
            f'<tr class="differs"><th scope="row"><code>{_text(name)}</code></th>'
            + "".join(f"<td>{_text(found.get(name, NONE))}</td>" for found in values)
            + "</tr>"
            for name in differing
        )
        content += "<h3>Where the groups differ</h3>" + _table("<th>setting</th>" + head, rows)
    rows = "".join(
        f'<tr><th scope="row"><code>{_text(name)}</code></th><td>{_text(values[0][name])}</td>'
        f"<td>{_text(meaning.get(name, ''))}</td></tr>"
        for name in names
        if name not in differing
    )
    heading = "<h3>The same for all</h3>" if differing else ""
    return content + heading + _table("<th>setting</th><th>value</th><th>meaning</th>", rows)


def _provenance(runs: Sequence[Run]) -> str:
    """The commands that made the runs, when, on what and with which versions."""
    found = [RunDirectory(run.path).provenance() for run in runs]
    commands = dict.fromkeys(str(each["command"]) for each in found if "command" in each)
    days = sorted(str(each["started"]) for each in found if "started" in each)
    facts = {"started": " to ".join(dict.fromkeys([*days[:1], *days[-1:]]))}
    for name in ("fedcog", "torch", "python", "device", "system"):
        facts[name] = _and(str(each[name]) for each in found if name in each)
    rows = "".join(
        f'<tr><th scope="row">{name}</th><td>{_text(fact)}</td></tr>' for name, fact in facts.items() if fact
    )
    if not rows and not commands:
        return "<p>Nobody wrote down how these runs were made (provenance.json is missing).</p>"
    said = "".join(f"<p><code>{_text(command)}</code></p>" for command in commands)
    return f"<h3>How they were made</h3>{said}{_table('', rows)}"


# What the sections share


def _federation(run: Run) -> tuple[dict[str, Tensor], Line]:
    try:
        return RunDirectory(run.path).tensors("federation.safetensors")
    except RecordError:  # not there yet, or damaged: the section about it says so
        return {}, {}


def _datasets(runs: Sequence[Run], federations: Sequence[tuple[dict[str, Tensor], Line]]) -> list[str]:
    return [
        str(about.get("dataset", run.experiment.dataset)) for run, (_, about) in zip(runs, federations, strict=True)
    ]


def _over_rounds(runs: Sequence[Run], values: Callable[[Line], Sequence[float | None]]) -> list[tuple[int, Spread]]:
    """(round, mean and deviation over all values that the runs have of it)."""
    found: dict[int, list[float]] = {}
    for run in runs:
        for line in run.lines:
            found.setdefault(line["round"], []).extend(value for value in values(line) if value is not None)
    return [(round, spread(numbers)) for round, numbers in sorted(found.items()) if numbers]


def _curves(groups: Sequence[Group], values: Callable[[Line], Sequence[float | None]]) -> list[Curve]:
    found = [Curve(each.label, _over_rounds(each.runs, values), look(n)) for n, each in enumerate(groups)]
    return [curve for curve in found if curve.points]


def _local(line: Line, name: str) -> list[float | None]:
    return [local.get(name) for local in line.get("local", ())]


def _seconds(lines: Sequence[Line]) -> dict[str, float]:
    """Mean seconds of a round by what they went into; empty where none were measured."""
    timed = [line["seconds"] for line in lines if line.get("seconds")]
    if not timed:
        return {}
    parts = {
        part: statistics.fmean(seconds.get(part) or 0.0 for seconds in timed)
        for part in ("generation", "training", "evaluation")
    }
    total = statistics.fmean(seconds.get("total") or 0.0 for seconds in timed)
    return parts | {"other": max(0.0, total - sum(parts.values()))}


def _wake(experiment: Experiment) -> int | None:
    """The first round, from 1, in which FedCOG generates."""
    found = [layer.start_round + 1 for _, layer in layers(experiment.algorithm) if isinstance(layer, FedCOG)]
    return found[0] if found else None


def _wakes(groups: Sequence[Group]) -> list[int]:
    """Where FedCOG wakes between two rounds that are there."""
    found = {
        wake
        for each in groups
        for run in each.runs
        if (wake := _wake(run.experiment)) is not None and 1 < wake <= len(run.lines)
    }
    return sorted(found)


def _percent(values: Sequence[float]) -> str:
    return spread(values).percent() if values else NONE


def _name(run: Run) -> str:
    return name_of(run.experiment.algorithm)


def _short(seconds: float) -> str:
    return f"{seconds:.2g}" if 0.001 <= seconds < 10 else f"{seconds:.0f}"


def _value(value: object) -> str:
    return {"True": "true", "False": "false", "": '""'}.get(str(value), str(value))


def _and(values: Iterable[object]) -> str:
    """Each once, in a list such as 1, 2 and 3."""
    words = list(dict.fromkeys(str(value) for value in values))
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _numbered(svg: str, number: int) -> str:
    """A figure with names of its own: matplotlib calls the parts of all figures the same."""
    return re.sub("<[^>]*>", lambda tag: re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>figure{number}-", tag[0]), svg)


def _key(number: int) -> str:
    """A group's line, as small as a letter."""
    colour, dashes = look(number)
    pattern = f' stroke-dasharray="{" ".join(f"{2.5 * dash:g}" for dash in dashes)}"' if dashes else ""
    line = f'<line x1="0" y1="5" x2="28" y2="5" stroke="{colour}" stroke-width="2.5"{pattern}/>'
    return f'<svg class="key" width="28" height="10" aria-hidden="true">{line}</svg>'


def _figure(svg: str, caption: str, more: str = "") -> str:
    return f"<figure>{svg}<figcaption>{_text(caption)}</figcaption>{more}</figure>"


def _table(head: str, rows: str) -> str:
    header = f"<thead><tr>{head}</tr></thead>" if head else ""
    return f'<div class="scroll" tabindex="0"><table>{header}<tbody>{rows}</tbody></table></div>'


def _text(value: object) -> str:
    return html.escape(printable(str(value)))


__all__ = ["page", "partition_figure"]
