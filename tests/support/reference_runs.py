"""Record about seventy small runs, and compare two recordings byte by byte.

A refactoring must not change one number. Record the runs with the old tree, record them again with
the new one, and compare:

    python tests/support/reference_runs.py record /tmp/before   # in the old tree
    python tests/support/reference_runs.py record /tmp/after    # in the new tree
    python tests/support/reference_runs.py compare /tmp/before /tmp/after

`record --only NAME ...` repeats some runs, `record --skip flower` leaves out those whose name
contains a word. The script uses nothing but what `fedcog` exports, so it runs in both trees.
Recordings of different machines or torch versions differ in rounding and cannot be compared.
"""

import argparse
import hashlib
import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the tree this file belongs to, whatever is installed

import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from torch import nn  # noqa: E402

import fedcog  # noqa: E402
from fedcog import ALGORITHMS, Experiment, make_algorithm  # noqa: E402

DIGITS: dict[str, Any] = {
    "clients": 4,
    "rounds": 3,
    "local_steps": 4,
    "batch_size": 16,
    "lr": 0.02,
    "threads": 1,
    "workers": 1,
    "mapping": "vmap",
    "device": "cpu",
}
TABLES = {
    "fedcog": {"count": 8, "steps": 3, "start_round": 1},
    "vhl": {"virtual": 40},
    "fedreg": {"count": 20},
    "fedgen": {"steps": 5},
}
RANDOM_RUNS = ("flower-secagg",)
"""Runs that two recordings of one tree do not repeat exactly: SecAgg+ quantizes at random."""
TIMES = {"seconds", "provenance"}
"""Keys of `rounds.jsonl` and of result files that differ between two equal runs."""


class BatchNormNet(nn.Module):
    """A small network with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten()
        )
        self.head = nn.Linear(6 * 64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.features(x))
        return logits


def experiment(
    name: str = "fedavg", tables: dict[str, Any] | None = None, **changes: Any
) -> Experiment:
    """Return a small experiment on the digits."""
    settings = {key: dict(value) for key, value in TABLES.items()}
    for key, value in (tables or {}).items():
        settings[key] = settings.get(key, {}) | value
    return Experiment(algorithm=make_algorithm(name, settings), **(DIGITS | changes))


def batch_norm() -> nn.Module:
    """Return the network with BatchNorm, with fixed initial weights."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(7)
        return BatchNormNet()


def single(
    name: str = "fedavg", tables: dict[str, Any] | None = None, **changes: Any
) -> Callable[[Path], None]:
    """Return a function that performs one run."""

    def record(out: Path) -> None:
        fedcog.run(experiment(name, tables, **changes), out, report=False)

    return record


def with_batch_norm(name: str, **changes: Any) -> Callable[[Path], None]:
    """Return a function that performs one run of a network with BatchNorm."""

    def record(out: Path) -> None:
        fedcog.run(experiment(name, **changes), out, model=batch_norm(), report=False)

    return record


def resumed(name: str, **changes: Any) -> Callable[[Path], None]:
    """Return a function that performs a run in two parts."""

    def record(out: Path) -> None:
        fedcog.run(experiment(name, **(changes | {"rounds": 2})), out, report=False)
        fedcog.run(experiment(name, **(changes | {"rounds": 4})), out, resume=True, report=False)

    return record


def compared(out: Path) -> None:
    """Compare two algorithms over two seeds."""
    fedcog.compare([experiment("fedavg"), experiment("fedprox+fedcog")], [0, 1], out)


def swept(out: Path) -> None:
    """Tune two algorithms."""
    space = {"lr": {"low": 0.001, "high": 0.5, "log": True}, "fedprox": {"mu": [0.001, 0.1]}}
    small = {"model": "mlp", "clients": 3, "mapping": "loop"}
    methods = [experiment("fedavg", **small), experiment("fedprox", **small)]
    fedcog.sweep(methods, space, out, trials=3, seeds=[0, 1], trial_seeds=[7])


def own_data(out: Path) -> None:
    """Run on arrays with users, passed from Python."""
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(240, 12, generator=draw)
    y = torch.randint(0, 4, (240,), generator=draw)
    users = torch.arange(240) % 4
    data = fedcog.from_arrays(x[:200], y[:200], x[200:], y[200:], users=users[:200])
    fedcog.run(experiment("scaffold+fedcog", partition="natural"), out, data=data, report=False)


def cases() -> dict[str, Callable[[Path], None]]:
    """Return every run by name."""
    runs: dict[str, Callable[[Path], None]] = {}
    base = [name for name in ALGORITHMS if name not in ("fedcog", "heterofl")]
    known = [name for name in base if name in FIRST_ALGORITHMS]
    for name in known:
        runs[f"{name}-vmap"] = single(name)
        runs[f"{name}+fedcog-loop"] = single(f"{name}+fedcog", mapping="loop")
    for name in ("fedavg", "scaffold", "feddyn", "fedgen", "moon"):
        runs[f"{name}-loop"] = single(name, mapping="loop")
    for name in ("fedavg", "scaffold", "moon", "fedrep"):
        runs[f"{name}+fedcog-vmap"] = single(f"{name}+fedcog")
    phones = "phone: clients=2 heterofl.width=0.5 local_steps=2; server: clients=2 fedcog.count=4"
    part = {"participation": 0.5, "clients": 6}
    runs |= {
        "heterofl": single("fedavg+heterofl", {"heterofl": {"width": 0.5}}),
        "heterofl-devices": single("moon+fedcog+heterofl", devices=phones),
        "heterofl-devices-loop": single("fedavg+fedcog+heterofl", devices=phones, mapping="loop"),
        "participation": single("scaffold+fedcog", **part),
        "participation-loop": single("feddyn", mapping="loop", **part),
        "epochs": single("fednova", local_epochs=0.5, local_steps=1),
        "epochs-loop": single("scaffold+fedcog", local_epochs=0.5, mapping="loop"),
        "workers": single("fedprox+fedcog", mapping="loop", workers=2, threads=2),
        "power-of-choice": single(selection="power-of-choice", candidates=5, **part),
        "power-of-choice-batch": single(selection="power-of-choice", choice_loss="batch", **part),
        "batch-norm": with_batch_norm("fedavg"),
        "batch-norm-loop": with_batch_norm("fedprox+fedcog", mapping="loop"),
        "batch-norm-sam": with_batch_norm("fedsam+fedcog"),
        "batch-norm-moon": with_batch_norm("moon"),
        "batch-norm-rep": with_batch_norm("fedrep+fedcog"),
        "resnet": single("fedavg", model="resnet18", dataset="digits", clients=2, rounds=1),
        "multi-label": single("fedavg", dataset="digit-mosaics", partition="iid"),
        "multi-label-fedcog": single(
            "fedprox+fedcog", dataset="digit-mosaics", partition="iid", mapping="loop"
        ),
        "dp-central": single("fedavg", privacy="central", dp_noise=0.5),
        "dp-local": single("fedprox+fedcog", privacy="local", dp_noise=0.1, **part),
        "adam-decay": single("fedavg", optimizer="adam", lr=0.005, lr_decay=0.9, grad_clip=1.0),
        "float64": single("scaffold+fedcog", precision="float64"),
        "bfloat16": single("fedavg+fedcog", precision="bfloat16"),
        "validation": single("fedavg", validation=0.2),
        "label-skew": single("fedavg+fedcog", partition="label-skew", clients=5, evaluate_every=2),
        "label-quantity": single("fedprox", partition="label-quantity", clients=5),
        "quantity": single("fedavg", partition="quantity", weights="uniform"),
        "iid": single("fedavg", partition="iid", weight_cap=100),
        "shift": single("fedavg", shift="rotation", label_noise=0.2),
        "generator": single("fedcog", {"fedcog": {"generator": "conv"}}),
        "generator-loop": single("fedcog", {"fedcog": {"generator": "conv"}}, mapping="loop"),
        "fixed-weighting": single(
            "fedcog", {"fedcog": {"weighting": "fixed", "supervision": "hard"}}
        ),
        "noise-source": single("fedcog", {"fedcog": {"source": "noise", "labels": "uniform"}}),
        "control-lr": single("fedcog", {"fedcog": {"control": "lr"}}),
        "batch-norm-loss": with_batch_norm("fedcog"),
        "own-data": own_data,
        "resumed": resumed("scaffold+fedcog"),
        "resumed-loop": resumed("moon+fedcog", mapping="loop", **part),
        "compare": compared,
        "sweep": swept,
        "flower": single("moon+fedcog+heterofl", devices=phones, mapping="loop", backend="flower"),
        "flower-secagg": single(
            "fedavg+fedcog",
            mapping="loop",
            backend="flower",
            secure_aggregation=True,
            evaluate_local=False,
        ),
    }
    return runs


FIRST_ALGORITHMS = (
    "fedavg",
    "fedavgm",
    "fedadam",
    "fedexp",
    "fedprox",
    "scaffold",
    "moon",
    "fedsam",
    "feddecorr",
    "feddyn",
    "fednova",
    "fedreg",
    "fedgen",
    "fedrep",
    "ditto",
    "vhl",
)
"""The algorithms of the first recording; later ones are not compared with it."""


def record(out: Path, only: list[str], skip: list[str]) -> None:
    """Perform the runs in OUT, one folder each."""
    torch.set_num_threads(1)
    for name, perform in cases().items():
        if (only and name not in only) or any(word in name for word in skip):
            continue
        shutil.rmtree(out / name, ignore_errors=True)
        start = time.monotonic()
        perform(out / name)
        print(f"{name:32} {time.monotonic() - start:6.1f} s", flush=True)


def without_times(value: Any) -> Any:
    """Return a recorded value without the times in it."""
    if isinstance(value, dict):
        return {key: without_times(inner) for key, inner in value.items() if key not in TIMES}
    if isinstance(value, list):
        return [without_times(inner) for inner in value]
    return value


def is_close(before: Path, after: Path) -> bool:
    """Return whether two runs of secure aggregation agree up to its random quantization."""
    old = load_file(before / "checkpoint.safetensors")
    new = load_file(after / "checkpoint.safetensors")
    if old.keys() != new.keys():
        return False
    return all(torch.allclose(old[name], new[name], atol=1e-4, rtol=0) for name in old)


def contents(folder: Path) -> dict[str, str]:
    """Return the contents or digest of every file of a run, without times."""
    files = {}
    for file in sorted(folder.rglob("*")):
        path = str(file.relative_to(folder))
        if file.suffix == ".safetensors":
            files[path] = hashlib.sha256(file.read_bytes()).hexdigest()
        elif file.suffix == ".jsonl":
            lines = [without_times(json.loads(line)) for line in file.read_text().splitlines()]
            files[path] = json.dumps(lines, sort_keys=True)
        elif file.suffix == ".toml":
            files[path] = file.read_text()
    return files


def compare(before: Path, after: Path) -> int:
    """Print which runs differ or are missing on one side, and return their number."""
    names = sorted(
        {path.name for path in before.iterdir()} | {path.name for path in after.iterdir()}
    )
    num_files = 0
    num_different = 0
    for name in names:
        old = contents(before / name)
        new = contents(after / name)
        num_files += len(old)
        different = sorted(
            path for path in old.keys() | new.keys() if old.get(path) != new.get(path)
        )
        if name in RANDOM_RUNS and is_close(before / name, after / name):
            different = []
        if different or not old:
            num_different += 1
            print(f"{name}: {', '.join(different) or 'nothing recorded'}")
    print(f"{len(names) - num_different} of {len(names)} runs are equal ({num_files} files)")
    return num_different


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("out", type=Path)
    recording.add_argument("--only", nargs="+", default=[])
    recording.add_argument("--skip", nargs="+", default=[])
    comparing = commands.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "record":
        record(arguments.out, arguments.only, arguments.skip)
    else:
        sys.exit(1 if compare(arguments.before, arguments.after) else 0)


if __name__ == "__main__":
    main()
