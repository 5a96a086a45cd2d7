"""The part of a network that a narrower one would have: of every hidden layer the first channels."""

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

Masks = dict[str, Tensor]
MIXING = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm, nn.Softmax, nn.LogSoftmax, nn.Softmin)
"""Layers of which a channel's output hangs on the others."""


class Uncuttable(Exception):
    """A network of which no part is a narrower one: says which layer, and why."""


def held(module: nn.Module, head: str, input_shape: tuple[int, ...], width: float, moving: set[str]) -> Masks:
    """1 where a network of that width has a number, else 0, by parameter and running statistic, all of them `moving`.

    Of every layer but the head it has the first channels, rounded up. What then goes into a layer is found by sending
    ones through the network, each layer putting out 1 in channels that are there and 0 in others.
    """
    some, last = next(module.parameters()), f"{head}." if head else ""
    for filled in (0.0, 1.0):  # first as if nothing were there at all: nothing must come of it
        masks = Masks()
        probe = copy.deepcopy(module).eval()
        for name, layer in probe.named_modules():
            name = f"{name}." if name else ""
            own = {key for key, _ in (*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False))}
            plain = isinstance(layer, nn.Linear | _ConvNd) and not getattr(layer, "transposed", False)
            if plain and own <= {"weight", "bias"}:
                share = 1 if name == last else width
                layer.register_forward_hook(_cut(name, share, masks, filled))
            elif isinstance(layer, _BatchNorm):
                layer.register_forward_hook(_passed(name, masks, filled))
            elif own or isinstance(layer, MIXING):
                raise Uncuttable(
                    f"layer '{name[:-1]}' ({type(layer).__name__}) mixes or holds numbers of all channels: only "
                    "networks of linear layers, convolutions and BatchNorm have narrower ones inside them."
                )
        with torch.no_grad():
            probe(torch.full((2, *input_shape), filled, device=some.device, dtype=some.dtype))
    if odd := sorted(masks.keys() ^ moving):
        raise Uncuttable(f"'{odd[0]}' is not trained, shared by two layers, or used outside of its own.")
    _check(module, input_shape, masks)
    return masks


def _check(module: nn.Module, input_shape: tuple[int, ...], masks: Masks) -> None:
    """Is nothing lost that is there? Then it does not matter what stands where nothing comes in."""
    probe, draw = copy.deepcopy(module).eval(), torch.Generator().manual_seed(0)
    some = next(probe.parameters())

    def numbers(like: Tensor) -> Tensor:  # so that what comes of a layer is about as large as what goes into it
        return torch.randn(like.shape, generator=draw).to(some) / math.sqrt(like[0].numel())

    inputs, outputs = 3 * torch.randn(8, *input_shape, generator=draw).to(some), list[Tensor]()
    weights = {name: numbers(value) for name, value in probe.named_parameters()}
    for filled in (0.0, 1.0):
        with torch.no_grad():
            for name, value in probe.named_parameters():
                there = masks[name]
                rows = there.flatten(1).amax(1).reshape(-1, *[1] * (there.dim() - 1)) if there.dim() > 1 else there
                value.copy_(weights[name] * torch.where(there > 0, there, filled * rows))  # rows: what is put out
            outputs.append(probe(inputs))
    empty = [name for name, mask in masks.items() if mask.dim() > 1 and not bool(mask.any())]
    if empty or not torch.allclose(outputs[0], outputs[1], rtol=1e-3, atol=1e-4):
        raise Uncuttable(
            "something between its layers makes 0 of what is there, or mixes channels: what a narrower one has cannot "
            "be told."
        )


def _cut(name: str, share: float, masks: Masks, filled: float) -> Callable[..., Tensor]:
    """A hook on a layer of weights: notes what is there of it, and puts out ones in that share of its channels."""

    def hook(layer: Any, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        weight, axis = layer.weight, -1 if isinstance(layer, nn.Linear) else 1
        there = _there(name, inputs[0], axis, filled)
        out = (torch.arange(len(weight), device=weight.device) < math.ceil(share * len(weight))).to(weight.dtype)
        groups = getattr(layer, "groups", 1)
        fed = there.to(weight.dtype).reshape(groups, -1).repeat_interleave(len(weight) // groups, 0)
        inside = (out[:, None] * fed).reshape(*weight.shape[:2], *[1] * (weight.dim() - 2))
        _note(masks, f"{name}weight", inside.expand_as(weight).contiguous())
        if layer.bias is not None:
            _note(masks, f"{name}bias", out)
        shape = [1] * output.dim()
        shape[axis] = -1
        return filled * out.reshape(shape).expand_as(output)

    return hook


def _passed(name: str, masks: Masks, filled: float) -> Callable[..., Tensor]:
    """A hook on BatchNorm, which has the channels that go into it."""

    def hook(layer: Any, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        there = _there(name, inputs[0], 1, filled).to(output.dtype)
        for part in ("weight", "bias", "running_mean", "running_var"):
            if getattr(layer, part) is not None:
                _note(masks, f"{name}{part}", there)
        return filled * there.reshape(1, -1, *[1] * (output.dim() - 2)).expand_as(output)

    return hook


def _there(name: str, x: Tensor, axis: int, filled: float) -> Tensor:
    """The channels in which something comes."""
    there = (x != 0).movedim(axis, 0).flatten(1).any(1)
    if not filled and bool(there.any()):
        raise Uncuttable(
            f"something comes into layer '{name[:-1]}' even where nothing goes into the network: an activation that "
            "makes something of 0, such as a sigmoid, would let channels be seen that are not there."
        )
    return there


def _note(masks: Masks, name: str, mask: Tensor) -> None:
    if not torch.equal(masks.setdefault(name, mask), mask):
        raise Uncuttable(f"'{name}' is used twice, of other channels each time.")
