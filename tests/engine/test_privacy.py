"""Differential privacy: what a client can change, how much noise there is, and what the accountant
says.
"""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.stats import norm

import fedcog
from fedcog.algorithms import ALGORITHMS, Wrapper
from fedcog.core import rng, tree
from fedcog.core.settings import ConfigError
from fedcog.core.tree import State
from fedcog.engine.privacy import Privacy, max_participation
from fedcog.runs.config.composition import make_algorithm
from fedcog.runs.config.experiment import Experiment
from fedcog.runs.records.run_directory import RunDirectory
from fedcog.runs.setup import ExperimentSetup, RemoteClients

pytest.importorskip("dp_accounting")

SMALL = {
    "rounds": 2,
    "clients": 3,
    "local_steps": 2,
    "batch_size": 8,
    "mapping": "loop",
    "workers": 1,
    "device": "cpu",
}
SUMS = [
    name for name, cls in ALGORITHMS.items() if not issubclass(cls, Wrapper) and cls.uplink == "sum"
]


def privacy(where: str = "central", **settings: object) -> Privacy:
    known = {"clip": 1.0, "noise": 1.0, "delta": 1e-5, "clients": 10, "count": 4, "seed": 0}
    return Privacy(where, **(known | settings))  # type: ignore[arg-type]


def payloads(rows: list[list[float]]) -> State:
    """Stacked payloads of two parts: a matrix of two numbers, and one alone."""
    numbers = torch.tensor(rows, dtype=torch.float64)
    one = torch.ones(len(rows), dtype=torch.float64)
    return {
        "delta": {"w": numbers[:, :2].reshape(-1, 2, 1)},
        "square": numbers[:, 2],
        "weight": one,
        "count": one,
    }


@given(
    st.lists(st.lists(st.floats(-1e3, 1e3), min_size=3, max_size=3), min_size=1, max_size=4),
    st.floats(0.01, 100),
)
def test_nobody_sends_more_than_the_clip_and_who_sends_less_is_let_alone(
    rows: list[list[float]], clip: float
) -> None:
    sent = privacy(clip=clip).protect_payloads(payloads(rows), torch.arange(len(rows)), 0)
    for row, numbers in enumerate(rows):
        found = [*sent["delta"]["w"][row].flatten().tolist(), float(sent["square"][row])]
        length = math.hypot(*numbers)
        assert math.hypot(*found) <= clip * (1 + 1e-9)
        factor = min(1.0, clip / length) if length else 1.0
        assert found == pytest.approx([factor * number for number in numbers], rel=1e-9, abs=1e-12)
    assert torch.equal(sent["weight"], torch.ones(len(rows), dtype=torch.float64))


def test_the_sum_gets_the_noise_that_was_promised_and_a_fixed_count() -> None:
    total = {"delta": torch.zeros(200_000), "weight": torch.tensor(3.0), "count": torch.tensor(3.0)}
    made = privacy(clip=0.5, noise=3.0).protect_sum(total, 0)
    assert float(made["delta"].std()) == pytest.approx(1.5, rel=0.01)
    assert abs(float(made["delta"].mean())) < 0.02
    assert (float(made["weight"]), float(made["count"])) == (4.0, 4.0)  # of whom one did not answer
    again = privacy(clip=0.5, noise=3.0).protect_sum(total, 0)
    later = privacy(clip=0.5, noise=3.0).protect_sum(total, 1)
    assert torch.equal(made["delta"], again["delta"]) and not torch.equal(
        made["delta"], later["delta"]
    )


def test_local_noise_is_every_clients_own_and_the_server_adds_none() -> None:
    local = privacy("local", clip=0.5, noise=3.0)
    one = {"delta": torch.zeros(2, 100_000), "weight": torch.ones(2), "count": torch.ones(2)}
    sent = local.protect_payloads(one, torch.tensor([3, 5]), 0)["delta"]
    assert float(sent.std()) == pytest.approx(1.5, rel=0.01)
    assert abs(float((sent[0] * sent[1]).mean())) < 0.05
    total = {"delta": sent.sum(0), "weight": torch.tensor(2.0), "count": torch.tensor(2.0)}
    assert torch.equal(local.protect_sum(total, 0)["delta"], total["delta"])


def test_noise_of_the_operating_system_is_normal_and_never_the_same() -> None:
    real = privacy(simulated=False)
    total = {"delta": torch.zeros(100_000), "weight": torch.tensor(4.0), "count": torch.tensor(4.0)}
    one, two = (real.protect_sum(total, 0)["delta"] for _ in range(2))
    assert not torch.equal(one, two)
    assert (
        float(one.std()) == pytest.approx(1.0, rel=0.02) and abs(float((one * two).mean())) < 0.02
    )
    assert rng.entropy((0,)).shape == (0,) and rng.entropy((3, 5)).shape == (3, 5)


def test_real_clients_have_real_noise() -> None:
    one = experiment("fedavg", privacy="local")
    here = ExperimentSetup(one).privacy
    there = ExperimentSetup(one, remote=RemoteClients()).privacy
    assert here is not None and here.simulated
    assert there is not None and not there.simulated


def analytic(sigma: float, delta: float) -> float:
    """Epsilon of one Gaussian release (Balle and Wang, ICML 2018, theorem 8)."""

    def excess(epsilon: float) -> float:
        half = 1 / (2 * sigma)
        kept = norm.cdf(half - epsilon * sigma) - math.exp(epsilon) * norm.cdf(
            -half - epsilon * sigma
        )
        return float(kept) - delta

    return float(brentq(excess, 0, 200))


@pytest.mark.parametrize("noise", [0.8, 2.0, 7.0])
@pytest.mark.parametrize("rounds", [1, 9, 70])
def test_the_accountant_agrees_with_the_formula_for_gaussians(noise: float, rounds: int) -> None:
    told = privacy(noise=noise, count=10).epsilon(
        rounds, rounds
    )  # so many releases are one with less noise
    assert told == pytest.approx(analytic(noise / math.sqrt(rounds), 1e-5), rel=0.01, abs=1e-3)
    local = privacy("local", noise=noise, count=3).epsilon(
        rounds, 4
    )  # counts for itself, and twice the change
    assert local == pytest.approx(analytic(noise / 2 / math.sqrt(4), 1e-5), rel=0.01, abs=1e-3)


def test_a_round_of_few_clients_costs_less_and_never_more() -> None:
    whole = privacy(noise=4.0, clients=1000, count=1000)
    spent = [replace(whole, count=count).epsilon(50, 50) for count in (10, 100, 999)]
    assert spent == sorted(spent)
    assert spent[0] < whole.epsilon(50, 50) / 3
    assert (
        spent[-1] <= analytic(4.0 / 2 / math.sqrt(50), 1e-5) * 1.01
    )  # one in place of another: twice the change
    real = replace(whole, count=10, simulated=False)  # whose turn it is, everybody knows
    assert real.epsilon(50, 3) == pytest.approx(analytic(4.0 / math.sqrt(3), 1e-5), rel=0.01)
    assert privacy(noise=0.0).epsilon(1, 1) == math.inf


def test_who_takes_part_most() -> None:
    assert max_participation([[0, 1], [1, 2], [1]]) == 3
    assert max_participation([]) == 0


def experiment(name: str, **settings: object) -> Experiment:
    tables = {"fedcog": {"start_round": 1, "count": 6, "steps": 2}}
    return Experiment(algorithm=make_algorithm(name, tables), **(SMALL | settings))  # type: ignore[arg-type]


def server(run: fedcog.Run) -> dict[str, torch.Tensor]:
    return tree.flatten(RunDirectory(run.path).load().server)  # type: ignore[union-attr]


def test_without_noise_and_with_room_it_is_the_plain_mean(tmp_path: Path) -> None:
    plain = fedcog.run(experiment("fedavg", weights="uniform"), tmp_path / "plain", report=False)
    one = experiment("fedavg", privacy="central", dp_clip=1e6, dp_noise=0.0)
    private = fedcog.run(one, tmp_path / "private", report=False)
    for name, value in server(plain).items():
        torch.testing.assert_close(value, server(private)[name], atol=1e-6, rtol=0)
    assert private.lines[-1]["privacy"] == {"epsilon": None, "delta": 1e-5, "simulated": True}
    assert "epsilon infinite" in private.privacy


@pytest.mark.parametrize("name", [*SUMS, "scaffold+fedcog"])
def test_every_sum_can_be_made_private(name: str, tmp_path: Path) -> None:
    one = experiment(name, privacy="central", dp_clip=0.5, dp_noise=0.5, participation=0.7)
    run = fedcog.run(one, tmp_path / "run", report=name == "fedavg")
    spent = [line["privacy"]["epsilon"] for line in run.lines]
    assert 0 < spent[0] < spent[1]
    assert (
        run.privacy.startswith("simulated privacy")
        and "replacing one client by another" in run.privacy
    )
    if name == "fedavg":
        page = (run.path / "report.html").read_text()
        assert "Simulated privacy" in page and "epsilon over rounds" in page


@pytest.mark.parametrize("where", ["central", "local"])
def test_noise_does_not_hang_on_how_clients_are_trained(where: str, tmp_path: Path) -> None:
    one = experiment("scaffold", privacy=where, precision="float64")
    ways = {"loop": {}, "workers": {"workers": 2}, "vmap": {"mapping": "vmap"}}
    found = [
        server(fedcog.run(replace(one, **own), tmp_path / name, report=False))  # type: ignore[arg-type]
        for name, own in ways.items()
    ]
    for name, value in found[0].items():
        for other in found[1:]:
            torch.testing.assert_close(value, other[name], atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"algorithm": "fedgen"}, "uplink is a sum"),
        ({"selection": "power-of-choice"}, "--selection uniform"),
        ({"weights": "examples"}, "--weights auto"),
    ],
)
def test_what_would_tell_of_a_client_is_refused(settings: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        experiment(
            **({"name": settings.pop("algorithm", "fedavg"), "privacy": "central"} | settings)
        )
