"""Mutation tests: each deliberate bug in an algorithm makes the plain-loop check fail."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedcog.algorithms
from fedcog.algorithms import SCAFFOLD, Algorithm, FedAvg, FedCOG, FedProx
from fedcog.core.optimizers import Optimizer
from fedcog.testing import active_fedcog_keeps_the_rule, resume_is_exact
from tests.support import closed_form, plain_checks
from tests.support.plain_checks import CASES, METHODS

SOURCES = Path(fedcog.algorithms.__file__).parent

# Mutation -> (method whose check fails, module, original source, mutated source).
MUTATIONS = {
    "norm instead of squared norm": (
        "fedprox",
        "fedprox",
        "tree.dot(drift, drift)",
        "(tree.dot(drift, drift) + 1e-9).sqrt()",
    ),
    "factor |S|/K is dropped": ("feddyn", "feddyn", 'total["count"] / server["population"]', "1.0"),
    "1/|S| instead of 1/K": (
        "scaffold",
        "scaffold",
        '1 / server["population"]',
        '1 / total["count"]',
    ),
    "control variate is not stored": (
        "scaffold",
        "scaffold",
        'return state | {"control": control}, payload',
        "return state, payload",
    ),
    "control variate is sent instead of its change": (
        "scaffold",
        "scaffold",
        '{"control": change}',
        '{"control": control}',
    ),
    "norm is per layer": (
        "fedsam",
        "fedsam",
        "tree.scale(self.rho / norm, step.grads)",
        "{name: self.rho / grad.norm() * grad for name, grad in step.grads.items()}",
    ),
    "previous model is the global one": (
        "moon",
        "moon",
        "client.transmitted(params)",
        'client.broadcast["params"] | client.broadcast["buffers"]',
    ),
    "velocity is not stored": (
        "fedavgm",
        "fedavgm",
        '"velocity": velocity,',
        '"velocity": server["velocity"],',
    ),
    "root of the sum": ("fedadam", "fedadam", "(v.sqrt() + self.tau)", "(v + self.tau).sqrt()"),
    "floor of 1 is dropped": ("fedexp", "fedexp", ".clamp(min=1)", ""),
    "steps instead of effective steps": (
        "fednova",
        "fednova",
        "(work.effective_step_size / work.lr)",
        "work.num_steps",
    ),
    "mask on the gradient only": (
        "fedrep",
        "fedrep",
        "self._select(super().after_step(before, after, batch, client), before, client)",
        "after",
    ),
    "pull towards the local copy": (
        "ditto",
        "ditto",
        'tree.change(client.broadcast["params"], v)',
        "tree.change(_global_part(params), v)",
    ),
    "virtual features are not detached": ("vhl", "vhl", "virtual.detach()", "virtual"),
    "alignment never ends": ("vhl", "vhl", "is_active * alignment", "alignment"),
    "counts are not smoothed": ("fedgen", "fedgen", "1 + expected", "expected"),
    "teacher outputs are not detached": ("fedgen", "fedgen", "like_real).detach()", "like_real)"),
    "projections are not sequential": (
        "fedreg",
        "fedreg",
        "_coefficient(rest, perturbed_grads)",
        "_coefficient(drift, perturbed_grads)",
    ),
    "biased variance": (
        "feddecorr",
        "feddecorr",
        "sum(0) / (batch_size - 1)",
        "sum(0) / batch_size",
    ),
}


def mutated_algorithm(module: str, old: str, new: str) -> Callable[..., Any]:
    """Return the algorithm class of a module after one replacement in its source."""
    source = (SOURCES / f"{module}.py").read_text()
    assert source.count(old) == 1, (
        f"{module}.py has changed: '{old}' occurs {source.count(old)} times"
    )
    namespace: dict[str, Any] = {"__name__": f"fedcog.algorithms.{module}"}
    exec(compile(source.replace(old, new), f"{module}.py, mutated", "exec"), namespace)
    algorithm: Callable[..., Any] = namespace[fedcog.algorithms.ALGORITHMS[module].__name__]
    return algorithm


def is_detected(algorithm: Algorithm, plain_loop: Callable[..., dict[str, Any]]) -> bool:
    """Return whether the comparison with the plain loop fails."""
    for case in CASES.values():
        try:
            plain_checks.assert_equals_plain_loop(algorithm, plain_loop, case)
        except AssertionError:
            return True
    return False


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_detected(name: str) -> None:
    method, module, old, new = MUTATIONS[name]
    original, plain_loop = METHODS[method]
    values = {field.name: getattr(original, field.name) for field in dataclasses.fields(original)}
    assert is_detected(mutated_algorithm(module, old, new)(**values), plain_loop)


def test_lost_inner_gradient_rule_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    active_fedcog_keeps_the_rule(SCAFFOLD())
    monkeypatch.setattr(FedCOG, "local_grad", Algorithm.local_grad)
    with pytest.raises(AssertionError, match="loses its rule"):
        active_fedcog_keeps_the_rule(SCAFFOLD())


def test_lost_loss_weights_of_fedcog_are_detected() -> None:
    old = "        real_weight, made_weight = self._loss_weights(client)\n"
    mutated = mutated_algorithm("fedcog", old, old + "        real_weight = 1.0\n")
    settings = closed_form.FEDCOG
    values = {
        field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)
    } | {"inner": FedProx(mu=0.3)}
    toy = closed_form.federation(mutated(**values))
    weight, _ = closed_form.one_round(toy, 0.3, settings)
    assert np.abs(toy.run()[-1].server["params"]["weight"].numpy() - weight).max() > 1e-6


def test_effective_step_size_without_momentum_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Optimizer, "effective_step_size", lambda self, num_steps, lr: lr * num_steps.double()
    )
    assert is_detected(*METHODS["scaffold"])
    assert is_detected(*METHODS["fednova"])
    assert not is_detected(*METHODS["fedavg"])


def test_lost_client_state_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedcog.federation.client_states import ClientStates

    monkeypatch.setattr(ClientStates, "put", lambda self, client_ids, states, is_finite: None)
    for method in ("scaffold", "moon", "feddyn", "fedrep", "ditto"):
        assert is_detected(*METHODS[method]), method
    monkeypatch.undo()
    monkeypatch.setattr(ClientStates, "restore", lambda self, flat: None)
    with pytest.raises(AssertionError, match="resume"):
        resume_is_exact(SCAFFOLD())
    resume_is_exact(FedAvg())
