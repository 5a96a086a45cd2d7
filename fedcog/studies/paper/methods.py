"""A study of ours: every method of the library at its published hyperparameters."""

from fedcog.algorithms import ALGORITHMS, FedSAM
from fedcog.runs.config.composition import make_algorithm
from fedcog.studies.paper.experiments import (
    CIFAR10_NIID1,
    CIFAR10_NIID2,
    METHOD_NAMES,
    experiment,
    fedcog_around,
    method,
)
from fedcog.studies.study import Cell, Study

PERSONALIZED = ("fedavg", "fedrep", "fedper", "fedbabu", "ditto")
"""Methods whose local models are compared; all but FedAvg and FedBABU have no other."""
WITHOUT_GLOBAL_MODEL = ("fedrep", "fedper", "ditto")
"""Methods whose global model means nothing, or is FedAvg's."""
SETTINGS_NEEDED = ("heterofl",)
"""Methods that equal FedAvg until device types are set."""


def all_methods() -> Study:
    """Every method with its default settings, which are the published ones, on CIFAR-10."""
    cells = []
    for setting in (CIFAR10_NIID1, CIFAR10_NIID2):
        for name in ALGORITHMS:
            if name not in (*WITHOUT_GLOBAL_MODEL, *SETTINGS_NEEDED):
                cells += _cells(setting, name)
    for setting in (CIFAR10_NIID1, CIFAR10_NIID2):
        for name in PERSONALIZED:
            started = experiment(setting, name, evaluate_local=True)
            block = f"{setting}, local models"
            cells.append(Cell(block, _row(name), started, metric="personal_accuracy"))
    return Study(
        name="methods",
        title="All methods at their published settings",
        source="no part of the paper",
        description=(
            "70 rounds of every method in the paper's setting: 10 clients, 400 local steps with "
            "momentum 0.9 and learning rate 0.01. The method's own hyperparameters are the "
            "published ones, where they are known, and were not tuned for this setting. FedCOG: 50 "
            "rounds of FedAvg, then 20 of FedCOG. Nobody attacks, so robust means show what they "
            "cost. The last two columns score the clients' local models on their label mix."
        ),
        cells=tuple(cells),
        reference_row="FedAvg",
    )


def _cells(setting: str, name: str) -> list[Cell]:
    """Return the cells of one method in one setting."""
    if name == "fedcog":
        return [Cell(setting, "FedCOG", *fedcog_around(setting))]
    if name == "fedsam":
        return [Cell(setting, "FedSAM, rho = 0.05", experiment(setting, FedSAM(rho=0.05)))]
    if name in METHOD_NAMES:
        return [Cell(setting, _row(name), *method(name, setting))]
    return [Cell(setting, _row(name), experiment(setting, make_algorithm(name)))]


def _row(name: str) -> str:
    """Return the name of a method in tables."""
    return "FedAvg" if name == "fedavg" else ALGORITHMS[name].__name__
