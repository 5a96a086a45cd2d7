"""Which settings are tried next: all of a grid, random ones, or what Optuna makes of those that were tried."""

import importlib.util
import itertools
from collections.abc import Sequence
from typing import Literal, get_args

from fedcog import streams
from fedcog.experiments.space import Choice, Point, Space, grid, points
from fedcog.settings import unknown

Search = Literal["grid", "random", "optuna"]


def missing(search: Search) -> list[str]:
    """What a search lacks here, with the remedy; or what there is instead of it."""
    if search not in get_args(Search):
        return [unknown("search", str(search), get_args(Search))]
    if search == "optuna" and importlib.util.find_spec("optuna") is None:
        return ["--search optuna needs Optuna: pip install 'fedcog[optuna]'."]
    return []


def ahead(search: Search, space: Space, trials: int, seed: int) -> list[Point] | None:
    """All points, where they do not hang on what comes of each other."""
    if search == "grid":
        return grid(space, trials, seed)
    return list(itertools.islice(points(space, seed), trials)) if search == "random" else None


def after(space: Space, done: Sequence[tuple[Point, float]], trials: int, seed: int) -> Point:
    """What Optuna's TPE would try next, given the points that were tried and what each came to.

    It is a function of its arguments: a new study is told what was tried, so that nothing but results is ever kept. The
    first quarter of so many trials (ten at most) is random search's, and a point that was tried gives way to a random
    one.
    """
    tried = [point for point, _ in done]
    if len(done) < min(10, max(2, trials // 4)):
        return next(points(space, seed, tried))
    import optuna  # takes a second to load

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    low, _ = streams.key(seed, f"sweep/optuna/{len(done)}")
    sampler = optuna.samplers.TPESampler(seed=low, n_startup_trials=1)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    shapes: dict[str, optuna.distributions.BaseDistribution] = {
        key: optuna.distributions.CategoricalDistribution(one.values)
        if isinstance(one, Choice)
        else optuna.distributions.IntDistribution(int(one.low), int(one.high), log=one.log)
        if one.whole
        else optuna.distributions.FloatDistribution(one.low, one.high, log=one.log)
        for key, one in space.items()
    }
    study.add_trials(
        [optuna.trial.create_trial(params=dict(point), distributions=shapes, value=value) for point, value in done]
    )
    asked = study.ask(shapes).params
    point = {
        key: asked[key] if isinstance(one, Choice) or one.whole else _four(asked[key], one.low, one.high)
        for key, one in space.items()
    }
    return next(points(space, seed, tried)) if point in tried else point


def _four(value: float, low: float, high: float) -> float:
    """Four figures are enough."""
    return min(max(float(f"{value:.4g}"), low), high)
