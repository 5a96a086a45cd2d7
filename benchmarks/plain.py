"""Time a FedAvg round in a plain PyTorch loop on one device, one client after another.

python benchmarks/plain.py [--clients 10] [--steps 400] [--repeats 3] [--out results/plain.md]

Every client has its own model and optimizer. The loop computes what the engine computes, on the
same batches: the paper's CNN, SGD with momentum and weight decay (foreach), images as uint8 on the
device, batches by index, crop, flip and normalization on the device, cross-entropy, and the mean of
the models weighted by the number of examples.

Before timing, both must agree over 20 steps within rounding: within 1 % of the distance from the
initial model in float32, where ReLU and pooling amplify small differences, and within 1e-9 of it
with --precision float64.
"""

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import replace

import common
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedcog.data import Dataset, FederatedData
from fedcog.models.zoo import build
from fedcog.runs.config.experiment import Experiment
from fedcog.runs.config.user_objects import UserObjects
from fedcog.runs.environment import find_device
from fedcog.runs.setup import ExperimentSetup

LAYOUTS = {"contiguous": torch.contiguous_format, "channels-last": torch.channels_last}
Weights = dict[str, Tensor]


def crop_and_flip(images: Tensor, crops: Tensor) -> Tensor:
    """Crop images out of a black frame of 4 pixels, and mirror some.

    Args:
        images: `(B, 3, 32, 32)`.
        crops: Offset down, offset right and whether to mirror, `(B, 3)`.

    Returns:
        The augmented images, `(B, 3, 32, 32)`.
    """
    down = crops[:, :1]
    right = crops[:, 1:2]
    flip = crops[:, 2:]
    offsets = torch.arange(32, device=images.device)
    rows = offsets + down
    columns = torch.where(flip == 1, 31 - offsets, offsets) + right
    pixels = rows[:, :, None] * 40 + columns[:, None, :]
    framed = F.pad(images, (4, 4, 4, 4)).flatten(2)
    return framed.gather(2, pixels.flatten(1)[:, None].expand(-1, 3, -1)).reshape(images.shape)


def train_round(
    network: nn.Module,
    data: FederatedData,
    dataset: Dataset,
    num_steps: int,
    batch_size: int = 64,
    round: int = 0,
    layout: torch.memory_format = torch.contiguous_format,
) -> Weights:
    """Train all clients one after another, and average their models.

    Args:
        network: The global model before the round.
        data: The clients' data.
        dataset: The data set behind it, for its mean and standard deviation.
        num_steps: Local steps of every client.
        batch_size: Examples in a batch.
        round: Round from 0, which decides the batches.
        layout: Memory layout of images and weights.

    Returns:
        The parameters of the new global model.
    """
    mean, std = (
        data.train_y.new_tensor(channel_values, dtype=data.dtype)[:, None, None]
        for channel_values in (dataset.mean, dataset.std)
    )
    scale = 1 / (255 * std)
    shift = -mean / std
    plan = data.plan_batches(round, torch.arange(data.num_clients), num_steps, batch_size)
    local_params = []
    for client in range(data.num_clients):
        model = copy.deepcopy(network).train()
        model.to(memory_format=layout)  # type: ignore[call-overload]
        optimizer = torch.optim.SGD(
            model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-5, foreach=True
        )
        for step in range(num_steps):
            indices = plan.indices[client, step]
            images = data.train_x[indices]
            if plan.crops is not None:
                images = crop_and_flip(images, plan.crops[client, step])
            inputs = torch.addcmul(shift, images.to(data.dtype), scale)
            optimizer.zero_grad()
            logits = model(inputs.contiguous(memory_format=layout))
            loss = F.cross_entropy(logits, data.train_y[indices])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        local_params.append({name: value.detach() for name, value in model.named_parameters()})
    weights = (data.sizes.to(data.dtype) / data.sizes.sum()).to(data.device)
    return {
        name: torch.stack([params[name] for params in local_params], -1) @ weights
        for name in local_params[0]
    }


def initial_network(data: FederatedData) -> nn.Module:
    """Build the paper's CNN as the engine does from seed 0, on the device of the data."""
    return build("cnn", (3, 32, 32), 10, 0).to(data.device, data.dtype)


@contextlib.contextmanager
def cudnn_flags(tf32: bool, search: bool) -> Iterator[None]:
    """Set how cuDNN computes convolutions.

    Args:
        tf32: Whether it may use TF32.
        search: Whether it measures which algorithm is fastest.
    """
    with torch.backends.cudnn.flags(enabled=True, benchmark=search, allow_tf32=tf32):
        yield


def time_layouts(
    experiment: Experiment, dataset: Dataset, num_rounds: int, tf32: bool = True
) -> dict[str, list[float]]:
    """Measure the wall time of rounds in each memory layout, after one round of warm-up.

    Args:
        experiment: Settings of clients and batches.
        dataset: Its data set.
        num_rounds: Timed rounds.
        tf32: Whether convolutions may use TF32.

    Returns:
        Seconds of every timed round, by layout.
    """
    setup = ExperimentSetup(experiment, UserObjects(dataset))
    network = initial_network(setup.data)
    num_steps = experiment.local_steps
    batch_size = experiment.batch_size
    seconds = {}
    for name, layout in LAYOUTS.items():
        end_times = []
        with cudnn_flags(tf32, search=True):
            for round in range(num_rounds + 1):
                train_round(network, setup.data, dataset, num_steps, batch_size, round, layout)
                end_times.append(common.synchronized_time(setup.device))
        seconds[name] = common.seconds_between(end_times, num_warmup=1)
    return seconds


def compare_with_engine(
    experiment: Experiment, dataset: Dataset, num_steps: int
) -> tuple[float, float]:
    """Compare the first round of the engine and of the plain loop.

    Args:
        experiment: The experiment.
        dataset: Its data set.
        num_steps: Local steps of the round.

    Returns:
        The largest difference of a parameter, and the L2 norm of the difference relative to the
        distance from the initial model.
    """
    experiment = common.without_evaluation(replace(experiment, local_steps=num_steps), 1)
    setup = ExperimentSetup(experiment, UserObjects(dataset))
    network = initial_network(setup.data)
    with (
        cudnn_flags(tf32=False, search=False),
        contextlib.closing(common.run_rounds(experiment, dataset)) as rounds,
    ):
        engine_params = next(rounds).server["params"]
        loop_params = train_round(network, setup.data, dataset, num_steps, experiment.batch_size)
    initial_params = dict(network.named_parameters())
    differences = [engine_params[name] - loop_params[name] for name in loop_params]
    updates = [loop_params[name] - initial_params[name].detach() for name in loop_params]
    difference = torch.cat([value.flatten() for value in differences]).double()
    update = torch.cat([value.flatten() for value in updates]).double()
    return float(difference.abs().max()), float(difference.norm() / update.norm())


def check_agreement(
    experiment: Experiment,
    dataset: Dataset,
    num_steps: int = 20,
    tolerance: float | None = None,
) -> dict[str, float]:
    """Check that the engine and the plain loop compute the same round.

    Args:
        experiment: The experiment.
        dataset: Its data set.
        num_steps: Local steps of the round.
        tolerance: Largest allowed relative difference; None for 0.01, or 1e-9 in float64.

    Returns:
        The number of steps and both differences of `compare_with_engine`.

    Raises:
        SystemExit: If they differ by more than the tolerance.
    """
    largest, relative = compare_with_engine(experiment, dataset, num_steps)
    tolerance = tolerance or {"float64": 1e-9}.get(experiment.precision, 0.01)
    if not relative <= tolerance:
        raise SystemExit(
            f"engine and plain loop differ after {num_steps} steps: by {relative:.1e} of the "
            "distance from the initial model."
        )
    return {"steps": num_steps, "largest": largest, "relative": relative}


def main() -> None:
    """Check that engine and loop agree, then time the loop."""
    parser = common.make_parser(__doc__, "results/plain.md")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--mapping", default="auto", help="the engine's mapping in the comparison")
    parser.add_argument("--precision", default="float32", help="of engine and loop")
    parser.add_argument("--no-tf32", action="store_true", help="never compute in TF32")
    options = parser.parse_args()
    if options.tiny:
        options.clients = 2
        options.steps = 6
        options.repeats = 2
    device = find_device(options.device)
    num_images = (600, 100) if options.tiny else ()
    dataset = common.load_images(options.data, *num_images)
    experiment = common.paper_experiment(
        clients=options.clients,
        local_steps=options.steps,
        device=str(device),
        mapping=options.mapping,
        precision=options.precision,
    )
    checks = [check_agreement(experiment, dataset)]
    if options.steps > 20:
        # Rounding errors have grown by then: only the direction is the same.
        checks.append(check_agreement(experiment, dataset, options.steps, tolerance=0.5))
    seconds = time_layouts(experiment, dataset, options.repeats, not options.no_tf32)
    rows = [
        [name, ", ".join(f"{value:.3f}" for value in round_seconds)]
        for name, round_seconds in seconds.items()
    ]
    agreement = "\n".join(
        f"- after {check['steps']:.0f} steps engine and loop differ by at most "
        f"{check['largest']:.1e} in a parameter, "
        f"{check['relative']:.1e} of the distance from the initial model"
        for check in checks
    )
    paragraphs = [
        agreement,
        f"Seconds of FedAvg rounds of {options.clients} clients x {options.steps} steps of batch "
        f"{experiment.batch_size}, one client after another:",
        common.markdown_table(["layout", "rounds"], rows),
    ]
    facts = common.describe_environment(device, options.data)
    results = {"agreement": checks, "seconds": seconds}
    common.write_report(options.out, "A plain PyTorch loop", facts, paragraphs, results)
    print(options.out.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
