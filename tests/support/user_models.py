"""Networks as users define them, without any knowledge of federated learning."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fedcog import KeyedRandom


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


class StochasticDepth(nn.Module):
    """A residual branch that is skipped at random, example by example, as in torchvision."""

    def __init__(self, branch: nn.Module, rate: float) -> None:
        super().__init__()
        self.branch = branch
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        branch: Tensor = self.branch(x)
        if self.training:
            noise = torch.empty([len(x), 1, 1, 1], dtype=x.dtype, device=x.device)
            noise = noise.bernoulli_(1 - self.rate)
            branch = branch * noise / (1 - self.rate)
        return x + branch


class Dropouts(nn.Module):
    """Every kind of dropout: of values, of channels, alpha, in attention, of whole branches."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, stride=2)
        self.channels = nn.Dropout2d(0.3)
        self.branch = StochasticDepth(nn.Conv2d(4, 4, 3, padding=1), 0.2)
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.2, batch_first=True)
        self.norm = nn.BatchNorm1d(36)
        self.alpha = nn.AlphaDropout(0.2)
        self.values = nn.Dropout(0.5, inplace=True)
        self.head = nn.Linear(36, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.branch(self.channels(torch.relu(self.stem(x))))
        tokens = x.flatten(2).mT
        tokens = tokens + self.attention(tokens, tokens, tokens, need_weights=False)[0]
        normalized = self.norm(
            torch.tanh(tokens).flatten(1)
        )  # a bias before it would have no effect
        logits: Tensor = self.head(self.values(self.alpha(normalized)))
        return logits


class Recurrent(nn.Module):
    """A two-layer LSTM over the first rows of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.LSTM(8, 6, num_layers=2, batch_first=True)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.rows(x[:, 0, :3])[0][:, -1])
        return logits


class Tokens(nn.Module):
    """A network on tokens below 12, with dropout on embeddings and BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(12, 5)
        self.drop = nn.Dropout(0.2)
        self.mix = nn.Conv1d(5, 8, 3)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 4)

    def embed(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.drop(self.words(tokens))
        return embedded

    def forward_embedded(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(torch.relu(self.mix(x.mT)).mean(2)))
        return logits


def jitter(x: Tensor, random: KeyedRandom) -> Tensor:
    """A user's augmentation of images, with every kind of random number."""
    count = len(x)
    x = x * (0.5 + random.uniform(count, 1, 1, 1).to(x.dtype))
    x = x + 0.05 * random.normal(*x.shape).to(x.dtype)
    flip = random.bernoulli(0.5, count, 1, 1, 1)
    x = torch.where(flip, x.flip(3), x)
    shift = random.integers(3, count, 1, 1, 1)
    return torch.where(shift == 0, x, x.roll(1, 2))


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
    "dropout": _seeded(Dropouts),
}
