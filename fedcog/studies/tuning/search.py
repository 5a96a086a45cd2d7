"""Search strategies: a grid, random search, or Optuna's TPE."""

import importlib.util
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, get_args

from fedcog.core import rng
from fedcog.core.settings import unknown_name
from fedcog.studies.tuning.search_space import Choice, Point, Range, SearchSpace, grid, points

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

Search = Literal["grid", "random", "optuna"]

MIN_RANDOM_TRIALS = 2
MAX_RANDOM_TRIALS = 10
"""Bounds of the number of random trials before TPE begins; in between, a quarter of all trials."""


def search_faults(search: Search) -> list[str]:
    """Return why a search strategy cannot be used, each fault with its remedy."""
    if search not in get_args(Search):
        return [unknown_name("search", str(search), get_args(Search))]
    if search == "optuna" and importlib.util.find_spec("optuna") is None:
        return ["--search optuna needs Optuna: pip install 'fedcog[optuna]'."]
    return []


def planned_points(
    search: Search, space: SearchSpace, num_trials: int, seed: int
) -> list[Point] | None:
    """Return all points of a search that does not depend on results.

    Args:
        search: The search strategy.
        space: The search space.
        num_trials: Number of points.
        seed: Seed of the search.

    Returns:
        The points, or None if the next point depends on the results of earlier ones.
    """
    if search == "grid":
        return grid(space, num_trials, seed)
    if search == "random":
        return list(itertools.islice(points(space, seed), num_trials))
    return None


def next_point(
    space: SearchSpace, done: Sequence[tuple[Point, float]], num_trials: int, seed: int
) -> Point:
    """Return the point that Optuna's TPE proposes next.

    It is a function of its arguments: each call builds a new Optuna study from the finished
    trials, so that only results are stored. The first trials are those of random search. A
    proposal that was tried already is replaced by a random point.

    Args:
        space: The search space.
        done: Finished trials: the point and its score.
        num_trials: Number of trials in total.
        seed: Seed of the search.

    Returns:
        A point that was not tried.
    """
    tried = [point for point, _ in done]
    num_random = min(MAX_RANDOM_TRIALS, max(MIN_RANDOM_TRIALS, num_trials // 4))
    if len(done) < num_random:
        return next(points(space, seed, tried))
    import optuna  # imported here: loading it takes a second

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler_seed, _ = rng.key(seed, f"sweep/optuna/{len(done)}")
    sampler = optuna.samplers.TPESampler(seed=sampler_seed, n_startup_trials=1)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    distributions = {name: _distribution(domain) for name, domain in space.items()}
    study.add_trials(
        [
            optuna.trial.create_trial(params=dict(point), distributions=distributions, value=score)
            for point, score in done
        ]
    )
    proposal = study.ask(distributions).params
    point = {
        name: domain.rounded(proposal[name]) if isinstance(domain, Range) else proposal[name]
        for name, domain in space.items()
    }
    return next(points(space, seed, tried)) if point in tried else point


def _distribution(domain: Choice | Range) -> "BaseDistribution":
    """The Optuna distribution of a domain."""
    from optuna import distributions

    if isinstance(domain, Choice):
        return distributions.CategoricalDistribution(domain.values)
    if domain.is_integer:
        low = int(domain.low)
        return distributions.IntDistribution(low, int(domain.high), log=domain.log)
    return distributions.FloatDistribution(domain.low, domain.high, log=domain.log)
