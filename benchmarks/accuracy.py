"""Compare mappings and precisions: first-round losses and test accuracy.

    python benchmarks/accuracy.py --data DIR --out results/accuracy \\
        --ways vmap,float32 graph,float32 graph,tf32 graph,bfloat16 \\
        [--algorithm fedavg] [--rounds 20] [--seeds 0 1 2] [--time-budget 500]

CIFAR-10 on ten clients (Dirichlet 0.1), the paper's CNN, 400 steps of batch 64. Every run (mapping,
precision, seed) is a file in the folder --out. Finished runs are not repeated: to continue, give
the same command again. The script stops before --time-budget seconds have passed.

Losses are each client's mean over its first round, compared with those of the first entry of
--ways. Accuracies are the global model's, after the last round and in the best round.
"""

import argparse
import contextlib
import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any, TypedDict

import common

from fedcog.data import Dataset
from fedcog.runs.config.experiment import Experiment
from fedcog.runs.environment import find_device


class RunRecord(TypedDict):
    """The file of a finished run.

    Attributes:
        losses: Mean loss of each client in the first round.
        accuracies: Test accuracy of the global model after every round.
        seconds: Wall time of the run.
        settings: The settings that decide the result.
    """

    losses: list[float]
    accuracies: list[float]
    seconds: float
    settings: dict[str, Any]


Runs = dict[str, dict[int, RunRecord]]
"""Finished runs by way ("mapping,precision") and seed."""


def make_experiment(
    options: argparse.Namespace, mapping: str, precision: str, seed: int
) -> Experiment:
    """Return the experiment of one run.

    Args:
        options: The command line.
        mapping: How clients train.
        precision: As in `fedcog run`, or "tf32" for float32 with TF32 allowed.
        seed: The seed.

    Returns:
        The experiment.
    """
    tiny_settings: dict[str, Any] = {"clients": 3, "local_steps": 3, "batch_size": 8}
    return common.paper_experiment(
        options.algorithm,
        mapping=mapping,
        precision="float32" if precision == "tf32" else precision,
        tf32=precision == "tf32",
        seed=seed,
        rounds=options.rounds,
        evaluate_local=False,
        device=str(options.device),
        **(tiny_settings if options.tiny else {}),
    )


def run_until_deadline(
    experiment: Experiment, dataset: Dataset, deadline: float
) -> RunRecord | None:
    """Run an experiment, unless it would end after the deadline.

    Args:
        experiment: The experiment.
        dataset: Its data set.
        deadline: Time of `time.monotonic` at which to stop.

    Returns:
        The record of the run; None if there was not enough time.
    """
    losses: list[float] = []
    accuracies: list[float] = []
    start_time = time.monotonic()
    last_time = start_time
    with contextlib.closing(common.run_rounds(experiment, dataset)) as rounds:
        for finished_round in rounds:
            now = time.monotonic()
            losses = losses or [client["loss"] for client in finished_round.record.local]
            accuracies.append(finished_round.record.scores["accuracy"])
            round_seconds = now - last_time
            if now + round_seconds > deadline and len(accuracies) < experiment.rounds:
                return None
            last_time = now
    return {
        "losses": losses,
        "accuracies": accuracies,
        "seconds": time.monotonic() - start_time,
        "settings": _result_settings(experiment),
    }


def _result_settings(experiment: Experiment) -> dict[str, Any]:
    """Return the settings that decide the result, without those of the machine."""
    return {
        name: value
        for name, value in experiment.to_dict().items()
        if name not in ("data_dir", "threads")
    }


def read_run(path: Path, experiment: Experiment) -> RunRecord | None:
    """Read a finished run.

    Args:
        path: File of the run.
        experiment: The experiment that it must be of.

    Returns:
        The record; None if the file does not exist.

    Raises:
        SystemExit: If the file has other settings.
    """
    if not path.exists():
        return None
    run: RunRecord = json.loads(path.read_text(encoding="utf-8"))
    if run["settings"] != json.loads(json.dumps(_result_settings(experiment))):
        raise SystemExit(f"{path} has other settings: choose another --out.")
    return run


def write_run(path: Path, run: RunRecord | None) -> None:
    """Write a finished run, completely or not at all.

    Args:
        path: File of the run.
        run: The record; None if there was not enough time, which is only printed.
    """
    if run is None:
        print(f"{path.name}: no time left", file=sys.stderr)
        return
    temporary_path = path.with_suffix(".part")
    temporary_path.write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")
    temporary_path.replace(path)
    accuracy = 100 * run["accuracies"][-1]
    print(f"{path.name}: {accuracy:.2f} %, {run['seconds']:.1f} s", file=sys.stderr)


def collect_runs(options: argparse.Namespace, dataset: Dataset) -> Runs:
    """Read finished runs, and run missing ones while there is time.

    Args:
        options: The command line.
        dataset: The data set.

    Returns:
        All finished runs.
    """
    deadline = time.monotonic() + options.time_budget
    longest_seconds = dict.fromkeys(options.ways, 0.0)
    runs: Runs = {way: {} for way in options.ways}
    for seed, way in itertools.product(options.seeds, options.ways):
        mapping, precision = way.split(",")
        experiment = make_experiment(options, mapping, precision, seed)
        path = options.out / f"{options.algorithm}-{mapping}-{precision}-seed-{seed}.json"
        run = read_run(path, experiment)
        if run is None and time.monotonic() + longest_seconds[way] < deadline:
            run = run_until_deadline(experiment, dataset, deadline)
            seconds = float("inf") if run is None else run["seconds"]
            longest_seconds[way] = max(longest_seconds[way], seconds)
            write_run(path, run)
        if run is not None:
            runs[way][seed] = run
    return runs


def loss_table(runs: Runs) -> str:
    """Format how much first-round losses differ from those of the first way."""
    (reference_way, reference_runs), *other_ways = runs.items()
    rows = []
    for way, way_runs in other_ways:
        for seed in sorted(reference_runs.keys() & way_runs.keys()):
            losses = way_runs[seed]["losses"]
            reference_losses = reference_runs[seed]["losses"]
            differences = [
                abs(loss - reference) / abs(reference)
                for loss, reference in zip(losses, reference_losses, strict=True)
            ]
            largest = f"{max(differences):.1e}"
            mean = f"{statistics.mean(differences):.1e}"
            rows.append([way, str(seed), largest, mean])
    head = [
        "mapping, precision",
        "seed",
        f"largest relative difference from {reference_way}",
        "mean",
    ]
    return common.markdown_table(head, rows) if rows else ""


def accuracy_table(runs: Runs, num_rounds: int) -> str:
    """Format mean and standard deviation over seeds, and the accuracy of every seed.

    Args:
        runs: All finished runs.
        num_rounds: Rounds of every run.

    Returns:
        A Markdown table.
    """
    rows = []
    for way, way_runs in runs.items():
        last = [100 * way_runs[seed]["accuracies"][-1] for seed in sorted(way_runs)]
        best = [100 * max(way_runs[seed]["accuracies"]) for seed in sorted(way_runs)]
        by_seed = ", ".join(f"{score:.2f}" for score in last)
        median_seconds = "-"
        if way_runs:
            median = statistics.median(run["seconds"] for run in way_runs.values())
            median_seconds = f"{median:.1f} s"
        rows.append(
            [way, _mean_and_deviation(last), by_seed, _mean_and_deviation(best), median_seconds]
        )
    head = [
        "mapping, precision",
        f"test accuracy after {num_rounds} rounds, %",
        "by seed",
        "best, %",
        "median run",
    ]
    return common.markdown_table(head, rows)


def _mean_and_deviation(scores: list[float]) -> str:
    if len(scores) < 2:
        return ", ".join(f"{score:.2f}" for score in scores) or "-"
    return f"{statistics.mean(scores):.2f} ± {statistics.stdev(scores):.2f}"


def main() -> None:
    """Run what is missing while there is time, and write the tables."""
    parser = common.make_parser(__doc__, "results/accuracy")
    parser.add_argument(
        "--ways",
        nargs="+",
        default=["vmap,float32", "graph,float32", "graph,tf32", "graph,bfloat16"],
        help="mapping,precision pairs to run; the first is the reference for the others",
    )
    parser.add_argument(
        "--algorithm",
        default="fedavg",
        help="as in fedcog run; FedCOG generates from the first round on",
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument(
        "--time-budget",
        type=float,
        default=float("inf"),
        help="seconds after which no run starts",
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
    num_images = (300, 100) if options.tiny else ()
    dataset = common.load_images(options.data, *num_images)
    runs = collect_runs(options, dataset)
    num_requested = len(runs) * len(options.seeds)
    num_finished = sum(len(way_runs) for way_runs in runs.values())
    paragraphs = [
        f"{options.algorithm}, {num_finished} of {num_requested} runs done.",
        accuracy_table(runs, options.rounds),
    ]
    losses = loss_table(runs)
    if losses:
        paragraphs.append(losses)
    facts = common.describe_environment(options.device, options.data)
    common.write_report(options.out / "summary.md", "Accuracy", facts, paragraphs, {"runs": runs})
    print((options.out / "summary.md").read_text())


if __name__ == "__main__":
    main()
