"""Tests that every program, settings file and notebook in `examples/` runs."""

import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from fedcog.core.toml import read_toml
from fedcog.runs.config.experiment import read_experiment
from fedcog.studies.tuning import search_space
from tests.support import flower_engine
from tests.support.example_output import EXPECTED_OUTPUT
from tests.support.paths import REPO
from tests.support.superlink import free_ports, kill_flower_processes

pytestmark = pytest.mark.processes

EXAMPLES = REPO / "examples"


def test_every_program_has_an_expected_output() -> None:
    programs = {path.stem for path in EXAMPLES.glob("*.py")}
    assert programs == {*EXPECTED_OUTPUT, "deploy"}
    assert all(len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 80 for name in programs)


@pytest.mark.parametrize("name", EXPECTED_OUTPUT)
def test_program_prints_the_expected_output(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run the program in this process: a new one would spend most of its time importing torch."""
    arguments = ["--rounds", "6"] if name == "unequal_devices" else []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    output = capsys.readouterr().out
    assert re.search(EXPECTED_OUTPUT[name], output), output
    if name == "generated_images":
        with Image.open(tmp_path / "generated.png") as image:
            assert image.width > 200 and len(image.getcolors() or ()) > 10


def test_deployment_example_runs_and_stops_its_processes(tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    flower_engine.skip_if_python_path_has_space()
    port = free_ports(3)
    arguments = [str(port), "--rounds", "1", "--start-round", "0"]
    process = subprocess.Popen(
        [sys.executable, str(EXAMPLES / "deploy.py"), *arguments],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=300)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # the example then stops its processes
        output, _ = process.communicate(timeout=60)
    finally:
        leftover_pids = kill_flower_processes(port, 3)
    assert process.returncode == 0, output
    assert re.search(r"last (\d+\.\d)% of the server's test set, after 1 rounds", output), output
    assert not leftover_pids


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.name)
def test_settings_file_is_valid(path: Path) -> None:
    values = read_toml(path)
    if path.name == "space.toml":
        assert list(search_space.read_space(values)) == ["lr", "fedprox.mu", "fedcog.lambda_dis"]
        return
    algorithm = "fedcog" if "fedcog" in values else "fedavg"
    read_experiment(values | {"algorithm": algorithm})


def test_existing_flower_client_runs_with_fedcog(tmp_path: Path) -> None:
    """FedCOG adds about ten lines to the client, and none to the server."""
    flower_engine.skip_without_ray()
    folder = EXAMPLES / "existing-flower-client"
    added_lines = {path.name: path.read_text().count("# FedCOG") for path in folder.glob("*.py")}
    assert added_lines == {"task.py": 3, "client_app.py": 7, "server_app.py": 0, "simulate.py": 0}
    assert all(len(path.read_text().splitlines()) <= 80 for path in folder.glob("*.py"))
    environment = os.environ | {
        "FLWR_TELEMETRY_ENABLED": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
    }
    simulation = subprocess.run(
        [sys.executable, "simulate.py"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert simulation.returncode == 0, simulation.stderr
    accuracies = {
        name: float(percentage[:-1])
        for name, percentage in re.findall(r"^(round \d+|last): (\S+)", simulation.stdout, re.M)
    }
    assert len(accuracies) == 14
    assert accuracies["last"] > accuracies["round 8"], "FedCOG begins after round 8"


def test_notebook_runs_and_contains_its_outputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "jupyter"))
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")])
    )
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    file = EXAMPLES / "tour.ipynb"
    text = file.read_text()
    stored = nbformat.read(file, 4)
    assert len(text) < 200_000 and not re.search(r"(/tmp|/home|/root|/Users|/var|/work)/", text)
    nbformat.validate(stored)

    executed = nbformat.read(file, 4)
    client = nbclient.NotebookClient(
        executed, timeout=120, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.create_kernel_manager()
    client.km.transport = "ipc"  # opens no network port
    with tempfile.TemporaryDirectory() as folder:  # tmp_path is too long for the name of a socket
        client.km.connection_file = f"{folder}/kernel.json"
        client.execute()  # raises if a cell fails
    for stored_cell, executed_cell in zip(stored.cells, executed.cells, strict=True):
        if stored_cell.cell_type == "code":
            assert output_types(stored_cell) == output_types(executed_cell), stored_cell.source
            assert stored_cell.execution_count
    images = [
        output
        for cell in stored.cells
        for output in cell.get("outputs", ())
        if "image/png" in output.get("data", ())
    ]
    assert len(images) == 3


def output_types(cell: Any) -> list[list[str]]:
    """Return the MIME types of each output of a notebook's cell."""
    return [sorted(output.get("data", ["text"])) for output in cell.outputs]
