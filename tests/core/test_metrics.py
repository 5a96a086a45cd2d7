"""Further metrics against scikit-learn and plain loops."""

import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import balanced_accuracy_score

from fedcog.core import metrics
from fedcog.core.tasks import make_task


def plain_calibration_error(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """The definition, bin by bin."""
    probabilities = torch.softmax(logits.double(), 1).numpy()
    confidence = probabilities.max(1)
    correct = probabilities.argmax(1) == labels.numpy()
    error = 0.0
    for number in range(metrics.NUM_CALIBRATION_BINS):
        low = number / metrics.NUM_CALIBRATION_BINS
        high = (number + 1) / metrics.NUM_CALIBRATION_BINS
        inside = (confidence > low) & (confidence <= high)
        if inside.any():
            gap = abs(correct[inside].mean() - confidence[inside].mean())
            error += inside.mean() * gap
    return float(error)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(2, 6), st.integers(1, 60))
def test_metrics_equal_their_definitions(seed: int, num_classes: int, number: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(number, num_classes, generator=generator)
    labels = torch.randint(num_classes, (number,), generator=generator)
    task = make_task(num_classes, multi_label=False)
    stats = task.class_stats(logits, labels)
    counts = task.class_counts(labels)
    names = ("balanced_accuracy", "class_accuracy", "ece")
    calibration = metrics.calibration_stats(logits, labels).sum(0)
    found = metrics.FurtherMetrics(names).from_stats(stats, counts, calibration)
    predicted = logits.argmax(1).numpy()
    with warnings.catch_warnings(action="ignore"):  # predicted classes without examples
        expected = balanced_accuracy_score(labels.numpy(), predicted)
    assert found["balanced_accuracy"] == pytest.approx(expected)
    assert found["ece"] == pytest.approx(plain_calibration_error(logits, labels), abs=1e-12)
    by_class = found["class_accuracy"]
    assert isinstance(by_class, list)
    for label, value in enumerate(by_class):
        own = (labels == label).numpy()
        if own.any():
            assert value == pytest.approx((predicted[own] == label).mean())
        else:
            assert value is None


def test_failing_metric_is_named() -> None:
    logits = torch.zeros(2, 3)
    with pytest.raises(RuntimeError, match="metric 'ratio' failed: ZeroDivisionError: division"):
        metrics.evaluate_functions({"ratio": lambda logits, labels: 1 / 0}, logits, torch.zeros(2))


def test_own_metrics_must_return_one_number() -> None:
    logits = torch.zeros(4, 3)
    labels = torch.zeros(4, dtype=torch.int64)
    found = metrics.evaluate_functions({"half": lambda logits, labels: 0.5}, logits, labels)
    assert math.isclose(float(found["half"]), 0.5)
    with pytest.raises(TypeError, match="metric 'rows' returned"):
        metrics.evaluate_functions({"rows": lambda logits, labels: logits}, logits, labels)


@pytest.mark.parametrize("name", ["ids", "examples", "clients", "accuracy_worst", "ece"])
def test_names_of_recorded_values_are_taken(name: str) -> None:
    (fault,) = metrics.check_functions({name: len})  # type: ignore[dict-item]
    assert fault == f"metric '{name}' is taken: choose another name."


def test_names_of_own_metrics_are_checked() -> None:
    faults = metrics.check_functions({"a b": abs, "ece": abs, "fine": abs, "odd": 3})  # type: ignore[dict-item]
    assert len(faults) == 3
    assert (
        "no valid name" in faults[0] and "is taken" in faults[1] and "give a function" in faults[2]
    )


def test_metrics_that_write_to_their_arguments_change_nothing_else() -> None:
    def spoil(logits: torch.Tensor, labels: torch.Tensor) -> float:
        logits.zero_()
        labels.zero_()
        return 0.0

    logits, labels = torch.ones(2, 3), torch.ones(2)
    functions = {"spoil": spoil, "total": lambda logits, labels: logits.sum() + labels.sum()}
    assert float(metrics.evaluate_functions(functions, logits, labels)["total"]) == 8
    assert logits.sum() == 6 and labels.sum() == 2


def test_metrics_of_logits_that_are_not_finite_are_nan() -> None:
    logits = torch.tensor([[math.nan, 0.0], [math.inf, 0.0], [1.0, 0.0]])
    labels = torch.zeros(3, dtype=torch.int64)
    found = metrics.evaluate_functions({"never": lambda logits, labels: 1 / 0}, logits, labels)
    assert math.isnan(float(found["never"]))
    stats = metrics.calibration_stats(logits, labels)
    assert stats[:, 0].sum() == 3, "each example is in one bin"


def test_numbers_keep_double_precision() -> None:
    logits = torch.zeros(2, 3)
    labels = torch.tensor([0, 1])
    for number in (1 / 3, 16777217.0, 1e300, 2**40 + 1):
        found = metrics.evaluate_functions(
            {"own": lambda *_, number=number: number}, logits, labels
        )
        assert float(found["own"]) == number
