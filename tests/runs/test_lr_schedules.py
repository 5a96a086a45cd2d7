"""Learning rate schedules in runs: what changes, what is recorded, and what may resume."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fedcog
from fedcog import ConfigError, Experiment, FedAdam, FedAvg, FedCOG, FedDyn, FedNova, make_algorithm
from fedcog.algorithms.fedcog_variants import Varied
from fedcog.core import tree
from fedcog.runs.config.notes import SettingWarning, experiment_notes
from fedcog.runs.records.run_directory import RecordError, RunDirectory

TINY = Experiment(
    clients=3,
    rounds=4,
    local_steps=2,
    batch_size=8,
    model="mlp",
    threads=1,
    workers=1,
    mapping="loop",
    evaluate_local=False,
)
COSINE: dict[str, Any] = {"lr_schedule": "cosine", "lr_warmup": 1, "lr_final": 0.1}


def checkpoint(run: fedcog.Run) -> bytes:
    return (run.path / "checkpoint.safetensors").read_bytes()


def weights(run: fedcog.Run) -> dict[str, torch.Tensor]:
    state = RunDirectory(run.path).load()
    assert state is not None
    params: dict[str, torch.Tensor] = state.server["params"]
    return params


def run(out: Path, experiment: Experiment = TINY, resume: bool = False, **changes: Any) -> Any:
    experiment = dataclasses.replace(experiment, **changes)
    return fedcog.run(experiment, out, resume=resume, report=False)


def test_identities_of_older_experiments_are_unchanged() -> None:
    assert Experiment().identity == "58c6dfde6aa83a7d"
    names = Experiment(lr_decay=0.9).identifying_settings()
    assert names["lr_decay"] == 0.9
    assert not {name for name in names if name.startswith(("lr_", "server_lr"))} - {"lr_decay"}


def test_learning_rates_are_recorded_if_they_change(tmp_path: Path) -> None:
    changing = run(tmp_path / "cosine", **COSINE, server_lr_schedule="linear")
    rates = [line["lr"] for line in changing.lines]
    assert rates == pytest.approx([0.005, 0.01, 0.0055, 0.001])
    expected = [1, 1 - 0.9 / 3, 1 - 0.9 * 2 / 3, 0.1]
    assert [line["server_lr"] for line in changing.lines] == pytest.approx(expected)
    constant = run(tmp_path / "constant")
    assert not {"lr", "server_lr"} & constant.lines[0].keys()


def test_report_shows_a_learning_rate_that_changes(tmp_path: Path) -> None:
    caption = "Local learning rate of each round."
    for name, changes in {"cosine": COSINE, "constant": {}}.items():
        page = fedcog.run(dataclasses.replace(TINY, **changes), tmp_path / name).path
        assert (caption in (page / "report.html").read_text()) == (name == "cosine")


def test_resumed_run_is_byte_equal(tmp_path: Path) -> None:
    changes = COSINE | {"lr_rounds": 4, "server_lr_schedule": "exponential", "server_lr_decay": 0.5}
    straight = run(tmp_path / "straight", **changes)
    run(tmp_path / "resumed", **(changes | {"rounds": 2}))
    resumed = run(tmp_path / "resumed", resume=True, **changes)
    assert checkpoint(straight) == checkpoint(resumed)


def test_horizon_is_part_of_the_identity(tmp_path: Path) -> None:
    run(tmp_path, **COSINE)
    with pytest.raises(RecordError, match=r"decays over 4 rounds.*set --lr-rounds 4 too"):
        run(tmp_path, resume=True, **COSINE, rounds=6)
    longer = run(tmp_path, resume=True, **COSINE, rounds=6, lr_rounds=4)
    assert [line["lr"] for line in longer.lines[3:]] == pytest.approx([0.001] * 3)


def test_other_schedules_may_get_more_rounds(tmp_path: Path) -> None:
    changes = {"lr_schedule": "step", "lr_step": 2, "lr_decay": 0.1}
    run(tmp_path, **changes)
    longer = run(tmp_path, resume=True, **changes, rounds=5)
    assert [line["lr"] for line in longer.lines] == pytest.approx([0.01, 0.01, 1e-3, 1e-3, 1e-4])


@pytest.mark.parametrize("name", ["fedavg+fedcog", "scaffold", "fednova+fedcog"])
def test_clients_at_once_train_the_same(name: str, tmp_path: Path) -> None:
    algorithm = make_algorithm(name, {"fedcog": {"start_round": 1, "count": 4, "steps": 2}})
    changes = COSINE | {"algorithm": algorithm, "precision": "float64", "momentum": 0.9}
    loop = run(tmp_path / "loop", **changes)
    at_once = run(tmp_path / "vmap", **changes, mapping="vmap")
    for mine, other in zip(loop.lines, at_once.lines, strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-9)


def test_fednova_divides_by_the_learning_rate_of_the_round(tmp_path: Path) -> None:
    """With equal local work it is FedAvg, whatever the learning rate."""
    pair = [
        run(tmp_path / str(index), algorithm=one, **COSINE, precision="float64", momentum=0.9)
        for index, one in enumerate((FedAvg(), FedNova()))
    ]
    difference = tree.subtract(weights(pair[0]), weights(pair[1]))
    assert max(float(value.abs().max()) for value in difference.values()) < 1e-12


def test_seeds_in_step_use_their_schedule(tmp_path: Path) -> None:
    experiment = dataclasses.replace(TINY, **COSINE)
    single = fedcog.run(dataclasses.replace(experiment, seed=1), tmp_path / "one", report=False)
    both = fedcog.compare([experiment], [0, 1], tmp_path / "both")
    assert [line["loss"] for line in both[1].lines] == [line["loss"] for line in single.lines]


def test_server_schedule_scales_the_update_of_the_model(tmp_path: Path) -> None:
    start = weights(run(tmp_path / "start", rounds=1, lr=1e-30))
    full = weights(run(tmp_path / "full", rounds=1))
    half = weights(run(tmp_path / "half", rounds=1, server_lr_warmup=1))
    for name, value in start.items():
        torch.testing.assert_close(half[name], (value + full[name]) / 2)


def test_server_schedule_is_fedadams_learning_rate(tmp_path: Path) -> None:
    scheduled = run(
        tmp_path / "scheduled",
        algorithm=FedAdam(lr=0.02),
        rounds=1,
        server_lr_warmup=3,
        precision="float64",
    )
    slower = run(tmp_path / "slower", algorithm=FedAdam(lr=0.005), rounds=1, precision="float64")
    for name, value in weights(slower).items():
        torch.testing.assert_close(weights(scheduled)[name], value, rtol=1e-12, atol=1e-15)


def test_server_schedule_is_refused_where_there_is_no_server_step() -> None:
    for algorithm in (FedDyn(), FedCOG(FedDyn()), Varied(average=0.9)):
        with pytest.raises(ConfigError, match=r"has no server step.*--server-lr-schedule constant"):
            Experiment(algorithm, server_lr_schedule="cosine")
    Experiment(FedDyn(), lr_schedule="cosine")


def test_faults_of_schedules_are_found_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        Experiment(lr_schedule="step", server_lr_schedule="step")
    assert len(caught.value.faults) == 4
    with pytest.raises(ConfigError, match="lr_final needs a number > 0"):
        Experiment(lr_final=0.0)


def test_settings_without_effect_are_named() -> None:
    experiment = Experiment(lr_schedule="cosine", lr_decay=0.9, lr_step=3)
    notes = experiment_notes(experiment)
    assert [note.split()[0] for note in notes] == ["lr_decay", "lr_step"]
    assert not experiment_notes(Experiment(lr_decay=0.9))


@pytest.mark.parametrize(
    ("settings", "note"),
    [
        ({"partition": "iid", "beta": 0.5}, "beta has no effect with --partition iid."),
        ({"partition": "natural", "balance": False}, "balance has no effect with"),
        ({"optimizer": "adam", "momentum": 0.5}, "momentum has no effect with --optimizer adam."),
        ({"local_epochs": 1.0, "local_steps": 5}, "local_steps has no effect with"),
        ({"shift_strength": 0.1}, "shift_strength has no effect without --shift."),
        ({"weights": "uniform", "weight_cap": 9}, "weight_cap has no effect with"),
        ({"dp_clip": 2.0}, "dp_clip, dp_noise and dp_delta have no effect without --privacy"),
        ({"algorithm": FedCOG(start_round=9), "rounds": 9}, "fedcog starts after round 9"),
    ],
)
def test_settings_without_effect_are_named_one_by_one(settings: dict[str, Any], note: str) -> None:
    (found,) = experiment_notes(Experiment(**settings))
    assert found.startswith(note)


def test_python_warns_of_settings_without_effect(tmp_path: Path) -> None:
    experiment = dataclasses.replace(TINY, rounds=1, shift_strength=0.1)
    with pytest.warns(SettingWarning, match="shift_strength has no effect"):
        fedcog.run(experiment, tmp_path / "one", report=False)
    with pytest.warns(SettingWarning, match="shift_strength has no effect") as caught:
        fedcog.compare([experiment, experiment], [0], tmp_path / "two")
    assert len([one for one in caught if one.category is SettingWarning]) == 1


def test_schedules_can_be_tuned(tmp_path: Path) -> None:
    space = {"lr_schedule": ["constant", "cosine"]}
    experiment = dataclasses.replace(TINY, rounds=2)
    (tuned,) = fedcog.sweep([experiment], space, tmp_path, search="grid", trials=2, seeds=[0])
    schedules = {trial.experiment.lr_schedule for trial in tuned.trials}
    assert schedules == {"constant", "cosine"}


def test_recorded_experiment_has_the_schedule(tmp_path: Path) -> None:
    finished = run(tmp_path, rounds=3, **COSINE)
    assert RunDirectory(finished.path).experiment().client_lr.kind == "cosine"
    lines = (tmp_path / "rounds.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["lr"] == 0.005


def test_rate_that_becomes_0_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"lr_decay 1e-25 lowers.*1e-77.*raise --lr-decay"):
        Experiment(lr=0.01, lr_decay=1e-25, rounds=4)
    Experiment(lr=0.01, lr_decay=1e-5, rounds=4)
