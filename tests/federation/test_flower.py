"""The same federation in this simulator and on Flower: its simulation engine runs for real."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fedcog
from fedcog import tree
from fedcog.algorithms import Algorithm
from fedcog.experiments.config import Experiment, make_algorithm
from fedcog.experiments.record import RecordError, RunDirectory
from fedcog.settings import ConfigError
from tests import engine
from tests.engine import in_this_process  # noqa: F401 - a fixture

pytest.importorskip("flwr")
engine.needed()

SMALL = {"rounds": 4, "clients": 3, "local_steps": 3, "batch_size": 8, "mapping": "loop", "threads": 1, "device": "cpu"}


class Mine(Algorithm):
    """Somebody's own."""


def experiment(name: str, **settings: object) -> Experiment:
    tables = {"fedcog": {"start_round": 1, "count": 6, "steps": 2}}
    return Experiment(algorithm=make_algorithm(name, tables), **(SMALL | settings))  # type: ignore[arg-type]


UNEQUAL = """
    phone: clients=2 heterofl.width=0.5 fedcog.source=nothing
    server: clients=1 local_steps=2 fedcog.generator=conv
"""


def test_flower_comes_to_what_the_simulator_comes_to(tmp_path: Path) -> None:
    """Where clients keep something, send more than their model, and differ in what they do."""
    one = experiment("moon+fedcog+heterofl", devices=UNEQUAL)
    here = fedcog.run(one, tmp_path / "here", report=False)
    there = fedcog.run(replace(one, backend="flower"), tmp_path / "there", report=False)
    for mine, theirs in zip(here.lines, there.lines, strict=True):
        assert mine["accuracy"] == theirs["accuracy"]
        for own, other in zip(mine["local"], theirs["local"], strict=True):
            for way in ("up", "down"):  # here the numbers alone; there also names, forms and a few findings
                assert own[way] < other[way] < own[way] + 8000
                own[way] = other[way]
            assert own == pytest.approx(other, abs=1e-5)
    servers = [tree.flatten(RunDirectory(run.path).load().server) for run in (here, there)]  # type: ignore[union-attr]
    assert servers[0].keys() == servers[1].keys()
    for key, value in servers[0].items():
        torch.testing.assert_close(value, servers[1][key], atol=1e-5, rtol=0)


@pytest.mark.usefixtures("in_this_process")
def test_what_nodes_kept_is_not_made_up_when_a_run_goes_on(tmp_path: Path) -> None:
    one = experiment("scaffold", rounds=1, backend="flower")
    fedcog.run(one, tmp_path / "run", report=False)
    for backend in ("simulator", "flower"):
        with pytest.raises(RecordError, match="took with them what clients of scaffold keep"):
            fedcog.run(replace(one, rounds=2, backend=backend), tmp_path / "run", resume=True, report=False)  # type: ignore[arg-type]


def test_what_flower_cannot_carry_out_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="power-of-choice"):
        fedcog.run(experiment("fedavg", selection="power-of-choice", backend="flower"), tmp_path / "run")
    with pytest.raises(ConfigError, match="unknown to Flower's nodes"):
        fedcog.run(replace(experiment("fedavg", backend="flower"), algorithm=Mine()), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_python_that_ray_cannot_start_is_told_and_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/home/me/my projects/.venv/bin/python")
    with pytest.raises(ConfigError, match=r"by a path with a space, such as this Python's, /home/me/my projects"):
        fedcog.run(experiment("fedavg", backend="flower"), tmp_path / "run", report=False)
    assert not (tmp_path / "run").exists()
