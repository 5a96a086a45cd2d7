"""Search spaces: a list of values or a range for each tuned setting, and the points in them."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from fedcog.algorithms import ALGORITHMS, Algorithm
from fedcog.core import rng, settings
from fedcog.core.settings import ConfigError, Setting
from fedcog.runs.config.composition import algorithm_name, named_layers
from fedcog.runs.config.experiment import Experiment

Point = dict[str, Any]
"""A value for every setting of a space, such as {"lr": 0.1, "fedprox.mu": 0.01}."""

TUNABLE_SETTINGS = (
    "local_steps",
    "local_epochs",
    "batch_size",
    "optimizer",
    "lr",
    "momentum",
    "weight_decay",
    "lr_decay",
    "lr_schedule",
    "lr_warmup",
    "lr_step",
    "lr_final",
    "server_lr_schedule",
    "server_lr_decay",
    "server_lr_warmup",
    "grad_clip",
    "weights",
    "weight_cap",
)
"""Settings of an experiment that may be tuned: local training and client weights.

The others define the problem, which is the same for all algorithms.
"""

MAX_VALUES = 1000
"""Maximal length of a list of values."""
EDGE_FRACTION = 0.05
"""A value this close to an end of a range, as a fraction of the range, lies at its edge."""
MAX_DRAWS = 100_096
"""Number of random points drawn in search of one that was not tried."""
DRAWS_PER_BATCH = 64

RANGE_KEYS = {"low", "high", "log"}


@dataclass(frozen=True)
class Choice:
    """A list of values."""

    values: tuple[Any, ...]

    @property
    def size(self) -> float:
        """The number of values."""
        return len(self.values)

    def extremes(self) -> tuple[Any, ...]:
        """Return the values to check before a search: all of them."""
        return self.values

    def at(self, fraction: float) -> Any:
        """Return the value at a fraction from 0 to 1 of the list."""
        return self.values[min(int(fraction * len(self.values)), len(self.values) - 1)]

    def text(self) -> str:
        """Format it for people."""
        return ", ".join(
            f"{value:g}" if type(value) is float else str(value) for value in self.values
        )


@dataclass(frozen=True)
class Range:
    """A range of numbers, both ends included: integers, or floats with four significant digits."""

    low: float
    high: float
    log: bool = False
    is_integer: bool = False

    @property
    def size(self) -> float:
        """The number of values; a range of floats counts as infinite."""
        return self.high - self.low + 1 if self.is_integer else math.inf

    def extremes(self) -> tuple[Any, ...]:
        """Return the values to check before a search: both ends."""
        return (self.at(0.0), self.at(1.0))

    def at(self, fraction: float) -> int | float:
        """Return the value at a fraction from 0 to 1 of the range, linear or logarithmic."""
        low = self.low
        high = self.high
        if self.is_integer:  # so that both ends are as likely as the numbers between them
            low -= 0.5
            high += 0.5
        if self.log:
            value = math.exp(math.log(low) + fraction * (math.log(high) - math.log(low)))
        else:
            value = low + fraction * (high - low)
        return self.rounded(value)

    def rounded(self, value: float) -> int | float:
        """Round a number to a value of the range."""
        if self.is_integer:
            return int(min(max(round(value), self.low), self.high))
        return min(max(float(f"{value:.4g}"), self.low), self.high)

    def text(self) -> str:
        """Format it for people."""
        scale = ", logarithmic" if self.log else ""
        return f"{self.low:g} to {self.high:g}{scale}"


Domain = Choice | Range

SearchSpace = dict[str, Domain]
"""The domain of each tuned setting; settings of an algorithm are named `fedprox.mu`."""


def read_space(
    values: Mapping[str, Any], algorithms: Mapping[str, type[Algorithm]] = ALGORITHMS
) -> SearchSpace:
    """Read a search space, as a TOML file describes it.

    Args:
        values: The settings of an experiment, with a list or a range in place of a value.
        algorithms: The known algorithms by name.

    Returns:
        The space.

    Raises:
        ConfigError: All faults at once.
    """
    space = SearchSpace()
    faults = list[str]()
    experiment_settings = settings.settings(Experiment)
    for name, value in values.items():
        if name in algorithms:
            _read_table(space, faults, name, value, algorithms[name])
        elif name in experiment_settings and name not in TUNABLE_SETTINGS:
            faults.append(
                f"space: {name} is the same for all algorithms and cannot be tuned. "
                f"Tunable settings: {', '.join(TUNABLE_SETTINGS)}."
            )
        elif name in experiment_settings:
            _read_domain(space, faults, name, value, experiment_settings[name])
        else:
            known = [*TUNABLE_SETTINGS, *algorithms]
            faults.append("space: " + settings.unknown_name("setting", name, known))
    if not space and not faults:
        faults.append(
            "space: it names no setting to tune: add one, such as lr = [0.01, 0.03, 0.1]."
        )
    if faults:
        raise ConfigError(faults)
    return space


def _read_table(
    space: SearchSpace, faults: list[str], name: str, value: Any, cls: type[Algorithm]
) -> None:
    """Read the settings of one algorithm."""
    if not isinstance(value, Mapping) or not value.keys() - RANGE_KEYS:
        faults.append(f"space: '{name}' is an algorithm: write a table [{name}] with its settings.")
        return
    known = settings.settings(cls)
    for key, domain in value.items():
        if key in known:
            _read_domain(space, faults, f"{name}.{key}", domain, known[key])
        else:
            names = [f"{name}.{known_key}" for known_key in known]
            if key in TUNABLE_SETTINGS:
                problem = f"{key} is a setting of all algorithms: write it above [{name}]."
            else:
                problem = settings.unknown_name("setting", f"{name}.{key}", names)
            faults.append(f"space: {problem}")


def _read_domain(
    space: SearchSpace, faults: list[str], name: str, value: Any, setting: Setting
) -> None:
    """Read the domain of one setting."""
    try:
        if isinstance(value, Mapping):
            space[name] = _read_range(value, setting)
        else:
            space[name] = _read_choice(value, setting)
    except ValueError as error:
        faults.append(f"space: {name} {error}.")


def _read_choice(value: Any, setting: Setting) -> Choice:
    if not isinstance(value, list | tuple):
        raise ValueError(
            f"needs a list of values or a range, {{low = ..., high = ...}}, not {value!r}"
        )
    if not 1 <= len(value) <= MAX_VALUES:
        raise ValueError(f"needs 1 to {MAX_VALUES} values, not {len(value)}")
    for item in value:
        fault = settings.fault(setting, item)
        if fault:
            raise ValueError(fault)
    values = tuple(float(item) if setting.type is float else item for item in value)
    if len(set(values)) < len(values):
        raise ValueError("has a value twice")
    return Choice(values)


def _read_range(value: Mapping[str, Any], setting: Setting) -> Range:
    if setting.type not in (int, float):
        raise ValueError("is not a number: give a list of values")
    unexpected = value.keys() - RANGE_KEYS
    missing = {"low", "high"} - value.keys()
    if unexpected or missing:
        problem = f"unknown key {', '.join(sorted(unexpected))}"
        if not unexpected:
            problem = f"missing key {', '.join(sorted(missing))}"
        raise ValueError(f"needs a range as {{low = ..., high = ..., log = true}}: {problem}")
    for end in ("low", "high"):
        fault = settings.fault(setting, value[end])
        if fault:
            raise ValueError(f"({end}) {fault}")
    low = value["low"]
    high = value["high"]
    log = value.get("log", False)
    if not low < high:
        raise ValueError(f"goes from {low:g} to {high:g}: low must be below high")
    if type(log) is not bool or (log and low <= 0):
        raise ValueError("needs log = true or false, and true only if low is above 0")
    return Range(low, high, log, setting.type is int)


def to_json(space: SearchSpace) -> dict[str, Any]:
    """Return a space as sweep.json stores it."""
    values: dict[str, Any] = {}
    for name, domain in space.items():
        if isinstance(domain, Choice):
            values[name] = list(domain.values)
        else:
            values[name] = {
                "low": domain.low,
                "high": domain.high,
                "log": domain.log,
                "whole": domain.is_integer,
            }
    return values


def space_of(space: SearchSpace, experiment: Experiment) -> SearchSpace:
    """Return the part of a space that concerns one experiment.

    Args:
        space: The search space of all algorithms.
        experiment: The experiment of one algorithm.

    Returns:
        The settings that all algorithms have, and those of this algorithm.
    """
    names = {name for name, _ in named_layers(experiment.algorithm)}
    return {
        key: domain
        for key, domain in space.items()
        if "." not in key or key.rpartition(".")[0] in names
    }


def edge_of(domain: Domain, value: Any) -> Literal["smallest", "largest"] | None:
    """Return at which edge of its domain a value lies; None inside, and for texts.

    Args:
        domain: Numbers, or a range.
        value: A value of the domain.

    Returns:
        The edge. A range has edges of 5 % of its width, on its own scale.
    """
    if isinstance(domain, Choice):
        if len(domain.values) < 2 or any(type(one) not in (int, float) for one in domain.values):
            return None
        if value == min(domain.values):
            return "smallest"
        return "largest" if value == max(domain.values) else None
    if domain.log:
        fraction = math.log(value / domain.low) / math.log(domain.high / domain.low)
    else:
        fraction = (value - domain.low) / (domain.high - domain.low)
    if fraction <= EDGE_FRACTION:
        return "smallest"
    return "largest" if fraction >= 1 - EDGE_FRACTION else None


def edge_sentences(experiment: Experiment, space: SearchSpace, point: Point) -> list[str]:
    """Return which values of a chosen point lie at an edge of what was searched.

    An edge that is also a bound of the setting, beyond which nothing can be tried, is left out.

    Args:
        experiment: The experiment of the algorithm.
        space: What was searched.
        point: The chosen values.

    Returns:
        A sentence with a remedy for each value, such as 'fedprox: the chosen lr 0.1 is the largest
        of its grid: try larger values.'
    """
    known = settings.settings(Experiment)
    for name, layer in named_layers(experiment.algorithm):
        own_settings = settings.settings(type(layer)).items()
        known = known | {f"{name}.{key}": setting for key, setting in own_settings}
    sentences = []
    for name, value in point.items():
        domain = space[name]
        edge = edge_of(domain, value)
        if edge is None or any(limit == value for _, limit in known[name].bounds):
            continue
        place = f"the {edge} of its grid"
        if isinstance(domain, Range):
            end = "lower" if edge == "smallest" else "upper"
            place = f"at the {end} end of its range"
        direction = "smaller" if edge == "smallest" else "larger"
        sentences.append(
            f"{algorithm_name(experiment.algorithm)}: the chosen {name} {value:g} is {place}: try "
            f"{direction} values."
        )
    return sentences


def size(space: SearchSpace) -> float:
    """Return the number of points of a space."""
    return math.prod(domain.size for domain in space.values())


def with_point(experiment: Experiment, point: Point) -> Experiment:
    """Replace the settings that a point names.

    Args:
        experiment: The experiment.
        point: A value for each tuned setting.

    Returns:
        The changed experiment.
    """
    values = {name: value for name, value in point.items() if "." not in name}
    algorithm = _algorithm_with_point(experiment.algorithm, point)
    return dataclasses.replace(experiment, algorithm=algorithm, **values)


def _algorithm_with_point(algorithm: Algorithm, point: Point) -> Algorithm:
    def with_settings(layer: Algorithm) -> Algorithm:
        name = named_layers(layer)[0][0]
        changes = {}
        for key, value in point.items():
            layer_name, _, setting = key.rpartition(".")
            if layer_name == name:
                changes[setting] = value
        return dataclasses.replace(layer, **changes)

    return algorithm.map_layers(with_settings)


def space_faults(
    space: SearchSpace, experiments: Sequence[Experiment], num_trials: int, lists_only: bool
) -> list[str]:
    """Return why a space cannot give every algorithm the same number of different trials.

    Args:
        space: The search space.
        experiments: One experiment per algorithm.
        num_trials: Number of trials per algorithm.
        lists_only: Whether ranges are not allowed, as in a grid.

    Returns:
        The faults, each with its remedy.
    """
    faults = list[str]()
    used = {name for experiment in experiments for name in space_of(space, experiment)}
    unused = [name for name in space if name not in used]
    if unused:
        faults.append(
            f"space: no algorithm has the setting {', '.join(unused)}: remove it, or add an "
            "algorithm that has it."
        )
    ranges = [name for name, domain in space.items() if isinstance(domain, Range)]
    if lists_only and ranges:
        faults.append(
            f"a grid needs lists of values, but {', '.join(ranges)} is a range: "
            "set --search random."
        )
    for experiment in experiments:
        num_points = size(space_of(space, experiment))
        if num_points < num_trials:
            name = algorithm_name(experiment.algorithm)
            faults.append(
                f"{name} has {num_points:g} different settings to try, "
                f"fewer than {num_trials} trials: budgets would not be equal. Add values, or set "
                f"--trials {num_points:g} or less."
            )
    return faults


def points(space: SearchSpace, seed: int, tried: Sequence[Point] = ()) -> Iterator[Point]:
    """Draw random points without repetition.

    A setting that several algorithms have is drawn equally for all of them.

    Args:
        space: The search space.
        seed: Seed of the search.
        tried: Points to leave out.

    Yields:
        Different points.

    Raises:
        ConfigError: `MAX_DRAWS` draws did not give another point.
    """
    seen = {tuple(point.items()) for point in tried}
    for start in range(0, MAX_DRAWS, DRAWS_PER_BATCH):
        indices = torch.arange(start, start + DRAWS_PER_BATCH)
        fractions = {
            name: rng.uniform(seed, f"sweep/{name}", 0, indices, ()).tolist() for name in space
        }
        for row in range(DRAWS_PER_BATCH):
            point = {name: domain.at(fractions[name][row]) for name, domain in space.items()}
            key = tuple(point.items())
            if key not in seen:
                seen.add(key)
                yield point
    raise ConfigError(
        [
            f"space: only {len(seen)} different points of {', '.join(space)} were found: widen "
            "it, or lower --trials."
        ]
    )


def corner_points(space: SearchSpace, seed: int) -> Iterator[Point]:
    """Vary one setting of a random point at a time, to check a space before the first trial.

    Args:
        space: The search space.
        seed: Seed of the search.

    Yields:
        The point with each value of a list, and with both ends of a range.
    """
    base = next(points(space, seed))
    for name, domain in space.items():
        for value in domain.extremes():
            yield base | {name: value}


def grid(space: SearchSpace, num_trials: int, seed: int) -> list[Point]:
    """Return the points of a grid in order.

    Args:
        space: The search space; every domain is a list of values.
        num_trials: Maximal number of points; a larger grid is sampled randomly.
        seed: Seed of the search.

    Returns:
        The points; the last setting varies fastest.
    """
    lists = [domain.values for domain in space.values() if isinstance(domain, Choice)]
    if math.prod(len(values) for values in lists) > num_trials:
        chosen = list(itertools.islice(points(space, seed), num_trials))
        orders = [{value: index for index, value in enumerate(values)} for values in lists]
        return sorted(
            chosen,
            key=lambda point: [
                order[value] for order, value in zip(orders, point.values(), strict=True)
            ],
        )
    return [dict(zip(space, values, strict=True)) for values in itertools.product(*lists)]
