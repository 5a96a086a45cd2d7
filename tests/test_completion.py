"""Completion, as shells do it."""

import shutil
import subprocess
from pathlib import Path
from typing import get_args

import pytest

from fedcog.algorithms import ALGORITHMS
from fedcog.cli import main
from fedcog.experiments.config import Partition

CASES = {
    "fedcog exp": "export",
    "fedcog data ": "get list path",
    "fedcog data get cifar": "cifar10 cifar100",
    "fedcog data get digits --d": "--data-dir",
    "fedcog deploy in": "init",
    "fedcog run --resu": "--resume",
    "fedcog run --partition ": " ".join(sorted(get_args(Partition))),
    "fedcog run mine.toml --rounds 3 --algorithm ditt": "ditto",
    "fedcog compare --algorithms ": " ".join(sorted(ALGORITHMS)),
    "fedcog compare --algorithms fedavg fedprox ditt": "ditto",
    "fedcog compare --algorithms fedavg --dataset mos": "mosaics",
    "fedcog run --shift = ro": "rotation",
    "fedcog sweep --search ": "grid optuna random",
    "fedcog sweep --trial-": "--trial-seeds",
    "fedcog run --fedcog.lambda-d": "--fedcog.lambda-dis",
    "fedcog run --dataset mos": "mosaics",
    "fedcog run --track ": "mlflow tensorboard wandb",
    "fedcog compare --track w": "wandb",
    "fedcog export run --format o": "onnx",
    "fedcog list algorithms --mark": "--markdown",
}
BASH = """source {script}
COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}}-1))
_fedcog; printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture
def script(request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """The script of the shell asked for."""
    assert main(["completion", request.param]) == 0
    path = tmp_path / "script"
    path.write_text(capsys.readouterr().out)
    return path


@pytest.mark.parametrize("script", ["bash"], indirect=True)
def test_bash(script: Path, tmp_path: Path) -> None:
    for line, wanted in CASES.items():
        words = " ".join(f"'{word}'" for word in line.split(" "))
        done = subprocess.run(
            ["bash", "-u", "-c", BASH.format(script=script, words=words)],
            capture_output=True,
            text=True,
            timeout=60,
            cwd=tmp_path,
        )
        assert done.stderr == "" and sorted(done.stdout.split()) == wanted.split(), line


@pytest.mark.parametrize("script", ["bash"], indirect=True)
def test_where_a_file_may_stand_bash_offers_files(script: Path) -> None:
    told = subprocess.run(["bash", "-c", f"source {script}; complete -p fedcog"], capture_output=True, text=True)
    assert told.stdout == "complete -o default -F _fedcog fedcog\n"
    for line in ("fedcog run ''", "fedcog run --out ''", "fedcog data get --data-dir ''"):
        code = BASH.format(script=script, words=line)
        done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, timeout=60)
        assert done.stdout.strip() == "" and done.stderr == "", "nothing of ours, so the default: files"


@pytest.mark.skipif(shutil.which("fish") is None, reason="there is no fish")
@pytest.mark.parametrize("script", ["fish"], indirect=True)
def test_fish(script: Path, tmp_path: Path) -> None:
    for line, wanted in CASES.items():
        code = f"source {script}; complete -C '{line}'"
        done = subprocess.run(["fish", "--no-config", "-c", code], capture_output=True, text=True, cwd=tmp_path)
        assert set(wanted.split()) <= set(done.stdout.split()), line


@pytest.mark.parametrize("script", ["zsh"], indirect=True)
def test_zsh_reads_what_bash_reads(script: Path) -> None:
    head, _, rest = script.read_text().partition("_fedcog_words() {")
    assert "bashcompinit" in head and "compdef" in head
    if shutil.which("zsh"):
        subprocess.run(["zsh", "-n", str(script)], check=True, timeout=60)
    assert rest


def test_an_unknown_shell(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "tcsh"]) == 2
    assert "choose from 'bash', 'zsh', 'fish'" in capsys.readouterr().err
