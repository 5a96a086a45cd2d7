"""The partitions of this package, and `make_partition`, which computes any partition by name.

To add a partition, write a function here and an entry in `PARTITIONS`. Settings, command line and
lists of partitions read that table.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from fedcog.core import rng
from fedcog.data.partitions import flwr_partitions
from fedcog.data.partitions.base import (
    Examples,
    Indices,
    Partition,
    PartitionConfig,
    PartitionError,
    check_sizes,
)
from fedcog.data.partitions.flwr_partitions import FLWR_PARTITIONS, flwr_partition

MAX_ATTEMPTS = 1000
"""Number of random draws before a partition is declared impossible."""


def make_partition(
    name: str, labels: Indices, users: Indices | None, config: PartitionConfig, seed: int
) -> list[Indices]:
    """Partition a training set among clients.

    Args:
        name: Name of the partition, in `PARTITIONS` or `FLWR_PARTITIONS`.
        labels: Class of each training example `(N,)`, or boolean rows `(N, num_classes)`.
        users: User of each training example `(N,)`, if known.
        config: The configuration of the partition.
        seed: The seed.

    Returns:
        For each client, the positions of its examples: sorted, or in the authors' order for the
        published partitions.

    Raises:
        PartitionError: If the settings leave a client without enough examples, or the data set
            lacks what the partition needs.
    """
    entry = FLWR_PARTITIONS[name] if name in FLWR_PARTITIONS else PARTITIONS[name]
    is_by_user = isinstance(entry, Partition) and entry.by_user
    if not is_by_user and config.clients * config.min_examples > len(labels):
        raise PartitionError(
            f"{config.clients} clients of at least {config.min_examples} examples need more than "
            f"the {len(labels)} there are: lower --clients or --min-examples."
        )
    if labels.ndim > 1 and entry.by_label:
        raise PartitionError(
            f"partition '{name}' divides each class, and an example here may have several labels: "
            "choose iid, quantity or natural."
        )
    if isinstance(entry, Partition):
        client_indices = entry.assign(Examples(labels, users), config, seed)
    else:
        client_indices = flwr_partition(name, labels, config, seed)
    if isinstance(entry, Partition) and entry.keeps_order:
        return client_indices
    return [np.sort(indices) for indices in client_indices]


def describe(name: str, config: PartitionConfig) -> str:
    """Describe a partition in words.

    Args:
        name: Name of the partition; 'given' is returned unchanged.
        config: Its configuration.

    Returns:
        Name and settings, such as 'dirichlet, beta 0.1'.
    """
    if name in FLWR_PARTITIONS:
        return flwr_partitions.describe(name, config)
    settings = PARTITIONS[name].describe(config) if name in PARTITIONS else ""
    return f"{name}, {settings}" if settings else name


def iid(examples: Examples, config: PartitionConfig, seed: int) -> list[Indices]:
    """Equal sizes, random labels.

    Args:
        examples: The training examples.
        config: Reads `clients`.
        seed: The seed.

    Returns:
        The examples of each client.
    """
    order = _generator(seed, 0).permutation(len(examples.labels))
    return np.array_split(order, config.clients)


def dirichlet(examples: Examples, config: PartitionConfig, seed: int) -> list[Indices]:
    """Divide each class by proportions ~ Dir(beta) (NIID-1 of the FedCOG paper).

    With `balance`, a client that already holds its even share of all examples gets no more of the
    next class. The draw is repeated until every client has enough examples.

    Args:
        examples: Labels of the training examples.
        config: Reads `clients`, `beta`, `balance` and `min_examples`.
        seed: The seed.

    Returns:
        The examples of each client.

    Raises:
        PartitionError: If every draw leaves some client with too few examples.
    """
    labels = examples.labels

    def draw(generator: np.random.Generator) -> list[Indices]:
        parts: list[list[Indices]] = [[] for _ in range(config.clients)]
        sizes = np.zeros(config.clients, dtype=np.int64)
        for label in range(int(labels.max()) + 1):
            members = generator.permutation(np.flatnonzero(labels == label))
            has_room = np.full(config.clients, True)
            if config.balance:
                has_room = sizes < len(labels) / config.clients
            proportions = _proportions(generator, config.clients, config.beta) * has_room
            if proportions.sum() == 0:  # a tiny beta may give all mass to clients without room
                proportions = has_room.astype(np.float64)
            cumulative = proportions.cumsum()
            # Dividing by the last entry keeps rounding from giving a full client the rest.
            cuts = cumulative[:-1] / cumulative[-1] * len(members)
            for client, part in enumerate(np.split(members, cuts.astype(np.int64))):
                parts[client].append(part)
                sizes[client] += len(part)
        return [np.concatenate(part) if part else np.empty(0, np.int64) for part in parts]

    return _draw_until_enough(draw, config, seed, f"dirichlet with beta {config.beta:g}")


def label_skew(examples: Examples, config: PartitionConfig, seed: int) -> list[Indices]:
    """Give each client one group of classes, divided evenly (NIID-2 of the FedCOG paper).

    Args:
        examples: Labels of the training examples.
        config: Reads `clients`, `classes_per_client` and `min_examples`.
        seed: The seed.

    Returns:
        The examples of each client.

    Raises:
        PartitionError: If groups and clients do not match, or a client has too few examples.
    """
    groups = _class_groups(examples.labels, config, "label-skew")
    generator = _generator(seed, 0)
    client_indices = _divide_groups(
        examples.labels, groups, config.clients, generator, np.array_split
    )
    check_sizes(client_indices, config, "label-skew", "lower --clients or --min-examples")
    return client_indices


def label_quantity(examples: Examples, config: PartitionConfig, seed: int) -> list[Indices]:
    """Give each client one group of classes, divided by proportions ~ Dir(beta).

    The draw is repeated until every client has enough examples.

    Args:
        examples: Labels of the training examples.
        config: Reads `clients`, `classes_per_client`, `beta` and `min_examples`.
        seed: The seed.

    Returns:
        The examples of each client.

    Raises:
        PartitionError: If groups and clients do not match, or every draw leaves some client with
            too few examples.
    """
    groups = _class_groups(examples.labels, config, "label-quantity")

    def draw(generator: np.random.Generator) -> list[Indices]:
        def _divide(members: Indices, num_parts: int) -> list[Indices]:
            cumulative = _proportions(generator, num_parts, config.beta).cumsum()
            return np.split(members, (cumulative[:-1] * len(members)).astype(np.int64))

        return _divide_groups(examples.labels, groups, config.clients, generator, _divide)

    return _draw_until_enough(draw, config, seed, f"label-quantity with beta {config.beta:g}")


def quantity(examples: Examples, config: PartitionConfig, seed: int) -> list[Indices]:
    """Random labels, sizes ~ Dir(beta): a few clients have most of the examples.

    Args:
        examples: The training examples.
        config: Reads `clients`, `beta` and `min_examples`.
        seed: The seed.

    Returns:
        The examples of each client.
    """
    num_examples = len(examples.labels)
    generator = _generator(seed, 0)
    cumulative = _proportions(generator, config.clients, config.beta).cumsum()
    spare = num_examples - config.clients * config.min_examples
    minimum = config.min_examples * np.arange(1, config.clients + 1)
    ends = (cumulative * spare).astype(np.int64) + minimum
    return np.split(generator.permutation(num_examples), ends[:-1])


def published(examples: Examples, config: PartitionConfig, seed: int) -> list[Indices]:
    """The FedCOG authors' own draw of NIID-1, as in their code: Dir(beta), seed by seed.

    One stream of numpy's legacy generator serves all passes. In a pass, each class is shuffled and
    divided by proportions ~ Dir(beta), without the clients that had their even share before. Passes
    are repeated until every client has enough examples. At the end, each client's are shuffled.

    Args:
        examples: Labels of the training examples.
        config: Reads `clients`, `beta` and `min_examples`.
        seed: The seed of the stream, below 2**32.

    Returns:
        The examples of each client.

    Raises:
        PartitionError: If the seed is too large, or every pass leaves some client with too few
            examples.
    """
    if seed >= 2**32:
        raise PartitionError(
            f"published uses numpy's legacy generator, whose seeds end at 2^32 - 1, not {seed}: "
            "lower --partition-seed."
        )
    labels = examples.labels
    stream = np.random.RandomState(seed)

    def draw(_: np.random.Generator) -> list[Indices]:
        parts: list[list[Indices]] = [[] for _ in range(config.clients)]
        sizes = np.zeros(config.clients, dtype=np.int64)
        for label in range(int(labels.max()) + 1):
            members = np.flatnonzero(labels == label)
            stream.shuffle(members)
            proportions = stream.dirichlet(np.repeat(config.beta, config.clients))
            proportions = proportions * (sizes < len(labels) / config.clients)
            total = proportions.sum()
            cuts = np.zeros(config.clients - 1, dtype=np.int64)
            if total > 0:  # else their code gives the whole class to the last client
                cuts = (np.cumsum(proportions / total) * len(members)).astype(np.int64)[:-1]
            for client, part in enumerate(np.split(members, cuts)):
                parts[client].append(part)
                sizes[client] += len(part)
        return [np.concatenate(part) for part in parts]

    client_indices = _draw_until_enough(draw, config, seed, f"published with beta {config.beta:g}")
    for indices in client_indices:
        stream.shuffle(indices)
    return client_indices


def published_label_skew(examples: Examples, config: PartitionConfig, seed: int) -> list[Indices]:
    """The FedCOG authors' own NIID-2, as in their code: groups of classes, in file order.

    Client k takes group k modulo the number of groups. Each class is cut into equal runs, one for
    each client of its group; a remainder is not used. Nothing is random.

    Args:
        examples: Labels of the training examples.
        config: Reads `clients`, `classes_per_client` and `min_examples`.
        seed: Ignored.

    Returns:
        The examples of each client, class by class.

    Raises:
        PartitionError: If classes or clients cannot be divided evenly, or a client has too few
            examples.
    """
    groups = _class_groups(examples.labels, config, "published-label-skew")
    if len(groups[-1]) < len(groups[0]) or config.clients % len(groups):
        raise PartitionError(
            f"published-label-skew needs groups of equal size and as many clients for each: "
            f"{int(examples.labels.max()) + 1} classes in groups of {config.classes_per_client}, "
            f"and {config.clients} clients, do not divide evenly. Change --classes-per-client or "
            f"--clients, or choose --partition label-skew."
        )
    holders = config.clients // len(groups)
    client_indices = []
    for client in range(config.clients):
        group = groups[client % len(groups)]
        turn = client // len(groups)
        runs = []
        for label in group:
            members = np.flatnonzero(examples.labels == label)
            length = len(members) // holders
            runs.append(members[turn * length : (turn + 1) * length])
        client_indices.append(np.concatenate(runs))
    remedy = "lower --clients or --min-examples"
    check_sizes(client_indices, config, "published-label-skew", remedy)
    return client_indices


def natural(examples: Examples, config: PartitionConfig, seed: int) -> list[Indices]:
    """Make each user of the data set a client; surplus users are left out at random.

    Args:
        examples: Users of the training examples.
        config: Reads `clients` and `min_examples`.
        seed: The seed.

    Returns:
        The examples of each client.

    Raises:
        PartitionError: If users are unknown, or too few have enough examples.
    """
    users = examples.users
    if users is None:
        raise PartitionError(
            "partition 'natural' needs the user of each example, and this data set has no users: "
            "choose another --partition, or give `users` with your own data."
        )
    # Sorting once avoids a scan of all examples for each of thousands of users.
    order = np.argsort(users, kind="stable")
    _, starts, sizes = np.unique(users[order], return_index=True, return_counts=True)
    eligible = np.flatnonzero(sizes >= config.min_examples)
    if len(eligible) < config.clients:
        raise PartitionError(
            f"{len(eligible)} of {len(sizes)} users have at least {config.min_examples} examples, "
            f"fewer than {config.clients} clients: lower --clients or --min-examples."
        )
    chosen = np.sort(_generator(seed, 0).permutation(eligible)[: config.clients])
    return [order[starts[user] : starts[user] + sizes[user]] for user in chosen]


def _describe_beta(config: PartitionConfig) -> str:
    return f"beta {config.beta:g}"


def _describe_classes(config: PartitionConfig) -> str:
    return f"{config.classes_per_client} classes each"


PARTITIONS: dict[str, Partition] = {
    "iid": Partition(iid),
    "dirichlet": Partition(
        dirichlet, "--beta --balance --min-examples", by_label=True, describe=_describe_beta
    ),
    "label-skew": Partition(
        label_skew,
        "--classes-per-client --min-examples",
        by_label=True,
        describe=_describe_classes,
    ),
    "label-quantity": Partition(
        label_quantity,
        "--classes-per-client --beta --min-examples",
        by_label=True,
        describe=lambda config: f"{_describe_classes(config)}, {_describe_beta(config)}",
    ),
    "quantity": Partition(quantity, "--beta --min-examples", describe=_describe_beta),
    "natural": Partition(natural, "--min-examples", by_user=True),
    "published": Partition(
        published,
        "--beta --min-examples",
        by_label=True,
        keeps_order=True,
        describe=_describe_beta,
    ),
    "published-label-skew": Partition(
        published_label_skew,
        "--classes-per-client --min-examples",
        by_label=True,
        keeps_order=True,
        describe=_describe_classes,
    ),
}
"""The partitions of this package, by name."""


def _generator(seed: int, attempt: int) -> np.random.Generator:
    low, high = rng.key(seed, f"partition/{attempt}")
    return np.random.Generator(np.random.Philox(key=low | high << 32))


def _proportions(generator: np.random.Generator, size: int, beta: float) -> NDArray[np.float64]:
    """Draw from a symmetric Dirichlet distribution; a tiny beta may underflow to NaN, then 0."""
    return np.nan_to_num(generator.dirichlet(np.full(size, beta)))


def _class_groups(labels: Indices, config: PartitionConfig, name: str) -> list[Indices]:
    """Divide the classes into groups of `classes_per_client`, at most one group per client."""
    size = config.classes_per_client
    classes = np.arange(int(labels.max()) + 1)
    if size > len(classes):
        raise PartitionError(
            f"{name} with {size} classes per client is impossible with {len(classes)} classes: "
            "lower --classes-per-client, or choose iid for all classes."
        )
    groups = [classes[start : start + size] for start in range(0, len(classes), size)]
    if config.clients < len(groups):
        raise PartitionError(
            f"{name} with {size} of {len(classes)} classes per client makes {len(groups)} "
            f"groups, and {config.clients} clients cannot hold them all: "
            f"raise --clients to {len(groups)} or more, or --classes-per-client."
        )
    return groups


def _divide_groups(
    labels: Indices,
    groups: list[Indices],
    num_clients: int,
    generator: np.random.Generator,
    divide: Callable[[Indices, int], list[Indices]],
) -> list[Indices]:
    """Divide the shuffled examples of every class among the clients of its group."""
    client_indices: list[Indices] = [np.empty(0, np.int64)] * num_clients
    for number, group in enumerate(groups):
        clients = range(number, num_clients, len(groups))
        for label in group:
            members = generator.permutation(np.flatnonzero(labels == label))
            for client, part in zip(clients, divide(members, len(clients)), strict=True):
                client_indices[client] = np.concatenate([client_indices[client], part])
    return client_indices


def _draw_until_enough(
    draw: Callable[[np.random.Generator], list[Indices]],
    config: PartitionConfig,
    seed: int,
    name: str,
) -> list[Indices]:
    """Repeat a random partition until every client has enough examples."""
    best = 0
    for attempt in range(MAX_ATTEMPTS):
        client_indices = draw(_generator(seed, attempt))
        smallest = min(len(indices) for indices in client_indices)
        if smallest >= config.min_examples:
            return client_indices
        best = max(best, smallest)
    raise PartitionError(
        f"{name} over {config.clients} clients left some client fewer than {config.min_examples} "
        f"examples in all {MAX_ATTEMPTS} draws (at best {best}): "
        "raise --beta, or lower --clients or --min-examples."
    )
