"""One round on a linear model, where everything is a formula: written with plain numpy from the algorithm boxes."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from fedcog.algorithms import Algorithm, FedAvg, FedCOG, FedProx, Site
from fedcog.federation.course import autograd
from fedcog.models import Model
from fedcog.optimiser import Optimiser
from fedcog.task import SingleLabel
from fedcog.testing import CLASSES, Small, vectors

Array = NDArray[np.float64]
LR, MOMENTUM, DECAY, BATCH, STEPS = 0.1, 0.9, 1e-3, 4, 3
SIZES = (30, 20, 10)


def softmax(z: Array) -> Array:
    e = np.exp(z - z.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def federation(algorithm: Algorithm) -> Small:
    module = nn.Linear(5, CLASSES)
    with torch.no_grad():
        module.weight.copy_(torch.linspace(-1, 1, 20).reshape(CLASSES, 5))
        module.bias.copy_(torch.tensor([0.1, -0.2, 0.3, 0.0]))
    return Small(
        algorithm,
        dataset=vectors(),
        module=module,
        sizes=SIZES,
        steps=STEPS,
        batch=BATCH,
        rounds=1,
        lr=LR,
        optimiser=Optimiser("sgd", MOMENTUM, DECAY),
    )


def one_round(small: Small, mu: float, cog: FedCOG | None) -> tuple[Array, Array]:
    """FedAvg / FedProx / FedCOG with analytic gradients, client by client."""
    weight0 = small.model.params["weight"].numpy().copy()
    bias0 = small.model.params["bias"].numpy().copy()
    x_all, y_all = small.data.train_x.double().numpy(), small.data.train_y.numpy()
    total_w, total_b, total = np.zeros_like(weight0), np.zeros_like(bias0), 0.0
    for client, size in enumerate(SIZES):
        number = torch.tensor([client])
        plan = small.data.plan(0, number, STEPS, BATCH).picks[0].numpy()
        counts = np.bincount(small.data.labels(client).numpy(), minlength=CLASSES)
        real_share, made_share = 1.0, 0.0
        if cog is not None:
            missing = counts.max() - counts
            real_share = counts.sum() / (counts.sum() + missing.sum())
            made_share = missing.sum() / (counts.sum() + missing.sum())
            made, picks = generated(small, cog, client, counts, weight0, bias0)
            teacher = softmax(made @ weight0.T + bias0)
        w, b, vw, vb = weight0.copy(), bias0.copy(), np.zeros_like(weight0), np.zeros_like(bias0)
        for step in range(STEPS):
            x, y = x_all[plan[step]], y_all[plan[step]]
            error = (softmax(x @ w.T + b) - np.eye(CLASSES)[y]) / BATCH
            gw, gb = real_share * error.T @ x, real_share * error.sum(0)
            if cog is not None:
                u = made[picks[step]]
                error = (softmax(u @ w.T + b) - teacher[picks[step]]) / BATCH
                gw, gb = gw + made_share * error.T @ u, gb + made_share * error.sum(0)
            gw, gb = gw + mu * (w - weight0) + DECAY * w, gb + mu * (b - bias0) + DECAY * b
            vw, vb = MOMENTUM * vw + gw, MOMENTUM * vb + gb
            w, b = w - LR * vw, b - LR * vb
        share = size / max(SIZES)
        total_w, total_b, total = total_w + share * (w - weight0), total_b + share * (b - bias0), total + share
    return weight0 + total_w / total, bias0 + total_b / total


def generated(
    small: Small, cog: FedCOG, client: int, counts: Array, weight: Array, bias: Array
) -> tuple[Array, NDArray[np.int64]]:
    """The first round's inputs: previous = global, so the disagreement is constant and only cross-entropy acts."""
    from fedcog import streams

    number = torch.tensor([client])
    x = streams.normal(3, "draw/noise", 0, number, (cog.count, 5))[0].double().numpy()
    y = small.task.targets(
        torch.tensor(counts), torch.tensor([0, sum(counts)]), "complementary", torch.zeros(cog.count, 1)
    ).numpy()
    mean, square = np.zeros_like(x), np.zeros_like(x)
    for step in range(1, cog.steps + 1):
        slope = (softmax(x @ weight.T + bias) - np.eye(CLASSES)[y]) @ weight / cog.count
        mean, square = 0.5 * mean + 0.5 * slope, 0.9 * square + 0.1 * slope**2
        x = x - cog.lr * (mean / (1 - 0.5**step)) / (np.sqrt(square / (1 - 0.9**step)) + 1e-8)
    sizes = torch.tensor([cog.count])
    picks = streams.windows(3, "extra/made", 0, number, sizes, STEPS * BATCH)[0].reshape(STEPS, BATCH)
    return x, picks.numpy()


COG = FedCOG(FedProx(mu=0.3), count=9, steps=7, lr=0.05, start_round=0)


@pytest.mark.parametrize(
    ("algorithm", "mu", "cog"),
    [(FedAvg(), 0.0, None), (FedProx(mu=0.7), 0.7, None), (COG, 0.3, COG)],
    ids=["fedavg", "fedprox", "fedprox+fedcog"],
)
def test_a_round_is_its_formula(algorithm: Algorithm, mu: float, cog: FedCOG | None) -> None:
    small = federation(algorithm)
    weight, bias = one_round(small, mu, cog)
    params = small.run()[-1].server["params"]
    assert np.abs(params["weight"].numpy() - weight).max() < 1e-9
    assert np.abs(params["bias"].numpy() - bias).max() < 1e-9


def test_the_gradient_of_fedcog_around_fedprox_term_by_term() -> None:
    """real_share * dCE + made_share * dKL + mu * (theta - G): the penalty is not scaled."""
    draw = torch.Generator().manual_seed(0)
    model = Model(nn.Linear(5, CLASSES).double(), (5,), CLASSES)
    sent = {name: torch.randn(value.shape, generator=draw).double() for name, value in model.params.items()}
    now = {name: torch.randn(value.shape, generator=draw).double() for name, value in model.params.items()}
    real = {"x": torch.randn(6, 5, generator=draw).double(), "y": torch.tensor([0, 1, 2, 3, 0, 1])}
    made = {"x": torch.randn(6, 5, generator=draw).double(), "logits": torch.randn(6, 4, generator=draw).double()}
    counts, mu = torch.tensor([40, 0, 10, 25]), 0.3
    zero = torch.zeros((), dtype=torch.float64)
    sent_all, numbers = {"params": sent, "buffers": {}}, (zero, zero, zero, zero)
    site = Site(model, SingleLabel(4), sent_all, {}, {}, zero + 1, counts, counts, *numbers, 6, autograd)
    algorithm = FedCOG(FedProx(mu=mu), start_round=0)
    grads, _ = algorithm.local_grad(
        lambda params, batch: algorithm.local_loss(params, batch, site), now, {**real, "made": made}, site
    )
    real_share, made_share = 75 / 160, 85 / 160
    w, b = now["weight"].numpy(), now["bias"].numpy()
    error = (softmax(real["x"].numpy() @ w.T + b) - np.eye(4)[real["y"].numpy()]) / 6
    loss_w, loss_b = error.T @ real["x"].numpy(), error.sum(0)
    error = (softmax(made["x"].numpy() @ w.T + b) - softmax(made["logits"].numpy())) / 6
    kl_w, kl_b = error.T @ made["x"].numpy(), error.sum(0)
    pull_w, pull_b = w - sent["weight"].numpy(), b - sent["bias"].numpy()
    expected_w = real_share * loss_w + made_share * kl_w + mu * pull_w
    expected_b = real_share * loss_b + made_share * kl_b + mu * pull_b
    assert np.abs(grads["weight"].numpy() - expected_w).max() < 1e-12
    assert np.abs(grads["bias"].numpy() - expected_b).max() < 1e-12


def test_a_subclass_may_not_lose_its_rule_under_a_wrapper() -> None:
    with pytest.raises(TypeError, match="Override data_loss"):

        class Careless(Algorithm):
            def local_loss(self, params, batch, site):  # type: ignore[no-untyped-def, misc]
                return 0
