"""Layer overrides compute the same as torch's layers, under vmap and differentiation."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fedcog.algorithms import FedAvg
from fedcog.models.functional import Model
from fedcog.models.ops import layers
from fedcog.models.ops.layers import LayerOverrides
from fedcog.testing import ToyFederation, max_difference

NETWORK = nn.Sequential(
    *(
        nn.Conv2d(2, 4, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.Conv2d(4, 3, (2, 3), dilation=(1, 2)),
        nn.Tanh(),
    ),
    *(
        nn.Conv2d(3, 3, 1, groups=3),
        nn.Conv2d(3, 2, 3, padding="same"),
        nn.Conv2d(2, 2, 1, padding="valid"),
    ),
).double()


@pytest.fixture(autouse=True, params=["ours", "as it comes"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the operator for many models also on a CPU; and the layers that a CPU uses by default."""
    if request.param == "ours":
        monkeypatch.setattr(layers, "_has_kernel", lambda input: True)


def energy(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return functional_call(NETWORK, params, (x,)).square().sum()


def ours(params: dict[str, Tensor], x: Tensor) -> Tensor:
    with LayerOverrides():
        return energy(params, x)


def arguments(models: int = 3) -> tuple[dict[str, Tensor], Tensor]:
    draw = torch.Generator().manual_seed(0)
    params = {
        name: value.detach()
        + 0.1 * torch.randn(models, *value.shape, generator=draw, dtype=value.dtype)
        for name, value in NETWORK.named_parameters()
    }
    return params, torch.randn(models, 5, 2, 9, 9, generator=draw, dtype=torch.float64)


def same(one: object, other: object) -> None:
    for a, b in zip(
        torch.utils._pytree.tree_leaves(one), torch.utils._pytree.tree_leaves(other), strict=True
    ):
        assert float((a - b).abs().max()) < 1e-10


@pytest.mark.parametrize("dims", [(0, 0), (None, 0), (0, None)])
def test_gradients_are_torchs_whatever_the_models_share(
    dims: tuple[int | None, int | None],
) -> None:
    params, x = arguments()
    params = params if dims[0] == 0 else {name: value[0] for name, value in params.items()}
    x = x if dims[1] == 0 else x[0]
    how = {"in_dims": dims}
    same(vmap(grad(ours, (0, 1)), **how)(params, x), vmap(grad(energy, (0, 1)), **how)(params, x))  # type: ignore[arg-type]


def test_second_derivatives_are_torchs() -> None:
    def steep(function):  # type: ignore[no-untyped-def]
        slopes = grad(function, (0, 1))
        return lambda params, x: sum(
            (one**2).sum() for one in (*slopes(params, x)[0].values(), slopes(params, x)[1])
        )

    params, x = arguments(2)
    same(vmap(grad(steep(ours), (0, 1)))(params, x), vmap(grad(steep(energy), (0, 1)))(params, x))


def test_plain_autograd_works_too() -> None:
    x, w, b = (
        torch.randn(*size).double().requires_grad_() for size in ((2, 3, 6, 6), (4, 3, 3, 3), (4,))
    )
    with LayerOverrides():
        mine = torch.autograd.grad(F.conv2d(x, w, b, padding=1).square().sum(), (x, w, b))
    same(mine, torch.autograd.grad(F.conv2d(x, w, b, padding=1).square().sum(), (x, w, b)))


def test_a_batch_may_be_empty() -> None:
    with LayerOverrides():
        assert F.conv2d(torch.randn(0, 3, 8, 8), torch.randn(4, 3, 3, 3), torch.randn(4)).shape == (
            0,
            4,
            6,
            6,
        )


@pytest.mark.parametrize("bias", [torch.zeros(1), torch.zeros(4).double()])
def test_what_torch_refuses_is_refused(bias: Tensor) -> None:
    with LayerOverrides(), pytest.raises(RuntimeError):
        F.conv2d(torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3), bias)
    with LayerOverrides(), pytest.raises(ValueError, match="more than 1 value per channel"):
        F.batch_norm(torch.randn(1, 3), None, None, training=True)


def test_arguments_may_be_named() -> None:
    x = torch.randn(2, 3, 6, 6)
    w = torch.randn(4, 3, 3, 3)
    with LayerOverrides():
        mine = F.conv2d(input=x, weight=w, padding="valid"), F.max_pool2d(input=x, kernel_size=2)
    assert float((mine[0] - F.conv2d(x, w)).abs().max()) < 1e-5
    assert torch.equal(mine[1], F.max_pool2d(x, 2))


@pytest.mark.parametrize(
    "dims", [(None, None, 0), (0, None, None), (None, 0, None), (0, None, 0), (0, 0, None)]
)
def test_a_bias_may_be_shared_or_not(dims: tuple[int | None, ...]) -> None:
    draw = torch.Generator().manual_seed(0)
    sizes = (2, 3, 6, 6), (4, 3, 3, 3), (4,)
    given = [
        torch.randn(*([3] if dim == 0 else []), *size, generator=draw, dtype=torch.float64)
        for dim, size in zip(dims, sizes, strict=True)
    ]

    def plain(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.conv2d(x, w, b).pow(3).sum()

    def mine(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        with LayerOverrides():
            return plain(x, w, b)

    same(vmap(grad(mine, (0, 1, 2)), dims)(*given), vmap(grad(plain, (0, 1, 2)), dims)(*given))


@pytest.mark.parametrize("affine", [True, False])
def test_running_statistics_are_torchs(affine: bool) -> None:
    module = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3, affine=affine), nn.Flatten(), nn.Linear(108, 2)
    )
    model = Model(module, (1, 8, 8), 2).to(torch.device("cpu"), torch.float64)
    x = torch.randn(5, 1, 8, 8).double()
    plain = model.forward(model.params, model.buffers, x)
    mine = model.vmappable.forward(model.params, model.buffers, x)
    same(plain.logits, mine.logits)
    same(plain.buffers, mine.buffers)
    change = mine.buffers["1.running_mean"] - model.buffers["1.running_mean"]
    assert float(change.abs().max()) > 1e-3


def test_a_batch_norm_without_running_statistics() -> None:
    x = torch.randn(4, 3, 5).double()
    with LayerOverrides():
        mine = F.batch_norm(x, None, None, training=True)
    same(mine, F.batch_norm(x, None, None, training=True))


def test_in_bfloat16_only_products_are_made_in_it() -> None:
    module = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(108, 2))
    exact = Model(module, (1, 8, 8), 2)
    coarse = exact.to(torch.device("cpu"), torch.bfloat16)
    x = torch.randn(5, 1, 8, 8)
    for model in (coarse, coarse.vmappable):
        logits = model.predict(model.params, x)
        assert logits.dtype == torch.float32 and all(
            one.dtype == torch.float32 for one in model.params.values()
        )
        error = (logits - exact.predict(exact.params, x)).norm() / logits.norm()
        assert 1e-5 < float(error) < 3e-2


class Twice(nn.Module):
    """Calls one normalisation twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.last = nn.Linear(256, 4)

    def forward(self, x: Tensor) -> Tensor:
        once = self.norm(self.first(x)).relu()
        out: Tensor = self.last(self.norm(self.second(once)).relu().flatten(1))
        return out


def test_a_layer_called_twice_moves_its_statistics_twice() -> None:
    apart, together = (
        ToyFederation(FedAvg(), mapping, module=Twice()) for mapping in ("loop", "vmap")
    )  # type: ignore[arg-type]
    together.server.state = apart.server.state
    assert max_difference(apart.final_state(), together.final_state()) < 1e-9


@pytest.mark.parametrize("shape", [(5,), (1, 5), (7, 5), (2, 3, 5)])
def test_a_steady_linear_layer_is_torchs_on_any_number_of_axes(shape: tuple[int, ...]) -> None:
    draw = torch.Generator().manual_seed(0)
    x, w, b = (
        torch.randn(size, generator=draw, dtype=torch.float64) for size in (shape, (4, 5), (4,))
    )
    with LayerOverrides(batch_invariant=True):
        plain = F.linear(x, w, b)
        named = F.linear(input=x, weight=w)
    assert plain.shape == (*shape[:-1], 4)
    same(plain, F.linear(x, w, b))
    same(named, F.linear(x, w))
    with (
        LayerOverrides(batch_invariant=True),
        pytest.raises(RuntimeError, match=r"shapes cannot be multiplied|size mismatch"),
    ):
        F.linear(x, w[:, :3], b)


@pytest.mark.parametrize("outputs", [2, 10, 84])
@pytest.mark.parametrize("inputs", [5, 84, 243])
def test_a_steady_linear_layer_makes_the_same_of_a_row_in_any_company(
    outputs: int, inputs: int
) -> None:
    """To the last bit, and so does its gradient."""
    if layers._has_kernel(torch.zeros(())):
        pytest.skip(
            "on a CPU the rules for a GPU compute with torch's kernels, which are not steady"
        )
    draw = torch.Generator().manual_seed(0)
    x, w, slope = (
        torch.randn(size, generator=draw)
        for size in ((40, inputs), (outputs, inputs), (40, outputs))
    )

    def both(some: slice) -> list[Tensor]:
        own = x[some].clone().requires_grad_()
        with LayerOverrides(batch_invariant=True):
            y = F.linear(own, w)
        return [y.detach(), *torch.autograd.grad(y, own, slope[some])]

    whole = both(slice(None))
    for size in (1, 3, 7, 20):
        for start in range(0, 40, size):
            some = slice(start, start + size)
            assert all(
                torch.equal(part, all[some]) for part, all in zip(both(some), whole, strict=True)
            )


class Bottle(nn.Module):
    """Convolutions of one pixel, looked at as rows, and normalised in groups."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Conv2d(3, 6, 1, bias=False)
        self.norm = nn.GroupNorm(2, 6)
        self.wide = nn.Conv2d(6, 5, 1)
        self.last = nn.Linear(5, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.wide(self.norm(self.narrow(x)).relu())
        x = self.last(x.view(len(x), 5, -1).mT)
        return torch.lerp(x, self.last(x @ self.last.weight), 0.5).view(len(x), -1)[:, :4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_what_steady_layers_make_lies_as_torchs_own(dtype: torch.dtype) -> None:
    """Views, norms under vmap and dtypes of a network are none of its business."""
    shape = 3, 4, 4
    model = Model(Bottle(), shape, 4).to(torch.device("cpu"), dtype)
    x = torch.randn(5, *shape, dtype=next(iter(model.params.values())).dtype)
    alone = model.predict(model.params, x)
    near = 0.1 if dtype == torch.bfloat16 else 1e-5
    assert float((model.batch_invariant.predict(model.params, x) - alone).abs().max()) < near
    together = vmap(lambda x: model.vmappable.batch_invariant.predict(model.params, x))(x[None])
    assert float((together[0] - alone).abs().max()) < near


@pytest.mark.parametrize(
    ("shape", "how"),
    [
        ((2, 4, 6, 6), {}),
        ((2, 5, 6, 6), {"bias": torch.zeros(1)}),
        ((2, 5, 0, 6), {}),
        ((2, 5, 6, 6), {"dilation": 0}),
    ],
)
def test_what_torch_refuses_steady_layers_refuse(
    shape: tuple[int, ...], how: dict[str, Any]
) -> None:
    x = torch.zeros(shape)
    w = torch.zeros(3, 5, 1, 1)
    with pytest.raises(RuntimeError) as torchs:
        F.conv2d(x, w, **how)
    with pytest.raises(RuntimeError) as ours, LayerOverrides(batch_invariant=True):
        F.conv2d(x, w, **how)
    assert str(torchs.value) == str(ours.value) or layers._has_kernel(x)


def test_batch_norm_in_bfloat16_is_evaluated_together_as_alone() -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 4))
    model = Model(module, (3, 4, 4), 4).to(torch.device("cpu"), torch.bfloat16)
    weights = model.params | model.buffers
    x = torch.randn(2, 5, 3, 4, 4)
    together = vmap(lambda x: model.vmappable.predict(weights, x))(x)
    assert float((together[1] - model.predict(weights, x[1])).abs().max()) < 0.05


def test_a_steady_linear_layer_of_nothing_is_its_bias() -> None:
    with LayerOverrides(batch_invariant=True):
        assert torch.equal(
            F.linear(torch.zeros(3, 0), torch.zeros(2, 0), torch.ones(2)), torch.ones(3, 2)
        )
