"""What the GPU and the driver do in one round of FedAvg and one of FedCOG: launches, copies, waits,
kernels, idle time.

python benchmarks/trace.py --out results/trace.md [--mapping auto] [--algorithms fedavg fedcog]
[--steps 400]

Each round is profiled by torch after two rounds of warm-up. In the long rounds only the device and
the driver's calls are recorded, since noting every PyTorch operation would slow the host and so
leave the GPU idle. A short round of `--short` steps is recorded with PyTorch's operations and
written as FILE-ALGORITHM.trace.json.gz (ui.perfetto.dev shows it); to stay below 500 kB it goes
without those operations, and if need be with fewer steps.
"""

import argparse
import contextlib
import gzip
import json
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import common
from torch.profiler import ProfilerActivity, profile

from fedcog.data import Dataset
from fedcog.runs.config.experiment import Experiment
from fedcog.runs.environment import find_device

LIMIT = 500_000
WARM = 2
ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
BY_DRIVER = {"cuda_runtime", "cuda_driver"}
CALLS = ("GraphLaunch", "LaunchKernel", "Memcpy", "Memset", "Synchronize", "Malloc", "EventQuery")
Event = dict[str, Any]


def recorded(experiment: Experiment, data: Dataset, host: bool) -> tuple[list[Event], float]:
    """The events of one round after warm-up, and how long it took while it was recorded."""
    device = find_device(experiment.device)
    common.clean(device)
    activities = [ProfilerActivity.CUDA] if device.type == "cuda" else []
    activities += [ProfilerActivity.CPU] if host or not activities else []
    with contextlib.closing(common.rounds(common.unscored(experiment, WARM + 1), data)) as running:
        for _ in range(WARM):
            next(running)
        common.now(device)
        with profile(activities=activities) as profiler:
            began = common.now(device)
            next(running)
            seconds = common.now(device) - began
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events: list[Event] = json.loads(path.read_text(encoding="utf-8", errors="replace"))[
            "traceEvents"
        ]
    return [event for event in events if event.get("ph") in ("X", "M")], seconds


def busy(events: Iterable[Event]) -> float:
    """Seconds in which the device was doing something: intervals that overlap count once."""
    total = 0.0
    end = 0.0
    for event in sorted(events, key=lambda event: float(event["ts"])):
        start = float(event["ts"])
        stop = float(event["ts"]) + float(event["dur"])
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total / 1e6


def summed(events: Iterable[Event]) -> dict[str, dict[str, float]]:
    """Count and seconds by name, the longest first."""
    count = Counter[str]()
    seconds = Counter[str]()
    for event in events:
        count[event["name"]] += 1
        seconds[event["name"]] += event["dur"] / 1e6
    return {name: {"count": count[name], "seconds": spent} for name, spent in seconds.most_common()}


def summary(events: list[Event], profiled: float, unprofiled: float) -> dict[str, Any]:
    """What a round's events come to."""
    spans = [event for event in events if event["ph"] == "X"]
    device = [event for event in spans if event.get("cat") in ON_DEVICE]
    calls = [event for event in spans if event.get("cat") in BY_DRIVER]
    copies = [event for event in device if event["cat"] != "kernel"]
    working = busy(device)
    return {
        "seconds profiled": profiled,
        "seconds unprofiled": unprofiled,
        "seconds busy": working,
        "busy share of the profiled round": working / profiled,
        "busy share of an unprofiled round": working / unprofiled,
        "kernels": sum(event["cat"] == "kernel" for event in device),
        "calls": summed(event for event in calls if any(word in event["name"] for word in CALLS)),
        "copies": summed(copies),
        "top kernels": summed(event for event in device if event["cat"] == "kernel"),
        "host operations": summed(event for event in spans if event.get("cat") == "cpu_op"),
    }


def described(name: str, found: dict[str, Any], top: int) -> str:
    """A round's summary in Markdown."""
    share = (
        100 * found["busy share of the profiled round"],
        100 * found["busy share of an unprofiled round"],
    )
    parts = [
        f"## {name}",
        f"{found['kernels']:,} kernels. GPU busy {1e3 * found['seconds busy']:.1f} ms: "
        f"{share[0]:.0f} % of the "
        f"profiled round ({1e3 * found['seconds profiled']:.1f} ms), {share[1]:.0f} % of an "
        "unprofiled one (median "
        f"{1e3 * found['seconds unprofiled']:.1f} ms). Two calls of cudaDeviceSynchronize are "
        "this script's own.",
    ]
    for title, key, most in (
        ("call", "calls", 1000),
        ("copy or fill", "copies", 1000),
        (f"the {top} kernels that took longest", "top kernels", top),
        (
            f"the {top} host operations that took longest, inner ones included",
            "host operations",
            top,
        ),
    ):
        rows = [
            [f"`{label[:100]}`", f"{one['count']:,.0f}", f"{1e3 * one['seconds']:.2f} ms"]
            for label, one in list(found[key].items())[:most]
        ]
        parts += [common.table([title, "count", "time"], rows)] if rows else []
    return "\n\n".join(parts)


def packed(events: list[Event]) -> bytes:
    """A trace as small as it may be: without arguments, but for what ties a call to its kernel."""
    kept = []
    for event in events:
        arguments = event.get("args", {})
        slim: Event = {
            key: event[key]
            for key in ("ph", "cat", "name", "pid", "tid", "ts", "dur")
            if key in event
        }
        slim["name"] = slim["name"][:120]
        wanted = ("correlation",) if event["ph"] == "X" else ("name", "labels", "sort_index")
        slim["args"] = {key: arguments[key] for key in wanted if key in arguments}
        kept.append(slim)
    return gzip.compress(json.dumps({"traceEvents": kept}, separators=(",", ":")).encode(), mtime=0)


def short_trace(options: argparse.Namespace, data: Dataset, algorithm: str) -> tuple[bytes, str]:
    """The trace of a short round, and what it shows: all that stays below the limit."""
    steps = options.short
    host = True
    while True:
        events, _ = recorded(setting(options, algorithm, steps, short=True), data, host)
        whole = packed(events)
        if len(whole) < LIMIT or (steps == 1 and not host):
            return (
                whole,
                f"a round of {steps} steps, {'with' if host else 'without'} PyTorch's operations",
            )
        steps = steps if host else max(1, steps // 2)
        host = False


def setting(
    options: argparse.Namespace, algorithm: str, steps: int, short: bool = False
) -> Experiment:
    """The paper's setting; a short round generates in as many steps as it trains."""
    small = {"clients": 3, "batch_size": 8} if options.tiny else {}
    tables = {"fedcog": {"start_round": 0, "steps": steps} | ({"count": 8} if options.tiny else {})}
    return common.experiment(
        algorithm,
        tables if short or options.tiny else None,
        local_steps=steps,
        device=str(options.device),
        mapping=options.mapping,
        **small,
    )


def main() -> None:
    """Profile every algorithm asked for, and write it down."""
    parser = common.parser(__doc__, "results/trace.md")
    parser.add_argument(
        "--mapping",
        default="auto",
        help="how clients are run, as in fedcog run (default: %(default)s)",
    )
    parser.add_argument("--algorithms", nargs="+", default=["fedavg", "fedcog"])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument(
        "--short", type=int, default=20, help="local steps of the round whose trace is kept"
    )
    parser.add_argument("--top", type=int, default=25, help="how many kernels are listed")
    options = parser.parse_args()
    options.device = find_device(options.device)
    if options.tiny:
        options.steps = 4
        options.short = 2
    data = common.images(options.data, *((300, 20) if options.tiny else ()))
    parts = []
    results = {}
    for algorithm in options.algorithms:
        experiment = setting(options, algorithm, options.steps)
        unprofiled = common.timed(experiment, data, warm=WARM, count=3).median
        events, profiled = recorded(experiment, data, host=False)
        results[algorithm] = found = summary(events, profiled, unprofiled)
        parts.append(described(f"{algorithm}, {options.steps} steps", found, options.top))
        whole, shows = short_trace(options, data, algorithm)
        place = options.out.with_name(f"{options.out.stem}-{algorithm}.trace.json.gz")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(whole)
        parts.append(f"{place.name}: {shows}, {len(whole) / 1e3:.0f} kB.")
        facts = common.about(options.device, options.data)
        common.write(options.out, "What a round does on the GPU", facts, parts, {"rounds": results})
    print(options.out.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
