"""What a round of FedAvg takes in a plain PyTorch loop on one device: client by client, a model and
an optimiser each.

python benchmarks/plain.py [--clients 10] [--steps 400] [--repeats 3] [--out results/plain.md]

The paper's CNN, SGD with momentum and weight decay (foreach), images as uint8 on the device,
batches by index, crop, flip and normalisation there, cross-entropy, the mean of the models by size:
what the engine computes, on the same batches. Before anything is timed, both must agree over 20
steps, but for what rounding comes to: to 1 % of the way they went in float32, where ReLU and
pooling make small differences grow, and to 1e-9 of it with --precision float64.
"""

import contextlib
import copy
import itertools
from collections.abc import Iterator
from dataclasses import replace

import common
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedcog.data import Dataset, FederatedData
from fedcog.models.zoo import build
from fedcog.runs.config.experiment import Experiment
from fedcog.runs.environment import find_device
from fedcog.runs.setup import ExperimentSetup, UserObjects

LAYOUTS = {"contiguous": False, "channels-last": True}
Weights = dict[str, Tensor]


def crop(images: Tensor, moves: Tensor) -> Tensor:
    """Every image out of a black frame at its own place, and mirrored where asked."""
    down = moves[:, :1]
    right = moves[:, 1:2]
    flip = moves[:, 2:]
    size = torch.arange(32, device=images.device)
    columns = torch.where(flip == 1, 31 - size, size) + right
    places = (size + down)[:, :, None] * 40 + columns[:, None, :]
    framed = F.pad(images, (4, 4, 4, 4)).flatten(2)
    return framed.gather(2, places.flatten(1)[:, None].expand(-1, 3, -1)).reshape(images.shape)


def round_(
    module: nn.Module,
    data: FederatedData,
    dataset: Dataset,
    steps: int,
    batch: int = 64,
    round: int = 0,
    channels_last: bool = False,
) -> Weights:
    """FedAvg's round as one would write it: the parameters of the new global model."""
    form = torch.channels_last if channels_last else torch.contiguous_format
    mean, std = (
        data.train_y.new_tensor(part, dtype=data.dtype)[:, None, None]
        for part in (dataset.mean, dataset.std)
    )
    scale = 1 / (255 * std)
    shift = -mean / std
    plan = data.plan_batches(round, torch.arange(data.num_clients), steps, batch)
    trained = []
    for client in range(data.num_clients):
        local = copy.deepcopy(module).to(memory_format=form).train()  # type: ignore[call-overload]
        optimiser = torch.optim.SGD(
            local.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-5, foreach=True
        )
        for step in range(steps):
            index = plan.indices[client, step]
            images = data.train_x[index]
            if plan.crops is not None:
                images = crop(images, plan.crops[client, step])
            inputs = torch.addcmul(shift, images.to(data.dtype), scale).contiguous(
                memory_format=form
            )
            optimiser.zero_grad()
            F.cross_entropy(local(inputs), data.train_y[index]).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        trained.append({name: value.detach() for name, value in local.named_parameters()})
    shares = (data.sizes.to(data.dtype) / data.sizes.sum()).to(data.device)
    return {name: torch.stack([one[name] for one in trained], -1) @ shares for name in trained[0]}


def network(data: FederatedData) -> nn.Module:
    """The paper's CNN as the engine starts it from seed 0, where the data is."""
    return build("cnn", (3, 32, 32), 10, 0).to(data.device, data.dtype)


@contextlib.contextmanager
def convolutions(tf32: bool, search: bool) -> Iterator[None]:
    """How cuDNN computes: in TF32 or not, with its fastest algorithm searched for or not."""
    with torch.backends.cudnn.flags(enabled=True, benchmark=search, allow_tf32=tf32):
        yield


def timed(
    experiment: Experiment, dataset: Dataset, repeats: int, tf32: bool = True
) -> dict[str, list[float]]:
    """Seconds of some rounds in each memory layout, after one that is not counted."""
    ready = ExperimentSetup(experiment, UserObjects(dataset))
    module = network(ready.data)
    found = {}
    for layout, last in LAYOUTS.items():
        ends = []
        with convolutions(tf32, search=True):
            for round in range(repeats + 1):
                steps = experiment.local_steps
                batch = experiment.batch_size
                round_(module, ready.data, dataset, steps, batch, round, channels_last=last)
                ends.append(common.now(ready.device))
        found[layout] = [after - before for before, after in itertools.pairwise(ends)]
    return found


def difference(experiment: Experiment, dataset: Dataset, steps: int) -> tuple[float, float]:
    """How the engine's first round and the plain loop's differ: at most in a parameter, and of the
    way they went.
    """
    experiment = common.unscored(replace(experiment, local_steps=steps), 1)
    ready = ExperimentSetup(experiment, UserObjects(dataset))
    start = network(ready.data)
    with (
        convolutions(tf32=False, search=False),
        contextlib.closing(common.rounds(experiment, dataset)) as running,
    ):
        ours = next(running).server["params"]
        theirs = round_(start, ready.data, dataset, steps, experiment.batch_size)
    first = dict(start.named_parameters())
    gap = torch.cat([(ours[name] - theirs[name]).flatten() for name in theirs]).double()
    way = torch.cat([(theirs[name] - first[name].detach()).flatten() for name in theirs]).double()
    return float(gap.abs().max()), float(gap.norm() / way.norm())


def agree(
    experiment: Experiment, dataset: Dataset, steps: int = 20, most: float | None = None
) -> dict[str, float]:
    """The differences; an error where they are more than rounding makes."""
    largest, relative = difference(experiment, dataset, steps)
    most = most or {"float64": 1e-9}.get(experiment.precision, 0.01)
    if not relative <= most:
        raise SystemExit(
            f"engine and plain loop differ after {steps} steps: by {relative:.1e} of the way "
            "they went."
        )
    return {"steps": steps, "largest": largest, "relative": relative}


def main() -> None:
    """Check that both agree, then time the plain loop alone."""
    parser = common.parser(__doc__, "results/plain.md")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--mapping", default="auto", help="the engine's way for the comparison")
    parser.add_argument("--precision", default="float32", help="of both, in comparison and timing")
    parser.add_argument("--no-tf32", action="store_true", help="convolutions in float32 throughout")
    options = parser.parse_args()
    if options.tiny:
        options.clients = 2
        options.steps = 6
        options.repeats = 2
    device = find_device(options.device)
    dataset = common.images(options.data, *((600, 100) if options.tiny else ()))
    experiment = common.experiment(
        clients=options.clients,
        local_steps=options.steps,
        device=str(device),
        mapping=options.mapping,
        precision=options.precision,
    )
    checks = [agree(experiment, dataset)]
    if options.steps > 20:  # by then rounding has grown: only the direction is the same
        checks.append(agree(experiment, dataset, options.steps, most=0.5))
    found = timed(experiment, dataset, options.repeats, not options.no_tf32)
    rows = [[name, ", ".join(f"{one:.3f}" for one in seconds)] for name, seconds in found.items()]
    said = "\n".join(
        f"- after {check['steps']:.0f} steps engine and loop differ by at most "
        f"{check['largest']:.1e} in a parameter, "
        f"{check['relative']:.1e} of the way they went"
        for check in checks
    )
    work = f"FedAvg rounds of {options.clients} clients x {options.steps} steps "
    work += f"of batch {experiment.batch_size}"
    parts = [
        said,
        f"Seconds of {work}, client by client:",
        common.table(["layout", "rounds"], rows),
    ]
    results = {"agreement": checks, "seconds": found}
    common.write(
        options.out, "A plain PyTorch loop", common.about(device, options.data), parts, results
    )
    print(options.out.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
