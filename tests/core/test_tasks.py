"""Tests of single-label tasks: divergences, targets of generated inputs, class statistics."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import softmax
from scipy.stats import entropy

from fedcog.core.tasks import LabelChoice, SingleLabel

task = SingleLabel(5)
logits = st.lists(st.floats(-30, 30), min_size=5, max_size=5)


def targets(
    counts: torch.Tensor, number: int, labels: LabelChoice = "complementary"
) -> torch.Tensor:
    return task.targets(
        counts, torch.stack([counts.sum() * 0, counts.sum()]), labels, torch.zeros(number, 6)
    )


@given(logits, logits)
def test_divergences_agree_with_scipy(logits_p: list[float], logits_q: list[float]) -> None:
    p = softmax(logits_p)
    q = softmax(logits_q)
    a = torch.tensor([logits_p], dtype=torch.float64)
    b = torch.tensor([logits_q], dtype=torch.float64)
    assert float(task.distillation_loss(a, b)) == pytest.approx(entropy(p, q), rel=1e-6, abs=1e-9)
    # scipy's jensenshannon is NaN where rounding makes a zero negative, so we use its definition.
    middle = (p + q) / 2
    jensen_shannon = (entropy(p, middle) + entropy(q, middle)) / 2
    assert float(task.divergence(a, b)) == pytest.approx(jensen_shannon, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [50.0, 500.0, 5000.0])
def test_divergence_of_confident_models_has_finite_gradients(
    size: float, dtype: torch.dtype
) -> None:
    p = torch.tensor([[size, 0, 0, 0, 0]], dtype=dtype, requires_grad=True)
    q = torch.tensor([[0, size, 0, 0, 0]], dtype=dtype, requires_grad=True)
    value = task.divergence(p, q)
    assert value.item() == pytest.approx(math.log(2), rel=1e-5)
    value.sum().backward()
    assert p.grad is not None and q.grad is not None
    assert bool(torch.isfinite(p.grad).all()) and bool(torch.isfinite(q.grad).all())


def test_missing_labels_equal_the_example_of_the_paper() -> None:
    counts = torch.tensor([500, 0, 400, 200, 400])
    assert task.missing(counts).tolist() == [0, 500, 100, 300, 100]
    assert torch.bincount(targets(counts, 10), minlength=5).tolist() == [0, 5, 1, 3, 1]


@settings(max_examples=200)
@given(st.lists(st.integers(0, 5000), min_size=5, max_size=5), st.integers(1, 400))
def test_targets_are_rounded_by_largest_remainder(counts: list[int], number: int) -> None:
    labels = targets(torch.tensor(counts), number)
    assigned = np.bincount(labels.numpy(), minlength=5)
    missing = max(counts) - np.array(counts)
    if missing.sum() == 0:
        missing = np.ones(5, dtype=int)
    quota = number * missing / missing.sum()
    assert len(labels) == number
    assert (np.abs(assigned - quota) < 1).all(), "each class gets its quota, rounded up or down"
    rest = number * missing % missing.sum()
    up = rest[assigned > number * missing // missing.sum()]
    down = rest[(assigned == number * missing // missing.sum())]
    assert not len(up) or not len(down) or up.min() >= down.max(), "a larger remainder goes first"


def test_uniform_targets_ignore_class_counts() -> None:
    labels = targets(torch.tensor([9, 0, 0, 0, 0]), 12, "uniform")
    assert torch.bincount(labels, minlength=5).tolist() == [3, 3, 2, 2, 2]


def test_class_stats_count_correct_predictions_per_class() -> None:
    outputs = torch.eye(5)[[0, 1, 1, 4]]
    assert task.class_stats(outputs, torch.tensor([0, 1, 2, 4])).tolist() == [1, 1, 0, 0, 1]
