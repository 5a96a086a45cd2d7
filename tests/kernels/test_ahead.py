"""Kernels compiled beside: without a GPU, for one; and found again when they are asked for a second time."""

import json
import os
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path

import pytest

from fedcog.kernels import ahead

pytest.importorskip("triton", reason="needs Triton: pip install triton")

SCRIPT = """
import json, sys, torch
from pathlib import Path
from fedcog.kernels import ahead, convolution
from fedcog.kernels.shapes import Shape, choices

folder, beside = Path(sys.argv[1]), sys.argv[2] == "beside"
shape = Shape(2, 4, 3, 8, 8, 6, 3, 3, (1, 1), (1, 1), (1, 1))
x, w, g = torch.empty(shape[:5]), torch.empty(2, 6, 3, 3, 3), torch.empty(2, 4, 6, 8, 8)
torch.cuda.get_device_capability = lambda device: (9, 0)
for kind, one, other in (("output", x, w), ("input", g, w), ("weight", g, x)):
    for blocks in choices(kind, shape):
        job = convolution.KINDS[kind], one, other, shape, blocks, False
        if beside:
            ahead.begin(torch.device("cuda", 0), *job)
        else:
            ahead._compile(str(folder), 90, *(ahead.Form.of(v) if isinstance(v, torch.Tensor) else v for v in job))
ahead.finish()
faults = [repr(one.exception()) for one in ahead._begun.values() if one.exception()]
print(json.dumps([len(ahead._begun), faults, sorted(p.parent.name for p in folder.rglob("*.cubin"))]))
"""


def compiled(folder: Path, how: str) -> tuple[int, list[str], list[str]]:
    kept = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    caches = {"TRITON_CACHE_DIR": str(folder), "TORCHINDUCTOR_CACHE_DIR": str(folder / "other")}
    caches |= {"TORCHINDUCTOR_COMPILE_THREADS": "2"}  # with one core, there would be nobody beside
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
    soon, never = Future[None](), Future[None]()
    soon.set_result(None)
    monkeypatch.setattr(ahead, "_begun", {"soon": soon, "never": never})
    ahead.finish(0.01)
    assert ahead._begun == {"soon": soon}
