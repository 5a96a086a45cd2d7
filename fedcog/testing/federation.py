"""A little federation on random data, in float64, quick enough to be run in tests by the dozen."""

from collections.abc import Sequence

import torch
from torch import nn

from fedcog import tree
from fedcog.algorithms import Algorithm
from fedcog.data import Dataset, FederatedData, from_arrays
from fedcog.federation import evaluate
from fedcog.federation.cohort import Cohort, Mapping
from fedcog.federation.rounds import Round, Schedule, federate, round_half_up
from fedcog.federation.selection import Uniform
from fedcog.federation.simulation import Simulation
from fedcog.models import Model, build
from fedcog.optimiser import Optimiser
from fedcog.task import Measure, task_of
from fedcog.tree import Params, State

CLASSES = 4


def images(train: int = 90, test: int = 20, shape: tuple[int, ...] = (1, 8, 8), seed: int = 0) -> Dataset:
    """Random little images with random labels, those for training in order of their labels."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 256, (train + test, *shape), dtype=torch.uint8, generator=draw)
    y = torch.randint(0, CLASSES, (train + test,), generator=draw)
    y[:train] = y[:train].sort()[0]  # clients own stretches of them: each another mix of labels
    names = [str(label) for label in range(CLASSES)]
    return from_arrays(x[:train], y[:train], x[train:], y[train:], classes=names, augment=True)


def several(train: int = 90, test: int = 20, shape: tuple[int, ...] = (1, 8, 8), seed: int = 0) -> Dataset:
    """Random little images with random sets of labels."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 256, (train + test, *shape), dtype=torch.uint8, generator=draw)
    y = torch.rand(train + test, CLASSES, generator=draw) < torch.linspace(0.2, 0.7, CLASSES)
    return from_arrays(x[:train], y[:train], x[train:], y[train:])


def vectors(train: int = 60, test: int = 12, size: int = 5, seed: int = 0) -> Dataset:
    """Random vectors with random labels."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(train + test, size, generator=draw)
    y = torch.randint(0, CLASSES, (train + test,), generator=draw)
    names = [str(label) for label in range(CLASSES)]
    return from_arrays(x[:train], y[:train], x[train:], y[train:], classes=names)


class Small:
    """A federation of three clients that own 50, 30 and 10 of 90 images (or as `sizes` says), in float64."""

    def __init__(
        self,
        algorithm: Algorithm,
        mapping: Mapping = "loop",
        *,
        dataset: Dataset | None = None,
        module: nn.Module | None = None,
        generator: nn.Module | None = None,
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
        skip_diverged: bool = False,
        seed: int = 3,
    ) -> None:
        self.algorithm, self.dataset = algorithm, dataset or images()
        indices = list(torch.split(torch.arange(sum(sizes)), list(sizes)))
        where = torch.device(device)
        self.data = FederatedData(
            self.dataset, indices, seed=seed, augment=self.dataset.augment, device=where, dtype=dtype
        )
        shape = self.dataset.input_shape
        module = module or build("small", shape, CLASSES, seed=seed - 2)
        self.model = Model(module, shape, CLASSES, generator=generator).to(where, dtype)
        self.task = task_of(CLASSES, self.dataset.several)
        cohort = Cohort(
            self.model,
            self.task,
            self.data,
            optimiser or Optimiser(momentum=0.9),
            batch_size=batch,
            grad_clip=clip,
            mapping=mapping,
        )
        self.backend = Simulation(
            cohort, local_steps=steps, local_epochs=epochs, weight_cap=0, skip_diverged=skip_diverged
        )
        count = max(1, round_half_up(participation * len(sizes)))
        self.schedule = Schedule(rounds, Uniform(len(sizes), count, seed=seed), lr, 1.0, 1, True)
        self.server: State = self.backend.begin(algorithm)

    @property
    def measure(self) -> Measure:
        """What models are judged by."""
        return self.task.measure

    def hits(self, server: State) -> Params:
        """The hits of the server's model on the test set."""
        weights, data = self.algorithm.server_model(server), self.data
        return {"test": evaluate.hits(self.model, self.task, data, weights, data.test_x, data.test_y)}

    def scores(self, hits: Params) -> dict[str, float]:
        """Its score."""
        return {self.measure: self.task.score(hits["test"], self.backend.totals)}

    def run(self, start: int = 0) -> list[Round]:
        """All rounds from `start` on."""
        rounds = list(federate(self.algorithm, self.backend, self, self.schedule, self.server, start))
        self.server = rounds[-1].server
        return rounds

    def everything(self, start: int = 0) -> Params:
        """All there is after the rounds: the server's state and every client's, flat."""
        return tree.flatten({"server": self.run(start)[-1].server}) | self.backend.store.flatten()


def worst(one: Params, other: Params) -> float:
    """The largest difference between two flat dicts of tensors of the same names."""
    assert one.keys() == other.keys(), f"they hold different things: {sorted(one.keys() ^ other.keys())}"
    apart = [(one[name] - other[name]).abs().max().cpu() for name in one if one[name].numel()]
    return float(torch.stack(apart).max())  # torch's, which does not pass over a nan as Python's does
