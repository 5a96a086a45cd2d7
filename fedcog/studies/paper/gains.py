"""What every method gains over FedAvg, as the stored results of the study of methods show it."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from fedcog.algorithms import ALGORITHMS
from fedcog.studies.paper import methods
from fedcog.studies.result_store import Results
from fedcog.studies.statistics import cell_values, paired_difference
from fedcog.studies.study import Cell

SETTING_WORDS = {
    "CIFAR-10, NIID-1": "Dirichlet 0.1",
    "CIFAR-10, NIID-2": "2 classes a client",
    "CIFAR-10, NIID-1, local models": "local models, Dirichlet 0.1",
    "CIFAR-10, NIID-2, local models": "local models, 2 classes a client",
}
"""Short names of the settings."""
MIN_SEEDS = 3


class Gain(NamedTuple):
    """Points of accuracy above FedAvg after the last round, on CIFAR-10.

    Attributes:
        setting: The setting.
        mean: Mean difference over seeds.
        half_width: Half of its 95 % confidence interval, from Student's t.
    """

    setting: str
    mean: float
    half_width: float

    @property
    def is_clear(self) -> bool:
        """Whether the confidence interval is above 0."""
        return self.mean > self.half_width


def measured_gains(results: Path) -> dict[str, list[Gain]]:
    """Read what every method gains over FedAvg from stored results.

    Args:
        results: Folder of the results.

    Returns:
        A gain for each setting with at least three seeds, by the method's name.
    """
    stored = Results(results)
    study = methods.all_methods()
    values = {
        (cell.block, cell.row): cell_values(cell, stored, study.seeds).last for cell in study.cells
    }
    found = {}
    for name in ALGORITHMS:
        rows = {cell.row for cell in _own_cells(study.cells, name)}
        gains = []
        for (block, row), last in values.items():
            difference = paired_difference(last, values[block, "FedAvg"])
            if row not in rows or difference is None or difference.num_pairs < MIN_SEEDS:
                continue
            half_width = difference.half_width or 0.0
            gains.append(Gain(block, round(difference.mean, 2), round(half_width, 2)))
        found[name] = gains
    return found


def best_for(name: str, gains: Mapping[str, list[Gain]]) -> str:
    """Describe where a method was measured to be clearly above FedAvg.

    Args:
        name: The method.
        gains: Result of `measured_gains`.

    Returns:
        Settings with their gains, such as "2 classes a client (+4.9)".
    """
    if name == "fedavg":
        return "the baseline"
    own = gains.get(name, [])
    if not own:
        return "not measured"
    clear = [gain for gain in own if gain.is_clear]
    texts = [f"{SETTING_WORDS[gain.setting]} ({gain.mean:+.1f})" for gain in clear]
    return "; ".join(texts) or "no clear gain"


def _own_cells(cells: tuple[Cell, ...], name: str) -> list[Cell]:
    """Return the cells of one method."""
    return [cell for cell in cells if type(cell.experiment.algorithm) is ALGORITHMS[name]]
