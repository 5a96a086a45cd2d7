"""What a label means: loss, distillation, decisions and metrics of a task."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fedcog.core.tree import Params

LabelChoice = Literal["complementary", "uniform"]
"""Which target labels to generate inputs for: those that a client lacks, or all alike."""

Metric = Literal["accuracy", "o_f1"]
"""The main metric: accuracy, or for multi-label examples F1 over all decisions (micro F1)."""

METRIC_LABELS: dict[Metric, str] = {"accuracy": "accuracy", "o_f1": "O-F1"}
"""The main metrics as reports print them."""

EXTRA_METRICS = ("c_p", "c_r", "c_f1", "o_p", "o_r", "s_p", "s_r", "s_f1", "map")
"""Further multi-label metrics: precision (p), recall (r) and F1 by class (c), over all decisions
(o) and by example (s), and mean average precision (map).
"""

ATTACK_SUCCESS = "attack_success"
"""Key of the share of test examples that the model decides as an attack wants."""
SCORE_KEYS = (
    *(f"{prefix}{name}" for prefix in ("", "label_mix_", "validation_") for name in METRIC_LABELS),
    *EXTRA_METRICS,
    ATTACK_SUCCESS,
)
"""Keys of `rounds.jsonl` that hold scores between 0 and 1."""

FORMER_KEYS = {f"personal_{name}": f"label_mix_{name}" for name in METRIC_LABELS}
"""Current keys of `rounds.jsonl`, by the keys of older lines and of result files."""


def with_current_keys(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line of `rounds.jsonl` with current keys in place of those of older versions."""
    return {FORMER_KEYS.get(name, name): value for name, value in line.items()}


def metric_of(record: Mapping[str, object]) -> Metric:
    """Return the main metric of a record: of a round, or of a client in a round."""
    return next((name for name in METRIC_LABELS if record.get(name) is not None), "accuracy")


class Task(Protocol):
    """The meaning of a label, for one client and without a client axis.

    Class statistics are counts by class that add up over examples and from which `score` computes
    the main metric.

    Attributes:
        num_classes: Number of classes, C.
        metric: The main metric.
        multi_label: Whether an example may have several labels.
    """

    num_classes: int
    metric: ClassVar[Metric]
    multi_label: ClassVar[bool]

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each example, `(B,)`.

        Args:
            logits: `(B, C)`.
            labels: `(B,)` class indices, or `(B, C)` booleans if multi-label.

        Returns:
            One loss per example, `(B,)`.
        """

    def distillation_loss(self, teacher: Tensor, student: Tensor) -> Tensor:
        """Return the KL divergence of the student's outputs from the teacher's.

        Args:
            teacher: Logits `(B, C)`.
            student: Logits `(B, C)`.

        Returns:
            One loss per example, `(B,)`.
        """

    def decide(self, logits: Tensor) -> Tensor:
        """Return the predicted labels: `(B,)`, or `(B, C)` booleans if multi-label."""

    def divergence(self, first: Tensor, second: Tensor) -> Tensor:
        """Return the Jensen-Shannon divergence of two models' outputs.

        Args:
            first: Logits `(B, C)`.
            second: Logits `(B, C)`.

        Returns:
            One value in [0, ln 2] per example, `(B,)`.
        """

    def class_counts(self, labels: Tensor) -> Tensor:
        """Return the number of examples of each class, `(C,)`, int64."""

    def missing(self, class_counts: Tensor) -> Tensor:
        """Return how many examples of each class a client lacks to be balanced, `(C,)`."""

    def label_set_sizes(self, labels: Tensor) -> Tensor:
        """Return the number of examples with 0, 1, 2, ... labels."""

    def targets(
        self,
        class_counts: Tensor,
        label_set_sizes: Tensor,
        label_choice: LabelChoice,
        uniform: Tensor,
    ) -> Tensor:
        """Return labels to generate inputs for.

        Args:
            class_counts: The client's examples of each class, `(C,)`.
            label_set_sizes: The client's examples with 0, 1, 2, ... labels.
            label_choice: Which labels to ask for.
            uniform: Random numbers between 0 and 1, `(N, 1 + C)`.

        Returns:
            Labels of N inputs: `(N,)`, or `(N, C)` booleans if multi-label.
        """

    def class_stats(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return class statistics, `(..., C)`, that add up over examples.

        Args:
            logits: `(B, C)`.
            labels: As for `loss`.

        Returns:
            Integer counts by class.
        """

    def example_stats(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return each example's part of the class statistics, `(B, ..., C)`.

        Args:
            logits: `(B, C)`.
            labels: As for `loss`.

        Returns:
            Integer counts whose sum over examples is `class_stats`.
        """

    def max_class_stats(self, class_counts: Tensor, num_examples: int) -> Tensor:
        """Return the largest class statistics that a data set allows.

        Args:
            class_counts: Examples of each class, `(C,)`.
            num_examples: Number of examples.

        Returns:
            Upper bounds in the shape of the class statistics.
        """

    def score(
        self, class_stats: Tensor, class_counts: Tensor, label_mix: Tensor | None = None
    ) -> float:
        """Compute the main metric.

        Args:
            class_stats: Class statistics on a test set.
            class_counts: Test examples of each class, `(C,)`.
            label_mix: Weights of the classes, `(C,)`, such as a client's class counts; None
                weights classes as the test set does.

        Returns:
            The metric, between 0 and 1.
        """

    def extra_metrics(self, logits: Tensor, labels: Tensor) -> Params:
        """Compute further metrics from the outputs on a whole test set.

        Args:
            logits: `(N, C)`.
            labels: As for `loss`.

        Returns:
            0-d tensors by name.
        """


class SingleLabel:
    """Each example has exactly one of `num_classes` labels."""

    metric: ClassVar[Metric] = "accuracy"
    multi_label: ClassVar[bool] = False

    def __init__(self, num_classes: int) -> None:
        self.num_classes = num_classes

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the cross-entropy. See `Task.loss` for Args and Returns.

        Returns:
            `(B,)`.
        """
        return F.cross_entropy(logits, labels, reduction="none")

    def distillation_loss(self, teacher: Tensor, student: Tensor) -> Tensor:
        """Return KL(p_teacher || p_student) (eq. 3).

        Returns:
            `(B,)`.
        """
        return _kl(teacher.log_softmax(-1), student.log_softmax(-1))

    def decide(self, logits: Tensor) -> Tensor:
        """Return the most likely class, `(B,)`."""
        return logits.argmax(-1)

    def divergence(self, first: Tensor, second: Tensor) -> Tensor:
        """Return the Jensen-Shannon divergence (eq. 2), at most ln 2.

        It is computed from log-probabilities, so that value and gradient stay finite where both
        models are certain.

        Returns:
            `(B,)`.
        """
        return _js(first.log_softmax(-1), second.log_softmax(-1))

    def class_counts(self, labels: Tensor) -> Tensor:
        """Return the number of examples of each class, `(C,)`."""
        return torch.bincount(labels, minlength=self.num_classes)

    def missing(self, class_counts: Tensor) -> Tensor:
        """Return max(d) - d (appendix A.1.1), `(C,)`."""
        return class_counts.max() - class_counts

    def label_set_sizes(self, labels: Tensor) -> Tensor:
        """Return the number of examples with 0 and 1 labels: all have one."""
        return torch.tensor([0, len(labels)], device=labels.device)

    def targets(
        self,
        class_counts: Tensor,
        label_set_sizes: Tensor,
        label_choice: LabelChoice,
        uniform: Tensor,
    ) -> Tensor:
        """Allocate labels in proportion to what is missing, by largest remainder.

        A client that lacks nothing asks for all classes alike. No randomness is used.

        Returns:
            `(N,)`.
        """
        number = len(uniform)
        shares = _target_shares(self.missing(class_counts), label_choice)
        quota = number * shares // shares.sum()
        remainder = number * shares % shares.sum()
        rank = (-remainder).argsort(stable=True).argsort()
        last = (quota + (rank < number - quota.sum())).cumsum(0)
        return (torch.arange(number, device=class_counts.device)[:, None] >= last).sum(1)

    def class_stats(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Count the correct predictions of each class.

        Returns:
            `(C,)`.
        """
        return self.example_stats(logits, labels).sum(0)

    def example_stats(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Mark the label of each example that is predicted correctly.

        Returns:
            `(B, C)`.
        """
        one_hot = F.one_hot(labels, self.num_classes)
        return one_hot * (self.decide(logits) == labels)[:, None]

    def max_class_stats(self, class_counts: Tensor, num_examples: int) -> Tensor:
        """Return the counts that all-correct predictions would have.

        Returns:
            `(C,)`.
        """
        return class_counts

    def score(
        self, class_stats: Tensor, class_counts: Tensor, label_mix: Tensor | None = None
    ) -> float:
        """Return the accuracy; with label mix p it is sum_c correct_c p_c / sum_c count_c p_c.

        Returns:
            The accuracy, between 0 and 1.
        """
        if label_mix is None:
            return int(class_stats.sum()) / int(class_counts.sum())
        share = label_mix.double() / label_mix.sum()
        return float((class_stats * share).sum() / (class_counts * share).sum())

    def extra_metrics(self, logits: Tensor, labels: Tensor) -> Params:
        """Return no further metrics.

        Returns:
            An empty dict.
        """
        return {}


class MultiLabel:
    """Each example has any subset of `num_classes` labels, given as a row of booleans."""

    metric: ClassVar[Metric] = "o_f1"
    multi_label: ClassVar[bool] = True

    def __init__(self, num_classes: int) -> None:
        self.num_classes = num_classes

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the binary cross-entropy, averaged over labels.

        Returns:
            `(B,)`.
        """
        targets = labels.to(logits.dtype)
        return F.binary_cross_entropy_with_logits(logits, targets, reduction="none").mean(-1)

    def distillation_loss(self, teacher: Tensor, student: Tensor) -> Tensor:
        """Return the KL divergence of Bernoulli distributions, summed over labels.

        Returns:
            `(B,)`.
        """
        return _kl(_bernoulli_log_probs(teacher), _bernoulli_log_probs(student)).sum(-1)

    def decide(self, logits: Tensor) -> Tensor:
        """Return the labels that are more likely than not, `(B, C)`."""
        return logits > 0

    def divergence(self, first: Tensor, second: Tensor) -> Tensor:
        """Return the Jensen-Shannon divergence of Bernoulli distributions, averaged over labels.

        Returns:
            `(B,)`, at most ln 2.
        """
        return _js(_bernoulli_log_probs(first), _bernoulli_log_probs(second)).mean(-1)

    def class_counts(self, labels: Tensor) -> Tensor:
        """Return the number of examples that have each label, `(C,)`."""
        return labels.sum(0)

    def missing(self, class_counts: Tensor) -> Tensor:
        """Return max(d) - d, `(C,)`."""
        return class_counts.max() - class_counts

    def label_set_sizes(self, labels: Tensor) -> Tensor:
        """Return the number of examples with 0 to C labels, `(C + 1,)`."""
        return torch.bincount(labels.sum(-1), minlength=self.num_classes + 1)

    def targets(
        self,
        class_counts: Tensor,
        label_set_sizes: Tensor,
        label_choice: LabelChoice,
        uniform: Tensor,
    ) -> Tensor:
        """Draw label sets of the sizes that the client's own examples have, but at least one label.

        Labels are drawn without replacement in proportion to what is missing: those with the
        largest log(share) + Gumbel noise.

        Returns:
            `(N, C)` booleans.
        """
        shares = _target_shares(self.missing(class_counts), label_choice)
        cumulative = label_set_sizes.cumsum(0)
        set_size = (uniform[:, :1] * label_set_sizes.sum() >= cumulative).sum(-1, keepdim=True)
        gumbel = -(-uniform[:, 1:].clamp(min=1e-30).log()).log()
        keys = shares.to(uniform.dtype).log() + gumbel
        rank: Tensor = keys.argsort(dim=-1, stable=True, descending=True).argsort(dim=-1)
        return (rank < set_size.clamp(min=1)) & (shares > 0)

    def class_stats(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Count true positives and predicted positives of each label.

        Returns:
            `(2, C)`.
        """
        predicted = self.decide(logits)
        return torch.stack([(predicted & labels).sum(0), predicted.sum(0)])

    def example_stats(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Mark the true positives and the predicted positives of each example.

        Returns:
            `(B, 2, C)`.
        """
        predicted = self.decide(logits)
        return torch.stack([predicted & labels, predicted], dim=1).long()

    def max_class_stats(self, class_counts: Tensor, num_examples: int) -> Tensor:
        """Return the largest true and predicted positives.

        Returns:
            `(2, C)`.
        """
        return torch.stack([class_counts, torch.full_like(class_counts, num_examples)])

    def score(
        self, class_stats: Tensor, class_counts: Tensor, label_mix: Tensor | None = None
    ) -> float:
        """Return micro F1: 2 TP / (predicted + actual), classes weighted by the label mix.

        Returns:
            F1, between 0 and 1.
        """
        if label_mix is None:
            share = torch.ones_like(class_counts).double()
        else:
            share = label_mix.double() / label_mix.sum().clamp(min=1)
        true_positives, predicted = class_stats
        denominator = ((predicted + class_counts) * share).sum()
        return float(_ratio((2 * true_positives * share).sum(), denominator))

    def extra_metrics(self, logits: Tensor, labels: Tensor) -> Params:
        """Return precision, recall and F1 by class, over all decisions and by example, and mAP.

        Returns:
            0-d tensors by the names in `EXTRA_METRICS`, and `"o_f1"`.
        """
        predicted = self.decide(logits)
        counts = (predicted & labels, predicted, labels)
        sums = {
            "c": [count.sum(0).double() for count in counts],
            "s": [count.sum(1).double() for count in counts],
            "o": [count.sum().double() for count in counts],
        }
        metrics = {}
        for prefix, (true_positives, positives, actual) in sums.items():
            metrics[f"{prefix}_p"] = _ratio(true_positives, positives).mean()
            metrics[f"{prefix}_r"] = _ratio(true_positives, actual).mean()
            metrics[f"{prefix}_f1"] = _ratio(2 * true_positives, positives + actual).mean()
        return metrics | {"map": mean_average_precision(logits, labels)}


def make_task(num_classes: int, multi_label: bool) -> Task:
    """Create the task of a data set.

    Args:
        num_classes: Number of classes.
        multi_label: Whether an example may have several labels.

    Returns:
        A `MultiLabel` or `SingleLabel` task.
    """
    return MultiLabel(num_classes) if multi_label else SingleLabel(num_classes)


def mean_average_precision(scores: Tensor, labels: Tensor) -> Tensor:
    """Average over the labels that occur: sum_n (R_n - R_(n-1)) P_n over falling thresholds.

    Args:
        scores: `(N, C)`; higher means more likely.
        labels: `(N, C)` booleans.

    Returns:
        A 0-d tensor.
    """
    order = scores.argsort(0, descending=True)
    ranked = scores.gather(0, order)
    true_positives = labels.gather(0, order).double().cumsum(0)
    place = torch.arange(1, len(scores) + 1, device=scores.device)[:, None]
    is_threshold = torch.ones_like(labels)
    is_threshold[:-1] = ranked[:-1] != ranked[1:]  # a threshold includes all equal scores
    previous = torch.where(is_threshold, true_positives, -1.0).cummax(0).values.roll(1, 0)
    previous = previous.clamp(min=0)
    previous[0] = 0
    num_positive = labels.sum(0)
    gains = (true_positives - previous) * true_positives / place
    average_precision = torch.where(is_threshold, gains, 0).sum(0) / num_positive.clamp(min=1)
    return average_precision.sum() / (num_positive > 0).sum().clamp(min=1)


def _target_shares(missing: Tensor, label_choice: LabelChoice) -> Tensor:
    """Return in which proportion to ask for labels: as they are missing, or alike."""
    shares = torch.ones_like(missing) if label_choice == "uniform" else missing
    return torch.where(shares.sum() == 0, torch.ones_like(shares), shares)


def _bernoulli_log_probs(logits: Tensor) -> Tensor:
    """Return log p and log (1 - p), `(..., 2)`."""
    return torch.stack([F.logsigmoid(logits), F.logsigmoid(-logits)], -1)


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Divide; 0 where the denominator is 0."""
    safe = torch.where(denominator > 0, denominator, 1)
    return torch.where(denominator > 0, numerator / safe, 0.0)


def _js(p: Tensor, q: Tensor) -> Tensor:
    middle = torch.logaddexp(p, q) - math.log(2)
    return (_kl(p, middle) + _kl(q, middle)) / 2


def _kl(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum(-1)
