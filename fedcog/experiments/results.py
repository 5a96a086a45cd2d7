"""Results worth keeping: a small file for every experiment, a line for every seed, never changed once written.

DIR/GROUP/NAME-KEY.jsonl begins with what was run; every further line is what came of it with one seed, and where that
line came from.
"""

import fcntl
import functools
import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedcog import settings, tree
from fedcog.experiments import trust
from fedcog.experiments.config import Experiment, layers, name_of
from fedcog.experiments.probes import Kind
from fedcog.experiments.record import Checkpoint, RecordError, RunDirectory
from fedcog.experiments.run import Run
from fedcog.task import SCORES

WERE = {"weighting": "balanced"}
"""Settings of algorithms that had other defaults when results were first named: keys leave those out, as they did."""


class Job(NamedTuple):
    """Something to be run or measured: an experiment with its seed, what it starts from, and what is looked at."""

    experiment: Experiment
    start: Experiment | None = None
    probe: Kind | None = None

    @property
    def seed(self) -> int:
        """The experiment's."""
        return self.experiment.seed

    def about(self) -> dict[str, Any]:
        """What was run, but for the seed: every setting that matters to the result."""
        found: dict[str, Any] = {"settings": dict(_told(self.experiment)), "rounds": self.experiment.rounds}
        if self.start is not None:
            found |= {"start": {**_told(self.start), "rounds": self.start.rounds}}
        return found | ({"probe": self.probe} if self.probe else {})

    @property
    def key(self) -> str:
        """A digest of what is not as usual, so that a setting that is new and unused leaves it as it was."""
        return _key(self)

    @property
    def name(self) -> str:
        """Where it belongs: its data and partition, its algorithm, and its key."""
        one = self.experiment
        rule = re.sub(r"[^\w.]+", "-", one.partition_rule)
        probe = f"{self.probe}-" if self.probe else ""
        return f"{one.dataset}-{rule}/{probe}{name_of(one.algorithm)}-{self.key}"


@functools.lru_cache(maxsize=8192)
def _key(job: Job) -> str:
    odd: dict[str, Any] = {"run": _unusual(job.experiment), "rounds": job.experiment.rounds, "probe": job.probe or ""}
    if job.start is not None:
        odd |= {"start": _unusual(job.start), "start_rounds": job.start.rounds}
    return hashlib.sha256(json.dumps(odd, sort_keys=True).encode()).hexdigest()[:10]


@functools.lru_cache(maxsize=8192)
def _told(experiment: Experiment) -> Mapping[str, Any]:
    return {name: value for name, value in experiment.telling().items() if name != "seed"}


def _unusual(experiment: Experiment) -> dict[str, Any]:
    """The settings that matter and are not as they would be if nobody had said anything."""
    usual = {name: one.default for name, one in settings.settings(Experiment).items()}
    told = {name: value for name, value in _told(experiment).items() if not isinstance(value, dict)}
    odd = {name: value for name, value in told.items() if name not in usual or value != usual[name]}
    for name, layer in layers(experiment.algorithm):
        own = settings.settings(type(layer))
        were = {key: WERE.get(key, one.default) for key, one in own.items()}
        odd |= {f"{name}.{key}": getattr(layer, key) for key in own if getattr(layer, key) != were[key]}
    return odd


class Results:
    """The folder of results."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._read: dict[Path, tuple[tuple[int, int], list[dict[str, Any]]]] = {}

    def of(self, job: Job) -> dict[int, dict[str, Any]]:
        """What came of a job's experiment, by seed; nothing where it was not run."""
        file = self._file(job)
        try:
            state = file.stat()
            stamp = state.st_mtime_ns, state.st_size
            if file not in self._read or self._read[file][0] != stamp:
                whole = file.read_bytes()
                cut = whole[: whole.rfind(b"\n") + 1]  # a line cut short by a kill does not count
                lines = [json.loads(line) for line in cut.splitlines()]
                for line in lines[1:]:
                    trust.check(line, job.probe)
                self._read[file] = stamp, lines
            lines = self._read[file][1]
            if not lines:
                return {}
            settings_, told = _told(job.experiment), lines[0]["settings"]
            if other := [name for name in settings_.keys() & told.keys() if _unlike(settings_[name], told[name])]:
                raise RecordError(f"{file} was made when {', '.join(sorted(other))} had other defaults: move it away.")
            return {line["seed"]: line for line in lines[1:]}
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise RecordError(f"cannot read {file} ({error.strerror or error}): choose another --results.") from error
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise RecordError(f"{file} is damaged ({error}): put it back as it was, or delete it.") from error

    def has(self, job: Job) -> bool:
        """Was this job done?"""
        return job.seed in self.of(job)

    def add(self, job: Job, found: dict[str, Any]) -> None:
        """Write down what came of a job."""
        file, line = self._file(job), {"seed": job.seed} | found
        if self.has(job):  # somebody else was quicker
            return
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with open(file, "a+b") as open_file:
                fcntl.flock(open_file, fcntl.LOCK_EX)
                open_file.seek(0)
                there = open_file.read()
                whole = there[: there.rfind(b"\n") + 1]  # a line cut short by a kill is written again
                open_file.truncate(len(whole))
                if not whole:
                    open_file.write(_line(job.about()))
                open_file.write(_line(line))
                open_file.flush()
                os.fsync(open_file.fileno())
        except OSError as error:
            raise RecordError(f"cannot write {file}: {error.strerror or error}. Choose another --results.") from error

    def run_directory(self, job: Job) -> Path:
        """Where the whole run of a job lives."""
        return self.path / "runs" / job.name / f"seed-{job.seed}"

    def notes(self) -> dict[str, str]:
        """What is to be said about each study: the parts of notes.md by their headings, the first under no name."""
        try:
            text = (self.path / "notes.md").read_text(encoding="utf-8")
        except FileNotFoundError:
            return {}
        except (OSError, UnicodeDecodeError) as error:
            raise RecordError(f"cannot read {self.path / 'notes.md'}: {error}.") from error
        first, *parts = re.split(r"^## +(\S+)[ \t]*$", text, flags=re.MULTILINE)
        return {"": first.strip()} | {name: part.strip() for name, part in zip(parts[::2], parts[1::2], strict=True)}

    def _file(self, job: Job) -> Path:
        return self.path / f"{job.name}.jsonl"


def _unlike(one: Any, other: Any) -> bool:
    """Do two settings differ? Of an algorithm's own those are compared that both know."""
    if isinstance(one, dict) and isinstance(other, dict):
        return any(one[name] != other[name] for name in one.keys() & other.keys())
    return bool(one != other)


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def digest(run: Run) -> dict[str, Any]:
    """What is kept of a run: scores and losses by round, seconds, its clients after the last round."""
    lines, directory = run.lines, RunDirectory(run.path)
    found: dict[str, Any] = {name: [_short(line.get(name)) for line in lines] for name in (run.measure, "loss")}
    for name in SCORES:
        values = [_short(line.get(name)) for line in lines]
        found |= {name: values} if any(value is not None for value in values) else {}
    last = lines[-1]["local"] if lines else []
    kept = ("distance", run.measure, f"own_{run.measure}")
    clients = {one["client"]: {name: _short(one[name]) for name in kept if name in one} for one in last}
    if run.experiment.evaluate_local and (checkpoint := directory.load()) is not None:
        for client, gap in _gaps(checkpoint).items():
            clients.setdefault(client, {})["gap"] = _short(gap)
    found["clients"] = [{"client": client} | told for client, told in clients.items()]
    found["seconds"] = round(sum(line["seconds"]["total"] for line in lines if line.get("seconds")), 1)
    found |= {"diverged": run.diverged} if run.diverged else {}
    return found | {"provenance": directory.provenance()}


def _gaps(checkpoint: Checkpoint) -> dict[int, float]:
    """How far each client's local model is from the mean that was made of all of them, where clients keep it."""
    clients, after = tree.unflatten(checkpoint.clients), checkpoint.server["params"]
    return {
        int(client): float(tree.norm(tree.change(after, own["previous"])))
        for client, own in clients.items()
        if "previous" in own
    }


def _short(value: float | None) -> float | None:
    """Six figures are more than enough; what is no number stays none."""
    return None if value is None else float(f"{value:.6g}")
