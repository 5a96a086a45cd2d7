"""What a table or figure consists of: cells, each with the experiment that fills it and what it starts from."""

import dataclasses
from typing import Literal, NamedTuple

from fedcog.algorithms import Algorithm, FedCOG
from fedcog.experiments.config import Experiment
from fedcog.experiments.probes import Kind

WARM = 50
"""Rounds of the inner method before FedCOG begins, wherever the paper runs it."""

Measure = Literal["accuracy", "personal", "validation", "seconds", "every", "gap", "general", "own"]
"""What a cell shows: the model's accuracy, clients' own, or on validation; seconds, or every: of a run all of whose
rounds are like its last; clients' mean distance to the mean model, and their models' accuracy on the test set or on
their own labels."""


class Start(NamedTuple):
    """A warm start that runs share: so many rounds of a method that FedCOG lies dormant around."""

    algorithm: Algorithm
    rounds: int = WARM

    def of(self, experiment: Experiment) -> Experiment:
        """The run to start from, for an experiment."""
        dormant = FedCOG(self.algorithm, start_round=self.rounds)
        return dataclasses.replace(experiment, algorithm=dormant, rounds=self.rounds, evaluate_local=False)


class Cell(NamedTuple):
    """One place in a table: a row of a block, the experiment that fills it, and what the paper has there."""

    block: str
    row: str
    experiment: Experiment | None  # None: it cannot be run yet
    start: Start | None = None
    paper: float | None = None  # in per cent, or seconds
    paper_deviation: float | None = None
    measure: Measure = "accuracy"
    probe: Kind | None = None  # measured beside training, if it is not read off the run


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
