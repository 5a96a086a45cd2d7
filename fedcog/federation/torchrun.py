"""The backend for several processes, on one machine or many, started by torchrun.

The first process leads: it has the server, the record and the client states. The others follow:
they receive their share of a round, and an all-reduce adds up the payloads. Nothing is pickled.
"""

import contextlib
import datetime
import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fedcog.algorithms import Algorithm
from fedcog.core import serialization, tree
from fedcog.core.integers import ceil_div
from fedcog.core.timing import Timings
from fedcog.core.tree import Params, State
from fedcog.engine.aggregation import add_totals
from fedcog.engine.cohort import RoundSpec
from fedcog.engine.cohort_results import CohortResult, join_cohorts
from fedcog.federation.backend import ClientEvaluation, RoundRequest, RoundResult
from fedcog.federation.client_sampling import LossOver
from fedcog.federation.simulator import Simulator

TIMEOUT = datetime.timedelta(days=2)
"""Longest wait for another process: a round may take long, and a dead process is noticed at once.
"""


class RankDied(Exception):
    """Another process of the run ended during the run."""


class ProcessGroup:
    """This process and the others that torchrun started.

    Attributes:
        rank: Number of this process; 0 leads.
        size: Number of processes.
    """

    def __init__(self) -> None:
        if not dist.is_initialized():
            if torch.cuda.is_available():
                local_rank = int(os.environ.get("LOCAL_RANK", "0"))
                torch.cuda.set_device(local_rank % torch.cuda.device_count())
            dist.init_process_group("gloo", timeout=TIMEOUT)
        self._group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()

    def send(self, rank: int, message: State) -> None:
        """Send a message.

        Args:
            rank: The receiver.
            message: A nested dict of tensors and JSON values.
        """
        packed = bytearray(serialization.pack(_to_cpu(message)))
        data = torch.frombuffer(packed, dtype=torch.uint8)
        with _death_noticed():
            dist.send(torch.tensor([len(data)]), rank, group=self._group)
            dist.send(data, rank, group=self._group)

    def receive(self, rank: int) -> State:
        """Receive the next message of another process."""
        size = torch.zeros(1, dtype=torch.int64)
        with _death_noticed():
            dist.recv(size, rank, group=self._group)
            data = torch.empty(int(size), dtype=torch.uint8)
            dist.recv(data, rank, group=self._group)
        return serialization.unpack(data.numpy().tobytes())

    def all_reduce(self, vector: Tensor) -> None:
        """Add up a vector over all processes, in place."""
        with _death_noticed():
            dist.all_reduce(vector, group=self._group)


class TorchrunBackend:
    """Trains each round's clients in all processes, of which each creates one."""

    def __init__(self, group: ProcessGroup, simulator: Simulator) -> None:
        self._group = group
        self._simulator = simulator
        self._template: State | None = None

    # Backend protocol, for the leader

    def run_round(self, request: RoundRequest) -> RoundResult:
        """Train the clients of a round, each process its share."""
        needs_payloads = request.algorithm.num_resums > 0
        spec = request.spec._replace(keep_payloads=needs_payloads)
        states = {
            client_id: self._simulator.client_state(spec.algorithm, spec.broadcast, client_id)
            for client_id in request.client_ids
        }
        shares = [
            request.client_ids[part]
            for part in _even_parts(len(request.client_ids), self._group.size)
        ]
        for rank, share in enumerate(shares[1:], 1):
            own_states = {str(client_id): states[client_id] for client_id in share}
            self._group.send(rank, _spec_message(spec) | {"states": own_states})
        result, new_states = self._train(spec, {id: states[id] for id in shares[0]})
        assert result is not None, "the leader's share is never empty"
        total = {} if needs_payloads else self._sum(spec, result)
        results = [result]
        for rank, share in enumerate(shares[1:], 1):
            answer = self._group.receive(rank)
            if share:
                results.append(self._read_result(answer["result"]))
                received = answer["states"]
                new_states |= {
                    client_id: _nest_like(states[client_id], received.get(str(client_id), {}))
                    for client_id in share
                }
        per_client = add_totals(
            [
                {"per_client": one.total["per_client"]}
                for one in results
                if "per_client" in one.total
            ]
        )
        joined = join_cohorts([one._replace(total={}) for one in results])
        joined = joined._replace(total=total | per_client, timings=result.timings)
        states_in_order = [new_states[client_id] for client_id in request.client_ids]
        if needs_payloads:
            return self._simulator.resummed_result(request, joined, states_in_order)
        return self._simulator.round_result(request.client_ids, joined, states_in_order)

    def keep_states(self, result: RoundResult, is_finite: Sequence[bool]) -> None:
        """Store the clients' new states at the leader.

        Args:
            result: Result of the round.
            is_finite: Which states to store, one per client.
        """
        self._simulator.keep_states(result, is_finite)

    def server_draws(self, algorithm: Algorithm, round: int) -> State:
        """Draw the random tensors of server scope.

        Args:
            algorithm: The algorithm.
            round: Current round, from 0.

        Returns:
            Tensors by name.
        """
        return self._simulator.server_draws(algorithm, round)

    def client_losses(
        self, weights: Params, client_ids: Sequence[int], round: int, loss_over: LossOver
    ) -> list[float]:
        """Return the mean loss of a model at some clients, computed by the leader.

        Args:
            weights: Parameters and buffers.
            client_ids: The clients.
            round: Current round, from 0.
            loss_over: Which training examples to use.

        Returns:
            One loss per client.
        """
        return self._simulator.client_losses(weights, client_ids, round, loss_over)

    def survey(self, algorithm: Algorithm, server: State, round: int) -> State:
        """Survey all clients at the leader, to prepare the server's model for its evaluation.

        Args:
            algorithm: The algorithm.
            server: The server state after the round.
            round: Current round, from 0.

        Returns:
            The server state.
        """
        return self._simulator.survey(algorithm, server, round)

    def evaluate_clients(self, algorithm: Algorithm, server: State, round: int) -> ClientEvaluation:
        """Evaluate models on every client's own test examples, at the leader.

        Args:
            algorithm: The algorithm.
            server: The server state after the round.
            round: Current round, from 0.

        Returns:
            Class statistics of all clients with test examples.
        """
        return self._simulator.evaluate_clients(algorithm, server, round)

    def end(self, outcome: dict[str, Any]) -> None:
        """Send all followers how the run ended."""
        for rank in range(1, self._group.size):
            self._group.send(rank, {"outcome": outcome})

    # For the followers

    def follow(self, algorithm: Algorithm, broadcast_template: State) -> State:
        """Train what the leader sends until the run ends.

        Args:
            algorithm: The algorithm.
            broadcast_template: A broadcast, for its nesting.

        Returns:
            How the run ended, as the leader passed it to `end`.
        """
        device = self._simulator.cohort.data.device
        while "outcome" not in (message := self._group.receive(0)):
            broadcast = tree.to(_nest_like(broadcast_template, message["broadcast"]), device)
            spec = RoundSpec(
                algorithm=algorithm,
                broadcast=broadcast,
                round=message["round"],
                lr=message["lr"],
                evaluate_local=message["evaluate_local"],
                keep_payloads=message["keep_payloads"],
            )
            new_state = algorithm.client_init(broadcast)
            states = {
                int(client_id): tree.to(_nest_like(new_state, state), device)
                for client_id, state in message["states"].items()
            }
            result, new_states = self._train(spec, states)
            if not spec.keep_payloads:
                self._sum(spec, result)
            self._group.send(
                0,
                {
                    "result": {} if result is None else _result_message(result),
                    "states": {str(id): state for id, state in new_states.items()},
                },
            )
        outcome: State = message["outcome"]
        return outcome

    def _train(
        self, spec: RoundSpec, states: dict[int, State]
    ) -> tuple[CohortResult | None, dict[int, State]]:
        """Train this process's share; nothing if it is empty."""
        if not states:
            return None, {}
        result, new_states = self._simulator.train_from(spec, states)
        return result, dict(zip(states, new_states, strict=True))

    def _sum(self, spec: RoundSpec, result: CohortResult | None) -> State:
        """Add up the sums of all processes; per-client parts are left out."""
        if self._template is None:
            answer = self._simulator.answer_template(spec.algorithm, spec.broadcast)
            self._template = answer["total"]
        template = {name: part for name, part in self._template.items() if name != "per_client"}
        expected = tree.flatten(template)
        # A share without a finite payload contributes zeros, or it would spoil the others' sum.
        flat = {name: torch.zeros(like.shape, dtype=like.dtype) for name, like in expected.items()}
        if result is not None and bool(result.update_finite.any()):
            flat = tree.flatten(result.total)
        vector = torch.cat([flat[name].detach().double().cpu().flatten() for name in expected])
        self._group.all_reduce(vector)
        parts = torch.split(vector, [like.numel() for like in expected.values()])
        device = self._simulator.cohort.data.device
        total = {
            name: part.reshape(like.shape).to(device, like.dtype)
            for (name, like), part in zip(expected.items(), parts, strict=True)
        }
        return tree.unflatten_like(template, total)

    def _read_result(self, message: State) -> CohortResult:
        """Return a follower's result, on this process's device."""
        device = self._simulator.cohort.data.device
        fields = {name: value for name, value in message.items() if value is not None}
        defaults: State = {
            "class_stats": None,
            "states": {},
            "artifacts": {},
            "total": {},
            "payloads": {},
        }
        return CohortResult(**(defaults | tree.to(fields, device)), timings=Timings())


def is_started() -> bool:
    """Return whether torchrun started this process along with others."""
    if not dist.is_available() or "MASTER_ADDR" not in os.environ:
        return False
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def is_follower() -> bool:
    """Return whether this is such a process, and not the first."""
    return is_started() and os.environ.get("RANK", "0") != "0"


def _spec_message(spec: RoundSpec) -> State:
    """Encode a round; the algorithm is known to all processes."""
    return {
        "broadcast": spec.broadcast,
        "round": spec.round,
        "lr": spec.lr,
        "evaluate_local": spec.evaluate_local,
        "keep_payloads": spec.keep_payloads,
    }


def _result_message(result: CohortResult) -> State:
    """Encode a result; of the sum only the per-client part, as the rest is all-reduced."""
    fields = result._asdict()
    del fields["timings"]
    per_client = {key: part for key, part in result.total.items() if key == "per_client"}
    return fields | {"total": per_client}


def _even_parts(count: int, num_parts: int) -> list[slice]:
    """Split `range(count)` as evenly as possible; only the first part is never empty."""
    ends = [ceil_div(count * part, num_parts) for part in range(num_parts + 1)]
    return [slice(start, end) for start, end in itertools.pairwise(ends)]


def _nest_like(template: State, message: State) -> State:
    """Nest a received state, which lost its empty dicts, like a template."""
    return tree.unflatten_like(template, tree.flatten(message))


def _to_cpu(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _to_cpu(inner) for name, inner in value.items()}
    return value.cpu() if isinstance(value, Tensor) else value


@contextlib.contextmanager
def _death_noticed() -> Iterator[None]:
    """Explain a broken connection, which means that another process died.

    Raises:
        RankDied: If the connection breaks.
    """
    try:
        yield
    except RuntimeError as error:
        raise RankDied(
            "another process of this run has ended: its error is above, and this run's last "
            "checkpoint is intact. Continue with --resume."
        ) from error
