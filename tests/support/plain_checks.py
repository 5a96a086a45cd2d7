"""Compare a federation with the plain loops of `plain_loops.py`."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from fedcog.algorithms import (
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
from fedcog.core import tree
from fedcog.testing import max_difference
from tests.support import plain_loops as plain
from tests.support.plain_case import Case

GEN = {"decay": 0.9, "steps": 4, "batch": 5, "lr": 0.01, "hidden": 7, "noise": 3}
REG = {"gamma": 0.4, "steps": 10, "pseudo_lr": 0.05, "perturbed_lr": 0.005, "count": 9}
VIRTUAL = {"virtual": 10, "temperature": 0.5, "align_epochs": 1}


# Key of fedcog's server state -> key of the plain loop's result.
SERVER_KEYS = {
    "control": "control",
    "memory": "h",
    "velocity": "velocity",
    "mean": "m",
    "generator": "generator",
}


# Key of a client's state -> key of the plain loop's result.
CLIENT_KEYS = {
    "control": "controls",
    "previous": "previous",
    "memory": "memories",
    "head": "heads",
    "personal": "personal",
}


METHODS: dict[str, tuple[Algorithm, Callable[..., dict[str, Any]]]] = {
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
    """Return an algorithm's settings as arguments of its plain loop; of a wrapped FedProx, mu."""
    values = {
        field.name: getattr(algorithm, field.name)
        for field in dataclasses.fields(algorithm)
        if field.name != "inner"
    }
    inner = getattr(algorithm, "inner", None)
    if inner is not None and hasattr(inner, "mu"):
        values["mu"] = inner.mu
    tested_elsewhere = {"source", "average", "personal"}
    return {name: value for name, value in values.items() if name not in tested_elsewhere}


def assert_equals_plain_loop(
    algorithm: Algorithm,
    plain_loop: Callable[..., dict[str, Any]],
    case: Case,
    mapping: str = "loop",
) -> None:
    """Assert that the final states of server and clients equal those of the plain loop."""
    expected = plain_loop(case, **settings(algorithm))
    toy = case.federation(algorithm, mapping)
    lines = [result.record.to_line() for result in toy.run()]
    assert max_difference(toy.server.state["params"], expected["params"]) < 1e-10
    for key, plain_key in SERVER_KEYS.items():
        if plain_key in expected:
            assert max_difference(toy.server.state[key], expected[plain_key]) < 1e-10, key
    client_states = tree.unflatten(toy.simulator.client_states.flatten())
    for key, plain_key in CLIENT_KEYS.items():
        if plain_key in expected:
            assert {int(client) for client in client_states} == set(expected[plain_key])
            for client, state in client_states.items():
                assert max_difference(state[key], expected[plain_key][int(client)]) < 1e-10, (
                    key,
                    client,
                )
    if "scales" in expected:
        assert [line["server_step"] for line in lines] == pytest.approx(
            expected["scales"], rel=1e-10
        )
    if "losses" in expected:
        assert [line["generator_loss"] for line in lines] == pytest.approx(
            expected["losses"], rel=1e-10
        )
