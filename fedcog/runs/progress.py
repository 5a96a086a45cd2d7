"""Progress of runs: a bar on a terminal or in a notebook, plain lines in a log."""

import html
import math
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from fedcog.core.tasks import METRIC_LABELS, metric_of
from fedcog.runs.config.composition import algorithm_name
from fedcog.runs.config.experiment import Experiment
from fedcog.runs.records.summary import flatten_settings

Display = Literal["bar", "notebook", "lines", "none"]
"""How progress is shown."""
NUM_RECENT_ROUNDS = 10
"""Rounds from which the remaining time is estimated; rounds take longer once FedCOG generates."""
MAX_FIXED_LOSS = 1e4
"""Losses above are printed in scientific notation."""


def choose_display(progress: bool | None) -> Display:
    """Return how to show the progress of a run that Python started.

    Args:
        progress: False: not at all. True: in plain lines if there is neither a notebook nor a
            terminal. None: in a notebook or on a terminal only.

    Returns:
        The display.
    """
    if progress is False:
        return "none"
    if _is_notebook():
        return "notebook"
    if sys.stderr is not None and sys.stderr.isatty():
        return "bar"
    return "lines" if progress else "none"


class RunProgress:
    """Shows rounds as they finish, on stderr. Use it as a context manager."""

    def __init__(
        self,
        num_rounds: int,
        num_done: int,
        display: Display,
        *,
        console: Console | None = None,
        varying: Sequence[str] = (),
    ) -> None:
        """Create a progress display.

        Args:
            num_rounds: Number of all rounds.
            num_done: Number of rounds that are already finished.
            display: How to show them.
            console: Where to print; stderr by default.
            varying: Settings that differ between runs, to show with each.
        """
        self._num_rounds = num_rounds
        self._num_done = num_done
        self._display = display
        self._console = console or Console(stderr=True, highlight=False, soft_wrap=True)
        self._varying = varying
        self._finished_at = deque([time.monotonic()], NUM_RECENT_ROUNDS + 1)
        self._notebook_output: Any = None
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("round {task.completed}/{task.total}"),
            TextColumn("{task.fields[score]}"),
            TimeRemainingColumn(compact=True),
            TextColumn("left"),
            console=self._console,
            disable=display != "bar",
            redirect_stdout=sys.stdout is not None and sys.stdout.isatty(),  # else it is a file
        )
        self._task = self._bar.add_task(
            "setting up", total=num_rounds, completed=num_done, score=""
        )

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def show_round(self, experiment: Experiment, line: dict[str, Any]) -> None:
        """Show a finished round.

        Args:
            experiment: The experiment.
            line: The round's line of `rounds.jsonl`.
        """
        self._num_done += 1
        self._finished_at.append(time.monotonic())
        if self._display == "none":
            return
        name = self._run_name(experiment)
        score = _score_text(experiment, line)
        if self._display == "bar":
            self._bar.update(self._task, completed=self._num_done, score=score, description=name)
        elif self._display == "notebook":
            self._show_in_notebook(name, score)
        else:
            self._print_line(name, score, experiment, line)

    def _show_in_notebook(self, name: str, score: str) -> None:
        """Show a bar below the cell; rich's own would need ipywidgets."""
        import IPython.display

        display: Any = IPython.display.display  # which has no types
        text = (
            f"{name}: round {self._num_done}/{self._num_rounds} {score} "
            f"({self._seconds_left:.0f} s left)"
        )
        bar = f'<progress value="{self._num_done}" max="{self._num_rounds}"></progress>'
        content = {"text/plain": text, "text/html": f"{bar} {html.escape(text)}"}
        if self._notebook_output is None:
            self._notebook_output = display(content, raw=True, display_id=True)
        else:
            self._notebook_output.update(content, raw=True)

    def _print_line(
        self, name: str, score: str, experiment: Experiment, line: Mapping[str, Any]
    ) -> None:
        seconds = line["seconds"]["total"]
        text = (
            f"{name}, round {line['round']} of {experiment.rounds}: loss {_loss_text(line)} "
            f"{score}{_epsilon_text(line)} ({seconds:.1f} s; {self._seconds_left:.0f} s left)"
        )
        if line.get("skipped"):
            text += f"; skipped clients {', '.join(map(str, line['skipped']))}"
        self._console.print(f"fedcog: {text.replace('  ', ' ')}", markup=False)

    @property
    def _seconds_left(self) -> float:
        """The remaining time, estimated from the last rounds."""
        recent = self._finished_at[-1] - self._finished_at[0]
        seconds_per_round = recent / (len(self._finished_at) - 1)
        return seconds_per_round * (self._num_rounds - self._num_done)

    def _run_name(self, experiment: Experiment) -> str:
        name = algorithm_name(experiment.algorithm)
        if self._varying:
            settings = flatten_settings(experiment.to_dict())
            for key in self._varying:
                if key in settings:
                    name += f" {key} {_short(settings[key])}"
        return f"{name} seed {experiment.seed}"


class AuditProgress:
    """Shows the attacks of an audit, on stderr. Use it as a context manager."""

    def __init__(self, display: Display, console: Console | None = None) -> None:
        """Create a progress display.

        Args:
            display: How to show the attacks; a notebook shows lines.
            console: Where to print; stderr by default.
        """
        self._display = display
        self._console = console or Console(stderr=True, highlight=False, soft_wrap=True)
        self._last = ""
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[cost]}"),
            TimeRemainingColumn(compact=True),
            console=self._console,
            disable=display != "bar",
            redirect_stdout=sys.stdout is not None and sys.stdout.isatty(),
        )
        self._task = self._bar.add_task("setting up", total=None, cost="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def show(self, attack: str, done: int, total: int, cost: float) -> None:
        """Show how far an attack is.

        Args:
            attack: What is attacked.
            done: Finished iterations of all attacks.
            total: Iterations of all attacks; 0 if they are not known yet.
            cost: Cosine cost; NaN if there is none yet.
        """
        text = "" if math.isnan(cost) else f"cosine cost {cost:.4f}"
        if self._display == "bar":
            self._bar.update(
                self._task, completed=done, total=total or None, description=attack, cost=text
            )
        elif self._display != "none" and attack != self._last:
            share = f" ({done} of {total} iterations)" if total else ""
            self._console.print(f"fedcog: {attack}{share}", markup=False)
        self._last = attack


def _is_notebook() -> bool:
    """Return whether the code runs in a notebook: of Jupyter, Colab or Databricks."""
    return Console().is_jupyter


def _score_text(experiment: Experiment, line: Mapping[str, Any]) -> str:
    metric = metric_of(line)
    text = ""
    if line.get(metric) is not None:
        text = f"{METRIC_LABELS[metric]} {100 * line[metric]:.2f}%"
    if not experiment.evaluate_test:
        for name, label in METRIC_LABELS.items():
            score = line.get(f"validation_{name}")
            if score is not None:
                text = f"validation {label} {100 * score:.2f}%"
    return text


def _loss_text(line: Mapping[str, Any]) -> str:
    loss = line["loss"]
    if line.get("privacy") and math.isnan(loss or 0):
        return "hidden"
    if loss is None:
        return "not finite"
    return f"{loss:.4f}" if loss < MAX_FIXED_LOSS else f"{loss:.3g}"


def _epsilon_text(line: Mapping[str, Any]) -> str:
    privacy = line.get("privacy")
    return f" epsilon {privacy['epsilon']:.3g}" if privacy else ""


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
