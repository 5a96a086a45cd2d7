"""Tests of FedCOG's variants beyond the paper: each setting has its documented effect."""

import dataclasses
from typing import Any

import pytest
import torch

from fedcog.algorithms import FedAvg, FedCOG
from fedcog.algorithms.fedcog_variants import Varied
from fedcog.core import tree
from fedcog.runs.config.composition import algorithm_name
from fedcog.testing import CONTRACT, ToyFederation, max_difference
from tests.support.generated_inputs import generate_inputs

SETTINGS: dict[str, Any] = {"count": 8, "steps": 6, "start_round": 0, "lr": 0.1}
PLAIN = Varied(**SETTINGS)


def varied(**changes: Any) -> Varied:
    return dataclasses.replace(PLAIN, **changes)


def trained(algorithm: FedCOG, rounds: int = 2) -> ToyFederation:
    toy = ToyFederation(algorithm, rounds=rounds)
    toy.run()
    return toy


def test_default_variant_equals_fedcog() -> None:
    fedcog = trained(FedCOG(**SETTINGS))
    variant = trained(PLAIN)
    assert max_difference(fedcog.server.state["params"], variant.server.state["params"]) == 0


CHANGES = {
    "smooth": 1.0,
    "small": 1.0,
    "like": 1.0,
    "noise_share": 0.5,
    "anneal": 0.5,
    "memory": 0.5,
}


@pytest.mark.parametrize("name", CHANGES)
def test_setting_changes_the_result(name: str) -> None:
    plain = trained(PLAIN).server.state["params"]
    changed = trained(varied(**{name: CHANGES[name]})).server.state["params"]
    assert max_difference(plain, changed) > 1e-6


# FedCOG wraps any algorithm but itself, so its own properties are left out.
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CONTRACT if "fedcog" not in name])
def test_all_settings_together_keep_the_contract(name: str) -> None:
    CONTRACT[name](varied(**CHANGES, average=0.3))


def test_smooth_and_small_penalties_act_on_inputs() -> None:
    def roughness(x: torch.Tensor) -> float:
        return float((x[..., 1:] - x[..., :-1]).abs().mean())

    plain = generate_inputs(PLAIN)[2]["x"]
    assert roughness(generate_inputs(varied(smooth=20.0))[2]["x"]) < 0.95 * roughness(plain)
    small = generate_inputs(varied(small=20.0))[2]["x"]
    assert float(small.square().mean()) < 0.95 * float(plain.square().mean())


def test_like_penalty_moves_features_towards_real_ones() -> None:
    def feature_distance(algorithm: Varied) -> float:
        toy, client, generated = generate_inputs(algorithm)
        real = toy.data.examples(
            toy.data.draw_indices("draw/real", 1, torch.tensor([0]), algorithm.count)
        )["x"][0]
        teacher = client.broadcast["params"] | client.broadcast["buffers"]
        generated_features = client.model.features(teacher, generated["x"])
        real_features = client.model.features(teacher, real)
        return float((generated_features.mean(0) - real_features.mean(0)).square().mean())

    assert feature_distance(varied(like=100.0, steps=30)) < 0.7 * feature_distance(varied(steps=30))


def test_noise_share_of_inputs_stays_noise() -> None:
    _, _, noise = generate_inputs(varied(source="noise"))
    _, _, mixed = generate_inputs(varied(noise_share=0.25))
    moved = (mixed["x"] != noise["x"]).flatten(1).any(1)
    assert moved.tolist() == [True] * 6 + [False] * 2


def test_anneal_reduces_the_generated_weight_by_round() -> None:
    _, client, _ = generate_inputs(PLAIN, rounds=3)
    real, generated = PLAIN._loss_weights(client)
    annealed_real, annealed_generated = varied(anneal=0.5)._loss_weights(client)
    assert float(annealed_generated) == pytest.approx(float(generated) * 0.5**3)
    assert float(annealed_real) == pytest.approx(1 - float(generated) * 0.5**3)
    assert float(real) < float(annealed_real)


def test_memory_makes_the_teacher_a_moving_average() -> None:
    algorithm = varied(memory=0.75)
    toy = ToyFederation(algorithm, rounds=3)
    first = toy.server.state["params"]
    global_models = [first, *(round.server["params"] for round in toy.run()[:2])]
    teacher = tree.stack(
        [toy.simulator.client_state(algorithm, toy.algorithm.broadcast(toy.server.state), 0)]
    )["teacher"]
    mean = global_models[0]  # the initial teacher is the first broadcast model
    for model in global_models:
        mean = tree.add(tree.scale(0.75, mean), tree.scale(0.25, model))
    assert max_difference({name: teacher[name][0] for name in mean}, mean) < 1e-12


def test_average_evaluates_a_moving_average() -> None:
    algorithm = varied(average=0.5)
    toy = ToyFederation(algorithm, rounds=2)
    first = toy.server.state["params"]
    models = [first, *(round.server["params"] for round in toy.run())]
    mean = {
        name: 0.25 * models[0][name] + 0.25 * models[1][name] + 0.5 * models[2][name]
        for name in models[0]
    }
    evaluated = algorithm.server_model(toy.server.state)
    assert max_difference({name: evaluated[name] for name in mean}, mean) < 1e-12
    # Training continues from the model itself, not from the average.
    assert max_difference(trained(PLAIN).server.state["params"], models[2]) == 0


def test_variant_without_inner_algorithm_wraps_fedavg() -> None:
    assert algorithm_name(varied()) == "fedavg+Varied" and isinstance(varied().inner, FedAvg)
