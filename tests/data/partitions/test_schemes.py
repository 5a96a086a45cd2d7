"""Tests of partition schemes: disjoint shares, sizes, label mixes, and errors."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcog.data import PartitionError
from fedcog.data.partitions.base import Indices, PartitionConfig
from fedcog.data.partitions.schemes import PARTITIONS, make_partition

LABELS = np.arange(2000) % 10
USERS = np.arange(2000) % 37


@settings(max_examples=80, deadline=None)
@given(
    kind=st.sampled_from(list(PARTITIONS)),
    clients=st.integers(5, 30),
    beta=st.floats(0.2, 10),
    balance=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_shares_are_disjoint_large_enough_and_reproducible(
    kind: str, clients: int, beta: float, balance: bool, seed: int
) -> None:
    if kind == "published-label-skew":  # its five groups need as many clients each
        clients = 5 * (clients // 5)
    config = PartitionConfig(clients, beta, balance, min_examples=3)
    shares = make_partition(kind, LABELS, USERS, config, seed)
    assigned = np.concatenate(shares)
    assert len(shares) == clients
    assert len(np.unique(assigned)) == len(assigned)
    assert min(len(share) for share in shares) >= 3
    if kind not in ("natural", "published-label-skew"):
        assert len(assigned) == len(LABELS), "every example has an owner"
    repeated = make_partition(kind, LABELS, USERS, config, seed)
    assert all(np.array_equal(a, b) for a, b in zip(shares, repeated, strict=True))


def classes_of(shares: list[Indices]) -> list[set[int]]:
    return [set(LABELS[share].tolist()) for share in shares]


def test_iid_sizes_are_even() -> None:
    shares = make_partition("iid", LABELS, None, PartitionConfig(7), 0)
    assert {len(share) for share in shares} <= {285, 286}


def test_label_skew_matches_niid_2_of_the_paper() -> None:
    shares = make_partition("label-skew", LABELS, None, PartitionConfig(10), 0)
    assert classes_of(shares) == [{0, 1}, {2, 3}, {4, 5}, {6, 7}, {8, 9}] * 2
    assert {len(share) for share in shares} == {200}
    config = PartitionConfig(4, classes_per_client=3)
    assert classes_of(make_partition("label-skew", LABELS, None, config, 0))[3] == {9}


def test_smaller_beta_makes_dirichlet_more_skewed() -> None:
    def concentration(beta: float) -> float:
        """Mean fraction of a class that its largest owner holds."""
        shares = make_partition(
            "dirichlet", LABELS, None, PartitionConfig(10, beta, balance=False, min_examples=1), 0
        )
        counts = np.stack([np.bincount(LABELS[share], minlength=10) for share in shares])
        return float((counts.max(0) / counts.sum(0)).mean())

    assert concentration(0.1) > concentration(1.0) > concentration(100.0)


def test_balance_rule_adds_nothing_to_a_full_client() -> None:
    """At most one class takes a client above its even share."""
    for seed in range(10):
        config = PartitionConfig(10, 0.1, balance=True)
        for share in make_partition("dirichlet", LABELS, None, config, seed):
            counts = np.bincount(LABELS[share], minlength=10)
            last = np.flatnonzero(counts)[-1]
            assert counts.sum() - counts[last] < 200


def test_quantity_keeps_the_label_mix_and_varies_the_size() -> None:
    shares = make_partition("quantity", LABELS, None, PartitionConfig(10, 0.5), 0)
    sizes = sorted(len(share) for share in shares)
    assert sizes[-1] > 4 * sizes[0] >= 4 * 10
    largest = np.bincount(LABELS[max(shares, key=len)], minlength=10)
    assert largest.max() < 2 * largest.min()


def test_natural_clients_are_users() -> None:
    shares = make_partition("natural", LABELS, USERS, PartitionConfig(12), 0)
    owners = [set(USERS[share].tolist()) for share in shares]
    assert all(len(owner) == 1 for owner in owners)
    assert len(set.union(*owners)) == 12


def test_tiny_beta_assigns_every_example() -> None:
    shares = make_partition(
        "dirichlet", LABELS, None, PartitionConfig(10, 1e-4, balance=True, min_examples=1), 0
    )
    assert sum(len(share) for share in shares) == len(LABELS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "config", "reason"),
    [
        (
            "dirichlet",
            PartitionConfig(100, 0.01, min_examples=15),
            r"beta 0\.01 .* 1000 draws .*raise --beta",
        ),
        (
            "label-skew",
            PartitionConfig(3),
            "5 groups, and 3 clients cannot hold them all: raise --clients to 5",
        ),
        (
            "label-skew",
            PartitionConfig(10, classes_per_client=11),
            "11 classes per client is impossible with 10 classes",
        ),
        (
            "label-quantity",
            PartitionConfig(10, classes_per_client=99),
            "lower --classes-per-client",
        ),
        ("iid", PartitionConfig(300, min_examples=10), "lower --clients or --min-examples"),
        (
            "label-skew",
            PartitionConfig(150, min_examples=13, classes_per_client=5),
            "lower --clients",
        ),
        ("natural", PartitionConfig(38), "37 of 37 users"),
    ],
)
def test_impossible_partition_error_names_the_setting(
    kind: str, config: PartitionConfig, reason: str
) -> None:
    with pytest.raises(PartitionError, match=reason):
        make_partition(kind, LABELS, USERS, config, 0)


def test_natural_without_users_is_refused() -> None:
    with pytest.raises(PartitionError, match="needs the user of each example"):
        make_partition("natural", LABELS, None, PartitionConfig(3), 0)


def authors_draw(labels: list[int], clients: int, beta: float, seed: int) -> list[list[int]]:
    """NIID-1 as the authors' code draws it, in plain lists."""
    np.random.seed(seed)
    smallest = 0
    while smallest < 10:
        held: list[list[int]] = [[] for _ in range(clients)]
        for label in range(max(labels) + 1):
            members = np.array([i for i, one in enumerate(labels) if one == label])
            np.random.shuffle(members)
            shares = np.random.dirichlet(np.repeat(beta, clients))
            shares = np.array(
                [
                    share * (len(own) < len(labels) / clients)
                    for share, own in zip(shares, held, strict=True)
                ]
            )
            shares = shares / shares.sum()
            ends = [int(end * len(members)) for end in np.cumsum(shares)][:-1]
            for client, (start, end) in enumerate(
                zip([0, *ends], [*ends, len(members)], strict=True)
            ):
                held[client] += members[start:end].tolist()
        smallest = min(len(own) for own in held)
    for own in held:
        np.random.shuffle(own)
    return held


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_published_is_the_authors_draw(seed: int) -> None:
    labels = np.random.default_rng(5).integers(0, 10, 3000)
    state = np.random.get_state()
    expected = authors_draw(labels.tolist(), 10, 0.1, seed)
    np.random.set_state(state)
    shares = make_partition("published", labels, None, PartitionConfig(10, 0.1), seed)
    assert [share.tolist() for share in shares] == expected


def test_published_goes_on_in_the_same_stream_if_a_client_lacks_examples() -> None:
    labels = np.arange(400) % 10
    state = np.random.get_state()
    expected = authors_draw(labels.tolist(), 10, 0.3, 0)
    np.random.set_state(state)
    shares = make_partition("published", labels, None, PartitionConfig(10, 0.3), 0)
    assert [share.tolist() for share in shares] == expected
    with pytest.raises(PartitionError, match="in all 1000 draws"):
        make_partition("published", labels, None, PartitionConfig(30, 0.01, min_examples=13), 0)
    with pytest.raises(PartitionError, match="seeds end at"):
        make_partition("published", labels, None, PartitionConfig(10), 2**32)


def test_published_label_skew_cuts_classes_in_file_order() -> None:
    labels = np.array([0, 1, 2, 3] * 7)
    config = PartitionConfig(6, classes_per_client=2, min_examples=1)
    with pytest.raises(PartitionError, match="do not divide evenly"):
        make_partition("published-label-skew", labels, None, PartitionConfig(5, min_examples=1), 0)
    shares = make_partition("published-label-skew", labels, None, config, 0)
    # 7 examples of a class over 3 clients: runs of 2, and the last example is not used.
    assert shares[0].tolist() == [0, 4, 1, 5]
    assert shares[1].tolist() == [2, 6, 3, 7]
    assert shares[2].tolist() == [8, 12, 9, 13]
    assert shares[4].tolist() == [16, 20, 17, 21]
    again = make_partition("published-label-skew", labels, None, config, 1)
    assert all(np.array_equal(a, b) for a, b in zip(shares, again, strict=True))
