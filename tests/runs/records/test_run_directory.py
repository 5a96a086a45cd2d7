"""Run directories: resumed after a kill, and never overwritten by mistake."""

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
from fedcog.runs.records.run_directory import RecordError, RunDirectory, write_file

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


def work(out: str, limit: int | None = None, changes: dict[str, Any] | None = None) -> None:
    """A run in a process of its own, which may be killed at any moment or write only so many bytes
    to a file.
    """
    if limit is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        fedcog.run(dataclasses.replace(TINY, **changes or {}), out, resume=True, report=False)
    except RecordError as error:
        Path(f"{out}.error").write_text(str(error)[:limit])
        os._exit(3)


def spawn(*arguments: Any) -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["fedcog", "torch._dynamo"]
    )  # which torch would load in every run anew
    process = context.Process(target=work, args=arguments, daemon=True)
    process.start()
    return process


def finish(*arguments: Any) -> int:
    process = spawn(*arguments)
    process.join(60)
    assert process.exitcode is not None, "the run hangs"
    return int(process.exitcode)


def lines(path: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in found]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """An uninterrupted run, and how long it took."""
    path = tmp_path_factory.mktemp("whole") / "run"
    assert finish(str(path)) == 0  # the first starts the server that forks
    again = path.with_name("again")
    began = time.monotonic()
    assert finish(str(again)) == 0
    return path, time.monotonic() - began


def same(path: Path, whole: Path) -> None:
    assert lines(path) == lines(whole)
    assert (path / "checkpoint.safetensors").read_bytes() == (
        whole / "checkpoint.safetensors"
    ).read_bytes()


@pytest.mark.parametrize("attempt", range(20))
def test_a_run_killed_at_any_moment_continues_to_the_same_bytes(
    attempt: int, whole: tuple[Path, float], tmp_path: Path
) -> None:
    path, seconds = whole
    moment = random.Random(attempt).uniform(0, seconds)
    for again in range(5):  # a moment after the end is none: sooner, then
        run = tmp_path / f"run-{again}"
        process = spawn(str(run))
        time.sleep(moment / 2**again)
        process.kill()
        process.join(10)
        if process.exitcode == -signal.SIGKILL:
            break
    assert process.exitcode == -signal.SIGKILL
    assert finish(str(run)) == 0
    same(run, path)


def test_checkpoints_between_rounds_forget_the_rounds_after_them(
    whole: tuple[Path, float], tmp_path: Path
) -> None:
    """Lines after the last checkpoint, whole or cut short, are taken back and happen again."""
    run = tmp_path / "run"
    assert finish(str(run), None, {"rounds": 4}) == 0
    with open(run / "rounds.jsonl", "a") as file:
        file.write('{"round": 5, "accuracy": 0.99, "local": []}\n{"round": 6, "accu')
    assert finish(str(run)) == 0
    same(run, whole[0])


def test_a_finished_run_is_only_read(whole: tuple[Path, float]) -> None:
    before = (whole[0] / "rounds.jsonl").read_bytes()
    done = fedcog.run(TINY, whole[0], resume=True, report=False)
    assert len(done.lines) == 6
    assert (whole[0] / "rounds.jsonl").read_bytes() == before


def test_a_run_may_grow_but_not_shrink(whole: tuple[Path, float], tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert finish(str(run), None, {"rounds": 3}) == 0
    assert finish(str(run), None, {"rounds": 6}) == 0
    same(run, whole[0])
    with pytest.raises(RecordError, match="would remove some"):
        fedcog.run(dataclasses.replace(TINY, rounds=2), run, resume=True, report=False)
    same(run, whole[0])


def test_checkpoint_every(tmp_path: Path) -> None:
    fedcog.run(
        dataclasses.replace(TINY, rounds=5, checkpoint_every=3), tmp_path / "run", report=False
    )
    checkpoint = RunDirectory(tmp_path / "run").load()
    assert checkpoint is not None and checkpoint.round == 5  # the last always


def test_what_is_read_lies_in_memory_as_torch_lays_it(whole: tuple[Path, float]) -> None:
    """On some processors a sum's last bit hangs on where its terms lie, and a resumed run would
    part from a whole.
    """
    checkpoint = RunDirectory(whole[0]).load()
    assert checkpoint is not None
    store = ClientStates()
    store.restore(checkpoint.clients)  # which hands on copies
    clients = [store.stacked([client], dict) for client in sorted(checkpoint.client_ids)]
    read = [
        value for state in (checkpoint.server, *clients) for value in tree.flatten(state).values()
    ]
    assert len(read) > 10 and not [value for value in read if value.data_ptr() % 64]


def snapshot(path: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()
    }


def test_nothing_is_overwritten_without_resume(whole: tuple[Path, float]) -> None:
    before = snapshot(whole[0])
    with pytest.raises(RecordError, match=r"already holds a run \(6 of 6 rounds\).*--resume"):
        fedcog.run(TINY, whole[0], report=False)
    assert snapshot(whole[0]) == before


def test_another_experiment_is_refused_by_name_of_what_differs(whole: tuple[Path, float]) -> None:
    before = snapshot(whole[0])
    other = dataclasses.replace(
        TINY, lr=0.5, algorithm=FedCOG(FedProx(mu=9), count=8, steps=3, start_round=2)
    )
    with pytest.raises(
        RecordError, match="belongs to another experiment, which differs in lr, fedprox"
    ):
        fedcog.run(other, whole[0], resume=True, report=False)
    assert snapshot(whole[0]) == before


@pytest.mark.parametrize("kept", [0, 5, 100, -1])
def test_a_truncated_checkpoint_is_an_error_and_stays(
    kept: int, whole: tuple[Path, float], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert finish(str(run), None, {"rounds": 3}) == 0
    file = run / "checkpoint.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    before = snapshot(run)
    with pytest.raises(RecordError, match=r"cannot read .*checkpoint\.safetensors.*damaged"):
        fedcog.run(TINY, run, resume=True, report=False)
    assert snapshot(run) == before


def test_a_foreign_checkpoint_is_refused(whole: tuple[Path, float], tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert finish(str(run), None, {"rounds": 3, "lr": 0.5}) == 0
    (run / "experiment.toml").write_text(TINY.to_toml())
    with pytest.raises(RecordError, match="made by another experiment"):
        fedcog.run(TINY, run, resume=True, report=False)


def test_other_data_are_refused(tmp_path: Path) -> None:
    def data(seed: int) -> fedcog.Dataset:
        draw = torch.Generator().manual_seed(seed)
        x = torch.randn(60, 4, generator=draw)
        y = torch.randint(0, 3, (60,), generator=draw)
        return fedcog.from_arrays(x, y, x[:9], torch.arange(9) % 3, classes=["a", "b", "c"])

    experiment = dataclasses.replace(TINY, rounds=2)
    fedcog.run(experiment, tmp_path / "run", data=data(0), report=False)
    with pytest.raises(RecordError, match="on other data"):
        fedcog.run(experiment, tmp_path / "run", data=data(1), resume=True, report=False)
    other = dataclasses.replace(data(0), train_x=-data(0).train_x)
    with pytest.raises(RecordError, match="on other data"):
        fedcog.run(experiment, tmp_path / "run", data=other, resume=True, report=False)


def test_two_runs_in_one_directory(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with RunDirectory(run).locked():
        assert finish(str(run)) == 3
    assert "another run is writing to" in Path(f"{run}.error").read_text()
    assert not (run / "experiment.toml").exists()


@pytest.mark.parametrize("room", [1000, 4000, 20_000, 50_000])
def test_a_full_disk_is_an_error_and_the_run_continues_when_there_is_room(
    room: int, whole: tuple[Path, float], tmp_path: Path
) -> None:
    """Files may grow to `room` bytes and no further: the real error of a real write, at another
    file each time.
    """
    run = tmp_path / "run"
    assert finish(str(run), room) == 3
    assert "cannot write" in Path(f"{run}.error").read_text()
    assert not list(run.glob(".*.part")), "nothing half-written is left"
    checkpoint = RunDirectory(run).load()
    assert checkpoint is None or checkpoint.round < 6
    assert finish(str(run)) == 0
    same(run, whole[0])


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match="cannot write to"):
        fedcog.run(TINY, tmp_path / "file" / "run", report=False)


def test_files_are_everybodys_as_far_as_the_mask_says(whole: tuple[Path, float]) -> None:
    usual = (whole[0] / "experiment.toml").stat().st_mode
    assert {file.stat().st_mode for file in whole[0].rglob("*") if file.is_file()} == {usual}


def test_what_a_killed_write_left_goes(whole: tuple[Path, float], tmp_path: Path) -> None:
    """Temporary files of safetensors' own, too: those of a large checkpoint would fill a disk."""
    shutil.copytree(whole[0], tmp_path / "run")
    for name in (".checkpoint.safetensors.1.part", ".tmpgC8sX4"):
        (tmp_path / "run" / name).write_bytes(b"half")
    fedcog.run(dataclasses.replace(TINY, rounds=7), tmp_path / "run", resume=True, report=False)
    hidden = {file.name for file in (tmp_path / "run").rglob(".*")}
    assert hidden == {".lock"}


def test_a_name_that_could_not_be_read_again_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="is not a name in UTF-8"):
        fedcog.run(TINY, os.fsdecode(os.fsencode(tmp_path) + b"/bad\xff"), report=False)
    assert not [*tmp_path.iterdir()]


def test_only_files_are_written_over_and_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "there").write_bytes(b"before")
    (tmp_path / "link").symlink_to("there")
    write_file(tmp_path / "link", b"after")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "there").read_bytes() == b"after"
    os.mkfifo(tmp_path / "queue")
    with pytest.raises(RecordError, match="it is a device or another special file"):
        write_file(tmp_path / "queue", b"after")
    assert (tmp_path / "queue").is_fifo()


def test_rounds_are_known_without_reading_all(whole: tuple[Path, float], tmp_path: Path) -> None:
    assert RunDirectory(tmp_path).checkpoint_round() == 0
    shutil.copytree(whole[0], tmp_path / "run")
    directory = RunDirectory(tmp_path / "run")
    assert directory.checkpoint_round() == 6
    (directory.path / "checkpoint.safetensors").write_bytes(b"no tensors")
    with pytest.raises(RecordError, match="The file is damaged"):
        directory.checkpoint_round()


def test_numbers_that_are_none_become_null(tmp_path: Path) -> None:
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
def test_a_damaged_record_is_refused_before_anything_happens(line: str, tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.begin(TINY, {})
    (tmp_path / "rounds.jsonl").write_text(line + "\n")
    before = snapshot(tmp_path)
    with pytest.raises(RecordError, match=r"rounds\.jsonl is damaged"):
        fedcog.run(TINY, tmp_path, resume=True, report=False)
    assert snapshot(tmp_path) | {".lock": b""} == before | {".lock": b""}


def test_a_checkpoint_that_does_not_fit_is_refused(
    whole: tuple[Path, float], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert finish(str(run), None, {"rounds": 3}) == 0
    directory = RunDirectory(run)
    good = directory.load()
    assert good is not None
    name = next(iter(good.clients))
    for spoilt in (
        good._replace(clients=good.clients | {name: torch.zeros(3)}),
        good._replace(clients={key: value for key, value in good.clients.items() if key != name}),
        good._replace(clients=good.clients | {"x::y": torch.zeros(3)}),
        good._replace(
            server=good.server
            | {"params": {k: v.double() for k, v in good.server["params"].items()}}
        ),
        good._replace(round=-1),
    ):
        directory.save(spoilt)
        with pytest.raises(RecordError, match=r"checkpoint\.safetensors"):
            fedcog.run(TINY, run, resume=True, report=False)


def test_a_run_whose_experiment_is_gone_is_left_alone(
    whole: tuple[Path, float], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert finish(str(run), None, {"rounds": 3}) == 0
    (run / "experiment.toml").unlink()
    before = snapshot(run)
    with pytest.raises(RecordError, match=r"experiment\.toml is missing"):
        fedcog.run(TINY, run, report=False)
    assert snapshot(run) == before
