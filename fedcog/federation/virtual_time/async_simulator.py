"""Asynchronous rounds (FedBuff; Nguyen et al., AISTATS 2022) in virtual time."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedcog.algorithms import Algorithm
from fedcog.algorithms.payloads import scale_update
from fedcog.core import tree
from fedcog.core.timing import Timings
from fedcog.core.tree import Params, State
from fedcog.federation.backend import (
    ClientEvaluation,
    ClientFindings,
    RoundRequest,
    RoundResult,
)
from fedcog.federation.client_sampling import LossOver, Uniform
from fedcog.federation.simulator import Simulator
from fedcog.federation.virtual_time.answers import Answer
from fedcog.federation.virtual_time.clock import VirtualClock


class AsyncRule(NamedTuple):
    """When the server aggregates, and how much it trusts stale answers.

    Attributes:
        buffer_size: Number of answers that the server aggregates at a time.
        exponent: A stale update is multiplied by (1 + age)^-exponent.
        sampling: Samples the clients that start; its count is the number that train at the same
            time.
    """

    buffer_size: int
    exponent: float
    sampling: Uniform

    def staleness_weight(self, age: int) -> float:
        """Return the factor on an update whose client started `age` server versions ago."""
        return float((1 + age) ** -self.exponent)


class AsyncSimulator:
    """The simulator with a server that does not wait for slow clients.

    A round is one aggregation. Between two aggregations this happens, in virtual time:

    1. Idle clients take the free places. They start from the newest model.
    2. The clock advances to the next arrival. All answers of that moment join the buffer.
    3. With fewer than `buffer_size` answers in the buffer, both repeat.

    The server then aggregates the first `buffer_size` answers. A client computes its answer when it
    starts; the answer waits until its time has come. A client starts at most once from each
    version of the model, because a second start would compute the same update again.
    """

    def __init__(self, simulator: Simulator, clock: VirtualClock, rule: AsyncRule) -> None:
        """Create the backend.

        Args:
            simulator: Trains the clients.
            clock: The virtual clock, with what is in flight.
            rule: When the server aggregates.
        """
        self._simulator = simulator
        self._clock = clock
        self._rule = rule

    @torch.no_grad()
    def run_round(self, request: RoundRequest) -> RoundResult:
        """Train clients until enough answers have arrived, and sum their weighted payloads."""
        clock = self._clock
        idle = self._rule.sampling.order(request.round)
        timings = [Timings(dict.fromkeys(("generation", "training", "evaluation"), 0.0))]
        while len(clock.buffer) < self._rule.buffer_size:
            busy = {answer.client_id for answer in clock.in_flight}
            num_free = self._rule.sampling.count - len(busy)
            starting = sorted([id for id in idle if id not in busy][:num_free])
            if starting:
                idle = [id for id in idle if id not in starting]
                timings.append(self._start(request, starting))
            for answer in clock.next_arrivals():
                self._keep_state(answer)
        return self._aggregate(request, clock.take(self._rule.buffer_size), timings)

    def keep_states(self, result: RoundResult, is_finite: Sequence[bool]) -> None:
        """Do nothing: states were stored when the answers arrived."""

    def server_draws(self, algorithm: Algorithm, round: int) -> State:
        """As `Simulator.server_draws`.

        Returns:
            Tensors by name.
        """
        return self._simulator.server_draws(algorithm, round)

    def client_losses(
        self, weights: Params, client_ids: Sequence[int], round: int, loss_over: LossOver
    ) -> list[float]:
        """As `Simulator.client_losses`.

        Returns:
            One loss per client.
        """
        return self._simulator.client_losses(weights, client_ids, round, loss_over)

    def survey(self, algorithm: Algorithm, server: State, round: int) -> State:
        """Survey all clients, to prepare the server's model for its evaluation.

        Returns:
            The server state.
        """
        return self._simulator.survey(algorithm, server, round)

    def evaluate_clients(self, algorithm: Algorithm, server: State, round: int) -> ClientEvaluation:
        """As `Simulator.evaluate_clients`.

        Returns:
            Class statistics of all clients with test examples.
        """
        return self._simulator.evaluate_clients(algorithm, server, round)

    def _start(self, request: RoundRequest, client_ids: list[int]) -> Timings:
        """Train clients from the newest model; their answers arrive when their time has come."""
        spec = request.spec._replace(keep_payloads=True)
        result, states = self._simulator.train(spec, client_ids, self._rule.sampling.count)
        device = result.update_finite.device
        found: State = {
            "update_finite": result.update_finite,
            "all_finite": result.update_finite & result.state_finite.to(device),
            "loss": result.loss,
            "distance": result.distance,
        }
        stats_before: Params = {}
        if result.class_stats is not None and request.stats_before is not None:
            found["class_stats"] = result.class_stats
            stats_before = {"test": request.stats_before}
        findings = tree.to_host(found)
        for row, client_id in enumerate(client_ids):
            answer = Answer(
                client_id=client_id,
                version=request.round,
                finish=self._clock.now + self._clock.durations[client_id],
                payload=_row(result.payloads, row),
                state=states[row],
                findings=_row(findings, row),
                stats_before=tree.apply(torch.clone, stats_before),
                artifacts=result.artifacts if row == 0 else {},
            )
            self._clock.in_flight.append(answer)
        return result.timings

    def _keep_state(self, answer: Answer) -> None:
        """Store the client's new state, which it has from its arrival on."""
        states = self._simulator.client_states
        states.put([answer.client_id], [answer.state], [answer.all_finite])

    def _aggregate(
        self, request: RoundRequest, answers: list[Answer], timings: list[Timings]
    ) -> RoundResult:
        """Sum the payloads, each update multiplied by the weight of its age."""
        answers = sorted(answers, key=lambda answer: (answer.client_id, answer.version))
        client_ids = [answer.client_id for answer in answers]
        ages = [request.round - answer.version for answer in answers]
        payloads = [
            scale_update(self._rule.staleness_weight(age), answer.payload)
            for age, answer in zip(ages, answers, strict=True)
        ]
        is_finite = [answer.update_finite for answer in answers]
        return RoundResult(
            client_ids=client_ids,
            total=self._simulator.sum_payloads(request.spec, client_ids, payloads, is_finite),
            findings=self._findings(answers),
            timings=Timings.concatenate(timings),
            artifacts=answers[0].artifacts,
            ages=ages,
        )

    def _findings(self, answers: Sequence[Answer]) -> ClientFindings:
        """Stack what is known of the clients; local models may be evaluated for some of them."""
        rows = torch.tensor([answer.client_id for answer in answers])
        rows = rows.to(self._simulator.class_counts.device)
        names = ("update_finite", "all_finite", "loss", "distance")
        is_evaluated = [bool(answer.stats_before) for answer in answers]
        findings = ClientFindings(
            **{name: torch.stack([one.findings[name] for one in answers]) for name in names},
            weight=self._simulator.weights[rows],
            class_counts=self._simulator.class_counts[rows],
            class_stats=None,
        )
        if not any(is_evaluated):
            return findings
        return findings._replace(
            class_stats=_stack_known([one.findings.get("class_stats") for one in answers]),
            stats_before=_stack_known([one.stats_before.get("test") for one in answers]),
            is_evaluated=torch.tensor(is_evaluated),
        )


def _row(state: State, row: int) -> State:
    """Return a copy of one client's part, so that it does not keep the whole stack in memory."""
    return tree.apply(torch.clone, tree.take(state, row))


def _stack_known(values: Sequence[Tensor | None]) -> Tensor:
    """Stack tensors of one shape, with zeros for those that are missing."""
    like = next(value for value in values if value is not None)
    return torch.stack([torch.zeros_like(like) if value is None else value for value in values])
