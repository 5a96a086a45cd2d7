"""Tests of FedAvg, FedProx and FedCOG against analytic gradients of a linear model in NumPy."""

import numpy as np
import pytest
import torch
from torch import nn

from fedcog.algorithms import Algorithm, ClientContext, FedAvg, FedCOG, FedProx
from fedcog.core.tasks import SingleLabel
from fedcog.engine.local_training import autograd_gradient
from fedcog.models.functional import Model
from fedcog.testing import NUM_CLASSES
from tests.support.closed_form import FEDCOG, federation, one_round, softmax


@pytest.mark.parametrize(
    ("algorithm", "mu", "fedcog"),
    [(FedAvg(), 0.0, None), (FedProx(mu=0.7), 0.7, None), (FEDCOG, 0.3, FEDCOG)],
    ids=["fedavg", "fedprox", "fedprox+fedcog"],
)
def test_round_equals_closed_form(algorithm: Algorithm, mu: float, fedcog: FedCOG | None) -> None:
    toy = federation(algorithm)
    weight, bias = one_round(toy, mu, fedcog)
    params = toy.run()[-1].server["params"]
    assert np.abs(params["weight"].numpy() - weight).max() < 1e-9
    assert np.abs(params["bias"].numpy() - bias).max() < 1e-9


def test_fedcog_around_fedprox_does_not_scale_the_penalty() -> None:
    """The gradient is real_share * dCE + generated_share * dKL + mu * (theta - global)."""
    generator = torch.Generator().manual_seed(0)
    model = Model(nn.Linear(5, NUM_CLASSES).double(), (5,), NUM_CLASSES)
    global_params = {
        name: torch.randn(value.shape, generator=generator).double()
        for name, value in model.params.items()
    }
    local_params = {
        name: torch.randn(value.shape, generator=generator).double()
        for name, value in model.params.items()
    }
    real = {
        "x": torch.randn(6, 5, generator=generator).double(),
        "y": torch.tensor([0, 1, 2, 3, 0, 1]),
    }
    generated = {
        "x": torch.randn(6, 5, generator=generator).double(),
        "logits": torch.randn(6, 4, generator=generator).double(),
    }
    counts = torch.tensor([40, 0, 10, 25])
    mu = 0.3
    zero = torch.zeros((), dtype=torch.float64)
    broadcast = {"params": global_params, "buffers": {}}
    client = ClientContext(
        model,
        SingleLabel(4),
        broadcast,
        {},
        {},
        zero + 1,
        counts,
        counts,
        *(zero, zero, zero, zero),
        6,
        autograd_gradient,
    )
    algorithm = FedCOG(FedProx(mu=mu), start_round=0)
    grads, _, _ = algorithm.local_grad(
        lambda params, batch: algorithm.local_loss(params, batch, client),
        local_params,
        {**real, "made": generated},
        client,
    )
    real_share = 75 / 160
    generated_share = 85 / 160
    w = local_params["weight"].numpy()
    b = local_params["bias"].numpy()
    error = (softmax(real["x"].numpy() @ w.T + b) - np.eye(4)[real["y"].numpy()]) / 6
    loss_w = error.T @ real["x"].numpy()
    loss_b = error.sum(0)
    error = (softmax(generated["x"].numpy() @ w.T + b) - softmax(generated["logits"].numpy())) / 6
    kl_w = error.T @ generated["x"].numpy()
    kl_b = error.sum(0)
    pull_w = w - global_params["weight"].numpy()
    pull_b = b - global_params["bias"].numpy()
    expected_w = real_share * loss_w + generated_share * kl_w + mu * pull_w
    expected_b = real_share * loss_b + generated_share * kl_b + mu * pull_b
    assert np.abs(grads["weight"].numpy() - expected_w).max() < 1e-12
    assert np.abs(grads["bias"].numpy() - expected_b).max() < 1e-12


def test_overriding_local_loss_is_an_error() -> None:
    with pytest.raises(TypeError, match="Override data_loss"):

        class OverridesLocalLoss(Algorithm):
            def local_loss(self, params, batch, client):  # type: ignore[no-untyped-def, misc]
                return 0
