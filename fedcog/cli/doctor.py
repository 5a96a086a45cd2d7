"""Checks of the installation: what works, what is missing, and how to get it."""

import importlib
import importlib.metadata
import importlib.util
import platform
import shlex
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import torch

import fedcog
from fedcog.data import DATASETS, array_store, registry
from fedcog.models.libraries import LIBRARIES, import_library
from fedcog.models.ops import augmentation

REQUIRED_PACKAGES = {
    "numpy": "numpy",
    "scipy": "scipy",
    "scikit-learn": "sklearn",
    "matplotlib": "matplotlib",
    "pillow": "PIL",
    "rich": "rich",
    "safetensors": "safetensors",
}
"""The module of each required package."""
OPTIONAL_PACKAGES = {
    "flwr": ("flwr", "flower", "--backend flower, fedcog deploy"),
    "ray": ("ray", "flower", "--backend flower"),
    "dp-accounting": ("dp_accounting", "privacy", "--privacy"),
    "h5py": ("h5py", "flair", "FLAIR as .hdf5"),
    "onnx": ("onnx", "onnx", "fedcog export --format onnx"),
    "flwr-datasets": ("flwr_datasets", "flwr-datasets", "--partition flwr-..."),
    "optuna": ("optuna", "optuna", "fedcog sweep --search optuna"),
    "onnxscript": ("onnxscript", "onnx", "fedcog export --format onnx"),
    "pandas": ("pandas", "pandas", "fedcog.frame"),
    "tensorboard": ("tensorboard", "tensorboard", "--track tensorboard"),
    "mlflow-skinny": ("mlflow", "mlflow", "--track mlflow"),
    "wandb": ("wandb", "wandb", "--track wandb"),
    "torchvision": ("torchvision", "torchvision", "--model torchvision:..."),
    "timm": ("timm", "timm", "--model timm:..."),
}
"""The module of each optional package, the extra that installs it, and what it is for."""
IMPORT_CHECKS = {
    "flwr": "fedcog.federation.flower_server",
    "tensorboard": "fedcog.runs.tracking.tensorboard",
    "mlflow": "fedcog.runs.tracking.mlflow",
    "wandb": "fedcog.runs.tracking.wandb",
}
"""Modules of fedcog that import more of a package, for a better check."""
GET_TORCH = "a torch for this machine: https://pytorch.org/get-started/locally"


class Check(NamedTuple):
    """The result of a check.

    Attributes:
        name: What was checked.
        state: Whether it works.
        facts: Version, size, or what is wrong.
        remedy: What to do if it does not work.
        required: Whether fedcog needs it.
    """

    name: str
    state: Literal["ok", "missing", "broken"]
    facts: str
    remedy: str = ""
    required: bool = False

    @property
    def is_failure(self) -> bool:
        """Whether something required does not work."""
        return self.required and self.state != "ok"


def run_checks(data_dir: str | None = None) -> Iterator[Check]:
    """Run all checks, one after another."""
    yield Check(
        "Python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    )
    yield Check("fedcog", "ok", fedcog.__version__)
    yield check("torch", _torch, GET_TORCH, required=True)
    yield from _gpu_checks()
    for name, module in REQUIRED_PACKAGES.items():
        yield check_package(name, module, "", f"pip install {name}", required=True)
    for name, (module, extra, use) in OPTIONAL_PACKAGES.items():
        yield check_package(name, module, use, f"pip install 'fedcog[{extra}]'")
    yield check("cache folder", _cache, "choose another: FEDCOG_CACHE=DIR")
    for name in DATASETS:
        yield _data(name, data_dir)


def check(name: str, test: Callable[[], str], remedy: str, required: bool = False) -> Check:
    """Run one check.

    Args:
        name: What is checked.
        test: Returns facts, or raises.
        remedy: What to do if it raises.
        required: Whether fedcog needs it.

    Returns:
        The result.
    """
    try:
        with warnings.catch_warnings(action="ignore"):
            return Check(name, "ok", test(), required=required)
    except Exception as error:  # a check may find anything
        reason = str(error).strip().splitlines() or [""]
        return Check(name, "broken", f"{type(error).__name__}: {reason[0]}", remedy, required)


def check_package(name: str, module: str, use: str, remedy: str, required: bool = False) -> Check:
    """Check a package by importing it.

    Args:
        name: Name at PyPI.
        module: Module to import.
        use: What it is for.
        remedy: How to install it.
        required: Whether fedcog needs it.

    Returns:
        The result.
    """

    def load() -> str:
        if module in LIBRARIES:
            import_library(module)
        else:
            importlib.import_module(IMPORT_CHECKS.get(module, module))
        return ", for ".join(part for part in (_version(name, module), use) if part)

    if importlib.util.find_spec(module) is None:
        return Check(name, "missing", f"for {use}" if use else "", remedy, required)
    return check(name, load, remedy, required)


def _version(name: str, module: str) -> str:
    """Return the version of a package, or of another one with the same module (MLflow)."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return importlib.metadata.version(module)


def _torch() -> str:
    one = torch.eye(8)
    assert torch.equal(one @ one, one), "it cannot multiply"
    return f"{torch.__version__}, {torch.get_num_threads()} threads"


def _gpu_checks() -> Iterator[Check]:
    """Check the GPU, CUDA graphs and our kernels."""
    if not torch.cuda.is_available():
        if Path("/dev/nvidia0").exists():
            yield Check(
                "GPU",
                "broken",
                f"torch {torch.__version__} does not see it",
                GET_TORCH,
            )
        else:
            yield Check("GPU", "missing", "none found: training uses the CPU")
        yield check_package(
            "triton", "triton", "our own kernels on a GPU", "comes with a torch for GPUs"
        )
        return
    yield check("GPU", _check_gpu, f"train with --device cpu, or get {GET_TORCH}", required=True)
    yield check(
        "CUDA graphs", _check_graphs, "training works without them, but slower: --mapping vmap"
    )
    triton = check_package("triton", "triton", "our own kernels on a GPU", "pip install triton")
    yield triton
    if triton.state == "ok":
        yield check(
            "our kernels",
            _check_kernels,
            "Triton needs a C compiler and Python's headers: apt install gcc python3-dev",
        )


def _check_gpu() -> str:
    one = torch.eye(8, device="cuda")
    assert torch.equal(one @ one, one), "it cannot multiply"
    known = torch.cuda.get_device_properties(0)
    more = f", the first of {torch.cuda.device_count()}" if torch.cuda.device_count() > 1 else ""
    return f"{known.name}, {known.total_memory / 2**30:.0f} GiB{more}; CUDA {torch.version.cuda}"


def _check_graphs() -> str:
    moved = torch.zeros(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        moved += 1
    graph.replay()
    graph.replay()
    assert moved.tolist() == [2.0] * 8, "a replayed graph gives another result"
    return "recorded and replayed"


def _check_kernels() -> str:
    images = torch.arange(2 * 64, dtype=torch.uint8).reshape(2, 1, 8, 8)
    given = (
        images,
        torch.arange(2),
        torch.tensor([[4, 4, 0], [3, 5, 1]]),
        torch.full((1, 1, 1), 0.5),
        torch.ones(1, 1, 1),
    )
    made = augmentation.gather_inputs(*(one.cuda() for one in given))
    assert torch.allclose(made.cpu(), augmentation.gather_inputs(*given)), (
        "a kernel and torch give different results"
    )
    return "compiled; they agree with torch"


def _cache() -> str:
    folder = array_store.cache_dir()
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    with tempfile.TemporaryFile(dir=there):
        return f"{folder}, {shutil.disk_usage(there).free / 2**30:.0f} GiB free"


def _data(name: str, data_dir: str | None) -> Check:
    source = DATASETS[name]
    where = f" --data-dir {shlex.quote(data_dir)}" if data_dir else ""
    remedy = f"fedcog data get {name}{where}" + (
        " explains how" if source.manual_instructions else ""
    )
    remedy = "pip install scikit-learn" if source.package else remedy
    result = check(f"data: {name}", lambda: str(registry.locate(name, data_dir) or ""), remedy)
    if result.facts:
        return result
    return result._replace(state="missing", facts=source.title, remedy=remedy)
