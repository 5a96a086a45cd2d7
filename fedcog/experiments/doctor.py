"""What there is to work with: what works, what is missing, and how to get it."""

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
from fedcog import pictures
from fedcog.data import SOURCES, sources, store

NEEDED = {
    "numpy": "numpy",
    "scipy": "scipy",
    "scikit-learn": "sklearn",
    "matplotlib": "matplotlib",
    "pillow": "PIL",
    "rich": "rich",
    "safetensors": "safetensors",
}
"""The module of each package that nothing goes without."""
EXTRAS = {
    "flwr": ("flwr", "flower", "--backend flower, fedcog deploy"),
    "ray": ("ray", "flower", "--backend flower"),
    "dp-accounting": ("dp_accounting", "privacy", "--privacy"),
    "h5py": ("h5py", "flair", "FLAIR as .hdf5"),
    "onnx": ("onnx", "onnx", "fedcog export --format onnx"),
    "flwr-datasets": ("flwr_datasets", "flwr-datasets", "--partition flwr-..."),
    "optuna": ("optuna", "optuna", "fedcog sweep --search optuna"),
    "onnxscript": ("onnxscript", "onnx", "fedcog export --format onnx"),
    "tensorboard": ("tensorboard", "tensorboard", "--track tensorboard"),
    "mlflow-skinny": ("mlflow", "mlflow", "--track mlflow"),
    "wandb": ("wandb", "wandb", "--track wandb"),
}
"""Of each package that most goes without: its module, the extra that brings it, and what it is for."""
USERS = {
    "flwr": "fedcog.federation.flower",
    "tensorboard": "fedcog.experiments.track.tensorboard",
    "mlflow": "fedcog.experiments.track.mlflow",
    "wandb": "fedcog.experiments.track.wandb",
}
"""What of ours loads a module and more of its package, to try it by."""
GET_TORCH = "a torch for this machine: https://pytorch.org/get-started/locally"


class Part(NamedTuple):
    """Something to work with: does it work, what is known of it, and what to do if it does not."""

    name: str
    state: Literal["ok", "missing", "broken"]
    facts: str
    remedy: str = ""
    needed: bool = False

    @property
    def ails(self) -> bool:
        """Is it needed, and does not work?"""
        return self.needed and self.state != "ok"


def examine(data_dir: str | None = None) -> Iterator[Part]:
    """Every part, tried in turn; whatever is missing, the next is tried all the same."""
    yield Part("Python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    yield Part("fedcog", "ok", fedcog.__version__)
    yield tried("torch", _torch, GET_TORCH, needed=True)
    yield from _gpu()
    for name, module in NEEDED.items():
        yield package(name, module, "", f"pip install {name}", needed=True)
    for name, (module, extra, use) in EXTRAS.items():
        yield package(name, module, use, f"pip install 'fedcog[{extra}]'")
    yield tried("cache folder", _cache, "choose another: FEDCOG_CACHE=DIR")
    for name in SOURCES:
        yield _data(name, data_dir)


def tried(name: str, trial: Callable[[], str], remedy: str, needed: bool = False) -> Part:
    """A part that works if its trial, which tells what is known of it, does."""
    try:
        with warnings.catch_warnings(action="ignore"):
            return Part(name, "ok", trial(), needed=needed)
    except Exception as error:  # whatever it is: to find it is what this is for
        reason = str(error).strip().splitlines() or [""]
        return Part(name, "broken", f"{type(error).__name__}: {reason[0]}", remedy, needed)


def package(name: str, module: str, use: str, remedy: str, needed: bool = False) -> Part:
    """A package, tried by loading it."""

    def load() -> str:
        importlib.import_module(USERS.get(module, module))
        return ", for ".join(part for part in (_version(name, module), use) if part)

    if importlib.util.find_spec(module) is None:
        return Part(name, "missing", f"for {use}" if use else "", remedy, needed)
    return tried(name, load, remedy, needed)


def _version(name: str, module: str) -> str:
    """Of a package, or of another that has the module, too: MLflow comes whole, or skinny."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return importlib.metadata.version(module)


def _torch() -> str:
    one = torch.eye(8)
    assert torch.equal(one @ one, one), "it cannot multiply"
    return f"{torch.__version__}, {torch.get_num_threads()} threads"


def _gpu() -> Iterator[Part]:
    """The GPU, what is recorded there and what is compiled for it."""
    if not torch.cuda.is_available():
        if Path("/dev/nvidia0").exists():
            yield Part("GPU", "broken", f"there is one, and torch {torch.__version__} does not see it", GET_TORCH)
        else:
            yield Part("GPU", "missing", "none seen: training is on the CPU, which works")
        yield package("triton", "triton", "our own kernels on a GPU", "comes with a torch for GPUs")
        return
    yield tried("GPU", _multiply, f"train with --device cpu, or get {GET_TORCH}", needed=True)
    yield tried("CUDA graphs", _record, "without them training is slower, but works: --mapping vmap")
    triton = package("triton", "triton", "our own kernels on a GPU", "pip install triton")
    yield triton
    if triton.state == "ok":
        yield tried(
            "our kernels", _compile, "Triton needs a C compiler and Python's headers: apt install gcc python3-dev"
        )


def _multiply() -> str:
    one = torch.eye(8, device="cuda")
    assert torch.equal(one @ one, one), "it cannot multiply"
    known = torch.cuda.get_device_properties(0)
    more = f", the first of {torch.cuda.device_count()}" if torch.cuda.device_count() > 1 else ""
    return f"{known.name}, {known.total_memory / 2**30:.0f} GiB{more}; CUDA {torch.version.cuda}"


def _record() -> str:
    moved, graph = torch.zeros(8, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        moved += 1
    graph.replay()
    graph.replay()
    assert moved.tolist() == [2.0] * 8, "what was recorded is not what is played back"
    return "recorded and played back"


def _compile() -> str:
    images = torch.arange(2 * 64, dtype=torch.uint8).reshape(2, 1, 8, 8)
    given = (
        images,
        torch.arange(2),
        torch.tensor([[4, 4, 0], [3, 5, 1]]),
        torch.full((1, 1, 1), 0.5),
        torch.ones(1, 1, 1),
    )
    made = pictures.examples(*(one.cuda() for one in given))
    assert torch.allclose(made.cpu(), pictures.examples(*given)), "a kernel computes something else than torch"
    return "compiled, and computing what torch computes"


def _cache() -> str:
    folder = store.cache()
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    with tempfile.TemporaryFile(dir=there):
        return f"{folder}, {shutil.disk_usage(there).free / 2**30:.0f} GiB free"


def _data(name: str, data_dir: str | None) -> Part:
    source, where = SOURCES[name], f" --data-dir {shlex.quote(data_dir)}" if data_dir else ""
    remedy = f"fedcog data get {name}{where}" + (" tells how" if source.by_hand else "")
    remedy = "pip install scikit-learn" if source.package else remedy
    found = tried(f"data: {name}", lambda: str(sources.locate(name, data_dir) or ""), remedy)
    return found if found.facts else found._replace(state="missing", facts=source.title, remedy=remedy)
