"""Scores of the server's model and of local models."""

from torch import Tensor

from fedcog.algorithms import Algorithm
from fedcog.core.tasks import Metric
from fedcog.core.tree import Params, State
from fedcog.federation.simulator import Simulator


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

    @property
    def metric(self) -> Metric:
        """The main metric."""
        return self._task.metric

    def class_stats(self, server: State) -> Params:
        """Return class statistics on `"test"` and `"validation"` examples, and further metrics."""
        data = self._data
        weights = self._algorithm.server_model(server)
        stats: Params = {}
        if self._use_test_set and self._task.multi_label:  # further metrics need all outputs
            logits = self._evaluator.logits(weights, data.test_x)
            stats["test"] = self._task.class_stats(logits, data.test_y)
            stats |= self._task.extra_metrics(logits, data.test_y)
        elif self._use_test_set:
            stats["test"] = self._evaluator.class_stats(weights, data.test_x, data.test_y)
        if len(data.validation):
            x = data.train_x[data.validation.to(data.train_x.device)]
            y = data.train_y[data.validation]
            stats["validation"] = self._evaluator.class_stats(weights, x, y)
        return stats

    def scores(self, class_stats: Params) -> dict[str, float]:
        """Compute scores by key of `rounds.jsonl` from class statistics in host memory."""
        scores = {
            name: float(value)
            for name, value in class_stats.items()
            if name not in ("test", "validation")
        }
        if "test" in class_stats:
            scores[self.metric] = self._task.score(class_stats["test"], self._test_counts)
        if "validation" in class_stats:
            labels = self._data.train_y[self._data.validation]
            counts = self._task.class_counts(labels).cpu()
            score = self._task.score(class_stats["validation"], counts)
            scores[f"validation_{self.metric}"] = score
        return scores

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
