"""Arithmetic on dicts of tensors: parameters, updates and states."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Params = dict[str, Tensor]
"""One model's tensors by name; stacked, they have a leading client axis."""

State = dict[str, Any]
"""Tensors, or dicts of tensors, by name."""


def add(a: Params, b: Params) -> Params:
    """Return a + b, tensor by tensor.

    Args:
        a: Tensors by name.
        b: Tensors by at least the same names.

    Returns:
        The sums, under the names of `a`.
    """
    return {name: value + b[name] for name, value in a.items()}


def subtract(a: Params, b: Params) -> Params:
    """Return a - b, tensor by tensor.

    Args:
        a: Tensors by name.
        b: Tensors by at least the same names.

    Returns:
        The differences, under the names of `a`.
    """
    return {name: value - b[name] for name, value in a.items()}


def change(before: Params, after: Params) -> Params:
    """Return after - before, tensor by tensor.

    Args:
        before: Tensors by name.
        after: Tensors by at least the same names; further names are ignored.

    Returns:
        The differences, under the names of `before`.
    """
    return {name: after[name] - value for name, value in before.items()}


def zeros(a: Params) -> Params:
    """Return zeros in the shapes of `a`."""
    return {name: torch.zeros_like(value) for name, value in a.items()}


def scale(factor: Tensor | float, a: Params) -> Params:
    """Return factor * a, tensor by tensor.

    Args:
        factor: A number or a 0-d tensor.
        a: Tensors by name.

    Returns:
        The scaled tensors.
    """
    return {name: factor * value for name, value in a.items()}


def dot(a: Params, b: Params) -> Tensor:
    """Return the inner product of two models as long vectors.

    Args:
        a: Tensors by name.
        b: Tensors by at least the same names.

    Returns:
        A 0-d tensor.
    """
    return torch.stack([(value * b[name]).sum() for name, value in a.items()]).sum()


def norm(a: Params) -> Tensor:
    """Return the L2 norm over the whole model, a 0-d tensor."""
    return dot(a, a).sqrt()


def apply(function: Callable[..., Tensor], *states: State) -> State:
    """Apply a function to the tensors at the same place in every state.

    Args:
        function: Takes as many tensors as there are states, and returns one.
        *states: Nested dicts of tensors. The first one's names are used.

    Returns:
        The results, nested like the first state.
    """
    first, *others = states
    return {
        name: apply(function, value, *(other[name] for other in others))
        if isinstance(value, dict)
        else function(value, *(other[name] for other in others))
        for name, value in first.items()
    }


def stack(states: Sequence[State]) -> State:
    """Stack equal-shaped states along a new leading client axis."""
    return apply(lambda *values: torch.stack(values), *states)


def concatenate(states: Sequence[State]) -> State:
    """Concatenate stacked states along their leading axis."""
    return states[0] if len(states) == 1 else apply(lambda *parts: torch.cat(parts), *states)


def take(state: State, index: int | slice | Tensor) -> State:
    """Select entries of the leading axis of a stacked state.

    Args:
        state: Stacked tensors.
        index: Which entries; an integer removes the axis.

    Returns:
        The selected entries.
    """
    return apply(lambda value: value[index], state)


def expand(state: State, count: int) -> State:
    """Repeat a state along a new leading client axis.

    Args:
        state: Nested dict of tensors.
        count: Number of copies.

    Returns:
        Contiguous copies, stacked.
    """
    return apply(lambda value: value.expand(count, *value.shape).clone(), state)


def to(state: State, device: torch.device) -> State:
    """Move a state to a device.

    Args:
        state: Nested dict of tensors.
        device: Where to move it.

    Returns:
        The state on `device`.
    """
    return apply(lambda value: value.to(device), state)


def to_host(state: State) -> State:
    """Copy a state to host memory, with one transfer for all of its tensors."""
    flat = flatten(state)
    remote = {name: value for name, value in flat.items() if value.device.type != "cpu"}
    if remote:
        vector = torch.cat([value.detach().flatten().double() for value in remote.values()]).cpu()
        parts = torch.split(vector, [value.numel() for value in remote.values()])
        for (name, value), part in zip(remote.items(), parts, strict=True):
            flat[name] = part.reshape(value.shape).to(value.dtype)
    return unflatten(flat)


def nbytes(state: State) -> int:
    """Return the number of bytes of all tensors."""
    return sum(value.nbytes for value in flatten(state).values())


def specs(state: State) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return shape and dtype of every tensor by its path."""
    return {name: (value.shape, value.dtype) for name, value in flatten(state).items()}


def flatten(state: State, prefix: str = "") -> Params:
    """Flatten nested dicts: {"a": {"b": t}} becomes {"a::b": t}.

    Args:
        state: Nested dict of tensors.
        prefix: Put before every path.

    Returns:
        Tensors by path.
    """
    flat: Params = {}
    for name, value in state.items():
        path = f"{prefix}{name}"
        flat |= flatten(value, f"{path}::") if isinstance(value, dict) else {path: value}
    return flat


def unflatten_like(template: State, flat: Params, prefix: str = "") -> State:
    """Nest a flat dict like another state, empty dicts included.

    Args:
        template: The state whose nesting to use.
        flat: Tensors by path.
        prefix: Path of `template` within `flat`.

    Returns:
        The tensors of `flat`, nested.
    """
    return {
        name: unflatten_like(value, flat, f"{prefix}{name}::")
        if isinstance(value, dict)
        else flat[f"{prefix}{name}"]
        for name, value in template.items()
    }


def unflatten(flat: Params) -> State:
    """Invert `flatten`."""
    state: State = {}
    for path, value in flat.items():
        *parents, name = path.split("::")
        place = state
        for parent in parents:
            place = place.setdefault(parent, {})
        place[name] = value
    return state
