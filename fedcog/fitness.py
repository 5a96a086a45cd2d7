"""Whether a network can be federated: tried out before round 1, what cannot work is refused with the reason."""

import copy

import torch
from torch import Tensor, nn

TOKENS = "Inputs are continuous here, and token numbers are not: give embedded tokens, as floats."


class ModelError(Exception):
    """A network that cannot be federated: says which part, why, and what to do."""


def copied(module: nn.Module) -> nn.Module:
    """A copy of a network, if it is one that can be had, and called as it is."""
    if not isinstance(module, nn.Module):
        raise ModelError(f"{type(module).__name__} is no nn.Module: give an instance of one, such as MyNet().")
    if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise ModelError(f"the network is wrapped in {type(module).__name__}: give what is inside, model.module.")
    for name, part in module.named_modules():
        if any(isinstance(value, nn.UninitializedParameter) for value in part.parameters(recurse=False)):
            raise ModelError(
                f"layer '{name}' ({type(part).__name__}) has no shape yet: call the network once on an example first."
            )
    try:
        return copy.deepcopy(module)
    except (RuntimeError, TypeError, NotImplementedError) as error:  # torch's words, or those of what cannot be copied
        raise ModelError(
            f"the network cannot be copied ({str(error).splitlines()[0]}): it may keep activations of its last call, "
            "or be compiled to a script. Give one that keeps nothing but weights."
        ) from error


def federable(module: nn.Module, input_shape: tuple[int, ...], classes: int, batch: int) -> tuple[set[str], str | None]:
    """Try the network out; name the floating buffers that training moves, and its head."""
    for name, part in module.named_modules():
        if "num_batches_tracked" in part._buffers and getattr(part, "momentum", 0.1) is None:
            raise ModelError(
                f"layer '{name}' ({type(part).__name__}) has momentum=None, a cumulative average that would depend on "
                "how many batches a client has seen: give it a momentum, such as 0.1."
            )
    trained = [value for value in module.parameters() if value.requires_grad]
    if not trained:
        raise ModelError("the network has no parameter with requires_grad=True, so there is nothing to train.")
    if odd := [name for name, value in module.named_parameters() if not value.is_floating_point()]:
        raise ModelError(f"parameter '{odd[0]}' is not of a real floating type: only those can be averaged.")

    inputs = torch.randn(batch, *input_shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    inputs = inputs.to(trained[0])
    given = inputs.clone()
    once, again, in_use = (copy.deepcopy(module).train(mode) for mode in (True, True, False))
    with torch.random.fork_rng(devices=[]):
        before = torch.random.get_rng_state()
        outputs = _trial(once, inputs, classes)
        drew = not torch.equal(before, torch.random.get_rng_state())
        repeated = _trial(copy.deepcopy(again), given.clone(), classes)
        found = [_find_head(copy.deepcopy(one), given.clone(), classes) for one in (again, in_use)]
        head = found[0] if found[0] == found[1] else None
    if drew or not torch.equal(outputs.nan_to_num(), repeated.nan_to_num()):
        noisy = [n for n, part in module.named_modules() if isinstance(part, nn.modules.dropout._DropoutNd) and part.p]
        where = f"{', '.join(repr(name) for name in noisy)} must draw" if noisy else "it must draw"
        raise ModelError(
            f"the network does not give the same outputs for the same inputs in training mode: {where} random numbers "
            "of its own (dropout, say), and here every random number comes from a keyed stream, so that runs can be "
            "repeated and resumed exactly. Take the layer out or set its rate to 0."
        )
    if not torch.equal(inputs, given):
        raise ModelError("the network writes over its own inputs: take inplace=True off its first layer.")
    if not outputs.requires_grad:
        raise ModelError("the network's outputs do not depend on its parameters (detach or no_grad inside?).")
    pristine = dict(module.named_buffers())
    moved = {name for name, value in once.named_buffers() if not _same(value, pristine[name])}
    counters = [name for name in moved if not pristine[name].is_floating_point()]
    if odd := [name for name in counters if not name.endswith("num_batches_tracked")]:
        raise ModelError(f"buffer '{odd[0]}' counts in training, and a count can be neither averaged nor resumed.")
    return moved - set(counters), head


def usable(module: nn.Module, input_shape: tuple[int, ...], classes: int) -> tuple[set[str], None]:
    """Try a network out that is not to be trained; name its floating buffers."""
    some = next(iter(module.parameters()), torch.empty(0))
    with torch.no_grad():
        _trial(copy.deepcopy(module).eval(), some.new_zeros(2, *input_shape), classes)
    return {name for name, value in module.named_buffers() if value.is_floating_point()}, None


def takes_channels_last(module: nn.Module, input_shape: tuple[int, ...], batch: int) -> bool:
    """Does the network convolve images, and not mind if their channels lie side by side, as a CPU likes them best?

    A network that takes a `view` where only a `reshape` would do minds.
    """
    if len(input_shape) != 3 or not any(isinstance(part, nn.Conv2d) for part in module.modules()):
        return False
    inputs = torch.randn(batch, *input_shape, generator=torch.Generator().manual_seed(0))
    inputs = inputs.to(next(module.parameters()))
    try:
        for training in (True, False):
            usual, other = (copy.deepcopy(module).train(training) for _ in range(2))
            found = other(inputs.contiguous(memory_format=torch.channels_last))
            found.sum().backward()
            if not torch.allclose(found, usual(inputs), rtol=1e-3, atol=1e-4, equal_nan=True):
                return False  # it looks at memory, and not at images
    except RuntimeError:
        return False
    return True


def _find_head(module: nn.Module, inputs: Tensor, classes: int) -> str | None:
    """The name of the linear layer whose outputs are the network's, if there is one.

    It must be a plain nn.Linear, called once with one input, trained, and share its weights with no other layer.
    """
    made = list[tuple[str, Tensor]]()
    hooks = [
        part.register_forward_hook(lambda _, given, output, name=name: made.append((name if given else "", output)))
        for name, part in module.named_modules()
        if type(part) is nn.Linear
    ]
    outputs = _trial(module, inputs, classes)
    for hook in hooks:
        hook.remove()
    named = list(module.named_parameters(remove_duplicate=False))
    for name, output in made:
        own = [value for key, value in named if key == f"{name}.weight".lstrip(".")]
        alone = len(own) == 1 and own[0].requires_grad and sum(value is own[0] for _, value in named) == 1
        if output is outputs and alone and [key for key, _ in made].count(name) == 1:
            return name
    return None


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.nan_to_num(), other.nan_to_num()) if one.is_floating_point() else torch.equal(one, other)


def _trial(module: nn.Module, inputs: Tensor, classes: int) -> Tensor:
    """The network's outputs, if they are logits."""
    shape = tuple(inputs.shape)
    try:
        outputs = module(inputs)
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
        tokens = any(isinstance(part, nn.Embedding | nn.EmbeddingBag) for part in module.modules())
        why = f"{error}. {TOKENS}" if tokens else str(error)
        raise ModelError(f"the network does not take inputs of shape {shape}: {why}") from error
    wanted = (shape[0], classes)
    if not isinstance(outputs, Tensor) or outputs.shape != wanted or not outputs.is_floating_point():
        shown = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        kind = f" of {outputs.dtype}" if isinstance(outputs, Tensor) and not outputs.is_floating_point() else ""
        mode = "training" if module.training else "evaluation"
        raise ModelError(
            f"for inputs of shape {shape} in {mode} mode the network gave {shown}{kind}, and the task needs logits of "
            f"shape {wanted}: change its last layer, or the data."
        )
    return outputs
