"""Every example runs as it stands."""

import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import nbclient
import nbformat
import pytest
from PIL import Image

from fedcog.core.toml import read_toml
from fedcog.runs.config.experiment import read_experiment
from fedcog.studies.tuning import search_space
from tests.support import flower_engine
from tests.support.example_output import EXPECTED_OUTPUT
from tests.support.paths import REPO
from tests.support.superlink import free_ports, kill_flower_processes

EXAMPLES = REPO / "examples"


def test_every_program_is_tried() -> None:
    programs = {path.stem for path in EXAMPLES.glob("*.py")}
    assert programs == {*EXPECTED_OUTPUT, "deploy"}
    assert all(len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 80 for name in programs)


@pytest.mark.parametrize("name", EXPECTED_OUTPUT)
def test_programs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, which has torch at hand already: a dozen new ones would spend most of their
    time loading it.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys, "argv", [name, *(["--rounds", "6"] if name == "unequal_devices" else [])]
    )
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert re.search(EXPECTED_OUTPUT[name], said), said
    if name == "generated_images":
        with Image.open(tmp_path / "generated.png") as image:
            assert image.width > 200 and len(image.getcolors() or ()) > 10


def test_deployment_on_this_machine(tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    flower_engine.skip_if_python_path_has_space()
    port = free_ports(3)
    command = [
        sys.executable,
        str(EXAMPLES / "deploy.py"),
        str(port),
        "--rounds",
        "1",
        "--start-round",
        "0",
    ]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        said, _ = process.communicate(timeout=300)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # it ends what it has started
        said, _ = process.communicate(timeout=60)
    finally:
        left = kill_flower_processes(port, 3)
    assert process.returncode == 0, said
    assert re.search(r"last (\d+\.\d)% of the server's test set, after 1 rounds", said), said
    assert not left, "the example ends all that it has started"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.name)
def test_settings(path: Path) -> None:
    values = read_toml(path)
    if path.name == "space.toml":
        assert list(search_space.read_space(values)) == ["lr", "fedprox.mu", "fedcog.lambda_dis"]
        return
    algorithm = "fedcog" if "fedcog" in values else "fedavg"
    read_experiment(values | {"algorithm": algorithm})


def test_an_app_of_flowers_own_shape(tmp_path: Path) -> None:
    """FedCOG is about ten lines in it, the server knows of none, and Flower's simulation engine
    runs it.
    """
    flower_engine.skip_without_ray()
    folder = EXAMPLES / "existing-flower-client"
    added = {path.name: path.read_text().count("# FedCOG") for path in folder.glob("*.py")}
    assert added == {"task.py": 3, "client_app.py": 7, "server_app.py": 0, "simulate.py": 0}
    assert all(len(path.read_text().splitlines()) <= 80 for path in folder.glob("*.py"))
    environment = os.environ | {
        "FLWR_TELEMETRY_ENABLED": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "simulate.py"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    told = {
        name: float(share[:-1])
        for name, share in re.findall(r"^(round \d+|last): (\S+)", done.stdout, re.M)
    }
    assert len(told) == 14
    assert told["last"] > told["round 8"], "FedCOG begins after round 8"


def test_the_notebook_runs_and_is_kept_with_what_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "jupyter"))
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")])
    )
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    file = EXAMPLES / "tour.ipynb"
    text = file.read_text()
    kept = nbformat.read(file, 4)
    assert len(text) < 200_000 and not re.search(r"(/tmp|/home|/root|/Users|/var|/work)/", text)
    nbformat.validate(kept)

    again = nbformat.read(file, 4)
    client = nbclient.NotebookClient(
        again, timeout=120, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.create_kernel_manager()
    client.km.transport = "ipc"  # no port, on no address
    with tempfile.TemporaryDirectory() as short:  # a socket's name may not be long
        client.km.connection_file = f"{short}/kernel.json"
        client.execute()  # a cell that fails is an error here
    for cell, now in zip(kept.cells, again.cells, strict=True):
        if cell.cell_type == "code":
            forms = [
                [sorted(one.get("data", ["text"])) for one in part.outputs] for part in (cell, now)
            ]
            assert forms[0] == forms[1], cell.source
            assert cell.execution_count
    shown = [
        one
        for cell in kept.cells
        for one in cell.get("outputs", ())
        if "image/png" in one.get("data", ())
    ]
    assert len(shown) == 3
