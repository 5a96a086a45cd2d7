"""Generators, and the ways in which their layers are computed."""

import math
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


def drawn(shape: tuple[int, ...], *models: int) -> tuple[Params, Tensor]:
    draw = torch.Generator().manual_seed(1)
    numbers = sum(map(math.prod, generators.conv_shapes(shape, 5)))
    make = partial(generators.conv_weights, input_shape=shape, noise_size=5)
    normal = torch.randn(*models, numbers, generator=draw, dtype=torch.float64)
    noise = torch.randn(*models, 4, 5, generator=draw, dtype=torch.float64)
    return (vmap(make)(normal) if models else make(normal)), noise


def layer_by_layer(weights: Params, noise: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The paper's generator of torch's own layers: enlarged first, then convolved."""

    def normal(x: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, training=True)

    x = (noise @ weights["weight0"].T).reshape(
        len(noise), 128, math.ceil(shape[1] / 4), math.ceil(shape[2] / 4)
    )
    x = nn.Upsample(scale_factor=2)(normal(x))
    x = nn.Upsample(size=shape[1:])(
        F.leaky_relu(normal(F.conv2d(x, weights["weight1"], padding=1)), 0.2)
    )
    x = F.leaky_relu(normal(F.conv2d(x, weights["weight2"], padding=1)), 0.2)
    return normal(F.conv2d(x, weights["weight3"], padding=1))


@pytest.mark.parametrize(
    "shape", [(3, 8, 8), (1, 28, 28), (1, 12, 4), (2, 5, 7), (1, 6, 10)], ids=str
)
def test_the_papers_generator_is_as_its_layers_one_after_the_other(shape: tuple[int, ...]) -> None:
    """Images and gradients are the same with and without real upsampling."""
    weights, noise = drawn(shape)
    kernel = torch.randn(4, *shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found, wanted = (
        make(weights, noise, shape) for make in (generators.conv_images, layer_by_layer)
    )
    assert found.shape == (4, *shape)
    assert float((found - wanted).abs().max()) < 1e-10
    slopes = [
        grad(lambda weights, make=make: (make(weights, noise, shape) * kernel).sum())(weights)
        for make in (generators.conv_images, layer_by_layer)
    ]
    assert max(float((slopes[0][name] - slopes[1][name]).abs().max()) for name in weights) < 1e-9


@pytest.mark.parametrize("own", [False, True], ids=["paper", "own"])
def test_generators_of_many_clients_convolve_in_the_layers_made_for_many(own: bool) -> None:
    """As models do: one operator for all clients, not one kernel a client."""
    shape = (1, 8, 8)
    model = Model(nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), shape, 3)
    weights, noise = drawn(shape, 3)
    if own:
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

    ways = [vmap(grad(partial(loss, model=one))) for one in (model.vmappable, model)]
    traced = make_fx(ways[0])(weights, noise)
    assert (
        "fedcog.convolve.default" in traced.code and "fedcog.convolve_weight.default" in traced.code
    )
    assert "aten.convolution" not in traced.code
    found = traced(weights, noise)
    wanted = ways[1](weights, noise)
    assert (
        max(
            float((found[name] - wanted[name]).abs().max() / wanted[name].abs().max())
            for name in wanted
        )
        < 1e-9
    )
