"""Trackers, by what they wrote: TensorBoard's event files, a real MLflow server on loopback, W&B's
offline files.
"""

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
import wandb

import fedcog
from fedcog import Experiment, FedAvg, FedCOG
from fedcog.cli.main import main
from fedcog.runs.records.run_directory import RunDirectory
from fedcog.runs.tracking import TrackerWarning, tracker
from fedcog.runs.tracking.values import flat_settings, image_sheet, round_metrics
from fedcog.runs.tracking.wandb_files import last_step
from tests.support.paths import REPO

QUICK: dict[str, Any] = {
    "dataset": "digits",
    "partition": "label-skew",
    "clients": 5,
    "local_steps": 2,
    "lr": 0.05,
}
QUICK |= {"batch_size": 8, "threads": 1, "mapping": "vmap", "rounds": 4}
COG = FedCOG(FedAvg(), start_round=2, count=8, steps=4)
ALL = ["tensorboard", "mlflow", "wandb"]
SERVER = (
    "import sys; from mlflow.server import app; from werkzeug.serving import run_simple as run; "
)
SERVER += "run('127.0.0.1', int(sys.argv[1]), app)"


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MLflow's tables, with nothing in them."""
    from mlflow import MlflowClient

    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    file = tmp_path_factory.mktemp("mlflow") / "empty.db"
    MlflowClient(f"sqlite:///{file}").search_experiments()
    return file


@pytest.fixture(autouse=True)
def store(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path | None:
    """Nobody's settings but ours; a new store for who asks for MLflow."""
    for name in [name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")  # tests talk to nobody
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
def server(store: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """A real MLflow server at 127.0.0.1."""
    own = {
        "_MLFLOW_SERVER_FILE_STORE": f"sqlite:///{store}",
        "_MLFLOW_SERVER_SERVE_ARTIFACTS": "true",
    }
    own |= {"_MLFLOW_SERVER_ARTIFACT_ROOT": "mlflow-artifacts:/"}
    own |= {"_MLFLOW_SERVER_ARTIFACT_DESTINATION": str(store.parent / "artifacts")}
    words = [sys.executable, "-c", SERVER, str(port)]
    with subprocess.Popen(words, env=os.environ | own, stderr=subprocess.DEVNULL) as process:
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
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def board(run: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard reads in a run's event files: (step, value) of every scalar."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(run / "tensorboard"), {"images": 0, "scalars": 0, "tensors": 0})
    found.Reload()
    scalars = {
        tag: [(one.step, one.value) for one in found.Scalars(tag)]
        for tag in found.Tags()["scalars"]
    }
    pictures = {
        tag: [(one.step, one.width) for one in found.Images(tag)] for tag in found.Tags()["images"]
    }
    marks = set(found.summary_metadata) | set(found.PluginTagToContent("hparams"))
    return (
        scalars
        | pictures
        | {mark: [] for mark in marks if mark not in scalars and mark not in pictures}
    )


def ledger() -> list[Any]:
    """The runs that MLflow's own client finds."""
    from mlflow import MlflowClient

    client = MlflowClient()
    places = [one.experiment_id for one in client.search_experiments()]
    return list(client.search_runs(places, order_by=["attributes.start_time ASC"]))


def history(run: str, name: str) -> list[tuple[int, float]]:
    """(step, value) of a metric."""
    from mlflow import MlflowClient

    return [(one.step, one.value) for one in MlflowClient().get_metric_history(run, name)]


def offline(run: Path) -> tuple[list[dict[str, Any]], list[Any]]:
    """The steps, and all other records, in the files that W&B would send, as they lie: blocks of a
    LevelDB log.
    """
    from wandb.proto import wandb_internal_pb2

    steps = []
    others = []
    for file in sorted((run / "wandb").glob("offline-run-*/*.wandb")):
        content = file.read_bytes()
        place = 7
        record = b""
        while place + 7 <= len(content):
            if 32768 - place % 32768 < 7:  # no room for a header: the rest of the block is empty
                place += 32768 - place % 32768
                continue
            length = int.from_bytes(content[place + 4 : place + 6], "little")
            kind = content[place + 6]
            record += content[place + 7 : place + 7 + length]
            place += 7 + length
            if kind in (1, 4):
                found = wandb_internal_pb2.Record.FromString(record)
                record = b""
                if found.WhichOneof("record_type") == "history":
                    items = found.history.item
                    steps.append(
                        {
                            one.key or "/".join(one.nested_key): json.loads(one.value_json)
                            for one in items
                        }
                    )
                else:
                    others.append(found)
    return steps, others


def scores(run: fedcog.Run, name: str = "loss") -> list[tuple[int, float]]:
    return [(line["round"], pytest.approx(line[name], rel=1e-6)) for line in run.lines]


def test_every_tracker_has_rounds_settings_and_pictures_and_the_run_is_the_same(
    tmp_path: Path, empty_store: Path
) -> None:
    experiment = Experiment(algorithm=COG, **QUICK)
    seen = []

    def look(_: Experiment, line: dict[str, Any]) -> None:
        seen.append(
            (
                line["round"],
                len(board(tmp_path / "a")["loss"]),
                len(history(ledger()[0].info.run_id, "loss")),
            )
        )

    with warnings.catch_warnings():
        warnings.simplefilter("error", TrackerWarning)
        run = fedcog.run(experiment, tmp_path / "a", track=ALL, callbacks=look, report=False)
    assert seen == [(n, n, n) for n in (1, 2, 3, 4)], "each round is there before the next"
    plain = fedcog.run(experiment, tmp_path / "b", report=False)
    for name in ("experiment.toml", "checkpoint.safetensors"):
        assert (run.path / name).read_bytes() == (plain.path / name).read_bytes()
    assert not (plain.path / "tracking.json").exists()

    found = board(run.path)
    assert found["loss"] == scores(run) and found["accuracy"] == scores(run, "accuracy")
    assert [step for step, _ in found["generated"]] == [3, 4]
    assert "experiment/text_summary" in found and "_hparams_/session_start_info" in found
    sent = [(line["round"], sum(one["up"] for one in line["local"])) for line in run.lines]
    assert found["bytes/up"] == sent and found["seconds/generation"][2][1] > 0

    (theirs,) = ledger()
    assert history(theirs.info.run_id, "loss") == scores(run)
    assert history(theirs.info.run_id, "bytes/up") == sent
    assert theirs.info.status == "FINISHED" and theirs.data.params["fedcog.start_round"] == "2"
    assert theirs.data.params["algorithm"] == "fedavg+fedcog" and theirs.info.run_name.endswith(
        "/a"
    )
    files = Path(theirs.info.artifact_uri.removeprefix("file://")) / "generated"
    assert sorted(file.name for file in files.iterdir()) == ["00003.png", "00004.png"]

    steps, others = offline(run.path)
    assert [(step["_step"], step["loss"]) for step in steps] == scores(run)
    assert [any(key.startswith("generated") for key in step) for step in steps] == [
        False,
        False,
        True,
        True,
    ]
    assert len(list((run.path / "wandb").glob("offline-run-*/files/media/images/*.png"))) == 2
    (told,) = [one.run for one in others if one.WhichOneof("record_type") == "run"]
    config = {one.key: json.loads(one.value_json) for one in told.config.update}
    assert config["lr"] == 0.05 and config["fedcog.count"] == 8 and told.project == "fedcog"
    assert [one.exit.exit_code for one in others if one.WhichOneof("record_type") == "exit"] == [0]


def test_a_run_that_was_killed_goes_on_with_no_step_twice_and_none_missing(
    tmp_path: Path, empty_store: Path
) -> None:
    experiment = Experiment(**QUICK | {"rounds": 7, "checkpoint_every": 3})
    out = tmp_path / "a"
    code = (
        "import os, signal, sys, fedcog; settings = fedcog.Experiment(**eval(sys.argv[1]));"
        "kill = lambda _, line: line['round'] == 5 and os.kill(os.getpid(), signal.SIGKILL);"
        "fedcog.run(settings, sys.argv[2], track=sys.argv[3:], callbacks=kill, report=False)"
    )
    words = [
        sys.executable,
        "-c",
        code,
        repr(QUICK | {"rounds": 7, "checkpoint_every": 3}),
        str(out),
        *ALL,
    ]
    done = subprocess.run(
        words,
        env=os.environ | {"PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    known = RunDirectory(out).tracking()
    assert {one["told"] for one in known.values()} == {5}, "two rounds more than the checkpoint has"
    for name in ("tensorboard", "mlflow"):  # as if the end had come between telling and noting it
        known[name]["told"] = 4
    RunDirectory(out).save_tracking(known)
    run = fedcog.run(experiment, out, track=ALL, resume=True, report=False)
    assert board(out)["loss"] == scores(run) and len(run.lines) == 7
    (theirs,) = ledger()
    assert history(theirs.info.run_id, "loss") == scores(run) and theirs.info.status == "FINISHED"
    steps, others = offline(out)
    assert [(step["_step"], step["loss"]) for step in steps] == scores(run)
    assert len({one.run.run_id for one in others if one.WhichOneof("record_type") == "run"}) == 1


def test_what_offline_files_have_is_counted_up_to_where_they_are_torn(tmp_path: Path) -> None:
    with wandb.init(
        project="x", id="mine", dir=tmp_path, mode="offline", settings=wandb.Settings(silent=True)
    ) as here:
        for step in range(1, 301):
            here.log({f"value {number}": step for number in range(20)}, step=step)
    assert (
        last_step(tmp_path / "wandb", "mine") == 300 and last_step(tmp_path / "wandb", "other") == 0
    )
    (file,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    whole = file.read_bytes()
    assert len(whole) > 3 * 32768
    seen = []
    for size in (len(whole) // 2, len(whole) // 3, 32768, 10, 7, 3, 0):
        file.write_bytes(whole[:size])
        seen.append(last_step(tmp_path / "wandb", "mine"))
    assert 100 < seen[0] < 200 and seen == sorted(seen, reverse=True) and seen[-4:] == [0] * 4


def test_who_follows_late_is_told_from_the_beginning(tmp_path: Path) -> None:
    run = fedcog.run(Experiment(algorithm=COG, **QUICK), tmp_path / "a", report=False)
    (run.path / "tracking.json").write_text('{"tensorboard": [')  # damaged: as good as none
    assert (
        main(
            [
                "run",
                "--resume",
                str(run.path),
                "--track",
                "tensorboard",
                "--track",
                "wandb",
                "--quiet",
            ]
        )
        == 0
    )
    found = board(run.path)
    assert found["loss"] == scores(run) and [step for step, _ in found["generated"]] == [3, 4]
    steps, _ = offline(run.path)
    assert [(step["_step"], step["loss"]) for step in steps] == scores(run)


def test_a_server_that_goes_and_comes_back(
    tmp_path: Path, empty_store: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    out = tmp_path / "a"
    experiment = Experiment(algorithm=COG, **QUICK)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
    with server(store, port) as process:

        def kill(_: Experiment, line: dict[str, Any]) -> None:
            if line["round"] == 2:
                process.kill()
                process.wait()

        with pytest.warns(TrackerWarning) as told:
            run = fedcog.run(experiment, out, track="mlflow", callbacks=kill, report=False)
    assert len(run.lines) == 4, "the run goes on"
    (said,) = [str(one.message) for one in told]
    assert (
        said.startswith(f"mlflow could not log {out} (")
        and f"fedcog run --resume {out} --track mlflow" in said
    )
    with server(store, port):
        fedcog.run(experiment, out, track=["mlflow"], resume=True, report=False)
        (theirs,) = ledger()
        assert (
            history(theirs.info.run_id, "loss") == scores(run) and theirs.info.status == "FINISHED"
        )
        from mlflow import MlflowClient

        pictures = [
            one.path for one in MlflowClient().list_artifacts(theirs.info.run_id, "generated")
        ]
        assert pictures == ["generated/00003.png", "generated/00004.png"]


def test_a_place_that_cannot_be_opened_holds_no_run_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/nowhere/mlflow.db")
    (tmp_path / "nowhere").write_text("no folder")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "tensorboard").write_text("no folder")
    began = time.monotonic()
    with pytest.warns(TrackerWarning) as told:
        run = fedcog.run(
            Experiment(**QUICK), tmp_path / "a", track=["mlflow", "tensorboard"], report=False
        )
    assert len(run.lines) == 4 and time.monotonic() - began < 60
    said = [str(one.message).split()[0] for one in told if issubclass(one.category, TrackerWarning)]
    assert sorted(said) == ["mlflow", "tensorboard"]
    assert not caplog.records, "what went wrong is told once, and not by MLflow, too"


def test_a_server_out_of_reach_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedcog.runs.tracking.wandb import _available_settings

    assert _available_settings()["init_timeout"] <= 30
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "120")
    assert "init_timeout" not in _available_settings()


def test_what_is_not_there_is_told_before_anything_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("wandb", "mlflow"):
        monkeypatch.setitem(sys.modules, name, None)
    for command in (["run"], ["compare", "--algorithms", "fedavg"]):
        words = [*command, "--out", str(tmp_path / "a"), "--track", "mlflow", "--track", "wandb"]
        assert main(words) == 2
        said = capsys.readouterr().err
        assert "fedcog: track wandb needs a package: pip install 'fedcog[wandb]'." in said
        assert "fedcog: track mlflow needs a package: pip install 'fedcog[mlflow]'." in said
    with pytest.raises(fedcog.ConfigError, match="did you mean tensorboard"):
        fedcog.run(Experiment(**QUICK), tmp_path / "a", track="tensorbord")
    assert main(["run", "--track", "comet"]) == 2
    assert not (tmp_path / "a").exists()


def test_a_comparison_is_followed_and_who_is_not_logged_in_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("WANDB_MODE")
    wandb.teardown()  # it remembers what the environment was
    words = [
        "compare",
        "--algorithms",
        "fedavg",
        "fedprox",
        "--seeds",
        "0",
        "--out",
        str(tmp_path / "c"),
        "--plain",
    ]
    words += [
        f"--{key.replace('_', '-')}={value}" for key, value in (QUICK | {"rounds": 1}).items()
    ]
    assert main([*words, "--track", "wandb", "--track", "tensorboard"]) == 0
    said = capsys.readouterr().err
    assert said.count("fedcog: not logged in to Weights & Biases") == 2, "once for each run"
    for name in ("fedavg", "fedprox"):
        place = tmp_path / "c" / name / "seed-0"
        assert [step["_step"] for step in offline(place)[0]] == [1] and len(
            board(place)["loss"]
        ) == 1
    wandb.teardown()


def test_divergence_is_told_as_the_end(tmp_path: Path, empty_store: Path) -> None:
    with pytest.raises(fedcog.Diverged):
        fedcog.run(Experiment(**QUICK | {"lr": 1e15}), tmp_path / "a", track="mlflow", report=False)
    assert ledger()[0].info.status == "FAILED"


def test_a_run_that_the_tracker_does_not_know_is_told_of(tmp_path: Path, empty_store: Path) -> None:
    from mlflow import MlflowClient

    one = Experiment(**QUICK)
    fedcog.run(one, tmp_path / "a", track="mlflow", report=False)
    MlflowClient().delete_run(ledger()[0].info.run_id)
    with pytest.warns(TrackerWarning, match="mlflow has no run .*: a new one gets all rounds"):
        fedcog.run(
            dataclasses.replace(one, rounds=one.rounds + 1),
            tmp_path / "a",
            track="mlflow",
            resume=True,
            report=False,
        )
    (again,) = ledger()
    assert [step for step, _ in history(again.info.run_id, "loss")] == list(
        range(1, one.rounds + 2)
    )


class Notes(fedcog.Tracker):
    """A tracker of one's own, which fails once."""

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


def test_a_tracker_of_ones_own_is_an_object(tmp_path: Path) -> None:
    notes = Notes()
    experiment = Experiment(algorithm=COG, **QUICK)
    with pytest.warns(TrackerWarning, match=r"Notes could not log .* \(the pencil broke\)"):
        run = fedcog.run(experiment, tmp_path / "a", track=notes, report=False)
    assert notes.seen == scores(run), "every round once, though one was missed at first"
    assert notes.opened == [(tmp_path / "a", "", 0)] and notes.ended == ["failed", "finished"]
    longer = dataclasses.replace(experiment, rounds=5)
    again = Notes()
    again.ended.append("failed")
    run = fedcog.run(
        longer, tmp_path / "a", track=[again, "tensorboard"], resume=True, report=False
    )
    assert again.opened == [(tmp_path / "a", "mine", 4)] and again.seen == scores(run)[4:]
    assert board(tmp_path / "a")["loss"] == scores(run)


def test_callbacks_are_one_function_or_several(tmp_path: Path) -> None:
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


def test_the_numbers_of_a_line() -> None:
    line = {
        "round": 3,
        "clients": [1, 4],
        "loss": None,
        "accuracy": 0.5,
        "odd: name?": 2,
        "skipped": [4],
        "map": True,
    }
    line |= {"seconds": {"total": 1.5}, "privacy": {"epsilon": float("inf"), "simulated": True}}
    line |= {
        "local": [
            {"client": 1, "up": 8, "distance": 1.0},
            {"client": 4, "up": 16, "distance": None},
        ]
    }
    wanted = {"accuracy": 0.5, "odd_ name_": 2, "skipped": 1, "seconds/total": 1.5, "bytes/up": 24}
    assert round_metrics(line) == wanted | {"clients/distance": 1.0}
    assert flat_settings(Experiment(algorithm=COG))["fedcog.count"] == 8


def test_a_sheet_of_pictures() -> None:
    grey = torch.arange(2 * 3 * 4, dtype=torch.uint8).reshape(2, 3, 1, 2, 2)
    made = image_sheet({"images": grey})
    assert made is not None and made.shape == (3, 6, 9) and made[0, 3, 3] == grey[1, 1, 0, 0, 0]
    huge = image_sheet({"images": torch.zeros(2, 900, 3, 64, 64, dtype=torch.uint8)})
    assert huge is not None and huge.shape[2] <= 4096
    for wrong in (
        {},
        {"images": torch.zeros(2, 3)},
        {"images": torch.zeros(0, 3, 1, 2, 2, dtype=torch.uint8)},
    ):
        assert image_sheet(wrong) is None
