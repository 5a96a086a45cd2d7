"""What clients send, added up: sums, and beside them what an algorithm declares to need client by client."""

import io
import math
from collections.abc import Sequence

import numpy as np
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


def fitted(form: State, flat: Params) -> State:
    """The flat tensors in the order and nesting of `form`, if they have its names, shapes and types and no others."""
    wanted = tree.flatten(form)
    for name in sorted(wanted.keys() ^ flat.keys()):
        raise Unfit(f"'{name}' is missing." if name in wanted else f"'{name}' is not expected.")
    for name, like in wanted.items():
        if flat[name].shape != like.shape or flat[name].dtype != like.dtype:
            here, there = (f"{one.dtype} {list(one.shape)}" for one in (flat[name], like))
            raise Unfit(f"'{name}' is {here}, and not {there}.")
    return tree.filled(form, flat)


def read_array(data: bytes) -> Tensor:
    """The tensor in the bytes of a .npy file that came from outside: nothing is unpickled, no size is believed."""
    try:
        file = io.BytesIO(data)
        major, minor = np.lib.format.read_magic(file)
        if (major, minor) != (1, 0):
            raise ValueError(f"its format is {major}.{minor}, and not 1.0")
        shape, transposed, dtype = np.lib.format.read_array_header_1_0(file, max_header_size=2**12)
        if dtype.hasobject or dtype.kind not in "fiub" or not dtype.isnative:
            raise ValueError(f"numbers of type {dtype} are not taken")
        if transposed and len(shape) > 1:
            raise ValueError("its columns come before its rows")
        if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != len(data) - file.tell():
            raise ValueError(f"{len(data) - file.tell()} bytes are no {dtype} {list(shape)}")
        return torch.from_numpy(np.frombuffer(data, dtype, offset=file.tell()).reshape(shape).copy())
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError, OverflowError, EOFError) as error:
        raise Unfit(f"an array cannot be read: {str(error).splitlines()[0] if str(error) else error!r}.") from error


def finite(state: State) -> Tensor:
    """Are all numbers of a state finite?"""
    values = [value.reshape(-1) for value in tree.flatten(state).values()]
    return torch.cat(values).isfinite().all() if values else torch.ones((), dtype=torch.bool)


def _apart(payload: State) -> tuple[State, State]:
    """What of a payload is summed, and what is not."""
    rest = {key: value for key, value in payload.items() if key != "each"}
    return rest, {key: value for key, value in payload.items() if key == "each"}
