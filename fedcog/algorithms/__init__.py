"""Every algorithm, one file each, and the table of their names.

To add an algorithm: write its file, then add its class to `ALGORITHMS`.
"""

from fedcog.algorithms.attack import Attack
from fedcog.algorithms.balanced_softmax import BalancedSoftmax
from fedcog.algorithms.base import Algorithm
from fedcog.algorithms.ccvr import CCVR
from fedcog.algorithms.ditto import Ditto
from fedcog.algorithms.fedacg import FedACG
from fedcog.algorithms.fedadam import FedAdam
from fedcog.algorithms.fedavg import FedAvg
from fedcog.algorithms.fedavgm import FedAvgM
from fedcog.algorithms.fedbabu import FedBABU
from fedcog.algorithms.fedcm import FedCM
from fedcog.algorithms.fedcog import FedCOG
from fedcog.algorithms.feddc import FedDC
from fedcog.algorithms.feddecorr import FedDecorr
from fedcog.algorithms.feddisco import FedDisco
from fedcog.algorithms.feddyn import FedDyn
from fedcog.algorithms.fedexp import FedExP
from fedcog.algorithms.fedgen import FedGen
from fedcog.algorithms.fedgkd import FedGKD
from fedcog.algorithms.fedlc import FedLC
from fedcog.algorithms.fedlesam import FedLESAM
from fedcog.algorithms.fednova import FedNova
from fedcog.algorithms.fedntd import FedNTD
from fedcog.algorithms.fedper import FedPer
from fedcog.algorithms.fedprox import FedProx
from fedcog.algorithms.fedreg import FedReg
from fedcog.algorithms.fedrep import FedRep
from fedcog.algorithms.fedrs import FedRS
from fedcog.algorithms.fedsam import FedSAM
from fedcog.algorithms.fedsol import FedSOL
from fedcog.algorithms.fedspeed import FedSpeed
from fedcog.algorithms.feduv import FedUV
from fedcog.algorithms.fedvls import FedVLS
from fedcog.algorithms.geometric_median import GeometricMedian
from fedcog.algorithms.heterofl import HeteroFL
from fedcog.algorithms.krum import Krum, MultiKrum
from fedcog.algorithms.median import Median
from fedcog.algorithms.moon import MOON
from fedcog.algorithms.scaffold import SCAFFOLD
from fedcog.algorithms.server_rule import ServerRule
from fedcog.algorithms.trimmed_mean import TrimmedMean
from fedcog.algorithms.types import (
    UPDATE_PARTS,
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
    "fedacg": FedACG,
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
    "balanced-softmax": BalancedSoftmax,
    "fedlc": FedLC,
    "fedrs": FedRS,
    "fedntd": FedNTD,
    "fedvls": FedVLS,
    "feduv": FedUV,
    "fedgkd": FedGKD,
    "fedcm": FedCM,
    "feddc": FedDC,
    "fedspeed": FedSpeed,
    "fedlesam": FedLESAM,
    "fedsol": FedSOL,
    "fedper": FedPer,
    "fedbabu": FedBABU,
    "feddisco": FedDisco,
    "vhl": VHL,
    "fedcog": FedCOG,
    "geometric-median": GeometricMedian,
    "median": Median,
    "trimmed-mean": TrimmedMean,
    "krum": Krum,
    "multi-krum": MultiKrum,
    "ccvr": CCVR,
    "heterofl": HeteroFL,
}
"""Algorithms by the name that the command line and settings files use."""

__all__ = [
    "ALGORITHMS",
    "CCVR",
    "MOON",
    "SCAFFOLD",
    "UPDATE_PARTS",
    "VHL",
    "Algorithm",
    "Attack",
    "BalancedSoftmax",
    "Batch",
    "ClientContext",
    "Ditto",
    "Draw",
    "ExtraData",
    "FedACG",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedBABU",
    "FedCM",
    "FedCOG",
    "FedDC",
    "FedDecorr",
    "FedDisco",
    "FedDyn",
    "FedExP",
    "FedGKD",
    "FedGen",
    "FedLC",
    "FedLESAM",
    "FedNTD",
    "FedNova",
    "FedPer",
    "FedProx",
    "FedRS",
    "FedReg",
    "FedRep",
    "FedSAM",
    "FedSOL",
    "FedSpeed",
    "FedUV",
    "FedVLS",
    "FederationInit",
    "GeneratorConfig",
    "GeometricMedian",
    "Gradient",
    "HeteroFL",
    "Krum",
    "LocalWork",
    "Loss",
    "Median",
    "MultiKrum",
    "RecordedAlgorithm",
    "RecordedWrapper",
    "Scope",
    "ServerRule",
    "StepGradient",
    "TrimmedMean",
    "Uplink",
    "Wrapper",
]
