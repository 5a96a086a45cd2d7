"""Data sets: labelled examples as tensors, read from the publishers' own files or given as arrays."""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import IterableDataset

Values = Tensor | npt.NDArray[Any] | Sequence[Any]


class DataError(Exception):
    """A data set that cannot be had or read: says which file, and what to do."""


class DataWarning(UserWarning):
    """A data set that had to be read without some of its examples, or waited for: says which."""


@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """Labelled examples: a training set to share out among clients, and a test set everybody is scored on."""

    name: str
    train_x: Tensor  # uint8 [n, C, H, W] (images) or floating [n, ...] (anything else)
    train_y: Tensor  # int64 [n]: the class of each; or bool [n, classes]: its labels, any number of them
    test_x: Tensor
    test_y: Tensor
    classes: tuple[str, ...]
    mean: tuple[float, ...] = ()  # per channel, of x / 255; empty: x is used as it is
    std: tuple[float, ...] = ()
    augment: bool = False  # does random crop and horizontal flip make sense by default
    users: Tensor | None = None  # int64 [n]: whose each training example is, where that is known
    indices: tuple[Tensor, ...] | None = None  # given clients: the training examples of each, int64
    digest: str = ""  # of all examples, where it is known: gigabytes need not be hashed again

    def __post_init__(self) -> None:
        faults = [
            *_example_faults("train", self.train_x, self.train_y, len(self.classes)),
            *_example_faults("test", self.test_x, self.test_y, len(self.classes)),
            *self._form_faults(),
            *self._share_faults(),
        ]
        if faults:
            raise DataError(f"data set {self.name!r} cannot be used:\n" + "\n".join(f"  - {fault}" for fault in faults))

    def __repr__(self) -> str:
        size = f"{len(self.train_y)} + {len(self.test_y)} examples of {_form(self.train_x[0])}"
        return f"Dataset({self.name!r}, {size}, {len(self.classes)} classes)"

    @property
    def several(self) -> bool:
        """May an example have several labels?"""
        return self.train_y.dtype == torch.bool

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one example, as a model takes it."""
        return tuple(self.train_x.shape[1:])

    @functools.cached_property
    def fingerprint(self) -> str:
        """A digest of all examples and of what is known about them."""
        found = hashlib.sha256(json.dumps([self.mean, self.std, self.classes]).encode())
        if self.digest:
            found.update(self.digest.encode())
            return found.hexdigest()
        for part in (self.train_x, self.train_y, self.test_x, self.test_y):
            found.update(f"{part.dtype} {list(part.shape)}".encode())
            found.update(part.contiguous().numpy().data)
        return found.hexdigest()

    def _form_faults(self) -> Iterator[str]:
        train, test = self.train_x, self.test_x
        if self.train_y.dtype != self.test_y.dtype:
            yield f"train_y is {_form(self.train_y)} and test_y {_form(self.test_y)}: give both the same type"
        if train.shape[1:] != test.shape[1:] or train.dtype != test.dtype:
            yield (
                f"train_x has examples {_form(train)} and test_x {_form(test)}: "
                "give both the same shape and the same type"
            )
        if not self.classes:
            yield "classes is empty: name every class"
        if twice := sorted({name for name in self.classes if self.classes.count(name) > 1}):
            yield f"classes names {twice[0]!r} twice: give every class a name of its own"
        if train.dtype == torch.uint8 and train.dim() != 4:
            yield f"train_x is uint8 {list(train.shape)}: give images as [n, C, H, W], or floats"
        elif train.dtype == torch.uint8:
            for name, values in (("mean", self.mean), ("std", self.std)):
                if len(values) != train.shape[1] or not all(map(math.isfinite, values)):
                    yield f"{name} is {values}: give one finite number for each of {train.shape[1]} channels"
            if not all(value > 0 for value in self.std):
                yield f"std is {self.std}: every entry must be above 0"
        elif self.mean or self.std:
            yield "mean and std are for uint8 images; floats are used as they are: leave both empty"

    def _share_faults(self) -> Iterator[str]:
        count = _count(self.train_x)
        if self.users is not None:
            if self.users.dtype != torch.int64 or self.users.shape != (count,):
                yield f"users names {self.users.numel()} owners: give one for each of {count} training examples"
            elif bool((self.users < 0).any()):
                yield f"users holds {int(self.users.min())}: number the users from 0"
        if self.indices is None:
            return
        if not self.indices:
            yield "indices is empty: give one tensor per client, or None"
        sound = []
        for client, own in enumerate(self.indices):
            if own.dtype != torch.int64 or own.dim() != 1:
                yield f"indices of client {client} are {_form(own)}: give int64 in one dimension"
            elif len(own) == 0:
                yield f"indices of client {client} are empty: leave the client out, or give it an example"
            elif int(own.min()) < 0 or int(own.max()) >= count:
                yield f"indices of client {client} leave 0..{count - 1}: {int(own.min())} to {int(own.max())}"
            else:
                sound.append(own)
        if sound:
            taken = torch.cat(sound).cpu().bincount(minlength=count)
            if int(taken.max()) > 1:
                yield f"indices hold example {int(taken.argmax())} twice: it goes to one client, once"


def _count(x: Tensor) -> int:
    return x.shape[0] if x.dim() else 0


def _form(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"


def _example_faults(part: str, x: Tensor, y: Tensor, classes: int) -> Iterator[str]:
    if x.dim() == 1:
        yield f"{part}_x is {list(x.shape)}: give [n, 1] for one number per example"
    if _count(x) == 0:
        yield f"{part}_x is {list(x.shape)}: give at least one example"
    if y.dtype == torch.bool:
        if y.shape != (_count(x), classes):
            yield f"{part}_y is {_form(y)}: give a row for each of {_count(x)} examples, with all {classes} classes"
    elif y.shape != (_count(x),):
        yield (
            f"{part}_y is {list(y.shape)} for {part}_x {list(x.shape)}: give one label per example, [n], or rows of "
            "True and False, [n, classes], if an example may have several"
        )
    if y.dtype not in (torch.int64, torch.bool):
        yield f"{part}_y is {_form(y)}: labels are int64"
    elif y.dtype == torch.int64 and y.numel() and (int(y.min()) < 0 or int(y.max()) >= classes):
        yield f"{part}_y has labels {int(y.min())} to {int(y.max())}: {classes} classes are 0..{classes - 1}"
    if x.is_floating_point():
        if not bool(x.isfinite().all()):
            yield f"{part}_x holds NaN or infinity: clean it first"
    elif x.dtype != torch.uint8:
        yield f"{part}_x is {_form(x)}: give uint8 images [n, C, H, W], or floats of any shape (tokens embedded)"


def from_arrays(
    train_x: Values,
    train_y: Values,
    test_x: Values,
    test_y: Values,
    *,
    name: str = "custom",
    classes: Sequence[str] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    augment: bool = False,
    users: Values | Sequence[Hashable] | None = None,
    indices: Sequence[Values] | None = None,
) -> Dataset:
    """Your own data as a data set.

    Inputs are floats of any shape, used as they are, or uint8 images: [n, H, W], [n, C, H, W], or a numpy
    [n, H, W, C] with 1, 3 or 4 channels. Labels are integers or strings; where an example may have several, sets or
    lists of strings, or rows of True and False, one for each class. Without mean and std, those of the training
    images are taken. Users are anything that sorts.
    """
    inputs, tests = _inputs("train_x", train_x), _inputs("test_x", test_x)
    train_y, test_y, classes = _rows(train_y, test_y, classes)
    labels, test_labels, names = _labels(_array(train_y), _array(test_y), classes)
    if inputs.dtype == torch.uint8 and inputs.dim() == 4 and len(inputs):
        own_mean, own_std = channel_statistics(inputs)
        mean, std = own_mean if mean is None else mean, own_std if std is None else std
    return Dataset(
        name=name,
        train_x=inputs,
        train_y=labels,
        test_x=tests,
        test_y=test_labels,
        classes=names,
        mean=tuple(map(float, mean or ())),
        std=tuple(map(float, std or ())),
        augment=augment,
        users=None if users is None else _numbered(users),
        indices=None if indices is None else tuple(_integers("indices", _array(own)) for own in indices),
    )


def from_torch(train: TorchDataset[Any], test: TorchDataset[Any], **keywords: Any) -> Dataset:
    """A torch data set of (x, y) pairs, read once from end to end; keywords as in `from_arrays`.

    x is a tensor, an array or a PIL image; y an integer, a string, a row of True and False or a set of names. A
    random transform would be drawn once and kept.
    """
    return from_arrays(*_pairs("train", train), *_pairs("test", test), **keywords)


def _pairs(part: str, source: TorchDataset[Any]) -> tuple[Values, Values]:
    items = source if isinstance(source, IterableDataset) else (source[i] for i in range(len(source)))  # type: ignore[arg-type]
    inputs: list[Any] = []
    labels: list[Any] = []
    for x, y in items:
        inputs.append(x if isinstance(x, Tensor) else np.asarray(x))
        alone = isinstance(y, Tensor | np.generic | np.ndarray) and not y.shape
        labels.append(y.item() if alone else _array(y) if isinstance(y, Tensor) else y)
        if inputs[-1].shape != inputs[0].shape or inputs[-1].dtype != inputs[0].dtype:
            raise DataError(
                f"{part} example {len(inputs) - 1} is {inputs[-1].dtype} {list(inputs[-1].shape)}, the first "
                f"{inputs[0].dtype} {list(inputs[0].shape)}: bring all to one shape and type with a transform"
            )
    if not inputs:
        raise DataError(f"the {part} set holds no examples: give at least one")
    return torch.stack(inputs) if isinstance(inputs[0], Tensor) else np.stack(inputs), labels


def _array(values: Any) -> npt.NDArray[Any]:
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)


def _inputs(name: str, values: Values) -> Tensor:
    if isinstance(values, Tensor):
        x = values.detach()
    else:
        array = np.asarray(values)
        if array.dtype.kind not in "uifb":
            raise DataError(f"{name} holds {array.dtype}: give uint8 images or floats")
        if array.dtype == np.uint8 and array.ndim == 4 and array.shape[3] in (1, 3, 4):
            if array.shape[1] in (1, 3, 4):
                raise DataError(
                    f"{name} is {list(array.shape)}: the channels may be the second or the last dimension. "
                    "Give a torch tensor [n, C, H, W]"
                )
            array = array.transpose(0, 3, 1, 2)
        x = torch.from_numpy(np.require(array, array.dtype.newbyteorder("="), ["C", "W"]))
    if x.dtype == torch.uint8 and x.dim() == 3:
        return x.unsqueeze(1)
    if x.is_floating_point() and x.dim() == 4 and x.shape[3] in (1, 3) and x.shape[1] == x.shape[2] > 4:
        raise DataError(
            f"{name} is floating {list(x.shape)}, which looks like images with the channels last: give them as "
            "[n, C, H, W] (numpy: x.transpose(0, 3, 1, 2)), or as uint8"
        )
    return x.float() if x.dtype == torch.float64 else x


def _integers(name: str, values: npt.NDArray[Any]) -> Tensor:
    if values.dtype.kind not in "iub" and values.size:
        raise DataError(
            f"{name} holds {values.dtype}: give integers (of one-hot rows, their argmax), or rows of True and False if "
            "an example may have several labels"
        )
    return torch.from_numpy(values.astype(np.int64))


def _rows(train: Any, test: Any, classes: Sequence[str] | None) -> tuple[Any, Any, Sequence[str] | None]:
    """Sets of names as rows of True and False; anything else as it is."""

    several = (list, tuple, set, frozenset)
    train, test = (_listed(part, values) for part, values in (("train_y", train), ("test_y", test)))
    if not any(
        isinstance(values, list) and any(isinstance(own, several) for own in values) for values in (train, test)
    ):
        return train, test, classes
    for part, values in (("train_y", train), ("test_y", test)):
        for place, own in enumerate(values if isinstance(values, list) else [values]):
            if not isinstance(own, several) or not all(isinstance(word, str) for word in own):
                raise DataError(
                    f"{part} has {own!r} at {place}: give a set of names for every example of both parts, or rows of "
                    "True and False"
                )
    words = {word for values in (train, test) for own in values for word in own}
    names = sorted(words) if classes is None else [str(name) for name in classes]
    if strangers := sorted(words - set(names)):
        raise DataError(f"labels {strangers[:5]} are not among classes {names[:5]}...: name every class")
    place_of = {name: place for place, name in enumerate(names)}
    found = [torch.zeros(len(values), len(names), dtype=torch.bool) for values in (train, test)]
    for rows, values in zip(found, (train, test), strict=True):
        for row, own in enumerate(values):
            rows[row, [place_of[word] for word in own]] = True
    return found[0], found[1], names


def _listed(part: str, values: Any) -> Any:
    """Labels as they were given; an array of objects as a list, and a list of rows of one length as an array."""
    if isinstance(values, np.ndarray) and values.dtype == object and values.ndim == 1:
        values = values.tolist()
    values = list(values) if isinstance(values, tuple) else values
    if not isinstance(values, list) or not values:
        return values
    rows = [_array(own) for own in values if isinstance(own, list | tuple | np.ndarray | Tensor)]
    if len(rows) < len(values) or not all(row.dtype == bool and row.ndim == 1 and len(row) for row in rows):
        return values
    if len({len(row) for row in rows}) > 1:
        raise DataError(f"{part} has rows of {len(rows[0])} and of other numbers of classes: give all the same")
    return np.stack(rows)


def _labels(
    train: npt.NDArray[Any], test: npt.NDArray[Any], classes: Sequence[str] | None
) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    if train.dtype.kind == test.dtype.kind == "b" and train.ndim == 2:
        names = tuple(str(i) for i in (range(train.shape[1]) if classes is None else classes))
        return torch.from_numpy(train.copy()), torch.from_numpy(test.copy()), names
    words = [*train.flat, *test.flat] if train.dtype.kind in "UO" else []
    if words and all(isinstance(word, str) for word in words):
        names = tuple(map(str, sorted(set(words)) if classes is None else classes))
        strangers = sorted(set(words) - set(names))
        if strangers:
            raise DataError(f"labels {strangers[:5]} are not among classes {list(names)[:5]}...: name every class")
        place = {word: i for i, word in enumerate(names)}
        numbered = [torch.tensor([place[word] for word in part.flat]).reshape(part.shape) for part in (train, test)]
        return numbered[0].long(), numbered[1].long(), names
    train_y, test_y = _integers("train_y", train), _integers("test_y", test)
    if classes is None:
        top = max((int(y.max()) for y in (train_y, test_y) if y.numel()), default=0)
        if top >= 1 << 16:
            raise DataError(f"labels reach up to {top}: number the classes from 0, or give labels as strings")
        classes = [str(i) for i in range(top + 1)]
        absent = sorted(set(range(top + 1)) - set(train_y.flatten().tolist()) - set(test_y.flatten().tolist()))
        if absent:
            raise DataError(
                f"no example has label {absent[0]}, and labels count from 0: number them anew, or name all classes "
                "with classes=[...] if that is meant"
            )
    return train_y, test_y, tuple(map(str, classes))


def _numbered(users: Any) -> Tensor:
    values = users.tolist() if isinstance(users, Tensor | np.ndarray) else list(users)
    try:
        place = {user: i for i, user in enumerate(sorted(set(values)))}
    except TypeError as error:
        raise DataError(f"users cannot be put in order ({error}): give all as strings, or all as integers") from error
    return torch.tensor([place[user] for user in values], dtype=torch.int64)


def channel_statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation per channel of uint8 images, of x / 255; a constant channel has std 1."""
    levels = torch.arange(256, dtype=torch.float64) / 255
    mean, std = [], []
    for channel in range(images.shape[1]):
        shares = images[:, channel].flatten().bincount(minlength=256).cpu().double()
        shares /= shares.sum()
        centre = float(shares @ levels)
        mean.append(centre)
        std.append(math.sqrt(float(shares @ (levels - centre) ** 2)) or 1.0)
    return tuple(mean), tuple(std)
