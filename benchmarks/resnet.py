"""Time and memory of ResNet-18 rounds on one GPU, compared with a plain PyTorch loop.

    python benchmarks/resnet.py --out results/resnet.md [--models resnet18 resnet18-gn]
        [--mappings graph vmap loop]
    python benchmarks/resnet.py --out results/kernels.md --trace 60 [--algorithm fedcog]
        [--count 256] [--cohort 30]    (lists the kernels of a round in TF32)

As in the paper's experiment on FLAIR, ten of 200 clients train in a round: 10 steps of batch 32 on
random images of 64x64 with 17 labels, SGD with momentum, crop and flip. The plain loop trains them
one after another, each with its own model and optimizer (foreach), with cuDNN's search for the
fastest algorithm and convolutions in TF32, which is torch's default. Seconds are wall time of a
round, after the device has finished: the median after a warm-up, without evaluation.
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
from fedcog.runs.config.user_objects import UserObjects
from fedcog.runs.environment import find_device
from fedcog.runs.setup import ExperimentSetup

NUM_LABELS = 17
IMAGE_SIZE = 64
NUM_PLAIN_CLIENTS = 10


def make_images(num_users: int, images_per_user: int, num_test: int = 100) -> Dataset:
    """Create random multi-label images, with the same number for every user.

    Args:
        num_users: Number of users.
        images_per_user: Training images of each user.
        num_test: Number of test images.

    Returns:
        The data set.
    """
    rng = np.random.default_rng(0)
    num_train = num_users * images_per_user
    num_images = num_train + num_test
    image_shape = (num_images, 3, IMAGE_SIZE, IMAGE_SIZE)
    images = torch.from_numpy(rng.integers(0, 256, image_shape, dtype=np.uint8))
    labels = torch.from_numpy(rng.random((num_images, NUM_LABELS)) < 0.16)
    user_ids = torch.arange(num_users).repeat_interleave(images_per_user)
    return Dataset(
        "random images",
        images[:num_train],
        labels[:num_train],
        images[num_train:],
        labels[num_train:],
        tuple(str(label) for label in range(NUM_LABELS)),
        common.MEAN,
        common.STD,
        True,
        user_ids,
    )


def make_experiment(
    options: argparse.Namespace,
    model: str,
    mapping: str,
    algorithm: str = "fedavg",
    tf32: bool = False,
) -> Experiment:
    """Return the paper's experiment on FLAIR.

    Args:
        options: The command line.
        model: Name of the network.
        mapping: How clients train.
        algorithm: Name of the algorithm.
        tf32: Whether to allow TF32.

    Returns:
        The experiment; a tiny one if the command line asks for it.
    """
    settings: dict[str, Any] = {
        "partition": "natural",
        "clients": options.clients,
        "participation": options.cohort / options.clients,
        "local_steps": 10,
        "batch_size": 32,
        "model": model,
        "mapping": mapping,
        "min_examples": 1,
        "device": options.device,
        "tf32": tf32,
    }
    fedcog_settings = {
        "start_round": 0,
        "count": options.count,
        "steps": options.generation_steps,
    }
    if options.tiny:
        settings |= {"local_steps": 1, "batch_size": 2}
        fedcog_settings |= {"steps": 2, "count": 2}
    return common.paper_experiment(algorithm, {"fedcog": fedcog_settings}, **settings)


def time_plain_loop(experiment: Experiment, dataset: Dataset, num_rounds: int) -> list[float]:
    """Measure rounds of a plain loop after one round of warm-up.

    Args:
        experiment: Settings of network and batches.
        dataset: Its data set.
        num_rounds: Timed rounds.

    Returns:
        Seconds of every timed round, in the faster of two memory layouts.
    """
    setup = ExperimentSetup(experiment, UserObjects(dataset))
    data = setup.data
    network = build(experiment.model, (3, IMAGE_SIZE, IMAGE_SIZE), NUM_LABELS, 0).to(data.device)
    mean, std = (
        torch.tensor(channel_values, device=data.device)[:, None, None]
        for channel_values in (dataset.mean, dataset.std)
    )
    clients = range(NUM_PLAIN_CLIENTS)

    def train_round(round: int, layout: torch.memory_format) -> None:
        plan = data.plan_batches(
            round, torch.tensor(clients), experiment.local_steps, experiment.batch_size
        )
        local_weights = []
        for client in clients:
            model = copy.deepcopy(network).train()
            model.to(memory_format=layout)  # type: ignore[call-overload]
            optimizer = torch.optim.SGD(
                model.parameters(), 0.01, 0.9, weight_decay=1e-5, foreach=True
            )
            for step in range(experiment.local_steps):
                indices = plan.indices[client, step]
                inputs = (data.train_x[indices].float() / 255 - mean) / std
                targets = data.train_y[indices].float()
                optimizer.zero_grad()
                logits = model(inputs.contiguous(memory_format=layout))
                loss = F.binary_cross_entropy_with_logits(logits, targets)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            local_weights.append(model.state_dict())
        for name in local_weights[0]:
            torch.stack([weights[name].float() for weights in local_weights]).mean(0)

    seconds_by_layout = []
    for layout in plain.LAYOUTS.values():
        end_times = []
        with plain.cudnn_flags(tf32=True, search=True):
            for round in range(num_rounds + 1):
                train_round(round, layout)
                end_times.append(common.synchronized_time(data.device))
        seconds_by_layout.append(common.seconds_between(end_times, num_warmup=1))
    return min(seconds_by_layout, key=statistics.median)


def list_kernels(options: argparse.Namespace, dataset: Dataset, device: torch.device) -> None:
    """List the kernels of a round by name and grid, the longest first.

    Args:
        options: The command line.
        dataset: The data set.
        device: The device.
    """
    experiment = make_experiment(
        options, options.models[0], options.mappings[0], options.algorithm, tf32=True
    )
    events, round_seconds = trace.profile_round(experiment, dataset, with_host=False)
    device_events = [
        event
        for event in events
        if event["ph"] == "X" and event.get("cat") in trace.DEVICE_CATEGORIES
    ]
    for event in device_events:
        event["name"] = f"{event['name'][:80]} {event.get('args', {}).get('grid', '')}"
    longest = list(trace.total_by_name(device_events).items())[: options.trace]
    rows = [
        [f"`{name}`", f"{total['count']:.0f}", f"{1e3 * total['seconds']:.3f} ms"]
        for name, total in longest
    ]
    busy_ms = 1e3 * trace.busy_seconds(device_events)
    summary = (
        f"{len(device_events):,} kernels and copies, "
        f"{busy_ms:.1f} of {1e3 * round_seconds:.1f} ms busy."
    )
    table = common.markdown_table(["kernel and grid", "count", "time"], rows)
    facts = common.describe_environment(device, None)
    title = "A round of ResNet-18, by kernel"
    common.write_report(options.out, title, facts, [summary, table], {})
    print(options.out.with_suffix(".md").read_text())


class Results:
    """Results so far, written after every measurement.

    Args:
        options: The command line.
        device: The device.
    """

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.options = options
        self.device = device
        self.measurements: dict[str, dict[str, Any]] = {}
        self.rows: list[list[str]] = []

    def add(self, model: str, label: str, timing: common.Timing, plain_seconds: float) -> None:
        """Add a measurement and write the report.

        Args:
            model: Name of the network.
            label: Label of the row.
            timing: The measurement.
            plain_seconds: A round of the plain loop to compare with; 0 for no comparison.
        """
        self.measurements.setdefault(model, {})[label] = {
            "rounds": timing.round_seconds,
            "memory": timing.peak_memory,
            "first": timing.first_round_seconds,
        }
        first_round = "-"
        if timing.first_round_seconds:
            first_round = common.format_number(timing.first_round_seconds, "s")
        row = [
            model,
            label,
            common.format_number(timing.median, "s"),
            first_round,
            f"{timing.peak_memory / 2**30:.2f} GiB",
            f"{plain_seconds / timing.median:.2f}x" if plain_seconds else "-",
        ]
        self.rows.append(row)
        self.write()
        print(row, file=sys.stderr, flush=True)

    def write(self) -> None:
        """Write the report."""
        head = [
            "network",
            "round of 10 clients",
            "seconds",
            "until the first ends",
            "GPU memory at most",
            "plain loop / this",
        ]
        facts = common.describe_environment(self.device, None)
        num_users = self.options.clients
        facts["data"] = f"random images of {IMAGE_SIZE}x{IMAGE_SIZE}, {num_users} users"
        facts["TF32"] = "on in the plain loop's convolutions and where a row names it"
        table = common.markdown_table(head, self.rows)
        common.write_report(
            self.options.out, "ResNet-18 on one GPU", facts, [table], {"found": self.measurements}
        )


def measure_model(
    options: argparse.Namespace, model: str, dataset: Dataset, results: Results
) -> None:
    """Measure the plain loop, FedAvg under every mapping, and FedCOG.

    Args:
        options: The command line.
        model: Name of the network.
        dataset: The data set.
        results: Receives the measurements.
    """
    device = results.device
    common.free_memory(device)
    plain_rounds = time_plain_loop(
        make_experiment(options, model, "loop"), dataset, options.repeats
    )
    peak_memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    plain_timing = common.Timing(plain_rounds, peak_memory)
    results.add(model, "plain loop, FedAvg", plain_timing, plain_seconds=0.0)
    for mapping, tf32 in itertools.product(options.mappings, (True, False)):
        experiment = make_experiment(options, model, mapping, tf32=tf32)
        timing = common.time_rounds(experiment, dataset, num_warmup=2, num_timed=options.repeats)
        label = f"{mapping}{', TF32' if tf32 else ''}, FedAvg"
        results.add(model, label, timing, plain_timing.median)
    experiment = make_experiment(options, model, options.mappings[0], "fedcog")
    timing = common.time_rounds(experiment, dataset, num_warmup=2, num_timed=options.repeats)
    results.add(model, f"{options.mappings[0]}, FedCOG", timing, plain_seconds=0.0)


def main() -> None:
    """Measure all networks, or list the kernels of a round."""
    parser = common.make_parser(__doc__, "results/resnet.md")
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
        "--trace",
        type=int,
        default=0,
        metavar="N",
        help="list the N longest kernels of a round, and time nothing",
    )
    options = parser.parse_args()
    device = find_device(options.device)
    if options.tiny:
        options.clients = 12
        options.repeats = 2
    dataset = make_images(options.clients, images_per_user=3 if options.tiny else 48)
    if options.trace:
        list_kernels(options, dataset, device)
        return
    results = Results(options, device)
    for model in options.models:
        measure_model(options, model, dataset, results)
    print(options.out.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
