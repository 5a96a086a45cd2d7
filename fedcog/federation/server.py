"""The server loop: sample clients, broadcast, aggregate, evaluate, record."""

import statistics
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedcog.algorithms import Algorithm
from fedcog.core import tree
from fedcog.core.lr_schedules import CONSTANT, LRSchedule
from fedcog.core.timing import Stopwatch
from fedcog.core.tree import Params, State
from fedcog.engine.aggregation import is_finite
from fedcog.engine.privacy import Privacy, max_participation
from fedcog.federation.backend import (
    Backend,
    ClientFindings,
    Diverged,
    RoundRequest,
    RoundResult,
    Scorer,
)
from fedcog.federation.client_sampling import ClientSampling
from fedcog.federation.virtual_time.clock import VirtualClock


@dataclass(frozen=True)
class Schedule:
    """Which clients take part, how learning rates change, and when models are evaluated.

    Attributes:
        rounds: Number of rounds.
        sampling: Which clients take part in a round.
        lr: Local learning rate before its schedule.
        client_lr: Schedule of the local learning rate.
        evaluate_every: Number of rounds between evaluations.
        evaluate_local: Whether to evaluate local models too.
        skip_diverged: Whether to leave clients out whose update is not finite, instead of stopping.
        evaluate_clients: Whether to evaluate models on every client's own test examples.
        server_lr: Schedule of the factor on the server's update.
    """

    rounds: int
    sampling: ClientSampling
    lr: float
    client_lr: LRSchedule
    evaluate_every: int
    evaluate_local: bool
    skip_diverged: bool = False
    evaluate_clients: bool = False
    server_lr: LRSchedule = CONSTANT

    def is_evaluated(self, round: int) -> bool:
        """Return whether a round, from 0, is evaluated; the last one always is."""
        return (round + 1) % self.evaluate_every == 0 or round + 1 == self.rounds

    def lr_in_round(self, round: int) -> float:
        """Return the local learning rate of a round, from 0."""
        return self.lr * self.client_lr.factor(round)

    def lr_record(self, round: int) -> dict[str, float]:
        """Return the learning rates of a round, from 0, that change over rounds.

        Returns:
            `"lr"`: the local learning rate; `"server_lr"`: the factor on the server's update.
        """
        record = {}
        if not self.client_lr.is_constant:
            record["lr"] = self.lr_in_round(round)
        if not self.server_lr.is_constant:
            record["server_lr"] = self.server_lr.factor(round)
        return record


@dataclass
class RoundRecord:
    """The record of a finished round: one line of `rounds.jsonl`.

    Attributes:
        round: The round, counted from 1.
        client_ids: Clients that took part.
        loss: Mean loss over clients, by weight.
        local: Record of each client.
        seconds: Seconds per part, and `"total"`.
        candidate_ids: Clients that were considered, if more than took part.
        skipped: Clients left out because their update was not finite.
        forgot: Clients whose update was finite, but not their new state.
        refused: Why answers were not used, by client.
        privacy: Privacy budget spent: epsilon, delta, simulated.
        readings: Metrics that the algorithm reports.
        scores: Scores of the server's model, and of local models on the clients' label mix.
        local_test: Scores on the clients' own test examples.
        learning_rates: Learning rates that change over rounds.
        virtual_seconds: Virtual time at the end of the round; None without a virtual clock.
        ages: Number of server updates since each client started; None in synchronous rounds.
    """

    round: int
    client_ids: list[int]
    loss: float
    local: list[dict[str, float | int]]
    seconds: dict[str, float]
    candidate_ids: list[int] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    forgot: list[int] = field(default_factory=list)
    refused: dict[int, str] = field(default_factory=dict)
    privacy: dict[str, Any] | None = None
    readings: dict[str, float] = field(default_factory=dict)
    scores: dict[str, Any] = field(default_factory=dict)
    local_test: dict[str, Any] = field(default_factory=dict)
    learning_rates: dict[str, float] = field(default_factory=dict)
    virtual_seconds: float | None = None
    ages: list[int] | None = None

    def to_line(self) -> dict[str, Any]:
        """Convert to a line of `rounds.jsonl`; empty fields are left out.

        Existing keys never change, because recorded runs have them.
        """
        line: dict[str, Any] = {
            "round": self.round,
            "clients": self.client_ids,
            "loss": self.loss,
        } | self.learning_rates
        if self.virtual_seconds is not None:
            line["virtual_seconds"] = self.virtual_seconds
        if self.ages is not None:
            line["staleness"] = statistics.fmean(self.ages)
        if len(self.candidate_ids) > len(self.client_ids):
            line["candidates"] = self.candidate_ids
        if self.skipped:
            line["skipped"] = self.skipped
        if self.forgot:
            line["forgot"] = self.forgot
        if self.refused:
            line["refused"] = [
                {"client": client_id, "why": reason}
                for client_id, reason in sorted(self.refused.items())
            ]
        if self.privacy is not None:
            line["privacy"] = self.privacy
        if self.local_test:
            line["local_test"] = self.local_test
        return line | self.readings | self.scores | {"local": self.local, "seconds": self.seconds}


class FinishedRound(NamedTuple):
    """A finished round.

    Attributes:
        record: What happened.
        server: The server state after the round.
        artifacts: What to save for the report.
    """

    record: RoundRecord
    server: State
    artifacts: Params


class Server:
    """The server of a federation.

    Attributes:
        state: The server state after the last finished round.
        backend: Trains the clients; it may be replaced before a round.
        clock: Virtual time; None if devices have no speeds.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        backend: Backend,
        scorer: Scorer,
        schedule: Schedule,
        state: State,
        privacy: Privacy | None = None,
        clock: VirtualClock | None = None,
    ) -> None:
        """Create a server.

        Args:
            algorithm: The algorithm.
            backend: Trains the clients.
            scorer: Evaluates the server's model.
            schedule: When things happen.
            state: The server state to start from.
            privacy: Differential privacy of what clients send.
            clock: Virtual time, if devices have speeds.
        """
        self.algorithm = algorithm
        self.backend = backend
        self.scorer = scorer
        self.schedule = schedule
        self.state = state
        self.privacy = privacy
        self.clock = clock
        self._class_stats: Params | None = None

    def run_round(self, round: int) -> FinishedRound:
        """Run one round, from 0."""
        request = self.start_round(round)
        return self.finish_round(request, self.backend.run_round(request))

    def start_round(self, round: int) -> RoundRequest:
        """Sample the clients of a round, from 0, and decide what they receive."""
        started = time.perf_counter()
        stats_before = None
        if self.schedule.is_evaluated(round) and self.schedule.evaluate_local:
            if self._class_stats is None:
                self._class_stats = tree.to_host(self.scorer.class_stats(self.state))
            stats_before = self._class_stats.get("test")
        sampling = self.schedule.sampling
        candidate_ids = sampling.candidates(round)
        client_ids = candidate_ids
        if sampling.loss_over != "nothing":
            weights = self.algorithm.server_model(self.state)
            losses = self.backend.client_losses(weights, candidate_ids, round, sampling.loss_over)
            client_ids = sampling.choose(candidate_ids, losses)
        return RoundRequest(
            algorithm=self.algorithm,
            round=round,
            client_ids=client_ids,
            candidate_ids=candidate_ids,
            broadcast=self.algorithm.broadcast(self.state),
            lr=self.schedule.lr_in_round(round),
            stats_before=stats_before,
            started=started,
        )

    def finish_round(self, request: RoundRequest, result: RoundResult) -> FinishedRound:
        """Update the server state from the result of a round.

        Args:
            request: What the clients were asked.
            result: What they returned.

        Returns:
            The record and the new server state.

        Raises:
            Diverged: If updates, or the new server state, are not finite.
        """
        stopwatch = Stopwatch(next(iter(tree.flatten(self.state).values())).device)
        is_evaluated = self.schedule.is_evaluated(request.round)
        with torch.no_grad():
            server = self._updated_state(request, result)
            if is_evaluated and self.algorithm.needs_survey:
                server = self.backend.survey(self.algorithm, server, request.round)
        stopwatch.lap("server")
        on_device: State = {
            "finite": is_finite(server),
            "readings": server.get("readings", {}),
            "artifacts": result.artifacts,
        }
        if result.findings is not None:
            on_device["findings"] = result.findings.to_tree()
        if is_evaluated:
            on_device["class_stats"] = self.scorer.class_stats(server)
        on_host = tree.to_host(on_device)  # one transfer from the device
        stopwatch.lap("evaluation")
        findings = None
        if result.findings is not None:
            findings = ClientFindings.from_tree(on_host["findings"])
        record = self._client_part(request, result, findings)
        if not on_host["finite"]:
            raise Diverged([], request.round)
        self.state = server
        self._class_stats = on_host.get("class_stats")
        record.readings = {
            name: float(value) for name, value in on_host.get("readings", {}).items()
        }
        if self.privacy:
            record.privacy = self._privacy_budget(self.privacy, request.round + 1)
        if self._class_stats is not None:
            record.scores = self.scorer.scores(self._class_stats) | self._label_mix_score(record)
        if is_evaluated and self.schedule.evaluate_clients:
            evaluation = self.backend.evaluate_clients(self.algorithm, server, request.round)
            if evaluation is not None:
                record.local_test = self.scorer.client_scores(evaluation)
                record.scores = self._main_score(record)
            stopwatch.lap("evaluation")
        if is_evaluated:
            record.seconds["evaluation"] += stopwatch.seconds()["evaluation"]
        record.seconds["total"] = time.perf_counter() - request.started
        return FinishedRound(record, server, on_host.get("artifacts", {}))

    def _updated_state(self, request: RoundRequest, result: RoundResult) -> State:
        """Return the server state after the server's step."""
        total = result.total
        if self.privacy:
            total = self.privacy.protect_sum(total, request.round)
        draws = self.backend.server_draws(self.algorithm, request.round)
        if self.algorithm.uplink == "per_client" and result.findings is not None:
            self._check_finite(request, result, result.findings)  # a rule may need every client
        total = self.algorithm.aggregate(total)
        server = self.algorithm.server_update(self.state, total, draws)
        return self._scale_step(server, self.schedule.server_lr.factor(request.round))

    def _scale_step(self, server: State, factor: float) -> State:
        """Scale the server's update of the parameters; the rest of its state stays as it is."""
        if factor == 1:
            return server
        step = tree.change(self.state["params"], server["params"])
        return server | {"params": tree.add(self.state["params"], tree.scale(factor, step))}

    def _client_part(
        self, request: RoundRequest, result: RoundResult, findings: ClientFindings | None
    ) -> RoundRecord:
        """Store the clients' states and record what is known of the clients."""
        record = RoundRecord(
            round=request.round + 1,
            client_ids=request.client_ids,
            candidate_ids=request.candidate_ids,
            loss=result.mean_loss,
            local=[{"client": client_id} for client_id in result.client_ids],
            seconds={},
            refused=result.refused,
            learning_rates=self.schedule.lr_record(request.round),
        )
        if result.ages is not None:
            record.client_ids = result.client_ids
            record.candidate_ids = []
            record.ages = result.ages
        if findings is not None:
            record.skipped, record.forgot = self._check_finite(request, result, findings)
            self.backend.keep_states(result, findings.all_finite.tolist())
            record.loss = _weighted_loss(findings)
            record.local = self._client_records(request, result, findings)
        num_heard = max(len(record.client_ids) - len(record.skipped), 1)
        bytes_down = tree.nbytes(request.broadcast)
        bytes_up = _bytes_per_client(result.total, num_heard)
        for row, client_id in enumerate(result.client_ids):
            sizes: dict[str, float | int] = {"down": bytes_down, "up": bytes_up}
            if client_id in result.traffic:
                traffic = result.traffic[client_id]
                sizes = {"down": traffic.received, "up": traffic.sent}
            record.local[row] = sizes | record.local[row]
            if result.ages is not None:
                record.local[row]["age"] = result.ages[row]
        record.seconds = result.timings.seconds()
        record.virtual_seconds = self._advance_clock(request, result)
        return record

    def _advance_clock(self, request: RoundRequest, result: RoundResult) -> float | None:
        """Return the virtual time after the round; a synchronous one waits for its slowest client.

        An asynchronous backend has advanced the clock itself.
        """
        if self.clock is None:
            return None
        if result.ages is None:
            self.clock.wait_for(request.client_ids)
        return float(self.clock.now)

    def _check_finite(
        self, request: RoundRequest, result: RoundResult, findings: ClientFindings
    ) -> tuple[list[int], list[int]]:
        """Return the clients whose update is not finite, and those whose state alone is not."""
        update_finite = findings.update_finite.tolist()
        all_finite = findings.all_finite.tolist()
        rows = list(zip(result.client_ids, update_finite, all_finite, strict=True))
        skipped = [client_id for client_id, finite, _ in rows if not finite]
        not_finite = [client_id for client_id, _, finite in rows if not finite]
        none_left = len(skipped) == len(result.client_ids)
        if not_finite and (not self.schedule.skip_diverged or none_left):
            raise Diverged(not_finite, request.round)
        return skipped, sorted({*not_finite} - {*skipped})

    def _client_records(
        self, request: RoundRequest, result: RoundResult, findings: ClientFindings
    ) -> list[dict[str, float | int]]:
        """Record loss, distance and scores of every client."""
        losses = findings.loss.tolist()
        distances = findings.distance.tolist()
        records: list[dict[str, float | int]] = []
        for row, client_id in enumerate(result.client_ids):
            record: dict[str, float | int] = {
                "client": client_id,
                "loss": losses[row],
                "distance": distances[row],
            }
            stats_before = findings.stats_before_of(row, request.stats_before)
            if stats_before is not None and bool(findings.all_finite[row]):
                assert findings.class_stats is not None
                record |= self.scorer.local_scores(
                    findings.class_stats[row], stats_before, findings.class_counts[row]
                )
            records.append(record)
        return records

    def _label_mix_score(self, record: RoundRecord) -> dict[str, float]:
        """Return the mean score of the clients' models on the test set, by their label mix."""
        metric = self.scorer.metric
        key = f"own_{metric}"
        scores = [float(client[key]) for client in record.local if key in client]
        return {f"label_mix_{metric}": sum(scores) / len(scores)} if scores else {}

    def _main_score(self, record: RoundRecord) -> dict[str, Any]:
        """Add the score over all clients' test examples as the main one, without a test set."""
        metric = self.scorer.metric
        if metric in record.scores:
            return record.scores
        return record.scores | {metric: record.local_test[metric], "evaluated_on": "clients"}

    def _privacy_budget(self, privacy: Privacy, num_rounds: int) -> dict[str, Any]:
        """Return the privacy budget spent after some rounds."""
        sampled = [self.schedule.sampling.candidates(round) for round in range(num_rounds)]
        epsilon = privacy.epsilon(num_rounds, max_participation(sampled))
        return {"epsilon": epsilon, "delta": privacy.delta, "simulated": privacy.simulated}


def _weighted_loss(findings: ClientFindings) -> float:
    """Return the mean loss of the clients with finite updates, by weight."""
    finite = findings.update_finite
    total_weight = torch.where(finite, findings.weight, 0).sum()
    total_loss: Tensor = torch.where(finite, findings.loss * findings.weight, 0).sum()
    return float(total_loss / total_weight)


def _bytes_per_client(total: State, num_clients: int) -> int:
    """Return the bytes that each client sent, given the sum and the stacked per-client parts."""
    per_client = tree.nbytes(total.get("per_client", {}))
    return tree.nbytes(total) - per_client + per_client // num_clients
