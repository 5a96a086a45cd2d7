"""Several seeds' clients as one larger cohort: each ends as if it had been alone."""

import dataclasses

import pytest
import torch

from fedcog import tree
from fedcog.algorithms import ALGORITHMS, Algorithm, FedAvg, FedCOG
from fedcog.federation.rounds import Federation
from fedcog.federation.simulation import gather_together
from fedcog.testing import Small, worst
from fedcog.tree import Params

COG = FedCOG(count=8, steps=3, start_round=1, lr=0.1)
SIZES = {3: (50, 30, 10), 4: (20, 20, 20), 5: (10, 40, 6)}


def small(algorithm: Algorithm, seed: int, epochs: float, mapping: str = "vmap", device: str = "cpu") -> Small:
    return Small(algorithm, mapping, sizes=SIZES[seed], seed=seed, epochs=epochs, device=device)  # type: ignore[arg-type]


def end(one: Small) -> Params:
    return tree.flatten({"server": one.server}) | one.backend.store.flatten()


def in_step(all_: list[Small], rounds: int = 2) -> list[list[dict[str, object]]]:
    federations = [Federation(one.algorithm, one.backend, one, one.schedule, one.server) for one in all_]
    lines: list[list[dict[str, object]]] = [[] for _ in all_]
    for round in range(rounds):
        works = [federation.ask(round) for federation in federations]
        gathered = gather_together([one.backend for one in all_], all_[0].algorithm, works)
        for federation, work, one, own in zip(federations, works, gathered, lines, strict=True):
            own.append(federation.answer(work, one).line)
    for one, federation in zip(all_, federations, strict=True):
        one.server = federation.server
    return lines


@pytest.mark.parametrize("epochs", [0.0, 0.5])
@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name != "fedcog"] + ["moon+fedcog", "ditto+fedcog"])
def test_seeds_trained_together_end_as_alone(name: str, epochs: float) -> None:
    base, _, wrapped = name.partition("+")
    algorithm: Algorithm = ALGORITHMS[base]()
    algorithm = dataclasses.replace(COG, inner=algorithm) if wrapped else algorithm
    alone, together = ([small(algorithm, seed, epochs) for seed in SIZES] for _ in range(2))
    told = [[done.line for done in one.run()] for one in alone]
    found = in_step(together)
    for one, other in zip(alone, together, strict=True):
        assert worst(end(one), end(other)) < 1e-9
    for mine, theirs in zip(told, found, strict=True):
        for line, same in zip(mine, theirs, strict=True):
            assert line["loss"] == pytest.approx(same["loss"], rel=1e-9)
            assert line["accuracy"] == same["accuracy"]
            assert line["clients"] == same["clients"]


def test_seeds_that_do_not_fit_together_run_apart() -> None:
    alone, together = ([small(FedAvg(), seed, 0.0) for seed in SIZES] for _ in range(2))
    together[0].backend.cohort.limit = 5
    for one in alone:
        one.run()
    in_step(together)
    for one, other in zip(alone, together, strict=True):
        assert worst(end(one), end(other)) < 1e-9


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_records_seeds_together() -> None:
    alone = [small(COG, seed, 0.5) for seed in SIZES]
    together = [small(COG, seed, 0.5, "graph", "cuda") for seed in SIZES]
    for one in alone:
        one.run()
    in_step(together)
    for one, other in zip(alone, together, strict=True):
        assert worst(end(one), {name: value.cpu() for name, value in end(other).items()}) < 1e-5
