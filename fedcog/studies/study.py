"""Studies: the cells of a table or figure, and the experiment that fills each cell."""

import dataclasses
from typing import Literal, NamedTuple

from fedcog.algorithms import Algorithm, FedCOG
from fedcog.runs.config.experiment import Experiment
from fedcog.studies.probes import ProbeKind

WARM_START_ROUNDS = 50
"""Rounds of the inner algorithm before FedCOG begins, in most experiments of the paper."""

MAX_SHORT_ROUNDS = 5
"""If at most this many rounds follow a warm start, "best" is the best of those rounds only."""

MultiLabelMetric = Literal["c_p", "c_r", "c_f1", "o_f1", "map"]
"""Precision, recall and F1 averaged over classes; F1 over all decisions; mean average precision."""

CellMetric = (
    Literal[
        "accuracy",
        "personal_accuracy",
        "validation_accuracy",
        "attack_success",
        "seconds",
        "seconds_all_rounds",
        "distance_to_mean",
        "local_accuracy",
        "own_label_accuracy",
    ]
    | MultiLabelMetric
)
"""What a cell shows.

`accuracy`, `validation_accuracy` and `attack_success` are the global model's. `personal_accuracy`,
`distance_to_mean`, `local_accuracy` (whole test set) and `own_label_accuracy` are means over the
clients' local models. `seconds` is the time of the run as it is; `seconds_all_rounds` assumes that
every round takes as long as the last one.
"""

FigureKind = Literal[
    "", "comparison", "curves", "lines", "clients", "partition", "pictures", "privacy"
]


class WarmStart(NamedTuple):
    """The first rounds of a run, trained with another algorithm; several runs may share them."""

    algorithm: Algorithm
    rounds: int = WARM_START_ROUNDS
    evaluate_every: int = 1

    def experiment_before(self, experiment: Experiment) -> Experiment:
        """Return the run that `experiment` continues."""
        return dataclasses.replace(experiment, **self._asdict(), evaluate_local=False)


def warm_start_of(
    algorithm: Algorithm, rounds: int = WARM_START_ROUNDS, evaluate_every: int = 1
) -> WarmStart:
    """Return the warm start that an algorithm and FedCOG around it share.

    Args:
        algorithm: The algorithm of the first rounds.
        rounds: Number of rounds.
        evaluate_every: Evaluate each round whose number is a multiple of this.

    Returns:
        The warm start. Its algorithm is FedCOG around `algorithm`, dormant in all its rounds.
    """
    # A dormant FedCOG weights nothing, but `weighting` is part of the key of stored results.
    dormant = FedCOG(algorithm, start_round=rounds, weighting="balanced")
    return WarmStart(dormant, rounds, evaluate_every)


class Cell(NamedTuple):
    """One cell of a table: its place, the experiment that fills it, and the paper's number."""

    block: str
    row: str
    experiment: Experiment
    warm_start: WarmStart | None = None
    paper: float | None = None  # in percent, or seconds
    paper_std: float | None = None
    metric: CellMetric = "accuracy"
    probe: ProbeKind | None = None  # how to measure it, if training does not record it

    @property
    def is_short(self) -> bool:
        """Whether at most `MAX_SHORT_ROUNDS` rounds follow the warm start."""
        if self.warm_start is None:
            return False
        return self.experiment.rounds - self.warm_start.rounds <= MAX_SHORT_ROUNDS


class Study(NamedTuple):
    """A table or figure: of the paper, or one of ours."""

    name: str
    title: str
    source: str  # where it is in the paper
    description: str  # what was run
    cells: tuple[Cell, ...]
    seeds: tuple[int, ...] = (0, 1, 2)
    reference_row: str = "FedCOG"  # the row that the others are compared with
    figure: FigureKind = ""
    axis: str = ""  # of a line figure: the quantity whose values name the blocks
    paper_averages: tuple[tuple[str, float], ...] = ()  # the paper's means over blocks, by row
