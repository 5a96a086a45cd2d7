"""Arithmetic on dicts of tensors: parameters, updates and states."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Params = dict[str, Tensor]
"""One model's tensors by name (in a stack: with a leading client axis)."""

State = dict[str, Any]
"""Tensors, or dicts of tensors, by name."""


def add(a: Params, b: Params) -> Params:
    """a + b, tensor by tensor, over the names of `a`."""
    return {name: value + b[name] for name, value in a.items()}


def subtract(a: Params, b: Params) -> Params:
    """a - b, tensor by tensor, over the names of `a`."""
    return {name: value - b[name] for name, value in a.items()}


def change(before: Params, after: Params) -> Params:
    """after - before, tensor by tensor, over the names of `before`: what was added since is let lie."""
    return {name: after[name] - value for name, value in before.items()}


def zeros(a: Params) -> Params:
    """Zero, in the shape of `a`."""
    return {name: torch.zeros_like(value) for name, value in a.items()}


def scale(factor: Tensor | float, a: Params) -> Params:
    """factor * a, tensor by tensor."""
    return {name: factor * value for name, value in a.items()}


def dot(a: Params, b: Params) -> Tensor:
    """The inner product of `a` and `b` as two long vectors, over the names of `a`."""
    return torch.stack([(value * b[name]).sum() for name, value in a.items()]).sum()


def norm(a: Params) -> Tensor:
    """The length of `a` as one long vector: over the whole model, never per layer."""
    return dot(a, a).sqrt()


def apply(function: Callable[..., Tensor], *states: State) -> State:
    """`function` of the tensors standing at the same place in every state."""
    first, *others = states
    return {
        name: apply(function, value, *(other[name] for other in others))
        if isinstance(value, dict)
        else function(value, *(other[name] for other in others))
        for name, value in first.items()
    }


def stack(states: Sequence[State]) -> State:
    """Equal-shaped states with a new leading client axis."""
    return apply(lambda *values: torch.stack(values), *states)


def join(states: Sequence[State]) -> State:
    """States of the same form, one after another along their leading axis."""
    return states[0] if len(states) == 1 else apply(lambda *parts: torch.cat(parts), *states)


def pick(state: State, index: int | slice | Tensor) -> State:
    """The entry (or entries) `index` of a stacked state's leading axis."""
    return apply(lambda value: value[index], state)


def expand(state: State, count: int) -> State:
    """`count` copies of a state along a new leading client axis (contiguous: they may part ways)."""
    return apply(lambda value: value.expand(count, *value.shape).clone(), state)


def to(state: State, device: torch.device) -> State:
    """The state on `device`."""
    return apply(lambda value: value.to(device), state)


def read(state: State) -> State:
    """The state in host memory: one transfer for all of it."""
    flat = flatten(state)
    wanted = {name: value for name, value in flat.items() if value.device.type != "cpu"}
    if wanted:
        whole = torch.cat([value.detach().flatten().double() for value in wanted.values()]).cpu()
        parts = torch.split(whole, [value.numel() for value in wanted.values()])
        for (name, value), part in zip(wanted.items(), parts, strict=True):
            flat[name] = part.reshape(value.shape).to(value.dtype)
    return unflatten(flat)


def nbytes(state: State) -> int:
    """The bytes that a state's numbers take up."""
    return sum(value.nbytes for value in flatten(state).values())


def forms(state: State) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """What a state looks like from outside: its tensors' names, shapes and types."""
    return {name: (value.shape, value.dtype) for name, value in flatten(state).items()}


def flatten(state: State, prefix: str = "") -> Params:
    """A state as one flat dict whose names are paths: {"a": {"b": t}} is {"a::b": t}."""
    flat: Params = {}
    for name, value in state.items():
        path = f"{prefix}{name}"
        flat |= flatten(value, f"{path}::") if isinstance(value, dict) else {path: value}
    return flat


def filled(form: State, flat: Params, prefix: str = "") -> State:
    """The state of the same nesting as `form`, empty dicts included, with the tensors of a flat dict."""
    return {
        name: filled(value, flat, f"{prefix}{name}::") if isinstance(value, dict) else flat[f"{prefix}{name}"]
        for name, value in form.items()
    }


def unflatten(flat: Params) -> State:
    """The state that `flatten` made `flat` of."""
    state: State = {}
    for path, value in flat.items():
        *parents, name = path.split("::")
        place = state
        for parent in parents:
            place = place.setdefault(parent, {})
        place[name] = value
    return state
