"""Tests that the code, commands, links and badges of the README are correct."""

import re
import tomllib
from pathlib import Path

import pytest
import torch

import fedcog
from fedcog.models.zoo import build
from tests.support.documents import blocks, commands, unknown_flags
from tests.support.paths import REPO

README = (REPO / "README.md").read_text()
PYTHON_BLOCKS = [block.text for block in blocks(README) if block.language == "python"]


@pytest.mark.slow
def test_python_of_the_readme_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _ = PYTHON_BLOCKS
    assert len([line for line in code.splitlines() if line.strip()]) <= 12
    smaller = (
        code.replace("seeds=[0, 1, 2]", "seeds=[0]")
        .replace("steps=50", "steps=2")
        .replace("rounds=12", "rounds=7")
    )
    assert smaller != code
    monkeypatch.chdir(tmp_path)
    exec(compile(smaller, "README.md", "exec"), {})
    output = capsys.readouterr().out
    assert "fedavg " in output and "fedavg+fedcog " in output
    assert (tmp_path / "runs/mine/report.html").exists()


@pytest.mark.slow
def test_two_fedcog_lines_run_in_a_plain_loop() -> None:
    models = {
        name: build("small", (1, 8, 8), 10, 0)
        for name in ("global_model", "previous_model", "model")
    }
    variables = {
        "fedcog": fedcog,
        "criterion": torch.nn.CrossEntropyLoss(),
        "x": torch.rand(4, 1, 8, 8),
        "y": torch.arange(4),
        "class_counts": [1] * 9 + [5],
        "input_shape": (1, 8, 8),
        "round": 1,
        "client": 0,
    }
    exec(compile(PYTHON_BLOCKS[1], "README.md", "exec"), variables | models)


def test_commands_of_the_readme_exist() -> None:
    assert {"run", "compare", "list", "watch"} <= set(commands(README))
    assert not unknown_flags(README)


def test_links_of_the_readme_exist() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", README)
    images = re.findall(r'src="([^"]+)"', README)
    for target in links + images:
        assert (REPO / target).exists(), target


def test_badges_match_the_project_metadata() -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    badges = dict(re.findall(r'<img src="(docs/badges/[^"]+)" alt="([^"]+)">', README))
    versions = [
        classifier.split(" :: ")[-1]
        for classifier in project["classifiers"]
        if "Python :: 3." in classifier
    ]
    assert badges == {
        "docs/badges/license.svg": f"license: {project['license']}",
        "docs/badges/python.svg": f"Python: {', '.join(versions)}",
    }
    for file, label in badges.items():
        assert f'aria-label="{label}"' in (REPO / file).read_text()
