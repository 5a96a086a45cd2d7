"""A network, its data and its training: plain PyTorch that knows of no federation."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fedcog  # FedCOG


class Net(nn.Module):
    """A small network for 8 x 8 digits."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(64, 64)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """The logits."""
        logits: Tensor = self.head(F.relu(self.hidden(x)))
        return logits


def load_data(
    partition: int, partitions: int
) -> tuple[DataLoader[tuple[Tensor, ...]], TensorDataset]:
    """One client's digits, of every class whose number modulo the partitions is its own; and
    everybody's test set.
    """
    pictures, digits = (torch.tensor(part) for part in load_digits(return_X_y=True))
    x = pictures.float() / 8 - 1
    y = digits
    own = y[:1400] % partitions == partition
    shuffled = torch.Generator().manual_seed(partition)
    train = DataLoader(
        TensorDataset(x[:1400][own], y[:1400][own]), 32, shuffle=True, generator=shuffled
    )
    return train, TensorDataset(x[1400:], y[1400:])


def train(
    net: Net,
    loader: DataLoader[tuple[Tensor, ...]],
    epochs: int,
    lr: float,
    made: fedcog.GeneratedData | None = None,  # FedCOG
) -> float:
    """Local training: the last loss."""
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss = made.loss(loss, net) if made else loss  # FedCOG
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return float(loss.detach())


def test(net: Net, data: TensorDataset) -> float:
    """The share of right answers."""
    x, y = data.tensors
    return float((net(x).argmax(-1) == y).float().mean())
