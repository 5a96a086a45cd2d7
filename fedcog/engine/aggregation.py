"""Aggregation of payloads: sums, and what an algorithm needs per client.

A payload is what one client sends. Its part under `"per_client"` is stacked; everything else is
summed, running statistics (`"buffers"`) included. What arrives from outside is checked here too.
"""

import math
import re
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedcog.core import tree
from fedcog.core.tree import Params, State

NPY_MAGIC = b"\x93NUMPY\x01\x00"
NPY_HEADER = re.compile(
    rb"\{'descr': '([<>|=]?[A-Za-z]\d{0,3})', 'fortran_order': (True|False), "
    rb"'shape': \(((?:\d{1,12}, ?){0,16}\d{0,12})\), \} *\n"
)
NPY_DTYPES = {"<f4", "<f8", "<f2", "<i8", "<i4", "<i2", "|i1", "|u1", "|b1"}


class InvalidPayload(Exception):
    """A state received from outside does not have the expected form."""


class NotFinite(InvalidPayload):
    """A state received from outside contains NaN or infinity."""


def sum_of_one(payload: State) -> State:
    """Turn one client's payload into a sum of one: its per-client part gets a client axis."""
    summed, per_client = _split(payload)
    return summed | tree.apply(lambda value: value[None], per_client)


def sum_payloads(payloads: State, update_finite: Tensor) -> State:
    """Sum the finite ones of stacked payloads.

    Args:
        payloads: Payloads with a client axis.
        update_finite: Which of them to sum, `(K,)`.

    Returns:
        The sum; the per-client part keeps the client axis.
    """
    summed, per_client = _split(payloads)

    def add(value: Tensor) -> Tensor:
        mask = update_finite.reshape(-1, *[1] * (value.dim() - 1))
        return torch.where(mask, value, 0).sum(0)

    total = tree.apply(add, summed)
    if per_client:
        total |= tree.take(per_client, update_finite)
    return total


def add_totals(totals: Sequence[State]) -> State:
    """Add sums of payloads; per-client parts are concatenated."""
    if not totals:
        return {}
    summed, per_client = _split(totals[0])
    for total in totals[1:]:
        other_summed, other_per_client = _split(total)
        summed = tree.apply(torch.add, summed, other_summed)
        per_client = tree.apply(lambda *two: torch.cat(two), per_client, other_per_client)
    return summed | per_client


def match_template(template: State, flat: Params) -> State:
    """Nest tensors received from outside like a template.

    Args:
        template: A state with the expected names, shapes and dtypes.
        flat: Tensors by path.

    Returns:
        The tensors in the order and nesting of the template.

    Raises:
        InvalidPayload: If a name, shape or dtype differs.
    """
    expected = tree.flatten(template)
    for name in sorted(expected.keys() ^ flat.keys()):
        problem = "is missing" if name in expected else "is not expected"
        raise InvalidPayload(f"'{name}' {problem}.")
    for name, like in expected.items():
        value = flat[name]
        if value.shape != like.shape or value.dtype != like.dtype:
            raise InvalidPayload(
                f"'{name}' is {value.dtype} {list(value.shape)}, "
                f"but should be {like.dtype} {list(like.shape)}."
            )
    return tree.unflatten_like(template, flat)


def read_array(data: bytes) -> Tensor:
    """Parse the bytes of a .npy file from outside.

    Nothing is evaluated, and the declared shape must agree with the number of bytes.

    Raises:
        InvalidPayload: If the bytes are not a plain array of numbers.
    """
    header_size = int.from_bytes(data[8:10], "little")
    header = NPY_HEADER.fullmatch(data[10 : 10 + header_size])
    body = data[10 + header_size :]
    if data[:8] != NPY_MAGIC or header is None:
        raise InvalidPayload("an array does not start like a .npy file of format 1.0.")
    dtype, fortran_order, sides = (part.decode() for part in header.groups())
    if dtype not in NPY_DTYPES:
        raise InvalidPayload(f"an array has dtype {dtype}, which is not accepted.")
    shape = [int(side) for side in sides.split(",") if side.strip()]
    if fortran_order == "True" and len(shape) > 1:
        raise InvalidPayload("an array is stored in Fortran order.")
    if math.prod(shape) * np.dtype(dtype).itemsize != len(body):
        raise InvalidPayload(f"an array has {len(body)} bytes, which do not fit {dtype} {shape}.")
    try:
        return torch.tensor(np.frombuffer(body, dtype).reshape(shape))
    except ValueError as error:  # an empty array with a side that is too long
        raise InvalidPayload(f"an array cannot have shape {shape}.") from error


def is_finite(state: State) -> Tensor:
    """Return whether all numbers of a state are finite, as a 0-d boolean tensor."""
    values = [value.reshape(-1) for value in tree.flatten(state).values()]
    if not values:
        return torch.ones((), dtype=torch.bool)
    return torch.cat(values).isfinite().all()


def _split(payload: State) -> tuple[State, State]:
    """Split a payload into what is summed and what is stacked."""
    summed = {key: value for key, value in payload.items() if key != "per_client"}
    per_client = {key: value for key, value in payload.items() if key == "per_client"}
    return summed, per_client
