"""Weights that a network begins with, from a file; and generators, which may begin so and can be taught to."""

import copy
import hashlib
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from fedcog import generators, pictures
from fedcog.algorithms import FedCOG
from fedcog.data import DataError, Dataset
from fedcog.fitness import ModelError


def pretrained(module: nn.Module, path: str | Path, classes: int = 0) -> tuple[nn.Module, str]:
    """A copy of a network with the weights of a safetensors file, and a digest of those.

    Every tensor must be there under its name and in its shape. Only what tells so many classes apart, the last layer,
    may be missing or of another number of classes: it stays as it was. Counters of batches are no weights.
    """
    module = copy.deepcopy(module)
    own = {name: value for name, value in module.state_dict().items() if not name.endswith("num_batches_tracked")}
    linear = [name for name, part in module.named_modules() if getattr(part, "out_features", None) == classes]
    last = {f"{linear[-1]}.{part}" for part in ("weight", "bias")} if linear else set[str]()
    try:
        with safe_open(path, "pt") as file:
            there = {name for name in file.keys() if not name.endswith("num_batches_tracked")}  # noqa: SIM118
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in there}
            fit = {name for name in there & own.keys() if shapes[name] == tuple(own[name].shape)}
            wide = {name for name in there & last & own.keys() if shapes[name][1:] == tuple(own[name].shape[1:])}
            new = bool(last & own.keys() - fit)
            fit -= last if new else set()  # all of the last layer, or nothing
            odd = sorted(there - fit - wide) + sorted(own.keys() - fit - last)
            if odd or not fit:
                name = odd[0] if odd else next(iter(own))
                here = f"in shape {shapes[name]}" if name in shapes else "missing"
                wanted = f"needs it in shape {tuple(own[name].shape)}" if name in own else "has no such tensor"
                raise ModelError(f"{path} has not this network's weights: there '{name}' is {here}, and it {wanted}.")
            for name in sorted(fit):
                value = file.get_tensor(name)
                kept = own[name].copy_(value) if value.is_floating_point() else own[name]  # into the module itself
                if not value.is_floating_point() or not bool(kept.isfinite().all()):
                    raise ModelError(f"{path} has numbers in '{name}' that no finite {kept.dtype} can hold.")
                if name.endswith("running_var") and bool((kept < 0).any()):
                    raise ModelError(f"{path} has variances below zero in '{name}'.")
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"{path} is no safetensors file that can be read ({error}): a run begins and goes on with the one it names."
        ) from error
    if new:
        warnings.warn(
            f"{path} has no last layer for {classes} classes: it begins afresh, all others as they are there.",
            stacklevel=2,
        )
    return module, _digest({name: own[name] for name in fit})


def _digest(weights: Mapping[str, Tensor]) -> str:
    found = hashlib.sha256()
    for name, value in sorted(weights.items()):
        found.update(f"{name} {list(value.shape)}".encode())
        found.update(value.contiguous().numpy().data)
    return found.hexdigest()[:16]


def ready_generator(
    algorithm: FedCOG, own: nn.Module | None, path: str, input_shape: tuple[int, ...]
) -> tuple[nn.Module | None, str]:
    """The generator that FedCOG begins with and what tells it from others; None: ours, afresh, or no generator at all.

    It is a network of somebody's `own` or ours, with its weights as they are or, where there is a `path`, from there.
    """
    if own is None and path and algorithm.generator == "conv":
        own = generators.ConvGenerator(input_shape, algorithm.noise)
    if own is None:
        return None, ""
    if path:
        own, _ = pretrained(own, path)
    usable = generators.usable(own, algorithm.noise, input_shape)
    return usable, repr(usable) + _digest(usable.state_dict())


def pretrain(
    generator: nn.Module,
    data: Dataset,
    path: str | Path,
    *,
    noise: int = generators.NOISE,
    steps: int = 1000,
    batch: int = 256,
    lr: float = 1e-3,
    seed: int = 0,
) -> nn.Module:
    """A copy of a generator, taught to make inputs like the training examples of `data`, and saved as safetensors.

    It is a moment matching network (Li, Swersky and Zemel, ICML 2015): Adam makes batches of noise indistinguishable
    from real ones by the means of many features at once. In a federation the data must be public: nobody has the
    clients'.
    """
    if not isinstance(data, Dataset):
        kind = type(data).__name__
        raise DataError(f"a generator is pre-trained on a Dataset, not on {kind}: fedcog.from_arrays makes one.")
    if steps < 1 or batch < 2:
        raise ModelError(f"a generator learns in 1 step or more, of batches of 2 or more: not {steps}, of {batch}.")
    generators.usable(generator, noise, data.input_shape)
    if not any(value.requires_grad for value in generator.parameters()):
        raise ModelError("the generator has no weights that could learn: there is nothing to pre-train.")
    Path(path).parent.mkdir(parents=True, exist_ok=True)  # now, not after a thousand steps
    channels = -1, *[1] * (data.train_x.dim() - 2)
    real = pictures.inputs(data.train_x, *(torch.tensor(one).reshape(channels) for one in (data.mean, data.std)))
    generator, draw = copy.deepcopy(generator).train(), torch.Generator().manual_seed(seed)
    adam, here = torch.optim.Adam(generator.parameters(), lr), next(generator.parameters()).device
    for _ in range(steps):
        made = generator(torch.randn(batch, noise, generator=draw).to(here))
        loss = discrepancy(made, real[torch.randint(len(real), (batch,), generator=draw)].to(here))
        adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        adam.step()
    if not all(bool(value.isfinite().all()) for value in generator.state_dict().values()):
        raise ModelError(f"the generator has diverged, and was not saved: choose a smaller lr than {lr:g}.")
    save_file({name: value.clone() for name, value in generator.state_dict().items()}, path)
    return generator


def discrepancy(made: Tensor, real: Tensor) -> Tensor:
    """The squared maximum mean discrepancy of two batches, by Gaussian kernels wide, narrow and as `real` is spread."""
    both = torch.cat([made, real]).flatten(1)
    squares = both.square().sum(1)
    apart = squares[:, None] + squares - 2 * both @ both.T
    spread = apart[len(made) :, len(made) :].mean()
    alike = sum((-apart / (width * spread)).exp() for width in (0.25, 1, 4))
    side = torch.cat([made.new_full((len(made),), 1 / len(made)), real.new_full((len(real),), -1 / len(real))])
    return side @ alike @ side
