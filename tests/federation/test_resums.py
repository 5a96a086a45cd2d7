"""Tests of algorithms that need several sums in a round, or one before an evaluation."""
# ruff: noqa: E402

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import flower_engine
from tests.support.flower_engine import in_process_flower  # noqa: F401 - a fixture

pytest.importorskip("fedcog.federation.flower_server")
flower_engine.skip_without_ray()

import fedcog
from fedcog.core import tree
from fedcog.core.settings import ConfigError
from fedcog.core.tree import Params
from fedcog.federation import flower_client
from fedcog.runs.config.composition import make_algorithm
from fedcog.runs.config.experiment import Experiment
from fedcog.runs.records.run_directory import RunDirectory

NAMES = ["fedprox+geometric-median", "scaffold+feddisco+fedavgm+fedcog", "fedntd+ccvr"]


GROUPS = [
    "fedvls",  # a loss
    "fedspeed",  # a gradient rule with state
    "fedlc+fedacg",  # a server rule
    "scaffold+multi-krum",  # a robust mean, of payloads in clear
]


def experiment(name: str, **settings: Any) -> Experiment:
    tables = {
        "fedcog": {"start_round": 0, "count": 6, "steps": 2},
        "multi-krum": {"attackers": 0},
    }
    return Experiment(
        algorithm=make_algorithm(name, tables),
        clients=4,
        local_steps=3,
        batch_size=8,
        rounds=2,
        mapping="loop",
        threads=1,
        device="cpu",
        evaluate_local=False,
        **settings,
    )


def final_model(config: Experiment, folder: Path) -> Params:
    fedcog.run(config, folder, report=False)
    checkpoint = RunDirectory(folder).load()
    assert checkpoint is not None
    params: Params = checkpoint.server["params"] | checkpoint.server.get("calibrated", {})
    return params


@pytest.mark.usefixtures("in_process_flower")
@pytest.mark.parametrize("name", GROUPS)
def test_flower_nodes_train_one_of_each_group_as_the_simulator_does(
    name: str, tmp_path: Path
) -> None:
    config = experiment(name)
    simulated = final_model(config, tmp_path / "simulated")
    deployed = final_model(replace(config, backend="flower"), tmp_path / "flower")
    for key, value in simulated.items():
        torch.testing.assert_close(deployed[key], value, atol=1e-6, rtol=0)


@pytest.mark.usefixtures("in_process_flower")
@pytest.mark.parametrize("name", NAMES)
def test_flower_nodes_sum_as_the_simulator_does_in_clear_and_masked(
    name: str, tmp_path: Path
) -> None:
    config = experiment(name)
    simulated = final_model(config, tmp_path / "simulated")
    deployed = final_model(replace(config, backend="flower"), tmp_path / "flower")
    for key, value in simulated.items():
        torch.testing.assert_close(deployed[key], value, atol=1e-6, rtol=0)
    masked = final_model(replace(config, secure_aggregation=True), tmp_path / "masked")
    fedavg = final_model(experiment("fedavg"), tmp_path / "fedavg")
    effect = tree.norm(tree.subtract(simulated, fedavg))
    assert float(tree.norm(tree.subtract(simulated, masked))) < 0.1 * float(effect)


@pytest.mark.usefixtures("in_process_flower")
def test_a_node_without_the_rounds_update_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Client 2 lost its update: the others are weighted without it."""
    original = flower_client._resum_reply

    def failing(message: Any, context: Any, setup: Any) -> Any:
        if int(context.node_config["partition-id"]) == 2:
            del context.state["payload"]
        return original(message, context, setup)

    monkeypatch.setattr(flower_client, "_resum_reply", failing)
    config = experiment("feddisco", backend="flower")
    with pytest.warns(UserWarning, match="without client 2: .*no update of round 1"):
        final_model(config, tmp_path / "run")


@pytest.mark.parametrize("name", ["feddisco", "fedavg+geometric-median", "fedavg+ccvr"])
def test_privacy_refuses_what_it_does_not_account_for(name: str) -> None:
    with pytest.raises(ConfigError, match=r"privacy (accounts for|does not account for)"):
        experiment(name, privacy="central").validate()
