"""What the README shows works as shown."""

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
BLOCKS = [block.text for block in blocks(README) if block.language == "python"]


def test_the_python_of_the_readme_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _ = BLOCKS
    assert len([line for line in code.splitlines() if line.strip()]) <= 12
    smaller = (
        code.replace("seeds=[0, 1, 2]", "seeds=[0]")
        .replace("steps=50", "steps=2")
        .replace("rounds=12", "rounds=7")
    )
    assert smaller != code
    monkeypatch.chdir(tmp_path)
    exec(compile(smaller, "README.md", "exec"), {})
    said = capsys.readouterr().out
    assert "fedavg " in said and "fedavg+fedcog " in said
    assert (tmp_path / "runs/mine/report.html").exists()


def test_the_two_lines_of_fedcog_run_in_any_loop() -> None:
    models = {
        name: build("small", (1, 8, 8), 10, 0)
        for name in ("global_model", "previous_model", "model")
    }
    here = {
        "x": torch.rand(4, 1, 8, 8),
        "y": torch.arange(4),
        "counts": [1] * 9 + [5],
        "input_shape": (1, 8, 8),
    }
    here |= {"fedcog": fedcog, "criterion": torch.nn.CrossEntropyLoss(), "round": 1, "client": 0}
    exec(compile(BLOCKS[1], "README.md", "exec"), here | models)


def test_the_commands_of_the_readme_exist() -> None:
    assert {"run", "compare", "list", "watch"} <= set(commands(README))
    assert not unknown_flags(README)


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", README) + re.findall(
        r'src="([^"]+)"', README
    ):
        assert (REPO / target).exists(), target


def test_badges_say_what_is_true() -> None:
    about = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    badges = dict(re.findall(r'<img src="(docs/badges/[^"]+)" alt="([^"]+)">', README))
    versions = [one.split(" :: ")[-1] for one in about["classifiers"] if "Python :: 3." in one]
    assert badges == {
        "docs/badges/licence.svg": f"licence: {about['license']}",
        "docs/badges/python.svg": f"Python: {', '.join(versions)}",
    }
    for file, words in badges.items():
        assert f'aria-label="{words}"' in (REPO / file).read_text()
