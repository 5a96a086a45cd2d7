"""Every algorithm x every property. The next algorithm is one row of ALGORITHMS_AND_NEUTRAL."""

import dataclasses

import pytest
import torch

from fedcog import tree
from fedcog.algorithms import ALGORITHMS, Algorithm, FedAvg, FedCOG, FedProx
from fedcog.federation.cohort import Members
from fedcog.federation.simulation import Simulation
from tests.small import Small, worst

# An algorithm with settings that bite, and the settings under which it is FedAvg.
ALGORITHMS_AND_NEUTRAL: dict[str, tuple[Algorithm, Algorithm]] = {
    "fedavg": (FedAvg(), FedAvg()),
    "fedprox": (FedProx(mu=0.5), FedProx(mu=0.0)),
}
BARE = {name: algorithm for name, (algorithm, _) in ALGORITHMS_AND_NEUTRAL.items()}
COG = FedCOG(count=8, steps=3, start_round=1, lr=0.1)
WRAPPED = {f"{name}+fedcog": dataclasses.replace(COG, inner=algorithm) for name, algorithm in BARE.items()}
ALL = BARE | WRAPPED

SETTING = {"participation": 0.67, "rounds": 3}  # two of three unequal clients a round, momentum 0.9

every = pytest.mark.parametrize("algorithm", ALL.values(), ids=ALL.keys())
bare = pytest.mark.parametrize("algorithm", BARE.values(), ids=BARE.keys())


def final(small: Small) -> dict[str, torch.Tensor]:
    """Everything there is after the rounds: the server's state and every client's."""
    server = small.run()[-1].server
    return tree.flatten({"server": server}) | small.backend.store.flatten()


def test_no_algorithm_is_left_out() -> None:
    assert set(BARE) | {"fedcog"} == set(ALGORITHMS)


@pytest.mark.parametrize("pair", ALGORITHMS_AND_NEUTRAL.values(), ids=ALGORITHMS_AND_NEUTRAL.keys())
def test_the_neutral_setting_is_fedavg_exactly(pair: tuple[Algorithm, Algorithm]) -> None:
    algorithm, neutral = pair
    expected = Small(FedAvg(), **SETTING).run()[-1].server["params"]
    got = Small(neutral, **SETTING).run()[-1].server["params"]
    assert all(torch.equal(expected[name], got[name]) for name in expected)
    if algorithm != neutral:
        assert worst(expected, Small(algorithm, **SETTING).run()[-1].server["params"]) > 1e-6


@every
def test_loop_is_vmap(algorithm: Algorithm) -> None:
    assert worst(final(Small(algorithm, "loop", **SETTING)), final(Small(algorithm, "vmap", **SETTING))) < 1e-9


@every
def test_a_cohort_is_cohorts_of_one(algorithm: Algorithm) -> None:
    together, apart = Small(algorithm, "vmap", **SETTING), Small(algorithm, "vmap", **SETTING)
    gather = apart.backend.gather

    def one_by_one(algorithm: Algorithm, shared: tree.State, clients: list[int], *rest: object):  # type: ignore[no-untyped-def]
        parts = [gather(algorithm, shared, [client], *rest) for client in clients]  # type: ignore[arg-type]
        total = parts[0][0]
        for part, _ in parts[1:]:
            total = tree.apply(torch.add, total, part)
        return total, parts[0][1]

    apart.backend.gather = one_by_one  # type: ignore[method-assign, assignment]
    assert worst(final(together), final(apart)) < 1e-9


@every
def test_payload_sums_add_up(algorithm: Algorithm) -> None:
    """The server gets the same from one sum over all as from the sum of two partial sums."""
    small = Small(algorithm, rounds=1)
    shared = algorithm.broadcast(small.server)

    def total(clients: list[int]) -> tree.State:
        return Small(algorithm).backend.gather(algorithm, shared, clients, 1, 0.05, None)[0]

    split = tree.apply(torch.add, total([0]), total([1, 2]))
    whole = total([0, 1, 2])
    one = tree.flatten(algorithm.server_update(small.server, whole))
    other = tree.flatten(algorithm.server_update(small.server, split))
    assert worst(one, other) < 1e-9


@every
def test_state_survives_being_written_down(algorithm: Algorithm) -> None:
    """Two rounds, everything flattened and put back into a fresh federation, a third round: bit for bit."""
    straight = final(Small(algorithm, **SETTING))
    first = Small(algorithm, **SETTING | {"rounds": 2})
    first.run()
    second = Small(algorithm, **SETTING)
    second.server = {"buffers": {}} | tree.unflatten(tree.flatten(first.server))
    second.backend.store.restore(first.backend.store.flatten())
    second_server = second.run(start=2)[-1].server
    resumed = tree.flatten({"server": second_server}) | second.backend.store.flatten()
    assert straight.keys() == resumed.keys()
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)


@every
def test_who_is_absent_keeps_its_state_and_newcomers_start_from_the_server(algorithm: Algorithm) -> None:
    small = Small(algorithm, rounds=1)
    shared = algorithm.broadcast(small.server)
    store = small.backend.store
    small.backend.gather(algorithm, shared, [0, 1], 0, 0.05, None)
    kept = {name: value.clone() for name, value in store.flatten().items()}
    small.backend.gather(algorithm, shared, [1], 1, 0.05, None)
    after = store.flatten()
    stale = {name for name in kept if name.startswith("0::")}
    assert all(torch.equal(kept[name], after[name]) for name in stale)
    assert not any(name.startswith("2::") for name in after)
    newcomer = tree.flatten(tree.pick(store.take([2], algorithm, shared), 0))
    expected = tree.flatten(algorithm.client_init(shared))
    assert newcomer.keys() == expected.keys()
    assert all(torch.equal(newcomer[name], expected[name]) for name in expected)


@bare
def test_dormant_fedcog_is_the_inner_algorithm(algorithm: Algorithm) -> None:
    dormant = dataclasses.replace(COG, inner=algorithm, start_round=99)
    plain, wrapped = final(Small(algorithm, **SETTING)), final(Small(dormant, **SETTING))
    assert all(torch.equal(value, wrapped[name]) for name, value in plain.items())


@bare
def test_awake_fedcog_keeps_the_inner_rule(algorithm: Algorithm) -> None:
    """Awake from the start: around a rule that bites the result differs from that around FedAvg."""
    awake = dataclasses.replace(COG, start_round=0)
    around = Small(dataclasses.replace(awake, inner=algorithm), **SETTING).run()[-1].server["params"]
    assert worst(around, Small(algorithm, **SETTING).run()[-1].server["params"]) > 1e-6
    if algorithm != FedAvg():
        assert worst(around, Small(awake, **SETTING).run()[-1].server["params"]) > 1e-6


@every
def test_hooks_write_nothing_in_place(algorithm: Algorithm) -> None:
    small = Small(dataclasses.replace(algorithm, start_round=0) if isinstance(algorithm, FedCOG) else algorithm)
    shared = algorithm.broadcast(small.server)
    before = {name: value.clone() for name, value in tree.flatten(shared).items()}
    members = _members(small.backend, algorithm, shared)
    kept = {name: value.clone() for name, value in tree.flatten(members.own).items()}
    small.backend.cohort.train(algorithm, shared, members, 0, 0.05)
    assert all(torch.equal(before[name], value) for name, value in tree.flatten(shared).items())
    assert all(torch.equal(kept[name], value) for name, value in tree.flatten(members.own).items())


def _members(backend: Simulation, algorithm: Algorithm, shared: tree.State) -> Members:
    own = backend.store.take([0, 1, 2], algorithm, shared)
    return Members(torch.arange(3), own, backend.weights, backend.counts, backend.steps)
