"""Studies of ours: every method at its published hyperparameters, and attacks."""

from collections.abc import Callable, Iterator

from fedcog.algorithms import (
    ALGORITHMS,
    Algorithm,
    FedCOG,
    FedSAM,
    GeometricMedian,
    Krum,
    Median,
    MultiKrum,
    TrimmedMean,
)
from fedcog.runs.config.composition import make_algorithm
from fedcog.studies.paper.experiments import (
    CIFAR10_NIID1,
    CIFAR10_NIID2,
    METHOD_NAMES,
    experiment,
    fedcog_around,
    method,
)
from fedcog.studies.study import Cell, CellMetric, Study, WarmStart, warm_start_of

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
            "rounds of FedAvg, then 20 of FedCOG. There is no attack, so robust means show what "
            "they cost. The last two columns score the clients' local models on their label mix."
        ),
        cells=tuple(cells),
        reference_row="FedAvg",
    )


ATTACKS = {
    "label flip": "attack=label-flip",
    "sign flip, 4 times": "attack=sign-flip attack.scale=4",
    "backdoor": "attack=backdoor attack.share=0.5",
    "replacement, 5 times": "attack=replacement attack.scale=5 attack.share=0.5",
    "backdoor until round 50": "attack=backdoor attack.share=0.5 attack.until=50",
}
"""What two of ten clients do, in the words of `--devices`."""
AGGREGATIONS: dict[str, Callable[[Algorithm], Algorithm]] = {
    "mean": lambda inner: inner,
    "median": Median,
    "trimmed mean": lambda inner: TrimmedMean(inner, trim=2),
    "Krum": lambda inner: Krum(inner, attackers=2),
    "multi-Krum": lambda inner: MultiKrum(inner, attackers=2),
    "geometric median": GeometricMedian,
}
"""Rules for the mean of the clients' updates."""


def attacks() -> Study:
    """Attacks against robust means, with FedCOG and without."""
    cells = []
    for attack, words in ATTACKS.items():
        devices = f"honest: clients=8; attacker: clients=2 {words}"
        metrics: list[CellMetric] = ["accuracy"]
        if "sign-flip" not in words:
            metrics.append("attack_success")
        for metric in metrics:
            block = f"{attack}, {metric.replace('_', ' ')}"
            for row, algorithm, warm_start in _attacked_algorithms():
                started = experiment(CIFAR10_NIID1, algorithm, devices=devices)
                cells.append(Cell(block, row, started, warm_start, metric=metric))
    return Study(
        name="attacks",
        title="Attacks, robust means and FedCOG",
        source="no part of the paper",
        description=(
            "CIFAR-10, NIID-1, ten clients, of which two attack: they train on flipped labels, "
            "send their update times -4, or train half of every batch with a trigger and label 0, "
            "once more with the update times 5, and once until FedCOG begins. 70 rounds; FedCOG: "
            "50 of FedAvg, then 20 of FedCOG, from the same state. Attack success is the share of "
            "test examples that are decided as the attack wants: lower is better."
        ),
        cells=tuple(cells),
        reference_row="mean",
    )


def _attacked_algorithms() -> Iterator[tuple[str, Algorithm, WarmStart]]:
    """Every rule for the mean, with FedCOG and without, by row."""
    for name, around in AGGREGATIONS.items():
        algorithm = around(Algorithm())
        warm_start = warm_start_of(algorithm)
        yield name, algorithm, warm_start
        fedcog = FedCOG(algorithm, start_round=warm_start.rounds, weighting="balanced")
        yield f"{name} + FedCOG", fedcog, warm_start


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
