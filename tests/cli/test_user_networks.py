"""A network of one's own on the command line: --model FILE.py:Name."""

import json
from pathlib import Path

import pytest
import torch

import fedcog
from fedcog.cli.main import main
from fedcog.runs.records.run_directory import RunDirectory

CODE = """
from torch import nn


class Net(nn.Sequential):
    def __init__(self, num_classes):
        super().__init__(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, num_classes))


def make(input_shape):
    return nn.Sequential(nn.Flatten(), nn.Linear(input_shape[1] * input_shape[2], 10))


given = Net(10)
"""
FAST = ["--rounds", "1", "--local-steps", "2", "--batch-size", "8", "--clients", "3"]
FAST += ["--partition", "iid", "--threads", "1", "--workers", "1", "--quiet"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(CODE)
    return tmp_path


@pytest.mark.parametrize("name", ["Net", "make"])
def test_class_or_function_trains(name: str) -> None:
    assert main(["run", "--model", f"net.py:{name}", "--out", "run", *FAST]) == 0
    directory = RunDirectory("run")
    assert directory.experiment().model == "custom"
    about = directory.tensors("federation.safetensors")[1]
    assert about["initial_weights"] == "seed"


def test_resume_asks_for_the_file_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--model=net.py:Net", "--out", "run", *FAST]) == 0
    assert main(["run", "--resume", "run", "--rounds", "2"]) == 2
    assert "--model FILE.py:Name" in capsys.readouterr().err
    assert main(["run", "--resume", "run", "--rounds", "2", "--model", "net.py:make"]) == 2
    assert "of another network" in capsys.readouterr().err
    assert main(["run", "--resume", "run", "--rounds", "2", "--model", "net.py:Net"]) == 0
    assert len(fedcog.read("run").lines) == 2


def test_python_and_command_line_make_the_same_run(folder: Path) -> None:
    assert main(["run", "--model", "net.py:Net", "--out", "run", *FAST]) == 0
    from fedcog.runs.config.user_code import load_network

    experiment = RunDirectory("run").experiment()
    run = fedcog.run(experiment, "other", model=load_network("net.py:Net"), report=False)
    assert [line["loss"] for line in run.lines] == [
        line["loss"] for line in fedcog.read("run").lines
    ]


def test_recorded_run_never_loads_code(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    assert main(["run", "--model", "net.py:Net", "--out", "run", *FAST]) == 0
    text = (folder / "run" / "experiment.toml").read_text()
    assert "net.py" not in text
    (folder / "run" / "experiment.toml").write_text(text.replace('"custom"', '"net.py:Net"'))
    assert main(["run", "--resume", "run", "--rounds", "2"]) == 2
    assert "is code, which only a command line names" in capsys.readouterr().err


def test_settings_file_names_no_code(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    (folder / "settings.toml").write_text('model = "net.py:Net"\n')
    (folder / "net.py").write_text("raise SystemExit('executed')")
    assert main(["run", "settings.toml"]) == 2
    error = capsys.readouterr().err
    assert "--model net.py:Net" in error and "executed" not in error


def test_export_takes_the_file(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    assert main(["run", "--model", "net.py:Net", "--out", "run", *FAST]) == 0
    assert main(["export", "run"]) == 2
    assert "--model FILE.py:Name" in capsys.readouterr().err
    assert main(["export", "run", "--model", "net.py:Net"]) == 0
    assert (folder / "run" / "model.safetensors").exists()
    assert main(["export", "run", "--model", "mlp"]) == 2
    assert "FILE.py:Name" in capsys.readouterr().err


def test_report_needs_no_code(folder: Path) -> None:
    assert main(["run", "--model", "net.py:Net", "--out", "run", *FAST]) == 0
    (folder / "net.py").unlink()
    assert main(["report", "run", "--quiet"]) == 0


def test_compare_and_sweep_start_from_each_seed(folder: Path) -> None:
    words = ["--model", "net.py:Net", "--algorithms", "fedavg", "--seeds", "0", "1", *FAST]
    assert main(["compare", *words, "--partition-seed", "0", "--lr", "1e-20"]) == 0
    from fedcog.runs.config.user_code import load_network

    networks = [
        fedcog.load(f"runs/compare-digits/fedavg/seed-{seed}", model=load_network("net.py:Net"))
        for seed in (0, 1)
    ]
    first, second = (network.state_dict()["1.weight"] for network in networks)
    assert not torch.allclose(first, second)
    (folder / "space.toml").write_text("lr = [0.1, 0.01]\n")
    sweep = ["--space", "space.toml", "--trials", "2", "--search", "grid", "--seeds", "0"]
    words = ["--model", "net.py:make", "--algorithms", "fedavg", *FAST]
    assert main(["sweep", *words, *sweep]) == 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("net.py:Other", "net.py has nothing called 'Other': it defines Net, make"),
        ("net.py:given", "one network with its weights: name its class, or a function"),
        ("net.py:nn", "is no network: name a class of nn.Module, or a function"),
        ("nowhere.py:Net", "nowhere.py: write FILE.py:Name"),
    ],
)
def test_faults_name_the_remedy(
    name: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--model", name]) == 2
    assert message in capsys.readouterr().err


def test_deployment_copies_no_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["deploy", "init", "federation", "--model", "net.py:Net"]) == 2
    assert "server_app(network=...)" in capsys.readouterr().err
    assert not Path("federation").exists()


def test_provenance_has_the_command() -> None:
    assert main(["run", "--model", "net.py:Net", "--out", "run", *FAST]) == 0
    provenance = json.loads(Path("run/provenance.json").read_text())
    assert "--model net.py:Net" in provenance["command"]
