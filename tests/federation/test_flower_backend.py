"""Tests of the Flower backend: its simulation engine gives the simulator's results."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedcog
from fedcog.algorithms import Algorithm
from fedcog.core import tree
from fedcog.core.settings import ConfigError
from fedcog.core.tree import Params
from fedcog.models.initialization import Network, initialize
from fedcog.runs import flower_runs
from fedcog.runs.config.composition import make_algorithm
from fedcog.runs.config.experiment import Experiment
from fedcog.runs.config.user_code import load_network
from fedcog.runs.records.run_directory import RecordError, RunDirectory
from tests.support import flower_engine
from tests.support.flower_engine import in_process_flower  # noqa: F401 - a fixture

pytest.importorskip("flwr")
flower_engine.skip_without_ray()

SMALL: dict[str, Any] = {
    "rounds": 4,
    "clients": 3,
    "local_steps": 3,
    "batch_size": 8,
    "mapping": "loop",
    "threads": 1,
    "device": "cpu",
}


class Mine(Algorithm):
    """A user's algorithm."""


def experiment(name: str, **settings: Any) -> Experiment:
    tables = {"fedcog": {"start_round": 1, "count": 6, "steps": 2}}
    return Experiment(algorithm=make_algorithm(name, tables), **(SMALL | settings))


def server_state(run: fedcog.Run) -> Params:
    return tree.flatten(RunDirectory(run.path).load().server)  # type: ignore[union-attr]


DEVICES = """
    phone: clients=2 heterofl.width=0.5 fedcog.source=nothing
    server: clients=1 local_steps=2 fedcog.generator=conv
"""


@pytest.mark.ray
def test_flower_matches_the_simulator(tmp_path: Path) -> None:
    """With client states, payloads beyond the model, and device types."""
    config = experiment("moon+fedcog+heterofl", devices=DEVICES)
    simulated = fedcog.run(config, tmp_path / "simulated", report=False)
    flower = fedcog.run(replace(config, backend="flower"), tmp_path / "flower", report=False)
    for expected, line in zip(simulated.lines, flower.lines, strict=True):
        assert expected["accuracy"] == line["accuracy"]
        for local, remote in zip(expected["local"], line["local"], strict=True):
            # The simulator counts tensors only; Flower also names, shapes and a few metrics.
            for direction in ("up", "down"):
                assert local[direction] < remote[direction] < local[direction] + 8000
                local[direction] = remote[direction]
            assert local == pytest.approx(remote, abs=1e-5)
    expected_state = server_state(simulated)
    state = server_state(flower)
    assert expected_state.keys() == state.keys()
    for key, value in expected_state.items():
        torch.testing.assert_close(value, state[key], atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.usefixtures("in_process_flower")
def test_resume_is_refused_when_nodes_hold_the_client_states(tmp_path: Path) -> None:
    first = experiment("scaffold", rounds=1, backend="flower")
    fedcog.run(first, tmp_path / "run", report=False)
    for backend in ("simulator", "flower"):
        longer = replace(first, rounds=2, backend=backend)  # type: ignore[arg-type]
        with pytest.raises(RecordError, match="whose nodes have the client states of scaffold"):
            fedcog.run(longer, tmp_path / "run", resume=True, report=False)


class Net(nn.Module):
    """A user's network, with BatchNorm and dropout."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        layers = (nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3))
        self.layers = nn.Sequential(nn.Flatten(), *layers, nn.Linear(8, num_classes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


def given_network() -> nn.Module:
    return initialize(lambda: Net(10), seed=5)


def network_in_file(folder: Path) -> Network:
    file = folder / "net.py"
    file.write_text(
        "from torch import nn\n"
        "def make(num_classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))\n"
    )
    return load_network(f"{file}:make")


@pytest.mark.slow
@pytest.mark.usefixtures("in_process_flower")
@pytest.mark.parametrize(
    "network",
    [lambda _: Net, lambda _: lambda: Net(10), lambda _: given_network(), network_in_file],
    ids=["class", "function", "instance", "file"],
)
def test_nodes_build_the_users_network(network: Callable[[Path], Network], tmp_path: Path) -> None:
    schedule: dict[str, Any] = {"lr_schedule": "cosine", "server_lr_warmup": 1}
    config = experiment("scaffold+fedcog", rounds=3, **schedule)
    model = network(tmp_path)
    simulated = fedcog.run(config, tmp_path / "simulated", model=model, report=False)
    flower = replace(config, backend="flower")
    remote = fedcog.run(flower, tmp_path / "flower", model=model, report=False)
    assert [line["lr"] for line in remote.lines] == [line["lr"] for line in simulated.lines]
    for expected, line in zip(simulated.lines, remote.lines, strict=True):
        assert line["loss"] == pytest.approx(expected["loss"], abs=1e-6)
    expected_state = server_state(simulated)
    for key, value in server_state(remote).items():
        torch.testing.assert_close(value, expected_state[key], atol=1e-6, rtol=0)


@pytest.mark.slow
@pytest.mark.usefixtures("in_process_flower")
def test_nodes_set_up_the_users_network_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flower_runs.set_up_node.cache_clear()
    config = experiment("fedavg", rounds=3, backend="flower")
    fedcog.run(config, tmp_path / "run", model=given_network(), report=False)
    assert flower_runs.set_up_node.cache_info().misses == 1


def test_unsupported_settings_are_refused(tmp_path: Path) -> None:
    selection = experiment("fedavg", selection="power-of-choice", backend="flower")
    with pytest.raises(ConfigError, match="power-of-choice"):
        fedcog.run(selection, tmp_path / "run")
    custom = replace(experiment("fedavg", backend="flower"), algorithm=Mine())
    message = "Mine is your own algorithm, which is unknown to Flower nodes"
    with pytest.raises(ConfigError, match=message):
        fedcog.run(custom, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_python_in_a_path_with_a_space_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/home/me/my projects/.venv/bin/python")
    with pytest.raises(
        ConfigError, match=r"from a path with a space, such as /home/me/my projects"
    ):
        fedcog.run(experiment("fedavg", backend="flower"), tmp_path / "run", report=False)
    assert not (tmp_path / "run").exists()
