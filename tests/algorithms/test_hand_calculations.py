"""Tests of each algorithm's formulas on numbers that can be checked by hand."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fedcog.algorithms import (
    SCAFFOLD,
    VHL,
    Algorithm,
    Batch,
    ClientContext,
    Ditto,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedDecorr,
    FedDyn,
    FederationInit,
    FedExP,
    FedSAM,
    LocalWork,
)
from fedcog.algorithms.fedreg import _coefficient
from fedcog.core.optimizers import Optimizer
from fedcog.core.tree import Params, State
from fedcog.engine.local_training import autograd_gradient
from fedcog.federation.client_sampling import PowerOfChoice
from fedcog.testing import PARTIAL, ToyFederation, max_difference
from tests.support.user_models import USER_MODELS


def number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def server_state(algorithm: Algorithm, population: int = 1, **params: Tensor) -> State:
    """Return the initial server state of a model with a few numbers."""
    model: Any = type("Model", (), {"buffers": {}})
    return algorithm.server_init(
        FederationInit(model, params or {"x": number(0.0)}, number(population), {})
    )


def server_update(
    server: State,
    algorithm: Algorithm,
    value: Tensor,
    weight: float = 1.0,
    count: float = 1.0,
    **extra: Tensor,
) -> State:
    """Return the server state after a round whose mean update is `value`."""
    total = {
        "delta": {"x": weight * value},
        "buffers": {},
        "weight": number(weight),
        "count": number(count),
    }
    return algorithm.server_update(server, total | extra, {})


@pytest.mark.parametrize(
    ("variant", "expected"),
    [("plain", [1, 2.1, 3.21]), ("damped", [0.9, 1.89, 2.889]), ("nesterov", [1.1, 2.21, 3.321])],
)
def test_fedavgm_momentum(variant: str, expected: list[float]) -> None:
    algorithm = FedAvgM(beta=0.1, variant=variant)  # type: ignore[arg-type]
    server = server_state(algorithm)
    values = []
    for _ in range(3):
        server = server_update(server, algorithm, number(1.0))
        values.append(float(server["params"]["x"]))
    assert values == pytest.approx(expected)


@pytest.mark.parametrize(
    ("rule", "beta1", "expected"),
    [
        ("adam", 0.9, [0.0990050, 0.1346050]),
        ("yogi", 0.9, [0.0990050, 0.1344635]),
        ("adagrad", 0.0, [0.0999000, 0.0552187]),
        ("sgd", 0.0, [0.1, 0.05]),
    ],
)
def test_fedopt_server_optimizers(rule: Any, beta1: float, expected: list[float]) -> None:
    algorithm = FedAdam(rule=rule, lr=0.1, beta1=beta1, beta2=0.99, tau=1e-3)
    server = server_state(algorithm)
    values = []
    for update in (1.0, -0.5):
        server = server_update(server, algorithm, number(update))
        values.append(float(server["params"]["x"]))
    assert values == pytest.approx(expected, abs=5e-8)


@pytest.mark.parametrize(
    ("updates", "step"),
    [
        (torch.eye(4), 1.992032),
        (torch.diag(torch.tensor([3.0, 4.0])), 1.0),
        (torch.ones(3, 2), 1.0),
    ],
    ids=["orthonormal updates", "floor of 1", "identical updates"],
)
def test_fedexp_server_step(updates: Tensor, step: float) -> None:
    algorithm = FedExP()
    updates = updates.double()
    server = server_state(algorithm, x=torch.zeros(updates.shape[1], dtype=torch.float64))
    square = (updates**2).sum()
    after = server_update(server, algorithm, updates.mean(0), float(len(updates)), square=square)
    assert float(after["readings"]["server_step"]) == pytest.approx(step, abs=1e-6)
    assert torch.allclose(after["params"]["x"], step * updates.mean(0), atol=1e-6)
    averaged = FedExP(average=True)
    assert torch.allclose(averaged.server_model(after)["x"], after["params"]["x"] / 2)


def test_feddyn_under_partial_participation() -> None:
    """N = 4, updates 1 and 3, any alpha: h / alpha = -1, so the model moves to 2 + 1 = 3."""
    algorithm = FedDyn(alpha=0.5)
    after = server_update(server_state(algorithm, 4), algorithm, number(2.0), 2.0, 2.0)
    assert float(after["memory"]["x"]) == -1 and float(after["params"]["x"]) == 3


def test_scaffold_under_partial_participation() -> None:
    """N = 4, control variates change by 2 and 4: c rises by 1.5."""
    algorithm = SCAFFOLD()
    after = server_update(
        server_state(algorithm, 4), algorithm, number(0.0), 2.0, 2.0, control={"x": number(6.0)}
    )  # type: ignore[arg-type]
    assert float(after["control"]["x"]) == 1.5


@pytest.mark.parametrize(
    ("steps", "momentum", "step_size"),
    [
        (1, 0.9, 1),
        (2, 0.9, 2.9),
        (5, 0.9, 13.1441),
        (20, 0.9, 120.9419),
        (400, 0.9, 3910.0),
        (7, 0.0, 7),
    ],
)
def test_effective_step_size(steps: int, momentum: float, step_size: float) -> None:
    computed = Optimizer("sgd", momentum).effective_step_size(torch.tensor(steps), 1.0)
    assert float(computed) == pytest.approx(step_size, rel=1e-6)


def test_scaffold_control_variate_is_the_mean_gradient() -> None:
    """Gradient 3, c_k = 1, c = 0.5, lr 0.1, 5 steps, momentum 0.9: the new variate is 3."""
    theta = 0.0
    velocity = 0.0
    lr = 0.1
    for _ in range(5):
        velocity = 0.9 * velocity + (3 - 1 + 0.5)
        theta -= lr * velocity
    client = type("Client", (), {})()
    client.broadcast = {"params": {"x": number(0.0)}, "buffers": {}, "control": {"x": number(0.5)}}
    client.state = {"control": {"x": number(1.0)}}
    client.buffers = {}
    client.weight = number(1.0)
    step_size = Optimizer("sgd", 0.9).effective_step_size(torch.tensor(5), lr)
    state, payload = SCAFFOLD().client_update(
        {"x": number(theta)}, client, LocalWork(torch.tensor(5), number(lr), step_size)
    )
    assert float(state["control"]["x"]) == pytest.approx(3.0, abs=1e-12)
    assert float(payload["control"]["x"]) == pytest.approx(2.0, abs=1e-12)


def test_fedsam_uses_the_norm_of_the_whole_model() -> None:
    """f = (a^2 + 4 b^2) / 2 at (3, 1), rho 0.5: the gradient is (3.3, 5.6), per layer (3.5, 6)."""
    zero = number(0.0)
    model: Any = None
    task: Any = None
    client = ClientContext(
        model, task, {}, {}, {}, zero, zero, zero, zero, zero, zero, zero, 1, autograd_gradient
    )

    def loss(params: Params, batch: Batch) -> tuple[Tensor, Params]:
        return (params["a"] ** 2 + 4 * params["b"] ** 2) / 2, {}

    params = {"a": number(3.0), "b": number(1.0)}
    grads = FedSAM(rho=0.5).local_grad(loss, params, {}, client).grads
    assert [float(grads["a"]), float(grads["b"])] == pytest.approx([3.3, 5.6])


def test_fedreg_projects_sequentially() -> None:
    drift = {"x": torch.tensor([1.0, 2.0], dtype=torch.float64)}
    pseudo_grads = {"x": torch.tensor([1.0, 0.0], dtype=torch.float64)}
    perturbed_grads = {"x": torch.tensor([1.0, 1.0], dtype=torch.float64)}
    first = _coefficient(drift, pseudo_grads)
    rest = {"x": drift["x"] - first * pseudo_grads["x"]}
    second = _coefficient(rest, perturbed_grads)
    assert (float(first), float(second)) == (1, 1)
    projected = drift["x"] - first * pseudo_grads["x"] - second * perturbed_grads["x"]
    assert projected.tolist() == [-1, 1]
    assert float(_coefficient(drift, {"x": -pseudo_grads["x"]})) == 0


def test_feddecorr_correlation_and_gradient() -> None:
    rows = torch.tensor([[1.0, 2], [2, 1], [3, 4], [4, 3]], dtype=torch.float64, requires_grad=True)
    code = FedDecorr().correlation(rows)
    paper = FedDecorr(normalisation="paper").correlation(rows)
    assert [code.item(), paper.item()] == pytest.approx([0.81, 0.68])
    assert torch.autograd.grad(code, rows)[0][0].tolist() == pytest.approx([0.216, -0.648])
    constant = torch.ones(4, 3, requires_grad=True)
    assert torch.autograd.grad(FedDecorr().correlation(constant), constant)[0].isfinite().all()
    assert float(FedDecorr().correlation(torch.ones(1, 3))) == 0
    assert float(FedDecorr().correlation(torch.ones(4, 1))) == 0


def test_vhl_contrastive_loss() -> None:
    labels = torch.tensor([0, 1, 0, 1])
    separated = torch.eye(2, dtype=torch.float64)[labels]
    assert float(VHL().contrast(separated, labels)) == pytest.approx(
        math.log(1 + 2 * math.exp(-1 / 0.07)), rel=1e-9
    )
    assert float(VHL().contrast(torch.ones(4, 3), labels)) == pytest.approx(math.log(3), rel=1e-6)
    assert float(VHL().contrast(torch.ones(1, 3), labels[:1])) == 0


def test_vhl_virtual_data_are_equal_in_every_round() -> None:
    for source in ("noise", "style"):
        algorithm = VHL(virtual=9, source=source)  # type: ignore[arg-type]
        cohort = ToyFederation(algorithm).simulator.cohort
        first = algorithm.unpack_broadcast(
            {}, cohort.shared_draws(algorithm, "federation"), cohort.model
        )["virtual"]
        later = algorithm.unpack_broadcast(
            {}, cohort.shared_draws(algorithm, "federation", round=5), cohort.model
        )["virtual"]
        assert first["x"].shape == (9, 1, 8, 8) and first["y"].tolist() == [
            0,
            0,
            0,
            1,
            1,
            2,
            2,
            3,
            3,
        ]
        assert (
            first["x"].isfinite().all() and first["x"].abs().max() <= 2 and first["x"].std() > 0.3
        )
        assert torch.equal(first["y"], later["y"])
        distance = torch.cdist(first["x"].flatten(1), first["x"].flatten(1))
        same = first["y"][:, None] == first["y"]
        # Inputs of one class are closer to each other than to those of other classes.
        assert distance[same].sum() / (same.sum() - 9) < distance[~same].mean()


@pytest.mark.slow
def test_power_of_choice_samples_by_size_and_keeps_highest_loss() -> None:
    """p = (.5, .3, .2), losses (1, 2, 3), one of two candidates: P(client 1) = .514286."""
    times_chosen = [0, 0, 0]
    losses = [1.0, 2.0, 3.0]
    for round in range(4000):
        sampler = PowerOfChoice((50, 30, 20), 1, 2, seed=0)
        candidates = sampler.candidates(round)
        chosen = sampler.choose(candidates, [losses[client] for client in candidates])
        times_chosen[chosen[0]] += 1
    assert times_chosen[0] == 0 and abs(times_chosen[1] / 4000 - 0.514286) < 0.03
    all_candidates = PowerOfChoice((5, 5, 5, 5), 2, 4, seed=0)
    assert all_candidates.candidates(0) == [0, 1, 2, 3]
    assert all_candidates.choose([0, 1, 2, 3], [1.0, math.nan, 1.0, math.inf]) == [1, 3]
    assert all_candidates.choose([0, 1, 2, 3], [1.0, 1.0, 1.0, 1.0]) == [0, 1]


def test_ditto_leaves_the_global_model_bit_equal() -> None:
    for module in ("batch-norm", "residual"):
        settings = PARTIAL | {"clip": 0.5}
        fedavg = ToyFederation(FedAvg(), module=USER_MODELS[module](), **settings).final_state()
        ditto = ToyFederation(Ditto(), module=USER_MODELS[module](), **settings).final_state()
        assert all(torch.equal(value, ditto[name]) for name, value in fedavg.items())


def test_fedsam_updates_buffers_once_and_ditto_keeps_its_own() -> None:
    settings: dict[str, Any] = {"module": USER_MODELS["batch-norm"](), "steps": 1, "rounds": 1}
    fedavg = ToyFederation(FedAvg(), **settings).run()[-1].server["buffers"]
    fedsam = ToyFederation(FedSAM(), **settings).run()[-1].server["buffers"]
    assert max_difference(fedavg, fedsam) == 0
    toy = ToyFederation(
        Ditto(lambda_pull=0.1), module=USER_MODELS["batch-norm"](), steps=4, rounds=1
    )
    toy.run()
    personal = toy.simulator.client_states.stacked([0, 1, 2], dict)["personal"]
    for name in toy.server.state["buffers"]:
        assert not torch.equal(personal[name][0], personal[name][1])
