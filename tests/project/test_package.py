"""Tests of a release: one version, the contents of wheel and sdist, a command that runs."""

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

pytestmark = pytest.mark.compiler

VERSION = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["version"]


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel and the sdist with the installed tools, without downloads."""
    out = tmp_path_factory.mktemp("dist")
    arguments = ["--no-isolation", "--sdist", "--wheel", "--outdir", str(out), str(REPO)]
    command = [sys.executable, "-m", "build", *arguments]
    build = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert build.returncode == 0, build.stdout + build.stderr
    return out


def test_version_is_the_same_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert fedcog.__version__ == VERSION
    with pytest.raises(SystemExit) as exit_info:
        main(["--version"])
    assert exit_info.value.code == 0
    assert capsys.readouterr().out == f"fedcog {VERSION}\n"
    changelog = (REPO / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## \[(\S+)\]", changelog, re.MULTILINE)
    assert next(name for name in headings if name != "Unreleased") == VERSION
    assert f"\nversion: {VERSION}\n" in (REPO / "CITATION.cff").read_text()


def test_twine_accepts_wheel_and_sdist(dist: Path) -> None:
    files = [str(file) for file in dist.iterdir()]
    assert len(files) == 2
    command = [sys.executable, "-m", "twine", "check", "--strict", *files]
    check = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert check.returncode == 0 and check.stdout.count("PASSED") == 2, check.stdout + check.stderr


def test_wheel_contains_exactly_the_package(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
        metadata = email.message_from_bytes(file.read(f"fedcog-{VERSION}.dist-info/METADATA"))
        entry_points = file.read(f"fedcog-{VERSION}.dist-info/entry_points.txt").decode()
    sources = {
        str(path.relative_to(REPO))
        for path in (REPO / "fedcog").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {
        "fedcog/py.typed",
        "fedcog/models/ops/kernels/programs.py",
        "fedcog/cli/schema.json",
    } <= sources
    installed = {name for name in names if not name.startswith(f"fedcog-{VERSION}.dist-info/")}
    assert installed == sources
    assert f"fedcog-{VERSION}.dist-info/licenses/LICENSE" in names
    assert metadata["Version"] == VERSION and metadata["Requires-Python"] == ">=3.11"
    assert {"flair", "flower", "onnx", "privacy"} <= set(metadata.get_all("Provides-Extra", []))
    assert "fedcog = fedcog.cli.main:main" in entry_points


def test_sdist_contains_tests_and_docs_but_no_results(dist: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
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


def test_command_of_the_installed_wheel_runs(dist: Path, tmp_path: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, "--target", str(tmp_path), str(wheel)], check=True, timeout=120)
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    code = f"""import fedcog, runpy
assert fedcog.__file__.startswith({str(tmp_path)!r}), "fedcog of this checkout, not of the wheel"
runpy.run_path({str(tmp_path / "bin" / "fedcog")!r}, run_name="__main__")"""
    command = [sys.executable, "-c", code, "--version"]
    version = subprocess.run(
        command, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=environment
    )
    assert (version.returncode, version.stdout) == (0, f"fedcog {VERSION}\n"), version.stderr
