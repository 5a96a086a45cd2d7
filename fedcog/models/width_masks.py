"""Masks of the narrower network inside a network: the first channels of every hidden layer."""

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

Masks = dict[str, Tensor]
CHANNEL_MIXING_LAYERS = (
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.LocalResponseNorm,
    nn.Softmax,
    nn.LogSoftmax,
    nn.Softmin,
)
"""Layers in which a channel's output depends on other channels."""


class WidthError(Exception):
    """A network that contains no narrower network; the message names the layer and the reason."""


def width_masks(
    module: nn.Module, head: str, input_shape: tuple[int, ...], width: float, names: set[str]
) -> Masks:
    """Compute the masks of a narrower network.

    Every layer but the head keeps its first channels, rounded up. The kept inputs of a layer are
    found by a pass of ones through the network: each layer outputs 1 in the channels that it keeps
    and 0 in others.

    Args:
        module: The network.
        head: Name of its last linear layer.
        input_shape: Shape of one input.
        width: Fraction of channels that hidden layers keep.
        names: Parameters and running statistics that must have masks.

    Returns:
        Masks by name: 1 where the narrower network has a value, else 0.

    Raises:
        WidthError: If the network contains no narrower network.
    """
    parameter = next(module.parameters())
    masks: Masks = {}
    # The first pass uses zeros: no layer may then receive anything but zeros.
    for fill in (0.0, 1.0):
        masks = {}
        probe = copy.deepcopy(module).eval()
        _register_hooks(probe, head, width, masks, fill)
        with torch.no_grad():
            shape = (2, *input_shape)
            probe(torch.full(shape, fill, device=parameter.device, dtype=parameter.dtype))
    if mismatched := sorted(masks.keys() ^ names):
        raise WidthError(
            f"'{mismatched[0]}' is not trained, shared by two layers, "
            "or used outside of its own layer."
        )
    _check_masks(module, input_shape, masks)
    return masks


def _register_hooks(probe: nn.Module, head: str, width: float, masks: Masks, fill: float) -> None:
    """Let every layer of a network record its masks and output its kept channels."""
    head_prefix = f"{head}." if head else ""
    for name, layer in probe.named_modules():
        prefix = f"{name}." if name else ""
        tensors = {key for key, _ in layer.named_parameters(recurse=False)}
        tensors |= {key for key, _ in layer.named_buffers(recurse=False)}
        is_plain = isinstance(layer, nn.Linear | _ConvNd) and not getattr(
            layer, "transposed", False
        )
        if is_plain and tensors <= {"weight", "bias"}:
            layer_width = 1 if prefix == head_prefix else width
            layer.register_forward_hook(_weight_hook(prefix, layer_width, masks, fill))
        elif isinstance(layer, _BatchNorm):
            layer.register_forward_hook(_batchnorm_hook(prefix, masks, fill))
        elif tensors or isinstance(layer, CHANNEL_MIXING_LAYERS):
            raise WidthError(
                f"layer '{name}' ({type(layer).__name__}) mixes channels, or has parameters of its "
                "own: only networks of linear layers, convolutions and BatchNorm contain narrower "
                "ones."
            )


def _check_masks(module: nn.Module, input_shape: tuple[int, ...], masks: Masks) -> None:
    """Check on random weights that masked inputs of a layer do not affect the outputs."""
    probe = copy.deepcopy(module).eval()
    generator = torch.Generator().manual_seed(0)
    parameter = next(probe.parameters())

    def draw(like: Tensor) -> Tensor:
        # This scale makes a layer's outputs about as large as its inputs.
        values = torch.randn(like.shape, generator=generator).to(parameter)
        return values / math.sqrt(like[0].numel())

    inputs = 3 * torch.randn(8, *input_shape, generator=generator).to(parameter)
    outputs: list[Tensor] = []
    weights = {name: draw(value) for name, value in probe.named_parameters()}
    for fill in (0.0, 1.0):
        with torch.no_grad():
            for name, value in probe.named_parameters():
                mask = masks[name]
                kept_outputs = mask
                if mask.dim() > 1:
                    kept_outputs = mask.flatten(1).amax(1).reshape(-1, *[1] * (mask.dim() - 1))
                value.copy_(weights[name] * torch.where(mask > 0, mask, fill * kept_outputs))
            outputs.append(probe(inputs))
    is_empty = any(mask.dim() > 1 and not bool(mask.any()) for mask in masks.values())
    if is_empty or not torch.allclose(outputs[0], outputs[1], rtol=1e-3, atol=1e-4):
        raise WidthError(
            "something between its layers sets kept channels to 0, or mixes channels: "
            "the channels of a narrower network cannot be found."
        )


def _weight_hook(prefix: str, width: float, masks: Masks, fill: float) -> Callable[..., Tensor]:
    """Make a hook on a linear layer or convolution that keeps a fraction of its channels."""

    def _hook(layer: Any, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        weight = layer.weight
        axis = -1 if isinstance(layer, nn.Linear) else 1
        kept_inputs = _nonzero_channels(prefix, inputs[0], axis, fill)
        num_kept = math.ceil(width * len(weight))
        kept = (torch.arange(len(weight), device=weight.device) < num_kept).to(weight.dtype)
        groups = getattr(layer, "groups", 1)
        by_group = kept_inputs.to(weight.dtype).reshape(groups, -1)
        per_output = by_group.repeat_interleave(len(weight) // groups, 0)
        mask = (kept[:, None] * per_output).reshape(*weight.shape[:2], *[1] * (weight.dim() - 2))
        _record(masks, f"{prefix}weight", mask.expand_as(weight).contiguous())
        if layer.bias is not None:
            _record(masks, f"{prefix}bias", kept)
        shape = [1] * output.dim()
        shape[axis] = -1
        return fill * kept.reshape(shape).expand_as(output)

    return _hook


def _batchnorm_hook(prefix: str, masks: Masks, fill: float) -> Callable[..., Tensor]:
    """Make a hook on BatchNorm, which keeps the channels that it receives."""

    def _hook(layer: Any, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        kept = _nonzero_channels(prefix, inputs[0], 1, fill).to(output.dtype)
        for name in ("weight", "bias", "running_mean", "running_var"):
            if getattr(layer, name) is not None:
                _record(masks, f"{prefix}{name}", kept)
        return fill * kept.reshape(1, -1, *[1] * (output.dim() - 2)).expand_as(output)

    return _hook


def _nonzero_channels(prefix: str, x: Tensor, axis: int, fill: float) -> Tensor:
    """Return which channels hold anything but zeros."""
    is_nonzero = (x != 0).movedim(axis, 0).flatten(1).any(1)
    if not fill and bool(is_nonzero.any()):
        raise WidthError(
            f"layer '{prefix[:-1]}' receives values other than 0 for inputs of 0: "
            "an activation that does not map 0 to 0, such as a sigmoid, would make masked "
            "channels visible."
        )
    return is_nonzero


def _record(masks: Masks, name: str, mask: Tensor) -> None:
    if not torch.equal(masks.setdefault(name, mask), mask):
        raise WidthError(f"'{name}' is used twice, with different channels.")
