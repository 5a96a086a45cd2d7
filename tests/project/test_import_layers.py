"""Tests of the package's structure: layers, imports, and where libraries are used."""

import ast
import re
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch

from fedcog.cli.main import main
from fedcog.data import FederatedData
from tests.support.paths import REPO

ROOT = REPO / "fedcog"

LAYERS = [
    "fedcog.core",
    "fedcog.models",
    "fedcog.data",
    "fedcog.algorithms",
    "fedcog.engine",
    "fedcog.federation",
    "fedcog.runs",
    "fedcog.studies",
    "fedcog.report",
    "fedcog.deploy",
    "fedcog.api",
    "fedcog.testing",
    "fedcog.cli",
    "fedcog",
]
"""The layers from the bottom up; a module imports only its own layer and those below.

The last one holds the package's `__init__` and `__main__`.
"""
MODULES = sorted(ROOT.rglob("*.py"))
MAX_MODULES = 12
"""Largest number of modules in a folder, except in `algorithms`, which has one per method."""


def module_name(path: Path) -> str:
    return ".".join(("fedcog", *path.relative_to(ROOT).with_suffix("").parts))


NAMES = [module_name(path) for path in MODULES]


def layer(name: str) -> int:
    """Return the index of a module's layer."""
    if name in ("fedcog.__init__", "fedcog.__main__"):
        return len(LAYERS) - 1
    for index, folder in enumerate(LAYERS[:-1]):
        if name == folder or name.startswith(f"{folder}."):
            return index
    raise AssertionError(f"{name} is in no layer: add its folder to LAYERS")


def modules_of(*folders: str) -> set[str]:
    """Return the names of all modules in some folders; a module is a folder of one."""
    return {
        name
        for name in NAMES
        if any(name == folder or name.startswith(f"{folder}.") for folder in folders)
    }


def imports(path: Path) -> set[str]:
    """Return everything that a module imports: modules, and names of modules."""
    imported: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            imported |= {f"{node.module}.{alias.name}" for alias in node.names}
            imported.add(node.module or "")
    return imported


def is_exported_name(name: str) -> bool:
    """Return whether `fedcog.name` is exported by the package and no module."""
    part = ROOT / name.split(".")[1]
    is_module = part.is_dir() or part.with_suffix(".py").exists()
    return name.count(".") == 1 and not is_module


@pytest.mark.parametrize("path", MODULES, ids=NAMES)
def test_module_imports_only_lower_layers(path: Path) -> None:
    name = module_name(path)
    for other in imports(path):
        if not other.startswith("fedcog."):
            continue
        if is_exported_name(other):
            continue
        assert layer(other) <= layer(name), f"{name} imports {other}"


def test_every_layer_exists() -> None:
    for folder in LAYERS[:-1]:
        assert modules_of(folder), folder


def test_no_folder_has_too_many_modules() -> None:
    for folder in {path.parent for path in MODULES}:
        if folder == ROOT / "algorithms":
            continue
        count = sum(path.name != "__init__.py" for path in folder.glob("*.py"))
        assert count <= MAX_MODULES, f"{folder} has {count} modules"


def test_design_page_lists_the_layers_and_existing_files() -> None:
    page = (ROOT.parent / "docs" / "design.md").read_text()
    rows = page.split("\n## Layers\n")[1].split("\n## ")[0].split("\n| `")[1:]
    listed = [re.split(r"(?:\.py|/)?`", row)[0] for row in rows]
    assert listed == [name.removeprefix("fedcog.") for name in LAYERS[:-1]]
    files = [path.as_posix() for path in [*MODULES, *ROOT.parent.glob("tests/**/*.py")]]
    for name in re.findall(r"`([a-z_/]+\.py)`", page):
        assert any(file.endswith(f"/{name}") for file in files), name


def test_data_imports_only_rng_image_ops_and_a_few_libraries() -> None:
    allowed = {
        "fedcog.core",
        "fedcog.core.rng",
        "fedcog.core.settings",
        "fedcog.models.libraries",  # imports torchvision for files of the user
        "fedcog.models.ops",
        "fedcog.models.ops.augmentation",
        "fedcog.models.ops.keyed_random",
    }
    libraries = {"torch", "numpy", "sklearn", "PIL", "h5py", "flwr_datasets", "datasets"}
    for path in (ROOT / "data").rglob("*.py"):
        imported = imports(path)
        modules = {name for name in imported if name in NAMES or name in allowed}
        assert {name for name in modules if not name.startswith("fedcog.data")} <= allowed, path
        external = {name.split(".")[0] for name in imported} - {"fedcog"} - sys.stdlib_module_names
        assert external <= libraries, path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "allowed"),
    [
        ("matplotlib", modules_of("fedcog.report")),
        ("rich", modules_of("fedcog.cli", "fedcog.runs.progress")),
        ("IPython", {"fedcog.runs.progress"}),
        ("pandas", {"fedcog.runs.records.frames", "fedcog.runs.records.recorded_run"}),
        ("argparse", modules_of("fedcog.cli")),
        (
            "safetensors",
            modules_of(
                "fedcog.core.serialization", "fedcog.runs.pretrained", "fedcog.runs.records"
            ),
        ),
        ("triton", modules_of("fedcog.models.ops.kernels")),
        ("flwr", {name for name in NAMES if name.startswith("fedcog.federation.flower_")}),
        ("h5py", {"fedcog.data.flair.hdf5"}),
        ("tensorboard", {"fedcog.runs.tracking.tensorboard"}),
        ("torch.utils.tensorboard", {"fedcog.runs.tracking.tensorboard"}),
        ("mlflow", {"fedcog.runs.tracking.mlflow"}),
        ("wandb", {"fedcog.runs.tracking.wandb", "fedcog.runs.tracking.wandb_files"}),
        ("flwr_datasets", {"fedcog.data.partitions.flwr_partitions"}),
        (
            "datasets",
            {"fedcog.data.partitions.flwr_partitions", "fedcog.data.sources.hub"},
        ),
        ("optuna", {"fedcog.studies.tuning.search"}),
        ("dp_accounting", {"fedcog.engine.privacy"}),
        ("cryptography", {"fedcog.deploy.certificates"}),
        ("pickle", set()),
    ],
)
def test_library_is_imported_only_where_allowed(library: str, allowed: set[str]) -> None:
    importers = {
        module_name(path)
        for path in MODULES
        if any(name == library or name.startswith(f"{library}.") for name in imports(path))
    }
    assert importers <= allowed


def test_only_the_command_line_prints() -> None:
    for path in MODULES:
        calls = [
            node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)
        ]
        prints = [
            node for node in calls if isinstance(node.func, ast.Name) and node.func.id == "print"
        ]
        assert not prints or module_name(path) in modules_of("fedcog.cli"), path


def test_algorithms_use_no_optimizer_loss_rng_or_client_axis() -> None:
    for path in (ROOT / "algorithms").glob("*.py"):
        code = ast.parse(path.read_text())
        names = called_or_imported(code)
        for word in ("optim", "cross_entropy", "rand", "manual_seed", "isinstance"):
            # FedGen trains its generator on the server with init_optimizer_state; a context has a
            # StepKey, and no hook draws from it.
            allowed = {"init_optimizer_state", "fedcog.models.ops.keyed_random"}
            forbidden = {name for name in names if word in name.lower()} - allowed
            assert not forbidden, f"{path}: {forbidden}"
        arguments = {node.arg for node in ast.walk(code) if isinstance(node, ast.arg)}
        variables = {node.id for node in ast.walk(code) if isinstance(node, ast.Name)}
        assert "clients" not in arguments | variables, path


def called_or_imported(code: ast.Module) -> set[str]:
    """Return the names that a module calls, reads as attributes, or imports."""
    names: set[str] = set()
    for node in ast.walk(code):
        if isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            names.add(node.func.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.name for alias in node.names}
            names.add(getattr(node, "module", None) or "")
    return names


def algorithm_classes() -> set[str]:
    """Return the names of Algorithm, FedAvg, and all their subclasses."""
    bases: dict[str, set[str]] = {}
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = {base.id for base in node.bases if isinstance(base, ast.Name)}
    classes = {"Algorithm", "FedAvg"}
    while new := {name for name, parents in bases.items() if parents & classes} - classes:
        classes |= new
    return classes


@pytest.mark.slow
def test_no_module_outside_algorithms_checks_the_class_of_an_algorithm() -> None:
    """Algorithms describe themselves by attributes, so that a user's algorithm can do the same."""
    classes = algorithm_classes()
    assert {"FedCOG", "HeteroFL", "Wrapper", "RecordedAlgorithm", "RecordedWrapper"} <= classes
    classes.remove("Algorithm")  # checking that something is an algorithm is allowed
    for path in MODULES:
        name = module_name(path)
        if name.startswith("fedcog.algorithms."):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            if not is_call or node.func.id not in ("isinstance", "issubclass"):
                continue
            parts = list(ast.walk(node.args[1]))
            checked = {part.id for part in parts if isinstance(part, ast.Name)}
            checked |= {part.attr for part in parts if isinstance(part, ast.Attribute)}
            assert not checked & classes, f"{name}, line {node.lineno}: {checked & classes}"


def run_python(program: str) -> str:
    finished = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    return finished.stdout.strip()


@pytest.mark.slow
def test_importing_fedcog_loads_only_torch_and_numpy() -> None:
    program = """
import sys
import numpy, torch
before = {name.split(".")[0] for name in sys.modules}
import fedcog
loaded = {name.split(".")[0] for name in sys.modules} - before
print(sorted(loaded - set(sys.stdlib_module_names)))
"""
    assert run_python(program) == "['fedcog']"


@pytest.mark.slow
def test_exported_names_load_no_slow_library() -> None:
    slow: tuple[str, ...] = ("matplotlib", "sklearn", "rich", "PIL", "optuna", "datasets", "flwr")
    slow += () if torch.version.cuda or torch.version.hip else ("triton",)
    program = f"""
import sys
import fedcog
for name in fedcog.__all__:
    getattr(fedcog, name)
print([name for name in {slow} if name in sys.modules])
"""
    assert run_python(program) == "[]"


def test_a_batch_is_ten_calls_away_from_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    walks: list[list[str]] = []
    examples = FederatedData.examples

    def record_walk(self: FederatedData, *args: Any, **kwargs: Any) -> Any:
        frames = traceback.extract_stack()
        walks.append([frame.name for frame in frames if Path(frame.filename).is_relative_to(ROOT)])
        return examples(self, *args, **kwargs)

    monkeypatch.setattr(FederatedData, "examples", record_walk)
    flags = ["--rounds=1", "--local-steps=1", "--threads=1", "--workers=1", "--mapping=vmap"]
    assert main(["run", *flags, "--quiet", f"--out={tmp_path / 'run'}"]) == 0
    first = walks[0]
    assert first[:2] == ["main", "run_command"]
    assert first[-2:] == ["train_step", "batch"]
    assert len(first[1:]) <= 10
