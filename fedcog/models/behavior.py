"""What a user's network and augmentation compute on fixed inputs.

A checkpoint records it, so that a run does not resume with others. Unlike source code it also shows
what code reads from elsewhere, and it does not change when code is only moved or written anew.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedcog.models.functional import Model
from fedcog.models.ops.keyed_random import trial_key

Behavior = list[float]
"""Some numbers that depend on all that is computed."""
NUM_EXAMPLES = 4
"""Number of inputs."""
NUM_VALUES = 16
"""Number of single values in a behavior."""
TOLERANCE = 1e-3
"""Largest difference, as a fraction of the largest number, that rounding may cause."""


def network_behavior(model: Model) -> Behavior:
    """Summarize the outputs of a network with fixed weights, in training and in evaluation mode.

    Args:
        model: The network. Its constants count, its weights and running statistics do not.

    Returns:
        The numbers.
    """
    generator = torch.Generator().manual_seed(0)
    like = next(iter(model.params.values()))

    def _draw(shape: Sequence[int], scale: float) -> Tensor:
        return scale * torch.randn(tuple(shape), generator=generator).to(like)

    params = {
        name: _draw(value.shape, (value.shape[0] / max(value.numel(), 1)) ** 0.5)
        if value.dim() > 1
        else _draw(value.shape, 0.5)
        for name, value in model.params.items()
    }
    buffers = {name: torch.ones_like(value) for name, value in model.buffers.items()}
    x = _draw((NUM_EXAMPLES, *model.continuous_shape), 1.0)
    with torch.no_grad():
        trained = model.forward(params, buffers, x, trial_key(like.device)).logits
        evaluated = model.predict(params | buffers, x)
    return summarize(torch.cat([trained, evaluated]))


def initial_weights(model: Model) -> Behavior:
    """Summarize the trainable weights of a network: root mean square and first value of each.

    Args:
        model: The network.

    Returns:
        The numbers.
    """
    numbers: list[float] = []
    for value in model.params.values():
        flat = value.detach().float().flatten()
        numbers += [float(flat.square().mean().sqrt()), float(flat[0])] if len(flat) else []
    return numbers


def summarize(values: Tensor) -> Behavior:
    """Return mean, deviation, and single values of a tensor, rounded to six digits."""
    flat = values.detach().double().flatten().nan_to_num(0, 1e30, -1e30).cpu()
    positions = torch.linspace(0, len(flat) - 1, min(NUM_VALUES, len(flat))).long()
    numbers = [flat.mean(), flat.std(correction=0), *flat[positions]]
    return [float(f"{float(number):.6g}") for number in numbers]


def is_same(first: Sequence[float], second: Sequence[float]) -> bool:
    """Whether two behaviors differ by rounding at most.

    Args:
        first: Numbers of one behavior.
        second: Numbers of the other.

    Returns:
        True if there are equally many, and none differs by more than `TOLERANCE` times the largest.
    """
    if len(first) != len(second):
        return False
    largest = max((abs(number) for number in (*first, *second)), default=0.0)
    return all(abs(a - b) <= TOLERANCE * largest for a, b in zip(first, second, strict=True))
