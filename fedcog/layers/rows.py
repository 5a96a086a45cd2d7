"""Few rows computed as many are: what comes of an example must not depend on how many there are beside it.

Mathematical libraries take other ways for the last few rows of a matrix, and for the last few numbers of a vector. They
round otherwise, by 1e-7, and a hundred steps of an optimiser make 1e-2 of it. Rows of zeros leave nothing over.
"""

import torch.nn.functional as F
from torch import Tensor

ROWS = 16  # a multiple of what the widest CPUs of today take at once


def filled(x: Tensor, multiple: int) -> Tensor:
    """x [rows, ...] with rows of zeros behind it, up to a multiple of so many."""
    return F.pad(x, (0,) * (2 * x.dim() - 1) + (-len(x) % multiple,))


def even(matrix: Tensor) -> Tensor:
    """A matrix with zeros behind its rows and its columns: sums of its products leave nothing over either."""
    rows, columns = matrix.shape
    return F.pad(matrix, (0, -columns % ROWS, 0, -rows % ROWS))


def accompanied(x: Tensor) -> Tensor:
    """x, or where it is one row two, the other of zeros: convolutions have a way of their own for a single image."""
    return filled(x, 2) if len(x) == 1 else x
