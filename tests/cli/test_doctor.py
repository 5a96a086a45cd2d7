"""Tests of `fedcog doctor`: it reports every missing or broken part with its remedy."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import fedcog
from fedcog.cli import doctor
from fedcog.cli.doctor import Check, run_checks
from fedcog.cli.main import main


@pytest.fixture(autouse=True)
def isolated_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("FEDCOG_DATA", raising=False)
    monkeypatch.delenv("FEDCOG_CACHE", raising=False)


def check_named(name: str, checks: Sequence[Check]) -> Check:
    return next(check for check in checks if check.name == name)


@pytest.mark.slow
def test_this_environment_passes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["doctor"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
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
        assert word in captured.out
    assert "fedcog data get cifar10" in captured.out
    assert "fedcog data get flair explains how" in captured.out
    assert not (tmp_path / ".cache" / "fedcog").exists(), "checks must not create folders"
    assert main(["doctor", "--plain", "--data-dir", "my data"]) == 0
    line = "data: cifar10: missing: CIFAR-10 (fedcog data get cifar10 --data-dir 'my data')"
    assert line in capsys.readouterr().out
    assert main(["doctor", "--quiet"]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.processes
def test_missing_modules_are_listed_with_their_install_command() -> None:
    """Runs in a new process, where none of the hidden modules has been imported."""
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
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({hidden})); "
        "from fedcog.cli.main import main; sys.exit(main())"
    )
    command = [sys.executable, "-c", code, "doctor", "--plain"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert process.returncode == 1, process.stderr
    assert "Traceback" not in process.stderr
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
        assert line in process.stdout.splitlines(), line
    for name in ("scipy", "scikit-learn", "matplotlib", "pillow"):
        assert f"fedcog: {name} is required, but missing: pip install {name}" in process.stderr


@pytest.mark.processes
def test_modules_that_fail_to_import_are_reported_as_broken(tmp_path: Path) -> None:
    """Runs in a new process, because half-imported modules would break later tests."""
    (tmp_path / "h5py.py").write_text("raise OSError('libhdf5.so: wrong [ELF] class\\nand more')")
    (tmp_path / "PIL.py").write_text("1 / 0")
    paths = os.pathsep.join([str(tmp_path), str(Path(fedcog.__file__).parent.parent)])
    process = subprocess.run(
        [sys.executable, "-m", "fedcog", "doctor", "--plain"],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 1
    assert "fedcog: pillow is required, but broken: pip install pillow\n" in process.stderr
    line = "h5py: broken: OSError: libhdf5.so: wrong [ELF] class (pip install 'fedcog[flair]')"
    assert line in process.stdout


def test_broken_gpu_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> str:
        raise RuntimeError("CUDA error: no kernel image is available\nfor this device")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("_check_gpu", "_check_graphs", "_check_kernels"):
        monkeypatch.setattr(doctor, name, fail)
    checks = list(run_checks())
    gpu = check_named("GPU", checks)
    assert gpu.is_failure and gpu.facts == "RuntimeError: CUDA error: no kernel image is available"
    assert "--device cpu" in gpu.remedy
    graphs = check_named("CUDA graphs", checks)
    assert not graphs.is_failure and graphs.state == "broken"


def test_unwritable_cache_folder_is_broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FEDCOG_CACHE", str(tmp_path / "file" / "below"))
    cache = check_named("cache folder", list(run_checks()))
    assert cache.state == "broken" and "FEDCOG_CACHE=DIR" in cache.remedy


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_graphs_and_kernels_work() -> None:
    checks = list(run_checks())
    for name in ("GPU", "CUDA graphs", "triton", "our kernels"):
        assert check_named(name, checks).state == "ok", check_named(name, checks)
