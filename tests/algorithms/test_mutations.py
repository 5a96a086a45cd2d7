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
from tests.support.plain_case import Case
from tests.support.plain_checks import CASES, METHODS, cases_of

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
    "logarithm is subtracted": (
        "balanced-softmax",
        "balanced_softmax",
        "logits + self.strength * log_share",
        "logits - self.strength * log_share",
    ),
    "share without smoothing": (
        "balanced-softmax smooth",
        "balanced_softmax",
        "client.class_counts.to(logits.dtype) + self.smoothing",
        "client.class_counts.to(logits.dtype)",
    ),
    "margin is added": ("fedlc", "fedlc", "(logits - margin)", "(logits + margin)"),
    "absent classes are not masked": (
        "fedlc",
        "fedlc",
        ".masked_fill(counts == 0, EXCLUDED)",
        "",
    ),
    "square root of the counts": ("fedlc", "fedlc", "pow(-0.25)", "pow(-0.5)"),
    "present classes are restricted": ("fedrs", "fedrs", "(counts > 0)", "(counts == 0)"),
    "soft rule divides by the sum": ("fedrs soft", "fedrs", "counts.max()", "counts.sum()"),
    "true class is distilled": (
        "fedntd",
        "fedntd",
        'classes == batch["y"][:, None]',
        "classes < 0",
    ),
    "distillation without T^2": (
        "fedntd",
        "fedntd",
        "self.beta * self.temperature**2 * divergence",
        "self.beta * divergence",
    ),
    "present classes are distilled": (
        "fedvls",
        "fedvls",
        "client.class_counts > 0",
        "client.class_counts == 0",
    ),
    "true logits are lowered": (
        "fedvls",
        "fedvls",
        "torch.where(is_true, 0, calibrated)",
        "calibrated",
    ),
    "biased standard deviation": ("feduv", "feduv", "var(0)", "var(0, correction=0)"),
    "median is detached": (
        "feduv",
        "feduv",
        "is_apart.any(), median, 1",
        "is_apart.any(), median.detach(), 1",
    ),
    "rounding errors count as distances": (
        "feduv",
        "feduv",
        "distance > rounding**2 * features.detach().square().sum(-1).amax()",
        "distance > 0",
    ),
    "newest model is missing": (
        "fedgkd two models",
        "fedgkd",
        "total = tree.add(past, self._weights(server))",
        "total = past",
    ),
    "teacher is the last model alone": (
        "fedgkd three models",
        "fedgkd",
        "value.sum(0), server",
        "value[-1], server",
    ),
    "momentum is added twice": (
        "fedacg",
        "fedacg",
        'tree.add(server["params"], velocity)',
        'tree.add(server["params"], tree.add(velocity, tree.scale(self.beta, server["velocity"])))',
    ),
    "penalty with a factor 1/2": ("fedacg", "fedacg", "inner + self.mu", "inner + self.mu / 2"),
    "model is sent without momentum": (
        "fedlc+fedacg",
        "fedacg",
        'server | {"params": ahead}',
        "server",
    ),
    "mean gradient per step": (
        "fedcm",
        "fedcm",
        "work.effective_step_size",
        "work.lr * work.num_steps",
    ),
    "mean gradient points downhill": (
        "fedcm",
        "fedcm",
        "-1 / mean_step_size",
        "1 / mean_step_size",
    ),
    "drift is not stored": (
        "feddc",
        "feddc",
        'the undecayed learning rate times the number of steps.\n    """\n',
        'the undecayed learning rate.\n    """\n\n'
        "    def client_update(self, params, client, work):\n"
        "        state, payload = super().client_update(params, client, work)\n"
        '        return state | {"memory": client.state["memory"]}, payload\n',
    ),
    "nothing is perturbed": (
        "fedspeed",
        "fedspeed",
        "tree.scale(self.rho / norm, step.grads)",
        "tree.zeros(step.grads)",
    ),
    "quadratic term is perturbed": (
        "fedspeed",
        "fedspeed",
        "drift = tree.subtract(params,",
        "drift = tree.subtract(perturbed,",
    ),
    "gradients are mixed the other way": (
        "fedspeed mix",
        "fedspeed",
        "tree.scale(1 - self.mix, step.grads), tree.scale(self.mix, second.grads)",
        "tree.scale(self.mix, step.grads), tree.scale(1 - self.mix, second.grads)",
    ),
    "direction is reversed": (
        "fedlesam",
        "fedlesam",
        'tree.change(client.broadcast["params"], client.state["received"])',
        'tree.change(client.state["received"], client.broadcast["params"])',
    ),
    "trained model is kept": (
        "scaffold+fedlesam",
        "fedlesam",
        '{"received": client.broadcast["params"]}',
        '{"received": params}',
    ),
    "student without temperature": (
        "fedsol",
        "fedsol",
        "logits / self.temperature\n            return",
        "logits\n            return",
    ),
    "signed distances": ("fedsol", "fedsol", "_unit_columns(value.abs())", "_unit_columns(value)"),
    "lengths of rows": (
        "fedsol",
        "fedsol",
        "F.normalize(flat, dim=0)",
        "F.normalize(flat, dim=-1)",
    ),
    "perturbation of any length": (
        "fedsol fixed",
        "fedsol",
        "torch.where(norm < 1e-6, 0, self.rho / norm)",
        "self.rho",
    ),
    "weights are not normalized": (
        "feddisco",
        "feddisco",
        'total["weight"] / new_weight',
        "1.0",
    ),
    "divergences are not normalized": (
        "feddisco",
        "feddisco",
        'discrepancy / broadcast["discrepancy"].clamp(min=1e-30)',
        "discrepancy",
    ),
    "negative weights": ("feddisco l2", "feddisco", ".clamp(min=0)", ""),
    "biased covariance": ("ccvr", "ccvr", "products / (count - 1)", "products / count"),
    "factor is not transposed": ("ccvr", "ccvr", "noise @ factor.mT", "noise @ factor"),
    "head is averaged": (
        "fedper",
        "fedper",
        'init.model.head_names if self.personal == "head" else []',
        "[]",
    ),
    "head is not stored": (
        "fedper",
        "fedper",
        'return state | {"head": head}, payload',
        "return state, payload",
    ),
    "head moves by weight decay": (
        "fedbabu",
        "fedbabu",
        "super().after_step(before, after, batch, client) | head",
        "super().after_step(before, after, batch, client)",
    ),
    "lower of two middle values": (
        "median",
        "median",
        "(ascending[(num_clients - 1) // 2] + ascending[num_clients // 2]) / 2",
        "ascending[(num_clients - 1) // 2]",
    ),
    "smallest values alone are dropped": (
        "trimmed-mean",
        "trimmed_mean",
        "[trim : len(values) - trim]",
        "[trim :]",
    ),
    "one neighbor more": (
        "krum no attackers",
        "krum",
        "len(weights) - self._num_attackers(len(weights)) - 2",
        "len(weights) - self._num_attackers(len(weights)) - 1",
    ),
    "distances of weighted updates": ("fedavg+krum+fedavgm", "krum", " / weights[:, None]", ""),
    "attackers are kept": (
        "multi-krum",
        "krum",
        "self.keep or num_clients - self._num_attackers(num_clients)",
        "self.keep or num_clients",
    ),
    "one pass fewer": (
        "geometric-median",
        "geometric_median",
        "return self.passes",
        "return self.passes - 1",
    ),
    "client's weight is left out": (
        "geometric-median one pass",
        "geometric_median",
        'closeness = payload["weight"] / distance',
        "closeness = 1 / distance",
    ),
}


def mutated_algorithm(module: str, class_name: str, old: str, new: str) -> Callable[..., Any]:
    """Return an algorithm class after one replacement in the source of its module."""
    source = (SOURCES / f"{module}.py").read_text()
    assert source.count(old) == 1, (
        f"{module}.py has changed: '{old}' occurs {source.count(old)} times"
    )
    namespace: dict[str, Any] = {"__name__": f"fedcog.algorithms.{module}"}
    exec(compile(source.replace(old, new), f"{module}.py, mutated", "exec"), namespace)
    algorithm: Callable[..., Any] = namespace[class_name]
    return algorithm


def is_detected(
    algorithm: Algorithm, plain_loop: Callable[..., dict[str, Any]], cases: dict[str, Case] = CASES
) -> bool:
    """Return whether the comparison with the plain loop fails."""
    for case in cases.values():
        try:
            plain_checks.assert_equals_plain_loop(algorithm, plain_loop, case)
        except AssertionError:
            return True
    return False


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_detected(name: str) -> None:
    method, module, old, new = MUTATIONS[name]
    original, plain_loop = METHODS[method]

    def mutated(layer: Algorithm) -> Algorithm:
        if type(layer).__module__ != f"fedcog.algorithms.{module}":
            return layer
        values = {field.name: getattr(layer, field.name) for field in dataclasses.fields(layer)}
        algorithm: Algorithm = mutated_algorithm(module, type(layer).__name__, old, new)(**values)
        return algorithm

    changed = original.map_layers(mutated)
    assert changed is not original
    assert is_detected(changed, plain_loop, cases_of(method))


def test_lost_inner_gradient_rule_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    active_fedcog_keeps_the_rule(SCAFFOLD())
    monkeypatch.setattr(FedCOG, "local_grad", Algorithm.local_grad)
    with pytest.raises(AssertionError, match="loses its rule"):
        active_fedcog_keeps_the_rule(SCAFFOLD())


def test_lost_loss_weights_of_fedcog_are_detected() -> None:
    old = "        real_weight, made_weight = self._loss_weights(client)\n"
    mutated = mutated_algorithm("fedcog", "FedCOG", old, old + "        real_weight = 1.0\n")
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
    for method in (
        "scaffold",
        "moon",
        "feddyn",
        "fedrep",
        "ditto",
        "feddc",
        "fedspeed",
        "fedlesam",
        "fedper",
    ):
        assert is_detected(*METHODS[method]), method
    monkeypatch.undo()
    monkeypatch.setattr(ClientStates, "restore", lambda self, flat: None)
    with pytest.raises(AssertionError, match="resume"):
        resume_is_exact(SCAFFOLD())
    resume_is_exact(FedAvg())
