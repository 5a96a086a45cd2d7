import dataclasses
import statistics
from pathlib import Path
from typing import Any

import pytest

from fedcog import Experiment, FedCOG, FedProx, Run
from fedcog.runs.records.summary import group, spread


def run(accuracies: list[float], **changes: Any) -> Run:
    lines = [
        {"round": number + 1, "accuracy": accuracy} for number, accuracy in enumerate(accuracies)
    ]
    return Run(Path(f"{changes}"), dataclasses.replace(Experiment(), **changes), lines)


def test_last_and_best_over_seeds() -> None:
    (found,) = group([run([0.1, 0.5, 0.4], seed=0), run([0.2, 0.3, 0.6], seed=1)])
    assert found.label == "fedavg"
    assert found.last.mean == pytest.approx(0.5) and found.last.deviation == pytest.approx(
        statistics.stdev([0.4, 0.6])
    )
    assert found.best.mean == pytest.approx(0.55)
    assert found.last.percent() == "50.00 ± 14.14"
    assert spread([0.5]).percent() == "50.00"


def test_groups_are_told_apart_by_name_and_else_by_what_differs() -> None:
    algorithms = {"algorithm": FedProx()}, {"algorithm": FedCOG(FedProx())}, {}
    assert [found.label for found in group([run([0.1], **one) for one in algorithms])] == [
        "fedprox",
        "fedprox+fedcog",
        "fedavg",
    ]
    labels = [found.label for found in group([run([0.1], lr=lr) for lr in (0.1, 0.2)])]
    assert labels == ["fedavg (lr 0.1)", "fedavg (lr 0.2)"]
    labels = [
        found.label for found in group([run([0.1], algorithm=FedProx(mu=mu)) for mu in (0.1, 0.2)])
    ]
    assert labels == ["fedprox (fedprox.mu 0.1)", "fedprox (fedprox.mu 0.2)"]


def test_runs_that_are_judged_by_different_measures_are_no_group() -> None:
    one = run([0.4])
    other = run([0.5], seed=1)
    other.lines[0]["o_f1"] = other.lines[0].pop("accuracy")
    found = group([one, other])
    assert [(each.label, each.last.mean) for each in found] == [
        ("fedavg, accuracy", 0.4),
        ("fedavg, O-F1", 0.5),
    ]


def test_a_run_that_is_not_judged_yet_stays_with_its_like() -> None:
    one = run([0.4])
    other = run([], seed=1)
    one.lines[0]["o_f1"] = one.lines[0].pop("accuracy")
    assert [[len(each.runs), each.label] for each in group([other, one])] == [[2, "fedavg"]]
