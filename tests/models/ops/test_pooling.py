"""Max pooling in plain operators has torch's values and gradients, also for equal maxima."""

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
    """Few different values, so that windows have ties."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=draw).double()


@given(
    st.integers(0, 10**6),
    st.integers(1, 3),
    st.integers(1, 2),
    st.integers(3, 8),
    st.integers(3, 8),
)
def test_values_and_gradients_are_torchs(
    seed: int, rows: int, columns: int, height: int, width: int
) -> None:
    x = images(seed, 2, 3, 2, height, width)
    weight = images(seed + 1, 3, 2, height // rows, width // columns)

    def mine(x: Tensor) -> Tensor:
        return (max_pool(x, rows, columns) * weight).sum()

    def torchs(x: Tensor) -> Tensor:
        return (F.max_pool2d(x, (rows, columns)) * weight).sum()

    assert torch.equal(vmap(grad(mine))(x), vmap(grad(torchs))(x))
    assert torch.equal(vmap(mine)(x), vmap(torchs)(x))


def test_second_derivatives_are_torchs() -> None:
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64)

    def steep(pool):  # type: ignore[no-untyped-def]
        return lambda x: grad(lambda x: pool(x).pow(3).sum())(x).square().sum()

    mine = grad(steep(lambda x: max_pool(x, 2, 2)))(x)
    torchs = grad(steep(lambda x: F.max_pool2d(x, 2)))(x)
    assert float((mine - torchs).abs().max()) < 1e-12


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
def test_what_is_traced_pools_as_torch_does(name: str) -> None:
    pool, ours = POOLS[name]
    x = images(0, 4, 2, 7, 7)

    def energy(x: Tensor) -> Tensor:
        with LayerOverrides():
            return pool(x).pow(3).sum()

    def torchs(x: Tensor) -> Tensor:
        return pool(x).pow(3).sum()

    traced = make_fx(vmap(grad(energy)))(x)
    assert torch.equal(traced(x), vmap(grad(torchs))(x))
    assert ours == ("max_pool2d" not in traced.code)


def test_eagerly_it_is_torchs_own_and_indices_may_be_asked_for() -> None:
    x = images(1, 2, 2, 6, 6)
    with LayerOverrides():
        values, places = F.max_pool2d(x, 2, return_indices=True)
        assert torch.equal(torch.max_pool2d(x, 2), values)
    assert torch.equal(x.flatten(2).gather(2, places.flatten(2)).reshape(values.shape), values)


def test_forward_mode_is_left_to_torch() -> None:
    network = nn.Sequential(nn.Conv2d(2, 3, 3), nn.MaxPool2d(2)).requires_grad_(False)
    x = torch.randn(2, 2, 6, 6)
    way = torch.randn(2, 2, 6, 6)

    def slope(x: Tensor, way: Tensor) -> Tensor:
        with LayerOverrides():
            found: Tensor = jvp(network, (x,), (way,))[1]
        return found

    wanted = jvp(network, (x,), (way,))[1]
    assert float((make_fx(slope)(x, way)(x, way) - wanted).abs().max()) < 1e-6


def test_an_image_smaller_than_the_window_is_refused_when_traced() -> None:
    def pool(x: Tensor) -> Tensor:
        with LayerOverrides():
            return F.max_pool2d(x, 2)

    with pytest.raises(RuntimeError, match="too small"):
        make_fx(pool)(torch.zeros(1, 1, 1, 4))
