"""Names of the user's own data, network and augmentation, with digests that tell them apart.

Settings do not describe these objects. Tables, labels and reports show their names, and runs of
different objects are never averaged.
"""

import hashlib
import re

import torch

from fedcog.data import Dataset
from fedcog.data.client_batches import Augmentation
from fedcog.data.sources import locations
from fedcog.models.behavior import (
    NUM_EXAMPLES,
    Behavior,
    initial_weights,
    network_behavior,
    summarize,
)
from fedcog.models.functional import Model
from fedcog.models.initialization import Network, make_network
from fedcog.models.ops.keyed_random import KeyedRandom, trial_key
from fedcog.runs.config.experiment import Experiment
from fedcog.runs.config.user_code import function_source
from fedcog.runs.config.user_objects import UserObjects

NUM_DIGITS = 6
"""Number of hexadecimal digits of a digest."""


def object_names(
    experiment: Experiment,
    objects: UserObjects,
    dataset: Dataset,
    network_text: str,
    model: Model | None = None,
) -> dict[str, str]:
    """Name what settings do not describe: the user's own objects, and data in files.

    Args:
        experiment: The experiment.
        objects: Objects of the user.
        dataset: The data set, before shifts.
        network_text: What describes the network.
        model: The network initialized from seed 0, or the instance; by default it is built.

    Returns:
        Names with digests, by role: data, network, augmentation.
    """
    names: dict[str, str] = {}
    is_located = locations.location_kind(experiment.dataset) in ("folder", "file", "hub")
    if objects.data is not None or experiment.indices or is_located:
        names["data"] = _data_name(dataset)
    if objects.model is not None:
        names["network"] = _network_name(objects.model, network_text, dataset, model)
    if objects.augmentation is not None:
        names["augmentation"] = _augmentation_name(objects.augmentation, dataset)
    return names


def _data_name(dataset: Dataset) -> str:
    """Return the name of a data set, with a digest of its examples, users and indices."""
    return f"{dataset.name}-{dataset.full_fingerprint[:NUM_DIGITS]}"


def _network_name(network: Network, text: str, dataset: Dataset, model: Model | None = None) -> str:
    """Return the name of a user's network: of a class or function the same for all seeds.

    Args:
        network: The network, as the user gave it.
        text: What describes it: its structure and source, and weights of files.
        dataset: The data set that it is for.
        model: The network initialized from seed 0, or the instance; by default it is built.

    Returns:
        Name and digest. The digest also depends on what the network computes and on its initial
        weights, because neither structure nor source shows the values that a function was made
        with.
    """
    if model is None:
        shape = dataset.input_shape
        num_classes = len(dataset.classes)
        module = make_network(network, shape, num_classes, seed=0)
        model = Model(module, shape, num_classes)
    numbers = network_behavior(model) + initial_weights(model)
    return _name(network, text + _coarse(numbers))


def _augmentation_name(augmentation: Augmentation, dataset: Dataset) -> str:
    """Return the name of a user's augmentation, the same for all seeds.

    Args:
        augmentation: The function.
        dataset: The data set, before shifts, which depend on the seed.

    Returns:
        Name and digest, which also depends on what the function computes.
    """
    x = dataset.train_x[:NUM_EXAMPLES].cpu()
    if x.dtype == torch.uint8:
        x = x.float() / 255
    changed = augmentation(x.clone(), KeyedRandom(trial_key(x.device)))
    return _name(augmentation, _code_text(augmentation) + _coarse(summarize(changed)))


def _name(thing: object, text: str) -> str:
    name = re.sub(r"\W", "", getattr(thing, "__name__", type(thing).__name__))
    return f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:NUM_DIGITS]}"


def _coarse(behavior: Behavior) -> str:
    """Return a behavior in three digits, which rounding hardly ever changes."""
    return " ".join(f"{number:.3g}" for number in behavior)


def _code_text(function: Augmentation) -> str:
    """Return the source of a function, or the byte code of a lambda."""
    code = getattr(function, "__code__", None)
    if code is not None and code.co_name == "<lambda>":
        constants = [one for one in code.co_consts if not isinstance(one, type(code))]
        return f"{code.co_code.hex()} {code.co_names} {constants} {function_source(function)}"
    return function_source(function)
