"""How the time of a round grows with the number of clients and with the size of the model, beside
what the GPU allows.

python benchmarks/scaling.py --out results/scaling [--mapping auto] [--only clients size]

Clients: 1 to 1,000 with the paper's CNN; size: the CNN with 1 to 8 times its channels and units,
ten clients. Rounds of 200 steps of batch 64, none evaluated; the time of a step is a round's by its
steps, whatever else the round does included. The floor of a step is the longer of two times:
floating-point operations of forward and backward passes at the peak rate, and bytes at the memory's
rate, where parameters, momentum and gradients are read and written once, and the images and the
outputs of convolutions and linear layers written once and read once. Writes results/scaling.json,
.md, .svg and .png.
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

CLIENTS = (1, 10, 30, 100, 1000)
MULTIPLES = (1, 2, 4, 8)
BATCH = 64
STEPS = 200
FLOAT = 4


class Work(NamedTuple):
    """What a step of one client cannot do without."""

    parameters: int
    operations: float
    bytes: float

    def floor(self, clients: int, operations: float, bandwidth: float) -> float:
        """Seconds of a step at so many operations and bytes a second."""
        return clients * max(self.operations / operations, self.bytes / bandwidth)


def wide(multiple: int) -> nn.Module:
    """The paper's CNN with so many times its channels and units, from seed 0."""
    first, second, third, fourth = (size * multiple for size in (6, 16, 120, 84))
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return nn.Sequential(
            *(nn.Conv2d(3, first, 5), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(first, second, 5), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(second * 25, third), nn.ReLU()),
            *(nn.Linear(third, fourth), nn.ReLU(), nn.Linear(fourth, 10)),
        )


def work(module: nn.Module) -> Work:
    """Operations and bytes of a step, counted layer by layer: 2 for each weight an output is made
    of, forward, for the weights' gradient, and for the inputs' in all layers but the first.
    """
    layers: list[tuple[int, int]] = []  # outputs, weights of each

    def see(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        assert isinstance(layer.weight, Tensor)
        layers.append((output.numel(), layer.weight[0].numel()))

    for part in module.modules():
        if isinstance(part, nn.Conv2d | nn.Linear):
            part.register_forward_hook(see)
    images = torch.zeros(BATCH, 3, 32, 32)
    module(images)
    passes = [2, *[3] * (len(layers) - 1)]
    operations = sum(
        2.0 * outputs * weights * times
        for (outputs, weights), times in zip(layers, passes, strict=True)
    )
    parameters = sum(value.numel() for value in module.parameters())
    activations = images.numel() + sum(outputs for outputs, _ in layers)
    return Work(parameters, operations, FLOAT * (6.0 * parameters + 2.0 * activations))


def point(
    options: argparse.Namespace, data: Dataset, clients: int, multiple: int
) -> dict[str, Any]:
    """One point of a curve: a round, a step, the floor, the memory."""
    steps = 4 if options.tiny else STEPS
    experiment = common.experiment(
        partition="iid",
        min_examples=1,
        clients=clients,
        local_steps=steps,
        batch_size=BATCH,
        model="custom",
        device=str(options.device),
        mapping=options.mapping,
    )
    timing = common.timed(experiment, data, wide(multiple), warm=1, count=options.repeats)
    needs = work(wide(multiple))
    return {
        "clients": clients,
        "parameters": needs.parameters,
        "round": timing.median,
        "step": timing.median / steps,
        "floor": needs.floor(clients, options.tflops * 1e12, options.bandwidth * 1e12),
        "operations": clients * needs.operations,
        "bytes": clients * needs.bytes,
        "memory": timing.memory,
        "rounds": timing.rounds,
    }


def figure(out: Path, curves: dict[str, list[dict[str, Any]]], device: str) -> None:
    """Time of a step and its floor, log-log, one panel a curve."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.hashsalt": "fedcog", "svg.fonttype": "none"}
    from matplotlib import pyplot

    labels = {"clients": "clients trained together", "size": "parameters of the model, 10 clients"}
    shown, panels = pyplot.subplots(
        1, len(curves), figsize=(5.2 * len(curves), 4.2), squeeze=False, layout="constrained"
    )
    for panel, (name, points) in zip(panels[0], curves.items(), strict=True):
        across = [one["clients" if name == "clients" else "parameters"] for one in points]
        steps = [1e3 * one["step"] for one in points]
        panel.loglog(across, steps, "o-", color="#1f5fa8", label="measured", nonpositive="mask")
        panel.loglog(
            across, [1e3 * one["floor"] for one in points], "s--", color="#c05020", label="floor"
        )
        panel.set(xlabel=labels[name], ylabel="milliseconds per local step, batch 64")
        panel.grid(True, which="major", alpha=0.3)
        panel.legend(frameon=False)
    shown.suptitle(f"A local step of all clients: {device}", fontsize=11)
    shown.savefig(out.with_suffix(".svg"), metadata={"Date": None})
    shown.savefig(out.with_suffix(".png"), dpi=150)
    pyplot.close(shown)


def report(options: argparse.Namespace, curves: dict[str, list[dict[str, Any]]]) -> None:
    """Write what is known so far."""
    head = [
        "clients",
        "parameters",
        f"round of {STEPS} steps",
        "step",
        "floor",
        "step / floor",
        "peak GPU memory",
    ]
    rows = [
        [f"{one['clients']:,}", f"{one['parameters']:,}", common.number(1e3 * one["round"], "ms")]
        + [common.number(1e3 * one[key], "ms") for key in ("step", "floor")]
        + [common.number(one["step"] / one["floor"], "x"), f"{one['memory'] / 2**30:.2f} GiB"]
        for points in curves.values()
        for one in points
    ]
    facts = common.about(options.device, options.data)
    facts["floor"] = f"{options.tflops:g} TFLOP/s float32, {options.bandwidth:g} TB/s"
    if options.failed:
        facts["out of memory"] = "; ".join(options.failed)
    common.write(
        options.out, "How time grows", facts, [common.table(head, rows)], {"curves": curves}
    )
    figure(options.out, {name: points for name, points in curves.items() if points}, facts["GPU"])


def main() -> None:
    """Measure point by point, and write after each."""
    parser = common.parser(__doc__, "results/scaling")
    parser.add_argument(
        "--mapping",
        default="auto",
        help="how clients are run, as in fedcog run (default: %(default)s)",
    )
    parser.add_argument(
        "--only", nargs="+", choices=("clients", "size"), default=["clients", "size"]
    )
    parser.add_argument(
        "--repeats", type=int, default=3, help="timed rounds, of which the median counts"
    )
    parser.add_argument(
        "--tflops", type=float, default=67.0, help="peak rate in float32, TFLOP/s (an H200's)"
    )
    parser.add_argument(
        "--bandwidth", type=float, default=4.3, help="rate of the memory, TB/s (an H200's)"
    )
    options = parser.parse_args()
    options.device = find_device(options.device)
    options.failed = list[str]()
    data = common.images(options.data, *((200, 20) if options.tiny else ()))
    across = {
        "clients": [(clients, 1) for clients in CLIENTS],
        "size": [(10, multiple) for multiple in MULTIPLES],
    }
    if options.tiny:
        options.repeats = 2
        across = {"clients": [(1, 1), (3, 1)], "size": [(2, 1), (2, 2)]}
    curves: dict[str, list[dict[str, Any]]] = {name: [] for name in options.only}
    for name in options.only:
        for clients, multiple in across[name]:
            try:
                curves[name].append(point(options, data, clients, multiple))
            except torch.OutOfMemoryError:
                options.failed.append(f"{clients} clients of {multiple} times the CNN")
            report(options, curves)
            print(f"{name}: {clients} clients, {multiple} x", file=sys.stderr)
    print(options.out.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
