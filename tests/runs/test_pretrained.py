"""Tests of generators in runs: user-defined and pretrained ones, and their record."""

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
from fedcog.runs.config.user_objects import UserObjects
from fedcog.runs.pretrained import discrepancy, load_pretrained
from fedcog.runs.records.run_directory import RunDirectory
from fedcog.runs.setup import ExperimentSetup

FEDCOG = FedCOG(generator="conv", noise=6, start_round=1, count=8, steps=2)
TINY = Experiment(
    FEDCOG, rounds=3, local_steps=2, batch_size=8, clients=4, partition="iid", threads=1
)
CUSTOM = dataclasses.replace(TINY, algorithm=dataclasses.replace(FEDCOG, generator="custom"))


def user_generator(seed: int = 0) -> nn.Module:
    """A generator with BatchNorm, as a user might pass it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(6, 9),
            nn.BatchNorm1d(9),
            nn.ReLU(),
            nn.Linear(9, 64),
            nn.Unflatten(1, (1, 8, 8)),
        )


def conv_generator() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return ConvGenerator((1, 8, 8), noise=6)


@pytest.mark.slow
def test_run_with_user_generator_is_recorded_and_resumes_exactly(
    tmp_path: Path,
) -> None:
    uninterrupted = fedcog.run(CUSTOM, tmp_path / "whole", generator=user_generator())
    assert fedcog.read(uninterrupted.path).experiment == uninterrupted.experiment
    assert "custom" in (uninterrupted.path / "report.html").read_text()
    fedcog.run(
        dataclasses.replace(CUSTOM, rounds=2),
        tmp_path / "part",
        generator=user_generator(),
        report=False,
    )
    for generator, reason in (
        (None, "pass it from Python"),
        (user_generator(seed=1), "of another network"),
    ):
        with pytest.raises((ModelError, RecordError), match=reason):
            fedcog.run(CUSTOM, tmp_path / "part", generator=generator, resume=True, report=False)
    fedcog.run(CUSTOM, tmp_path / "part", generator=user_generator(), resume=True, report=False)
    uninterrupted_state = load_file(tmp_path / "whole" / "checkpoint.safetensors")
    resumed_state = load_file(tmp_path / "part" / "checkpoint.safetensors")
    assert uninterrupted_state.keys() == resumed_state.keys()
    for name, value in uninterrupted_state.items():
        assert torch.equal(value, resumed_state[name])
    fedcog.run(CUSTOM, tmp_path / "other", generator=user_generator(seed=1), report=False)
    other_state = load_file(tmp_path / "other" / "checkpoint.safetensors")
    assert any(
        not torch.equal(value, other_state[name]) for name, value in uninterrupted_state.items()
    )


@pytest.mark.slow
def test_user_generator_is_passed_only_to_generator_custom(tmp_path: Path) -> None:
    experiments = [
        dataclasses.replace(CUSTOM, algorithm=algorithm)
        for algorithm in (FedAvg(), FEDCOG, CUSTOM.algorithm)
    ]
    assert len(fedcog.compare(experiments, [0], tmp_path, generator=user_generator())) == 3
    with pytest.raises(
        ModelError, match=r"the generator gave \(4, 64\), and inputs have shape \(4, 1, 8, 8\)"
    ):
        fedcog.run(CUSTOM, tmp_path / "x", generator=nn.Linear(6, 64))
    with pytest.raises(
        ConfigError, match=r"your own generator needs FedCOG\(generator='custom'\): set it"
    ):
        fedcog.run(TINY, tmp_path / "x", generator=user_generator())


@pytest.mark.slow
def test_run_starts_from_a_pretrained_generator_file(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "conv.safetensors"
    save_file(conv_generator().state_dict(), file)
    config = dataclasses.replace(TINY, pretrained_generator=str(file))
    generator = ExperimentSetup(config).model.generator
    assert generator is not None
    weights = generator.state_dict()
    assert not torch.equal(weights["weight0"], ConvGenerator((1, 8, 8), 6).weight0)
    for name, value in conv_generator().state_dict().items():
        assert torch.equal(value, weights[name])
    arguments = (
        "run --algorithm fedcog --fedcog.generator conv --fedcog.noise 6 --fedcog.start-round 1 "
        "--fedcog.count 8 --fedcog.steps 2 --rounds 3 --local-steps 2 --batch-size 8 --clients 4 "
        "--partition iid --threads 1 --pretrained-generator"
    )
    assert main([*arguments.split(), str(file), "--out", str(tmp_path / "a")]) == 0
    assert fedcog.read(tmp_path / "a").experiment.algorithm == config.algorithm
    fresh = fedcog.run(TINY, tmp_path / "b", report=False)
    assert fresh.lines[-1]["loss"] != fedcog.read(tmp_path / "a").lines[-1]["loss"]
    save_file({name: 2 * value for name, value in conv_generator().state_dict().items()}, file)
    assert main(["run", "--resume", str(tmp_path / "a"), "--rounds", "4"]) == 2
    assert "of another network" in capsys.readouterr().err


def test_user_generator_loads_weights_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.safetensors"
    save_file(user_generator(seed=1).state_dict(), file)
    config = dataclasses.replace(CUSTOM, pretrained_generator=str(file))
    setup = ExperimentSetup(config, UserObjects(generator=user_generator()))
    generator = setup.model.generator
    assert generator is not None
    expected = user_generator(seed=1).state_dict()["0.weight"]
    assert torch.equal(generator.state_dict()["0.weight"], expected)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"weight1": None}, "'weight1' is missing"),
        (
            {"weight3": torch.zeros(3, 64, 3, 3)},
            r"'weight3' has shape \(3, 64, 3, 3\), but .* needs shape \(1, 64, 3, 3\)",
        ),
        ({"other": torch.zeros(2)}, "has no such tensor"),
    ],
)
def test_weights_that_do_not_fit_the_generator_are_refused(
    changes: dict[str, torch.Tensor | None], reason: str, tmp_path: Path
) -> None:
    weights = conv_generator().state_dict() | changes
    save_file(
        {name: value for name, value in weights.items() if value is not None},
        tmp_path / "odd.safetensors",
    )
    with pytest.raises(ModelError, match=reason):
        ExperimentSetup(
            dataclasses.replace(TINY, pretrained_generator=str(tmp_path / "odd.safetensors"))
        )


def test_last_layer_of_a_generator_must_be_complete(tmp_path: Path) -> None:
    """Only a classifier's last layer may be missing, because other classes need a new one."""
    weights = nn.Linear(6, 10).state_dict()
    save_file({"weight": weights["weight"]}, tmp_path / "odd.safetensors")
    with pytest.raises(ModelError, match="'bias' is missing"):
        load_pretrained(nn.Linear(6, 10), tmp_path / "odd.safetensors")


def test_pretrained_file_without_a_generator_is_refused() -> None:
    for algorithm in (FedAvg(), FedCOG()):
        with pytest.raises(ConfigError, match="set --fedcog"):
            dataclasses.replace(TINY, algorithm=algorithm, pretrained_generator="some.safetensors")


def test_pretrain_refuses_arrays_before_creating_files(tmp_path: Path) -> None:
    array = np.zeros((3, 1, 8, 8))
    file = tmp_path / "new" / "made.safetensors"
    with pytest.raises(DataError, match="on a Dataset, not on ndarray"):
        fedcog.pretrain(conv_generator(), array, file)  # type: ignore[arg-type]
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("generator", "options", "reason"),
    [
        (conv_generator(), {"batch": 1}, "batches of at least 2, not 2 with 1"),
        (conv_generator(), {"steps": 0}, "needs at least 1 step"),
        (conv_generator(), {"lr": 1e30}, "diverged and was not saved"),
        (conv_generator().requires_grad_(False), {}, "no trainable weights"),
    ],
)
def test_failed_pretraining_saves_no_file(
    generator: nn.Module, options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=reason):
        fedcog.pretrain(
            generator,
            registry.load("digits"),
            tmp_path / "made",
            **{"noise": 6, "steps": 2} | options,
        )
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("make_generator", [conv_generator, user_generator])
def test_pretraining_halves_the_discrepancy_to_real_images(
    make_generator: Any, tmp_path: Path
) -> None:
    digits = registry.load("digits")
    file = tmp_path / "new" / "made.safetensors"
    pretrained = fedcog.pretrain(
        make_generator(), digits, file, noise=6, steps=15, batch=64, lr=0.01
    )
    saved_weights = load_pretrained(make_generator(), file)[0].state_dict()
    assert all(
        torch.equal(value, saved_weights[name])
        for name, value in pretrained.state_dict().items()
        if "tracked" not in name
    )
    noise = torch.randn(64, 6, generator=torch.Generator().manual_seed(5))
    mean = torch.tensor(digits.mean)[:, None, None]
    std = torch.tensor(digits.std)[:, None, None]
    real = (digits.test_x[:64] / 255 - mean) / std
    before = discrepancy(make_generator().train()(noise), real).item()
    after = discrepancy(pretrained.train()(noise), real).item()
    assert after < 0.5 * before


def test_discrepancy_matches_hand_calculation() -> None:
    """Two generated and two real points on a line, summed over the three kernel widths."""
    generated = torch.tensor([[0.0], [1.0]]).double()
    real = torch.tensor([[2.0], [4.0]]).double()
    spread = (0 + 4 + 4 + 0) / 4
    expected = 0.0
    for width in (0.25, 1, 4):

        def mean_kernel(a: torch.Tensor, b: torch.Tensor, width: float = width) -> float:
            return float((-((a - b.T) ** 2) / (width * spread)).exp().mean())

        expected += (
            mean_kernel(generated, generated)
            + mean_kernel(real, real)
            - 2 * mean_kernel(generated, real)
        )
    assert discrepancy(generated, real).item() == pytest.approx(expected, rel=1e-12)
    assert discrepancy(real, real).item() == pytest.approx(0, abs=1e-12)


def test_checkpoint_identifies_a_user_generator(tmp_path: Path) -> None:
    """Built-in generators add nothing to the network's identity, so old checkpoints still fit."""
    builtin = ExperimentSetup(TINY)
    custom = ExperimentSetup(CUSTOM, UserObjects(generator=user_generator()))
    prefix = custom._network_text[: len(builtin._network_text)]
    assert builtin._network_text == prefix != custom._network_text
    fedcog.run(CUSTOM, tmp_path / "run", generator=user_generator(), report=False)
    checkpoint = RunDirectory(tmp_path / "run").load()
    assert checkpoint is not None
    network = checkpoint.info["network"]
    assert network == custom.checkpoint_info["network"] != builtin.checkpoint_info["network"]
