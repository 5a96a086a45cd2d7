"""Generators as pure functions: of images for FedCOG, virtual data for VHL, features for FedGen."""

import copy
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value
from torch.nn.modules.batchnorm import _NormBase

from fedcog.core.integers import ceil_div
from fedcog.core.optimizers import Optimizer, OptimizerState
from fedcog.core.tree import Params, State
from fedcog.models.checks import ModelError
from fedcog.models.functional import Model

STYLE_LATENT_SIZE = 64
STYLE_CHANNELS = 32
DEFAULT_NOISE_SIZE = 256
"""Random numbers that an image generator takes for one image."""
MAX_NOISE_IMAGE_SIZE = 8
BATCHNORM_EPS = 1e-5
BATCHNORM_MOMENTUM = 0.1


def noise_shape(input_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of noise for `noise_images`: at most 8x8 for images."""
    if len(input_shape) != 3:
        return input_shape
    channels, height, width = input_shape
    return (channels, min(MAX_NOISE_IMAGE_SIZE, height), min(MAX_NOISE_IMAGE_SIZE, width))


def noise_images(mean: Tensor, noise: Tensor, input_shape: tuple[int, ...]) -> Tensor:
    """Make smooth random images around a mean.

    Args:
        mean: Mean of each image, `(N, *noise_shape)`.
        noise: Standard normal noise of the same shape.
        input_shape: Shape of one input.

    Returns:
        Inputs `(N, *input_shape)`, clipped to [0, 1] and normalized by 0.5 and 0.25.
    """
    x = mean + 0.5 * noise
    if len(input_shape) == 3:
        x = F.interpolate(x, size=input_shape[1:], mode="bilinear", align_corners=False)
    return (x.clamp(0, 1) - 0.5) / 0.25


def style_shapes(channels: int) -> list[tuple[int, ...]]:
    """Return the shapes of the style generator's weights, for images of `channels` channels."""
    mapping = [(STYLE_LATENT_SIZE, STYLE_LATENT_SIZE)] * 2
    constant = (STYLE_CHANNELS, 4, 4)
    block = [(STYLE_CHANNELS, STYLE_LATENT_SIZE), (STYLE_CHANNELS, STYLE_CHANNELS, 3, 3)]
    output = [(STYLE_CHANNELS, STYLE_LATENT_SIZE), (channels, STYLE_CHANNELS, 1, 1)]
    return [*mapping, constant, *block * 4, *output]


def style_images(latents: Tensor, numbers: Tensor, input_shape: tuple[int, ...]) -> Tensor:
    """Make images with an untrained style generator.

    As in StyleGAN2 (Karras et al., CVPR 2020), latents are mapped to styles, which scale the input
    channels of each convolution. Images grow from 4x4 to 32x32 and are then resized.

    Args:
        latents: Latents `(N, 64)`.
        numbers: Standard normal numbers, one for each weight of `style_shapes`.
        input_shape: Shape of one image.

    Returns:
        Images `(N, *input_shape)`.
    """
    tensors = _unflatten(numbers, style_shapes(input_shape[0]))
    style = latents
    for weight in tensors[:2]:
        style = style @ weight.T / math.sqrt(STYLE_LATENT_SIZE)
        style = F.leaky_relu(style, 0.2) * math.sqrt(2)
    x = tensors[2].expand(len(latents), -1, -1, -1)
    for affine, weight in zip(tensors[3::2], tensors[4::2], strict=True):
        scales = 1 + style @ affine.T / math.sqrt(STYLE_LATENT_SIZE)
        x = x * scales[:, :, None, None]
        if weight.shape[-1] == 3:
            x = F.interpolate(x, scale_factor=2, mode="nearest") if x.shape[-1] < 32 else x
            x = F.conv2d(x, weight, padding=1)
            x = F.leaky_relu(x / (x.square().mean((1, 2, 3), keepdim=True) + 1e-8).sqrt(), 0.2)
        else:
            x = F.conv2d(x, weight) / math.sqrt(STYLE_CHANNELS)
    resized = F.interpolate(x, size=input_shape[1:], mode="bilinear", align_corners=False)
    return torch.tanh(resized) * 2


def conv_shapes(input_shape: tuple[int, ...], noise_size: int) -> list[tuple[int, ...]]:
    """Return the shapes of the convolutional generator's weights.

    Args:
        input_shape: Shape of one image.
        noise_size: Random numbers per image.

    Returns:
        Shapes of a linear layer and three 3x3 convolutions.

    Raises:
        ModelError: If inputs are not images.
    """
    if len(input_shape) != 3:
        raise ModelError(
            "fedcog.generator 'conv' makes images, and the inputs here are not images: "
            "set it to 'none'."
        )
    channels, height, width = input_shape
    positions = ceil_div(height, 4) * ceil_div(width, 4)
    return [(128 * positions, noise_size), (128, 128, 3, 3), (64, 128, 3, 3), (channels, 64, 3, 3)]


def conv_weights(numbers: Tensor, input_shape: tuple[int, ...], noise_size: int) -> Params:
    """Make the initial weights of the convolutional generator.

    Args:
        numbers: Standard normal numbers, one for each weight of `conv_shapes`.
        input_shape: Shape of one image.
        noise_size: Random numbers per image.

    Returns:
        Weights by name.
    """
    tensors = _unflatten(numbers, conv_shapes(input_shape, noise_size))
    return {
        f"weight{index}": tensor / math.sqrt(tensor[0].numel())
        for index, tensor in enumerate(tensors)
    }


def conv_images(weights: Params, noise: Tensor, input_shape: tuple[int, ...]) -> Tensor:
    """Make images with the convolutional generator (FedCOG, appendix A.4.2).

    A quarter of the height and width is doubled twice. Every layer is normalized over the batch,
    the last one too, so that images have the mean and deviation that models expect.

    Args:
        weights: Weights of `conv_weights`.
        noise: Noise `(N, noise_size)`.
        input_shape: Shape of one image.

    Returns:
        Images `(N, *input_shape)`.
    """
    height, width = input_shape[1:]
    x = F.linear(noise, weights["weight0"])
    x = x.reshape(-1, 128, ceil_div(height, 4), ceil_div(width, 4))
    x = _upsample_conv(_normalize(x), weights["weight1"], (2 * x.shape[-2], 2 * x.shape[-1]))
    x = _upsample_conv(F.leaky_relu(_normalize(x), 0.2), weights["weight2"], (height, width))
    return _normalize(F.conv2d(F.leaky_relu(_normalize(x), 0.2), weights["weight3"], padding=1))


class ConvGenerator(nn.Module):
    """The convolutional generator as a network with its own weights, for pretraining."""

    def __init__(self, input_shape: tuple[int, ...], noise: int = DEFAULT_NOISE_SIZE) -> None:
        """Initialize the weights at random.

        Args:
            input_shape: Shape of one image.
            noise: Random numbers per image.
        """
        super().__init__()
        self.input_shape = input_shape
        numbers = torch.randn(sum(map(math.prod, conv_shapes(input_shape, noise))))
        for name, value in conv_weights(numbers, input_shape, noise).items():
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, noise: Tensor) -> Tensor:
        """Make images from noise `(N, noise_size)`."""
        return conv_images(dict(self.named_parameters()), noise, self.input_shape)


def init_generator(model: Model, noise: Tensor, numbers: Tensor | None) -> Params:
    """Return the tensors that are optimized to make inputs.

    Args:
        model: The model; its generator is used if it has one, else the convolutional generator.
        noise: Noise `(N, noise_size)`.
        numbers: Standard normal numbers for the weights of the convolutional generator.

    Returns:
        Weights of the generator by name, and the noise as ".noise".
    """
    if model.generator is not None:
        weights = {
            name: value.detach()
            for name, value in model.generator.named_parameters()
            if value.requires_grad
        }
    else:
        assert numbers is not None, "a new generator needs random numbers"
        weights = conv_weights(numbers, model.continuous_shape, noise.shape[-1])
    return weights | {".noise": noise}


def generate_inputs(model: Model, tensors: Params) -> Tensor:
    """Make inputs with the generator of a model.

    Args:
        model: The model, whose layer implementations are used.
        tensors: Tensors of `init_generator`, optimized or not.

    Returns:
        Inputs `(N, *input_shape)`.
    """
    weights = {name: value for name, value in tensors.items() if not name.startswith(".")}
    with model.layers():
        if model.generator is None:
            return conv_images(weights, tensors[".noise"], model.continuous_shape)
        inputs: Tensor = functional_call(model.generator, weights, (tensors[".noise"],))
    return inputs


def check_generator(
    generator: nn.Module, noise_size: int, input_shape: tuple[int, ...]
) -> nn.Module:
    """Copy a user's generator, and check that it makes inputs.

    The copy is in evaluation mode, but its BatchNorm layers normalize over the batch: running
    statistics would not fit weights that change.

    Args:
        generator: The generator.
        noise_size: Random numbers per input.
        input_shape: Shape of one input.

    Returns:
        The copy.

    Raises:
        ModelError: If the generator does not take the noise, makes no inputs, draws random numbers,
            or has no gradient.
    """
    if not isinstance(generator, nn.Module):
        raise ModelError(
            f"{generator!r} is not an nn.Module: give an instance, such as MyGenerator()."
        )
    generator = copy.deepcopy(generator).cpu().float().eval()
    for layer in generator.modules():
        if isinstance(layer, _NormBase):
            layer.running_mean = None
            layer.running_var = None
            layer.num_batches_tracked = None
            layer.track_running_stats = False
    seeded = torch.Generator().manual_seed(0)
    noise = torch.randn(4, noise_size, generator=seeded).requires_grad_()
    with torch.random.fork_rng(devices=[]):
        try:
            inputs = generator(noise)
            repeated = generator(noise)
        except Exception as error:  # a user's code may raise anything
            raise ModelError(
                f"the generator does not take noise of shape {(4, noise_size)}: {error}. "
                "Set fedcog.noise to the number of random numbers that it takes per input."
            ) from error
    _check_generated(inputs, repeated, (4, noise_size), (4, *input_shape))
    return generator


def _check_generated(
    inputs: Tensor, repeated: Tensor, noise_shape: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    """Check the inputs that a generator makes of the same noise in two calls."""
    if not isinstance(inputs, Tensor) or inputs.shape != expected:
        shown = tuple(inputs.shape) if isinstance(inputs, Tensor) else type(inputs).__name__
        raise ModelError(
            f"for noise of shape {noise_shape} the generator gave {shown}, "
            f"and inputs have shape {expected}: change its last layer."
        )
    if inputs.dtype != torch.float32:
        raise ModelError(
            f"the generator gave {inputs.dtype}, and inputs are torch.float32: "
            "take the conversion out of it."
        )
    if not torch.equal(inputs.nan_to_num(), repeated.nan_to_num()):
        raise ModelError(
            "the generator does not make the same inputs of the same noise: it must be drawing "
            "random numbers, or writing to its buffers, and a run could not be repeated. "
            "Take that part out."
        )
    if not inputs.requires_grad or not bool(inputs.isfinite().all()):
        raise ModelError(
            "the generator's inputs depend neither on its weights nor on its noise, or are not "
            "finite, so nothing could be learned: look for detach or no_grad in it, and for "
            "weights that are too large."
        )


def _upsample_conv(x: Tensor, weight: Tensor, size: tuple[int, int]) -> Tensor:
    """Upsample images to `size` by nearest neighbors, then apply a 3x3 convolution.

    An upsampling by exactly two is computed on the small images, at half the cost: a 3x3 window
    then covers 2x2 different pixels, whose weights are sums that depend on the position in a 2x2
    block.
    """
    height, width = x.shape[-2:]
    if size != (2 * height, 2 * width):
        return F.conv2d(F.interpolate(x, size=size, mode="nearest"), weight, padding=1)

    def _sum_taps(w: Tensor, dim: int) -> Tensor:
        first, middle, last = w.unbind(dim)
        even = torch.stack((first, middle + last), dim)
        odd = torch.stack((first + middle, last), dim)
        return torch.stack([even, odd], 1)

    y = F.conv2d(x, _sum_taps(_sum_taps(weight, 2), 4).flatten(0, 2), padding=1)
    y = y.reshape(len(x), len(weight), 2, 2, height + 1, width + 1)
    rows = []
    for i in (0, 1):
        columns = [y[:, :, j, i, i : i + height, j : j + width] for j in (0, 1)]
        rows.append(torch.stack(columns, -1))
    return torch.stack(rows, 3).reshape(len(x), len(weight), *size)


def _normalize(x: Tensor) -> Tensor:
    """Normalize channels to mean 0 and deviation 1 over the batch."""
    mean = x.mean((0, 2, 3), keepdim=True)
    variance = x.var((0, 2, 3), keepdim=True, unbiased=False)
    return (x - mean) / (variance + BATCHNORM_EPS).sqrt()


class FeatureGeneratorSize(NamedTuple):
    """The layer sizes of a feature generator.

    Attributes:
        noise: Random numbers per feature vector.
        num_classes: Number of classes.
        hidden: Hidden units.
        num_features: Number of features.
    """

    noise: int
    num_classes: int
    hidden: int
    num_features: int


def feature_generator_shapes(size: FeatureGeneratorSize) -> list[tuple[int, int]]:
    """Return the shapes of the feature generator's two weight matrices."""
    return [(size.hidden, size.noise + size.num_classes), (size.num_features, size.hidden)]


def init_feature_generator(numbers: Tensor, size: FeatureGeneratorSize) -> Params:
    """Make the initial weights and running statistics of a feature generator.

    The first layer has no bias: BatchNorm would subtract it, and Adam would amplify its rounding
    errors.

    Args:
        numbers: Standard normal numbers, one for each weight of `feature_generator_shapes`.
        size: Layer sizes.

    Returns:
        Weights and running statistics by name.
    """
    first, last = (
        tensor / math.sqrt(tensor.shape[1])
        for tensor in _unflatten(numbers, feature_generator_shapes(size))
    )
    zeros = first.new_zeros(size.hidden)
    ones = first.new_ones(size.hidden)
    return {
        "0.weight": first,
        "1.weight": ones,
        "1.bias": zeros,
        "3.weight": last,
        "3.bias": last.new_zeros(size.num_features),
        "1.running_mean": zeros,
        "1.running_var": ones,
    }


def generate_features(weights: Params, noise: Tensor, labels: Tensor) -> Tensor:
    """Make features of given labels, in evaluation mode.

    The layers are Linear, BatchNorm (by its running statistics), ReLU and Linear.

    Args:
        weights: Weights and running statistics by name.
        noise: Noise `(N, noise_size)`.
        labels: Labels `(N,)`.

    Returns:
        Features `(N, F)`.
    """
    hidden = _first_layer(weights, noise, labels)
    deviation = (weights["1.running_var"] + BATCHNORM_EPS).sqrt()
    return _last_layers(weights, (hidden - weights["1.running_mean"]) / deviation)


def train_feature_generator(
    weights: Params,
    optimizer_state: State,
    loss: Callable[[Tensor, Tensor, Tensor], Tensor],
    noise: Tensor,
    labels: Tensor,
    lr: float,
    weight_decay: float,
) -> tuple[Params, State, Tensor]:
    """Train a feature generator with Adam.

    Args:
        weights: Weights and running statistics by name.
        optimizer_state: State of `init_optimizer_state`, or of earlier training.
        loss: Maps features `(N, F)`, noise `(N, noise_size)` and labels `(N,)` to a 0-d loss.
        noise: Noise of each step, `(steps, N, noise_size)`.
        labels: Labels of each step, `(steps, N)`.
        lr: Learning rate.
        weight_decay: Weight decay.

    Returns:
        Weights and running statistics, the optimizer state, and the mean loss over all steps.
    """
    params = {name: value for name, value in weights.items() if "running" not in name}
    running_mean = weights["1.running_mean"]
    running_var = weights["1.running_var"]
    state = OptimizerState(**optimizer_state)
    optimizer = Optimizer("adam", weight_decay=weight_decay)
    rate = torch.full_like(optimizer_state["step"], lr)
    losses = []

    def _objective(params: Params, eps: Tensor, y: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        hidden = _first_layer(params, eps, y)
        mean = hidden.mean(0)
        variance = hidden.var(0, unbiased=False)
        features = _last_layers(params, (hidden - mean) / (variance + BATCHNORM_EPS).sqrt())
        return loss(features, eps, y), (mean.detach(), variance.detach())

    for eps, y in zip(noise, labels, strict=True):
        grads, (value, (mean, variance)) = grad_and_value(_objective, has_aux=True)(params, eps, y)
        params, state = optimizer.step(params, grads, state, rate)
        unbiased = variance * len(y) / (len(y) - 1)
        running_mean = (1 - BATCHNORM_MOMENTUM) * running_mean + BATCHNORM_MOMENTUM * mean
        running_var = (1 - BATCHNORM_MOMENTUM) * running_var + BATCHNORM_MOMENTUM * unbiased
        losses.append(value)
    trained = params | {"1.running_mean": running_mean, "1.running_var": running_var}
    return trained, state._asdict(), torch.stack(losses).mean()


def init_optimizer_state(weights: Params) -> State:
    """Return the optimizer state of an untrained feature generator."""
    zeros = {
        name: torch.zeros_like(value) for name, value in weights.items() if "running" not in name
    }
    return {"first": zeros, "second": dict(zeros), "step": torch.zeros_like(weights["3.bias"][0])}


def _unflatten(numbers: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Cut a vector into tensors of given shapes."""
    parts = torch.split(numbers, [math.prod(shape) for shape in shapes])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def _first_layer(weights: Params, noise: Tensor, labels: Tensor) -> Tensor:
    """Apply the first linear layer to noise and one-hot labels."""
    num_classes = weights["0.weight"].shape[-1] - noise.shape[-1]
    classes = torch.arange(num_classes, device=labels.device)
    one_hot = (labels[:, None] == classes).to(noise.dtype)
    return F.linear(torch.cat([noise, one_hot], dim=-1), weights["0.weight"])


def _last_layers(weights: Params, normalized: Tensor) -> Tensor:
    """Apply BatchNorm's scale and shift, ReLU and the last linear layer."""
    hidden = (normalized * weights["1.weight"] + weights["1.bias"]).relu()
    return F.linear(hidden, weights["3.weight"], weights["3.bias"])
