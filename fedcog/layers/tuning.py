"""Which way of computing the same thing is fastest here: measured once for each case, and remembered."""

import contextlib
import json
import os
import statistics
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

_known: dict[str, str] = {}
_read: set[Path] = set()


def fastest(case: str, ways: Mapping[str, Callable[[], Tensor]]) -> str:
    """The name of the fastest of some ways to compute the same tensor on the current GPU; the first is the reference.

    What fails, or comes to another result than the reference, is passed over. The choice is kept in a file, so that
    the next run makes the same one: ways differ in their rounding.
    """
    name = known(case)
    if name not in ways:
        name = _known[_here(case)] = _measure(ways)
        _remember()
    return name


def known(case: str) -> str:
    """What was found to be fastest in a case; empty, if nobody has looked yet."""
    _recall()
    return _known.get(_here(case), "")


def _here(case: str) -> str:
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}: {case}"


def _measure(ways: Mapping[str, Callable[[], Tensor]]) -> str:
    torch.cuda.synchronize()  # other threads launch on a stream of their own
    with ThreadPoolExecutor(len(ways)) as pool:  # what must be compiled first is compiled side by side
        first = {name: pool.submit(way) for name, way in ways.items()}
    torch.cuda.synchronize()
    reference: Tensor | None = None
    times: dict[str, float] = {}
    for name, way in ways.items():
        try:
            found = first[name].result()
            if reference is None:
                reference = found
            elif not (found - reference).float().norm() <= 2e-2 * reference.float().norm():
                warnings.warn(f"a kernel ({name}) is passed over: it disagrees with torch's own.", stacklevel=2)
                continue
            times[name] = seconds(way, repeats=1, calls=1)
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:  # a way that does not work here is none; the reference must
            if reference is None:
                raise
            warnings.warn(f"a kernel ({name}) is passed over: {type(error).__name__}: {error}", stacklevel=2)
    near = 3 * min(times.values()) + 1e-3  # a millisecond may be all launching
    times = {name: seconds(ways[name]) for name, once in times.items() if once <= near}
    return min(times, key=lambda name: times[name])


def seconds(way: Callable[[], Tensor], repeats: int = 5, calls: int = 10) -> float:
    """The median time of a call by the GPU's own clock, without what it takes to launch it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            way()
    found = []
    for _ in range(repeats + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(float(begin.elapsed_time(end)) / 1e3 / calls)
    return statistics.median(found[1:])


def _file() -> Path:
    return Path(os.path.expanduser(os.environ.get("FEDCOG_CACHE", "~/.cache/fedcog"))) / "tuning.json"


def _recall() -> None:
    """What earlier runs found out; a file that cannot be read is as good as none."""
    file = _file()
    if file in _read:
        return
    _read.add(file)
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(found, dict):
            _known.update({str(case): str(name) for case, name in found.items()} | _known)


def _remember() -> None:
    """Write down all choices; where that is not possible, they hold for this process."""
    file = _file()
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps(_known, indent=1), encoding="utf-8")
        part.replace(file)
