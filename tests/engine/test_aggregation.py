"""What comes from outside: taken only in the form it must have."""

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

FORM: State = {
    "delta": {"w": torch.empty(2, 3), "b": torch.empty(3)},
    "buffers": {},
    "weight": torch.empty(()),
}


def good() -> dict[str, Tensor]:
    return {"weight": torch.ones(()), "delta::b": torch.arange(3.0), "delta::w": torch.ones(2, 3)}


def test_what_fits_takes_the_nesting_and_order_of_the_form() -> None:
    found = match_template(FORM, good())
    assert list(tree.flatten(found)) == list(tree.flatten(FORM))
    assert found["buffers"] == {}
    assert torch.equal(found["delta"]["b"], torch.arange(3.0))


names = st.sampled_from(
    ["delta::w", "delta::b", "weight", "delta", "delta::w::x", "buffers", "", "::", "else"]
)
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
dtypes = st.sampled_from([torch.float32, torch.float64, torch.int64, torch.bool, torch.bfloat16])


@given(st.dictionaries(names, st.tuples(shapes, dtypes), max_size=5))
def test_whatever_comes_either_fits_or_is_refused_with_a_reason(
    strange: dict[str, tuple[tuple[int, ...], torch.dtype]],
) -> None:
    flat = good() | {
        name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in strange.items()
    }
    fits = flat.keys() == good().keys() and all(
        flat[name].shape == value.shape and flat[name].dtype == value.dtype
        for name, value in good().items()
    )
    if fits:
        assert tree.flatten(match_template(FORM, flat)).keys() == good().keys()
    else:
        with pytest.raises(InvalidPayload, match=r"'.*' is"):
            match_template(FORM, flat)


@pytest.mark.parametrize("name", ["weight", "delta::w"])
def test_what_is_missing_is_named(name: str) -> None:
    flat = good()
    del flat[name]
    with pytest.raises(InvalidPayload, match=f"'{name}' is missing"):
        match_template(FORM, flat)


def small(name: str) -> Experiment:
    settings = {
        "clients": 2,
        "local_steps": 1,
        "batch_size": 8,
        "mapping": "loop",
        "workers": 1,
        "device": "cpu",
    }
    return Experiment(algorithm=make_algorithm(name, {}), **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [*ALGORITHMS, "scaffold+fedcog", "fedgen+vhl"])
def test_what_an_answer_looks_like_is_known_before_it_comes(name: str) -> None:
    wraps = issubclass(ALGORITHMS.get(name, Algorithm), Wrapper)
    prepared = ExperimentSetup(small(f"fedavg+{name}" if wraps else name))
    algorithm = prepared.experiment.algorithm
    simulator = prepared.simulator
    broadcast = algorithm.broadcast(prepared.server_state)
    spec = RoundSpec(algorithm, broadcast, round=0, lr=0.01, evaluate_local=True)
    done, _ = simulator.train_client(spec, 1, algorithm.client_init(broadcast))
    answer = {
        "total": done.total,
        "class_stats": done.class_stats,
        "loss": done.loss,
        "distance": done.distance,
    }
    flat = tree.flatten(answer)
    form = simulator.answer_template(algorithm, broadcast)
    assert tree.flatten(match_template(form, flat)).keys() == flat.keys()
    if algorithm.uplink == "sum":  # then it can be masked, in two vectors' sum as in one
        bounds = algorithm.payload_bounds
        assert secure_aggregation.undeclared_parts(form["total"], bounds) == []
        one = secure_aggregation.to_vector(done.total, done.loss[0], bounds, 1.0)
        total, loss = secure_aggregation.from_vector(one + one, form["total"], bounds, 1.0)
        assert loss == pytest.approx(2 * float(done.loss))
        for key, value in tree.flatten(total).items():
            torch.testing.assert_close(
                value, 2 * tree.flatten(done.total)[key], atol=1e-6, rtol=1e-5
            )
