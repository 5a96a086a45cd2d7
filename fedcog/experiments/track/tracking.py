"""The trackers of one run: told each round once, whatever is stopped, resumed or out of reach in between."""

import contextlib
import importlib
import importlib.util
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from torch import Tensor

from fedcog.experiments.config import Experiment
from fedcog.experiments.record import RecordError, RunDirectory
from fedcog.experiments.track.values import sheet, values
from fedcog.settings import ConfigError, unknown

PAUSE = 60.0  # seconds until a tracker that failed is tried again, at least
SLOWEST = 10  # and at least so many times what the failure took: a tenth of a run may go into that, not more
End = Literal["finished", "stopped", "diverged"]


class TrackWarning(UserWarning):
    """A tracker that was not told: says why, and what becomes of it."""


class Tracker(Protocol):
    """A run as one tracker has it."""

    run: str
    """What the tracker knows it by, to be gone on with."""
    told: int
    """The last round it has."""

    def tell(self, round: int, numbers: dict[str, float], picture: Tensor | None) -> None:
        """Add a round, so that it is seen at once."""

    def close(self, end: End) -> None:
        """Say how the run ended, for now."""


class Kind(NamedTuple):
    """A tracker that can be asked for: its package and module, and the class of ours that talks to it."""

    package: str
    module: str
    ours: str


TRACKERS = {
    "tensorboard": Kind("tensorboard", "tensorboard", "fedcog.experiments.track.tensorboard:TensorBoard"),
    "mlflow": Kind("mlflow-skinny", "mlflow", "fedcog.experiments.track.mlflow:MLflow"),
    "wandb": Kind("wandb", "wandb", "fedcog.experiments.track.wandb:WandB"),
}


def chosen(names: str | Sequence[str]) -> list[str]:
    """The trackers of those names, each once; a ConfigError where one is unknown, or its package is not there."""
    found = list(dict.fromkeys([names] if isinstance(names, str) else names))
    faults = [unknown("tracker", name, TRACKERS) for name in found if name not in TRACKERS]
    faults += [
        f"track {name} needs a package more: pip install 'fedcog[{name}]'."
        for name in found
        if name in TRACKERS and importlib.util.find_spec(TRACKERS[name].module) is None
    ]
    if faults:
        raise ConfigError(faults)
    return found


class Tracking:
    """Everything that follows one run. Nothing that goes wrong with it reaches the run: it is warned of, once.

    What a tracker missed, because it could not be reached or was not asked for then, it is told from the record as
    soon as it can be: nothing is missing there, and nothing there twice.
    """

    def __init__(self, names: Sequence[str], directory: RunDirectory, experiment: Experiment) -> None:
        self.directory, self.experiment, self.names = directory, experiment, list(names)
        self.lines = directory.lines() if names else []
        self.known = directory.tracking() if names else {}
        self.trackers: dict[str, Tracker] = {}
        self.failed: dict[str, float] = {}
        self.end: End = "stopped"
        self._everybody()

    def tell(self, line: dict[str, Any]) -> None:
        """Pass a finished round on; it is on the record already."""
        if self.names:
            self.lines.append(line)
            self._everybody()

    def close(self) -> None:
        """Let go of all trackers, with a last try for those that failed."""
        self._everybody(last=True)
        for name, tracker in self.trackers.items():
            with self._trying(name):
                tracker.close(self.end)

    def _everybody(self, last: bool = False) -> None:
        for name in self.names:
            if name not in self.failed or last or time.monotonic() >= self.failed[name]:
                with self._trying(name):
                    self._catch_up(name)

    def _catch_up(self, name: str) -> None:
        """Tell a tracker all rounds that it has not."""
        if name not in self.trackers:
            module, _, ours = TRACKERS[name].ours.partition(":")
            begin = getattr(importlib.import_module(module), ours)
            self.trackers[name] = begin(self.directory.path, self.experiment, *self._noted(name))
            self._note(name)
        tracker = self.trackers[name]
        for line in self.lines[tracker.told :]:
            tracker.tell(line["round"], values(line), self._picture(line["round"]))
            tracker.told = line["round"]
            self._note(name)

    def _noted(self, name: str) -> tuple[str, int]:
        """What a tracker calls this run, and the last round that it was told."""
        known = self.known.get(name)
        if not isinstance(known, dict) or not isinstance(known.get("run"), str) or type(known.get("told")) is not int:
            return "", 0
        return known["run"], max(0, known["told"])

    def _note(self, name: str) -> None:
        tracker = self.trackers[name]
        self.known |= {name: {"run": tracker.run, "told": tracker.told}}
        self.directory.save_tracking(self.known)

    def _picture(self, round: int) -> Tensor | None:
        """What was generated in a round, if anything."""
        try:
            shown = self.directory.exhibit(round)
            return None if shown is None else sheet(shown)
        except RecordError:  # damaged: whoever makes a report is told
            return None

    @contextlib.contextmanager
    def _trying(self, name: str) -> Iterator[None]:
        """Within it, whatever a tracker does wrong is told the first time, and no more."""
        began = time.monotonic()
        try:
            yield
        except Exception as error:  # a tracker is somebody else's program, and may fail in any way
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
            if name not in self.failed:
                warnings.warn(
                    f"{name} is not told of {self.directory.path} ({reason}). The run goes on; what is missed is told "
                    f"as soon as it can be, or by: fedcog run --resume {self.directory.path} --track {name}",
                    TrackWarning,
                    stacklevel=2,
                )
            now = time.monotonic()
            self.failed[name] = now + max(PAUSE, SLOWEST * (now - began))
