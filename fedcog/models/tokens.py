"""Networks on tokens.

A network that offers `embed(tokens)` and `forward_embedded(x)` takes token numbers as inputs. What
is optimized or drawn instead of real inputs, as by FedCOG and VHL, are embeddings: tokens have no
gradient.
"""

import copy
import types

import torch
from torch import Tensor, nn

from fedcog.models.checks import ModelError
from fedcog.models.ops.dropout import KeyedDropout
from fedcog.models.ops.keyed_random import trial_key


def takes_tokens(module: nn.Module) -> bool:
    """Return whether a network offers `embed` and `forward_embedded`."""
    names = ("embed", "forward_embedded")
    return all(callable(getattr(module, name, None)) for name in names)


def accept_embeddings(module: nn.Module) -> None:
    """Make a token network accept both token numbers and their embeddings, in place.

    Args:
        module: A copy of the user's network. Integer inputs are embedded first, floating ones are
            embeddings. With `embed_only`, the embeddings are returned.
    """
    module.forward = types.MethodType(_forward, module)


def _forward(self: nn.Module, x: Tensor, embed_only: bool = False) -> Tensor:
    embedded: Tensor = x if x.is_floating_point() else self.embed(x)  # type: ignore[operator]
    if embed_only:
        return embedded
    logits: Tensor = self.forward_embedded(embedded)  # type: ignore[operator]
    return logits


class EmbeddedNetwork(nn.Module):
    """A network on tokens, called with embeddings. Its weights are those of `network`."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of embeddings `(B, ...)`."""
        logits: Tensor = self.network.forward_embedded(x)  # type: ignore[operator]
        return logits


def continuous_shape(module: nn.Module, input_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of one continuous input: of an embedding, for a network on tokens.

    Args:
        module: The network.
        input_shape: Shape of one input, as stored.

    Returns:
        `input_shape`, or the shape of its embedding.

    Raises:
        ModelError: If `embed` does not turn tokens into one floating tensor per example.
    """
    if not takes_tokens(module):
        return tuple(input_shape)
    device = next(module.parameters(), torch.empty(0)).device
    tokens = torch.zeros((2, *input_shape), dtype=torch.int64, device=device)
    was_training = module.training
    try:
        with torch.no_grad():
            embedded = module.eval().embed(tokens)  # type: ignore[operator]
    except Exception as error:  # whatever a user's network raises
        raise ModelError(
            f"embed(tokens) fails on int64 tokens of shape {tuple(tokens.shape)}: {error}."
        ) from error
    finally:
        module.train(was_training)
    is_valid = isinstance(embedded, Tensor) and embedded.is_floating_point()
    if not is_valid or embedded.dim() < 2 or len(embedded) != 2:
        raise ModelError(
            "embed(tokens) must return floats with one embedding per example, such as (N, L, D) "
            f"for tokens (N, L), and not {_describe(embedded)}."
        )
    return tuple(embedded.shape[1:])


def embeds_with_dropout(module: nn.Module, input_shape: tuple[int, ...], batch_size: int) -> bool:
    """Return whether `embed` drops values at random in training mode.

    Args:
        module: The network.
        input_shape: Shape of the tokens of one example.
        batch_size: Number of examples in the trial batch.

    Raises:
        ModelError: If `embed` draws random numbers that do not come from keyed streams, or writes
            to weights.
    """
    tokens = torch.zeros((batch_size, *input_shape), dtype=torch.int64)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        rng_state = torch.random.get_rng_state()
        copied = copy.deepcopy(module).train()
        with KeyedDropout(trial_key(tokens.device)) as dropout:
            copied.embed(tokens)  # type: ignore[operator]
        is_random = not torch.equal(rng_state, torch.random.get_rng_state())
    if is_random:
        raise ModelError("embed(tokens) draws random numbers of its own: use nn.Dropout instead.")
    for name, value in copied.named_parameters():
        if not torch.equal(value, module.get_parameter(name)):
            raise ModelError(
                f"embed(tokens) writes to parameter '{name}': only training may do so."
            )
    return bool(dropout.num_calls)


def check_tokens(module: nn.Module, x: Tensor, test_x: Tensor) -> None:
    """Check that a network takes inputs of this type, and has an embedding for every token.

    Args:
        module: The network.
        x: All training inputs, as stored.
        test_x: All test inputs.

    Raises:
        ModelError: If one is on tokens and the other is not, or a token has no embedding.
    """
    is_tokens = x.dtype == torch.int64
    if is_tokens and not takes_tokens(module):
        raise ModelError(
            f"the inputs are int64 tokens of shape {tuple(x.shape[1:])}, and "
            f"{type(module).__name__} has no embed(tokens) and forward_embedded(x): split its "
            "forward into these two, or give floats if the inputs are no tokens."
        )
    if not is_tokens and takes_tokens(module):
        raise ModelError(
            f"{type(module).__name__} embeds tokens, and the inputs are {x.dtype}: give int64 "
            "tokens, or rename its method embed."
        )
    if is_tokens:
        largest = max((int(part.max()) for part in (x, test_x) if part.numel()), default=0)
        device = next(module.parameters(), torch.empty(0)).device
        if device.type != "cpu":
            return
        tokens = torch.full((1, *x.shape[1:]), largest)
        try:
            with torch.no_grad():
                module.embed(tokens)  # type: ignore[operator]
        except IndexError as error:
            raise ModelError(
                f"the network has no embedding for token {largest}, the largest in the data: give "
                f"it at least {largest + 1} embeddings."
            ) from error


def _describe(value: object) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__
