"""Several seeds' clients as one larger cohort: each ends as if it had been alone."""

import dataclasses
from typing import Any

import pytest
import torch

from fedcog.algorithms import Algorithm, FedAvg, FedCOG
from fedcog.core import tree
from fedcog.core.optimizers import Optimizer, OptimizerKind
from fedcog.core.tree import Params, State
from fedcog.federation.simulator import run_stacked_round
from fedcog.testing import ToyFederation, max_difference
from tests.support.algorithm_settings import SINGLE_ALGORITHMS
from tests.support.engine_doubles import TracedGraphCache, simulate_out_of_memory

COG = FedCOG(count=8, steps=3, start_round=1, lr=0.1)
SIZES = {3: (50, 30, 10), 4: (20, 20, 20), 5: (10, 40, 6)}


def toy(
    algorithm: Algorithm, seed: int, epochs: float, mapping: str = "vmap", device: str = "cpu"
) -> ToyFederation:
    return ToyFederation(
        algorithm, mapping, sizes=SIZES[seed], seed=seed, epochs=epochs, device=device
    )  # type: ignore[arg-type]


def end(one: ToyFederation) -> Params:
    return tree.flatten({"server": one.server.state}) | one.simulator.client_states.flatten()


def in_step(all_: list[ToyFederation], rounds: int = 2) -> list[list[dict[str, object]]]:
    lines: list[list[dict[str, object]]] = [[] for _ in all_]
    for round in range(rounds):
        requests = [one.server.start_round(round) for one in all_]
        results = run_stacked_round([one.simulator for one in all_], requests)
        for one, request, result, own in zip(all_, requests, results, lines, strict=True):
            own.append(one.server.finish_round(request, result).record.to_line())
    return lines


@pytest.mark.parametrize("epochs", [0.0, 0.5])
@pytest.mark.parametrize(
    "name",
    [name for name in SINGLE_ALGORITHMS if name != "fedcog"] + ["moon+fedcog", "ditto+fedcog"],
)
def test_seeds_trained_together_end_as_alone(name: str, epochs: float) -> None:
    base, _, wrapped = name.partition("+")
    algorithm: Algorithm = SINGLE_ALGORITHMS[base]
    algorithm = dataclasses.replace(COG, inner=algorithm) if wrapped else algorithm
    alone, together = ([toy(algorithm, seed, epochs) for seed in SIZES] for _ in range(2))
    told = [[done.record.to_line() for done in one.run()] for one in alone]
    found = in_step(together)
    for one, other in zip(alone, together, strict=True):
        assert max_difference(end(one), end(other)) < 1e-9
    for mine, theirs in zip(told, found, strict=True):
        for line, same in zip(mine, theirs, strict=True):
            assert line["loss"] == pytest.approx(same["loss"], rel=1e-9)
            assert line["accuracy"] == same["accuracy"]
            assert line["clients"] == same["clients"]


RATES = {3: 0.3, 4: 0.02, 5: 0.1}


def rated(algorithm: Algorithm, seed: int, kind: OptimizerKind, **how: str) -> ToyFederation:
    """The same with a learning rate of the seed's own."""
    one = toy(algorithm, seed, 0.5, **how)
    one.server.schedule = dataclasses.replace(one.schedule, lr=RATES[seed], lr_decay=0.5)
    one.simulator.cohort.optimizer = Optimizer(kind, 0.9, 1e-2)
    return one


@pytest.mark.parametrize("kind", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fednova", "fedsam", "moon+fedcog"])
def test_seeds_of_different_learning_rates_end_as_alone(name: str, kind: OptimizerKind) -> None:
    base, _, wrapped = name.partition("+")
    algorithm: Algorithm = SINGLE_ALGORITHMS[base]
    algorithm = dataclasses.replace(COG, inner=algorithm) if wrapped else algorithm
    alone, together = ([rated(algorithm, seed, kind) for seed in SIZES] for _ in range(2))
    for one in alone:
        one.run()
    in_step(together)
    for one, other in zip(alone, together, strict=True):
        assert max_difference(end(one), end(other)) < 1e-9
    same = [toy(algorithm, seed, 0.5) for seed in SIZES]
    in_step(same)
    assert max_difference(end(same[0]), end(together[0])) > 1e-4  # it does matter


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "moon+fedcog"])
def test_what_is_traced_of_different_learning_rates_does_what_each_does_alone(name: str) -> None:
    """As it would be recorded on a GPU: one program for all, whose rates are numbers of its
    clients.
    """
    base, _, wrapped = name.partition("+")
    algorithm: Algorithm = SINGLE_ALGORITHMS[base]
    algorithm = dataclasses.replace(COG, inner=algorithm) if wrapped else algorithm
    alone, together = ([rated(algorithm, seed, "sgd") for seed in SIZES] for _ in range(2))
    traced = TracedGraphCache()
    asked = list[int]()

    def repeat(*what: Any) -> State:
        asked.append(what[-1])
        return traced.repeat(*what)

    for one in together:
        one.simulator.cohort._repeat = repeat
    for one in alone:
        one.run()
    with torch.no_grad():
        in_step(together)
    assert len(asked) >= 2, "every round is one program for all of them"
    for one, other in zip(alone, together, strict=True):
        assert max_difference(end(one), end(other)) < 1e-9


def test_seeds_that_do_not_fit_together_run_apart() -> None:
    alone, together = ([toy(FedAvg(), seed, 0.0) for seed in SIZES] for _ in range(2))
    together[0].simulator.cohort.max_clients = 5
    for one in alone:
        one.run()
    in_step(together)
    for one, other in zip(alone, together, strict=True):
        assert max_difference(end(one), end(other)) < 1e-9


def test_states_leave_the_device_before_seeds_run_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, together = ([toy(COG, seed, 0.0) for seed in SIZES] for _ in range(2))
    for one in alone:
        one.run()
    tried, left = simulate_out_of_memory(monkeypatch)
    in_step(together)
    assert tried == [9, 9, 9] and left == [
        one.simulator.client_states for one in together
    ]  # round 1, 2 in vain, and again
    for one, other in zip(alone, together, strict=True):
        assert max_difference(end(one), end(other)) < 1e-9


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("rates", ["one", "each"])
def test_a_gpu_records_seeds_together(rates: str) -> None:
    alone = [toy(COG, seed, 0.5) if rates == "one" else rated(COG, seed, "sgd") for seed in SIZES]
    there = {"mapping": "graph", "device": "cuda"}
    together = [
        toy(COG, seed, 0.5, **there) if rates == "one" else rated(COG, seed, "sgd", **there)
        for seed in SIZES
    ]
    for one in alone:
        one.run()
    in_step(together)
    for one, other in zip(alone, together, strict=True):
        assert (
            max_difference(end(one), {name: value.cpu() for name, value in end(other).items()})
            < 1e-5
        )
