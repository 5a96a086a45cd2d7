"""Tests of more algorithms' formulas on numbers that can be checked by hand."""

import functools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedcog.algorithms import (
    CCVR,
    Algorithm,
    BalancedSoftmax,
    Batch,
    ClientContext,
    FedACG,
    FedAvg,
    FedAvgM,
    FedBABU,
    FedCM,
    FedDC,
    FedDisco,
    FederationInit,
    FedExP,
    FedGKD,
    FedLC,
    FedLESAM,
    FedNTD,
    FedPer,
    FedRS,
    FedSOL,
    FedSpeed,
    FedUV,
    FedVLS,
    GeometricMedian,
    Krum,
    LocalWork,
    Median,
    MultiKrum,
    TrimmedMean,
)
from fedcog.core import tree
from fedcog.core.optimizers import Optimizer
from fedcog.core.tasks import make_task
from fedcog.core.tree import Params, State
from fedcog.engine.local_training import autograd_gradient
from fedcog.testing import ToyFederation, max_difference
from tests.support import plain_loops_today as today

CLOSE = 5e-8


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


class TableModel:
    """A network whose parameter `z` holds the logits of all examples."""

    def __init__(self, num_classes: int = 2) -> None:
        self.num_classes = num_classes
        self.params: Params = {}
        self.buffers: Params = {}

    def forward(self, params: Params, buffers: Params, x: Tensor, key: Any) -> Any:
        return SimpleNamespace(logits=params["z"])

    def predict(self, weights: Params, x: Tensor) -> Tensor:
        return weights["z"]


def client_of(
    counts: Tensor | None = None,
    params: Params | None = None,
    state: State | None = None,
    weight: float = 1.0,
    **broadcast: Any,
) -> ClientContext:
    """Return a client that received `params`."""
    zero = number(0.0)
    class_counts = vector(1.0, 1.0) if counts is None else counts
    sent = {"params": params or {}, "buffers": {}} | broadcast
    model: Any = TableModel(len(class_counts))
    return ClientContext(
        model,
        make_task(len(class_counts), False),
        sent,
        state or {},
        {},
        number(weight),
        class_counts,
        zero,
        zero,
        zero,
        zero,
        zero,
        1,
        autograd_gradient,
    )


def value_and_gradient(
    term: Callable[[Tensor], Tensor], at: Tensor
) -> tuple[float, list[list[float]]]:
    at = at.clone().requires_grad_()
    value = term(at)
    return value.item(), torch.autograd.grad(value, at)[0].tolist()


def data_loss(
    algorithm: Algorithm, z: list[float], counts: list[float], label: int
) -> tuple[float, list[float]]:
    """Return the loss of one example and its gradient by the logits."""
    client = client_of(vector(*counts))
    batch = {"x": vector(0.0), "y": torch.tensor([label])}
    value, gradient = value_and_gradient(
        lambda logits: algorithm.data_loss({"logits": logits}, batch, client), vector(*z)[None]
    )
    return value, gradient[0]


def penalty(
    algorithm: Algorithm,
    z: list[list[float]],
    z_global: list[list[float]],
    labels: list[int],
    counts: list[float],
    **broadcast: Any,
) -> tuple[float, list[list[float]]]:
    """Return the penalty of a batch and its gradient by the logits."""
    client = client_of(
        vector(*counts), {"z": torch.tensor(z_global, dtype=torch.float64)}, **broadcast
    )
    batch = {"x": torch.zeros(len(labels)), "y": torch.tensor(labels)}
    return value_and_gradient(
        lambda logits: algorithm.penalty({"z": logits}, {"logits": logits}, batch, client),
        torch.tensor(z, dtype=torch.float64),
    )


# --- losses for label skew


def test_fedlc_logits_loss_and_gradient() -> None:
    loss, gradient = data_loss(FedLC(tau=1.0), [2, 1, 0], [16, 1, 81], 0)
    assert loss == pytest.approx(0.3242622, abs=CLOSE)
    assert gradient == pytest.approx([-0.2769394, 0.1613366, 0.1156027], abs=CLOSE)
    calibrated = FedLC(tau=1.0).calibrate(vector(2, 1, 0)[None], client_of(vector(16, 1, 81)))
    assert calibrated[0].tolist() == pytest.approx([1.5, 0, -1 / 3])


def test_fedrs_restricted_logits() -> None:
    arguments = ([2.0, 1.0, -1.0], [10.0, 0.0, 5.0], 0)
    assert data_loss(FedRS(), *arguments)[0] == pytest.approx(0.2413113, abs=CLOSE)
    assert data_loss(FedRS(rule="soft"), *arguments)[0] == pytest.approx(0.2523590, abs=CLOSE)
    assert data_loss(FedRS(alpha=1.0), *arguments)[0] == pytest.approx(0.3490122, abs=CLOSE)


def test_fedrs_raises_negative_logits() -> None:
    """Logits (0, -2), class 1 absent: its probability rises from .119 to .269."""
    for alpha, probability in ((1.0, 0.1192029), (0.5, 0.2689414)):
        loss, _ = data_loss(FedRS(alpha=alpha), [0, -2], [5, 0], 0)
        assert 1 - math.exp(-loss) == pytest.approx(probability, abs=CLOSE)


def test_balanced_softmax_loss_and_gradient() -> None:
    loss, gradient = data_loss(BalancedSoftmax(), [0, 0, 0], [8, 2, 0], 0)
    assert loss == pytest.approx(math.log(10 / 8))
    assert gradient == pytest.approx([-0.2, 0.2, 0])
    loss, gradient = data_loss(BalancedSoftmax(), [1, 0, 2], [8, 2, 0], 1)
    assert loss == pytest.approx(2.4742776, abs=CLOSE)
    assert gradient == pytest.approx([0.9157762, -0.9157762, 0], abs=CLOSE)
    assert gradient[2] == 0


@pytest.mark.parametrize(
    "neutral", [FedLC(tau=0.0), BalancedSoftmax(strength=0.0), FedRS(alpha=1.0)]
)
def test_neutral_calibration_is_cross_entropy_with_absent_classes(neutral: Algorithm) -> None:
    arguments = ([2.0, 1.0, -1.0], [10.0, 0.0, 5.0], 0)
    assert data_loss(neutral, *arguments) == data_loss(FedAvg(), *arguments)


def test_smoothing_pushes_absent_classes_down() -> None:
    """Counts (8, 2, 0) + 1 and equal logits: the shares 9, 3, 1 of 13."""
    loss, gradient = data_loss(BalancedSoftmax(smoothing=1.0), [0, 0, 0], [8, 2, 0], 0)
    assert loss == pytest.approx(math.log(13 / 9))
    assert gradient == pytest.approx([9 / 13 - 1, 3 / 13, 1 / 13])


@pytest.mark.parametrize(
    ("temperature", "expected", "slope"), [(1.0, 0.8287249, 0.6118557), (3.0, 1.0802267, 0.7299797)]
)
def test_fedntd_distills_wrong_classes(temperature: float, expected: float, slope: float) -> None:
    algorithm = FedNTD(temperature=temperature)
    value, gradient = penalty(algorithm, [[2, 1, 0]], [[0, 1, 3]], [0], [1, 1, 1])
    assert value == pytest.approx(expected, abs=CLOSE)
    assert gradient[0] == pytest.approx([0, slope, -slope], abs=CLOSE)
    assert gradient[0][0] == 0
    value, gradient = penalty(algorithm, [[0, 1, 3]], [[0, 1, 3]], [0], [1, 1, 1])
    assert value == pytest.approx(0, abs=1e-15)
    assert gradient[0] == pytest.approx([0, 0, 0], abs=1e-15)
    value, gradient = penalty(algorithm, [[2, 1]], [[0, 1]], [0], [1, 1])
    assert (value, gradient) == (0, [[0, 0]])


def test_fedgkd_teacher_and_divergence() -> None:
    """Global models 1, 2, 4 and two models: the teacher of the next round is 3."""
    algorithm = FedGKD(gamma=1.0, models=2)
    server = server_state(algorithm, x=number(1.0))
    teachers = [float(algorithm.broadcast(server)["teacher"]["x"])]
    for change in (1.0, 2.0):
        server = server_update(server, algorithm, {"x": number(change)})
        teachers.append(float(algorithm.broadcast(server)["teacher"]["x"]))
    assert teachers == [1, 1.5, 3]
    value, gradient = penalty(
        algorithm,
        [[2, 1, 0]],
        [[9, 9, 9]],
        [0],
        [1, 1, 1],
        teacher={"z": vector(0, 1, 3)[None]},
    )
    assert value == pytest.approx(1.6851240, abs=CLOSE)
    assert gradient[0] == pytest.approx([0.6232309, 0.1305333, -0.7537642], abs=CLOSE)
    one_model = FedGKD(gamma=1.0, models=1)
    assert one_model.broadcast(server_state(one_model)).keys() == {"params", "buffers"}
    alone = penalty(one_model, [[2, 1, 0]], [[0, 1, 3]], [0], [1, 1, 1])
    assert alone == (value, gradient)


def test_fedvls_distills_absent_classes() -> None:
    vacant = FedVLS(lambda_vacant=1.0, suppression=0.0)
    value, gradient = penalty(vacant, [[7, 0, 1]], [[-3, 1, 0]], [0], [9, 0, 0])
    assert value == pytest.approx(0.4621172, abs=CLOSE)
    assert gradient[0] == pytest.approx([0, -0.4621172, 0.4621172], abs=CLOSE)


@pytest.mark.parametrize("counts", [[9, 3, 0], [9, 3, 1]], ids=["one absent", "none absent"])
def test_fedvls_needs_two_absent_classes(counts: list[float]) -> None:
    vacant = FedVLS(lambda_vacant=1.0, suppression=0.0)
    value, gradient = penalty(vacant, [[7, 0, 1]], [[-3, 1, 0]], [0], counts)
    assert (value, gradient) == (0, [[0, 0, 0]])


def test_fedvls_suppression() -> None:
    """Equal shares of two classes: z is not shifted. Labels (0, 1), logits (., a), (b, .)."""
    lowered = FedVLS(lambda_vacant=0.0, suppression=1.0)
    value, gradient = penalty(lowered, [[3, 0.4], [0.7, 2]], [[0, 0]] * 2, [0, 1], [5, 5])
    a = math.log((1 + math.exp(0.4)) / 2)
    b = math.log((1 + math.exp(0.7)) / 2)
    assert value == pytest.approx((a + b) / 2, abs=1e-8)
    slopes = [math.exp(z) / (1 + math.exp(z)) / 2 for z in (0.4, 0.7)]
    assert gradient[0] == pytest.approx([0, slopes[0]], abs=1e-8)
    assert gradient[1] == pytest.approx([slopes[1], 0], abs=1e-8)


def test_fedvls_is_finite_for_a_batch_of_one_class() -> None:
    lowered = FedVLS(lambda_vacant=1.0, suppression=1.0)
    value, gradient = penalty(lowered, [[3, 0, 1], [2, 0, 1]], [[0, 1, 0]] * 2, [0, 0], [9, 0, 0])
    assert math.isfinite(value)
    assert torch.tensor(gradient).isfinite().all()
    # The client has class 0 alone, and all examples are of it: nothing is lowered.
    _, without = penalty(
        FedVLS(lambda_vacant=1.0, suppression=0.0),
        [[3, 0, 1], [2, 0, 1]],
        [[0, 1, 0]] * 2,
        [0, 0],
        [9, 0, 0],
    )
    assert gradient == without


def test_feduv_terms() -> None:
    rows = torch.tensor([[0.9, 0.1], [0.1, 0.9]], dtype=torch.float64)
    assert float(FedUV.lacking_variance(rows.log())) == pytest.approx(0.1414214, abs=CLOSE)
    corners = torch.tensor([[0.0, 0], [1, 0], [0, 1]], dtype=torch.float64)
    assert float(FedUV.crowding(corners)) == pytest.approx(0.2903647, abs=CLOSE)
    # Equal predictions lack all of 1 / sqrt(10).
    equal = torch.zeros(6, 10, dtype=torch.float64)
    assert float(FedUV.lacking_variance(equal)) == pytest.approx(0.3162278, abs=2e-6)


@pytest.mark.parametrize(
    ("term", "rows"),
    [
        (FedUV.lacking_variance, torch.ones(1, 3)),
        (FedUV.lacking_variance, torch.ones(4, 3)),
        (FedUV.lacking_variance, torch.tensor([[80.0, -80.0], [80.0, -80.0], [79.0, -80.0]])),
        (FedUV.crowding, torch.ones(1, 3)),
        (FedUV.crowding, torch.zeros(4, 3)),
        (FedUV.crowding, torch.tensor([[1.0, 2.0], [1.0, 2.0], [3.0, 2.0]])),
    ],
    ids=["one prediction", "equal", "certain", "one feature row", "dead", "constant column"],
)
def test_feduv_edge_cases_are_finite(term: Callable[[Tensor], Tensor], rows: Tensor) -> None:
    value, gradient = value_and_gradient(term, rows.double())
    assert math.isfinite(value)
    assert torch.tensor(gradient).isfinite().all()
    if len(rows) == 1:
        assert value == 0


def test_feduv_ignores_distances_that_are_rounding() -> None:
    """One example three times and another: the median must not be that of the rounding errors."""
    noise = 1e-7 * torch.linspace(-1, 1, 16).reshape(4, 4)
    rows = torch.tensor([[1.0, 1, 1, 1]] * 3 + [[3.0, 1, 1, 1]]) + noise
    value, gradient = value_and_gradient(FedUV.crowding, rows)
    exact, _ = value_and_gradient(FedUV.crowding, rows.round())
    assert value == pytest.approx(exact, abs=1e-6)
    assert torch.tensor(gradient).abs().max() < 1


# --- local gradients and global momentum


def server_state(algorithm: Algorithm, population: int = 1, **params: Tensor) -> State:
    """Return the initial server state of a model with a few numbers."""
    model: Any = TableModel()
    return algorithm.server_init(
        FederationInit(model, params or {"x": number(0.0)}, number(population), {})
    )


def server_update(
    server: State, algorithm: Algorithm, delta: Params, weight: float = 1.0, **extra: Any
) -> State:
    """Return the server state after a round of one client."""
    total = {
        "delta": tree.scale(weight, delta),
        "buffers": {},
        "weight": number(weight),
        "count": number(1.0),
    }
    return algorithm.server_update(server, algorithm.aggregate(total | extra), {})


Function = Callable[[Params], Tensor]


def run_round(
    algorithm: Algorithm,
    server: State,
    functions: list[Function],
    states: dict[int, State],
    steps: int,
    lr: float,
    momentum: float = 0.0,
) -> State:
    """Return the server state after equal clients took steps on functions of the parameters."""
    total: State = {}
    broadcast = algorithm.broadcast(server)
    for k, f in enumerate(functions):
        if k not in states:
            states[k] = algorithm.client_init(broadcast)
        client = client_of(state=states[k], **broadcast)
        y = algorithm.start_params(client)
        buffer = {name: torch.zeros_like(value) for name, value in y.items()}

        def loss(
            p: Params, batch: Batch, f: Function = f, client: ClientContext = client
        ) -> tuple[Tensor, Params]:
            return f(p) + algorithm.penalty(p, {}, batch, client), {}

        for _ in range(steps):
            step = algorithm.local_grad(loss, y, {}, client)
            for name in y:
                buffer[name] = momentum * buffer[name] + step.grads[name]
            y = {name: y[name] - lr * buffer[name] for name in y}
        length = Optimizer("sgd", momentum).effective_step_size(torch.tensor(steps), lr)
        work = LocalWork(torch.tensor(steps), number(lr), length)
        states[k], payload = algorithm.client_update(y, client, work)
        total = tree.apply(torch.add, total, payload) if total else payload
    return algorithm.server_update(server, algorithm.aggregate(total), {})


def quadratic(curvature: float, minimum: float) -> Function:
    return lambda p: curvature / 2 * (p["x"] - minimum) ** 2


def trajectory(
    algorithm: Algorithm, functions: list[Function], start: float, rounds: int, **options: Any
) -> list[float]:
    """Return the evaluated model after every round."""
    server = server_state(algorithm, len(functions), x=number(start))
    states: dict[int, State] = {}
    values = []
    for _ in range(rounds):
        server = run_round(algorithm, server, functions, states, **options)
        values.append(float(algorithm.server_model(server)["x"]))
    return values


def test_feddc_on_two_quadratics() -> None:
    """It overshoots first, then converges to the global optimum 3."""
    functions = [quadratic(1, 0), quadratic(3, 4)]
    values = trajectory(FedDC(alpha=0.1), functions, 0.0, 400, steps=10, lr=0.05)
    assert values[:4] == pytest.approx([3.1525341, 4.4856909, 4.0977418, 3.2244388], abs=CLOSE)
    assert values[-1] == pytest.approx(3, abs=1e-9)


def elliptic(p: Params) -> Tensor:
    """Return f = y' diag(1, 4) y / 2."""
    return (p["y"] ** 2 * vector(1, 4)).sum() / 2


def elliptic_loss(p: Params, batch: Batch) -> tuple[Tensor, Params]:
    return elliptic(p), {}


@pytest.mark.parametrize(("mix", "expected"), [(1.0, [3.3, 5.6]), (0.5, [3.15, 4.8])])
def test_fedspeed_direction(mix: float, expected: list[float]) -> None:
    algorithm = FedSpeed(alpha=0.1, rho=0.5, mix=mix)
    start = {"y": vector(3, 1)}
    server = server_state(algorithm, y=start["y"])
    broadcast = algorithm.broadcast(server)
    client = client_of(state=algorithm.client_init(broadcast), **broadcast)
    step = algorithm.local_grad(elliptic_loss, start, {}, client)
    assert step.grads["y"].tolist() == pytest.approx(expected)


def test_fedspeed_does_not_perturb_the_quadratic_term() -> None:
    """At theta - G = (1, 0) with h = 0, alpha adds (alpha, 0) to the direction."""
    algorithm = FedSpeed(alpha=0.2, rho=0.5)
    broadcast = algorithm.broadcast(server_state(algorithm, y=vector(2, 1)))
    client = client_of(state=algorithm.client_init(broadcast), **broadcast)
    step = algorithm.local_grad(elliptic_loss, {"y": vector(3, 1)}, {}, client)
    assert step.grads["y"].tolist() == pytest.approx([3.5, 5.6])


@pytest.mark.parametrize("rho", [0.5, 50.0])
def test_fedlesam_does_not_perturb_new_clients(rho: float) -> None:
    for dtype in (torch.float32, torch.float64):
        start = {"y": vector(3, 1).to(dtype)}
        client = client_of(params=start, state={"received": start})
        step = FedLESAM(rho=rho).local_grad(elliptic_loss, start, {}, client)
        assert step.grads["y"].tolist() == [3, 4]


def test_fedlesam_direction() -> None:
    algorithm = FedLESAM(rho=0.5)
    start = {"y": vector(3, 1)}
    client = client_of(params=start, state={"received": {"y": vector(6, 5)}})
    step = algorithm.local_grad(elliptic_loss, start, {}, client)
    assert step.grads["y"].tolist() == pytest.approx([3.3, 5.6])
    newcomer = client_of(
        params=start, state=algorithm.client_init({"params": start, "buffers": {}})
    )
    step = algorithm.local_grad(elliptic_loss, start, {}, newcomer)
    assert step.grads["y"].tolist() == [3, 4]


@pytest.mark.parametrize(
    ("scaling", "expected"), [("fixed", [0.3, 0.4]), ("adaptive", [0.18, 0.32])]
)
def test_fedsol_perturbation(scaling: Any, expected: list[float]) -> None:
    """With |theta - G|^2 / 2 for the distillation loss, theta - G = (3, 4)."""
    algorithm = FedSOL(rho=0.5, scaling=scaling)
    theta = {"y": vector(3, 4)}
    client = client_of(params={"y": vector(0, 0)})
    perturbation = algorithm.perturbation(theta, theta, client)
    assert perturbation["y"].tolist() == pytest.approx(expected)
    direction = autograd_gradient(lambda p, batch: elliptic(p), tree.add(theta, perturbation), {})[
        0
    ]
    assert direction["y"].tolist() == pytest.approx([3 + expected[0], 4 * (4 + expected[1])])


@pytest.mark.parametrize("scaling", ["fixed", "adaptive"])
def test_fedsol_is_not_perturbed_at_the_global_model(scaling: Any) -> None:
    logits = torch.tensor([[0.3, -1.2, 0.9], [2.0, 0.1, 0.2]])  # float32, where r is 1e-9
    client = client_of(params={"z": logits})
    batch = {"x": torch.zeros(2), "y": torch.tensor([0, 1])}

    def loss(p: Params, batch: Batch) -> tuple[Tensor, Params]:
        return (p["z"] ** 2).sum() / 2, {}

    step = FedSOL(scaling=scaling).local_grad(loss, {"z": logits}, batch, client)
    assert torch.equal(step.grads["z"], logits)


def test_fedsol_keeps_zero_columns() -> None:
    """The second column did not move: the perturbation of its weights is 0, not NaN."""
    theta = {"w": torch.tensor([[3.0, 0.0], [4.0, 0.0]], dtype=torch.float64)}
    client = client_of(params={"w": torch.zeros(2, 2, dtype=torch.float64)})
    toward = {"w": torch.ones(2, 2, dtype=torch.float64)}
    perturbation = FedSOL(rho=1.0).perturbation(toward, theta, client)["w"]
    assert perturbation.flatten().tolist() == pytest.approx([0.3, 0, 0.4, 0])


def test_fedacg_sends_what_lies_ahead() -> None:
    algorithm = FedACG(beta=0.85)
    server = server_state(algorithm)
    sent = []
    evaluated = []
    for _ in range(3):
        sent.append(float(algorithm.broadcast(server)["params"]["x"]))
        server = server_update(server, algorithm, {"x": number(1.0)})
        evaluated.append(float(algorithm.server_model(server)["x"]))
    assert sent == pytest.approx([0, 1.85, 4.4225])
    assert evaluated == pytest.approx([1, 2.85, 5.4225])


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        (FedACG(beta=0.85, mu=0.0), [0.9, 0.7335, 0.532778]),
        (FedAvgM(beta=0.85), [0.9, 0.725, 0.50375]),
    ],
    ids=["fedacg", "fedavgm"],
)
def test_fedacg_is_not_fedavgm(algorithm: Algorithm, expected: list[float]) -> None:
    values = trajectory(algorithm, [quadratic(1, 0)], 1.0, 3, steps=1, lr=0.1)
    assert values == pytest.approx(expected, abs=5e-7)


def test_fedacg_penalty_has_no_factor_one_half() -> None:
    """Two steps of lr .1 on a constant function: the first has no gradient of its own."""
    client = client_of(params={"x": number(1.0)})
    value = FedACG(mu=0.3).penalty({"x": number(3.0)}, {}, {}, client)
    assert float(value) == pytest.approx(0.3 * 4)


@pytest.mark.parametrize(("steps", "momentum"), [(5, 0.9), (3, 0.0)])
def test_fedcm_converges_to_a_constant_gradient(steps: int, momentum: float) -> None:
    """Gradient 2, alpha .1: V = .2, .38, .542, ... With momentum too: V is per effective step."""
    algorithm = FedCM(alpha=0.1)
    server = server_state(algorithm)
    states: dict[int, State] = {}
    values = []
    for _ in range(200):
        functions: list[Function] = [lambda p: 2 * p["x"]]
        server = run_round(algorithm, server, functions, states, steps, 0.1, momentum)
        values.append(float(server["direction"]["x"]))
    assert values[:3] == pytest.approx([0.2, 0.38, 0.542])
    assert values[-1] == pytest.approx(2)


def test_fedcm_direction() -> None:
    client = client_of(params={"x": number(0.0)}, direction={"x": number(1.0)})
    step = FedCM(alpha=0.1).local_grad(
        lambda p, batch: (2 * p["x"], {}), {"x": number(0.0)}, {}, client
    )
    assert float(step.grads["x"]) == pytest.approx(1.1)


# --- the server


def payload_of(
    algorithm: Algorithm, update: Tensor, weight: float, counts: Tensor | None = None
) -> State:
    """Return the payload of a client whose model changed by `update`."""
    client = client_of(counts, {"x": torch.zeros_like(update)}, weight=weight)
    work = LocalWork(torch.tensor(1), number(0.1), number(0.1))
    return algorithm.client_update({"x": update}, client, work)[1]


def applied_update(algorithm: Algorithm, payloads: list[State]) -> list[float]:
    """Return the update that the server applies, after all sums of a round."""
    total = sum_of([algorithm.first_payload(one) for one in payloads])
    for _ in range(algorithm.num_resums):
        broadcast = algorithm.resum_broadcast(total)
        answers = [algorithm.resum_payload(one, broadcast) for one in payloads]
        total = total | sum_of(answers)
        payloads = [one | answer for one, answer in zip(payloads, answers, strict=True)]
    mean = algorithm.mean_update(algorithm.aggregate(total))
    values: list[float] = mean["delta"]["x"].tolist()
    return values


def sum_of(payloads: list[State]) -> State:
    """Add payloads up; what the server sees of every client is stacked."""
    sums = [{key: one[key] for key in one if key != "per_client"} for one in payloads]
    total = functools.reduce(functools.partial(tree.apply, torch.add), sums)
    if "per_client" in payloads[0]:
        total["per_client"] = tree.stack([one["per_client"] for one in payloads])
    return total


UNITS = torch.eye(3, dtype=torch.float64)
COUNTS = torch.tensor([[5.0, 5], [9, 1], [10, 0]], dtype=torch.float64)


def disco_weights(algorithm: FedDisco) -> list[float]:
    """Return the weights of three clients, which send unit vectors."""
    payloads = [
        payload_of(algorithm, unit, weight, counts)
        for unit, weight, counts in zip(UNITS, (0.5, 0.3, 0.2), COUNTS, strict=True)
    ]
    return applied_update(algorithm, payloads)


@pytest.mark.parametrize(
    ("distance", "expected"),
    [("kl", [0.7258799, 0.2741201, 0]), ("l2", [0.8366366, 0.1633635, 0])],
)
def test_feddisco_weights(distance: Any, expected: list[float]) -> None:
    assert disco_weights(FedDisco(distance=distance)) == pytest.approx(expected, abs=2e-7)


def test_feddisco_divergences() -> None:
    divergences = [float(FedDisco().discrepancy(counts)) for counts in COUNTS]
    assert divergences == pytest.approx([0, 0.3680642, 0.6931472], abs=CLOSE)


def test_feddisco_leaves_the_model_if_all_weights_are_zero() -> None:
    payloads = [payload_of(FedDisco(a=10.0, b=0.0), unit, 0.5, COUNTS[2]) for unit in UNITS]
    assert applied_update(FedDisco(a=10.0, b=0.0), payloads) == [0, 0, 0]


def test_feddisco_with_balanced_clients_is_finite() -> None:
    """All divergences are 0, and so is their sum: the weights are the shares plus b."""
    payloads = [
        payload_of(FedDisco(), unit, weight, COUNTS[0])
        for unit, weight in zip(UNITS, (0.5, 0.3, 0.2), strict=True)
    ]
    assert applied_update(FedDisco(), payloads) == pytest.approx([0.6 / 1.3, 0.4 / 1.3, 0.3 / 1.3])


def survey_of(*features: float) -> State:
    """Return a client's sums of one class and one feature."""
    values = vector(*features)
    return {
        "num_examples": number(len(features))[None],
        "feature_sum": values.sum()[None, None],
        "feature_products": (values**2).sum()[None, None, None],
    }


def test_ccvr_moments() -> None:
    """Features {0, 2} and {4}: mean 2, variance 4, that of all three."""
    total = tree.apply(torch.add, survey_of(0, 2), survey_of(4))
    mean, factor = CCVR().moments(total)
    assert mean.tolist() == [[2]]
    # A thousandth of the variance is added for the factorization.
    assert float(factor) ** 2 == pytest.approx(4 * 1.001)


def test_ccvr_covariances_are_those_of_pooled_features() -> None:
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(12, 3, generator=generator).double() * 2 + 5
    labels = torch.arange(12) % 2
    model: Any = SimpleNamespace(num_classes=2, features=lambda weights, x: x)
    parts = [
        CCVR().survey({}, {"x": features[rows], "y": labels[rows]}, model)
        for rows in (slice(0, 5), slice(5, 6), slice(6, 12))
    ]
    mean, factor = CCVR().moments(sum_of(parts))
    for c in range(2):
        covariance = torch.cov(features[labels == c].T)
        ridge = 0.001 * covariance.diagonal().mean() * torch.eye(3)
        assert torch.allclose(mean[c], features[labels == c].mean(0), atol=1e-12)
        assert torch.allclose(factor[c] @ factor[c].T, covariance + ridge, atol=1e-12)


def test_ccvr_skips_classes_without_a_covariance() -> None:
    """Class 3 has one example: its virtual features train nothing."""
    algorithm = CCVR(samples=5, steps=3)
    model: Any = ToyFederation(Algorithm()).model
    generator = torch.Generator().manual_seed(2)
    batch = {
        "x": torch.randn(13, model.num_features, generator=generator).double(),
        "y": torch.tensor([0, 1, 2] * 4 + [3]),
    }
    classes: Any = SimpleNamespace(num_classes=4, features=lambda weights, x: x)
    total = algorithm.survey({}, batch, classes)
    noise = torch.randn(4, 5, model.num_features, generator=generator).double()
    initial = {name: model.params[name] for name in model.head_names}
    server = {"params": model.params, "buffers": model.buffers, "calibrated": initial}
    after = algorithm.use_survey(server, total, {"virtual_features": noise}, model)
    noise[3] = 1e3
    same = algorithm.use_survey(server, total, {"virtual_features": noise}, model)
    assert max_difference(after["calibrated"], same["calibrated"]) == 0
    assert max_difference(after["calibrated"], initial) > 0
    assert after["params"] is server["params"]
    evaluated = algorithm.server_model(after)
    assert max_difference(evaluated, model.params | after["calibrated"] | model.buffers) == 0


def test_ccvr_starts_from_the_evaluated_head() -> None:
    """FedExP evaluates the mean of two models; without training steps CCVR changes nothing."""
    inner = FedExP(average=True)
    toy = ToyFederation(CCVR(inner, samples=3, steps=0))
    server = toy.run()[-1].server
    evaluated = toy.algorithm.server_model(server)
    assert max_difference(evaluated, inner.server_model(server)) == 0


# --- personalized methods


def test_fedper_keeps_heads_and_averages_bodies() -> None:
    """In one round the shared layers are those of FedAvg, and heads differ."""
    settings: dict[str, Any] = {"rounds": 1, "steps": 3}
    fedavg = ToyFederation(FedAvg(), **settings).run()[-1].server["params"]
    toy = ToyFederation(FedPer(), **settings)
    server = toy.run()[-1].server
    names = toy.model.head_names
    assert server["params"].keys() == fedavg.keys() - set(names)
    assert max_difference(server["params"], {k: fedavg[k] for k in server["params"]}) == 0
    assert all(torch.equal(server["head"][name], toy.model.params[name]) for name in names)
    heads = toy.simulator.client_states.stacked([0, 1, 2], dict)["head"]
    assert all(not torch.equal(heads[name][0], heads[name][1]) for name in names)


def test_fedbabu_freezes_the_head_bit_by_bit() -> None:
    """Momentum and weight decay do not move it; in one step the body is that of FedAvg."""
    optimizer = Optimizer("sgd", 0.9, 0.1)
    toy = ToyFederation(FedBABU(), rounds=3, steps=4, optimizer=optimizer)
    server = toy.run()[-1].server
    names = toy.model.head_names
    weights = toy.algorithm.server_model(server)
    assert all(torch.equal(weights[name], toy.model.params[name]) for name in names)
    one_step: dict[str, Any] = {"rounds": 1, "steps": 1, "optimizer": optimizer}
    fedavg = ToyFederation(FedAvg(), **one_step).run()[-1].server["params"]
    fedbabu = ToyFederation(FedBABU(), **one_step).run()[-1].server["params"]
    body = fedavg.keys() - set(names)
    assert all(torch.equal(fedavg[name], fedbabu[name]) for name in body)


# --- robust rules


FIVE = (0.0, 1.0, 2.0, 3.0, 100.0)


def robust_update(algorithm: Algorithm, values: tuple[float, ...], *weights: float) -> float:
    """Return the update that the server applies to a model with one number."""
    shares = weights or (1.0,) * len(values)
    payloads = [
        payload_of(algorithm, vector(value), weight)
        for value, weight in zip(values, shares, strict=True)
    ]
    return applied_update(algorithm, payloads)[0]


def test_krum_scores_and_choice() -> None:
    """Of the tie between 1 and 2 the first wins."""
    updates = {"delta": {"x": vector(*FIVE)[:, None]}, "buffers": {}}
    scores = Krum().scores(updates, torch.ones(5, dtype=torch.float64))
    assert scores.tolist() == [5, 2, 2, 5, 19013]
    assert robust_update(Krum(), FIVE) == 1
    assert robust_update(MultiKrum(keep=3), FIVE) == 1
    # By default all but one attacker's: 0, 1, 2 and 3.
    assert robust_update(MultiKrum(), FIVE) == 1.5


def test_krum_chooses_alike_whatever_the_weights() -> None:
    weights = (1.0, 0.5, 0.25, 0.5, 0.125)
    assert robust_update(Krum(), FIVE, *weights) == 1
    # The chosen ones are averaged with their weights.
    chosen = (0.0 * 1 + 1.0 * 0.5 + 2.0 * 0.25) / 1.75
    assert robust_update(MultiKrum(keep=3), FIVE, *weights) == pytest.approx(chosen)


def test_krum_measures_differences_exactly() -> None:
    """Close updates that are long: a Gram matrix would lose their distances."""
    delta = {"x": torch.tensor([1e4, 1e4 + 1, 1e4 + 2, 1e4 + 3, 0.0])[:, None]}
    scores = Krum().scores({"delta": delta, "buffers": {}}, torch.ones(5))
    assert scores[:4].tolist() == [5, 2, 2, 5]


@pytest.mark.parametrize("algorithm", [Median(), TrimmedMean(trim=1)], ids=["median", "trimmed"])
def test_median_and_trimmed_mean(algorithm: Algorithm) -> None:
    assert robust_update(algorithm, FIVE) == 2
    assert robust_update(algorithm, (100.0, 2.0, 0.0, 3.0, 1.0)) == 2
    assert robust_update(algorithm, FIVE, 1.0, 0.5, 0.25, 0.5, 0.125) == pytest.approx(2)


def test_median_of_an_even_number_is_the_mean_of_the_middle_two() -> None:
    assert robust_update(Median(), (0.0, 1.0, 2.0, 100.0)) == 1.5
    assert robust_update(Median(), (3.0, 8.0)) == 5.5


CORNERS = ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0))


@pytest.mark.parametrize(
    ("points", "passes", "expected", "tolerance"),
    [
        (CORNERS, 0, 1 / 3, 1e-12),
        (CORNERS, 1, 0.2792408, CLOSE),
        (CORNERS, 4, 0.2285353, CLOSE),
        (CORNERS, 60, 0.2113249, CLOSE),
        ((*CORNERS, (100.0, 100.0)), 0, 25.25, 1e-12),
        ((*CORNERS, (100.0, 100.0)), 1, 10.30, 0.005),
        ((*CORNERS, (100.0, 100.0)), 4, 0.795, 0.0005),
        ((*CORNERS, (100.0, 100.0)), 400, 0.5, 1e-3),
    ],
)
def test_geometric_median_passes(
    points: tuple[tuple[float, float], ...], passes: int, expected: float, tolerance: float
) -> None:
    algorithm = GeometricMedian(passes=passes)
    payloads = [payload_of(algorithm, vector(*point), 1.0) for point in points]
    assert applied_update(algorithm, payloads) == pytest.approx([expected] * 2, abs=tolerance)


def test_geometric_median_of_far_and_weighted_points() -> None:
    """Weights that differ, lengths from 1e-3 to 1e3: the plain algorithm gives the same."""
    generator = torch.Generator().manual_seed(5)
    scales = vector(1e-3, 1e-3, 1, 30, 1e3)
    points = torch.randn(5, 7, generator=generator).double() * scales[:, None]
    weights = {0: 0.2, 1: 1.0, 2: 0.7, 3: 0.4, 4: 0.9}
    algorithm = GeometricMedian(passes=6)
    payloads = [payload_of(algorithm, points[i], weights[i]) for i in weights]
    expected = today.weiszfeld({i: {"x": points[i]} for i in weights}, weights, 6, 1e-5)["x"]
    assert applied_update(algorithm, payloads) == pytest.approx(expected.tolist(), rel=1e-9)
