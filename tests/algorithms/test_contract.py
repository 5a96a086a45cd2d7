"""Tests of every algorithm against every property of the contract.

A new algorithm needs one entry in ACTIVE_AND_NEUTRAL.
"""

import pytest
import torch

from fedcog.algorithms import ALGORITHMS
from fedcog.testing import (
    CONTRACT,
    PARTIAL,
    ToyFederation,
    max_difference,
    neutral_equals_fedavg,
)
from tests.support.algorithm_settings import ACTIVE_AND_NEUTRAL, ALL_ALGORITHMS
from tests.support.user_models import USER_MODELS


def test_every_algorithm_is_tested() -> None:
    assert set(ACTIVE_AND_NEUTRAL) == set(ALGORITHMS)


@pytest.mark.parametrize(
    "name", [name for name, (_, neutral) in ACTIVE_AND_NEUTRAL.items() if neutral is not None]
)
def test_neutral_settings_equal_fedavg(name: str) -> None:
    algorithm, neutral = ACTIVE_AND_NEUTRAL[name]
    assert neutral is not None
    neutral_equals_fedavg(algorithm, neutral)


def test_only_two_rules_have_no_neutral_settings() -> None:
    without = {name for name, (_, neutral) in ACTIVE_AND_NEUTRAL.items() if neutral is None}
    assert without == {"median", "krum"}


@pytest.mark.parametrize("check", CONTRACT.values(), ids=CONTRACT.keys())
@pytest.mark.parametrize("name", ALL_ALGORITHMS)
def test_algorithm_keeps_the_contract(name: str, check) -> None:  # type: ignore[no-untyped-def]
    check(ALL_ALGORITHMS[name])


@pytest.mark.parametrize("name", ALL_ALGORITHMS)
def test_vmap_equals_loop_with_batch_norm_and_unequal_steps(name: str) -> None:
    settings = PARTIAL | {"module": USER_MODELS["batch-norm"](), "epochs": 0.5}
    separate = ToyFederation(ALL_ALGORITHMS[name], "loop", **settings)
    stacked = ToyFederation(ALL_ALGORITHMS[name], "vmap", **settings)
    assert separate.server.state["buffers"]
    assert max_difference(separate.final_state(), stacked.final_state()) < 1e-9


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ALL_ALGORITHMS)
def test_gpu_equals_cpu(name: str) -> None:
    cpu = ToyFederation(ALL_ALGORITHMS[name], **PARTIAL).final_state()
    gpu = ToyFederation(ALL_ALGORITHMS[name], "vmap", device="cuda", **PARTIAL).final_state()
    assert max_difference(cpu, {name: value.cpu() for name, value in gpu.items()}) < 1e-6
