"""Storage of results: one small file per experiment, one line per seed, append-only.

The first line of DIR/GROUP/NAME-KEY.jsonl describes the experiment. Each further line holds the
result of one seed and its provenance.
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

from fedcog.core import settings, tree
from fedcog.core.tasks import FORMER_KEYS, SCORE_KEYS
from fedcog.data.sources.locations import short_name
from fedcog.runs.config.composition import algorithm_name, named_layers
from fedcog.runs.config.experiment import (
    DEFAULT_CLIENTS,
    DEFAULT_MIN_EXAMPLES,
    DEFAULT_PARTITION,
    Experiment,
)
from fedcog.runs.records.checkpoint import Checkpoint
from fedcog.runs.records.recorded_run import Run
from fedcog.runs.records.run_directory import RecordError, RunDirectory
from fedcog.studies import result_checks
from fedcog.studies.probes import ProbeKind

ORIGINAL_DEFAULTS = {"weighting": "balanced"}
"""Defaults that algorithm settings had when the first results were stored.

Keys of results omit default values, so a later change of a default must not change old keys.
"""

Result = dict[str, Any]
"""One line of a result file, as `result_checks.check_result` accepts it."""


class Job(NamedTuple):
    """A unit of work: an experiment with its seed, the run it continues, and what to measure."""

    experiment: Experiment
    warm_start: Experiment | None = None
    probe: ProbeKind | None = None

    @property
    def seed(self) -> int:
        """The seed of the experiment."""
        return self.experiment.seed

    def description(self) -> dict[str, Any]:
        """Return every setting that affects the result, except the seed."""
        description: dict[str, Any] = {
            "settings": dict(_settings_of(self.experiment)),
            "rounds": self.experiment.rounds,
        }
        if self.warm_start is not None:
            start_settings = _settings_of(self.warm_start)
            description["start"] = {**start_settings, "rounds": self.warm_start.rounds}
        if self.probe:
            description["probe"] = self.probe
        return description

    @property
    def key(self) -> str:
        """A hash of the settings that differ from their defaults.

        A new setting at its default value therefore leaves existing keys unchanged.
        """
        return _key(self)

    @property
    def name(self) -> str:
        """Path of the result file without suffix: data set and partition, algorithm, key."""
        experiment = self.experiment
        # A location is an absolute path, which would lead out of the folder.
        dataset = re.sub(r"[^\w.-]+", "-", short_name(experiment.dataset))
        partition = re.sub(r"[^\w.]+", "-", experiment.partition_rule)
        prefix = f"{self.probe}-" if self.probe else ""
        algorithm = algorithm_name(experiment.algorithm)
        return f"{dataset}-{partition}/{prefix}{algorithm}-{self.key}"


@functools.lru_cache(maxsize=8192)
def _key(job: Job) -> str:
    content: dict[str, Any] = {
        "run": _non_default_settings(job.experiment),
        "rounds": job.experiment.rounds,
        "probe": job.probe or "",
    }
    if job.warm_start is not None:
        content["start"] = _non_default_settings(job.warm_start)
        content["start_rounds"] = job.warm_start.rounds
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:10]


@functools.lru_cache(maxsize=8192)
def _settings_of(experiment: Experiment) -> Mapping[str, Any]:
    values = dict(experiment.identifying_settings())
    values.pop("seed")
    return values


def _non_default_settings(experiment: Experiment) -> dict[str, Any]:
    """Settings that affect the result and differ from their (original) defaults."""
    defaults = {name: field.default for name, field in settings.settings(Experiment).items()}
    defaults |= {
        "partition": DEFAULT_PARTITION,
        "clients": DEFAULT_CLIENTS,
        "min_examples": DEFAULT_MIN_EXAMPLES,
    }
    changed: dict[str, Any] = {}
    for name, value in _settings_of(experiment).items():
        if isinstance(value, dict):
            continue
        if name not in defaults or value != defaults[name]:
            changed[name] = value
    for name, layer in named_layers(experiment.algorithm):
        for key, field in settings.settings(type(layer)).items():
            value = getattr(layer, key)
            if value != ORIGINAL_DEFAULTS.get(key, field.default):
                changed[f"{name}.{key}"] = value
    return changed


class Results:
    """A folder of results."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._cache: dict[Path, tuple[tuple[int, int], list[Result]]] = {}

    def by_seed(self, job: Job) -> dict[int, Result]:
        """Read the results of a job's experiment.

        Args:
            job: The job; its own seed does not matter.

        Returns:
            The stored results by seed; empty if the experiment was never run.

        Raises:
            RecordError: The file cannot be read, is damaged, or was made under other defaults.
        """
        file = self._file(job)
        try:
            lines = self._read_lines(file, job.probe)
            if not lines:
                return {}
            _check_defaults(file, _settings_of(job.experiment), lines[0]["settings"])
            return {line["seed"]: line for line in lines[1:]}
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise RecordError(
                f"cannot read {file} ({error.strerror or error}): choose another --results."
            ) from error
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise RecordError(
                f"{file} is damaged ({error}): restore it from a backup, or delete it."
            ) from error

    def _read_lines(self, file: Path, probe: ProbeKind | None) -> list[Result]:
        """Read and check a result file, or return it from the cache if it has not changed."""
        stat = file.stat()
        stamp = (stat.st_mtime_ns, stat.st_size)
        if file not in self._cache or self._cache[file][0] != stamp:
            lines = [json.loads(line) for line in _complete_lines(file.read_bytes()).splitlines()]
            for line in lines[1:]:
                result_checks.check_result(line, probe)
            self._cache[file] = (stamp, lines)
        return self._cache[file][1]

    def has(self, job: Job) -> bool:
        """Whether the result of this job, with its seed, is stored."""
        return job.seed in self.by_seed(job)

    def add(self, job: Job, result: Result) -> None:
        """Append the result of a job; do nothing if another process stored it first.

        Args:
            job: The job.
            result: Its result, without the seed.

        Raises:
            RecordError: The file cannot be written.
        """
        file = self._file(job)
        if self.has(job):
            return
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with open(file, "a+b") as open_file:
                fcntl.flock(open_file, fcntl.LOCK_EX)
                open_file.seek(0)
                content = _complete_lines(open_file.read())
                open_file.truncate(len(content))
                if not content:
                    open_file.write(_json_line(job.description()))
                open_file.write(_json_line({"seed": job.seed} | result))
                open_file.flush()
                os.fsync(open_file.fileno())
        except OSError as error:
            raise RecordError(
                f"cannot write {file}: {error.strerror or error}. Choose another --results."
            ) from error

    def run_directory(self, job: Job) -> Path:
        """Return the run directory of a job."""
        return self.path / "runs" / job.name / f"seed-{job.seed}"

    def notes(self) -> dict[str, str]:
        """Read notes.md.

        Returns:
            The text below each heading, by heading. The text above the first has the name "".

        Raises:
            RecordError: The file exists but cannot be read.
        """
        try:
            text = (self.path / "notes.md").read_text(encoding="utf-8")
        except FileNotFoundError:
            return {}
        except (OSError, UnicodeDecodeError) as error:
            raise RecordError(f"cannot read {self.path / 'notes.md'}: {error}.") from error
        introduction, *parts = re.split(r"^## +(\S+)[ \t]*$", text, flags=re.MULTILINE)
        notes = {"": introduction.strip()}
        for heading, part in zip(parts[::2], parts[1::2], strict=True):
            notes[heading] = part.strip()
        return notes

    def _file(self, job: Job) -> Path:
        return self.path / f"{job.name}.jsonl"


def _complete_lines(content: bytes) -> bytes:
    """Drop a last line without a line break: its writer was killed."""
    return content[: content.rfind(b"\n") + 1]


def _check_defaults(file: Path, expected: Mapping[str, Any], stored: Mapping[str, Any]) -> None:
    """Raise if results were stored while a setting had another default value."""
    common = expected.keys() & stored.keys()
    changed = [name for name in common if _differ(expected[name], stored[name])]
    if changed:
        raise RecordError(
            f"{file} was made when {', '.join(sorted(changed))} had other defaults: move it away."
        )


def _differ(value: Any, other: Any) -> bool:
    """Compare two settings; of two algorithms only the settings that both have."""
    if isinstance(value, dict) and isinstance(other, dict):
        return any(value[name] != other[name] for name in value.keys() & other.keys())
    return bool(value != other)


def _json_line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode() + b"\n"


RESULT_KEYS = {current: former for former, current in FORMER_KEYS.items()}
"""Keys of result files that differ from those of `rounds.jsonl`: stored results keep theirs."""


def summarize_run(run: Run) -> Result:
    """Reduce a run to what a result file stores.

    Args:
        run: A run that is finished, or has diverged.

    Returns:
        Scores and losses by round, seconds, the clients after the last round, and provenance.
    """
    lines = run.lines
    directory = RunDirectory(run.path)
    result: Result = {
        name: [_round_to_six_digits(line.get(name)) for line in lines]
        for name in (run.metric, "loss")
    }
    for name in SCORE_KEYS:
        values = [_round_to_six_digits(line.get(name)) for line in lines]
        if any(value is not None for value in values):
            result[RESULT_KEYS.get(name, name)] = values
    clients = _last_clients(run)
    result["clients"] = [{"client": client} | values for client, values in clients.items()]
    seconds = sum(line["seconds"]["total"] for line in lines if line.get("seconds"))
    result["seconds"] = round(seconds, 1)
    if run.diverged:
        result["diverged"] = run.diverged
    result["provenance"] = directory.provenance()
    return result


def _last_clients(run: Run) -> dict[int, dict[str, float | None]]:
    """What was recorded of each client in the last round, by client."""
    records = run.lines[-1]["local"] if run.lines else []
    names = ("distance", run.metric, f"own_{run.metric}")
    clients: dict[int, dict[str, float | None]] = {}
    for record in records:
        values = {name: _round_to_six_digits(record[name]) for name in names if name in record}
        clients[record["client"]] = values
    if run.experiment.evaluate_local:
        checkpoint = RunDirectory(run.path).load()
        if checkpoint is not None:
            for client, distance in _distances_to_mean(checkpoint).items():
                clients.setdefault(client, {})["gap"] = _round_to_six_digits(distance)
    return clients


def _distances_to_mean(checkpoint: Checkpoint) -> dict[int, float]:
    """L2 distance of each client's local model to the mean model, where clients keep theirs."""
    mean_model = checkpoint.server["params"]
    distances = {}
    for client, state in tree.unflatten(checkpoint.clients).items():
        if "previous" in state:
            difference = tree.change(mean_model, state["previous"])
            distances[int(client)] = float(tree.norm(difference))
    return distances


def _round_to_six_digits(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")
