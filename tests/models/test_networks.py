"""Tests of networks as pure functions: built-in and user networks, checks, and the head."""

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from fedcog.algorithms import FedAvg
from fedcog.models.checks import ModelError
from fedcog.models.functional import Model
from fedcog.models.initialization import initialize, make_network
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
def test_paper_networks_have_the_papers_sizes(
    name: str, shape: tuple[int, ...], classes: int, parameters: int
) -> None:
    model = Model(build(name, shape, classes, seed=0), shape, classes)
    assert sum(value.numel() for value in model.params.values()) == parameters


def test_initialization_depends_on_the_seed_only() -> None:
    torch.manual_seed(1)
    first = build("small", (1, 8, 8), 4, seed=5).state_dict()
    torch.manual_seed(2)
    rng_state = torch.random.get_rng_state()
    second = build("small", (1, 8, 8), 4, seed=5).state_dict()
    assert torch.equal(rng_state, torch.random.get_rng_state())
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(
        first["0.weight"], build("small", (1, 8, 8), 4, seed=6).state_dict()["0.weight"]
    )


@pytest.mark.parametrize("name", sorted(USER_MODELS.keys() - {"dropout"}))
def test_model_matches_the_user_module(name: str) -> None:
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


class OwnNoise(nn.Module):
    """Noise from torch's generator, which a head of zeros hides at initialization."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        nn.init.zeros_(self.layer.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.randn_like(x) if self.training else 0
        return self.layer(x + noise)  # type: ignore[no-any-return]


class OwnGenerator(nn.Module):
    """Noise from a generator of the network's own, in one of the two modes."""

    def __init__(self, mode: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.mode = mode
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training == self.mode:
            x = x + torch.rand(x.shape, generator=self.generator)
        return self.layer(x)  # type: ignore[no-any-return]


class CountsCalls(nn.Module):
    """Its outputs depend on how often it was called, which no buffer knows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.layer(x) / self.count  # type: ignore[no-any-return]


class RecurrentDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, 4, num_layers=2, dropout=0.5, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x[:, :, None])[0][:, -1]  # type: ignore[no-any-return]


class DropoutInEvaluation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(nn.functional.dropout(x))  # type: ignore[no-any-return]


class CountingBuffer(nn.Module):
    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.layer(x)  # type: ignore[no-any-return]


class ModeDependent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layer(x)
        return logits if self.training else logits[:, :2]


class Detached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).detach()  # type: ignore[no-any-return]


class TupleOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer(x), x


class WithRule(nn.Module):
    """A network that does something in its forward that no federated network may do."""

    def __init__(self, rule: Callable[["WithRule", Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("mean", torch.zeros(4))
        self.rule = rule
        self.kept: Tensor | None = None
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.rule(self, self.layer(x))


def clamps_weights(net: WithRule, y: Tensor) -> Tensor:
    with torch.no_grad():
        net.layer.weight.clamp_(-0.1, 0.1)
    return y


def clamps_weights_in_training(net: WithRule, y: Tensor) -> Tensor:
    return clamps_weights(net, y) if net.training else y


def moves_mean_in_evaluation(net: WithRule, y: Tensor) -> Tensor:
    net.mean.mul_(0.9).add_(0.1 * y.detach().mean(0))
    return y - net.mean


def normalizes_by_batch_in_evaluation(net: WithRule, y: Tensor) -> Tensor:
    return nn.functional.batch_norm(y, net.norm.running_mean, net.norm.running_var, training=True)


def counts_silently(net: WithRule, y: Tensor) -> Tensor:
    net.calls += 1
    return y if net.calls < 9 else y / 2


def keeps_weights(net: WithRule, y: Tensor) -> Tensor:
    if net.kept is None:
        net.kept = net.layer.weight.detach().sum(1)
    return y + net.kept


def draws_with_python(net: WithRule, y: Tensor) -> Tensor:
    return y if random.random() < 2 else y / 2


def draws_with_numpy(net: WithRule, y: Tensor) -> Tensor:
    return y if np.random.rand() < 2 else y / 2


def checkpoints_dropout(net: WithRule, y: Tensor) -> Tensor:
    return checkpoint(  # type: ignore[no-any-return]
        lambda h: nn.functional.dropout(h.tanh(), 0.5, net.training), y, use_reentrant=False
    )


def checkpoints_a_layer(net: WithRule, y: Tensor) -> Tensor:
    rule = lambda h: h + h.sum(1, keepdim=True) * net.layer.bias  # noqa: E731
    return checkpoint(rule, y, use_reentrant=False)  # type: ignore[no-any-return]


def fails_backward(net: WithRule, y: Tensor) -> Tensor:
    return nn.functional.dropout(y.sigmoid(), 0.5, net.training).exp().mul_(2)


def raises_something(net: WithRule, y: Tensor) -> Tensor:
    raise KeyError("lost")


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        (clamps_weights, "writes to its parameter 'layer.weight'"),
        (clamps_weights_in_training, "writes to its parameter 'layer.weight'"),
        (moves_mean_in_evaluation, "'mean' changes in evaluation mode"),
        (normalizes_by_batch_in_evaluation, "'norm.running_mean' changes in evaluation mode"),
        (counts_silently, "counts its calls"),
        (keeps_weights, "keeps something of a call"),
        (draws_with_python, "draws random numbers"),
        (draws_with_numpy, "draws random numbers"),
        (checkpoints_dropout, "torch.utils.checkpoint"),
        (checkpoints_a_layer, "torch.utils.checkpoint"),
        (fails_backward, "no gradient that can be computed here"),
        (raises_something, "does not take inputs.*lost"),
    ],
)
def test_calls_with_side_effects_are_refused(
    rule: Callable[[WithRule, Tensor], Tensor], reason: str
) -> None:
    network = WithRule(rule)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    with pytest.raises(ModelError, match=reason):
        Model(network, (3,), 4)
    assert states == (
        random.getstate(),
        np.random.get_state()[1].tolist(),
        torch.get_rng_state().tolist(),
    )


def test_what_a_call_leaves_behind_is_allowed_if_no_call_reads_it() -> None:
    def keeps_logits(net: WithRule, y: Tensor) -> Tensor:
        net.kept = y.detach()
        net.calls = len(y)
        return y

    Model(WithRule(keeps_logits), (3,), 4)


@pytest.mark.parametrize(("option", "value"), [("max_norm", 1.0), ("sparse", True)])
def test_embeddings_that_cannot_be_averaged_are_refused(option: str, value: object) -> None:
    network = nn.Sequential(nn.Linear(3, 4))
    network.add_module("words", nn.Embedding(5, 4, **{option: value}))  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=rf"'words' \(Embedding\).*remove {option}"):
        Model(network, (3,), 4)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (OwnNoise(), "in training mode, a layer draws random numbers of its own"),
        (OwnGenerator(True), "in training mode, a layer draws random numbers of its own"),
        (OwnGenerator(False), "draws random numbers in evaluation mode"),
        (CountsCalls(), "counts its calls"),
        (RecurrentDropout(), r"'lstm' \(LSTM\) draws random numbers.*between them"),
        (DropoutInEvaluation(), "draws random numbers in evaluation mode"),
        (TupleOutput(), "gave tuple"),
        (TupleOutput, "is no nn.Module: give its class"),
        (CountingBuffer(), "'count' counts in training"),
        (ModeDependent(), "in evaluation mode the network gave"),
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
def test_unsuitable_module_is_refused_with_reason(module: nn.Module, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        Model(module, (3,), 4)


def test_batch_size_one_is_checked_if_used() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    Model(module, (3,), 4, batch_size=2)
    with pytest.raises(ModelError, match="more than 1 value per channel"):
        Model(module, (3,), 4, batch_size=1)


class MemoryFormatRecorder(nn.Module):
    """A convolution that records the memory format of its images, then flattens as in `flat`."""

    def __init__(self, flat: str) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 5, 3)
        self.head = nn.Linear(5 * 6 * 6, 4)
        self.flat = flat

    def forward(self, x: Tensor) -> Tensor:

        seen_channels_last.append(x.is_contiguous(memory_format=torch.channels_last))
        images = self.convolution(x).relu()
        if self.flat == "memory":  # no error, but wrong values in another memory format
            return self.head(images.as_strided((len(x), 180), (180, 1)))
        return self.head(images.view(len(x), -1) if self.flat == "view" else images.flatten(1))


seen_channels_last: list[bool] = []


@pytest.mark.parametrize("flat", ["view", "flatten", "memory"])
def test_images_are_channels_last_if_the_network_allows(flat: str) -> None:
    module = MemoryFormatRecorder(flat)
    model = Model(module, (3, 8, 8), 4)
    x = torch.randn(6, 3, 8, 8)
    expected = module(x)
    expected_grads = torch.autograd.grad(module(x).pow(2).sum(), [*module.parameters()])
    params = {name: value.requires_grad_() for name, value in model.params.items()}
    seen_channels_last.clear()
    logits = model.forward(params, {}, x).logits
    assert seen_channels_last == [flat == "flatten"]
    torch.testing.assert_close(logits, expected)
    grads = torch.autograd.grad(
        logits.pow(2).sum(), [params[name] for name, _ in module.named_parameters()]
    )
    torch.testing.assert_close(grads, expected_grads)


def test_dropout_with_zero_probability_is_allowed() -> None:
    model = Model(nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.0)), (3,), 4)
    assert not model.uses_dropout


def test_network_too_large_for_the_images_is_refused() -> None:
    with pytest.raises(ModelError, match=r"too small.*Choose another: small"):
        build("cnn", (1, 8, 8), 4, seed=0)


class OddHead(nn.Module):
    """A network that uses its last layer in an unusual way, given by `kind`."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.head = CosineLinear(4, 4) if kind == "subclass" else nn.Linear(4, 4)
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


class CosineLinear(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return (
            nn.functional.normalize(input, dim=-1) @ nn.functional.normalize(self.weight, dim=-1).T
        )


@pytest.mark.parametrize("kind", ["subclass", "tied", "frozen", "keyword", "aside", "twice"])
def test_unusual_last_layer_is_not_a_head(kind: str) -> None:
    model = Model(OddHead(kind), (1, 8, 8), 4)
    assert model.head is None and Model(OddHead("plain"), (1, 8, 8), 4).head == "head"
    result = model.forward(model.params, {}, torch.randn(3, 1, 8, 8))
    assert result.logits.shape == (3, 4) and result.features is None


@pytest.mark.parametrize(
    ("name", "shape"),
    [("cnn", (3, 32, 32)), ("cnn3", (3, 32, 32)), ("small", (1, 8, 8)), ("mlp", (5,))],
)
def test_flops_match_torch_counter(name: str, shape: tuple[int, ...]) -> None:
    model = Model(build(name, shape, 10, seed=0), shape, 10)
    with FlopCounterMode(display=False) as counted:
        model.predict(model.params | model.buffers, torch.zeros(7, *shape))
    assert 7 * model.flops_per_example == counted.get_total_flops() > 0
    assert not any(layer._forward_hooks for layer in model._eval.modules())


def torchvision_shapes() -> dict[str, tuple[int, ...]]:
    """Names and shapes in torchvision's resnet18, copied by hand."""
    shapes: dict[str, tuple[int, ...]] = {
        "conv1.weight": (64, 3, 7, 7),
        "fc.weight": (1000, 512),
        "fc.bias": (1000,),
    }

    def norm(name: str, width: int) -> None:
        shapes.update(
            {
                f"{name}.{part}": (width,)
                for part in ("weight", "bias", "running_mean", "running_var")
            }
        )
        shapes[f"{name}.num_batches_tracked"] = ()

    norm("bn1", 64)
    for stage, (in_width, width) in enumerate([(64, 64), (64, 128), (128, 256), (256, 512)], 1):
        for block in (0, 1):
            name = f"layer{stage}.{block}"
            shapes[f"{name}.conv1.weight"] = (width, in_width if block == 0 else width, 3, 3)
            shapes[f"{name}.conv2.weight"] = (width, width, 3, 3)
            norm(f"{name}.bn1", width)
            norm(f"{name}.bn2", width)
        if stage > 1:
            shapes[f"layer{stage}.0.downsample.0.weight"] = (width, in_width, 1, 1)
            norm(f"layer{stage}.0.downsample.1", width)
    return shapes


def test_resnet18_matches_torchvision_names_and_shapes() -> None:
    network = build("resnet18", (3, 64, 64), 1000, seed=0)
    assert {
        name: tuple(value.shape) for name, value in network.state_dict().items()
    } == torchvision_shapes()
    assert sum(value.numel() for value in network.parameters()) == 11_689_512


def write_checkpoint(path: Path, **changes: torch.Tensor | None) -> Path:
    """Write what `save_file(torchvision.models.resnet18().state_dict(), path)` would write."""
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name: torch.rand(shape, generator=generator) for name, shape in torchvision_shapes().items()
    }
    tensors = {
        name: value.long() if name.endswith("tracked") else value for name, value in tensors.items()
    }
    chosen = {name: value for name, value in (tensors | changes).items() if value is not None}
    save_file(chosen, path)
    return path


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*no last layer")
def test_torchvision_checkpoint_loads_except_a_mismatched_head(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "resnet18.safetensors")
    network = build("resnet18", (3, 64, 64), 17, seed=0)
    with pytest.warns(UserWarning, match="no last layer for 17 classes"):
        pretrained, digest = load_pretrained(network, path, 17)
    before = network.state_dict()
    after = pretrained.state_dict()
    saved = load_file(path)
    for name, value in after.items():
        if name.startswith("fc.") or name.endswith("tracked"):
            assert torch.equal(value, before[name])
        else:
            assert torch.equal(value, saved[name]) and not torch.equal(value, before[name])
    full, full_digest = load_pretrained(build("resnet18", (3, 64, 64), 1000, seed=0), path, 1000)
    assert torch.equal(full.state_dict()["fc.weight"], saved["fc.weight"]) and digest != full_digest
    headless = write_checkpoint(
        tmp_path / "headless.safetensors", **{"fc.weight": None, "fc.bias": None}
    )
    assert load_pretrained(network, headless, 17)[1] == digest
    half_head = write_checkpoint(
        tmp_path / "half.safetensors", **{"fc.weight": None, "fc.bias": torch.ones(17)}
    )
    # A head loads completely or not at all.
    loaded = load_pretrained(network, half_head, 17)[0].state_dict()
    assert torch.equal(loaded["fc.bias"], before["fc.bias"])
    float8 = {
        name: value.to(torch.float8_e4m3fn)
        for name, value in saved.items()
        if value.is_floating_point()
    }
    float8_file = write_checkpoint(tmp_path / "eighth.safetensors", **float8)
    assert load_pretrained(network, float8_file, 17)[1] != digest


@pytest.mark.parametrize(
    ("changes", "reason"),
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
    changes: dict[str, torch.Tensor | None], reason: str, tmp_path: Path
) -> None:
    path = write_checkpoint(tmp_path / "odd.safetensors", **changes)
    with pytest.raises(ModelError, match=reason):
        load_pretrained(build("resnet18", (3, 64, 64), 17, seed=0), path, 17)


def test_file_without_weights_is_refused(tmp_path: Path) -> None:
    network = build("small", (1, 8, 8), 10, seed=0)
    (tmp_path / "odd").write_bytes(b"\x80\x04pickle")
    for name in ("odd", "nowhere"):
        with pytest.raises(ModelError, match="cannot be read as a safetensors file"):
            load_pretrained(network, tmp_path / name, 10)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "resnet18-gn"])
def test_resnet18_loop_and_vmap_agree_and_send_statistics(name: str) -> None:
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
def test_multi_label_resnet18_loop_and_graph_agree(name: str) -> None:
    data = random_multi_label(num_train=24, num_test=4, shape=(3, 16, 16))
    network = build(name, (3, 16, 16), NUM_CLASSES, seed=0)
    loop_run, graph_run = (
        ToyFederation(
            FedAvg(),
            mapping,
            dataset=data,
            module=network,
            sizes=(14, 10),
            steps=2,
            rounds=2,
            batch=4,
            device=device,
        )
        for mapping, device in (("loop", "cpu"), ("graph", "cuda"))
    )
    graph_state = {key: value.cpu() for key, value in graph_run.final_state().items()}
    assert max_difference(loop_run.final_state(), graph_state) < 1e-5


class PlainTensor(nn.Module):
    """A network with constants of its seed that no state dict holds."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        scale = torch.rand(4)
        if kind == "buffer":
            self.register_buffer("scale", scale, persistent=False)
        else:
            self.scale = [scale] if kind == "list" else scale
        if kind == "number":
            self.scale = float(scale[0])

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale[0] if isinstance(self.scale, list) else self.scale
        return self.layer(x) * scale


@pytest.mark.parametrize("kind", ["tensor", "buffer", "list", "number"])
def test_networks_with_other_constants_are_not_stacked(kind: str) -> None:
    models = []
    for seed in (0, 1, 0):
        module = initialize(lambda: PlainTensor(kind), seed)
        models.append(Model(module, (3,), 4))
    assert models[0].has_same_constants(models[2])
    assert not models[0].has_same_constants(models[1])


def test_unfit_networks_are_refused_with_those_that_fit() -> None:
    with pytest.raises(ModelError, match=r"\(6,\): it takes images.* Choose another: mlp\."):
        build("small", (6,), 3, 0)
    with pytest.raises(ModelError, match=r"Choose another: .*resnet18, resnet18-gn"):
        build("cnn", (1, 4, 4), 3, 0)


def keeps_statistics(net: WithRule, y: Tensor) -> Tensor:
    """Statistics that are no buffer: evaluation would always see those of the start."""
    if net.training:
        net.kept = y.detach().mean(0)
        return y - net.kept
    return y if net.kept is None else y - net.kept


def makes_a_buffer(net: WithRule, y: Tensor) -> Tensor:
    if "table" not in net._buffers:
        net.register_buffer("table", torch.arange(4.0))
    return y + net.table


def checkpoints_relu(net: WithRule, y: Tensor) -> Tensor:
    hidden = checkpoint(lambda x: (x @ net.layer.weight).relu(), y, use_reentrant=False)
    return y + hidden.sum(1, keepdim=True)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        (keeps_statistics, "keeps something of a call"),
        (makes_a_buffer, "makes 'table' in its first call: call it once"),
        (checkpoints_relu, "torch.utils.checkpoint"),
    ],
)
def test_state_outside_of_weights_is_refused(
    rule: Callable[[WithRule, Tensor], Tensor], reason: str
) -> None:
    with pytest.raises(ModelError, match=reason):
        Model(WithRule(rule), (3,), 4)


@pytest.mark.parametrize("start", [0, 0.0, [0], {"n": 0}, np.int64(0), torch.zeros(())])
def test_counted_calls_are_refused(start: Any) -> None:
    def counts(net: WithRule, y: Tensor) -> Tensor:
        if isinstance(net.kept, list):
            net.kept = [net.kept[0] + 1]
        elif isinstance(net.kept, dict):
            net.kept["n"] += 1
        else:
            net.kept = net.kept + 1
        return y

    module = WithRule(counts)
    module.kept = start
    with pytest.raises(ModelError, match="counts its calls"):
        Model(module, (3,), 4)


def test_hooks_of_parameters_are_refused() -> None:
    module = nn.Linear(3, 4)
    module.weight.register_hook(lambda gradient: gradient * 0)
    with pytest.raises(ModelError, match="parameter 'weight' has a hook"):
        Model(module, (3,), 4)


def test_layers_that_synchronize_or_count_are_refused() -> None:
    with pytest.raises(ModelError, match=r"SyncBatchNorm.*use nn\.BatchNorm1d"):
        Model(nn.Sequential(nn.Linear(3, 4), nn.SyncBatchNorm(4)), (3,), 4)

    def counts_batches(net: WithRule, y: Tensor) -> Tensor:
        if net.training:
            net.num_batches_tracked += 1  # type: ignore[operator]
        return y

    module = WithRule(counts_batches)
    module.register_buffer("num_batches_tracked", torch.tensor(0))
    with pytest.raises(ModelError, match="'num_batches_tracked' counts in training"):
        Model(module, (3,), 4)


def test_harmless_networks_are_accepted() -> None:
    def measures_time(net: WithRule, y: Tensor) -> Tensor:
        net.seconds = time.perf_counter()  # type: ignore[assignment]
        return y

    Model(WithRule(measures_time), (3,), 4)
    frozen = nn.Linear(3, 4)
    frozen.add_module("words", nn.Embedding(5, 4, sparse=True).requires_grad_(False))
    Model(frozen, (3,), 4)


class Graph(nn.Module):
    """A network with a sparse matrix as a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.neighbors = torch.eye(6).to_sparse()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer((self.neighbors @ x.T).T)  # type: ignore[no-any-return]


def test_sparse_constants_are_accepted() -> None:
    models = [Model(make_network(Graph, (6,), 3, seed), (6,), 3) for seed in (0, 1)]
    assert models[0].has_same_constants(models[1])
