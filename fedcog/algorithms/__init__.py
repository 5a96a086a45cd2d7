"""The algorithms, by name."""

from fedcog.algorithms.base import (
    Algorithm,
    Batch,
    Draw,
    Effort,
    Extra,
    Gradient,
    Loss,
    Origin,
    Scope,
    Site,
    Uplink,
)
from fedcog.algorithms.ditto import Ditto
from fedcog.algorithms.fedadam import FedAdam
from fedcog.algorithms.fedavgm import FedAvgM
from fedcog.algorithms.fedcog import FedCOG
from fedcog.algorithms.feddecorr import FedDecorr
from fedcog.algorithms.feddyn import FedDyn
from fedcog.algorithms.fedexp import FedExP
from fedcog.algorithms.fedgen import FedGen
from fedcog.algorithms.fednova import FedNova
from fedcog.algorithms.fedprox import FedProx
from fedcog.algorithms.fedreg import FedReg
from fedcog.algorithms.fedrep import FedRep
from fedcog.algorithms.fedsam import FedSAM
from fedcog.algorithms.heterofl import HeteroFL
from fedcog.algorithms.moon import MOON
from fedcog.algorithms.scaffold import SCAFFOLD
from fedcog.algorithms.vhl import VHL
from fedcog.algorithms.wrapper import Wrapper

FedAvg = Algorithm
"""Algorithm as it stands."""

ALGORITHMS: dict[str, type[Algorithm]] = {
    "fedavg": FedAvg,
    "fedavgm": FedAvgM,
    "fedadam": FedAdam,
    "fedexp": FedExP,
    "fedprox": FedProx,
    "scaffold": SCAFFOLD,
    "moon": MOON,
    "fedsam": FedSAM,
    "feddecorr": FedDecorr,
    "feddyn": FedDyn,
    "fednova": FedNova,
    "fedreg": FedReg,
    "fedgen": FedGen,
    "fedrep": FedRep,
    "ditto": Ditto,
    "vhl": VHL,
    "fedcog": FedCOG,
    "heterofl": HeteroFL,
}

__all__ = [
    "ALGORITHMS",
    "MOON",
    "SCAFFOLD",
    "VHL",
    "Algorithm",
    "Batch",
    "Ditto",
    "Draw",
    "Effort",
    "Extra",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedCOG",
    "FedDecorr",
    "FedDyn",
    "FedExP",
    "FedGen",
    "FedNova",
    "FedProx",
    "FedReg",
    "FedRep",
    "FedSAM",
    "Gradient",
    "HeteroFL",
    "Loss",
    "Origin",
    "Scope",
    "Site",
    "Uplink",
    "Wrapper",
]
