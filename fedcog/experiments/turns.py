"""Runs that are carried out at once, round by round: each asks for its round's gathering, and goes on with it."""

import contextlib
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from fedcog.algorithms import Algorithm
from fedcog.federation.rounds import Diverged, Gathered, Work
from fedcog.federation.simulation import Simulation, gather_together

if TYPE_CHECKING:
    from fedcog.experiments.run import Run


class Interrupted(Exception):
    """A run that was asked to stop, and did so after a whole round."""


class Turn(NamedTuple):
    """A run that waits for what its clients make of a round."""

    backend: Simulation
    algorithm: Algorithm
    work: Work


Running = Generator[Turn, Gathered, "Run"]


class Band:
    """Runs of one experiment that differ in their seed: the clients of the same round train as one larger cohort.

    What diverges ends alone. The GPU's work is queued on `stream`, where one is given, and waited for at the next call.
    """

    def __init__(self, runs: Sequence[Running], stream: torch.cuda.Stream | None = None) -> None:
        self.runs, self.stream = list(runs), stream
        self.ended: dict[int, Run | Diverged] = {}
        self.interrupted: Interrupted | None = None
        self._turns: dict[int, Turn] = {}
        self._gathered: dict[int, Gathered | None] = dict.fromkeys(range(len(self.runs)))

    @property
    def busy(self) -> bool:
        """Has a round been begun, and not been finished?"""
        return any(gathered is not None for gathered in self._gathered.values())

    def go_on(self) -> None:
        """Finish the round that was begun, in every run that takes part in it."""
        with self._queue():
            for place, gathered in self._gathered.items():
                try:
                    run = self.runs[place]
                    self._turns[place] = next(run) if gathered is None else run.send(gathered)
                except StopIteration as end:
                    self.ended[place] = end.value
                except Diverged as error:
                    self.ended[place] = error
                except Interrupted as error:  # the others are to end with a whole round as well
                    self.interrupted = error
            self._gathered = {}

    def begin(self) -> bool:
        """Begin the next round of those that are furthest behind; False, if there is none."""
        if not self._turns:
            return False
        now = min(turn.work.round for turn in self._turns.values())
        due = {place: turn for place, turn in self._turns.items() if turn.work.round == now}
        self._turns = {place: turn for place, turn in self._turns.items() if place not in due}
        simulations, works = [turn.backend for turn in due.values()], [turn.work for turn in due.values()]
        with self._queue():
            found = gather_together(simulations, next(iter(due.values())).algorithm, works)
        self._gathered = dict(zip(due, found, strict=True))
        return True

    def close(self) -> None:
        """End all runs where they are."""
        for run in self.runs:
            run.close()

    @contextlib.contextmanager
    def _queue(self) -> Iterator[None]:
        if self.stream is None:
            yield
            return
        with torch.cuda.stream(self.stream):
            yield


def in_step(bands: Sequence[Sequence[Running]], device: torch.device | None = None) -> "list[list[Run | Diverged]]":
    """The bands' runs carried out to their ends; on a GPU several bands share it, each on a stream of its own.

    A band's round is queued before another's is waited for: the GPU is never without work, and does what of several
    fits beside each other. Whatever is raised, but for divergence, ends all.
    """
    apart = device is not None and device.type == "cuda" and len(bands) > 1
    with contextlib.ExitStack() as ending:
        all_ = [Band(runs, torch.cuda.Stream(device) if apart else None) for runs in bands]  # type: ignore[no-untyped-call]
        for band in all_:
            ending.callback(band.close)
        queue, interrupted = deque(all_), None
        while queue:
            band = queue.popleft()
            if interrupted is None or band.busy:
                band.go_on()
            interrupted = interrupted or band.interrupted
            if interrupted is None and band.begin():
                queue.append(band)
        if interrupted is not None:
            raise interrupted
    return [[band.ended[place] for place in range(len(band.runs))] for band in all_]
