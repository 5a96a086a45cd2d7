"""Checks of a user's network before round 1: what cannot be federated is refused with a reason."""

import copy
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedcog.models.ops.dropout import KeyedDropout
from fedcog.models.ops.keyed_random import trial_key

TOKENS_HINT = (
    "Inputs are continuous here, and token numbers are not: give int64 tokens to a network with "
    "embed(tokens) and forward_embedded(x)."
)


class ModelError(Exception):
    """A network that cannot be federated; the message names the layer, the reason and a remedy."""


class CheckedNetwork(NamedTuple):
    """What the checks find out about a network.

    Attributes:
        buffer_names: Floating buffers that training changes.
        head: Name of the linear layer whose outputs are the logits, if there is one.
        uses_dropout: Whether a pass in training mode drops values at random.
    """

    buffer_names: set[str]
    head: str | None
    uses_dropout: bool = False


def copy_network(module: nn.Module) -> nn.Module:
    """Copy a network; raise a ModelError if it is wrapped, lazy or cannot be copied."""
    if not isinstance(module, nn.Module):
        if isinstance(module, str):
            raise ModelError(
                f"model='{module}' is a name, which belongs to the experiment: "
                f"Experiment(model='{module}')."
            )
        raise ModelError(
            f"{type(module).__name__} is no nn.Module: give its class, such as model=MyNet."
        )
    if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise ModelError(
            f"the network is wrapped in {type(module).__name__}: give what is inside, model.module."
        )
    for name, layer in module.named_modules():
        parameters = layer.parameters(recurse=False)
        if any(isinstance(value, nn.UninitializedParameter) for value in parameters):
            raise ModelError(
                f"layer '{name}' ({type(layer).__name__}) has no shape yet: "
                "call the network once on an example first."
            )
    try:
        return copy.deepcopy(module)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise ModelError(
            f"the network cannot be copied ({str(error).splitlines()[0]}): "
            "it may keep activations of its last call, or be a compiled script. "
            "Give one that keeps nothing but weights."
        ) from error


def check_trainable(
    module: nn.Module, input_shape: tuple[int, ...], num_classes: int, batch_size: int
) -> CheckedNetwork:
    """Check that a network can be trained in a federation.

    Args:
        module: The network.
        input_shape: Shape of one continuous input.
        num_classes: Number of classes.
        batch_size: Number of inputs in the trial batches.

    Returns:
        The buffers that training changes, and the head.

    Raises:
        ModelError: If the network has no trainable parameter, draws random numbers, changes its
            inputs, counts batches, or does not map inputs to logits.
    """
    _check_parameters(module)
    trainable = [value for value in module.parameters() if value.requires_grad]
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(batch_size, *input_shape, generator=generator, dtype=torch.float32)
    inputs = inputs.to(trainable[0])
    original = inputs.clone()
    trained = copy.deepcopy(module).train()
    with torch.random.fork_rng(devices=[]):
        rng_state = torch.random.get_rng_state()
        with KeyedDropout(trial_key(inputs.device)) as dropout:
            outputs = _try_forward(trained, inputs, num_classes)
            heads = [_find_head(copy.deepcopy(module).train(), original.clone(), num_classes)]
        draws_in_training = not torch.equal(rng_state, torch.random.get_rng_state())
        heads.append(_find_head(copy.deepcopy(module).eval(), original.clone(), num_classes))
        draws_at_all = not torch.equal(rng_state, torch.random.get_rng_state())
    if draws_in_training or not _is_repeatable(module, original, num_classes, training=True):
        raise ModelError(_explain_randomness(module))
    if draws_at_all or not _is_repeatable(module, original, num_classes, training=False):
        raise ModelError(
            "the network draws random numbers in evaluation mode: call dropout with "
            "training=self.training, F.dropout(x, 0.5, self.training)."
        )
    if not torch.equal(inputs, original):
        raise ModelError(
            "the network writes over its own inputs: take inplace=True off its first layer."
        )
    if not outputs.requires_grad:
        raise ModelError(
            "the network's outputs do not depend on its parameters (detach or no_grad inside?)."
        )
    before = dict(module.named_buffers())
    changed = {name for name, value in trained.named_buffers() if not _equal(value, before[name])}
    counters = {name for name in changed if not before[name].is_floating_point()}
    for name in counters:
        if not name.endswith("num_batches_tracked"):
            raise ModelError(
                f"buffer '{name}' counts in training, "
                "and a count can be neither averaged nor resumed."
            )
    head = heads[0] if heads[0] == heads[1] else None
    return CheckedNetwork(changed - counters, head, dropout.num_calls > 0)


def _is_repeatable(module: nn.Module, inputs: Tensor, num_classes: int, training: bool) -> bool:
    """Whether a second pass of one copy gives the same outputs.

    Generators and counters that are no buffers change them.
    """
    copied = copy.deepcopy(module).train(training)
    outputs = []
    for _ in range(2):
        with torch.random.fork_rng(devices=[]), KeyedDropout(trial_key(inputs.device)):
            found = _try_forward(copied, inputs.clone(), num_classes)
        outputs.append(found.detach().nan_to_num())
        with torch.no_grad():
            for old, new in zip(module.buffers(), copied.buffers(), strict=True):
                new.copy_(old)
    return torch.equal(*outputs)


def _check_parameters(module: nn.Module) -> None:
    for name, layer in module.named_modules():
        if "num_batches_tracked" in layer._buffers and getattr(layer, "momentum", 0.1) is None:
            raise ModelError(
                f"layer '{name}' ({type(layer).__name__}) has momentum=None, a cumulative average "
                "that would depend on how many batches a client has seen: "
                "give it a momentum, such as 0.1."
            )
    if not any(value.requires_grad for value in module.parameters()):
        raise ModelError(
            "the network has no parameter with requires_grad=True, so there is nothing to train."
        )
    for name, value in module.named_parameters():
        if not value.is_floating_point():
            raise ModelError(
                f"parameter '{name}' is not of a real floating type: only those can be averaged."
            )


def _explain_randomness(module: nn.Module) -> str:
    layers = [
        f"'{name}' ({type(layer).__name__})"
        for name, layer in module.named_modules()
        if getattr(layer, "dropout", 0) and isinstance(layer, nn.RNNBase)
    ]
    return (
        f"in training mode, {', '.join(layers) or 'a layer'} draws random numbers of its own, or "
        "counts its calls. Here every random number comes from a keyed stream, so that runs can be "
        "repeated and resumed exactly. "
        "Use nn.Dropout and its like, or Tensor.bernoulli_(p), which do so; recurrent layers need "
        "dropout=0, with an nn.Dropout between them."
    )


def check_usable(
    module: nn.Module, input_shape: tuple[int, ...], num_classes: int
) -> CheckedNetwork:
    """Check that a network can be evaluated, though not trained.

    Args:
        module: The network.
        input_shape: Shape of one input.
        num_classes: Number of classes.

    Returns:
        All floating buffers, and no head.

    Raises:
        ModelError: If the network does not map inputs to logits.
    """
    parameter = next(iter(module.parameters()), torch.empty(0))
    with torch.no_grad():
        inputs = parameter.new_zeros(2, *input_shape)
        _try_forward(copy.deepcopy(module).eval(), inputs, num_classes)
    names = {name for name, value in module.named_buffers() if value.is_floating_point()}
    return CheckedNetwork(names, None)


def supports_channels_last(
    module: nn.Module, input_shape: tuple[int, ...], batch_size: int
) -> bool:
    """Whether a network convolves images and accepts them channels last, which is faster on a CPU.

    A network that calls `view` where only `reshape` is valid does not.

    Args:
        module: The network.
        input_shape: Shape of one input.
        batch_size: Number of inputs in the trial batches.

    Returns:
        True if outputs are the same for both memory formats.
    """
    if len(input_shape) != 3 or not any(isinstance(part, nn.Conv2d) for part in module.modules()):
        return False
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(batch_size, *input_shape, generator=generator)
    inputs = inputs.to(next(module.parameters()))
    try:
        for mode in (True, False):
            reordered = inputs.contiguous(memory_format=torch.channels_last)
            with KeyedDropout(trial_key(inputs.device)):
                expected = copy.deepcopy(module).train(mode)(inputs)
            with KeyedDropout(trial_key(inputs.device)):
                outputs = copy.deepcopy(module).train(mode)(reordered)
            outputs.sum().backward()
            if not torch.allclose(outputs, expected, rtol=1e-3, atol=1e-4, equal_nan=True):
                return False
    except RuntimeError:
        return False
    return True


def _find_head(module: nn.Module, inputs: Tensor, num_classes: int) -> str | None:
    """Return the name of the linear layer whose outputs are the network's, if there is one.

    It must be a trainable nn.Linear, or a subclass that computes the same, that is called once with
    one input and shares its weights with no other layer.
    """
    calls: list[tuple[str, Tensor]] = []
    hooks = [
        layer.register_forward_hook(
            lambda layer, args, output, name=name: calls.append(
                (name if _is_linear(layer, args, output) else "", output)
            )
        )
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Linear)
    ]
    outputs = _try_forward(module, inputs, num_classes)
    for hook in hooks:
        hook.remove()
    parameters = list(module.named_parameters(remove_duplicate=False))
    for name, output in calls:
        weights = [value for key, value in parameters if key == f"{name}.weight".lstrip(".")]
        if len(weights) != 1 or not weights[0].requires_grad:
            continue
        is_unshared = sum(value is weights[0] for _, value in parameters) == 1
        is_called_once = [key for key, _ in calls].count(name) == 1
        if output is outputs and is_unshared and is_called_once:
            return name
    return None


def _is_linear(layer: nn.Linear, args: tuple[Tensor, ...], output: Tensor) -> bool:
    """Whether a layer called with `args` has computed what nn.Linear computes."""
    if type(layer) is nn.Linear:
        return bool(args)
    names = {name for name, _ in layer.named_parameters()}
    if not args or not names <= {"weight", "bias"} or next(layer.children(), None) is not None:
        return False
    return torch.equal(F.linear(args[0], layer.weight, layer.bias), output)


def _equal(first: Tensor, second: Tensor) -> bool:
    if first.is_floating_point():
        return torch.equal(first.nan_to_num(), second.nan_to_num())
    return torch.equal(first, second)


def _try_forward(module: nn.Module, inputs: Tensor, num_classes: int) -> Tensor:
    """Return the network's outputs if they are logits; else raise a ModelError."""
    shape = tuple(inputs.shape)
    try:
        outputs = module(inputs)
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
        has_tokens = any(
            isinstance(layer, nn.Embedding | nn.EmbeddingBag) for layer in module.modules()
        )
        reason = f"{error}. {TOKENS_HINT}" if has_tokens else str(error)
        raise ModelError(f"the network does not take inputs of shape {shape}: {reason}") from error
    expected = (shape[0], num_classes)
    if isinstance(outputs, Tensor):
        if outputs.shape == expected and outputs.is_floating_point():
            return outputs
        description = str(tuple(outputs.shape))
        if not outputs.is_floating_point():
            description += f" of {outputs.dtype}"
    else:
        description = type(outputs).__name__
    mode = "training" if module.training else "evaluation"
    raise ModelError(
        f"for inputs of shape {shape} in {mode} mode the network gave {description}, "
        f"and the task needs logits of shape {expected}: change its last layer, or the data."
    )
