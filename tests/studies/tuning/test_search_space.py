"""Spaces of settings: what is offered is what is tried, each point once, the same for all and every
time.
"""

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
PLACES = st.floats(0, 1, exclude_min=True, exclude_max=True)


@st.composite
def ranges(draw: st.DrawFn) -> Range:
    log = draw(st.booleans())
    if draw(st.booleans()):
        low = draw(st.integers(1, 1000))
        return Range(low, low + draw(st.integers(1, 1000)), log, is_integer=True)
    low, high = sorted((draw(FLOATS), draw(FLOATS)))
    return Range(low, 2 * high, log)


@given(ranges(), PLACES)
def test_a_range_keeps_its_ends_and_its_kind(one: Range, place: float) -> None:
    value = one.at(place)
    assert one.low <= value <= one.high
    assert type(value) is (int if one.is_integer else float)
    if not one.is_integer and one.low < value < one.high:
        assert float(f"{value:.4g}") == value


@given(ranges(), PLACES, PLACES)
def test_a_range_is_in_order(one: Range, first: float, second: float) -> None:
    low, high = sorted((first, second))
    assert one.at(low) <= one.at(high)


def test_a_range_is_even_or_even_by_logarithm() -> None:
    even = Range(0.001, 0.1)
    by_log = Range(0.001, 0.1, log=True)
    places = [(number + 0.5) / 1000 for number in range(1000)]
    assert sum(even.at(place) < 0.01 for place in places) == pytest.approx(91, abs=2)
    assert sum(by_log.at(place) < 0.01 for place in places) == pytest.approx(500, abs=2)
    dice = [Range(1, 6, is_integer=True).at(place) for place in places]
    assert {number: dice.count(number) // 10 for number in dice} == dict.fromkeys(range(1, 7), 16)


@given(st.lists(st.integers(), min_size=1, max_size=20, unique=True))
def test_a_choice_gives_each_value_its_share(values: list[int]) -> None:
    one = Choice(tuple(values))
    assert [one.at((place + 0.5) / len(values)) for place in range(len(values))] == values
    assert one.at(1.0) == values[-1]


@given(st.integers(0, 2**40), st.integers(1, 12), st.integers(1, 4), st.integers(1, 4))
def test_random_points_are_distinct_and_the_same_again(
    seed: int, trials: int, first: int, second: int
) -> None:
    offered: search_space.SearchSpace = {
        "a": Choice(tuple(range(first))),
        "b": Range(1, second + 1, is_integer=True),
    }
    trials = min(trials, int(search_space.size(offered)))
    points = list(itertools.islice(search_space.points(offered, seed), trials))
    assert len({tuple(point.items()) for point in points}) == trials
    assert points == list(itertools.islice(search_space.points(offered, seed), trials))
    untried = (
        next(search_space.points(offered, seed, points), None)
        if trials < search_space.size(offered)
        else None
    )
    assert untried not in points


@given(
    st.integers(0, 2**40), st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(1, 30)
)
def test_a_grid_is_whole_or_a_part_in_its_order(seed: int, sizes: list[int], trials: int) -> None:
    offered: search_space.SearchSpace = {
        f"s{place}": Choice(tuple(range(size))) for place, size in enumerate(sizes)
    }
    whole = [
        dict(zip(offered, values, strict=True)) for values in itertools.product(*map(range, sizes))
    ]
    found = search_space.grid(offered, trials, seed)
    assert len(found) == min(trials, len(whole))
    places = [whole.index(point) for point in found]
    assert places == sorted(set(places))
    if trials >= len(whole):
        assert found == whole


def test_what_methods_share_is_drawn_alike() -> None:
    read = search_space.read_space(
        {"lr": {"low": 0.001, "high": 1, "log": True}, "fedprox": {"mu": {"low": 0, "high": 1}}}
    )
    bare, prox = (
        search_space.space_of(read, Experiment(algorithm=one)) for one in (FedAvg(), FedProx())
    )
    assert list(bare) == ["lr"] and list(prox) == ["lr", "fedprox.mu"]
    first, second = (search.planned_points("random", one, 8, 3) for one in (bare, prox))
    assert (
        first and second and [point["lr"] for point in first] == [point["lr"] for point in second]
    )


def test_points_are_put_into_the_layer_they_name() -> None:
    one = Experiment(algorithm=make_algorithm("fedprox+fedcog"), lr=0.5)
    done = search_space.with_point(one, {"lr": 0.1, "fedprox.mu": 0.7, "fedcog.steps": 3})
    assert done.lr == 0.1 and isinstance(done.algorithm, FedCOG) and done.algorithm.steps == 3
    assert done.algorithm.inner == FedProx(mu=0.7)
    assert (
        search_space.with_point(
            done, {"lr": 0.5, "fedprox.mu": FedProx().mu, "fedcog.steps": FedCOG().steps}
        )
        == one
    )


@pytest.mark.parametrize(
    ("values", "words"),
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
def test_what_is_no_space_is_told(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as told:
        search_space.read_space(values)
    assert words in str(told.value)


def test_budgets_that_cannot_be_equal_are_refused() -> None:
    read = search_space.read_space({"lr": [0.1, 0.2], "fedprox": {"mu": [0.1, 1, 2]}})
    both = [Experiment(algorithm=FedAvg()), Experiment(algorithm=FedProx())]
    assert search_space.space_faults(read, both, 2, lists_only=True) == []
    (fault,) = search_space.space_faults(read, both, 3, lists_only=True)
    assert (
        "fedavg has 2 different settings to try, fewer than 3 trials" in fault
        and "--trials 2" in fault
    )
    (fault,) = search_space.space_faults(read, both[:1], 2, lists_only=True)
    assert "no algorithm has the setting fedprox.mu" in fault
    (fault,) = search_space.space_faults(
        search_space.read_space({"lr": {"low": 0.1, "high": 1}}), both, 3, lists_only=True
    )
    assert "a grid needs lists" in fault


def test_a_range_too_narrow_for_its_trials_is_told_and_ends() -> None:
    narrow: search_space.SearchSpace = {"lr": Range(0.1, 0.1001)}
    with pytest.raises(ConfigError, match="2 different points of lr"):
        search.planned_points("random", narrow, 5, 0)


def test_optuna_learns_from_what_was_tried_and_repeats_itself() -> None:
    pytest.importorskip("optuna")
    offered: search_space.SearchSpace = {
        "lr": Range(1e-4, 1.0, log=True),
        "steps": Range(1, 40, is_integer=True),
        "kind": Choice(("sgd", "adam")),
    }

    def value(point: search_space.Point) -> float:
        return (
            -abs(math.log10(point["lr"]) + 2)
            - abs(point["steps"] - 20) / 20
            - (point["kind"] == "adam")
        )

    def tried(seed: int) -> list[tuple[search_space.Point, float]]:
        done: list[tuple[search_space.Point, float]] = []
        while len(done) < 30:
            point = search.next_point(offered, done, 30, seed)
            done.append((point, value(point)))
        return done

    learnt = tried(0)
    assert learnt == tried(0) != tried(1)
    assert len({tuple(point.items()) for point, _ in learnt}) == 30
    assert all(1 <= point["steps"] <= 40 and 1e-4 <= point["lr"] <= 1 for point, _ in learnt)
    assert all(type(point["steps"]) is int and type(point["lr"]) is float for point, _ in learnt)
    aimless = [value(point) for point in search.planned_points("random", offered, 30, 0) or []]
    assert [point for point, _ in learnt[:7]] == (
        search.planned_points("random", offered, 30, 0) or []
    )[:7]
    late = [value for _, value in learnt[15:]]
    assert (
        sum(late) / len(late) > sum(aimless) / len(aimless) + 0.3
    )  # it looks where it is worth it
    few: search_space.SearchSpace = {"kind": Choice(("sgd", "adam", "adamw"))}
    done: list[tuple[search_space.Point, float]] = []
    for _ in range(3):  # a point that was tried gives way
        done.append((search.next_point(few, done, 3, 0), 1.0))
    assert len({point["kind"] for point, _ in done}) == 3


@pytest.mark.parametrize("kind", ["random", "grid", "optuna"])
def test_what_a_method_cannot_do_is_told_before_the_first_trial(kind: search.Search) -> None:
    if kind == "optuna":
        pytest.importorskip("optuna")
    scaffold = [Experiment(algorithm=make_algorithm("scaffold"))]
    offered = {"optimizer": ["sgd", "adam"], "local_steps": [1, 2, 3, 4, 5, 6, 7, 8]}
    with pytest.raises(ConfigError, match="scaffold derives the mean gradient"):
        plan_sweep(scaffold, offered, search=kind, trials=16 if kind != "optuna" else 8)
