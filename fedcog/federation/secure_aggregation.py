"""Payloads as vectors of numbers between -1 and 1, as secure aggregation needs them, and back.

Every part of a payload is divided by the bound that its algorithm declares. A number beyond its
bound is an error and never clipped: it would wrap around in the masked sum without a trace.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from fedcog.core import tree
from fedcog.core.tree import State

LOSS_BOUND = 1024.0
"""Bound on a client's weighted loss, which is sent along."""
MODULUS = 2**32
MAX_LEVELS = 2**30


class OutOfRange(Exception):
    """A number of a payload exceeds the bound of its part."""


def num_levels(num_clients: int) -> int:
    """Return the quantization levels: the largest power of two whose sum stays below MODULUS."""
    return min(1 << ((MODULUS - 1) // num_clients).bit_length() - 1, MAX_LEVELS)


def undeclared_parts(template: State, bounds: Mapping[str, float]) -> list[str]:
    """Return the parts of a payload without a declared bound.

    Args:
        template: A payload.
        bounds: Bounds by part.

    Returns:
        Names of parts.
    """
    return [part for part in template if part not in bounds]


def to_vector(payload: State, loss: Tensor, bounds: Mapping[str, float], factor: float) -> Tensor:
    """Encode one client's payload and weighted loss as a vector.

    Args:
        payload: What the client sends.
        loss: Its weighted loss, a 0-d tensor.
        bounds: Bounds by part of the payload.
        factor: Multiplied with every bound.

    Returns:
        Numbers between -1 and 1, float64.

    Raises:
        OutOfRange: If a number exceeds its bound or is not finite.
    """
    parts = []
    for name, value in _named_tensors(payload, loss):
        bound = _bound(name, bounds) * factor
        part = value.double().flatten().cpu() / bound
        if not bool(part.isfinite().all()):
            raise OutOfRange(
                f"'{name}' is not finite: training diverged at this client. "
                "Lower the learning rate."
            )
        if bool((part.abs() > 1).any()):  # the error must not reveal by how much
            raise OutOfRange(
                f"'{name}' exceeds {bound:g}, the largest number that secure aggregation expects: "
                "raise --secure-scale, or lower the learning rate."
            )
        parts.append(part)
    return torch.cat(parts)


def from_vector(
    vector: Tensor, template: State, bounds: Mapping[str, float], factor: float
) -> tuple[State, float]:
    """Decode the sum of encoded payloads.

    Args:
        vector: Sum of the clients' vectors.
        template: A payload with the expected shapes and dtypes.
        bounds: Bounds by part of the payload.
        factor: Multiplied with every bound.

    Returns:
        (sum of the payloads, sum of the weighted losses).
    """
    flat: dict[str, Tensor] = {}
    start = 0
    for name, like in _named_tensors(template, torch.empty(())):
        part = vector[start : start + like.numel()] * (_bound(name, bounds) * factor)
        flat[name] = part.reshape(like.shape).to(like.dtype)
        start += like.numel()
    return tree.unflatten_like(template, flat), float(flat["loss"])


def vector_size(template: State) -> int:
    """Return the length of an encoded payload."""
    return sum(value.numel() for _, value in _named_tensors(template, torch.empty(())))


def _named_tensors(payload: State, loss: Tensor) -> list[tuple[str, Tensor]]:
    """Return everything that a vector encodes, in order of names."""
    return sorted((tree.flatten(payload) | {"loss": loss}).items())


def _bound(name: str, bounds: Mapping[str, float]) -> float:
    return ({"loss": LOSS_BOUND} | dict(bounds))[name.partition("::")[0]]
