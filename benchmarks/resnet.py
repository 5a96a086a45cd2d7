"""How fast and how large ResNet-18 is on one GPU: ten clients of a FLAIR-shaped federation, against
a plain loop.

    python benchmarks/resnet.py --out results/resnet.md [--models resnet18 resnet18-gn]
        [--mappings graph vmap loop]
    python benchmarks/resnet.py --out results/kernels.md --trace 60 [--algorithm fedcog]
        [--count 256] [--cohort 30]    (which kernels a round in TF32 runs)

Ten of 200 clients take part in a round of 10 steps of batch 32 on random images of 64x64 with 17
labels, as the paper's experiment on FLAIR has it; SGD with momentum, crop and flip. The plain loop
trains them one after another, a model and an optimiser each (foreach), with cuDNN's search on and
convolutions in TF32, as torch ships. Seconds are wall time of a round, after the device has
finished: the median of some after warm-up, none of them evaluated.
"""

import argparse
import copy
import itertools
import statistics
import sys
import trace
from typing import Any

import common
import numpy as np
import plain
import torch
import torch.nn.functional as F

from fedcog.data import Dataset
from fedcog.models.zoo import build
from fedcog.runs.config.experiment import Experiment
from fedcog.runs.environment import find_device
from fedcog.runs.setup import ExperimentSetup, UserObjects

LABELS = 17
SIDE = 64
Found = dict[str, Any]


def images(users: int, each: int = 48, test: int = 100) -> Dataset:
    """Random images of several labels each, as many for every user."""
    draw = np.random.default_rng(0)
    count = users * each
    inputs = torch.from_numpy(draw.integers(0, 256, (count + test, 3, SIDE, SIDE), dtype=np.uint8))
    labels = torch.from_numpy(draw.random((count + test, LABELS)) < 0.16)
    owners = torch.arange(users).repeat_interleave(each)
    names = tuple(str(label) for label in range(LABELS))
    split = inputs[:count], labels[:count], inputs[count:], labels[count:]
    return Dataset("random images", *split, names, common.MEAN, common.STD, True, owners)


def setting(
    options: argparse.Namespace, model: str, mapping: str, algorithm: str = "fedavg", **more: Any
) -> Experiment:
    """The paper's experiment on FLAIR, but for the data."""
    chosen: Found = {"partition": "natural", "clients": options.clients}
    chosen |= {"participation": options.cohort / options.clients}
    chosen |= {
        "local_steps": 10,
        "batch_size": 32,
        "model": model,
        "mapping": mapping,
        "min_examples": 1,
    }
    made = {"start_round": 0, "count": options.count, "steps": options.generation_steps}
    small = {"fedcog": made | ({"steps": 2, "count": 2} if options.tiny else {})}
    return common.experiment(algorithm, small, **chosen | {"device": options.device} | more)


def by_hand(experiment: Experiment, dataset: Dataset, repeats: int) -> list[float]:
    """Seconds of rounds in a plain loop, in the better of two memory layouts."""
    ready = ExperimentSetup(experiment, UserObjects(dataset))
    data = ready.data
    members = range(10)
    module = build(experiment.model, (3, SIDE, SIDE), LABELS, 0).to(data.device)
    mean, std = (
        torch.tensor(part, device=data.device)[:, None, None]
        for part in (dataset.mean, dataset.std)
    )
    found: dict[str, list[float]] = {}
    for layout, last in plain.LAYOUTS.items():
        form = torch.channels_last if last else torch.contiguous_format
        ends = []
        with plain.convolutions(tf32=True, search=True):
            for round in range(repeats + 1):
                plan = data.plan_batches(
                    round, torch.tensor(members), experiment.local_steps, experiment.batch_size
                )
                trained = []
                for place in members:
                    local = copy.deepcopy(module).to(memory_format=form).train()  # type: ignore[call-overload]
                    optimiser = torch.optim.SGD(
                        local.parameters(), 0.01, 0.9, weight_decay=1e-5, foreach=True
                    )
                    for step in range(experiment.local_steps):
                        index = plan.indices[place, step]
                        inputs = (data.train_x[index].float() / 255 - mean) / std
                        optimiser.zero_grad()
                        outputs = local(inputs.contiguous(memory_format=form))
                        F.binary_cross_entropy_with_logits(
                            outputs, data.train_y[index].float()
                        ).backward()  # type: ignore[no-untyped-call]
                        optimiser.step()
                    trained.append(local.state_dict())
                for name in trained[0]:
                    torch.stack([one[name].float() for one in trained]).mean(0)
                ends.append(common.now(data.device))
        found[layout] = [after - before for before, after in itertools.pairwise(ends)]
    return min(found.values(), key=statistics.median)


def kernels(
    options: argparse.Namespace, dataset: Dataset, device: torch.device, **small: Any
) -> None:
    """What a round on a GPU is made of, by kernel and grid, the longest first."""
    experiment = setting(
        options, options.models[0], options.mappings[0], options.algorithm, tf32=True, **small
    )
    events, seconds = trace.recorded(experiment, dataset, host=False)
    spans = [
        event for event in events if event["ph"] == "X" and event.get("cat") in trace.ON_DEVICE
    ]
    for event in spans:
        event["name"] = f"{event['name'][:80]} {event.get('args', {}).get('grid', '')}"
    longest = list(trace.summed(spans).items())[: options.trace]
    rows = [
        [f"`{name}`", f"{one['count']:.0f}", f"{1e3 * one['seconds']:.3f} ms"]
        for name, one in longest
    ]
    told = f"{len(spans):,} kernels and copies, "
    told += f"{1e3 * trace.busy(spans):.1f} of {1e3 * seconds:.1f} ms busy."
    parts = [told, common.table(["kernel and grid", "count", "time"], rows)]
    common.write(
        options.out, "A round of ResNet-18, by kernel", common.about(device, None), parts, {}
    )
    print(options.out.with_suffix(".md").read_text())


def main() -> None:
    """Measure, model by model, and write down after each part."""
    parser = common.parser(__doc__, "results/resnet.md")
    parser.add_argument("--models", nargs="+", default=["resnet18", "resnet18-gn"])
    parser.add_argument("--mappings", nargs="+", default=["graph", "vmap", "loop"])
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--cohort", type=int, default=10, help="clients in a round")
    parser.add_argument(
        "--count", type=int, default=32, help="inputs that a client of FedCOG generates"
    )
    parser.add_argument("--generation-steps", type=int, default=100)
    parser.add_argument(
        "--algorithm", default="fedavg", help="of the round whose kernels are listed"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--trace", type=int, default=0, help="time nothing, and list so many kernels of a round"
    )
    options = parser.parse_args()
    device = find_device(options.device)
    if options.tiny:
        options.clients = 12
        options.repeats = 2
    dataset = images(options.clients, 3 if options.tiny else 48)
    small: Found = {"local_steps": 1, "batch_size": 2} if options.tiny else {}
    if options.trace:
        kernels(options, dataset, device, **small)
        return
    found: dict[str, Found] = {}
    rows: list[list[str]] = []

    def note(model: str, what: str, timing: common.Timing, against: float) -> None:
        seconds = timing.rounds
        memory = timing.memory
        median = statistics.median(seconds)
        found.setdefault(model, {})[what] = timing._asdict()
        ratio = f"{against / median:.2f}x" if against else "-"
        first = common.number(timing.first, "s") if timing.first else "-"
        rows.append(
            [model, what, common.number(median, "s"), first, f"{memory / 2**30:.2f} GiB", ratio]
        )
        head = [
            "network",
            "round of 10 clients",
            "seconds",
            "until the first ends",
            "GPU memory at most",
            "plain loop / this",
        ]
        facts = common.about(device, None) | {
            "data": f"random images of {SIDE}x{SIDE}, {options.clients} users"
        }
        facts["TF32"] = "on in the plain loop's convolutions and where a row names it"
        common.write(
            options.out, "ResNet-18 on one GPU", facts, [common.table(head, rows)], {"found": found}
        )
        print(rows[-1], file=sys.stderr, flush=True)

    for model in options.models:
        common.clean(device)
        seconds = by_hand(setting(options, model, "loop", **small), dataset, options.repeats)
        memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
        note(model, "plain loop, FedAvg", common.Timing(seconds, memory), 0.0)
        plain_round = statistics.median(seconds)
        for mapping, tf32 in itertools.product(options.mappings, (True, False)):
            experiment = setting(options, model, mapping, tf32=tf32, **small)
            timing = common.timed(experiment, dataset, warm=2, count=options.repeats)
            what = f"{mapping}{', TF32' if tf32 else ''}, FedAvg"
            note(model, what, timing, plain_round)
        experiment = setting(options, model, options.mappings[0], "fedcog", **small)
        timing = common.timed(experiment, dataset, warm=2, count=options.repeats)
        note(model, f"{options.mappings[0]}, FedCOG", timing, 0.0)
    print(options.out.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
