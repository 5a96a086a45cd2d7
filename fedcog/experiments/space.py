"""What is to be tuned: for each setting a list of values or a range, and the points that are tried of them."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fedcog import settings, streams
from fedcog.algorithms import ALGORITHMS, Algorithm, Wrapper
from fedcog.experiments.config import Experiment, layers, name_of
from fedcog.settings import ConfigError, Setting

Point = dict[str, Any]
"""A value for every setting of a space: lr, fedprox.mu."""

COMMON = (
    *("local_steps", "local_epochs", "batch_size", "optimizer", "lr", "momentum", "weight_decay", "lr_decay"),
    *("grad_clip", "weights", "weight_cap"),
)
"""The settings of an experiment that may be tuned: how clients train, and how they count; not what the problem is."""
VALUES = 1000
"""The longest list of values."""
DRAWS, BATCH = 100_096, 64
"""Points that are drawn at most, in search of one that was not tried; and at once."""


@dataclass(frozen=True)
class Choice:
    """One of some values."""

    values: tuple[Any, ...]

    @property
    def size(self) -> float:
        """How many values there are."""
        return len(self.values)

    def at(self, place: float) -> Any:
        """The value at a place from 0 to 1."""
        return self.values[min(int(place * len(self.values)), len(self.values) - 1)]

    def words(self) -> str:
        """As people read it."""
        return ", ".join(f"{value:g}" if type(value) is float else str(value) for value in self.values)


@dataclass(frozen=True)
class Range:
    """A number from low to high, both included: of four figures, or whole."""

    low: float
    high: float
    log: bool = False
    whole: bool = False

    @property
    def size(self) -> float:
        """How many values there are: as good as endless, unless they are whole."""
        return self.high - self.low + 1 if self.whole else math.inf

    def at(self, place: float) -> int | float:
        """The value at a place from 0 to 1, evenly or evenly in its logarithm."""
        low, high = (self.low - 0.5, self.high + 0.5) if self.whole else (self.low, self.high)
        if self.log:
            value = math.exp(math.log(low) + place * (math.log(high) - math.log(low)))
        else:
            value = low + place * (high - low)
        value = float(round(value)) if self.whole else float(f"{value:.4g}")
        value = min(max(value, self.low), self.high)
        return int(value) if self.whole else value

    def words(self) -> str:
        """As people read it."""
        return f"{self.low:g} to {self.high:g}" + (" by logarithm" if self.log else "")


Space = dict[str, Choice | Range]
"""What may be chosen for each setting of one method."""


def read(values: Mapping[str, Any], known: Mapping[str, type[Algorithm]] = ALGORITHMS) -> Space:
    """The space that a file describes: as an experiment's, with a list or a range in place of a value."""
    found, faults = Space(), list[str]()
    usual = settings.settings(Experiment)
    for name, value in values.items():
        if name in known:
            own = settings.settings(known[name])
            if not isinstance(value, Mapping) or not value.keys() - {"low", "high", "log"}:
                faults.append(f"space: '{name}' is an algorithm: write a table [{name}] with its settings.")
                continue
            for key, one in value.items():
                _add(found, faults, f"{name}.{key}", one, own.get(key), [f"{name}.{key}" for key in own])
        elif name in usual and name not in COMMON:
            faults.append(f"space: {name} is the same for all and cannot be tuned; what can is {', '.join(COMMON)}.")
        else:
            _add(found, faults, name, value, usual.get(name), [*COMMON, *known])
    if not found and not faults:
        faults.append("space: nothing is to be tuned: name a setting, such as lr = [0.01, 0.03, 0.1].")
    if faults:
        raise ConfigError(faults)
    return found


def _add(found: Space, faults: list[str], name: str, value: Any, setting: Setting | None, known: Sequence[str]) -> None:
    if setting is None:
        faults.append("space: " + settings.unknown("setting", name, known))
        return
    try:
        found[name] = _range(value, setting) if isinstance(value, Mapping) else _choice(value, setting)
    except ValueError as error:
        faults.append(f"space: {name} {error}.")


def _choice(value: Any, setting: Setting) -> Choice:
    if not isinstance(value, list | tuple):
        raise ValueError(f"needs a list of values or a range, {{low = ..., high = ...}}, not {value!r}")
    if not 1 <= len(value) <= VALUES:
        raise ValueError(f"needs 1 to {VALUES} values, not {len(value)}")
    for one in value:
        if trouble := settings.fault(setting, one):
            raise ValueError(trouble)
    values = tuple(float(one) if setting.type is float else one for one in value)
    if len(set(values)) < len(values):
        raise ValueError("has a value twice")
    return Choice(values)


def _range(value: Mapping[str, Any], setting: Setting) -> Range:
    if setting.type not in (int, float):
        raise ValueError("is no number, so that it needs a list of values")
    if strange := value.keys() - {"low", "high", "log"} or {"low", "high"} - value.keys():
        raise ValueError(f"needs a range as {{low = ..., high = ..., log = true}}: {', '.join(sorted(strange))}?")
    for end in ("low", "high"):
        if trouble := settings.fault(setting, value[end]):
            raise ValueError(f"({end}) {trouble}")
    low, high, log = value["low"], value["high"], value.get("log", False)
    if not low < high:
        raise ValueError(f"goes from {low:g} to {high:g}: low must be below high")
    if type(log) is not bool or (log and low <= 0):
        raise ValueError("needs log = true or false, and true only above 0")
    return Range(low, high, log, setting.type is int)


def told(space: Space) -> dict[str, Any]:
    """A space as it is written down."""
    return {name: list(one.values) if isinstance(one, Choice) else vars(one) for name, one in space.items()}


def of_method(space: Space, experiment: Experiment) -> Space:
    """The part of a space that is about a method: what all share, and the settings of its own layers."""
    own = {name for name, _ in layers(experiment.algorithm)}
    return {name: one for name, one in space.items() if "." not in name or name.rpartition(".")[0] in own}


def size(space: Space) -> float:
    """How many points a space has."""
    return math.prod(one.size for one in space.values())


def settled(experiment: Experiment, point: Point) -> Experiment:
    """An experiment with the settings of a point."""
    plain = {name: value for name, value in point.items() if "." not in name}
    return dataclasses.replace(experiment, algorithm=_with(experiment.algorithm, point), **plain)


def _with(algorithm: Algorithm, point: Point) -> Algorithm:
    name = layers(algorithm)[0][0]
    own = {key.rpartition(".")[2]: value for key, value in point.items() if key.rpartition(".")[0] == name}
    if isinstance(algorithm, Wrapper):
        own["inner"] = _with(algorithm.inner, point)
    return dataclasses.replace(algorithm, **own)


def check(space: Space, experiments: Sequence[Experiment], trials: int, lists: bool) -> list[str]:
    """Why methods cannot all be given so many different trials, each of lists of values if need be."""
    faults, named = list[str](), {name for one in experiments for name in of_method(space, one)}
    if idle := [name for name in space if name not in named]:
        faults.append(f"space: {', '.join(idle)}: none of the algorithms has that: leave it out, or add one that has.")
    if lists and (ranges := [name for name, one in space.items() if isinstance(one, Range)]):
        faults.append(f"a grid is made of lists of values, and {', '.join(ranges)} is a range: set --search random.")
    for experiment in experiments:
        found = size(of_method(space, experiment))
        if found < trials:
            faults.append(
                f"{name_of(experiment.algorithm)} has {found:g} different settings to try, fewer than {trials} trials: "
                f"budgets would not be equal. Name more values, or set --trials {found:g} or less."
            )
    return faults


def points(space: Space, seed: int, tried: Sequence[Point] = ()) -> Iterator[Point]:
    """Random points, none twice and none that was tried. What methods share is drawn alike for all of them."""
    seen = {tuple(point.items()) for point in tried}
    for start in range(0, DRAWS, BATCH):
        number = torch.arange(start, start + BATCH)
        drawn = {name: streams.uniform(seed, f"sweep/{name}", 0, number, ()).tolist() for name in space}
        for row in range(BATCH):
            point = {name: one.at(drawn[name][row]) for name, one in space.items()}
            key = tuple(point.items())
            if key not in seen:
                seen.add(key)
                yield point
    raise ConfigError(
        [
            f"space: {len(seen)} different points of {', '.join(space)} are all that were found: widen it, or lower "
            "--trials."
        ]
    )


def corners(space: Space, seed: int) -> Iterator[Point]:
    """Points to try a space out by: a random one, with each value of a list and each end of a range in its turn."""
    first = next(points(space, seed))
    for name, one in space.items():
        for value in one.values if isinstance(one, Choice) else (one.at(0.0), one.at(1.0)):
            yield first | {name: value}


def grid(space: Space, trials: int, seed: int) -> list[Point]:
    """All points of a grid in their order; of more than so many, as many random ones."""
    lists = [one.values for one in space.values() if isinstance(one, Choice)]
    whole = math.prod(len(values) for values in lists)
    if whole > trials:
        chosen = list(itertools.islice(points(space, seed), trials))
        places = [{value: place for place, value in enumerate(values)} for values in lists]
        return sorted(chosen, key=lambda point: [place[one] for place, one in zip(places, point.values(), strict=True)])
    found = list[Point]()
    for number in range(whole):
        point = Point()
        for name, values in reversed(list(zip(space, lists, strict=True))):
            number, place = divmod(number, len(values))
            point[name] = values[place]
        found.append({name: point[name] for name in space})
    return found
