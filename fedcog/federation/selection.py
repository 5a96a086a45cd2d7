"""Who takes part in a round."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from fedcog import streams

Asked = Literal["nothing", "all", "batch"]


class Selection(Protocol):
    """A rule by which a round's clients are chosen, in two steps: who comes into question, and who of them it is."""

    @property
    def asks(self) -> Asked:
        """Over what the candidates must tell the global model's loss: nothing, all their examples, or one batch."""

    def candidates(self, round: int) -> list[int]:
        """Who comes into question, in order of their numbers."""

    def choose(self, candidates: Sequence[int], losses: Sequence[float]) -> list[int]:
        """Who of them takes part, in order of their numbers; `losses` is empty where nothing was asked."""


@dataclass(frozen=True)
class Uniform:
    """`count` of all clients, each as likely as any other."""

    clients: int
    count: int
    seed: int
    asks: Literal["nothing"] = "nothing"

    def candidates(self, round: int) -> list[int]:
        """A random handful."""
        return sorted(streams.permutation(self.seed, "sample", round, self.clients)[: self.count].tolist())

    def choose(self, candidates: Sequence[int], losses: Sequence[float]) -> list[int]:
        """All of them."""
        return list(candidates)


@dataclass(frozen=True)
class PowerOfChoice:
    """Power-of-choice (Cho et al., AISTATS 2022, algorithm 1): of some candidates, those with the highest losses.

    Candidates are drawn without replacement, in proportion to their examples; the clients chosen are averaged alike,
    since their sizes have acted already. Every candidate tells its loss (over all its examples: pow-d; over one batch:
    cpow-d), so sums are not enough for it.
    """

    sizes: tuple[int, ...]
    count: int
    pool: int
    seed: int
    asks: Asked = "all"

    def candidates(self, round: int) -> list[int]:
        """The first `pool` to arrive in a race whose speeds are the sizes: a draw without replacement."""
        nobody = torch.zeros(1, dtype=torch.int64)
        chance = streams.uniform(self.seed, "candidates", round, nobody, (len(self.sizes),))[0]
        arrival = -chance.log() / torch.tensor(self.sizes, dtype=torch.float64)
        return sorted(arrival.argsort(stable=True)[: self.pool].tolist())

    def choose(self, candidates: Sequence[int], losses: Sequence[float]) -> list[int]:
        """The highest losses; what is no number counts as highest, and of equals the lower number comes first."""
        told = [math.inf if math.isnan(loss) else loss for loss in losses]
        ranked = sorted(zip(candidates, told, strict=True), key=lambda pair: (-pair[1], pair[0]))
        return sorted(client for client, _ in ranked[: self.count])
