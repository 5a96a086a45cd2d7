"""A run that goes on from where another ended: the same as if it had been one."""

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
from fedcog.studies.probes import FederationState
from fedcog.testing import max_difference

SMALL: dict[str, Any] = {"rounds": 3, "local_steps": 4, "batch_size": 8, "clients": 4, "lr": 0.05}
SMALL |= {"mapping": "loop", "threads": 1, "workers": 1}
COG = FedCOG(count=8, steps=3, start_round=2, lr=0.1)


def experiment(algorithm: Algorithm, **changes: Any) -> Experiment:
    return Experiment(algorithm=algorithm, **SMALL | changes)


def onward(one: Experiment, out: Path, after: Path) -> Run:
    with (
        torch_settings(one),
        Runner(one, out, options=RunOptions(resume=True), start_from=after) as runner,
    ):
        (done,) = run_all([runner])
    assert isinstance(done, Run)
    return done


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two rounds of FedAvg, FedCOG asleep around it."""
    out = tmp_path_factory.mktemp("start")
    return run(experiment(FedCOG(start_round=2), rounds=2), out / "run", report=False).path


@pytest.mark.parametrize("algorithm", [FedAvg(), COG, dataclasses.replace(COG, source="noise")])
def test_going_on_is_as_if_it_had_been_one_run(
    algorithm: Algorithm, start: Path, tmp_path: Path
) -> None:
    whole = run(experiment(algorithm), tmp_path / "whole", report=False)
    parts = onward(experiment(algorithm), tmp_path / "parts", start)
    assert [line["loss"] for line in parts.lines] == [line["loss"] for line in whole.lines]
    assert [line["accuracy"] for line in parts.lines] == [line["accuracy"] for line in whole.lines]
    files = [(one.path / "checkpoint.safetensors").read_bytes() for one in (whole, parts)]
    assert files[0] == files[1]
    assert RunDirectory(parts.path).provenance()["after"] == "fedavg+fedcog"


@pytest.mark.parametrize(
    "algorithm",
    [FedProx(), MOON(), SCAFFOLD(), Varied(start_round=2, memory=0.5, average=0.5)],
)
def test_another_method_may_go_on(algorithm: Algorithm, start: Path, tmp_path: Path) -> None:
    done = onward(experiment(algorithm, evaluate_local=False), tmp_path / "on", start)
    before = RunDirectory(start).lines()
    assert len(done.lines) == 3 and done.lines[:2] == before
    begun = RunDirectory(start).load()
    ended = RunDirectory(done.path).load()
    assert begun is not None and ended is not None
    for name, value in begun.server["params"].items():
        assert 0 < float((ended.server["params"][name] - value).abs().max()) < 1
    alone = run(experiment(algorithm), tmp_path / "alone", report=False)
    assert done.lines[2]["loss"] != alone.lines[2]["loss"]  # which had two rounds of its own


@pytest.mark.parametrize(
    ("changed", "words"),
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
def test_what_is_no_start_is_refused(
    changed: dict[str, Any], words: str, start: Path, tmp_path: Path
) -> None:
    one = dataclasses.replace(experiment(FedAvg()), **changed)
    with pytest.raises(RecordError, match=words):
        onward(one, tmp_path / "on", start)


def test_a_start_that_is_not_finished_is_refused(start: Path, tmp_path: Path) -> None:
    (start / "checkpoint.safetensors").rename(start / "away")
    try:
        with pytest.raises(RecordError, match="not finished"):
            onward(experiment(FedAvg()), tmp_path / "on", start)
    finally:
        (start / "away").rename(start / "checkpoint.safetensors")
    assert onward(
        experiment(FedAvg()), tmp_path / "on", start
    ).lines  # what was begun in vain is in nobody's way


def disagreement(scene: FederationState, client: int) -> float:
    """The length of the gradient of the disagreement term alone, at the noise that generation
    begins with.
    """
    prepared = scene.prepared
    previous = prepared.simulator.client_state(COG, scene.shared, client)["previous"]
    noise = prepared.simulator.cohort.draws(COG, "client", 2, torch.tensor([client]))["noise"][0]
    labels = torch.zeros(len(noise), dtype=torch.int64)
    models = generation.Models(prepared.task, prepared.model, scene.weights, previous)
    with_it, without = (
        generation.objective(
            models, COG.generation_config._replace(disagreement=strength), len(noise)
        )
        for strength in (0.1, 0.0)
    )
    slopes = [
        autograd_gradient(loss, {"x": noise}, {"y": labels})[0] for loss in (with_it, without)
    ]
    return max_difference(*slopes)


def test_after_a_dormant_start_the_first_round_of_fedcog_disagrees(start: Path) -> None:
    prepared = ExperimentSetup(experiment(COG))
    checkpoint = RunDirectory(start).load()
    assert checkpoint is not None
    prepared.simulator.client_states.restore(checkpoint.clients)
    assert all(
        disagreement(FederationState(prepared, checkpoint.server, 2, None), client) > 1e-6
        for client in range(4)
    )
    prepared.simulator.client_states.restore(
        {}
    )  # as after a start of bare FedAvg, whose clients keep nothing
    assert all(
        disagreement(FederationState(prepared, checkpoint.server, 2, None), client) == 0
        for client in range(4)
    )
