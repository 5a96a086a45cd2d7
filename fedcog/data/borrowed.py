"""Partitions of flwr-datasets: some of its partitioners, each called by the name it has here and by nothing else."""

import importlib.util
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from fedcog import streams
from fedcog.data.rules import Indices, PartitionError, Rule, check_sizes

MOST = 10**9
"""No argument is meant to be larger."""


class Borrowed(NamedTuple):
    """A partitioner of flwr-datasets: what it is called there, what it is given, and what more it may be told."""

    partitioner: str
    words: str
    given: Callable[[Rule, int], dict[str, Any]]  # of a rule and the number of examples
    uses: str  # the settings that those come from
    more: Mapping[str, type[int] | type[bool] | tuple[str, ...]] = {}  # each a count, a switch, or one of some words
    by_label: bool = True
    detail: Callable[[Rule], str] = lambda _: ""  # what a rule asks of it, in words


def _shards(rule: Rule, examples: int) -> dict[str, Any]:
    told = arguments("flwr-shard", rule.arguments)
    own = {} if {"num_shards_per_partition", "shard_size"} & told.keys() else {"shards": rule.classes_per_client}
    return {"num_partitions": rule.clients} | {f"num_{name}_per_partition": value for name, value in own.items()}


def _sizes(rule: Rule, examples: int) -> dict[str, Any]:
    even = [examples // rule.clients + (client < examples % rule.clients) for client in range(rule.clients)]
    return {"partition_sizes": even, "alpha": rule.beta}


def _count(rule: Rule, examples: int) -> dict[str, Any]:
    return {"num_partitions": rule.clients}


def _beta(rule: Rule) -> str:
    return f"beta {rule.beta:g}"


BORROWED: dict[str, Borrowed] = {
    "flwr-dirichlet": Borrowed(
        "DirichletPartitioner",
        "Of each class, proportions ~ Dir(beta).",
        lambda rule, _: {
            "num_partitions": rule.clients,
            "alpha": rule.beta,
            "min_partition_size": rule.min_examples,
            "self_balancing": rule.balance,
        },
        "--beta --balance --min-examples",
        detail=_beta,
    ),
    "flwr-inner-dirichlet": Borrowed(
        "InnerDirichletPartitioner",
        "Equal sizes; within each client, proportions of classes ~ Dir(beta).",
        _sizes,
        "--beta --min-examples",
        detail=_beta,
    ),
    "flwr-pathological": Borrowed(
        "PathologicalPartitioner",
        "So many classes a client, drawn for each; a class shared out evenly among those who hold it.",
        lambda rule, _: {"num_partitions": rule.clients, "num_classes_per_partition": rule.classes_per_client},
        "--classes-per-client --min-examples",
        {"class_assignment_mode": ("random", "deterministic", "first-deterministic")},
        detail=lambda rule: f"{rule.classes_per_client} classes each",
    ),
    "flwr-shard": Borrowed(
        "ShardPartitioner",
        "Examples in the order of their labels, cut into shards, some of which each client gets.",
        _shards,
        "--classes-per-client (as many shards) --min-examples",
        {"num_shards_per_partition": int, "shard_size": int, "keep_incomplete_shard": bool},
        detail=lambda rule: "" if rule.arguments else f"{rule.classes_per_client} shards each",
    ),
    "flwr-iid": Borrowed(
        "IidPartitioner", "Equal sizes, labels as they come.", _count, "--min-examples", by_label=False
    ),
    "flwr-linear": Borrowed(
        "LinearPartitioner", "Sizes as 1, 2, 3 and so on.", _count, "--min-examples", by_label=False
    ),
    "flwr-square": Borrowed(
        "SquarePartitioner", "Sizes as 1, 4, 9 and so on.", _count, "--min-examples", by_label=False
    ),
    "flwr-exponential": Borrowed(
        "ExponentialPartitioner", "Sizes as powers of e.", _count, "--min-examples", by_label=False
    ),
}
"""The partitions that are borrowed, by name."""


def in_words(kind: str, rule: Rule) -> str:
    """How a borrowed partition shares examples out, such as 'flwr-dirichlet, beta 0.1'."""
    detail = BORROWED[kind].detail(rule)
    return ", ".join([kind, *([detail] if detail else []), *rule.arguments.split()])


def arguments(kind: str, text: str) -> dict[str, Any]:
    """What a text such as 'shard_size=50 keep_incomplete_shard=true' tells a partitioner.

    A ValueError says what is wrong with it. Partitions of ours have no use for it.
    """
    if kind not in BORROWED:
        return {}
    known, found = BORROWED[kind].more, dict[str, Any]()
    for word in text.split():
        name, _, value = word.partition("=")
        if not known:
            raise ValueError(f"partition '{kind}' takes none: leave '{word}' out")
        if name not in known or name in found:
            raise ValueError(f"{name} is told twice" if name in found else f"no '{name}': {', '.join(known)} are known")
        wanted = known[name]
        if wanted is int:
            if not (value.isascii() and value.isdecimal() and len(value) < 11 and 1 <= int(value) <= MOST):
                raise ValueError(f"{name} needs a whole number from 1 to {MOST}, not '{value}'")
            found[name] = int(value)
        else:
            words = ("true", "false") if wanted is bool else wanted
            assert isinstance(words, tuple)
            if value not in words:
                raise ValueError(f"{name} needs one of {', '.join(words)}, not '{value}'")
            found[name] = value == "true" if wanted is bool else value
    return found


def missing() -> str:
    """How to get flwr-datasets where it is not; else nothing."""
    if importlib.util.find_spec("flwr_datasets") is not None:
        return ""
    return "flwr-datasets is missing: pip install 'fedcog[flwr-datasets]'."


def borrow(kind: str, labels: Indices, rule: Rule, seed: int) -> list[Indices]:
    """Every client's examples as the partitioner has them; if it takes no seed, of examples that are shuffled first."""
    one = BORROWED[kind]
    if trouble := missing():
        raise PartitionError(f"partition '{kind}': {trouble}")
    from datasets import Dataset  # with what follows, takes seconds to load
    from flwr_datasets import partitioner

    order = np.arange(len(labels))
    given = one.given(rule, len(labels)) | arguments(kind, rule.arguments)
    if one.by_label:
        given |= {"partition_by": "label", "seed": seed}
    else:
        order = streams.permutation(seed, "partition/0", 0, len(labels)).numpy()
    columns = {"place": order, "label": labels[order]} if one.by_label else {"place": order}
    try:
        with warnings.catch_warnings(action="ignore"):  # draws that it makes again
            maker = getattr(partitioner, one.partitioner)(**given)
            maker.dataset = Dataset.from_dict(columns)
            shares = [
                np.asarray(maker.load_partition(client)["place"], dtype=np.int64) for client in range(rule.clients)
            ]
    except (ValueError, TypeError, ArithmeticError, LookupError, AssertionError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, ArithmeticError):
            reason = f"{reason}: there are too few examples for what is asked of it."
        uses = f"{one.uses} --partition-args" if one.more else one.uses
        raise PartitionError(
            f"partition '{kind}': {one.partitioner} of flwr-datasets says: {reason} (Here these are {uses} --clients.)"
        ) from error
    check_sizes(shares, rule, f"partition '{kind}'", "lower --clients or --min-examples")
    return shares
