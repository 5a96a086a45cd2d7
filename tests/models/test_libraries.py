"""Networks of torchvision and timm by name."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedcog
from fedcog import ConfigError, Experiment, FedCOG
from fedcog.models import libraries
from fedcog.models.checks import ModelError
from fedcog.models.functional import Model
from fedcog.models.libraries import InputAdapter, import_library, input_note, name_fault
from fedcog.models.zoo import build
from fedcog.runs.pretrained import load_pretrained
from fedcog.runs.records.run_directory import RunDirectory

HAS_TORCHVISION = importlib.util.find_spec("torchvision") is not None
HAS_TIMM = importlib.util.find_spec("timm") is not None
needs_torchvision = pytest.mark.skipif(not HAS_TORCHVISION, reason="torchvision is not installed")
needs_timm = pytest.mark.skipif(not HAS_TIMM, reason="timm is not installed")
needs_both = pytest.mark.skipif(not (HAS_TORCHVISION and HAS_TIMM), reason="one is not installed")

TINY = Experiment(
    clients=2, rounds=2, local_steps=1, batch_size=4, threads=1, workers=1, mapping="loop"
)


@pytest.mark.parametrize("size", [(16, 16), (9, 24), (8, 5)])
def test_adapter_resizes_bilinearly_and_repeats_the_channel(size: tuple[int, int]) -> None:
    x = torch.randn(3, 1, 8, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    adapter = InputAdapter((1, 8, 5), 3, size).double()
    expected = F.interpolate(x, size, mode="bilinear").repeat(1, 3, 1, 1)
    torch.testing.assert_close(adapter(x), expected, atol=1e-6, rtol=0)
    is_resized = size != (8, 5)
    assert adapter.note.startswith("inputs are resized from 8x5 to") == is_resized
    assert adapter.note.endswith("the channel is repeated 3 times")


def test_missing_package_is_refused_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libraries.importlib.util, "find_spec", lambda _: None)
    message = r"model 'timm:resnet10t' needs timm: pip install 'fedcog\[timm\]'"
    with pytest.raises(ConfigError, match=message):
        fedcog.run(Experiment(model="timm:resnet10t"), tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoint.safetensors").exists()


@needs_both
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("torchvision:resnet17", "did you mean torchvision:resnet18?"),
        ("torchvision:fasterrcnn_resnet50_fpn", "unknown model"),
        ("torchvision:zzz", "list_models(module=torchvision.models) returns all names"),
        ("timm:resnet10", "did you mean timm:resnet10t?"),
        ("timm:hf_hub:someone/model", "unknown model"),
        ("timm:resnet10t.c3_in1k", "did you mean timm:resnet10t?"),
    ],
)
def test_only_listed_names_are_accepted(name: str, message: str) -> None:
    fault = name_fault(name)
    assert fault is not None and message in fault


@needs_both
def test_unfit_inputs_are_refused() -> None:
    with pytest.raises(ModelError, match="takes images of shape"):
        build("timm:resnet10t", (20,), 4, 0)
    with pytest.raises(ModelError, match="1 or 3 channels, not 4: choose a network of timm"):
        build("torchvision:resnet18", (4, 8, 8), 4, 0)
    assert build("timm:test_resnet", (4, 8, 8), 4, 0)(torch.zeros(2, 4, 8, 8)).shape == (2, 4)


@needs_both
@pytest.mark.parametrize("name", ["torchvision:mobilenet_v3_small", "timm:test_vit"])
def test_weights_depend_on_the_seed_alone(name: str) -> None:
    state = torch.random.get_rng_state()
    networks = [build(name, (1, 8, 8), 4, seed) for seed in (1, 1, 2)]
    assert torch.equal(state, torch.random.get_rng_state())
    same, again, other = ([*network.parameters()] for network in networks)
    assert all(torch.equal(one, two) for one, two in zip(same, again, strict=True))
    assert any(not torch.equal(one, two) for one, two in zip(same, other, strict=True))
    assert all(float(buffer.abs().max()) in (0, 1) for buffer in _statistics(networks[0]))


def _statistics(module: nn.Module) -> list[torch.Tensor]:
    return [value for name, value in module.named_buffers() if "running" in name]


@needs_both
@pytest.mark.parametrize(
    ("name", "head", "note"),
    [
        ("torchvision:resnet18", "fc", "the channel is repeated 3 times"),
        ("torchvision:mobilenet_v3_small", "classifier.3", "the channel is repeated 3 times"),
        ("timm:convnext_atto", "head.fc", "inputs are resized from 8x8 to 32x32"),
        ("timm:test_vit", "head", "inputs are resized from 8x8 to 32x32"),
        ("timm:mobilenetv3_small_050", "classifier", ""),
        ("timm:resnet10t", "fc", ""),
    ],
)
def test_heads_and_input_gradients_are_found(name: str, head: str, note: str) -> None:
    module = build(name, (1, 8, 8), 4, 0)
    assert input_note(module) == note
    model = Model(module, (1, 8, 8), 4)
    assert model.head == head
    assert model.has_input_gradient
    features = model.features(model.params | model.buffers, torch.zeros(2, 1, 8, 8))
    logits = model.predict(model.params | model.buffers, torch.zeros(2, 1, 8, 8))
    torch.testing.assert_close(model.classify(model.params, features), logits)


@needs_timm
def test_patches_cover_the_image() -> None:
    """Two or more patches per side, or a transformer would see one token or drop pixels."""
    notes = {
        side: input_note(build("timm:test_vit", (3, side, side), 4, 0)) for side in (8, 28, 32)
    }
    assert notes == {
        8: "inputs are resized from 8x8 to 32x32",
        28: "inputs are resized from 28x28 to 32x32",
        32: "",
    }


@needs_torchvision
def test_weights_keep_the_librarys_names(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    original = import_library("torchvision").models.resnet18(num_classes=4)
    file = tmp_path / "resnet18.safetensors"
    save_file(original.state_dict(), file)
    network, _ = load_pretrained(build("torchvision:resnet18", (1, 8, 8), 4, 0), file, 4)
    assert network.state_dict().keys() == original.state_dict().keys()
    x = torch.randn(2, 1, 8, 8)
    expected = original.eval()(x.repeat(1, 3, 1, 1))
    torch.testing.assert_close(network.eval()(x), expected)


FAKE_TORCHVISION = """
import torch
for name in ("nms", "qnms"):
    torch.library.register_fake(f"torchvision::{name}")(lambda *inputs: inputs[0])
"""


@pytest.mark.processes
def test_torchvision_of_another_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text(FAKE_TORCHVISION)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from fedcog.models.libraries import import_library\n"
        "print(import_library('torchvision').__file__)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == str(tmp_path / "torchvision" / "__init__.py"), result.stderr


@needs_timm
@pytest.mark.slow
def test_run_records_the_name_and_the_note(tmp_path: Path) -> None:
    experiment = Experiment(**_values(model="timm:test_vit", rounds=1))
    with pytest.warns(UserWarning, match="timm:test_vit: inputs are resized from 8x8 to 32x32"):
        run = fedcog.run(experiment, tmp_path / "run")
    about = RunDirectory(run.path).tensors("federation.safetensors")[1]
    assert about["model"] == "timm:test_vit"
    assert about["input_note"] == "inputs are resized from 8x8 to 32x32"
    assert "timm:test_vit" in (run.path / "report.html").read_text()
    network = fedcog.load(run.path)
    assert network(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
    assert fedcog.export(run.path).path.exists()


@needs_timm
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_named_network_resumes_byte_for_byte(tmp_path: Path) -> None:
    algorithm = FedCOG(count=4, steps=1, start_round=1)
    experiment = Experiment(algorithm, **_values(model="timm:test_vit"))
    straight = fedcog.run(experiment, tmp_path / "straight", report=False)
    first = Experiment(algorithm, **_values(model="timm:test_vit", rounds=1))
    fedcog.run(first, tmp_path / "resumed", report=False)
    resumed = fedcog.run(experiment, tmp_path / "resumed", resume=True, report=False)
    files = [(run.path / "checkpoint.safetensors").read_bytes() for run in (straight, resumed)]
    assert files[0] == files[1]


def _values(**changes: object) -> dict[str, object]:
    values = TINY.to_dict() | changes
    return {name: value for name, value in values.items() if name != "algorithm"}
