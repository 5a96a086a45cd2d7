"""Every example runs as it stands."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fedcog.experiments import space
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
    if path.name == "space.toml":
        assert list(space.read(values)) == ["lr", "fedprox.mu", "fedcog.lambda_dis"]
        return
    algorithm = "fedcog" if "fedcog" in values else "fedavg"
    read_experiment(values | {"algorithm": algorithm})


def test_an_app_of_flowers_own_shape(tmp_path: Path) -> None:
    """FedCOG is about ten lines in it, the server knows of none, and Flower's simulation engine runs it."""
    pytest.importorskip("ray")
    folder = EXAMPLES / "existing-flower-client"
    added = {path.name: path.read_text().count("# FedCOG") for path in folder.glob("*.py")}
    assert added == {"task.py": 3, "client_app.py": 7, "server_app.py": 0, "simulate.py": 0}
    assert all(len(path.read_text().splitlines()) <= 60 for path in folder.glob("*.py"))
    environment = os.environ | {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "simulate.py"], cwd=folder, env=environment, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr
    told = {name: float(share[:-1]) for name, share in re.findall(r"^(round \d+|last): (\S+)", done.stdout, re.M)}
    assert len(told) == 14
    assert told["last"] > told["round 8"], "FedCOG begins after round 8"
