"""fedcog: federated learning with consensus-oriented generation, its rivals, and a fast simulator."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("fedcog")
except PackageNotFoundError:  # run from a checkout that was never installed
    __version__ = "0.0.0"

from fedcog.algorithms import (
    ALGORITHMS,
    MOON,
    SCAFFOLD,
    VHL,
    Algorithm,
    Ditto,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedCOG,
    FedDecorr,
    FedDyn,
    FedExP,
    FedGen,
    FedNova,
    FedProx,
    FedReg,
    FedRep,
    FedSAM,
    HeteroFL,
    Wrapper,
)
from fedcog.complement import Complement, distillation_loss, generate
from fedcog.data import DataError, Dataset, from_arrays, from_folder, from_torch
from fedcog.experiments.compare import compare
from fedcog.experiments.config import Experiment, make_algorithm
from fedcog.experiments.export import export
from fedcog.experiments.pretrained import pretrain
from fedcog.experiments.record import RecordError
from fedcog.experiments.run import Run, load, read, run
from fedcog.experiments.summary import Group, group
from fedcog.experiments.sweep import Tuned, sweep
from fedcog.experiments.turns import Interrupted
from fedcog.federation.rounds import Diverged
from fedcog.fitness import ModelError
from fedcog.generators import ConvGenerator
from fedcog.models import Model
from fedcog.settings import ConfigError

__all__ = [
    "ALGORITHMS",
    "MOON",
    "SCAFFOLD",
    "VHL",
    "Algorithm",
    "Complement",
    "ConfigError",
    "ConvGenerator",
    "DataError",
    "Dataset",
    "Ditto",
    "Diverged",
    "Experiment",
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
    "Group",
    "HeteroFL",
    "Interrupted",
    "Model",
    "ModelError",
    "RecordError",
    "Run",
    "Tuned",
    "Wrapper",
    "__version__",
    "compare",
    "distillation_loss",
    "export",
    "from_arrays",
    "from_folder",
    "from_torch",
    "generate",
    "group",
    "load",
    "make_algorithm",
    "pretrain",
    "read",
    "run",
    "sweep",
]
