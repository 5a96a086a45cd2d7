"""Tests of search spaces: ranges, choices, grids, random points, Optuna, and faults."""

import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcog import Experiment, FedAvg, FedCOG, FedProx, make_algorithm
from fedcog.core.settings import ConfigError
from fedcog.studies.tuning import search, search_space
from fedcog.studies.tuning.search_space import Choice, Range
from fedcog.studies.tuning.sweep import plan_sweep

FLOATS = st.floats(1e-6, 1e6).map(lambda value: float(f"{value:.4g}"))
FRACTIONS = st.floats(0, 1, exclude_min=True, exclude_max=True)


@st.composite
def ranges(draw: st.DrawFn) -> Range:
    log = draw(st.booleans())
    if draw(st.booleans()):
        low = draw(st.integers(1, 1000))
        return Range(low, low + draw(st.integers(1, 1000)), log, is_integer=True)
    low, high = sorted((draw(FLOATS), draw(FLOATS)))
    return Range(low, 2 * high, log)


@given(ranges(), FRACTIONS)
def test_range_keeps_its_bounds_and_type(value_range: Range, fraction: float) -> None:
    value = value_range.at(fraction)
    assert value_range.low <= value <= value_range.high
    assert type(value) is (int if value_range.is_integer else float)
    if not value_range.is_integer and value_range.low < value < value_range.high:
        assert float(f"{value:.4g}") == value


@given(ranges(), FRACTIONS, FRACTIONS)
def test_range_is_monotonic(value_range: Range, first: float, second: float) -> None:
    low, high = sorted((first, second))
    assert value_range.at(low) <= value_range.at(high)


def test_range_is_uniform_or_log_uniform() -> None:
    uniform = Range(0.001, 0.1)
    log_uniform = Range(0.001, 0.1, log=True)
    fractions = [(number + 0.5) / 1000 for number in range(1000)]
    assert sum(uniform.at(fraction) < 0.01 for fraction in fractions) == pytest.approx(91, abs=2)
    assert sum(log_uniform.at(fraction) < 0.01 for fraction in fractions) == pytest.approx(
        500, abs=2
    )
    dice = [Range(1, 6, is_integer=True).at(fraction) for fraction in fractions]
    assert {number: dice.count(number) // 10 for number in dice} == dict.fromkeys(range(1, 7), 16)


@pytest.mark.parametrize(
    ("domain", "value", "edge"),
    [
        (Choice((0.01, 0.03, 0.1)), 0.1, "largest"),
        (Choice((0.1, 0.03, 0.01)), 0.01, "smallest"),
        (Choice((0.01, 0.03, 0.1)), 0.03, None),
        (Choice((1, 2)), 2, "largest"),
        (Choice((0.1,)), 0.1, None),
        (Choice(("sgd", "adam")), "sgd", None),
        (Choice((True, False)), True, None),
        (Range(0, 1), 0.96, "largest"),
        (Range(0, 1), 0.94, None),
        (Range(0, 1), 0.04, "smallest"),
        (Range(0.001, 1, log=True), 0.8, "largest"),  # 10 ** (-3 * 0.05) = 0.71
        (Range(0.001, 1, log=True), 0.7, None),
        (Range(0.001, 1, log=True), 0.0014, "smallest"),  # 0.001 * 10 ** (3 * 0.05) = 0.0014125
        (Range(0.001, 1, log=True), 0.0015, None),
        (Range(1, 100, is_integer=True), 100, "largest"),
    ],
)
def test_edges_are_ends_of_lists_and_the_outer_5_percent_of_ranges(
    domain: Choice | Range, value: Any, edge: str | None
) -> None:
    assert search_space.edge_of(domain, value) == edge


def test_edge_sentences_name_algorithm_setting_and_remedy() -> None:
    experiment = Experiment(FedProx())
    space = search_space.read_space(
        {
            "lr": [0.01, 0.03, 0.1],
            "momentum": [0.0, 0.9],
            "weight_decay": {"low": 0.001, "high": 0.1, "log": True},
            "fedprox": {"mu": [0.01, 0.1, 1]},
        }
    )
    point = {"lr": 0.1, "momentum": 0.0, "weight_decay": 0.001, "fedprox.mu": 0.1}
    assert search_space.edge_sentences(experiment, space, point) == [
        "fedprox: the chosen lr 0.1 is the largest of its grid: try larger values.",
        "fedprox: the chosen weight_decay 0.001 is at the lower end of its range: try smaller "
        "values.",
    ], "no momentum is below 0"


@given(st.lists(st.integers(), min_size=1, max_size=20, unique=True))
def test_choice_gives_each_value_an_equal_share(values: list[int]) -> None:
    choice = Choice(tuple(values))
    assert [choice.at((i + 0.5) / len(values)) for i in range(len(values))] == values
    assert choice.at(1.0) == values[-1]


@given(st.integers(0, 2**40), st.integers(1, 12), st.integers(1, 4), st.integers(1, 4))
def test_random_points_are_distinct_and_reproducible(
    seed: int, trials: int, first: int, second: int
) -> None:
    space: search_space.SearchSpace = {
        "a": Choice(tuple(range(first))),
        "b": Range(1, second + 1, is_integer=True),
    }
    trials = min(trials, int(search_space.size(space)))
    points = list(itertools.islice(search_space.points(space, seed), trials))
    assert len({tuple(point.items()) for point in points}) == trials
    assert points == list(itertools.islice(search_space.points(space, seed), trials))
    untried = None
    if trials < search_space.size(space):
        untried = next(search_space.points(space, seed, points), None)
    assert untried not in points


@given(
    st.integers(0, 2**40), st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(1, 30)
)
def test_grid_is_complete_or_an_ordered_subset(seed: int, sizes: list[int], trials: int) -> None:
    space: search_space.SearchSpace = {
        f"s{i}": Choice(tuple(range(size))) for i, size in enumerate(sizes)
    }
    full_grid = [
        dict(zip(space, values, strict=True)) for values in itertools.product(*map(range, sizes))
    ]
    points = search_space.grid(space, trials, seed)
    assert len(points) == min(trials, len(full_grid))
    positions = [full_grid.index(point) for point in points]
    assert positions == sorted(set(positions))
    if trials >= len(full_grid):
        assert points == full_grid


def test_algorithms_share_points_of_shared_settings() -> None:
    settings = search_space.read_space(
        {"lr": {"low": 0.001, "high": 1, "log": True}, "fedprox": {"mu": {"low": 0, "high": 1}}}
    )
    fedavg_space = search_space.space_of(settings, Experiment(algorithm=FedAvg()))
    fedprox_space = search_space.space_of(settings, Experiment(algorithm=FedProx()))
    assert list(fedavg_space) == ["lr"] and list(fedprox_space) == ["lr", "fedprox.mu"]
    fedavg_points = search.planned_points("random", fedavg_space, 8, 3)
    fedprox_points = search.planned_points("random", fedprox_space, 8, 3)
    assert (
        fedavg_points
        and fedprox_points
        and [point["lr"] for point in fedavg_points] == [point["lr"] for point in fedprox_points]
    )


def test_point_changes_the_layer_it_names() -> None:
    experiment = Experiment(algorithm=make_algorithm("fedprox+fedcog"), lr=0.5)
    changed = search_space.with_point(experiment, {"lr": 0.1, "fedprox.mu": 0.7, "fedcog.steps": 3})
    assert (
        changed.lr == 0.1 and isinstance(changed.algorithm, FedCOG) and changed.algorithm.steps == 3
    )
    assert changed.algorithm.inner == FedProx(mu=0.7)
    assert (
        search_space.with_point(
            changed, {"lr": 0.5, "fedprox.mu": FedProx().mu, "fedcog.steps": FedCOG().steps}
        )
        == experiment
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lr": [0.1, 0.1]}, "lr has a value twice"),
        ({"lr": []}, "lr needs 1 to 1000 values"),
        ({"lr": [0.1, -1]}, "lr needs a number > 0"),
        ({"lr": 0.1}, "lr needs a list of values or a range"),
        ({"lr": {"low": 0.1}}, "missing key high"),
        ({"lr": {"low": 0.1, "high": 1, "step": 2}}, "unknown key step"),
        ({"lr": {"low": 1, "high": 0.1}}, "low must be below high"),
        ({"lr": {"low": 0.1, "high": math.inf}}, "(high) needs a number"),
        ({"momentum": {"low": 0, "high": 0.5, "log": True}}, "true only if low is above 0"),
        ({"optimizer": {"low": 0, "high": 1}}, "is not a number"),
        ({"local_steps": {"low": 1.5, "high": 3}}, "(low) needs an integer"),
        ({"seed": [1, 2]}, "seed is the same for all"),
        ({"partition": ["iid"]}, "partition is the same for all"),
        ({"rounds": [1, 2]}, "rounds is the same for all"),
        ({"learning_rate": [1]}, "unknown setting 'learning_rate'"),
        ({"fedprox": [1]}, "'fedprox' is an algorithm"),
        ({"fedprox": {"my": [1]}}, "unknown setting 'fedprox.my'"),
        ({}, "names no setting to tune"),
    ],
)
def test_invalid_search_space_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        search_space.read_space(values)
    assert message in str(caught.value)


def test_unequal_trial_counts_are_refused() -> None:
    settings = search_space.read_space({"lr": [0.1, 0.2], "fedprox": {"mu": [0.1, 1, 2]}})
    experiments = [Experiment(algorithm=FedAvg()), Experiment(algorithm=FedProx())]
    assert search_space.space_faults(settings, experiments, 2, lists_only=True) == []
    (fault,) = search_space.space_faults(settings, experiments, 3, lists_only=True)
    assert (
        "fedavg has 2 different settings to try, fewer than 3 trials" in fault
        and "--trials 2" in fault
    )
    (fault,) = search_space.space_faults(settings, experiments[:1], 2, lists_only=True)
    assert "no algorithm has the setting fedprox.mu" in fault
    (fault,) = search_space.space_faults(
        search_space.read_space({"lr": {"low": 0.1, "high": 1}}), experiments, 3, lists_only=True
    )
    assert "a grid needs lists" in fault


def test_range_too_narrow_for_its_trials_is_refused() -> None:
    narrow: search_space.SearchSpace = {"lr": Range(0.1, 0.1001)}
    with pytest.raises(ConfigError, match="2 different points of lr"):
        search.planned_points("random", narrow, 5, 0)


def test_optuna_improves_with_trials_and_is_reproducible() -> None:
    pytest.importorskip("optuna")
    space: search_space.SearchSpace = {
        "lr": Range(1e-4, 1.0, log=True),
        "steps": Range(1, 40, is_integer=True),
        "kind": Choice(("sgd", "adam")),
    }

    def score(point: search_space.Point) -> float:
        return (
            -abs(math.log10(point["lr"]) + 2)
            - abs(point["steps"] - 20) / 20
            - (point["kind"] == "adam")
        )

    def run_trials(seed: int) -> list[tuple[search_space.Point, float]]:
        done: list[tuple[search_space.Point, float]] = []
        while len(done) < 30:
            point = search.next_point(space, done, 30, seed)
            done.append((point, score(point)))
        return done

    trials = run_trials(0)
    assert trials == run_trials(0) != run_trials(1)
    assert len({tuple(point.items()) for point, _ in trials}) == 30
    assert all(1 <= point["steps"] <= 40 and 1e-4 <= point["lr"] <= 1 for point, _ in trials)
    assert all(type(point["steps"]) is int and type(point["lr"]) is float for point, _ in trials)
    random_scores = [score(point) for point in search.planned_points("random", space, 30, 0) or []]
    assert [point for point, _ in trials[:7]] == (
        search.planned_points("random", space, 30, 0) or []
    )[:7]
    late_scores = [score for _, score in trials[15:]]
    # Later points score better than random points.
    assert sum(late_scores) / len(late_scores) > sum(random_scores) / len(random_scores) + 0.3
    small_space: search_space.SearchSpace = {"kind": Choice(("sgd", "adam", "adamw"))}
    done: list[tuple[search_space.Point, float]] = []
    for _ in range(3):  # no point is suggested twice
        done.append((search.next_point(small_space, done, 3, 0), 1.0))
    assert len({point["kind"] for point, _ in done}) == 3


@pytest.mark.parametrize("kind", ["random", "grid", "optuna"])
def test_unsupported_settings_are_refused_before_the_first_trial(kind: search.Search) -> None:
    if kind == "optuna":
        pytest.importorskip("optuna")
    scaffold = [Experiment(algorithm=make_algorithm("scaffold"))]
    space = {"optimizer": ["sgd", "adam"], "local_steps": [1, 2, 3, 4, 5, 6, 7, 8]}
    with pytest.raises(ConfigError, match="scaffold derives the mean gradient"):
        plan_sweep(scaffold, space, search=kind, trials=16 if kind != "optuna" else 8)
