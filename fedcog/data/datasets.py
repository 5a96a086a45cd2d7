"""Data sets: labeled examples as tensors, and their construction from arrays or torch data sets."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import warnings
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data import Dataset as TorchDataset

from fedcog.core import settings

Values = Tensor | npt.NDArray[Any] | Sequence[Any]

LABEL_SETS = (list, tuple, set, frozenset)
"""Types that hold the class names of one multi-label example."""

MAX_INFERRED_LABEL = 1 << 16
"""Integer labels must lie below this bound when `classes` is not given."""
MAX_SHOWN_CLASSES = 5
"""Number of classes that a warning names."""
MAX_SHOWN_USERS = 3
"""A warning names this many users."""


class DataError(Exception):
    """A data set that is missing or cannot be read; the message names the file and the remedy."""


class DataWarning(UserWarning):
    """A data set was read without some of its examples, or another process is building it."""


class DatasetOptions(TypedDict, total=False):
    """Keyword arguments of `from_arrays`, all optional."""

    name: str
    classes: Sequence[str] | None
    mean: Sequence[float] | None
    std: Sequence[float] | None
    augment: bool
    users: Values | Sequence[Hashable] | None
    test_users: Values | Sequence[Hashable] | None
    indices: Sequence[Values] | None


@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """Labeled examples: a training set to partition among clients, and a test set.

    The test set may be empty (no rows). With `test_users`, each user has test examples of its own.

    Attributes:
        name: Name of the data set.
        train_x: Training inputs: uint8 images `(N, C, H, W)`, floats `(N, ...)`, or int64 tokens
            `(N, L)`.
        train_y: Training labels: int64 `(N,)`, or bool `(N, num_classes)` if multi-label.
        test_x: Test inputs, in the format of `train_x`; no rows if there is no test set.
        test_y: Test labels, in the format of `train_y`.
        classes: Names of the classes.
        mean: Mean per channel of `x / 255`; empty if inputs are used unchanged.
        std: Standard deviation per channel of `x / 255`; empty if inputs are used unchanged.
        augment: Whether random crops and horizontal flips make sense by default.
        users: User of each training example, int64 `(N,)`, if known.
        test_users: User of each test example, numbered as `users`, if known.
        user_names: Name of each user, by number; empty if users have no names.
        indices: Training examples of each client, int64, if the partition is fixed.
        digest: Digest of all examples, if known; it saves hashing gigabytes again.
    """

    name: str
    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    classes: tuple[str, ...]
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    augment: bool = False
    users: Tensor | None = None
    indices: tuple[Tensor, ...] | None = None
    digest: str = ""
    test_users: Tensor | None = None
    user_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        faults = [
            *_example_faults("train", self.train_x, self.train_y, len(self.classes)),
            *_example_faults("test", self.test_x, self.test_y, len(self.classes)),
            *self._format_faults(),
            *self._user_faults(),
            *self._index_faults(),
        ]
        if faults:
            raise DataError(
                f"data set {self.name!r} cannot be used:\n"
                + "\n".join(f"  - {fault}" for fault in faults)
            )

    def __repr__(self) -> str:
        size = f"{len(self.train_y)} + {len(self.test_y)} examples of {_describe(self.train_x[0])}"
        return f"Dataset({self.name!r}, {size}, {len(self.classes)} classes)"

    @property
    def multi_label(self) -> bool:
        """Whether an example may have several labels."""
        return self.train_y.dtype == torch.bool

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one example, as a model takes it."""
        return tuple(self.train_x.shape[1:])

    @functools.cached_property
    def fingerprint(self) -> str:
        """A SHA-256 digest of all examples, the class names and the normalization."""
        sha256 = hashlib.sha256(json.dumps([self.mean, self.std, self.classes]).encode())
        if self.test_users is not None:
            sha256.update(b"test_users")
            sha256.update(self.test_users.contiguous().numpy().data)
        if self.digest:
            sha256.update(self.digest.encode())
            return sha256.hexdigest()
        for tensor in (self.train_x, self.train_y, self.test_x, self.test_y):
            sha256.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
            sha256.update(tensor.contiguous().numpy().data)
        return sha256.hexdigest()

    @functools.cached_property
    def full_fingerprint(self) -> str:
        """The fingerprint, extended by the users and indices of the training examples, if any."""
        sha256 = hashlib.sha256(self.fingerprint.encode())
        parts = [] if self.users is None else [self.users]
        for tensor in (*parts, *(self.indices or ())):
            sha256.update(f"{list(tensor.shape)}".encode())
            sha256.update(tensor.contiguous().numpy().data)
        return sha256.hexdigest() if parts or self.indices else self.fingerprint

    def _format_faults(self) -> Iterator[str]:
        train = self.train_x
        test = self.test_x
        if self.train_y.dtype != self.test_y.dtype:
            yield (
                f"train_y is {_describe(self.train_y)} and test_y {_describe(self.test_y)}: "
                "give both the same type"
            )
        if train.shape[1:] != test.shape[1:] or train.dtype != test.dtype:
            yield (
                f"train_x has examples {_describe(train)} and test_x {_describe(test)}: "
                "give both the same shape and the same type"
            )
        if not self.classes:
            yield "classes is empty: name every class"
        elif len(self.classes) == 1 and not self.multi_label:
            yield f"there is one class, {self.classes[0]!r}, and nothing to tell apart: give two"
        if duplicates := sorted({name for name in self.classes if self.classes.count(name) > 1}):
            yield f"classes names {duplicates[0]!r} twice: give every class a unique name"
        if train.dtype == torch.uint8 and train.dim() != 4:
            yield f"train_x is uint8 {list(train.shape)}: give images as [n, C, H, W], or floats"
        elif train.dtype == torch.uint8:
            yield from self._normalization_faults()
        elif self.mean or self.std:
            yield "mean and std are for uint8 images; floats are used as they are: leave both empty"

    def _normalization_faults(self) -> Iterator[str]:
        channels = self.train_x.shape[1]
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) != channels or not all(map(math.isfinite, values)):
                yield f"{name} is {values}: give one finite number for each of {channels} channels"
        if not all(value > 0 for value in self.std):
            yield f"std is {self.std}: every entry must be above 0"

    def _user_faults(self) -> Iterator[str]:
        splits = [
            ("users", self.users, "training", _num_examples(self.train_x)),
            ("test_users", self.test_users, "test", _num_examples(self.test_x)),
        ]
        for name, users, split, count in splits:
            if users is None:
                continue
            if users.dtype != torch.int64 or users.shape != (count,):
                yield (
                    f"{name} has {users.numel()} entries: "
                    f"give one for each of {count} {split} examples"
                )
            elif bool((users < 0).any()):
                yield f"{name} holds {int(users.min())}: number the users from 0"
            elif self.user_names and count and int(users.max()) >= len(self.user_names):
                yield (
                    f"{name} holds {int(users.max())}, and user_names has "
                    f"{len(self.user_names)} names: name every user"
                )
        if self.test_users is not None and self.users is None:
            yield "test_users is given without users: give the user of each training example too"

    def _index_faults(self) -> Iterator[str]:
        count = _num_examples(self.train_x)
        if self.indices is None:
            return
        if not self.indices:
            yield "indices is empty: give one tensor per client, or None"
        valid = []
        for client, positions in enumerate(self.indices):
            if positions.dtype != torch.int64 or positions.dim() != 1:
                yield (
                    f"indices of client {client} are {_describe(positions)}: "
                    "give int64 in one dimension"
                )
            elif len(positions) == 0:
                yield (
                    f"indices of client {client} are empty: "
                    "leave the client out, or give it an example"
                )
            elif int(positions.min()) < 0 or int(positions.max()) >= count:
                yield (
                    f"indices of client {client} leave 0..{count - 1}: "
                    f"{int(positions.min())} to {int(positions.max())}"
                )
            else:
                valid.append(positions)
        if valid:
            uses = torch.cat(valid).cpu().bincount(minlength=count)
            if int(uses.max()) > 1:
                yield (
                    f"indices hold example {int(uses.argmax())} twice: "
                    "give an example to one client, once"
                )


def _num_examples(x: Tensor) -> int:
    return x.shape[0] if x.dim() else 0


def _describe(x: Tensor) -> str:
    """Describe a tensor by dtype and shape, such as 'uint8 [10, 3, 32, 32]'."""
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"


def _example_faults(split: str, x: Tensor, y: Tensor, num_classes: int) -> Iterator[str]:
    if x.dim() == 1:
        yield f"{split}_x is {list(x.shape)}: give [n, 1] for one number per example"
    if _num_examples(x) == 0 and (split == "train" or x.dim() < 2):
        yield f"{split}_x is {list(x.shape)}: give at least one example"
    yield from _label_faults(split, x, y, num_classes)
    if x.is_floating_point():
        if not bool(x.isfinite().all()):
            yield f"{split}_x holds NaN or infinity: clean it first"
    elif x.dtype == torch.int64:
        if x.numel() and int(x.min()) < 0:
            yield f"{split}_x holds {int(x.min())}: number the tokens from 0"
    elif x.dtype != torch.uint8:
        yield (
            f"{split}_x is {_describe(x)}: give uint8 images [n, C, H, W], floats of any shape, "
            "or int64 tokens [n, length]"
        )


def _label_faults(split: str, x: Tensor, y: Tensor, num_classes: int) -> Iterator[str]:
    if y.dtype == torch.bool:
        if y.shape != (_num_examples(x), num_classes):
            yield (
                f"{split}_y is {_describe(y)}: give a row for each of {_num_examples(x)} examples, "
                f"with all {num_classes} classes"
            )
    elif y.shape != (_num_examples(x),):
        yield (
            f"{split}_y is {list(y.shape)} for {split}_x {list(x.shape)}: "
            "give one label per example, [n], or rows of True and False, [n, classes], "
            "if an example may have several"
        )
    if y.dtype not in (torch.int64, torch.bool):
        yield f"{split}_y is {_describe(y)}: labels are int64"
    elif y.dtype == torch.int64 and y.numel() and (int(y.min()) < 0 or int(y.max()) >= num_classes):
        yield (
            f"{split}_y has labels {int(y.min())} to {int(y.max())}: "
            f"{num_classes} classes are 0..{num_classes - 1}"
        )


def from_arrays(
    train_x: Values,
    train_y: Values,
    test_x: Values | None = None,
    test_y: Values | None = None,
    **options: Unpack[DatasetOptions],
) -> Dataset:
    """Make a data set from arrays or tensors.

    Inputs are floats of any shape, which are used unchanged, or uint8 images: `(N, H, W)`,
    `(N, C, H, W)`, or a numpy array `(N, H, W, C)` with 1, 3 or 4 channels. Integers of other types
    are token numbers, `(N, L)`, for a network with `embed` and `forward_embedded`. Labels are
    integers or strings. For multi-label data they are sets or lists of strings, or boolean rows
    with one entry per class.

    Args:
        train_x: Training inputs.
        train_y: Training labels.
        test_x: Test inputs; without them, the test set is empty.
        test_y: Test labels.
        **options: Optional settings, by keyword.
            name: Name of the data set; "custom" by default.
            classes: Class names, in the order of integer labels; by default those that occur.
            mean: Mean per channel of `x / 255`; by default that of the training images.
            std: Standard deviation per channel of `x / 255`; by default that of the training
                images.
            augment: Whether random crops and horizontal flips make sense.
            users: User of each training example; any values that can be sorted. Their text is kept
                as `user_names`. Each user becomes a client, unless the experiment says otherwise.
            test_users: User of each test example, if users have test examples of their own.
            indices: Training examples of each client, if the partition is fixed.

    Returns:
        The data set.

    Raises:
        DataError: If the arrays do not fit together; the message lists every fault.

    Example:
        ```python
        import torch
        import fedcog

        x = torch.rand(20, 3)
        data = fedcog.from_arrays(x[:15], [0, 1, 2] * 5, x[15:], [0, 1, 2, 0, 1])
        print(data)  # Dataset('custom', 15 + 5 examples of float32 [3], 3 classes)
        ```
    """
    _check_options(options)
    fields: dict[str, Any] = {"name": "custom", **options}
    has_test = test_x is not None
    if has_test != (test_y is not None):
        given, missing = ("test_x", "test_y") if has_test else ("test_y", "test_x")
        raise DataError(f"{given} is given without {missing}: give both, or neither.")
    train_inputs = _to_inputs("train_x", train_x)
    if not _num_examples(train_inputs):
        raise DataError(f"train_x is {list(train_inputs.shape)}: give at least one example")
    test_inputs = train_inputs[:0] if test_x is None else _to_inputs("test_x", test_x)
    train_y, test_y, names = _label_sets_to_rows(
        train_y, test_y if has_test else train_y, options.get("classes")
    )
    train_labels, test_labels, classes = _to_labels(_to_array(train_y), _to_array(test_y), names)
    if not has_test:
        test_labels = test_labels[:0]
    if options.get("classes") is None and train_labels.dim() == 1:
        warn_about_untrained([classes[label] for label in _untrained(train_labels, test_labels)])
    fields |= _normalization(train_inputs, options)
    fields |= _clients(options)
    fields["classes"] = classes
    return Dataset(
        train_x=train_inputs,
        train_y=train_labels,
        test_x=test_inputs,
        test_y=test_labels,
        **fields,
    )


def _untrained(train_labels: Tensor, test_labels: Tensor) -> list[int]:
    """Return the labels of test examples that no training example has."""
    return sorted({*test_labels.tolist()} - {*train_labels.tolist()})


def warn_about_untrained(classes: Sequence[str]) -> None:
    """Warn of classes that have test examples and no training examples.

    Args:
        classes: Their names; nothing happens if there are none.
    """
    if classes:
        shown = ", ".join(map(repr, classes[:MAX_SHOWN_CLASSES]))
        dots = ", ..." if len(classes) > MAX_SHOWN_CLASSES else ""
        warnings.warn(
            f"classes {shown}{dots} have test examples and no training example, so no model can "
            "learn them: check the spelling of the labels.",
            DataWarning,
            stacklevel=4,
        )


def _check_options(options: Mapping[str, Any]) -> None:
    """Refuse unknown keyword arguments, as Python does for functions that list theirs."""
    for name in options:
        if name not in DatasetOptions.__annotations__:
            text = settings.unknown_name("keyword argument", name, DatasetOptions.__annotations__)
            raise TypeError(f"from_arrays: {text}")


def _clients(options: DatasetOptions) -> dict[str, Any]:
    """Convert the users, or the examples of each client, if they are given."""
    fields: dict[str, Any] = {}
    users = options.get("users")
    if users is not None:
        fields |= _number_users(users, options.get("test_users"))
    if (indices := options.get("indices")) is not None:
        fields["indices"] = tuple(_to_positions(part) for part in indices)
    elif options.get("test_users") is not None and users is None:
        raise DataError(
            "test_users is given without users: give the user of each training example too."
        )
    return fields


def _to_positions(values: Any) -> Tensor:
    """Convert the positions of a client's examples."""
    positions = _to_array(values)
    if positions.dtype == bool:
        raise DataError("indices hold True and False: give positions (numpy: np.flatnonzero(mask))")
    return _to_integers("indices", positions)


def _normalization(inputs: Tensor, options: DatasetOptions) -> dict[str, tuple[float, ...]]:
    """Return mean and std as given, or of the training images."""
    mean = options.get("mean")
    std = options.get("std")
    if inputs.dtype == torch.uint8 and inputs.dim() == 4 and len(inputs):
        channel_mean, channel_std = channel_statistics(inputs)
        mean = channel_mean if mean is None else mean
        std = channel_std if std is None else std
    return {
        name: () if values is None else tuple(map(float, values))
        for name, values in (("mean", mean), ("std", std))
    }


def from_torch(
    train: TorchDataset[Any],
    test: TorchDataset[Any] | None = None,
    **options: Unpack[DatasetOptions],
) -> Dataset:
    """Make a data set from torch data sets of (x, y) pairs, which are read once.

    Each x is a tensor, an array or a PIL image; images are read as grayscale or RGB, as
    `from_folder` reads them. Each y is an integer, a string, a boolean row or a
    set of class names. A random transform is applied once, and its result is kept.

    Args:
        train: Training examples, with a length or iterable.
        test: Test examples, with a length or iterable; without it, the test set is empty.
        **options: Keyword arguments of `from_arrays`.

    Returns:
        The data set.

    Raises:
        DataError: If a data set is empty, or its examples differ in shape or type.
    """
    train_x, train_y = _read_pairs("train", train)
    if test is None:
        return from_arrays(train_x, train_y, **options)
    test_x, test_y = _read_pairs("test", test)
    return from_arrays(train_x, train_y, test_x, test_y, **options)


def _read_pairs(split: str, source: TorchDataset[Any]) -> tuple[Values, Values]:
    if isinstance(source, DataLoader):
        raise DataError(f"the {split} set is a DataLoader: give its data set, loader.dataset")
    if isinstance(source, IterableDataset):
        examples = iter(source)
    else:
        examples = (source[index] for index in range(len(source)))  # type: ignore[arg-type]
    inputs: list[Any] = []
    labels: list[Any] = []
    for example in examples:
        if not isinstance(example, tuple | list) or len(example) != 2:
            raise DataError(
                f"{split} example {len(inputs)} is no pair (x, y), but "
                f"{type(example).__name__}: return two values"
            )
        x, y = example
        inputs.append(x if isinstance(x, Tensor) else _image_or_array(split, len(inputs), x))
        labels.append(_plain_label(y))
        if inputs[-1].shape != inputs[0].shape or inputs[-1].dtype != inputs[0].dtype:
            raise DataError(
                f"{split} example {len(inputs) - 1} is "
                f"{inputs[-1].dtype} {list(inputs[-1].shape)}, the first "
                f"{inputs[0].dtype} {list(inputs[0].shape)}: "
                "bring all to one shape and type with a transform"
            )
    if not inputs:
        raise DataError(f"the {split} set holds no examples: give at least one")
    return torch.stack(inputs) if isinstance(inputs[0], Tensor) else np.stack(inputs), labels


def _image_or_array(split: str, position: int, x: Any) -> npt.NDArray[Any]:
    """Convert an example that is no tensor; a PIL image becomes grayscale or RGB."""
    if type(x).__module__.partition(".")[0] == "PIL":
        from fedcog.data.folders import check_image  # imports this module

        check_image(f"{split} example {position}", x)
        x = x.convert("L" if x.mode in ("1", "L") else "RGB")
    return np.asarray(x)


def _plain_label(y: Any) -> Any:
    """Turn a 0-d array or tensor into a Python number, and a tensor into an array."""
    if isinstance(y, Tensor | np.generic | np.ndarray) and not y.shape:
        return y.item()
    return _to_array(y) if isinstance(y, Tensor) else y


def _to_array(values: Any) -> npt.NDArray[Any]:
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)


def _to_inputs(name: str, values: Values) -> Tensor:
    if isinstance(values, Tensor):
        if values.layout != torch.strided:
            raise DataError(f"{name} is sparse: give {name}.to_dense()")
        x = values.detach()
    else:
        x = _array_to_inputs(name, values)
    if x.dtype == torch.uint8 and x.dim() == 3:
        return x.unsqueeze(1)
    is_channels_last = x.dim() == 4 and x.shape[3] in (1, 3) and x.shape[1] == x.shape[2] > 4
    if x.is_floating_point() and is_channels_last:
        raise DataError(
            f"{name} is floating {list(x.shape)}, which looks like images with the channels last: "
            "give them as [n, C, H, W] (numpy: x.transpose(0, 3, 1, 2)), or as uint8"
        )
    if x.dtype in (torch.int8, torch.int16, torch.int32, torch.uint16, torch.uint32):
        return x.long()
    return x.float() if x.dtype in (torch.float64, torch.bfloat16) else x


def _array_to_inputs(name: str, values: Any) -> Tensor:
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise DataError(f"{name} has examples of several shapes: {error}") from error
    if array.dtype.kind not in "uifb":
        raise DataError(f"{name} holds {array.dtype}: give uint8 images or floats")
    if array.dtype == np.uint8 and array.ndim == 4 and array.shape[3] in (1, 3, 4):
        if array.shape[1] in (1, 3, 4):
            raise DataError(
                f"{name} is {list(array.shape)}: "
                "the channels may be the second or the last dimension. "
                "Give a torch tensor [n, C, H, W]"
            )
        array = array.transpose(0, 3, 1, 2)
    if array.dtype.kind in "ui" and array.dtype != np.uint8:
        return _to_integers(name, array)
    if array.dtype.kind == "f" and array.dtype.itemsize > 8:
        array = array.astype(np.float64)
    return torch.from_numpy(np.require(array, array.dtype.newbyteorder("="), ["C", "W"]))


def _to_integers(name: str, values: npt.NDArray[Any]) -> Tensor:
    if values.dtype.kind not in "iub" and values.size:
        raise DataError(
            f"{name} holds {values.dtype}: give integers (the argmax of one-hot rows), "
            "or rows of True and False if an example may have several labels"
        )
    integers = values.astype(np.int64)
    if values.dtype == np.uint64 and integers.size and int(integers.min()) < 0:
        raise DataError(f"{name} holds {int(values.max())}, which no int64 can: number from 0")
    return torch.from_numpy(integers)


def _label_sets_to_rows(
    train: Any, test: Any, classes: Sequence[str] | None
) -> tuple[Any, Any, Sequence[str] | None]:
    """Turn sets of class names into boolean rows; return other labels unchanged."""
    splits = {"train_y": _normalize_labels("train_y", train)}
    splits["test_y"] = _normalize_labels("test_y", test)
    if not any(map(_has_label_sets, splits.values())):
        return splits["train_y"], splits["test_y"], classes
    for split, labels in splits.items():
        for position, names in enumerate(labels if isinstance(labels, list) else [labels]):
            if not isinstance(names, LABEL_SETS) or not all(isinstance(n, str) for n in names):
                raise DataError(
                    f"{split} has {names!r} at {position}: give a set of names for every example "
                    "of both splits, or rows of True and False"
                )
    used = {name for labels in splits.values() for names in labels for name in names}
    ordered = sorted(used) if classes is None else [str(name) for name in classes]
    _check_all_named(used, ordered)
    column = {name: index for index, name in enumerate(ordered)}
    rows = []
    for labels in splits.values():
        matrix = torch.zeros(len(labels), len(ordered), dtype=torch.bool)
        for row, names in enumerate(labels):
            matrix[row, [column[name] for name in names]] = True
        rows.append(matrix)
    return rows[0], rows[1], ordered


def _has_label_sets(labels: Any) -> bool:
    return isinstance(labels, list) and any(isinstance(names, LABEL_SETS) for names in labels)


def _check_all_named(used: set[str], classes: Sequence[str]) -> None:
    if unknown := sorted(used - set(classes)):
        labels = ", ".join(map(str, unknown[:5]))
        raise DataError(
            f"labels {labels} are not among classes {', '.join(classes[:5])}"
            f"{', ...' if len(classes) > 5 else ''}: name every class"
        )


def _normalize_labels(split: str, values: Any) -> Any:
    """Turn an object array or tuple into a list, and a list of boolean rows into an array."""
    if isinstance(values, np.ndarray) and values.dtype == object and values.ndim == 1:
        values = values.tolist()
    values = list(values) if isinstance(values, tuple) else values
    if not isinstance(values, list) or not values:
        return values
    rows = [_to_array(row) for row in values if isinstance(row, list | tuple | np.ndarray | Tensor)]
    if len(rows) < len(values) or not all(
        row.dtype == bool and row.ndim == 1 and len(row) for row in rows
    ):
        return values
    if len({len(row) for row in rows}) > 1:
        raise DataError(
            f"{split} has rows of {len(rows[0])} and of other numbers of classes: give all the same"
        )
    return np.stack(rows)


def _to_labels(
    train: npt.NDArray[Any], test: npt.NDArray[Any], classes: Sequence[str] | None
) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    """Convert labels to tensors, and find the names of the classes."""
    if train.dtype.kind == test.dtype.kind == "b" and train.ndim == 2:
        names = tuple(str(i) for i in (range(train.shape[1]) if classes is None else classes))
        return torch.from_numpy(train.copy()), torch.from_numpy(test.copy()), names
    labels = [*train.flat, *test.flat] if train.dtype.kind in "UO" else []
    if labels and all(isinstance(label, str) for label in labels):
        names = tuple(map(str, sorted(set(labels)) if classes is None else classes))
        _check_all_named(set(labels), names)
        index_of = {name: index for index, name in enumerate(names)}
        train_y, test_y = (
            torch.tensor([index_of[label] for label in split.flat]).reshape(split.shape).long()
            for split in (train, test)
        )
        return train_y, test_y, names
    train_y = _to_integers("train_y", train)
    test_y = _to_integers("test_y", test)
    if classes is None:
        classes = _infer_classes(train_y, test_y)
    return train_y, test_y, tuple(map(str, classes))


def _infer_classes(train_y: Tensor, test_y: Tensor) -> list[str]:
    """Name the classes by number; every number from 0 to the largest label must occur."""
    largest = max((int(y.max()) for y in (train_y, test_y) if y.numel()), default=0)
    if largest >= MAX_INFERRED_LABEL:
        raise DataError(
            f"labels reach up to {largest}: number the classes from 0, or give labels as strings"
        )
    used = {*train_y.flatten().tolist(), *test_y.flatten().tolist()}
    if missing := sorted(set(range(largest + 1)) - used):
        raise DataError(
            f"no example has label {missing[0]}, and labels count from 0: renumber them, "
            "or name all classes with classes=[...] if that is meant"
        )
    return [str(label) for label in range(largest + 1)]


def _number_users(users: Any, test_users: Any = None) -> dict[str, Any]:
    """Number the users of both splits in sorted order, and keep their names."""
    splits = {"users": _to_list(users)}
    if test_users is not None:
        splits["test_users"] = _to_list(test_users)
    for name, values in splits.items():
        if any(map(_is_missing, values)):
            raise DataError(f"{name} holds None or NaN: give the user of every example")
    try:
        ordered = sorted({user for values in splits.values() for user in values})
    except TypeError as error:
        raise DataError(
            f"users cannot be put in order ({error}): give all as strings, or all as integers"
        ) from error
    index_of = {user: index for index, user in enumerate(ordered)}
    fields: dict[str, Any] = {
        name: torch.tensor([index_of[user] for user in values], dtype=torch.int64)
        for name, values in splits.items()
    }
    fields["user_names"] = tuple(map(str, ordered))
    if unknown := sorted(set(splits.get("test_users", ())) - set(splits["users"])):
        shown = ", ".join(map(repr, unknown[:MAX_SHOWN_USERS]))
        warnings.warn(
            f"test_users holds {len(unknown)} users without training examples, such as {shown}: "
            "their examples test the global model only, and no client.",
            DataWarning,
            stacklevel=4,
        )
    return fields


def _is_missing(user: Any) -> bool:
    """Return whether a user is None, NaN, or the NA of pandas, which is no truth value."""
    try:
        return user is None or bool(user != user)
    except TypeError:
        return True


def _to_list(values: Any) -> list[Any]:
    return values.tolist() if isinstance(values, Tensor | np.ndarray) else list(values)


def channel_statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Compute mean and standard deviation per channel of uint8 images, of `x / 255`.

    A constant channel has standard deviation 1.
    """
    levels = torch.arange(256, dtype=torch.float64) / 255
    mean = []
    std = []
    for channel in range(images.shape[1]):
        frequencies = images[:, channel].flatten().bincount(minlength=256).cpu().double()
        frequencies /= frequencies.sum()
        channel_mean = float(frequencies @ levels)
        mean.append(channel_mean)
        std.append(math.sqrt(float(frequencies @ (levels - channel_mean) ** 2)) or 1.0)
    return tuple(mean), tuple(std)
