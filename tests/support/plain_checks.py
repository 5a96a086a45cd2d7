"""Compare a federation with `plain_loops.py` and `plain_loops_today.py`."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from fedcog.algorithms import (
    CCVR,
    MOON,
    SCAFFOLD,
    VHL,
    Algorithm,
    BalancedSoftmax,
    Ditto,
    FedACG,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedBABU,
    FedCM,
    FedDC,
    FedDecorr,
    FedDisco,
    FedDyn,
    FedExP,
    FedGen,
    FedGKD,
    FedLC,
    FedLESAM,
    FedNova,
    FedNTD,
    FedPer,
    FedProx,
    FedReg,
    FedRep,
    FedRS,
    FedSAM,
    FedSOL,
    FedSpeed,
    FedUV,
    FedVLS,
    GeometricMedian,
    Krum,
    Median,
    MultiKrum,
    TrimmedMean,
)
from fedcog.core import tree
from fedcog.testing import max_difference
from tests.support import plain_loops as plain
from tests.support import plain_loops_today as today
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
    "direction": "direction",
    "history": "history",
    "calibrated": "calibrated",
}


# Key of a client's state -> key of the plain loop's result.
CLIENT_KEYS = {
    "control": "controls",
    "previous": "previous",
    "memory": "memories",
    "head": "heads",
    "personal": "personal",
    "received": "received",
}


OLDER: dict[str, tuple[Algorithm, Callable[..., dict[str, Any]]]] = {
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


MORE: dict[str, tuple[Algorithm, Callable[..., dict[str, Any]]]] = {
    "balanced-softmax": (BalancedSoftmax(strength=0.8), today.balanced_softmax),
    "balanced-softmax smooth": (BalancedSoftmax(smoothing=1.0), today.balanced_softmax),
    "fedlc": (FedLC(tau=1.3), today.fedlc),
    "fedrs": (FedRS(alpha=0.4), today.fedrs),
    "fedrs soft": (FedRS(alpha=0.4, rule="soft"), today.fedrs),
    "fedntd": (FedNTD(beta=0.7, temperature=3.0), today.fedntd),
    "fedvls": (FedVLS(strength=0.8, lambda_vacant=0.6, suppression=0.2), today.fedvls),
    "feduv": (FedUV(), today.feduv),
    "fedgkd": (FedGKD(gamma=0.6, temperature=2.0, models=1), today.fedgkd),
    "fedgkd three models": (FedGKD(gamma=0.6, temperature=2.0, models=3), today.fedgkd),
    "fedgkd two models": (FedGKD(gamma=0.6, temperature=2.0, models=2), today.fedgkd),
    "fedacg": (FedACG(mu=0.2), today.fedacg),
    "fedlc+fedacg": (FedACG(FedLC(tau=1.3), mu=0.2), today.fedlc_fedacg),
    "fedcm": (FedCM(alpha=0.3), today.fedcm),
    "feddc": (FedDC(alpha=0.2, correction=0.8, strength=0.9), today.feddc),
    "fedspeed": (FedSpeed(alpha=0.2, rho=0.3, correction=0.8), today.fedspeed),
    "fedspeed mix": (FedSpeed(alpha=0.2, rho=0.3, mix=0.6), today.fedspeed),
    "fedlesam": (FedLESAM(rho=0.5), today.fedlesam),
    "scaffold+fedlesam": (FedLESAM(SCAFFOLD(), rho=0.5), today.scaffold_fedlesam),
    "fedsol": (FedSOL(temperature=2.0), today.fedsol),
    "fedsol fixed": (FedSOL(rho=0.4, scaling="fixed"), today.fedsol),
    "feddisco": (FedDisco(), today.feddisco),
    "feddisco l1": (FedDisco(a=0.2, distance="l1"), today.feddisco),
    "feddisco l2": (FedDisco(distance="l2"), today.feddisco),
    "ccvr": (CCVR(samples=20, steps=12), today.ccvr),
    "fedper": (FedPer(), today.fedper),
    "fedbabu": (FedBABU(), today.fedbabu),
    "median": (Median(), today.median),
    "geometric-median": (GeometricMedian(), today.geometric_median),
    "geometric-median one pass": (GeometricMedian(passes=1), today.geometric_median),
    "fedprox+fedavgm": (FedAvgM(FedProx(mu=0.7), beta=0.6), today.fedprox_fedavgm),
    "scaffold+fedadam": (FedAdam(SCAFFOLD(), lr=0.05), today.scaffold_fedadam),
    "fedprox+feddisco+fedavgm": (
        FedAvgM(FedDisco(FedProx(mu=0.7)), beta=0.6),
        today.fedprox_feddisco_fedavgm,
    ),
}


# These need more than two clients in a round.
OF_MANY_CLIENTS: dict[str, tuple[Algorithm, Callable[..., dict[str, Any]]]] = {
    "trimmed-mean": (TrimmedMean(), today.trimmed_mean),
    "krum": (Krum(), today.krum),
    "krum no attackers": (Krum(attackers=0), today.krum),
    "multi-krum": (MultiKrum(), today.multi_krum),
    "multi-krum three": (MultiKrum(keep=3), today.multi_krum),
    "fedavg+krum+fedavgm": (FedAvgM(Krum(), beta=0.6), today.krum_fedavgm),
}


METHODS = OLDER | MORE | OF_MANY_CLIENTS


CASES = {"equal steps": Case(rounds=3), "unequal steps": Case(rounds=3, epochs=1.0)}


SKEW: dict[str, Any] = {
    "rounds": 3,
    "sizes": (18, 14, 10, 8, 6, 4),
    "participation": 5 / 6,
    "label_skew": True,
}


SKEWED_CASES = {
    "label skew, equal steps": Case(**SKEW),
    "label skew, unequal steps": Case(**SKEW, epochs=1.0),
}


def cases_of(name: str) -> dict[str, Case]:
    """Return the cases in which a method is compared with its plain loop."""
    if name in OF_MANY_CLIENTS:
        return SKEWED_CASES
    if name in MORE:
        return CASES | SKEWED_CASES
    return CASES


def settings(algorithm: Algorithm) -> dict[str, Any]:
    """Return the settings of an algorithm, and of those inside, as arguments of its plain loop."""
    values: dict[str, Any] = {}
    for layer in algorithm.layers:
        for field in dataclasses.fields(layer):
            values.setdefault(field.name, getattr(layer, field.name))
    tested_elsewhere = {"inner", "source", "average", "personal"}
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
