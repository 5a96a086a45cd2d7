"""The run directory: configuration, record and checkpoint of one run.

experiment.toml              the whole experiment, which can be run again
provenance.json              command, versions and machine
federation.safetensors       examples per client and class; some real images of each class
rounds.jsonl                 one line per round
exhibits/NNNNN.safetensors   artifacts of round NNNNN (generated inputs)
diverged.txt                 why training stopped early, if it diverged
checkpoint.safetensors       server and client states after the last checkpointed round
tracking.json                what trackers call the run, and the last round that each has
report.html                  the report
audit.json, audit.html       what the run leaks, if it was audited
model.*                      the global model, if it was exported
"""

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from fedcog.algorithms import ALGORITHMS, Algorithm
from fedcog.core import tree
from fedcog.core.settings import ConfigError
from fedcog.core.tasks import SCORE_KEYS, with_current_keys
from fedcog.core.toml import read_toml
from fedcog.core.tree import Params
from fedcog.federation.virtual_time.answers import VirtualState
from fedcog.runs.config.experiment import Experiment, read_recorded
from fedcog.runs.records.checkpoint import Checkpoint
from fedcog.runs.records.files import (
    replace_file,
    temporary_file,
    tensors_and_metadata,
    without_nan,
)

CHECKPOINT_FORMAT = 1
CHECKPOINT_FILE = "checkpoint.safetensors"
ROUNDS_FILE = "rounds.jsonl"
OBJECT_NAMES = ("data", "network", "augmentation")
"""What a user may pass in place of a name."""
ARTIFACT_FOLDER = "exhibits"
RUN_FILES = (
    "experiment.toml",
    "provenance.json",
    "federation.safetensors",
    ROUNDS_FILE,
    CHECKPOINT_FILE,
    "diverged.txt",
    "tracking.json",
    ".lock",
)
"""The files that a run consists of."""
NUM_LOCK_ATTEMPTS = 6
LOCK_PAUSE_SECONDS = 0.05
CHECKPOINT_PAUSE_FACTOR = 20
"""After a large checkpoint, the next one waits for this many times its writing time."""


class RecordError(Exception):
    """A run directory cannot be written, read or continued."""


class DirectoryBusy(RecordError):
    """Another run is writing to the directory."""


class RunDirectory:
    """The files of one run. They are written under a temporary name and renamed.

    Attributes:
        path: The directory.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._last_save = time.monotonic()
        self._bytes_per_second = 1e9  # an estimate, until one was written

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the directory until the end of the block or of the process.

        Raises:
            DirectoryBusy: If another process has locked it.
            RecordError: If it cannot be written.
        """
        try:
            str(self.path).encode()
        except UnicodeEncodeError:
            raise RecordError(
                f"{str(self.path)!a} is not a name in UTF-8: choose another --out."
            ) from None
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = open(self.path / ".lock", "w")  # noqa: SIM115 - open as long as it is locked
        except OSError as error:
            raise RecordError(
                f"cannot write to {self.path}: {error.strerror or error}. Choose another --out."
            ) from error
        with lock:
            for attempts_left in reversed(range(NUM_LOCK_ATTEMPTS)):
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except OSError:
                    if not attempts_left:
                        raise DirectoryBusy(
                            f"another run is writing to {self.path}: wait for it, or choose "
                            "another --out."
                        ) from None
                time.sleep(LOCK_PAUSE_SECONDS)  # `is_busy` of another process locks briefly
            yield

    def is_busy(self) -> bool:
        """Return whether a run is writing here, without preventing it."""
        try:
            with open(self.path / ".lock", "rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def exists(self) -> bool:
        """Return whether there is a run in the directory."""
        return (self.path / "experiment.toml").exists()

    def experiment(self, known: Mapping[str, type[Algorithm]] = ALGORITHMS) -> Experiment:
        """Return the run's experiment; unknown algorithms become placeholders.

        Raises:
            RecordError: If there is no run, or its record is damaged.
        """
        file = self.path / "experiment.toml"
        if not self.exists():
            below = sorted(found.parent for found in self.path.glob("*/*/experiment.toml"))
            hint = f" It holds several runs: name one, such as {below[0]}." if below else ""
            raise RecordError(f"there is no run in {self.path}: experiment.toml is missing.{hint}")
        try:
            return read_recorded(read_toml(file), known)
        except ConfigError as error:
            raise RecordError(f"{file} is damaged: {' '.join(error.faults)}") from error

    def begin(self, experiment: Experiment, provenance: dict[str, Any]) -> None:
        """Write the experiment and its provenance, and remove leftovers of a killed process.

        Args:
            experiment: The experiment.
            provenance: Command, versions and machine.
        """
        leftovers = [*self.path.glob(".*.part"), *self.path.glob(".tmp*")]
        for leftover in leftovers:
            leftover.unlink(missing_ok=True)
        with self._write_errors_explained("diverged.txt"):
            (self.path / "diverged.txt").unlink(missing_ok=True)
        self._write("provenance.json", json.dumps(provenance, indent=1).encode())
        self._write("experiment.toml", experiment.to_toml().encode())

    def provenance(self) -> dict[str, Any]:
        """Return command, versions and machine; empty if they are missing."""
        return self._read_json("provenance.json")

    def user_objects(self) -> dict[str, str]:
        """Return the names of the user's own objects; empty if there are none, or they are damaged.

        They are texts to show and to compare. Nothing is ever loaded because of them.
        """
        try:
            objects = self.provenance().get("objects")
        except RecordError:
            return {}
        if not isinstance(objects, dict):
            return {}
        return {name: str(objects[name]) for name in OBJECT_NAMES if name in objects}

    def record_failure(self, reason: str) -> None:
        """Record why training stopped early."""
        self._write("diverged.txt", reason.encode())

    def failure(self) -> str:
        """Return why training stopped early; empty if it did not."""
        try:
            return (self.path / "diverged.txt").read_text(errors="replace")
        except OSError:
            return ""

    # Rounds

    def lines(self) -> list[dict[str, Any]]:
        """Return the lines of all rounds; a line that a kill cut short does not count.

        Raises:
            RecordError: If a line is damaged.
        """
        file = self.path / ROUNDS_FILE
        try:
            lines = [json.loads(line) for line in self._complete_lines()]
        except (ValueError, RecursionError) as error:
            raise RecordError(f"{file} is damaged: {error}.") from error
        lines = [with_current_keys(line) if isinstance(line, dict) else line for line in lines]
        for number, line in enumerate(lines, 1):
            is_round = isinstance(line, dict) and line.get("round") == number
            local = line.get("local") if is_round else None
            if not (isinstance(local, list) and all(isinstance(one, dict) for one in local)):
                raise RecordError(f"{file} is damaged: line {number} is not round {number}.")
            for name in ("loss", *SCORE_KEYS):
                if not isinstance(line.get(name), float | int | None):
                    raise RecordError(
                        f"{file} is damaged: {name} in line {number} is not a number."
                    )
            for name in ("local_test", "metrics"):
                if not _is_evaluation(line.get(name, {})):
                    raise RecordError(
                        f"{file} is damaged: {name} in line {number} is no table of numbers."
                    )
        return lines

    def append(self, line: dict[str, Any]) -> None:
        """Append a line to `rounds.jsonl`; `RoundRecord` in `federation/server.py` makes it."""
        text = json.dumps(without_nan(line), separators=(",", ":"), allow_nan=False) + "\n"
        with (
            self._write_errors_explained(ROUNDS_FILE),
            open(self.path / ROUNDS_FILE, "ab") as file,
        ):
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())

    def rewind(self, num_rounds: int) -> None:
        """Remove the rounds after the first `num_rounds`, which will be repeated."""
        self._write(ROUNDS_FILE, self._first_lines(num_rounds))

    def copy_rounds(self, other: "RunDirectory", num_rounds: int) -> None:
        """Copy the first rounds of another run.

        Args:
            other: The other run.
            num_rounds: Number of rounds.
        """
        self._write(ROUNDS_FILE, other._first_lines(num_rounds))

    # Checkpoints

    def save(self, checkpoint: Checkpoint) -> None:
        """Replace the checkpoint."""
        started = time.monotonic()
        flat = tree.flatten({"server": checkpoint.server})
        flat |= {f"clients::{name}": value for name, value in checkpoint.clients.items()}
        info = {"format": CHECKPOINT_FORMAT, "round": checkpoint.round} | checkpoint.info
        if checkpoint.virtual is not None:
            answers = checkpoint.virtual.to_tensors()
            flat |= {f"answers::{name}": value for name, value in answers.items()}
            info["virtual_time"] = checkpoint.virtual.to_info()
        self._write_tensors(CHECKPOINT_FILE, flat, info)
        self._last_save = time.monotonic()
        seconds = max(self._last_save - started, 1e-6)
        self._bytes_per_second = checkpoint.nbytes / seconds

    def is_due(self, checkpoint: Checkpoint) -> bool:
        """Return whether to write a checkpoint: large ones may take a twentieth of the time."""
        pause = 0.0
        if checkpoint.is_large:
            pause = CHECKPOINT_PAUSE_FACTOR * checkpoint.nbytes / self._bytes_per_second
        return time.monotonic() >= self._last_save + pause

    def load(self) -> Checkpoint | None:
        """Return the checkpoint, if there is one; client states are read when they are used.

        Raises:
            RecordError: If the file is damaged or of another format.
        """
        file = self.path / CHECKPOINT_FILE
        if not file.exists():
            return None
        with self._open_tensors(CHECKPOINT_FILE) as (tensors, info):
            names = sorted(tensors.keys())
            flat = {
                name: tensors.get_tensor(name).clone()
                for name in names
                if name.startswith("server::")
            }
            clients = {
                name.removeprefix("clients::"): tensors.get_tensor(name)
                for name in names
                if name.startswith("clients::")
            }
            answers = {
                name.removeprefix("answers::"): tensors.get_tensor(name).clone()
                for name in names
                if name.startswith("answers::")
            }
        try:
            if info.pop("format") != CHECKPOINT_FORMAT:
                raise RecordError(
                    f"{file} has another format: use the version of fedcog that wrote it (see "
                    "provenance.json)."
                )
            round = info.pop("round")
            if type(round) is not int or round < 0:
                raise ValueError("the round is not a number")
            server = {"buffers": {}} | tree.unflatten(flat)["server"]
            virtual = None
            if "virtual_time" in info:
                virtual = VirtualState.from_record(answers, info.pop("virtual_time"))
            checkpoint = Checkpoint(round, server, clients, info, virtual)
            if any(client_id < 0 for client_id in checkpoint.client_ids):
                raise ValueError("a client id is negative")
            return checkpoint
        except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise RecordError(
                f"{file} is not a checkpoint of fedcog: delete {self.path} to start this run anew, "
                "or choose another --out."
            ) from error

    def checkpoint_round(self) -> int:
        """Return the number of rounds in the checkpoint, without reading its tensors."""
        if not (self.path / CHECKPOINT_FILE).exists():
            return 0
        with self._open_tensors(CHECKPOINT_FILE) as (_, info):
            round = info.get("round")
            return round if type(round) is int else 0

    def has_checkpoint_of(self, min_bytes: int) -> bool:
        """Return whether there is a checkpoint of at least `min_bytes` bytes."""
        file = self.path / CHECKPOINT_FILE
        return file.exists() and file.stat().st_size >= min_bytes

    def delete_checkpoint(self) -> None:
        """Delete the checkpoint."""
        with self._write_errors_explained(CHECKPOINT_FILE):
            (self.path / CHECKPOINT_FILE).unlink(missing_ok=True)

    # Other files

    def save_federation(self, tensors: Params, info: dict[str, Any]) -> None:
        """Write which client has which examples.

        Args:
            tensors: Counts per client and class, and some real images.
            info: Names of classes and of the data set.
        """
        self._write_tensors("federation.safetensors", tensors, info)

    def save_artifacts(self, round: int, tensors: Params) -> None:
        """Write the artifacts of a round.

        Args:
            round: The round, from 1.
            tensors: Artifacts by name.
        """
        self._write_tensors(_artifact_name(round), tensors, {})

    def artifact_files(self) -> list[str]:
        """Return the names of all files of artifacts, in order of rounds."""
        files = (self.path / ARTIFACT_FOLDER).glob("*.safetensors")
        return sorted(f"{ARTIFACT_FOLDER}/{file.name}" for file in files)

    def artifacts(self, round: int) -> Params | None:
        """Return the artifacts of a round, from 1; None if there are none."""
        name = _artifact_name(round)
        return self.tensors(name)[0] if (self.path / name).exists() else None

    def save_tracking(self, progress: dict[str, Any]) -> None:
        """Write which rounds trackers have."""
        self._write("tracking.json", json.dumps(progress, indent=1, sort_keys=True).encode())

    def tracking(self) -> dict[str, Any]:
        """Return which rounds trackers have; empty if no tracker was used."""
        return self._read_json("tracking.json")

    def save_report(self, html: str) -> Path:
        """Write the report and return its path."""
        self._write("report.html", html.encode())
        return self.path / "report.html"

    def tensors(self, name: str) -> tuple[Params, dict[str, Any]]:
        """Read a file of tensors.

        They are cloned, because their alignment in memory can change the last bit of a result.

        Returns:
            The tensors by name, and what the file says about itself.
        """
        with self._open_tensors(name) as (file, info):
            return {key: file.get_tensor(key).clone() for key in sorted(file.keys())}, info

    def client_names(self, num_clients: int) -> list[str]:
        """Return the name of each client's user.

        Args:
            num_clients: Number of clients.

        Returns:
            Names by client id; empty if clients are no users, have no names, or the federation
            record is missing or damaged.
        """
        try:
            with self._open_tensors("federation.safetensors") as (_, info):
                names = info.get("client_names")
        except RecordError:
            return []
        if not isinstance(names, list) or len(names) != num_clients:
            return []
        return [str(name) for name in names]

    @contextlib.contextmanager
    def _open_tensors(self, name: str) -> Iterator[tuple[Any, dict[str, Any]]]:
        """Open a file of tensors, and explain a damaged one."""
        try:
            with safe_open(self.path / name, "pt") as file:
                info = json.loads((file.metadata() or {}).get("about", "{}"))
                if not isinstance(info, dict):
                    raise ValueError("its metadata is not a table")
                yield file, info
        except (OSError, SafetensorError, ValueError, RecursionError) as error:
            raise RecordError(
                f"cannot read {self.path / name}: {error}. The file is damaged: delete {self.path} "
                "to start this run anew, or choose another --out."
            ) from error

    def _read_json(self, name: str) -> dict[str, Any]:
        """Return a small JSON file; empty if it is missing or damaged."""
        try:
            content = json.loads((self.path / name).read_text())
        except (OSError, ValueError, RecursionError):
            return {}
        return content if isinstance(content, dict) else {}

    def _first_lines(self, num_rounds: int) -> bytes:
        """Return the lines of the first rounds, which a checkpoint says exist."""
        lines = self._complete_lines()
        if len(lines) < num_rounds:
            raise RecordError(
                f"{self.path / ROUNDS_FILE} has {len(lines)} complete lines, but the checkpoint is "
                f"of round {num_rounds}: the record is damaged. Delete {self.path} to start this "
                "run anew, or choose another --out."
            )
        return b"".join(lines[:num_rounds])

    def _complete_lines(self) -> list[bytes]:
        file = self.path / ROUNDS_FILE
        try:
            content = file.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise RecordError(f"cannot read {file}: {error.strerror or error}.") from error
        return [line for line in content.splitlines(keepends=True) if line.endswith(b"\n")]

    def _write(self, name: str, content: bytes) -> None:
        with self._write_errors_explained(name):
            replace_file(self.path / name, content)

    def _write_tensors(self, name: str, tensors: Params, info: dict[str, Any]) -> None:
        with self._write_errors_explained(name), temporary_file(self.path / name) as temporary:
            on_host, metadata = tensors_and_metadata(tensors, info)
            try:
                save_file(
                    on_host, temporary, metadata
                )  # encoded in memory it would need twice more
            except SafetensorError as error:
                raise OSError(str(error)) from error

    @contextlib.contextmanager
    def _write_errors_explained(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RecordError(
                f"cannot write {self.path / name}: {error.strerror or error}. Everything up to the "
                "last checkpoint is safe; free some space, then continue with: fedcog run --resume "
                f"{self.path}"
            ) from error


def write_file(path: Path, content: bytes) -> None:
    """Write a report, figure or model anywhere but over the files of a run.

    Args:
        path: The file; a link is followed.
        content: Its content.

    Raises:
        RecordError: If it is part of a run, not a regular file, or cannot be written.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        kind = "a folder" if target.is_dir() else "a device or another special file"
        raise RecordError(f"cannot write {path}: it is {kind}. Choose another place.")
    if target.name in RUN_FILES and (target.parent / "experiment.toml").exists():
        raise RecordError(f"{path} is part of a run and would be lost: choose another place.")
    try:
        replace_file(target, content)
    except OSError as error:
        raise RecordError(
            f"cannot write {path}: {error.strerror or error}. Choose another place."
        ) from error


def check_writable(folder: Path, flag: str) -> None:
    """Create a folder if necessary, and check that files can be written to it.

    Args:
        folder: The folder.
        flag: The flag that chose it, for the error.

    Raises:
        RecordError: If it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError("it is not writable")
    except OSError as error:
        raise RecordError(
            f"cannot write to {folder} ({error.strerror or error}): choose another {flag}."
        ) from error


def runs_below(directories: Sequence[str | Path]) -> list[Path]:
    """Return every run in or below some directories.

    Raises:
        RecordError: If a directory holds no run.
    """
    found: dict[Path, None] = {}
    empty = []
    for directory in directories:
        files = sorted(Path(directory).rglob("experiment.toml"))
        found |= dict.fromkeys(file.parent for file in files)
        if not files and (Path(directory) / "sweep.md").is_file():
            raise RecordError(
                f"{directory} holds a sweep, which keeps no runs: see its report.html and sweep.md."
            )
        if not files:
            empty.append(str(directory))
    if empty:
        raise RecordError(f"there is no run in or below {' and '.join(empty)}.")
    return list(found)


def _artifact_name(round: int) -> str:
    return f"{ARTIFACT_FOLDER}/{round:05d}.safetensors"


def _is_evaluation(table: object) -> bool:
    """Return whether a part of a round's line holds numbers and lists of numbers by name.

    `clients` holds lists of the same length, one entry per client.
    """
    if not isinstance(table, dict):
        return False
    lists = [value for value in table.values() if isinstance(value, list)]
    clients = table.get("clients", {})
    if not isinstance(clients, dict) or not all(map(_is_list, clients.values())):
        return False
    if len({len(values) for values in clients.values()}) > 1:
        return False
    numbers = [value for name, value in table.items() if name != "clients"]
    return all(map(_is_list, lists)) and all(
        isinstance(value, float | int | list | None) for value in numbers
    )


def _is_list(values: object) -> bool:
    """Return whether this is a list of numbers, with None for those that are missing."""
    return isinstance(values, list) and all(
        isinstance(value, float | int | None) for value in values
    )
