"""Kernels compiled by worker processes, without a GPU, are found at the launch."""

import json
import os
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path

import pytest

from fedcog.models.ops.kernels import ahead_of_time

pytest.importorskip("triton", reason="needs Triton: pip install triton")

SCRIPT = """
import json, sys, torch
from pathlib import Path
from fedcog.models.ops.kernels import ahead_of_time, launchers
from fedcog.models.ops.kernels.shapes import Shape, block_choices

folder, beside = Path(sys.argv[1]), sys.argv[2] == "beside"
shape = Shape(2, 4, 3, 8, 8, 6, 3, 3, (1, 1), (1, 1), (1, 1))
x, w, g = torch.empty(shape[:5]), torch.empty(2, 6, 3, 3, 3), torch.empty(2, 4, 6, 8, 8)
torch.cuda.get_device_capability = lambda device: (9, 0)
for kind, one, other in (("output", x, w), ("input", g, w), ("weight", g, x)):
    for blocks in block_choices(kind, shape):
        job = launchers.LAUNCHERS[kind], one, other, shape, blocks, False
        if beside:
            ahead_of_time.start_compiling(torch.device("cuda", 0), *job)
        else:
            spec = ahead_of_time.TensorSpec.from_tensor
            job = (spec(v) if isinstance(v, torch.Tensor) else v for v in job)
            ahead_of_time._compile(str(folder), 90, *job)
ahead_of_time.wait_for_compilations()
jobs = ahead_of_time._compilations.values()
faults = [repr(one.exception()) for one in jobs if one.exception()]
print(json.dumps([len(jobs), faults, sorted(p.parent.name for p in folder.rglob("*.cubin"))]))
"""


def compiled(folder: Path, how: str) -> tuple[int, list[str], list[str]]:
    kept = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    caches = {"TRITON_CACHE_DIR": str(folder), "TORCHINDUCTOR_CACHE_DIR": str(folder / "other")}
    caches |= {"TORCHINDUCTOR_COMPILE_THREADS": "2"}  # with one thread there is no worker
    command = [sys.executable, "-c", SCRIPT, str(folder), how]
    done = subprocess.run(command, env=kept | caches, capture_output=True, text=True, timeout=120)
    assert not done.returncode, done.stderr
    begun, faults, files = json.loads(done.stdout.splitlines()[-1])
    return begun, faults, files


def test_other_processes_compile_what_is_found_later(tmp_path: Path) -> None:
    begun, faults, files = compiled(tmp_path, "beside")
    assert begun == 3 and not faults and len(files) >= 3
    assert compiled(tmp_path, "here")[2] == files  # nothing is compiled twice


def test_what_takes_too_long_is_not_waited_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    soon = Future[None]()
    never = Future[None]()
    soon.set_result(None)
    monkeypatch.setattr(ahead_of_time, "_compilations", {"soon": soon, "never": never})
    ahead_of_time.wait_for_compilations(0.01)
    assert ahead_of_time._compilations == {"soon": soon}
