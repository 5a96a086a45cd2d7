"""A run as it grows: only what is new of its files is read, and what is half-written, damaged or gone is borne."""

import json
import math
import os
import re
import stat
import time
from pathlib import Path
from typing import Any, BinaryIO, Literal

from fedcog.experiments.config import Experiment
from fedcog.experiments.record import RecordError, RunDirectory
from fedcog.experiments.run import Run
from fedcog.task import SCORES

State = Literal["running", "finished", "stopped", "diverged", "damaged"]
BLOCK = 4 * 2**20  # bytes read at a time
ENOUGH = 64 * 2**20  # bytes read of a run in one go; the rest comes with the next
SETTINGS = 2**20  # bytes that an experiment.toml, or a reason why training diverged, may have
LATEST = 12  # rounds that the time of the next is guessed from
Stamp = tuple[int, int, int]


class Gone(Exception):
    """A run whose directory has vanished."""


class Followed:
    """One run, kept up to date by `refresh`.

    `lines` has of every round its number, loss and scores alone. `generation` grows whenever rounds were taken back, as
    happens when a run is resumed: what somebody has of an earlier one is not to be added to.
    """

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name, self.directory = path, name, RunDirectory(path)
        self.experiment: Experiment | None = None
        self.lines: list[dict[str, Any]] = []
        self.fault, self.diverged, self.generation = "", "", 0
        self.state: State = "stopped"
        self.exhibits: list[int] = []
        self._settings: Stamp | None = None
        self._rounds: tuple[int, int] | None = None  # which file it is
        self._place = 0  # how much of it is read
        self._torn = ""  # what is wrong with the rest of it
        self._refused = ""  # what is wrong with its settings

    @property
    def run(self) -> Run | None:
        """The run as far as it is known, if its settings are."""
        return None if self.experiment is None else Run(self.path, self.experiment, self.lines, self.diverged)

    @property
    def mark(self) -> object:
        """Something that is the same as long as there is nothing new to show."""
        known = self._settings, self.generation, len(self.lines), self.state, self.fault, self.diverged
        return *known, tuple(self.exhibits[-1:]), len(self.exhibits), (self.path / "federation.safetensors").exists()

    @property
    def left(self) -> float | None:
        """Seconds that a running one will take, if it goes on as it did."""
        if self.state != "running" or self.experiment is None or not self.lines:
            return None
        taken = [line["seconds"] for line in self.lines[-LATEST:] if line["seconds"] is not None]
        return sum(taken) / len(taken) * (self.experiment.rounds - len(self.lines)) if taken else None

    def refresh(self) -> None:
        """Read what is new; `Gone` if there is nothing any more."""
        self.fault = ""
        try:
            self._read_settings()
            self._read_rounds()
            self.diverged = _text(self.path / "diverged.txt")
            self._list_exhibits()
            self.fault = self.fault or self._torn
            self.state = self._told()
        except OSError as error:
            if not (self.path / "experiment.toml").exists():
                raise Gone from error
            self.fault, self.state = f"cannot be read: {error.strerror or error}", "damaged"

    def _told(self) -> State:
        if self.experiment is None or self.fault:
            return "damaged"
        if self.diverged:
            return "diverged"
        if len(self.lines) >= self.experiment.rounds:
            return "finished"
        return "running" if self.directory.busy() else "stopped"

    def _read_settings(self) -> None:
        stamp = stamped(self.path / "experiment.toml")
        if stamp is None:
            raise Gone
        if stamp != self._settings:
            self.experiment = None
            self._settings = stamp
            if stamp[1] <= SETTINGS:
                try:
                    self.experiment = self.directory.experiment()
                except RecordError as error:
                    self._refused = str(error)
            else:
                self._refused = f"{self.path / 'experiment.toml'} is too large to be one."
        if self.experiment is None:
            self.fault = self._refused

    def _read_rounds(self) -> None:
        try:
            with _opened(self.path / "rounds.jsonl") as file:
                now = os.fstat(file.fileno())
                if (now.st_dev, now.st_ino) != self._rounds or now.st_size < self._place:
                    self._forget((now.st_dev, now.st_ino))
                if not self._torn and now.st_size > self._place:
                    file.seek(self._place)
                    self._add(file)
        except FileNotFoundError:
            if self._rounds is not None:
                self._forget(None)

    def _forget(self, file: tuple[int, int] | None) -> None:
        self.lines, self._place, self._torn, self._rounds = [], 0, "", file
        self.generation += 1

    def _add(self, file: BinaryIO) -> None:
        """Take in the lines that are whole; one that is still being written waits."""
        rest, taken = b"", 0
        while not self._torn and taken < ENOUGH and (block := file.read(BLOCK)):
            taken += len(block)
            *whole, rest = (rest + block).split(b"\n")
            for line in whole:
                found = _slim(line, len(self.lines) + 1)
                if found is None:
                    self._torn = f"line {len(self.lines) + 1} of rounds.jsonl is damaged"
                    return
                self.lines.append(found)
                self._place += len(line) + 1
        if len(rest) >= ENOUGH - BLOCK:
            self._torn = f"line {len(self.lines) + 1} of rounds.jsonl has no end"

    def _list_exhibits(self) -> None:
        try:
            names = [entry.name for entry in os.scandir(self.path / "exhibits")]
        except FileNotFoundError:
            names = []
        rounds = [int(found[1]) for name in names if (found := re.fullmatch(r"(\d{5,9})\.safetensors", name))]
        self.exhibits = sorted(round for round in rounds if round <= len(self.lines))


def _opened(file: Path) -> BinaryIO:
    """A file to be read, which is nothing that one would wait for."""
    opened = open(file, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
        opened.close()
        raise OSError(f"{file.name} is no ordinary file")
    return opened


def stamped(file: Path) -> Stamp | None:
    """By what a file is known to be the same as before: its number, size and time; None if there is none."""
    try:
        found = file.stat()
    except OSError:
        return None
    if not stat.S_ISREG(found.st_mode):
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def age(file: Path) -> float:
    """Seconds since a file was changed."""
    try:
        return max(0.0, time.time() - file.stat().st_mtime)
    except OSError:
        return math.inf


def _slim(text: bytes, number: int) -> dict[str, Any] | None:
    """Of a round's line what is shown; None if it is none of that round."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict) or line.get("round") != number:
        return None
    seconds = line.get("seconds")
    found: dict[str, Any] = {"round": number, "loss": _number(line.get("loss")), "local": []}
    found["seconds"] = _number(seconds.get("total")) if isinstance(seconds, dict) else None
    return found | {name: _number(line[name]) for name in SCORES if name in line}


def _number(value: object) -> float | None:
    fine = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    return float(value) if fine else None  # type: ignore[arg-type]


def _text(file: Path) -> str:
    try:
        with _opened(file) as opened:
            return opened.read(SETTINGS).decode(errors="replace").strip()
    except FileNotFoundError:
        return ""
