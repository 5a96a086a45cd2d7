"""A small federation whose sampling, batches and random numbers plain loops can read."""

import dataclasses
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fedcog.algorithms import Algorithm
from fedcog.core import rng
from fedcog.core.integers import round_half_up
from fedcog.core.optimizers import Optimizer
from fedcog.data import Dataset
from fedcog.testing import NUM_CLASSES, ToyFederation, random_vectors

SEED = 3


def network() -> nn.Module:
    """Return Linear(5, 6), Tanh, Linear(6, C): parameters 0.weight, 0.bias, 2.weight, 2.bias."""
    generator = torch.Generator().manual_seed(7)
    module = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, NUM_CLASSES))
    with torch.no_grad():
        for value in module.parameters():
            value.copy_(torch.randn(value.shape, generator=generator) * 0.6)
    return module


@dataclass
class Case:
    """Clients of unequal size, SGD with momentum and weight decay, float64.

    Under label skew, client k has classes k, k + 1, ... (modulo C), 1 + k % 3 of them.
    """

    lr: float = 0.1
    momentum: float = 0.9
    decay: float = 1e-3
    steps: int = 3
    epochs: float = 0.0  # above 0: ceil(epochs * n / batch) steps per client
    batch: int = 4
    rounds: int = 2
    sizes: tuple[int, ...] = (24, 16, 12, 8)
    participation: float = 0.5
    classes: int = NUM_CLASSES
    label_skew: bool = False
    toy: ToyFederation = field(init=False)

    def dataset(self) -> Dataset:
        """Return random vectors with random labels."""
        dataset = random_vectors()
        if not self.label_skew:
            return dataset
        clients = torch.repeat_interleave(torch.arange(len(self.sizes)), torch.tensor(self.sizes))
        labels = (clients + dataset.train_y % (1 + clients % 3)) % self.classes
        return dataclasses.replace(dataset, train_y=labels)

    def federation(self, algorithm: Algorithm, mapping: str = "loop") -> ToyFederation:
        return ToyFederation(
            algorithm,
            mapping,  # type: ignore[arg-type]
            dataset=self.dataset(),
            module=network(),
            sizes=self.sizes,
            steps=self.steps,
            epochs=self.epochs,
            batch=self.batch,
            rounds=self.rounds,
            lr=self.lr,
            participation=self.participation,
            optimizer=Optimizer("sgd", self.momentum, self.decay),
        )

    def __post_init__(self) -> None:
        self.toy = self.federation(Algorithm())

    @property
    def params(self) -> dict[str, Tensor]:
        """A copy of the initial global parameters."""
        return {name: value.clone() for name, value in self.toy.model.params.items()}

    def sampled(self, round: int) -> list[int]:
        """Return the sorted client ids of a round (from 0)."""
        count = round_half_up(self.participation * len(self.sizes))
        return sorted(rng.permutation(SEED, "sample", round, len(self.sizes))[:count].tolist())

    def weight(self, client: int) -> float:
        return self.sizes[client] / max(self.sizes)

    def counts(self, client: int) -> Tensor:
        """Return the client's class counts, shape (C,), int64."""
        return torch.bincount(self.toy.data.client_labels(client), minlength=self.classes)

    def num_steps(self, client: int) -> int:
        return int(self.toy.simulator.num_steps[client])

    def batches(self, round: int, client: int) -> list[tuple[Tensor, Tensor]]:
        """Return the client's (x, y) of each local step of a round."""
        plan = self.toy.data.plan_batches(
            round, torch.tensor([client]), self.num_steps(client), self.batch
        ).indices[0]
        batches = [self.toy.data.examples(indices) for indices in plan]
        return [(batch["x"], batch["y"]) for batch in batches]

    def own_examples(self, client: int) -> tuple[Tensor, Tensor]:
        """Return all (x, y) of the client."""
        start = sum(self.sizes[:client])
        chosen = self.toy.data.examples(torch.arange(start, start + self.sizes[client]))
        return chosen["x"], chosen["y"]

    def normal(self, name: str, shape: tuple[int, ...], round: int, client: int) -> Tensor:
        """Return the standard normal numbers of draw NAME."""
        return rng.normal(SEED, f"draw/{name}", round, torch.tensor([client]), shape)[0].double()

    def uniform(self, name: str, shape: tuple[int, ...], round: int, client: int) -> Tensor:
        """Return the uniform numbers in (0, 1) of draw NAME."""
        return rng.uniform(SEED, f"draw/{name}", round, torch.tensor([client]), shape)[0].double()

    def examples(self, name: str, count: int, round: int, client: int) -> tuple[Tensor, Tensor]:
        """Return `count` of the client's own (x, y), as draw NAME chooses them."""
        sizes = torch.tensor([self.sizes[client]])
        indices = rng.epoch_indices(
            SEED, f"draw/{name}", round, torch.tensor([client]), sizes, count
        )[0]
        start = sum(self.sizes[:client])
        chosen = self.toy.data.examples(start + indices)
        return chosen["x"], chosen["y"]

    def extra_batches(self, group: str, size: int, round: int, client: int) -> list[Tensor]:
        """Return the indices into a group of `size` extra examples, one (batch,) per local step."""
        length = self.num_steps(client) * self.batch
        order = rng.epoch_indices(
            SEED, f"extra/{group}", round, torch.tensor([client]), torch.tensor([size]), length
        )[0]
        return list(order.reshape(-1, self.batch))
