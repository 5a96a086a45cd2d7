"""What clients send, added up: sums, and beside them what an algorithm declares to need client by client."""

import math
import re
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedcog import tree
from fedcog.tree import Params, State

HEADER = re.compile(
    rb"\{'descr': '([<>|=]?[A-Za-z]\d{0,3})', 'fortran_order': (True|False), "
    rb"'shape': \(((?:\d{1,12}, ?){0,16}\d{0,12})\), \} *\n"
)
NUMBERS = {"<f4", "<f8", "<f2", "<i8", "<i4", "<i2", "|i1", "|u1", "|b1"}


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


class NotFinite(Unfit):
    """Such a state that holds NaN or infinity."""


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
    """The tensor in the bytes of a .npy file that came from outside: nothing is evaluated, and no size is believed."""
    size = int.from_bytes(data[8:10], "little")
    header, rest = HEADER.fullmatch(data[10 : 10 + size]), data[10 + size :]
    if data[:8] != b"\x93NUMPY\x01\x00" or header is None:
        raise Unfit("an array does not begin as a .npy file of format 1.0 does.")
    kind, transposed, sides = (part.decode() for part in header.groups())
    if kind not in NUMBERS:
        raise Unfit(f"an array holds {kind}, and such are not taken.")
    shape = [int(side) for side in sides.split(",") if side.strip()]
    if transposed == "True" and len(shape) > 1:
        raise Unfit("an array has its columns before its rows.")
    if math.prod(shape) * np.dtype(kind).itemsize != len(rest):
        raise Unfit(f"an array has {len(rest)} bytes, which are no {kind} {shape}.")
    try:
        return torch.tensor(np.frombuffer(rest, kind).reshape(shape))
    except ValueError as error:  # nothing, of sides that are too long
        raise Unfit(f"an array cannot be of shape {shape}.") from error


def finite(state: State) -> Tensor:
    """Are all numbers of a state finite?"""
    values = [value.reshape(-1) for value in tree.flatten(state).values()]
    return torch.cat(values).isfinite().all() if values else torch.ones((), dtype=torch.bool)


def _apart(payload: State) -> tuple[State, State]:
    """What of a payload is summed, and what is not."""
    rest = {key: value for key, value in payload.items() if key != "each"}
    return rest, {key: value for key, value in payload.items() if key == "each"}
