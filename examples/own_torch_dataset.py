"""Use a torch Dataset, such as torchvision's, whose examples are already assigned to clients.

python examples/own_torch_dataset.py
"""

import torch
from torch import Tensor
from torch.utils.data import Dataset

import fedcog


class Waves(Dataset[tuple[Tensor, int]]):
    """Noisy waves of three frequencies. Any Dataset of (x, y) pairs works."""

    def __init__(self, num_waves: int, seed: int) -> None:
        rng = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(3, (num_waves,), generator=rng).tolist()
        self.phases = torch.rand(num_waves, generator=rng)
        self.noise = torch.randn(num_waves, 32, generator=rng)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        label = self.labels[index]
        time = torch.linspace(0, 6.28, 32)
        wave = torch.sin((1 + label) * time + 6.28 * self.phases[index])
        return wave + 0.8 * self.noise[index], label


# Assign examples to four clients. The first two have no waves of the highest frequency.
train = Waves(400, seed=0)
slow = [index for index, label in enumerate(train.labels) if label < 2][:160]
rest = [index for index in range(400) if index not in set(slow)]
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
