"""How good models are: how their answers agree with the labels, class by class, which every score is made of."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedcog.data.federated import FederatedData
from fedcog.models import Model
from fedcog.task import Task
from fedcog.tree import Params

Each = Callable[[Callable[..., Any]], Callable[..., Any]]
BATCH = 1000


def _alone(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def hits(
    model: Model, task: Task, data: FederatedData, weights: Params, x: Tensor, y: Tensor, each: Each = _alone
) -> Tensor:
    """The task's hits on stored examples; `each` maps over the leading client axis of `weights`, if any."""
    total: Tensor | None = None
    with torch.no_grad():
        for at in range(0, len(y), BATCH):
            inputs, labels = data.inputs(x[at : at + BATCH]), y[at : at + BATCH]
            right: Tensor = each(_right(model, task, inputs, labels))(weights)
            total = right if total is None else total + right
    assert total is not None, "a data set without test examples is refused when it is made"
    return total


def _right(model: Model, task: Task, inputs: Tensor, labels: Tensor) -> Callable[[Params], Tensor]:
    return lambda weights: task.hits(model.predict(weights, inputs), labels)


def loss(model: Model, task: Task, data: FederatedData, weights: Params, index: Tensor) -> float:
    """The mean loss of a model in use over some training examples."""
    total = 0.0
    with torch.no_grad():
        for part in torch.split(index, BATCH):
            examples = data.examples(part)
            total += float(task.loss(model.predict(weights, examples["x"]), examples["y"]).sum())
    return total / len(index)


def outputs(model: Model, data: FederatedData, weights: Params, x: Tensor) -> Tensor:
    """A model's outputs on stored examples."""
    with torch.no_grad():
        return torch.cat([model.predict(weights, data.inputs(part)) for part in torch.split(x, BATCH)])
