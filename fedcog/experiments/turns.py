"""Runs that are carried out in step: each asks for its round's gathering, and goes on with it."""

import contextlib
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from fedcog.algorithms import Algorithm
from fedcog.experiments.config import Experiment
from fedcog.federation.rounds import Diverged, Gathered, Work
from fedcog.federation.simulation import Simulation, gather_together

if TYPE_CHECKING:
    from fedcog.experiments.run import Run


class Interrupted(Exception):
    """A run that was asked to stop, and did so after a whole round."""


class Turn(NamedTuple):
    """A run that waits for what its clients make of a round."""

    experiment: Experiment
    backend: Simulation
    work: Work

    @property
    def algorithm(self) -> Algorithm:
        """The experiment's."""
        return self.experiment.algorithm


Running = Generator[Turn, Gathered, "Run"]


def in_step(runs: Sequence[Running]) -> "list[Run | Diverged]":
    """Runs of one experiment that differ in their seed, round by round; clients of the same round train together.

    What diverges ends alone; when one is interrupted all are, after the same round; whatever else is raised ends all.
    """
    ended: dict[int, Run | Diverged] = {}
    turns: dict[int, Turn] = {}
    gathered: dict[int, Gathered | None] = dict.fromkeys(range(len(runs)))
    interrupted: Interrupted | None = None
    with contextlib.ExitStack() as ending:
        for running in runs:
            ending.callback(running.close)
        while gathered:
            for place, found in gathered.items():
                try:
                    turns[place] = next(runs[place]) if found is None else runs[place].send(found)
                except StopIteration as end:
                    ended[place] = end.value
                except Diverged as error:
                    ended[place] = error
                except Interrupted as error:
                    interrupted = error
            if interrupted is not None:
                for place in turns:
                    with contextlib.suppress(Interrupted):
                        runs[place].throw(interrupted)
                raise interrupted
            now = min((turn.work.round for turn in turns.values()), default=0)
            places = [place for place, turn in turns.items() if turn.work.round == now]
            due = [turns.pop(place) for place in places]
            gathered = dict(zip(places, _gather(due), strict=True))
    return [ended[place] for place in range(len(runs))]


def _gather(turns: Sequence[Turn]) -> list[Gathered]:
    if not turns:
        return []
    return gather_together([turn.backend for turn in turns], turns[0].algorithm, [turn.work for turn in turns])
