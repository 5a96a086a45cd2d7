"""Tests of input generators and of how their layers are computed."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from fedcog.core.tree import Params
from fedcog.models import generators
from fedcog.models.functional import Model


def random_arguments(shape: tuple[int, ...], *num_models: int) -> tuple[Params, Tensor]:
    generator = torch.Generator().manual_seed(1)
    num_weights = sum(map(math.prod, generators.conv_shapes(shape, 5)))
    conv_weights = partial(generators.conv_weights, input_shape=shape, noise_size=5)
    normal = torch.randn(*num_models, num_weights, generator=generator, dtype=torch.float64)
    noise = torch.randn(*num_models, 4, 5, generator=generator, dtype=torch.float64)
    return (vmap(conv_weights)(normal) if num_models else conv_weights(normal)), noise


def layer_by_layer(weights: Params, noise: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The paper's generator from torch layers: upsample first, then convolve."""

    def batch_norm(x: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, training=True)

    x = (noise @ weights["weight0"].T).reshape(
        len(noise), 128, math.ceil(shape[1] / 4), math.ceil(shape[2] / 4)
    )
    x = nn.Upsample(scale_factor=2)(batch_norm(x))
    x = nn.Upsample(size=shape[1:])(
        F.leaky_relu(batch_norm(F.conv2d(x, weights["weight1"], padding=1)), 0.2)
    )
    x = F.leaky_relu(batch_norm(F.conv2d(x, weights["weight2"], padding=1)), 0.2)
    return batch_norm(F.conv2d(x, weights["weight3"], padding=1))


@pytest.mark.parametrize(
    "shape", [(3, 8, 8), (1, 28, 28), (1, 12, 4), (2, 5, 7), (1, 6, 10)], ids=str
)
def test_conv_generator_matches_layer_by_layer_version(shape: tuple[int, ...]) -> None:
    """Images and gradients are the same with and without real upsampling."""
    weights, noise = random_arguments(shape)
    projection = torch.randn(
        4, *shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64
    )
    images = generators.conv_images(weights, noise, shape)
    expected = layer_by_layer(weights, noise, shape)
    assert images.shape == (4, *shape)
    assert float((images - expected).abs().max()) < 1e-10
    grads = []
    for generate in (generators.conv_images, layer_by_layer):

        def loss(weights: Params, generate: Callable[..., Tensor] = generate) -> Tensor:
            return (generate(weights, noise, shape) * projection).sum()

        grads.append(grad(loss)(weights))
    assert max(float((grads[0][name] - grads[1][name]).abs().max()) for name in weights) < 1e-9


@pytest.mark.parametrize("is_user_generator", [False, True], ids=["paper", "own"])
def test_vmapped_generators_use_the_batched_convolution(is_user_generator: bool) -> None:
    """One operator convolves for all clients, instead of one kernel per client."""
    shape = (1, 8, 8)
    model = Model(nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), shape, 3)
    weights, noise = random_arguments(shape, 3)
    if is_user_generator:
        model.generator = generators.check_generator(
            nn.Sequential(nn.Linear(5, 64), nn.Unflatten(1, shape), nn.Conv2d(1, 1, 3, padding=1)),
            5,
            shape,
        ).double()
        weights = {
            name: value.detach().expand(3, *value.shape).clone()
            for name, value in model.generator.named_parameters()
        }

    def loss(weights: Params, noise: Tensor, model: Model) -> Tensor:
        return generators.generate_inputs(model, weights | {".noise": noise}).pow(3).sum()

    gradients = [vmap(grad(partial(loss, model=variant))) for variant in (model.vmappable, model)]
    traced = make_fx(gradients[0])(weights, noise)
    assert (
        "fedcog.convolve.default" in traced.code and "fedcog.convolve_weight.default" in traced.code
    )
    assert "aten.convolution" not in traced.code
    grads = traced(weights, noise)
    expected = gradients[1](weights, noise)
    errors = [
        float((grads[name] - expected[name]).abs().max() / expected[name].abs().max())
        for name in expected
    ]
    assert max(errors) < 1e-9
