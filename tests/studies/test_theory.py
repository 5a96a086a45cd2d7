"""Tests of the convergence theorem: formulas, measured constants, and the bound itself."""

import math

import pytest
import torch
from torch.func import hessian

from fedcog.cli.main import main
from fedcog.core import tree
from fedcog.data import registry
from fedcog.runs.config.experiment import Experiment
from fedcog.runs.environment import torch_settings
from fedcog.studies.theory import Constants, Problem, TheoryPlan, measure

pytestmark = pytest.mark.slow

SMALL_PLAN = TheoryPlan(clients=5, rounds=6, steps=3, batch=8, num_generated=20, repeats=2)
DIGITS = registry.load("digits")


def test_bound_and_largest_step_match_hand_calculation() -> None:
    constants = Constants(
        smoothness=2.0, variance=3.0, kappa_squared=5.0, initial_gap=7.0, weights_squared=0.25
    )
    # 0.0589, which is below 1/8/2
    assert constants.largest_step(4) == pytest.approx(1 / math.sqrt(2 * 4 * 3 * 3) / 2)
    assert constants._replace(beta_squared=10.0).largest_step(4) == pytest.approx(
        1 / math.sqrt(2 * 4 * 3 * 21) / 2
    )
    assert constants.largest_step(1) == pytest.approx(1 / 4)
    expected = (
        4 * 7 / (4 * 0.05 * 10)
        + 4 * 0.05 * 2 * 3 * 0.25
        + 3 * 3 * 0.05**2 * 3 * 4
        + 6 * 4 * 3 * 0.05**2 * 4 * 5
    )
    assert constants.bound(4, 0.05, 10) == pytest.approx(expected)


@pytest.fixture(scope="module")
def linear() -> Problem:
    return Problem("linear", DIGITS, SMALL_PLAN)


def full_hessian(problem: Problem, client: int) -> torch.Tensor:
    """Full Hessian of a client at the initial parameters, from torch."""
    generated = problem.generate(problem.start, 0)
    blocks = hessian(problem.objective)(problem.start, client, generated)
    sizes = {name: value.numel() for name, value in problem.start.items()}
    return torch.cat(
        [torch.cat([blocks[a][b].reshape(sizes[a], sizes[b]) for b in sizes], 1) for a in sizes]
    )


def test_smoothness_bounds_or_matches_hessian_eigenvalues(
    linear: Problem,
) -> None:
    generated = linear.generate(linear.start, 0)
    for client in range(SMALL_PLAN.clients):
        eigenvalues = torch.linalg.eigvalsh(full_hessian(linear, client))
        assert float(eigenvalues.min()) > -1e-9  # convex
        assert float(eigenvalues.max()) <= linear.smoothness(linear.start, generated)
    mlp = Problem("mlp", DIGITS, SMALL_PLAN)
    expected = float(torch.linalg.eigvalsh(full_hessian(mlp, 0)).abs().max())
    assert mlp._curvature(mlp.start, 0, mlp.generate(mlp.start, 0)) == pytest.approx(
        expected, rel=0.05
    )


def test_variance_matches_sampled_batches(linear: Problem) -> None:
    generated = linear.generate(linear.start, 0)
    generator = torch.Generator().manual_seed(0)
    steps = [
        tree.flatten(linear._step(linear.start, 1, generated, 1.0, generator)) for _ in range(3000)
    ]
    flat = torch.stack([torch.cat([value.flatten() for value in step.values()]) for step in steps])
    sampled = float((flat - flat.mean(0)).square().sum(1).mean())
    assert linear.variance(linear.start, 1, generated) == pytest.approx(sampled, rel=0.05)


def test_clients_share_generated_inputs_that_change_each_round(linear: Problem) -> None:
    first, again, later = (linear.generate(linear.start, round) for round in (0, 0, 1))
    assert torch.equal(first.x, again.x) and not torch.equal(first.x, later.x)
    assert torch.equal(first.logits, linear.model.predict(linear.start, first.x))


def test_bound_and_lemma_hold_on_convex_problem() -> None:
    with torch_settings(Experiment(threads=1)):
        measured = measure("linear", DIGITS, SMALL_PLAN)
    assert measured.lr <= measured.constants.largest_step(SMALL_PLAN.steps)
    assert 0 < measured.min_gradient <= measured.mean_gradient <= measured.bound
    assert measured.max_distillation == 0 and measured.num_increases == 0
    assert (
        measured.constants.kappa_squared > 0
        and measured.constants.weights_squared == pytest.approx(0.2, abs=0.01)
    )


def test_theory_command_prints_results_and_faults(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--network",
        "linear",
        "--clients",
        "5",
        "--rounds",
        "2",
        "--local-steps",
        "2",
        "--repeats",
        "1",
    ]
    assert main(["theory", *arguments, "--lr", "5"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "largest step" in text and "more than allowed" in text
    assert main(["theory", *arguments, "--plain"]) == 0
    text = capsys.readouterr().out
    assert "\nlargest step: 0." in text and text.isascii()
    assert main(["theory", *arguments, "--quiet"]) == 0 and not capsys.readouterr().out
    assert main(["theory", "--rounds", "0", "--lr", "-1"]) == 2
    stderr = capsys.readouterr().err
    assert "rounds needs an integer" in stderr and "lr needs a number" in stderr
    assert main(["theory", "--clients", "3", "--local-steps", "0"]) == 2
    stderr = capsys.readouterr().err
    assert "clients needs an integer from 5 to 100" in stderr and "local-steps needs" in stderr
