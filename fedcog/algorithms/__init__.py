"""The algorithms, by name."""

from fedcog.algorithms.base import Algorithm, Batch, Draw, Effort, Extra, Loss, Site, Wrapper
from fedcog.algorithms.fedcog import FedCOG
from fedcog.algorithms.fedprox import FedProx

FedAvg = Algorithm
"""Algorithm as it stands."""

ALGORITHMS: dict[str, type[Algorithm]] = {
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "fedcog": FedCOG,
}

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "Batch",
    "Draw",
    "Effort",
    "Extra",
    "FedAvg",
    "FedCOG",
    "FedProx",
    "Loss",
    "Site",
    "Wrapper",
]
