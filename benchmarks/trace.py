"""Profile one round of FedAvg and of FedCOG: kernels, launches, copies, waits and idle time.

python benchmarks/trace.py --out results/trace.md [--mapping auto] [--algorithms fedavg fedcog]
[--steps 400]

torch's profiler records each round after two rounds of warm-up. In long rounds it records only the
device and the driver's calls: recording every PyTorch operation would slow the host down and leave
the GPU idle. A short round of `--short` steps is recorded with PyTorch's operations and written to
FILE-ALGORITHM.trace.json.gz (open it in ui.perfetto.dev). To keep that file below 500 kB, these
operations are left out first, then the round gets fewer steps.
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

MAX_TRACE_BYTES = 500_000
NUM_WARMUP = 2
DEVICE_CATEGORIES = {"kernel", "gpu_memcpy", "gpu_memset"}
DRIVER_CATEGORIES = {"cuda_runtime", "cuda_driver"}
LISTED_CALLS = (
    "GraphLaunch",
    "LaunchKernel",
    "Memcpy",
    "Memset",
    "Synchronize",
    "Malloc",
    "EventQuery",
)
Event = dict[str, Any]


def profile_round(
    experiment: Experiment, dataset: Dataset, with_host: bool
) -> tuple[list[Event], float]:
    """Profile one round after warm-up.

    Args:
        experiment: The experiment.
        dataset: Its data set.
        with_host: Whether to record PyTorch's operations; without a GPU they always are.

    Returns:
        The events of the round, and its seconds under the profiler.
    """
    device = find_device(experiment.device)
    common.free_memory(device)
    activities = [ProfilerActivity.CUDA] if device.type == "cuda" else []
    if with_host or not activities:
        activities.append(ProfilerActivity.CPU)
    experiment = common.without_evaluation(experiment, NUM_WARMUP + 1)
    with contextlib.closing(common.run_rounds(experiment, dataset)) as rounds:
        for _ in range(NUM_WARMUP):
            next(rounds)
        common.synchronized_time(device)
        with profile(activities=activities) as profiler:
            start_time = common.synchronized_time(device)
            next(rounds)
            round_seconds = common.synchronized_time(device) - start_time
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    events: list[Event] = [event for event in trace["traceEvents"] if event.get("ph") in ("X", "M")]
    return events, round_seconds


def busy_seconds(events: Iterable[Event]) -> float:
    """Return the seconds covered by events; where events overlap, time counts once."""
    covered = 0.0
    covered_until = 0.0
    for event in sorted(events, key=lambda event: float(event["ts"])):
        start = float(event["ts"])
        end = start + float(event["dur"])
        covered += max(0.0, end - max(start, covered_until))
        covered_until = max(covered_until, end)
    return covered / 1e6


def total_by_name(events: Iterable[Event]) -> dict[str, dict[str, float]]:
    """Return count and total seconds of events by name, the longest first."""
    counts = Counter[str]()
    seconds = Counter[str]()
    for event in events:
        counts[event["name"]] += 1
        seconds[event["name"]] += event["dur"] / 1e6
    return {
        name: {"count": counts[name], "seconds": total} for name, total in seconds.most_common()
    }


def summarize(events: list[Event], profiled: float, unprofiled: float) -> dict[str, Any]:
    """Summarize the events of a round.

    Args:
        events: Result of `profile_round`.
        profiled: Seconds of the profiled round.
        unprofiled: Median seconds of rounds without profiler.

    Returns:
        Times, busy shares, and totals by name, as written to the JSON file.
    """
    spans = [event for event in events if event["ph"] == "X"]
    device_spans = [event for event in spans if event.get("cat") in DEVICE_CATEGORIES]
    kernels = [event for event in device_spans if event["cat"] == "kernel"]
    copies = [event for event in device_spans if event["cat"] != "kernel"]
    calls = [
        event
        for event in spans
        if event.get("cat") in DRIVER_CATEGORIES
        and any(name in event["name"] for name in LISTED_CALLS)
    ]
    host_operations = [event for event in spans if event.get("cat") == "cpu_op"]
    busy = busy_seconds(device_spans)
    return {
        "seconds profiled": profiled,
        "seconds unprofiled": unprofiled,
        "seconds busy": busy,
        "busy share of the profiled round": busy / profiled,
        "busy share of an unprofiled round": busy / unprofiled,
        "kernels": len(kernels),
        "calls": total_by_name(calls),
        "copies": total_by_name(copies),
        "top kernels": total_by_name(kernels),
        "host operations": total_by_name(host_operations),
    }


def format_summary(title: str, summary: dict[str, Any], num_kernels: int) -> str:
    """Format the summary of a round as Markdown.

    Args:
        title: Heading.
        summary: Result of `summarize`.
        num_kernels: How many kernels and host operations to list.

    Returns:
        Heading, text and tables.
    """
    busy_ms = 1e3 * summary["seconds busy"]
    profiled_ms = 1e3 * summary["seconds profiled"]
    unprofiled_ms = 1e3 * summary["seconds unprofiled"]
    profiled_percent = 100 * summary["busy share of the profiled round"]
    unprofiled_percent = 100 * summary["busy share of an unprofiled round"]
    paragraphs = [
        f"## {title}",
        f"{summary['kernels']:,} kernels. GPU busy {busy_ms:.1f} ms: {profiled_percent:.0f} % of "
        f"the profiled round ({profiled_ms:.1f} ms), {unprofiled_percent:.0f} % of an unprofiled "
        f"one (median {unprofiled_ms:.1f} ms). Two calls of cudaDeviceSynchronize are this "
        "script's own.",
    ]
    host_heading = f"the {num_kernels} host operations that took longest, inner ones included"
    for heading, key, max_rows in (
        ("call", "calls", 1000),
        ("copy or fill", "copies", 1000),
        (f"the {num_kernels} kernels that took longest", "top kernels", num_kernels),
        (host_heading, "host operations", num_kernels),
    ):
        rows = [
            [f"`{name[:100]}`", f"{total['count']:,.0f}", f"{1e3 * total['seconds']:.2f} ms"]
            for name, total in list(summary[key].items())[:max_rows]
        ]
        if rows:
            paragraphs.append(common.markdown_table([heading, "count", "time"], rows))
    return "\n\n".join(paragraphs)


def compress_trace(events: list[Event]) -> bytes:
    """Compress a trace; of the arguments, keep those that link a call to its kernel."""
    slim_events = []
    for event in events:
        arguments = event.get("args", {})
        slim_event: Event = {
            key: event[key]
            for key in ("ph", "cat", "name", "pid", "tid", "ts", "dur")
            if key in event
        }
        slim_event["name"] = slim_event["name"][:120]
        kept_keys = ("correlation",) if event["ph"] == "X" else ("name", "labels", "sort_index")
        slim_event["args"] = {key: arguments[key] for key in kept_keys if key in arguments}
        slim_events.append(slim_event)
    text = json.dumps({"traceEvents": slim_events}, separators=(",", ":"))
    return gzip.compress(text.encode(), mtime=0)


def record_short_trace(
    options: argparse.Namespace, dataset: Dataset, algorithm: str
) -> tuple[bytes, str]:
    """Record a short round whose trace stays below the size limit.

    Args:
        options: The command line.
        dataset: The data set.
        algorithm: Name of the algorithm.

    Returns:
        The compressed trace, and a description of it.
    """
    num_steps = options.short
    with_host = True
    while True:
        experiment = make_experiment(options, algorithm, num_steps, is_short=True)
        events, _ = profile_round(experiment, dataset, with_host)
        trace = compress_trace(events)
        if len(trace) < MAX_TRACE_BYTES or (num_steps == 1 and not with_host):
            with_or_without = "with" if with_host else "without"
            return trace, f"a round of {num_steps} steps, {with_or_without} PyTorch's operations"
        if with_host:
            with_host = False
        else:
            num_steps = max(1, num_steps // 2)


def make_experiment(
    options: argparse.Namespace, algorithm: str, num_steps: int, is_short: bool = False
) -> Experiment:
    """Return the paper's experiment.

    Args:
        options: The command line.
        algorithm: Name of the algorithm.
        num_steps: Local steps of a round.
        is_short: Whether there are also only `num_steps` generation steps.

    Returns:
        The experiment; a tiny one if the command line asks for it.
    """
    tiny_settings = {"clients": 3, "batch_size": 8} if options.tiny else {}
    fedcog_settings = {"start_round": 0}
    if is_short or options.tiny:
        fedcog_settings["steps"] = num_steps
    if options.tiny:
        fedcog_settings["count"] = 8
    return common.paper_experiment(
        algorithm,
        {"fedcog": fedcog_settings},
        local_steps=num_steps,
        device=str(options.device),
        mapping=options.mapping,
        **tiny_settings,
    )


def main() -> None:
    """Profile the requested algorithms, and write the results after each."""
    parser = common.make_parser(__doc__, "results/trace.md")
    parser.add_argument(
        "--mapping",
        default="auto",
        help="how clients train, as in fedcog run (default: %(default)s)",
    )
    parser.add_argument("--algorithms", nargs="+", default=["fedavg", "fedcog"])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument(
        "--short", type=int, default=20, help="local steps of the round whose trace is written"
    )
    parser.add_argument("--top", type=int, default=25, help="how many kernels to list")
    options = parser.parse_args()
    options.device = find_device(options.device)
    if options.tiny:
        options.steps = 4
        options.short = 2
    num_images = (300, 20) if options.tiny else ()
    dataset = common.load_images(options.data, *num_images)
    paragraphs = []
    summaries = {}
    for algorithm in options.algorithms:
        experiment = make_experiment(options, algorithm, options.steps)
        timing = common.time_rounds(experiment, dataset, num_warmup=NUM_WARMUP, num_timed=3)
        events, profiled_seconds = profile_round(experiment, dataset, with_host=False)
        summary = summarize(events, profiled_seconds, timing.median)
        summaries[algorithm] = summary
        title = f"{algorithm}, {options.steps} steps"
        paragraphs.append(format_summary(title, summary, options.top))
        trace, description = record_short_trace(options, dataset, algorithm)
        path = options.out.with_name(f"{options.out.stem}-{algorithm}.trace.json.gz")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(trace)
        paragraphs.append(f"{path.name}: {description}, {len(trace) / 1e3:.0f} kB.")
        facts = common.describe_environment(options.device, options.data)
        common.write_report(
            options.out, "What a round does on the GPU", facts, paragraphs, {"rounds": summaries}
        )
    print(options.out.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
