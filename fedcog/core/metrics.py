"""Further metrics of single-label tasks: balanced and per-class accuracy, calibration, your own."""

import math
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from fedcog.core.tree import Params

NUM_CALIBRATION_BINS = 15
"""Number of confidence bins of the expected calibration error."""

METRICS: dict[str, str] = {
    "balanced_accuracy": "mean over classes of the accuracy on each class",
    "class_accuracy": "accuracy on each class",
    "ece": f"expected calibration error, {NUM_CALIBRATION_BINS} bins of equal width",
}
"""Metrics that are available by name, and what they are."""

MetricFunction = Callable[[Tensor, Tensor], float | Tensor]
"""A metric of your own: a function of logits `(N, C)` and labels that returns one number."""

TAKEN_NAMES = {*METRICS, "clients", "num_clients", "ids", "examples"}
"""Names of other scores, and of lists, on the clients' test examples."""
TAKEN_PREFIXES = ("accuracy", "o_f1", "personal_")
"""Beginnings of such names."""

MetricFunctions = Mapping[str, MetricFunction]


class FurtherMetrics(NamedTuple):
    """Metrics that are recorded besides the main one.

    Attributes:
        names: Names in `METRICS`.
        functions: The user's metric functions by name.
    """

    names: tuple[str, ...] = ()
    functions: MetricFunctions = MappingProxyType({})

    @property
    def has_calibration(self) -> bool:
        """Whether calibration statistics are needed."""
        return "ece" in self.names

    def from_stats(
        self, class_stats: Tensor, class_counts: Tensor, calibration: Tensor | None
    ) -> dict[str, float | list[float | None]]:
        """Compute the named metrics from statistics.

        Args:
            class_stats: Correct predictions of each class, `(C,)`.
            class_counts: Examples of each class, `(C,)`.
            calibration: Sum of `calibration_stats`, if needed.

        Returns:
            Metrics by name; None stands for a class without examples.
        """
        found: dict[str, float | list[float | None]] = {}
        if "balanced_accuracy" in self.names:
            found["balanced_accuracy"] = balanced_accuracy(class_stats, class_counts)
        if "class_accuracy" in self.names:
            values = class_accuracy(class_stats, class_counts).tolist()
            found["class_accuracy"] = [None if math.isnan(value) else value for value in values]
        if calibration is not None:
            found["ece"] = calibration_error(calibration)
        return found


def parse_names(text: str) -> list[str]:
    """Return the metrics of a list such as 'ece, balanced_accuracy', without repetitions."""
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def check_functions(functions: MetricFunctions) -> list[str]:
    """Return what is wrong with the names of a user's metrics.

    Args:
        functions: Metric functions by name.

    Returns:
        The problems found.
    """
    faults = []
    for name, function in functions.items():
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z]\w{0,63}", name):
            faults.append(f"metric {name!r} is no valid name: use letters, digits and underscores.")
        elif name in TAKEN_NAMES or name.startswith(TAKEN_PREFIXES):
            faults.append(f"metric '{name}' is taken: choose another name.")
        if not callable(function):
            faults.append(
                f"metric '{name}' is {function!r}: give a function of logits (N, C) and labels."
            )
    return faults


def class_accuracy(class_stats: Tensor, class_counts: Tensor) -> Tensor:
    """Return the accuracy on each class; NaN for classes without examples.

    Args:
        class_stats: Correct predictions of each class, `(C,)`.
        class_counts: Examples of each class, `(C,)`.

    Returns:
        `(C,)`, float64.
    """
    return class_stats.double() / class_counts.double()


def balanced_accuracy(class_stats: Tensor, class_counts: Tensor) -> float:
    """Return the mean accuracy over the classes that have examples.

    Args:
        class_stats: Correct predictions of each class, `(C,)`.
        class_counts: Examples of each class, `(C,)`.

    Returns:
        The metric, between 0 and 1.
    """
    return float(class_accuracy(class_stats, class_counts).nanmean())


def calibration_stats(logits: Tensor, labels: Tensor) -> Tensor:
    """Return each example's part of the calibration statistics.

    Args:
        logits: `(B, C)`.
        labels: `(B,)` class indices.

    Returns:
        `(B, 3, bins)`, float64: in the bin of an example's confidence 1, the confidence, and
        whether the prediction is correct. Their sum over examples gives `calibration_error`.
    """
    confidence, predicted = logits.double().softmax(-1).max(-1)
    bins = (confidence * NUM_CALIBRATION_BINS).ceil().long() - 1
    one_hot = torch.nn.functional.one_hot(
        bins.clamp(0, NUM_CALIBRATION_BINS - 1), NUM_CALIBRATION_BINS
    )
    values = torch.stack([torch.ones_like(confidence), confidence, (predicted == labels).double()])
    return values.T[:, :, None] * one_hot[:, None, :]


def calibration_error(stats: Tensor) -> float:
    """Return the expected calibration error: sum over bins of |accuracy - confidence| * share.

    Args:
        stats: Sum of `calibration_stats` over examples, `(3, bins)`.

    Returns:
        The error, between 0 and 1.
    """
    counts, confidence, correct = stats
    return float((correct - confidence).abs().sum() / counts.sum())


def evaluate_functions(functions: MetricFunctions, logits: Tensor, labels: Tensor) -> Params:
    """Compute a user's metrics.

    Args:
        functions: Metric functions by name. They get copies, so they may write to them.
        logits: `(N, C)`.
        labels: `(N,)`, or `(N, C)` booleans if multi-label.

    Returns:
        0-d tensors by name, float64, in host memory. All are NaN if logits are not finite.

    Raises:
        RuntimeError: If a function fails.
        TypeError: If a function does not return one number.
    """
    if functions and not bool(logits.isfinite().all()):
        return {name: torch.tensor(math.nan, dtype=torch.float64) for name in functions}
    found: Params = {}
    for name, function in functions.items():
        try:
            result = function(logits.clone(), labels.clone())
        except Exception as error:
            raise RuntimeError(
                f"metric '{name}' failed: {type(error).__name__}: {error}."
            ) from error
        try:
            is_number = isinstance(result, int | float)
            value = torch.as_tensor(result, dtype=torch.float64 if is_number else None)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(
                f"metric '{name}' returned {type(result).__name__}: return one number."
            ) from error
        if value.numel() != 1 or value.is_complex():
            raise TypeError(
                f"metric '{name}' returned {list(value.shape)} numbers: return one, such as a mean."
            )
        found[name] = value.detach().reshape(()).double().cpu()
    return found
