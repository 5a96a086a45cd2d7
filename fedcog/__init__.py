"""fedcog: federated learning with consensus-oriented generation, rival methods, a fast simulator.

Names are imported when they are first used, so that `import fedcog` and the command line start
quickly.
"""

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

try:
    __version__ = version("fedcog")
except PackageNotFoundError:  # run from a checkout that was never installed
    __version__ = "0.0.0"

if TYPE_CHECKING:
    from fedcog.algorithms import (
        ALGORITHMS,
        CCVR,
        MOON,
        SCAFFOLD,
        VHL,
        Algorithm,
        BalancedSoftmax,
        Batch,
        ClientContext,
        Ditto,
        Draw,
        ExtraData,
        FedACG,
        FedAdam,
        FedAvg,
        FedAvgM,
        FedBABU,
        FedCM,
        FedCOG,
        FedDC,
        FedDecorr,
        FedDisco,
        FedDyn,
        FederationInit,
        FedExP,
        FedGen,
        FedGKD,
        FedLC,
        FedLESAM,
        FedNova,
        FedNTD,
        FedPer,
        FedProx,
        FedReg,
        FedRep,
        FedRS,
        FedSAM,
        FedSOL,
        FedSpeed,
        FedUV,
        FedVLS,
        GeometricMedian,
        HeteroFL,
        Krum,
        LocalWork,
        Loss,
        Median,
        MultiKrum,
        ServerRule,
        StepGradient,
        TrimmedMean,
        Wrapper,
    )
    from fedcog.api import audit, compare, partition, plot, run, sweep
    from fedcog.core import tree
    from fedcog.core.errors import Interrupted
    from fedcog.core.settings import ConfigError, setting
    from fedcog.core.tree import Params, State
    from fedcog.data import (
        DataError,
        Dataset,
        PartitionError,
        from_arrays,
        from_folder,
        from_torch,
        load_dataset,
    )
    from fedcog.engine.standalone import GeneratedData, distillation_loss, generate
    from fedcog.federation.backend import Diverged
    from fedcog.models.checks import ModelError
    from fedcog.models.functional import Model
    from fedcog.models.generators import ConvGenerator
    from fedcog.models.ops.keyed_random import KeyedRandom
    from fedcog.runs.config.composition import make_algorithm
    from fedcog.runs.config.experiment import Experiment
    from fedcog.runs.pretrained import pretrain
    from fedcog.runs.records.export import export
    from fedcog.runs.records.frames import frame
    from fedcog.runs.records.recorded_run import Run, load, read, read_all
    from fedcog.runs.records.run_directory import RecordError
    from fedcog.runs.records.summary import Group, group
    from fedcog.runs.tracking import Tracker
    from fedcog.studies.audit.attacks import InversionAttack
    from fedcog.studies.audit.audit import Audit
    from fedcog.studies.comparison_table import table
    from fedcog.studies.tuning.sweep import Tuned

_MODULES = {
    "fedcog.algorithms": (
        "ALGORITHMS CCVR MOON SCAFFOLD VHL Algorithm BalancedSoftmax Batch "
        "ClientContext Ditto Draw ExtraData FedACG FedAdam FedAvg FedAvgM FedBABU FedCM FedCOG "
        "FedDC FedDecorr FedDisco FedDyn FedExP FedGKD FedGen FedLC FedLESAM FedNTD FedNova "
        "FedPer FedProx FedRS FedReg FedRep FedSAM FedSOL FedSpeed FedUV FedVLS FederationInit "
        "GeometricMedian HeteroFL Krum LocalWork Loss Median MultiKrum ServerRule StepGradient "
        "TrimmedMean Wrapper"
    ),
    "fedcog.api": "audit compare partition plot run sweep",
    "fedcog.core": "tree",
    "fedcog.core.errors": "Interrupted",
    "fedcog.core.settings": "ConfigError setting",
    "fedcog.core.tree": "Params State",
    "fedcog.data": (
        "DataError Dataset PartitionError from_arrays from_folder from_torch load_dataset"
    ),
    "fedcog.engine.standalone": "GeneratedData distillation_loss generate",
    "fedcog.federation.backend": "Diverged",
    "fedcog.models.checks": "ModelError",
    "fedcog.models.functional": "Model",
    "fedcog.models.generators": "ConvGenerator",
    "fedcog.models.ops.keyed_random": "KeyedRandom",
    "fedcog.runs.config.composition": "make_algorithm",
    "fedcog.runs.config.experiment": "Experiment",
    "fedcog.runs.pretrained": "pretrain",
    "fedcog.runs.records.export": "export",
    "fedcog.runs.records.frames": "frame",
    "fedcog.runs.records.recorded_run": "Run load read read_all",
    "fedcog.runs.records.run_directory": "RecordError",
    "fedcog.runs.records.summary": "Group group",
    "fedcog.runs.tracking": "Tracker",
    "fedcog.studies.audit.attacks": "InversionAttack",
    "fedcog.studies.audit.audit": "Audit",
    "fedcog.studies.comparison_table": "table",
    "fedcog.studies.tuning.sweep": "Tuned",
}
"""Where exported names are defined."""
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = [
    "ALGORITHMS",
    "CCVR",
    "MOON",
    "SCAFFOLD",
    "VHL",
    "Algorithm",
    "Audit",
    "BalancedSoftmax",
    "Batch",
    "ClientContext",
    "ConfigError",
    "ConvGenerator",
    "DataError",
    "Dataset",
    "Ditto",
    "Diverged",
    "Draw",
    "Experiment",
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
    "GeneratedData",
    "GeometricMedian",
    "Group",
    "HeteroFL",
    "Interrupted",
    "InversionAttack",
    "KeyedRandom",
    "Krum",
    "LocalWork",
    "Loss",
    "Median",
    "Model",
    "ModelError",
    "MultiKrum",
    "Params",
    "PartitionError",
    "RecordError",
    "Run",
    "ServerRule",
    "State",
    "StepGradient",
    "Tracker",
    "TrimmedMean",
    "Tuned",
    "Wrapper",
    "__version__",
    "audit",
    "compare",
    "distillation_loss",
    "export",
    "frame",
    "from_arrays",
    "from_folder",
    "from_torch",
    "generate",
    "group",
    "load",
    "load_dataset",
    "make_algorithm",
    "partition",
    "plot",
    "pretrain",
    "read",
    "read_all",
    "run",
    "setting",
    "sweep",
    "table",
    "tree",
]


def __getattr__(name: str) -> Any:
    """Import an exported name on first use."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'fedcog' has no attribute '{name}'")
    module = importlib.import_module(_MODULE_OF[name])
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
