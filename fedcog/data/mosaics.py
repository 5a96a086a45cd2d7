"""Synthetic multi-label data sets with users: mosaics of CIFAR-100 images or of digits.

The mosaics of CIFAR-100 are a freely available substitute for FLAIR (Song et al., 2022). Each image
is a mosaic of one to four CIFAR-100 images, and their superclasses are its labels. As in FLAIR,
there are 17 labels, 2.79 per image on average, and users of very different sizes: a quarter have
one image, half have at most two, a quarter have five or more, and the mean is 8.3. Every user
prefers some labels. Other properties of FLAIR are missing: photographs of one user are not similar,
and labels are not correlated. The mosaics of digits serve quick trials.
"""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcog.core import rng
from fedcog.data.datasets import Dataset
from fedcog.data.formats import CIFAR100_MEAN, CIFAR100_STD, cifar100_records, read_digits

NUM_LABELS = 17
"""The first superclasses of CIFAR-100, in the order of their names."""
NUM_CELLS = 4
CELL_FREQUENCIES = {1: 0.13, 2: 0.24, 3: 0.34, 4: 0.29}
"""Frequency of each number of filled cells in a mosaic; the mean is 2.79."""
LOMAX_SHAPE = 1.16
LOMAX_SCALE = 1.8
PREFERENCE_EXPONENT = 3.0
"""Users' label preferences are exponential random numbers to this power."""
BLANK_COLOR = (129, 124, 112)
"""The mean color of CIFAR-100, for empty cells."""
CLASSES = """
aquatic_mammals fish flowers food_containers fruit_and_vegetables household_electrical_devices
household_furniture insects large_carnivores large_man-made_outdoor_things
large_natural_outdoor_scenes large_omnivores_and_herbivores medium_mammals non-insect_invertebrates
people reptiles small_mammals
"""

Indices = NDArray[np.int64]


def read_mosaics(folder: str | Path, *, sizes: tuple[int, int] = (50_000, 10_000)) -> Dataset:
    """Make mosaics of CIFAR-100 images; the result is always the same.

    Args:
        folder: The folder of CIFAR-100's binary files.
        sizes: Expected numbers of CIFAR-100's training and test examples.

    Returns:
        The data set, multi-label and with users.

    Raises:
        DataError: If a file is missing or damaged.
    """
    splits = []
    for split, size in zip(("train", "test"), sizes, strict=True):
        images, superclasses = cifar100_records(Path(folder) / f"{split}.bin", size, "coarse")
        splits.append(_make_mosaics(images, superclasses, split, NUM_LABELS, BLANK_COLOR))
    (train_x, train_y, users), (test_x, test_y, _) = splits
    return Dataset(
        "mosaics",
        train_x,
        train_y,
        test_x,
        test_y,
        tuple(CLASSES.split()),
        CIFAR100_MEAN,
        CIFAR100_STD,
        augment=True,
        users=users,
    )


def read_digit_mosaics() -> Dataset:
    """Make mosaics of the digits: up to four different digits in an image of 16 x 16."""
    digits = read_digits()
    train_x, train_y, users = _make_mosaics(digits.train_x, digits.train_y, "train", 10, (0,))
    test_x, test_y, _ = _make_mosaics(digits.test_x, digits.test_y, "test", 10, (0,))
    return Dataset(
        "digit-mosaics",
        train_x,
        train_y,
        test_x,
        test_y,
        digits.classes,
        digits.mean,
        digits.std,
        users=users,
    )


def _make_mosaics(
    images: Tensor, classes: Tensor, split: str, num_labels: int, blank: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """Make mosaics of the first `num_labels` classes; return images, labels and users.

    All test mosaics have user 0.
    """
    mean_cells = sum(count * frequency for count, frequency in CELL_FREQUENCIES.items())
    count = int((classes < num_labels).sum() / mean_cells)
    users = assign_users(count) if split == "train" else np.zeros(count, dtype=np.int64)
    chosen = choose_images(classes.numpy(), users, split, num_labels)
    is_filled = (chosen >= 0).any(1)
    chosen = chosen[is_filled]
    users = users[is_filled]
    labels = torch.zeros(len(chosen), num_labels, dtype=torch.bool)
    rows, cells = np.nonzero(chosen >= 0)
    labels[rows, classes[chosen[rows, cells]]] = True
    return _paste_images(images, chosen, blank), labels, torch.from_numpy(users)


def assign_users(num_images: int) -> Indices:
    """Return the user of each image.

    The sizes of users are quantiles of a Lomax distribution, for as many users as fit. The largest
    user gets the remaining images.
    """

    def user_sizes(num_users: int) -> Indices:
        level = (np.arange(num_users) + 0.5) / num_users
        return (1 + LOMAX_SCALE * ((1 - level) ** (-1 / LOMAX_SHAPE) - 1)).astype(np.int64)

    fits = 1
    too_many = num_images + 1
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if user_sizes(middle).sum() <= num_images:
            fits = middle
        else:
            too_many = middle
    sizes = user_sizes(fits)
    sizes[-1] += num_images - sizes.sum()
    return np.repeat(np.arange(fits), sizes)


def choose_images(
    classes: Indices, users: Indices, split: str, num_labels: int = NUM_LABELS
) -> Indices:
    """Choose the images of each mosaic.

    The classes of a mosaic are drawn without replacement, by the preferences of its user. Every
    image is used at most once; when few are left, mosaics have more empty cells.

    Args:
        classes: Class of each image.
        users: User of each mosaic.
        split: "train" or "test"; in the test set, users have no preferences.
        num_labels: Number of classes used, from the first.

    Returns:
        The image in each cell, `(mosaics, 4)`; -1 for an empty cell.
    """
    generator = _generator(split)
    pools = [
        list(generator.permutation(np.flatnonzero(classes == label))) for label in range(num_labels)
    ]
    exponent = PREFERENCE_EXPONENT if split == "train" else 0.0
    uniform = generator.random((int(users.max()) + 1, num_labels))
    preferences = (-np.log(1 - uniform)) ** exponent
    thresholds = np.cumsum(list(CELL_FREQUENCIES.values()))[:-1]
    sizes = np.searchsorted(thresholds, generator.random(len(users)), side="right") + 1
    chances = generator.random((len(users), NUM_CELLS))
    cells = generator.random((len(users), NUM_CELLS)).argsort(1)
    chosen = np.full((len(users), NUM_CELLS), -1)
    remaining = np.array([len(pool) for pool in pools])
    for mosaic in generator.permutation(len(users)):
        weights = preferences[users[mosaic]] * (remaining > 0)
        for position in range(sizes[mosaic]):
            cumulative = weights.cumsum()
            if cumulative[-1] <= 0:
                break
            threshold = chances[mosaic, position] * cumulative[-1]
            label = int(np.searchsorted(cumulative, threshold, side="right"))
            label = min(label, num_labels - 1)
            chosen[mosaic, cells[mosaic, position]] = pools[label].pop()
            remaining[label] -= 1
            weights[label] = 0
    return chosen


def _paste_images(images: Tensor, chosen: Indices, blank: tuple[int, ...]) -> Tensor:
    """Paste images into the cells of mosaics; empty cells get the color `blank`."""
    channels, side = images.shape[1:3]
    color = torch.tensor(blank, dtype=torch.uint8).reshape(channels, 1, 1)
    mosaics = color.expand(len(chosen), channels, 2 * side, 2 * side).clone()
    for cell in range(NUM_CELLS):
        rows = np.flatnonzero(chosen[:, cell] >= 0)
        top = side * (cell // 2)
        left = side * (cell % 2)
        mosaics[rows, :, top : top + side, left : left + side] = images[chosen[rows, cell]]
    return mosaics


def _generator(split: str) -> np.random.Generator:
    low, high = rng.key(0, f"mosaics/{split}")
    return np.random.Generator(np.random.Philox(key=low | high << 32))
