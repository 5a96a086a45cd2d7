"""Checks of a user's network before round 1: what cannot be federated is refused with a reason."""

import contextlib
import copy
import itertools
import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _NormBase

from fedcog.core.tree import Params
from fedcog.models.ops.dropout import KeyedDropout
from fedcog.models.ops.keyed_random import trial_key

TOKENS_HINT = (
    "Inputs are continuous here, and token numbers are not: give int64 tokens to a network with "
    "embed(tokens) and forward_embedded(x)."
)

OTHER_WEIGHTS = 1.25
"""Factor on weights in trials that tell weights from what a network kept of them."""
OTHER_INPUTS = 0.75
"""Factor on trial inputs, likewise."""
PLAIN_TYPES = (int, float, str, bool, type(None), np.generic)
"""Types of attributes that a pass may set, but not count up."""
MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
"""Attributes that every layer has."""


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
    if isinstance(module, torch.jit.ScriptModule):
        raise ModelError("the network is a compiled script: give the network before torch.jit.")
    for name, layer in module.named_modules():
        parameters = layer.parameters(recurse=False)
        if any(isinstance(value, nn.UninitializedParameter) for value in parameters):
            raise ModelError(
                f"layer '{name}' ({type(layer).__name__}) has no shape yet: "
                "call the network once on an example first."
            )
    for name, value in module.named_parameters():  # copies have no hooks
        if value._backward_hooks or value._post_accumulate_grad_hooks:
            raise ModelError(
                f"parameter '{name}' has a hook on its gradient, which would not be called here: "
                "change the gradient of its inputs in forward, or write an algorithm."
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
        ModelError: If the network has no trainable parameter, draws random numbers, writes to its
            inputs or weights, depends on earlier calls, or does not map inputs to logits.
    """
    _check_parameters(module)
    parameter = next(value for value in module.parameters() if value.requires_grad)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(batch_size, *input_shape, generator=generator, dtype=torch.float32)
    inputs = inputs.to(parameter)
    original = inputs.clone()
    with restored_random_states():
        trained = _try_pass(module, inputs, num_classes, training=True)
        if not torch.equal(inputs, original):
            raise ModelError(
                "the network writes over its own inputs: take inplace=True off its first layer."
            )
        evaluated = _try_pass(module, original.clone(), num_classes, training=False)
        if trained.is_random:
            raise ModelError(_explain_randomness(module))
        counters = _batch_counters(module, trained)
        _check_writes(module, trained, evaluated)
        if _depends_on_history(module, original, num_classes, training=True):
            raise ModelError(_explain_randomness(module))
        is_random = evaluated.is_random or evaluated.num_masks > 0
        if is_random or _depends_on_history(module, original, num_classes, training=False):
            raise ModelError(
                "the network draws random numbers in evaluation mode, or keeps something of a call "
                "for the next one: call dropout with training=self.training, "
                "F.dropout(x, 0.5, self.training), and keep no weights or activations."
            )
        if not trained.outputs.requires_grad:
            raise ModelError(
                "the network's outputs do not depend on its parameters (detach or no_grad inside?)."
            )
        _check_gradients(module, original)
    head = trained.head if trained.head == evaluated.head else None
    return CheckedNetwork(trained.changed - counters, head, trained.num_masks > 0)


class _TrialPass(NamedTuple):
    """What a pass over trial inputs shows.

    Attributes:
        outputs: The logits.
        changed: Names of the parameters and buffers that the pass changed.
        head: Name of the linear layer whose outputs are the logits, if there is one.
        num_masks: Number of dropout masks that it drew.
        is_random: Whether it drew other random numbers.
    """

    outputs: Tensor
    changed: set[str]
    head: str | None
    num_masks: int
    is_random: bool


def _try_pass(module: nn.Module, inputs: Tensor, num_classes: int, training: bool) -> _TrialPass:
    """Run a copy of a network on trial inputs."""
    copied = copy.deepcopy(module).train(training)
    states = random_states()
    with KeyedDropout(trial_key(inputs.device)) as dropout:
        outputs, head = _find_head(copied, inputs, num_classes)
    is_random = states != random_states()
    before = dict(_named_tensors(module))
    after = dict(_named_tensors(copied))
    for name in after:
        if name not in before or after[name].shape != before[name].shape:
            raise ModelError(
                f"the network makes '{name}' in its first call: call it once on an example first."
            )
    changed = {name for name, value in after.items() if not _equal(value, before[name])}
    return _TrialPass(outputs, changed, head, dropout.num_calls, is_random)


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return itertools.chain(module.named_parameters(), module.named_buffers())


def all_tensors(module: nn.Module) -> Params:
    """Return parameters, buffers and plain tensor attributes by name, but none without a shape."""
    tensors = dict(_named_tensors(module))
    for layer_name, layer in module.named_modules():
        for name, value in vars(layer).items():
            if isinstance(value, Tensor):
                tensors[f"{layer_name}.{name}".lstrip(".")] = value
    lazy = nn.UninitializedParameter | nn.UninitializedBuffer
    return {name: value for name, value in tensors.items() if not isinstance(value, lazy)}


def have_equal_values(first: Params, second: Params) -> bool:
    """Whether two dicts hold equal tensors by the same names.

    Args:
        first: Tensors by name.
        second: Tensors by name.

    Returns:
        True if names, dtypes, shapes and values are equal; NaN equals NaN.
    """
    return first.keys() == second.keys() and all(
        value.dtype == second[name].dtype and _equal(value, second[name])
        for name, value in first.items()
    )


def random_states() -> tuple[object, ...]:
    """Return the states of the generators that user code may draw from."""
    name, keys, *rest = np.random.get_state(legacy=True)
    torch_state = torch.random.get_rng_state().numpy().tobytes()
    return torch_state, random.getstate(), name, keys.tobytes(), *rest  # type: ignore[union-attr]


@contextlib.contextmanager
def restored_random_states() -> Iterator[None]:
    """Leave the caller's generators as they are, whatever user code draws."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def _batch_counters(module: nn.Module, trained: _TrialPass) -> set[str]:
    """Return BatchNorm's counters, on which no result depends; refuse other counters."""
    before = dict(module.named_buffers())
    counters = {
        name for name in trained.changed & before.keys() if not before[name].is_floating_point()
    }
    for name in counters:
        layer = module.get_submodule(name.rpartition(".")[0])
        if not (name.endswith("num_batches_tracked") and isinstance(layer, _NormBase)):
            raise ModelError(
                f"buffer '{name}' counts in training, "
                "and a count can be neither averaged nor resumed."
            )
    return counters


def _check_writes(module: nn.Module, trained: _TrialPass, evaluated: _TrialPass) -> None:
    """Refuse networks that write to weights in a pass, or to running statistics in evaluation.

    Evaluation would change training, and a client that trains the next one.
    """
    parameters = {name for name, _ in module.named_parameters()}
    for name in sorted((trained.changed | evaluated.changed) & parameters):
        raise ModelError(
            f"the network writes to its parameter '{name}' when it is called: only training may "
            "change it. Compute with a changed copy instead."
        )
    for name in sorted(evaluated.changed):
        raise ModelError(
            f"buffer '{name}' changes in evaluation mode, so evaluating a model would change it: "
            "let running statistics move only if self.training, and leave BatchNorm's mode to "
            "train() and eval()."
        )


def _depends_on_history(
    module: nn.Module, inputs: Tensor, num_classes: int, training: bool
) -> bool:
    """Whether outputs depend on earlier calls, as with counters, caches and own generators.

    A network that was called before in both modes, with other weights and inputs, is compared with
    a new one.
    """
    used = copy.deepcopy(module)
    changes = _attribute_changes(used, inputs, num_classes, training)
    # What differs between equal trials, such as a time, counts nothing.
    if changes and changes & _attribute_changes(
        copy.deepcopy(module), inputs, num_classes, training
    ):
        return True
    outputs = []
    for candidate in (copy.deepcopy(module).train(training), used):
        with torch.no_grad():
            for parameter in candidate.parameters():
                parameter.mul_(OTHER_WEIGHTS)
        _set_buffers(candidate, module.buffers())
        with KeyedDropout(trial_key(inputs.device)):
            found = _try_forward(candidate, inputs.flip(0) * OTHER_INPUTS, num_classes)
        outputs.append(found.detach().nan_to_num())
    return not torch.equal(*outputs)


def _set_buffers(module: nn.Module, values: Iterable[Tensor]) -> None:
    with torch.no_grad():
        for buffer, value in zip(module.buffers(), values, strict=True):
            buffer.copy_(value)


def _attribute_changes(
    module: nn.Module, inputs: Tensor, num_classes: int, training: bool
) -> set[tuple[int, str, str]]:
    """Call a network three times; return which attributes the last call left otherwise."""
    found = []
    for mode in (training, not training, training):
        buffers = [value.detach().clone() for value in module.buffers()]
        with KeyedDropout(trial_key(inputs.device)):
            _try_forward(module.train(mode), inputs.clone(), num_classes)
        found.append(plain_attributes(module))
        _set_buffers(module, buffers)
    return {
        (position, name, repr((value, last.get(name))))
        for position, (first, last) in enumerate(zip(found[0], found[2], strict=True))
        for name, value in first.items()
        if value != last.get(name)
    }


def plain_attributes(module: nn.Module) -> list[dict[str, object]]:
    """Return the numbers, texts and tensors that each layer keeps as plain attributes.

    Args:
        module: The network.

    Returns:
        For each layer, values by name that can be compared; other objects are None.
    """
    return [
        {
            name: _plain_value(value)
            for name, value in vars(layer).items()
            if name not in MODULE_ATTRIBUTES
        }
        for layer in module.modules()
    ]


def _plain_value(value: object, depth: int = 3) -> object:
    """Return what can be compared of an attribute: numbers and texts, also in containers."""
    if isinstance(value, Tensor):
        if value.is_complex():
            value = torch.view_as_real(value)
        dense = value.detach().to_dense().double().nan_to_num()
        return str(value.dtype), tuple(dense.shape), dense.cpu().numpy().tobytes()
    if isinstance(value, np.ndarray) and value.dtype != object:
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, PLAIN_TYPES):
        return repr(value)  # NaN equals NaN
    if depth and isinstance(value, Mapping):
        return [(repr(key), _plain_value(item, depth - 1)) for key, item in value.items()]
    if depth and isinstance(value, list | tuple | deque):
        return [_plain_value(item, depth - 1) for item in value]
    return None


def _check_gradients(module: nn.Module, inputs: Tensor) -> None:
    """Refuse networks that compute another gradient if weights are passed in from outside.

    Raises:
        ModelError: If the backward pass fails, or its gradients depend on more than a pass does.
    """
    gradients = []
    for is_given in (False, True):
        trained = copy.deepcopy(module).train()
        names = {name for name, value in trained.named_parameters() if value.requires_grad}
        trained.requires_grad_(not is_given)
        weights: dict[str, Tensor] = {}
        for name, value in trained.named_parameters():
            if name not in names:
                value.requires_grad_(False)
            elif is_given:  # weights other than the network's own
                weights[name] = (value.detach() * OTHER_WEIGHTS).requires_grad_()
            else:
                with torch.no_grad():
                    weights[name] = value.mul_(OTHER_WEIGHTS)
        torch.default_generator.manual_seed(int(is_given))  # leaves the user's GPUs alone
        try:
            with KeyedDropout(trial_key(inputs.device)):
                outputs = functional_call(trained, weights if is_given else {}, (inputs.clone(),))
            loss = outputs.square().sum()
            found = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
        except (RuntimeError, TypeError, ValueError) as error:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise ModelError(
                f"the network has no gradient that can be computed here ({reason}). If it has "
                "layers with inplace=True, remove that; if it uses torch.utils.checkpoint, call "
                "its layers directly."
            ) from error
        gradients.append([torch.zeros(()) if one is None else one.nan_to_num() for one in found])
    if any(one.is_sparse for own in gradients for one in own):
        raise ModelError(
            "the network has sparse gradients, which cannot be averaged: remove sparse=True."
        )
    largest = max(float(one.abs().max()) for one in gradients[0] if one.numel())
    for first, second in zip(*gradients, strict=True):
        # A bias before BatchNorm has no gradient but rounding errors, which count as equal.
        tolerance = 1e-5 * largest + 1e-3 * (float(first.abs().max()) if first.numel() else 0.0)
        if not torch.allclose(first, second, rtol=0, atol=tolerance):
            raise ModelError(
                "the network's gradients are not those of its outputs when it is called with given "
                "weights: torch.utils.checkpoint, for instance, computes layers again without "
                "keyed dropout. Call them directly."
            )


def _check_parameters(module: nn.Module) -> None:
    for name, layer in module.named_modules():
        if isinstance(layer, nn.SyncBatchNorm):
            raise ModelError(
                f"layer '{name}' (SyncBatchNorm) averages over processes, and a client trains in "
                "one: use nn.BatchNorm1d, 2d or 3d."
            )
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
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
            is_sparse = layer.sparse and layer.weight.requires_grad
            for option, effect, applies in (
                ("max_norm", "writes to its weights in every pass", layer.max_norm),
                ("sparse", "has sparse gradients, which cannot be averaged", is_sparse),
            ):
                if applies:
                    raise ModelError(
                        f"layer '{name}' ({type(layer).__name__}) {effect}: remove {option}."
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
        f"in training mode, {', '.join(layers) or 'a layer'} draws random numbers of its own, "
        "counts its calls, or keeps something of a call for the next one. Here every random number "
        "comes from a keyed stream, so that runs can be repeated and resumed exactly. "
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


def _find_head(module: nn.Module, inputs: Tensor, num_classes: int) -> tuple[Tensor, str | None]:
    """Run a network; return its outputs, and the linear layer that makes them, if there is one.

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
            return outputs, name
    return outputs, None


def _is_linear(layer: nn.Linear, args: tuple[Tensor, ...], output: Tensor) -> bool:
    """Whether a layer called with `args` has computed what nn.Linear computes."""
    if type(layer) is nn.Linear:
        return bool(args)
    names = {name for name, _ in layer.named_parameters()}
    if not args or not names <= {"weight", "bias"} or next(layer.children(), None) is not None:
        return False
    return torch.equal(F.linear(args[0], layer.weight, layer.bias), output)


def _equal(first: Tensor, second: Tensor) -> bool:
    if first.layout != torch.strided and first.layout == second.layout:
        first = first.to_dense()
        second = second.to_dense()
    if first.is_floating_point():
        return torch.equal(first.nan_to_num(), second.nan_to_num())
    return torch.equal(first, second)


def _try_forward(module: nn.Module, inputs: Tensor, num_classes: int) -> Tensor:
    """Return the network's outputs if they are logits; else raise a ModelError."""
    shape = tuple(inputs.shape)
    try:
        outputs = module(inputs)
    except Exception as error:  # whatever a user's network raises
        has_tokens = any(
            isinstance(layer, nn.Embedding | nn.EmbeddingBag) for layer in module.modules()
        )
        reason = str(error) or type(error).__name__
        if has_tokens and not hasattr(module, "forward_embedded"):
            reason = f"{reason}. {TOKENS_HINT}"
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
