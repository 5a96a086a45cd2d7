"""How good models are: right answers per class, from which every accuracy here is made."""

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
    """Right answers of each class on stored examples; `each` maps over the leading client axis of `weights`, if any."""
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


def accuracy(hits: Tensor, totals: Tensor) -> float:
    """The share of right answers."""
    return int(hits.sum()) / int(totals.sum())


def own_accuracy(hits: Tensor, totals: Tensor, counts: Tensor) -> float:
    """The share of right answers if the test set had a client's label mix p: sum_c hits_c p_c / sum_c totals_c p_c."""
    mix = counts.double() / counts.sum()
    return float((hits * mix).sum() / (totals * mix).sum())
