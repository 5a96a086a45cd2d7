"""The theorem as numbers: its formulas by pencil, its constants by brute force, and that it holds
where it must.
"""

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

FEW = TheoryPlan(clients=5, rounds=6, steps=3, batch=8, num_generated=20, repeats=2)
DIGITS = registry.load("digits")


def test_bound_and_step_by_pencil() -> None:
    known = Constants(
        smoothness=2.0, variance=3.0, kappa_squared=5.0, initial_gap=7.0, weights_squared=0.25
    )
    assert known.largest_step(4) == pytest.approx(
        1 / math.sqrt(2 * 4 * 3 * 3) / 2
    )  # 0.0589, and not 1/8/2
    assert known._replace(beta_squared=10.0).largest_step(4) == pytest.approx(
        1 / math.sqrt(2 * 4 * 3 * 21) / 2
    )
    assert known.largest_step(1) == pytest.approx(1 / 4)
    wanted = (
        4 * 7 / (4 * 0.05 * 10)
        + 4 * 0.05 * 2 * 3 * 0.25
        + 3 * 3 * 0.05**2 * 3 * 4
        + 6 * 4 * 3 * 0.05**2 * 4 * 5
    )
    assert known.bound(4, 0.05, 10) == pytest.approx(wanted)


@pytest.fixture(scope="module")
def linear() -> Problem:
    return Problem("linear", DIGITS, FEW)


def matrix(problem: Problem, client: int) -> torch.Tensor:
    """A client's whole Hessian at the start, as torch makes it."""
    made = problem.generate(problem.start, 0)
    found = hessian(problem.objective)(problem.start, client, made)
    sizes = {name: value.numel() for name, value in problem.start.items()}
    return torch.cat(
        [torch.cat([found[a][b].reshape(sizes[a], sizes[b]) for b in sizes], 1) for a in sizes]
    )


def test_smoothness_is_a_bound_of_the_convex_problem_and_the_curvature_of_the_other(
    linear: Problem,
) -> None:
    made = linear.generate(linear.start, 0)
    for client in range(FEW.clients):
        values = torch.linalg.eigvalsh(matrix(linear, client))
        assert float(values.min()) > -1e-9  # convex
        assert float(values.max()) <= linear.smoothness(linear.start, made)
    small = Problem("mlp", DIGITS, FEW)
    wanted = float(torch.linalg.eigvalsh(matrix(small, 0)).abs().max())
    assert small._curvature(small.start, 0, small.generate(small.start, 0)) == pytest.approx(
        wanted, rel=0.05
    )


def test_variance_is_that_of_drawn_batches(linear: Problem) -> None:
    made = linear.generate(linear.start, 0)
    draw = torch.Generator().manual_seed(0)
    steps = [tree.flatten(linear._step(linear.start, 1, made, 1.0, draw)) for _ in range(3000)]
    flat = torch.stack([torch.cat([value.flatten() for value in one.values()]) for one in steps])
    brute = float((flat - flat.mean(0)).square().sum(1).mean())
    assert linear.variance(linear.start, 1, made) == pytest.approx(brute, rel=0.05)


def test_every_client_distils_the_same_inputs_and_they_are_renewed(linear: Problem) -> None:
    first, again, later = (linear.generate(linear.start, round) for round in (0, 0, 1))
    assert torch.equal(first.x, again.x) and not torch.equal(first.x, later.x)
    assert torch.equal(first.logits, linear.model.predict(linear.start, first.x))


def test_the_bound_holds_on_the_convex_problem_and_so_does_the_lemma() -> None:
    with torch_settings(Experiment(threads=1)):
        found = measure("linear", DIGITS, FEW)
    assert found.lr <= found.constants.largest_step(FEW.steps)
    assert 0 < found.min_gradient <= found.mean_gradient <= found.bound
    assert found.max_distillation == 0 and found.num_increases == 0
    assert found.constants.kappa_squared > 0 and found.constants.weights_squared == pytest.approx(
        0.2, abs=0.01
    )


def test_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    few = [
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
    assert main(["theory", *few, "--lr", "5"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "largest step" in text and "more than allowed" in text
    assert main(["theory", *few, "--plain"]) == 0
    text = capsys.readouterr().out
    assert "\nlargest step: 0." in text and text.isascii()
    assert main(["theory", *few, "--quiet"]) == 0 and not capsys.readouterr().out
    assert main(["theory", "--rounds", "0", "--lr", "-1"]) == 2
    fault = capsys.readouterr().err
    assert "rounds needs an integer" in fault and "lr needs a number" in fault
    assert main(["theory", "--clients", "3", "--local-steps", "0"]) == 2
    fault = capsys.readouterr().err
    assert "clients needs an integer from 5 to 100" in fault and "local-steps needs" in fault
