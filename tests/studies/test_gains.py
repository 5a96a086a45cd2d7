"""Tests of what `fedcog list algorithms` says a method is best for."""

import json
import math
import statistics
from pathlib import Path

import pytest

from fedcog.algorithms import ALGORITHMS
from fedcog.studies.paper.gains import Gain, best_for, measured_gains
from tests.support.paths import REPO

FOLDER = REPO / "results" / "cifar10-label-skew-2-classes-each"


def last_accuracies(folder: Path, algorithm: str) -> dict[int, float]:
    """Read the last accuracies of a method's 70 rounds with its defaults, by seed."""
    for file in folder.glob(f"{algorithm}-*.jsonl"):
        first, *results = [json.loads(line) for line in file.read_text().splitlines()]
        settings = first["settings"]
        is_plain = (settings["clients"], settings["participation"]) == (10, 1.0)
        if first["rounds"] == 70 and is_plain and settings["local_steps"] == 400:
            return {one["seed"]: 100 * one["accuracy"][-1] for one in results}
    raise FileNotFoundError(algorithm)


def test_gain_is_the_mean_difference_with_students_interval() -> None:
    gain = next(
        one for one in measured_gains(REPO / "results")["fedcm"] if one.setting.endswith("NIID-2")
    )
    fedcm = last_accuracies(FOLDER, "fedcm")
    fedacg = last_accuracies(FOLDER, "fedacg")
    other = next(
        one for one in measured_gains(REPO / "results")["fedacg"] if one.setting.endswith("NIID-2")
    )
    # Both are compared with the same FedAvg, so their difference needs no FedAvg.
    between = statistics.fmean(fedcm[seed] - fedacg[seed] for seed in (0, 1, 2))
    assert gain.mean - other.mean == pytest.approx(between, abs=0.011)
    assert gain.is_clear and gain.half_width > 0


def test_only_intervals_above_zero_are_named(tmp_path: Path) -> None:
    spread = [1.0, 2.0, 3.0]
    half_width = 4.303 * statistics.stdev(spread) / math.sqrt(3)
    gains = {
        "fedlc": [Gain("CIFAR-10, NIID-1", 2.6, half_width), Gain("CIFAR-10, NIID-2", 2.4, 2.5)],
        "moon": [Gain("CIFAR-10, NIID-1", 2.4, half_width)],
    }
    assert best_for("fedlc", gains) == "Dirichlet 0.1 (+2.6)"
    assert best_for("moon", gains) == "no clear gain"
    assert best_for("krum", gains) == "not measured"
    assert best_for("fedavg", gains) == "the baseline"
    assert measured_gains(tmp_path) == {name: [] for name in ALGORITHMS}
