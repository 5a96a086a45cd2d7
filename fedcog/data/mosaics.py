"""A federation shaped like FLAIR (Song et al., 2022) that anyone can have: CIFAR-100's pictures put together.

It is a stand-in and no more. Each image is a mosaic of one to four pictures, its labels are their superclasses, and as
with FLAIR there are 17 of them, 2.79 an image on average, and users of very different sizes: a quarter has one image, a
half two at most, a quarter five or more, and the mean is 8.3. Every user has tastes of its own. What FLAIR has beside
that, that photographs of one user are alike and labels go together, is not there. The same of the embedded digits is a
federation to try things on.
"""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcog import streams
from fedcog.data.datasets import Dataset
from fedcog.data.readers import cifar100_records, read_digits

LABELS = 17  # of CIFAR-100's twenty superclasses the first, in the order of their names
PICTURES = {1: 0.13, 2: 0.24, 3: 0.34, 4: 0.29}  # how many of a mosaic there are, and how often: 2.79 on average
TAIL, SCALE, TASTE = 1.16, 1.8, 3.0
MIDDLE = (129, 124, 112)  # the mean colour
NAMES = """
aquatic_mammals fish flowers food_containers fruit_and_vegetables household_electrical_devices household_furniture
insects large_carnivores large_man-made_outdoor_things large_natural_outdoor_scenes large_omnivores_and_herbivores
medium_mammals non-insect_invertebrates people reptiles small_mammals
"""

Numbers = NDArray[np.int64]


def read_mosaics(folder: str | Path, *, sizes: tuple[int, int] = (50_000, 10_000)) -> Dataset:
    """The mosaics of CIFAR-100's training pictures, whose each is, and those of its test pictures; always the same."""
    parts = []
    for name, size in zip(("train", "test"), sizes, strict=True):
        images, superclasses = cifar100_records(Path(folder) / f"{name}.bin", size, "coarse")
        parts.append(_mosaics(images, superclasses, name, LABELS, MIDDLE))
    (train_x, train_y, owners), (test_x, test_y, _) = parts
    mean, std = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
    return Dataset("mosaics", train_x, train_y, test_x, test_y, tuple(NAMES.split()), mean, std, True, owners)


def read_digit_mosaics() -> Dataset:
    """The same of the embedded digits: up to four different ones in an image of 16 x 16."""
    digits = read_digits()
    train_x, train_y, owners = _mosaics(digits.train_x, digits.train_y, "train", 10, (0,))
    test_x, test_y, _ = _mosaics(digits.test_x, digits.test_y, "test", 10, (0,))
    like = digits.classes, digits.mean, digits.std
    return Dataset("digit-mosaics", train_x, train_y, test_x, test_y, *like, users=owners)


def _mosaics(images: Tensor, classes: Tensor, part: str, number: int, blank: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Mosaics of the pictures in the first so many classes, their labels, and whose each is; in testing, nobody's."""
    count = int((classes < number).sum() / sum(count * share for count, share in PICTURES.items()))
    users = shares(count) if part == "train" else np.zeros(count, dtype=np.int64)
    chosen = pictures(classes.numpy(), users, part, number)
    there = (chosen >= 0).any(1)
    chosen, users = chosen[there], users[there]
    labels = torch.zeros(len(chosen), number, dtype=torch.bool)
    rows, cells = np.nonzero(chosen >= 0)
    labels[rows, classes[chosen[rows, cells]]] = True
    return _put_together(images, chosen, blank), labels, torch.from_numpy(users)


def shares(number: int) -> Numbers:
    """Whose each of so many images is: the users' sizes are the quantiles of a Lomax distribution, as many as fit.

    What is left over is the largest user's.
    """

    def quantiles(users: int) -> Numbers:
        level = (np.arange(users) + 0.5) / users
        return (1 + SCALE * ((1 - level) ** (-1 / TAIL) - 1)).astype(np.int64)

    few, many = 1, number + 1
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (middle, many) if quantiles(middle).sum() <= number else (few, middle)
    found = quantiles(few)
    found[-1] += number - found.sum()
    return np.repeat(np.arange(few), found)


def pictures(classes: Numbers, users: Numbers, part: str, number: int = LABELS) -> Numbers:
    """[mosaics, 4]: which picture lies in each cell, -1 for none.

    A mosaic's classes, of the first so many, are drawn one after another by its user's tastes, no one twice, and every
    picture is used once at most; when little is left, mosaics have fewer pictures than they should. In testing nobody
    has tastes.
    """
    draw = _generator(part)
    pools = [list(draw.permutation(np.flatnonzero(classes == label))) for label in range(number)]
    taste = (-np.log(1 - draw.random((int(users.max()) + 1, number)))) ** (TASTE if part == "train" else 0.0)
    sizes = np.searchsorted(np.cumsum(list(PICTURES.values()))[:-1], draw.random(len(users)), side="right") + 1
    chance, cells = draw.random((len(users), 4)), draw.random((len(users), 4)).argsort(1)
    found = np.full((len(users), 4), -1)
    left = np.array([len(pool) for pool in pools])
    for mosaic in draw.permutation(len(users)):
        weight = taste[users[mosaic]] * (left > 0)
        for place in range(sizes[mosaic]):
            whole = weight.cumsum()
            if whole[-1] <= 0:
                break
            label = int(np.searchsorted(whole, chance[mosaic, place] * whole[-1], side="right").clip(max=number - 1))
            found[mosaic, cells[mosaic, place]] = pools[label].pop()
            left[label] -= 1
            weight[label] = 0
    return found


def _put_together(images: Tensor, chosen: Numbers, blank: tuple[int, ...]) -> Tensor:
    """Images of four cells each, those without a picture of one colour."""
    channels, side = images.shape[1:3]
    colour = torch.tensor(blank, dtype=torch.uint8).reshape(channels, 1, 1)
    whole = colour.expand(len(chosen), channels, 2 * side, 2 * side).clone()
    for cell in range(4):
        rows = np.flatnonzero(chosen[:, cell] >= 0)
        top, left = side * (cell // 2), side * (cell % 2)
        whole[rows, :, top : top + side, left : left + side] = images[chosen[rows, cell]]
    return whole


def _generator(part: str) -> np.random.Generator:
    low, high = streams.key(0, f"mosaics/{part}")
    return np.random.Generator(np.random.Philox(key=low | high << 32))
