"""How the time of a round grows with the number of clients and the size of the model.

python benchmarks/scaling.py --out results/scaling [--mapping auto] [--only clients size]

"clients": 1 to 1,000 clients with the paper's CNN. "size": ten clients, and the CNN with 1 to 8
times its channels and units. Rounds have 200 steps of batch 64 and are not evaluated. The time of a
step is a round's time divided by its steps, and includes everything else the round does.

The floor is a lower bound on the time of a step: the longer of two times. One is the floating-point
operations of forward and backward passes at the GPU's peak rate. The other is the bytes at the rate
of its memory: parameters, momentum and gradients are read and written once; images and the outputs
of convolutions and linear layers are written once and read once.

Writes results/scaling.json, .md, .svg and .png.
"""

import argparse
import sys
from pathlib import Path
from typing import Any, NamedTuple

import common
import torch
from torch import Tensor, nn

from fedcog.data import Dataset
from fedcog.runs.environment import find_device

CLIENT_COUNTS = (1, 10, 30, 100, 1000)
WIDTH_MULTIPLES = (1, 2, 4, 8)
BATCH_SIZE = 64
NUM_STEPS = 200
BYTES_PER_FLOAT = 4
Point = dict[str, Any]


class StepCost(NamedTuple):
    """The least that a local step of one client needs.

    Attributes:
        num_params: Number of parameters.
        operations: Floating-point operations.
        num_bytes: Bytes read and written.
    """

    num_params: int
    operations: float
    num_bytes: float

    def floor_seconds(
        self, num_clients: int, operations_per_second: float, bytes_per_second: float
    ) -> float:
        """Return a lower bound on the seconds of a step.

        Args:
            num_clients: Clients that train at once.
            operations_per_second: Peak rate of the GPU.
            bytes_per_second: Rate of its memory.

        Returns:
            Seconds of a step of all clients.
        """
        compute_seconds = self.operations / operations_per_second
        memory_seconds = self.num_bytes / bytes_per_second
        return num_clients * max(compute_seconds, memory_seconds)


def make_wide_cnn(multiple: int) -> nn.Module:
    """Build the paper's CNN with `multiple` times its channels and units, from seed 0."""
    channels1, channels2, units1, units2 = (size * multiple for size in (6, 16, 120, 84))
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(3, channels1, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(channels1, channels2, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(channels2 * 25, units1),
            nn.ReLU(),
            nn.Linear(units1, units2),
            nn.ReLU(),
            nn.Linear(units2, 10),
        )


def count_step_cost(network: nn.Module) -> StepCost:
    """Count the operations and bytes of a step, layer by layer.

    Every weight of an output costs 2 operations in the forward pass, 2 for the gradient of the
    weights and, except in the first layer, 2 for the gradient of the inputs.
    """
    layers: list[tuple[int, int]] = []  # number of outputs, weights per output

    def record_layer(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        assert isinstance(layer.weight, Tensor)
        layers.append((output.numel(), layer.weight[0].numel()))

    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.register_forward_hook(record_layer)
    images = torch.zeros(BATCH_SIZE, 3, 32, 32)
    network(images)
    passes_per_layer = [2, *[3] * (len(layers) - 1)]
    operations = sum(
        2.0 * num_outputs * num_weights * num_passes
        for (num_outputs, num_weights), num_passes in zip(layers, passes_per_layer, strict=True)
    )
    num_params = sum(value.numel() for value in network.parameters())
    num_activations = images.numel() + sum(num_outputs for num_outputs, _ in layers)
    num_bytes = BYTES_PER_FLOAT * (6.0 * num_params + 2.0 * num_activations)
    return StepCost(num_params, operations, num_bytes)


def measure_point(
    options: argparse.Namespace, dataset: Dataset, num_clients: int, multiple: int
) -> Point:
    """Measure one point of a curve.

    Args:
        options: The command line.
        dataset: The data set.
        num_clients: Number of clients.
        multiple: Factor of the CNN's channels and units.

    Returns:
        Seconds of a round, a step and the floor, operations, bytes and memory.
    """
    num_steps = 4 if options.tiny else NUM_STEPS
    experiment = common.paper_experiment(
        partition="iid",
        min_examples=1,
        clients=num_clients,
        local_steps=num_steps,
        batch_size=BATCH_SIZE,
        model="custom",
        device=str(options.device),
        mapping=options.mapping,
    )
    timing = common.time_rounds(
        experiment, dataset, make_wide_cnn(multiple), num_warmup=1, num_timed=options.repeats
    )
    cost = count_step_cost(make_wide_cnn(multiple))
    return {
        "clients": num_clients,
        "parameters": cost.num_params,
        "round": timing.median,
        "step": timing.median / num_steps,
        "floor": cost.floor_seconds(num_clients, options.tflops * 1e12, options.bandwidth * 1e12),
        "operations": num_clients * cost.operations,
        "bytes": num_clients * cost.num_bytes,
        "memory": timing.peak_memory,
        "rounds": timing.round_seconds,
    }


def draw_figure(out: Path, curves: dict[str, list[Point]], device_name: str) -> None:
    """Draw the time of a step and its floor with logarithmic axes, one panel per curve.

    Args:
        out: Path of the figure; the suffix becomes `.svg` and `.png`.
        curves: Points of each curve.
        device_name: Name of the GPU, for the title.
    """
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.hashsalt": "fedcog", "svg.fonttype": "none"}
    from matplotlib import pyplot

    x_keys = {"clients": "clients", "size": "parameters"}
    x_labels = {
        "clients": "clients trained together",
        "size": "parameters of the model, 10 clients",
    }
    figure, panels = pyplot.subplots(
        1, len(curves), figsize=(5.2 * len(curves), 4.2), squeeze=False, layout="constrained"
    )
    for panel, (name, points) in zip(panels[0], curves.items(), strict=True):
        x = [point[x_keys[name]] for point in points]
        step_ms = [1e3 * point["step"] for point in points]
        floor_ms = [1e3 * point["floor"] for point in points]
        panel.loglog(x, step_ms, "o-", color="#1f5fa8", label="measured", nonpositive="mask")
        panel.loglog(x, floor_ms, "s--", color="#c05020", label="floor")
        panel.set(xlabel=x_labels[name], ylabel="milliseconds per local step, batch 64")
        panel.grid(True, which="major", alpha=0.3)
        panel.legend(frameon=False)
    figure.suptitle(f"A local step of all clients: {device_name}", fontsize=11)
    figure.savefig(out.with_suffix(".svg"), metadata={"Date": None})
    figure.savefig(out.with_suffix(".png"), dpi=150)
    pyplot.close(figure)


def write_results(options: argparse.Namespace, curves: dict[str, list[Point]]) -> None:
    """Write table and figure of what was measured so far.

    Args:
        options: The command line.
        curves: Points of each curve.
    """
    head = [
        "clients",
        "parameters",
        f"round of {NUM_STEPS} steps",
        "step",
        "floor",
        "step / floor",
        "peak GPU memory",
    ]
    rows = [
        [
            f"{point['clients']:,}",
            f"{point['parameters']:,}",
            common.format_number(1e3 * point["round"], "ms"),
            common.format_number(1e3 * point["step"], "ms"),
            common.format_number(1e3 * point["floor"], "ms"),
            common.format_number(point["step"] / point["floor"], "x"),
            f"{point['memory'] / 2**30:.2f} GiB",
        ]
        for points in curves.values()
        for point in points
    ]
    facts = common.describe_environment(options.device, options.data)
    facts["floor"] = f"{options.tflops:g} TFLOP/s float32, {options.bandwidth:g} TB/s"
    if options.failed:
        facts["out of memory"] = "; ".join(options.failed)
    table = common.markdown_table(head, rows)
    common.write_report(options.out, "How time grows", facts, [table], {"curves": curves})
    measured_curves = {name: points for name, points in curves.items() if points}
    draw_figure(options.out, measured_curves, facts["GPU"])


def main() -> None:
    """Measure point by point, and write the results after each."""
    parser = common.make_parser(__doc__, "results/scaling")
    parser.add_argument(
        "--mapping",
        default="auto",
        help="how clients train, as in fedcog run (default: %(default)s)",
    )
    parser.add_argument(
        "--only", nargs="+", choices=("clients", "size"), default=["clients", "size"]
    )
    parser.add_argument(
        "--repeats", type=int, default=3, help="timed rounds, of which the median counts"
    )
    parser.add_argument(
        "--tflops",
        type=float,
        default=67.0,
        help="peak rate in float32, TFLOP/s (default: %(default)s, an H200)",
    )
    parser.add_argument(
        "--bandwidth",
        type=float,
        default=4.3,
        help="memory bandwidth, TB/s (default: %(default)s, an H200)",
    )
    options = parser.parse_args()
    options.device = find_device(options.device)
    options.failed = list[str]()
    num_images = (200, 20) if options.tiny else ()
    dataset = common.load_images(options.data, *num_images)
    sizes = {
        "clients": [(num_clients, 1) for num_clients in CLIENT_COUNTS],
        "size": [(10, multiple) for multiple in WIDTH_MULTIPLES],
    }
    if options.tiny:
        options.repeats = 2
        sizes = {"clients": [(1, 1), (3, 1)], "size": [(2, 1), (2, 2)]}
    curves: dict[str, list[Point]] = {name: [] for name in options.only}
    for name in options.only:
        for num_clients, multiple in sizes[name]:
            try:
                curves[name].append(measure_point(options, dataset, num_clients, multiple))
            except torch.OutOfMemoryError:
                options.failed.append(f"{num_clients} clients of {multiple} times the CNN")
            write_results(options, curves)
            print(f"{name}: {num_clients} clients, {multiple} x", file=sys.stderr)
    print(options.out.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
