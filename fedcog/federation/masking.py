"""A payload as one vector of numbers between -1 and 1, as secure aggregation wants it; and the sum of such, again.

Every part of a payload is divided by the scale its algorithm declares for it. A number beyond its scale is an error,
never a clip: it would fold over in the masked sum and nobody could tell.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from fedcog import tree
from fedcog.tree import State

LOSS = 1024.0  # the scale of a client's weighted loss, which rides along
MODULUS = 2**32


class OutOfRange(Exception):
    """A number that is too large for its part's scale: says which, and what to do."""


def levels(clients: int) -> int:
    """How finely numbers are told apart: the largest power of two whose sum over the clients is below the modulus."""
    return min(1 << ((MODULUS - 1) // clients).bit_length() - 1, 2**30)


def lacking(form: State, declared: Mapping[str, float]) -> list[str]:
    """The parts of a payload that no scale is declared for."""
    return [part for part in form if part not in declared]


def vector(payload: State, loss: Tensor, declared: Mapping[str, float], factor: float) -> Tensor:
    """One client's payload and its weighted loss as one vector, in float64; every scale times `factor`."""
    parts = []
    for name, value in _numbers(payload, loss):
        most = _scale(name, declared) * factor
        part = value.double().flatten().cpu() / most
        if not bool(part.isfinite().all()):
            raise OutOfRange(f"'{name}' is not finite: training diverged at this client. Lower the learning rate.")
        if bool((part.abs() > 1).any()):  # by how much is nobody's business
            raise OutOfRange(
                f"'{name}' holds more than {most:g}, the most that secure aggregation was told to expect: raise "
                "--secure-scale, or lower the learning rate."
            )
        parts.append(part)
    return torch.cat(parts)


def total(summed: Tensor, form: State, declared: Mapping[str, float], factor: float) -> tuple[State, float]:
    """The sum of payloads in the nesting of `form`, and of the weighted losses, from the sum of such vectors."""
    flat, start = dict[str, Tensor](), 0
    for name, like in _numbers(form, torch.empty(())):
        part = summed[start : start + like.numel()] * (_scale(name, declared) * factor)
        flat[name], start = part.reshape(like.shape).to(like.dtype), start + like.numel()
    return tree.filled(form, flat), float(flat["loss"])


def size(form: State) -> int:
    """How long such a vector is."""
    return sum(value.numel() for _, value in _numbers(form, torch.empty(())))


def _numbers(payload: State, loss: Tensor) -> list[tuple[str, Tensor]]:
    """All that goes into a vector, in order of its names."""
    return sorted((tree.flatten(payload) | {"loss": loss}).items())


def _scale(name: str, declared: Mapping[str, float]) -> float:
    return ({"loss": LOSS} | dict(declared))[name.partition("::")[0]]
