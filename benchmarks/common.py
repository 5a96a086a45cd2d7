"""What the benchmarks share: images of CIFAR-10's form, timed rounds, and tables that say where
they come from.
"""

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
from fedcog.runs.environment import find_device, torch_settings
from fedcog.runs.records.provenance import commit
from fedcog.runs.setup import ExperimentSetup, UserObjects

MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)


class Timing(NamedTuple):
    """Seconds of some rounds, and the peak GPU memory meanwhile."""

    rounds: list[float]
    memory: int
    # from the beginning to the end of the first round, with all that is made ready only once
    first: float = 0.0

    @property
    def median(self) -> float:
        """The middle one of the rounds, in seconds."""
        return statistics.median(self.rounds)


def parser(doc: str | None, out: str) -> argparse.ArgumentParser:
    """The flags that every benchmark has."""
    flags = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument(
        "--out", type=Path, default=Path(out), help="where results go (default: %(default)s)"
    )
    flags.add_argument(
        "--data", help="folder with CIFAR-10; without it, random images of the same form"
    )
    flags.add_argument("--device", default="auto", help="auto, cpu, cuda, ...")
    flags.add_argument(
        "--tiny", action="store_true", help="very small sizes, to try the script out"
    )
    return flags


def images(data: str | None, train: int = 50_000, test: int = 10_000) -> Dataset:
    """CIFAR-10 from the folder `data`, or else random images and labels in its form."""
    if data:
        return registry.load("cifar10", data)
    draw = np.random.default_rng(0)
    inputs = torch.from_numpy(draw.integers(0, 256, (train + test, 3, 32, 32), dtype=np.uint8))
    labels = torch.from_numpy(draw.integers(0, 10, train + test))
    return Dataset(
        name="random images",
        train_x=inputs[:train],
        train_y=labels[:train],
        test_x=inputs[train:],
        test_y=labels[train:],
        classes=tuple(str(label) for label in range(10)),
        mean=MEAN,
        std=STD,
        augment=True,
    )


def experiment(
    algorithm: str = "fedavg", tables: dict[str, Any] | None = None, **settings: Any
) -> Experiment:
    """The paper's setting on CIFAR-10, with FedCOG awake from the first round, but for the
    `settings` given.
    """
    own = {"fedcog": {"start_round": 0}} | (tables or {})
    chosen: dict[str, Any] = {"dataset": "cifar10", "model": "cnn"} | settings
    return Experiment(algorithm=make_algorithm(algorithm, own), **chosen)


def rounds(
    experiment: Experiment, data: Dataset, module: nn.Module | None = None
) -> Generator[FinishedRound, None, None]:
    """The rounds of an experiment, as `fedcog.run` runs them, but with nothing written down."""
    with torch_settings(experiment):
        server = ExperimentSetup(experiment, UserObjects(data, module)).make_server()
        for round in range(experiment.rounds):
            yield server.run_round(round)


def unscored(experiment: Experiment, count: int) -> Experiment:
    """Return the experiment with `count` rounds without evaluation, and an evaluated one."""
    return replace(experiment, rounds=count + 1, evaluate_every=count + 1)


def timed(
    experiment: Experiment,
    data: Dataset,
    module: nn.Module | None = None,
    *,
    warm: int,
    count: int,
    score: bool = False,
) -> Timing:
    """Seconds of `count` rounds after `warm` others; with `score`, global and local models are
    evaluated in each.
    """
    device = find_device(experiment.device)
    clean(device)
    total = warm + count
    experiment = unscored(experiment, total)
    if score:
        experiment = replace(experiment, evaluate_every=1, evaluate_local=True)
    ends = []
    began = now(device)
    with contextlib.closing(rounds(experiment, data, module)) as running:
        for _ in range(total):
            next(running)
            ends.append(now(device))
    seconds = [after - before for before, after in zip(ends[warm - 1 :], ends[warm:], strict=False)]
    memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return Timing(seconds, memory, ends[0] - began)


def now(device: torch.device) -> float:
    """The time once the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def clean(device: torch.device) -> None:
    """Give back what the last measurement held, and count memory afresh."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def about(device: torch.device, data: str | None) -> dict[str, str]:
    """Hardware, versions, date and command."""
    packages = {
        name: importlib.metadata.version(name)
        for name in ("torch", "triton", "numpy")
        if _installed(name)
    }
    return {
        "GPU": torch.cuda.get_device_name(device) if device.type == "cuda" else "none used",
        "CPU": _cpu(),
        "versions": ", ".join(
            [
                f"Python {platform.python_version()}",
                *(f"{name} {found}" for name, found in packages.items()),
            ]
        ),
        "TF32": f"off in rounds of fedcog; as torch ships it is allowed in {_tf32()}",
        "data": "CIFAR-10" if data else "random images of CIFAR-10's form",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit(),
        "command": shlex.join(
            ["python", f"benchmarks/{Path(sys.argv[0]).name}", *map(_short, sys.argv[1:])]
        ),
    }


def _short(argument: str) -> str:
    """An argument as it is printed: where on this machine a path lies is nobody's business."""
    return Path(argument).name if argument.startswith("/") else argument


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _tf32() -> str:
    """Where torch may compute in TF32."""
    try:
        convolutions = torch.backends.cudnn.allow_tf32
        products = torch.backends.cuda.matmul.allow_tf32
    except (
        RuntimeError
    ):  # somebody has set it by torch's newer names, and the old ones then refuse to tell
        return "what fp32_precision says"
    allowed = [
        name for name, on in (("convolutions", convolutions), ("matrix products", products)) if on
    ]
    return " and ".join(allowed) or "nothing"


def _cpu() -> str:
    """The processor's name, and how many cores of it there are."""
    found = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        names = [
            line
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ]
        found = f"{len(names)} x {names[0].partition(': ')[2]}" if names else found
    return found


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def number(value: float | None, unit: str = "") -> str:
    """Three significant digits with a unit; a dash where there is none."""
    if value is None:
        return "-"
    shown = f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{shown} {unit}".strip()


def write(
    out: Path, title: str, facts: dict[str, str], parts: Sequence[str], results: dict[str, Any]
) -> None:
    """Markdown to `out`, and all that it was made of to a JSON file beside it."""
    out.parent.mkdir(parents=True, exist_ok=True)
    top = "\n".join(
        f"- {name}: {f'`{text}`' if name == 'command' else text}" for name, text in facts.items()
    )
    out.with_suffix(".md").write_text(
        "\n\n".join([f"# {title}", top, *parts]) + "\n", encoding="utf-8"
    )
    record = {"about": facts} | results
    out.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
