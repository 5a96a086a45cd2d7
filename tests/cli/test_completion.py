"""Tests of shell completion, run in bash and, where installed, fish and zsh."""

import shutil
import subprocess
from pathlib import Path

import pytest

from fedcog.algorithms import ALGORITHMS
from fedcog.cli.main import main
from fedcog.core.settings import settings
from fedcog.runs.config.experiment import Experiment

CASES = {
    "fedcog exp": "export",
    "fedcog data ": "get list path",
    "fedcog data get cifar": "cifar10 cifar100",
    "fedcog data get digits --d": "--data-dir",
    "fedcog deploy in": "init",
    "fedcog run --resu": "--resume",
    "fedcog run --partition ": " ".join(sorted(settings(Experiment)["partition"].choices)),
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
    "fedcog au": "audit",
    "fedcog audit run --labels ": "inferred optimized",
    "fedcog list algorithms --mark": "--markdown",
}
BASH = """source {script}
COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}}-1))
_fedcog; printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture
def script(
    request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Path:
    """The completion script of the shell in `request.param`, as a file."""
    assert main(["completion", request.param]) == 0
    path = tmp_path / "script"
    path.write_text(capsys.readouterr().out)
    return path


@pytest.mark.parametrize("script", ["bash"], indirect=True)
def test_bash_completes_words(script: Path, tmp_path: Path) -> None:
    for line, expected in CASES.items():
        words = " ".join(f"'{word}'" for word in line.split(" "))
        process = subprocess.run(
            ["bash", "-u", "-c", BASH.format(script=script, words=words)],
            capture_output=True,
            text=True,
            timeout=60,
            cwd=tmp_path,
        )
        assert process.stderr == "" and sorted(process.stdout.split()) == expected.split(), line


@pytest.mark.parametrize("script", ["bash"], indirect=True)
def test_bash_offers_files_where_a_path_is_expected(script: Path) -> None:
    registration = subprocess.run(
        ["bash", "-c", f"source {script}; complete -p fedcog"], capture_output=True, text=True
    )
    assert registration.stdout == "complete -o default -F _fedcog fedcog\n"
    for line in ("fedcog run ''", "fedcog run --out ''", "fedcog data get --data-dir ''"):
        code = BASH.format(script=script, words=line)
        process = subprocess.run(["bash", "-c", code], capture_output=True, text=True, timeout=60)
        # No words of ours, so bash falls back to its default: files.
        assert process.stdout.strip() == "" and process.stderr == ""


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
@pytest.mark.parametrize("script", ["fish"], indirect=True)
def test_fish_completes_words(script: Path, tmp_path: Path) -> None:
    for line, expected in CASES.items():
        code = f"source {script}; complete -C '{line}'"
        process = subprocess.run(
            ["fish", "--no-config", "-c", code], capture_output=True, text=True, cwd=tmp_path
        )
        assert set(expected.split()) <= set(process.stdout.split()), line


@pytest.mark.parametrize("script", ["zsh"], indirect=True)
def test_zsh_loads_the_bash_script(script: Path) -> None:
    head, _, rest = script.read_text().partition("_fedcog_words() {")
    assert "bashcompinit" in head and "compdef" in head
    if shutil.which("zsh"):
        subprocess.run(["zsh", "-n", str(script)], check=True, timeout=60)
    assert rest


def test_unknown_shell_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "tcsh"]) == 2
    assert "choose from 'bash', 'zsh', 'fish'" in capsys.readouterr().err
