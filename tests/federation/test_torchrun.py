"""Tests of torchrun: several processes share a round's clients, on the CPU over gloo."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from fedcog.cli.main import main
from fedcog.core import tree
from fedcog.runs.records.run_directory import RunDirectory
from tests.support.paths import REPO

pytestmark = pytest.mark.processes

SMALL = ["--clients", "5", "--local-steps", "2", "--batch-size", "8", "--mapping", "loop"]
SMALL += ["--device", "cpu", "--workers", "1", "--threads", "1"]
FEDCOG = ["--algorithm", "scaffold+fedcog", "--start-round", "1"]
FEDCOG += ["--fedcog.count", "6", "--fedcog.steps", "2"]


def start_run(*flags: str, processes: int = 2) -> subprocess.Popen[str]:
    return start_torchrun("-m", "fedcog", "run", *flags, "--plain", processes=processes)


def start_torchrun(*arguments: str, processes: int = 2) -> subprocess.Popen[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.Popen(
        [*torchrun, f"--nproc-per-node={processes}", *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)},
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def output_of(process: subprocess.Popen[str], seconds: float = 120) -> str:
    """Wait for a process group, and kill it when the time is over."""
    try:
        return process.communicate(timeout=seconds)[0]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def states(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    checkpoint = RunDirectory(path).load()
    assert checkpoint is not None
    return tree.flatten(checkpoint.server), checkpoint.clients


def assert_same_run(path: Path, expected_path: Path) -> None:
    for state, expected in zip(states(path), states(expected_path), strict=True):
        assert state.keys() == expected.keys()
        for name, value in state.items():
            torch.testing.assert_close(value, expected[name], atol=1e-5, rtol=0)
    lines = RunDirectory(path).lines()
    expected_lines = RunDirectory(expected_path).lines()
    for line, expected_line in zip(lines, expected_lines, strict=True):
        assert line["accuracy"] == expected_line["accuracy"]
        assert line["loss"] == pytest.approx(expected_line["loss"], abs=1e-5)
        client_ids = [local["client"] for local in line["local"]]
        assert client_ids == [local["client"] for local in expected_line["local"]]
        for local, expected_local in zip(line["local"], expected_line["local"], strict=True):
            assert local == pytest.approx(expected_local, abs=1e-5)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("processes", "flags"),
    [
        (2, FEDCOG),
        # Two clients for three processes, and payloads that are not summed.
        (3, ["--algorithm", "fedgen", "--participation", "0.4"]),
        (2, ["--algorithm", "feddisco"]),  # two sums in a round
    ],
)
def test_several_processes_match_one_process(
    processes: int, flags: list[str], tmp_path: Path
) -> None:
    flags = [*SMALL, "--rounds", "3", *flags]
    run = start_run(*flags, "--out", str(tmp_path / "many"), processes=processes)
    output = output_of(run)
    assert main(["run", *flags, "--out", str(tmp_path / "one"), "--quiet"]) == 0
    assert_same_run(tmp_path / "many", tmp_path / "one")
    assert output.count("round 3 of 3") == 1, output  # only rank 0 prints


@pytest.mark.processes
def test_killed_process_ends_the_run_which_then_resumes(tmp_path: Path) -> None:
    flags = [*SMALL, *FEDCOG]
    run = start_run(*flags, "--rounds", "2000", "--out", str(tmp_path / "run"))
    try:
        end = time.monotonic() + 60
        while time.monotonic() < end and len(RunDirectory(tmp_path / "run").lines()) < 3:
            time.sleep(0.2)
        children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
        follower = next(pid for pid in children if "RANK=1" in _environment(pid))
        os.kill(int(follower), signal.SIGKILL)
    finally:
        output = output_of(run)
    assert run.returncode != 0
    checkpoint = RunDirectory(tmp_path / "run").load()
    assert checkpoint is not None and 2 <= checkpoint.round < 2000, output
    rounds = ["--rounds", str(checkpoint.round + 2), "--quiet"]
    assert main(["run", "--resume", str(tmp_path / "run"), *rounds]) == 0
    assert main(["run", *flags, *rounds, "--out", str(tmp_path / "uninterrupted")]) == 0
    assert_same_run(tmp_path / "run", tmp_path / "uninterrupted")


def _environment(pid: str) -> list[str]:
    return Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")


@pytest.mark.processes
def test_script_may_run_several_experiments(tmp_path: Path) -> None:
    """Two runs with rounds that are not evaluated, then one that diverges."""
    script = tmp_path / "twice.py"
    script.write_text(
        "import sys, fedcog\n"
        "from fedcog.runs.config.composition import make_algorithm\n"
        "from fedcog.runs.config.experiment import Experiment\n"
        "for name in ('fedavg', 'scaffold'):\n"
        "    experiment = Experiment(algorithm=make_algorithm(name), clients=3, rounds=2,\n"
        "        local_steps=2, batch_size=8, evaluate_every=2,\n"
        "        mapping='loop', workers=1, device='cpu')\n"
        "    run = fedcog.run(experiment, f'{sys.argv[1]}/{name}', report=False)\n"
        "    sys.stdout.write(f'ended {name} {len(run.lines)}\\n')\n"
        "from fedcog.cli.main import main\n"
        "main(['run', *sys.argv[2:], '--out', f'{sys.argv[1]}/wild'])\n"
    )
    diverging = [*SMALL, "--rounds", "2", "--lr", "1e10", "--plain"]
    output = output_of(start_torchrun(str(script), str(tmp_path), *diverging))
    assert output.count("ended fedavg 2") == 2 and output.count("ended scaffold 2") == 2, output
    assert output.count("diverged in round") == 1, output


def test_flower_under_torchrun_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert main(["run", "--backend", "flower", "--rounds", "1"]) == 2


def test_compare_under_torchrun_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert main(["compare", "--algorithms", "fedavg"]) == 2
