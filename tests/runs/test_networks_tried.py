"""Architectures that users bring: each trains, alone and with FedCOG, one by one and at once."""

import dataclasses
import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fedcog
from fedcog import Dataset, Experiment, FedCOG
from fedcog.models.initialization import Network
from fedcog.models.libraries import import_library
from fedcog.runs.records.run_directory import RunDirectory

EXPERIMENT = Experiment(
    FedCOG(count=4, steps=2, start_round=1, lr=0.1),
    clients=2,
    partition="iid",
    min_examples=1,
    rounds=2,
    local_steps=2,
    batch_size=4,
    lr=0.05,
    precision="float64",
    evaluate_local=False,
    mapping="loop",
    threads=1,
    workers=1,
)
"""Round 1 is FedAvg's, round 2 FedCOG's."""


def random_data(*shape: int) -> Dataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(20, *shape, generator=generator)
    y = torch.arange(20) % 4
    return fedcog.from_arrays(x[:16], y[:16], x[16:], y[16:], classes=list("abcd"))


class Sequences(nn.Module):
    """An LSTM over sequences of vectors, with dropout."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 8, num_layers=2, batch_first=True)
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(8, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.dropout(self.lstm(x)[0][:, -1]))
        return logits


def signals(num_classes: int) -> nn.Module:
    """A 1-D CNN with BatchNorm."""
    return nn.Sequential(
        *(nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8), nn.ReLU(), nn.MaxPool1d(2)),
        *(nn.Conv1d(8, 8, 3), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(8, num_classes)),
    )


def vgg11(num_classes: int) -> nn.Module:
    """VGG-11 for 32x32 images, with BatchNorm and dropout."""
    widths = [64, "M", 128, "M", 256, 256, "M", 512, 512, "M", 512, 512, "M"]
    features = import_library("torchvision").models.vgg.make_layers(widths, batch_norm=True)
    hidden = (nn.Linear(512, 512), nn.ReLU(), nn.Dropout())
    return nn.Sequential(features, nn.Flatten(), *hidden, nn.Linear(512, num_classes))


def small_vit(num_classes: int) -> nn.Module:
    """A small ViT with stochastic depth and dropout in attention."""
    timm = import_library("timm")
    return timm.models.VisionTransformer(  # type: ignore[no-any-return]
        img_size=8,
        patch_size=4,
        in_chans=1,
        num_classes=num_classes,
        embed_dim=16,
        depth=2,
        num_heads=2,
        drop_path_rate=0.3,
        attn_drop_rate=0.2,
    )


def small_convnext(num_classes: int) -> nn.Module:
    """A small ConvNeXt with stochastic depth."""
    convnext = import_library("torchvision").models.convnext
    blocks = [convnext.CNBlockConfig(8, 16, 1), convnext.CNBlockConfig(16, None, 2)]
    return convnext.ConvNeXt(  # type: ignore[no-any-return]
        blocks, stochastic_depth_prob=0.4, num_classes=num_classes
    )


def needs(*libraries: str) -> list[pytest.MarkDecorator]:
    missing = [name for name in libraries if importlib.util.find_spec(name) is None]
    return [pytest.mark.skipif(bool(missing), reason=f"{missing} is not installed")]


SLOW = [*needs("torchvision", "timm"), pytest.mark.slow]
LONG = [*SLOW, pytest.mark.long]
NETWORKS = [
    pytest.param(Sequences, (6, 5), id="lstm"),
    pytest.param(signals, (3, 20), id="cnn-1d"),
    pytest.param(small_vit, (1, 8, 8), marks=needs("timm"), id="vit"),
    pytest.param(small_convnext, (3, 16, 16), marks=needs("torchvision"), id="convnext"),
    pytest.param(vgg11, (3, 32, 32), marks=SLOW, id="vgg11"),
    pytest.param("torchvision:mobilenet_v3_small", (1, 8, 8), marks=SLOW, id="mobilenet"),
    pytest.param("torchvision:resnet18", (3, 8, 8), marks=LONG, id="resnet18"),
    pytest.param("timm:convnext_atto", (1, 8, 8), marks=LONG, id="convnext-atto"),
    pytest.param("timm:vit_tiny_patch16_224", (1, 8, 8), marks=LONG, id="vit-tiny"),
    pytest.param("timm:resnet10t", (1, 8, 8), marks=SLOW, id="resnet10t"),
]


def train(
    out: Path, network: Network | str, data: Dataset, resume: bool = False, **changes: object
) -> fedcog.Run:
    experiment = dataclasses.replace(EXPERIMENT, **changes)  # type: ignore[arg-type]
    if isinstance(network, str) or network is vgg11:  # larger networks
        experiment = dataclasses.replace(experiment, local_steps=1)
    if isinstance(network, str):
        experiment = dataclasses.replace(experiment, model=network)
        return fedcog.run(experiment, out, data=data, resume=resume, report=False)
    return fedcog.run(experiment, out, data=data, model=network, resume=resume, report=False)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("network", "shape"), NETWORKS)
def test_network_trains_the_same_in_all_ways(
    network: Callable[[int], nn.Module] | str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    data = random_data(*shape)
    loop = train(tmp_path / "loop", network, data)
    at_once = train(tmp_path / "vmap", network, data, mapping="vmap")
    for expected, line in zip(loop.lines, at_once.lines, strict=True):
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    train(tmp_path / "resumed", network, data, rounds=1)
    resumed = train(tmp_path / "resumed", network, data, resume=True)
    assert [line["loss"] for line in resumed.lines] == [line["loss"] for line in loop.lines]
    files = [(run.path / "checkpoint.safetensors").read_bytes() for run in (loop, resumed)]
    assert files[0] == files[1]
    state = RunDirectory(loop.path).load()
    assert state is not None
    assert all(bool(value.isfinite().all()) for value in state.server["params"].values())
