"""Tests of differential privacy: clipping, noise, and accounting."""

import importlib.util
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

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

needs_accountant = pytest.mark.skipif(
    importlib.util.find_spec("dp_accounting") is None, reason="needs dp-accounting"
)

SMALL: dict[str, Any] = {
    "rounds": 2,
    "clients": 3,
    "local_steps": 2,
    "batch_size": 8,
    "mapping": "loop",
    "workers": 1,
    "device": "cpu",
}
SUM_ALGORITHMS = [
    name for name, cls in ALGORITHMS.items() if not issubclass(cls, Wrapper) and cls.uplink == "sum"
]


def make_privacy(where: str = "central", **settings: object) -> Privacy:
    defaults = {
        "clip": 1.0,
        "noise": 1.0,
        "delta": 1e-5,
        "num_clients": 10,
        "clients_per_round": 4,
        "seed": 0,
    }
    return Privacy(where, **(defaults | settings))  # type: ignore[arg-type]


def make_payloads(rows: list[list[float]]) -> State:
    """Stack payloads of three numbers: a 2x1 matrix and a scalar."""
    numbers = torch.tensor(rows, dtype=torch.float64)
    ones = torch.ones(len(rows), dtype=torch.float64)
    return {
        "delta": {"w": numbers[:, :2].reshape(-1, 2, 1)},
        "square": numbers[:, 2],
        "weight": ones,
        "count": ones,
    }


@given(
    st.lists(st.lists(st.floats(-1e3, 1e3), min_size=3, max_size=3), min_size=1, max_size=4),
    st.floats(0.01, 100),
)
def test_clipping_scales_down_only_long_payloads(rows: list[list[float]], clip: float) -> None:
    client_ids = torch.arange(len(rows))
    clipped = make_privacy(clip=clip).protect_payloads(make_payloads(rows), client_ids, 0)
    for row, numbers in enumerate(rows):
        sent = [*clipped["delta"]["w"][row].flatten().tolist(), float(clipped["square"][row])]
        length = math.hypot(*numbers)
        assert math.hypot(*sent) <= clip * (1 + 1e-9)
        factor = min(1.0, clip / length) if length else 1.0
        assert sent == pytest.approx([factor * number for number in numbers], rel=1e-9, abs=1e-12)
    assert torch.equal(clipped["weight"], torch.ones(len(rows), dtype=torch.float64))


def test_central_noise_has_the_set_scale_and_the_count_is_fixed() -> None:
    total = {"delta": torch.zeros(200_000), "weight": torch.tensor(3.0), "count": torch.tensor(3.0)}
    privacy = make_privacy(clip=0.5, noise=3.0)
    noisy = privacy.protect_sum(total, 0)
    assert float(noisy["delta"].std()) == pytest.approx(1.5, rel=0.01)
    assert abs(float(noisy["delta"].mean())) < 0.02
    # Four clients are expected, although only three answered.
    assert (float(noisy["weight"]), float(noisy["count"])) == (4.0, 4.0)
    repeated = make_privacy(clip=0.5, noise=3.0).protect_sum(total, 0)
    next_round = make_privacy(clip=0.5, noise=3.0).protect_sum(total, 1)
    assert torch.equal(noisy["delta"], repeated["delta"])
    assert not torch.equal(noisy["delta"], next_round["delta"])


def test_local_noise_is_independent_per_client_and_server_adds_none() -> None:
    local = make_privacy("local", clip=0.5, noise=3.0)
    payloads = {"delta": torch.zeros(2, 100_000), "weight": torch.ones(2), "count": torch.ones(2)}
    sent = local.protect_payloads(payloads, torch.tensor([3, 5]), 0)["delta"]
    assert float(sent.std()) == pytest.approx(1.5, rel=0.01)
    assert abs(float((sent[0] * sent[1]).mean())) < 0.05
    total = {"delta": sent.sum(0), "weight": torch.tensor(2.0), "count": torch.tensor(2.0)}
    assert torch.equal(local.protect_sum(total, 0)["delta"], total["delta"])


def test_system_entropy_noise_is_normal_and_never_repeats() -> None:
    real = make_privacy(simulated=False)
    total = {"delta": torch.zeros(100_000), "weight": torch.tensor(4.0), "count": torch.tensor(4.0)}
    first = real.protect_sum(total, 0)["delta"]
    second = real.protect_sum(total, 0)["delta"]
    assert not torch.equal(first, second)
    assert float(first.std()) == pytest.approx(1.0, rel=0.02)
    assert abs(float((first * second).mean())) < 0.02
    assert rng.entropy((0,)).shape == (0,) and rng.entropy((3, 5)).shape == (3, 5)


@needs_accountant
def test_remote_clients_use_system_entropy() -> None:
    config = make_experiment("fedavg", privacy="local")
    simulated = ExperimentSetup(config).privacy
    remote = ExperimentSetup(config, remote=RemoteClients()).privacy
    assert simulated is not None and simulated.simulated
    assert remote is not None and not remote.simulated


def analytic_epsilon(sigma: float, delta: float) -> float:
    """Return epsilon of one Gaussian release (Balle and Wang, ICML 2018, theorem 8)."""

    def excess(epsilon: float) -> float:
        half = 1 / (2 * sigma)
        upper = norm.cdf(half - epsilon * sigma)
        lower = norm.cdf(-half - epsilon * sigma)
        return float(upper - math.exp(epsilon) * lower) - delta

    return float(brentq(excess, 0, 200))


@needs_accountant
@pytest.mark.parametrize("noise", [0.8, 2.0, 7.0])
@pytest.mark.parametrize("rounds", [1, 9, 70])
def test_accountant_matches_the_analytic_gaussian(noise: float, rounds: int) -> None:
    # R releases with noise s are one release with noise s / sqrt(R).
    central = make_privacy(noise=noise, clients_per_round=10).epsilon(rounds, rounds)
    expected = analytic_epsilon(noise / math.sqrt(rounds), 1e-5)
    assert central == pytest.approx(expected, rel=0.01, abs=1e-3)
    # Local privacy counts the client's own rounds; replacing its payload changes twice the norm.
    local = make_privacy("local", noise=noise, clients_per_round=3).epsilon(rounds, 4)
    expected = analytic_epsilon(noise / 2 / math.sqrt(4), 1e-5)
    assert local == pytest.approx(expected, rel=0.01, abs=1e-3)


@needs_accountant
def test_sampling_fewer_clients_lowers_epsilon() -> None:
    full = make_privacy(noise=4.0, num_clients=1000, clients_per_round=1000)
    epsilons = [replace(full, clients_per_round=count).epsilon(50, 50) for count in (10, 100, 999)]
    assert epsilons == sorted(epsilons)
    assert epsilons[0] < full.epsilon(50, 50) / 3
    # Sampling replaces one client by another, which changes twice the norm.
    assert epsilons[-1] <= analytic_epsilon(4.0 / 2 / math.sqrt(50), 1e-5) * 1.01
    # In a real federation the server knows who takes part, so sampling does not help.
    real = replace(full, clients_per_round=10, simulated=False)
    expected = analytic_epsilon(4.0 / math.sqrt(3), 1e-5)
    assert real.epsilon(50, 3) == pytest.approx(expected, rel=0.01)
    assert make_privacy(noise=0.0).epsilon(1, 1) == math.inf


def test_max_participation_counts_the_most_frequent_client() -> None:
    assert max_participation([[0, 1], [1, 2], [1]]) == 3
    assert max_participation([]) == 0


def make_experiment(name: str, **settings: Any) -> Experiment:
    tables = {"fedcog": {"start_round": 1, "count": 6, "steps": 2}}
    return Experiment(algorithm=make_algorithm(name, tables), **(SMALL | settings))


def server_state(run: fedcog.Run) -> dict[str, torch.Tensor]:
    return tree.flatten(RunDirectory(run.path).load().server)  # type: ignore[union-attr]


@needs_accountant
def test_zero_noise_and_large_clip_give_the_plain_mean(tmp_path: Path) -> None:
    uniform = make_experiment("fedavg", weights="uniform")
    plain = fedcog.run(uniform, tmp_path / "plain", report=False)
    config = make_experiment("fedavg", privacy="central", dp_clip=1e6, dp_noise=0.0)
    private = fedcog.run(config, tmp_path / "private", report=False)
    for name, value in server_state(plain).items():
        torch.testing.assert_close(value, server_state(private)[name], atol=1e-6, rtol=0)
    assert private.lines[-1]["privacy"] == {"epsilon": None, "delta": 1e-5, "simulated": True}
    assert "epsilon infinite" in private.privacy


@pytest.mark.slow
@needs_accountant
@pytest.mark.parametrize("name", [*SUM_ALGORITHMS, "scaffold+fedcog"])
def test_every_sum_algorithm_supports_privacy(name: str, tmp_path: Path) -> None:
    config = make_experiment(name, privacy="central", dp_clip=0.5, dp_noise=0.5, participation=0.7)
    run = fedcog.run(config, tmp_path / "run", report=name == "fedavg")
    epsilons = [line["privacy"]["epsilon"] for line in run.lines]
    assert 0 < epsilons[0] < epsilons[1]
    assert run.privacy.startswith("simulated privacy")
    assert "replacing one client by another" in run.privacy
    if name == "fedavg":
        report_html = (run.path / "report.html").read_text()
        assert "Simulated privacy" in report_html and "epsilon over rounds" in report_html


@needs_accountant
@pytest.mark.parametrize("where", ["central", "local"])
def test_noise_does_not_depend_on_the_mapping(where: str, tmp_path: Path) -> None:
    config = make_experiment("scaffold", privacy=where, precision="float64")
    variants: dict[str, dict[str, Any]] = {
        "loop": {},
        "workers": {"workers": 2},
        "vmap": {"mapping": "vmap"},
    }
    states = [
        server_state(fedcog.run(replace(config, **changes), tmp_path / name, report=False))
        for name, changes in variants.items()
    ]
    for name, value in states[0].items():
        for other in states[1:]:
            torch.testing.assert_close(value, other[name], atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"algorithm": "fedgen"}, "uplink is a sum"),
        ({"selection": "power-of-choice"}, "--selection uniform"),
        ({"weights": "examples"}, "--weights auto"),
    ],
)
def test_settings_that_leak_client_data_are_refused(settings: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_experiment(
            **({"name": settings.pop("algorithm", "fedavg"), "privacy": "central"} | settings)
        )
