"""Generators in a run: your own, pre-trained ones, and what is recorded of them."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import fedcog
from fedcog import ConfigError, ConvGenerator, Experiment, FedAvg, FedCOG, ModelError, RecordError
from fedcog.cli.main import main
from fedcog.data import DataError, registry
from fedcog.runs.pretrained import discrepancy, load_pretrained
from fedcog.runs.records.run_directory import RunDirectory
from fedcog.runs.setup import ExperimentSetup, UserObjects

COG = FedCOG(generator="conv", noise=6, start_round=1, count=8, steps=2)
TINY = Experiment(COG, rounds=3, local_steps=2, batch_size=8, clients=4, partition="iid", threads=1)
OWN = dataclasses.replace(TINY, algorithm=dataclasses.replace(COG, generator="custom"))


def mine(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(6, 9),
            nn.BatchNorm1d(9),
            nn.ReLU(),
            nn.Linear(9, 64),
            nn.Unflatten(1, (1, 8, 8)),
        )


def conv() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return ConvGenerator((1, 8, 8), noise=6)


def test_a_run_with_a_generator_of_your_own_is_recorded_reported_and_resumed_bit_for_bit(
    tmp_path: Path,
) -> None:
    whole = fedcog.run(OWN, tmp_path / "whole", generator=mine())
    assert fedcog.read(whole.path).experiment == whole.experiment
    assert "custom" in (whole.path / "report.html").read_text()
    fedcog.run(
        dataclasses.replace(OWN, rounds=2), tmp_path / "part", generator=mine(), report=False
    )
    for resumed, why in ((None, "pass it from Python"), (mine(seed=1), "of another network")):
        with pytest.raises((ModelError, RecordError), match=why):
            fedcog.run(OWN, tmp_path / "part", generator=resumed, resume=True, report=False)
    fedcog.run(OWN, tmp_path / "part", generator=mine(), resume=True, report=False)
    one, other = (
        load_file(tmp_path / name / "checkpoint.safetensors") for name in ("whole", "part")
    )
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    fedcog.run(OWN, tmp_path / "other", generator=mine(seed=1), report=False)
    another = load_file(tmp_path / "other" / "checkpoint.safetensors")
    assert any(not torch.equal(one[name], another[name]) for name in one)


def test_a_comparison_gives_it_to_whom_it_is_for(tmp_path: Path) -> None:
    experiments = [
        dataclasses.replace(OWN, algorithm=algorithm)
        for algorithm in (FedAvg(), COG, OWN.algorithm)
    ]
    assert len(fedcog.compare(experiments, [0], tmp_path, generator=mine())) == 3
    with pytest.raises(
        ModelError, match=r"the generator gave \(4, 64\), and inputs have shape \(4, 1, 8, 8\)"
    ):
        fedcog.run(OWN, tmp_path / "x", generator=nn.Linear(6, 64))
    with pytest.raises(
        ConfigError, match="your own generator needs FedCOG\\(generator='custom'\\): set it"
    ):
        fedcog.run(TINY, tmp_path / "x", generator=mine())


def test_a_run_begins_with_the_generator_of_a_file(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "conv.safetensors"
    save_file(conv().state_dict(), file)
    given = dataclasses.replace(TINY, pretrained_generator=str(file))
    network = ExperimentSetup(given).model.generator
    assert network is not None and not torch.equal(
        network.state_dict()["weight0"], ConvGenerator((1, 8, 8), 6).weight0
    )
    assert all(
        torch.equal(value, network.state_dict()[name])
        for name, value in conv().state_dict().items()
    )
    words = (
        "run --algorithm fedcog --fedcog.generator conv --fedcog.noise 6 --fedcog.start-round 1 "
        "--fedcog.count 8"
    )
    rest = (
        "--fedcog.steps 2 --rounds 3 --local-steps 2 --batch-size 8 --clients 4 --partition iid "
        "--threads 1"
    )
    assert (
        main(
            [
                *words.split(),
                *rest.split(),
                "--pretrained-generator",
                str(file),
                "--out",
                str(tmp_path / "a"),
            ]
        )
        == 0
    )
    assert fedcog.read(tmp_path / "a").experiment == given
    fresh = fedcog.run(TINY, tmp_path / "b", report=False)
    assert fresh.lines[-1]["loss"] != fedcog.read(tmp_path / "a").lines[-1]["loss"]
    save_file({name: 2 * value for name, value in conv().state_dict().items()}, file)
    assert main(["run", "--resume", str(tmp_path / "a"), "--rounds", "4"]) == 2
    assert "of another network" in capsys.readouterr().err


def test_your_own_generator_with_the_weights_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.safetensors"
    save_file(mine(seed=1).state_dict(), file)
    found = ExperimentSetup(
        dataclasses.replace(OWN, pretrained_generator=str(file)), UserObjects(generator=mine())
    ).model.generator
    assert found is not None and torch.equal(
        found.state_dict()["0.weight"], mine(seed=1).state_dict()["0.weight"]
    )


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"weight1": None}, "'weight1' is missing"),
        (
            {"weight3": torch.zeros(3, 64, 3, 3)},
            r"'weight3' has shape \(3, 64, 3, 3\), but .* needs shape \(1, 64, 3, 3\)",
        ),
        ({"other": torch.zeros(2)}, "has no such tensor"),
    ],
)
def test_weights_of_another_generator_are_refused(
    changes: dict[str, torch.Tensor | None], why: str, tmp_path: Path
) -> None:
    there = conv().state_dict() | changes
    save_file(
        {name: value for name, value in there.items() if value is not None},
        tmp_path / "odd.safetensors",
    )
    with pytest.raises(ModelError, match=why):
        ExperimentSetup(
            dataclasses.replace(TINY, pretrained_generator=str(tmp_path / "odd.safetensors"))
        )


def test_the_last_layer_of_a_generator_may_not_be_missing(tmp_path: Path) -> None:
    """As a classifier's may, which is made anew for other classes."""
    there = nn.Linear(6, 10).state_dict()
    save_file({"weight": there["weight"]}, tmp_path / "odd.safetensors")
    with pytest.raises(ModelError, match="'bias' is missing"):
        load_pretrained(nn.Linear(6, 10), tmp_path / "odd.safetensors")


def test_a_file_without_a_generator_is_refused() -> None:
    for algorithm in (FedAvg(), FedCOG()):
        with pytest.raises(ConfigError, match="set --fedcog"):
            dataclasses.replace(TINY, algorithm=algorithm, pretrained_generator="some.safetensors")


def test_what_is_no_data_set_is_said_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="on a Dataset, not on ndarray"):
        fedcog.pretrain(conv(), np.zeros((3, 1, 8, 8)), tmp_path / "new" / "made.safetensors")  # type: ignore[arg-type]
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("generator", "options", "why"),
    [
        (conv(), {"batch": 1}, "batches of at least 2, not 2 with 1"),
        (conv(), {"steps": 0}, "needs at least 1 step"),
        (conv(), {"lr": 1e30}, "diverged and was not saved"),
        (conv().requires_grad_(False), {}, "no trainable weights"),
    ],
)
def test_what_cannot_be_pretrained_is_not_saved(
    generator: nn.Module, options: dict[str, Any], why: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=why):
        fedcog.pretrain(
            generator,
            registry.load("digits"),
            tmp_path / "made",
            **{"noise": 6, "steps": 2} | options,
        )
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("make", [conv, mine])
def test_pretraining_makes_images_like_those_it_was_shown(make: Any, tmp_path: Path) -> None:
    digits = registry.load("digits")
    file = tmp_path / "new" / "made.safetensors"
    made = fedcog.pretrain(make(), digits, file, noise=6, steps=15, batch=64, lr=0.01)
    saved = load_pretrained(make(), file)[0].state_dict()
    assert all(
        torch.equal(value, saved[name])
        for name, value in made.state_dict().items()
        if "tracked" not in name
    )
    noise = torch.randn(64, 6, generator=torch.Generator().manual_seed(5))
    mean, std = (torch.tensor(one)[:, None, None] for one in (digits.mean, digits.std))
    real = (digits.test_x[:64] / 255 - mean) / std
    before, after = (discrepancy(one.train()(noise), real).item() for one in (make(), made))
    assert after < 0.5 * before


def test_discrepancy_by_hand() -> None:
    """Two points and two points on a line, kernel by kernel."""
    made = torch.tensor([[0.0], [1.0]]).double()
    real = torch.tensor([[2.0], [4.0]]).double()
    spread = (0 + 4 + 4 + 0) / 4
    wanted = 0.0
    for width in (0.25, 1, 4):

        def mean(one: torch.Tensor, other: torch.Tensor, width: float = width) -> float:
            return float((-((one - other.T) ** 2) / (width * spread)).exp().mean())

        wanted += mean(made, made) + mean(real, real) - 2 * mean(made, real)
    assert discrepancy(made, real).item() == pytest.approx(wanted, rel=1e-12)
    assert discrepancy(real, real).item() == pytest.approx(0, abs=1e-12)


def test_the_record_tells_whose_generator_it_was(tmp_path: Path) -> None:
    """Runs with ours are what they were before there were others: nothing is added to what a
    checkpoint belongs to.
    """
    plain = ExperimentSetup(TINY)
    given = ExperimentSetup(OWN, UserObjects(generator=mine()))
    shared = given._network_text[: len(plain._network_text)]
    assert plain._network_text == shared != given._network_text
    fedcog.run(OWN, tmp_path / "run", generator=mine(), report=False)
    checkpoint = RunDirectory(tmp_path / "run").load()
    assert (
        checkpoint is not None
        and checkpoint.info["network"]
        == given.checkpoint_info["network"]
        != plain.checkpoint_info["network"]
    )
