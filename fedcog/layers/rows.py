"""Few rows computed as many are: what comes of an example must not depend on how many there are beside it.

Mathematical libraries take other ways for the last few rows of a matrix, and for the last few numbers of a vector. They
round otherwise, by 1e-7, and a hundred steps of an optimiser make 1e-2 of it. Rows of zeros leave nothing over.
"""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

ROWS = 16  # a multiple of what the widest CPUs of today take at once


def filled(x: Tensor, multiple: int = ROWS) -> Tensor:
    """x [rows, ...] with rows of zeros behind it, up to a multiple of so many."""
    return F.pad(x, (0,) * (2 * x.dim() - 1) + (-len(x) % multiple,))


def accompanied(x: Tensor) -> Tensor:
    """x, or where it is one row two, the other of zeros: convolutions have a way of their own for a single image."""
    return filled(x, 2) if len(x) == 1 else x


class AsMany(TorchFunctionMode):
    """Within it, linear layers take their rows filled up, however they are called."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Any call of torch."""
        if func is F.linear:
            return _linear(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if input.dim() != 2 or len(input) % ROWS == 0:
        return F.linear(input, weight, bias)
    return F.linear(filled(input), weight, bias)[: len(input)]
