"""A data set partitioned among clients, on one device, with reproducible batches."""

import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fedcog.core import rng
from fedcog.data.datasets import Dataset
from fedcog.data.local_tests import LocalTests
from fedcog.models.ops import augmentation
from fedcog.models.ops.keyed_random import KeyedRandom

MAX_INPUT_BYTES = 2**30
"""On a CPU, a training set up to this size (in bytes) is stored as normalized inputs."""


Augmentation = Callable[[Tensor, KeyedRandom], Tensor]
"""The user's augmentation: a function of a batch of one client and a source of random numbers.

Images `(B, C, H, W)` are floats in [0, 1]; other inputs are as the data set has them. The result
has the same shape and dtype.
"""


class BatchPlan(NamedTuple):
    """The batches of one round.

    Attributes:
        indices: Positions in the training set, `(clients, steps, batch)`.
        crops: Row offset, column offset and flip of each example, `(clients, steps, batch, 3)`;
            None without augmentation.
    """

    indices: Tensor
    crops: Tensor | None


class FederatedData:
    """A partitioned training set and a test set, on one device.

    Data that exceeds `max_device_bytes` stays in host memory and is copied to the device batch by
    batch (`is_streamed`).

    Attributes:
        device: Device of labels, batches and, unless streamed, all inputs.
        dtype: Floating type of inputs.
        seed: Seed of batches, augmentation and validation split.
        augment: Whether training images are randomly cropped and flipped.
        is_streamed: Whether inputs stay in host memory.
        train_x: Training inputs, as stored in the data set.
        train_y: Training labels.
        test_x: Test inputs, as stored in the data set.
        test_y: Test labels.
        validation: Positions of the training examples that are held out for validation.
        sizes: Number of training examples per client, in host memory.
        local_tests: The clients' own test examples, if they have any.
        augmentation: Changes the training examples of every batch, if the user gave it.
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
        local_tests: LocalTests | None = None,
        augmentation: Augmentation | None = None,
    ) -> None:
        """Move a data set to a device and split off the validation examples.

        Args:
            dataset: The data set.
            indices: Training examples of each client, int64.
            seed: Seed of batches, augmentation and validation split.
            validation: Fraction of each client's examples to hold out.
            augment: Whether to crop and flip training images at random.
            device: Where batches are made; the CPU by default.
            dtype: Floating type of inputs.
            local_tests: The clients' own test examples.
            augmentation: Changes the training examples of every batch.
        """
        self.device = device or torch.device("cpu")
        self.dtype = dtype
        self.seed = seed
        self.augment = augment
        self.augmentation = augmentation
        num_bytes = dataset.train_x.nbytes + dataset.test_x.nbytes
        self.is_streamed = num_bytes > max_device_bytes(self.device)
        input_device = torch.device("cpu") if self.is_streamed else self.device
        self.train_x = dataset.train_x.to(input_device)
        self.train_y = dataset.train_y.to(self.device)
        self.test_x = dataset.test_x.to(input_device)
        self.test_y = dataset.test_y.to(self.device)
        self.local_tests = None
        if local_tests is not None:
            self.local_tests = local_tests.to(input_device, self.device)
        splits = [
            _split_validation(client_indices, validation, seed, client)
            for client, client_indices in enumerate(indices)
        ]
        training, held_out = zip(*splits, strict=True)
        self.validation = torch.cat(held_out).to(self.device)
        # Sizes and offsets stay in host memory: they decide shapes, and reading them from a GPU
        # would wait for it.
        self.sizes = torch.tensor([len(client_indices) for client_indices in training])
        self._offsets = self.sizes.cumsum(0) - self.sizes
        self._device_offsets = self._offsets.to(self.device)
        self._client_indices = torch.cat(training).to(self.device)
        self._labels = dataset.train_y.cpu()[torch.cat(training)]
        channels = (-1, *[1] * (self.train_x.dim() - 2))
        self._mean = torch.tensor(dataset.mean, dtype=dtype, device=self.device).reshape(channels)
        self._std = torch.tensor(dataset.std, dtype=dtype, device=self.device).reshape(channels)
        self._stored = self.train_x
        self._normalization = {"mean": self._mean, "std": self._std}
        is_small = self.train_x.numel() * dtype.itemsize <= MAX_INPUT_BYTES
        if self.device.type == "cpu" and not augment and not augmentation and is_small:
            self._stored = _to_channels_last(self.to_inputs(self.train_x))
            self._normalization = {"mean": self._mean[:0], "std": self._std[:0]}

    @property
    def num_clients(self) -> int:
        """The number of clients."""
        return len(self.sizes)

    def client_labels(self, client: int) -> Tensor:
        """Return the labels of a client's training examples, in host memory."""
        start = int(self._offsets[client])
        return self._labels[start : start + int(self.sizes[client])]

    def client_indices(self, client: int) -> Tensor:
        """Return the positions of a client's training examples."""
        start = int(self._offsets[client])
        return self._client_indices[start : start + int(self.sizes[client])]

    def draw_indices(self, purpose: str, round: int, client_ids: Tensor, count: int) -> Tensor:
        """Draw examples of each client without replacement, epoch by epoch.

        Args:
            purpose: Purpose of the random numbers.
            round: Round of the random numbers.
            client_ids: Client ids `(K,)`, in host memory.
            count: Number of examples per client.

        Returns:
            Positions in the training set, `(K, count)`.
        """
        ids = client_ids.to(self.device)
        sizes = self.sizes[client_ids]
        positions = rng.epoch_indices(self.seed, purpose, round, ids, sizes, count)
        return self._client_indices[self._device_offsets[ids][:, None] + positions]

    def plan_batches(self, round: int, client_ids: Tensor, steps: int, batch: int) -> BatchPlan:
        """Draw the batches of one round.

        Args:
            round: The round.
            client_ids: Client ids `(K,)`, in host memory.
            steps: Number of local steps.
            batch: Batch size.

        Returns:
            The batches; each client passes through shuffled epochs of its examples.
        """
        count = steps * batch
        indices = self.draw_indices("batches", round, client_ids, count)
        crops = None
        if self.augment:
            words = rng.words(self.seed, "augmentation", round, client_ids.to(self.device), count)
            offsets = rng.integers(words[..., :2], 2 * augmentation.PADDING + 1)
            flips = rng.integers(words[..., 2:3], 2)
            crops = torch.cat([offsets, flips], dim=-1).reshape(len(client_ids), steps, batch, 3)
        return BatchPlan(indices.reshape(len(client_ids), steps, batch), crops)

    @property
    def example_store(self) -> dict[str, Tensor]:
        """Normalization (`mean`, `std`) and, unless streamed, all training examples (`x`, `y`).

        With the user's augmentation there is no normalization here: it follows the augmentation.
        """
        stored = {} if self.is_streamed else {"x": self._stored, "y": self.train_y}
        if self.augmentation is not None:
            return stored | {"mean": self._mean[:0], "std": self._std[:0]}
        return stored | self._normalization

    def examples(
        self, indices: Tensor, crops: Tensor | None = None, store: dict[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Return training examples as the model takes them.

        Args:
            indices: Positions in `store`, of any shape.
            crops: Row offset, column offset and flip per example, `(*indices.shape, 3)`.
            store: `example_store`, or staged examples with its normalization; by default, indices
                are positions in the training set.

        Returns:
            Inputs `x`, `(*indices.shape, ...)`, and labels `y`.
        """
        if store is None:
            store = self._normalization | self.stage(indices)
            indices = torch.arange(indices.numel(), device=self.device).reshape(indices.shape)
        x = augmentation.gather_inputs(store["x"], indices, crops, store["mean"], store["std"])
        return {"x": x, "y": store["y"][indices]}

    def stage(self, indices: Tensor) -> dict[str, Tensor]:
        """Copy the stored examples at `indices`, in that order, to the device."""
        flat = indices.flatten()
        return {
            "x": self._stored[flat.to(self._stored.device)].to(self.device),
            "y": self.train_y[flat],
        }

    def to_inputs(self, x: Tensor) -> Tensor:
        """Convert stored examples to inputs: images are scaled to [0, 1] and normalized."""
        return augmentation.normalize(x.to(self.device), self._mean, self._std)

    def normalize(self, x: Tensor) -> Tensor:
        """Normalize inputs that are scaled, but not normalized yet."""
        return augmentation.normalize(x, self._mean, self._std)

    def to_images(self, x: Tensor) -> Tensor:
        """Convert inputs back to uint8 images, with clipping."""
        if self._mean.numel():
            x = x * self._std.to(x.device) + self._mean.to(x.device)
        return (x * 255).round().clamp(0, 255).to(torch.uint8)


def max_device_bytes(device: torch.device) -> int:
    """Return the bytes that data may take up on a device: on a GPU, half of what is free."""
    return torch.cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else sys.maxsize


def _split_validation(
    indices: Tensor, fraction: float, seed: int, client: int
) -> tuple[Tensor, Tensor]:
    """Split a client's examples into training and validation; training keeps at least one."""
    held_out = min(round(len(indices) * fraction), len(indices) - 1)
    if held_out <= 0:
        return indices, indices[:0]
    order = rng.permutation(seed, f"validation/{client}", 0, len(indices))
    return indices[order[held_out:].sort()[0]], indices[order[:held_out].sort()[0]]


def _to_channels_last(x: Tensor) -> Tensor:
    """Store images channels last, which is faster for convolutions on a CPU."""
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x
