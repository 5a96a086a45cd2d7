"""What generation needs on a small device, compared with training: optimized values and memory.

python benchmarks/devices.py --out results/devices.md [--batches 256 64 16 1]

The paper's appendix on unequal devices says that its CNN for CIFAR-100 has 69,380 parameters, and
one input 3 x 32 x 32 = 3,072 values, so that a device that can train can also generate a few inputs
at a time. Here one client trains on batches of 64, and generates 256 inputs, --batches at a time.

Memory is the peak of all tensors created during the work: parameters, momentum, activations,
gradients, inputs and Adam's moments. Workspace inside a kernel is not counted. On a GPU, the peak
of torch's allocator is listed too.
"""

import dataclasses
import sys
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import common
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fedcog.algorithms import FedAvg, FedCOG, generation
from fedcog.data import Dataset, registry
from fedcog.engine.cohort import RoundSpec
from fedcog.engine.local_training import autograd_gradient
from fedcog.runs.config.experiment import Experiment
from fedcog.runs.config.user_objects import UserObjects
from fedcog.runs.environment import find_device
from fedcog.runs.setup import ExperimentSetup

NUM_INPUTS = 256
NUM_STEPS = 3
MIB = 2**20


class TensorMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context that counts the bytes of tensors created in it.

    Attributes:
        current: Bytes of tensors that still exist.
        peak: The largest value of `current` so far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current = 0
        self.peak = 0
        self._finalizers: dict[int, weakref.finalize[Any, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and count the storage of its results until it is freed."""
        result = func(*args, **kwargs or {})
        argument_keys = {
            argument.untyped_storage()._cdata
            for argument in pytree.tree_leaves((args, kwargs))
            if _is_tensor(argument)
        }
        for tensor in filter(_is_tensor, pytree.tree_leaves(result)):
            storage = tensor.untyped_storage()
            key = storage._cdata
            num_bytes = storage.nbytes()
            if key in self._finalizers or key in argument_keys:  # a view, or an in-place operation
                continue
            self.current += num_bytes
            self.peak = max(self.peak, self.current)
            self._finalizers[key] = weakref.finalize(storage, self._free, key, num_bytes)
        return result

    def _free(self, key: int, num_bytes: int) -> None:
        self._finalizers.pop(key, None)
        self.current -= num_bytes


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


class Work(NamedTuple):
    """Work that a device does.

    Attributes:
        num_values: Number of values that a gradient is computed for.
        run: Does the work.
    """

    num_values: int
    run: Callable[[], object]


def load_images(data_dir: str | None, num_train: int) -> Dataset:
    """Load CIFAR-100, or create random images of the same shape.

    Args:
        data_dir: Folder with CIFAR-100; None for random images.
        num_train: Number of random training images.

    Returns:
        The data set.
    """
    if data_dir:
        return registry.load("cifar100", data_dir)
    num_test = 100
    dataset = common.load_images(None, num_train, num_test)
    labels = torch.arange(num_train + num_test) % 100
    return dataclasses.replace(
        dataset,
        train_y=labels[:num_train],
        test_y=labels[num_train:],
        classes=tuple(str(label) for label in range(100)),
    )


def measure_memory(run: Callable[[], object], device: torch.device) -> dict[str, int]:
    """Measure the peak memory of some work.

    Args:
        run: Does the work.
        device: Where it runs.

    Returns:
        "bytes": peak bytes in tensors; on a GPU also "allocated": the peak of torch's allocator.
    """
    common.free_memory(device)
    allocated_before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    with TensorMemory() as memory:
        run()
    result = {"bytes": memory.peak}
    if device.type == "cuda":
        result["allocated"] = torch.cuda.max_memory_allocated(device) - allocated_before
    return result


def training_work(setup: ExperimentSetup) -> Work:
    """Return a few steps of one client's local training."""
    algorithm = FedAvg()
    broadcast = algorithm.broadcast(setup.server_state)
    spec = RoundSpec(algorithm, broadcast, 0, 0.01, False)
    num_params = sum(map(torch.numel, setup.model.params.values()))
    return Work(num_params, lambda: setup.simulator.train_client(spec, 0, {}))


def generation_work(setup: ExperimentSetup, batch_size: int) -> Work:
    """Return a few steps of one client's generation.

    Args:
        setup: The experiment's model and task.
        batch_size: How many inputs are generated at a time.

    Returns:
        The work.
    """
    global_weights = setup.model.params | setup.model.buffers
    previous_weights = {name: value + 0.01 for name, value in global_weights.items()}
    noise = torch.randn(NUM_INPUTS, *setup.model.input_shape, device=setup.device)
    labels = torch.arange(NUM_INPUTS, device=setup.device) % setup.model.num_classes
    generation_batch = batch_size if batch_size < NUM_INPUTS else 0  # 0: all at once
    fedcog = dataclasses.replace(FedCOG(), steps=NUM_STEPS, generation_batch=generation_batch)
    config = fedcog.generation_config
    models = generation.Models(setup.task, setup.model, global_weights, previous_weights)

    def run() -> object:
        with torch.no_grad():
            return generation.generate(models, labels, noise.clone(), config, autograd_gradient)

    return Work(batch_size * noise[0].numel(), run)


def make_work(setup: ExperimentSetup, batch_sizes: list[int]) -> dict[str, Work]:
    """Return all work to measure.

    Args:
        setup: The experiment.
        batch_sizes: How many inputs are generated at a time.

    Returns:
        Training, then generation with every batch size, by the label of its row.
    """
    work = {f"training, batch {setup.experiment.batch_size}": training_work(setup)}
    for batch_size in batch_sizes:
        label = f"generation of {NUM_INPUTS} inputs at once"
        if batch_size < NUM_INPUTS:
            label = f"generation of {NUM_INPUTS} inputs, {batch_size} at a time"
        work[label] = generation_work(setup, batch_size)
    return work


def main() -> None:
    """Measure training, then generation in batches of several sizes."""
    parser = common.make_parser(__doc__, "results/devices.md")
    parser.add_argument("--batches", type=int, nargs="+", default=[256, 64, 16, 1])
    options = parser.parse_args()
    device = find_device(options.device)
    dataset = load_images(options.data, 1000)
    experiment = Experiment(
        dataset="cifar100",
        model="cnn3",
        partition="iid",
        clients=1,
        local_steps=NUM_STEPS,
        mapping="loop",
        workers=1,
        device=str(device),
    )
    setup = ExperimentSetup(experiment, UserObjects(dataset))
    results = {}
    rows = []
    for label, (num_values, run) in make_work(setup, options.batches).items():
        run()  # a first time, so that what is created only once does not count
        memory = measure_memory(run, device)
        results[label] = memory | {"numbers": num_values}
        row = [label, f"{num_values:,}", f"{memory['bytes'] / MIB:.1f} MiB"]
        if device.type == "cuda":
            row.append(f"{memory['allocated'] / MIB:.1f} MiB")
        rows.append(row)
        print(row, file=sys.stderr)
    head = ["work", "numbers a gradient is taken of", "living in tensors at most"]
    if device.type == "cuda":
        head.append("of the allocator at most")
    facts = common.describe_environment(device, options.data)
    facts["data"] = "CIFAR-100" if options.data else "random images with the shape of CIFAR-100's"
    input_mib = NUM_INPUTS * dataset.train_x[0].numel() * 4 / MIB
    note = (
        f"All inputs take {input_mib:.1f} MiB before a step and as much after it. This does not "
        "depend on how many are optimized at a time."
    )
    common.write_report(
        options.out,
        "What generation asks of a small device",
        facts,
        [common.markdown_table(head, rows), note],
        {"found": results},
    )
    print(options.out.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
