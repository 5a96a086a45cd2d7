"""Shared helpers of the benchmarks: data, timed rounds, and reports that record their origin."""

import argparse
import contextlib
import datetime
import gc
import importlib.metadata
import json
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from fedcog.data import Dataset, registry
from fedcog.federation.server import FinishedRound
from fedcog.runs.config.composition import make_algorithm
from fedcog.runs.config.experiment import Experiment
from fedcog.runs.config.user_objects import UserObjects
from fedcog.runs.environment import find_device, torch_settings
from fedcog.runs.records.provenance import commit
from fedcog.runs.setup import ExperimentSetup

MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)


class Timing(NamedTuple):
    """Wall time of consecutive rounds, and peak GPU memory.

    Attributes:
        round_seconds: Seconds of each timed round.
        peak_memory: Peak bytes allocated on the GPU; 0 on a CPU.
        first_round_seconds: Seconds from the start of setup to the end of the first round.
    """

    round_seconds: list[float]
    peak_memory: int
    first_round_seconds: float = 0.0

    @property
    def median(self) -> float:
        """Median seconds of a round."""
        return statistics.median(self.round_seconds)


def make_parser(description: str | None, default_out: str) -> argparse.ArgumentParser:
    """Create a parser with the flags that all benchmarks share.

    Args:
        description: Help text, usually the docstring of the script.
        default_out: Default of `--out`.

    Returns:
        A parser to which a script adds its own flags.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(default_out),
        help="where to write results (default: %(default)s)",
    )
    parser.add_argument(
        "--data", help="folder with CIFAR-10; without it, random images of the same shape"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, ...")
    parser.add_argument(
        "--tiny", action="store_true", help="very small sizes, to check that the script runs"
    )
    return parser


def load_images(data_dir: str | None, num_train: int = 50_000, num_test: int = 10_000) -> Dataset:
    """Load CIFAR-10, or create random images and labels of the same shape.

    Args:
        data_dir: Folder with CIFAR-10; None for random images.
        num_train: Number of random training images.
        num_test: Number of random test images.

    Returns:
        The data set. Random images are the same in every call.
    """
    if data_dir:
        return registry.load("cifar10", data_dir)
    rng = np.random.default_rng(0)
    num_images = num_train + num_test
    images = torch.from_numpy(rng.integers(0, 256, (num_images, 3, 32, 32), dtype=np.uint8))
    labels = torch.from_numpy(rng.integers(0, 10, num_images))
    return Dataset(
        name="random images",
        train_x=images[:num_train],
        train_y=labels[:num_train],
        test_x=images[num_train:],
        test_y=labels[num_train:],
        classes=tuple(str(label) for label in range(10)),
        mean=MEAN,
        std=STD,
        augment=True,
    )


def paper_experiment(
    algorithm: str = "fedavg",
    algorithm_settings: dict[str, Any] | None = None,
    **settings: Any,
) -> Experiment:
    """Return the paper's experiment on CIFAR-10, with FedCOG generating from the first round.

    Args:
        algorithm: Name of the algorithm, as in `fedcog run --algorithm`.
        algorithm_settings: Settings of algorithms, by the algorithm's name.
        **settings: Settings of the experiment that differ from the paper's.

    Returns:
        The experiment.
    """
    tables = {"fedcog": {"start_round": 0}} | (algorithm_settings or {})
    experiment_settings: dict[str, Any] = {"dataset": "cifar10", "model": "cnn"} | settings
    return Experiment(algorithm=make_algorithm(algorithm, tables), **experiment_settings)


def run_rounds(
    experiment: Experiment, dataset: Dataset, network: nn.Module | None = None
) -> Generator[FinishedRound, None, None]:
    """Run an experiment as `fedcog.run` does, without recording it.

    Args:
        experiment: The experiment.
        dataset: Its data set.
        network: A network that replaces the one of the experiment.

    Yields:
        Every finished round.
    """
    with torch_settings(experiment):
        server = ExperimentSetup(experiment, UserObjects(dataset, network)).make_server()
        for round in range(experiment.rounds):
            yield server.run_round(round)


def without_evaluation(experiment: Experiment, num_rounds: int) -> Experiment:
    """Return the experiment with `num_rounds` rounds that are not evaluated, and one that is."""
    return replace(experiment, rounds=num_rounds + 1, evaluate_every=num_rounds + 1)


def time_rounds(
    experiment: Experiment,
    dataset: Dataset,
    network: nn.Module | None = None,
    *,
    num_warmup: int,
    num_timed: int,
    evaluate: bool = False,
) -> Timing:
    """Measure the wall time of rounds after a warm-up.

    Args:
        experiment: The experiment.
        dataset: Its data set.
        network: A network that replaces the one of the experiment.
        num_warmup: Rounds before the timed ones, at least one.
        num_timed: Timed rounds.
        evaluate: Whether every round evaluates the global and all local models.

    Returns:
        Seconds of the timed rounds, peak GPU memory, and seconds until the first round ended.
    """
    device = find_device(experiment.device)
    free_memory(device)
    num_rounds = num_warmup + num_timed
    experiment = without_evaluation(experiment, num_rounds)
    if evaluate:
        experiment = replace(experiment, evaluate_every=1, evaluate_local=True)
    end_times = []
    start_time = synchronized_time(device)
    with contextlib.closing(run_rounds(experiment, dataset, network)) as rounds:
        for _ in range(num_rounds):
            next(rounds)
            end_times.append(synchronized_time(device))
    peak_memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    first_round_seconds = end_times[0] - start_time
    return Timing(seconds_between(end_times, num_warmup), peak_memory, first_round_seconds)


def seconds_between(end_times: Sequence[float], num_warmup: int) -> list[float]:
    """Compute the durations of rounds from the times at which they ended.

    Args:
        end_times: End of every round, in seconds.
        num_warmup: Rounds at the beginning that do not count, at least one.

    Returns:
        Seconds of every round after the warm-up.
    """
    pairs = zip(end_times[num_warmup - 1 :], end_times[num_warmup:], strict=False)
    return [end - start for start, end in pairs]


def synchronized_time(device: torch.device) -> float:
    """Wait until the device has finished, and return the time in seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def free_memory(device: torch.device) -> None:
    """Free the memory of earlier measurements and reset the peak."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def describe_environment(device: torch.device, data_dir: str | None) -> dict[str, str]:
    """Describe hardware, versions, date and command line.

    Args:
        device: The device that the benchmark ran on.
        data_dir: Folder with CIFAR-10; None if the images were random.

    Returns:
        Facts for the top of a report, by name.
    """
    versions = [f"Python {platform.python_version()}"]
    versions += [
        f"{package} {importlib.metadata.version(package)}"
        for package in ("torch", "triton", "numpy")
        if _is_installed(package)
    ]
    script = f"benchmarks/{Path(sys.argv[0]).name}"
    arguments = [_without_folder(argument) for argument in sys.argv[1:]]
    return {
        "GPU": torch.cuda.get_device_name(device) if device.type == "cuda" else "none used",
        "CPU": _cpu_name(),
        "versions": ", ".join(versions),
        "TF32": f"off in rounds of fedcog; by default torch allows it in {_tf32_operations()}",
        "data": "CIFAR-10" if data_dir else "random images with the shape of CIFAR-10's",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit(),
        "command": shlex.join(["python", script, *arguments]),
    }


def _without_folder(argument: str) -> str:
    """Remove the folders of an absolute path, which describe only this machine."""
    return Path(argument).name if argument.startswith("/") else argument


def _is_installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _tf32_operations() -> str:
    """Return the operations that torch may compute in TF32."""
    try:
        allowed = {
            "convolutions": torch.backends.cudnn.allow_tf32,
            "matrix products": torch.backends.cuda.matmul.allow_tf32,
        }
    except RuntimeError:
        # torch refuses to read these flags once its newer ones (fp32_precision) were set.
        return "what fp32_precision says"
    return " and ".join(name for name, is_allowed in allowed.items() if is_allowed) or "nothing"


def _cpu_name() -> str:
    """Return the processor's name and its number of cores."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model_lines = [line for line in lines if line.startswith("model name")]
        if model_lines:
            name = f"{len(model_lines)} x {model_lines[0].partition(': ')[2]}"
    return name


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table.

    Args:
        head: Headings of the columns.
        rows: Cells of each row.

    Returns:
        The table, without a final line break.
    """
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def format_number(value: float | None, unit: str = "") -> str:
    """Format a number with three significant digits.

    Args:
        value: The number; None becomes a dash.
        unit: Unit to append.

    Returns:
        The text.
    """
    if value is None:
        return "-"
    digits = f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{digits} {unit}".strip()


def write_report(
    out: Path,
    title: str,
    facts: dict[str, str],
    paragraphs: Sequence[str],
    results: dict[str, Any],
) -> None:
    """Write a Markdown report, and the numbers behind it to a JSON file next to it.

    Args:
        out: Path of the report; the suffix becomes `.md` and `.json`.
        title: Heading of the report.
        facts: Result of `describe_environment`.
        paragraphs: Text and tables of the report.
        results: Content of the JSON file.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    fact_lines = []
    for name, text in facts.items():
        value = f"`{text}`" if name == "command" else text
        fact_lines.append(f"- {name}: {value}")
    report = "\n\n".join([f"# {title}", "\n".join(fact_lines), *paragraphs])
    out.with_suffix(".md").write_text(report + "\n", encoding="utf-8")
    record = {"about": facts} | results
    out.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
