"""Imports point one way: a module may import its own layer and those below it."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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
"""The layers from the bottom up. The last one holds the package's `__init__` and `__main__`."""
MODULES = sorted(ROOT.rglob("*.py"))
MAX_MODULES = 12
"""Largest number of modules in a folder; algorithms have one each and may be more."""
COMPOSITION = "fedcog.runs.config.composition"
"""The one module outside of fedcog.algorithms that may ask for an algorithm's class."""


def module_name(path: Path) -> str:
    return ".".join(("fedcog", *path.relative_to(ROOT).with_suffix("").parts))


NAMES = [module_name(path) for path in MODULES]


def layer(name: str) -> int:
    """The index of a module's layer."""
    if name in ("fedcog.__init__", "fedcog.__main__"):
        return len(LAYERS) - 1
    for index, folder in enumerate(LAYERS[:-1]):
        if name == folder or name.startswith(f"{folder}."):
            return index
    raise AssertionError(f"{name} is in no layer: add its folder to LAYERS")


def modules_of(*folders: str) -> set[str]:
    """The names of all modules in some folders, or of single modules."""
    return {
        name
        for name in NAMES
        if any(name == folder or name.startswith(f"{folder}.") for folder in folders)
    }


def imports(path: Path) -> set[str]:
    """Everything that a module imports: modules, and names of modules."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module or ""}
    return found


def is_name_of_package(name: str) -> bool:
    """Whether `fedcog.name` is something that the package exports, and no module."""
    part = ROOT / name.split(".")[1]
    is_module = part.is_dir() or part.with_suffix(".py").exists()
    return name.count(".") == 1 and not is_module


@pytest.mark.parametrize("path", MODULES, ids=NAMES)
def test_imports_point_down(path: Path) -> None:
    name = module_name(path)
    for other in imports(path):
        if not other.startswith("fedcog."):
            continue
        if is_name_of_package(other):
            continue
        assert layer(other) <= layer(name), f"{name} imports {other}"


def test_the_layers_are_all_there() -> None:
    for folder in LAYERS[:-1]:
        assert modules_of(folder), folder


def test_no_folder_has_too_many_modules() -> None:
    for folder in {path.parent for path in MODULES}:
        if folder == ROOT / "algorithms":
            continue
        count = sum(path.name != "__init__.py" for path in folder.glob("*.py"))
        assert count <= MAX_MODULES, f"{folder} has {count} modules"


def test_the_page_on_design_lists_these_layers_and_names_no_file_that_is_not_there() -> None:
    page = (ROOT.parent / "docs" / "design.md").read_text()
    rows = page.split("\n## Layers\n")[1].split("\n## ")[0].split("\n| `")[1:]
    listed = [re.split(r"(?:\.py|/)?`", row)[0] for row in rows]
    assert listed == [name.removeprefix("fedcog.") for name in LAYERS[:-1]]
    files = [path.as_posix() for path in [*MODULES, *ROOT.parent.glob("tests/**/*.py")]]
    for name in re.findall(r"`([a-z_/]+\.py)`", page):
        assert any(file.endswith(f"/{name}") for file in files), name


def test_data_knows_only_random_numbers_images_and_a_few_libraries() -> None:
    allowed = {"fedcog.core", "fedcog.core.rng", "fedcog.models.ops", "fedcog.models.ops.images"}
    libraries = {"torch", "numpy", "sklearn", "PIL", "h5py", "flwr_datasets", "datasets"}
    for path in (ROOT / "data").rglob("*.py"):
        found = imports(path)
        inside = {name for name in found if name.startswith("fedcog.")}
        assert {name for name in inside if not name.startswith("fedcog.data")} <= allowed, path
        outside = {name.split(".")[0] for name in found} - {"fedcog"} - sys.stdlib_module_names
        assert outside <= libraries, path


@pytest.mark.parametrize(
    ("library", "users"),
    [
        ("matplotlib", modules_of("fedcog.report")),
        ("rich", modules_of("fedcog.cli")),
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
        ("datasets", {"fedcog.data.partitions.flwr_partitions"}),
        ("optuna", {"fedcog.studies.tuning.search"}),
        ("dp_accounting", {"fedcog.engine.privacy"}),
        ("cryptography", {"fedcog.deploy.certificates"}),
        ("pickle", set()),
    ],
)
def test_each_library_has_its_place(library: str, users: set[str]) -> None:
    found = {
        module_name(path)
        for path in MODULES
        if any(name == library or name.startswith(f"{library}.") for name in imports(path))
    }
    assert found <= users


def test_only_the_command_line_prints() -> None:
    for path in MODULES:
        calls = [
            node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)
        ]
        prints = [
            node for node in calls if isinstance(node.func, ast.Name) and node.func.id == "print"
        ]
        assert not prints or module_name(path) in modules_of("fedcog.cli"), path


def test_no_algorithm_knows_an_optimizer_a_client_axis_or_a_loss_of_its_own() -> None:
    for path in (ROOT / "algorithms").glob("*.py"):
        code = ast.parse(path.read_text())
        names = called_or_imported(code)
        for word in ("optim", "cross_entropy", "rand", "manual_seed", "isinstance"):
            found = {name for name in names if word in name.lower()} - {"init_optimizer_state"}
            assert not found, f"{path}: {found}"  # the one that remains is of FedGen's server
        arguments = {node.arg for node in ast.walk(code) if isinstance(node, ast.arg)}
        variables = {node.id for node in ast.walk(code) if isinstance(node, ast.Name)}
        assert "clients" not in arguments | variables, path


def called_or_imported(code: ast.Module) -> set[str]:
    """The names of functions that a module calls, of attributes it reads, and of its imports."""
    found: set[str] = set()
    for node in ast.walk(code):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found.add(node.func.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.name for alias in node.names}
            found.add(getattr(node, "module", None) or "")
    return found


def algorithm_classes() -> set[str]:
    """The names of all classes of algorithms: those of fedcog.algorithms, and their subclasses."""
    bases: dict[str, set[str]] = {}
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = {base.id for base in node.bases if isinstance(base, ast.Name)}
    found = {"Algorithm", "FedAvg"}
    while new := {name for name, own in bases.items() if own & found} - found:
        found |= new
    return found


def test_nothing_but_composition_asks_for_the_class_of_an_algorithm() -> None:
    """Algorithms say what they are by attributes, so that a user's own may say the same."""
    classes = algorithm_classes()
    assert {"FedCOG", "HeteroFL", "Wrapper", "RecordedAlgorithm", "RecordedWrapper"} <= classes
    classes.remove("Algorithm")  # whether something is an algorithm at all may be asked
    for path in MODULES:
        name = module_name(path)
        if name == COMPOSITION or name.startswith("fedcog.algorithms."):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            if not is_call or node.func.id not in ("isinstance", "issubclass"):
                continue
            asked = {part.id for part in ast.walk(node.args[1]) if isinstance(part, ast.Name)}
            asked |= {
                part.attr for part in ast.walk(node.args[1]) if isinstance(part, ast.Attribute)
            }
            assert not asked & classes, f"{name}, line {node.lineno}: {asked & classes}"


def run_python(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout.strip()


def test_importing_fedcog_loads_only_torch_and_numpy_of_other_libraries() -> None:
    program = """
import sys
import numpy, torch
before = {name.split(".")[0] for name in sys.modules}
import fedcog
loaded = {name.split(".")[0] for name in sys.modules} - before
print(sorted(loaded - set(sys.stdlib_module_names)))
"""
    assert run_python(program) == "['fedcog']"


def test_using_every_name_of_fedcog_loads_no_library_that_takes_long() -> None:
    heavy: tuple[str, ...] = ("matplotlib", "sklearn", "rich", "PIL", "optuna", "datasets", "flwr")
    heavy += () if torch.version.cuda or torch.version.hip else ("triton",)
    program = f"""
import sys
import fedcog
for name in fedcog.__all__:
    getattr(fedcog, name)
print([name for name in {heavy} if name in sys.modules])
"""
    assert run_python(program) == "[]"
