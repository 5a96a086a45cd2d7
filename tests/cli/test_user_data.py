"""Tests of data sets and augmentation that the command line names."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fedcog
from fedcog.cli.main import main
from fedcog.runs.records.run_directory import RunDirectory
from tests.support import flower_engine

CODE = """
import numpy as np

def load():
    rng = np.random.default_rng(0)
    x = rng.integers(0, 255, (60, 1, 8, 8), dtype=np.uint8)
    y = np.arange(60) % 3
    return {"train_x": x[:45], "train_y": y[:45], "test_x": x[45:], "test_y": y[45:],
            "users": ["ann", "bob", "cem"] * 15}

def fade(x, random):
    return x * random.uniform(len(x), 1, 1, 1).to(x.dtype)

number = 3
"""
QUICK = ["--rounds", "2", "--local-steps", "2", "--batch-size", "4", "--threads", "1", "--plain"]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(CODE)
    np.savez(
        "points.npz",
        train_x=np.eye(6, dtype="f4").repeat(10, 0),
        train_y=np.arange(60) % 2,
        test_x=np.eye(6, dtype="f4"),
        test_y=np.arange(6) % 2,
    )


def test_function_makes_the_data_set(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--dataset", "mine.py:load", *QUICK, "--out", "run"]) == 0
    run = fedcog.read("run")
    assert (run.experiment.dataset, run.experiment.partition) == ("custom", "natural")
    assert run.experiment.clients == 3
    assert "mine.py" not in Path("run/experiment.toml").read_text(), "records name no code"
    capsys.readouterr()
    assert main(["run", "--resume", "run", "--rounds", "3"]) == 2
    assert "--dataset FILE.py:Name" in capsys.readouterr().err
    again = ["run", "--resume", "run", "--dataset", "mine.py:load", "--rounds", "3", "--plain"]
    assert main(again) == 0
    assert len(fedcog.read("run").lines) == 3
    assert main(["partition", "--dataset", "mine.py:load"]) == 0
    assert "1 bob" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("partition", "clients"),
    [
        ("auto", "the clients of the data, or else 10,"),
        ("natural", "all clients of the data (natural)"),
        ("iid", "10 clients (iid)"),
    ],
)
def test_summary_says_how_many_clients_there_will_be(
    partition: str, clients: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--partition", partition, "--min-examples", "1", *QUICK]
    assert main(["run", "--dataset", "mine.py:load", *words, "--out", "run"]) == 0
    assert f"fedavg on custom: {clients}" in capsys.readouterr().out


def test_module_in_the_current_folder_makes_the_data_set() -> None:
    Path("a_module_of_mine.py").write_text(CODE)
    assert main(["run", "--dataset", "a_module_of_mine:load", *QUICK, "--out", "run"]) == 0


def test_settings_files_name_no_code(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.toml").write_text('dataset = "mine.py:load"\n')
    assert main(["run", "a.toml", "--plain"]) == 2
    assert "is run only if you name it on the command line" in " ".join(
        capsys.readouterr().err.split()
    )


def test_compare_sweep_and_partition_take_locations(capsys: pytest.CaptureFixture[str]) -> None:
    Path("space.toml").write_text("lr = [0.01, 0.1]\n")
    data = ["--dataset", "points.npz", "--clients", "2", "--model", "mlp"]
    assert main(["compare", *data, *QUICK, "--algorithms", "fedavg", "--seeds", "0", "1"]) == 0
    assert (
        Path("runs/compare-points/fedavg/seed-1/report.html").exists()
        or Path("runs/compare-points/report.html").exists()
    )
    sweep = ["--algorithms", "fedavg", "--space", "space.toml", "--trials", "2", "--seeds", "0"]
    before = set(Path().iterdir())
    assert main(["sweep", *data, *QUICK, *sweep, "--out", "swept"]) == 0
    assert set(Path().iterdir()) - before == {Path("swept")}, "nothing is written beside the data"
    assert len(list(Path("swept").rglob("experiment.toml"))) == 3
    assert main(["partition", *data]) == 0
    assert main(["sweep", "--dataset", "mine.py:load", *QUICK, *sweep, "--out", "s"]) == 0


def test_missing_locations_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    for location, reason in {
        "./photos": "there is no folder photos",
        "none.npz": "there is no file none.npz",
        "nowhere.py:load": "there is no file",
        "mine.py:nothing": "has nothing called 'nothing': it defines load, fade",
        "photoz": "unknown data set 'photoz'",
    }.items():
        assert main(["run", "--dataset", location, *QUICK]) == 2
        assert reason in " ".join(capsys.readouterr().err.split()), location
    assert main(["run", "--partition", "given", "--indices", "no.json", *QUICK]) == 2
    assert "there is no file no.json: change --indices" in capsys.readouterr().err


def test_indices_from_a_file() -> None:
    Path("parts.json").write_text(json.dumps([[0, 1, 2, 3], [20, 21, 22, 23]]))
    flags = ["--dataset", "points.npz", "--partition", "given", "--indices", "parts.json"]
    assert main(["run", *flags, *QUICK, "--out", "run"]) == 0
    counts = RunDirectory("run").tensors("federation.safetensors")[0]["counts"]
    assert counts.tolist() == [[2, 2], [2, 2]]


def test_augmentation_from_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--clients", "3", *QUICK]
    assert main(["run", *flags, "--augmentation", "mine.py:fade", "--out", "a"]) == 0
    assert main(["run", *flags, "--out", "b"]) == 0
    losses = [[line["loss"] for line in fedcog.read(name).lines] for name in "ab"]
    assert losses[0] != losses[1]
    capsys.readouterr()
    assert main(["run", "--resume", "a", "--rounds", "3", "--plain"]) == 2
    assert "name it again, --augmentation FILE.py:Name" in capsys.readouterr().err
    again = ["--augmentation", "mine.py:fade", "--rounds", "3", "--plain"]
    assert main(["run", "--resume", "a", *again]) == 0
    assert main(["run", *flags, "--augmentation", "mine.py:number"]) == 2
    assert "is no function" in capsys.readouterr().err


def test_deploy_copies_no_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["deploy", "init", "fed", "--dataset", "mine.py:load"]) == 2
    assert "deploy init copies no code" in " ".join(capsys.readouterr().err.split())


@pytest.mark.processes
@pytest.mark.slow
def test_torchrun_takes_functions() -> None:
    base = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    base += ["-m", "fedcog", "run"]
    flags = ["--dataset", "mine.py:load", "--model", "mlp", *QUICK]
    done = subprocess.run(
        [*base, *flags, "--out", "torchrun"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert main(["run", *flags, "--out", "alone"]) == 0
    pair = [[line["loss"] for line in fedcog.read(name).lines] for name in ("torchrun", "alone")]
    assert pair[0] == pytest.approx(pair[1], rel=1e-5)


@pytest.mark.ray
@pytest.mark.slow
def test_flower_nodes_receive_data_network_and_augmentation() -> None:
    pytest.importorskip("flwr")
    flower_engine.skip_if_python_path_has_space()
    Path("net.py").write_text(
        "from torch import nn\n\n"
        "def make(num_classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes), nn.Dropout(0.2))\n"
    )
    code = ["--dataset", "mine.py:load", "--model", "net.py:make"]
    code += ["--augmentation", "mine.py:fade", "--subset", "30", "--local-test", "0.3"]
    flower = [*code, *QUICK, "--backend", "flower", "--out", "flower"]
    command = [sys.executable, "-m", "fedcog", "run", *flower]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    assert main(["run", *code, *QUICK, "--out", "alone"]) == 0
    flower_lines, lines = (fedcog.read(name).lines for name in ("flower", "alone"))
    losses = [line["loss"] for line in lines]
    assert [line["loss"] for line in flower_lines] == pytest.approx(losses, rel=1e-5)
    own_tests = [line["local_test"]["clients"] for line in lines]
    assert [line["local_test"]["clients"] for line in flower_lines] == own_tests


def test_names_in_data_files_are_shown_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(
        "odd.npz",
        train_x=np.eye(6, dtype="f4").repeat(10, 0),
        train_y=np.arange(60) % 2,
        users=np.array(["ann\x1b[2J", "b[/b]"] * 30),
        classes=np.array(["[/b]", "\x1b]0;owned\x07x"]),
    )
    assert main(["partition", "--dataset", "odd.npz"]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown and "\x07" not in shown
    assert "[/b]" in shown and "1 b[/b]" in shown
