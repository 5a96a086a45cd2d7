"""What clients send, added up: sums, and beside them what an algorithm declares to need client by client."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from fedcog import tree
from fedcog.tree import Params, State


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


class Unfit(Exception):
    """A state that came from outside and is not what it must be: says in what."""


def fitted(form: State, flat: Params, besides: Collection[str] = ()) -> State:
    """The flat tensors in the order and nesting of `form`, if they have its names, shapes and types and no others.

    Names in `besides` may be there and are left out.
    """
    wanted = tree.flatten(form)
    for name in wanted.keys() ^ (flat.keys() - set(besides)):
        raise Unfit(f"'{name}' is missing." if name in wanted else f"'{name}' is not expected.")
    for name, like in wanted.items():
        if flat[name].shape != like.shape or flat[name].dtype != like.dtype:
            here, there = (f"{one.dtype} {list(one.shape)}" for one in (flat[name], like))
            raise Unfit(f"'{name}' is {here}, and not {there}.")
    return tree.filled(form, flat)


def finite(state: State) -> Tensor:
    """Are all numbers of a state finite?"""
    values = [value.reshape(-1) for value in tree.flatten(state).values()]
    return torch.cat(values).isfinite().all() if values else torch.ones((), dtype=torch.bool)


def _apart(payload: State) -> tuple[State, State]:
    """What of a payload is summed, and what is not."""
    rest = {key: value for key, value in payload.items() if key != "each"}
    return rest, {key: value for key, value in payload.items() if key == "each"}
