"""What generation asks of a small device, against training: numbers that a gradient is taken of,
and memory.

python benchmarks/devices.py --out results/devices.md [--batches 256 64 16 1]

The paper's appendix on unequal devices says that its CNN for CIFAR-100 has 69,380 learnable
numbers, and an input by itself 3 x 32 x 32 = 3,072, so that a device which can train can also
generate, a few inputs at a time. Here one client trains by batches of 64, and generates 256 inputs,
so many at a time. Memory is what lives in tensors at most beyond what was there before: parameters,
momentum, activations, gradients, inputs and what Adam remembers of them. What a kernel takes for
itself while it runs is not seen. On a GPU the allocator's own maximum stands beside it.
"""

import dataclasses
import sys
import weakref
from collections.abc import Callable
from typing import Any

import common
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fedcog.algorithms import FedAvg, FedCOG, generation
from fedcog.data import Dataset
from fedcog.engine.cohort import RoundSpec
from fedcog.engine.local_training import autograd_gradient
from fedcog.runs.config.experiment import Experiment
from fedcog.runs.environment import find_device
from fedcog.runs.setup import ExperimentSetup, UserObjects

COUNT = 256
STEPS = 3


class Living(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it, the bytes of tensors made since its beginning and still alive are counted, and the
    most of them.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self._known: dict[int, weakref.finalize[Any, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The operation as it is; what it makes is counted until it is gone."""
        found = func(*args, **kwargs or {})
        given = {
            one.untyped_storage()._cdata
            for one in pytree.tree_leaves((args, kwargs))
            if _is_tensor(one)
        }
        for value in filter(_is_tensor, pytree.tree_leaves(found)):
            storage = value.untyped_storage()
            key = storage._cdata
            size = storage.nbytes()
            if key in self._known or key in given:  # a view, or written in place
                continue
            self.now += size
            self.most = max(self.most, self.now)
            self._known[key] = weakref.finalize(storage, self._gone, key, size)
        return found

    def _gone(self, key: int, size: int) -> None:
        self._known.pop(key, None)
        self.now -= size


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def images(data: str | None, train: int) -> Dataset:
    """CIFAR-100, or random images of its form."""
    from fedcog.data import registry

    if data:
        return registry.load("cifar100", data)
    made = common.images(None, train, 100)
    labels = torch.arange(train + 100) % 100
    names = tuple(str(label) for label in range(100))
    return dataclasses.replace(made, train_y=labels[:train], test_y=labels[train:], classes=names)


def measured(work: Callable[[], object], device: torch.device) -> dict[str, int]:
    """Return the peak bytes in tensors during some work, and the allocator's peak on a GPU."""
    common.clean(device)
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    with Living() as living:
        work()
    found = {"bytes": living.most}
    if device.type == "cuda":
        found["allocated"] = torch.cuda.max_memory_allocated(device) - before
    return found


def trained(ready: ExperimentSetup) -> Callable[[], object]:
    """A few steps of one client's local training."""
    algorithm = FedAvg()
    shared = algorithm.broadcast(ready.server_state)
    spec = RoundSpec(algorithm, shared, 0, 0.01, False)
    return lambda: ready.simulator.train_client(spec, 0, {})


def generated(ready: ExperimentSetup, batch: int) -> Callable[[], object]:
    """A few steps of one client's generation, so many inputs at a time."""
    weights = ready.model.params | ready.model.buffers
    other = {name: value + 0.01 for name, value in weights.items()}
    noise = torch.randn(COUNT, *ready.model.input_shape, device=ready.device)
    labels = torch.arange(COUNT, device=ready.device) % ready.model.num_classes
    recipe = dataclasses.replace(FedCOG(), steps=STEPS, generation_batch=batch).generation_config

    models = generation.Models(ready.task, ready.model, weights, other)

    def work() -> object:
        with torch.no_grad():
            return generation.generate(models, labels, noise.clone(), recipe, autograd_gradient)

    return work


def main() -> None:
    """Measure training, then generation in batches of several sizes."""
    parser = common.parser(__doc__, "results/devices.md")
    parser.add_argument("--batches", type=int, nargs="+", default=[256, 64, 16, 1])
    options = parser.parse_args()
    device = find_device(options.device)
    dataset = images(options.data, 1000)
    experiment = Experiment(
        dataset="cifar100",
        model="cnn3",
        partition="iid",
        clients=1,
        local_steps=STEPS,
        mapping="loop",
        workers=1,
    )
    ready = ExperimentSetup(
        dataclasses.replace(experiment, device=str(device)), UserObjects(dataset)
    )
    inputs = dataset.train_x[0].numel()
    work = {
        f"training, batch {experiment.batch_size}": (
            sum(map(torch.numel, ready.model.params.values())),
            trained(ready),
        )
    }
    for batch in options.batches:
        name = (
            f"generation of {COUNT} inputs, {batch} at a time"
            if batch < COUNT
            else f"generation of {COUNT} inputs at once"
        )
        work[name] = (batch * inputs, generated(ready, batch if batch < COUNT else 0))
    found = {}
    rows = []
    for name, (numbers, doing) in work.items():
        doing()  # once before, so that what is made only once does not count
        found[name] = measured(doing, device) | {"numbers": numbers}
        row = [name, f"{numbers:,}", f"{found[name]['bytes'] / 2**20:.1f} MiB"]
        rows.append(
            [
                *row,
                *([f"{found[name]['allocated'] / 2**20:.1f} MiB"] if device.type == "cuda" else []),
            ]
        )
        print(rows[-1], file=sys.stderr)
    head = ["work", "numbers a gradient is taken of", "living in tensors at most"]
    head += ["of the allocator at most"] if device.type == "cuda" else []
    facts = common.about(device, options.data) | {
        "data": "CIFAR-100" if options.data else "random images of its form"
    }
    kept = COUNT * inputs * 4 / 2**20
    note = (
        f"All inputs together are {kept:.1f} MiB, before and after a step: so much of generation "
        "does not hang on how "
        "many are optimised at a time."
    )
    common.write(
        options.out,
        "What generation asks of a small device",
        facts,
        [common.table(head, rows), note],
        {"found": found},
    )
    print(options.out.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
