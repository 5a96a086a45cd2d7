"""What was tried beyond the paper: each setting does what it says, and without any it is FedCOG."""

import dataclasses
from typing import Any

import pytest
import torch

from fedcog import tree
from fedcog.algorithms import FedAvg, FedCOG
from fedcog.algorithms.varied import Varied
from fedcog.testing import CONTRACT, Small, worst
from tests.algorithms.test_fedcog import extra

USUAL: dict[str, Any] = {"count": 8, "steps": 6, "start_round": 0, "lr": 0.1}
PLAIN = Varied(**USUAL)


def varied(**changes: Any) -> Varied:
    return dataclasses.replace(PLAIN, **changes)


def after(algorithm: FedCOG, rounds: int = 2) -> Small:
    small = Small(algorithm, rounds=rounds)
    small.run()
    return small


def test_as_it_stands_it_is_fedcog() -> None:
    one, other = after(FedCOG(**USUAL)), after(PLAIN)
    assert worst(one.server["params"], other.server["params"]) == 0


CHANGES = {"smooth": 1.0, "small": 1.0, "like": 1.0, "noise_share": 0.5, "anneal": 0.5, "memory": 0.5}


@pytest.mark.parametrize("name", CHANGES)
def test_every_setting_matters(name: str) -> None:
    assert worst(after(PLAIN).server["params"], after(varied(**{name: CHANGES[name]})).server["params"]) > 1e-6


@pytest.mark.parametrize("law", [name for name in CONTRACT if "fedcog" not in name])  # which goes around all but itself
def test_all_settings_together_keep_the_contract(law: str) -> None:
    CONTRACT[law](varied(**CHANGES, average=0.3))


def test_smooth_inputs_are_smoother_and_small_ones_smaller() -> None:
    def rough(x: torch.Tensor) -> float:
        return float((x[..., 1:] - x[..., :-1]).abs().mean())

    plain = extra(PLAIN)[2]["x"]
    assert rough(extra(varied(smooth=20.0))[2]["x"]) < 0.95 * rough(plain)
    assert float(extra(varied(small=20.0))[2]["x"].square().mean()) < 0.95 * float(plain.square().mean())


def test_features_come_to_be_like_real_ones() -> None:
    def gap(algorithm: Varied) -> float:
        small, site, made = extra(algorithm)
        real = small.data.examples(small.data.pick("draw/real", 1, torch.tensor([0]), algorithm.count))["x"][0]
        teacher = site.shared["params"] | site.shared["buffers"]
        features = [site.model.features(teacher, x) for x in (made["x"], real)]
        return float((features[0].mean(0) - features[1].mean(0)).square().mean())

    assert gap(varied(like=100.0, steps=30)) < 0.7 * gap(varied(steps=30))


def test_a_share_of_the_inputs_stays_noise() -> None:
    _, _, noise = extra(varied(source="noise"))
    _, _, mixed = extra(varied(noise_share=0.25))
    moved = (mixed["x"] != noise["x"]).flatten(1).any(1)
    assert moved.tolist() == [True] * 6 + [False] * 2


def test_the_share_fades_round_by_round() -> None:
    _, site, _ = extra(PLAIN, rounds=3)
    real, made = PLAIN._shares(site)
    faded = varied(anneal=0.5)._shares(site)
    assert float(faded[1]) == pytest.approx(float(made) * 0.5**3)
    assert float(faded[0]) == pytest.approx(1 - float(made) * 0.5**3) and float(real) < float(faded[0])


def test_the_teacher_is_a_moving_mean_of_global_models() -> None:
    algorithm = varied(memory=0.75)
    small = Small(algorithm, rounds=3)
    first = small.server["params"]
    sent = [first, *(round.server["params"] for round in small.run()[:2])]
    kept = tree.stack([small.backend.kept(algorithm, small.algorithm.broadcast(small.server), 0)])["teacher"]
    mean = sent[0]  # a newcomer's teacher is the model it is sent
    for model in sent:
        mean = tree.add(tree.scale(0.75, mean), tree.scale(0.25, model))
    assert worst({name: kept[name][0] for name in mean}, mean) < 1e-12


def test_the_model_that_is_judged_is_a_moving_mean() -> None:
    algorithm = varied(average=0.5)
    small = Small(algorithm, rounds=2)
    first = small.server["params"]
    models = [first, *(round.server["params"] for round in small.run())]
    mean = {name: 0.25 * models[0][name] + 0.25 * models[1][name] + 0.5 * models[2][name] for name in models[0]}
    judged = algorithm.server_model(small.server)
    assert worst({name: judged[name] for name in mean}, mean) < 1e-12
    assert worst(after(PLAIN).server["params"], models[2]) == 0  # training goes on from the model itself


def test_around_nothing_it_is_called_what_it_is() -> None:
    from fedcog.experiments.config import name_of

    assert name_of(varied()) == "fedavg+Varied" and isinstance(varied().inner, FedAvg)
