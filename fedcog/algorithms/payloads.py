"""Payloads: their update, scaled."""

from torch import Tensor

from fedcog.algorithms.types import UPDATE_PARTS
from fedcog.core import tree
from fedcog.core.tree import State


def scaled_update(factor: float | Tensor, payload: State) -> State:
    """Return a payload's update times a factor, without what else it holds.

    Args:
        factor: A number, or a 0-d tensor.
        payload: The payload of one client, or a sum of payloads.

    Returns:
        `"delta"` and `"buffers"`.
    """
    update = {key: payload.get(key, {}) for key in UPDATE_PARTS}
    return tree.apply(lambda value: value * factor, update)


def scale_update(factor: float | Tensor, payload: State) -> State:
    """Multiply a payload's update, and leave everything else as it is.

    The update is what the payload has under a key of `UPDATE_PARTS`, in its per-client part too.

    Args:
        factor: A number, or a 0-d tensor.
        payload: The payload of one client.

    Returns:
        The payload with a scaled update.
    """
    scaled: State = {}
    for key, value in payload.items():
        if key in UPDATE_PARTS:
            scaled |= tree.apply(lambda update: update * factor, {key: value})
        elif key == "per_client":
            scaled[key] = _scale_nested(factor, value)
        else:
            scaled[key] = value
    return scaled


def _scale_nested(factor: float | Tensor, part: State) -> State:
    """Scale the updates in a per-client part, at any depth."""
    nested = {key: value for key, value in part.items() if hasattr(value, "items")}
    scaled = {
        key: _scale_nested(factor, value)
        for key, value in nested.items()
        if key not in UPDATE_PARTS
    }
    updates = {key: value for key, value in nested.items() if key in UPDATE_PARTS}
    return part | scaled | tree.apply(lambda update: update * factor, updates)
