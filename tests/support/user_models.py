"""Networks as users define them, without any knowledge of federated learning."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Residual(nn.Module):
    """Two convolutions with a shortcut, with GroupNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 6, 3, padding=1)
        self.norm = nn.GroupNorm(2, 6)
        self.conv = nn.Conv2d(6, 6, 3, padding=1)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        x = torch.relu(x + self.conv(x))
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


class Tied(nn.Module):
    """A network whose two layers share one weight matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(64, 64, bias=False)
        self.decode = nn.Linear(64, 64)
        self.decode.weight = self.encode.weight
        self.head = nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.decode(torch.tanh(self.encode(x.flatten(1)))))
        return logits


class Frozen(nn.Module):
    """A fixed first layer, a table of constants and a trained head."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(64, 16).requires_grad_(False)
        self.head = nn.Linear(16, 4)
        self.register_buffer("table", torch.linspace(0.5, 1.5, 64))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.relu(self.body(x.flatten(1) * self.table)))
        return logits


def layer_norm() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 12), nn.LayerNorm(12), nn.GELU(), nn.Linear(12, 4)
    )


def batch_norm() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 5, 3),
        nn.BatchNorm2d(5),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(5 * 36, 4),
    )


def user_generator(dropout: float = 0.5) -> nn.Module:
    """A user's generator: noise (N, 5) -> images (N, 1, 8, 8)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(
            *(nn.Linear(5, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(dropout)),
            *(nn.Linear(12, 64), nn.Unflatten(1, (1, 8, 8))),
        )


def _seeded(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def seeded() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return build()

    return seeded


USER_MODELS = {
    "residual": _seeded(Residual),
    "layer-norm": _seeded(layer_norm),
    "tied": _seeded(Tied),
    "batch-norm": _seeded(batch_norm),
    "frozen": _seeded(Frozen),
}
