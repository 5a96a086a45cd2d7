"""What papers print beside accuracy, by pencil and in a run."""

import math
from pathlib import Path

import pytest
import torch

import fedcog
from fedcog.cli.main import main
from fedcog.report import page
from fedcog.runs.config.experiment import Experiment
from fedcog.runs.records.metrics import Cost, cost_to, fairness, forgetting, median_cost
from fedcog.runs.records.recorded_run import Run


def run(scores: list[float | None], **local: list[float | None]) -> Run:
    """A run whose clients are sent 10 bytes and send 5, in rounds of two seconds."""
    number = max((len(values) for values in local.values()), default=2)
    lines = []
    for round, score in enumerate(scores, 1):
        clients: list[dict[str, float]] = [
            {"client": client, "down": 10, "up": 5} for client in range(number)
        ]
        for name, values in local.items():
            clients = [
                one | ({} if value is None else {name: value})
                for one, value in zip(clients, values, strict=True)
            ]
        told = {} if score is None else {"accuracy": score}
        lines.append({"round": round, "local": clients, "seconds": {"total": 2.0}} | told)
    return Run(Path("nowhere"), Experiment(rounds=len(scores)), lines)


def test_what_a_target_costs() -> None:
    found = run([0.1, None, 0.5, 0.4, 0.6])
    assert cost_to(found, 0.5) == Cost(3, 3 * 2 * 15, 6.0)
    assert cost_to(found, 0.6) == Cost(5, 5 * 2 * 15, 10.0)
    assert cost_to(found, 0.7) is None


def test_what_a_target_costs_a_typical_seed() -> None:
    """A seed that never gets there is slow, and not left out: a method would look the faster the
    more of them fail.
    """
    quick = run([0.5, 0.6])
    slow = run([0.1, 0.1, 0.1, 0.5])
    never = run([0.1, 0.2])
    assert median_cost([quick, slow], 0.5) == ([2.5, 2.5 * 30, 5.0], 2)
    assert median_cost([quick, slow, never], 0.5) == ([4, 4 * 30, 8.0], 2)
    assert median_cost([quick, never, never], 0.5) == ([math.inf] * 3, 1)


def test_how_unequally_clients_fare() -> None:
    own: list[float | None] = [0.1, 0.2, *[0.5] * 9, 0.9]
    found = fairness(run([0.5], own_accuracy=own))
    assert found is not None
    assert (found.mean, found.clients) == (pytest.approx(5.7 / 12), 12)
    assert found.worst == pytest.approx(0.15), "of twelve clients the worst tenth is two"
    assert found.deviation == pytest.approx(float(torch.tensor(own).std(correction=0)))
    assert fairness(run([0.5])) is None


def test_what_is_forgotten() -> None:
    before = [0.5, 0.4, None]
    after = [0.2, 0.4, 0.9]
    assert forgetting(
        run([0.5], absent_accuracy_before=before, absent_accuracy=after)
    ) == pytest.approx(0.15)
    assert forgetting(run([0.5])) is None


def test_local_training_on_two_classes_forgets_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = Experiment(partition="label-skew", clients=5, rounds=4, local_steps=40)
    found = fedcog.run(one, tmp_path / "run", report=False)
    lost = forgetting(found)
    fair = fairness(found)
    assert lost is not None and lost > 0.1
    assert fair is not None and fair.worst <= fair.mean
    html = page([tmp_path / "run"], target=found.best)
    assert "<h3>Fairness</h3>" in html and "To the target" in html
    assert f"{100 * fair.worst:.2f}" in html and f"{100 * lost:.2f}" in html
    cost = cost_to(found, found.best)
    assert cost is not None and f"{cost.bytes / 1e6:,.1f}" in html
    assert "To the target" not in page([tmp_path / "run"], target=1.0)
    assert main(["report", str(tmp_path / "run"), "--target", f"{found.best}"]) == 0
    assert (
        f": {cost.round} rounds, {cost.bytes / 1e6:,.1f} MB, {cost.seconds:,.1f} s"
        in capsys.readouterr().out
    )
