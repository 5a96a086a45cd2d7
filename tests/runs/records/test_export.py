"""Tests of exported models: equal predictions in onnxruntime, torch and new fedcog runs."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

import fedcog
from fedcog import Experiment, FedExP, FedRep, ModelError, RecordError
from fedcog.cli.main import main
from fedcog.core.settings import ConfigError
from fedcog.data import registry
from fedcog.models.zoo import MODELS, build
from fedcog.runs.records.run_directory import RunDirectory
from tests.support.paths import REPO
from tests.support.user_models import USER_MODELS

pytestmark = pytest.mark.compiler

TINY: dict[str, Any] = {
    "rounds": 2,
    "local_steps": 5,
    "batch_size": 16,
    "clients": 4,
    "partition": "iid",
    "threads": 1,
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run on digits, in the current folder, called run."""
    monkeypatch.chdir(tmp_path)
    fedcog.run(Experiment(**TINY, lr=0.1), "run", report=False)
    return Path("run")


def onnx_outputs(path: str | Path, x: Tensor) -> Tensor:
    """Outputs of onnxruntime for stored examples."""
    session = onnxruntime.InferenceSession(
        Path(path).read_bytes(), providers=["CPUExecutionProvider"]
    )
    (model_input,) = session.get_inputs()
    (logits,) = session.run(["logits"], {model_input.name: x.numpy()})
    return torch.from_numpy(logits)


def network_inputs(data: fedcog.Dataset) -> Tensor:
    """The test images as a network takes them, normalized independently of fedcog."""
    mean = torch.tensor(data.mean).reshape(-1, 1, 1)
    std = torch.tensor(data.std).reshape(-1, 1, 1)
    return (data.test_x / 255 - mean) / std


def test_onnxruntime_predicts_the_same_as_torch_from_bytes(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", "run", "--format", "onnx"]) == 0
    assert capsys.readouterr() == ("model: run/model.onnx (small, after round 2 of 2)\n", "")
    data = registry.load("digits")
    file = run / "model.onnx"
    with torch.no_grad():
        expected = fedcog.load(run)(network_inputs(data))
    for count in (1, 7, len(data.test_y)):
        torch.testing.assert_close(
            onnx_outputs(file, data.test_x[:count]), expected[:count], atol=1e-5, rtol=1e-5
        )
    accuracy = (onnx_outputs(file, data.test_x).argmax(1) == data.test_y).double().mean()
    assert float(accuracy) == pytest.approx(fedcog.read(run).last)


def test_onnx_file_describes_the_model_and_contains_no_local_paths(run: Path) -> None:
    exported = fedcog.export(run, "sub/folder/m.onnx", "onnx")
    assert exported.path == Path("sub/folder/m.onnx")
    session = onnxruntime.InferenceSession(exported.path)
    (model_input,) = session.get_inputs()
    (model_output,) = session.get_outputs()
    assert (model_input.name, model_input.type, model_input.shape[1:]) == (
        "images",
        "tensor(uint8)",
        [1, 8, 8],
    )
    assert (model_output.name, model_output.shape[1:]) == ("logits", [10])
    about = json.loads(session.get_modelmeta().custom_metadata_map["about"])
    assert about == exported.about
    assert about["classes"] == list("0123456789")
    assert about["model"] == "small" and not about["several"]
    for path in (REPO, sys.prefix, Path(torch.__file__).parent, Path.home()):
        assert str(path).encode() not in exported.path.read_bytes()


def test_torch_file_loads_into_the_network(run: Path) -> None:
    assert main(["export", "run", "--format", "torch", "--out", "m.pt", "--quiet"]) == 0
    network = build("small", (1, 8, 8), 10, seed=99).eval()
    network.load_state_dict(torch.load("m.pt", weights_only=True))
    images = network_inputs(registry.load("digits"))
    assert torch.equal(network(images), fedcog.load(run)(images))


def test_safetensors_file_describes_the_model_and_starts_a_run(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", "run"]) == 0
    with safe_open(run / "model.safetensors", "pt") as file:
        about = json.loads(file.metadata()["about"])
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    data = registry.load("digits")
    assert about["input_shape"] == [1, 8, 8] and about["classes"] == list(data.classes)
    assert about["mean"] == list(data.mean) and about["std"] == list(data.std)
    assert about["dataset"] == "digits" and about["algorithm"] == "fedavg" and about["round"] == 2
    model = fedcog.load(run)
    assert weights.keys() == model.state_dict().keys()
    fedcog.run(
        Experiment(**TINY, lr=1e-9, pretrained="run/model.safetensors"), "again", report=False
    )
    images = network_inputs(data)
    torch.testing.assert_close(fedcog.load("again")(images), model(images), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("algorithm", [FedExP(), FedRep()])
def test_exported_model_is_the_one_that_was_scored(
    algorithm: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """FedExP broadcasts another model than it scores; FedRep also has personal models."""
    run = fedcog.run(
        Experiment(algorithm=algorithm, **TINY, lr=0.1), tmp_path / "run", report=False
    )
    assert main(["export", str(run.path), "--format", "onnx"]) == 0
    note = "trains personal models: this is the model that clients share"
    assert (note in capsys.readouterr().err) == algorithm.is_personalized
    data = registry.load("digits")
    correct = onnx_outputs(run.path / "model.onnx", data.test_x).argmax(1) == data.test_y
    assert float(correct.double().mean()) == pytest.approx(run.last)


def test_exported_multi_label_model_has_the_recorded_f1(tmp_path: Path) -> None:
    run = fedcog.run(
        Experiment(dataset="digit-mosaics", **TINY, lr=0.1), tmp_path / "run", report=False
    )
    exported = fedcog.export(run.path, format="onnx")
    assert exported.about["several"]
    data = registry.load("digit-mosaics")
    predicted = onnx_outputs(exported.path, data.test_x) > 0
    f1 = 2 * (predicted & data.test_y).sum() / (predicted.sum() + data.test_y.sum())
    assert float(f1) == pytest.approx(run.last, abs=1e-6)


class BatchNormNetwork(nn.Module):
    """A user's network with running statistics, for vectors of eight numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.tanh(self.norm(x)))
        return logits


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_vectors_are_not_normalized_and_user_networks_are_passed(
    precision: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 8)).astype(np.float32) * 3 + 1
    y = rng.integers(3, size=200)
    data = fedcog.from_arrays(x, y, x[:20], y[:20])
    run = fedcog.run(
        Experiment(**TINY, precision=precision),
        tmp_path / "r",
        data=data,
        model=BatchNormNetwork(),
        report=False,
    )
    user_network = BatchNormNetwork()
    before = user_network.head.weight.clone()
    exported = fedcog.export(run.path, format="onnx", model=user_network)
    assert torch.equal(user_network.head.weight, before), "the passed network is not modified"
    model = fedcog.load(run.path, model=BatchNormNetwork()).float()
    torch.testing.assert_close(
        onnx_outputs(exported.path, data.test_x), model(data.test_x), atol=1e-5, rtol=1e-5
    )
    state = torch.load(
        fedcog.export(run.path, format="torch", model=BatchNormNetwork()).path, weights_only=True
    )
    running_mean = state["norm.running_mean"]
    assert running_mean.dtype == getattr(torch, precision) and running_mean.abs().sum() > 0
    assert main(["export", str(run.path)]) == 2
    assert "trained your own network: pass it with" in capsys.readouterr().err
    with pytest.raises(RecordError, match="its parameters have other names"):
        fedcog.export(run.path, model=nn.Linear(8, 3))


@pytest.mark.parametrize("name", [name for name in (*MODELS, *USER_MODELS) if name != "small"])
def test_every_network_is_exported_to_onnx(name: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    make_network = USER_MODELS.get(name, lambda: None)
    shape = (3, 32, 32) if name in MODELS else (1, 8, 8)
    x = rng.integers(256, size=(24, *shape), dtype=np.uint8)
    y = rng.integers(4, size=24)
    data = fedcog.from_arrays(x, y, x[:5], y[:5], classes="abcd")
    settings = TINY | {
        "rounds": 1,
        "local_steps": 1,
        "clients": 1,
        "batch_size": 4,
        "evaluate_local": False,
    }
    if name in MODELS:
        settings["model"] = name
    fedcog.run(
        Experiment(**settings), tmp_path / "r", data=data, model=make_network(), report=False
    )
    exported = fedcog.export(tmp_path / "r", format="onnx", model=make_network())
    with torch.no_grad():
        expected = fedcog.load(tmp_path / "r", model=make_network())(network_inputs(data))
    torch.testing.assert_close(
        onnx_outputs(exported.path, data.test_x), expected, atol=1e-5, rtol=1e-5
    )


class DataDependentBranch(nn.Module):
    """A network with a branch on its outputs, which ONNX cannot express."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(x.flatten(1))
        return logits if float(logits.detach().sum()) > 1e9 else 2 * logits


def test_network_that_onnx_cannot_express_is_refused(tmp_path: Path) -> None:
    fedcog.run(
        Experiment(**TINY, mapping="loop"),
        tmp_path / "r",
        model=DataDependentBranch(),
        report=False,
    )
    with pytest.raises(ModelError, match=r"cannot be converted to ONNX: .+ Choose another format"):
        fedcog.export(tmp_path / "r", format="onnx", model=DataDependentBranch())
    assert not (tmp_path / "r" / "model.onnx").exists()
    assert fedcog.export(tmp_path / "r", format="torch", model=DataDependentBranch()).path.exists()


def test_user_algorithm_must_be_named_for_export(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    algorithm = f"{REPO / 'examples/my_method.py'}:Sparse"
    out = str(tmp_path / "r")
    arguments = (
        "--rounds 1 --local-steps 2 --batch-size 8 --partition iid --threads 1 --quiet --out"
    )
    assert main(["run", "--algorithm", algorithm, *arguments.split(), out]) == 0
    assert main(["export", out]) == 2
    assert (
        "Sparse is your own algorithm: name its file, --algorithm FILE.py:Sparse"
        in capsys.readouterr().err
    )
    assert main(["export", out, "--algorithm", algorithm]) == 0


def test_export_of_unfinished_run_and_of_run_without_checkpoint(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toml = run / "experiment.toml"
    toml.write_text(toml.read_text().replace("rounds = 2", "rounds = 9"))
    assert main(["export", "run"]) == 0
    captured = capsys.readouterr()
    assert "after round 2 of 9" in captured.out
    assert "the run is not finished: this is its model after round 2" in captured.err
    (run / "checkpoint.safetensors").unlink()
    assert main(["export", "run"]) == 2
    assert "has no checkpoint yet" in capsys.readouterr().err


@pytest.mark.parametrize(
    "file", ["checkpoint.safetensors", "federation.safetensors", "experiment.toml"]
)
def test_damaged_files_are_errors(run: Path, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    content = (run / file).read_bytes()
    (run / file).write_bytes(b"=" + content[: len(content) // 2])
    assert main(["export", "run"]) == 2
    assert f"run/{file}" in capsys.readouterr().err
    assert not (run / "model.safetensors").exists()


def test_missing_federation_file_is_rewritten_on_resume(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "federation.safetensors").unlink()
    assert main(["export", "run"]) == 2
    assert "Write it again with: fedcog run --resume run" in capsys.readouterr().err
    assert main(["run", "--resume", "run", "--quiet"]) == 0 == main(["export", "run"])


def test_checkpoint_of_an_unknown_network_is_refused(run: Path) -> None:
    directory = RunDirectory(run)
    checkpoint = directory.load()
    assert checkpoint is not None
    directory.save(checkpoint._replace(info=checkpoint.info | {"model": "cnn99"}))
    with pytest.raises(RecordError, match="no network that is known here"):
        fedcog.export(run)


def test_old_records_gain_the_normalization_on_resume(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = RunDirectory(run)
    tensors, about = directory.tensors("federation.safetensors")
    directory.save_federation(
        tensors, {name: value for name, value in about.items() if name not in ("mean", "std")}
    )
    assert main(["export", "run", "--format", "onnx"]) == 2
    assert "fedcog run --resume run writes it" in capsys.readouterr().err
    assert main(["export", "run", "--format", "torch"]) == 0
    assert main(["run", "--resume", "run", "--quiet"]) == 0
    assert main(["export", "run", "--format", "onnx"]) == 0


def test_export_and_report_do_not_overwrite_files_of_a_run(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {file: file.read_bytes() for file in run.iterdir()}
    reasons = {
        ("export", "run", "--out"): "is no model",
        ("report", "run", "--out"): "a report is a page",
        ("report", "run", "--table"): "is no table",
        ("table", "run", "--out"): "is no table",
        ("plot", "run", "--out"): "is no figure",
    }
    for command, reason in reasons.items():
        for name in ("checkpoint.safetensors", "rounds.jsonl", "experiment.toml"):
            assert main([*command, f"run/{name}"]) == 2
            error = capsys.readouterr().err
            is_model = command[0] == "export" and name.endswith(".safetensors")
            expected = "is part of a run and would be lost" if is_model else reason
            assert expected in error and f"run/{name}" in error
    assert before == {
        file: file.read_bytes() for file in run.iterdir() if file.name != "report.html"
    }


def test_errors_say_what_to_do(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", "nowhere"]) == 2
    assert "there is no run in nowhere" in capsys.readouterr().err
    Path("several/fedavg/seed-0").mkdir(parents=True)
    Path("several/fedavg/seed-0/experiment.toml").touch()
    assert main(["export", "several"]) == 2
    assert "name one, such as several/fedavg/seed-0" in capsys.readouterr().err
    assert main(["export", "run", "--format", "tensorflow"]) == 2
    assert "choose from 'safetensors', 'torch', 'onnx'" in capsys.readouterr().err
    assert main(["export", "run", "--out", "run"]) == 2
    assert "cannot write run: it is a folder" in capsys.readouterr().err
    with pytest.raises(
        ConfigError, match="format needs one of safetensors, torch, onnx, not 'keras'"
    ):
        fedcog.export(run, format="keras")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"m.onnx ends in .onnx, which is onnx, not torch"):
        fedcog.export(run, "m.onnx", format="torch")
    with pytest.raises(ConfigError, match=r"m.h5 is no model: choose a name that ends in"):
        fedcog.export(run, "m.h5")
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    assert main(["export", "run", "--format", "onnx"]) == 2
    assert "pip install 'fedcog[onnx]'" in capsys.readouterr().err
