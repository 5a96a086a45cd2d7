"""What a label means: how outputs are scored, compared and asked for."""

import math
from collections.abc import Mapping
from typing import ClassVar, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fedcog.tree import Params

Labels = Literal["complementary", "uniform"]
Measure = Literal["accuracy", "o_f1"]
"""What a model is judged by first: the share of right answers or, of several labels, F1 over all decisions."""
MEASURES: dict[Measure, str] = {"accuracy": "accuracy", "o_f1": "O-F1"}
MARKS = ("c_p", "c_r", "c_f1", "o_p", "o_r", "s_p", "s_r", "s_f1", "map")
"""What else is told of several labels: precision, recall and F1 by class, over all decisions and by example, and mean
average precision."""
SCORES = (*(f"{kind}{name}" for kind in ("", "personal_", "validation_") for name in MEASURES), *MARKS)
"""What a round's line may tell of how good models are: shares, all of them."""


def measure_of(line: Mapping[str, object]) -> Measure:
    """The measure that a round's line, or what is told of a client, goes by."""
    return next((name for name in MEASURES if line.get(name) is not None), "accuracy")


class Task(Protocol):
    """The meaning of a label, for one client and with no client axis."""

    classes: int
    measure: ClassVar[Measure]
    several: ClassVar[bool]  # may an example have several labels?

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

    def sizes(self, labels: Tensor) -> Tensor:
        """How many examples have no label, one, two, and so on."""

    def targets(self, counts: Tensor, sizes: Tensor, labels: Labels, chance: Tensor) -> Tensor:
        """Labels to generate inputs for, given a client's counts and sizes, and [number, 1 + classes] uniform draws."""

    def hits(self, logits: Tensor, labels: Tensor) -> Tensor:
        """How outputs and labels agree, class by class [..., classes]: to be added up over examples."""

    def most(self, totals: Tensor, examples: int) -> Tensor:
        """The largest hits there can be on so many examples, of each class so many."""

    def score(self, hits: Tensor, totals: Tensor, mix: Tensor | None = None) -> float:
        """The measure, from the hits on a test set with such totals; as if that had the label mix of such counts."""

    def marks(self, logits: Tensor, labels: Tensor) -> Params:
        """What else there is to be known of a model, from its outputs on a whole test set."""


class SingleLabel:
    """Each example has exactly one of `classes` labels."""

    measure: ClassVar[Measure] = "accuracy"
    several: ClassVar[bool] = False

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
        return _js(one.log_softmax(-1), other.log_softmax(-1))

    def counts(self, labels: Tensor) -> Tensor:
        """Label counts, int64."""
        return torch.bincount(labels, minlength=self.classes)

    def missing(self, counts: Tensor) -> Tensor:
        """max(d) - d (appendix A.1.1)."""
        return counts.max() - counts

    def sizes(self, labels: Tensor) -> Tensor:
        """All have one."""
        return torch.tensor([0, len(labels)], device=labels.device)

    def targets(self, counts: Tensor, sizes: Tensor, labels: Labels, chance: Tensor) -> Tensor:
        """Labels in proportion to what is missing, or to one, by largest remainder and not by chance.

        A client that lacks nothing asks for all classes alike.
        """
        number, share = len(chance), _wanted(self.missing(counts), labels)
        quota, rest = number * share // share.sum(), number * share % share.sum()
        rank = (-rest).argsort(stable=True).argsort()
        last = (quota + (rank < number - quota.sum())).cumsum(0)
        return (torch.arange(number, device=counts.device)[:, None] >= last).sum(1)

    def hits(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Correct predictions of each class."""
        chosen = F.one_hot(labels, self.classes)
        return (chosen * (self.decide(logits) == labels)[:, None]).sum(0)

    def most(self, totals: Tensor, examples: int) -> Tensor:
        """All of them."""
        return totals

    def score(self, hits: Tensor, totals: Tensor, mix: Tensor | None = None) -> float:
        """The share of right answers; with the label mix p it is sum_c hits_c p_c / sum_c totals_c p_c."""
        if mix is None:
            return int(hits.sum()) / int(totals.sum())
        share = mix.double() / mix.sum()
        return float((hits * share).sum() / (totals * share).sum())

    def marks(self, logits: Tensor, labels: Tensor) -> Params:
        """Nothing."""
        return {}


class MultiLabel:
    """Each example has any number of `classes` labels, given as a row of True and False."""

    measure: ClassVar[Measure] = "o_f1"
    several: ClassVar[bool] = True

    def __init__(self, classes: int) -> None:
        self.classes = classes

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Binary cross-entropy, mean over labels."""
        return F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="none").mean(-1)

    def distil(self, teacher: Tensor, student: Tensor) -> Tensor:
        """KL of Bernoulli distributions, sum over labels."""
        return _kl(_both(teacher), _both(student)).sum(-1)

    def decide(self, logits: Tensor) -> Tensor:
        """The labels that are more likely than not."""
        return logits > 0

    def divergence(self, one: Tensor, other: Tensor) -> Tensor:
        """Jensen-Shannon divergence of Bernoulli distributions, mean over labels: at most ln 2."""
        return _js(_both(one), _both(other)).mean(-1)

    def counts(self, labels: Tensor) -> Tensor:
        """How many examples have each label, int64."""
        return labels.sum(0)

    def missing(self, counts: Tensor) -> Tensor:
        """max(d) - d."""
        return counts.max() - counts

    def sizes(self, labels: Tensor) -> Tensor:
        """From no label to all of them."""
        return torch.bincount(labels.sum(-1), minlength=self.classes + 1)

    def targets(self, counts: Tensor, sizes: Tensor, labels: Labels, chance: Tensor) -> Tensor:
        """As many labels as the client's own examples have, but one at least; which, in proportion to what is missing.

        They are drawn without replacement: the largest of log(share) + Gumbel noise.
        """
        share = _wanted(self.missing(counts), labels)
        number = (chance[:, :1] * sizes.sum() >= sizes.cumsum(0)).sum(-1, keepdim=True).clamp(min=1)
        keys = share.to(chance.dtype).log() - (-chance[:, 1:].clamp(min=1e-30).log()).log()
        rank: Tensor = keys.argsort(dim=-1, stable=True, descending=True).argsort(dim=-1)
        return (rank < number) & (share > 0)

    def hits(self, logits: Tensor, labels: Tensor) -> Tensor:
        """[2, classes]: how often each label is found rightly, and how often at all."""
        found = self.decide(logits)
        return torch.stack([(found & labels).sum(0), found.sum(0)])

    def most(self, totals: Tensor, examples: int) -> Tensor:
        """Each label as often as it is there, and at every example."""
        return torch.stack([totals, torch.full_like(totals, examples)])

    def score(self, hits: Tensor, totals: Tensor, mix: Tensor | None = None) -> float:
        """F1 over all decisions (micro): 2 TP / (found + there), each class counted by its share of the label mix."""
        share = torch.ones_like(totals).double() if mix is None else mix.double() / mix.sum().clamp(min=1)
        right, found = hits
        return float(_ratio((2 * right * share).sum(), ((found + totals) * share).sum()))

    def marks(self, logits: Tensor, labels: Tensor) -> Params:
        """Precision, recall and F1 by class (c_), over all decisions (o_) and by example (s_), and mean precision."""
        found = self.decide(logits)
        right, claimed, there = found & labels, found, labels
        by = {"c": 0, "s": 1}
        sums = {name: [part.sum(axis).double() for part in (right, claimed, there)] for name, axis in by.items()}
        sums["o"] = [part.sum().double() for part in (right, claimed, there)]
        marks = {}
        for name, (hit, said, true) in sums.items():
            marks[f"{name}_p"] = _ratio(hit, said).mean()
            marks[f"{name}_r"] = _ratio(hit, true).mean()
            marks[f"{name}_f1"] = _ratio(2 * hit, said + true).mean()
        return marks | {"map": mean_precision(logits, labels)}


def task_of(classes: int, several: bool) -> Task:
    """What a label means where an example has one of so many classes, or several."""
    return MultiLabel(classes) if several else SingleLabel(classes)


def mean_precision(scores: Tensor, labels: Tensor) -> Tensor:
    """The mean over labels that occur of their average precision: sum_n (R_n - R_(n-1)) P_n over falling thresholds."""
    order = scores.argsort(0, descending=True)
    ranked, right = scores.gather(0, order), labels.gather(0, order).double()
    hits, place = right.cumsum(0), torch.arange(1, len(scores) + 1, device=scores.device)[:, None]
    last = torch.ones_like(labels)
    last[:-1] = ranked[:-1] != ranked[1:]  # a threshold lets in all that are equal
    before = torch.where(last, hits, -1.0).cummax(0).values.roll(1, 0).clamp(min=0)
    before[0] = 0
    there = labels.sum(0)
    each = (torch.where(last, (hits - before) * hits / place, 0)).sum(0) / there.clamp(min=1)
    return each.sum() / (there > 0).sum().clamp(min=1)


def _wanted(missing: Tensor, labels: Labels) -> Tensor:
    """In what proportion labels are asked for: as they are missing or, if nothing is, alike."""
    share = torch.ones_like(missing) if labels == "uniform" else missing
    return torch.where(share.sum() == 0, torch.ones_like(share), share)


def _both(logits: Tensor) -> Tensor:
    """The logarithms of the chances of yes and of no."""
    return torch.stack([F.logsigmoid(logits), F.logsigmoid(-logits)], -1)


def _ratio(part: Tensor, whole: Tensor) -> Tensor:
    """A share of something; of nothing it is none."""
    return torch.where(whole > 0, part / torch.where(whole > 0, whole, 1), 0.0)


def _js(p: Tensor, q: Tensor) -> Tensor:
    middle = torch.logaddexp(p, q) - math.log(2)
    return (_kl(p, middle) + _kl(q, middle)) / 2


def _kl(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum(-1)
