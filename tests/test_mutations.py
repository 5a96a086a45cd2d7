"""The tests can fail: things broken on purpose, one at a time, and each is caught."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedcog.algorithms
from fedcog.algorithms import SCAFFOLD, Algorithm, FedAvg, FedCOG, FedProx
from fedcog.optimiser import Optimiser
from fedcog.testing import awake_fedcog_keeps_its_rule, resumes_bit_for_bit
from tests.algorithms import test_closed_form, test_recalculation
from tests.algorithms.test_recalculation import CASES, ROWS

SOURCES = Path(fedcog.algorithms.__file__).parent

# What is broken: the row that catches it, the file, what stands there, and what is put in its place.
MUTANTS = {
    "the square is missing": ("fedprox", "fedprox", "tree.dot(drift, drift)", "(tree.dot(drift, drift) + 1e-9).sqrt()"),
    "|S|/K is dropped": ("feddyn", "feddyn", 'total["count"] / server["population"]', "1.0"),
    "1/|S| for 1/K": ("scaffold", "scaffold", '1 / server["population"]', '1 / total["count"]'),
    "the variate is not stored": ("scaffold", "scaffold", 'own | {"control": control}, payload', "own, payload"),
    "the variate is sent, not its change": ("scaffold", "scaffold", '{"control": change}', '{"control": control}'),
    "the norm is per layer": (
        "fedsam",
        "fedsam",
        "tree.scale(self.rho / length, grads)",
        "{name: self.rho / grad.norm() * grad for name, grad in grads.items()}",
    ),
    "the previous model is the global one": (
        "moon",
        "moon",
        "site.local(params)",
        'site.shared["params"] | site.shared["buffers"]',
    ),
    "the velocity is not kept": ("fedavgm", "fedavgm", '"velocity": velocity}', '"velocity": server["velocity"]}'),
    "the root of the sum": ("fedadam", "fedadam", "(v.sqrt() + self.tau)", "(v + self.tau).sqrt()"),
    "the floor of 1 is forgotten": ("fedexp", "fedexp", ".clamp(min=1)", ""),
    "steps for effective steps": ("fednova", "fednova", "(effort.length / effort.lr)", "effort.steps"),
    "a mask on the gradient alone": (
        "fedrep",
        "fedrep",
        "self._turn(super().after_step(before, after, batch, site), before, site)",
        "after",
    ),
    "the pull is to the moving copy": (
        "ditto",
        "ditto",
        'tree.change(site.shared["params"], v)',
        "tree.change(_main(params), v)",
    ),
    "virtual features do not stand still": ("vhl", "vhl", "made.detach()", "made"),
    "alignment never ends": ("vhl", "vhl", "early * aligned", "aligned"),
    "no smoothing of the counts": ("fedgen", "fedgen", "1 + drawn", "drawn"),
    "the student teaches the generated": ("fedgen", "fedgen", "like).detach()", "like)"),
    "projections are not one after the other": ("fedreg", "fedreg", "_along(rest, near[0])", "_along(drift, near[0])"),
    "the biased variance": ("feddecorr", "feddecorr", "/ (number - 1) + 1e-8", "/ number + 1e-8"),
}


def broken(module: str, old: str, new: str) -> Callable[..., Any]:
    """The algorithm of a file in which one thing is replaced."""
    source = (SOURCES / f"{module}.py").read_text()
    assert source.count(old) == 1, f"{module}.py has changed: '{old}' stands there {source.count(old)} times"
    names: dict[str, Any] = {"__name__": f"fedcog.algorithms.{module}"}
    exec(compile(source.replace(old, new), f"{module}.py, broken", "exec"), names)
    known = fedcog.algorithms.ALGORITHMS[module].__name__
    found: Callable[..., Any] = names[known]
    return found


def caught(algorithm: Algorithm, calculate: Callable[..., dict[str, Any]]) -> bool:
    for case in CASES.values():
        try:
            test_recalculation.check(algorithm, calculate, case)
        except AssertionError:
            return True
    return False


@pytest.mark.parametrize("name", MUTANTS)
def test_it_is_caught(name: str) -> None:
    row, module, old, new = MUTANTS[name]
    sound, calculate = ROWS[row]
    values = {field.name: getattr(sound, field.name) for field in dataclasses.fields(sound)}
    assert caught(broken(module, old, new)(**values), calculate)


def test_the_inner_rule_lost_under_fedcog_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    awake_fedcog_keeps_its_rule(SCAFFOLD())
    monkeypatch.setattr(FedCOG, "local_grad", Algorithm.local_grad)
    with pytest.raises(AssertionError, match="its rule is lost"):
        awake_fedcog_keeps_its_rule(SCAFFOLD())


def test_shares_lost_in_fedcog_are_caught() -> None:
    old = "        real_share, made_share = self._shares(site)\n"
    lost = broken("fedcog", old, old + "        real_share = 1.0\n")
    settings = test_closed_form.COG
    values = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)} | {
        "inner": FedProx(mu=0.3)
    }
    small = test_closed_form.federation(lost(**values))
    weight, _ = test_closed_form.one_round(small, 0.3, settings)
    assert np.abs(small.run()[-1].server["params"]["weight"].numpy() - weight).max() > 1e-6


def test_a_length_without_momentum_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Optimiser, "length", lambda self, steps, lr: lr * steps.double())
    assert caught(*ROWS["scaffold"])
    assert caught(*ROWS["fednova"])
    assert not caught(*ROWS["fedavg"])


def test_state_that_is_not_kept_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedcog.federation.store import Store

    monkeypatch.setattr(Store, "put", lambda self, clients, kept, sound: None)
    for row in ("scaffold", "moon", "feddyn", "fedrep", "ditto"):
        assert caught(*ROWS[row]), row
    monkeypatch.undo()
    monkeypatch.setattr(Store, "restore", lambda self, flat: None)
    with pytest.raises(AssertionError, match="resume"):
        resumes_bit_for_bit(SCAFFOLD())
    resumes_bit_for_bit(FedAvg())
