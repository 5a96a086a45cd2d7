"""Tests of pandas frames of runs, against the records and pandas' own groups."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest

import fedcog
from fedcog import ConfigError, Experiment, FedProx, RecordError
from fedcog.runs.records.run_directory import RunDirectory

pd = pytest.importorskip("pandas")


def write_run(path: Path, scores: list[float], **changes: Any) -> Path:
    """Write a run directory with these accuracies."""
    directory = RunDirectory(path)
    path.mkdir(parents=True)
    directory.begin(dataclasses.replace(Experiment(), rounds=len(scores), **changes), {})
    for number, score in enumerate(scores, 1):
        local = [{"client": k, "up": 100, "loss": float(k)} for k in (0, 1)]
        line = {"round": number, "accuracy": score, "loss": None, "local": local}
        line |= {"local_test": {"accuracy_mean": score / 2}, "seconds": {"total": 2.0}}
        directory.append(line)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for seed in (0, 1, 2):
        scores = [0.1 * seed, 0.2 + 0.1 * seed]
        write_run(tmp_path / "runs" / "a" / f"seed-{seed}", scores, seed=seed)
    write_run(tmp_path / "runs" / "b", [0.3, 0.5, 0.7], lr=0.5, algorithm=FedProx(mu=0.2))
    return tmp_path / "runs"


def test_runs_of_a_folder_are_sorted_by_path(folder: Path) -> None:
    names = [str(run.path.relative_to(folder)) for run in fedcog.read_all(folder)]
    assert names == ["a/seed-0", "a/seed-1", "a/seed-2", "b"]


def test_damaged_runs_are_skipped_and_an_error_if_all_are(folder: Path) -> None:
    (folder / "b" / "rounds.jsonl").write_text("nothing\n")
    with pytest.warns(UserWarning, match="skipped: .*rounds.jsonl is damaged") as warned:
        assert len(fedcog.read_all(folder)) == 3
    assert warned[0].filename == __file__
    with pytest.raises(RecordError, match="is damaged"):
        fedcog.read_all(folder / "b")


def test_a_frame_has_one_row_per_round_with_what_was_recorded(folder: Path) -> None:
    frame = fedcog.frame(folder)
    assert len(frame) == 3 * 2 + 3
    first = ["algorithm", "dataset", "partition", "seed", "group", "round"]
    assert [*frame.columns][:6] == first
    assert {"lr", "rounds"} <= {*frame.columns} and "momentum" not in frame.columns
    for run in fedcog.read_all(folder):
        label = next(one.label for one in fedcog.group(fedcog.read_all(folder)) if run in one.runs)
        own = frame[(frame["group"] == label) & (frame["seed"] == run.experiment.seed)]
        lines = [json.loads(text) for text in (run.path / "rounds.jsonl").read_text().splitlines()]
        assert own["round"].tolist() == [line["round"] for line in lines]
        assert own["accuracy"].tolist() == [line["accuracy"] for line in lines]
        halves = [line["accuracy"] / 2 for line in lines]
        assert own["local_test/accuracy_mean"].tolist() == halves
        assert own["bytes/up"].tolist() == [200] * len(lines), "the sum over clients"
        assert own["clients/loss"].tolist() == [0.5] * len(lines), "the mean over clients"
        assert own["lr"].unique().tolist() == [run.experiment.lr]
    assert "loss" not in frame.columns, "no round has one"


def test_means_of_pandas_are_those_of_a_group(folder: Path) -> None:
    frame = fedcog.frame(folder)
    last = frame[frame["round"] == frame.groupby("group")["round"].transform("max")]
    statistics = last.groupby("group")["accuracy"].agg(["mean", "std", "count"])
    for group in fedcog.group(fedcog.read_all(folder)):
        mean, deviation, number = statistics.loc[group.label]
        assert group.last.mean == pytest.approx(mean) and group.last.number == number
        if group.last.deviation is not None:
            assert group.last.deviation == pytest.approx(deviation)


def test_settings_of_some_algorithms_only_are_missing_for_others(tmp_path: Path) -> None:
    for mu in (0.1, 0.2):
        write_run(tmp_path / f"prox-{mu}", [0.5], algorithm=FedProx(mu=mu))
    write_run(tmp_path / "avg", [0.5])
    frame = fedcog.frame(tmp_path).set_index("group")
    assert frame["fedprox.mu"].isna().tolist() == [True, False, False]


def test_one_run_and_a_run_without_rounds(tmp_path: Path) -> None:
    run = fedcog.read(write_run(tmp_path / "a", [0.25]))
    assert run.to_frame().equals(fedcog.frame([run])) and len(run.to_frame()) == 1
    assert run.to_frame().equals(fedcog.frame(run))
    assert run.to_frame().equals(fedcog.frame([run, run.path, tmp_path])), "each run counts once"
    empty = fedcog.read(write_run(tmp_path / "b", [0.5])).path
    (empty / "rounds.jsonl").unlink()
    frame = fedcog.read(empty).to_frame()
    assert len(frame) == 0 and "accuracy" not in frame.columns and "seed" in frame.columns


def test_without_pandas_the_error_names_the_command(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigError, match=r"pip install 'fedcog\[pandas\]'"):
        fedcog.read_all(folder)[0].to_frame()
