"""Measure the engine on one GPU against earlier numbers, two targets and a plain PyTorch loop.

python benchmarks/gpu.py --out results/gpu.md [--mapping auto] [--against vmap] [--only fedavg plain
...]

Ten clients (Dirichlet 0.1) train the paper's CNN on batches of 64, with crop and flip, SGD with
momentum and weight decay. Seconds are wall time between rounds, after the device has finished: the
median after a warm-up. Rounds are not evaluated unless a row says so. The time of a local step is a
slope: (a round of 400 steps - one of 100) / 300. `--against eager` means vmap. Results are written
after every part: the tables to FILE.md, every timed round to FILE.json.

The table compares with a prototype, with the "bar" (required) and with the "aim" (desired).
"""

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import common
import plain
import torch

from fedcog.algorithms import ALGORITHMS
from fedcog.data import Dataset
from fedcog.federation.backend import Diverged
from fedcog.models.checks import ModelError
from fedcog.runs.config.experiment import Experiment
from fedcog.runs.config.user_objects import UserObjects
from fedcog.runs.environment import find_device, torch_settings
from fedcog.runs.runner import Runner, RunOptions, run_in_step

INNER_ALGORITHMS = ("fedprox", "scaffold", "moon", "fedsam", "fedgen", "vhl", "ditto")
IMPORTED_MODULES = (
    "torch._inductor.compile_fx, torch._inductor.codegen.triton, triton.compiler, fedcog"
)

PartResult = dict[str, Any]
"""What one part measured, by the keys of FILE.json."""

MappingResults = dict[str, PartResult]
"""The parts measured under one mapping, by name."""


class Target(NamedTuple):
    """A row of the main table.

    Attributes:
        work: What is measured.
        unit: Unit of all numbers.
        prototype: What a prototype measured.
        bar: Required value.
        aim: Desired value.
        larger_is_better: Whether values above bar and aim meet them.
    """

    work: str
    unit: str
    prototype: float | None = None
    bar: float | None = None
    aim: float | None = None
    larger_is_better: bool = False

    def verdict(self, value: float) -> str:
        """Say whether a value meets the aim, the bar, or neither."""
        for name, goal in (("aim", self.aim), ("bar", self.bar)):
            if goal is None:
                continue
            if (value >= goal) if self.larger_is_better else (value <= goal):
                return f"meets the {name}"
        return "-" if self.bar is None else "misses the bar"


TARGETS = {
    "step": Target("local step, 10 clients x batch 64", "ms", 0.93, 0.45, 0.2),
    "fedavg": Target("FedAvg round, 10 x 400 steps", "s", 0.37, 0.2, 0.08),
    "fedcog": Target(
        "FedCOG round, 100 generation steps of 256 images a client, 400 steps", "s", 1.04, 0.5, 0.2
    ),
    "ratio": Target(
        "FedAvg round against benchmarks/plain.py", "x", None, 15, 40, larger_is_better=True
    ),
    "start": Target(
        "process start to the end of the first FedAvg round, no compiled kernels cached",
        "s",
        None,
        20,
    ),
    "start again": Target("the same once more, caches kept", "s"),
    "start bare": Target("the same with nothing cached and no Python byte code either", "s"),
    "seeds": Target(
        "three seeds of FedAvg as one larger cohort, against one after another",
        "x",
        larger_is_better=True,
    ),
    "evaluation": Target("FedAvg round, and all 11 models on 10,000 test images", "s"),
}


@dataclass(frozen=True)
class Bench:
    """Data, device and sizes of all measurements.

    Attributes:
        options: The command line.
        dataset: The data set.
        device: The device.
        num_warmup: Rounds before the timed ones.
        num_timed: Timed rounds.
        step_counts: Local steps of the short and of the long round.
        plain_seconds: Rounds of the plain loop by layout, measured once for all mappings.
    """

    options: argparse.Namespace
    dataset: Dataset
    device: torch.device
    num_warmup: int = 2
    num_timed: int = 5
    step_counts: tuple[int, int] = (100, 400)
    plain_seconds: dict[str, list[float]] = field(default_factory=dict)

    def experiment(self, mapping: str, algorithm: str = "fedavg", **settings: Any) -> Experiment:
        """Return the paper's experiment under one mapping.

        Args:
            mapping: How clients train, as in `fedcog run --mapping`.
            algorithm: Name of the algorithm.
            **settings: Settings that differ from the paper's.

        Returns:
            The experiment; a tiny one if the command line asks for it.
        """
        experiment_settings = {
            "local_steps": self.step_counts[1],
            "device": str(self.device),
            "mapping": mapping,
        }
        experiment_settings |= settings
        algorithm_settings = None
        if self.options.tiny:
            experiment_settings |= {"clients": 3, "batch_size": 8}
            algorithm_settings = {"fedcog": {"start_round": 0, "count": 8, "steps": 2}}
        return common.paper_experiment(algorithm, algorithm_settings, **experiment_settings)

    def time_rounds(self, experiment: Experiment, evaluate: bool = False) -> common.Timing:
        """Measure the rounds of an experiment.

        Args:
            experiment: The experiment.
            evaluate: Whether every round evaluates the global and all local models.

        Returns:
            Seconds and peak memory.
        """
        return common.time_rounds(
            experiment,
            self.dataset,
            num_warmup=self.num_warmup,
            num_timed=self.num_timed,
            evaluate=evaluate,
        )


# The parts. Each takes the bench and a mapping.


def measure_fedavg(bench: Bench, mapping: str) -> PartResult:
    """Measure FedAvg rounds of two lengths, and the slope between them."""
    few_steps, many_steps = bench.step_counts
    short = bench.time_rounds(bench.experiment(mapping, local_steps=few_steps))
    long = bench.time_rounds(bench.experiment(mapping, local_steps=many_steps))
    step_ms = 1e3 * (long.median - short.median) / (many_steps - few_steps)
    return {
        "step": step_ms,
        "fedavg": long.median,
        "memory": long.peak_memory,
        "short": short.round_seconds,
        "long": long.round_seconds,
    }


def measure_fedcog(bench: Bench, mapping: str) -> PartResult:
    """Measure FedCOG rounds that generate inputs."""
    timing = bench.time_rounds(bench.experiment(mapping, "fedcog"))
    return {
        "fedcog": timing.median,
        "memory": timing.peak_memory,
        "rounds": timing.round_seconds,
    }


def measure_evaluation(bench: Bench, mapping: str) -> PartResult:
    """Measure FedAvg rounds that evaluate the global and all local models."""
    timing = bench.time_rounds(bench.experiment(mapping), evaluate=True)
    return {
        "evaluation": timing.median,
        "memory": timing.peak_memory,
        "rounds": timing.round_seconds,
    }


def compare_with_plain_loop(bench: Bench, mapping: str) -> PartResult:
    """Compare with the plain loop in its faster layout, after a check that both agree."""
    experiment = bench.experiment(mapping)
    agreement = plain.check_agreement(experiment, bench.dataset)
    if not bench.plain_seconds:
        bench.plain_seconds.update(plain.time_layouts(experiment, bench.dataset, num_rounds=3))
    plain_median = min(map(statistics.median, bench.plain_seconds.values()))
    timing = bench.time_rounds(experiment)
    return {
        "ratio": plain_median / timing.median,
        "plain": plain_median,
        "ours": timing.round_seconds,
        "agreement": agreement,
        "seconds": bench.plain_seconds,
    }


def measure_start(bench: Bench, mapping: str) -> PartResult:
    """Measure the time from process start to the end of the first round, three times.

    The first process finds no compiled kernels in the cache, the second finds those of the first.
    Both find Python's byte code, as an installer leaves it. The third finds neither.
    """
    command = [sys.executable, __file__, "--first-round"]
    command += ["--mapping", mapping, "--device", str(bench.device)]
    command += ["--data", bench.options.data] if bench.options.data else []
    command += ["--tiny"] if bench.options.tiny else []
    with tempfile.TemporaryDirectory() as folder:
        environment = _environment_with_caches(Path(folder, "usual"))
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        bare_environment = _environment_with_caches(Path(folder, "bare"))
        bare_environment["PYTHONDONTWRITEBYTECODE"] = "1"
        write_byte_code = [sys.executable, "-c", f"import {IMPORTED_MODULES}"]
        subprocess.run(write_byte_code, env=environment, check=True)
        return {
            "start": _seconds_to_first_round(command, environment),
            "start again": _seconds_to_first_round(command, environment),
            "start bare": _seconds_to_first_round(command, bare_environment),
        }


def _environment_with_caches(folder: Path) -> dict[str, str]:
    """Return this process's environment with all caches in subfolders of `folder`."""
    subfolders = {
        "TRITON_CACHE_DIR": "triton",
        "TORCHINDUCTOR_CACHE_DIR": "inductor",
        "CUDA_CACHE_PATH": "cuda",
        "FEDCOG_CACHE": "fedcog",
        "PYTHONPYCACHEPREFIX": "bytecode",
    }
    return os.environ | {name: str(folder / subfolder) for name, subfolder in subfolders.items()}


def _seconds_to_first_round(command: list[str], environment: dict[str, str]) -> float:
    start_time = time.time()
    process = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    end_time = float(process.stdout.split()[-1])
    return end_time - start_time


def measure_algorithms(bench: Bench, mapping: str) -> PartResult:
    """Measure rounds of every algorithm, and of some inside FedCOG."""
    names = [*ALGORITHMS, *(f"{name}+fedcog" for name in INNER_ALGORITHMS)]
    short_bench = replace(bench, num_timed=3)
    return {"algorithms": {name: _measure_algorithm(short_bench, mapping, name) for name in names}}


def _measure_algorithm(bench: Bench, mapping: str, name: str) -> PartResult:
    """Measure rounds of one algorithm, or return why it failed."""
    try:
        timing = bench.time_rounds(bench.experiment(mapping, name))
    except (Diverged, ModelError, torch.OutOfMemoryError) as error:
        return {"failed": f"{type(error).__name__}: {error}".splitlines()[0]}
    return {
        "seconds": timing.median,
        "memory": timing.peak_memory,
        "rounds": timing.round_seconds,
    }


def measure_stacked_seeds(bench: Bench, mapping: str) -> PartResult:
    """Compare three seeds as one larger cohort with three seeds one after another."""
    one_seed = _seconds_of_stacked_seeds(bench, mapping, num_seeds=1)
    three_seeds = _seconds_of_stacked_seeds(bench, mapping, num_seeds=3)
    return {"seeds": 3 * one_seed / three_seeds, "one": one_seed, "three": three_seeds}


def _seconds_of_stacked_seeds(bench: Bench, mapping: str, num_seeds: int) -> float:
    """Measure a round of stacked seeds after warm-up; the last, evaluated round does not count."""
    num_warmup = bench.num_warmup
    num_rounds = num_warmup + 2 * bench.num_timed
    experiment = bench.experiment(mapping, checkpoint_every=10**6)
    experiment = common.without_evaluation(experiment, num_rounds)
    seeded_experiments = [replace(experiment, seed=seed) for seed in range(num_seeds)]
    end_times: list[float] = []  # one for every seed of every round

    def record_end(experiment: Experiment, line: dict[str, Any]) -> None:
        end_times.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder, torch_settings(experiment):
        objects = UserObjects(bench.dataset)
        options = RunOptions(callbacks=[record_end])
        with contextlib.ExitStack() as stack:
            runners = [
                stack.enter_context(
                    Runner(seeded, Path(folder, str(seeded.seed)), objects, options)
                )
                for seeded in seeded_experiments
            ]
            run_in_step(runners)
    seconds = end_times[num_rounds * num_seeds - 1] - end_times[num_warmup * num_seeds - 1]
    return seconds / (num_rounds - num_warmup)


PARTS: dict[str, Callable[[Bench, str], PartResult]] = {
    "fedavg": measure_fedavg,
    "fedcog": measure_fedcog,
    "evaluation": measure_evaluation,
    "start": measure_start,
    "plain": compare_with_plain_loop,
    "together": measure_stacked_seeds,
    "algorithms": measure_algorithms,
}


def target_table(results: dict[str, MappingResults], first: str, second: str, tiny: bool) -> str:
    """Format the measured values next to their targets.

    Args:
        results: The parts measured so far, by mapping.
        first: The mapping that is compared with the targets.
        second: Another mapping for a further column, or "".
        tiny: Whether sizes are tiny, so that no verdict is given.

    Returns:
        A Markdown table.
    """
    head = ["work", "prototype", "bar", "aim", f"measured ({first})", "verdict"]
    if second:
        head.append(second)
    rows = []
    for key, target in TARGETS.items():
        value = _find_value(results.get(first, {}), key)
        if value is None:
            continue
        row = [
            target.work,
            common.format_number(target.prototype, target.unit),
            common.format_number(target.bar, target.unit),
            common.format_number(target.aim, target.unit),
            common.format_number(value, target.unit),
            "tiny" if tiny else target.verdict(value),
        ]
        if second:
            second_value = _find_value(results.get(second, {}), key)
            row.append(common.format_number(second_value, target.unit))
        rows.append(row)
    return common.markdown_table(head, rows)


def _find_value(parts: MappingResults, key: str) -> float | None:
    """Return the value with this key from the part that measured it."""
    return next((part[key] for part in parts.values() if key in part), None)


def algorithm_table(results: dict[str, MappingResults]) -> str:
    """Format the seconds of a round by algorithm, with a column for each mapping."""
    by_mapping = {
        mapping: parts["algorithms"]["algorithms"]
        for mapping, parts in results.items()
        if "algorithms" in parts
    }
    if not by_mapping:
        return ""
    names = next(iter(by_mapping.values()))
    rows = [
        [name, *(_format_algorithm(by_algorithm[name]) for by_algorithm in by_mapping.values())]
        for name in names
    ]
    head = ["algorithm", *(f"round ({mapping})" for mapping in by_mapping)]
    return f"Every algorithm's round of the same length:\n\n{common.markdown_table(head, rows)}"


def _format_algorithm(result: PartResult) -> str:
    if "failed" in result:
        reason: str = result["failed"]
        return reason
    return f"{result['seconds']:.3f} s, {result['memory'] / 2**30:.2f} GiB"


def plain_loop_note(part: PartResult) -> str:
    """Describe how the plain loop was measured and how closely it agrees with the engine."""
    fastest = ", ".join(
        f"{layout} {min(seconds):.3f} s" for layout, seconds in part["seconds"].items()
    )
    agreement = part["agreement"]
    return (
        f"Fastest rounds of the plain loop: {fastest} (cuDNN searches for its fastest algorithm; "
        "TF32 in convolutions, torch's default). "
        f"After {agreement['steps']} steps without TF32, it differs from the engine by "
        f"{agreement['relative']:.0e} of the distance from the initial model."
    )


def write_results(bench: Bench, results: dict[str, MappingResults], mappings: list[str]) -> None:
    """Write what was measured so far.

    Args:
        bench: The bench.
        results: The parts measured so far, by mapping.
        mappings: One or two mappings.
    """
    second = mappings[1] if len(mappings) > 1 else ""
    paragraphs = [target_table(results, mappings[0], second, bench.options.tiny)]
    if "plain" in results[mappings[0]]:
        paragraphs.append(plain_loop_note(results[mappings[0]]["plain"]))
    algorithms = algorithm_table(results)
    if algorithms:
        paragraphs.append(algorithms)
    facts = common.describe_environment(bench.device, bench.options.data)
    common.write_report(
        bench.options.out, "Speed on one GPU", facts, paragraphs, {"found": results}
    )


def print_first_round_end(bench: Bench, mapping: str) -> None:
    """Run one round and print the time at which it ended."""
    experiment = common.without_evaluation(bench.experiment(mapping), 1)
    next(common.run_rounds(experiment, bench.dataset))
    common.synchronized_time(bench.device)
    print(time.time())


def main() -> None:
    """Measure the requested parts, and write the results after each."""
    parser = common.make_parser(__doc__, "results/gpu.md")
    parser.add_argument(
        "--mapping",
        default="auto",
        help="how clients train, as in fedcog run (default: %(default)s)",
    )
    parser.add_argument("--against", help="another mapping to compare with; eager: vmap")
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, default=list(PARTS), help="measure only these parts"
    )
    parser.add_argument("--first-round", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = find_device(options.device)
    num_images = (300, 100) if options.tiny else ()
    dataset = common.load_images(options.data, *num_images)
    bench = Bench(options, dataset, device)
    if options.tiny:
        bench = replace(bench, num_warmup=1, num_timed=2, step_counts=(1, 3))
    if options.first_round:
        print_first_round_end(bench, options.mapping)
        return
    mappings = [options.mapping]
    if options.against:
        mappings.append("vmap" if options.against == "eager" else options.against)
    results: dict[str, MappingResults] = {mapping: {} for mapping in mappings}
    for mapping in mappings:
        for name in options.only:
            results[mapping][name] = PARTS[name](bench, mapping)
            write_results(bench, results, mappings)
            print(f"{mapping}: {name} measured", file=sys.stderr)
    print(options.out.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
