"""Tests of warm starts: a run that takes over the rounds of another."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from fedcog import run
from fedcog.algorithms import MOON, SCAFFOLD, VHL, Algorithm, FedAvg, FedCOG, FedProx, generation
from fedcog.algorithms.fedcog_variants import Varied
from fedcog.engine.local_training import autograd_gradient
from fedcog.runs.config.experiment import Experiment
from fedcog.runs.environment import torch_settings
from fedcog.runs.records.recorded_run import Run
from fedcog.runs.records.run_directory import RecordError, RunDirectory
from fedcog.runs.runner import Runner, RunOptions, run_all
from fedcog.runs.setup import ExperimentSetup
from fedcog.studies.audit.federation_state import FederationState
from fedcog.testing import max_difference

SMALL: dict[str, Any] = {"rounds": 3, "local_steps": 4, "batch_size": 8, "clients": 4, "lr": 0.05}
SMALL |= {"mapping": "loop", "threads": 1, "workers": 1}
FEDCOG = FedCOG(count=8, steps=3, start_round=2, lr=0.1)


def experiment(algorithm: Algorithm, **changes: Any) -> Experiment:
    return Experiment(algorithm=algorithm, **SMALL | changes)


def run_from(experiment: Experiment, out: Path, warm_start: Path) -> Run:
    """Run `experiment` after the rounds of the run in `warm_start`."""
    with (
        torch_settings(experiment),
        Runner(experiment, out, options=RunOptions(resume=True), start_from=warm_start) as runner,
    ):
        (result,) = run_all([runner])
    assert isinstance(result, Run)
    return result


@pytest.fixture(scope="module")
def warm_start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two rounds in which FedCOG is not active yet."""
    out = tmp_path_factory.mktemp("start")
    return run(experiment(FedCOG(start_round=2), rounds=2), out / "run", report=False).path


@pytest.mark.parametrize(
    "algorithm", [FedAvg(), FEDCOG, dataclasses.replace(FEDCOG, source="noise")]
)
def test_warm_started_run_equals_an_uninterrupted_one(
    algorithm: Algorithm, warm_start: Path, tmp_path: Path
) -> None:
    uninterrupted = run(experiment(algorithm), tmp_path / "whole", report=False)
    warm_started = run_from(experiment(algorithm), tmp_path / "parts", warm_start)
    for key in ("loss", "accuracy"):
        expected_values = [line[key] for line in uninterrupted.lines]
        assert [line[key] for line in warm_started.lines] == expected_values
    expected = (uninterrupted.path / "checkpoint.safetensors").read_bytes()
    assert (warm_started.path / "checkpoint.safetensors").read_bytes() == expected
    assert RunDirectory(warm_started.path).provenance()["after"] == "fedavg+fedcog"


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm",
    [FedProx(), MOON(), SCAFFOLD(), Varied(start_round=2, memory=0.5, average=0.5)],
)
def test_another_algorithm_may_take_over_the_rounds(
    algorithm: Algorithm, warm_start: Path, tmp_path: Path
) -> None:
    warm_started = run_from(
        experiment(algorithm, evaluate_local=False), tmp_path / "on", warm_start
    )
    first_lines = RunDirectory(warm_start).lines()
    assert len(warm_started.lines) == 3 and warm_started.lines[:2] == first_lines
    first_checkpoint = RunDirectory(warm_start).load()
    last_checkpoint = RunDirectory(warm_started.path).load()
    assert first_checkpoint is not None and last_checkpoint is not None
    for name, value in first_checkpoint.server["params"].items():
        assert 0 < float((last_checkpoint.server["params"][name] - value).abs().max()) < 1
    cold_started = run(experiment(algorithm), tmp_path / "alone", report=False)
    # The cold run trained its first two rounds with this algorithm.
    assert warm_started.lines[2]["loss"] != cold_started.lines[2]["loss"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"algorithm": VHL(virtual=10)},
            "params belong to another network, or to an algorithm that adds some",
        ),
        ({"seed": 1}, "differs in seed"),
        ({"lr": 0.1}, "differs in lr"),
        ({"rounds": 1}, "not finished, or longer"),
        ({"beta": 0.5, "batch_size": 4}, "differs in batch_size, beta"),
    ],
)
def test_warm_start_refuses_other_settings(
    changes: dict[str, Any], reason: str, warm_start: Path, tmp_path: Path
) -> None:
    config = dataclasses.replace(experiment(FedAvg()), **changes)
    with pytest.raises(RecordError, match=reason):
        run_from(config, tmp_path / "on", warm_start)


def test_warm_start_refuses_an_unfinished_run(warm_start: Path, tmp_path: Path) -> None:
    (warm_start / "checkpoint.safetensors").rename(warm_start / "away")
    try:
        with pytest.raises(RecordError, match="not finished"):
            run_from(experiment(FedAvg()), tmp_path / "on", warm_start)
    finally:
        (warm_start / "away").rename(warm_start / "checkpoint.safetensors")
    # The failed attempt left nothing that blocks the next one.
    assert run_from(experiment(FedAvg()), tmp_path / "on", warm_start).lines


def disagreement_gradient(federation: FederationState, client: int) -> float:
    """Largest entry of the disagreement term's gradient at the initial noise of generation."""
    setup = federation.prepared
    previous = setup.simulator.client_state(FEDCOG, federation.shared, client)["previous"]
    noise = setup.simulator.cohort.draws(FEDCOG, "client", 2, torch.tensor([client]))["noise"][0]
    labels = torch.zeros(len(noise), dtype=torch.int64)
    models = generation.Models(setup.task, setup.model, federation.weights, previous)
    gradients = []
    for weight in (0.1, 0.0):
        config = FEDCOG.generation_config._replace(disagreement=weight)
        loss = generation.objective(models, config, len(noise))
        gradients.append(autograd_gradient(loss, {"x": noise}, {"y": labels})[0])
    return max_difference(*gradients)


def test_first_fedcog_round_after_a_warm_start_has_disagreement(warm_start: Path) -> None:
    setup = ExperimentSetup(experiment(FEDCOG))
    checkpoint = RunDirectory(warm_start).load()
    assert checkpoint is not None
    setup.simulator.client_states.restore(checkpoint.clients)
    federation = FederationState(setup, checkpoint.server, 2, None)
    assert all(disagreement_gradient(federation, client) > 1e-6 for client in range(4))
    # As after plain FedAvg, whose clients keep no state.
    setup.simulator.client_states.restore({})
    assert all(disagreement_gradient(federation, client) == 0 for client in range(4))
