"""Random numbers within a local step, keyed by (seed, round, client, step).

They are the same for one client alone, for clients at once (vmap), in CUDA graphs, in worker
processes and at remote nodes. Dropout masks and the user's augmentation draw from them.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedcog.core import rng
from fedcog.core.integers import ceil_div

PURPOSE = "dropout"
"""Purpose of the random numbers of a step."""
MAX_CALLS = 2**16
"""Number of draws of a stream in one step."""
AUGMENTATION_STREAM = 2
"""Stream of the user's augmentation; 0 and 1 are those of dropout."""


class StepKey(NamedTuple):
    """What the random numbers of a step depend on. All tensors are int64 and on one device.

    Attributes:
        seed_words: Two 32-bit words, derived from the run's seed, `(2,)`.
        round: Current round, 0-d.
        client_id: The client, 0-d.
        step: Current local step, 0-d.
        stream: 0 for dropout in the pass over the client's own examples, 1 for dropout in further
            passes of the step, 2 for augmentation.
    """

    seed_words: Tensor
    round: Tensor
    client_id: Tensor
    step: Tensor
    stream: int = 0


def seed_words(seed: int) -> Tensor:
    """Derive the words of a `StepKey` from a run's seed.

    Args:
        seed: The seed.

    Returns:
        `(2,)`, int64.
    """
    return torch.tensor(rng.key(seed, PURPOSE))


def trial_key(device: torch.device) -> StepKey:
    """Return a key for passes whose random numbers do not matter.

    Args:
        device: Device of the pass.

    Returns:
        The key.
    """
    zero = torch.zeros((), dtype=torch.int64, device=device)
    return StepKey(torch.zeros(2, dtype=torch.int64, device=device), zero, zero, zero)


class KeyedRandom:
    """Draws random tensors for one client and one local step; each call draws new numbers.

    Attributes:
        num_calls: Number of draws so far.
    """

    def __init__(self, key: StepKey, is_mapped: bool = False) -> None:
        """Create the source.

        Args:
            key: What the numbers depend on.
            is_mapped: Whether vmap maps the step over clients, or a graph records it.
        """
        self.num_calls = 0
        self._key = key
        self._use_numpy = not is_mapped and key.step.device.type == "cpu"

    def words(self, *shape: int | Sequence[int]) -> Tensor:
        """Draw 32-bit words.

        Args:
            *shape: Shape of the result, as numbers or as one sequence.

        Returns:
            int64, from 0 to 2**32 - 1.
        """
        sizes = _sizes(shape)
        count = math.prod(sizes)
        return self._draw(ceil_div(count, 4)).flatten()[:count].reshape(sizes)

    def uniform(self, *shape: int | Sequence[int]) -> Tensor:
        """Draw uniform numbers, as `torch.rand` does.

        Args:
            *shape: Shape of the result, as numbers or as one sequence.

        Returns:
            float32, from 0 to below 1: multiples of 2**-24, which float32 holds exactly.
        """
        return (self.words(*shape) >> 8).float() * 2.0**-24

    def normal(self, *shape: int | Sequence[int]) -> Tensor:
        """Draw standard normal numbers.

        Args:
            *shape: Shape of the result, as numbers or as one sequence.

        Returns:
            float32.
        """
        sizes = _sizes(shape)
        count = math.prod(sizes)
        drawn = rng.box_muller(self._draw(ceil_div(count, 4)))
        return drawn.flatten()[:count].reshape(sizes).float()

    def integers(self, below: int, *shape: int | Sequence[int]) -> Tensor:
        """Draw integers, each equally likely to within `below / 2**32`.

        Args:
            below: Exclusive upper bound.
            *shape: Shape of the result, as numbers or as one sequence.

        Returns:
            int64, from 0 to `below - 1`.
        """
        return rng.integers(self.words(*shape), below)

    def bernoulli(self, probability: float, *shape: int | Sequence[int]) -> Tensor:
        """Draw True with a probability.

        Args:
            probability: Probability of True, between 0 and 1.
            *shape: Shape of the result, as numbers or as one sequence.

        Returns:
            Booleans.

        Raises:
            ValueError: If the probability is not between 0 and 1.
        """
        if not 0 <= probability <= 1:
            raise ValueError(f"a probability lies in [0, 1], and this is {probability}")
        return self.words(*shape) < round(probability * 2**32)

    def _draw(self, count: int) -> Tensor:
        """Draw 32-bit words, `(count, 4)`."""
        assert self.num_calls < MAX_CALLS
        key = self._key
        call = key.stream * MAX_CALLS + self.num_calls
        self.num_calls += 1
        index = torch.arange(count, device=key.step.device)
        if self._use_numpy:
            low, high = key.seed_words.tolist()
            step, round, client_id = (
                part.expand(count) for part in (key.step, key.round, key.client_id)
            )
            drawn = rng.philox((low, high ^ call), (index, step, round, client_id))
            return torch.stack(drawn, dim=-1)
        # Torch's compiler would multiply a plain arange by Philox's constants in 32 bits.
        index = index + (key.step - key.step)
        # Tensors as keys: stacked runs differ in seed.
        words = (key.seed_words[0], key.seed_words[1] ^ call)
        parts = rng.philox_rounds(words, index, key.step, key.round, key.client_id)
        return torch.stack(parts, dim=-1)


def _sizes(shape: tuple[int | Sequence[int], ...]) -> tuple[int, ...]:
    """Return a shape that was given as numbers, or as one sequence."""
    if len(shape) == 1 and isinstance(shape[0], Sequence):
        return tuple(shape[0])
    return tuple(shape)  # type: ignore[arg-type]
