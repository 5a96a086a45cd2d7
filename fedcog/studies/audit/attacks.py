"""Gradient inversion of one observed update, and how close it comes to the originals."""

import dataclasses
import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedcog.core import rng
from fedcog.models.checks import ModelError
from fedcog.studies.audit.inversion import AttackConfig, Knowledge, OnIteration, invert
from fedcog.studies.audit.matching import (
    Match,
    chance_recovery,
    label_recovery,
    match,
    squared_errors,
)
from fedcog.studies.audit.observation import (
    AuditCase,
    AuditedRun,
    Observation,
    ValueRange,
    observe,
    value_range,
)

MAX_INPUTS = 16
"""Number of inputs that an attack reconstructs, at most."""
MAX_NUMBERS = 2**20
"""Number of numbers in these inputs, at most: six images of 3x224x224."""
NUM_MEAN_IMAGES = 2000
"""Number of training examples whose mean is a baseline, at most."""
MAX_AVERAGED_NUMBERS = 2**26
"""Number of numbers in these examples, at most: 445 images of 3x224x224."""
BATCHNORM_ERROR = "more than 1 value per channel"
"""Words in torch's error about a batch that BatchNorm cannot normalize."""


@dataclasses.dataclass(frozen=True)
class InversionAttack:
    """The result of gradient inversion in one case.

    Attributes:
        case: The case in words, such as "1 step, 1 example".
        target: "client": one client's update; "sum": the sum of the round's updates.
        num_clients: Number of clients in the observed update.
        num_steps: Number of local steps.
        num_examples: Number of examples in all steps of all clients.
        num_inputs: Number of reconstructed inputs.
        psnr: Mean PSNR in dB over reconstructions, each assigned to an original of its own.
        best_psnr: PSNR of the best pair.
        baselines: Mean PSNR of guesses that ignore the update, assigned in the same way: the mean
            training input ("mean"), noise ("noise"), and test inputs ("others"), if there are any.
        cost: Cosine cost reached: 0 means that the simulated update is parallel to the observed.
        label_recovery: Fraction of the attacker's labels that are right; None if multi-label.
        label_chance: The same for random guesses.
        is_closed_form: Whether the input was computed from a linear layer, not optimized.
        seconds: Duration.
        problem: Why the attack was not possible; empty if it was.
        pictures: Originals and reconstructions as bytes, `(2, n, C, H, W)`; None for inputs that
            are not images.
        classes: Class of each shown original.
    """

    case: str
    target: str
    num_clients: int
    num_steps: int = 0
    num_examples: int = 0
    num_inputs: int = 0
    psnr: float = math.nan
    best_psnr: float = math.nan
    baselines: dict[str, float] = dataclasses.field(default_factory=dict)
    cost: float = math.nan
    label_recovery: float | None = None
    label_chance: float | None = None
    is_closed_form: bool = False
    seconds: float = 0.0
    problem: str = ""
    pictures: Tensor | None = dataclasses.field(default=None, repr=False, compare=False)
    classes: tuple[str, ...] = ()

    @property
    def baseline(self) -> float:
        """The highest PSNR of a guess that ignores the update."""
        return max(self.baselines.values(), default=math.nan)

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers, as audit.json has them."""
        left_out = ("pictures", "classes")
        fields = dataclasses.fields(self)
        return {
            field.name: getattr(self, field.name) for field in fields if field.name not in left_out
        }


def attack(
    audited: AuditedRun,
    case: AuditCase,
    client_ids: list[int],
    config: AttackConfig,
    empty: InversionAttack,
    on_iteration: OnIteration,
) -> InversionAttack:
    """Observe an update, reconstruct inputs, and compare them with the originals.

    Args:
        audited: The run.
        case: How much the clients train.
        client_ids: The clients whose updates are summed.
        config: How the attacker optimizes inputs.
        empty: The result before the attack: names of case and target.
        on_iteration: Called now and then with (iterations, cosine cost).

    Returns:
        The result; with `problem` if the attack is not possible.
    """
    started = time.perf_counter()
    prepared = audited.prepared
    try:
        seen = observe(audited, case, client_ids, is_sum=empty.target == "sum")
        size = math.prod(prepared.dataset.input_shape)
        num_inputs = min(seen.num_examples, MAX_INPUTS, max(MAX_NUMBERS // size, 1))
        if not all(bool(value.isfinite().all()) for value in seen.gradient.values()):
            return dataclasses.replace(empty, problem="The update is not finite.")
        values = value_range(prepared)
        found = invert(_knowledge(audited, seen, values), num_inputs, config, on_iteration)
    except (ModelError, ValueError) as error:
        if BATCHNORM_ERROR in str(error):
            error = ModelError("BatchNorm cannot train on a single value.")
        elif isinstance(error, ValueError):
            raise
        return dataclasses.replace(empty, problem=str(error))
    compare = _Comparison(audited, seen, values)
    matched = compare.match(found.inputs)
    return dataclasses.replace(
        empty,
        num_steps=seen.num_steps,
        num_examples=seen.num_examples,
        num_inputs=num_inputs,
        psnr=matched.mean,
        best_psnr=matched.best,
        baselines=compare.baselines(num_inputs, config.seed),
        cost=found.cost,
        is_closed_form=found.is_closed_form,
        **compare.labels(found.labels, config.seed),
        **compare.pictures(found.inputs, matched),
        seconds=time.perf_counter() - started,
    )


def _knowledge(audited: AuditedRun, seen: Observation, values: ValueRange) -> Knowledge:
    """Return what the attacker knows: everything but the clients' examples."""
    prepared = audited.prepared
    return Knowledge(
        model=prepared.model,
        params=seen.params,
        buffers=seen.buffers,
        multi_label=prepared.task.multi_label,
        gradient=seen.gradient,
        low=values.low,
        high=values.high,
        is_image=len(prepared.dataset.input_shape) == 3,
    )


class _Comparison(NamedTuple):
    """Compares guesses with what clients trained on."""

    audited: AuditedRun
    seen: Observation
    values: ValueRange

    def match(self, inputs: Tensor) -> Match:
        """Assign inputs to originals."""
        originals = self.seen.originals

        def _some(rows: slice) -> Tensor:
            return self.values.to_unit(originals.inputs(rows))

        return match(squared_errors(self.values.to_unit(inputs), len(originals.indices), _some))

    def baselines(self, num_inputs: int, seed: int) -> dict[str, float]:
        """Return the PSNR of guesses that ignore the update.

        Args:
            num_inputs: Number of guesses of each kind.
            seed: Seed of the guesses.

        Returns:
            PSNR in dB, by the kind of guess.
        """
        data = self.audited.prepared.data
        shape = self.audited.prepared.dataset.input_shape
        num_averaged = min(NUM_MEAN_IMAGES, max(MAX_AVERAGED_NUMBERS // math.prod(shape), 1))
        order = rng.permutation(seed, "audit/mean", 0, len(data.train_y))[:num_averaged]
        mean = data.to_inputs(data.train_x[order.to(data.train_x.device)]).mean(0)
        zero = torch.zeros(1, dtype=torch.int64)
        uniform = rng.uniform(seed, "audit/noise", 0, zero, (num_inputs, *shape))[0].to(mean)
        guesses = {
            "mean": mean.expand(num_inputs, *shape),
            "noise": self.values.low + uniform * (self.values.high - self.values.low),
        }
        if len(data.test_y):
            order = rng.permutation(seed, "audit/others", 0, len(data.test_y))[:num_inputs]
            guesses["others"] = data.to_inputs(data.test_x[order.to(data.test_x.device)])
        return {name: self.match(guess).mean for name, guess in guesses.items()}

    def labels(self, labels: Tensor, seed: int) -> dict[str, Any]:
        """Return how many labels are right, and how many would be by chance.

        Args:
            labels: Inferred labels, `(N,)`.
            seed: Seed of the random guesses.

        Returns:
            Both as shares; empty for multi-label examples.
        """
        task = self.audited.prepared.task
        if task.multi_label:
            return {}
        counts = task.class_counts(self.seen.originals.labels).cpu()
        return {
            "label_recovery": label_recovery(labels, counts),
            "label_chance": chance_recovery(counts, len(labels), seed),
        }

    def pictures(self, inputs: Tensor, matched: Match) -> dict[str, Any]:
        """Return originals beside reconstructions, if inputs are images.

        Args:
            inputs: Reconstructions, `(N, ...)`.
            matched: Which originals they are assigned to.

        Returns:
            Images and their labels; empty for other inputs.
        """
        prepared = self.audited.prepared
        if len(prepared.dataset.input_shape) != 3:
            return {}
        originals = self.seen.originals.inputs(matched.columns)
        both = torch.stack([originals, inputs[matched.rows]])
        labels = prepared.data.train_y[self.seen.originals.indices[matched.columns]]
        return {
            "pictures": prepared.data.to_images(both).cpu(),
            "classes": tuple(_class_names(prepared.dataset.classes, labels)),
        }


def _class_names(classes: Sequence[str], labels: Tensor) -> list[str]:
    if labels.dim() == 1:
        return [str(classes[label]) for label in labels.tolist()]
    return [
        " + ".join(str(classes[label]) for label in row.nonzero()[:, 0].tolist()) for row in labels
    ]
