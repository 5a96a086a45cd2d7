"""What is released: one version, a wheel and an sdist that hold what they must, a command that
runs.
"""

import email
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import fedcog
from fedcog.cli.main import main
from tests.support.paths import REPO

VERSION = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["version"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the wheel and the sdist, made by the tools here: nothing is fetched."""
    out = tmp_path_factory.mktemp("dist")
    words = ["build", "--no-isolation", "--sdist", "--wheel", "--outdir", str(out), str(REPO)]
    done = subprocess.run(
        [sys.executable, "-m", *words], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_the_version_is_said_once_and_told_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert fedcog.__version__ == VERSION
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"fedcog {VERSION}\n"
    log = (REPO / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## \[(\S+)\]", log, re.MULTILINE)
    assert next(name for name in headings if name != "Unreleased") == VERSION
    assert f"\nversion: {VERSION}\n" in (REPO / "CITATION.cff").read_text()


def test_twine_finds_no_fault(built: Path) -> None:
    files = [str(file) for file in built.iterdir()]
    assert len(files) == 2
    words = [sys.executable, "-m", "twine", "check", "--strict", *files]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.count("PASSED") == 2, done.stdout + done.stderr


def test_the_wheel_holds_the_package_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
        about = email.message_from_bytes(file.read(f"fedcog-{VERSION}.dist-info/METADATA"))
        entries = file.read(f"fedcog-{VERSION}.dist-info/entry_points.txt").decode()
    ours = {str(path.relative_to(REPO)) for path in (REPO / "fedcog").rglob("*") if path.is_file()}
    ours = {name for name in ours if "__pycache__" not in name}
    assert {
        "fedcog/py.typed",
        "fedcog/models/ops/kernels/programs.py",
        "fedcog/cli/schema.json",
    } <= ours
    inside = {name for name in names if not name.startswith(f"fedcog-{VERSION}.dist-info/")}
    assert inside == ours
    assert f"fedcog-{VERSION}.dist-info/licenses/LICENSE" in names
    assert about["Version"] == VERSION and about["Requires-Python"] == ">=3.11"
    assert {"flair", "flower", "onnx", "privacy"} <= set(about.get_all("Provides-Extra", []))
    assert "fedcog = fedcog.cli.main:main" in entries


def test_the_sdist_can_be_tested_and_holds_no_runs_or_results(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    for name in (
        "pyproject.toml",
        "README.md",
        "CHANGELOG.md",
        "LICENSE",
        "tests/conftest.py",
        "fedcog/py.typed",
    ):
        assert name in names, name
    for name in (
        "Makefile",
        "constraints.txt",
        "docs/decisions.md",
        "examples/demo.toml",
        "mkdocs.yml",
        "docs/round.svg",
    ):
        assert name in names, name
    assert not [
        name for name in names if name.startswith(("results", "runs", "data", ".ci", ".venv"))
    ]


def test_the_wheels_command_runs(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    words = [
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        str(tmp_path),
        str(wheel),
    ]
    subprocess.run([sys.executable, "-m", *words], check=True, timeout=120)
    around = os.environ | {"PYTHONPATH": str(tmp_path)}
    code = f"""import fedcog, runpy
assert fedcog.__file__.startswith({str(tmp_path)!r}), "it is this checkout's, not the wheel's"
runpy.run_path({str(tmp_path / "bin" / "fedcog")!r}, run_name="__main__")"""
    command = [sys.executable, "-c", code, "--version"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=around
    )
    assert (done.returncode, done.stdout) == (0, f"fedcog {VERSION}\n"), done.stderr
