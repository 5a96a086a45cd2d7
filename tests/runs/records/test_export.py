"""A run's model elsewhere: the same predictions in onnxruntime, in plain torch, and from fedcog's
own --pretrained.
"""

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
    """A run on digits, in the current folder."""
    monkeypatch.chdir(tmp_path)
    fedcog.run(Experiment(**TINY, lr=0.1), "run", report=False)
    return Path("run")


def outputs(path: str | Path, x: Tensor) -> Tensor:
    """What onnxruntime makes of stored examples."""
    session = onnxruntime.InferenceSession(
        Path(path).read_bytes(), providers=["CPUExecutionProvider"]
    )
    (given,) = session.get_inputs()
    (logits,) = session.run(["logits"], {given.name: x.numpy()})
    return torch.from_numpy(logits)


def inputs(data: fedcog.Dataset) -> Tensor:
    """The test images as a network takes them, calculated here once more."""
    mean, std = (torch.tensor(one).reshape(-1, 1, 1) for one in (data.mean, data.std))
    return (data.test_x / 255 - mean) / std


def test_onnxruntime_predicts_from_bytes_what_torch_predicts(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", "run", "--format", "onnx"]) == 0
    assert capsys.readouterr() == ("model: run/model.onnx (small, after round 2 of 2)\n", "")
    data = registry.load("digits")
    file = run / "model.onnx"
    with torch.no_grad():
        wanted = fedcog.load(run)(inputs(data))
    for count in (1, 7, len(data.test_y)):
        torch.testing.assert_close(
            outputs(file, data.test_x[:count]), wanted[:count], atol=1e-5, rtol=1e-5
        )
    accuracy = (outputs(file, data.test_x).argmax(1) == data.test_y).double().mean()
    assert float(accuracy) == pytest.approx(fedcog.read(run).last), (
        "and scores what the record says"
    )


def test_a_graph_tells_what_it_is_and_nothing_of_where_it_was_made(run: Path) -> None:
    exported = fedcog.export(run, "sub/folder/m.onnx", "onnx")
    assert exported.path == Path("sub/folder/m.onnx")
    session = onnxruntime.InferenceSession(exported.path)
    (given,) = session.get_inputs()
    (made,) = session.get_outputs()
    assert (given.name, given.type, given.shape[1:]) == ("images", "tensor(uint8)", [1, 8, 8])
    assert (made.name, made.shape[1:]) == ("logits", [10])
    about = json.loads(session.get_modelmeta().custom_metadata_map["about"])
    assert about == exported.about
    assert (
        about["classes"] == list("0123456789")
        and about["model"] == "small"
        and not about["several"]
    )
    for place in (REPO, sys.prefix, Path(torch.__file__).parent, Path.home()):
        assert str(place).encode() not in exported.path.read_bytes()


def test_torch_loads_it_into_the_plain_network(run: Path) -> None:
    assert main(["export", "run", "--format", "torch", "--out", "m.pt", "--quiet"]) == 0
    plain = build("small", (1, 8, 8), 10, seed=99).eval()
    plain.load_state_dict(torch.load("m.pt", weights_only=True))
    images = inputs(registry.load("digits"))
    assert torch.equal(plain(images), fedcog.load(run)(images))


def test_safetensors_tell_what_they_are_and_begin_another_run(
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
    trained = fedcog.load(run)
    assert weights.keys() == trained.state_dict().keys()
    fedcog.run(
        Experiment(**TINY, lr=1e-9, pretrained="run/model.safetensors"), "again", report=False
    )
    images = inputs(data)
    torch.testing.assert_close(fedcog.load("again")(images), trained(images), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("algorithm", [FedExP(), FedRep()])
def test_it_is_the_model_that_was_scored(
    algorithm: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """FedExP's is not the one that is sent on; FedRep's clients have their own, too."""
    done = fedcog.run(
        Experiment(algorithm=algorithm, **TINY, lr=0.1), tmp_path / "run", report=False
    )
    assert main(["export", str(done.path), "--format", "onnx"]) == 0
    assert (
        "trains personal models: this is the model that clients share" in capsys.readouterr().err
    ) == algorithm.is_personalized
    data = registry.load("digits")
    right = outputs(done.path / "model.onnx", data.test_x).argmax(1) == data.test_y
    assert float(right.double().mean()) == pytest.approx(done.last)


def test_several_labels(tmp_path: Path) -> None:
    done = fedcog.run(
        Experiment(dataset="digit-mosaics", **TINY, lr=0.1), tmp_path / "run", report=False
    )
    exported = fedcog.export(done.path, format="onnx")
    assert exported.about["several"]
    data = registry.load("digit-mosaics")
    found = outputs(exported.path, data.test_x) > 0
    right = 2 * (found & data.test_y).sum() / (found.sum() + data.test_y.sum())
    assert float(right) == pytest.approx(done.last, abs=1e-6)


class Normed(nn.Module):
    """A network of somebody's own, with running statistics, for eight numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.tanh(self.norm(x)))
        return logits


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_numbers_go_in_as_they_are_and_a_network_of_ones_own_is_given(
    precision: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draw = np.random.default_rng(0)
    x = draw.normal(size=(200, 8)).astype(np.float32) * 3 + 1
    y = draw.integers(3, size=200)
    data = fedcog.from_arrays(x, y, x[:20], y[:20])
    done = fedcog.run(
        Experiment(**TINY, precision=precision),
        tmp_path / "r",
        data=data,
        model=Normed(),
        report=False,
    )
    own = Normed()
    before = own.head.weight.clone()
    exported = fedcog.export(done.path, format="onnx", model=own)
    assert torch.equal(own.head.weight, before), "the network that was given is left alone"
    trained = fedcog.load(done.path, model=Normed()).float()
    torch.testing.assert_close(
        outputs(exported.path, data.test_x), trained(data.test_x), atol=1e-5, rtol=1e-5
    )
    state = torch.load(
        fedcog.export(done.path, format="torch", model=Normed()).path, weights_only=True
    )
    assert (
        state["norm.running_mean"].dtype == getattr(torch, precision)
        and state["norm.running_mean"].abs().sum() > 0
    )
    assert main(["export", str(done.path)]) == 2
    assert "trained your own network: pass it with" in capsys.readouterr().err
    with pytest.raises(RecordError, match="its parameters have other names"):
        fedcog.export(done.path, model=nn.Linear(8, 3))


@pytest.mark.parametrize("name", [name for name in (*MODELS, *USER_MODELS) if name != "small"])
def test_every_network_becomes_a_graph(name: str, tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    own = USER_MODELS.get(name, lambda: None)
    shape = (3, 32, 32) if name in MODELS else (1, 8, 8)
    x = draw.integers(256, size=(24, *shape), dtype=np.uint8)
    y = draw.integers(4, size=24)
    data = fedcog.from_arrays(x, y, x[:5], y[:5], classes="abcd")
    tiny = TINY | {
        "rounds": 1,
        "local_steps": 1,
        "clients": 1,
        "batch_size": 4,
        "evaluate_local": False,
    }
    tiny |= {"model": name} if name in MODELS else {}
    fedcog.run(Experiment(**tiny), tmp_path / "r", data=data, model=own(), report=False)
    exported = fedcog.export(tmp_path / "r", format="onnx", model=own())
    with torch.no_grad():
        wanted = fedcog.load(tmp_path / "r", model=own())(inputs(data))
    torch.testing.assert_close(outputs(exported.path, data.test_x), wanted, atol=1e-5, rtol=1e-5)


class Stubborn(nn.Module):
    """A network that asks its numbers which way to go: no graph can."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(x.flatten(1))
        return logits if float(logits.detach().sum()) > 1e9 else 2 * logits


def test_what_is_no_graph_is_refused_with_the_reason(tmp_path: Path) -> None:
    fedcog.run(Experiment(**TINY, mapping="loop"), tmp_path / "r", model=Stubborn(), report=False)
    with pytest.raises(ModelError, match=r"cannot be converted to ONNX: .+ Choose another format"):
        fedcog.export(tmp_path / "r", format="onnx", model=Stubborn())
    assert not (tmp_path / "r" / "model.onnx").exists()
    assert fedcog.export(tmp_path / "r", format="torch", model=Stubborn()).path.exists()


def test_an_algorithm_of_ones_own_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = f"{REPO / 'examples/my_method.py'}:Sparse"
    out = str(tmp_path / "r")
    words = "--rounds 1 --local-steps 2 --batch-size 8 --partition iid --threads 1 --quiet --out"
    assert main(["run", "--algorithm", own, *words.split(), out]) == 0
    assert main(["export", out]) == 2
    assert (
        "Sparse is your own algorithm: name its file, --algorithm FILE.py:Sparse"
        in capsys.readouterr().err
    )
    assert main(["export", out, "--algorithm", own]) == 0


def test_unfinished_and_without_a_checkpoint(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    toml = run / "experiment.toml"
    toml.write_text(toml.read_text().replace("rounds = 2", "rounds = 9"))
    assert main(["export", "run"]) == 0
    said = capsys.readouterr()
    assert (
        "after round 2 of 9" in said.out
        and "the run is not finished: this is its model after round 2" in said.err
    )
    (run / "checkpoint.safetensors").unlink()
    assert main(["export", "run"]) == 2
    assert "has no checkpoint yet" in capsys.readouterr().err


@pytest.mark.parametrize(
    "file", ["checkpoint.safetensors", "federation.safetensors", "experiment.toml"]
)
def test_damaged(run: Path, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    content = (run / file).read_bytes()
    (run / file).write_bytes(b"=" + content[: len(content) // 2])
    assert main(["export", "run"]) == 2
    assert f"run/{file}" in capsys.readouterr().err
    assert not (run / "model.safetensors").exists()


def test_what_is_written_anew_by_going_on_is_told(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "federation.safetensors").unlink()
    assert main(["export", "run"]) == 2
    assert "Write it again with: fedcog run --resume run" in capsys.readouterr().err
    assert main(["run", "--resume", "run", "--quiet"]) == 0 == main(["export", "run"])


def test_a_checkpoint_of_a_network_nobody_knows(run: Path) -> None:
    directory = RunDirectory(run)
    checkpoint = directory.load()
    assert checkpoint is not None
    directory.save(checkpoint._replace(info=checkpoint.info | {"model": "cnn99"}))
    with pytest.raises(RecordError, match="no network that is known here"):
        fedcog.export(run)


def test_older_records_do_not_tell_the_normalisation_until_resumed(
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


def test_a_run_is_not_written_over(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {file: file.read_bytes() for file in run.iterdir()}
    for command in (
        ["export", "run", "--out"],
        ["report", "run", "--out"],
        ["report", "run", "--table"],
    ):
        for name in ("checkpoint.safetensors", "rounds.jsonl", "experiment.toml"):
            assert main([*command, f"run/{name}"]) == 2
            assert f"run/{name} is part of a run and would be lost" in capsys.readouterr().err
    assert before == {
        file: file.read_bytes() for file in run.iterdir() if file.name != "report.html"
    }


def test_faults_say_what_to_do(
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
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    assert main(["export", "run", "--format", "onnx"]) == 2
    assert "pip install 'fedcog[onnx]'" in capsys.readouterr().err
