"""Overhead of the engine's loop over a hand-written PyTorch loop, on one CPU thread.

python benchmarks/loop_overhead.py [--clients 4] [--steps 50] [--repeats 5] [--no-augment]

One FedAvg round of the paper's CNN (62,006 parameters, batch 64, crop and flip, SGD with momentum
and weight decay) on random images of CIFAR-10's size. Both loops train on the same batches. Their
results must agree before times are printed.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedcog.algorithms import FedAvg
from fedcog.core.optimizers import Optimizer
from fedcog.core.tasks import SingleLabel
from fedcog.data import FederatedData, from_arrays
from fedcog.engine.cohort import Cohort, CohortConfig, RoundSpec
from fedcog.federation.simulator import LocalWorkload, Simulator
from fedcog.models.functional import Model
from fedcog.models.zoo import build

BATCH_SIZE = 64
LR = 0.01
NUM_IMAGES = 2000
MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)
Params = dict[str, Tensor]


def make_data(num_clients: int, augment: bool) -> FederatedData:
    """Create random images, split evenly among clients.

    Args:
        num_clients: Number of clients.
        augment: Whether to crop and flip.

    Returns:
        The clients' data.
    """
    rng = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (NUM_IMAGES, 3, 32, 32), dtype=torch.uint8, generator=rng)
    y = torch.randint(0, 10, (NUM_IMAGES,), generator=rng)
    classes = [str(label) for label in range(10)]
    dataset = from_arrays(x, y, x[:10], y[:10], classes=classes, mean=MEAN, std=STD)
    client_indices = list(torch.arange(NUM_IMAGES).chunk(num_clients))
    return FederatedData(dataset, client_indices, seed=0, augment=augment)


def crop_and_flip(images: Tensor, down: Tensor, right: Tensor, flip: Tensor) -> Tensor:
    """Crop images out of a black frame of 4 pixels, and mirror some.

    Args:
        images: `(B, 3, 32, 32)`.
        down: Offset of each crop from the top, `(B,)`.
        right: Offset of each crop from the left, `(B,)`.
        flip: 1 where an image is mirrored, `(B,)`.

    Returns:
        The augmented images, `(B, 3, 32, 32)`.
    """
    offsets = torch.arange(32)
    rows = offsets + down[:, None]
    columns = torch.where(flip[:, None] == 1, 31 - offsets, offsets) + right[:, None]
    pixels = rows[:, :, None] * 40 + columns[:, None, :]
    framed = F.pad(images, (4, 4, 4, 4)).flatten(2)
    return framed.gather(2, pixels.flatten(1)[:, None].expand(-1, 3, -1)).reshape(images.shape)


def train_by_hand(
    network: nn.Module, data: FederatedData, num_clients: int, num_steps: int
) -> Params:
    """Train a FedAvg round in plain PyTorch: a model, an optimizer and a loop per client.

    Args:
        network: The global model before the round.
        data: The clients' data.
        num_clients: Number of clients.
        num_steps: Local steps of every client.

    Returns:
        The mean of the clients' parameters.
    """
    mean = torch.tensor(MEAN)[:, None, None]
    std = torch.tensor(STD)[:, None, None]
    plan = data.plan_batches(0, torch.arange(num_clients), num_steps, BATCH_SIZE)
    local_params = []
    for client in range(num_clients):
        model = copy.deepcopy(network).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, weight_decay=1e-5)
        for step in range(num_steps):
            indices = plan.indices[client, step]
            images = data.train_x[indices]
            if plan.crops is not None:
                images = crop_and_flip(images, *plan.crops[client, step].unbind(-1))
            inputs = (images.float() / 255 - mean) / std
            inputs = inputs.contiguous(memory_format=torch.channels_last)  # the faster layout
            loss = F.cross_entropy(model(inputs), data.train_y[indices])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        local_params.append(dict(model.named_parameters()))
    return {
        name: torch.stack([params[name].detach() for params in local_params]).mean(0)
        for name in local_params[0]
    }


def make_engine_round(
    network: nn.Module, data: FederatedData, num_clients: int, num_steps: int
) -> Callable[[], Params]:
    """Set up the engine for the same round.

    Args:
        network: The global model before the round.
        data: The clients' data.
        num_clients: Number of clients.
        num_steps: Local steps of every client.

    Returns:
        A function that trains the round and returns the new global parameters.
    """
    algorithm = FedAvg()
    model = Model(network, (3, 32, 32), 10)
    config = CohortConfig(batch_size=BATCH_SIZE, mapping="loop")
    cohort = Cohort(model, SingleLabel(10), data, Optimizer(), config)
    simulator = Simulator(cohort, LocalWorkload(local_steps=num_steps))
    server = simulator.init_server(algorithm)

    def train_round() -> Params:
        spec = RoundSpec(algorithm, algorithm.broadcast(server), 0, LR, False)
        total = simulator.train(spec, range(num_clients))[0].total
        params: Params = algorithm.server_update(server, total, {})["params"]
        return params

    return train_round


def main() -> None:
    """Check that both loops agree, time them in turn, and print the ratio of the medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no-augment", action="store_true", help="neither crop nor flip")
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = make_data(options.clients, augment=not options.no_augment)
    network = build("cnn", (3, 32, 32), 10, seed=0)
    train_with_engine = make_engine_round(network, data, options.clients, options.steps)
    loops: dict[str, Callable[[], Params]] = {
        "engine": train_with_engine,
        "by hand": lambda: train_by_hand(network, data, options.clients, options.steps),
    }
    engine_params, handwritten_params = (train() for train in loops.values())
    largest_difference = max(
        float((engine_params[name] - handwritten_params[name]).abs().max())
        for name in engine_params
    )
    print(f"largest difference of a parameter: {largest_difference:.1e}")
    assert largest_difference < 1e-4, "the two loops do not compute the same"
    round_seconds: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(options.repeats):
        for name, train in loops.items():
            start_time = time.perf_counter()
            train()
            round_seconds[name].append(time.perf_counter() - start_time)
    medians = {name: statistics.median(seconds) for name, seconds in round_seconds.items()}
    num_steps = options.clients * options.steps
    for name, seconds in round_seconds.items():
        step_ms = 1e3 * medians[name] / num_steps
        rounds = ", ".join(f"{value:.2f}" for value in seconds)
        print(f"{name:8} {step_ms:6.2f} ms a step  (rounds: {rounds} s)")
    ratio = medians["engine"] / medians["by hand"]
    print(f"ratio engine / by hand: {ratio:.3f}  (torch {torch.__version__}, one thread)")


if __name__ == "__main__":
    main()
