"""Tests of wrappers around wrappers, in every order, and of their names."""

import functools
import itertools
from typing import Any

import pytest
import torch

from fedcog.algorithms import (
    ALGORITHMS,
    CCVR,
    SCAFFOLD,
    VHL,
    Algorithm,
    Ditto,
    FedACG,
    FedAdam,
    FedAvgM,
    FedBABU,
    FedCOG,
    FedDisco,
    FedDyn,
    FedExP,
    FedGKD,
    FedLESAM,
    FedNova,
    FedProx,
    GeometricMedian,
    HeteroFL,
    Krum,
    Median,
    MultiKrum,
    TrimmedMean,
    Wrapper,
)
from fedcog.core.settings import ConfigError
from fedcog.core.tree import Params
from fedcog.runs.config.composition import algorithm_name, make_algorithm
from fedcog.testing import PARTIAL, ToyFederation, max_difference
from tests.support.algorithm_settings import VIRTUAL

WRAPPERS: dict[str, tuple[type[Wrapper], dict[str, Any]]] = {
    "fedavgm": (FedAvgM, {"beta": 0.5}),
    "fedadam": (FedAdam, {}),
    "fedexp": (FedExP, {"epsilon": 1e-9}),
    "fedacg": (FedACG, {}),
    "fedlesam": (FedLESAM, {"rho": 0.5}),
    "feddisco": (FedDisco, {}),
    "median": (Median, {}),
    "trimmed-mean": (TrimmedMean, {}),
    "krum": (Krum, {"attackers": 0}),
    "multi-krum": (MultiKrum, {"attackers": 0, "keep": 2}),
    "geometric-median": (GeometricMedian, {}),
    "ccvr": (CCVR, {"samples": 20, "steps": 5}),
    "ditto": (Ditto, {}),
    "vhl": (VHL, VIRTUAL),
    "fedcog": (FedCOG, {"count": 8, "steps": 3, "start_round": 1, "lr": 0.1}),
    "heterofl": (HeteroFL, {"width": 0.5}),
}
SERVER_RULES = {"fedavgm", "fedadam", "fedexp", "fedacg"}
MEAN_RULES = {"feddisco", "median", "trimmed-mean", "krum", "multi-krum", "geometric-median"}


def refusal(inner: str, outer: str) -> str:
    """Return a part of the reason why an order of two wrappers is refused; empty if it is not."""
    pair = {inner, outer}
    if pair <= SERVER_RULES:
        return "each decides how far the model moves"
    if pair <= MEAN_RULES:
        return "replaces the mean of the clients' updates, and so does"
    if "fedexp" in pair and pair & MEAN_RULES:
        return "undoes a rule that leaves some of them out"
    if outer in MEAN_RULES and inner == "heterofl":
        return "compares whole updates"
    if outer == "heterofl" and (inner in MEAN_RULES or inner == "vhl"):
        return "needs all of it at every client"
    return ""


@functools.cache
def alone(name: str) -> Params:
    """Return the final state with one wrapper alone."""
    cls, settings = WRAPPERS[name]
    return ToyFederation(cls(FedProx(mu=0.1), **settings), **PARTIAL).final_state()


def test_every_wrapper_is_here() -> None:
    assert set(WRAPPERS) == {name for name, cls in ALGORITHMS.items() if cls.is_wrapper}


@pytest.mark.slow
@pytest.mark.parametrize("outer", WRAPPERS)
@pytest.mark.parametrize("inner", WRAPPERS)
def test_two_wrappers_in_every_order(inner: str, outer: str) -> None:
    """It runs alike in loop and vmap, in full and in part, or is refused with the reason."""
    if inner == outer:
        pytest.skip("an algorithm does not wrap itself")
    inner_class, inner_settings = WRAPPERS[inner]
    outer_class, outer_settings = WRAPPERS[outer]
    if reason := refusal(inner, outer):
        with pytest.raises(ConfigError, match=reason):
            outer_class(inner_class(**inner_settings), **outer_settings)
        return
    algorithm = outer_class(inner_class(FedProx(mu=0.1), **inner_settings), **outer_settings)
    loop = ToyFederation(algorithm, "loop", **PARTIAL).final_state()
    vmap = ToyFederation(algorithm, "vmap", **PARTIAL).final_state()
    assert max_difference(loop, vmap) < 1e-9
    model = {name: value for name, value in loop.items() if name.startswith("server::params")}
    for only in (inner, outer):
        state = alone(only)
        missing = {"ccvr", "ditto"} & {inner, outer} - {only}  # they leave the model as it is
        is_same = all(name in state and torch.equal(model[name], state[name]) for name in model)
        assert is_same == bool(missing), f"{inner} inside {outer} is {only} alone"


@pytest.mark.parametrize("server_rule", sorted(SERVER_RULES))
def test_server_rules_refuse_servers_without_a_step(server_rule: str) -> None:
    cls, settings = WRAPPERS[server_rule]
    with pytest.raises(ConfigError, match="sets the model from its memory of all clients"):
        cls(FedDyn(), **settings)


def test_server_rules_keep_their_names_and_go_around_others() -> None:
    assert algorithm_name(FedAvgM()) == "fedavgm"
    assert make_algorithm("fedavgm") == FedAvgM() == make_algorithm("fedavg+fedavgm")
    assert algorithm_name(FedCOG(FedAvgM())) == "fedavgm+fedcog"
    assert algorithm_name(FedCOG()) == "fedavg+fedcog"
    assert algorithm_name(Krum()) == "fedavg+krum"
    three = make_algorithm("fedlc+fedavgm+fedcog", {"fedavgm": {"beta": 0.7}})
    assert [type(layer).__name__ for layer in three.layers] == ["FedCOG", "FedAvgM", "FedLC"]
    assert algorithm_name(three) == "fedlc+fedavgm+fedcog"
    with pytest.raises(ConfigError, match=r"fedadam goes around algorithms without a server rule"):
        make_algorithm("fedavgm+fedadam")


def test_server_momentum_follows_what_the_inner_rule_makes_of_the_sum() -> None:
    """FedNova stretches the mean update by its mean number of steps: the velocity is that."""
    settings = {"sizes": (40, 20, 10), "epochs": 0.5, "rounds": 1}
    start = ToyFederation(Algorithm(), **settings).server.state["params"]
    bare = ToyFederation(FedNova(), **settings)
    bare.run()
    around = ToyFederation(FedAvgM(FedNova(), beta=0.5), **settings)
    around.run()
    for name, value in bare.server.state["params"].items():
        torch.testing.assert_close(
            around.server.state["velocity"][name], value - start[name], atol=1e-12, rtol=0
        )


def test_order_of_a_server_rule_and_a_client_rule_does_not_matter() -> None:
    for one, other in itertools.permutations(["ditto", "fedlesam", "fedavgm"], 2):
        first_class, first = WRAPPERS[one]
        second_class, second = WRAPPERS[other]
        inside = first_class(second_class(SCAFFOLD(), **second), **first)
        outside = second_class(first_class(SCAFFOLD(), **first), **second)
        states = [
            ToyFederation(algorithm, **PARTIAL).final_state() for algorithm in (inside, outside)
        ]
        assert max_difference(*states) < 1e-12


def test_a_first_argument_that_is_no_algorithm_is_refused() -> None:
    wrong: Any = 0.5
    with pytest.raises(ConfigError, match="is not an Algorithm: the first argument of FedAvgM"):
        FedAvgM(wrong)


def test_fedgkd_distills_the_models_that_the_server_rule_made() -> None:
    """With momentum, the last past model in the teacher is the one that was sent."""
    toy = ToyFederation(FedAvgM(FedGKD(models=3), beta=0.9), rounds=3)
    sent = [toy.server.state["params"], *(one.server["params"] for one in toy.run())]
    for name, history in toy.server.state["history"].items():
        assert torch.equal(history, torch.stack([sent[1][name], sent[2][name]]))


def test_fedbabu_never_sends_its_head() -> None:
    """So no noise and no server rule can move it."""
    toy = ToyFederation(FedAvgM(FedBABU(), beta=0.9), rounds=3)
    toy.run()
    weights = toy.algorithm.server_model(toy.server.state)
    payload = toy.run_clients([0], 3, toy.algorithm.broadcast(toy.server.state)).total
    for name in toy.model.head_names:
        assert torch.equal(weights[name], toy.model.params[name])
        assert name not in payload["delta"]


def test_ccvr_survives_rounded_sums() -> None:
    """Rounding can make a variance negative, so that no Cholesky factor exists."""
    total = {
        "num_examples": torch.tensor([2.0, 50.0], dtype=torch.float64),
        "feature_sum": torch.zeros(2, 3, dtype=torch.float64),
        "feature_products": torch.diag_embed(
            torch.tensor([[4.0, 1.0, -0.5], [49.0, 49.0, 49.0]], dtype=torch.float64)
        ),
    }
    _, factor = CCVR.moments(total)
    covariance = factor @ factor.mT
    assert torch.allclose(
        covariance[0].diagonal()[:2], torch.tensor([4.0, 1.0]).double(), rtol=1e-2
    )
    assert 0 < covariance[0, 2, 2] < 0.01
    assert torch.allclose(covariance[1], 1.001 * torch.eye(3).double())


def test_two_client_rules_are_not_sent_in_a_circle() -> None:
    with pytest.raises(ConfigError, match="fedlc and fedper both say how clients train"):
        make_algorithm("fedlc+fedper")
    with pytest.raises(ConfigError, match=r"write fedlc[+]fedavgm"):
        make_algorithm("fedavgm+fedlc")
    assert algorithm_name(make_algorithm("fedlc + fedcog")) == "fedlc+fedcog"
