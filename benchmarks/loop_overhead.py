"""What the engine's loop costs beside a hand-written PyTorch loop doing the same arithmetic, on one
CPU thread.

python benchmarks/loop_overhead.py [--clients 4] [--steps 50] [--repeats 5] [--no-augment]

One FedAvg round of the paper's CNN (62,006 parameters, batch 64, crop and flip, SGD with momentum
and weight decay) on random images of CIFAR-10's size. Both sides train on the same batches; the
results must agree before times are printed.
"""

import argparse
import copy
import statistics
import time

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

BATCH = 64
LR = 0.01
SIZE = 2000
MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)


def crop(images: Tensor, down: Tensor, right: Tensor, flip: Tensor) -> Tensor:
    """Every image out of a black frame at its own place, and mirrored where asked."""
    rows = torch.arange(32)
    columns = torch.where(flip[:, None] == 1, 31 - rows, rows) + right[:, None]
    places = (rows + down[:, None])[:, :, None] * 40 + columns[:, None, :]
    framed = F.pad(images, (4, 4, 4, 4)).flatten(2)
    return framed.gather(2, places.flatten(1)[:, None].expand(-1, 3, -1)).reshape(images.shape)


def by_hand(module: nn.Module, data: FederatedData, clients: int, steps: int) -> dict[str, Tensor]:
    """FedAvg's round as one would write it: a model, an optimiser and a loop per client, then the
    mean.
    """
    mean = torch.tensor(MEAN)[:, None, None]
    std = torch.tensor(STD)[:, None, None]
    plan = data.plan_batches(0, torch.arange(clients), steps, BATCH)
    locals_ = []
    for client in range(clients):
        local = copy.deepcopy(module).train()
        optimiser = torch.optim.SGD(local.parameters(), lr=LR, momentum=0.9, weight_decay=1e-5)
        for step in range(steps):
            index = plan.indices[client, step]
            images = data.train_x[index]
            if plan.crops is not None:
                images = crop(images, *plan.crops[client, step].unbind(-1))
            x = ((images.float() / 255 - mean) / std).contiguous(
                memory_format=torch.channels_last
            )  # the faster way
            loss = F.cross_entropy(local(x), data.train_y[index])
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        locals_.append(dict(local.named_parameters()))
    return {
        name: torch.stack([one[name].detach() for one in locals_]).mean(0) for name in locals_[0]
    }


def main() -> None:
    """Check that both agree, time them in turn, and print the ratio of the medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no-augment", action="store_true", help="neither crop nor flip")
    options = parser.parse_args()
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (SIZE, 3, 32, 32), dtype=torch.uint8, generator=draw)
    y = torch.randint(0, 10, (SIZE,), generator=draw)
    dataset = from_arrays(
        x, y, x[:10], y[:10], classes=[str(c) for c in range(10)], mean=MEAN, std=STD
    )
    data = FederatedData(
        dataset,
        list(torch.arange(SIZE).chunk(options.clients)),
        seed=0,
        augment=not options.no_augment,
    )
    module = build("cnn", (3, 32, 32), 10, seed=0)
    model = Model(module, (3, 32, 32), 10)
    algorithm = FedAvg()
    config = CohortConfig(batch_size=BATCH, mapping="loop")
    cohort = Cohort(model, SingleLabel(10), data, Optimizer(), config)
    simulator = Simulator(cohort, LocalWorkload(local_steps=options.steps))
    server = simulator.init_server(algorithm)

    def engine() -> dict[str, Tensor]:
        spec = RoundSpec(algorithm, algorithm.broadcast(server), 0, LR, False)
        total = simulator.train(spec, range(options.clients))[0].total
        params: dict[str, Tensor] = algorithm.server_update(server, total, {})["params"]
        return params

    ours = engine()
    theirs = by_hand(module, data, options.clients, options.steps)
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
    ratio = median["engine"] / median["by hand"]
    print(f"ratio engine / by hand: {ratio:.3f}  (torch {torch.__version__}, one thread)")


if __name__ == "__main__":
    main()
