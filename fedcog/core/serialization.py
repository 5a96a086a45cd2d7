"""Messages between processes: tensors as safetensors, the rest as JSON. Nothing is ever unpickled.

A message is a nested dict of tensors and of JSON values other than lists.
"""

import json
import math
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from fedcog.core.tree import State


def pack(message: State) -> bytes:
    """Encode a message.

    The JSON part replaces each tensor by a list of its dtype and shape. All tensors of a dtype are
    stored as one, because a safetensors entry costs as much time as a thousand numbers.
    """
    flat: dict[str, list[Tensor]] = {}

    def describe(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: describe(inner) for name, inner in value.items()}
        if isinstance(value, Tensor):
            dtype = str(value.dtype)
            flat.setdefault(dtype, []).append(value.detach().reshape(-1))
            return [dtype, *value.shape]
        return value

    text = json.dumps(describe(message)).encode()
    tensors = save({dtype: torch.cat(parts) for dtype, parts in flat.items()})
    return len(text).to_bytes(8, "little") + text + tensors


def unpack(data: bytes) -> State:
    """Decode a message.

    Tensors are cloned, because their alignment in memory can change the last bit of a result.
    """
    end = 8 + int.from_bytes(data[:8], "little")
    description = json.loads(data[8:end])
    flat = load(data[end:])
    offsets = dict.fromkeys(flat, 0)

    def restore(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: restore(inner) for name, inner in value.items()}
        if isinstance(value, list):
            dtype, *shape = value
            start = offsets[dtype]
            offsets[dtype] = start + math.prod(shape)
            return flat[dtype][start : offsets[dtype]].reshape(shape).clone()
        return value

    message: State = restore(description)
    return message
