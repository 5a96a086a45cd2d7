"""Tests of trackers by what they write: event files, a real MLflow server, W&B offline files."""

import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import fedcog
from fedcog import Experiment, FedAvg, FedCOG
from fedcog.cli.main import main
from fedcog.runs.records.run_directory import RunDirectory
from fedcog.runs.tracking import TrackerWarning, tracker
from fedcog.runs.tracking.values import flat_settings, image_sheet, round_metrics
from fedcog.runs.tracking.wandb_files import last_step
from tests.support.paths import REPO

wandb = pytest.importorskip("wandb")
pytestmark = pytest.mark.processes

QUICK: dict[str, Any] = {
    "dataset": "digits",
    "partition": "label-skew",
    "clients": 5,
    "local_steps": 2,
    "lr": 0.05,
    "batch_size": 8,
    "threads": 1,
    "mapping": "vmap",
    "rounds": 4,
}
FEDCOG = FedCOG(FedAvg(), start_round=2, count=8, steps=4)
TRACKERS = ["tensorboard", "mlflow", "wandb"]
SERVER_CODE = (
    "import sys; from mlflow.server import app; from werkzeug.serving import run_simple as run; "
    "run('127.0.0.1', int(sys.argv[1]), app)"
)


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty MLflow database."""
    from mlflow import MlflowClient

    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    file = tmp_path_factory.mktemp("mlflow") / "empty.db"
    MlflowClient(f"sqlite:///{file}").search_experiments()
    return file


@pytest.fixture(autouse=True)
def store(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path | None:
    """Isolate the settings of trackers; give tests that use `empty_store` a new MLflow database."""
    for name in [name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")  # no network in tests
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setattr(tracker, "MIN_RETRY_SECONDS", 0.0)
    monkeypatch.setattr(tracker, "RETRY_FACTOR", 0)
    monkeypatch.chdir(tmp_path)
    if "empty_store" not in request.fixturenames:
        return None
    shutil.copy(request.getfixturevalue("empty_store"), tmp_path / "mlflow.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    return tmp_path / "mlflow.db"


@contextmanager
def mlflow_server(store: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """A real MLflow server at 127.0.0.1."""
    settings = {
        "_MLFLOW_SERVER_FILE_STORE": f"sqlite:///{store}",
        "_MLFLOW_SERVER_SERVE_ARTIFACTS": "true",
        "_MLFLOW_SERVER_ARTIFACT_ROOT": "mlflow-artifacts:/",
        "_MLFLOW_SERVER_ARTIFACT_DESTINATION": str(store.parent / "artifacts"),
    }
    command = [sys.executable, "-c", SERVER_CODE, str(port)]
    with subprocess.Popen(command, env=os.environ | settings, stderr=subprocess.DEVNULL) as process:
        try:
            for _ in range(300):
                assert process.poll() is None
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                    break
                except OSError:
                    time.sleep(0.1)
            yield process
        finally:
            process.kill()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def tensorboard_data(run: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard reads in a run's event files, by tag.

    Returns:
        (step, value) of every scalar, (step, width) of every image, nothing for other tags.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"), {"images": 0, "scalars": 0, "tensors": 0})
    events.Reload()
    scalars = {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }
    images = {
        tag: [(event.step, event.width) for event in events.Images(tag)]
        for tag in events.Tags()["images"]
    }
    tags = set(events.summary_metadata) | set(events.PluginTagToContent("hparams"))
    others: dict[str, list[tuple[int, float]]] = {tag: [] for tag in tags}
    return others | scalars | images


def mlflow_runs() -> list[Any]:
    """All runs in MLflow's store, oldest first."""
    from mlflow import MlflowClient

    client = MlflowClient()
    experiment_ids = [experiment.experiment_id for experiment in client.search_experiments()]
    return list(client.search_runs(experiment_ids, order_by=["attributes.start_time ASC"]))


def mlflow_history(run: str, name: str) -> list[tuple[int, float]]:
    """(step, value) of a metric in MLflow's store."""
    from mlflow import MlflowClient

    return [(metric.step, metric.value) for metric in MlflowClient().get_metric_history(run, name)]


def wandb_records(run: Path) -> tuple[list[dict[str, Any]], list[Any]]:
    """Read W&B's offline files, which are LevelDB logs of 32 KiB blocks.

    Returns:
        (steps, other records).
    """
    from wandb.proto import wandb_internal_pb2

    steps = []
    others = []
    for file in sorted((run / "wandb").glob("offline-run-*/*.wandb")):
        content = file.read_bytes()
        offset = 7
        record = b""
        while offset + 7 <= len(content):
            if 32768 - offset % 32768 < 7:  # the block has no room for another header
                offset += 32768 - offset % 32768
                continue
            length = int.from_bytes(content[offset + 4 : offset + 6], "little")
            kind = content[offset + 6]
            record += content[offset + 7 : offset + 7 + length]
            offset += 7 + length
            if kind in (1, 4):
                message = wandb_internal_pb2.Record.FromString(record)
                record = b""
                if message.WhichOneof("record_type") == "history":
                    items = message.history.item
                    steps.append(
                        {
                            item.key or "/".join(item.nested_key): json.loads(item.value_json)
                            for item in items
                        }
                    )
                else:
                    others.append(message)
    return steps, others


def recorded(run: fedcog.Run, name: str = "loss") -> list[tuple[int, float]]:
    """(round, value) of a metric in a run's own record."""
    return [(line["round"], pytest.approx(line[name], rel=1e-6)) for line in run.lines]


def test_trackers_get_rounds_settings_and_images(tmp_path: Path, empty_store: Path) -> None:
    experiment = Experiment(algorithm=FEDCOG, **QUICK)
    seen = []

    def count_logged_rounds(_: Experiment, line: dict[str, Any]) -> None:
        num_events = len(tensorboard_data(tmp_path / "a")["loss"])
        num_metrics = len(mlflow_history(mlflow_runs()[0].info.run_id, "loss"))
        seen.append((line["round"], num_events, num_metrics))

    with warnings.catch_warnings():
        warnings.simplefilter("error", TrackerWarning)
        run = fedcog.run(
            experiment, tmp_path / "a", track=TRACKERS, callbacks=count_logged_rounds, report=False
        )
    assert seen == [(n, n, n) for n in (1, 2, 3, 4)], "each round is logged before the next begins"
    untracked = fedcog.run(experiment, tmp_path / "b", report=False)
    for name in ("experiment.toml", "checkpoint.safetensors"):
        assert (run.path / name).read_bytes() == (untracked.path / name).read_bytes()
    assert not (untracked.path / "tracking.json").exists()

    events = tensorboard_data(run.path)
    assert events["loss"] == recorded(run) and events["accuracy"] == recorded(run, "accuracy")
    assert [step for step, _ in events["generated"]] == [3, 4]
    assert "experiment/text_summary" in events and "_hparams_/session_start_info" in events
    bytes_up = [(line["round"], sum(entry["up"] for entry in line["local"])) for line in run.lines]
    assert events["bytes/up"] == bytes_up and events["seconds/generation"][2][1] > 0

    (mlflow_run,) = mlflow_runs()
    assert mlflow_history(mlflow_run.info.run_id, "loss") == recorded(run)
    assert mlflow_history(mlflow_run.info.run_id, "bytes/up") == bytes_up
    assert mlflow_run.info.status == "FINISHED"
    assert mlflow_run.data.params["fedcog.start_round"] == "2"
    assert mlflow_run.data.params["algorithm"] == "fedavg+fedcog"
    assert mlflow_run.info.run_name.endswith("/a")
    image_folder = Path(mlflow_run.info.artifact_uri.removeprefix("file://")) / "generated"
    assert sorted(file.name for file in image_folder.iterdir()) == ["00003.png", "00004.png"]

    steps, others = wandb_records(run.path)
    assert [(step["_step"], step["loss"]) for step in steps] == recorded(run)
    has_images = [any(key.startswith("generated") for key in step) for step in steps]
    assert has_images == [False, False, True, True]
    assert len(list((run.path / "wandb").glob("offline-run-*/files/media/images/*.png"))) == 2
    (wandb_run,) = [entry.run for entry in others if entry.WhichOneof("record_type") == "run"]
    config = {entry.key: json.loads(entry.value_json) for entry in wandb_run.config.update}
    assert config["lr"] == 0.05 and config["fedcog.count"] == 8 and wandb_run.project == "fedcog"
    exits = [entry.exit for entry in others if entry.WhichOneof("record_type") == "exit"]
    assert [entry.exit_code for entry in exits] == [0]


def test_resumed_run_logs_every_step_exactly_once(tmp_path: Path, empty_store: Path) -> None:
    settings = QUICK | {"rounds": 7, "checkpoint_every": 3}
    experiment = Experiment(**settings)
    out = tmp_path / "a"
    code = (
        "import os, signal, sys, fedcog; settings = fedcog.Experiment(**eval(sys.argv[1]));"
        "kill = lambda _, line: line['round'] == 5 and os.kill(os.getpid(), signal.SIGKILL);"
        "fedcog.run(settings, sys.argv[2], track=sys.argv[3:], callbacks=kill, report=False)"
    )
    command = [sys.executable, "-c", code, repr(settings), str(out), *TRACKERS]
    process = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == -signal.SIGKILL, process.stderr
    tracking = RunDirectory(out).tracking()
    assert {entry["told"] for entry in tracking.values()} == {5}, (
        "two rounds more than in the checkpoint"
    )
    # As if the process had been killed after logging round 5, but before recording that.
    for name in ("tensorboard", "mlflow"):
        tracking[name]["told"] = 4
    RunDirectory(out).save_tracking(tracking)
    run = fedcog.run(experiment, out, track=TRACKERS, resume=True, report=False)
    assert tensorboard_data(out)["loss"] == recorded(run) and len(run.lines) == 7
    (mlflow_run,) = mlflow_runs()
    assert mlflow_history(mlflow_run.info.run_id, "loss") == recorded(run)
    assert mlflow_run.info.status == "FINISHED"
    steps, others = wandb_records(out)
    assert [(step["_step"], step["loss"]) for step in steps] == recorded(run)
    wandb_runs = [entry.run for entry in others if entry.WhichOneof("record_type") == "run"]
    assert len({wandb_run.run_id for wandb_run in wandb_runs}) == 1


def test_last_step_of_truncated_offline_files(tmp_path: Path) -> None:
    with wandb.init(
        project="x", id="mine", dir=tmp_path, mode="offline", settings=wandb.Settings(silent=True)
    ) as wandb_run:
        for step in range(1, 301):
            wandb_run.log({f"value {number}": step for number in range(20)}, step=step)
    assert last_step(tmp_path / "wandb", "mine") == 300
    assert last_step(tmp_path / "wandb", "other") == 0
    (file,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    content = file.read_bytes()
    assert len(content) > 3 * 32768
    last_steps = []
    for size in (len(content) // 2, len(content) // 3, 32768, 10, 7, 3, 0):
        file.write_bytes(content[:size])
        last_steps.append(last_step(tmp_path / "wandb", "mine"))
    assert 100 < last_steps[0] < 200
    assert last_steps == sorted(last_steps, reverse=True)
    assert last_steps[-4:] == [0] * 4


def test_tracker_added_on_resume_gets_all_rounds(tmp_path: Path) -> None:
    run = fedcog.run(Experiment(algorithm=FEDCOG, **QUICK), tmp_path / "a", report=False)
    (run.path / "tracking.json").write_text('{"tensorboard": [')  # damaged
    arguments = ["run", "--resume", str(run.path), "--quiet"]
    assert main([*arguments, "--track", "tensorboard", "--track", "wandb"]) == 0
    events = tensorboard_data(run.path)
    assert events["loss"] == recorded(run) and [step for step, _ in events["generated"]] == [3, 4]
    steps, _ = wandb_records(run.path)
    assert [(step["_step"], step["loss"]) for step in steps] == recorded(run)


def test_rounds_missed_while_the_server_was_down_are_logged_later(
    tmp_path: Path, empty_store: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    out = tmp_path / "a"
    experiment = Experiment(algorithm=FEDCOG, **QUICK)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
    with mlflow_server(store, port) as process:

        def kill_server(_: Experiment, line: dict[str, Any]) -> None:
            if line["round"] == 2:
                process.kill()
                process.wait()

        with pytest.warns(TrackerWarning) as caught:
            run = fedcog.run(experiment, out, track="mlflow", callbacks=kill_server, report=False)
    assert len(run.lines) == 4, "the run must continue"
    (message,) = [str(warning.message) for warning in caught]
    assert message.startswith(f"mlflow could not log {out} (")
    assert f"fedcog run --resume {out} --track mlflow" in message
    with mlflow_server(store, port):
        fedcog.run(experiment, out, track=["mlflow"], resume=True, report=False)
        (mlflow_run,) = mlflow_runs()
        assert mlflow_history(mlflow_run.info.run_id, "loss") == recorded(run)
        assert mlflow_run.info.status == "FINISHED"
        from mlflow import MlflowClient

        images = [
            artifact.path
            for artifact in MlflowClient().list_artifacts(mlflow_run.info.run_id, "generated")
        ]
        assert images == ["generated/00003.png", "generated/00004.png"]


def test_unopenable_tracker_does_not_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/nowhere/mlflow.db")
    (tmp_path / "nowhere").write_text("no folder")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "tensorboard").write_text("no folder")
    started = time.monotonic()
    with pytest.warns(TrackerWarning) as caught:
        run = fedcog.run(
            Experiment(**QUICK), tmp_path / "a", track=["mlflow", "tensorboard"], report=False
        )
    assert len(run.lines) == 4 and time.monotonic() - started < 60
    names = [
        str(warning.message).split()[0]
        for warning in caught
        if issubclass(warning.category, TrackerWarning)
    ]
    assert sorted(names) == ["mlflow", "tensorboard"]
    assert not caplog.records, "MLflow must not log the same error again"


def test_wandb_timeout_is_short_unless_set(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedcog.runs.tracking.wandb import _available_settings

    assert _available_settings()["init_timeout"] <= 30
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "120")
    assert "init_timeout" not in _available_settings()


def test_missing_tracker_packages_are_reported_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("wandb", "mlflow"):
        monkeypatch.setitem(sys.modules, name, None)
    for command in (["run"], ["compare", "--algorithms", "fedavg"]):
        arguments = [*command, "--out", str(tmp_path / "a")]
        assert main([*arguments, "--track", "mlflow", "--track", "wandb"]) == 2
        stderr = capsys.readouterr().err
        assert "fedcog: track wandb needs a package: pip install 'fedcog[wandb]'." in stderr
        assert "fedcog: track mlflow needs a package: pip install 'fedcog[mlflow]'." in stderr
    with pytest.raises(fedcog.ConfigError, match="did you mean tensorboard"):
        fedcog.run(Experiment(**QUICK), tmp_path / "a", track="tensorbord")
    assert main(["run", "--track", "comet"]) == 2
    assert not (tmp_path / "a").exists()


def test_compare_tracks_every_run_and_warns_without_wandb_login(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("WANDB_MODE")
    wandb.teardown()  # wandb caches the environment
    arguments = ["compare", "--algorithms", "fedavg", "fedprox", "--seeds", "0"]
    arguments += ["--out", str(tmp_path / "c"), "--plain"]
    arguments += [
        f"--{key.replace('_', '-')}={value}" for key, value in (QUICK | {"rounds": 1}).items()
    ]
    assert main([*arguments, "--track", "wandb", "--track", "tensorboard"]) == 0
    stderr = capsys.readouterr().err
    assert stderr.count("fedcog: not logged in to Weights & Biases") == 2, "once for each run"
    for name in ("fedavg", "fedprox"):
        run = tmp_path / "c" / name / "seed-0"
        assert [step["_step"] for step in wandb_records(run)[0]] == [1]
        assert len(tensorboard_data(run)["loss"]) == 1
    wandb.teardown()


def test_diverged_run_is_marked_as_failed(tmp_path: Path, empty_store: Path) -> None:
    with pytest.raises(fedcog.Diverged):
        fedcog.run(Experiment(**QUICK | {"lr": 1e15}), tmp_path / "a", track="mlflow", report=False)
    assert mlflow_runs()[0].info.status == "FAILED"


def test_deleted_tracker_run_is_replaced_with_a_warning(tmp_path: Path, empty_store: Path) -> None:
    from mlflow import MlflowClient

    config = Experiment(**QUICK)
    fedcog.run(config, tmp_path / "a", track="mlflow", report=False)
    MlflowClient().delete_run(mlflow_runs()[0].info.run_id)
    with pytest.warns(TrackerWarning, match="mlflow has no run .*: a new one gets all rounds"):
        fedcog.run(
            dataclasses.replace(config, rounds=config.rounds + 1),
            tmp_path / "a",
            track="mlflow",
            resume=True,
            report=False,
        )
    (mlflow_run,) = mlflow_runs()
    steps = [step for step, _ in mlflow_history(mlflow_run.info.run_id, "loss")]
    assert steps == list(range(1, config.rounds + 2))


class Notes(fedcog.Tracker):
    """A user's tracker that fails once, in round 2."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, float]] = []
        self.opened: list[tuple[Path, str, int]] = []
        self.ended: list[str] = []

    def open(self, path: Path, experiment: Experiment, run_id: str, last_round: int) -> None:
        super().open(path, experiment, run_id or "mine", last_round)
        self.opened.append((path, run_id, last_round))

    def log(self, round: int, metrics: dict[str, float], image: torch.Tensor | None) -> None:
        if round == 2 and len(self.seen) == 1 and not self.ended:
            self.ended.append("failed")
            raise OSError("the pencil broke")
        assert (image is not None) == (round > 2)
        self.seen.append((round, metrics["loss"]))

    def close(self, status: Any) -> None:
        self.ended.append(status)


def test_user_tracker_may_fail_once_and_resumes(tmp_path: Path) -> None:
    failing_tracker = Notes()
    experiment = Experiment(algorithm=FEDCOG, **QUICK)
    with pytest.warns(TrackerWarning, match=r"Notes could not log .* \(the pencil broke\)"):
        run = fedcog.run(experiment, tmp_path / "a", track=failing_tracker, report=False)
    assert failing_tracker.seen == recorded(run), (
        "every round once, although round 2 failed at first"
    )
    assert failing_tracker.opened == [(tmp_path / "a", "", 0)]
    assert failing_tracker.ended == ["failed", "finished"]
    longer = dataclasses.replace(experiment, rounds=5)
    resumed = Notes()
    resumed.ended.append("failed")
    run = fedcog.run(
        longer, tmp_path / "a", track=[resumed, "tensorboard"], resume=True, report=False
    )
    assert resumed.opened == [(tmp_path / "a", "mine", 4)] and resumed.seen == recorded(run)[4:]
    assert tensorboard_data(tmp_path / "a")["loss"] == recorded(run)


def test_callbacks_may_be_a_function_or_a_list(tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []

    def first(experiment: Experiment, line: dict[str, Any]) -> None:
        calls.append(("first", experiment.rounds, line["round"]))

    def second(experiment: Experiment, line: dict[str, Any]) -> None:
        calls.append(("second", experiment.rounds, line["round"]))

    experiment = Experiment(**QUICK | {"rounds": 2})
    fedcog.run(experiment, tmp_path / "a", callbacks=first, report=False)
    assert calls == [("first", 2, 1), ("first", 2, 2)]
    calls.clear()
    fedcog.run(experiment, tmp_path / "b", callbacks=[first, second], report=False)
    assert calls == [(name, 2, round) for round in (1, 2) for name in ("first", "second")]


def test_round_metrics_flatten_a_recorded_line() -> None:
    line = {
        "round": 3,
        "clients": [1, 4],
        "loss": None,
        "accuracy": 0.5,
        "label_mix_accuracy": 0.75,
        "local_test": {"personal_accuracy": 0.25},
        "odd: name?": 2,
        "skipped": [4],
        "map": True,
        "seconds": {"total": 1.5},
        "privacy": {"epsilon": float("inf"), "simulated": True},
        "local": [
            {"client": 1, "up": 8, "distance": 1.0},
            {"client": 4, "up": 16, "distance": None},
        ],
    }
    expected = {
        "accuracy": 0.5,
        "label_mix_accuracy": 0.75,
        "local_test/personal_accuracy": 0.25,
        "odd_ name_": 2,
        "skipped": 1,
        "seconds/total": 1.5,
        "bytes/up": 24,
    }
    assert round_metrics(line) == expected | {"clients/distance": 1.0}
    assert flat_settings(Experiment(algorithm=FEDCOG))["fedcog.count"] == 8


def test_image_sheet_arranges_and_limits_images() -> None:
    images = torch.arange(2 * 3 * 4, dtype=torch.uint8).reshape(2, 3, 1, 2, 2)
    sheet = image_sheet({"images": images})
    assert sheet is not None and sheet.shape == (3, 6, 9)
    assert sheet[0, 3, 3] == images[1, 1, 0, 0, 0]
    large_sheet = image_sheet({"images": torch.zeros(2, 900, 3, 64, 64, dtype=torch.uint8)})
    assert large_sheet is not None and large_sheet.shape[2] <= 4096
    for tensors in (
        {},
        {"images": torch.zeros(2, 3)},
        {"images": torch.zeros(0, 3, 1, 2, 2, dtype=torch.uint8)},
    ):
        assert image_sheet(tensors) is None
