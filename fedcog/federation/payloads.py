"""What clients send, added up: sums, and beside them what an algorithm declares to need client by client."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedcog import tree
from fedcog.tree import State


def one_alone(payload: State) -> State:
    """One client's payload as a sum of one: what must reach the server client by client gets a client axis."""
    rest, each = _apart(payload)
    return rest | tree.apply(lambda value: value[None], each)


def summed(payload: State, sound: Tensor) -> State:
    """The sum of the sound ones of stacked payloads; what must reach the server client by client stays apart."""
    rest, each = _apart(payload)

    def add(value: Tensor) -> Tensor:
        return torch.where(sound.reshape(-1, *[1] * (value.dim() - 1)), value, 0).sum(0)

    return tree.apply(add, rest) | (tree.pick(each, sound) if each else {})


def joined(totals: Sequence[State]) -> State:
    """The sum of sums."""
    total, *others = [_apart(one) for one in totals] or [({}, {})]
    for rest, each in others:
        total = tree.apply(torch.add, total[0], rest), tree.apply(lambda *two: torch.cat(two), total[1], each)
    return total[0] | total[1]


def finite(state: State) -> Tensor:
    """Are all numbers of a state finite?"""
    values = [value.reshape(-1) for value in tree.flatten(state).values()]
    return torch.cat(values).isfinite().all() if values else torch.ones((), dtype=torch.bool)


def _apart(payload: State) -> tuple[State, State]:
    """What of a payload is summed, and what is not."""
    rest = {key: value for key, value in payload.items() if key != "each"}
    return rest, {key: value for key, value in payload.items() if key == "each"}
