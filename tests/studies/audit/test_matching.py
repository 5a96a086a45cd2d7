"""Tests of PSNR, assignment, and label recovery, by hand."""

import pytest
import torch

from fedcog.studies.audit.matching import (
    MAX_PSNR,
    chance_recovery,
    label_recovery,
    match,
    psnr,
    scaled_counts,
    squared_errors,
)


def test_psnr_by_hand() -> None:
    assert psnr(torch.tensor([0.01, 1.0, 0.0])).tolist() == pytest.approx([20, 0, MAX_PSNR])


def test_squared_errors_of_all_pairs() -> None:
    inputs = torch.tensor([[0.0, 0.0], [1.0, 0.0]])
    originals = torch.tensor([[0.0, 1.0], [1.0, 1.0], [1.0, 0.0]])
    errors = squared_errors(inputs, 3, lambda rows: originals[rows])
    expected = torch.tensor([[0.5, 1.0, 0.5], [1.0, 0.5, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(errors, expected)


def test_squared_errors_do_not_need_all_originals_at_once() -> None:
    originals = torch.rand(1100, 3)
    sizes = []

    def some(rows: slice) -> torch.Tensor:
        sizes.append(len(originals[rows]))
        return originals[rows]

    errors = squared_errors(originals[:2], 1100, some)
    assert errors.shape == (2, 1100) and max(sizes) <= 128 and sum(sizes) == 1100
    assert errors[0, 0] == 0 and errors[1, 1] == 0


def test_each_reconstruction_gets_an_original_of_its_own() -> None:
    # Both are nearest to original 0; together it is better to give it to the second.
    errors = torch.tensor([[0.1, 0.11, 1.0], [0.01, 1.0, 1.0]])
    found = match(errors)
    assert dict(zip(found.rows, found.columns, strict=True)) == {0: 1, 1: 0}
    assert found.best == pytest.approx(20)
    assert found.mean == pytest.approx((20 + float(psnr(torch.tensor(0.11)))) / 2)


def test_more_reconstructions_than_originals() -> None:
    found = match(torch.tensor([[0.5], [0.1]]))
    assert (found.rows, found.columns) == ([1], [0])


def test_label_recovery_ignores_order_and_counts_repetitions() -> None:
    counts = torch.tensor([2, 1, 0])
    assert label_recovery(torch.tensor([1, 0, 0]), counts) == 1
    assert label_recovery(torch.tensor([0, 0, 0]), counts) == pytest.approx(2 / 3)
    assert label_recovery(torch.tensor([2]), counts) == 0


def test_counts_are_scaled_by_largest_remainder() -> None:
    assert scaled_counts(torch.tensor([55, 30, 15]), 4).tolist() == [2, 1, 1]
    assert scaled_counts(torch.tensor([2, 1, 0]), 3).tolist() == [2, 1, 0]


def test_chance_of_one_label_is_one_in_the_number_of_classes() -> None:
    assert chance_recovery(torch.tensor([1, 0, 0, 0]), 1, seed=0) == pytest.approx(0.25, abs=0.05)
    assert chance_recovery(torch.tensor([5]), 5, seed=0) == 1
