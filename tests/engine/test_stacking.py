"""Tests of stacking: runs that train as one larger cohort end as they do alone."""

import dataclasses
from typing import Any

import pytest
import torch

from fedcog.algorithms import Algorithm, FedAvg, FedCOG
from fedcog.core import tree
from fedcog.core.lr_schedules import LRSchedule
from fedcog.core.optimizers import Optimizer, OptimizerKind
from fedcog.core.tree import Params, State
from fedcog.federation.simulator import run_stacked_round
from fedcog.testing import ToyFederation, max_difference
from tests.support.algorithm_settings import SINGLE_ALGORITHMS
from tests.support.engine_doubles import TracedGraphCache, simulate_out_of_memory

pytestmark = pytest.mark.compiler

FEDCOG = FedCOG(count=8, steps=3, start_round=1, lr=0.1)
SIZES = {3: (50, 30, 10), 4: (20, 20, 20), 5: (10, 40, 6)}
"""Seed -> sizes of its clients."""
RATES = {3: 0.3, 4: 0.02, 5: 0.1}
"""Seed -> learning rate."""


def make_algorithm(name: str) -> Algorithm:
    """Return an algorithm by name, in FedCOG if the name ends in "+fedcog"."""
    base, _, wrapper = name.partition("+")
    algorithm = SINGLE_ALGORITHMS[base]
    return dataclasses.replace(FEDCOG, inner=algorithm) if wrapper else algorithm


def make_toy(
    algorithm: Algorithm, seed: int, epochs: float, mapping: str = "vmap", device: str = "cpu"
) -> ToyFederation:
    return ToyFederation(
        algorithm, mapping, sizes=SIZES[seed], seed=seed, epochs=epochs, device=device
    )  # type: ignore[arg-type]


def make_toy_with_lr(
    algorithm: Algorithm, seed: int, kind: OptimizerKind, **settings: str
) -> ToyFederation:
    """Return a toy federation with the learning rate of its seed."""
    toy = make_toy(algorithm, seed, 0.5, **settings)
    toy.server.schedule = dataclasses.replace(
        toy.schedule, lr=RATES[seed], client_lr=LRSchedule(decay=0.5)
    )
    toy.simulator.cohort.optimizer = Optimizer(kind, 0.9, 1e-2)
    return toy


def final_state(toy: ToyFederation) -> Params:
    return tree.flatten({"server": toy.server.state}) | toy.simulator.client_states.flatten()


def run_stacked(toys: list[ToyFederation], rounds: int = 2) -> list[list[dict[str, object]]]:
    """Run federations as one cohort and return the recorded rounds of each."""
    records: list[list[dict[str, object]]] = [[] for _ in toys]
    for round in range(rounds):
        requests = [toy.server.start_round(round) for toy in toys]
        results = run_stacked_round([toy.simulator for toy in toys], requests)
        for toy, request, result, lines in zip(toys, requests, results, records, strict=True):
            lines.append(toy.server.finish_round(request, result).record.to_line())
    return records


def assert_same_final_states(alone: list[ToyFederation], stacked: list[ToyFederation]) -> None:
    for expected, actual in zip(alone, stacked, strict=True):
        assert max_difference(final_state(expected), final_state(actual)) < 1e-9


@pytest.mark.parametrize("epochs", [0.0, 0.5])
@pytest.mark.parametrize(
    "name",
    [name for name in SINGLE_ALGORITHMS if name != "fedcog"] + ["moon+fedcog", "ditto+fedcog"],
)
def test_stacked_seeds_equal_single_runs(name: str, epochs: float) -> None:
    algorithm = make_algorithm(name)
    alone = [make_toy(algorithm, seed, epochs) for seed in SIZES]
    stacked = [make_toy(algorithm, seed, epochs) for seed in SIZES]
    lines_alone = [[result.record.to_line() for result in toy.run()] for toy in alone]
    lines_stacked = run_stacked(stacked)
    assert_same_final_states(alone, stacked)
    for expected_lines, actual_lines in zip(lines_alone, lines_stacked, strict=True):
        for expected, actual in zip(expected_lines, actual_lines, strict=True):
            assert expected["loss"] == pytest.approx(actual["loss"], rel=1e-9)
            assert expected["accuracy"] == actual["accuracy"]
            assert expected["clients"] == actual["clients"]


@pytest.mark.parametrize("kind", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fednova", "fedsam", "moon+fedcog"])
def test_stacked_learning_rates_equal_single_runs(name: str, kind: OptimizerKind) -> None:
    algorithm = make_algorithm(name)
    alone = [make_toy_with_lr(algorithm, seed, kind) for seed in SIZES]
    stacked = [make_toy_with_lr(algorithm, seed, kind) for seed in SIZES]
    for toy in alone:
        toy.run()
    run_stacked(stacked)
    assert_same_final_states(alone, stacked)
    # The learning rate does matter.
    same_rate = [make_toy(algorithm, seed, 0.5) for seed in SIZES]
    run_stacked(same_rate)
    assert max_difference(final_state(same_rate[0]), final_state(stacked[0])) > 1e-4


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "moon+fedcog"])
def test_traced_learning_rates_equal_single_runs(name: str) -> None:
    """One traced program serves all runs, as on a GPU: learning rates are inputs per client."""
    algorithm = make_algorithm(name)
    alone = [make_toy_with_lr(algorithm, seed, "sgd") for seed in SIZES]
    stacked = [make_toy_with_lr(algorithm, seed, "sgd") for seed in SIZES]
    traced = TracedGraphCache()
    num_steps_of_calls = list[int]()

    def repeat(*args: Any) -> State:
        num_steps_of_calls.append(args[-1])
        return traced.repeat(*args)

    for toy in stacked:
        toy.simulator.cohort._repeat = repeat
    for toy in alone:
        toy.run()
    with torch.no_grad():
        run_stacked(stacked)
    assert len(num_steps_of_calls) >= 2, "every round is one program for all runs"
    assert_same_final_states(alone, stacked)


def test_seeds_that_do_not_fit_together_run_one_by_one() -> None:
    alone = [make_toy(FedAvg(), seed, 0.0) for seed in SIZES]
    stacked = [make_toy(FedAvg(), seed, 0.0) for seed in SIZES]
    stacked[0].simulator.cohort.max_clients = 5
    for toy in alone:
        toy.run()
    run_stacked(stacked)
    assert_same_final_states(alone, stacked)


def test_states_move_to_host_before_seeds_run_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = [make_toy(FEDCOG, seed, 0.0) for seed in SIZES]
    stacked = [make_toy(FEDCOG, seed, 0.0) for seed in SIZES]
    for toy in alone:
        toy.run()
    attempts, moved = simulate_out_of_memory(monkeypatch)
    run_stacked(stacked)
    # Round 1, a failed attempt at round 2, and round 2.
    assert attempts == [9, 9, 9]
    assert moved == [toy.simulator.client_states for toy in stacked]
    assert_same_final_states(alone, stacked)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("rates", ["one", "each"])
def test_gpu_records_stacked_seeds(rates: str) -> None:
    def make(seed: int, **settings: str) -> ToyFederation:
        if rates == "one":
            return make_toy(FEDCOG, seed, 0.5, **settings)
        return make_toy_with_lr(FEDCOG, seed, "sgd", **settings)

    alone = [make(seed) for seed in SIZES]
    stacked = [make(seed, mapping="graph", device="cuda") for seed in SIZES]
    for toy in alone:
        toy.run()
    run_stacked(stacked)
    for expected, actual in zip(alone, stacked, strict=True):
        gpu_state = {name: value.cpu() for name, value in final_state(actual).items()}
        assert max_difference(final_state(expected), gpu_state) < 1e-5
