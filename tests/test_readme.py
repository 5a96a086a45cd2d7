"""What the README shows works as shown."""

import re
from pathlib import Path

import pytest
import torch

import fedcog
from fedcog.models import build

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_python_of_the_readme_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _ = BLOCKS
    assert len([line for line in code.splitlines() if line.strip()]) <= 12
    smaller = (
        code.replace("seeds=[0, 1, 2]", "seeds=[0]").replace("steps=50", "steps=2").replace("rounds=12", "rounds=7")
    )
    assert smaller != code
    monkeypatch.chdir(tmp_path)
    exec(compile(smaller, "README.md", "exec"), {})
    said = capsys.readouterr().out
    assert "fedavg " in said and "fedavg+fedcog " in said
    assert (tmp_path / "runs/mine/report.html").exists()


def test_the_two_lines_of_fedcog_run_in_any_loop() -> None:
    models = {name: build("small", (1, 8, 8), 10, 0) for name in ("global_model", "previous_model", "model")}
    here = {"x": torch.rand(4, 1, 8, 8), "y": torch.arange(4), "counts": [1] * 9 + [5], "input_shape": (1, 8, 8)}
    here |= {"fedcog": fedcog, "criterion": torch.nn.CrossEntropyLoss(), "round": 1, "client": 0}
    exec(compile(BLOCKS[1], "README.md", "exec"), here | models)


def test_the_commands_of_the_readme_exist() -> None:
    from fedcog.algorithms import ALGORITHMS
    from fedcog.cli import _parser

    known = {flag for parser in _parsers(_parser(ALGORITHMS)) for flag in parser._option_string_actions}
    for command in re.findall(r"^fedcog .*(?:\\\n.*)*", README, re.MULTILINE):
        for flag in re.findall(r"(?<=\s)--[a-z.-]+", command):
            assert flag in known, f"{flag} in: {command}"


def _parsers(parser):  # type: ignore[no-untyped-def]
    yield parser
    for action in parser._actions:
        if isinstance(getattr(action, "choices", None), dict):
            for inner in action.choices.values():
                yield from _parsers(inner)


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", README) + re.findall(r'src="([^"]+)"', README):
        assert (ROOT / target).exists(), target
