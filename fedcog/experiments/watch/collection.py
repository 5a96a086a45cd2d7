"""All runs below some folders, found again and again, and what a page shows of them."""

import os
import secrets
import threading
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from fedcog.experiments.config import name_of
from fedcog.experiments.report.markup import printable
from fedcog.experiments.run import Run
from fedcog.experiments.summary import COLUMNS, Group, group, row
from fedcog.experiments.watch.following import Followed, Gone, age
from fedcog.task import MEASURES, Measure

RUNS = 400  # more are counted, and the latest shown
FOLDERS = 50_000  # more are not looked into
PAUSE = 0.5  # seconds between two looks at the runs
SEARCH = 2.0  # and between two at the folders, at least
POINTS = 20_000  # rounds sent at once
SHOWN = 60  # exhibits told of


class Collection:
    """The runs in or below `roots`, each known by a number of its own as long as this object lives."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = list(roots)
        self.runs: dict[Path, Followed] = {}
        self.more = 0
        self._name = secrets.token_hex(8)  # a page whose server is another now begins anew
        self._numbers: dict[Path, int] = {}
        self._lock = threading.Lock()
        self._looked = self._searched = -1e9
        self._took = 0.0
        self._page: dict[str, Any] = {}
        self._marks: list[tuple[Path, object]] = []

    def page(self) -> dict[str, Any]:
        """What there is to show, no older than half a second."""
        with self._lock:
            now = time.monotonic()
            if now - self._looked >= PAUSE:
                self._refresh(now)
                marks = [(path, run.mark) for path, run in self.runs.items()]
                if marks != self._marks or not self._page:
                    self._marks, self._page = marks, self._shown()
                self._looked = time.monotonic()
            return self._page

    def find(self, number: int) -> Followed | None:
        """The run with a number, if it is still there."""
        with self._lock:
            return next((run for path, run in self.runs.items() if self._numbers[path] == number), None)

    def knows(self, number: int) -> bool:
        """Was there ever a run with that number?"""
        with self._lock:
            return 0 < number <= len(self._numbers)

    def curves(self, run: Followed, generation: int, first: int) -> dict[str, Any]:
        """The rounds of a run after the first so many, or all if those are no longer its own."""
        with self._lock:
            first = first if generation == run.generation else 0
            some, known = run.lines[first : first + POINTS], run.run
            measure = _judged(known)[0] if known else "accuracy"
            told = {"generation": run.generation, "first": min(first, len(run.lines))}
            return told | {"loss": [one["loss"] for one in some], "score": [one.get(measure) for one in some]}

    def _refresh(self, now: float) -> None:
        if now - self._searched >= max(SEARCH, 10 * self._took):
            self._search()
            self._searched = time.monotonic()
            self._took = self._searched - now
        for path, run in list(self.runs.items()):
            try:
                run.refresh()
            except Gone:
                del self.runs[path]

    def _search(self) -> None:
        found: dict[Path, Followed] = {}
        for root in self.roots:
            for path in below(root):
                inner = path.relative_to(root)
                name = printable(str(inner) if inner.parts else path.absolute().name)
                found[path] = self.runs.get(path) or Followed(path, name)
        if len(found) > RUNS:
            latest = sorted(found, key=lambda path: age(path / "rounds.jsonl"))[:RUNS]
            self.more, keep = len(found) - RUNS, set(latest)
            found = {path: run for path, run in found.items() if path in keep}
        else:
            self.more = 0
        self.runs = found
        for path in found:
            self._numbers.setdefault(path, len(self._numbers) + 1)

    def _shown(self) -> dict[str, Any]:
        known = [(followed, run) for followed in self.runs.values() if (run := followed.run)]
        groups = group([run for _, run in known]) if known else []
        place = {run.path: number for number, each in enumerate(groups) for run in each.runs}
        scored = [[run for run in each.runs if run.scores or run.diverged] for each in groups]
        rows = [(n, row(Group(groups[n].label, own))) for n, own in enumerate(scored) if own]
        return {
            "server": self._name,
            "where": [printable(str(root)) for root in self.roots],
            "more": self.more,
            "runs": [self._told(path, one, place.get(path)) for path, one in self.runs.items()],
            "groups": [printable(each.label) for each in groups],
            "columns": list(COLUMNS),
            "table": [{"group": n, "cells": [printable(cell) for cell in cells]} for n, cells in rows],
        }

    def _told(self, path: Path, one: Followed, place: int | None) -> dict[str, Any]:
        run, experiment = one.run, one.experiment
        told: dict[str, Any] = {"id": self._numbers[path], "name": one.name, "state": one.state, "group": place}
        told |= {"done": len(one.lines), "generation": one.generation, "left": one.left}
        told |= {"exhibits": one.exhibits[-SHOWN:], "why": printable(one.fault or one.diverged)[:2000]}
        told |= {"partition": (path / "federation.safetensors").exists()}
        if run is not None and experiment is not None:
            name, words = _judged(run)
            scores = [line[name] for line in one.lines if line.get(name) is not None]
            told |= {"rounds": experiment.rounds, "seed": experiment.seed, "measure": words}
            told |= {"algorithm": printable(name_of(experiment.algorithm)), "dataset": printable(experiment.dataset)}
            told |= {"rule": f"{experiment.clients} clients, {printable(experiment.partition_rule)}"}
            told |= {"last": scores[-1] if scores else None, "best": max(scores, default=None)}
        return told


def _judged(run: Run) -> tuple[str, str]:
    """What a run is judged by, and in words: on the test set or, where that is left alone, on validation examples."""
    if run.experiment.evaluate_test:
        return run.measure, f"Test {MEASURES[run.measure]}"
    held_out = {name for line in run.lines for name in line}
    measure: Measure = next((name for name in MEASURES if f"validation_{name}" in held_out), "accuracy")
    return f"validation_{measure}", f"Validation {MEASURES[measure]}"


def below(root: Path) -> list[Path]:
    """The runs in or below a folder; a run holds no others, and hidden folders none at all."""
    found = []
    for folder, inner, files in islice(os.walk(root), FOLDERS):
        if "experiment.toml" in files:
            found.append(Path(folder))
            inner.clear()
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        linked = [place for name in inner if (place := Path(folder, name)).is_symlink()]  # not looked into any deeper
        found += [place for place in linked if (place / "experiment.toml").is_file()]
    return found
