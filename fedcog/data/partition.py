"""How a training set is shared out among clients."""

from collections.abc import Callable

import numpy as np

from fedcog import streams
from fedcog.data.borrowed import BORROWED, borrow
from fedcog.data.rules import Indices, PartitionError, Rule, check_sizes

REDRAWS = 1000


def split(kind: str, labels: Indices, users: Indices | None, rule: Rule, seed: int) -> list[Indices]:
    """Every client's examples, as sorted positions in the training set."""
    if kind == "natural":
        shares = natural(users, rule, _generator(seed, 0))
    else:
        if rule.clients * rule.min_examples > len(labels):
            raise PartitionError(
                f"{rule.clients} clients of at least {rule.min_examples} examples need more than the {len(labels)} "
                "there are: lower --clients or --min-examples."
            )
        if labels.ndim > 1 and kind in BY_LABEL:
            raise PartitionError(
                f"partition '{kind}' shares out class by class, and an example here may have several labels: choose "
                "iid, quantity or natural."
            )
        shares = borrow(kind, labels, rule, seed) if kind in BORROWED else PARTITIONS[kind](labels, rule, seed)
    return [np.sort(share) for share in shares]


def iid(labels: Indices, rule: Rule, seed: int) -> list[Indices]:
    """Equal sizes, labels as they come."""
    return np.array_split(_generator(seed, 0).permutation(len(labels)), rule.clients)


def dirichlet(labels: Indices, rule: Rule, seed: int) -> list[Indices]:
    """Of each class, proportions ~ Dir(beta) (the paper's NIID-1).

    With `balance`, a client that already holds its even share of all examples gets no more of the next class.
    Redrawn until every client has enough.
    """

    def draw(generator: np.random.Generator) -> list[Indices]:
        shares: list[list[Indices]] = [[] for _ in range(rule.clients)]
        held = np.zeros(rule.clients, dtype=np.int64)
        for label in range(int(labels.max()) + 1):
            examples = generator.permutation(np.flatnonzero(labels == label))
            room = held < len(labels) / rule.clients if rule.balance else np.full(rule.clients, True)
            proportions = np.nan_to_num(generator.dirichlet(np.full(rule.clients, rule.beta))) * room
            if proportions.sum() == 0:  # beta so small that nothing is left for those with room
                proportions = room.astype(np.float64)
            rising = proportions.cumsum()  # divided by its own end: rounding must not give a full client the rest
            cuts = rising[:-1] / rising[-1] * len(examples)
            for client, part in enumerate(np.split(examples, cuts.astype(np.int64))):
                shares[client].append(part)
                held[client] += len(part)
        return [np.concatenate(parts) if parts else np.empty(0, np.int64) for parts in shares]

    return _redraw(
        draw, rule, seed, f"dirichlet with beta {rule.beta:g}", "raise --beta, or lower --clients or --min-examples"
    )


def _groups(labels: Indices, rule: Rule, kind: str) -> list[Indices]:
    """The classes in groups of `classes_per_client`, none more than there are clients."""
    classes = np.arange(int(labels.max()) + 1)
    if rule.classes_per_client > len(classes):
        raise PartitionError(
            f"{kind} with {rule.classes_per_client} classes per client needs as many, and there are {len(classes)}: "
            "lower --classes-per-client, or choose iid, if everybody is to hold everything."
        )
    groups = [classes[at : at + rule.classes_per_client] for at in range(0, len(classes), rule.classes_per_client)]
    if rule.clients < len(groups):
        raise PartitionError(
            f"{kind} with {rule.classes_per_client} of {len(classes)} classes per client makes {len(groups)} "
            f"groups, and {rule.clients} clients cannot hold them all: raise --clients to {len(groups)} or more, or "
            "--classes-per-client."
        )
    return groups


def _to_holders(
    labels: Indices,
    groups: list[Indices],
    rule: Rule,
    generator: np.random.Generator,
    cut: Callable[[Indices, int], list[Indices]],
) -> list[Indices]:
    """Every class shared out among the clients of its group: its shuffled examples cut into as many parts."""
    shares: list[Indices] = [np.empty(0, np.int64)] * rule.clients
    for number, group in enumerate(groups):
        holders = range(number, rule.clients, len(groups))
        for label in group:
            parts = cut(generator.permutation(np.flatnonzero(labels == label)), len(holders))
            for client, part in zip(holders, parts, strict=True):
                shares[client] = np.concatenate([shares[client], part])
    return shares


def label_skew(labels: Indices, rule: Rule, seed: int) -> list[Indices]:
    """Classes in groups of `classes_per_client`, one group a client, groups shared out evenly (the paper's NIID-2)."""
    shares = _to_holders(labels, _groups(labels, rule, "label-skew"), rule, _generator(seed, 0), np.array_split)
    check_sizes(shares, rule, "label-skew", "lower --clients or --min-examples")
    return shares


def label_quantity(labels: Indices, rule: Rule, seed: int) -> list[Indices]:
    """Groups of classes as in label-skew, each class shared out among its clients by proportions ~ Dir(beta).

    Redrawn until every client has enough.
    """
    groups = _groups(labels, rule, "label-quantity")

    def draw(generator: np.random.Generator) -> list[Indices]:
        def cut(examples: Indices, holders: int) -> list[Indices]:
            rising = np.nan_to_num(generator.dirichlet(np.full(holders, rule.beta))).cumsum()
            return np.split(examples, (rising[:-1] * len(examples)).astype(np.int64))

        return _to_holders(labels, groups, rule, generator, cut)

    remedy = "raise --beta, or lower --clients or --min-examples"
    return _redraw(draw, rule, seed, f"label-quantity with beta {rule.beta:g}", remedy)


def quantity(labels: Indices, rule: Rule, seed: int) -> list[Indices]:
    """Labels as they come, sizes ~ Dir(beta): a few clients have most of the examples."""
    generator = _generator(seed, 0)
    rising = np.nan_to_num(generator.dirichlet(np.full(rule.clients, rule.beta))).cumsum()
    spare = len(labels) - rule.clients * rule.min_examples
    ends = (rising * spare).astype(np.int64) + rule.min_examples * np.arange(1, rule.clients + 1)
    return np.split(generator.permutation(len(labels)), ends[:-1])


def natural(users: Indices | None, rule: Rule, generator: np.random.Generator) -> list[Indices]:
    """One client a user, as the data set tells; of more users than clients, a random choice."""
    if users is None:
        raise PartitionError(
            "partition 'natural' needs to know whose each example is, and this data set does not say: choose another "
            "--partition, or give `users` with your own data."
        )
    order = np.argsort(users, kind="stable")  # once, not a look at everything for each of thousands of users
    _, starts, sizes = np.unique(users[order], return_index=True, return_counts=True)
    fit = np.flatnonzero(sizes >= rule.min_examples)
    if len(fit) < rule.clients:
        raise PartitionError(
            f"{len(fit)} of {len(sizes)} users have at least {rule.min_examples} examples, and {rule.clients} "
            "clients were asked for: lower --clients or --min-examples."
        )
    chosen = np.sort(generator.permutation(fit)[: rule.clients])
    return [order[starts[user] : starts[user] + sizes[user]] for user in chosen]


PARTITIONS: dict[str, Callable[[Indices, Rule, int], list[Indices]]] = {
    "iid": iid,
    "dirichlet": dirichlet,
    "label-skew": label_skew,
    "label-quantity": label_quantity,
    "quantity": quantity,
}
KINDS = (*PARTITIONS, "natural")
BY_LABEL = ("dirichlet", "label-skew", "label-quantity", *(name for name, one in BORROWED.items() if one.by_label))


def _generator(seed: int, attempt: int) -> np.random.Generator:
    low, high = streams.key(seed, f"partition/{attempt}")
    return np.random.Generator(np.random.Philox(key=low | high << 32))


def _redraw(
    draw: Callable[[np.random.Generator], list[Indices]], rule: Rule, seed: int, what: str, remedy: str
) -> list[Indices]:
    best = 0
    for attempt in range(REDRAWS):
        shares = draw(_generator(seed, attempt))
        smallest = min(len(share) for share in shares)
        if smallest >= rule.min_examples:
            return shares
        best = max(best, smallest)
    raise PartitionError(
        f"{what} over {rule.clients} clients left some client fewer than {rule.min_examples} examples in all {REDRAWS} "
        f"draws (at best {best}): {remedy}."
    )
