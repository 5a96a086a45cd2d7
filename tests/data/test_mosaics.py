"""Tests of mosaics: images, labels, and the distribution of user sizes."""

from pathlib import Path

import numpy as np
import pytest

from fedcog.data import mosaics
from fedcog.data.formats import read_digits


def write_cifar100(path: Path, count: int, seed: int) -> np.ndarray:
    """Write a CIFAR-100 file whose pixels equal the image's index; return the superclasses."""
    coarse = np.random.default_rng(seed).integers(0, 20, count).astype(np.uint8)
    records = np.empty((count, 3074), np.uint8)
    records[:, 0] = coarse
    records[:, 1] = coarse * 5
    records[:, 2:] = np.arange(count)[:, None]
    records.tofile(path)
    return coarse


def test_mosaics_contain_whole_images_and_their_labels(tmp_path: Path) -> None:
    coarse = write_cifar100(tmp_path / "train.bin", 120, 0)
    write_cifar100(tmp_path / "test.bin", 60, 1)
    data = mosaics.read_mosaics(tmp_path, sizes=(120, 60))
    again = mosaics.read_mosaics(tmp_path, sizes=(120, 60))
    assert data.fingerprint == again.fingerprint and data.multi_label and len(data.classes) == 17
    used_ids: list[int] = []
    for image, labels in zip(data.train_x, data.train_y, strict=True):
        cells = [image[:, top : top + 32, left : left + 32] for top in (0, 32) for left in (0, 32)]
        image_ids = [int(cell[0, 0, 0]) for cell in cells if len(cell.unique()) == 1]
        assert 1 <= len(image_ids) <= 4
        blank = [cell for cell in cells if len(cell.unique()) > 1]
        assert all(
            cell.flatten(1).unique(dim=1).tolist() == [[129], [124], [112]] for cell in blank
        )
        # Sorted labels without repeats: no superclass appears twice in a mosaic.
        assert labels.nonzero()[:, 0].tolist() == sorted(int(coarse[i]) for i in image_ids)
        used_ids += image_ids
    # About a hundred of the 120 images belong to the 17 superclasses in use.
    assert len(used_ids) == len(set(used_ids)) >= 90
    assert data.users is not None and len(data.users) == len(data.train_y)


def test_user_sizes_match_flair() -> None:
    sizes = np.bincount(mosaics.assign_users(15_232))
    assert sizes.sum() == 15_232
    assert np.percentile(sizes, [25, 50, 75]).tolist() == [1, 2, 5]
    assert sizes.mean() == pytest.approx(8.35, abs=0.1)
    assert (np.diff(sizes) >= 0).all() and sizes[-1] > 1000
    assert mosaics.assign_users(1).tolist() == [0]


def test_training_users_have_label_skew_and_test_users_none() -> None:
    superclasses = np.repeat(np.arange(20), 500)
    users = np.repeat(np.arange(10), 250)
    for part, bounds in (("train", (0.5, 1.0)), ("test", (0.0, 0.3))):
        chosen = mosaics.choose_images(superclasses, users, part)
        counts = np.zeros((10, 20))
        rows, cells = np.nonzero(chosen >= 0)
        np.add.at(counts, (users[rows], superclasses[chosen[rows, cells]]), 1)
        assert bounds[0] < counts.max() / 250 < bounds[1] and not counts[:, 17:].any()


def test_digit_mosaics_need_no_files() -> None:
    data = mosaics.read_digit_mosaics()
    assert data.fingerprint == mosaics.read_digit_mosaics().fingerprint
    assert (len(data.train_x), len(data.test_x)) == (516, 127) and data.input_shape == (1, 16, 16)
    assert data.multi_label and data.users is not None and len(data.classes) == 10
    digits = {bytes(digit.numpy().tobytes()) for digit in read_digits().train_x}
    cells = [
        data.train_x[:, :, top : top + 8, left : left + 8] for top in (0, 8) for left in (0, 8)
    ]
    assert sum(bool(cell.any()) for corner in cells for cell in corner) == int(data.train_y.sum())
    assert all(
        cell.numpy().tobytes() in digits for corner in cells for cell in corner if cell.any()
    )
