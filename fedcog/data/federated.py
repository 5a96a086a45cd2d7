"""A data set shared out among clients, on one device, with its batches and augmentation as keyed streams."""

import sys
from typing import NamedTuple

import torch
from torch import Tensor

from fedcog import pictures, streams
from fedcog.data.datasets import Dataset

READY = 2**30
"""Bytes up to which a training set is kept as inputs, on a CPU."""


class Plan(NamedTuple):
    """A round's batches: which examples, and how each is shifted and flipped. Leading axes: client, step, place."""

    picks: Tensor  # positions in the training set
    moves: Tensor | None  # down, right, flip


class FederatedData:
    """A training set on a device as uint8, its owners, and a test set.

    Data of more than `room` bytes (by default half of what is free on a GPU) stays in host memory and is `streamed`.
    """

    def __init__(
        self,
        dataset: Dataset,
        indices: list[Tensor],
        *,
        seed: int,
        validation: float = 0.0,
        augment: bool = False,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
        room: int | None = None,
    ) -> None:
        self.device, self.dtype = device or torch.device("cpu"), dtype
        self.seed, self.augment = seed, augment
        room = _room(self.device) if room is None else room
        self.streamed = dataset.train_x.nbytes + dataset.test_x.nbytes > room
        place = torch.device("cpu") if self.streamed else self.device
        self.train_x, self.train_y = dataset.train_x.to(place), dataset.train_y.to(self.device)
        self.test_x, self.test_y = dataset.test_x.to(place), dataset.test_y.to(self.device)
        kept, held_out = zip(*(_part(one, validation, seed, k) for k, one in enumerate(indices)), strict=True)
        self.validation = torch.cat(held_out).to(self.device)
        self.sizes = torch.tensor([len(one) for one in kept])  # in host memory: they decide about shapes
        self._owned = torch.cat(kept).to(self.device)
        self._first = self.sizes.cumsum(0) - self.sizes  # there, too: to ask a device means to wait for it
        self._start = self._first.to(self.device)
        self._labels = dataset.train_y.cpu()[torch.cat(kept)]
        channels = (-1, *[1] * (self.train_x.dim() - 2))
        self._mean = torch.tensor(dataset.mean, dtype=dtype, device=self.device).reshape(channels)
        self._std = torch.tensor(dataset.std, dtype=dtype, device=self.device).reshape(channels)
        # What batches are made of. Where nothing moves them they might as well be inputs already.
        self._stored, self._rule = self.train_x, {"mean": self._mean, "std": self._std}
        if self.device.type == "cpu" and not augment and self.train_x.numel() * dtype.itemsize <= READY:
            self._stored = _as_convolved(self.inputs(self.train_x))
            self._rule = {"mean": self._mean[:0], "std": self._std[:0]}

    @property
    def clients(self) -> int:
        """How many clients there are."""
        return len(self.sizes)

    def labels(self, client: int) -> Tensor:
        """The labels of a client's training examples, in host memory."""
        start, size = int(self._first[client]), int(self.sizes[client])
        return self._labels[start : start + size]

    def own(self, client: int) -> Tensor:
        """The positions of a client's training examples."""
        start, size = int(self._first[client]), int(self.sizes[client])
        return self._owned[start : start + size]

    def pick(self, purpose: str, round: int, clients: Tensor, count: int) -> Tensor:
        """[clients, count] positions of each client's own examples, each once before any comes twice.

        Client numbers lie in host memory, here and everywhere: the sizes of what is drawn go by them.
        """
        there = clients.to(self.device)
        window = streams.windows(self.seed, purpose, round, there, self.sizes[clients], count)
        return self._owned[self._start[there][:, None] + window]

    def plan(self, round: int, clients: Tensor, steps: int, batch: int) -> Plan:
        """The clients' batches of a round: windows over fresh permutations of what each holds."""
        length = steps * batch
        index = self.pick("batches", round, clients, length)
        moves = None
        if self.augment:
            words = streams.words(self.seed, "augmentation", round, clients.to(self.device), length)
            shift = streams.integers(words[..., :2], 2 * pictures.PADDING + 1)
            flip = streams.integers(words[..., 2:3], 2)
            moves = torch.cat([shift, flip], dim=-1).reshape(len(clients), steps, batch, 3)
        return Plan(index.reshape(len(clients), steps, batch), moves)

    @property
    def stock(self) -> dict[str, Tensor]:
        """What examples are normalised by and, unless they are streamed, all of them as they are stored."""
        stored = {} if self.streamed else {"x": self._stored, "y": self.train_y}
        return stored | self._rule

    def examples(
        self, index: Tensor, moves: Tensor | None = None, stock: dict[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """The examples at `index` (of any shape) of a stock, moved if asked, as the model sees them."""
        if stock is None:
            stock = self.stock | self.staged(index)
            index = torch.arange(index.numel(), device=self.device).reshape(index.shape)
        x = pictures.examples(stock["x"], index, moves, stock["mean"], stock["std"])
        return {"x": x, "y": stock["y"][index]}

    def staged(self, index: Tensor) -> dict[str, Tensor]:
        """The stored examples at `index`, in its order, on the device."""
        own = index.flatten()
        return {"x": self._stored[own.to(self._stored.device)].to(self.device), "y": self.train_y[own]}

    def inputs(self, x: Tensor) -> Tensor:
        """Stored examples as the model sees them: images scaled to [0, 1], then normalised."""
        return pictures.inputs(x.to(self.device), self._mean, self._std)

    def pictures(self, x: Tensor) -> Tensor:
        """What the model sees, as images again: uint8, clipped."""
        if self._mean.numel():
            x = x * self._std.to(x.device) + self._mean.to(x.device)
        return (x * 255).round().clamp(0, 255).to(torch.uint8)


def _room(device: torch.device) -> int:
    """The bytes that data may take up on a device: on a GPU half of what is free."""
    return torch.cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else sys.maxsize


def _part(indices: Tensor, validation: float, seed: int, client: int) -> tuple[Tensor, Tensor]:
    """A client's examples in two: those it trains on, and the share held out for validation."""
    held_out = min(round(len(indices) * validation), len(indices) - 1)
    if held_out <= 0:
        return indices, indices[:0]
    order = streams.permutation(seed, f"validation/{client}", 0, len(indices))
    return indices[order[held_out:].sort()[0]], indices[order[:held_out].sort()[0]]


def _as_convolved(x: Tensor) -> Tensor:
    """Images with their channels innermost, which is how a CPU likes to convolve them; anything else as it is."""
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x
