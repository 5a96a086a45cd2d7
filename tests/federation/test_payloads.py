"""What comes from outside: taken only in the form it must have."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedcog import tree
from fedcog.algorithms import ALGORITHMS, Algorithm, Wrapper
from fedcog.experiments.config import Experiment, make_algorithm
from fedcog.experiments.prepare import Prepared
from fedcog.federation import masking
from fedcog.federation.payloads import Unfit, fitted
from fedcog.tree import State

FORM: State = {"delta": {"w": torch.empty(2, 3), "b": torch.empty(3)}, "buffers": {}, "weight": torch.empty(())}


def good() -> dict[str, Tensor]:
    return {"weight": torch.ones(()), "delta::b": torch.arange(3.0), "delta::w": torch.ones(2, 3)}


def test_what_fits_takes_the_nesting_and_order_of_the_form() -> None:
    found = fitted(FORM, good())
    assert list(tree.flatten(found)) == list(tree.flatten(FORM))
    assert found["buffers"] == {}
    assert torch.equal(found["delta"]["b"], torch.arange(3.0))


names = st.sampled_from(["delta::w", "delta::b", "weight", "delta", "delta::w::x", "buffers", "", "::", "else"])
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
dtypes = st.sampled_from([torch.float32, torch.float64, torch.int64, torch.bool, torch.bfloat16])


@given(st.dictionaries(names, st.tuples(shapes, dtypes), max_size=5))
def test_whatever_comes_either_fits_or_is_refused_with_a_reason(
    strange: dict[str, tuple[tuple[int, ...], torch.dtype]],
) -> None:
    flat = good() | {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in strange.items()}
    fits = flat.keys() == good().keys() and all(
        flat[name].shape == value.shape and flat[name].dtype == value.dtype for name, value in good().items()
    )
    if fits:
        assert tree.flatten(fitted(FORM, flat)).keys() == good().keys()
    else:
        with pytest.raises(Unfit, match=r"'.*' is"):
            fitted(FORM, flat)


@pytest.mark.parametrize("name", ["weight", "delta::w"])
def test_what_is_missing_is_named(name: str) -> None:
    flat = good()
    del flat[name]
    with pytest.raises(Unfit, match=f"'{name}' is missing"):
        fitted(FORM, flat)


def small(name: str) -> Experiment:
    settings = {"clients": 2, "local_steps": 1, "batch_size": 8, "mapping": "loop", "workers": 1, "device": "cpu"}
    return Experiment(algorithm=make_algorithm(name, {}), **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [*ALGORITHMS, "scaffold+fedcog", "fedgen+vhl"])
def test_what_an_answer_looks_like_is_known_before_it_comes(name: str) -> None:
    wraps = issubclass(ALGORITHMS.get(name, Algorithm), Wrapper)
    prepared = Prepared(small(f"fedavg+{name}" if wraps else name))
    algorithm, simulation = prepared.experiment.algorithm, prepared.backend
    shared = algorithm.broadcast(prepared.server)
    done, _ = simulation.alone(algorithm, shared, 1, algorithm.client_init(shared), 0, 0.01, True)
    flat = tree.flatten({"total": done.total, "hits": done.hits, "loss": done.loss, "distance": done.distance})
    form = simulation.form(algorithm, shared)
    assert tree.flatten(fitted(form, flat)).keys() == flat.keys()
    if algorithm.uplink == "sum":  # then it can be masked, in two vectors' sum as in one
        assert masking.lacking(form["total"], algorithm.scales) == []
        one = masking.vector(done.total, done.loss[0], algorithm.scales, 1.0)
        total, loss = masking.total(one + one, form["total"], algorithm.scales, 1.0)
        assert loss == pytest.approx(2 * float(done.loss))
        for key, value in tree.flatten(total).items():
            torch.testing.assert_close(value, 2 * tree.flatten(done.total)[key], atol=1e-6, rtol=1e-5)
