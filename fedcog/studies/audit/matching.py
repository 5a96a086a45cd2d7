"""Comparison of reconstructed inputs with the originals: errors, assignment, PSNR, labels."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

MAX_PSNR = 100.0
"""PSNR of equal inputs, in dB: a mean squared error of 1e-10."""
ORIGINALS_AT_A_TIME = 128
NUM_GUESSES = 10_000
"""Number of random guesses that estimate how many labels are right by chance."""


class Match(NamedTuple):
    """Reconstructions and the originals that they are assigned to.

    Attributes:
        rows: Positions among the reconstructions, best pair first.
        columns: Positions among the originals.
        psnr: PSNR of each pair in dB.
    """

    rows: list[int]
    columns: list[int]
    psnr: list[float]

    @property
    def mean(self) -> float:
        """The mean PSNR over all pairs."""
        return sum(self.psnr) / len(self.psnr)

    @property
    def best(self) -> float:
        """The PSNR of the best pair."""
        return self.psnr[0]


def psnr(mean_squared_error: Tensor) -> Tensor:
    """Return the peak signal-to-noise ratio in dB, for values between 0 and 1.

    Args:
        mean_squared_error: Mean squared errors, of any shape.

    Returns:
        -10 log10 of them, at most `MAX_PSNR`.
    """
    return (-10 * mean_squared_error.log10()).clamp(max=MAX_PSNR)


def squared_errors(
    inputs: Tensor, num_originals: int, originals: Callable[[slice], Tensor]
) -> Tensor:
    """Return the mean squared error of every pair of a reconstruction and an original.

    Args:
        inputs: Reconstructions with values between 0 and 1, `(N, ...)`.
        num_originals: Number of originals, M.
        originals: Returns some originals, `(m, ...)`; all at once may not fit into memory.

    Returns:
        `(N, M)`, float64 in host memory.
    """
    flat = inputs.flatten(1).double()
    parts = []
    for start in range(0, num_originals, ORIGINALS_AT_A_TIME):
        some = originals(slice(start, start + ORIGINALS_AT_A_TIME)).flatten(1).double()
        distance = torch.cdist(flat, some, compute_mode="donot_use_mm_for_euclid_dist")
        parts.append((distance.square() / flat.shape[1]).cpu())
    return torch.cat(parts, dim=1)


def match(errors: Tensor) -> Match:
    """Assign each reconstruction to an original of its own, with the highest sum of PSNR.

    Args:
        errors: Mean squared errors, `(N, M)`.

    Returns:
        min(N, M) pairs.
    """
    from scipy.optimize import linear_sum_assignment  # imported here: it takes half a second

    ratios = psnr(errors)
    rows, columns = linear_sum_assignment(ratios.numpy(), maximize=True)
    found = ratios[rows, columns]
    order = found.argsort(descending=True, stable=True).tolist()
    return Match(
        [int(rows[index]) for index in order],
        [int(columns[index]) for index in order],
        [float(found[index]) for index in order],
    )


def label_recovery(labels: Tensor, counts: Tensor) -> float:
    """Return the fraction of an attacker's labels that are right, whatever their order.

    Args:
        labels: The attacker's labels, `(N,)`.
        counts: How often each class occurs among the originals, `(C,)`. If there are more
            originals than labels, they are scaled down to N.

    Returns:
        A fraction from 0 to 1.
    """
    found = torch.bincount(labels.cpu(), minlength=len(counts))
    expected = scaled_counts(counts, len(labels))
    return float(torch.minimum(found, expected).sum()) / len(labels)


def chance_recovery(counts: Tensor, num_labels: int, seed: int) -> float:
    """Return the label recovery of random guesses, on average.

    Args:
        counts: How often each class occurs among the originals, `(C,)`.
        num_labels: Number of labels to guess.
        seed: Seed of the guesses.

    Returns:
        A fraction from 0 to 1.
    """
    draw = torch.Generator().manual_seed(seed)
    guesses = torch.randint(len(counts), (NUM_GUESSES, num_labels), generator=draw)
    found = torch.zeros(NUM_GUESSES, len(counts), dtype=torch.int64)
    found.scatter_add_(1, guesses, torch.ones_like(guesses))
    right = torch.minimum(found, scaled_counts(counts, num_labels)).sum(1)
    return float(right.double().mean()) / num_labels


def scaled_counts(counts: Tensor, total: int) -> Tensor:
    """Scale counts to another total, by largest remainder.

    Args:
        counts: `(C,)`, not all zero.
        total: What the result adds up to.

    Returns:
        `(C,)`, int64.
    """
    shares = counts.cpu().long() * total
    quota = shares // counts.sum().cpu()
    remainder = shares - quota * counts.sum().cpu()
    largest = remainder.argsort(descending=True, stable=True)[: total - int(quota.sum())]
    quota[largest] += 1
    return quota
