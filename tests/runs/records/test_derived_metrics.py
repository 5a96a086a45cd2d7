"""Tests of the metrics besides accuracy: cost to a target, fairness, forgetting."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import fedcog
from fedcog.cli.main import main
from fedcog.report import page
from fedcog.runs.config.experiment import Experiment
from fedcog.runs.records.derived_metrics import Cost, cost_to, fairness, forgetting, median_cost
from fedcog.runs.records.recorded_run import Run


def make_run(scores: list[float | None], **local: list[float | None]) -> Run:
    """A run in which every client receives 10 bytes and sends 5, in rounds of two seconds.

    Args:
        scores: Accuracy of every round; None if the round was not evaluated.
        local: Values of every client by name, the same in every round; None if missing.
    """
    num_clients = max((len(values) for values in local.values()), default=2)
    lines = []
    for round, score in enumerate(scores, 1):
        clients: list[dict[str, float]] = [
            {"client": client, "down": 10, "up": 5} for client in range(num_clients)
        ]
        for name, values in local.items():
            for entry, value in zip(clients, values, strict=True):
                if value is not None:
                    entry[name] = value
        line: dict[str, Any] = {"round": round, "local": clients, "seconds": {"total": 2.0}}
        if score is not None:
            line["accuracy"] = score
        lines.append(line)
    return Run(Path("nowhere"), Experiment(rounds=len(scores)), lines)


def test_cost_to_a_target() -> None:
    run = make_run([0.1, None, 0.5, 0.4, 0.6])
    assert cost_to(run, 0.5) == Cost(3, 3 * 2 * 15, 6.0)
    assert cost_to(run, 0.6) == Cost(5, 5 * 2 * 15, 10.0)
    assert cost_to(run, 0.7) is None


def test_median_cost_counts_failed_seeds_as_infinite() -> None:
    """Without failed seeds, an algorithm would look faster the more of its seeds fail."""
    quick = make_run([0.5, 0.6])
    slow = make_run([0.1, 0.1, 0.1, 0.5])
    never = make_run([0.1, 0.2])
    assert median_cost([quick, slow], 0.5) == ([2.5, 2.5 * 30, 5.0], 2)
    assert median_cost([quick, slow, never], 0.5) == ([4, 4 * 30, 8.0], 2)
    assert median_cost([quick, never, never], 0.5) == ([math.inf] * 3, 1)


def test_fairness_over_clients() -> None:
    accuracies: list[float | None] = [0.1, 0.2, *[0.5] * 9, 0.9]
    summary = fairness(make_run([0.5], own_accuracy=accuracies))
    assert summary is not None
    assert (summary.mean, summary.clients) == (pytest.approx(5.7 / 12), 12)
    assert summary.worst == pytest.approx(0.15), "the worst tenth of twelve clients is two clients"
    assert summary.deviation == pytest.approx(float(torch.tensor(accuracies).std(correction=0)))
    assert fairness(make_run([0.5])) is None


def test_forgetting_averages_the_loss_on_absent_classes() -> None:
    before = [0.5, 0.4, None]
    after = [0.2, 0.4, 0.9]
    assert forgetting(
        make_run([0.5], absent_accuracy_before=before, absent_accuracy=after)
    ) == pytest.approx(0.15)
    assert forgetting(make_run([0.5])) is None


@pytest.mark.slow
def test_report_shows_forgetting_fairness_and_cost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = Experiment(partition="label-skew", clients=5, rounds=4, local_steps=40)
    run = fedcog.run(config, tmp_path / "run", report=False)
    forgotten = forgetting(run)
    client_fairness = fairness(run)
    assert forgotten is not None and forgotten > 0.1
    assert client_fairness is not None and client_fairness.worst <= client_fairness.mean
    html = page([tmp_path / "run"], target=run.best)
    assert "<h3>Fairness</h3>" in html and "To the target" in html
    assert f"{100 * client_fairness.worst:.2f}" in html and f"{100 * forgotten:.2f}" in html
    cost = cost_to(run, run.best)
    assert cost is not None and f"{cost.bytes / 1e6:,.1f}" in html
    assert "To the target" not in page([tmp_path / "run"], target=1.0)
    assert main(["report", str(tmp_path / "run"), "--target", f"{run.best}"]) == 0
    assert (
        f": {cost.round} rounds, {cost.bytes / 1e6:,.1f} MB, {cost.seconds:,.1f} s"
        in capsys.readouterr().out
    )
