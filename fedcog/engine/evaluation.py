"""Evaluation of models: class statistics, mean loss, outputs."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedcog.core.tasks import Task
from fedcog.core.tree import Params
from fedcog.data.client_batches import FederatedData
from fedcog.models.functional import Model

MapClients = Callable[[Callable[..., Any]], Callable[..., Any]]
BATCH_SIZE = 1000
"""Number of examples evaluated at a time."""


class Evaluator(NamedTuple):
    """Evaluates weights of one network on stored examples.

    Attributes:
        model: The network.
        task: What a label means.
        data: The federated data set, which normalizes inputs.
    """

    model: Model
    task: Task
    data: FederatedData

    def class_stats(
        self, weights: Params, x: Tensor, y: Tensor, map_clients: MapClients | None = None
    ) -> Tensor:
        """Return the task's class statistics on stored examples.

        Args:
            weights: Parameters and buffers; with a client axis if `map_clients` is given.
            x: Stored inputs `(N, ...)`.
            y: Labels `(N, ...)`.
            map_clients: Maps over the leading client axis of `weights`.

        Returns:
            `(..., C)`, with a client axis if mapped.
        """
        total: Tensor | None = None
        with torch.no_grad():
            for start in range(0, len(y), BATCH_SIZE):
                inputs = self.data.to_inputs(x[start : start + BATCH_SIZE])
                labels = y[start : start + BATCH_SIZE]
                evaluate = self._batch_stats(inputs, labels)
                stats: Tensor = (map_clients(evaluate) if map_clients else evaluate)(weights)
                total = stats if total is None else total + stats
        assert total is not None, "a data set without test examples is refused when it is created"
        return total

    def _batch_stats(self, inputs: Tensor, labels: Tensor) -> Callable[[Params], Tensor]:
        return lambda weights: self.task.class_stats(self.model.predict(weights, inputs), labels)

    def mean_loss(self, weights: Params, index: Tensor) -> float:
        """Return the mean loss over some training examples.

        Args:
            weights: Parameters and buffers.
            index: Indices of training examples.

        Returns:
            The mean loss.
        """
        total = 0.0
        with torch.no_grad():
            for part in torch.split(index, BATCH_SIZE):
                examples = self.data.examples(part)
                logits = self.model.predict(weights, examples["x"])
                total += float(self.task.loss(logits, examples["y"]).sum())
        return total / len(index)

    def logits(self, weights: Params, x: Tensor) -> Tensor:
        """Return the outputs on stored examples.

        Args:
            weights: Parameters and buffers.
            x: Stored inputs `(N, ...)`.

        Returns:
            `(N, C)`.
        """
        with torch.no_grad():
            parts = [
                self.model.predict(weights, self.data.to_inputs(part))
                for part in torch.split(x, BATCH_SIZE)
            ]
        return torch.cat(parts)
