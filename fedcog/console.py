"""What the command line shows: progress, tables, faults."""

import contextlib
import io
import math
import os
import signal
import sys
import time
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Literal, Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table
from torch import Tensor

from fedcog.data import SOURCES, sources
from fedcog.data.borrowed import BORROWED
from fedcog.data.partition import KINDS, PARTITIONS, natural
from fedcog.experiments import summary, tuning
from fedcog.experiments.catalogue import catalogue as measured
from fedcog.experiments.config import Experiment, layers, name_of, own_settings
from fedcog.experiments.doctor import Part
from fedcog.experiments.export import Exported
from fedcog.experiments.measures import typical_cost
from fedcog.experiments.plan import Done
from fedcog.experiments.run import Run
from fedcog.experiments.study import Study
from fedcog.experiments.sweep import Plan, Tuned
from fedcog.experiments.theory import Finding
from fedcog.experiments.theory import Plan as Theory
from fedcog.models import MODELS
from fedcog.task import MEASURES, measure_of

Style = Literal["auto", "plain", "quiet"]


class Stream(Console):
    """A console whose reader may have enough: that does not end a run, and nobody is told from then on."""

    def on_broken_pipe(self) -> None:
        """Write to nowhere."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


_out = Stream(
    highlight=False,
    width=None if sys.stdout and sys.stdout.isatty() else 160,
    file=None if sys.stdout else io.StringIO(),  # somebody closed it
)
_err = Stream(stderr=True, highlight=False, soft_wrap=True, file=None if sys.stderr else io.StringIO())


def say(text: str, style: Style) -> None:
    """A line of results."""
    if style != "quiet":
        _out.print(text, markup=False, soft_wrap=True)


def note(text: str) -> None:
    """A line beside the results."""
    _err.print(f"fedcog: {text}", markup=False)


@contextlib.contextmanager
def heard() -> Iterator[None]:
    """Within it our own warnings are told like all else beside the results, without where in the code they arose."""
    with warnings.catch_warnings():
        usual = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], filename: str, *rest: Any, **more: Any) -> None:
            if issubclass(category, UserWarning) and Path(filename).is_relative_to(Path(__file__).parent):
                note(str(message))
            else:
                usual(message, category, filename, *rest, **more)

        warnings.showwarning = show
        yield


def aside(text: str, style: Style) -> None:
    """A line beside the results that a quiet reader does without."""
    if style != "quiet":
        note(text)


def progress_of(studies: Sequence[Study], done: Sequence[Done], where: Path) -> None:
    """How much of each table and figure is there."""
    table = Table(title=f"The paper in {where}", title_justify="left")
    for name, side in (("name", "left"), ("what", "left"), ("in the paper", "left"), ("done", "right")):
        table.add_column(name, justify=side)  # type: ignore[arg-type]
    for study, one in zip(studies, done, strict=True):
        table.add_row(study.name, escape(study.title), study.place, f"{one.done}/{one.total}")
    table.add_row("", "", "", f"{sum(one.done for one in done)}/{sum(one.total for one in done)}")
    _out.print(table)


def faults(found: Sequence[str]) -> int:
    """Every fault on a line of its own; the exit code that goes with them."""
    for fault in found:
        _err.print(f"fedcog: {fault}", markup=False)
    return 2


def _lively(style: Style) -> bool:
    return style == "auto" and _err.is_terminal


LATEST = 10
"""Rounds that the time of those to come is guessed from: when FedCOG wakes, a round takes longer than before."""


class Progress:
    """Rounds as they come: a bar on a terminal, plain lines in a log; Ctrl-C asks for a stop after the round."""

    def __init__(self, rounds: int, done: int, style: Style, told: Sequence[str] = ()) -> None:
        self.rounds, self.done, self.style, self.stop = rounds, done, style, False
        self.told = told  # settings by which runs are told apart
        self.ended = deque([time.monotonic()], LATEST + 1)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("round {task.completed}/{task.total}"),
            TextColumn("{task.fields[score]}"),
            TimeRemainingColumn(compact=True),
            TextColumn("left"),
        )
        self.bar = Bar(*columns, console=_err, disable=not _lively(style))
        self.task = self.bar.add_task("getting ready", total=rounds, completed=done, score="")

    def __enter__(self) -> Self:
        self.bar.start()
        self.handlers = {name: signal.signal(name, self._ask) for name in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.bar.stop()
        for name, handler in self.handlers.items():
            signal.signal(name, handler)

    def stopping(self) -> bool:
        """Has a stop been asked for?"""
        return self.stop

    def advance(self, what: Experiment, line: dict[str, Any]) -> None:
        """Show a finished round."""
        self.done += 1
        self.ended.append(time.monotonic())
        values = summary.flat(what.to_dict()) if self.told else {}
        some = {name: values[name] for name in self.told if name in values}
        run = name_of(what.algorithm) + "".join(f" {name} {_short(value)}" for name, value in some.items())
        run += f" seed {what.seed}"
        measure = measure_of(line)
        score = f"{MEASURES[measure]} {100 * line[measure]:.2f}%" if line.get(measure) is not None else ""
        for name, words in MEASURES.items() if not what.evaluate_test else ():
            held_out = line.get(f"validation_{name}")
            score = score if held_out is None else f"{words} in validation {100 * held_out:.2f}%"
        if self.style == "quiet":
            return
        if _lively(self.style):
            self.bar.update(self.task, completed=self.done, score=score, description=run)
            return
        left = (self.ended[-1] - self.ended[0]) / (len(self.ended) - 1) * (self.rounds - self.done)
        private = line.get("privacy")
        loss = "not finite" if line["loss"] is None else f"{line['loss']:{'.4f' if line['loss'] < 1e4 else '.3g'}}"
        loss = "not told" if private and math.isnan(line["loss"] or 0) else loss
        score += f" epsilon {private['epsilon']:.3g}" if private else ""
        skipped = f"; left out {', '.join(str(client) for client in line['skipped'])}" if line.get("skipped") else ""
        total = line["seconds"]["total"]
        words = f"{run}, round {line['round']} of {what.rounds}: loss {loss} {score} ({total:.1f} s; {left:.0f} s left)"
        note(words.replace("  ", " ") + skipped)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.stop:
            raise KeyboardInterrupt
        self.stop = True
        note("finishing this round, then stopping; once more stops at once.")


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class Download:
    """Bytes as they come."""

    def __init__(self) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        self.bar = Bar(*columns, console=_err, disable=not _err.is_terminal)
        self.tasks: dict[str, Any] = {}

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.bar.stop()

    def advance(self, name: str, done: int, total: int | None) -> None:
        """Show how far a file is."""
        if name not in self.tasks:
            self.tasks[name] = self.bar.add_task(name, total=total)
        self.bar.update(self.tasks[name], completed=done, total=total)


def experiment(what: Experiment, out: Any, style: Style, seeds: Sequence[int] = ()) -> None:
    """The settings of a run that is about to start, or of several that differ in the seed."""
    if style == "quiet":
        return
    local = f"{what.local_epochs:g} epochs" if what.local_epochs else f"{what.local_steps} steps"
    some = f" by {what.participation:.0%} of them ({what.selection})" if what.participation < 1 else ""
    say(
        f"{name_of(what.algorithm)} on {what.dataset}: {what.clients} clients ({what.partition_rule}), "
        f"{what.rounds} rounds of {local}{some}, batch {what.batch_size}, {what.optimizer} lr {what.lr:g}, "
        + (f"seeds {', '.join(str(seed) for seed in seeds)}" if seeds else f"seed {what.seed}"),
        style,
    )
    for name, layer in layers(what.algorithm):
        if own := own_settings(layer):
            say(f"  {name}: " + ", ".join(f"{key} {value}" for key, value in own.items()), style)
    first = 0
    for device in what.kinds:
        last = first + device.clients - 1
        say(f"  {device.name} (clients {first} to {last}): {device.words}", style)
        first = last + 1
    for warning in _warnings(what):
        note(warning)
    say(f"  run directory: {out}", style)


def comparison(experiments: Sequence[Experiment], seeds: Sequence[int], out: Any, style: Style) -> None:
    """The settings of a comparison that is about to start."""
    names = ", ".join(name_of(one.algorithm) for one in experiments)
    say(f"comparing {names} over seeds {', '.join(str(seed) for seed in seeds)}", style)
    for one in experiments:
        experiment(one, f"{out}/{name_of(one.algorithm)}/seed-N", style, seeds)


def sweeping(plan: Plan, out: Any, style: Style) -> None:
    """What is to be tuned, and how."""
    names = ", ".join(name_of(one.algorithm) for one in plan.experiments)
    say(f"tuning {names}: {plan.trials} trials each ({plan.search}, seed {plan.seed})", style)
    for name, one in plan.space.items():
        say(f"  {name}: {one.words()}", style)
    for each in plan.experiments:
        experiment(each, out, style, plan.trial_seeds)


def tuned(plan: Plan, found: Sequence[Tuned], style: Style) -> None:
    """What was chosen for each method, and how that does on the test set."""
    grid = tuning.chosen(found)
    if style == "plain":
        for row in grid.rows:
            say("; ".join(f"{head} {cell}" for head, cell in zip(grid.heads, row, strict=True)), style)
    elif style != "quiet":
        table = Table(title="in %, test as mean ± standard deviation over seeds", title_justify="left")
        for place, head in enumerate(grid.heads):
            table.add_column(head, justify="left" if place < 2 else "right")
        for row in grid.rows:
            table.add_row(*(escape(cell) for cell in row))
        _out.print(table)
    for sentence in tuning.words(plan, found):
        say(sentence, style)


def _warnings(what: Experiment) -> list[str]:
    found = []
    for name, layer in layers(what.algorithm):
        if layer.personalises and not what.evaluate_local:
            found.append(f"{name} is about the clients' own models, and they are not evaluated (--evaluate-local).")
    if what.privacy == "off" and (what.dp_clip, what.dp_noise, what.dp_delta) != (1.0, 1.0, 1e-5):
        found.append("dp_clip, dp_noise and dp_delta do nothing without --privacy central or local.")
    if what.partition_args and what.partition not in BORROWED:
        found.append("partition_args does nothing without --partition flwr-shard or flwr-pathological.")
    if what.selection == "uniform" and (what.candidates or what.choice_loss != "all"):
        found.append("candidates and choice_loss do nothing without --selection power-of-choice.")
    for name, layer in layers(what.algorithm):
        start = getattr(layer, "start_round", 0)
        if start >= what.rounds:
            found.append(
                f"{name} starts after round {start}, and there are {what.rounds}: it stays dormant (--start-round)."
            )
    return found


def results(runs: Sequence[Run], style: Style) -> None:
    """Last and best score of every group of runs, mean and deviation over seeds; what of privacy is spent."""
    if style == "quiet":
        return
    for words in dict.fromkeys(run.privacy for run in runs if run.privacy):
        say(words, style)
    scored = [run for run in runs if run.scores or run.diverged]
    if not scored:
        say("no round has been evaluated yet", style)
        return
    found = summary.rows(scored)
    several = any(len(each.runs) > 1 for each in summary.group(scored))
    names = " or ".join(dict.fromkeys(MEASURES[run.measure] for run in scored))
    title = f"test {names} in %" + (", mean ± standard deviation over seeds" if several else "")
    if style == "plain":
        say(title, style)
        for label, last, best, *own, seeds, rounds in found:
            mine = f", personal last {own[0]}, best {own[1]}" if own[0] else ""
            lost = f", rounds {rounds}" if "diverged" in rounds else ""
            say(f"{label}: last {last or 'none'}, best {best or 'none'}{mine}, seeds {seeds}{lost}", style)
        return
    table = Table(title=title, title_justify="left")
    for column in summary.COLUMNS:
        table.add_column(column, justify="left" if column == "algorithm" else "right")
    for row in found:
        table.add_row(*row)
    _out.print(table)
    if any(row[3] for row in found):
        words = (
            "personal: the round's clients' own models (else their local ones, before averaging), on their label mix"
        )
        _out.print(words, markup=False)


def costs(runs: Sequence[Run], target: float, style: Style) -> None:
    """What every group of runs spent until it reached a score."""
    for each in summary.group([run for run in runs if run.scores]):
        (rounds, sent, seconds), there = typical_cost(each.runs, target)
        spent = f"{rounds:g} rounds, {sent / 1e6:,.1f} MB, {seconds:,.1f} s" if math.isfinite(rounds) else "not reached"
        of = f" ({there} of {len(each.runs)} seeds got there)" if len(each.runs) > 1 else ""
        say(f"to {100 * target:g} %, {each.label}: {spent}{of}", style)


def exported(found: Exported, what: Experiment, style: Style) -> None:
    """Where a model now lies, and what of the run is not in it."""
    done, rounds = found.about["round"], found.about["rounds"]
    say(f"model: {found.path} ({found.about['model']}, after round {done} of {rounds})", style)
    if done < rounds:
        aside(f"the run is not finished, or was stopped: this is its model after round {done}.", style)
    for name, layer in layers(what.algorithm):
        if layer.personalises:
            aside(f"{name} is about the clients' own models: this is the one that they share.", style)


def doctor(parts: Sequence[Part], style: Style) -> None:
    """What works, what is missing, and what to do about it."""
    if style == "plain":
        for part in parts:
            remedy = f" ({part.remedy})" if part.remedy else ""
            say(f"{part.name}: {part.state}: {part.facts}{remedy}", style)
    elif style != "quiet":
        colours = {"ok": "green", "missing": "yellow", "broken": "red"}
        table = Table("part", "state", "what it is", "what to do")
        for part in parts:
            state = f"[{colours[part.state]}]{part.state}[/]"
            table.add_row(part.name, state, escape(part.facts), escape(part.remedy))
        _out.print(table)


def catalogue(what: str | None, data_dir: str | None) -> None:
    """Everything that can be chosen, or one kind of it, with settings and defaults."""
    parts = {"algorithms": algorithms, "data": lambda: data_sets(data_dir), "models": models, "partitions": partitions}
    for name, show in parts.items():
        if what in (None, name):
            show()
    if what is None:
        _out.print("Every setting of an experiment, with its default: fedcog run --help", markup=False)


def algorithms() -> None:
    """The algorithms with their settings, and what each sends and keeps."""
    table = Table(title="Algorithms", title_justify="left")
    for column in ("algorithm", "what it is, and its settings", "default", "sends", "is sent", "keeps", "sums"):
        table.add_column(column, justify="right" if column in ("sends", "is sent") else "left")
    for one in measured():
        kind = " (wrapper)" if one.wrapper else ""
        sums = "enough" if one.sums else "not enough"
        sizes = f"{one.sends:.2f}", f"{one.receives:.2f}"
        table.add_row(one.name + kind, one.line, "", *sizes, one.kept, sums, style="bold")
        for setting in one.settings:
            choices = f" [{' | '.join(setting.choices)}]" if setting.choices else ""
            table.add_row("", f"--{one.name}.{setting.flag}: {escape(setting.help + choices)}", setting.shown)
    _out.print(table)
    _out.print(
        "sends, is sent, keeps: bytes of a client and round, measured on the paper's CNN, relative to FedAvg's one "
        "model. sums: is the sum of what clients send enough for the server?",
        markup=False,
    )


def models() -> None:
    """The networks."""
    table = Table("model", "what it is", title="Models", title_justify="left")
    for name, build in MODELS.items():
        table.add_row(name, (build.__doc__ or "").strip().splitlines()[0])
    _out.print(table)


def partitions() -> None:
    """The ways to share examples out."""
    table = Table("partition", "what it is", "settings", title="Partitions", title_justify="left")
    uses = {
        "dirichlet": "--beta --balance --min-examples",
        "label-skew": "--classes-per-client --min-examples",
        "label-quantity": "--classes-per-client --beta --min-examples",
        "quantity": "--beta --min-examples",
        "natural": "--min-examples",
    }
    for kind in KINDS:
        text = (PARTITIONS.get(kind, natural).__doc__ or "").strip().splitlines()[0]
        table.add_row(kind, text, uses.get(kind, ""))
    for kind, one in BORROWED.items():
        more = " --partition-args" if one.more else ""
        table.add_row(kind, f"{one.words} (flwr-datasets' {one.partitioner})", one.uses + more)
    table.add_row("given", "As `indices` per client say, with your own data.", "")
    _out.print(table)


def data_sets(data_dir: str | None) -> None:
    """Which data sets there are, and where they lie."""
    table = Table("data set", "train", "test", "shape", "classes", "where", title="Data sets", title_justify="left")
    for name, source in SOURCES.items():
        place = sources.locate(name, data_dir)
        missing = f"missing; fedcog data get {name}" + (" tells how" if source.by_hand else "")
        where = "embedded (scikit-learn)" if source.package else str(place or missing)
        shape = "x".join(str(side) for side in source.input_shape)
        table.add_row(name, f"{source.train_size:,}", f"{source.test_size:,}", shape, str(source.classes), where)
    _out.print(table)


def theory(found: Finding, plan: Theory, style: Style) -> None:
    """The theorem's constants, its largest step and its bound, beside what was measured."""
    known, convex = found.constants, found.network == "linear"
    what = "linear model (convex)" if convex else "small network"
    title = f"{what}: {plan.rounds} rounds of {plan.steps} steps, {plan.clients} clients of two classes of digits"
    admitted = known.largest_step(plan.steps)
    over = "" if found.lr <= admitted * (1 + 1e-9) else ", more than is admitted: the bound need not hold"
    rows = {
        "L": (known.smoothness, "smoothness of every client's loss" + (", a bound" if convex else ", the largest met")),
        "sigma^2": (known.variance, "variance of a batch's gradient, the largest met"),
        "kappa^2": (known.kappa, "dissimilarity of clients' gradients, the largest met; beta^2 = 1"),
        "Phi - inf": (known.gap, "loss at the start; it is never below 0"),
        "largest step": (admitted, "that the theorem admits, with these constants"),
        "step": (found.lr, f"that was taken{over}"),
        "bound": (found.bound, "of the smallest squared gradient, by the theorem"),
        "smallest": (found.smallest, f"squared gradient of any round, mean over {plan.repeats} runs"),
        "mean": (found.mean, "of all rounds"),
        "Q": (found.distilled, "the distillation term at a round's start; the lemma has it at 0"),
        "rises": (found.rises, "of the loss when inputs are renewed; the lemma forbids them"),
    }
    if style == "plain":
        say(title, style)
        for name, (value, words) in rows.items():
            say(f"{name}: {value:.4g}, {words}", style)
    elif style != "quiet":
        table = Table("", "", "", title=title, title_justify="left", show_header=False)
        for name, (value, words) in rows.items():
            table.add_row(name, f"{value:.4g}", words)
        _out.print(table)


def partition(counts: Tensor, classes: Sequence[str], noun: str = "examples") -> None:
    """Examples, or labels, per client and class; where that is too wide, how many classes each client holds."""
    if sum(max(len(name), 4) + 3 for name in classes) + 20 > _out.width:
        table = Table("client", noun, "classes", "most of", "share", title="what each client holds")
        for client, row in enumerate(counts.tolist()):
            most = max(range(len(row)), key=row.__getitem__)
            share = f"{100 * row[most] / max(1, sum(row)):.0f}%"
            held = sum(count > 0 for count in row)
            table.add_row(str(client), str(sum(row)), str(held), classes[most], share)
        _out.print(table)
        return
    table = Table("client", *classes, "all", title=f"{noun} per client and class", title_justify="left")
    for client, row in enumerate(counts.tolist()):
        table.add_row(str(client), *(str(count) if count else "·" for count in row), str(sum(row)))
    table.add_row("all", *(str(count) for count in counts.sum(0).tolist()), str(int(counts.sum())), style="bold")
    _out.print(table)
