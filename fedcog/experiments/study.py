"""What a table or figure consists of: cells, each with the experiment that fills it and what it starts from."""

import dataclasses
from typing import Literal, NamedTuple

from fedcog.algorithms import Algorithm, FedCOG
from fedcog.experiments.config import Experiment
from fedcog.experiments.probes import Kind

WARM = 50
"""Rounds of the inner method before FedCOG begins, wherever the paper runs it."""

FEW = 5
"""Up to so many rounds after a start are looked at by themselves: those before them are not their own."""

Marks = Literal["c_p", "c_r", "c_f1", "o_f1", "map"]
Measure = Literal["accuracy", "personal", "validation", "seconds", "every", "gap", "general", "own"] | Marks
"""What a cell shows: the model's accuracy, clients' own, or on validation; seconds, or every: of a run all of whose
rounds are like its last; clients' mean distance to the mean model, and their models' accuracy on the test set or on
their own labels; of several labels, precision, recall and F1 by class, F1 over all decisions, and mean average
precision."""


class Start(NamedTuple):
    """A warm start: so many rounds of an algorithm, which runs may share."""

    algorithm: Algorithm
    rounds: int = WARM
    evaluate_every: int = 1

    def of(self, experiment: Experiment) -> Experiment:
        """The run to start from, for an experiment."""
        return dataclasses.replace(experiment, **self._asdict(), evaluate_local=False)


def dormant(method: Algorithm, rounds: int = WARM, evaluate_every: int = 1) -> Start:
    """A start that FedCOG's runs and the bare method's share: the method, with FedCOG asleep around it."""
    # Asleep it weighs nothing yet, but results are kept under keys that know its weighting.
    return Start(FedCOG(method, start_round=rounds, weighting="balanced"), rounds, evaluate_every)


class Cell(NamedTuple):
    """One place in a table: a row of a block, the experiment that fills it, and what the paper has there."""

    block: str
    row: str
    experiment: Experiment
    start: Start | None = None
    paper: float | None = None  # in per cent, or seconds
    paper_deviation: float | None = None
    measure: Measure = "accuracy"
    probe: Kind | None = None  # measured beside training, if it is not read off the run

    @property
    def short(self) -> bool:
        """Do only few rounds follow its start?"""
        return self.start is not None and self.experiment.rounds - self.start.rounds <= FEW


class Study(NamedTuple):
    """A table or figure of the paper, or a question of ours."""

    name: str
    title: str
    place: str  # in the paper
    words: str  # what was run
    cells: tuple[Cell, ...]
    seeds: tuple[int, ...] = (0, 1, 2)
    ours: str = "FedCOG"  # the row that others are compared with
    figure: Literal["", "beside", "curves", "lines", "clients", "partition", "pictures", "privacy"] = ""
    axis: str = ""  # of a line figure: what the blocks are values of
    averages: tuple[tuple[str, float], ...] = ()  # over all blocks, row by row, where the paper has them
