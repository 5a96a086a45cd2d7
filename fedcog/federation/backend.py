"""What the server asks of a backend, and what a backend answers.

A backend trains the clients of a round: the simulator on this machine, torchrun on several
processes, Flower on remote nodes. All have the same signature.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from fedcog.algorithms import Algorithm
from fedcog.core.timing import Timings
from fedcog.core.tree import Params, State
from fedcog.engine.cohort import RoundSpec
from fedcog.federation.client_sampling import LossOver


class Diverged(Exception):
    """Training diverged: an update or the server state contains NaN or infinity.

    Attributes:
        client_ids: Clients whose update or state is not finite; empty if it is the server's.
        round: The round, from 0.
        advice: What may help.
    """

    def __init__(self, client_ids: Sequence[int], round: int, advice: str = "") -> None:
        """Create the error.

        Args:
            client_ids: Clients whose update or state is not finite; empty if it is the server's.
            round: The round, from 0.
            advice: What may help.
        """
        self.client_ids = list(client_ids)
        self.round = round
        self.advice = advice
        ids = ", ".join(str(client_id) for client_id in client_ids)
        if not client_ids:
            what = "the server state is"
        elif len(client_ids) == 1:
            what = f"the update of client {ids} is"
        else:
            what = f"the updates of clients {ids} are"
        message = f"training diverged in round {round + 1}: {what} not finite. {advice}"
        super().__init__(message.strip())


class NoAnswer(RuntimeError):
    """No client gave a usable answer in a round."""


class RoundRequest(NamedTuple):
    """What the server asks of the clients of a round.

    Attributes:
        algorithm: The algorithm.
        round: Current round, from 0.
        client_ids: Clients that take part, in ascending order.
        candidate_ids: Clients that were considered.
        broadcast: What the server sends.
        lr: Learning rate.
        stats_before: Class statistics of the global model on the test set, `(..., C)`; None if
            local models are not evaluated.
        started: When the round started, in seconds of `time.perf_counter`.
    """

    algorithm: Algorithm
    round: int
    client_ids: list[int]
    candidate_ids: list[int]
    broadcast: State
    lr: float
    stats_before: Tensor | None
    started: float

    @property
    def spec(self) -> RoundSpec:
        """What the clients need to know."""
        evaluate_local = self.stats_before is not None
        return RoundSpec(self.algorithm, self.broadcast, self.round, self.lr, evaluate_local)


class ClientFindings(NamedTuple):
    """Statistics of the clients of a round, one row per client.

    Attributes:
        update_finite: Whether the payload is finite, `(K,)`.
        all_finite: Whether payload and state are finite, `(K,)`.
        loss: Mean loss over the local steps, `(K,)`.
        distance: L2 norm of the change of the parameters, `(K,)`.
        weight: Weight in the server's sum, `(K,)`.
        class_counts: Training examples of each class, `(K, C)`.
        class_stats: Class statistics of the local models, `(K, ..., C)`; None if not evaluated.
        stats_before: Class statistics of the global models that clients started from,
            `(K, ..., C)`; None if all started from that of the request.
        is_evaluated: Whose local model was evaluated, `(K,)`; None if all were, or none.
    """

    update_finite: Tensor
    all_finite: Tensor
    loss: Tensor
    distance: Tensor
    weight: Tensor
    class_counts: Tensor
    class_stats: Tensor | None
    stats_before: Tensor | None = None
    is_evaluated: Tensor | None = None

    def to_tree(self) -> State:
        """Convert to a dict of tensors; missing class statistics are left out."""
        return {name: value for name, value in self._asdict().items() if value is not None}

    def stats_before_of(self, row: int, stats_before: Tensor | None) -> Tensor | None:
        """Return the class statistics of the global model that a client started from.

        Args:
            row: The client's row.
            stats_before: Those of the request.

        Returns:
            The class statistics; None if the client's local model was not evaluated.
        """
        if self.class_stats is None:
            return None
        if self.is_evaluated is not None and not self.is_evaluated[row]:
            return None
        return stats_before if self.stats_before is None else self.stats_before[row]

    @classmethod
    def from_tree(cls, fields: State) -> "ClientFindings":
        """Convert back from `to_tree`."""
        defaults: State = {"class_stats": None}
        return cls(**(defaults | fields))


class Traffic(NamedTuple):
    """Bytes that a client received and sent in a round."""

    received: int
    sent: int


@dataclass(frozen=True)
class RoundResult:
    """What the clients of a round returned, still on the device.

    Attributes:
        client_ids: Clients that answered, in ascending order. In asynchronous rounds a client may
            be there twice.
        total: Sum of their payloads.
        findings: Their statistics; None if only the sum is known.
        mean_loss: Mean loss of the clients; used if there are no findings.
        new_states: What each client keeps, if it keeps it here.
        artifacts: What to save for the report.
        timings: Seconds per part.
        refused: Why the answers of other clients are not in the sum, by client.
        traffic: Measured traffic by client; empty if it was not measured.
        ages: Number of server updates since each client started; None in synchronous rounds.
    """

    client_ids: list[int]
    total: State
    findings: ClientFindings | None
    timings: Timings
    mean_loss: float = float("nan")
    new_states: list[State] = field(default_factory=list)
    artifacts: Params = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    traffic: dict[int, Traffic] = field(default_factory=dict)
    ages: list[int] | None = None


class ClientEvaluation(NamedTuple):
    """How models do on the clients' own test examples.

    Rows are clients. With secure aggregation only sums are known: then there is a single row for
    all of them, and `score_sums`.

    Attributes:
        client_ids: Clients that were evaluated, in ascending order.
        class_counts: Test examples of each class, `(K, C)`.
        num_examples: Number of test examples, `(K,)`.
        class_stats: Class statistics by model: `"global"` and, if clients have models of their own,
            `"personal"`; `(K, ..., C)`.
        calibration: Calibration statistics of the global model, `(K, 3, bins)`, if asked for.
        values: The user's metrics of the global model by name, `(K,)`.
        score_sums: Sum of the clients' scores and of their squares by model, if only sums are
            known.
        num_summed: Number of clients with test examples in these sums.
    """

    client_ids: list[int]
    class_counts: Tensor
    num_examples: Tensor
    class_stats: Params
    calibration: Tensor | None = None
    values: Params | None = None
    score_sums: dict[str, tuple[float, float]] | None = None
    num_summed: int = 0


class Backend(Protocol):
    """Trains the clients of a round."""

    def run_round(self, request: RoundRequest) -> RoundResult:
        """Train the clients of a round and return the sum of their payloads."""

    def keep_states(self, result: RoundResult, is_finite: Sequence[bool]) -> None:
        """Store the clients' new states.

        Args:
            result: Result of the round.
            is_finite: Which states to store, one per client; the others stay as they were.
        """

    def server_draws(self, algorithm: Algorithm, round: int) -> State:
        """Draw the random tensors of server scope.

        Args:
            algorithm: The algorithm.
            round: Current round, from 0.

        Returns:
            Tensors by name.
        """

    def client_losses(
        self, weights: Params, client_ids: Sequence[int], round: int, loss_over: LossOver
    ) -> list[float]:
        """Return the mean loss of a model at some clients.

        Args:
            weights: Parameters and buffers.
            client_ids: The clients.
            round: Current round, from 0.
            loss_over: Which training examples to use.

        Returns:
            One loss per client.
        """

    def survey(self, algorithm: Algorithm, server: State, round: int) -> State:
        """Let all clients help to prepare the server's model for its evaluation.

        Args:
            algorithm: The algorithm.
            server: The server state after the round.
            round: Current round, from 0.

        Returns:
            The server state; as it was, if too few clients can be reached.
        """

    def evaluate_clients(
        self, algorithm: Algorithm, server: State, round: int
    ) -> ClientEvaluation | None:
        """Evaluate the global model, and personal ones, on every client's own test examples.

        Args:
            algorithm: The algorithm.
            server: The server state after the round.
            round: Current round, from 0.

        Returns:
            Statistics of all clients that can be reached; None if there are too few.
        """


class Scorer(Protocol):
    """Evaluates the server's model."""

    @property
    def metric(self) -> str:
        """The main metric."""

    def class_stats(self, server: State) -> Params:
        """Return class statistics by data set, such as `"test"`, and further metrics."""

    def scores(self, class_stats: Params) -> dict[str, float]:
        """Compute scores by name from class statistics in host memory."""

    def client_scores(self, evaluation: ClientEvaluation) -> dict[str, Any]:
        """Summarize how models do on the clients' own test examples."""

    def local_scores(
        self, class_stats: Tensor, stats_before: Tensor, class_counts: Tensor
    ) -> dict[str, float]:
        """Compute the scores of one client's local model.

        Args:
            class_stats: Class statistics of its local model on the test set, `(..., C)`.
            stats_before: Those of the global model it started from.
            class_counts: The client's training examples of each class, `(C,)`.

        Returns:
            Scores by key of `rounds.jsonl`.
        """
