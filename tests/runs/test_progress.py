"""Tests of the progress display of runs that Python starts: terminals, pipes and notebooks."""

import os
import pty
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

import fedcog
from fedcog import Experiment
from fedcog.runs import progress
from fedcog.runs.progress import RunProgress, choose_display
from tests.support.paths import REPO

pytestmark = pytest.mark.processes

SETTINGS = "rounds=2, local_steps=1, clients=2, partition='iid', threads=1, mapping='vmap'"
RUN = f"fedcog.run(fedcog.Experiment({SETTINGS}), 'run', report=False{{}})"
PREAMBLE = "import fedcog\n"
ROUND = re.compile(r"fedcog: fedavg seed 0, round 2 of 2: loss .* s left\)")


def run_on_terminal(program: str, folder: Path) -> tuple[str, str]:
    """Run a program; return its stdout, which is a pipe, and its stderr, which is a terminal."""
    environment = os.environ | {"PYTHONPATH": str(REPO), "TERM": "xterm", "COLUMNS": "100"}
    command = [sys.executable, "-c", program]
    main_end, program_end = pty.openpty()
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=program_end, text=True
    ) as process:
        os.close(program_end)
        shown = b""
        while True:
            try:
                content = os.read(main_end, 65536)
            except OSError:  # the program has ended
                break
            if not content:
                break
            shown += content
        assert process.stdout is not None
        stdout = process.stdout.read()
    os.close(main_end)
    assert process.returncode == 0, shown.decode()
    return stdout, shown.decode()


def test_terminal_shows_a_bar_unless_progress_is_false(tmp_path: Path) -> None:
    """Prints of the user's program reach a redirected stdout, not the bar's terminal."""
    callback = ", callbacks=lambda _, line: print('round', line['round'])"
    silent = RUN.replace("'run'", "'silent'").replace("rounds=2", "rounds=1")
    program = f"{PREAMBLE}{silent.format(', progress=False')}; {RUN.format(callback)}"
    stdout, stderr = run_on_terminal(program, tmp_path)
    assert stdout == "round 1\nround 2\n"
    assert "round 2/2" in stderr and "accuracy" in stderr and "fedavg seed 0" in stderr
    assert "round 1/1" not in stderr


def test_pipe_shows_lines_if_progress_is_true(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for progress_option in (None, False, True):
        experiment = Experiment(rounds=2, local_steps=1, clients=2, partition="iid", threads=1)
        options: Any = {} if progress_option is None else {"progress": progress_option}
        fedcog.run(experiment, tmp_path / str(progress_option), report=False, **options)
        stdout, stderr = capfd.readouterr()
        assert stdout == ""
        if progress_option:
            assert stderr.count("\n") == 2 and ROUND.search(stderr)
        else:
            assert stderr == ""


def test_compare_and_sweep_count_all_rounds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    totals: list[tuple[int, int]] = []
    start = RunProgress.__init__

    def record(self: RunProgress, num_rounds: int, num_done: int, *args: Any, **more: Any) -> None:
        totals.append((num_rounds, num_done))
        start(self, num_rounds, num_done, *args, **more)

    monkeypatch.setattr(RunProgress, "__init__", record)
    experiment = Experiment(rounds=2, local_steps=1, clients=2, partition="iid", threads=1)
    fedcog.compare([experiment], [0, 1], tmp_path / "c", progress=True)
    assert totals == [(4, 0)] and capsys.readouterr().err.count("round 2 of 2") == 2
    fedcog.compare([experiment], [0, 1], tmp_path / "c", progress=True)
    assert len(totals) == 1 and not capsys.readouterr().err, "nothing is left to run"
    space = {"lr": [0.01, 0.1]}
    options: dict[str, Any] = {"trials": 2, "seeds": [0], "progress": True}
    fedcog.sweep([experiment], space, tmp_path / "s", **options)
    error = capsys.readouterr().err
    assert totals[1:] == [(2 * 2 + 2, 0)] and "fedavg lr 0.1 seed 100, round 2 of 2" in error
    fedcog.run(experiment, tmp_path / "r", resume=True, progress=True)
    fedcog.run(
        Experiment(**experiment.to_dict() | {"algorithm": fedcog.FedAvg(), "rounds": 3}),
        tmp_path / "r",
        resume=True,
        progress=True,
    )
    assert totals[2:] == [(2, 0), (3, 2)]


def test_command_shows_progress_once(tmp_path: Path) -> None:
    flags = ["--rounds=2", "--local-steps=1", "--clients=2", "--partition=iid", "--threads=1"]
    program = f"""
from fedcog.cli.main import main
from fedcog.runs.progress import RunProgress

displays = []
start = RunProgress.__enter__
RunProgress.__enter__ = lambda self: displays.append(self._display) or start(self)
main(["run", "--out=bar", *{flags}])
main(["run", "--out=lines", "--plain", *{flags}])
print(displays)
"""
    stdout, stderr = run_on_terminal(program, tmp_path)
    assert stdout.endswith("\n['bar', 'lines']\n")
    assert "round 2/2" in stderr and stderr.count("round 2 of 2") == 1


@pytest.mark.parametrize(
    ("notebook", "terminal", "choice", "display"),
    [
        (False, False, None, "none"),
        (False, False, True, "lines"),
        (False, True, None, "bar"),
        (False, True, False, "none"),
        (True, False, None, "notebook"),
        (True, False, False, "none"),
    ],
)
def test_display_is_chosen_by_where_the_program_runs(
    monkeypatch: pytest.MonkeyPatch,
    notebook: bool,
    terminal: bool,
    choice: bool | None,
    display: str,
) -> None:
    monkeypatch.setattr(progress, "_is_notebook", lambda: notebook)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    assert choose_display(choice) == display


def test_notebook_shows_one_bar_below_the_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "jupyter"))
    monkeypatch.setenv("PYTHONPATH", str(REPO))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    sources = [PREAMBLE + RUN.format(""), RUN.format(", resume=True"), "print('next')"]
    cells = [nbformat.v4.new_code_cell(source + ";") for source in sources]
    notebook = nbformat.v4.new_notebook(cells=cells)
    client = nbclient.NotebookClient(
        notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.create_kernel_manager()
    client.km.transport = "ipc"  # opens no network port
    with tempfile.TemporaryDirectory() as folder:  # tmp_path is too long for the name of a socket
        client.km.connection_file = f"{folder}/kernel.json"
        client.execute()
    outputs = [cell.outputs for cell in notebook.cells]
    (shown,) = outputs[0]
    assert shown["output_type"] == "display_data"
    assert re.fullmatch(
        r"fedavg seed 0: round 2/2 accuracy .*% \(0 s left\)", shown["data"]["text/plain"]
    )
    assert '<progress value="2" max="2">' in shown["data"]["text/html"]
    assert outputs[1] == [], "the run is finished, so no round is shown"
