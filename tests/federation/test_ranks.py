"""Several processes that share a round's clients: torchrun for real, on the CPU over gloo."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from fedcog import tree
from fedcog.cli import main
from fedcog.experiments.record import RunDirectory

SMALL = ["--clients", "5", "--local-steps", "2", "--batch-size", "8", "--mapping", "loop", "--device", "cpu"]
SMALL += ["--workers", "1", "--threads", "1"]
COG = ["--algorithm", "scaffold+fedcog", "--start-round", "1", "--fedcog.count", "6", "--fedcog.steps", "2"]


def torchrun(*words: str, processes: int = 2) -> subprocess.Popen[str]:
    return _torchrun("-m", "fedcog", "run", *words, "--plain", processes=processes)


def _torchrun(*words: str, processes: int = 2) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", *words]
    quiet = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=os.environ | quiet, start_new_session=True, **pipes)  # type: ignore[call-overload, no-any-return]


def finished(process: subprocess.Popen[str], seconds: float = 120) -> str:
    try:
        return process.communicate(timeout=seconds)[0]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def state(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    checkpoint = RunDirectory(path).load()
    assert checkpoint is not None
    return tree.flatten(checkpoint.server), checkpoint.clients


def same(one: Path, other: Path) -> None:
    for mine, theirs in zip(state(one), state(other), strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():
            torch.testing.assert_close(value, theirs[name], atol=1e-5, rtol=0)
    for mine, theirs in zip(RunDirectory(one).lines(), RunDirectory(other).lines(), strict=True):
        assert mine["accuracy"] == theirs["accuracy"]
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
        assert [one["client"] for one in mine["local"]] == [one["client"] for one in theirs["local"]]
        for own, their in zip(mine["local"], theirs["local"], strict=True):
            assert own == pytest.approx(their, abs=1e-5)


@pytest.mark.parametrize(
    ("processes", "words"),
    [
        (2, COG),
        (3, ["--algorithm", "fedgen", "--participation", "0.4"]),  # two clients for three, and what is no sum
    ],
)
def test_several_processes_come_to_what_one_comes_to(processes: int, words: list[str], tmp_path: Path) -> None:
    words = [*SMALL, "--rounds", "3", *words]
    said = finished(torchrun(*words, "--out", str(tmp_path / "many"), processes=processes))
    assert main(["run", *words, "--out", str(tmp_path / "one"), "--quiet"]) == 0
    same(tmp_path / "many", tmp_path / "one")
    assert said.count("round 3 of 3") == 1, said  # one process speaks for all


def test_a_process_that_dies_ends_the_run_and_the_run_goes_on(tmp_path: Path) -> None:
    words = [*SMALL, *COG]
    run = torchrun(*words, "--rounds", "2000", "--out", str(tmp_path / "run"))
    try:
        end = time.monotonic() + 60
        while time.monotonic() < end and len(RunDirectory(tmp_path / "run").lines()) < 3:
            time.sleep(0.2)
        children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
        follower = next(pid for pid in children if "RANK=1" in _environment(pid))
        os.kill(int(follower), signal.SIGKILL)
    finally:
        said = finished(run)
    assert run.returncode != 0
    done = RunDirectory(tmp_path / "run").load()
    assert done is not None and 2 <= done.round < 2000, said
    rounds = str(done.round + 2)
    assert main(["run", "--resume", str(tmp_path / "run"), "--rounds", rounds, "--quiet"]) == 0
    assert main(["run", *words, "--rounds", rounds, "--out", str(tmp_path / "whole"), "--quiet"]) == 0
    same(tmp_path / "run", tmp_path / "whole")


def _environment(pid: str) -> list[str]:
    return Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")


def test_local_models_need_not_be_tried_and_a_program_may_run_twice(tmp_path: Path) -> None:
    """A script under torchrun: rounds that are not evaluated, one run after another, and one that diverges."""
    script = tmp_path / "twice.py"
    script.write_text(
        "import sys, fedcog\n"
        "from fedcog.experiments.config import Experiment, make_algorithm\n"
        "for name in ('fedavg', 'scaffold'):\n"
        "    one = Experiment(algorithm=make_algorithm(name), clients=3, rounds=2, local_steps=2, batch_size=8,\n"
        "        evaluate_every=2, mapping='loop', workers=1, device='cpu')\n"
        "    done = fedcog.run(one, f'{sys.argv[1]}/{name}', report=False)\n"
        "    sys.stdout.write(f'ended {name} {len(done.lines)}\\n')\n"
        "from fedcog.cli import main\n"
        "main(['run', *sys.argv[2:], '--out', f'{sys.argv[1]}/wild'])\n"
    )
    said = finished(_torchrun(str(script), str(tmp_path), *SMALL, "--rounds", "2", "--lr", "1e10", "--plain"))
    assert said.count("ended fedavg 2") == 2 and said.count("ended scaffold 2") == 2, said
    assert said.count("diverged in round") == 1, said


def test_flower_under_torchrun_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert main(["run", "--backend", "flower", "--rounds", "1"]) == 2


def test_a_comparison_under_torchrun_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert main(["compare", "--algorithms", "fedavg"]) == 2
