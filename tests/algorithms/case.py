"""A little federation laid open for plain loops: who takes part, on which batches, with which random numbers."""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fedcog import streams
from fedcog.algorithms import Algorithm
from fedcog.optimiser import Optimiser
from fedcog.testing import CLASSES, Small, vectors

SEED = 3


def network() -> nn.Module:
    """Inputs of 5 numbers -> Linear -> tanh -> Linear -> logits; parameters 0.weight, 0.bias, 2.weight, 2.bias."""
    draw = torch.Generator().manual_seed(7)
    module = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, CLASSES))
    with torch.no_grad():
        for value in module.parameters():
            value.copy_(torch.randn(value.shape, generator=draw) * 0.6)
    return module


@dataclass
class Case:
    """Four unequal clients, half of them a round, two rounds, SGD with momentum 0.9 and weight decay; all float64."""

    lr: float = 0.1
    momentum: float = 0.9
    decay: float = 1e-3
    steps: int = 3
    epochs: float = 0.0  # above 0: unequal numbers of steps, ceil(epochs * n / batch)
    batch: int = 4
    rounds: int = 2
    sizes: tuple[int, ...] = (24, 16, 12, 8)
    participation: float = 0.5
    classes: int = CLASSES
    small: Small = field(init=False)

    def federation(self, algorithm: Algorithm, mapping: str = "loop") -> Small:
        return Small(
            algorithm,
            mapping,  # type: ignore[arg-type]
            dataset=vectors(),
            module=network(),
            sizes=self.sizes,
            steps=self.steps,
            epochs=self.epochs,
            batch=self.batch,
            rounds=self.rounds,
            lr=self.lr,
            participation=self.participation,
            optimiser=Optimiser("sgd", self.momentum, self.decay),
        )

    def __post_init__(self) -> None:
        self.small = self.federation(Algorithm())

    @property
    def params(self) -> dict[str, Tensor]:
        """Where the global model starts."""
        return {name: value.clone() for name, value in self.small.model.params.items()}

    def chosen(self, round: int) -> list[int]:
        """The clients of a round (rounds count from 0), in order."""
        return sorted(streams.permutation(SEED, "sample", round, len(self.sizes))[: len(self.sizes) // 2].tolist())

    def weight(self, client: int) -> float:
        return self.sizes[client] / max(self.sizes)

    def counts(self, client: int) -> Tensor:
        """The client's examples of each class, int64."""
        return torch.bincount(self.small.data.labels(client), minlength=self.classes)

    def steps_of(self, client: int) -> int:
        return int(self.small.backend.steps[client])

    def batches(self, round: int, client: int) -> list[tuple[Tensor, Tensor]]:
        """The client's (x, y) of each local step of a round."""
        plan = self.small.data.plan(round, torch.tensor([client]), self.steps_of(client), self.batch).picks[0]
        return [(self.small.data.examples(one)["x"], self.small.data.examples(one)["y"]) for one in plan]

    def normal(self, name: str, shape: tuple[int, ...], round: int, client: int) -> Tensor:
        """The standard normal numbers that draw NAME of a round and client consists of."""
        return streams.normal(SEED, f"draw/{name}", round, torch.tensor([client]), shape)[0].double()

    def uniform(self, name: str, shape: tuple[int, ...], round: int, client: int) -> Tensor:
        """The same, uniform in (0, 1)."""
        return streams.uniform(SEED, f"draw/{name}", round, torch.tensor([client]), shape)[0].double()

    def examples(self, name: str, count: int, round: int, client: int) -> tuple[Tensor, Tensor]:
        """`count` of the client's own (x, y), drawn for NAME."""
        sizes = torch.tensor([self.sizes[client]])
        place = streams.windows(SEED, f"draw/{name}", round, torch.tensor([client]), sizes, count)[0]
        start = sum(self.sizes[:client])
        found = self.small.data.examples(start + place)
        return found["x"], found["y"]

    def served(self, group: str, size: int, round: int, client: int) -> list[Tensor]:
        """Which of a group's `size` extra examples each local step is served (`batch` positions a step)."""
        length = self.steps_of(client) * self.batch
        order = streams.windows(SEED, f"extra/{group}", round, torch.tensor([client]), torch.tensor([size]), length)[0]
        return list(order.reshape(-1, self.batch))
