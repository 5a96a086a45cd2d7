"""Tests of groups of runs over seeds: labels, means and deviations."""

import dataclasses
import statistics
from pathlib import Path
from typing import Any

import pytest

from fedcog import Experiment, FedCOG, FedProx, Run
from fedcog.runs.records.summary import group, spread


def make_run(accuracies: list[float], **changes: Any) -> Run:
    """A run with these accuracies, round by round."""
    lines = [
        {"round": number + 1, "accuracy": accuracy} for number, accuracy in enumerate(accuracies)
    ]
    return Run(Path(f"{changes}"), dataclasses.replace(Experiment(), **changes), lines)


def test_group_averages_last_and_best_over_seeds() -> None:
    (summary,) = group([make_run([0.1, 0.5, 0.4], seed=0), make_run([0.2, 0.3, 0.6], seed=1)])
    assert summary.label == "fedavg"
    assert summary.last.mean == pytest.approx(0.5)
    assert summary.last.deviation == pytest.approx(statistics.stdev([0.4, 0.6]))
    assert summary.best.mean == pytest.approx(0.55)
    assert summary.last.percent() == "50.00 ± 14.14"
    assert spread([0.5]).percent() == "50.00"


def test_labels_leave_out_settings_without_a_value() -> None:
    groups = group([make_run([0.1]), make_run([0.2], indices="parts.json", lr=0.1)])
    assert [one.label for one in groups] == [
        "fedavg (lr 0.01)",
        "fedavg (indices parts.json, lr 0.1)",
    ]


def test_first_run_of_a_repeated_seed_counts() -> None:
    runs = [
        make_run([0.4], checkpoint_every=2, seed=0),
        make_run([0.9], seed=0),
        make_run([0.6], seed=1),
    ]
    with pytest.warns(UserWarning, match="of several runs with seed 0, the first counts"):
        (summary,) = group(runs)
    assert summary.runs == [runs[0], runs[2]] and summary.repeated == [runs[1]]
    assert summary.last == spread([0.4, 0.6])


def test_groups_are_labeled_by_algorithm_or_by_differing_settings() -> None:
    def labels(runs: list[Run]) -> list[str]:
        return [summary.label for summary in group(runs)]

    algorithms = [{"algorithm": FedProx()}, {"algorithm": FedCOG(FedProx())}, {}]
    runs = [make_run([0.1], **changes) for changes in algorithms]
    assert labels(runs) == ["fedprox", "fedprox+fedcog", "fedavg"]
    runs = [make_run([0.1], lr=lr) for lr in (0.1, 0.2)]
    assert labels(runs) == ["fedavg (lr 0.1)", "fedavg (lr 0.2)"]
    runs = [make_run([0.1], algorithm=FedProx(mu=mu)) for mu in (0.1, 0.2)]
    assert labels(runs) == ["fedprox (fedprox.mu 0.1)", "fedprox (fedprox.mu 0.2)"]


def test_runs_with_different_metrics_are_not_grouped() -> None:
    accuracy_run = make_run([0.4])
    f1_run = make_run([0.5], seed=1)
    f1_run.lines[0]["o_f1"] = f1_run.lines[0].pop("accuracy")
    groups = group([accuracy_run, f1_run])
    assert [(summary.label, summary.last.mean) for summary in groups] == [
        ("fedavg, accuracy", 0.4),
        ("fedavg, O-F1", 0.5),
    ]


def test_run_without_scores_joins_the_group_of_its_experiment() -> None:
    scored = make_run([0.4])
    unscored = make_run([], seed=1)
    scored.lines[0]["o_f1"] = scored.lines[0].pop("accuracy")
    assert [[len(summary.runs), summary.label] for summary in group([unscored, scored])] == [
        [2, "fedavg"]
    ]
