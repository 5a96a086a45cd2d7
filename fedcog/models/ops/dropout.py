"""Dropout from keyed random numbers.

Within `KeyedDropout`, the layers of a network that drop values at random draw from `KeyedRandom`,
keyed by (seed, round, client, local step). So a run has no generator to save.
"""

import math
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fedcog.models.ops.keyed_random import KeyedRandom, StepKey

ALPHA = 1.7580993408473766
"""Minus the value that alpha dropout puts in place of a dropped one (Klambauer et al., 2017)."""


class KeyedDropout(TorchFunctionMode):
    """A context in which dropout layers, and `Tensor.bernoulli_`, draw keyed random numbers.

    It covers torch's dropout functions, attention with dropout, and stochastic depth as torchvision
    and timm have it.
    """

    def __init__(self, key: StepKey, is_mapped: bool = False) -> None:
        """Create the context for one forward pass.

        Args:
            key: What the masks depend on.
            is_mapped: Whether vmap maps the pass over clients, or a graph records it.
        """
        super().__init__()
        self._random = KeyedRandom(key, is_mapped)

    @property
    def num_calls(self) -> int:
        """Number of masks drawn so far."""
        return self._random.num_calls

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a torch function, or its replacement."""
        replacement = _REPLACEMENTS.get(func)
        if replacement is None:
            return func(*args, **(kwargs or {}))
        return replacement(self, *args, **(kwargs or {}))

    def keep(self, shape: Sequence[int], drop_probability: float) -> Tensor:
        """Draw which values to keep.

        Args:
            shape: Shape of the mask.
            drop_probability: Probability of False.

        Returns:
            A boolean mask.

        Raises:
            ValueError: If the probability is not between 0 and 1.
        """
        if not 0 <= drop_probability <= 1:
            raise ValueError(
                f"a dropout probability lies in [0, 1], and this is {drop_probability}"
            )
        return self._random.words(*shape) >= round(drop_probability * 2**32)


def _dropout(
    mode: KeyedDropout, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    return _drop(mode, input, input.shape, p, training, inplace)


def _feature_dropout(num_dims: int | None) -> Callable[..., Tensor]:
    """Return dropout of whole channels; inputs of `num_dims` dimensions have no batch."""

    def _drop_channels(
        mode: KeyedDropout,
        input: Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
    ) -> Tensor:
        num_kept = 1 if input.dim() == num_dims else 2
        return _drop(mode, input, _channel_shape(input, num_kept), p, training, inplace)

    return _drop_channels


def _alpha_dropout(
    mode: KeyedDropout, input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
) -> Tensor:
    return _drop_alpha(mode, input, input.shape, p, training, inplace)


def _feature_alpha_dropout(
    mode: KeyedDropout, input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
) -> Tensor:
    return _drop_alpha(mode, input, _channel_shape(input, 2), p, training, inplace)


def _channel_shape(input: Tensor, num_kept: int) -> list[int]:
    return [*input.shape[:num_kept], *[1] * (input.dim() - num_kept)]


def _drop(
    mode: KeyedDropout, input: Tensor, shape: Sequence[int], p: float, training: bool, inplace: bool
) -> Tensor:
    """Set values to 0 with probability p, and scale the others by 1 / (1 - p)."""
    if not training or p == 0:
        return input
    scale = 0.0 if p == 1 else 1 / (1 - p)
    factor = mode.keep(shape, p).to(input.dtype) * scale
    return input.mul_(factor) if inplace else input * factor


def _drop_alpha(
    mode: KeyedDropout, input: Tensor, shape: Sequence[int], p: float, training: bool, inplace: bool
) -> Tensor:
    """Set values to -alpha with probability p, then restore mean and variance."""
    if not training or p == 0:
        return input
    if p == 1:
        return input.mul_(0) if inplace else input * 0
    scale = ((ALPHA * ALPHA * p + 1) * (1 - p)) ** -0.5
    kept = mode.keep(shape, p).to(input.dtype)
    shift = (kept - 1) * (ALPHA * scale) + ALPHA * scale * p
    return input.mul_(kept * scale).add_(shift) if inplace else input * (kept * scale) + shift


def _in_place(replacement: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the replacement of a function such as torch.dropout_."""

    def _replaced(mode: KeyedDropout, input: Tensor, p: float, train: bool) -> Tensor:
        return replacement(mode, input, p, train, True)

    return _replaced


def _with_train_flag(replacement: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the replacement of a function such as torch.dropout."""

    def _replaced(mode: KeyedDropout, input: Tensor, p: float, train: bool) -> Tensor:
        return replacement(mode, input, p, train)

    return _replaced


def _bernoulli(
    mode: KeyedDropout, target: Tensor, p: float | Tensor = 0.5, *, generator: Any = None
) -> Tensor:
    """Fill a tensor with 1 with probability p, else 0, as stochastic depth does."""
    if isinstance(p, Tensor) or generator is not None:
        return target.bernoulli_(p, generator=generator)
    drawn = mode.keep(target.shape, 1 - p).to(target.dtype)
    try:
        return target.copy_(drawn)
    except RuntimeError:
        # Under vmap, a tensor without a client axis cannot hold the masks of all clients. A network
        # that uses it instead of the result must not go on with uninitialized numbers.
        target.fill_(math.nan)
        return drawn


def _attention(
    mode: KeyedDropout,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Apply F.scaled_dot_product_attention; with dropout, in plain operators."""
    options: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    if not dropout_p:
        return F.scaled_dot_product_attention(query, key, value, attn_mask, **options)
    if enable_gqa:
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~allowed, -math.inf)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    # A query that may attend to nothing has weights of 0, as in torch.
    is_masked = (scores == -math.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(is_masked, 0).softmax(-1).masked_fill(is_masked, 0)
    return _dropout(mode, weights, dropout_p) @ value


def _multi_head_attention(mode: KeyedDropout, *args: Any, **kwargs: Any) -> Any:
    """Run F.multi_head_attention_forward with the dropout of this module.

    Torch switches replacements off within a replaced function. A copy of the function that looks
    its dropout up here avoids that.
    """
    original = F.multi_head_attention_forward
    replaced = {
        "has_torch_function": lambda _: False,
        "dropout": lambda *own, **options: _dropout(mode, *own, **options),
        "scaled_dot_product_attention": lambda *own, **options: _attention(mode, *own, **options),
    }
    own_globals = original.__globals__ | replaced
    copied = types.FunctionType(
        original.__code__, own_globals, original.__name__, original.__defaults__
    )
    copied.__kwdefaults__ = original.__kwdefaults__
    return copied(*args, **kwargs)


_REPLACEMENTS: dict[Callable[..., Any], Callable[..., Any]] = {
    F.dropout: _dropout,
    F.dropout1d: _feature_dropout(2),
    F.dropout2d: _feature_dropout(None),
    F.dropout3d: _feature_dropout(4),
    F.alpha_dropout: _alpha_dropout,
    F.feature_alpha_dropout: _feature_alpha_dropout,
    torch.dropout: _with_train_flag(_dropout),
    torch.dropout_: _in_place(_dropout),
    torch.feature_dropout: _with_train_flag(_feature_dropout(None)),
    torch.feature_dropout_: _in_place(_feature_dropout(None)),
    torch.alpha_dropout: _with_train_flag(_alpha_dropout),
    torch.alpha_dropout_: _in_place(_alpha_dropout),
    torch.feature_alpha_dropout: _with_train_flag(_feature_alpha_dropout),
    torch.feature_alpha_dropout_: _in_place(_feature_alpha_dropout),
    torch.Tensor.bernoulli_: _bernoulli,
    F.scaled_dot_product_attention: _attention,
    F.multi_head_attention_forward: _multi_head_attention,
}
