"""Imports point one way: each room may know only the rooms below it."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent / "fedcog"

# A room, from the bottom up; a module may import its own room and those before it. `data` stands aside of the models.
ROOMS = [
    {"fedcog.tree", "fedcog.streams", "fedcog.settings", "fedcog.kernels"},
    {"fedcog.optimiser", "fedcog.pictures", "fedcog.layers", "fedcog.resnet", "fedcog.widths"},
    {"fedcog.data"},
    {"fedcog.task"},
    {"fedcog.models", "fedcog.fitness"},
    {"fedcog.generation", "fedcog.generators"},
    {"fedcog.algorithms"},
    {"fedcog.federation"},
    {"fedcog.complement"},
    {"fedcog.experiments"},
    {"fedcog.testing"},
    {"fedcog.console", "fedcog.flags", "fedcog.completion"},
    {"fedcog.grammar"},
    {"fedcog.cli"},
    {"fedcog.__main__", "fedcog.__init__"},
]
MODULES = sorted(ROOT.rglob("*.py"))


def room(name: str) -> int:
    for level, names in enumerate(ROOMS):
        if any(name == one or name.startswith(one + ".") for one in names):
            return level
    raise AssertionError(f"{name} is in no room: put it into ROOMS")


def name_of(path: Path) -> str:
    return ".".join(("fedcog", *path.relative_to(ROOT).with_suffix("").parts))


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module or ""}
    return found


@pytest.mark.parametrize("path", MODULES, ids=[name_of(path) for path in MODULES])
def test_imports_point_down(path: Path) -> None:
    name = name_of(path)
    for other in imports(path):
        if other == "fedcog" or not other.startswith("fedcog."):
            continue
        if other == "fedcog.__version__" or (other.count(".") == 1 and not _is_module(other)):
            continue
        assert room(other) <= room(name), f"{name} imports {other}"


def test_the_page_on_design_has_these_rooms_and_names_no_file_that_is_not_there() -> None:
    page = (ROOT.parent / "docs" / "design.md").read_text()
    rows = page.split("## Rooms")[1].split("## ")[0].split("\n| `")[1:]
    told = [name for row in rows for name in re.findall(r"`?(\w+)(?:\.py|/)`", row.split("|")[0])]
    shown = [name.removeprefix("fedcog.") for names in ROOMS for name in names if "__" not in name]
    assert sorted(told) == sorted(shown)
    levels = [room(f"fedcog.{name}") for name in told]
    assert levels == sorted(levels)
    files = [path.as_posix() for path in [*MODULES, *ROOT.parent.glob("tests/**/*.py")]]
    for name in re.findall(r"`([a-z_/]+\.py)`", page):
        assert any(file.endswith(f"/{name}") for file in files), name


def _is_module(name: str) -> bool:
    part = ROOT / name.split(".")[1]
    return part.is_dir() or part.with_suffix(".py").exists()


def test_the_data_room_knows_only_torch_numpy_streams_and_pictures() -> None:
    for path in (ROOT / "data").glob("*.py"):
        inside = {one for one in imports(path) if one.startswith("fedcog.") and not one.startswith("fedcog.data")}
        assert inside <= {"fedcog.streams", "fedcog.pictures"}, path
        outside = {one.split(".")[0] for one in imports(path)} - {"fedcog", "__future__"} - sys.stdlib_module_names
        assert outside <= {"torch", "numpy", "sklearn", "PIL", "h5py", "flwr_datasets", "datasets"}, path


@pytest.mark.parametrize(
    ("library", "rooms"),
    [
        ("matplotlib", {name for name in map(name_of, MODULES) if name.startswith("fedcog.experiments.report.")}),
        ("rich", {"fedcog.console"}),
        ("argparse", {f"fedcog.{one}" for one in ("cli", "grammar", "flags", "completion")}),
        (
            "safetensors",
            {f"fedcog.{one}" for one in ("experiments.record", "experiments.pretrained", "federation.messages")},
        ),
        ("triton", {name for name in map(name_of, MODULES) if name.startswith("fedcog.kernels.")}),
        ("flwr", {"fedcog.federation.flower"}),
        ("h5py", {"fedcog.data.hdf5"}),
        *((name, {f"fedcog.experiments.track.{name}"}) for name in ("tensorboard", "mlflow")),
        ("wandb", {"fedcog.experiments.track.wandb", "fedcog.experiments.track.offline"}),
        ("flwr_datasets", {"fedcog.data.borrowed"}),
        ("datasets", {"fedcog.data.borrowed"}),
        ("optuna", {"fedcog.experiments.search"}),
        ("pickle", set()),
    ],
)
def test_each_library_has_its_room(library: str, rooms: set[str]) -> None:
    users = {name_of(path) for path in MODULES if any(one.split(".")[0] == library for one in imports(path))}
    assert users <= rooms


def test_only_the_command_line_prints() -> None:
    for path in MODULES:
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        prints = [node for node in calls if isinstance(node.func, ast.Name) and node.func.id == "print"]
        assert not prints or name_of(path) in {"fedcog.cli", "fedcog.console"}, path


def test_no_algorithm_knows_an_optimiser_a_client_axis_or_a_loss_of_its_own() -> None:
    for path in (ROOT / "algorithms").glob("*.py"):
        text = path.read_text()
        for word in ("optimiser", "optimizer", "cross_entropy", "torch.rand", "manual_seed", "clients:", "isinstance"):
            assert word not in text, f"{path}: {word}"


def test_importing_fedcog_loads_neither_matplotlib_nor_scikit_learn() -> None:
    heavy: tuple[str, ...] = ("matplotlib", "sklearn", "rich", "PIL", "optuna", "datasets")
    heavy += () if torch.version.cuda or torch.version.hip else ("triton",)
    check = f"import sys, fedcog; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
