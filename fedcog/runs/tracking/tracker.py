"""The tracker interface, and the trackers of one run, which log every round exactly once."""

import contextlib
import importlib
import importlib.util
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch import Tensor

from fedcog.core.settings import ConfigError, unknown_name
from fedcog.runs.config.experiment import Experiment
from fedcog.runs.records.run_directory import RecordError, RunDirectory
from fedcog.runs.tracking.values import image_sheet, round_metrics

MIN_RETRY_SECONDS = 60.0
"""Shortest wait before a failed tracker is tried again."""
RETRY_FACTOR = 10
"""The wait is also this many times as long as the failure took, so retries take a tenth of a run.
"""
LAST_ROUND_KEY = "told"
"""Key of the last logged round in `tracking.json`. Existing files have it, so it stays."""
MAX_REASON_LENGTH = 300
"""Characters of a tracker's error that are shown."""

RunStatus = Literal["finished", "stopped", "diverged"]


class TrackerWarning(UserWarning):
    """A tracker could not log a round."""


class Tracker:
    """Logs one run. Subclass it to log to a service of yours, and pass an object of it.

    Attributes:
        run_id: What the service calls the run; stored, so that a resumed run continues it.
        last_round: The last round that the service has, from 1.

    Example:
        ```python
        import fedcog


        class Printer(fedcog.Tracker):
            def log(self, round, metrics, image):
                print(round, metrics["accuracy"])


        experiment = fedcog.Experiment(rounds=2, local_steps=5)
        fedcog.run(experiment, "runs/printed", track=Printer())
        ```
    """

    run_id: str = ""
    last_round: int = 0

    def open(self, path: Path, experiment: Experiment, run_id: str, last_round: int) -> None:
        """Start or continue the run at the service.

        Args:
            path: The run directory.
            experiment: The experiment.
            run_id: What the service called the run before; empty if it is new.
            last_round: The last round that was logged.
        """
        self.run_id = run_id
        self.last_round = last_round

    def log(self, round: int, metrics: dict[str, float], image: Tensor | None) -> None:
        """Log one round.

        Args:
            round: The round, from 1.
            metrics: Values by name.
            image: Generated images as one, `(3, H, W)`, uint8; None if there are none.
        """
        raise NotImplementedError

    def close(self, status: RunStatus) -> None:
        """End the run at the service."""


class TrackerEntry(NamedTuple):
    """A built-in tracker.

    Attributes:
        package: Name of its package at PyPI.
        module: Module that must be installed.
        path: Our class, as module:Class.
    """

    package: str
    module: str
    path: str


TRACKERS = {
    "tensorboard": TrackerEntry(
        "tensorboard", "tensorboard", "fedcog.runs.tracking.tensorboard:TensorBoard"
    ),
    "mlflow": TrackerEntry("mlflow-skinny", "mlflow", "fedcog.runs.tracking.mlflow:MLflow"),
    "wandb": TrackerEntry("wandb", "wandb", "fedcog.runs.tracking.wandb:WandB"),
}
"""Built-in trackers by name."""


def check_trackers(trackers: Sequence[str | Tracker]) -> None:
    """Check that trackers exist and their packages are installed.

    Raises:
        ConfigError: If one is unknown or its package is missing.
    """
    faults = []
    for tracker in trackers:
        if isinstance(tracker, Tracker):
            continue
        if tracker not in TRACKERS:
            faults.append(unknown_name("tracker", str(tracker), TRACKERS))
        elif importlib.util.find_spec(TRACKERS[tracker].module) is None:
            faults.append(f"track {tracker} needs a package: pip install 'fedcog[{tracker}]'.")
    if faults:
        raise ConfigError(faults)


class Trackers:
    """All trackers of one run.

    No failure of a tracker reaches the run: it is reported once as a warning. What a tracker missed
    is logged from the record as soon as it works again, so every round is logged exactly once.
    """

    def __init__(
        self,
        trackers: Sequence[str | Tracker],
        directory: RunDirectory,
        experiment: Experiment,
    ) -> None:
        """Open trackers.

        Args:
            trackers: Names of built-in trackers, or tracker objects.
            directory: The run directory.
            experiment: The experiment.
        """
        self._directory = directory
        self._experiment = experiment
        self._objects = {
            type(tracker).__name__: tracker for tracker in trackers if isinstance(tracker, Tracker)
        }
        names = [
            type(tracker).__name__ if isinstance(tracker, Tracker) else tracker
            for tracker in trackers
        ]
        self._names = list(dict.fromkeys(names))
        self._lines = directory.lines() if self._names else []
        self._stored = directory.tracking() if self._names else {}
        self._open: dict[str, Tracker] = {}
        self._retry_at: dict[str, float] = {}
        self._log_missing()

    def log(self, line: dict[str, Any]) -> None:
        """Log a finished round, which is already recorded."""
        if self._names:
            self._lines.append(line)
            self._log_missing()

    def close(self, status: RunStatus) -> None:
        """Close all trackers, after a last try with those that failed."""
        self._log_missing(is_last=True)
        for name, tracker in self._open.items():
            with self._failures_reported(name):
                tracker.close(status)

    def _log_missing(self, is_last: bool = False) -> None:
        """Log what each tracker has not, unless it failed recently."""
        for name in self._names:
            is_due = name not in self._retry_at or time.monotonic() >= self._retry_at[name]
            if is_due or is_last:
                with self._failures_reported(name):
                    self._catch_up(name)

    def _catch_up(self, name: str) -> None:
        """Log all rounds that a tracker has not."""
        if name not in self._open:
            tracker = self._objects.get(name) or _create(name)
            run_id, last_round = self._stored_progress(name)
            tracker.open(self._directory.path, self._experiment, run_id, last_round)
            self._open[name] = tracker
            self._store_progress(name)
        tracker = self._open[name]
        for line in self._lines[tracker.last_round :]:
            tracker.log(line["round"], round_metrics(line), self._image(line["round"]))
            tracker.last_round = line["round"]
            self._store_progress(name)

    def _stored_progress(self, name: str) -> tuple[str, int]:
        """Return what a tracker calls this run, and the last round that it has."""
        stored = self._stored.get(name)
        if not isinstance(stored, dict):
            return "", 0
        run_id = stored.get("run")
        last_round = stored.get(LAST_ROUND_KEY)
        if not isinstance(run_id, str) or type(last_round) is not int:
            return "", 0
        return run_id, max(0, last_round)

    def _store_progress(self, name: str) -> None:
        tracker = self._open[name]
        self._stored |= {name: {"run": tracker.run_id, LAST_ROUND_KEY: tracker.last_round}}
        self._directory.save_tracking(self._stored)

    def _image(self, round: int) -> Tensor | None:
        """Return what was generated in a round, as one image."""
        try:
            artifacts = self._directory.artifacts(round)
        except RecordError:  # a damaged file; reports mention it
            return None
        return None if artifacts is None else image_sheet(artifacts)

    @contextlib.contextmanager
    def _failures_reported(self, name: str) -> Iterator[None]:
        """Turn the first failure of a tracker into a warning, and schedule a retry."""
        started = time.monotonic()
        try:
            yield
        except Exception as error:  # a tracker is a foreign program and may raise anything
            lines = str(error).strip().splitlines() or [type(error).__name__]
            if name not in self._retry_at:
                path = self._directory.path
                warnings.warn(
                    f"{name} could not log {path} ({lines[0][:MAX_REASON_LENGTH]}). The run "
                    "continues. Missing rounds are logged as soon as possible, or with: "
                    f"fedcog run --resume {path} --track {name}",
                    TrackerWarning,
                    stacklevel=2,
                )
            now = time.monotonic()
            wait = max(MIN_RETRY_SECONDS, RETRY_FACTOR * (now - started))
            self._retry_at[name] = now + wait


def _create(name: str) -> Tracker:
    """Import and create a built-in tracker."""
    module, _, cls = TRACKERS[name].path.partition(":")
    tracker: Tracker = getattr(importlib.import_module(module), cls)()
    return tracker
