"""Network, data and training in plain PyTorch, without federated learning."""

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
        """Return the logits, `(B, 10)`."""
        logits: Tensor = self.head(F.relu(self.hidden(x)))
        return logits


def load_data(
    partition_id: int, num_partitions: int
) -> tuple[DataLoader[tuple[Tensor, ...]], TensorDataset]:
    """Load a client's training set and the common test set.

    The client holds the digits that equal its partition modulo the number of partitions.
    """
    images, y = (torch.tensor(array) for array in load_digits(return_X_y=True))
    x = images.float() / 8 - 1
    train_x = x[:1400]
    train_y = y[:1400]
    is_own = train_y % num_partitions == partition_id
    rng = torch.Generator().manual_seed(partition_id)
    train_set = TensorDataset(train_x[is_own], train_y[is_own])
    train_loader = DataLoader(train_set, 32, shuffle=True, generator=rng)
    return train_loader, TensorDataset(x[1400:], y[1400:])


def train(
    net: Net,
    loader: DataLoader[tuple[Tensor, ...]],
    epochs: int,
    lr: float,
    made: fedcog.GeneratedData | None = None,  # FedCOG
) -> float:
    """Train the network in place, and return the loss of the last step."""
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
    """Return the accuracy."""
    x, y = data.tensors
    return float((net(x).argmax(-1) == y).float().mean())
