"""Initial weights from a seed: networks by name, and the user's classes and functions."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fedcog.core.settings import ConfigError
from fedcog.core.tree import Params
from fedcog.models.checks import ModelError, all_tensors, have_equal_values

Network = nn.Module | Callable[..., nn.Module]
"""A user's network: an instance, or a class or function that builds one."""


def initialize(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Build a network whose initial weights depend on the seed only.

    Args:
        build: Builds the network; its random numbers come from torch's default generator.
        seed: Seed of the initial weights.

    Returns:
        The network. The caller's generators are left as they were.
    """
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would also reseed the user's GPUs.
        torch.default_generator.manual_seed(seed)
        return build()


def make_network(
    network: Network, input_shape: tuple[int, ...], num_classes: int, seed: int
) -> nn.Module:
    """Return the user's network with its initial weights.

    Args:
        network: An instance, which is returned unchanged, or a class or function. It is called with
            those of `input_shape` and `num_classes` that it names as parameters.
        input_shape: Shape of one input.
        num_classes: Number of classes.
        seed: Seed of the initial weights.

    Returns:
        The network.

    Raises:
        ModelError: If the call fails, returns no network or always the same one, or does not depend
            on the seed alone.
    """
    if isinstance(network, nn.Module) or not callable(network):
        return network
    from fedcog.models.libraries import call_with_torchvision  # imports this module

    name = getattr(network, "__name__", type(network).__name__)
    arguments = _arguments(network, {"input_shape": input_shape, "num_classes": num_classes})

    def _build() -> nn.Module:
        try:
            # If torchvision's import fails, the second attempt starts from the seed again.
            return call_with_torchvision(lambda: initialize(lambda: network(**arguments), seed))
        except TypeError as error:
            raise ModelError(
                f"{name} cannot be called as {name}({', '.join(arguments)}): {error}. Give a "
                f"function without arguments, such as model=lambda: {name}(10)."
            ) from error
        except (ConfigError, ModelError):
            raise
        except Exception as error:
            raise ModelError(f"{name} failed: {type(error).__name__}: {error}.") from error

    module = _build()
    if not isinstance(module, nn.Module):
        raise ModelError(f"{name} returned {type(module).__name__}, which is no nn.Module.")
    again = _build()
    if _share_weights(module, again):
        raise ModelError(
            f"{name} returns the same weights in every call, so all seeds would start from them: "
            "build the network inside the function, or pass the network itself, with one seed."
        )
    if not have_equal_values(all_tensors(module), all_tensors(again)):
        raise ModelError(
            f"{name} gives other weights when it is called again with the same seed, so runs could "
            "not be repeated: draw initial weights with torch only, from its default generator."
        )
    return module


def start_alike(first: nn.Module, second: nn.Module) -> bool:
    """Return whether two networks have equal trainable weights.

    Args:
        first: A network.
        second: The same network, initialized from another seed.
    """
    weights: list[Params] = [
        {name: value for name, value in each.named_parameters() if value.requires_grad}
        for each in (first, second)
    ]
    return have_equal_values(*weights)


def _share_weights(first: nn.Module, second: nn.Module) -> bool:
    """Return whether all trainable parameters of two networks are the same objects."""
    trainable = [
        {id(one) for one in each.parameters() if one.requires_grad} for each in (first, second)
    ]
    return bool(trainable[0]) and trainable[0] == trainable[1]


def _arguments(network: Callable[..., Any], known: dict[str, Any]) -> dict[str, Any]:
    """Select the arguments that a class or function names as parameters."""
    try:
        parameters = inspect.signature(network).parameters
    except (TypeError, ValueError):  # some classes of C extensions have no signature
        return {}
    return {name: value for name, value in known.items() if name in parameters}
