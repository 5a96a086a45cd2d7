"""Small federations for the tests: a few clients of unequal size on random data, in float64."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedcog.algorithms import Algorithm
from fedcog.data import Dataset, FederatedData, from_arrays
from fedcog.federation import evaluate
from fedcog.federation.cohort import Cohort, Mapping
from fedcog.federation.optimiser import Optimiser
from fedcog.federation.rounds import Round, Schedule, federate
from fedcog.federation.simulation import Simulation
from fedcog.models import Model, build
from fedcog.task import SingleLabel
from fedcog.tree import State

CLASSES = 4


def images(train: int = 90, test: int = 20, shape: tuple[int, ...] = (1, 8, 8), seed: int = 0) -> Dataset:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 256, (train + test, *shape), dtype=torch.uint8, generator=draw)
    y = torch.arange(train + test) % CLASSES
    y = y[torch.randperm(train + test, generator=draw)]
    names = [str(label) for label in range(CLASSES)]
    return from_arrays(x[:train], y[:train], x[train:], y[train:], classes=names, augment=True)


def vectors(train: int = 60, test: int = 12, size: int = 5, seed: int = 0) -> Dataset:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(train + test, size, generator=draw)
    y = torch.randint(0, CLASSES, (train + test,), generator=draw)
    names = [str(label) for label in range(CLASSES)]
    return from_arrays(x[:train], y[:train], x[train:], y[train:], classes=names)


class Small:
    """A federation of three clients that own 50, 30 and 10 of 90 images (or as `sizes` says)."""

    def __init__(
        self,
        algorithm: Algorithm,
        mapping: Mapping = "loop",
        *,
        dataset: Dataset | None = None,
        module: nn.Module | None = None,
        sizes: Sequence[int] = (50, 30, 10),
        dtype: torch.dtype = torch.float64,
        steps: int = 3,
        epochs: float = 0.0,
        batch: int = 6,
        optimiser: Optimiser | None = None,
        participation: float = 1.0,
        rounds: int = 2,
        clip: float = 0.0,
        lr: float = 0.05,
        device: str = "cpu",
    ) -> None:
        self.algorithm, self.dataset = algorithm, dataset or images()
        indices = list(torch.split(torch.arange(sum(sizes)), list(sizes)))
        where = torch.device(device)
        self.data = FederatedData(
            self.dataset, indices, seed=3, augment=self.dataset.augment, device=where, dtype=dtype
        )
        shape = self.dataset.input_shape
        module = module or build("small", shape, CLASSES, seed=1)
        self.model = Model(module, shape, CLASSES).to(where, dtype)
        self.task = SingleLabel(CLASSES)
        cohort = Cohort(
            self.model,
            self.task,
            self.data,
            optimiser or Optimiser(momentum=0.9),
            batch_size=batch,
            grad_clip=clip,
            mapping=mapping,
        )
        self.backend = Simulation(cohort, local_steps=steps, local_epochs=epochs, weight_cap=0)
        self.schedule = Schedule(rounds, len(sizes), participation, 3, lr, 1.0, 1, True)
        self.server: State = algorithm.server_init(self.model.params, self.model.buffers, len(sizes))

    def hits(self, server: State) -> Tensor:
        weights = server["params"] | server["buffers"]
        alone: Callable[[Any], Any] = lambda function: function  # noqa: E731
        data = self.data
        return evaluate.hits(self.model, self.task, data, weights, data.test_x, data.test_y, alone)

    def scores(self, hits: Tensor, server: State) -> dict[str, float]:
        return {"accuracy": evaluate.accuracy(hits, self.backend.totals)}

    def run(self, start: int = 0) -> list[Round]:
        rounds = list(federate(self.algorithm, self.backend, self, self.schedule, self.server, start))
        self.server = rounds[-1].server
        return rounds


def worst(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference between two flat dicts of tensors of the same names."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)
