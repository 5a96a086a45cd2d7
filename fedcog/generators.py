"""Generators as pure functions of random numbers: images for FedCOG, virtual data for VHL, features for FedGen."""

import copy
import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value
from torch.nn.modules.batchnorm import _NormBase

from fedcog.fitness import ModelError
from fedcog.models import Model
from fedcog.optimiser import Motion, Optimiser
from fedcog.tree import Params, State

LATENT, CHANNELS = 64, 32  # of the style generator
NOISE = 256  # numbers that go into an image generator, for one image, if nobody says otherwise


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


def conv_sizes(input_shape: tuple[int, ...], noise: int) -> list[tuple[int, ...]]:
    """The shapes of the convolutional generator's weights: a linear layer, then three 3x3 convolutions."""
    if len(input_shape) != 3:
        raise ModelError("fedcog.generator 'conv' makes images, and the inputs here are none: set it to 'none'.")
    channels, height, width = input_shape
    small = -(-height // 4) * -(-width // 4)
    return [(128 * small, noise), (128, 128, 3, 3), (64, 128, 3, 3), (channels, 64, 3, 3)]


def conv_weights(numbers: Tensor, input_shape: tuple[int, ...], noise: int) -> Params:
    """The weights of the convolutional generator, made of standard normal `numbers`."""
    parts = _parts(numbers, conv_sizes(input_shape, noise))
    return {f"weight{place}": part / math.sqrt(part[0].numel()) for place, part in enumerate(parts)}


def conv_images(weights: Params, noise: Tensor, input_shape: tuple[int, ...]) -> Tensor:
    """Images that a convolutional generator makes of noise (FedCOG, appendix A.4.2).

    A quarter of the height and width is doubled twice; every layer is normalised over the batch, the last one too, so
    that images have the mean and deviation that models are used to.
    """
    height, width = input_shape[1:]
    x = F.linear(noise, weights["weight0"]).reshape(-1, 128, -(-height // 4), -(-width // 4))
    x = _enlarged(_normal(x), weights["weight1"], (2 * x.shape[-2], 2 * x.shape[-1]))
    x = _enlarged(F.leaky_relu(_normal(x), 0.2), weights["weight2"], (height, width))
    return _normal(F.conv2d(F.leaky_relu(_normal(x), 0.2), weights["weight3"], padding=1))


class ConvGenerator(nn.Module):
    """The same as a network with weights of its own: something to pre-train."""

    def __init__(self, input_shape: tuple[int, ...], noise: int = NOISE) -> None:
        super().__init__()
        self.input_shape = input_shape
        numbers = torch.randn(sum(map(math.prod, conv_sizes(input_shape, noise))))
        for name, value in conv_weights(numbers, input_shape, noise).items():
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, noise: Tensor) -> Tensor:
        """Images of noise [n, numbers]."""
        return conv_images(dict(self.named_parameters()), noise, self.input_shape)


def begin(model: Model, noise: Tensor, numbers: Tensor | None) -> Params:
    """What learns to make inputs: noise {".noise"}, and the weights of the model's generator.

    Where the model has none, it is the paper's, with weights made of standard normal `numbers`.
    """
    if model.generator is not None:
        weights = {name: value.detach() for name, value in model.generator.named_parameters() if value.requires_grad}
    else:
        assert numbers is not None, "what begins afresh is drawn"
        weights = conv_weights(numbers, model.input_shape, noise.shape[-1])
    return weights | {".noise": noise}


def inputs(model: Model, learnt: Params) -> Tensor:
    """The inputs that a generator makes with what was learnt, in layers as the model's."""
    weights = {name: value for name, value in learnt.items() if not name.startswith(".")}
    with model.layers():
        if model.generator is None:
            return conv_images(weights, learnt[".noise"], model.input_shape)
        made: Tensor = functional_call(model.generator, weights, (learnt[".noise"],))
    return made


def usable(generator: nn.Module, noise: int, input_shape: tuple[int, ...]) -> nn.Module:
    """A copy of a generator that makes inputs of so many random numbers each, or the reason why it cannot.

    It is used as in evaluation, but BatchNorm normalises over the batch: while weights learn, running statistics would
    be those of another network.
    """
    if not isinstance(generator, nn.Module):
        raise ModelError(f"{generator!r} is not an nn.Module: give an instance, such as MyGenerator().")
    generator = copy.deepcopy(generator).cpu().float().eval()
    for part in generator.modules():
        if isinstance(part, _NormBase):
            part.running_mean = part.running_var = part.num_batches_tracked = None
            part.track_running_stats = False
    numbers = torch.randn(4, noise, generator=torch.Generator().manual_seed(0)).requires_grad_()
    with torch.random.fork_rng(devices=[]):
        try:
            made, again = generator(numbers), generator(numbers)
        except Exception as error:  # it is somebody's own code
            raise ModelError(
                f"the generator does not take noise of shape {(4, noise)}: {error}. Set fedcog.noise to the numbers it "
                "makes an input of."
            ) from error
    wanted = (4, *input_shape)
    if not isinstance(made, Tensor) or made.shape != wanted:
        shown = tuple(made.shape) if isinstance(made, Tensor) else type(made).__name__
        raise ModelError(
            f"for noise of shape {(4, noise)} the generator gave {shown}, and inputs have shape {wanted}: change its "
            "last layer."
        )
    if made.dtype != torch.float32:
        raise ModelError(f"the generator gave {made.dtype}, and inputs are torch.float32: take the change out of it.")
    if not torch.equal(made.nan_to_num(), again.nan_to_num()):
        raise ModelError(
            "the generator does not make the same inputs of the same noise: it must draw random numbers of its own, or "
            "write to its buffers, and a run could not be repeated. Take that part out."
        )
    if not made.requires_grad or not bool(made.isfinite().all()):
        raise ModelError(
            "the generator's inputs hang neither on its weights nor on its noise, or are not finite, so that nothing "
            "could be learnt: look for detach or no_grad in it, and for weights that are too large."
        )
    return generator


def _enlarged(x: Tensor, weight: Tensor, size: tuple[int, int]) -> Tensor:
    """The 3x3 convolution of x enlarged to `size`, its pixels standing several times.

    Where each stands four times, it is computed on x itself, for half of the work: a window has 2x2 different pixels,
    whose weights are sums, and other ones for each place in a block of four.
    """
    height, width = x.shape[-2:]
    if size != (2 * height, 2 * width):
        return F.conv2d(F.interpolate(x, size=size, mode="nearest"), weight, padding=1)

    def summed(w: Tensor, dim: int) -> Tensor:
        first, middle, last = w.unbind(dim)
        return torch.stack([torch.stack(pair, dim) for pair in ((first, middle + last), (first + middle, last))], 1)

    y = F.conv2d(x, summed(summed(weight, 2), 4).flatten(0, 2), padding=1)
    y = y.reshape(len(x), len(weight), 2, 2, height + 1, width + 1)
    places = [[y[:, :, right, low, low : low + height, right : right + width] for right in (0, 1)] for low in (0, 1)]
    return torch.stack([torch.stack(pair, -1) for pair in places], 3).reshape(len(x), len(weight), *size)


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
