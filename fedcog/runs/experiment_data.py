"""The data of an experiment: read, adapted, and split among clients."""

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcog.core.settings import ConfigError
from fedcog.data import DATASETS, Dataset, FederatedData, shifts
from fedcog.data.client_batches import Augmentation
from fedcog.data.datasets import DataWarning
from fedcog.data.partitions import schemes
from fedcog.data.sources import locations
from fedcog.data.sources.client_indices import read_client_indices
from fedcog.models.checks import random_states, restored_random_states
from fedcog.models.ops.keyed_random import KeyedRandom, trial_key
from fedcog.runs.config.experiment import (
    DEFAULT_CLIENTS,
    DEFAULT_MIN_EXAMPLES,
    DEFAULT_PARTITION,
    Experiment,
)

NUM_TRIALS = 4
"""Number of calls that show whether an augmentation can be repeated."""
DATA_SETTINGS = (
    "dataset",
    "data_dir",
    "image_size",
    "subset",
    "indices",
    "input_column",
    "label_column",
    "user_column",
)
"""The settings that decide what `read_dataset` returns."""


def data_settings(experiment: Experiment) -> tuple[int | str, ...]:
    """Return the values of `DATA_SETTINGS`: experiments with equal ones share a data set."""
    return tuple(getattr(experiment, name) for name in DATA_SETTINGS)


def read_dataset(experiment: Experiment) -> Dataset:
    """Read the data set that an experiment names.

    Args:
        experiment: Names the data set or its location, image size, subset and indices.

    Returns:
        The data set.

    Raises:
        DataError: If it is missing or damaged.
    """
    dataset = locations.load_dataset(
        experiment.dataset,
        experiment.data_dir or None,
        image_size=experiment.image_size,
        subset=experiment.subset,
        input_column=experiment.input_column,
        label_column=experiment.label_column,
        user_column=experiment.user_column,
    )
    return _with_indices(dataset, experiment)


def adapt_dataset(dataset: Dataset, experiment: Experiment) -> Dataset:
    """Apply image size, subset and indices of an experiment to the user's own data set.

    Args:
        dataset: The data set.
        experiment: Has the settings.

    Returns:
        The changed data set, or the same one if nothing changes.
    """
    options = locations.ReadOptions(experiment.image_size, experiment.subset)
    return _with_indices(locations.adapt_dataset(dataset, options), experiment)


def _with_indices(dataset: Dataset, experiment: Experiment) -> Dataset:
    if not experiment.indices:
        return dataset
    path = Path(experiment.indices).expanduser()
    return dataclasses.replace(dataset, indices=read_client_indices(path))


def resolve_clients(experiment: Experiment, dataset: Dataset) -> Experiment:
    """Return the experiment with the partition and the number of clients that the data set implies.

    Args:
        experiment: May say `partition = "auto"` and `clients = 0`.
        dataset: The data set.

    Returns:
        The experiment as it is recorded.

    Raises:
        ConfigError: If the number of clients is not that of the data set's `indices`.
    """
    partition = experiment.partition
    if partition == "auto":
        partition = _implied_partition(dataset)
    changes: dict[str, Any] = {
        "partition": partition,
        "min_examples": experiment.min_examples or DEFAULT_MIN_EXAMPLES,
    }
    if partition == "given" and dataset.indices is not None:
        changes["clients"] = len(dataset.indices)
        if experiment.clients not in (0, len(dataset.indices)):
            raise ConfigError(
                [
                    f"clients is {experiment.clients}, but there are indices for "
                    f"{len(dataset.indices)}: remove --clients, or restore the indices that the "
                    "run began with."
                ]
            )
    elif not experiment.clients and partition == "natural" and dataset.users is not None:
        sizes = np.unique(dataset.users.numpy(), return_counts=True)[1]
        if not experiment.min_examples:  # all users, however few examples
            changes["min_examples"] = min(DEFAULT_MIN_EXAMPLES, int(sizes.min()))
        changes["clients"] = max(1, int((sizes >= changes["min_examples"]).sum()))
    elif not experiment.clients:
        changes["clients"] = DEFAULT_CLIENTS
    if all(getattr(experiment, name) == value for name, value in changes.items()):
        return experiment
    return dataclasses.replace(experiment, **changes)


def _implied_partition(dataset: Dataset) -> str:
    """Return what `partition = "auto"` means for a data set."""
    if dataset.indices is not None:
        return "given"
    return DEFAULT_PARTITION if dataset.users is None else "natural"


def resolve_before_loading(experiment: Experiment) -> Experiment:
    """Return what `resolve_clients` will, if that is known without the data; else the same.

    Args:
        experiment: May say `partition = "auto"` and `clients = 0`.
    """
    source = DATASETS.get(experiment.dataset)
    if source is None or source.has_users or experiment.indices:
        return experiment
    partition = experiment.partition
    if partition == "auto":
        partition = DEFAULT_PARTITION
    return dataclasses.replace(
        experiment,
        partition=partition,
        clients=experiment.num_clients,
        min_examples=experiment.min_examples or DEFAULT_MIN_EXAMPLES,
    )


def check_augmentation(augmentation: Augmentation, data: FederatedData) -> Tensor:
    """Call the user's augmentation on a few examples.

    Args:
        augmentation: The function.
        data: The data that it will change.

    Returns:
        The examples that it changed.

    Raises:
        ConfigError: If it fails, changes shape or dtype, or cannot be repeated.
    """
    name = getattr(augmentation, "__name__", "augmentation")
    indices = torch.arange(min(4, len(data.train_y)), device=data.device)
    x = data.examples(indices, store=data.example_store | data.stage(indices))["x"]
    results = []
    with restored_random_states():
        states = random_states()
        for _ in range(NUM_TRIALS):
            try:
                results.append(augmentation(x.clone(), KeyedRandom(trial_key(data.device))))
            except Exception as error:
                raise ConfigError(
                    [f"{name}(x, random) failed: {type(error).__name__}: {error}."]
                ) from error
        draws_itself = states != random_states()
    found = results[0]
    if not isinstance(found, Tensor) or found.shape != x.shape or found.dtype != x.dtype:
        description = type(found).__name__
        if isinstance(found, Tensor):
            description = f"{found.dtype} {tuple(found.shape)}"
        raise ConfigError(
            [f"{name} must return {x.dtype} {tuple(x.shape)} as it receives, not {description}."]
        )
    if found.is_floating_point() and not bool(found.isfinite().all()):
        raise ConfigError([f"{name} returns NaN or infinity for some of the training examples."])
    if draws_itself or not all(torch.equal(found, other) for other in results):
        raise ConfigError(
            [
                f"{name} draws random numbers of its own, so runs could not be repeated: draw them "
                "from its second argument, random.uniform(*shape), normal, integers or bernoulli."
            ]
        )
    return found


def augmentation_batching_error(augmentation: Augmentation, data: FederatedData) -> str:
    """Call the user's augmentation for two clients at once, on a few examples.

    Args:
        augmentation: The function.
        data: The data that it will change.

    Returns:
        Why torch cannot map it over clients with vmap; empty if it can.
    """
    indices = torch.arange(min(2, len(data.train_y)), device=data.device)
    x = data.examples(indices, store=data.example_store | data.stage(indices))["x"]
    key = trial_key(data.device)

    def _augment(x: Tensor, client_id: Tensor) -> Tensor:
        own_key = key._replace(client_id=client_id)
        return augmentation(x, KeyedRandom(own_key, is_mapped=True))

    try:
        with warnings.catch_warnings(action="ignore"):  # about missing batching rules
            torch.func.vmap(_augment)(torch.stack([x, x]), torch.arange(2, device=data.device))
    except Exception as error:
        return next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")
    return ""


def client_names(experiment: Experiment, dataset: Dataset, indices: list[Tensor]) -> list[str]:
    """Return the name of each client's user; empty if clients are no users, or have no names.

    Args:
        experiment: The experiment, with its partition.
        dataset: The data set.
        indices: Training examples of each client.
    """
    if experiment.partition != "natural" or dataset.users is None or not dataset.user_names:
        return []
    users = dataset.users
    return [dataset.user_names[int(users[part[0]])] if len(part) else "" for part in indices]


def split_dataset(experiment: Experiment, dataset: Dataset) -> list[Tensor]:
    """Split the training examples among clients.

    Args:
        experiment: Names the partition.
        dataset: The data set, with `indices` if the partition is "given".

    Returns:
        Indices of training examples, one tensor per client.

    Raises:
        ConfigError: If the partition is "given" but the data set has no indices.
    """
    experiment = resolve_clients(experiment, dataset)
    if experiment.partition == "given":
        if dataset.indices is None:
            raise ConfigError(
                [
                    "partition 'given' needs the examples of each client: name a file with "
                    "--indices, or give your own data with `indices`; or choose another partition."
                ]
            )
        num_used = sum(map(len, dataset.indices))
        if num_used < len(dataset.train_y):
            warnings.warn(
                f"{len(dataset.train_y) - num_used} of the {len(dataset.train_y)} training "
                "examples are in no client's indices and not used.",
                DataWarning,
                stacklevel=2,
            )
        return list(dataset.indices)
    users = None if dataset.users is None else dataset.users.numpy()
    parts = schemes.make_partition(
        experiment.partition,
        dataset.train_y.numpy(),
        users,
        experiment.partition_config,
        partition_seed(experiment),
    )
    if experiment.partition == "natural" and users is not None:
        _warn_about_users(experiment, users)
    return [torch.from_numpy(part) for part in parts]


def _warn_about_users(experiment: Experiment, users: np.ndarray) -> None:
    """Say how many users are no clients, and why."""
    sizes = np.unique(users, return_counts=True)[1]
    num_eligible = int((sizes >= experiment.min_examples).sum())
    reasons = []
    if num_eligible < len(sizes):
        reasons.append(
            f"{len(sizes) - num_eligible} of {len(sizes)} users are left out, which have fewer "
            f"than {experiment.min_examples} training examples: lower --min-examples."
        )
    if experiment.clients < num_eligible:
        reasons.append(
            f"{num_eligible - experiment.clients} of {len(sizes)} users are left out, because "
            f"--clients is {experiment.clients}: set --clients 0 for all."
        )
    for reason in reasons:
        warnings.warn(reason, DataWarning, stacklevel=3)


def apply_shifts(experiment: Experiment, dataset: Dataset, indices: list[Tensor]) -> Dataset:
    """Shift the clients' inputs and corrupt labels, if the experiment says so.

    Args:
        experiment: Names the shift and the label noise.
        dataset: The data set.
        indices: Training examples of each client.

    Returns:
        The data set as the clients have it.
    """
    return shifts.apply_shift(
        dataset,
        indices,
        experiment.shift,
        experiment.shift_strength,
        experiment.label_noise,
        partition_seed(experiment),
    )


def partition_seed(experiment: Experiment) -> int:
    """Return the seed of partition, shifts and held-out test examples."""
    if experiment.partition_seed < 0:
        return experiment.seed
    return experiment.partition_seed
