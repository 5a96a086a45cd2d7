"""Client-level differential privacy: payloads clipped as a whole, Gaussian noise, accounting."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedcog.core import rng, tree
from fedcog.core.tree import State

CONSTANT_KEYS = ("weight", "count")
"""Parts of a payload that reveal nothing: with privacy, all clients have equal weights."""


@dataclass(frozen=True)
class Privacy:
    """The mechanism that protects a client's whole contribution to a run.

    A payload is scaled down to the L2 norm `clip`, which bounds its effect on a round's sum.
    Gaussian noise of standard deviation `noise` times `clip` is added to the sum (`central`: the
    server is trusted) or to every payload (`local`). Sums are divided by
    `clients_per_round`, however many clients answer.

    Attributes:
        noise_at: Where noise is added.
        clip: Clipping norm.
        noise: Noise multiplier.
        delta: Delta at which epsilon is reported.
        num_clients: Number of all clients.
        clients_per_round: Number of clients in a round.
        seed: Seed of the noise.
        simulated: Whether noise comes from the seed, so that runs can be repeated, instead of the
            operating system's entropy.
    """

    noise_at: Literal["central", "local"]
    clip: float
    noise: float
    delta: float
    num_clients: int
    clients_per_round: int
    seed: int
    simulated: bool = True

    def protect_payloads(self, payloads: State, client_ids: Tensor, round: int) -> State:
        """Clip stacked payloads and, with local privacy, add noise.

        Args:
            payloads: Payloads with a client axis.
            client_ids: `(K,)`.
            round: Current round, from 0.

        Returns:
            The payloads as they leave their clients.
        """
        private, constant = _split(payloads)
        flat = tree.flatten(private)
        squares = [
            value.double().square().reshape(len(value), -1).sum(1) for value in flat.values()
        ]
        norm = torch.stack(squares).sum(0).sqrt()
        factor = (self.clip / norm.clamp(min=1e-300)).clamp(max=1.0)
        for name, value in flat.items():
            clipped = value * factor.to(value.dtype).reshape(-1, *[1] * (value.dim() - 1))
            if self.noise_at == "local":
                clipped = self._add_noise(name, clipped, client_ids, round)
            flat[name] = clipped
        return tree.unflatten_like(private, flat) | constant

    def protect_sum(self, total: State, round: int) -> State:
        """Add noise to a sum, with central privacy, and fix the number of clients.

        Args:
            total: Sum of the payloads.
            round: Current round, from 0.

        Returns:
            The sum as the server may use it.
        """
        private, constant = _split(total)
        flat = tree.flatten(private)
        server = torch.zeros(1, dtype=torch.int64)
        if self.noise_at == "central":
            flat = {
                name: self._add_noise(name, value[None], server, round)[0]
                for name, value in flat.items()
            }
        counts = tree.apply(lambda value: torch.full_like(value, self.clients_per_round), constant)
        return tree.unflatten_like(private, flat) | counts

    def _add_noise(self, name: str, value: Tensor, client_ids: Tensor, round: int) -> Tensor:
        shape = tuple(value.shape[1:])
        if self.simulated:
            ids = client_ids.to(value.device)
            noise = rng.normal(self.seed, f"privacy/{name}", round, ids, shape)
        else:
            noise = rng.entropy((len(value), *shape)).to(value.device)
        return value + self.noise * self.clip * noise.to(value.dtype)

    def epsilon(self, num_rounds: int, max_participation: int) -> float:
        """Return epsilon after some rounds.

        Central privacy is about adding or removing one client. If a simulation samples the clients
        of a round without replacement, the sample is assumed secret, and privacy is about replacing
        one client by another. In a deployment all clients know the seed of the sampling, so
        sampling amplifies nothing.
        Local privacy is about replacing a client's data by any other.

        Args:
            num_rounds: Number of rounds.
            max_participation: Number of rounds of the client that took part most often.

        Returns:
            Epsilon; infinity without noise.
        """
        if not self.noise:
            return float("inf")
        if self.noise_at == "local":
            return _gaussian_epsilon(self.noise / 2, max_participation, self.delta)
        if not self._is_sample_secret:
            return _gaussian_epsilon(self.noise, max_participation, self.delta)
        return _sampled_epsilon(
            self.noise / 2, self.num_clients, self.clients_per_round, num_rounds, self.delta
        )

    @property
    def _is_sample_secret(self) -> bool:
        """Whether the clients of a round are a secret sample."""
        return self.simulated and self.clients_per_round < self.num_clients

    @property
    def neighboring(self) -> str:
        """The neighboring relation that epsilon refers to, in words."""
        if self.noise_at == "local":
            return "replacing a client's data by any other, toward the server"
        if self._is_sample_secret:
            return "replacing one client by another, if the sampled clients are secret"
        return "adding or removing one client"


def max_participation(sampled: Sequence[Sequence[int]]) -> int:
    """Return the number of rounds of the client that took part most often."""
    counts: dict[int, int] = {}
    for client_ids in sampled:
        for client_id in client_ids:
            counts[client_id] = counts.get(client_id, 0) + 1
    return max(counts.values(), default=0)


def _split(payload: State) -> tuple[State, State]:
    """Split a payload into what depends on a client's data and what is constant."""
    private = {name: part for name, part in payload.items() if name not in CONSTANT_KEYS}
    constant = {name: part for name, part in payload.items() if name in CONSTANT_KEYS}
    return private, constant


@functools.cache
def _gaussian_epsilon(noise: float, num_releases: int, delta: float) -> float:
    """Return epsilon of several Gaussian releases, which equal one release with less noise."""
    import dp_accounting

    if not num_releases:
        return 0.0
    return float(dp_accounting.get_epsilon_gaussian(noise / math.sqrt(num_releases), delta))


@functools.cache
def _sampled_epsilon(
    noise: float, num_clients: int, num_sampled: int, num_releases: int, delta: float
) -> float:
    """Return epsilon with clients sampled without replacement, at most that without sampling."""
    import dp_accounting
    from dp_accounting import rdp

    accountant = rdp.RdpAccountant(
        neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE
    )
    event = dp_accounting.SampledWithoutReplacementDpEvent(
        num_clients, num_sampled, dp_accounting.GaussianDpEvent(noise)
    )
    accountant.compose(dp_accounting.SelfComposedDpEvent(event, num_releases))
    return min(float(accountant.get_epsilon(delta)), _gaussian_epsilon(noise, num_releases, delta))
