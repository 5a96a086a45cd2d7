"""Tests that worker processes compile kernels without a GPU, for later launches."""

import json
import os
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path

import pytest

from fedcog.models.ops.kernels import ahead_of_time

pytestmark = pytest.mark.compiler

pytest.importorskip("triton", reason="needs Triton: pip install triton")

SCRIPT = """
import json, sys, torch
from pathlib import Path
from fedcog.models.ops.kernels import ahead_of_time, launchers
from fedcog.models.ops.kernels.shapes import Shape, block_choices

folder = Path(sys.argv[1])
in_workers = sys.argv[2] == "beside"
shape = Shape(2, 4, 3, 8, 8, 6, 3, 3, (1, 1), (1, 1), (1, 1))
x = torch.empty(shape[:5])
w = torch.empty(2, 6, 3, 3, 3)
g = torch.empty(2, 4, 6, 8, 8)
torch.cuda.get_device_capability = lambda device: (9, 0)
for kind, left, right in (("output", x, w), ("input", g, w), ("weight", g, x)):
    for blocks in block_choices(kind, shape):
        job = launchers.LAUNCHERS[kind], left, right, shape, blocks, False
        if in_workers:
            ahead_of_time.start_compiling(torch.device("cuda", 0), *job)
        else:
            spec = ahead_of_time.TensorSpec.from_tensor
            job = (spec(v) if isinstance(v, torch.Tensor) else v for v in job)
            ahead_of_time._compile(str(folder), 90, *job)
ahead_of_time.wait_for_compilations()
jobs = ahead_of_time._compilations.values()
faults = [repr(job.exception()) for job in jobs if job.exception()]
print(json.dumps([len(jobs), faults, sorted(p.parent.name for p in folder.rglob("*.cubin"))]))
"""


def compile_kernels(folder: Path, mode: str) -> tuple[int, list[str], list[str]]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    caches = {"TRITON_CACHE_DIR": str(folder), "TORCHINDUCTOR_CACHE_DIR": str(folder / "other")}
    caches |= {"TORCHINDUCTOR_COMPILE_THREADS": "2"}  # one thread would mean no worker process
    command = [sys.executable, "-c", SCRIPT, str(folder), mode]
    process = subprocess.run(
        command, env=environment | caches, capture_output=True, text=True, timeout=120
    )
    assert not process.returncode, process.stderr
    num_jobs, faults, files = json.loads(process.stdout.splitlines()[-1])
    return num_jobs, faults, files


def test_worker_processes_compile_kernels_for_later_use(tmp_path: Path) -> None:
    num_jobs, faults, files = compile_kernels(tmp_path, "beside")
    assert num_jobs == 3 and not faults and len(files) >= 3
    assert compile_kernels(tmp_path, "here")[2] == files  # all were found in the cache


def test_timed_out_compilation_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    finished = Future[None]()
    unfinished = Future[None]()
    finished.set_result(None)
    monkeypatch.setattr(ahead_of_time, "_compilations", {"soon": finished, "never": unfinished})
    ahead_of_time.wait_for_compilations(0.01)
    assert ahead_of_time._compilations == {"soon": finished}
