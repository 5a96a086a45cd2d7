"""Tests that max pooling from plain operators matches torch, including ties."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import grad, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from fedcog.models.ops.layers import LayerOverrides
from fedcog.models.ops.pooling import max_pool


def images(seed: int, *shape: int) -> Tensor:
    """Images with few different values, so that windows have ties."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).double()


@given(
    st.integers(0, 10**6),
    st.integers(1, 3),
    st.integers(1, 2),
    st.integers(3, 8),
    st.integers(3, 8),
)
def test_values_and_gradients_match_torch(
    seed: int, rows: int, columns: int, height: int, width: int
) -> None:
    x = images(seed, 2, 3, 2, height, width)
    weight = images(seed + 1, 3, 2, height // rows, width // columns)

    def plain_loss(x: Tensor) -> Tensor:
        return (max_pool(x, rows, columns) * weight).sum()

    def torch_loss(x: Tensor) -> Tensor:
        return (F.max_pool2d(x, (rows, columns)) * weight).sum()

    assert torch.equal(vmap(grad(plain_loss))(x), vmap(grad(torch_loss))(x))
    assert torch.equal(vmap(plain_loss)(x), vmap(torch_loss)(x))


def test_second_derivatives_match_torch() -> None:
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64)

    def squared_gradient(pool):  # type: ignore[no-untyped-def]
        return lambda x: grad(lambda x: pool(x).pow(3).sum())(x).square().sum()

    actual = grad(squared_gradient(lambda x: max_pool(x, 2, 2)))(x)
    expected = grad(squared_gradient(lambda x: F.max_pool2d(x, 2)))(x)
    assert float((actual - expected).abs().max()) < 1e-12


POOLS = {
    "tiles": (nn.MaxPool2d(2), True),
    "stride given": (nn.MaxPool2d((2, 1), stride=(2, 1)), True),
    "overlaps": (nn.MaxPool2d(3, stride=2), False),
    "padded": (nn.MaxPool2d(2, padding=1), False),
    "dilated": (nn.MaxPool2d(2, dilation=2), False),
    "rounded up": (nn.MaxPool2d(2, ceil_mode=True), False),
    "too large to unroll": (nn.MaxPool2d(3), False),
}


@pytest.mark.parametrize("name", POOLS)
def test_traced_pooling_matches_torch(name: str) -> None:
    pool, is_unrolled = POOLS[name]
    x = images(0, 4, 2, 7, 7)

    def override_loss(x: Tensor) -> Tensor:
        with LayerOverrides():
            return pool(x).pow(3).sum()

    def torch_loss(x: Tensor) -> Tensor:
        return pool(x).pow(3).sum()

    traced = make_fx(vmap(grad(override_loss)))(x)
    assert torch.equal(traced(x), vmap(grad(torch_loss))(x))
    assert is_unrolled == ("max_pool2d" not in traced.code)


def test_eager_pooling_uses_torch_and_returns_indices() -> None:
    x = images(1, 2, 2, 6, 6)
    with LayerOverrides():
        values, indices = F.max_pool2d(x, 2, return_indices=True)
        assert torch.equal(torch.max_pool2d(x, 2), values)
    assert torch.equal(x.flatten(2).gather(2, indices.flatten(2)).reshape(values.shape), values)


def test_forward_mode_matches_torch() -> None:
    network = nn.Sequential(nn.Conv2d(2, 3, 3), nn.MaxPool2d(2)).requires_grad_(False)
    x = torch.randn(2, 2, 6, 6)
    direction = torch.randn(2, 2, 6, 6)

    def derivative(x: Tensor, direction: Tensor) -> Tensor:
        with LayerOverrides():
            tangent: Tensor = jvp(network, (x,), (direction,))[1]
        return tangent

    expected = jvp(network, (x,), (direction,))[1]
    assert float((make_fx(derivative)(x, direction)(x, direction) - expected).abs().max()) < 1e-6


def test_traced_pooling_refuses_images_smaller_than_the_window() -> None:
    def pool(x: Tensor) -> Tensor:
        with LayerOverrides():
            return F.max_pool2d(x, 2)

    with pytest.raises(RuntimeError, match="too small"):
        make_fx(pool)(torch.zeros(1, 1, 1, 4))
