"""Tests that layer overrides match torch's layers under vmap and differentiation."""

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
    """Run each test with the batched operator, and with the default layers of a CPU."""
    if request.param == "ours":
        monkeypatch.setattr(layers, "_has_kernel", lambda input: True)


def torch_energy(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return functional_call(NETWORK, params, (x,)).square().sum()


def override_energy(params: dict[str, Tensor], x: Tensor) -> Tensor:
    with LayerOverrides():
        return torch_energy(params, x)


def random_arguments(num_models: int = 3) -> tuple[dict[str, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(0)
    params = {
        name: value.detach()
        + 0.1 * torch.randn(num_models, *value.shape, generator=generator, dtype=value.dtype)
        for name, value in NETWORK.named_parameters()
    }
    return params, torch.randn(num_models, 5, 2, 9, 9, generator=generator, dtype=torch.float64)


def assert_same(tree: object, expected: object) -> None:
    for a, b in zip(
        torch.utils._pytree.tree_leaves(tree),
        torch.utils._pytree.tree_leaves(expected),
        strict=True,
    ):
        assert float((a - b).abs().max()) < 1e-10


@pytest.mark.parametrize("dims", [(0, 0), (None, 0), (0, None)])
def test_gradients_match_torch_for_shared_arguments(
    dims: tuple[int | None, int | None],
) -> None:
    params, x = random_arguments()
    if dims[0] is None:
        params = {name: value[0] for name, value in params.items()}
    if dims[1] is None:
        x = x[0]
    options = {"in_dims": dims}
    assert_same(
        vmap(grad(override_energy, (0, 1)), **options)(params, x),
        vmap(grad(torch_energy, (0, 1)), **options)(params, x),
    )  # type: ignore[arg-type]


def test_second_derivatives_match_torch() -> None:
    def squared_gradient(function):  # type: ignore[no-untyped-def]
        gradients = grad(function, (0, 1))
        return lambda params, x: sum(
            (grad_part**2).sum()
            for grad_part in (*gradients(params, x)[0].values(), gradients(params, x)[1])
        )

    params, x = random_arguments(2)
    assert_same(
        vmap(grad(squared_gradient(override_energy), (0, 1)))(params, x),
        vmap(grad(squared_gradient(torch_energy), (0, 1)))(params, x),
    )


def test_autograd_without_vmap_matches_torch() -> None:
    x, w, b = (
        torch.randn(*size).double().requires_grad_() for size in ((2, 3, 6, 6), (4, 3, 3, 3), (4,))
    )
    with LayerOverrides():
        grads = torch.autograd.grad(F.conv2d(x, w, b, padding=1).square().sum(), (x, w, b))
    assert_same(grads, torch.autograd.grad(F.conv2d(x, w, b, padding=1).square().sum(), (x, w, b)))


def test_empty_batch_is_allowed() -> None:
    with LayerOverrides():
        y = F.conv2d(torch.randn(0, 3, 8, 8), torch.randn(4, 3, 3, 3), torch.randn(4))
        assert y.shape == (0, 4, 6, 6)


@pytest.mark.parametrize("bias", [torch.zeros(1), torch.zeros(4).double()])
def test_invalid_arguments_are_refused_as_in_torch(bias: Tensor) -> None:
    with LayerOverrides(), pytest.raises(RuntimeError):
        F.conv2d(torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3), bias)
    with LayerOverrides(), pytest.raises(ValueError, match="more than 1 value per channel"):
        F.batch_norm(torch.randn(1, 3), None, None, training=True)


def test_keyword_arguments_are_accepted() -> None:
    x = torch.randn(2, 3, 6, 6)
    w = torch.randn(4, 3, 3, 3)
    with LayerOverrides():
        convolved = F.conv2d(input=x, weight=w, padding="valid")
        pooled = F.max_pool2d(input=x, kernel_size=2)
    assert float((convolved - F.conv2d(x, w)).abs().max()) < 1e-5
    assert torch.equal(pooled, F.max_pool2d(x, 2))


@pytest.mark.parametrize(
    "dims", [(None, None, 0), (0, None, None), (None, 0, None), (0, None, 0), (0, 0, None)]
)
def test_shared_bias_matches_torch(dims: tuple[int | None, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = [(2, 3, 6, 6), (4, 3, 3, 3), (4,)]
    tensors = [
        torch.randn(*([3] if dim == 0 else []), *size, generator=generator, dtype=torch.float64)
        for dim, size in zip(dims, sizes, strict=True)
    ]

    def torch_loss(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.conv2d(x, w, b).pow(3).sum()

    def override_loss(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        with LayerOverrides():
            return torch_loss(x, w, b)

    assert_same(
        vmap(grad(override_loss, (0, 1, 2)), dims)(*tensors),
        vmap(grad(torch_loss, (0, 1, 2)), dims)(*tensors),
    )


@pytest.mark.parametrize("affine", [True, False])
def test_running_statistics_match_torch(affine: bool) -> None:
    module = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3, affine=affine), nn.Flatten(), nn.Linear(108, 2)
    )
    model = Model(module, (1, 8, 8), 2).to(torch.device("cpu"), torch.float64)
    x = torch.randn(5, 1, 8, 8).double()
    expected = model.forward(model.params, model.buffers, x)
    result = model.vmappable.forward(model.params, model.buffers, x)
    assert_same(expected.logits, result.logits)
    assert_same(expected.buffers, result.buffers)
    change = result.buffers["1.running_mean"] - model.buffers["1.running_mean"]
    assert float(change.abs().max()) > 1e-3


def test_batch_norm_without_running_statistics_matches_torch() -> None:
    x = torch.randn(4, 3, 5).double()
    with LayerOverrides():
        normalized = F.batch_norm(x, None, None, training=True)
    assert_same(normalized, F.batch_norm(x, None, None, training=True))


def test_bfloat16_affects_products_only() -> None:
    module = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(108, 2))
    exact = Model(module, (1, 8, 8), 2)
    low_precision = exact.to(torch.device("cpu"), torch.bfloat16)
    x = torch.randn(5, 1, 8, 8)
    for model in (low_precision, low_precision.vmappable):
        logits = model.predict(model.params, x)
        assert logits.dtype == torch.float32 and all(
            value.dtype == torch.float32 for value in model.params.values()
        )
        error = (logits - exact.predict(exact.params, x)).norm() / logits.norm()
        assert 1e-5 < float(error) < 3e-2


class SharedNorm(nn.Module):
    """Calls one normalization layer twice."""

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


def test_layer_called_twice_updates_statistics_twice() -> None:
    loop_run, vmap_run = (
        ToyFederation(FedAvg(), mapping, module=SharedNorm()) for mapping in ("loop", "vmap")
    )  # type: ignore[arg-type]
    vmap_run.server.state = loop_run.server.state
    assert max_difference(loop_run.final_state(), vmap_run.final_state()) < 1e-9


@pytest.mark.parametrize("shape", [(5,), (1, 5), (7, 5), (2, 3, 5)])
def test_batch_invariant_linear_matches_torch(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    x, w, b = (
        torch.randn(size, generator=generator, dtype=torch.float64)
        for size in (shape, (4, 5), (4,))
    )
    with LayerOverrides(batch_invariant=True):
        positional = F.linear(x, w, b)
        named = F.linear(input=x, weight=w)
    assert positional.shape == (*shape[:-1], 4)
    assert_same(positional, F.linear(x, w, b))
    assert_same(named, F.linear(x, w))
    with (
        LayerOverrides(batch_invariant=True),
        pytest.raises(RuntimeError, match=r"shapes cannot be multiplied|size mismatch"),
    ):
        F.linear(x, w[:, :3], b)


@pytest.mark.parametrize("outputs", [2, 10, 84])
@pytest.mark.parametrize("inputs", [5, 84, 243])
def test_batch_invariant_linear_ignores_the_batch_size(outputs: int, inputs: int) -> None:
    """Outputs and gradients are bitwise equal for every batch size."""
    if layers._has_kernel(torch.zeros(())):
        pytest.skip("on a CPU the GPU rules use torch's kernels, which are not batch-invariant")
    generator = torch.Generator().manual_seed(0)
    x, w, output_grad = (
        torch.randn(size, generator=generator)
        for size in ((40, inputs), (outputs, inputs), (40, outputs))
    )

    def output_and_grad(rows: slice) -> list[Tensor]:
        x_rows = x[rows].clone().requires_grad_()
        with LayerOverrides(batch_invariant=True):
            y = F.linear(x_rows, w)
        return [y.detach(), *torch.autograd.grad(y, x_rows, output_grad[rows])]

    expected = output_and_grad(slice(None))
    for size in (1, 3, 7, 20):
        for start in range(0, 40, size):
            rows = slice(start, start + size)
            assert all(
                torch.equal(actual, full[rows])
                for actual, full in zip(output_and_grad(rows), expected, strict=True)
            )


class Bottleneck(nn.Module):
    """1x1 convolutions with group normalization, viewed as rows."""

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
def test_batch_invariant_network_matches_torch(dtype: torch.dtype) -> None:
    """Views, norms under vmap, and low-precision dtypes keep working."""
    shape = 3, 4, 4
    model = Model(Bottleneck(), shape, 4).to(torch.device("cpu"), dtype)
    x = torch.randn(5, *shape, dtype=next(iter(model.params.values())).dtype)
    expected = model.predict(model.params, x)
    tolerance = 0.1 if dtype == torch.bfloat16 else 1e-5
    assert (
        float((model.batch_invariant.predict(model.params, x) - expected).abs().max()) < tolerance
    )
    vmapped = vmap(lambda x: model.vmappable.batch_invariant.predict(model.params, x))(x[None])
    assert float((vmapped[0] - expected).abs().max()) < tolerance


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((2, 4, 6, 6), {}),
        ((2, 5, 6, 6), {"bias": torch.zeros(1)}),
        ((2, 5, 0, 6), {}),
        ((2, 5, 6, 6), {"dilation": 0}),
    ],
)
def test_batch_invariant_layers_refuse_what_torch_refuses(
    shape: tuple[int, ...], options: dict[str, Any]
) -> None:
    x = torch.zeros(shape)
    w = torch.zeros(3, 5, 1, 1)
    with pytest.raises(RuntimeError) as torch_error:
        F.conv2d(x, w, **options)
    with pytest.raises(RuntimeError) as override_error, LayerOverrides(batch_invariant=True):
        F.conv2d(x, w, **options)
    assert str(torch_error.value) == str(override_error.value) or layers._has_kernel(x)


def test_bfloat16_batch_norm_evaluates_the_same_under_vmap() -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 4))
    model = Model(module, (3, 4, 4), 4).to(torch.device("cpu"), torch.bfloat16)
    weights = model.params | model.buffers
    x = torch.randn(2, 5, 3, 4, 4)
    vmapped = vmap(lambda x: model.vmappable.predict(weights, x))(x)
    assert float((vmapped[1] - model.predict(weights, x[1])).abs().max()) < 0.05


def test_batch_invariant_linear_without_inputs_returns_its_bias() -> None:
    with LayerOverrides(batch_invariant=True):
        assert torch.equal(
            F.linear(torch.zeros(3, 0), torch.zeros(2, 0), torch.ones(2)), torch.ones(3, 2)
        )
