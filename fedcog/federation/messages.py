"""Messages between processes: tensors as safetensors and the rest as JSON, so that nothing is ever unpickled.

A message is a dict, nested at will, of tensors and of what JSON knows but lists.
"""

import json
import math
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from fedcog.tree import State


def pack(message: State) -> bytes:
    """A message's form, in which a tensor is a list of its type and shape, and all tensors' numbers.

    Tensors of a type go as one, since a safetensors entry costs as much time as a thousand numbers.
    """
    flat: dict[str, list[Tensor]] = {}

    def form(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: form(inside) for name, inside in value.items()}
        if isinstance(value, Tensor):
            kind = str(value.dtype)
            flat.setdefault(kind, []).append(value.detach().reshape(-1))
            return [kind, *value.shape]
        return value

    text = json.dumps(form(message)).encode()
    return len(text).to_bytes(8, "little") + text + save({kind: torch.cat(parts) for kind, parts in flat.items()})


def unpack(data: bytes) -> State:
    """The message again; its tensors lie in memory as any other of torch's, for the last bit may hang on that."""
    end = 8 + int.from_bytes(data[:8], "little")
    form, flat = json.loads(data[8:end]), load(data[end:])
    taken = dict.fromkeys(flat, 0)

    def fill(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: fill(inside) for name, inside in value.items()}
        if isinstance(value, list):
            kind, *shape = value
            start, taken[kind] = taken[kind], taken[kind] + math.prod(shape)
            return flat[kind][start : taken[kind]].reshape(shape).clone()
        return value

    message: State = fill(form)
    return message
