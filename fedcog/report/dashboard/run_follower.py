"""Follows a run as it grows: reads only new content, and tolerates damaged or missing files."""

import json
import math
import os
import re
import stat
import time
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

from fedcog.core.tasks import SCORE_KEYS, with_current_keys
from fedcog.runs.config.experiment import Experiment
from fedcog.runs.records.recorded_run import Run
from fedcog.runs.records.run_directory import RecordError, RunDirectory

RunState = Literal["running", "finished", "stopped", "diverged", "damaged"]

BLOCK_BYTES = 4 * 2**20
"""Bytes that are read at a time."""
MAX_READ_BYTES = 64 * 2**20
"""Bytes that one refresh reads; the next one continues."""
MAX_TEXT_BYTES = 2**20
"""Maximal size of experiment.toml and diverged.txt."""
NUM_TIMED_ROUNDS = 12
"""Number of latest rounds from which the remaining time is estimated."""
MAX_MAGNITUDE = 1e300


class FileStamp(NamedTuple):
    """Identifies the content of a file: a changed file has another stamp."""

    inode: int
    size: int
    modified: int  # nanoseconds


class RunGone(Exception):
    """The directory of a run no longer exists."""


class RunFollower:
    """One run, kept up to date by `refresh`.

    Attributes:
        lines: For each round its number, loss, seconds and scores.
        generation: Increases whenever rounds are removed, as when a run is resumed. Rounds that
            were read in an earlier generation must be read again.
        fault: What is wrong with the files; "" if nothing is.
        diverged: Why training diverged; "" if it did not.
        exhibits: Rounds that have generated images.
    """

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self.name = name
        self.directory = RunDirectory(path)
        self.experiment: Experiment | None = None
        self.lines: list[dict[str, Any]] = []
        self.fault = ""
        self.diverged = ""
        self.generation = 0
        self.state: RunState = "stopped"
        self.exhibits: list[int] = []
        self._settings_stamp: FileStamp | None = None
        self._settings_fault = ""
        self._provenance_stamp: FileStamp | None = None
        self._user_objects: dict[str, str] = {}
        self._rounds_file: tuple[int, int] | None = None  # device and inode of rounds.jsonl
        self._rounds_offset = 0  # bytes of it that were read
        self._rounds_fault = ""

    @property
    def run(self) -> Run | None:
        """The run so far; None if its settings cannot be read."""
        if self.experiment is None:
            return None
        stamp = stamp_of(self.path / "provenance.json")
        if stamp != self._provenance_stamp:
            self._provenance_stamp = stamp
            self._user_objects = self.directory.user_objects()
        return Run(self.path, self.experiment, self.lines, self.diverged, self._user_objects)

    @property
    def fingerprint(self) -> object:
        """A value that changes whenever there is something new to show."""
        return (
            self._settings_stamp,
            self.generation,
            len(self.lines),
            self.state,
            self.fault,
            self.diverged,
            tuple(self.exhibits[-1:]),
            len(self.exhibits),
            (self.path / "federation.safetensors").exists(),
        )

    @property
    def seconds_left(self) -> float | None:
        """Estimated remaining seconds of a running run."""
        if self.state != "running" or self.experiment is None or not self.lines:
            return None
        latest = [line["seconds"] for line in self.lines[-NUM_TIMED_ROUNDS:]]
        seconds: list[float] = [value for value in latest if value is not None]
        if not seconds:
            return None
        return sum(seconds) / len(seconds) * (self.experiment.rounds - len(self.lines))

    def refresh(self) -> None:
        """Read what is new.

        Raises:
            RunGone: The run no longer exists.
        """
        self.fault = ""
        try:
            self._read_settings()
            self._read_rounds()
            self.diverged = _read_text(self.path / "diverged.txt")
            self._list_exhibits()
            self.fault = self.fault or self._rounds_fault
            self.state = self._current_state()
        except OSError as error:
            if not (self.path / "experiment.toml").exists():
                raise RunGone from error
            self.fault = f"cannot be read: {error.strerror or error}"
            self.state = "damaged"

    def _current_state(self) -> RunState:
        if self.experiment is None or self.fault:
            return "damaged"
        if self.diverged:
            return "diverged"
        if len(self.lines) >= self.experiment.rounds:
            return "finished"
        return "running" if self.directory.is_busy() else "stopped"

    def _read_settings(self) -> None:
        file = self.path / "experiment.toml"
        stamp = stamp_of(file)
        if stamp is None:
            raise RunGone
        if stamp != self._settings_stamp:
            self.experiment = None
            self._settings_stamp = stamp
            if stamp.size <= MAX_TEXT_BYTES:
                try:
                    self.experiment = self.directory.experiment()
                except RecordError as error:
                    self._settings_fault = str(error)
            else:
                self._settings_fault = f"{file} is too large for the settings of a run."
        if self.experiment is None:
            self.fault = self._settings_fault

    def _read_rounds(self) -> None:
        try:
            with _open_regular(self.path / "rounds.jsonl") as file:
                stat_ = os.fstat(file.fileno())
                identity = (stat_.st_dev, stat_.st_ino)
                if identity != self._rounds_file or stat_.st_size < self._rounds_offset:
                    self._reset_rounds(identity)
                if not self._rounds_fault and stat_.st_size > self._rounds_offset:
                    file.seek(self._rounds_offset)
                    self._append_rounds(file)
        except FileNotFoundError:
            if self._rounds_file is not None:
                self._reset_rounds(None)

    def _reset_rounds(self, file: tuple[int, int] | None) -> None:
        self.lines = []
        self._rounds_offset = 0
        self._rounds_fault = ""
        self._rounds_file = file
        self.generation += 1

    def _append_rounds(self, file: BinaryIO) -> None:
        """Read complete lines; a line that is still being written is read later."""
        rest = b""
        num_read = 0
        while num_read < MAX_READ_BYTES and (block := file.read(BLOCK_BYTES)):
            num_read += len(block)
            *complete, rest = (rest + block).split(b"\n")
            for text in complete:
                line = _parse_round(text, len(self.lines) + 1)
                if line is None:
                    self._rounds_fault = f"line {len(self.lines) + 1} of rounds.jsonl is damaged"
                    return
                self.lines.append(line)
                self._rounds_offset += len(text) + 1
        if len(rest) >= MAX_READ_BYTES - BLOCK_BYTES:
            self._rounds_fault = f"line {len(self.lines) + 1} of rounds.jsonl is too long"

    def _list_exhibits(self) -> None:
        """List the rounds that have generated images."""
        try:
            names = [entry.name for entry in os.scandir(self.path / "exhibits")]
        except FileNotFoundError:
            names = []
        matches = [re.fullmatch(r"(\d{5,9})\.safetensors", name) for name in names]
        rounds = [int(match[1]) for match in matches if match]
        self.exhibits = sorted(round for round in rounds if round <= len(self.lines))


def _open_regular(file: Path) -> BinaryIO:
    """Open a regular file; a pipe or device, which could block, raises OSError."""
    opened = os.fdopen(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
        opened.close()
        raise OSError(f"{file.name} is not a regular file")
    return opened


def stamp_of(file: Path) -> FileStamp | None:
    """Return the stamp of a regular file; None if there is none."""
    try:
        stat_ = file.stat()
    except OSError:
        return None
    if not stat.S_ISREG(stat_.st_mode):
        return None
    return FileStamp(stat_.st_ino, stat_.st_size, stat_.st_mtime_ns)


def seconds_since_change(file: Path) -> float:
    """Return the seconds since a file was changed; infinity if it does not exist."""
    try:
        return max(0.0, time.time() - file.stat().st_mtime)
    except OSError:
        return math.inf


def _parse_round(text: bytes, number: int) -> dict[str, Any] | None:
    """Keep of a round's record what the page shows; None if it is not that round's record."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or record.get("round") != number:
        return None
    record = with_current_keys(record)
    seconds = record.get("seconds")
    line: dict[str, Any] = {"round": number, "loss": _finite(record.get("loss")), "local": []}
    line["seconds"] = _finite(seconds.get("total")) if isinstance(seconds, dict) else None
    for name in SCORE_KEYS:
        if name in record:
            line[name] = _finite(record[name])
    if record.get("evaluated_on") == "clients":
        line["evaluated_on"] = "clients"
    local_test = record.get("local_test")
    if isinstance(local_test, dict):
        numbers = {name: _finite(value) for name, value in local_test.items()}
        line["local_test"] = {name: value for name, value in numbers.items() if value is not None}
    return line


def _finite(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < MAX_MAGNITUDE else None


def _read_text(file: Path) -> str:
    try:
        with _open_regular(file) as opened:
            return opened.read(MAX_TEXT_BYTES).decode(errors="replace").strip()
    except FileNotFoundError:
        return ""
