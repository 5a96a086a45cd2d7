"""Tests of run directories: resuming after a kill, damaged files, nothing overwritten."""

import dataclasses
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import fedcog
from fedcog import Experiment, FedCOG, FedProx
from fedcog.core import tree
from fedcog.federation.client_states import ClientStates
from fedcog.report.dashboard.run_follower import RunFollower
from fedcog.runs.records.checkpoint import Checkpoint
from fedcog.runs.records.run_directory import RecordError, RunDirectory, write_file
from fedcog.studies.result_store import summarize_run

TINY = Experiment(
    algorithm=FedCOG(FedProx(), count=8, steps=3, start_round=2),
    rounds=6,
    local_steps=3,
    batch_size=8,
    clients=5,
    participation=0.6,
    partition="iid",
    threads=1,
)


def run_in_process(
    out: str, max_bytes: int | None = None, changes: dict[str, Any] | None = None
) -> None:
    """Run in a separate process, which may be killed or limited to files of `max_bytes`."""
    if max_bytes is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, max_bytes))
    try:
        fedcog.run(dataclasses.replace(TINY, **changes or {}), out, resume=True, report=False)
    except RecordError as error:
        Path(f"{out}.error").write_text(str(error)[:max_bytes])
        os._exit(3)


def spawn(*arguments: Any) -> Any:
    context = multiprocessing.get_context("forkserver")
    # Otherwise every run would import them again.
    context.set_forkserver_preload(["fedcog", "torch._dynamo"])
    process = context.Process(target=run_in_process, args=arguments, daemon=True)
    process.start()
    return process


def run_to_end(*arguments: Any) -> int:
    process = spawn(*arguments)
    process.join(60)
    assert process.exitcode is not None, "the run hangs"
    return int(process.exitcode)


def recorded_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a run's record, without times."""
    recorded_lines = [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]
    return [
        {key: value for key, value in line.items() if key != "seconds"} for line in recorded_lines
    ]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """An uninterrupted run, and its duration in seconds."""
    path = tmp_path_factory.mktemp("reference") / "run"
    assert run_to_end(str(path)) == 0  # also starts the fork server, which takes time
    started = time.monotonic()
    assert run_to_end(str(path.with_name("again"))) == 0
    return path, time.monotonic() - started


def assert_same_record(path: Path, reference: Path) -> None:
    assert recorded_lines(path) == recorded_lines(reference)
    expected = (reference / "checkpoint.safetensors").read_bytes()
    assert (path / "checkpoint.safetensors").read_bytes() == expected


@pytest.mark.slow
@pytest.mark.parametrize("attempt", range(20))
def test_killed_run_resumes_to_the_same_bytes(
    attempt: int, reference: tuple[Path, float], tmp_path: Path
) -> None:
    path, seconds = reference
    delay = random.Random(attempt).uniform(0, seconds)
    for halvings in range(5):  # kill sooner if the run ended before
        run = tmp_path / f"run-{halvings}"
        process = spawn(str(run))
        time.sleep(delay / 2**halvings)
        process.kill()
        process.join(10)
        if process.exitcode == -signal.SIGKILL:
            break
    assert process.exitcode == -signal.SIGKILL
    assert run_to_end(str(run)) == 0
    assert_same_record(run, path)


@pytest.mark.slow
def test_resume_repeats_rounds_after_the_last_checkpoint(
    reference: tuple[Path, float], tmp_path: Path
) -> None:
    """Lines after the last checkpoint, complete or cut short, are removed and written again."""
    run = tmp_path / "run"
    assert run_to_end(str(run), None, {"rounds": 4}) == 0
    with open(run / "rounds.jsonl", "a") as file:
        file.write('{"round": 5, "accuracy": 0.99, "local": []}\n{"round": 6, "accu')
    assert run_to_end(str(run)) == 0
    assert_same_record(run, reference[0])


def test_resume_only_reads_a_finished_run(reference: tuple[Path, float]) -> None:
    before = (reference[0] / "rounds.jsonl").read_bytes()
    run = fedcog.run(TINY, reference[0], resume=True, report=False)
    assert len(run.lines) == 6
    assert (reference[0] / "rounds.jsonl").read_bytes() == before


@pytest.mark.slow
def test_resume_may_add_rounds_but_not_remove_any(
    reference: tuple[Path, float], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert run_to_end(str(run), None, {"rounds": 3}) == 0
    assert run_to_end(str(run), None, {"rounds": 6}) == 0
    assert_same_record(run, reference[0])
    with pytest.raises(RecordError, match="would remove some"):
        fedcog.run(dataclasses.replace(TINY, rounds=2), run, resume=True, report=False)
    assert_same_record(run, reference[0])


def test_every_third_and_the_last_round_are_checkpointed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_rounds: list[int] = []
    save = RunDirectory.save

    def record_round(self: RunDirectory, checkpoint: Checkpoint) -> None:
        saved_rounds.append(checkpoint.round)
        save(self, checkpoint)

    monkeypatch.setattr(RunDirectory, "save", record_round)
    fedcog.run(
        dataclasses.replace(TINY, rounds=5, checkpoint_every=3), tmp_path / "run", report=False
    )
    assert saved_rounds == [3, 5]
    checkpoint = RunDirectory(tmp_path / "run").load()
    assert checkpoint is not None and checkpoint.round == 5


def test_loaded_tensors_are_aligned_like_those_of_torch(reference: tuple[Path, float]) -> None:
    """On some processors alignment decides the last bit of a sum, so resumed runs would differ."""
    checkpoint = RunDirectory(reference[0]).load()
    assert checkpoint is not None
    client_states = ClientStates()
    client_states.restore(checkpoint.clients)
    clients = [client_states.stacked([client], dict) for client in sorted(checkpoint.client_ids)]
    tensors = [
        value for state in (checkpoint.server, *clients) for value in tree.flatten(state).values()
    ]
    assert len(tensors) > 10 and not [value for value in tensors if value.data_ptr() % 64]


def snapshot(path: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()
    }


def test_existing_run_is_not_overwritten_without_resume(reference: tuple[Path, float]) -> None:
    before = snapshot(reference[0])
    with pytest.raises(RecordError, match=r"already holds a run \(6 of 6 rounds\).*--resume"):
        fedcog.run(TINY, reference[0], report=False)
    assert snapshot(reference[0]) == before


def test_resume_refuses_changed_settings_by_name(reference: tuple[Path, float]) -> None:
    before = snapshot(reference[0])
    other = dataclasses.replace(
        TINY, lr=0.5, algorithm=FedCOG(FedProx(mu=9), count=8, steps=3, start_round=2)
    )
    with pytest.raises(
        RecordError, match="belongs to another experiment, which differs in lr, fedprox"
    ):
        fedcog.run(other, reference[0], resume=True, report=False)
    assert snapshot(reference[0]) == before


@pytest.mark.parametrize("size", [0, 5, 100, -1])
def test_truncated_checkpoint_is_an_error_and_left_unchanged(
    size: int, reference: tuple[Path, float], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert run_to_end(str(run), None, {"rounds": 3}) == 0
    file = run / "checkpoint.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    before = snapshot(run)
    with pytest.raises(RecordError, match=r"cannot read .*checkpoint\.safetensors.*damaged"):
        fedcog.run(TINY, run, resume=True, report=False)
    assert snapshot(run) == before


def test_checkpoint_of_another_experiment_is_refused(
    reference: tuple[Path, float], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert run_to_end(str(run), None, {"rounds": 3, "lr": 0.5}) == 0
    (run / "experiment.toml").write_text(TINY.to_toml())
    with pytest.raises(RecordError, match="made by another experiment"):
        fedcog.run(TINY, run, resume=True, report=False)


def test_resume_refuses_other_data(tmp_path: Path) -> None:
    def make_data(seed: int) -> fedcog.Dataset:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(60, 4, generator=generator)
        y = torch.randint(0, 3, (60,), generator=generator)
        return fedcog.from_arrays(x, y, x[:9], torch.arange(9) % 3, classes=["a", "b", "c"])

    experiment = dataclasses.replace(TINY, rounds=2)
    fedcog.run(experiment, tmp_path / "run", data=make_data(0), report=False)
    with pytest.raises(RecordError, match="on other data"):
        fedcog.run(experiment, tmp_path / "run", data=make_data(1), resume=True, report=False)
    other = dataclasses.replace(make_data(0), train_x=-make_data(0).train_x)
    with pytest.raises(RecordError, match="on other data"):
        fedcog.run(experiment, tmp_path / "run", data=other, resume=True, report=False)


def test_two_runs_cannot_write_to_one_directory(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with RunDirectory(run).locked():
        assert run_to_end(str(run)) == 3
    assert "another run is writing to" in Path(f"{run}.error").read_text()
    assert not (run / "experiment.toml").exists()


@pytest.mark.slow
@pytest.mark.parametrize("max_bytes", [1000, 4000, 20_000, 50_000])
def test_run_resumes_after_a_full_disk(
    max_bytes: int, reference: tuple[Path, float], tmp_path: Path
) -> None:
    """A limit on file size makes real writes fail, at another file for each limit."""
    run = tmp_path / "run"
    assert run_to_end(str(run), max_bytes) == 3
    assert "cannot write" in Path(f"{run}.error").read_text()
    assert not list(run.glob(".*.part")), "no partial file is left"
    checkpoint = RunDirectory(run).load()
    assert checkpoint is None or checkpoint.round < 6
    assert run_to_end(str(run)) == 0
    assert_same_record(run, reference[0])


def test_unwritable_path_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match="cannot write to"):
        fedcog.run(TINY, tmp_path / "file" / "run", report=False)


def test_all_files_have_the_permissions_of_the_umask(reference: tuple[Path, float]) -> None:
    mode = (reference[0] / "experiment.toml").stat().st_mode
    assert {file.stat().st_mode for file in reference[0].rglob("*") if file.is_file()} == {mode}


def test_resume_removes_files_of_interrupted_writes(
    reference: tuple[Path, float], tmp_path: Path
) -> None:
    """Those of safetensors too: with large checkpoints they would fill the disk."""
    shutil.copytree(reference[0], tmp_path / "run")
    for name in (".checkpoint.safetensors.1.part", ".tmpgC8sX4"):
        (tmp_path / "run" / name).write_bytes(b"half")
    fedcog.run(dataclasses.replace(TINY, rounds=7), tmp_path / "run", resume=True, report=False)
    hidden = {file.name for file in (tmp_path / "run").rglob(".*")}
    assert hidden == {".lock"}


def test_path_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="is not a name in UTF-8"):
        fedcog.run(TINY, os.fsdecode(os.fsencode(tmp_path) + b"/bad\xff"), report=False)
    assert not [*tmp_path.iterdir()]


def test_write_file_follows_links_and_refuses_special_files(tmp_path: Path) -> None:
    (tmp_path / "there").write_bytes(b"before")
    (tmp_path / "link").symlink_to("there")
    write_file(tmp_path / "link", b"after")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "there").read_bytes() == b"after"
    os.mkfifo(tmp_path / "queue")
    with pytest.raises(RecordError, match="it is a device or another special file"):
        write_file(tmp_path / "queue", b"after")
    assert (tmp_path / "queue").is_fifo()


def test_checkpoint_round_is_read_from_the_metadata(
    reference: tuple[Path, float], tmp_path: Path
) -> None:
    assert RunDirectory(tmp_path).checkpoint_round() == 0
    shutil.copytree(reference[0], tmp_path / "run")
    directory = RunDirectory(tmp_path / "run")
    assert directory.checkpoint_round() == 6
    (directory.path / "checkpoint.safetensors").write_bytes(b"no tensors")
    with pytest.raises(RecordError, match="The file is damaged"):
        directory.checkpoint_round()


def test_lines_of_older_versions_are_read_by_their_names_now(tmp_path: Path) -> None:
    """The score by label mix was called personal, as the score of personal models now is."""
    run = fedcog.run(dataclasses.replace(TINY, rounds=2), tmp_path / "now", report=False)
    assert run.label_mix and "personal_accuracy" not in run.lines[0]
    older = tmp_path / "older"
    shutil.copytree(run.path, older)
    file = older / "rounds.jsonl"
    file.write_text(file.read_text().replace("label_mix_accuracy", "personal_accuracy"))
    before = file.read_bytes()
    found = fedcog.read(older)
    assert found.label_mix == run.label_mix and found.lines == run.lines
    follower = RunFollower(older, "older")
    follower.refresh()
    assert follower.lines[-1]["label_mix_accuracy"] == pytest.approx(run.label_mix[-1])
    more = dataclasses.replace(TINY, rounds=3)
    resumed = fedcog.run(more, older, resume=True, report=False)
    assert len(resumed.label_mix) == 3 and file.read_bytes().startswith(before)


def test_result_files_keep_their_keys(tmp_path: Path) -> None:
    run = fedcog.run(dataclasses.replace(TINY, rounds=1), tmp_path, report=False)
    result = summarize_run(fedcog.read(run.path))
    assert result["personal_accuracy"] == [pytest.approx(run.label_mix[0], abs=1e-6)]
    assert "label_mix_accuracy" not in result


def test_nan_and_infinity_are_recorded_as_null(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.append({"round": 1, "loss": float("nan"), "local": [{"loss": float("inf")}]})
    assert directory.lines() == [{"round": 1, "loss": None, "local": [{"loss": None}]}]


@pytest.mark.parametrize(
    "line",
    [
        '{"foo": 1}',
        "3",
        '{"round": 2, "local": []}',
        '{"round": 1, "local": null}',
        '{"round": 1, "local": [], "accuracy": "good"}',
        '{"round": 1, "local": [], "loss": "low"}',
        '{"round": 1, "local": [], "personal_accuracy": []}',
        '{"round": 1, "local": [1]}',
        "[" * 100_000,
        "\x00\xff",
    ],
)
def test_damaged_record_is_refused_and_left_unchanged(line: str, tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.begin(TINY, {})
    (tmp_path / "rounds.jsonl").write_text(line + "\n")
    before = snapshot(tmp_path)
    with pytest.raises(RecordError, match=r"rounds\.jsonl is damaged"):
        fedcog.run(TINY, tmp_path, resume=True, report=False)
    assert snapshot(tmp_path) | {".lock": b""} == before | {".lock": b""}


def test_checkpoint_with_unfitting_tensors_is_refused(
    reference: tuple[Path, float], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert run_to_end(str(run), None, {"rounds": 3}) == 0
    directory = RunDirectory(run)
    checkpoint = directory.load()
    assert checkpoint is not None
    name = next(iter(checkpoint.clients))
    for damaged in (
        checkpoint._replace(clients=checkpoint.clients | {name: torch.zeros(3)}),
        checkpoint._replace(
            clients={key: value for key, value in checkpoint.clients.items() if key != name}
        ),
        checkpoint._replace(clients=checkpoint.clients | {"x::y": torch.zeros(3)}),
        checkpoint._replace(
            server=checkpoint.server
            | {"params": {k: v.double() for k, v in checkpoint.server["params"].items()}}
        ),
        checkpoint._replace(round=-1),
    ):
        directory.save(damaged)
        with pytest.raises(RecordError, match=r"checkpoint\.safetensors"):
            fedcog.run(TINY, run, resume=True, report=False)


def test_run_without_its_experiment_file_is_left_unchanged(
    reference: tuple[Path, float], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert run_to_end(str(run), None, {"rounds": 3}) == 0
    (run / "experiment.toml").unlink()
    before = snapshot(run)
    with pytest.raises(RecordError, match=r"experiment\.toml is missing"):
        fedcog.run(TINY, run, report=False)
    assert snapshot(run) == before
