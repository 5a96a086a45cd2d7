"""Evaluation of models: class statistics, mean loss, outputs."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedcog.core.metrics import MetricFunctions, calibration_stats, evaluate_functions
from fedcog.core.tasks import Task
from fedcog.core.tree import Params
from fedcog.data.client_batches import FederatedData
from fedcog.data.local_tests import LocalTests
from fedcog.models.functional import Model

MapClients = Callable[[Callable[..., Any]], Callable[..., Any]]
BATCH_SIZE = 1000
"""Number of examples evaluated at a time."""


class ClientResults(NamedTuple):
    """How one model does on the clients' own test examples.

    Attributes:
        class_stats: Class statistics, `(K, ..., C)`.
        calibration: Calibration statistics `(K, 3, bins)`, if asked for.
        values: The user's metrics by name, `(K,)`; NaN for clients without test examples or for
            which the metric is not defined, infinity where logits are not finite.
    """

    class_stats: Tensor
    calibration: Tensor | None
    values: Params | None


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

    def client_results(
        self, weights: Params, functions: MetricFunctions, with_calibration: bool
    ) -> ClientResults:
        """Evaluate one model on every client's own test examples.

        Args:
            weights: Parameters and buffers.
            functions: Metrics of the user by name.
            with_calibration: Whether to compute calibration statistics.

        Returns:
            Statistics with a row for each client, also for those without test examples.
        """
        tests = self.data.local_tests
        assert tests is not None, "the server asks for them only if clients have test examples"
        owners = tests.owners.to(self.data.device)
        num_clients = len(tests.sizes)
        total: Tensor | None = None
        calibration: Tensor | None = None
        all_logits = []
        with torch.no_grad():
            for start in range(0, len(tests.y), BATCH_SIZE):
                rows = slice(start, start + BATCH_SIZE)
                labels = tests.y[rows]
                logits = self.model.predict(weights, self.data.to_inputs(tests.x[rows]))
                stats = self.task.example_stats(logits, labels)
                total = _add_by_client(total, stats, owners[rows], num_clients)
                if with_calibration:
                    stats = calibration_stats(logits, labels)
                    calibration = _add_by_client(calibration, stats, owners[rows], num_clients)
                if functions:
                    all_logits.append(logits)
            assert total is not None
            values = None
            if functions:
                values = _client_values(functions, torch.cat(all_logits), tests)
        return ClientResults(total, calibration, values)

    def own_stats(
        self, weights: Params, client_ids: Tensor, map_clients: MapClients | None = None
    ) -> Tensor:
        """Return the class statistics of each client's model on its own test examples.

        Args:
            weights: Parameters and buffers, with a client axis if `map_clients` is given.
            client_ids: `(K,)`, or `(1,)` without a client axis, in host memory.
            map_clients: Maps over the client axis.

        Returns:
            `(K, ..., C)`, or `(..., C)` without a client axis.
        """
        tests = self.data.local_tests
        assert tests is not None
        positions, exists = tests.rows(client_ids)
        batch_size = max(1, BATCH_SIZE // len(client_ids))
        total: Tensor | None = None
        with torch.no_grad():
            for start in range(0, positions.shape[1], batch_size):
                own = positions[:, start : start + batch_size]
                inputs = self.data.to_inputs(tests.x[own.to(tests.x.device)])
                batch = (inputs, tests.y[own.to(tests.y.device)])
                mask = exists[:, start : start + batch_size].to(self.data.device)
                if map_clients is None:
                    stats = self._masked_stats(weights, batch[0][0], batch[1][0], mask[0])
                else:
                    stats = map_clients(self._masked_stats)(weights, *batch, mask)
                total = stats if total is None else total + stats
        assert total is not None
        return total

    def _masked_stats(
        self, weights: Params, inputs: Tensor, labels: Tensor, mask: Tensor
    ) -> Tensor:
        """Return the class statistics of one model on the examples that exist."""
        stats = self.task.example_stats(self.model.predict(weights, inputs), labels)
        return (stats * mask.reshape(-1, *[1] * (stats.dim() - 1))).sum(0)

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


def _add_by_client(total: Tensor | None, stats: Tensor, owners: Tensor, num_clients: int) -> Tensor:
    """Add the statistics of examples to those of their clients."""
    if total is None:
        total = stats.new_zeros(num_clients, *stats.shape[1:])
    return total.index_add(0, owners, stats)


def _client_values(functions: MetricFunctions, logits: Tensor, tests: LocalTests) -> Params:
    """Compute the user's metrics for each client."""
    sizes = tests.sizes.tolist()
    found = {name: torch.full((len(sizes),), torch.nan).double() for name in functions}
    parts = zip(torch.split(logits, sizes), torch.split(tests.y, sizes), strict=True)
    for client_id, (own_logits, own_labels) in enumerate(parts):
        if sizes[client_id] and not bool(own_logits.isfinite().all()):
            for name in functions:  # NaN would mean that the metric is not defined here
                found[name][client_id] = torch.inf
        elif sizes[client_id]:
            for name, value in evaluate_functions(functions, own_logits, own_labels).items():
                found[name][client_id] = value
    return found
