"""A torch Dataset of your own, such as torchvision's, whose examples are already at their clients.

python examples/own_torch_dataset.py
"""

import torch
from torch import Tensor
from torch.utils.data import Dataset

import fedcog


class Waves(Dataset[tuple[Tensor, int]]):
    """Noisy waves of three speeds; any Dataset of (x, y) pairs works."""

    def __init__(self, count: int, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(3, (count,), generator=draw).tolist()
        self.phase = torch.rand(count, generator=draw)
        self.noise = torch.randn(count, 32, generator=draw)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        label = self.labels[place]
        time = torch.linspace(0, 6.28, 32)
        return torch.sin((1 + label) * time + 6.28 * self.phase[place]) + 0.8 * self.noise[
            place
        ], label


# Who holds what is known here: four clients, of which the first two lack the fastest waves.
train = Waves(400, seed=0)
slow = [place for place, label in enumerate(train.labels) if label < 2][:160]
rest = [place for place in range(400) if place not in set(slow)]
data = fedcog.from_torch(
    train,
    Waves(200, seed=1),
    classes=["slow", "fast", "faster"],
    indices=[slow[0::2], slow[1::2], rest[0::2], rest[1::2]],
)
print(data)

experiment = fedcog.Experiment(
    fedcog.FedCOG(start_round=6, count=32, steps=10),
    rounds=8,
    local_steps=10,
    batch_size=16,
    lr=0.05,
    threads=1,
)
run = fedcog.run(experiment, "runs/waves", data=data, resume=True)
print(f"last {run.last:.1%}, best {run.best:.1%}; look at {run.path / 'report.html'}")
