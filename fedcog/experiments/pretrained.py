"""Weights that a network begins with, from a file."""

import copy
import hashlib
import warnings
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import nn

from fedcog.models import ModelError


def pretrained(module: nn.Module, path: str | Path, classes: int) -> tuple[nn.Module, str]:
    """A copy of a network with the weights of a safetensors file, and a digest of those.

    Every tensor must be there under its name and in its shape. Only what tells so many classes apart, the last layer,
    may be missing or of another number of classes: it stays as it was. Counters of batches are no weights.
    """
    module, digest = copy.deepcopy(module), hashlib.sha256()
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
                digest.update(f"{name} {list(value.shape)}".encode())
                digest.update(own[name].contiguous().numpy().data)
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"{path} is no safetensors file that can be read ({error}): a run begins and goes on with the one it names."
        ) from error
    if new:
        warnings.warn(
            f"{path} has no last layer for {classes} classes: it begins as if nothing were given.", stacklevel=2
        )
    return module, digest.hexdigest()[:16]
