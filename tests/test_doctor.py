"""`fedcog doctor`: whatever is missing, it says so, says how to get it, and goes on."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import fedcog
from fedcog.cli import main
from fedcog.experiments import doctor
from fedcog.experiments.doctor import Part, examine


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("FEDCOG_DATA", raising=False)
    monkeypatch.delenv("FEDCOG_CACHE", raising=False)


def part(name: str, parts: Sequence[Part]) -> Part:
    return next(one for one in parts if one.name == name)


def test_here_everything_needed_works(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["doctor"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    for word in (
        "Python",
        "torch",
        torch.__version__,
        "GPU",
        "triton",
        "flwr",
        "dp-accounting",
        "h5py",
        "tensorboard",
        "mlflow-skinny",
        "wandb",
        "scikit-learn",
    ):
        assert word in said.out
    assert "fedcog data get cifar10" in said.out and "fedcog data get flair tells how" in said.out
    assert not (tmp_path / ".cache" / "fedcog").exists(), "to look makes no folder"
    assert main(["doctor", "--plain", "--data-dir", "my data"]) == 0
    said = capsys.readouterr()
    assert "data: cifar10: missing: CIFAR-10 (fedcog data get cifar10 --data-dir 'my data')" in said.out
    assert main(["doctor", "--quiet"]) == 0
    assert capsys.readouterr().out == ""


def test_every_module_that_can_be_done_without_is_missed_by_name() -> None:
    """In a process of its own, where none of them has been loaded: nothing of theirs is found."""
    hidden = [
        "flwr",
        "ray",
        "dp_accounting",
        "h5py",
        "onnx",
        "onnxscript",
        "tensorboard",
        "mlflow",
        "wandb",
        "optuna",
        "flwr_datasets",
        "datasets",
        "triton",
        "matplotlib",
        "sklearn",
        "PIL",
        "scipy",
    ]
    code = f"import sys; sys.modules.update(dict.fromkeys({hidden})); from fedcog.cli import main; sys.exit(main())"
    words = [sys.executable, "-c", code, "doctor", "--plain"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    for line in (
        "flwr: missing: for --backend flower, fedcog deploy (pip install 'fedcog[flower]')",
        "dp-accounting: missing: for --privacy (pip install 'fedcog[privacy]')",
        "h5py: missing: for FLAIR as .hdf5 (pip install 'fedcog[flair]')",
        "onnxscript: missing: for fedcog export --format onnx (pip install 'fedcog[onnx]')",
        "mlflow-skinny: missing: for --track mlflow (pip install 'fedcog[mlflow]')",
        "wandb: missing: for --track wandb (pip install 'fedcog[wandb]')",
        "optuna: missing: for fedcog sweep --search optuna (pip install 'fedcog[optuna]')",
        "flwr-datasets: missing: for --partition flwr-... (pip install 'fedcog[flwr-datasets]')",
        "scikit-learn: missing:  (pip install scikit-learn)",
        "data: digits: missing: scikit-learn's handwritten digits (pip install scikit-learn)",
        "data: cifar10: missing: CIFAR-10 (fedcog data get cifar10)",
    ):
        assert line in done.stdout.splitlines(), line
    for name in ("scipy", "scikit-learn", "matplotlib", "pillow"):
        assert f"fedcog: {name} is needed, and missing: pip install {name}" in done.stderr


def test_what_is_there_and_does_not_load_is_broken(tmp_path: Path) -> None:
    """In a process of its own, too: half-loaded modules are no good to anybody after."""
    (tmp_path / "h5py.py").write_text("raise OSError('libhdf5.so: wrong [ELF] class\\nand more')")
    (tmp_path / "PIL.py").write_text("1 / 0")
    paths = os.pathsep.join([str(tmp_path), str(Path(fedcog.__file__).parent.parent)])
    done = subprocess.run(
        [sys.executable, "-m", "fedcog", "doctor", "--plain"],
        env=os.environ | {"PYTHONPATH": paths},
        **{"capture_output": True, "text": True, "timeout": 120},
    )
    assert done.returncode == 1
    assert "fedcog: pillow is needed, and broken: pip install pillow\n" in done.stderr
    assert "h5py: broken: OSError: libhdf5.so: wrong [ELF] class (pip install 'fedcog[flair]')" in done.stdout


def test_a_gpu_that_does_not_work_is_told_and_not_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*anything: object) -> str:
        raise RuntimeError("CUDA error: no kernel image is available\nfor this device")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("_multiply", "_record", "_compile"):
        monkeypatch.setattr(doctor, name, fail)
    parts = list(examine())
    gpu = part("GPU", parts)
    assert gpu.ails and gpu.facts == "RuntimeError: CUDA error: no kernel image is available"
    assert "--device cpu" in gpu.remedy
    assert not part("CUDA graphs", parts).ails and part("CUDA graphs", parts).state == "broken"


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FEDCOG_CACHE", str(tmp_path / "file" / "below"))
    found = part("cache folder", list(examine()))
    assert found.state == "broken" and "FEDCOG_CACHE=DIR" in found.remedy


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_on_a_gpu_graphs_and_kernels_are_tried() -> None:
    parts = list(examine())
    for name in ("GPU", "CUDA graphs", "triton", "our kernels"):
        assert part(name, parts).state == "ok", part(name, parts)
