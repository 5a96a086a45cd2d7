"""What the engine's loop costs beside a hand-written PyTorch loop doing the same arithmetic, on one CPU thread.

    python benchmarks/loop_overhead.py [--clients 4] [--steps 50] [--repeats 5] [--no-augment]

One FedAvg round of the paper's CNN (62,006 parameters, batch 64, crop and flip, SGD with momentum and weight decay) on
random images of CIFAR-10's size. Both sides train on the same batches; the results must agree before times are printed.
"""

import argparse
import copy
import statistics
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedcog.algorithms import FedAvg
from fedcog.data import FederatedData, from_arrays
from fedcog.federation.cohort import Cohort
from fedcog.federation.simulation import Simulation
from fedcog.models import Model, build
from fedcog.optimiser import Optimiser
from fedcog.task import SingleLabel

BATCH, LR, SIZE = 64, 0.01, 2000
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def crop(images: Tensor, down: Tensor, right: Tensor, flip: Tensor) -> Tensor:
    """Every image out of a black frame at its own place, and mirrored where asked."""
    rows = torch.arange(32)
    columns = torch.where(flip[:, None] == 1, 31 - rows, rows) + right[:, None]
    places = (rows + down[:, None])[:, :, None] * 40 + columns[:, None, :]
    framed = F.pad(images, (4, 4, 4, 4)).flatten(2)
    return framed.gather(2, places.flatten(1)[:, None].expand(-1, 3, -1)).reshape(images.shape)


def by_hand(module: nn.Module, data: FederatedData, clients: int, steps: int) -> dict[str, Tensor]:
    """FedAvg's round as one would write it: a model, an optimiser and a loop per client, then the mean."""
    mean, std = torch.tensor(MEAN)[:, None, None], torch.tensor(STD)[:, None, None]
    plan = data.plan(0, torch.arange(clients), steps, BATCH)
    locals_ = []
    for client in range(clients):
        local = copy.deepcopy(module).train()
        optimiser = torch.optim.SGD(local.parameters(), lr=LR, momentum=0.9, weight_decay=1e-5)
        for step in range(steps):
            index = plan.picks[client, step]
            images = data.train_x[index]
            if plan.moves is not None:
                images = crop(images, *plan.moves[client, step].unbind(-1))
            x = ((images.float() / 255 - mean) / std).contiguous(memory_format=torch.channels_last)  # the faster way
            loss = F.cross_entropy(local(x), data.train_y[index])
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        locals_.append(dict(local.named_parameters()))
    return {name: torch.stack([one[name].detach() for one in locals_]).mean(0) for name in locals_[0]}


def main() -> None:
    """Check that both agree, time them in turn, and print the ratio of the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no-augment", action="store_true", help="neither crop nor flip")
    options = parser.parse_args()
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (SIZE, 3, 32, 32), dtype=torch.uint8, generator=draw)
    y = torch.randint(0, 10, (SIZE,), generator=draw)
    dataset = from_arrays(x, y, x[:10], y[:10], classes=[str(c) for c in range(10)], mean=MEAN, std=STD)
    data = FederatedData(
        dataset, list(torch.arange(SIZE).chunk(options.clients)), seed=0, augment=not options.no_augment
    )
    module = build("cnn", (3, 32, 32), 10, seed=0)
    model, algorithm = Model(module, (3, 32, 32), 10), FedAvg()
    cohort = Cohort(model, SingleLabel(10), data, Optimiser(), batch_size=BATCH, mapping="loop")
    backend = Simulation(cohort, local_steps=options.steps, local_epochs=0, weight_cap=0)
    server = backend.begin(algorithm)

    def engine() -> dict[str, Tensor]:
        total = backend.gather(algorithm, algorithm.broadcast(server), range(options.clients), 0, LR, None).total
        params: dict[str, Tensor] = algorithm.server_update(server, total, {})["params"]
        return params

    ours, theirs = engine(), by_hand(module, data, options.clients, options.steps)
    worst = max(float((ours[name] - theirs[name]).abs().max()) for name in ours)
    print(f"largest difference of a parameter: {worst:.1e}")
    assert worst < 1e-4, "the two loops do not do the same arithmetic"
    times: dict[str, list[float]] = {"engine": [], "by hand": []}
    for _ in range(options.repeats):
        for name, run in (
            ("engine", engine),
            ("by hand", lambda: by_hand(module, data, options.clients, options.steps)),
        ):
            began = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - began)
    median = {name: statistics.median(seconds) for name, seconds in times.items()}
    steps = options.clients * options.steps
    for name, seconds in times.items():
        shown = ", ".join(f"{one:.2f}" for one in seconds)
        print(f"{name:8} {1e3 * median[name] / steps:6.2f} ms a step  (rounds: {shown} s)")
    print(
        f"ratio engine / by hand: {median['engine'] / median['by hand']:.3f}  (torch {torch.__version__}, one thread)"
    )


if __name__ == "__main__":
    main()
