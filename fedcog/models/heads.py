"""Training of a network's last layer alone, on given features."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fedcog.core.tree import Params
from fedcog.models.functional import Model


def train_head(
    model: Model, head: Params, features: Tensor, labels: Tensor, num_steps: int, lr: float
) -> Params:
    """Minimize the cross-entropy of features with Adam, all of them in every step.

    Args:
        model: The network.
        head: Initial weights of its last layer, by their names in the network.
        features: `(N, F)`.
        labels: `(N,)`.
        num_steps: Number of steps.
        lr: Learning rate.

    Returns:
        The trained weights, by the same names.
    """
    with torch.enable_grad():
        trained = {name: value.clone().requires_grad_() for name, value in head.items()}
        optimizer = torch.optim.Adam(trained.values(), lr=lr)
        for _ in range(num_steps):
            optimizer.zero_grad()
            loss = F.cross_entropy(model.classify(trained, features), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return {name: value.detach() for name, value in trained.items()}
