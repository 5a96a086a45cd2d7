"""Client sampling: which clients take part in a round."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from fedcog.core import rng

LossOver = Literal["nothing", "all", "batch"]
"""Over which training examples candidates report their loss: none, all, or one batch."""


class ClientSampling(Protocol):
    """A sampling rule in two steps: candidates, and those of them that take part."""

    @property
    def loss_over(self) -> LossOver:
        """Which losses of the candidates `choose` needs."""

    def candidates(self, round: int) -> list[int]:
        """Return the candidates of a round, from 0, in ascending order."""

    def choose(self, candidates: Sequence[int], losses: Sequence[float]) -> list[int]:
        """Return the candidates that take part; called only if candidates report losses.

        Args:
            candidates: Client ids.
            losses: Their losses.

        Returns:
            Client ids in ascending order.
        """


@dataclass(frozen=True)
class Uniform:
    """Samples `count` of all clients uniformly, without replacement."""

    clients: int
    count: int
    seed: int
    loss_over: Literal["nothing"] = "nothing"

    def order(self, round: int) -> list[int]:
        """Return all clients in random order; the first `count` of them are the sample."""
        order: list[int] = rng.permutation(self.seed, "sample", round, self.clients).tolist()
        return order

    def candidates(self, round: int) -> list[int]:
        """Return a uniform sample."""
        return sorted(self.order(round)[: self.count])

    def choose(self, candidates: Sequence[int], losses: Sequence[float]) -> list[int]:
        """Return all candidates.

        Returns:
            Client ids in ascending order.
        """
        return list(candidates)


@dataclass(frozen=True)
class PowerOfChoice:
    """Power-of-choice (Cho et al., AISTATS 2022, algorithm 1): the candidates with highest loss.

    Candidates are sampled without replacement, in proportion to their number of examples. The
    chosen clients have equal weights, because sampling already favors large clients. Every
    candidate reports its own loss (over all examples: pow-d; over one batch: cpow-d), so it does
    not work under secure aggregation.
    """

    sizes: tuple[int, ...]
    count: int
    pool: int
    seed: int
    loss_over: LossOver = "all"

    def candidates(self, round: int) -> list[int]:
        """Return the first `pool` arrivals of exponential clocks whose rates are the sizes."""
        server = torch.zeros(1, dtype=torch.int64)
        uniform = rng.uniform(self.seed, "candidates", round, server, (len(self.sizes),))[0]
        arrival = -uniform.log() / torch.tensor(self.sizes, dtype=torch.float64)
        return sorted(arrival.argsort(stable=True)[: self.pool].tolist())

    def choose(self, candidates: Sequence[int], losses: Sequence[float]) -> list[int]:
        """Return those with the highest losses; NaN ranks highest, ties go to the lower id.

        Returns:
            Client ids in ascending order.
        """
        ranks = [math.inf if math.isnan(loss) else loss for loss in losses]
        ranked = sorted(zip(candidates, ranks, strict=True), key=lambda pair: (-pair[1], pair[0]))
        return sorted(client_id for client_id, _ in ranked[: self.count])
