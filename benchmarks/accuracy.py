"""Whether a faster way of computing learns as well: first-round losses and test accuracy by mapping
and precision.

    python benchmarks/accuracy.py --data DIR --out results/accuracy \\
        --ways vmap,float32 graph,float32 graph,tf32 graph,bfloat16 \\
        [--algorithm fedavg] [--rounds 20] [--seeds 0 1 2] [--time-budget 500]

CIFAR-10 over ten clients (Dirichlet 0.1), the paper's CNN, 400 steps of batch 64. Every run of one
mapping, precision and seed is a file in the folder --out; finished ones are not run again, so that
the same command goes on where it was stopped. It stops by itself before --time-budget seconds.
Losses are each client's mean over its first round, compared with those of the first way named;
accuracies are of the global model, after the last round and at its best.
"""

import argparse
import contextlib
import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import common

from fedcog.data import Dataset
from fedcog.runs.config.experiment import Experiment
from fedcog.runs.environment import find_device

Run = dict[str, Any]


def setting(options: argparse.Namespace, mapping: str, precision: str, seed: int) -> Experiment:
    """One run's settings; the precision "tf32" is float32 with TF32 allowed."""
    small: dict[str, Any] = (
        {"clients": 3, "local_steps": 3, "batch_size": 8} if options.tiny else {}
    )
    return common.experiment(
        options.algorithm,
        mapping=mapping,
        precision="float32" if precision == "tf32" else precision,
        tf32=precision == "tf32",
        seed=seed,
        rounds=options.rounds,
        evaluate_local=False,
        device=str(options.device),
        **small,
    )


def carry_out(experiment: Experiment, data: Dataset, deadline: float) -> Run | None:
    """What comes of a run; nothing if the time is over before its end."""
    losses: list[float] = []
    accuracies: list[float] = []
    began = last = time.monotonic()
    with contextlib.closing(common.rounds(experiment, data)) as running:
        for done in running:
            now = time.monotonic()
            losses = losses or [client["loss"] for client in done.record.local]
            accuracies.append(done.record.scores["accuracy"])
            if now + (now - last) > deadline and len(accuracies) < experiment.rounds:
                return None
            last = now
    seconds = time.monotonic() - began
    return {
        "losses": losses,
        "accuracies": accuracies,
        "seconds": seconds,
        "settings": _settings(experiment),
    }


def _settings(experiment: Experiment) -> Run:
    """What decides the result, without where things lie."""
    return {
        name: value
        for name, value in experiment.to_dict().items()
        if name not in ("data_dir", "threads")
    }


def finished(place: Path, experiment: Experiment) -> Run | None:
    """The run recorded at `place`, where there is one of these very settings."""
    if not place.exists():
        return None
    run: Run = json.loads(place.read_text(encoding="utf-8"))
    if run["settings"] != json.loads(json.dumps(_settings(experiment))):
        raise SystemExit(f"{place} is of other settings: choose another --out.")
    return run


def gather(options: argparse.Namespace, data: Dataset) -> dict[str, dict[int, Run]]:
    """All runs there are by way of computing and seed, as many more of them as time allows."""
    deadline = time.monotonic() + options.time_budget
    longest = dict.fromkeys(options.ways, 0.0)
    found: dict[str, dict[int, Run]] = {way: {} for way in options.ways}
    for seed, way in itertools.product(options.seeds, options.ways):
        mapping, precision = way.split(",")
        experiment = setting(options, mapping, precision, seed)
        place = options.out / f"{options.algorithm}-{mapping}-{precision}-seed-{seed}.json"
        run = finished(place, experiment)
        if run is None and time.monotonic() + longest[way] < deadline:
            run = carry_out(experiment, data, deadline)
            longest[way] = float("inf") if run is None else max(longest[way], run["seconds"])
            keep(place, run)
        if run is not None:
            found[way][seed] = run
    return found


def keep(place: Path, run: Run | None) -> None:
    """Record a run that came to its end, whole or not at all."""
    if run is None:
        print(f"{place.name}: no time left", file=sys.stderr)
        return
    part = place.with_suffix(".part")
    part.write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")
    part.replace(place)
    print(
        f"{place.name}: {100 * run['accuracies'][-1]:.2f} %, {run['seconds']:.1f} s",
        file=sys.stderr,
    )


def loss_table(found: dict[str, dict[int, Run]]) -> str:
    """How far the clients' first-round losses lie from those of the first way, at most."""
    (first, base), *others = found.items()
    rows = []
    for way, runs in others:
        for seed in sorted(base.keys() & runs.keys()):
            pairs = zip(base[seed]["losses"], runs[seed]["losses"], strict=True)
            gaps = [abs(mine - theirs) / abs(theirs) for theirs, mine in pairs]
            rows.append([way, str(seed), f"{max(gaps):.1e}", f"{statistics.mean(gaps):.1e}"])
    head = ["mapping, precision", "seed", f"largest relative difference from {first}", "mean"]
    return common.table(head, rows) if rows else ""


def accuracy_table(found: dict[str, dict[int, Run]], rounds: int) -> str:
    """Mean and sample deviation over seeds, and every seed."""
    rows = []
    for way, runs in found.items():
        last = [100 * runs[seed]["accuracies"][-1] for seed in sorted(runs)]
        best = [100 * max(runs[seed]["accuracies"]) for seed in sorted(runs)]
        seconds = (
            f"{statistics.median(run['seconds'] for run in runs.values()):.1f} s" if runs else "-"
        )
        rows.append(
            [
                way,
                _spread(last),
                ", ".join(f"{score:.2f}" for score in last),
                _spread(best),
                seconds,
            ]
        )
    head = [
        "mapping, precision",
        f"test accuracy after {rounds} rounds, %",
        "by seed",
        "best, %",
        "median run",
    ]
    return common.table(head, rows)


def _spread(scores: list[float]) -> str:
    if len(scores) < 2:
        return ", ".join(f"{score:.2f}" for score in scores) or "-"
    return f"{statistics.mean(scores):.2f} ± {statistics.stdev(scores):.2f}"


def main() -> None:
    """Run what is missing, as time allows, and write down what there is."""
    parser = common.parser(__doc__, "results/accuracy")
    parser.add_argument(
        "--ways",
        nargs="+",
        default=["vmap,float32", "graph,float32", "graph,tf32", "graph,bfloat16"],
        help="mapping,precision of each way; the first is what the others are compared with",
    )
    parser.add_argument(
        "--algorithm",
        default="fedavg",
        help="as in fedcog run; FedCOG is awake from the first round",
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument(
        "--time-budget",
        type=float,
        default=float("inf"),
        help="seconds after which nothing is begun",
    )
    options = parser.parse_args()
    if options.tiny:
        options.rounds = 2
    elif not options.data:
        parser.error(
            "accuracy needs real images: --data DIR, a folder with CIFAR-10 (fedcog data get "
            "cifar10)."
        )
    options.device = find_device(options.device)
    options.out.mkdir(parents=True, exist_ok=True)
    data = common.images(options.data, *((300, 100) if options.tiny else ()))
    found = gather(options, data)
    wanted = len(found) * len(options.seeds)
    there = sum(len(runs) for runs in found.values())
    parts = [
        f"{options.algorithm}, {there} of {wanted} runs done.",
        accuracy_table(found, options.rounds),
        loss_table(found),
    ]
    facts = common.about(options.device, options.data)
    common.write(
        options.out / "summary.md",
        "Accuracy",
        facts,
        [part for part in parts if part],
        {"runs": found},
    )
    print((options.out / "summary.md").read_text())


if __name__ == "__main__":
    main()
