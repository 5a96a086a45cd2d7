"""Every method against plain loops over plain tensors, written from the algorithm boxes without a look at ours."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fedcog import tree
from fedcog.algorithms import (
    ALGORITHMS,
    MOON,
    SCAFFOLD,
    VHL,
    Algorithm,
    Ditto,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedDecorr,
    FedDyn,
    FedExP,
    FedGen,
    FedNova,
    FedProx,
    FedReg,
    FedRep,
    FedSAM,
)
from fedcog.testing import worst
from tests.algorithms import plain
from tests.algorithms.case import Case

GEN = {"decay": 0.9, "steps": 4, "batch": 5, "lr": 0.01, "hidden": 7, "noise": 3}
REG = {"gamma": 0.4, "steps": 10, "pseudo_lr": 0.05, "perturbed_lr": 0.005, "count": 9}
VIRTUAL = {"virtual": 10, "temperature": 0.5, "align_epochs": 1}

# What the state of the package is called in the plain calculation: server's by key, clients' by key.
SERVER = {"control": "control", "memory": "h", "velocity": "velocity", "mean": "m", "generator": "generator"}
CLIENTS = {"control": "controls", "previous": "previous", "memory": "memories", "head": "heads", "personal": "personal"}

ROWS: dict[str, tuple[Algorithm, Callable[..., dict[str, Any]]]] = {
    "fedavg": (FedAvg(), plain.fedavg),
    "fedavgm": (FedAvgM(beta=0.6), plain.fedavgm),
    "fedavgm damped": (FedAvgM(beta=0.6, variant="damped"), plain.fedavgm),
    "fedavgm nesterov": (FedAvgM(beta=0.6, variant="nesterov"), plain.fedavgm),
    "fedadam": (FedAdam(lr=0.05), plain.fedadam),
    "fedadam yogi": (FedAdam(rule="yogi", lr=0.05), plain.fedadam),
    "fedadam adagrad": (FedAdam(rule="adagrad", lr=0.05, beta1=0.0), plain.fedadam),
    "fedadam sgd": (FedAdam(rule="sgd", lr=0.7), plain.fedadam),
    "fedexp": (FedExP(), plain.fedexp),
    "fedprox": (FedProx(mu=0.7), plain.fedprox),
    "scaffold": (SCAFFOLD(), plain.scaffold),
    "scaffold half": (SCAFFOLD(strength=0.5), plain.scaffold),
    "moon": (MOON(mu=0.8), plain.moon),
    "fedsam": (FedSAM(), plain.fedsam),
    "feddecorr": (FedDecorr(beta=0.5), plain.feddecorr),
    "feddecorr paper": (FedDecorr(beta=0.5, normalisation="paper"), plain.feddecorr),
    "feddyn": (FedDyn(alpha=0.3), plain.feddyn),
    "fednova": (FedNova(), plain.fednova),
    "fedreg": (FedReg(**REG), plain.fedreg),
    "fedgen": (FedGen(**GEN), plain.fedgen),
    "fedrep": (FedRep(), plain.fedrep),
    "ditto": (Ditto(lambda_pull=0.6), plain.ditto),
    "vhl": (VHL(**VIRTUAL), plain.vhl),
    "vhl shared": (VHL(**VIRTUAL, labels="shared"), plain.vhl),
    "fedprox+vhl": (VHL(FedProx(mu=0.7), **VIRTUAL), plain.vhl),
}
CASES = {"equal steps": Case(rounds=3), "unequal steps": Case(rounds=3, epochs=1.0)}


def settings(algorithm: Algorithm) -> dict[str, Any]:
    """An algorithm's settings as the plain calculation takes them; a wrapped FedProx is its mu."""
    values = {f.name: getattr(algorithm, f.name) for f in dataclasses.fields(algorithm) if f.name != "inner"}
    inner = getattr(algorithm, "inner", None)
    values |= {"mu": inner.mu} if inner is not None and hasattr(inner, "mu") else {}
    elsewhere = {"source", "average", "personal"}  # tested on their own
    return {name: value for name, value in values.items() if name not in elsewhere}


def check(algorithm: Algorithm, calculate: Callable[..., dict[str, Any]], case: Case, mapping: str = "loop") -> None:
    """The server's and every client's state after the rounds are those of the plain calculation."""
    expected = calculate(case, **settings(algorithm))
    small = case.federation(algorithm, mapping)
    lines = [one.line for one in small.run()]
    assert worst(small.server["params"], expected["params"]) < 1e-10
    for key, called in SERVER.items():
        if called in expected:
            assert worst(small.server[key], expected[called]) < 1e-10, key
    kept = tree.unflatten(small.backend.store.flatten())
    for key, called in CLIENTS.items():
        if called in expected:
            assert {int(client) for client in kept} == set(expected[called])
            for client, state in kept.items():
                assert worst(state[key], expected[called][int(client)]) < 1e-10, (key, client)
    if "scales" in expected:
        assert [line["server_step"] for line in lines] == pytest.approx(expected["scales"], rel=1e-10)
    if "losses" in expected:
        assert [line["generator_loss"] for line in lines] == pytest.approx(expected["losses"], rel=1e-10)


@pytest.mark.parametrize("mapping", ["loop", "vmap"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("name", ROWS)
def test_recalculated(name: str, case: Case, mapping: str) -> None:
    check(*ROWS[name], case, mapping)


def test_no_method_is_left_out() -> None:
    elsewhere = {"fedcog", "heterofl"}  # test_closed_form.py, federation/test_devices.py
    assert {name.split()[0].split("+")[-1] for name in ROWS} | elsewhere == set(ALGORITHMS)


def test_the_case_says_something() -> None:
    """Some client takes part twice with another between, some never; steps are unequal where they should be."""
    case = CASES["unequal steps"]
    chosen = [case.chosen(round) for round in range(case.rounds)]
    times = [sum(client in one for one in chosen) for client in range(4)]
    assert max(times) > 1 and len({case.steps_of(client) for client in range(4)}) > 1
    assert max(plain.fedexp(CASES["equal steps"], epsilon=1e-3)["scales"]) > 1  # its step is not always at the floor
    assert torch.tensor([case.weight(client) for client in range(4)]).unique().numel() == 4
