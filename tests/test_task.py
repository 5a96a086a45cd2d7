import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import softmax
from scipy.stats import entropy

from fedcog.task import Labels, SingleLabel

task = SingleLabel(5)
logits = st.lists(st.floats(-30, 30), min_size=5, max_size=5)


def asked(counts: torch.Tensor, number: int, labels: Labels = "complementary") -> torch.Tensor:
    return task.targets(counts, torch.stack([counts.sum() * 0, counts.sum()]), labels, torch.zeros(number, 6))


@given(logits, logits)
def test_divergences_agree_with_scipy(one: list[float], other: list[float]) -> None:
    p, q = softmax(one), softmax(other)
    a, b = torch.tensor([one], dtype=torch.float64), torch.tensor([other], dtype=torch.float64)
    assert float(task.distil(a, b)) == pytest.approx(entropy(p, q), rel=1e-6, abs=1e-9)
    middle = (p + q) / 2  # and not scipy's jensenshannon: it takes the root of a zero that rounding made negative
    between = (entropy(p, middle) + entropy(q, middle)) / 2
    assert float(task.divergence(a, b)) == pytest.approx(between, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [50.0, 500.0, 5000.0])
def test_disagreement_of_certain_models_is_finite_and_so_is_its_gradient(size: float, dtype: torch.dtype) -> None:
    one = torch.tensor([[size, 0, 0, 0, 0]], dtype=dtype, requires_grad=True)
    other = torch.tensor([[0, size, 0, 0, 0]], dtype=dtype, requires_grad=True)
    value = task.divergence(one, other)
    assert value.item() == pytest.approx(math.log(2), rel=1e-5)
    value.sum().backward()
    assert one.grad is not None and other.grad is not None
    assert bool(torch.isfinite(one.grad).all()) and bool(torch.isfinite(other.grad).all())


def test_the_papers_example_of_missing_labels() -> None:
    counts = torch.tensor([500, 0, 400, 200, 400])
    assert task.missing(counts).tolist() == [0, 500, 100, 300, 100]
    assert torch.bincount(asked(counts, 10), minlength=5).tolist() == [0, 5, 1, 3, 1]


@settings(max_examples=200)
@given(st.lists(st.integers(0, 5000), min_size=5, max_size=5), st.integers(1, 400))
def test_targets_are_exactly_as_many_as_asked_by_largest_remainder(counts: list[int], number: int) -> None:
    labels = asked(torch.tensor(counts), number)
    got = np.bincount(labels.numpy(), minlength=5)
    missing = max(counts) - np.array(counts)
    if missing.sum() == 0:
        missing = np.ones(5, dtype=int)
    quota = number * missing / missing.sum()
    assert len(labels) == number
    assert (np.abs(got - quota) < 1).all(), "each class gets its quota, rounded up or down"
    rest = number * missing % missing.sum()
    up, down = rest[got > number * missing // missing.sum()], rest[(got == number * missing // missing.sum())]
    assert not len(up) or not len(down) or up.min() >= down.max(), "a larger remainder goes first"


def test_uniform_targets() -> None:
    labels = asked(torch.tensor([9, 0, 0, 0, 0]), 12, "uniform")
    assert torch.bincount(labels, minlength=5).tolist() == [3, 3, 2, 2, 2]


def test_hits_per_class() -> None:
    outputs = torch.eye(5)[[0, 1, 1, 4]]
    assert task.hits(outputs, torch.tensor([0, 1, 2, 4])).tolist() == [1, 1, 0, 0, 1]
