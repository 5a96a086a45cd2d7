"""Numbers that can be checked with a pencil: one for every formula that has one."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fedcog.algorithms import (
    SCAFFOLD,
    VHL,
    Algorithm,
    Ditto,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedDecorr,
    FedDyn,
    FedExP,
    FedSAM,
)
from fedcog.algorithms.base import Effort, Origin
from fedcog.algorithms.fedreg import _along
from fedcog.federation.selection import PowerOfChoice
from fedcog.optimiser import Optimiser
from fedcog.testing import PARTIAL, Small, worst
from fedcog.tree import State
from tests.user_models import USER_MODELS


def number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def begin(algorithm: Algorithm, population: int = 1, **params: Tensor) -> State:
    """A server whose model is a few numbers."""
    model: Any = type("Model", (), {"buffers": {}})
    return algorithm.server_init(Origin(model, params or {"x": number(0.0)}, number(population), {}))


def change(
    server: State, algorithm: Algorithm, value: Tensor, weight: float = 1.0, count: float = 1.0, **more: Tensor
) -> State:
    total = {"delta": {"x": weight * value}, "buffers": {}, "weight": number(weight), "count": number(count)}
    return algorithm.server_update(server, total | more, {})


@pytest.mark.parametrize(
    ("variant", "expected"),
    [("plain", [1, 2.1, 3.21]), ("damped", [0.9, 1.89, 2.889]), ("nesterov", [1.1, 2.21, 3.321])],
)
def test_fedavgm(variant: str, expected: list[float]) -> None:
    algorithm = FedAvgM(beta=0.1, variant=variant)  # type: ignore[arg-type]
    server, seen = begin(algorithm), []
    for _ in range(3):
        server = change(server, algorithm, number(1.0))
        seen.append(float(server["params"]["x"]))
    assert seen == pytest.approx(expected)


@pytest.mark.parametrize(
    ("rule", "beta1", "expected"),
    [
        ("adam", 0.9, [0.0990050, 0.1346050]),
        ("yogi", 0.9, [0.0990050, 0.1344635]),
        ("adagrad", 0.0, [0.0999000, 0.0552187]),
        ("sgd", 0.0, [0.1, 0.05]),
    ],
)
def test_fedopt(rule: str, beta1: float, expected: list[float]) -> None:
    algorithm = FedAdam(rule=rule, lr=0.1, beta1=beta1, beta2=0.99, tau=1e-3)  # type: ignore[arg-type]
    server, seen = begin(algorithm), []
    for value in (1.0, -0.5):
        server = change(server, algorithm, number(value))
        seen.append(float(server["params"]["x"]))
    assert seen == pytest.approx(expected, abs=5e-8)


@pytest.mark.parametrize(
    ("changes", "step"),
    [(torch.eye(4), 1.992032), (torch.diag(torch.tensor([3.0, 4.0])), 1.0), (torch.ones(3, 2), 1.0)],
    ids=["orthonormal", "the floor", "identical clients are FedAvg"],
)
def test_fedexp(changes: Tensor, step: float) -> None:
    algorithm, changes = FedExP(), changes.double()
    server = begin(algorithm, x=torch.zeros(changes.shape[1], dtype=torch.float64))
    square = (changes**2).sum()
    after = change(server, algorithm, changes.mean(0), float(len(changes)), square=square)
    assert float(after["readings"]["server_step"]) == pytest.approx(step, abs=1e-6)
    assert torch.allclose(after["params"]["x"], step * changes.mean(0), atol=1e-6)
    averaged = FedExP(average=True)
    assert torch.allclose(averaged.server_model(after)["x"], after["params"]["x"] / 2)


def test_feddyn_under_partial_participation() -> None:
    """N = 4, changes 1 and 3, alpha anything: h / alpha = -1, so the model goes to 2 + 1 = 3."""
    algorithm = FedDyn(alpha=0.5)
    after = change(begin(algorithm, 4), algorithm, number(2.0), 2.0, 2.0)
    assert float(after["memory"]["x"]) == -1 and float(after["params"]["x"]) == 3


def test_scaffold_under_partial_participation() -> None:
    """N = 4, variates changed by 2 and 4: c rises by 1.5."""
    algorithm = SCAFFOLD()
    after = change(begin(algorithm, 4), algorithm, number(0.0), 2.0, 2.0, control={"x": number(6.0)})  # type: ignore[arg-type]
    assert float(after["control"]["x"]) == 1.5


@pytest.mark.parametrize(
    ("steps", "momentum", "length"),
    [(1, 0.9, 1), (2, 0.9, 2.9), (5, 0.9, 13.1441), (20, 0.9, 120.9419), (400, 0.9, 3910.0), (7, 0.0, 7)],
)
def test_effective_steps(steps: int, momentum: float, length: float) -> None:
    assert float(Optimiser("sgd", momentum).length(torch.tensor(steps), 1.0)) == pytest.approx(length, rel=1e-6)


def test_scaffolds_variate_is_the_mean_gradient() -> None:
    """A constant gradient of 3, c_k = 1, c = 0.5, lr 0.1, 5 steps with momentum 0.9: the new variate is 3."""
    theta, velocity, lr = 0.0, 0.0, 0.1
    for _ in range(5):
        velocity = 0.9 * velocity + (3 - 1 + 0.5)
        theta -= lr * velocity
    site = type("Site", (), {})()
    site.shared = {"params": {"x": number(0.0)}, "buffers": {}, "control": {"x": number(0.5)}}
    site.own, site.buffers, site.weight = {"control": {"x": number(1.0)}}, {}, number(1.0)
    length = Optimiser("sgd", 0.9).length(torch.tensor(5), lr)
    own, payload = SCAFFOLD().client_update({"x": number(theta)}, site, Effort(torch.tensor(5), number(lr), length))
    assert float(own["control"]["x"]) == pytest.approx(3.0, abs=1e-12)
    assert float(payload["control"]["x"]) == pytest.approx(2.0, abs=1e-12)


def test_fedsam_measures_the_whole_model() -> None:
    """f = (a^2 + 4 b^2) / 2 at (3, 1), rho 0.5: the gradient uphill is (3.3, 5.6), where per layer it were (3.5, 6)."""
    from fedcog.federation.course import autograd

    site = type("Site", (), {"gradient": staticmethod(autograd)})()
    loss = lambda p, batch, track=True: (p["a"] ** 2 + 4 * p["b"] ** 2) / 2  # noqa: E731
    grads, _ = FedSAM(rho=0.5).local_grad(loss, {"a": number(3.0), "b": number(1.0)}, {}, site)
    assert [float(grads["a"]), float(grads["b"])] == pytest.approx([3.3, 5.6])


def test_fedreg_projects_one_after_the_other() -> None:
    drift, far, near = ({"x": torch.tensor(v, dtype=torch.float64)} for v in ([1.0, 2.0], [1.0, 0.0], [1.0, 1.0]))
    first = _along(drift, far)
    rest = {"x": drift["x"] - first * far["x"]}
    second = _along(rest, near)
    assert (float(first), float(second)) == (1, 1)
    assert (drift["x"] - first * far["x"] - second * near["x"]).tolist() == [-1, 1]
    assert float(_along(drift, {"x": -far["x"]})) == 0


def test_feddecorr() -> None:
    rows = torch.tensor([[1.0, 2], [2, 1], [3, 4], [4, 3]], dtype=torch.float64, requires_grad=True)
    value = FedDecorr().correlation(rows)
    papers = FedDecorr(normalisation="paper").correlation(rows)
    assert [value.item(), papers.item()] == pytest.approx([0.81, 0.68])
    assert torch.autograd.grad(value, rows)[0][0].tolist() == pytest.approx([0.216, -0.648])
    still = torch.ones(4, 3, requires_grad=True)
    assert torch.autograd.grad(FedDecorr().correlation(still), still)[0].isfinite().all()
    assert float(FedDecorr().correlation(torch.ones(1, 3))) == 0
    assert float(FedDecorr().correlation(torch.ones(4, 1))) == 0


def test_vhls_contrast() -> None:
    labels = torch.tensor([0, 1, 0, 1])
    apart = torch.eye(2, dtype=torch.float64)[labels]
    assert float(VHL().contrast(apart, labels)) == pytest.approx(math.log(1 + 2 * math.exp(-1 / 0.07)), rel=1e-9)
    assert float(VHL().contrast(torch.ones(4, 3), labels)) == pytest.approx(math.log(3), rel=1e-6)
    assert float(VHL().contrast(torch.ones(1, 3), labels[:1])) == 0


def test_vhls_data_are_the_same_at_every_client_and_in_every_round() -> None:
    for source in ("noise", "style"):
        algorithm = VHL(virtual=9, source=source)  # type: ignore[arg-type]
        cohort = Small(algorithm).backend.cohort
        one = algorithm.unpack({}, cohort.common(algorithm, "federation"), cohort.model)["virtual"]
        other = algorithm.unpack({}, cohort.common(algorithm, "federation", round=5), cohort.model)["virtual"]
        assert one["x"].shape == (9, 1, 8, 8) and one["y"].tolist() == [0, 0, 0, 1, 1, 2, 2, 3, 3]
        assert one["x"].isfinite().all() and one["x"].abs().max() <= 2 and one["x"].std() > 0.3
        assert torch.equal(one["y"], other["y"])
        distance = torch.cdist(one["x"].flatten(1), one["x"].flatten(1))
        same = one["y"][:, None] == one["y"]
        assert distance[same].sum() / (same.sum() - 9) < distance[~same].mean()  # classes can be told apart


def test_power_of_choice_draws_in_proportion_and_takes_the_worst() -> None:
    """p = (.5, .3, .2), losses (1, 2, 3), two candidates, one taken: client 1 with chance .514286, client 2 else."""
    times = [0, 0, 0]
    for round in range(4000):
        chosen = PowerOfChoice((50, 30, 20), 1, 2, seed=0)
        candidates = chosen.candidates(round)
        times[chosen.choose(candidates, [[1.0, 2.0, 3.0][one] for one in candidates])[0]] += 1
    assert times[0] == 0 and abs(times[1] / 4000 - 0.514286) < 0.03
    everyone = PowerOfChoice((5, 5, 5, 5), 2, 4, seed=0)
    assert everyone.candidates(0) == [0, 1, 2, 3]
    assert everyone.choose([0, 1, 2, 3], [1.0, math.nan, 1.0, math.inf]) == [1, 3]
    assert everyone.choose([0, 1, 2, 3], [1.0, 1.0, 1.0, 1.0]) == [0, 1]


def test_ditto_leaves_the_global_model_alone_to_the_last_bit() -> None:
    for module in ("batch-norm", "residual"):
        settings = PARTIAL | {"clip": 0.5}
        plain = Small(FedAvg(), module=USER_MODELS[module](), **settings).everything()
        both = Small(Ditto(), module=USER_MODELS[module](), **settings).everything()
        assert all(torch.equal(value, both[name]) for name, value in plain.items())


def test_running_statistics_move_once_a_step_and_dittos_apart() -> None:
    one = {"module": USER_MODELS["batch-norm"](), "steps": 1, "rounds": 1}
    plain = Small(FedAvg(), **one).run()[-1].server["buffers"]  # type: ignore[arg-type]
    assert worst(plain, Small(FedSAM(), **one).run()[-1].server["buffers"]) == 0  # type: ignore[arg-type]
    small = Small(Ditto(lambda_pull=0.1), module=USER_MODELS["batch-norm"](), steps=4, rounds=1)
    small.run()
    kept = small.backend.store.take([0, 1, 2], dict)["personal"]
    for name in small.server["buffers"]:
        assert not torch.equal(kept[name][0], kept[name][1])
