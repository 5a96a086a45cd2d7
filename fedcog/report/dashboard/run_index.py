"""Index of all runs below some folders, and the data that the dashboard shows of them."""

import math
import os
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from fedcog.core.tasks import METRIC_LABELS, Metric
from fedcog.data.sources.locations import short_name
from fedcog.report.dashboard.run_follower import RunFollower, RunGone, seconds_since_change
from fedcog.report.dashboard.run_labels import short_labels
from fedcog.report.markup import printable
from fedcog.runs.config.composition import algorithm_name
from fedcog.runs.records.recorded_run import Run
from fedcog.runs.records.summary import COLUMNS, Group, group, row, used_columns

MAX_RUNS = 400
"""Number of runs that are shown; of more, the latest."""
MAX_FOLDERS = 50_000
"""Number of folders that a search visits."""
REFRESH_SECONDS = 0.5
"""Minimal time between two looks at the known runs."""
SEARCH_SECONDS = 2.0
"""Minimal time between two searches for runs."""
MAX_ROUNDS_PER_ANSWER = 20_000
MAX_EXHIBITS = 60
"""Number of rounds with generated images that are listed for a run."""
MAX_REASON_LENGTH = 2000


class RunIndex:
    """The runs in or below `roots`; each has a number as long as this object lives."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = list(roots)
        self.runs: dict[Path, RunFollower] = {}
        self.num_hidden = 0
        self._server_id = secrets.token_hex(8)  # the page starts afresh when it changes
        self._numbers: dict[Path, int] = {}
        self._folders: dict[Path, str] = {}
        self._lock = threading.Lock()
        self._last_refresh = -math.inf
        self._last_search = -math.inf
        self._search_duration = 0.0
        self._overview: dict[str, Any] = {}
        self._fingerprints: list[tuple[Path, object]] = []

    def overview(self) -> dict[str, Any]:
        """Return the content of runs.json, at most `REFRESH_SECONDS` old."""
        with self._lock:
            now = time.monotonic()
            if now - self._last_refresh >= REFRESH_SECONDS:
                self._refresh(now)
                fingerprints = [(path, run.fingerprint) for path, run in self.runs.items()]
                if fingerprints != self._fingerprints or not self._overview:
                    self._fingerprints = fingerprints
                    self._overview = self._build_overview()
                self._last_refresh = time.monotonic()
            return self._overview

    def find(self, number: int) -> RunFollower | None:
        """Return the run with a number, if it still exists."""
        with self._lock:
            for path, run in self.runs.items():
                if self._numbers[path] == number:
                    return run
            return None

    def knows(self, number: int) -> bool:
        """Whether there ever was a run with this number."""
        with self._lock:
            return 0 < number <= len(self._numbers)

    def curves(self, run: RunFollower, generation: int, first: int) -> dict[str, Any]:
        """Return the rounds of a run that a page does not have yet.

        Args:
            run: The run.
            generation: The generation of the rounds that the page has.
            first: How many rounds it has.

        Returns:
            The content of curves.json. It begins with the first round if the generation changed.
        """
        with self._lock:
            if generation != run.generation:
                first = 0
            lines = run.lines[first : first + MAX_ROUNDS_PER_ANSWER]
            known_run = run.run
            metric = _shown_metric(known_run)[0] if known_run else "accuracy"
            return {
                "generation": run.generation,
                "first": min(first, len(run.lines)),
                "loss": [line["loss"] for line in lines],
                "score": [line.get(metric) for line in lines],
                "clientScore": [_client_score(line) for line in lines],
            }

    def _refresh(self, now: float) -> None:
        """Read what is new in all runs, and search for runs if it is time."""
        if now - self._last_search >= max(SEARCH_SECONDS, 10 * self._search_duration):
            self._search()
            self._last_search = time.monotonic()
            self._search_duration = self._last_search - now
        for path, run in list(self.runs.items()):
            try:
                run.refresh()
            except RunGone:
                del self.runs[path]

    def _search(self) -> None:
        """Find all runs, and keep the followers of those that are known."""
        runs: dict[Path, RunFollower] = {}
        for root in self.roots:
            for path in runs_below(root):
                inner = path.relative_to(root)
                name = printable(str(inner) if inner.parts else path.absolute().name)
                runs[path] = self.runs.get(path) or RunFollower(path, name)
                top = inner.parts[:-1][:1]
                self._folders[path] = printable("/".join((root.absolute().name, *top)))
        self.num_hidden = max(0, len(runs) - MAX_RUNS)
        if self.num_hidden:
            by_age = sorted(runs, key=lambda path: seconds_since_change(path / "rounds.jsonl"))
            latest = set(by_age[:MAX_RUNS])
            runs = {path: run for path, run in runs.items() if path in latest}
        self.runs = runs
        for path in runs:
            self._numbers.setdefault(path, len(self._numbers) + 1)

    def _build_overview(self) -> dict[str, Any]:
        known_runs = [run for follower in self.runs.values() if (run := follower.run)]
        groups = group(known_runs) if known_runs else []
        group_indices = {
            run.path: index
            for index, each in enumerate(groups)
            for run in (*each.runs, *each.repeated)
        }
        rows = {}
        for index, each in enumerate(groups):
            scored = [run for run in each.runs if run.scores or run.diverged]
            if scored:
                rows[index] = row(Group(each.label, scored))
        columns = used_columns(list(rows.values()))
        table = [
            {"group": index, "cells": [printable(cells[column]) for column in columns]}
            for index, cells in rows.items()
        ]
        return {
            "server": self._server_id,
            "where": [printable(str(root)) for root in self.roots],
            "more": self.num_hidden,
            "runs": self._describe_all(group_indices),
            "groups": [printable(each.label) for each in groups],
            "columns": [COLUMNS[column] for column in columns],
            "table": table,
        }

    def _describe_all(self, group_indices: Mapping[Path, int]) -> list[dict[str, Any]]:
        """Describe all runs: first those that are running, then the others by folder."""
        labels = short_labels(
            [
                (self._numbers[path], follower.name, follower.run)
                for path, follower in self.runs.items()
            ]
        )
        descriptions = []
        for (path, follower), label in zip(self.runs.items(), labels, strict=True):
            description = self._describe(path, follower, group_indices.get(path))
            section = "running" if follower.state == "running" else self._folders[path]
            descriptions.append(description | {"label": label, "section": section})
        sections = list(dict.fromkeys(one["section"] for one in descriptions))
        return sorted(
            descriptions,
            key=lambda one: (one["state"] != "running", sections.index(one["section"])),
        )

    def _describe(
        self, path: Path, follower: RunFollower, group_index: int | None
    ) -> dict[str, Any]:
        """Describe one run for the page."""
        description: dict[str, Any] = {
            "id": self._numbers[path],
            "name": follower.name,
            "state": follower.state,
            "group": group_index,
            "done": len(follower.lines),
            "generation": follower.generation,
            "left": follower.seconds_left,
            "exhibits": follower.exhibits[-MAX_EXHIBITS:],
            "why": printable(follower.fault or follower.diverged)[:MAX_REASON_LENGTH],
            "partition": (path / "federation.safetensors").exists(),
        }
        run = follower.run
        if run is None:
            return description
        experiment = run.experiment
        key, label = _shown_metric(run)
        scores = [line[key] for line in follower.lines if line.get(key) is not None]
        partition = printable(experiment.partition_rule)
        return description | {
            "rounds": experiment.rounds,
            "seed": experiment.seed,
            "measure": label,
            "algorithm": printable(algorithm_name(experiment.algorithm)),
            "dataset": printable(short_name(experiment.dataset)),
            "rule": f"{experiment.clients} clients, {partition}",
            "last": scores[-1] if scores else None,
            "best": max(scores, default=None),
        }


def _client_score(line: dict[str, Any]) -> float | None:
    """Return the score over all clients' own test examples in a round."""
    local_test = line.get("local_test", {})
    return next((local_test[name] for name in METRIC_LABELS if name in local_test), None)


def _shown_metric(run: Run) -> tuple[str, str]:
    """Key and label of the score: on the test set, or on validation examples if that is unused."""
    if run.test_examples != "the test set":
        return run.metric, f"Clients' test {METRIC_LABELS[run.metric]}"
    if run.experiment.evaluate_test:
        return run.metric, f"Test {METRIC_LABELS[run.metric]}"
    recorded = {name for line in run.lines for name in line}
    metric: Metric = next(
        (name for name in METRIC_LABELS if f"validation_{name}" in recorded), "accuracy"
    )
    return f"validation_{metric}", f"Validation {METRIC_LABELS[metric]}"


def runs_below(root: Path) -> list[Path]:
    """Return the run directories in or below a folder.

    Hidden folders and the folders inside a run are not searched. A link is followed if it leads
    directly to a run.
    """
    runs = []
    for folder, inner, files in islice(os.walk(root), MAX_FOLDERS):
        if "experiment.toml" in files:
            runs.append(Path(folder))
            inner.clear()
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        links = [path for name in inner if (path := Path(folder, name)).is_symlink()]
        runs += [path for path in links if (path / "experiment.toml").is_file()]
    return runs
