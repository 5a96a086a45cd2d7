"""One round on a linear model in plain NumPy, with analytic gradients."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedcog.algorithms import Algorithm, FedCOG, FedProx
from fedcog.core import rng
from fedcog.core.optimizers import Optimizer
from fedcog.testing import NUM_CLASSES, ToyFederation, random_vectors

Array = NDArray[np.float64]

LR = 0.1
MOMENTUM = 0.9
DECAY = 1e-3
BATCH = 4
STEPS = 3
SIZES = (30, 20, 10)


def softmax(z: Array) -> Array:
    e = np.exp(z - z.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def federation(algorithm: Algorithm) -> ToyFederation:
    module = nn.Linear(5, NUM_CLASSES)
    with torch.no_grad():
        module.weight.copy_(torch.linspace(-1, 1, 20).reshape(NUM_CLASSES, 5))
        module.bias.copy_(torch.tensor([0.1, -0.2, 0.3, 0.0]))
    return ToyFederation(
        algorithm,
        dataset=random_vectors(),
        module=module,
        sizes=SIZES,
        steps=STEPS,
        batch=BATCH,
        rounds=1,
        lr=LR,
        optimizer=Optimizer("sgd", MOMENTUM, DECAY),
    )


def one_round(toy: ToyFederation, mu: float, fedcog: FedCOG | None) -> tuple[Array, Array]:
    """Compute FedAvg, FedProx or FedCOG with analytic gradients, client by client."""
    weight0 = toy.model.params["weight"].numpy().copy()
    bias0 = toy.model.params["bias"].numpy().copy()
    x_all = toy.data.train_x.double().numpy()
    y_all = toy.data.train_y.numpy()
    total_w = np.zeros_like(weight0)
    total_b = np.zeros_like(bias0)
    total_weight = 0.0
    for client, size in enumerate(SIZES):
        client_ids = torch.tensor([client])
        plan = toy.data.plan_batches(0, client_ids, STEPS, BATCH).indices[0].numpy()
        counts = np.bincount(toy.data.client_labels(client).numpy(), minlength=NUM_CLASSES)
        real_share = 1.0
        generated_share = 0.0
        if fedcog is not None:
            missing = counts.max() - counts
            real_share = counts.sum() / (counts.sum() + missing.sum())
            generated_share = missing.sum() / (counts.sum() + missing.sum())
            generated, picks = generate(toy, fedcog, client, counts, weight0, bias0)
            teacher = softmax(generated @ weight0.T + bias0)
        w = weight0.copy()
        b = bias0.copy()
        vw = np.zeros_like(weight0)
        vb = np.zeros_like(bias0)
        for step in range(STEPS):
            x = x_all[plan[step]]
            y = y_all[plan[step]]
            error = (softmax(x @ w.T + b) - np.eye(NUM_CLASSES)[y]) / BATCH
            gw = real_share * error.T @ x
            gb = real_share * error.sum(0)
            if fedcog is not None:
                u = generated[picks[step]]
                error = (softmax(u @ w.T + b) - teacher[picks[step]]) / BATCH
                gw = gw + generated_share * error.T @ u
                gb = gb + generated_share * error.sum(0)
            gw = gw + mu * (w - weight0) + DECAY * w
            gb = gb + mu * (b - bias0) + DECAY * b
            vw = MOMENTUM * vw + gw
            vb = MOMENTUM * vb + gb
            w = w - LR * vw
            b = b - LR * vb
        client_weight = size / max(SIZES)
        total_w = total_w + client_weight * (w - weight0)
        total_b = total_b + client_weight * (b - bias0)
        total_weight = total_weight + client_weight
    return weight0 + total_w / total_weight, bias0 + total_b / total_weight


def generate(
    toy: ToyFederation, fedcog: FedCOG, client: int, counts: Array, weight: Array, bias: Array
) -> tuple[Array, NDArray[np.int64]]:
    """Generate the inputs of round 1, where only cross-entropy has a gradient.

    The previous model equals the global one there, so the disagreement is constant.
    """
    client_ids = torch.tensor([client])
    x = rng.normal(3, "draw/noise", 0, client_ids, (fedcog.count, 5))[0].double().numpy()
    y = toy.task.targets(
        torch.tensor(counts),
        torch.tensor([0, sum(counts)]),
        "complementary",
        torch.zeros(fedcog.count, 1),
    ).numpy()
    mean = np.zeros_like(x)
    square = np.zeros_like(x)
    for step in range(1, fedcog.steps + 1):
        grad = (softmax(x @ weight.T + bias) - np.eye(NUM_CLASSES)[y]) @ weight / fedcog.count
        mean = 0.5 * mean + 0.5 * grad
        square = 0.9 * square + 0.1 * grad**2
        x = x - fedcog.lr * (mean / (1 - 0.5**step)) / (np.sqrt(square / (1 - 0.9**step)) + 1e-8)
    sizes = torch.tensor([fedcog.count])
    picks = rng.epoch_indices(3, "extra/made", 0, client_ids, sizes, STEPS * BATCH)[0].reshape(
        STEPS, BATCH
    )
    return x, picks.numpy()


FEDCOG = FedCOG(FedProx(mu=0.3), count=9, steps=7, lr=0.05, start_round=0)
