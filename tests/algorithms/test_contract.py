"""Tests of every algorithm against every property of the contract.

A new algorithm needs one entry in ACTIVE_AND_NEUTRAL.
"""

from typing import Any, ClassVar

import pytest
import torch

from fedcog.algorithms import ALGORITHMS, Algorithm
from fedcog.core.tree import Params
from fedcog.testing import (
    CONTRACT,
    PARTIAL,
    ToyFederation,
    contract,
    max_difference,
    neutral_equals_fedavg,
)
from tests.support.algorithm_settings import (
    ACTIVE_AND_NEUTRAL,
    ALL_ALGORITHMS,
    COMPOSITIONS,
    SINGLE_ALGORITHMS,
)
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


class CachedFederation(ToyFederation):
    """A federation whose final state several checks share."""

    known: ClassVar[dict[Any, Params]] = {}

    def __init__(self, algorithm: Algorithm, mapping: Any = "loop", **settings: Any) -> None:
        super().__init__(algorithm, mapping, **settings)
        self.key = (algorithm, mapping, *sorted(settings.items(), key=lambda item: item[0]))

    def final_state(self, start: int = 0) -> Params:
        if start or self.server.backend is not self.simulator:
            return super().final_state(start)
        if self.key not in self.known:
            self.known[self.key] = super().final_state()
        return self.known[self.key]


@pytest.fixture
def shared_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let checks of the same algorithm share runs of the same federation."""
    monkeypatch.setattr(contract, "ToyFederation", CachedFederation)


@pytest.mark.usefixtures("shared_runs")
@pytest.mark.parametrize("check", CONTRACT.values(), ids=CONTRACT.keys())
@pytest.mark.parametrize("name", SINGLE_ALGORITHMS)
def test_algorithm_keeps_the_contract(name: str, check) -> None:  # type: ignore[no-untyped-def]
    check(SINGLE_ALGORITHMS[name])


COMPOSED = (
    "loop_equals_vmap",
    "payloads_add_up",
    "resume_is_exact",
    "active_fedcog_keeps_the_rule",
)


@pytest.mark.usefixtures("shared_runs")
@pytest.mark.parametrize("check", COMPOSED)
@pytest.mark.parametrize("name", COMPOSITIONS)
def test_composition_keeps_the_contract(name: str, check: str) -> None:
    """What single algorithms and pairs of wrappers keep is not checked again."""
    CONTRACT[check](COMPOSITIONS[name])


@pytest.mark.parametrize("name", SINGLE_ALGORITHMS)
def test_vmap_equals_loop_with_batch_norm_and_unequal_steps(name: str) -> None:
    settings = PARTIAL | {"module": USER_MODELS["batch-norm"](), "epochs": 0.5}
    separate = ToyFederation(SINGLE_ALGORITHMS[name], "loop", **settings)
    stacked = ToyFederation(SINGLE_ALGORITHMS[name], "vmap", **settings)
    assert separate.server.state["buffers"]
    assert max_difference(separate.final_state(), stacked.final_state()) < 1e-9


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ALL_ALGORITHMS)
def test_gpu_equals_cpu(name: str) -> None:
    cpu = ToyFederation(ALL_ALGORITHMS[name], **PARTIAL).final_state()
    gpu = ToyFederation(ALL_ALGORITHMS[name], "vmap", device="cuda", **PARTIAL).final_state()
    assert max_difference(cpu, {name: value.cpu() for name, value in gpu.items()}) < 1e-6
