"""Every algorithm, one file each, and the table of their names.

To add an algorithm: write its file, then add its class to `ALGORITHMS`.
"""

from fedcog.algorithms.base import Algorithm
from fedcog.algorithms.ditto import Ditto
from fedcog.algorithms.fedadam import FedAdam
from fedcog.algorithms.fedavg import FedAvg
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
from fedcog.algorithms.types import (
    Batch,
    ClientContext,
    Draw,
    ExtraData,
    FederationInit,
    GeneratorConfig,
    Gradient,
    LocalWork,
    Loss,
    Scope,
    StepGradient,
    Uplink,
)
from fedcog.algorithms.vhl import VHL
from fedcog.algorithms.wrapper import RecordedAlgorithm, RecordedWrapper, Wrapper

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
"""Algorithms by the name that the command line and settings files use."""

__all__ = [
    "ALGORITHMS",
    "MOON",
    "SCAFFOLD",
    "VHL",
    "Algorithm",
    "Batch",
    "ClientContext",
    "Ditto",
    "Draw",
    "ExtraData",
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
    "FederationInit",
    "GeneratorConfig",
    "Gradient",
    "HeteroFL",
    "LocalWork",
    "Loss",
    "RecordedAlgorithm",
    "RecordedWrapper",
    "Scope",
    "StepGradient",
    "Uplink",
    "Wrapper",
]
