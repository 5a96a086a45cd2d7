"""Tests of secure aggregation's encoding: payloads to vectors, and sums of vectors back."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedcog.algorithms import ALGORITHMS, SCAFFOLD, FedCOG
from fedcog.core import tree
from fedcog.core.tree import State
from fedcog.federation import secure_aggregation
from fedcog.federation.secure_aggregation import OutOfRange

SCALES = {"delta": 8.0, "weight": 1.0}


def payload(*numbers: float) -> State:
    return {
        "weight": torch.tensor(numbers[0]),
        "delta": {"w": torch.tensor(numbers[1:3]), "b": torch.tensor(numbers[3])},
    }


bounded = st.floats(-8, 8, width=32)
client_values = st.tuples(st.floats(0, 1, width=32), bounded, bounded, bounded)


@given(st.lists(client_values, min_size=1, max_size=5), st.floats(1, 10))
def test_sum_of_vectors_decodes_to_the_sum_of_payloads(
    clients: list[tuple[float, ...]], factor: float
) -> None:
    vectors = [
        secure_aggregation.to_vector(payload(*values), torch.tensor(0.5), SCALES, factor)
        for values in clients
    ]
    assert all(float(vector.abs().max()) <= 1 for vector in vectors)
    template = tree.apply(
        lambda value: torch.empty_like(value, device="meta"), payload(0.0, 0.0, 0.0, 0.0)
    )
    assert len(vectors[0]) == secure_aggregation.vector_size(template)
    total, loss = secure_aggregation.from_vector(
        torch.stack(vectors).sum(0), template, SCALES, factor
    )
    expected = payload(*(sum(numbers) for numbers in zip(*clients, strict=True)))
    for name, value in tree.flatten(expected).items():
        torch.testing.assert_close(tree.flatten(total)[name], value, atol=1e-4, rtol=1e-5)
    assert loss == pytest.approx(0.5 * len(clients))


def test_key_order_of_a_payload_does_not_matter() -> None:
    first = payload(0.5, 1, 2, 3)
    reordered = {"delta": dict(reversed(first["delta"].items())), "weight": first["weight"]}
    loss = torch.tensor(0.0)
    assert torch.equal(
        secure_aggregation.to_vector(first, loss, SCALES, 1),
        secure_aggregation.to_vector(reordered, loss, SCALES, 1),
    )


@pytest.mark.parametrize("value", [8.01, -9.0, float("nan"), float("inf")])
def test_out_of_range_values_are_errors_and_never_clipped(value: float) -> None:
    with pytest.raises(
        OutOfRange, match=r"'delta::w' (exceeds 8, .*raise --secure-scale|is not finite)"
    ):
        secure_aggregation.to_vector(payload(1, 0, value, 0), torch.tensor(0.0), SCALES, 1)
    if abs(value) < 10:
        secure_aggregation.to_vector(payload(1, 0, value, 0), torch.tensor(0.0), SCALES, 2)


@given(st.integers(3, 2**16))
def test_quantized_sums_stay_below_the_modulus(clients: int) -> None:
    levels = secure_aggregation.num_levels(clients)
    assert levels * clients < secure_aggregation.MODULUS
    assert levels >= 2**15
    assert levels & (levels - 1) == 0


def test_payload_bounds_are_inherited_and_undeclared_parts_listed() -> None:
    bounds = FedCOG(SCAFFOLD()).payload_bounds
    assert bounds["control"] > bounds["delta"]
    for algorithm in ALGORITHMS.values():
        assert {"delta", "weight", "count"} <= algorithm().payload_bounds.keys()
    assert secure_aggregation.undeclared_parts({"delta": {}, "secret": {}}, SCALES) == ["secret"]
