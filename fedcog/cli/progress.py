"""Progress of runs and downloads: a bar on a terminal, plain lines in a log."""

import math
import signal
import time
from collections import deque
from collections.abc import Mapping, Sequence
from types import FrameType, TracebackType
from typing import Any, Self

from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from fedcog.cli.console import Style, err, is_live, print_note
from fedcog.core.tasks import METRIC_LABELS, metric_of
from fedcog.runs.config.composition import algorithm_name
from fedcog.runs.config.experiment import Experiment
from fedcog.runs.records.summary import flatten_settings

NUM_RECENT_ROUNDS = 10
"""Rounds from which the remaining time is estimated; rounds take longer once FedCOG generates."""
MAX_FIXED_LOSS = 1e4
"""Losses above are printed in scientific notation."""


class RunProgress:
    """Shows rounds as they finish. The first Ctrl-C stops after the round, the second at once."""

    def __init__(
        self, num_rounds: int, num_done: int, style: Style, varying: Sequence[str] = ()
    ) -> None:
        """Create a progress display.

        Args:
            num_rounds: Number of all rounds.
            num_done: Number of rounds that are already finished.
            style: How much to print.
            varying: Settings that differ between runs, to show with each.
        """
        self._num_rounds = num_rounds
        self._num_done = num_done
        self._style = style
        self._varying = varying
        self._should_stop = False
        self._finished_at = deque([time.monotonic()], NUM_RECENT_ROUNDS + 1)
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("round {task.completed}/{task.total}"),
            TextColumn("{task.fields[score]}"),
            TimeRemainingColumn(compact=True),
            TextColumn("left"),
            console=err,
            disable=not is_live(style),
        )
        self._task = self._bar.add_task(
            "setting up", total=num_rounds, completed=num_done, score=""
        )

    def __enter__(self) -> Self:
        self._bar.start()
        self._handlers = {
            number: signal.signal(number, self._request_stop)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._bar.stop()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def should_stop(self) -> bool:
        """Return whether the user asked to stop."""
        return self._should_stop

    def show_round(self, experiment: Experiment, line: dict[str, Any]) -> None:
        """Show a finished round.

        Args:
            experiment: The experiment.
            line: The round's line of `rounds.jsonl`.
        """
        self._num_done += 1
        self._finished_at.append(time.monotonic())
        if self._style == "quiet":
            return
        name = self._run_name(experiment)
        score = _score_text(experiment, line)
        if is_live(self._style):
            self._bar.update(self._task, completed=self._num_done, score=score, description=name)
            return
        recent = self._finished_at[-1] - self._finished_at[0]
        seconds_per_round = recent / (len(self._finished_at) - 1)
        seconds_left = seconds_per_round * (self._num_rounds - self._num_done)
        seconds = line["seconds"]["total"]
        text = (
            f"{name}, round {line['round']} of {experiment.rounds}: loss {_loss_text(line)} "
            f"{score}{_epsilon_text(line)} ({seconds:.1f} s; {seconds_left:.0f} s left)"
        )
        if line.get("skipped"):
            text += f"; skipped clients {', '.join(map(str, line['skipped']))}"
        print_note(text.replace("  ", " "))

    def _run_name(self, experiment: Experiment) -> str:
        name = algorithm_name(experiment.algorithm)
        if self._varying:
            settings = flatten_settings(experiment.to_dict())
            for key in self._varying:
                if key in settings:
                    name += f" {key} {_short(settings[key])}"
        return f"{name} seed {experiment.seed}"

    def _request_stop(self, number: int, frame: FrameType | None) -> None:
        if self._should_stop:
            raise KeyboardInterrupt
        self._should_stop = True
        print_note("stopping after this round; press again to stop at once.")


class DownloadProgress:
    """Shows the bytes of downloads."""

    def __init__(self) -> None:
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TimeRemainingColumn(),
            console=err,
            disable=not err.is_terminal,
        )
        self._tasks: dict[str, Any] = {}

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

    def show(self, name: str, num_done: int, total: int | None) -> None:
        """Show the progress of one file.

        Args:
            name: The file.
            num_done: Bytes so far.
            total: Bytes in all, if known.
        """
        if name not in self._tasks:
            self._tasks[name] = self._bar.add_task(name, total=total)
        self._bar.update(self._tasks[name], completed=num_done, total=total)


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
