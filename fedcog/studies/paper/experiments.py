"""Experiment settings of the paper, and the runs that its tables and figures share."""

from typing import Any

from fedcog.algorithms import Algorithm, FedCOG
from fedcog.runs.config.composition import make_algorithm
from fedcog.runs.config.experiment import Experiment
from fedcog.studies.study import WarmStart, warm_start_of

SETTINGS: dict[str, dict[str, Any]] = {
    "Fashion-MNIST, NIID-1": {"dataset": "fashion-mnist", "partition": "dirichlet", "beta": 0.1},
    "Fashion-MNIST, NIID-2": {
        "dataset": "fashion-mnist",
        "partition": "label-skew",
        "classes_per_client": 2,
    },
    "CIFAR-10, NIID-1": {"dataset": "cifar10", "partition": "dirichlet", "beta": 0.1},
    "CIFAR-10, NIID-2": {"dataset": "cifar10", "partition": "label-skew", "classes_per_client": 2},
    "CIFAR-100, NIID-1": {"dataset": "cifar100", "partition": "dirichlet", "beta": 0.1},
    "CIFAR-100, NIID-2": {
        "dataset": "cifar100",
        "partition": "label-skew",
        "classes_per_client": 10,
    },
}
"""Settings with one label per example, by name."""

CIFAR10_NIID1 = "CIFAR-10, NIID-1"
CIFAR10_NIID2 = "CIFAR-10, NIID-2"

MULTI_LABEL_SETTINGS: dict[str, dict[str, Any]] = {
    name: {
        "dataset": dataset,
        "partition": "natural",
        "clients": 200,
        "participation": 0.05,
        "local_steps": 10,
        "batch_size": 32,
        "tf32": True,
    }
    for name, dataset in (("FLAIR", "flair"), ("Mosaics", "mosaics"))
}
"""Settings with several labels per image: the paper's data set, and its stand-in."""

MULTI_LABEL_START_ROUNDS = 400
"""Rounds before FedCOG begins in the multi-label settings."""
MULTI_LABEL_EVALUATE_EVERY = 20
"""Evaluation interval of those rounds; every later round is evaluated."""

LOSS_CONTROL = "control: real share on the loss"
"""Row of the control that scales the loss as balanced weighting does, and generates nothing."""

METHOD_NAMES = {
    "fedavg": "FedAvg",
    "fedavgm": "FedAvgM",
    "fedprox": "FedProx",
    "scaffold": "SCAFFOLD",
    "moon": "MOON",
    "fedsam": "FedSAM",
    "vhl": "VHL",
    "fedexp": "FedExP",
    "feddecorr": "FedDecorr",
    "fedreg": "FedReg",
    "fedgen": "FedGen",
}

WRAPPED_METHODS = ("fedavg", "fedavgm", "fedprox", "scaffold", "moon")
"""Methods that FedCOG is wrapped around; they share the warm start with FedCOG."""

StartedExperiment = tuple[Experiment, WarmStart | None]
"""An experiment and its warm start: two consecutive fields of a `Cell`."""


def experiment(setting: str, algorithm: Algorithm | str = "fedavg", **changes: Any) -> Experiment:
    """Return the paper's experiment in one of its settings.

    Args:
        setting: A key of `SETTINGS` or `MULTI_LABEL_SETTINGS`.
        algorithm: The algorithm, or its name.
        changes: Other settings of the experiment.

    Returns:
        The experiment. It does not evaluate local models unless `changes` says so.
    """
    if isinstance(algorithm, str):
        algorithm = make_algorithm(algorithm)
    defaults = {"evaluate_local": False, "checkpoint_every": 10}
    values = defaults | (SETTINGS | MULTI_LABEL_SETTINGS)[setting] | changes
    return Experiment(algorithm=algorithm, **values)


def method(name: str, setting: str, **changes: Any) -> StartedExperiment:
    """Return the experiment of a method without FedCOG, from the shared warm start if it has one.

    Args:
        name: Name of the algorithm.
        setting: As in `experiment`.
        changes: Other settings of the experiment.

    Returns:
        The experiment and its warm start.
    """
    started = experiment(setting, name, **changes)
    if name in WRAPPED_METHODS:
        return started, shared_warm_start(started.algorithm, setting)
    if setting in MULTI_LABEL_SETTINGS:
        warm_start = WarmStart(
            started.algorithm, MULTI_LABEL_START_ROUNDS, MULTI_LABEL_EVALUATE_EVERY
        )
        return started, warm_start
    return started, None


def fedcog_around(
    setting: str, inner: str = "fedavg", options: dict[str, Any] | None = None, **changes: Any
) -> StartedExperiment:
    """Return the experiment of FedCOG around a method, from the shared warm start.

    Args:
        setting: As in `experiment`.
        inner: Name of the inner algorithm.
        options: Settings of FedCOG.
        changes: Other settings of the experiment.

    Returns:
        The experiment and its warm start.
    """
    inner_algorithm = make_algorithm(inner)
    warm_start = shared_warm_start(inner_algorithm, setting)
    fedcog_options = {"weighting": "balanced"} | (options or {})
    algorithm = FedCOG(inner_algorithm, start_round=warm_start.rounds, **fedcog_options)
    return experiment(setting, algorithm, **changes), warm_start


def shared_warm_start(algorithm: Algorithm, setting: str) -> WarmStart:
    """Return the warm start that a method and FedCOG around it share.

    Args:
        algorithm: The method.
        setting: As in `experiment`.

    Returns:
        The warm start.
    """
    if setting in MULTI_LABEL_SETTINGS:
        return warm_start_of(algorithm, MULTI_LABEL_START_ROUNDS, MULTI_LABEL_EVALUATE_EVERY)
    return warm_start_of(algorithm)
