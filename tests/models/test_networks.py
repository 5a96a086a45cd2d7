"""Networks as pure functions: the zoo, users' networks, checks, and the head."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fedcog.algorithms import FedAvg
from fedcog.models.checks import ModelError
from fedcog.models.functional import Model
from fedcog.models.zoo import build
from fedcog.runs.pretrained import load_pretrained
from fedcog.testing import (
    NUM_CLASSES,
    ToyFederation,
    max_difference,
    random_images,
    random_multi_label,
)
from tests.support.user_models import USER_MODELS


@pytest.mark.parametrize(
    ("name", "shape", "classes", "parameters"),
    [
        ("cnn", (3, 32, 32), 10, 62_006),
        ("cnn", (1, 28, 28), 10, 44_426),
        ("cnn3", (3, 32, 32), 100, 69_380),
    ],
)
def test_the_papers_networks_have_the_papers_sizes(
    name: str, shape: tuple[int, ...], classes: int, parameters: int
) -> None:
    model = Model(build(name, shape, classes, seed=0), shape, classes)
    assert sum(value.numel() for value in model.params.values()) == parameters


def test_initialisation_is_a_function_of_the_seed_alone() -> None:
    torch.manual_seed(1)
    one = build("small", (1, 8, 8), 4, seed=5).state_dict()
    torch.manual_seed(2)
    before = torch.random.get_rng_state()
    two = build("small", (1, 8, 8), 4, seed=5).state_dict()
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(
        one["0.weight"], build("small", (1, 8, 8), 4, seed=6).state_dict()["0.weight"]
    )


@pytest.mark.parametrize("name", USER_MODELS)
def test_a_users_network_computes_what_it_computes(name: str) -> None:
    module = USER_MODELS[name]().double()
    model = Model(module, (1, 8, 8), 4).to(torch.device("cpu"), torch.float64)
    x = torch.randn(7, 1, 8, 8, dtype=torch.float64)
    assert torch.equal(model.predict(model.params | model.buffers, x), module.eval()(x))
    before = {key: value.clone() for key, value in model.buffers.items()}
    result = model.forward(model.params, model.buffers, x)
    assert torch.equal(result.logits, module.train()(x))
    for key, value in module.named_buffers():
        if key in model.buffers:
            assert torch.equal(result.buffers[key], value), "running statistics differ"
            assert torch.equal(model.buffers[key], before[key]), "buffers are not written to"


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(nn.functional.dropout(x, 0.5, self.training))  # type: ignore[no-any-return]


class Hidden(nn.Module):
    """Dropout whose noise a zero head hides at first."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.layer = nn.Linear(3, 4)
        nn.init.zeros_(self.layer.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.drop(x))  # type: ignore[no-any-return]


class Counting(nn.Module):
    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.layer(x)  # type: ignore[no-any-return]


class TwoFaced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) if self.training else self.layer(x)[:, :2]  # type: ignore[no-any-return]


class Detached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).detach()  # type: ignore[no-any-return]


class Twins(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer(x), x


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5)), "'1' must be drawing random numbers"),
        (Noisy(), "does not give the same outputs"),
        (Twins(), "gave tuple"),
        (Twins, "is no nn.Module: give an instance"),
        (Hidden(), "'drop' must be drawing random numbers"),
        (Counting(), "'count' counts in training"),
        (TwoFaced(), "in evaluation mode the network gave"),
        (Detached(), "do not depend on its parameters"),
        (nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 4)), "writes over its own inputs"),
        (nn.Sequential(nn.Linear(3, 4, dtype=torch.complex64)), "real floating type"),
        (nn.Linear(3, 5), r"gave \(4, 5\)"),
        (nn.Linear(9, 4), "does not take inputs of shape"),
        (nn.Flatten(), "nothing to train"),
        (nn.Sequential(nn.LazyLinear(4)), "no shape yet"),
        (nn.Sequential(nn.BatchNorm1d(3, momentum=None), nn.Linear(3, 4)), "momentum=None"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(module: nn.Module, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        Model(module, (3,), 4)


def test_a_batch_of_one_is_tried_where_one_will_be_used() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    Model(module, (3,), 4, batch_size=2)
    with pytest.raises(ModelError, match="more than 1 value per channel"):
        Model(module, (3,), 4, batch_size=1)


class Images(nn.Module):
    """A convolution that records the memory format of its images, then flattens by `flat`."""

    def __init__(self, flat: str) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 5, 3)
        self.head = nn.Linear(5 * 6 * 6, 4)
        self.flat = flat

    def forward(self, x: Tensor) -> Tensor:
        """The logits."""
        seen.append(x.is_contiguous(memory_format=torch.channels_last))
        made = self.convolution(x).relu()
        if self.flat == "memory":  # no error, but other numbers wherever they lie otherwise
            return self.head(made.as_strided((len(x), 180), (180, 1)))
        return self.head(made.view(len(x), -1) if self.flat == "view" else made.flatten(1))


seen: list[bool] = []


@pytest.mark.parametrize("flat", ["view", "flatten", "memory"])
def test_images_lie_as_a_cpu_likes_them_unless_the_network_minds(flat: str) -> None:
    module = Images(flat)
    model = Model(module, (3, 8, 8), 4)
    x = torch.randn(6, 3, 8, 8)
    expected = module(x)
    slopes = torch.autograd.grad(module(x).pow(2).sum(), [*module.parameters()])
    weights = {name: value.requires_grad_() for name, value in model.params.items()}
    seen.clear()
    logits = model.forward(weights, {}, x).logits
    assert seen == [flat == "flatten"]
    torch.testing.assert_close(logits, expected)
    found = torch.autograd.grad(
        logits.pow(2).sum(), [weights[name] for name, _ in module.named_parameters()]
    )
    torch.testing.assert_close(found, slopes)


def test_dropout_that_drops_nothing_is_fine() -> None:
    Model(nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.0)), (3,), 4)


def test_a_network_too_large_for_the_images_is_refused() -> None:
    with pytest.raises(ModelError, match=r"too small.*Choose another: cnn"):
        build("cnn", (1, 8, 8), 4, seed=0)


class Last(nn.Module):
    """A network whose last layer is `kind`, used in an odd way."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.head = Cosine(4, 4) if kind == "subclass" else nn.Linear(4, 4)
        self.middle = nn.Linear(4, 4)
        if kind == "tied":
            self.middle.weight = self.head.weight
        if kind == "frozen":
            self.head.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.middle(x.flatten(1)[:, :4]).tanh()
        if self.kind == "keyword":
            return self.head(input=z)  # type: ignore[no-any-return]
        if self.kind == "aside" and self.training:
            return nn.functional.linear(z, self.head.weight, self.head.bias)
        return self.head(self.head(z) if self.kind == "twice" else z)  # type: ignore[no-any-return]


class Cosine(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return (
            nn.functional.normalize(input, dim=-1) @ nn.functional.normalize(self.weight, dim=-1).T
        )


@pytest.mark.parametrize("kind", ["subclass", "tied", "frozen", "keyword", "aside", "twice"])
def test_a_head_that_is_none_is_not_taken_for_one(kind: str) -> None:
    model = Model(Last(kind), (1, 8, 8), 4)
    assert model.head is None and Model(Last("plain"), (1, 8, 8), 4).head == "head"
    result = model.forward(model.params, {}, torch.randn(3, 1, 8, 8))
    assert result.logits.shape == (3, 4) and result.features is None


@pytest.mark.parametrize(
    ("name", "shape"),
    [("cnn", (3, 32, 32)), ("cnn3", (3, 32, 32)), ("small", (1, 8, 8)), ("mlp", (5,))],
)
def test_what_an_input_costs_is_what_torch_counts(name: str, shape: tuple[int, ...]) -> None:
    model = Model(build(name, shape, 10, seed=0), shape, 10)
    with FlopCounterMode(display=False) as counted:
        model.predict(model.params | model.buffers, torch.zeros(7, *shape))
    assert 7 * model.flops_per_example == counted.get_total_flops() > 0
    assert not any(layer._forward_hooks for layer in model._eval.modules())


def torchvisions() -> dict[str, tuple[int, ...]]:
    """Names and shapes of torchvision's resnet18, written down from its documentation's network."""
    found: dict[str, tuple[int, ...]] = {
        "conv1.weight": (64, 3, 7, 7),
        "fc.weight": (1000, 512),
        "fc.bias": (1000,),
    }

    def norm(name: str, width: int) -> None:
        found.update(
            {
                f"{name}.{part}": (width,)
                for part in ("weight", "bias", "running_mean", "running_var")
            }
        )
        found[f"{name}.num_batches_tracked"] = ()

    norm("bn1", 64)
    for stage, (inside, width) in enumerate([(64, 64), (64, 128), (128, 256), (256, 512)], 1):
        for block in (0, 1):
            name = f"layer{stage}.{block}"
            found[f"{name}.conv1.weight"] = (width, inside if block == 0 else width, 3, 3)
            found[f"{name}.conv2.weight"] = (width, width, 3, 3)
            norm(f"{name}.bn1", width)
            norm(f"{name}.bn2", width)
        if stage > 1:
            found[f"layer{stage}.0.downsample.0.weight"] = (width, inside, 1, 1)
            norm(f"layer{stage}.0.downsample.1", width)
    return found


def test_resnet18_has_the_names_and_shapes_of_torchvisions() -> None:
    network = build("resnet18", (3, 64, 64), 1000, seed=0)
    assert {
        name: tuple(value.shape) for name, value in network.state_dict().items()
    } == torchvisions()
    assert sum(value.numel() for value in network.parameters()) == 11_689_512


def checkpoint(path: Path, **changes: torch.Tensor | None) -> Path:
    """A file such as `save_file(torchvision.models.resnet18().state_dict(), path)` would be."""
    draw = torch.Generator().manual_seed(1)
    tensors = {name: torch.rand(shape, generator=draw) for name, shape in torchvisions().items()}
    tensors = {
        name: value.long() if name.endswith("tracked") else value for name, value in tensors.items()
    }
    chosen = {name: value for name, value in (tensors | changes).items() if value is not None}
    save_file(chosen, path)
    return path


@pytest.mark.filterwarnings("ignore:.*no last layer")
def test_a_torchvision_checkpoint_loads_but_for_a_head_of_other_classes(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "resnet18.safetensors")
    fresh = build("resnet18", (3, 64, 64), 17, seed=0)
    with pytest.warns(UserWarning, match="no last layer for 17 classes"):
        found, digest = load_pretrained(fresh, path, 17)
    before = fresh.state_dict()
    after = found.state_dict()
    wanted = load_file(path)
    for name, value in after.items():
        if name.startswith("fc.") or name.endswith("tracked"):
            assert torch.equal(value, before[name])
        else:
            assert torch.equal(value, wanted[name]) and not torch.equal(value, before[name])
    whole, other = load_pretrained(build("resnet18", (3, 64, 64), 1000, seed=0), path, 1000)
    assert torch.equal(whole.state_dict()["fc.weight"], wanted["fc.weight"]) and digest != other
    headless = checkpoint(tmp_path / "headless.safetensors", **{"fc.weight": None, "fc.bias": None})
    assert load_pretrained(fresh, headless, 17)[1] == digest
    half = checkpoint(
        tmp_path / "half.safetensors", **{"fc.weight": None, "fc.bias": torch.ones(17)}
    )
    assert torch.equal(
        load_pretrained(fresh, half, 17)[0].state_dict()["fc.bias"], before["fc.bias"]
    )  # all of it, or none
    wanted8 = {
        name: value.to(torch.float8_e4m3fn)
        for name, value in wanted.items()
        if value.is_floating_point()
    }
    eighth = checkpoint(tmp_path / "eighth.safetensors", **wanted8)
    assert load_pretrained(fresh, eighth, 17)[1] != digest


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"layer1.0.conv1.weight": None}, "'layer1.0.conv1.weight' is missing"),
        (
            {"layer1.0.conv1.weight": torch.zeros(64, 64, 5, 5)},
            r"has shape \(64, 64, 5, 5\), but the network needs",
        ),
        ({"layer9.weight": torch.zeros(2)}, "has no such tensor"),
        ({"bn1.weight": torch.full((64,), torch.nan)}, "'bn1.weight' that are not finite"),
        ({"bn1.running_var": torch.full((64,), -1.0)}, "negative variances in 'bn1.running_var'"),
        (
            {"bn1.weight": torch.full((64,), 1e300, dtype=torch.float64)},
            "'bn1.weight' that are not finite",
        ),
        ({"bn1.weight": torch.zeros(64, dtype=torch.int64)}, "'bn1.weight' that are not finite"),
        (
            {"fc.weight": torch.zeros(1000, 99)},
            r"'fc.weight' has shape \(1000, 99\), but the network needs",
        ),
    ],
)
def test_weights_of_another_network_are_refused(
    changes: dict[str, torch.Tensor | None], why: str, tmp_path: Path
) -> None:
    path = checkpoint(tmp_path / "odd.safetensors", **changes)
    with pytest.raises(ModelError, match=why):
        load_pretrained(build("resnet18", (3, 64, 64), 17, seed=0), path, 17)


def test_what_is_no_file_of_weights_is_refused(tmp_path: Path) -> None:
    network = build("small", (1, 8, 8), 10, seed=0)
    (tmp_path / "odd").write_bytes(b"\x80\x04pickle")
    for name in ("odd", "nowhere"):
        with pytest.raises(ModelError, match="cannot be read as a safetensors file"):
            load_pretrained(network, tmp_path / name, 10)


@pytest.mark.parametrize("name", ["resnet18", "resnet18-gn"])
def test_resnet18_trains_together_as_alone_and_its_statistics_travel(name: str) -> None:
    data = random_images(num_train=24, num_test=4, shape=(3, 16, 16))
    network = build(name, (3, 16, 16), NUM_CLASSES, seed=0)
    runs = [
        ToyFederation(
            FedAvg(),
            mapping,
            dataset=data,
            module=network,
            sizes=(14, 10),
            steps=2,
            rounds=1,
            batch=4,
        )
        for mapping in ("loop", "vmap")
    ]
    before = {key: value.clone() for key, value in runs[0].server.state["buffers"].items()}
    assert max_difference(*(run.final_state() for run in runs)) < 1e-9
    after = runs[0].server.state["buffers"]
    assert len(after) == (40 if name == "resnet18" else 0)
    assert all(not torch.equal(value, before[key]) for key, value in after.items())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["resnet18", "resnet18-gn"])
def test_resnet18_of_several_labels_is_recorded_by_a_gpu(name: str) -> None:
    data = random_multi_label(num_train=24, num_test=4, shape=(3, 16, 16))
    network = build(name, (3, 16, 16), NUM_CLASSES, seed=0)
    here, there = (
        ToyFederation(
            FedAvg(),
            how,
            dataset=data,
            module=network,
            sizes=(14, 10),
            steps=2,
            rounds=2,
            batch=4,
            device=where,
        )
        for how, where in (("loop", "cpu"), ("graph", "cuda"))
    )
    assert (
        max_difference(
            here.final_state(), {key: value.cpu() for key, value in there.final_state().items()}
        )
        < 1e-5
    )
