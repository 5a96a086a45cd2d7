"""Messages between processes: tensors as safetensors and the rest as JSON, so that nothing is ever unpickled.

A message is a dict, nested at will, of tensors and of what JSON knows but lists.
"""

import json
from multiprocessing.connection import Connection
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from fedcog.tree import State


def pack(message: State) -> tuple[bytes, bytes]:
    """A message in two parts: its form, in which a tensor is a list of its number alone, and the tensors."""
    tensors: dict[str, Tensor] = {}

    def form(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: form(inside) for name, inside in value.items()}
        if isinstance(value, Tensor):
            tensors[str(len(tensors))] = value.detach().clone(memory_format=torch.contiguous_format)
            return [len(tensors) - 1]
        return value

    return json.dumps(form(message)).encode(), save(tensors)


def send(line: Connection, parts: tuple[bytes, bytes]) -> None:
    """Send what `pack` made."""
    for part in parts:
        line.send_bytes(part)


def receive(line: Connection) -> State:
    """The next message; its tensors lie in memory as any other of torch's, for the last bit may hang on that."""
    form, tensors = json.loads(line.recv_bytes()), load(line.recv_bytes())

    def fill(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: fill(inside) for name, inside in value.items()}
        return tensors[str(value[0])].clone() if isinstance(value, list) else value

    message: State = fill(form)
    return message
