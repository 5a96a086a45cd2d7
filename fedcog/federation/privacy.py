"""Differential privacy of all that a client sends: clipped as a whole, counted as one, blurred by Gaussian noise."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedcog import streams, tree
from fedcog.tree import State

CONSTANT = ("weight", "count")  # what every client sends alike, and so tells nothing


@dataclass(frozen=True)
class Privacy:
    """What protects one client's whole contribution to a run.

    Its payload is scaled down to the length `clip`, and so moves a round's sum by no more. Noise of standard deviation
    `noise` times `clip` goes onto the sum ("central": the server is trusted), or onto every payload ("local"). Sums are
    divided by `count`, however many clients answered. Noise comes from the seed, so that a run can be repeated and its
    privacy is but simulated, or from the operating system.
    """

    where: Literal["central", "local"]
    clip: float
    noise: float
    delta: float
    clients: int
    count: int  # of clients in a round
    seed: int
    simulated: bool = True

    def sent(self, payload: State, clients: Tensor, round: int) -> State:
        """Stacked payloads as they leave their clients."""
        own, rest = _apart(payload)
        flat = tree.flatten(own)
        square = torch.stack([value.double().square().reshape(len(value), -1).sum(1) for value in flat.values()]).sum(0)
        factor = (self.clip / square.sqrt().clamp(min=1e-300)).clamp(max=1.0)
        for name, value in flat.items():
            bounded = value * factor.to(value.dtype).reshape(-1, *[1] * (value.dim() - 1))
            flat[name] = self._noisy(name, bounded, clients, round) if self.where == "local" else bounded
        return tree.filled(own, flat) | rest

    def released(self, total: State, round: int) -> State:
        """A sum of payloads as it may be used, with the count of clients that was fixed beforehand."""
        own, rest = _apart(total)
        flat, nobody = tree.flatten(own), torch.zeros(1, dtype=torch.int64)
        if self.where == "central":
            flat = {name: self._noisy(name, value[None], nobody, round)[0] for name, value in flat.items()}
        return tree.filled(own, flat) | tree.apply(lambda value: torch.full_like(value, self.count), rest)

    def _noisy(self, name: str, value: Tensor, clients: Tensor, round: int) -> Tensor:
        shape = tuple(value.shape[1:])
        if self.simulated:
            drawn = streams.normal(self.seed, f"privacy/{name}", round, clients.to(value.device), shape)
        else:
            drawn = streams.entropy((len(value), *shape)).to(value.device)
        return value + self.noise * self.clip * drawn.to(value.dtype)

    def spent(self, rounds: int, most: int) -> float:
        """Epsilon after so many rounds, of which the client that took part most often took part in `most`.

        Central: a client more or less. Where a simulation draws a round's clients, without replacement, nobody is taken
        to know whom it drew, and it is one client in place of another; real clients are drawn by a seed that all know,
        which hides nobody. Local: any data in place of a client's.
        """
        if not self.noise:
            return float("inf")
        if self.where == "local":
            return _gaussian(self.noise / 2, most, self.delta)
        if not self._hidden:
            return _gaussian(self.noise, most, self.delta)
        return _sampled(self.noise / 2, self.clients, self.count, rounds, self.delta)

    @property
    def _hidden(self) -> bool:
        """Does nobody know who takes part?"""
        return self.simulated and self.count < self.clients

    @property
    def words(self) -> str:
        """What epsilon is about."""
        about = {
            "local": "any data in place of a client's, towards the server",
            "central": "one client in place of another, if nobody knows whose turn it is"
            if self._hidden
            else "a client more or less",
        }
        return about[self.where]


def takes_part_most(chosen: Sequence[Sequence[int]]) -> int:
    """How often the client took part that did so most often, given who was chosen in each round."""
    often: dict[int, int] = {}
    for clients in chosen:
        for client in clients:
            often[client] = often.get(client, 0) + 1
    return max(often.values(), default=0)


def _apart(payload: State) -> tuple[State, State]:
    """What of a payload may tell of a client, and what does not."""
    own = {name: part for name, part in payload.items() if name not in CONSTANT}
    return own, {name: part for name, part in payload.items() if name in CONSTANT}


@functools.cache
def _gaussian(noise: float, times: int, delta: float) -> float:
    """Epsilon of so many Gaussian releases, whose noise is so many times what one client can change.

    Together they are exactly one release with less noise.
    """
    import dp_accounting

    return float(dp_accounting.get_epsilon_gaussian(noise / math.sqrt(times), delta)) if times else 0.0


@functools.cache
def _sampled(noise: float, population: int, sample: int, times: int, delta: float) -> float:
    """The same where each release is of some clients only, drawn without replacement; never more than without."""
    import dp_accounting
    from dp_accounting import rdp

    accountant = rdp.RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE)
    event = dp_accounting.SampledWithoutReplacementDpEvent(population, sample, dp_accounting.GaussianDpEvent(noise))
    accountant.compose(dp_accounting.SelfComposedDpEvent(event, times))
    return min(float(accountant.get_epsilon(delta)), _gaussian(noise, times, delta))
