"""Scores of the server's model, of local models, and of models on the clients' test examples."""

import math
import statistics
from typing import Any

import torch
from torch import Tensor

from fedcog.algorithms import Algorithm, Attack
from fedcog.core.metrics import calibration_stats, evaluate_functions
from fedcog.core.tasks import ATTACK_SUCCESS, Metric
from fedcog.core.tree import Params, State
from fedcog.engine.evaluation import BATCH_SIZE
from fedcog.federation.backend import ClientEvaluation
from fedcog.federation.simulator import Simulator

CALIBRATION = "calibration"
"""Name of the calibration statistics among class statistics."""
OWN_METRIC = "own_metric/"
"""Prefix of the user's metrics among class statistics."""
PREFIXES = {"global": "", "personal": "personal_"}
"""Prefix of a score in `local_test`, by model."""


class ModelScorer:
    """Evaluates models on the test set, and on the validation examples of all clients.

    To record a metric in every round, return it from `scores` (server) or `local_scores` (clients).
    """

    def __init__(self, algorithm: Algorithm, simulator: Simulator, use_test_set: bool) -> None:
        """Create a scorer.

        Args:
            algorithm: Knows which weights of the server state to evaluate.
            simulator: Knows data and network.
            use_test_set: Whether to evaluate the server's model on the test set.
        """
        self._algorithm = algorithm
        self._evaluator = simulator.cohort.evaluator
        self._task = simulator.cohort.task
        self._data = simulator.cohort.data
        self._test_counts = simulator.test_class_counts
        self._use_test_set = use_test_set
        self._metrics = simulator.metrics
        attacks = [device.attack for device in simulator.device_types if device.attack is not None]
        self._attack = next((attack for attack in attacks if attack.has_success), None)

    @property
    def metric(self) -> Metric:
        """The main metric."""
        return self._task.metric

    def class_stats(self, server: State) -> Params:
        """Return class statistics on `"test"` and `"validation"` examples, and further metrics."""
        data = self._data
        weights = self._algorithm.server_model(server)
        stats: Params = {}
        if self._use_test_set:
            stats = self._test_stats(weights)
            if self._attack is not None:
                stats[ATTACK_SUCCESS] = self._attack_success(self._attack, weights)
        if len(data.validation):
            x = data.train_x[data.validation.to(data.train_x.device)]
            y = data.train_y[data.validation]
            stats["validation"] = self._evaluator.class_stats(weights, x, y)
        return stats

    def _attack_success(self, attack: Attack, weights: Params) -> Tensor:
        """Return how often the model decides on test examples as an attack wants, 0-d."""
        data = self._data
        decisions = []
        for rows in torch.split(torch.arange(len(data.test_y)), BATCH_SIZE):
            inputs = data.to_inputs(data.test_x[rows])
            if attack.has_trigger:
                inputs = attack.stamp(inputs)
            decisions.append(self._task.decide(self._evaluator.model.predict(weights, inputs)))
        return attack.success(torch.cat(decisions), data.test_y, self._task.num_classes)

    def _test_stats(self, weights: Params) -> Params:
        """Return class statistics on the test set, and what further metrics need."""
        data = self._data
        metrics = self._metrics
        needs_logits = self._task.multi_label or metrics.functions or metrics.has_calibration
        if not needs_logits:
            return {"test": self._evaluator.class_stats(weights, data.test_x, data.test_y)}
        logits = self._evaluator.logits(weights, data.test_x)
        stats = {"test": self._task.class_stats(logits, data.test_y)}
        stats |= self._task.extra_metrics(logits, data.test_y)
        if metrics.has_calibration:
            parts = zip(torch.split(logits, 1000), torch.split(data.test_y, 1000), strict=True)
            sums = [calibration_stats(*part).sum(0) for part in parts]
            stats[CALIBRATION] = torch.stack(sums).sum(0)
        own = evaluate_functions(metrics.functions, logits, data.test_y)
        return stats | {f"{OWN_METRIC}{name}": value for name, value in own.items()}

    def scores(self, class_stats: Params) -> dict[str, Any]:
        """Compute scores by key of `rounds.jsonl` from class statistics in host memory."""
        scores: dict[str, Any] = {
            name: float(value)
            for name, value in class_stats.items()
            if name not in ("test", "validation", CALIBRATION) and not name.startswith(OWN_METRIC)
        }
        if "test" in class_stats:
            scores[self.metric] = self._task.score(class_stats["test"], self._test_counts)
            if further := self._further_metrics(class_stats):
                scores["metrics"] = further
        if "validation" in class_stats:
            labels = self._data.train_y[self._data.validation]
            counts = self._task.class_counts(labels).cpu()
            score = self._task.score(class_stats["validation"], counts)
            scores[f"validation_{self.metric}"] = score
        return scores

    def _further_metrics(self, class_stats: Params) -> dict[str, Any]:
        """Return the metrics on the test set that the user asked for."""
        found: dict[str, Any] = self._metrics.from_stats(
            class_stats["test"], self._test_counts, class_stats.get(CALIBRATION)
        )
        for name in self._metrics.functions:
            found[name] = float(class_stats[f"{OWN_METRIC}{name}"])
        return found

    def client_scores(self, evaluation: ClientEvaluation) -> dict[str, Any]:
        """Summarize how models do on the clients' own test examples.

        Args:
            evaluation: Statistics of the clients.

        Returns:
            For the global model the metric over all test examples, and over clients its mean
            (`_mean`), its mean over the worst tenth (`_worst`) and its standard deviation
            (`_deviation`); the same for personal models (`personal_`); further metrics over all
            test examples, calibration of the global model only; and `clients`, lists with an entry
            per client of the metric and of the user's metrics. The worst tenth and the lists are
            unknown if only sums are known.
        """
        counts = evaluation.class_counts.sum(0)
        found: dict[str, Any] = {}
        clients: dict[str, Any] = {
            "ids": evaluation.client_ids,
            "examples": evaluation.num_examples.tolist(),
        }
        for model, stats in evaluation.class_stats.items():
            name = f"{PREFIXES[model]}{self.metric}"
            found[name] = self._task.score(stats.sum(0), counts)
            if evaluation.score_sums is not None:
                total, squares = evaluation.score_sums[model]
                found |= _moments(name, total, squares, evaluation.num_summed)
                continue
            rows = zip(stats, evaluation.class_counts, strict=True)
            scores = [self._task.score(own, own_counts) for own, own_counts in rows]
            found |= _spread(name, scores)
            clients[name] = scores
        for model, stats in evaluation.class_stats.items():
            calibration = evaluation.calibration if model == "global" else None
            metrics = self._metrics.from_stats(
                stats.sum(0), counts, None if calibration is None else calibration.sum(0)
            )
            found |= {f"{PREFIXES[model]}{name}": value for name, value in metrics.items()}
        for name, values in (evaluation.values or {}).items():
            found[name] = _weighted_mean(values, evaluation.num_examples)
            clients[name] = [_number_or_none(value) for value in values.tolist()]
        if evaluation.score_sums is None:
            found["clients"] = clients
        else:
            found["num_clients"] = evaluation.num_summed
        return found

    def local_scores(
        self, class_stats: Tensor, stats_before: Tensor, class_counts: Tensor
    ) -> dict[str, float]:
        """Compute the scores of one client's local model on the test set.

        Args:
            class_stats: Class statistics of the local model, `(..., C)`.
            stats_before: Those of the global model that it started from.
            class_counts: The client's training examples of each class, `(C,)`.

        Returns:
            The metric on the whole test set, on the client's own label mix (`own_`), and on the
            classes that it lacks (`absent_`); `_before` is the global model's.
        """
        metric = self.metric
        counts = self._test_counts
        score = self._task.score
        scores = {
            metric: score(class_stats, counts),
            f"own_{metric}": score(class_stats, counts, class_counts),
            f"own_{metric}_before": score(stats_before, counts, class_counts),
        }
        absent = (class_counts == 0).to(class_counts.dtype)
        if metric == "accuracy" and bool((absent * counts).any()):
            scores[f"absent_{metric}"] = score(class_stats, counts, absent)
            scores[f"absent_{metric}_before"] = score(stats_before, counts, absent)
        return scores


def _weighted_mean(values: Tensor, weights: Tensor) -> float:
    """Return the weighted mean of the values that are numbers; NaN if none is."""
    is_number = ~values.isnan()
    weights = weights.double() * is_number
    return float((values.where(is_number, 0.0) * weights).sum() / weights.sum())


def _spread(name: str, scores: list[float]) -> dict[str, float]:
    """Return mean, mean of the worst tenth, and standard deviation over clients."""
    worst_tenth = sorted(scores)[: math.ceil(len(scores) / 10)]
    return {
        f"{name}_mean": statistics.fmean(scores),
        f"{name}_worst": statistics.fmean(worst_tenth),
        f"{name}_deviation": statistics.pstdev(scores),
    }


def _moments(name: str, total: float, squares: float, number: int) -> dict[str, float]:
    """Return mean and standard deviation over clients from sums."""
    mean = total / number
    variance = max(squares / number - mean**2, 0.0)
    return {f"{name}_mean": mean, f"{name}_deviation": math.sqrt(variance)}


def _number_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None
