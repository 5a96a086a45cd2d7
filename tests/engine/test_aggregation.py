"""Tests that answers from outside are accepted only in the expected form."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedcog.algorithms import ALGORITHMS, Algorithm, Wrapper
from fedcog.core import tree
from fedcog.core.tree import State
from fedcog.engine.aggregation import InvalidPayload, match_template
from fedcog.engine.cohort import RoundSpec
from fedcog.federation import secure_aggregation
from fedcog.runs.config.composition import make_algorithm
from fedcog.runs.config.experiment import Experiment
from fedcog.runs.setup import ExperimentSetup

TEMPLATE: State = {
    "delta": {"w": torch.empty(2, 3), "b": torch.empty(3)},
    "buffers": {},
    "weight": torch.empty(()),
}


def valid_payload() -> dict[str, Tensor]:
    return {"weight": torch.ones(()), "delta::b": torch.arange(3.0), "delta::w": torch.ones(2, 3)}


def test_matching_payload_gets_nesting_and_order_of_the_template() -> None:
    nested = match_template(TEMPLATE, valid_payload())
    assert list(tree.flatten(nested)) == list(tree.flatten(TEMPLATE))
    assert nested["buffers"] == {}
    assert torch.equal(nested["delta"]["b"], torch.arange(3.0))


names = st.sampled_from(
    ["delta::w", "delta::b", "weight", "delta", "delta::w::x", "buffers", "", "::", "else"]
)
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
dtypes = st.sampled_from([torch.float32, torch.float64, torch.int64, torch.bool, torch.bfloat16])


@given(st.dictionaries(names, st.tuples(shapes, dtypes), max_size=5))
def test_payload_matches_or_is_refused_with_a_reason(
    changes: dict[str, tuple[tuple[int, ...], torch.dtype]],
) -> None:
    flat = valid_payload() | {
        name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in changes.items()
    }
    fits = flat.keys() == valid_payload().keys() and all(
        flat[name].shape == value.shape and flat[name].dtype == value.dtype
        for name, value in valid_payload().items()
    )
    if fits:
        assert tree.flatten(match_template(TEMPLATE, flat)).keys() == valid_payload().keys()
    else:
        with pytest.raises(InvalidPayload, match=r"'.*' is"):
            match_template(TEMPLATE, flat)


@pytest.mark.parametrize("name", ["weight", "delta::w"])
def test_error_names_the_missing_tensor(name: str) -> None:
    flat = valid_payload()
    del flat[name]
    with pytest.raises(InvalidPayload, match=f"'{name}' is missing"):
        match_template(TEMPLATE, flat)


def small_experiment(name: str) -> Experiment:
    settings = {
        "clients": 3,
        "local_steps": 1,
        "batch_size": 8,
        "mapping": "loop",
        "workers": 1,
        "device": "cpu",
    }
    few = {"krum": {"attackers": 0}, "multi-krum": {"attackers": 0}, "trimmed-mean": {"trim": 0}}
    return Experiment(algorithm=make_algorithm(name, few), **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [*ALGORITHMS, "scaffold+fedcog", "fedgen+vhl"])
def test_answer_template_matches_real_answers(name: str) -> None:
    is_wrapper = issubclass(ALGORITHMS.get(name, Algorithm), Wrapper)
    setup = ExperimentSetup(small_experiment(f"fedavg+{name}" if is_wrapper else name))
    algorithm = setup.experiment.algorithm
    simulator = setup.simulator
    broadcast = algorithm.broadcast(setup.server_state)
    spec = RoundSpec(algorithm, broadcast, round=0, lr=0.01, evaluate_local=True)
    result, _ = simulator.train_client(spec, 1, algorithm.client_init(broadcast))
    result = result._replace(total=algorithm.first_payload(result.total))
    answer = {
        "total": result.total,
        "class_stats": result.class_stats,
        "loss": result.loss,
        "distance": result.distance,
    }
    flat = tree.flatten(answer)
    template = simulator.answer_template(algorithm, broadcast)
    assert tree.flatten(match_template(template, flat)).keys() == flat.keys()
    if algorithm.uplink == "sum":
        # Secure aggregation decodes a sum of vectors, here of two equal ones.
        bounds = algorithm.payload_bounds
        assert secure_aggregation.undeclared_parts(template["total"], bounds) == []
        vector = secure_aggregation.to_vector(result.total, result.loss[0], bounds, 1.0)
        total, loss = secure_aggregation.from_vector(
            vector + vector, template["total"], bounds, 1.0
        )
        assert loss == pytest.approx(2 * float(result.loss))
        for key, value in tree.flatten(total).items():
            torch.testing.assert_close(
                value, 2 * tree.flatten(result.total)[key], atol=1e-6, rtol=1e-5
            )
