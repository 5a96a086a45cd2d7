"""A run directory: what was asked, what happened round by round, and where it stands.

experiment.toml          the whole experiment, re-runnable
provenance.json          command, versions and machine
federation.safetensors   examples per client and class; a few real pictures of each class
rounds.jsonl             one line a round
exhibits/NNNNN.safetensors   what a report shows of round NNNNN (generated inputs)
diverged.txt             why training ended early, if it left the numbers
checkpoint.safetensors   the server's and every client's state after the last checkpointed round
tracking.json            what trackers call the run, and the last round that each was told
report.html              the run to look at
model.*                  the global model, if it was exported
"""

import contextlib
import fcntl
import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialise
from safetensors.torch import save_file

from fedcog import tree
from fedcog.algorithms import ALGORITHMS, Algorithm
from fedcog.experiments.config import Experiment, read_recorded, read_toml
from fedcog.settings import ConfigError
from fedcog.task import SCORES
from fedcog.tree import Params, State

FORMAT = 1
TRIES = 6  # to have a directory for oneself
OWN = (
    *("experiment.toml", "provenance.json", "federation.safetensors", "rounds.jsonl", "checkpoint.safetensors"),
    *("diverged.txt", "tracking.json", ".lock"),
)
"""The files that a run is lost without."""
HEAVY = 1 << 30
"""Bytes of a checkpoint that is written seldom, and kept no longer than need be: 200 ResNet-18 clients keep 9 GB."""
REST = 20
"""How many times as long as it takes to write a heavy checkpoint nothing is written after it."""


class RecordError(Exception):
    """A run directory that cannot be written or continued: says which file, why, and what to do."""


class Busy(RecordError):
    """A run directory that another run is writing to right now."""


class Checkpoint(NamedTuple):
    """Where a run stands: rounds done, the server's state, every client's, and what they belong to."""

    round: int
    server: State
    clients: Params
    about: dict[str, Any]

    @property
    def nbytes(self) -> int:
        """How large it is."""
        return sum(value.nbytes for part in (tree.flatten(self.server), self.clients) for value in part.values())

    @property
    def heavy(self) -> bool:
        """Is it HEAVY?"""
        return self.nbytes >= HEAVY

    @property
    def known(self) -> set[int]:
        """The clients that have taken part."""
        return {int(name.split("::")[0]) for name in self.clients}


class RunDirectory:
    """The files of one run. Whole files are written under a temporary name and renamed."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._rested, self._speed = time.monotonic(), 1e9  # bytes a second, until that is known

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """This directory for ourselves, until the process ends however it ends."""
        try:
            str(self.path).encode()
        except UnicodeEncodeError:
            raise RecordError(f"{str(self.path)!a} is no name in UTF-8: choose another --out.") from None
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = open(self.path / ".lock", "w")  # noqa: SIM115 - held open as long as the lock
        except OSError as error:
            raise RecordError(
                f"cannot write to {self.path}: {error.strerror or error}. Choose another --out."
            ) from error
        with lock:
            for left in reversed(range(TRIES)):
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except OSError:
                    if not left:
                        raise Busy(
                            f"another run is writing to {self.path} right now: wait for it, or choose another --out."
                        ) from None
                time.sleep(0.05)  # somebody may only have asked whether it is busy
            yield

    def busy(self) -> bool:
        """Is a run writing here right now? To ask changes nothing, and keeps nobody from writing."""
        try:
            with open(self.path / ".lock", "rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def exists(self) -> bool:
        """Does a run live here?"""
        return (self.path / "experiment.toml").exists()

    def experiment(self, known: Mapping[str, type[Algorithm]] = ALGORITHMS) -> Experiment:
        """The experiment this run is of; algorithms that are not `known` are only names."""
        if not self.exists():
            below = sorted(file.parent for file in self.path.glob("*/*/experiment.toml"))
            hint = f" It is a folder of several: name one, such as {below[0]}." if below else ""
            raise RecordError(f"there is no run in {self.path}: experiment.toml is missing.{hint}")
        try:
            return read_recorded(read_toml(self.path / "experiment.toml"), known)
        except ConfigError as error:
            raise RecordError(f"{self.path / 'experiment.toml'} is damaged: {' '.join(error.faults)}") from error

    def begin(self, experiment: Experiment, provenance: dict[str, Any]) -> None:
        """Say what this run is of."""
        for left in (*self.path.glob(".*.part"), *self.path.glob(".tmp*")):  # ours and safetensors', of a killed write
            left.unlink(missing_ok=True)
        with self._writing("diverged.txt"):
            (self.path / "diverged.txt").unlink(missing_ok=True)  # of an earlier try
        self._write("provenance.json", json.dumps(provenance, indent=1).encode())
        self._write("experiment.toml", experiment.to_toml().encode())

    def provenance(self) -> dict[str, Any]:
        """Where the run came from; empty where nobody wrote it down."""
        return self._table("provenance.json")

    def fail(self, reason: str) -> None:
        """Say why training ended early."""
        self._write("diverged.txt", reason.encode())

    def failure(self) -> str:
        """Why training ended early; nothing where it did not."""
        try:
            return (self.path / "diverged.txt").read_text(errors="replace")
        except OSError:
            return ""

    def lines(self) -> list[dict[str, Any]]:
        """What happened, round by round; a line cut short by a kill does not count."""
        file = self.path / "rounds.jsonl"
        try:
            lines = [json.loads(line) for line in self._whole_lines()]
        except (ValueError, RecursionError) as error:
            raise RecordError(f"{file} is damaged: {error}.") from error
        for number, line in enumerate(lines, 1):
            local = line.get("local") if isinstance(line, dict) and line.get("round") == number else None
            if not (isinstance(local, list) and all(isinstance(client, dict) for client in local)):
                raise RecordError(f"{file} is damaged: line {number} is not that of round {number}.")
            for name in ("loss", *SCORES):
                if not isinstance(line.get(name), float | int | None):
                    raise RecordError(f"{file} is damaged: line {number} has a {name} that is no number.")
        return lines

    def append(self, line: dict[str, Any]) -> None:
        """Add a round."""
        text = json.dumps(_finite(line), separators=(",", ":"), allow_nan=False) + "\n"
        with self._writing("rounds.jsonl"), open(self.path / "rounds.jsonl", "ab") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())

    def rewind(self, rounds: int) -> None:
        """Forget the rounds after the first `rounds`: they were not checkpointed and will happen again."""
        self._write("rounds.jsonl", self._first(rounds))

    def adopt(self, other: "RunDirectory", rounds: int) -> None:
        """Take over the first rounds of another run."""
        self._write("rounds.jsonl", other._first(rounds))

    def _first(self, rounds: int) -> bytes:
        """The lines of the first rounds, which a checkpoint says are there."""
        lines = self._whole_lines()
        if len(lines) < rounds:
            raise RecordError(
                f"{self.path / 'rounds.jsonl'} has {len(lines)} whole lines, but the checkpoint is of round {rounds}: "
                f"the record is damaged. Delete {self.path} to start this run anew, or choose another --out."
            )
        return b"".join(lines[:rounds])

    def save(self, checkpoint: Checkpoint) -> None:
        """Replace the checkpoint, or leave the old one as it was."""
        begun = time.monotonic()
        flat = tree.flatten({"server": checkpoint.server})
        flat |= {f"clients::{name}": value for name, value in checkpoint.clients.items()}
        about = {"format": FORMAT, "round": checkpoint.round} | checkpoint.about
        self._tensors("checkpoint.safetensors", flat, about)
        self._rested = time.monotonic()
        self._speed = checkpoint.nbytes / max(self._rested - begun, 1e-6)

    def due(self, checkpoint: Checkpoint) -> bool:
        """Is it time to write this one? Of heavy ones, only so often that they take a twentieth of all time."""
        rest = REST * checkpoint.nbytes / self._speed if checkpoint.heavy else 0.0
        return time.monotonic() >= self._rested + rest

    def load(self) -> Checkpoint | None:
        """The checkpoint, if there is one; what clients keep is read from the file when their turn comes."""
        if not (self.path / "checkpoint.safetensors").exists():
            return None
        with self._opened("checkpoint.safetensors") as (file, about):
            names = sorted(file.keys())
            flat = {name: file.get_tensor(name).clone() for name in names if name.startswith("server::")}
            clients = {name[9:]: file.get_tensor(name) for name in names if name.startswith("clients::")}
        try:
            if about.pop("format") != FORMAT:
                raise RecordError(
                    f"{self.path / 'checkpoint.safetensors'} was written in another format: use the version of fedcog "
                    "that wrote it (see provenance.json)."
                )
            round = about.pop("round")
            if type(round) is not int or round < 0:
                raise ValueError("a checkpoint counts its rounds")
            state = tree.unflatten(flat)
            checkpoint = Checkpoint(round, {"buffers": {}} | state["server"], clients, about)
            assert all(client >= 0 for client in checkpoint.known)
            return checkpoint
        except (KeyError, TypeError, ValueError, AssertionError) as error:
            raise RecordError(
                f"{self.path / 'checkpoint.safetensors'} is not a checkpoint of fedcog's: delete {self.path} to start "
                "this run anew, or choose another --out."
            ) from error

    def rounds(self) -> int:
        """The rounds that the checkpoint is of, which is not read as a whole for that; none where there is none."""
        if not (self.path / "checkpoint.safetensors").exists():
            return 0
        with self._opened("checkpoint.safetensors") as (_, about):
            round = about.get("round")
            return round if type(round) is int else 0

    def weighs(self, least: int) -> bool:
        """Is there a checkpoint of so many bytes, or more?"""
        file = self.path / "checkpoint.safetensors"
        return file.exists() and file.stat().st_size >= least

    def lighten(self) -> None:
        """Do without the checkpoint."""
        with self._writing("checkpoint.safetensors"):
            (self.path / "checkpoint.safetensors").unlink(missing_ok=True)

    def save_federation(self, tensors: Params, about: dict[str, Any]) -> None:
        """Write down who holds what."""
        self._tensors("federation.safetensors", tensors, about)

    def save_exhibit(self, round: int, tensors: Params) -> None:
        """Write down what a report shows of a round."""
        self._tensors(f"exhibits/{round:05d}.safetensors", tensors, {})

    def exhibits(self) -> list[str]:
        """The names of all exhibits, in order of their rounds."""
        return sorted(f"exhibits/{file.name}" for file in (self.path / "exhibits").glob("*.safetensors"))

    def exhibit(self, round: int) -> Params | None:
        """What a report shows of a round; None where there is nothing."""
        name = f"exhibits/{round:05d}.safetensors"
        return self.tensors(name)[0] if (self.path / name).exists() else None

    def save_tracking(self, known: dict[str, Any]) -> None:
        """Write down what trackers know of this run."""
        self._write("tracking.json", json.dumps(known, indent=1, sort_keys=True).encode())

    def tracking(self) -> dict[str, Any]:
        """What trackers know of this run; nothing where it was never written down."""
        return self._table("tracking.json")

    def save_report(self, html: str) -> Path:
        """Write the page to look at."""
        self._write("report.html", html.encode())
        return self.path / "report.html"

    def tensors(self, name: str) -> tuple[Params, dict[str, Any]]:
        """A file of tensors, in memory as any other of torch's (the last bit may hang on that), and what it says."""
        with self._opened(name) as (file, about):
            return {key: file.get_tensor(key).clone() for key in sorted(file.keys())}, about

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[tuple[Any, dict[str, Any]]]:
        """A file of tensors, open to be read, and what it says."""
        try:
            with safe_open(self.path / name, "pt") as file:
                about = json.loads((file.metadata() or {}).get("about", "{}"))
                if not isinstance(about, dict):
                    raise ValueError("what it says about itself is no table")
                yield file, about
        except (OSError, SafetensorError, ValueError, RecursionError) as error:
            raise RecordError(
                f"cannot read {self.path / name}: {error}. The file is damaged: delete {self.path} to start this run "
                "anew, or choose another --out."
            ) from error

    def _table(self, name: str) -> dict[str, Any]:
        """What a small file of JSON says; nothing where it is not there, or damaged."""
        try:
            found = json.loads((self.path / name).read_text())
        except (OSError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def _tensors(self, name: str, tensors: Params, about: dict[str, Any]) -> None:
        with self._writing(name), _replacing(self.path / name) as beside:
            resting, told = _resting(tensors, about)
            try:
                save_file(resting, beside, told)  # as bytes it would be in memory twice more
            except SafetensorError as error:
                raise OSError(str(error)) from error

    def _whole_lines(self) -> list[bytes]:
        try:
            content = (self.path / "rounds.jsonl").read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise RecordError(f"cannot read {self.path / 'rounds.jsonl'}: {error.strerror or error}.") from error
        return [line for line in content.splitlines(keepends=True) if line.endswith(b"\n")]

    def _write(self, name: str, content: bytes) -> None:
        with self._writing(name):
            _replace(self.path / name, content)

    @contextlib.contextmanager
    def _writing(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RecordError(
                f"cannot write {self.path / name}: {error.strerror or error}. Everything up to the last checkpoint is "
                f"safe; make room, then continue with: fedcog run --resume {self.path}"
            ) from error


def packed(tensors: Params, about: dict[str, Any]) -> bytes:
    """A file of tensors, and what it says of itself: JSON under "about"."""
    return serialise(*_resting(tensors, about))


def _resting(tensors: Params, about: dict[str, Any]) -> tuple[Params, dict[str, str]]:
    # One metadata entry only: safetensors writes several in no particular order.
    resting = {key: value.detach().to("cpu").contiguous() for key, value in tensors.items()}
    return resting, {"about": json.dumps(about, sort_keys=True)}


def write_file(path: Path, content: bytes) -> None:
    """A page, figure or model, anywhere but in place of what a run consists of, or of what is no file."""
    place = Path(os.path.realpath(path))  # what a link leads to, and not the link
    if place.exists() and not place.is_file():
        kind = "a folder" if place.is_dir() else "a device, or something else that is no file"
        raise RecordError(f"cannot write {path}: it is {kind}. Choose another place.")
    if place.name in OWN and (place.parent / "experiment.toml").exists():
        raise RecordError(f"{path} is part of a run, which would be lost: choose another place.")
    try:
        _replace(place, content)
    except OSError as error:
        raise RecordError(f"cannot write {path}: {error.strerror or error}. Choose another place.") from error


def check_writable(folder: Path, flag: str) -> None:
    """A folder that files can be put into, made if need be; the fault names the flag that chose it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError("it may not be written to")
    except OSError as error:
        raise RecordError(f"cannot write to {folder} ({error.strerror or error}): choose another {flag}.") from error


def runs_below(directories: Sequence[str | Path]) -> list[Path]:
    """Every run in or below some directories."""
    found = {place: [file.parent for file in sorted(Path(place).rglob("experiment.toml"))] for place in directories}
    if empty := [str(place) for place, runs in found.items() if not runs]:
        raise RecordError(f"there is no run in or below {' and '.join(empty)}.")
    return list(dict.fromkeys(run for runs in found.values() for run in runs))


def _replace(final: Path, content: bytes) -> None:
    with _replacing(final) as beside:
        beside.write_bytes(content)


@contextlib.contextmanager
def _replacing(final: Path) -> Iterator[Path]:
    """Where to write so that it becomes the whole file, or nothing: beside it, then flushed to disk and renamed."""
    final.parent.mkdir(parents=True, exist_ok=True)
    beside = final.with_name(f".{final.name}.{os.getpid()}.part")
    try:
        beside.touch()
        usual = beside.stat().st_mode
        yield beside
        beside.chmod(usual)  # safetensors gives its files to their owner alone
        _flush(beside)
        os.replace(beside, final)
        _flush(final.parent)  # or the new name may not survive a power cut
    finally:
        beside.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _finite(value: Any) -> Any:
    """The same with null for numbers that are none: JSON knows no nan."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
