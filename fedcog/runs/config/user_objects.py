"""The user's own objects, and what an experiment needs of them."""

from collections.abc import Iterable
from types import MappingProxyType
from typing import NamedTuple

from torch import nn

from fedcog.core.metrics import MetricFunctions
from fedcog.core.settings import ConfigError
from fedcog.data import Dataset
from fedcog.data.client_batches import Augmentation
from fedcog.models.initialization import Network
from fedcog.models.libraries import name_fault
from fedcog.runs.config.composition import algorithm_name, named_layers
from fedcog.runs.config.experiment import Experiment


class UserObjects(NamedTuple):
    """Objects that the user passes from Python instead of names.

    Attributes:
        data: Data set.
        model: Network: an instance, or a class or function, which starts from the run's seed.
        generator: Generator network, for FedCOG(generator="custom").
        preloaded: The data set of the experiment, if it is already read and adapted.
        metrics: Metric functions by name.
        augmentation: Changes the training examples of every batch.
    """

    data: Dataset | None = None
    model: Network | None = None
    generator: nn.Module | None = None
    preloaded: Dataset | None = None
    metrics: MetricFunctions = MappingProxyType({})
    augmentation: Augmentation | None = None


def check_objects(experiment: Experiment, objects: UserObjects) -> None:
    """Refuse experiments whose code, data or network is not available.

    Args:
        experiment: The experiment.
        objects: Objects of the user.

    Raises:
        ConfigError: If something is missing.
    """
    if faults := check_runnable(experiment):
        raise ConfigError(faults)
    faults = missing_objects(experiment, objects)
    if objects.model is None and (fault := name_fault(experiment.model)):
        faults.append(fault)
    if faults:
        raise ConfigError(faults)


def check_runnable(experiment: Experiment) -> list[str]:
    """Return why a recorded experiment cannot run: its algorithm's code is not available."""
    layers = named_layers(experiment.algorithm)
    missing = [name for name, layer in layers if layer.is_recorded]
    if not missing:
        return []
    parts = [
        f"FILE.py:{part}" if part in missing else part
        for part in algorithm_name(experiment.algorithm).split("+")
    ]
    return [
        f"{missing[0]} is your own algorithm: name its file, --algorithm {'+'.join(parts)}, or "
        "continue the run from Python with fedcog.run(...)."
    ]


def missing_objects(experiment: Experiment, objects: UserObjects) -> list[str]:
    """Return which of the user's own objects an experiment needs and does not get.

    Args:
        experiment: The experiment.
        objects: Objects of the user.

    Returns:
        A message with a remedy for each.
    """
    faults = []
    if objects.data is None and objects.preloaded is None and experiment.dataset == "custom":
        faults.append(
            "this run uses your own data: name what makes them, --dataset FILE.py:Name, or "
            "continue it from Python with fedcog.run(..., data=..., resume=True)."
        )
    if objects.model is None and experiment.model == "custom":
        faults.append(
            "this run uses your own network: name its file, --model FILE.py:Name, or continue it "
            "from Python with fedcog.run(..., model=..., resume=True)."
        )
    return faults


def check_seeds(model: Network | None, seeds: Iterable[int]) -> None:
    """Refuse one instance of a network for several seeds, which would all start alike.

    Args:
        model: The user's network.
        seeds: The seeds.

    Raises:
        ConfigError: If there are several seeds and the network is an instance.
    """
    different = list(dict.fromkeys(seeds))
    if isinstance(model, nn.Module) and len(different) > 1:
        name = type(model).__name__
        raise ConfigError(
            [
                f"model is one {name} with its weights, so seeds {', '.join(map(str, different))} "
                "would all start from them: give its class or a function instead, such as "
                f"model={name} or model=lambda: {name}(...), which starts from each seed."
            ]
        )
