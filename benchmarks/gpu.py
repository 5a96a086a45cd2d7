"""How fast the engine is on one GPU, against a prototype's numbers, a bar, an aim and a plain
PyTorch loop.

python benchmarks/gpu.py --out results/gpu.md [--mapping auto] [--against vmap] [--only fedavg plain
...]

Ten clients (Dirichlet 0.1) x batch 64, the paper's CNN, crop and flip, SGD with momentum and weight
decay. Seconds are wall time between rounds, after the device has finished: the median of some after
warm-up, none of them evaluated but where it says so. A local step is a slope, (a round of 400 steps
- one of 100) / 300. `--against eager` means vmap. Results are written after every part: FILE.md,
and all single rounds in FILE.json.
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
from fedcog.runs.environment import find_device, torch_settings
from fedcog.runs.runner import Runner, RunOptions, run_in_step
from fedcog.runs.setup import UserObjects

UNDER = ("fedprox", "scaffold", "moon", "fedsam", "fedgen", "vhl", "ditto")
Found = dict[str, Any]


class Target(NamedTuple):
    """A line of the table: what is measured, and what it should come to."""

    work: str
    unit: str
    prototype: float | None = None
    bar: float | None = None
    aim: float | None = None
    more: bool = False  # is more better?

    def verdict(self, value: float) -> str:
        """Does the value meet the aim, the bar, or neither?"""
        for name, goal in (("aim", self.aim), ("bar", self.bar)):
            if goal is not None and (value >= goal if self.more else value <= goal):
                return f"meets the {name}"
        return "-" if self.bar is None else "misses the bar"


TARGETS = {
    "step": Target("local step, 10 clients x batch 64", "ms", 0.93, 0.45, 0.2),
    "fedavg": Target("FedAvg round, 10 x 400 steps", "s", 0.37, 0.2, 0.08),
    "fedcog": Target(
        "FedCOG round, 100 generation steps of 256 images a client, 400 steps", "s", 1.04, 0.5, 0.2
    ),
    "ratio": Target("FedAvg round against benchmarks/plain.py", "x", None, 15, 40, more=True),
    "start": Target(
        "process start to the end of the first FedAvg round, no compiled kernels cached",
        "s",
        None,
        20,
    ),
    "start again": Target("the same once more, caches kept", "s"),
    "start bare": Target("the same with nothing cached and no Python byte code either", "s"),
    "seeds": Target(
        "three seeds of FedAvg as one larger cohort, against one after another", "x", more=True
    ),
    "evaluation": Target("FedAvg round, and all 11 models on 10,000 test images", "s"),
}


@dataclass(frozen=True)
class Bench:
    """What is measured on, and how long."""

    options: argparse.Namespace
    dataset: Dataset
    device: torch.device
    warm: int = 2
    count: int = 5
    steps: tuple[int, int] = (100, 400)
    plain: dict[str, list[float]] = field(default_factory=dict)  # filled once, for all mappings

    def experiment(self, mapping: str, algorithm: str = "fedavg", **settings: Any) -> Experiment:
        """The paper's setting under one mapping."""
        small = (
            {"fedcog": {"start_round": 0, "count": 8, "steps": 2}} if self.options.tiny else None
        )
        chosen = {
            "local_steps": self.steps[1],
            "device": str(self.device),
            "mapping": mapping,
        } | settings
        chosen |= {"clients": 3, "batch_size": 8} if self.options.tiny else {}
        return common.experiment(algorithm, small, **chosen)

    def timed(self, experiment: Experiment, score: bool = False) -> common.Timing:
        """The experiment's rounds."""
        return common.timed(experiment, self.dataset, warm=self.warm, count=self.count, score=score)


def fedavg(bench: Bench, mapping: str) -> Found:
    """Rounds of two lengths, and the slope between them."""
    few, many = bench.steps
    short = bench.timed(bench.experiment(mapping, local_steps=few))
    long = bench.timed(bench.experiment(mapping, local_steps=many))
    step = 1e3 * (long.median - short.median) / (many - few)
    return {
        "step": step,
        "fedavg": long.median,
        "memory": long.memory,
        "short": short.rounds,
        "long": long.rounds,
    }


def fedcog(bench: Bench, mapping: str) -> Found:
    """Rounds that generate."""
    timing = bench.timed(bench.experiment(mapping, "fedcog"))
    return {"fedcog": timing.median, "memory": timing.memory, "rounds": timing.rounds}


def evaluation(bench: Bench, mapping: str) -> Found:
    """Rounds with global and local models evaluated."""
    timing = bench.timed(bench.experiment(mapping), score=True)
    return {"evaluation": timing.median, "memory": timing.memory, "rounds": timing.rounds}


def against_plain(bench: Bench, mapping: str) -> Found:
    """Rounds of a plain loop, in the better of two layouts, once both are seen to agree."""
    experiment = bench.experiment(mapping)
    checked = plain.agree(experiment, bench.dataset)
    if not bench.plain:
        bench.plain.update(plain.timed(experiment, bench.dataset, repeats=3))
    best = min(map(statistics.median, bench.plain.values()))
    ours = bench.timed(experiment)
    found = {"ratio": best / ours.median, "plain": best, "ours": ours.rounds}
    return found | {"agreement": checked, "seconds": bench.plain}


def start(bench: Bench, mapping: str) -> Found:
    """A process of its own, three times: with no cache of compiled kernels, with what that left,
    and with nothing.

    Python's own byte code is there the first two times, as an installer leaves it, and not the
    third.
    """
    command = [
        sys.executable,
        __file__,
        "--first-round",
        "--mapping",
        mapping,
        "--device",
        str(bench.device),
    ]
    command += ["--data", bench.options.data] if bench.options.data else []
    command += ["--tiny"] if bench.options.tiny else []
    modules = "torch._inductor.compile_fx, torch._inductor.codegen.triton, triton.compiler, fedcog"
    with tempfile.TemporaryDirectory() as folder:
        usual = _environment(Path(folder, "usual"))
        bare = _environment(Path(folder, "bare"))
        usual.pop("PYTHONDONTWRITEBYTECODE", None)
        subprocess.run([sys.executable, "-c", f"import {modules}"], env=usual, check=True)
        found = {name: _first_round(command, usual) for name in ("start", "start again")}
        return found | {
            "start bare": _first_round(command, bare | {"PYTHONDONTWRITEBYTECODE": "1"})
        }


def _environment(folder: Path) -> dict[str, str]:
    """This process's, but with every cache below `folder`, where there is nothing yet."""
    caches = {
        "TRITON_CACHE_DIR": "triton",
        "TORCHINDUCTOR_CACHE_DIR": "inductor",
        "CUDA_CACHE_PATH": "cuda",
    }
    caches |= {"FEDCOG_CACHE": "fedcog", "PYTHONPYCACHEPREFIX": "bytecode"}
    return os.environ | {name: str(folder / part) for name, part in caches.items()}


def _first_round(command: list[str], environment: dict[str, str]) -> float:
    began = time.time()
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout.split()[-1]) - began


def algorithms(bench: Bench, mapping: str) -> Found:
    """Rounds of every algorithm, and of some under FedCOG."""
    names = [*ALGORITHMS, *(f"{name}+fedcog" for name in UNDER)]
    return {"algorithms": {name: _one(replace(bench, count=3), mapping, name) for name in names}}


def together(bench: Bench, mapping: str) -> Found:
    """How much sooner a comparison's seeds are done as one larger cohort than one after another."""
    warm = bench.warm
    last = bench.warm + 2 * bench.count

    def seconds(count: int) -> float:
        """Of a round of so many seeds, after warm-up; the last one, which is evaluated, does not
        count.
        """
        ends: list[float] = []
        experiment = common.unscored(bench.experiment(mapping, checkpoint_every=10**6), last)
        seeds = [replace(experiment, seed=seed) for seed in range(count)]
        with tempfile.TemporaryDirectory() as folder, torch_settings(experiment):
            objects = UserObjects(bench.dataset)
            options = RunOptions(callbacks=[_noting(ends)])
            with contextlib.ExitStack() as stack:
                runners = [
                    stack.enter_context(Runner(one, Path(folder, str(one.seed)), objects, options))
                    for one in seeds
                ]
                run_in_step(runners)
        return (ends[last * count - 1] - ends[warm * count - 1]) / (last - warm)

    one = seconds(1)
    three = seconds(3)
    return {"seeds": 3 * one / three, "one": one, "three": three}


def _noting(ends: list[float]) -> Callable[[Experiment, dict[str, Any]], None]:
    return lambda experiment, line: ends.append(time.perf_counter())


def _one(bench: Bench, mapping: str, name: str) -> Found:
    """One algorithm's round, or why there is none."""
    try:
        timing = bench.timed(bench.experiment(mapping, name))
    except (Diverged, ModelError, torch.OutOfMemoryError) as error:
        return {"failed": f"{type(error).__name__}: {error}".splitlines()[0]}
    return {"seconds": timing.median, "memory": timing.memory, "rounds": timing.rounds}


PARTS: dict[str, Callable[[Bench, str], Found]] = {
    "fedavg": fedavg,
    "fedcog": fedcog,
    "evaluation": evaluation,
    "start": start,
    "plain": against_plain,
    "together": together,
    "algorithms": algorithms,
}


def main_table(found: dict[str, Found], first: str, second: str, tiny: bool) -> str:
    """What was measured, against what it should be; tiny sizes are not judged."""
    head = [
        "work",
        "prototype",
        "bar",
        "aim",
        f"measured ({first})",
        "verdict",
        *([second] if second else []),
    ]
    rows = []
    for key, target in TARGETS.items():
        here, there = (_value(found.get(mapping, {}), key) for mapping in (first, second))
        if here is None:
            continue
        goals = [
            common.number(goal, target.unit) for goal in (target.prototype, target.bar, target.aim)
        ]
        row = [
            target.work,
            *goals,
            common.number(here, target.unit),
            "tiny" if tiny else target.verdict(here),
        ]
        rows.append([*row, *([common.number(there, target.unit)] if second else [])])
    return common.table(head, rows)


def _value(found: Found, key: str) -> float | None:
    """The number called `key` in whichever part measured it."""
    return next((part[key] for part in found.values() if key in part), None)


def algorithm_table(found: dict[str, Found]) -> str:
    """Seconds of a round by algorithm, one column for each mapping that was tried."""
    tried = {
        mapping: parts["algorithms"]["algorithms"]
        for mapping, parts in found.items()
        if "algorithms" in parts
    }
    if not tried:
        return ""
    names = next(iter(tried.values()))
    rows = [[name, *(_cell(one[name]) for one in tried.values())] for name in names]
    head = ["algorithm", *(f"round ({mapping})" for mapping in tried)]
    return f"Every algorithm's round of the same length:\n\n{common.table(head, rows)}"


def _cell(one: Found) -> str:
    return (
        one["failed"]
        if "failed" in one
        else f"{one['seconds']:.3f} s, {one['memory'] / 2**30:.2f} GiB"
    )


def report(bench: Bench, found: dict[str, Found], mappings: list[str]) -> None:
    """Write down what is known so far."""
    second = mappings[1] if len(mappings) > 1 else ""
    notes = []
    if "plain" in found[mappings[0]]:
        part = found[mappings[0]]["plain"]
        rounds = ", ".join(
            f"{layout} {min(seconds):.3f} s" for layout, seconds in part["seconds"].items()
        )
        notes.append(
            f"The plain loop's fastest rounds: {rounds} (cuDNN's search on, TF32 convolutions as "
            "torch ships). After "
            f"{part['agreement']['steps']} steps without TF32, it and the engine differ by "
            f"{part['agreement']['relative']:.0e} of the way they went."
        )
    parts = [
        main_table(found, mappings[0], second, bench.options.tiny),
        *notes,
        algorithm_table(found),
    ]
    facts = common.about(bench.device, bench.options.data)
    common.write(
        bench.options.out,
        "Speed on one GPU",
        facts,
        [part for part in parts if part],
        {"found": found},
    )


def first_round(bench: Bench, mapping: str) -> None:
    """Run one round and say when it was over."""
    next(common.rounds(common.unscored(bench.experiment(mapping), 1), bench.dataset))
    common.now(bench.device)
    print(time.time())


def main() -> None:
    """Measure the parts asked for, and write them down one by one."""
    parser = common.parser(__doc__, "results/gpu.md")
    parser.add_argument(
        "--mapping",
        default="auto",
        help="how clients are run, as in fedcog run (default: %(default)s)",
    )
    parser.add_argument("--against", help="another mapping to compare with; eager: vmap")
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, default=list(PARTS), help="these parts alone"
    )
    parser.add_argument("--first-round", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = find_device(options.device)
    dataset = common.images(options.data, *((300, 100) if options.tiny else ()))
    bench = Bench(options, dataset, device)
    if options.tiny:
        bench = replace(bench, warm=1, count=2, steps=(1, 3))
    if options.first_round:
        first_round(bench, options.mapping)
        return
    mappings = [
        options.mapping,
        *([{"eager": "vmap"}.get(options.against, options.against)] if options.against else []),
    ]
    found: dict[str, Found] = {mapping: {} for mapping in mappings}
    for mapping in mappings:
        for name in options.only:
            found[mapping][name] = PARTS[name](bench, mapping)
            report(bench, found, mappings)
            print(f"{mapping}: {name} measured", file=sys.stderr)
    print(options.out.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
