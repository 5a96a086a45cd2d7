"""Partitions of flwr-datasets: a fixed table of its partitioners.

To add one, write an entry in `FLWR_PARTITIONS`.
"""

import importlib.util
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from fedcog.core import rng
from fedcog.data.partitions.base import Indices, PartitionConfig, PartitionError, check_sizes

MAX_ARGUMENT = 10**9
"""Largest integer accepted in `PartitionConfig.arguments`."""


class FlwrPartition(NamedTuple):
    """A partitioner of flwr-datasets.

    Attributes:
        partitioner: Name of its class in `flwr_datasets.partitioner`.
        summary: What it does, in a sentence for users.
        arguments: Returns its arguments, given the configuration and the number of examples.
        settings: Command-line flags of the settings that these arguments come from.
        options: Additional arguments that users may give: an integer, a boolean, or one of the
            listed words.
        by_label: Whether it needs exactly one label per example.
        describe: Returns the values of its settings in words, such as 'beta 0.1'.
    """

    partitioner: str
    summary: str
    arguments: Callable[[PartitionConfig, int], dict[str, Any]]
    settings: str
    options: Mapping[str, type[int] | type[bool] | tuple[str, ...]] = {}
    by_label: bool = True
    describe: Callable[[PartitionConfig], str] = lambda config: ""


def _shard_arguments(config: PartitionConfig, num_examples: int) -> dict[str, Any]:
    arguments = {"num_partitions": config.clients}
    given = parse_arguments("flwr-shard", config.arguments)
    if not {"num_shards_per_partition", "shard_size"} & given.keys():
        arguments["num_shards_per_partition"] = config.classes_per_client
    return arguments


def _inner_dirichlet_arguments(config: PartitionConfig, num_examples: int) -> dict[str, Any]:
    sizes = [
        num_examples // config.clients + (client < num_examples % config.clients)
        for client in range(config.clients)
    ]
    return {"partition_sizes": sizes, "alpha": config.beta}


def _size_arguments(config: PartitionConfig, num_examples: int) -> dict[str, Any]:
    return {"num_partitions": config.clients}


def _describe_beta(config: PartitionConfig) -> str:
    return f"beta {config.beta:g}"


FLWR_PARTITIONS: dict[str, FlwrPartition] = {
    "flwr-dirichlet": FlwrPartition(
        "DirichletPartitioner",
        "Divide each class by proportions ~ Dir(beta).",
        lambda config, _: {
            "num_partitions": config.clients,
            "alpha": config.beta,
            "min_partition_size": config.min_examples,
            "self_balancing": config.balance,
        },
        "--beta --balance --min-examples",
        describe=_describe_beta,
    ),
    "flwr-inner-dirichlet": FlwrPartition(
        "InnerDirichletPartitioner",
        "Equal sizes; class proportions within each client ~ Dir(beta).",
        _inner_dirichlet_arguments,
        "--beta --min-examples",
        describe=_describe_beta,
    ),
    "flwr-pathological": FlwrPartition(
        "PathologicalPartitioner",
        "A fixed number of random classes per client; a class is divided evenly among its clients.",
        lambda config, _: {
            "num_partitions": config.clients,
            "num_classes_per_partition": config.classes_per_client,
        },
        "--classes-per-client --min-examples",
        {"class_assignment_mode": ("random", "deterministic", "first-deterministic")},
        describe=lambda config: f"{config.classes_per_client} classes each",
    ),
    "flwr-shard": FlwrPartition(
        "ShardPartitioner",
        "Sort examples by label, cut them into shards, and give each client some shards.",
        _shard_arguments,
        "--classes-per-client (number of shards) --min-examples",
        {"num_shards_per_partition": int, "shard_size": int, "keep_incomplete_shard": bool},
        describe=lambda config: (
            "" if config.arguments else f"{config.classes_per_client} shards each"
        ),
    ),
    "flwr-iid": FlwrPartition(
        "IidPartitioner",
        "Equal sizes, random labels.",
        _size_arguments,
        "--min-examples",
        by_label=False,
    ),
    "flwr-linear": FlwrPartition(
        "LinearPartitioner",
        "Sizes proportional to 1, 2, 3 and so on.",
        _size_arguments,
        "--min-examples",
        by_label=False,
    ),
    "flwr-square": FlwrPartition(
        "SquarePartitioner",
        "Sizes proportional to 1, 4, 9 and so on.",
        _size_arguments,
        "--min-examples",
        by_label=False,
    ),
    "flwr-exponential": FlwrPartition(
        "ExponentialPartitioner",
        "Sizes proportional to powers of e.",
        _size_arguments,
        "--min-examples",
        by_label=False,
    ),
}
"""The partitions of flwr-datasets, by name."""


def describe(name: str, config: PartitionConfig) -> str:
    """Describe a partition of flwr-datasets in words.

    Args:
        name: Name of the partition.
        config: Its configuration.

    Returns:
        Name and settings, such as 'flwr-dirichlet, beta 0.1'.
    """
    settings = FLWR_PARTITIONS[name].describe(config)
    return ", ".join([name, *([settings] if settings else []), *config.arguments.split()])


def parse_arguments(name: str, text: str) -> dict[str, Any]:
    """Parse additional arguments of a partitioner.

    Args:
        name: Name of the partition.
        text: The arguments, such as 'shard_size=50 keep_incomplete_shard=true'.

    Returns:
        Values by argument; empty for partitions that are not flwr-datasets'.

    Raises:
        ValueError: If an argument is unknown, repeated, or has a value that is not allowed.
    """
    if name not in FLWR_PARTITIONS:
        return {}
    options = FLWR_PARTITIONS[name].options
    values: dict[str, Any] = {}
    for word in text.split():
        argument, _, value = word.partition("=")
        if not options:
            raise ValueError(f"partition '{name}' takes no arguments: leave '{word}' out")
        if argument in values:
            raise ValueError(f"{argument} is given twice")
        if argument not in options:
            raise ValueError(f"no '{argument}': {', '.join(options)} are known")
        values[argument] = _parse_value(argument, value, options[argument])
    return values


def _parse_value(
    argument: str, value: str, kind: type[int] | type[bool] | tuple[str, ...]
) -> int | bool | str:
    if kind is int:
        is_integer = value.isascii() and value.isdecimal() and len(value) < 11
        if not (is_integer and 1 <= int(value) <= MAX_ARGUMENT):
            raise ValueError(f"{argument} needs an integer from 1 to {MAX_ARGUMENT}, not '{value}'")
        return int(value)
    words = ("true", "false") if kind is bool else kind
    assert isinstance(words, tuple)
    if value not in words:
        raise ValueError(f"{argument} needs one of {', '.join(words)}, not '{value}'")
    return value == "true" if kind is bool else value


def missing_package() -> str:
    """Say how to install flwr-datasets if it is missing; else return an empty string."""
    if importlib.util.find_spec("flwr_datasets") is not None:
        return ""
    return "flwr-datasets is missing: pip install 'fedcog[flwr-datasets]'."


def flwr_partition(name: str, labels: Indices, config: PartitionConfig, seed: int) -> list[Indices]:
    """Partition examples with flwr-datasets.

    Examples are shuffled first if the partitioner takes no seed.

    Args:
        name: Name of the partition.
        labels: Class of each training example `(N,)`.
        config: The configuration of the partition.
        seed: The seed.

    Returns:
        The examples of each client.

    Raises:
        PartitionError: If flwr-datasets is missing or refuses, or a client has too few examples.
    """
    entry = FLWR_PARTITIONS[name]
    if problem := missing_package():
        raise PartitionError(f"partition '{name}': {problem}")
    # These imports take seconds.
    from datasets import Dataset
    from flwr_datasets import partitioner

    order = np.arange(len(labels))
    arguments = entry.arguments(config, len(labels)) | parse_arguments(name, config.arguments)
    if entry.by_label:
        arguments |= {"partition_by": "label", "seed": seed}
    else:
        order = rng.permutation(seed, "partition/0", 0, len(labels)).numpy()
    columns = {"position": order}
    if entry.by_label:
        columns["label"] = labels[order]
    try:
        # The partitioner warns about each draw that it repeats.
        with warnings.catch_warnings(action="ignore"):
            split = getattr(partitioner, entry.partitioner)(**arguments)
            split.dataset = Dataset.from_dict(columns)
            client_indices = [
                np.asarray(split.load_partition(client)["position"], dtype=np.int64)
                for client in range(config.clients)
            ]
    except (ValueError, TypeError, ArithmeticError, LookupError, AssertionError) as error:
        raise PartitionError(_explain(name, entry, error)) from error
    check_sizes(client_indices, config, f"partition '{name}'", "lower --clients or --min-examples")
    return client_indices


def _explain(name: str, entry: FlwrPartition, error: Exception) -> str:
    """Quote an error of flwr-datasets, and name the settings behind its arguments."""
    reason = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, ArithmeticError):
        reason = f"{reason}: there are too few examples for these settings."
    flags = f"{entry.settings} --partition-args" if entry.options else entry.settings
    return (
        f"partition '{name}': {entry.partitioner} of flwr-datasets says: {reason} "
        f"(The settings here are {flags} --clients.)"
    )
