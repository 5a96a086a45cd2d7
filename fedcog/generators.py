"""Generators as pure functions of random numbers: images for FedCOG, virtual data for VHL, features for FedGen."""

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad_and_value

from fedcog.optimiser import Motion, Optimiser
from fedcog.tree import Params, State

LATENT, CHANNELS = 64, 32  # of the style generator
NOISE = 256  # numbers that go into the convolutional generator, for one image


def noise_shape(input_shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that noise is drawn in: images at 8x8 at most, anything else as it is."""
    return (input_shape[0], min(8, input_shape[1]), min(8, input_shape[2])) if len(input_shape) == 3 else input_shape


def noise_images(mean: Tensor, noise: Tensor, input_shape: tuple[int, ...]) -> Tensor:
    """Clouds of noise around `mean`, enlarged smoothly, clipped to [0, 1] and normalised by 0.5 and 0.25."""
    x = mean + 0.5 * noise
    if len(input_shape) == 3:
        x = F.interpolate(x, size=input_shape[1:], mode="bilinear", align_corners=False)
    return (x.clamp(0, 1) - 0.5) / 0.25


def style_sizes(channels: int) -> list[tuple[int, ...]]:
    """The shapes of an untrained style generator's weights for images of so many channels."""
    mapping = [(LATENT, LATENT)] * 2
    blocks = [shape for _ in range(4) for shape in ((CHANNELS, LATENT), (CHANNELS, CHANNELS, 3, 3))]
    return [*mapping, (CHANNELS, 4, 4), *blocks, (CHANNELS, LATENT), (channels, CHANNELS, 1, 1)]


def style_images(latents: Tensor, numbers: Tensor, input_shape: tuple[int, ...]) -> Tensor:
    """Images of a style generator whose weights are standard normal `numbers`, never trained.

    As in StyleGAN2 (Karras et al., CVPR 2020): latents are mapped to styles, which scale the channels going into each
    convolution; 4x4 is doubled to 32x32, then resized.
    """
    sizes = style_sizes(input_shape[0])
    parts = _parts(numbers, sizes)
    style = latents
    for weight in parts[:2]:
        style = F.leaky_relu(style @ weight.T / math.sqrt(LATENT), 0.2) * math.sqrt(2)
    x = parts[2].expand(len(latents), -1, -1, -1)
    for affine, weight in zip(parts[3::2], parts[4::2], strict=True):
        scales = 1 + style @ affine.T / math.sqrt(LATENT)
        x = x * scales[:, :, None, None]
        if weight.shape[-1] == 3:
            x = F.interpolate(x, scale_factor=2, mode="nearest") if x.shape[-1] < 32 else x
            x = F.conv2d(x, weight, padding=1)
            x = F.leaky_relu(x / (x.square().mean((1, 2, 3), keepdim=True) + 1e-8).sqrt(), 0.2)
        else:
            x = F.conv2d(x, weight) / math.sqrt(CHANNELS)
    return torch.tanh(F.interpolate(x, size=input_shape[1:], mode="bilinear", align_corners=False)) * 2


def conv_sizes(input_shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The shapes of the convolutional generator's weights: a linear layer, then three 3x3 convolutions."""
    channels, height, width = input_shape
    small = -(-height // 4) * -(-width // 4)
    return [(128 * small, NOISE), (128, 128, 3, 3), (64, 128, 3, 3), (channels, 64, 3, 3)]


def conv_generator(numbers: Tensor, input_shape: tuple[int, ...]) -> Params:
    """The weights of the convolutional generator, made of standard normal `numbers`."""
    parts = _parts(numbers, conv_sizes(input_shape))
    return {f"weight{place}": part / math.sqrt(part[0].numel()) for place, part in enumerate(parts)}


def conv_images(learnt: Params, input_shape: tuple[int, ...]) -> Tensor:
    """Images that a convolutional generator makes of noise {"noise"} (FedCOG, appendix A.4.2).

    A quarter of the height and width is doubled twice; every layer is normalised over the batch, the last one too, so
    that images have the mean and deviation that models are used to.
    """
    height, width = input_shape[1:]
    x = F.linear(learnt["noise"], learnt["weight0"]).reshape(-1, 128, -(-height // 4), -(-width // 4))
    x = F.interpolate(_normal(x), scale_factor=2, mode="nearest")
    x = F.leaky_relu(_normal(F.conv2d(x, learnt["weight1"], padding=1)), 0.2)
    x = F.interpolate(x, size=(height, width), mode="nearest")
    x = F.leaky_relu(_normal(F.conv2d(x, learnt["weight2"], padding=1)), 0.2)
    return _normal(F.conv2d(x, learnt["weight3"], padding=1))


def _normal(x: Tensor) -> Tensor:
    """Channels of mean 0 and deviation 1, over the batch."""
    mean, variance = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), keepdim=True, unbiased=False)
    return (x - mean) / (variance + 1e-5).sqrt()


def feature_sizes(noise: int, classes: int, hidden: int, width: int) -> list[tuple[int, int]]:
    """The shapes of the feature generator's two weight matrices."""
    return [(hidden, noise + classes), (width, hidden)]


def feature_generator(numbers: Tensor, noise: int, classes: int, hidden: int, width: int) -> Params:
    """The weights of a generator of features, made of standard normal `numbers`, and its running statistics.

    The first layer has no bias: BatchNorm takes it off again, and Adam would blow its rounding errors up.
    """
    shapes = feature_sizes(noise, classes, hidden, width)
    first, last = (part / math.sqrt(part.shape[1]) for part in _parts(numbers, shapes))
    zeros, ones = first.new_zeros(hidden), first.new_ones(hidden)
    weights = {"0.weight": first, "1.weight": ones, "1.bias": zeros, "3.weight": last, "3.bias": last.new_zeros(width)}
    return weights | {"1.running_mean": zeros, "1.running_var": ones}


def features(weights: Params, noise: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Features of the labels, in use: Linear, BatchNorm by its running statistics, ReLU, Linear."""
    hidden = _first(weights, noise, labels, classes)
    return _last(weights, (hidden - weights["1.running_mean"]) / (weights["1.running_var"] + 1e-5).sqrt())


def teach(
    weights: Params,
    motion: State,
    loss: Callable[[Tensor, Tensor, Tensor], Tensor],
    noise: Tensor,
    labels: Tensor,
    classes: int,
    lr: float,
    weight_decay: float,
) -> tuple[Params, State, Tensor]:
    """The generator trained by Adam on loss(features, noise, labels), a step a row; how it moves, and the mean loss."""
    learnt = {name: value for name, value in weights.items() if "running" not in name}
    running = weights["1.running_mean"], weights["1.running_var"]
    moving, optimiser = Motion(**motion), Optimiser("adam", weight_decay=weight_decay)
    rate, values = torch.full_like(motion["step"], lr), []

    def objective(learnt: Params, eps: Tensor, y: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        hidden = _first(learnt, eps, y, classes)
        mean, variance = hidden.mean(0), hidden.var(0, unbiased=False)
        made = _last(learnt, (hidden - mean) / (variance + 1e-5).sqrt())
        return loss(made, eps, y), (mean.detach(), variance.detach())

    for eps, y in zip(noise, labels, strict=True):
        grads, (value, statistics) = grad_and_value(objective, has_aux=True)(learnt, eps, y)
        learnt, moving = optimiser.step(learnt, grads, moving, rate)
        unbiased = statistics[0], statistics[1] * len(y) / (len(y) - 1)
        running = 0.9 * running[0] + 0.1 * unbiased[0], 0.9 * running[1] + 0.1 * unbiased[1]
        values.append(value)
    weights = learnt | {"1.running_mean": running[0], "1.running_var": running[1]}
    return weights, moving._asdict(), torch.stack(values).mean()


def at_rest(weights: Params) -> State:
    """How a generator moves that was never taught."""
    zeros = {name: torch.zeros_like(value) for name, value in weights.items() if "running" not in name}
    return {"first": zeros, "second": dict(zeros), "step": torch.zeros_like(weights["3.bias"][0])}


def _parts(numbers: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """A long vector cut up into tensors of these shapes."""
    parts = torch.split(numbers, [math.prod(shape) for shape in shapes])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def _first(weights: Params, noise: Tensor, labels: Tensor, classes: int) -> Tensor:
    chosen = (labels[:, None] == torch.arange(classes, device=labels.device)).to(noise.dtype)
    return F.linear(torch.cat([noise, chosen], dim=-1), weights["0.weight"])


def _last(weights: Params, normal: Tensor) -> Tensor:
    hidden = (normal * weights["1.weight"] + weights["1.bias"]).relu()
    return F.linear(hidden, weights["3.weight"], weights["3.bias"])
