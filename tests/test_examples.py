"""Every example runs as it stands."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedcog.experiments.config import read_experiment, read_toml

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_programs(path: Path, tmp_path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 60
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(path)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "last" in done.stdout or "keep the contract" in done.stdout


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.name)
def test_settings(path: Path) -> None:
    values = read_toml(path)
    algorithm = "fedcog" if "fedcog" in values else "fedavg"
    read_experiment(values | {"algorithm": algorithm})
