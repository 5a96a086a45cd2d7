"""Tests of every method against independent plain loops written from the papers."""

import pytest
import torch

from fedcog.algorithms import ALGORITHMS
from tests.support import plain_loops as plain
from tests.support.plain_checks import (
    CASES,
    METHODS,
    assert_equals_plain_loop,
    cases_of,
)


@pytest.mark.slow
@pytest.mark.parametrize("mapping", ["loop", "vmap"])
@pytest.mark.parametrize(
    ("name", "case"), [(name, case) for name in METHODS for case in cases_of(name)]
)
def test_method_equals_plain_loop(name: str, case: str, mapping: str) -> None:
    assert_equals_plain_loop(*METHODS[name], cases_of(name)[case], mapping)


def test_every_method_has_a_plain_loop() -> None:
    # test_closed_form.py and federation/test_device_types.py recalculate these.
    tested_elsewhere = {"fedcog", "heterofl"}
    assert {name.split()[0].split("+")[-1] for name in METHODS} | tested_elsewhere == set(
        ALGORITHMS
    )


def test_cases_cover_partial_participation_and_unequal_steps() -> None:
    """Some client trains more than once, steps and weights differ, and FedExP exceeds its floor."""
    case = CASES["unequal steps"]
    sampled = [case.sampled(round) for round in range(case.rounds)]
    num_rounds = [sum(client in client_ids for client_ids in sampled) for client in range(4)]
    assert max(num_rounds) > 1
    assert len({case.num_steps(client) for client in range(4)}) > 1
    assert max(plain.fedexp(CASES["equal steps"], epsilon=1e-3)["scales"]) > 1
    assert torch.tensor([case.weight(client) for client in range(4)]).unique().numel() == 4
