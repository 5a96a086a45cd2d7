"""What a label means: how outputs are scored, compared and asked for."""

import math
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

Labels = Literal["complementary", "uniform"]


class Task(Protocol):
    """The meaning of a label, for one client and with no client axis."""

    classes: int

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The task-driven loss, one number an example."""

    def distil(self, teacher: Tensor, student: Tensor) -> Tensor:
        """How far the student's outputs are from the teacher's, one number an example."""

    def decide(self, logits: Tensor) -> Tensor:
        """The labels a model's outputs amount to."""

    def divergence(self, one: Tensor, other: Tensor) -> Tensor:
        """How much two models disagree, in [0, 1], one number an example."""

    def counts(self, labels: Tensor) -> Tensor:
        """How many examples there are of each class."""

    def missing(self, counts: Tensor) -> Tensor:
        """How many examples of each class a client lacks to be balanced."""

    def targets(self, counts: Tensor, number: int, labels: Labels) -> Tensor:
        """`number` labels to generate inputs for, given a client's counts."""

    def hits(self, logits: Tensor, labels: Tensor) -> Tensor:
        """How many examples of each class are right."""


class SingleLabel:
    """Each example has exactly one of `classes` labels."""

    def __init__(self, classes: int) -> None:
        self.classes = classes

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy."""
        return F.cross_entropy(logits, labels, reduction="none")

    def distil(self, teacher: Tensor, student: Tensor) -> Tensor:
        """KL(p_teacher || p_student) (eq. 3)."""
        return _kl(teacher.log_softmax(-1), student.log_softmax(-1))

    def decide(self, logits: Tensor) -> Tensor:
        """The most likely class."""
        return logits.argmax(-1)

    def divergence(self, one: Tensor, other: Tensor) -> Tensor:
        """Jensen-Shannon divergence (eq. 2) in natural logarithms: at most ln 2.

        Computed from log-probabilities throughout, so that it stays finite, with a finite gradient, where both models
        are certain.
        """
        p, q = one.log_softmax(-1), other.log_softmax(-1)
        middle = torch.logaddexp(p, q) - math.log(2)
        return (_kl(p, middle) + _kl(q, middle)) / 2

    def counts(self, labels: Tensor) -> Tensor:
        """Label counts, int64."""
        return torch.bincount(labels, minlength=self.classes)

    def missing(self, counts: Tensor) -> Tensor:
        """max(d) - d (appendix A.1.1)."""
        return counts.max() - counts

    def targets(self, counts: Tensor, number: int, labels: Labels) -> Tensor:
        """Labels in proportion to what is missing, or to one; exactly `number` by largest remainder.

        A client that lacks nothing asks for all classes alike.
        """
        share = self.missing(counts)
        if labels == "uniform":
            share = torch.ones_like(share)
        share = torch.where(share.sum() == 0, torch.ones_like(share), share)
        quota, rest = number * share // share.sum(), number * share % share.sum()
        rank = (-rest).argsort(stable=True).argsort()
        last = (quota + (rank < number - quota.sum())).cumsum(0)
        return (torch.arange(number, device=counts.device)[:, None] >= last).sum(1)

    def hits(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Correct predictions of each class."""
        chosen = F.one_hot(labels, self.classes)
        return (chosen * (self.decide(logits) == labels)[:, None]).sum(0)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum(-1)
