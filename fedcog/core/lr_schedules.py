"""Learning rates as functions of the round."""

import math
from dataclasses import dataclass
from typing import Literal

ScheduleKind = Literal["exponential", "constant", "step", "cosine", "linear"]
"""Rules by which a learning rate changes over rounds."""


@dataclass(frozen=True)
class LRSchedule:
    """A factor on a learning rate, as a pure function of the round.

    After `warmup` rounds, in which the factor rises linearly to 1, n rounds later it is:

    - exponential: `decay`^n
    - constant: 1
    - step: `decay`^floor(n / `step`)
    - cosine: `final` + (1 - `final`) (1 + cos(pi t)) / 2
    - linear: 1 - (1 - `final`) t

    where t rises from 0 to 1 in round `horizon`, counted from 1, and stays there.

    Attributes:
        kind: The rule.
        decay: Factor per round, or per step.
        step: Number of rounds between steps.
        final: Factor from round `horizon` on.
        warmup: Number of rounds of warm-up.
        horizon: Number of rounds over which the learning rate decays, warm-up included.
    """

    kind: ScheduleKind = "exponential"
    decay: float = 1.0
    step: int = 0
    final: float = 1.0
    warmup: int = 0
    horizon: int = 1

    @property
    def is_constant(self) -> bool:
        """Whether the factor is 1 in all rounds."""
        is_flat = self.kind == "constant" or (self.kind == "exponential" and self.decay == 1)
        return is_flat and not self.warmup

    @property
    def uses_horizon(self) -> bool:
        """Whether the factor depends on `horizon`."""
        return self.kind in ("cosine", "linear")

    def factor(self, round: int) -> float:
        """Return the factor in a round, from 0."""
        if round < self.warmup:
            return (round + 1) / (self.warmup + 1)
        elapsed = round - self.warmup
        if self.kind == "exponential":
            return self.decay**elapsed
        if self.kind == "step":
            return self.decay ** (elapsed // self.step)
        if self.kind == "constant":
            return 1.0
        duration = max(self.horizon - 1 - self.warmup, 1)
        left = 1 - min(elapsed / duration, 1.0)
        if self.kind == "cosine":
            left = (1 - math.cos(math.pi * left)) / 2
        return self.final + (1 - self.final) * left

    def faults(self, prefix: str = "") -> list[str]:
        """Return what is wrong with the settings of the schedule.

        Args:
            prefix: Beginning of the names of the settings: "" or "server_".

        Returns:
            Messages with remedies.
        """
        name = f"{prefix}lr_schedule"
        flag = f"--{prefix.replace('_', '-')}lr"
        found = []
        if self.kind == "step" and not self.step:
            found.append(f"{name} step needs the rounds between its steps: set --lr-step 10.")
        if self.kind == "step" and self.decay == 1:
            found.append(f"{name} step needs the factor of its steps: set {flag}-decay 0.1.")
        if self.uses_horizon and self.warmup and self.warmup >= self.horizon - 1:
            found.append(
                f"{prefix}lr_warmup {self.warmup} leaves no rounds to decay in until round "
                f"{self.horizon}: lower {flag}-warmup."
            )
        return found


CONSTANT = LRSchedule()
"""The schedule that changes nothing."""
