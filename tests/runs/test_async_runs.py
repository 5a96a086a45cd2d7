"""Tests of runs with virtual time: settings, records, resume, several seeds, command line."""

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fedcog
from fedcog import SCAFFOLD, Experiment, FedAvg, FedCOG, compare
from fedcog.cli.main import main
from fedcog.core import tree
from fedcog.core.errors import Interrupted
from fedcog.core.settings import ConfigError
from fedcog.federation import torchrun
from fedcog.runs import compare as comparing
from fedcog.runs.config.notes import experiment_notes
from fedcog.runs.flower_runs import deployment_faults
from fedcog.runs.records.recorded_run import Run
from fedcog.runs.records.run_directory import RecordError, RunDirectory
from fedcog.runs.runner import Runner, round_loop

DEVICES = "fast: clients=3 speed=2; normal: clients=2; slow: clients=1 speed=0.3"
SYNCHRONOUS = Experiment(
    rounds=8,
    clients=6,
    local_steps=3,
    batch_size=8,
    lr=0.05,
    participation=0.7,
    devices=DEVICES,
    mapping="vmap",
    threads=1,
)
ASYNCHRONOUS = dataclasses.replace(SYNCHRONOUS, async_buffer=2)


def train(experiment: Experiment, out: Path, **keywords: Any) -> Run:
    return fedcog.run(experiment, out, report=False, **keywords)


def without_seconds(run: Run) -> list[dict[str, Any]]:
    return [line | {"seconds": None} for line in run.lines]


def all_tensors(path: Path) -> dict[str, Any]:
    """Return everything that a run's checkpoint holds, answers in flight included."""
    checkpoint = RunDirectory(path).load()
    assert checkpoint is not None and checkpoint.virtual is not None
    answers = checkpoint.virtual.to_tensors()
    flat = tree.flatten({"server": checkpoint.server, "answers": answers})
    return flat | checkpoint.clients


def stop_after(num_rounds: int) -> Callable[[], bool]:
    calls: list[None] = []

    def should_stop() -> bool:
        calls.append(None)
        return len(calls) == num_rounds

    return should_stop


@pytest.mark.parametrize(
    "experiment",
    [
        dataclasses.replace(ASYNCHRONOUS, algorithm=SCAFFOLD()),
        dataclasses.replace(
            ASYNCHRONOUS, algorithm=FedCOG(count=4, steps=2, start_round=2), evaluate_every=2
        ),
        dataclasses.replace(ASYNCHRONOUS, mapping="loop", async_buffer=1, on_divergence="skip"),
        SYNCHRONOUS,
    ],
    ids=["scaffold", "fedcog", "loop", "synchronous"],
)
def test_stopped_run_resumes_bit_for_bit(experiment: Experiment, tmp_path: Path) -> None:
    whole = train(experiment, tmp_path / "whole")
    with pytest.raises(Interrupted):
        train(experiment, tmp_path / "parts", should_stop=stop_after(3))
    stopped = RunDirectory(tmp_path / "parts").load()
    assert stopped is not None and stopped.virtual is not None and stopped.virtual.now > 0
    assert bool(stopped.virtual.in_flight) == (experiment.async_buffer > 0)
    with pytest.raises(Interrupted):
        train(experiment, tmp_path / "parts", resume=True, should_stop=stop_after(1))
    resumed = train(experiment, tmp_path / "parts", resume=True)
    assert without_seconds(resumed) == without_seconds(whole)
    first, second = all_tensors(tmp_path / "parts"), all_tensors(tmp_path / "whole")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    files = [tmp_path / name / "checkpoint.safetensors" for name in ("parts", "whole")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_checkpoint_holds_answers_that_have_arrived_too(tmp_path: Path) -> None:
    """Six clients finish at once: two are aggregated, four wait in the buffer."""
    experiment = dataclasses.replace(ASYNCHRONOUS, devices="", participation=1.0)
    with pytest.raises(Interrupted):
        train(experiment, tmp_path / "run", should_stop=stop_after(1))
    checkpoint = RunDirectory(tmp_path / "run").load()
    assert checkpoint is not None and checkpoint.virtual is not None
    assert [one.client_id for one in checkpoint.virtual.buffer] == [2, 3, 4, 5]
    assert [one.version for one in checkpoint.virtual.buffer] == [0] * 4
    assert checkpoint.virtual.in_flight == []
    assert checkpoint.virtual.buffer[0].payload["buffers"] == {}
    finished = train(experiment, tmp_path / "run", resume=True)
    assert [line["virtual_seconds"] for line in finished.lines] == [3, 3, 3, 6, 6, 6, 9, 9]
    assert [line["staleness"] for line in finished.lines[:4]] == [0, 1, 2, 0]


@pytest.mark.parametrize("damage", [{"now": "1/0"}, {"now": "soon"}, {"buffer": [7]}, {"now": 0}])
def test_damaged_virtual_time_is_an_error(damage: dict[str, Any], tmp_path: Path) -> None:
    train(dataclasses.replace(ASYNCHRONOUS, rounds=1), tmp_path)
    directory = RunDirectory(tmp_path)
    checkpoint = directory.load()
    assert checkpoint is not None and checkpoint.virtual is not None
    info = checkpoint.info | {"virtual_time": checkpoint.virtual.to_info() | damage}
    without_answers = damage == {"now": 0}
    tensors = {} if without_answers else checkpoint.virtual.to_tensors()
    flat = tree.flatten({"server": checkpoint.server, "answers": tensors})
    header = {"format": 1, "round": 1}
    directory._write_tensors("checkpoint.safetensors", flat, header | info)
    with pytest.raises(RecordError, match="is not a checkpoint"):
        directory.load()


def test_speeds_change_the_record_and_nothing_else(tmp_path: Path) -> None:
    timed = train(SYNCHRONOUS, tmp_path / "timed")
    plain = train(dataclasses.replace(SYNCHRONOUS, devices=""), tmp_path / "plain")
    for line, expected in zip(without_seconds(timed), without_seconds(plain), strict=True):
        slowest = line.pop("virtual_seconds")
        assert slowest > 0 and line == expected
    durations = [1.5] * 3 + [3] * 2 + [10]
    lengths = [max(durations[client] for client in line["clients"]) for line in timed.lines]
    times = [line["virtual_seconds"] for line in timed.lines]
    assert times == [sum(lengths[: index + 1]) for index in range(8)]
    fields = plain.lines[0].keys() | plain.lines[0]["local"][0].keys()
    assert not fields & {"virtual_seconds", "staleness", "age"}
    checkpoint = RunDirectory(tmp_path / "plain").load()
    assert checkpoint is not None and checkpoint.virtual is None


def test_record_has_ages_and_reaches_frames_and_trackers(tmp_path: Path) -> None:
    run = train(ASYNCHRONOUS, tmp_path)
    for line in run.lines:
        ages = [client["age"] for client in line["local"]]
        assert line["staleness"] == sum(ages) / 2 and len(line["clients"]) == 2
        assert [client["client"] for client in line["local"]] == line["clients"]
    assert any(line["staleness"] for line in run.lines)
    times = [line["virtual_seconds"] for line in run.lines]
    assert times == sorted(times)
    frame = fedcog.frame(tmp_path)
    assert frame["virtual_seconds"].tolist() == times
    assert frame["clients/age"].tolist() == frame["staleness"].tolist()


@pytest.mark.processes
def test_workers_equal_one_process(tmp_path: Path) -> None:
    experiment = dataclasses.replace(ASYNCHRONOUS, rounds=3, mapping="loop", devices="")
    runs = [
        train(dataclasses.replace(experiment, workers=count), tmp_path / str(count))
        for count in (1, 2)
    ]
    assert without_seconds(runs[0]) == without_seconds(runs[1])


def test_seeds_run_one_after_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "stacks_seeds", lambda experiment: True)
    experiment = dataclasses.replace(ASYNCHRONOUS, rounds=3)
    runs = compare([experiment], [0, 1], tmp_path / "all")
    for run in runs:
        alone = train(run.experiment, tmp_path / f"alone-{run.experiment.seed}")
        assert without_seconds(run) == without_seconds(alone)


# --- what is refused


def faults(**settings: Any) -> list[str]:
    with pytest.raises(ConfigError) as error:
        Experiment(clients=10, **settings)
    return error.value.faults


def test_all_faults_are_reported_at_once() -> None:
    found = faults(
        async_buffer=8,
        participation=0.5,
        backend="flower",
        privacy="central",
        selection="power-of-choice",
    )
    text = "\n".join(found)
    assert "only 5 clients train at the same time" in text and "at most 5" in text
    assert "Flower nodes answer in real time" in text
    assert "privacy accounts for rounds" in text
    assert "compares the losses of all candidates" in text
    assert all("set --" in fault for fault in found)


def test_settings_out_of_range_are_refused() -> None:
    (fault,) = faults(async_buffer=3, secure_aggregation=True)
    assert "--no-secure-aggregation" in fault
    assert "async_staleness" in faults(async_buffer=3, async_staleness=-1.0)[0]
    assert "speed needs a number > 0" in faults(devices="slow: clients=10 speed=0")[0]
    assert "speed needs a number > 0" in faults(devices="slow: clients=10 speed=much")[0]
    Experiment(clients=10, participation=0.5, async_buffer=5)


def test_buffer_is_checked_once_the_number_of_clients_is_known(tmp_path: Path) -> None:
    labels = torch.arange(60) % 2
    data = fedcog.from_arrays(
        torch.randn(60, 4), labels, torch.randn(10, 4), labels[:10], users=labels
    )
    experiment = Experiment(async_buffer=3, rounds=1, local_steps=1)
    with pytest.raises(ConfigError, match="only 2 clients train at the same time"):
        Runner(experiment, tmp_path, fedcog.runs.config.user_objects.UserObjects(data=data))


def test_torchrun_and_deployments_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchrun, "is_started", lambda: True)
    with pytest.raises(ConfigError, match="start fedcog without torchrun"):
        round_loop(ASYNCHRONOUS)
    found = deployment_faults(ASYNCHRONOUS, has_own_data=False)
    assert any("nodes answer in real time" in fault for fault in found)


def test_warm_start_is_refused(tmp_path: Path) -> None:
    start = dataclasses.replace(ASYNCHRONOUS, rounds=2)
    train(start, tmp_path / "start")
    with pytest.raises(RecordError, match="answers of its clients are still on their way"):
        Runner(ASYNCHRONOUS, tmp_path / "run", start_from=tmp_path / "start")


def test_clock_continues_after_a_warm_start(tmp_path: Path) -> None:
    train(dataclasses.replace(SYNCHRONOUS, rounds=2), tmp_path / "start")
    with Runner(SYNCHRONOUS, tmp_path / "run", start_from=tmp_path / "start") as runner:
        warm = runner.run()
    whole = train(SYNCHRONOUS, tmp_path / "whole")
    assert without_seconds(warm) == without_seconds(whole)


def test_staleness_without_a_buffer_is_noted() -> None:
    assert experiment_notes(Experiment(async_staleness=1.0)) == [
        "async_staleness has no effect without --async-buffer."
    ]


def test_identity_is_that_of_earlier_versions_unless_set() -> None:
    plain = Experiment(FedAvg())
    assert not {"async_buffer", "async_staleness"} & plain.identifying_settings().keys()
    assert Experiment(FedAvg(), async_buffer=2).identity != plain.identity


# --- command line and report


def test_command_line_trains_and_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--rounds", "4", "--clients", "6", "--local-steps", "2", "--batch-size", "8"]
    flags += ["--threads", "1", "--plain", "--out", str(tmp_path / "run")]
    command = ["run", *flags, "--devices", DEVICES, "--async-buffer", "3"]
    assert main([*command, "--async-staleness", "1"]) == 0
    output = capsys.readouterr().out
    assert "asynchronous: the server aggregates 3 answers at a time" in output
    assert "slow (clients 5 to 5): speed 0.3" in output
    lines = (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()
    assert all("virtual_seconds" in json.loads(line) for line in lines)
    page = (tmp_path / "run" / "report.html").read_text()
    assert len(re.findall("against virtual time", page)) == 1
    assert main(["run", *flags, "--async-buffer", "7"]) == 2
    assert "async_buffer is 7, but only 6 clients" in capsys.readouterr().err
