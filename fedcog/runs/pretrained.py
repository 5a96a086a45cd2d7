"""Pretrained weights from a file, and the pre-training of generators."""

import copy
import hashlib
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from fedcog.algorithms import GeneratorConfig
from fedcog.data import DataError, Dataset
from fedcog.models import generators
from fedcog.models.checks import ModelError
from fedcog.models.ops import augmentation

KERNEL_WIDTHS = (0.25, 1, 4)
"""Widths of the Gaussian kernels of the discrepancy, relative to the spread of the data."""


def load_pretrained(
    module: nn.Module, path: str | Path, num_classes: int = 0
) -> tuple[nn.Module, str]:
    """Copy a network and load its weights from a safetensors file.

    Every tensor must be in the file under its name and in its shape. Only the last layer may be
    missing or have another number of classes: it stays as it was. Counters of batches are ignored.

    Args:
        module: The network; it is not changed.
        path: The file.
        num_classes: Number of classes, which identifies the last layer.

    Returns:
        The copy, and a digest of the loaded weights.

    Raises:
        ModelError: If the file does not fit the network.
    """
    module = copy.deepcopy(module)
    targets = _weights(module.state_dict())
    head = _head_names(module, num_classes)
    try:
        with safe_open(path, "pt") as file:
            names = [name for name in file.keys() if _is_weight(name)]  # noqa: SIM118
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in names}
            fitting = _fitting_names(path, targets, shapes, head)
            for name in sorted(fitting):
                _copy_weight(path, name, file.get_tensor(name), targets[name])
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"{path} cannot be read as a safetensors file ({error}): a run needs the file that it "
            "names when it starts and when it resumes."
        ) from error
    if head & targets.keys() - fitting:
        warnings.warn(
            f"{path} has no last layer for {num_classes} classes: that layer keeps its initial "
            "weights.",
            stacklevel=2,
        )
    return module, _digest({name: targets[name] for name in fitting})


def _is_weight(name: str) -> bool:
    return not name.endswith("num_batches_tracked")


def _weights(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in state_dict.items() if _is_weight(name)}


def _head_names(module: nn.Module, num_classes: int) -> set[str]:
    """Return the names of the weights of the last linear layer."""
    layers = [
        name
        for name, part in module.named_modules()
        if getattr(part, "out_features", None) == num_classes
    ]
    if not layers:
        return set()
    return {f"{layers[-1]}.weight", f"{layers[-1]}.bias"}


def _fitting_names(
    path: str | Path,
    targets: Mapping[str, Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    head: set[str],
) -> set[str]:
    """Return which weights to load; refuse a file that does not fit."""
    common = shapes.keys() & targets.keys()
    fitting = {name for name in common if shapes[name] == tuple(targets[name].shape)}
    other_classes = {
        name for name in common & head if shapes[name][1:] == tuple(targets[name].shape[1:])
    }
    if head & targets.keys() - fitting:  # all of the last layer, or nothing of it
        fitting -= head
    unexpected = sorted(shapes.keys() - fitting - other_classes)
    unexpected += sorted(targets.keys() - fitting - head)
    if unexpected or not fitting:
        name = unexpected[0] if unexpected else next(iter(targets))
        found = f"has shape {shapes[name]}" if name in shapes else "is missing"
        needed = "the network has no such tensor"
        if name in targets:
            needed = f"the network needs shape {tuple(targets[name].shape)}"
        raise ModelError(
            f"{path} does not hold this network's weights: '{name}' {found}, but {needed}."
        )
    return fitting


def _copy_weight(path: str | Path, name: str, value: Tensor, target: Tensor) -> None:
    """Copy one weight into the network, and check it."""
    if value.is_floating_point():
        target.copy_(value)
    if not value.is_floating_point() or not bool(target.isfinite().all()):
        raise ModelError(f"{path} has numbers in '{name}' that are not finite in {target.dtype}.")
    if name.endswith("running_var") and bool((target < 0).any()):
        raise ModelError(f"{path} has negative variances in '{name}'.")


def _digest(weights: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(weights.items()):
        digest.update(f"{name} {list(value.shape)}".encode())
        digest.update(value.contiguous().numpy().data)
    return digest.hexdigest()[:16]


def prepare_generator(
    config: GeneratorConfig,
    generator: nn.Module | None,
    path: str,
    input_shape: tuple[int, ...],
) -> tuple[nn.Module | None, str]:
    """Return the generator that FedCOG starts every round with.

    Args:
        config: Which generator the algorithm uses.
        generator: The user's network, if any.
        path: File with its initial weights; empty if there is none.
        input_shape: Shape of one input.

    Returns:
        The network, and what identifies it; None if the built-in one starts with random weights, or
        there is no generator.
    """
    if generator is None and path and config.kind == "conv":
        generator = generators.ConvGenerator(input_shape, config.noise_size)
    if generator is None:
        return None, ""
    if path:
        generator, _ = load_pretrained(generator, path)
    checked = generators.check_generator(generator, config.noise_size, input_shape)
    return checked, repr(checked) + _digest(checked.state_dict())


class PretrainConfig(NamedTuple):
    """How a generator is pre-trained.

    Attributes:
        noise: Length of the noise vector.
        steps: Number of Adam steps.
        batch: Number of inputs in a batch.
        lr: Learning rate.
        seed: Seed of noise and batches.
    """

    noise: int = generators.DEFAULT_NOISE_SIZE
    steps: int = 1000
    batch: int = 256
    lr: float = 1e-3
    seed: int = 0


def pretrain(generator: nn.Module, data: Dataset, path: str | Path, **settings: Any) -> nn.Module:
    """Pre-train a generator to make inputs like the training examples of a data set.

    It is trained as a moment matching network (Li, Swersky and Zemel, ICML 2015): Adam minimizes
    the maximum mean discrepancy of generated and real batches. In a federation the data must be
    public, because the clients' data are not available.

    Args:
        generator: The network; it is not changed.
        data: The data set.
        path: Where to save the weights, as safetensors.
        **settings: `noise`, `steps`, `batch`, `lr` and `seed`: see `PretrainConfig`.

    Returns:
        The trained copy.

    Raises:
        DataError: If `data` is not a Dataset.
        ModelError: If the generator cannot be trained, or diverges.
    """
    config = PretrainConfig(**settings)
    if not isinstance(data, Dataset):
        raise DataError(
            f"a generator is pre-trained on a Dataset, not on {type(data).__name__}: "
            "fedcog.from_arrays makes one."
        )
    if config.steps < 1 or config.batch < 2:
        raise ModelError(
            "pre-training needs at least 1 step with batches of at least 2, not "
            f"{config.steps} with {config.batch}."
        )
    generators.check_generator(generator, config.noise, data.input_shape)
    if not any(value.requires_grad for value in generator.parameters()):
        raise ModelError("the generator has no trainable weights.")
    Path(path).parent.mkdir(parents=True, exist_ok=True)  # fail before training, not after
    channels = (-1, *[1] * (data.train_x.dim() - 2))
    mean = torch.tensor(data.mean).reshape(channels)
    std = torch.tensor(data.std).reshape(channels)
    real = augmentation.normalize(data.train_x, mean, std)
    generator = copy.deepcopy(generator).train()
    draw = torch.Generator().manual_seed(config.seed)
    adam = torch.optim.Adam(generator.parameters(), config.lr)
    device = next(generator.parameters()).device
    for _ in range(config.steps):
        noise = torch.randn(config.batch, config.noise, generator=draw).to(device)
        made = generator(noise)
        rows = torch.randint(len(real), (config.batch,), generator=draw)
        loss = discrepancy(made, real[rows].to(device))
        adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        adam.step()
    if not all(bool(value.isfinite().all()) for value in generator.state_dict().values()):
        raise ModelError(
            f"the generator diverged and was not saved: choose an lr below {config.lr:g}."
        )
    save_file({name: value.clone() for name, value in generator.state_dict().items()}, path)
    return generator


def discrepancy(made: Tensor, real: Tensor) -> Tensor:
    """Return the squared maximum mean discrepancy of two batches, with Gaussian kernels.

    Args:
        made: Generated inputs `(N, ...)`.
        real: Real inputs `(M, ...)`.

    Returns:
        A 0-d tensor.
    """
    both = torch.cat([made, real]).flatten(1)
    squares = both.square().sum(1)
    distances = squares[:, None] + squares - 2 * both @ both.T
    spread = distances[len(made) :, len(made) :].mean()
    kernel = sum((-distances / (width * spread)).exp() for width in KERNEL_WIDTHS)
    weights = torch.cat(
        [made.new_full((len(made),), 1 / len(made)), real.new_full((len(real),), -1 / len(real))]
    )
    return weights @ kernel @ weights
