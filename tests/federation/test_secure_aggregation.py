"""Tests of secure aggregation's encoding: payloads to vectors, and sums of vectors back."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedcog.algorithms import ALGORITHMS, SCAFFOLD, FedCOG
from fedcog.core import tree
from fedcog.core.tree import Params, State
from fedcog.engine.aggregation import add_totals
from fedcog.engine.cohort import RoundSpec
from fedcog.federation import secure_aggregation
from fedcog.federation.secure_aggregation import OutOfRange
from fedcog.testing import ToyFederation, max_difference
from tests.support.algorithm_settings import ALL_ALGORITHMS

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


SUMMED = [name for name, one in ALL_ALGORITHMS.items() if one.uplink == "sum"]


@pytest.mark.parametrize("name", SUMMED)
def test_every_algorithm_that_claims_sums_works_with_masked_ones(name: str) -> None:
    """Payloads that travel as vectors within their bounds give the server the same model."""
    algorithm = ALL_ALGORITHMS[name]
    server = ToyFederation(algorithm).server.state
    simulator = ToyFederation(algorithm).simulator
    spec = RoundSpec(algorithm, algorithm.broadcast(server), 0, 0.05, False, keep_payloads=True)
    result, _ = simulator.train(spec, [0, 1, 2])
    payloads = [tree.take(result.payloads, row) for row in range(3)]

    def masked_sum(parts: list[State]) -> State:
        vectors = [
            secure_aggregation.to_vector(part, torch.zeros(()), algorithm.payload_bounds, 1.0)
            for part in parts
        ]
        levels = secure_aggregation.num_levels(3)
        quantized = [(vector * levels).round() / levels for vector in vectors]
        total = torch.stack(quantized).sum(0)
        return secure_aggregation.from_vector(total, parts[0], algorithm.payload_bounds, 1.0)[0]

    def final_model(add: Callable[[list[State]], State]) -> Params:
        last = payloads
        total = add([algorithm.first_payload(payload) for payload in last])
        for _ in range(algorithm.num_resums):
            broadcast = algorithm.resum_broadcast(total)
            parts = [algorithm.resum_payload(payload, broadcast) for payload in last]
            total = total | add(parts)
            last = [payload | part for payload, part in zip(last, parts, strict=True)]
        draws = simulator.server_draws(algorithm, 0)
        after = algorithm.server_update(server, algorithm.aggregate(total), draws)
        params: Params = after["params"]
        return params

    in_clear = final_model(add_totals)
    assert max_difference(final_model(masked_sum), in_clear) < 1e-4
