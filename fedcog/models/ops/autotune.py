"""Choice of the fastest implementation of a computation: measured once per case and cached."""

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

MAX_RELATIVE_ERROR = 2e-2
"""Largest relative L2 distance of a candidate's result from the reference's."""

_choices: dict[str, str] = {}
_files_read: set[Path] = set()


def fastest(case: str, candidates: Mapping[str, Callable[[], Tensor]]) -> str:
    """Return the name of the fastest way to compute a tensor on the current GPU.

    Candidates that fail, or differ from the reference, are ignored. The choice is saved to a file,
    so that later runs choose the same: candidates round differently.

    Args:
        case: Identifies the computation.
        candidates: Functions that compute the tensor, by name; the first is the reference.

    Returns:
        The name of the fastest candidate.
    """
    name = cached_choice(case)
    if name not in candidates:
        name = _measure(candidates)
        _choices[_key(case)] = name
        _save_choices()
    return name


def cached_choice(case: str) -> str:
    """Return the name that was chosen for a case, or an empty string."""
    _load_choices()
    return _choices.get(_key(case), "")


def _key(case: str) -> str:
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}: {case}"


def _measure(candidates: Mapping[str, Callable[[], Tensor]]) -> str:
    torch.cuda.synchronize()  # other threads launch on their own streams
    with ThreadPoolExecutor(len(candidates)) as pool:  # kernels compile in parallel
        futures = {name: pool.submit(compute) for name, compute in candidates.items()}
    torch.cuda.synchronize()
    reference: Tensor | None = None
    times: dict[str, float] = {}
    for name, compute in candidates.items():
        try:
            result = futures[name].result()
            if reference is None:
                reference = result
            else:
                error = (result - reference).float().norm()
                if not error <= MAX_RELATIVE_ERROR * reference.float().norm():
                    warnings.warn(
                        f"kernel {name} is ignored: its result differs from torch's.", stacklevel=2
                    )
                    continue
            times[name] = measure_seconds(compute, repeats=1, calls=1)
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:  # only the reference must work everywhere
            if reference is None:
                raise
            warnings.warn(
                f"kernel {name} is ignored: {type(error).__name__}: {error}", stacklevel=2
            )
    # Launching alone may take a millisecond.
    limit = 3 * min(times.values()) + 1e-3
    finalists = [name for name, once in times.items() if once <= limit]
    times = {name: measure_seconds(candidates[name]) for name in finalists}
    return min(times, key=lambda name: times[name])


def measure_seconds(compute: Callable[[], Tensor], repeats: int = 5, calls: int = 10) -> float:
    """Measure the time of a call by the GPU's clock, without launch overhead.

    Args:
        compute: The function.
        repeats: Number of measurements.
        calls: Number of calls per measurement.

    Returns:
        The median time of a call, in seconds.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            compute()
    times = []
    for _ in range(repeats + 1):
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)) / 1e3 / calls)
    return statistics.median(times[1:])


def _cache_file() -> Path:
    folder = os.path.expanduser(os.environ.get("FEDCOG_CACHE", "~/.cache/fedcog"))
    return Path(folder) / "tuning.json"


def _load_choices() -> None:
    """Load the choices of earlier runs; an unreadable file is ignored."""
    file = _cache_file()
    if file in _files_read:
        return
    _files_read.add(file)
    with contextlib.suppress(OSError, ValueError):
        saved = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(saved, dict):
            _choices.update({str(case): str(name) for case, name in saved.items()} | _choices)


def _save_choices() -> None:
    """Save all choices; if that fails, they hold for this process."""
    file = _cache_file()
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps(_choices, indent=1), encoding="utf-8")
        part.replace(file)
