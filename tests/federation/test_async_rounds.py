"""Tests of asynchronous rounds: against synchronous ones, by hand, and against plain events."""

import dataclasses
import itertools
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from fedcog.algorithms import SCAFFOLD, Algorithm, FedAvg, FedCOG, FedGen, FedProx
from fedcog.algorithms.payloads import scale_update
from fedcog.algorithms.types import ClientContext, LocalWork
from fedcog.core import rng, tree
from fedcog.core.lr_schedules import LRSchedule
from fedcog.core.tree import Params, State
from fedcog.engine.cohort import RoundSpec
from fedcog.engine.cohort_results import CohortResult
from fedcog.federation.backend import Diverged
from fedcog.federation.client_sampling import Uniform
from fedcog.federation.device_types import DeviceType, merge_by_training
from fedcog.federation.simulator import LocalWorkload, Simulator
from fedcog.federation.virtual_time.answers import Answer
from fedcog.federation.virtual_time.async_simulator import AsyncRule, AsyncSimulator
from fedcog.federation.virtual_time.clock import VirtualClock, client_durations
from fedcog.testing import ToyFederation, max_difference
from tests.support import plain_loops
from tests.support.plain_case import SEED, Case

SIZES = (16, 12, 12, 8, 8, 4)
SPEEDS = (1.0, 1.0, 0.5, 0.5, 0.25, 2.0)


def make_async(
    toy: ToyFederation,
    buffer_size: int,
    speeds: Sequence[float] = (),
    exponent: float = 0.5,
) -> VirtualClock:
    """Give a federation asynchronous rounds, and return their clock."""
    types = [DeviceType(f"type {id}", 1, speed=speed) for id, speed in enumerate(speeds)]
    clock = VirtualClock(client_durations(toy.simulator.num_steps.tolist(), types))
    sampling = toy.schedule.sampling
    assert isinstance(sampling, Uniform)
    rule = AsyncRule(buffer_size, exponent, sampling)
    toy.server.backend = AsyncSimulator(toy.simulator, clock, rule)
    toy.server.clock = clock
    return clock


# --- neutral settings


ALGORITHMS = [
    FedAvg(),
    SCAFFOLD(),
    FedCOG(FedProx(mu=0.1), count=4, steps=2, start_round=1),
    FedGen(steps=2, hidden=8),
]


@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize("mapping", ["loop", "vmap"])
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda one: one.class_name)
def test_equal_speeds_and_full_buffer_equal_synchronous_rounds(
    algorithm: Algorithm, mapping: Any, participation: float
) -> None:
    settings: dict[str, Any] = {
        "sizes": (30, 20, 20, 12, 8),
        "dtype": torch.float32,
        "participation": participation,
        "rounds": 3,
    }
    synchronous = ToyFederation(algorithm, mapping, **settings)
    asynchronous = ToyFederation(algorithm, mapping, **settings)
    count = asynchronous.schedule.sampling.count  # type: ignore[attr-defined]
    make_async(asynchronous, count)
    for round, expected in enumerate(synchronous.run()):
        actual = asynchronous.server.run_round(round)
        assert_equal(actual.server, expected.server)
        line = actual.record.to_line()
        assert line.pop("virtual_seconds") == 3 * (round + 1)
        assert line.pop("staleness") == 0
        assert [client.pop("age") for client in line["local"]] == [0] * count
        without_time = {"seconds": None}
        assert line | without_time == expected.record.to_line() | without_time
        assert actual.artifacts.keys() == expected.artifacts.keys()
    states = [toy.simulator.client_states.flatten() for toy in (asynchronous, synchronous)]
    assert_equal(*states)


def assert_equal(first: State, second: State) -> None:
    flat = tree.flatten(first), tree.flatten(second)
    assert flat[0].keys() == flat[1].keys()
    assert all(torch.equal(value, flat[1][name]) for name, value in flat[0].items())


@pytest.mark.parametrize("mapping", ["loop", "vmap"])
@pytest.mark.parametrize("max_clients", [2, 3, 20])
def test_sum_in_chunks_and_device_types_equals_that_of_a_cohort(
    mapping: Any, max_clients: int
) -> None:
    """With 20 clients, two types of devices and chunks, sums are rounded as in `train`."""
    toy = ToyFederation(FedAvg(), mapping, sizes=(4,) * 20, dtype=torch.float32)
    types = [DeviceType("one", 17, local_steps=2), DeviceType("other", 3, local_steps=3)]
    workload = LocalWorkload(local_steps=3, device_types=types)
    simulator = Simulator(toy.simulator.cohort, workload)
    if mapping == "vmap":
        simulator.cohort.max_clients = max_clients
    broadcast = toy.algorithm.broadcast(toy.server.state)
    spec = RoundSpec(toy.algorithm, broadcast, 0, 0.05, evaluate_local=False)
    ids = list(range(20))
    expected, _ = simulator.train(spec, ids)
    kept, _ = simulator.train(spec._replace(keep_payloads=True), ids)
    assert expected.payloads == {} and kept.total == {}
    payloads = [tree.take(kept.payloads, row) for row in ids]
    total = simulator.sum_payloads(spec, ids, payloads, [True] * 20)
    assert_equal(total, expected.total)


def test_cuda_graphs_have_few_sizes() -> None:
    """Numbers of starting clients vary; a graph of each size would be recorded anew."""
    toy = ToyFederation(FedAvg(), sizes=(7,) * 12)
    spec = toy.server.start_round(0).spec
    cohort = toy.simulator.cohort

    def sizes(max_clients: int) -> list[int]:
        groups = [
            toy.simulator._device_groups(spec, list(range(count)), max_clients)
            for count in range(1, 11)
        ]
        return [group.max_clients for (group,) in groups]

    assert sizes(0) == sizes(10) == list(range(1, 11))
    cohort.config = cohort.config._replace(mapping="graph")
    assert sizes(0) == list(range(1, 11))
    assert sizes(10) == [1, 2, 4, 4, 8, 8, 8, 8, 10, 10]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("algorithm", ALGORITHMS[:3], ids=lambda one: one.class_name)
def test_gpu_graphs_equal_synchronous_rounds_and_the_cpu(algorithm: Algorithm) -> None:
    settings: dict[str, Any] = {"sizes": (15,) * 6, "rounds": 6}
    on_gpu = ToyFederation(algorithm, "graph", device="cuda", **settings)
    make_async(on_gpu, 6)
    synchronous = ToyFederation(algorithm, "graph", device="cuda", **settings)
    assert_equal(on_gpu.final_state(), synchronous.final_state())
    on_gpu = ToyFederation(algorithm, "graph", device="cuda", **settings)
    on_cpu = ToyFederation(algorithm, "vmap", **settings)
    for toy in (on_gpu, on_cpu):
        make_async(toy, 3, SPEEDS)
    host = torch.device("cpu")
    difference = max_difference(tree.to(on_gpu.final_state(), host), on_cpu.final_state())
    assert difference < 1e-6


def test_kept_payloads_are_those_of_single_clients() -> None:
    for mapping in ("loop", "vmap"):
        toy = ToyFederation(FedGen(steps=2, hidden=8), mapping)  # type: ignore[arg-type]
        broadcast = toy.algorithm.broadcast(toy.server.state)
        spec = RoundSpec(toy.algorithm, broadcast, 0, 0.05, False, keep_payloads=True)
        kept, _ = toy.simulator.train(spec, [0, 1, 2])
        for client in range(3):
            alone, _ = toy.simulator.train(spec._replace(keep_payloads=False), [client])
            payload = tree.take(kept.payloads, client)
            assert payload["per_client"]["head"].keys() == {"weight", "bias"}
            payload["per_client"] = tree.stack([payload["per_client"]])
            assert max_difference(tree.flatten(payload), tree.flatten(alone.total)) < 1e-12


# --- by hand


def answer(client_id: int, version: int, payload: State) -> Answer:
    findings = {
        "update_finite": torch.tensor(True),
        "all_finite": torch.tensor(True),
        "loss": torch.tensor(1.0),
        "distance": torch.tensor(1.0),
    }
    return Answer(client_id, version, Fraction(0), payload, {}, findings, {}, {})


@pytest.mark.parametrize("mapping", ["loop", "vmap"])
def test_ages_zero_and_three_by_hand(mapping: Any) -> None:
    """K = 2, D = 1 (age 0) and 2 (age 3): weights 1 and 1/2, divided by K: G + 1."""
    toy = ToyFederation(FedAvg(), mapping)
    clock = make_async(toy, 2)
    one = torch.tensor(1.0)

    def payload(delta: float) -> State:
        return {"delta": {"w": torch.tensor([delta])}, "buffers": {}, "weight": one, "count": one}

    clock.buffer = [answer(0, 3, payload(1.0)), answer(1, 0, payload(2.0))]
    request = toy.server.start_round(3)
    result = toy.server.backend.run_round(request)
    server: State = {"params": {"w": torch.tensor([10.0])}, "buffers": {}}
    assert FedAvg().server_update(server, result.total, {})["params"]["w"].item() == 11.0
    assert result.ages == [0, 3] and clock.buffer == [] and clock.now == 0


def test_staleness_scales_the_update_and_nothing_else() -> None:
    payload = {
        "delta": {"w": torch.tensor(2.0)},
        "buffers": {"mean": torch.tensor(4.0)},
        "weight": torch.tensor(0.5),
        "count": torch.tensor(1.0),
        "control": {"w": torch.tensor(3.0)},
        "per_client": {"delta": {"w": torch.tensor(2.0)}, "head": {"b": torch.tensor(5.0)}},
    }
    scaled = tree.flatten(scale_update(0.5, payload))
    assert {name: value.item() for name, value in scaled.items()} == {
        "delta::w": 1.0,
        "buffers::mean": 2.0,
        "weight": 0.5,
        "count": 1.0,
        "control::w": 3.0,
        "per_client::delta::w": 1.0,
        "per_client::head::b": 5.0,
    }


def test_durations_are_exact_fractions() -> None:
    types = [DeviceType("fast", 2, speed=3.0), DeviceType("slow", 1, speed=0.3)]
    assert client_durations([1, 2, 3], types) == [Fraction(1, 3), Fraction(2, 3), 10]
    assert client_durations([4, 5], [DeviceType("any", 2)]) == [4, 5]
    assert client_durations([4, 5], []) == [4, 5]


def test_types_that_differ_in_speed_train_together() -> None:
    slow = DeviceType("slow", 2, speed=0.5)
    fast = DeviceType("fast", 3, speed=2.0)
    short = DeviceType("short", 1, local_steps=1)
    assert [one.num_clients for one in merge_by_training([slow, fast, short])] == [5, 1]
    assert [one.num_clients for one in merge_by_training([slow, short, fast])] == [2, 1, 3]
    alike = [DeviceType("one", 2), DeviceType("other", 3)]
    assert merge_by_training(alike) == alike, "without speeds cohorts stay as they were"


# --- an independent simulation of events


class PlainRound(NamedTuple):
    """One aggregation of the plain simulation."""

    clients: list[int]
    ages: list[int]
    time: float
    params: Params


def plain_events(
    case: Case, lr_decay: float, concurrency: int, buffer_size: int, exponent: float
) -> list[PlainRound]:
    """Simulate FedBuff with a plain list of events; times are binary fractions."""
    lr = case.lr
    x = case.params
    time = 0.0
    training: dict[int, tuple[float, int, Params]] = {}
    arrived: list[tuple[int, int, Params]] = []
    began: set[tuple[int, int]] = set()
    history: list[PlainRound] = []
    while len(history) < case.rounds:
        version = len(history)
        for client in rng.permutation(SEED, "sample", version, len(case.sizes)).tolist():
            can_start = client not in training and (client, version) not in began
            if can_start and len(training) < concurrency:
                case.lr = lr * lr_decay**version
                update = plain_loops.local_sgd(case, x, version, client)
                finish = time + case.num_steps(client) / SPEEDS[client]
                training[client] = (finish, version, update)
                began.add((client, version))
        time = min(finish for finish, _, _ in training.values())
        for client in sorted(training):
            finish, version, update = training[client]
            if finish == time:
                arrived.append((client, version, update))
                del training[client]
        while len(arrived) >= buffer_size and len(history) < case.rounds:
            chosen, arrived = arrived[:buffer_size], arrived[buffer_size:]
            now = len(history)
            total = sum(case.weight(client) for client, _, _ in chosen)
            for client, version, update in chosen:
                factor = case.weight(client) / total / (1 + now - version) ** exponent
                x = plain_loops.add(x, update, factor)
            ranked = sorted((client, version) for client, version, _ in chosen)
            ids = [client for client, _ in ranked]
            history.append(PlainRound(ids, [now - version for _, version in ranked], time, dict(x)))
    case.lr = lr
    return history


@pytest.mark.parametrize("mapping", ["loop", "vmap"])
@pytest.mark.parametrize(
    ("concurrency", "buffer_size", "exponent"), [(4, 3, 0.5), (6, 2, 1.0), (3, 1, 0.0), (6, 5, 0.5)]
)
def test_fedavg_equals_a_plain_simulation_of_events(
    mapping: str, concurrency: int, buffer_size: int, exponent: float
) -> None:
    """Twelve aggregations in float64: the same clients, ages, times and models."""
    case = Case(sizes=SIZES, rounds=12, epochs=1.0, participation=concurrency / len(SIZES))
    expected = plain_events(case, 0.9, concurrency, buffer_size, exponent)
    toy = case.federation(FedAvg(), mapping)
    toy.server.schedule = dataclasses.replace(toy.schedule, client_lr=LRSchedule(decay=0.9))
    make_async(toy, buffer_size, SPEEDS, exponent)
    for round, (clients, ages, time, params) in enumerate(expected):
        finished = toy.server.run_round(round)
        record = finished.record
        assert (record.client_ids, record.ages, record.virtual_seconds) == (clients, ages, time)
        assert max_difference(finished.server["params"], params) < 1e-9
    assert {age for one in expected for age in one.ages} >= {0, 1}, "some answers are stale"


def test_the_simulated_events_include_special_cases() -> None:
    """Two aggregations at once, and a client twice in one of them, are among those above."""
    case = Case(sizes=SIZES, rounds=12, epochs=1.0)
    crowded = plain_events(case, 0.9, 6, 2, 1.0)
    assert any(one.time == other.time for one, other in itertools.pairwise(crowded))
    rounds = plain_events(case, 0.9, 6, 5, 0.5)
    assert any(len({*one.clients}) < len(one.clients) for one in rounds)


def test_clients_start_when_idle_and_once_from_each_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    toy = ToyFederation(FedAvg(), sizes=(15,) * 6, participation=0.67, rounds=10)
    clock = make_async(toy, 3, (1, 1, 0.5, 0.5, 0.25, 3))
    started: list[tuple[int, int]] = []
    num_rounds = 0
    train = toy.simulator.train

    def watch(
        spec: RoundSpec, client_ids: Sequence[int], max_clients: int
    ) -> tuple[CohortResult, list[State]]:
        busy = {one.client_id for one in clock.in_flight}
        assert not busy & {*client_ids} and len(busy) + len(client_ids) <= 4
        assert spec.round == num_rounds
        started.extend((spec.round, client) for client in client_ids)
        assert max_clients == 4
        return train(spec, client_ids)

    monkeypatch.setattr(toy.simulator, "train", watch)
    for round in range(10):
        toy.server.run_round(round)
        num_rounds += 1
    assert len(started) == len({*started}) > 20


# --- states, failures and records


def test_server_control_variate_is_the_mean_of_the_clients() -> None:
    """SCAFFOLD's c: changes of c_k are not scaled, or c would drift away from their mean."""
    toy = ToyFederation(SCAFFOLD(), sizes=(15,) * 6, rounds=9, participation=0.67)
    clock = make_async(toy, 3, SPEEDS)
    records = [finished.record for finished in toy.run()]
    assert max(age for record in records for age in record.ages or []) >= 2
    states = tree.unflatten(toy.simulator.client_states.flatten())
    for name, control in toy.server.state["control"].items():
        expected = torch.stack([state["control"][name] for state in states.values()]).sum(0)
        for waiting in clock.buffer:  # the clients have it, the server not yet
            expected = expected - waiting.payload["control"][name]
        torch.testing.assert_close(6 * control, expected, rtol=1e-9, atol=1e-12)


def test_state_is_stored_when_the_answer_arrives() -> None:
    toy = ToyFederation(SCAFFOLD(), rounds=3)
    clock = make_async(toy, 1, (1, 0.5, 0.125))
    toy.run()
    assert [one.client_id for one in clock.in_flight] == [2]
    stored = {int(name.split("::")[0]) for name in toy.simulator.client_states.flatten()}
    assert stored == {0, 1}
    assert all(one.state == {} for one in clock.buffer)


class Poisoned(Algorithm):
    """FedAvg in which the smallest client sends NaN."""

    def client_update(
        self, params: Params, client: ClientContext, work: LocalWork
    ) -> tuple[State, State]:
        state, payload = super().client_update(params, client, work)
        factor = torch.where(client.weight < 0.3, torch.nan, 1.0)
        return state, payload | {"delta": tree.scale(factor, payload["delta"])}


@pytest.mark.parametrize("mapping", ["loop", "vmap"])
def test_diverged_answers_stop_the_run_or_are_left_out(mapping: Any) -> None:
    toy = ToyFederation(Poisoned(), mapping, rounds=2, skip_diverged=True)
    make_async(toy, 3)
    healthy = ToyFederation(FedAvg(), mapping, rounds=1)
    broadcast = FedAvg().broadcast(healthy.server.state)
    expected = FedAvg().server_update(
        healthy.server.state, healthy.run_clients([0, 1], 0, broadcast).total, {}
    )
    first = toy.server.run_round(0)
    assert first.record.skipped == [2]
    assert max_difference(first.server["params"], expected["params"]) < 1e-12
    strict = ToyFederation(Poisoned(), mapping)
    make_async(strict, 3)
    with pytest.raises(Diverged, match="client 2 is not finite"):
        strict.run()
    alone = ToyFederation(Poisoned(), mapping, skip_diverged=True)
    make_async(alone, 1, (0.1, 0.1, 9))
    with pytest.raises(Diverged, match="client 2 is not finite"):
        alone.run()


def test_local_models_are_compared_with_the_version_they_started_from() -> None:
    """With evaluation in every second round, clients that started in the others have no score."""
    toy = ToyFederation(FedAvg(), rounds=8)
    toy.server.schedule = dataclasses.replace(toy.schedule, evaluate_every=2)
    make_async(toy, 1, (1, 0.5, 0.3))
    before: dict[int, Tensor] = {}
    num_scored = 0
    for round in range(8):
        before[round] = toy.server.scorer.class_stats(toy.server.state)["test"]
        record = toy.server.run_round(round).record
        (client,) = record.local
        version = round - int(client["age"])
        is_evaluated = version % 2 == 1
        assert ("own_accuracy_before" in client) == is_evaluated
        if is_evaluated:
            num_scored += 1
            counts = toy.simulator.class_counts[int(client["client"])]
            totals = toy.simulator.test_class_counts
            score = toy.task.score(before[version], totals, counts)
            assert client["own_accuracy_before"] == score
    assert 0 < num_scored < 8


def test_synchronous_round_lasts_as_long_as_its_slowest_client() -> None:
    toy = ToyFederation(FedAvg(), rounds=3, sizes=(20,) * 4, participation=0.5)
    types = [DeviceType("fast", 2, speed=3.0), DeviceType("slow", 2, speed=0.5)]
    toy.server.clock = VirtualClock(client_durations(toy.simulator.num_steps.tolist(), types))
    expected = 0.0
    for finished in toy.run():
        expected += 6.0 if max(finished.record.client_ids) >= 2 else 1.0
        line = finished.record.to_line()
        assert line["virtual_seconds"] == expected
        assert "staleness" not in line and "age" not in line["local"][0]
