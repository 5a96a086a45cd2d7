"""Payloads as vectors for secure aggregation, and sums of such as payloads again."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedcog import tree
from fedcog.algorithms import ALGORITHMS, SCAFFOLD, FedCOG
from fedcog.federation import masking
from fedcog.federation.masking import OutOfRange
from fedcog.tree import State

SCALES = {"delta": 8.0, "weight": 1.0}


def payload(*numbers: float) -> State:
    return {
        "weight": torch.tensor(numbers[0]),
        "delta": {"w": torch.tensor(numbers[1:3]), "b": torch.tensor(numbers[3])},
    }


within = st.floats(-8, 8, width=32)
rows = st.tuples(st.floats(0, 1, width=32), within, within, within)


@given(st.lists(rows, min_size=1, max_size=5), st.floats(1, 10))
def test_the_sum_of_vectors_is_the_vector_of_the_sum(clients: list[tuple[float, ...]], factor: float) -> None:
    vectors = [masking.vector(payload(*one), torch.tensor(0.5), SCALES, factor) for one in clients]
    assert all(float(one.abs().max()) <= 1 for one in vectors)
    form = tree.apply(lambda value: torch.empty_like(value, device="meta"), payload(0.0, 0.0, 0.0, 0.0))
    assert len(vectors[0]) == masking.size(form)
    total, loss = masking.total(torch.stack(vectors).sum(0), form, SCALES, factor)
    wanted = payload(*(sum(numbers) for numbers in zip(*clients, strict=True)))
    for name, value in tree.flatten(wanted).items():
        torch.testing.assert_close(tree.flatten(total)[name], value, atol=1e-4, rtol=1e-5)
    assert loss == pytest.approx(0.5 * len(clients))


def test_the_order_in_which_a_payload_was_put_together_does_not_matter() -> None:
    one = payload(0.5, 1, 2, 3)
    other = {"delta": dict(reversed(one["delta"].items())), "weight": one["weight"]}
    loss = torch.tensor(0.0)
    assert torch.equal(masking.vector(one, loss, SCALES, 1), masking.vector(other, loss, SCALES, 1))


@pytest.mark.parametrize("odd", [8.01, -9.0, float("nan"), float("inf")])
def test_what_is_too_large_is_an_error_and_never_clipped(odd: float) -> None:
    with pytest.raises(OutOfRange, match=r"'delta::w' (holds more than 8, .*raise --secure-scale|is not finite)"):
        masking.vector(payload(1, 0, odd, 0), torch.tensor(0.0), SCALES, 1)
    if abs(odd) < 10:
        masking.vector(payload(1, 0, odd, 0), torch.tensor(0.0), SCALES, 2)


@given(st.integers(3, 2**16))
def test_sums_stay_below_the_modulus_and_numbers_are_told_apart(clients: int) -> None:
    levels = masking.levels(clients)
    assert levels * clients < masking.MODULUS
    assert levels >= 2**15
    assert levels & (levels - 1) == 0


def test_scales_are_inherited_and_what_has_none_is_named() -> None:
    assert FedCOG(SCAFFOLD()).scales["control"] > FedCOG(SCAFFOLD()).scales["delta"]
    assert all({"delta", "weight", "count"} <= cls().scales.keys() for cls in ALGORITHMS.values())
    assert masking.lacking({"delta": {}, "secret": {}}, SCALES) == ["secret"]
