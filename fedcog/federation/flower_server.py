"""The Flower server app: the backend whose clients are Flower nodes."""

import contextlib
import dataclasses
import functools
import logging
import math
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

from fedcog.federation.flower_messages import (  # first: it configures Flower before its import
    BROADCAST_RECORD,
    CLASS_STATS_KEY,
    COUNT_BOUNDS,
    EVALUATE,
    EVALUATE_KEY,
    EVALUATE_ONLY_KEY,
    MODEL_RECORD,
    QUERY,
    REQUEST_RECORD,
    RESUM_KEY,
    SURVEY_KEY,
    TRAIN,
    NodeSetup,
    TrafficMeter,
    answer_result,
    evaluation_state,
    masked_counts,
    read_answer,
    read_evaluation,
    read_part,
    summed_evaluation,
    to_array_record,
)

# isort: split
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.common import FitIns, FitRes, Parameters, parameters_to_ndarrays
from flwr.server import LegacyContext
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD, Key
from flwr.serverapp import Grid, ServerApp

from fedcog.algorithms import Algorithm
from fedcog.core import tree
from fedcog.core.metrics import NUM_CALIBRATION_BINS
from fedcog.core.timing import Timings
from fedcog.core.tree import Params, State
from fedcog.engine.aggregation import InvalidPayload, NotFinite, add_totals
from fedcog.engine.cohort_results import join_single_clients
from fedcog.federation import secure_aggregation
from fedcog.federation.backend import (
    ClientEvaluation,
    Diverged,
    NoAnswer,
    RoundRequest,
    RoundResult,
    Traffic,
)
from fedcog.federation.client_sampling import LossOver
from fedcog.federation.flower_client import client_app
from fedcog.federation.simulator import is_personalized

__all__ = ["FlowerBackend", "SecAggRound", "ServerApp", "server_app", "simulate"]

MAX_NEIGHBORS = 33
"""SecAgg+: largest number of clients that share a client's secret."""
MIN_SECAGG_CLIENTS = 3
"""Of two clients, each would learn the other's payload."""
QUERY_TIMEOUT_SECONDS = 120.0
"""Longest wait for a node to say which partition it holds."""
NO_REPLY = "it did not answer in time."

Messages = dict[str, Any]
"""Records of a message by name."""


class MaskedSum(NamedTuple):
    """What secure aggregation reveals.

    Attributes:
        total: Sum of the nodes' vectors.
        client_ids: The clients in the sum.
        refused: Why others are not, by client.
    """

    total: Any
    client_ids: list[int]
    refused: dict[int, str]


class FlowerBackend:
    """The backend whose clients are nodes behind a Flower grid.

    A node is found by the partition that it holds.
    """

    def __init__(
        self,
        grid: Grid,
        context: Context,
        setup: NodeSetup,
        run: str = "",
        timeout: float | None = None,
    ) -> None:
        """Create a backend.

        Args:
            grid: Flower's connection to the nodes.
            context: Flower's context of the server app.
            setup: The experiment.
            run: Hexadecimal name of the run, under which nodes store their state.
            timeout: Seconds to wait for answers; None waits forever.
        """
        self._grid = grid
        self._context = context
        self._setup = setup
        self._run = run
        self._timeout = timeout
        self._nodes: dict[int, int] = {}
        self._has_started = False

    # Backend protocol

    def run_round(self, request: RoundRequest) -> RoundResult:
        """Train the clients of a round at their nodes."""
        meter = TrafficMeter(self._grid)
        started = time.perf_counter()
        deadline = self._deadline()
        aggregate = self._aggregate_masked if self._setup.secure_scale else self._aggregate
        while True:
            nodes = self._connected_nodes(request.client_ids)
            try:
                result = aggregate(request, nodes, meter)
                result = self._resum(request, result, nodes, meter)
                break
            except NoAnswer as error:
                all_offline = meter.unavailable and meter.unavailable == meter.failures.keys()
                if not all_offline or time.monotonic() > deadline:
                    raise
                warnings.warn(f"{error} Waiting for them.", stacklevel=2)
                self._pause()
        refused = result.refused | {
            client_id: "no node with this partition is connected."
            for client_id in request.client_ids
            if client_id not in nodes
        }
        for client_id, reason in sorted(refused.items()):
            warnings.warn(
                f"round {request.round + 1} continues without client {client_id}: {reason}",
                stacklevel=2,
            )
        seconds = {
            "generation": 0.0,
            "training": time.perf_counter() - started,
            "evaluation": 0.0,
        }
        traffic = {
            client_id: Traffic(
                received=meter.received.get(nodes[client_id], 0),
                sent=meter.sent.get(nodes[client_id], 0),
            )
            for client_id in result.client_ids
        }
        return RoundResult(
            client_ids=result.client_ids,
            total=result.total,
            findings=result.findings,
            timings=Timings(seconds),
            mean_loss=result.mean_loss,
            refused=refused,
            traffic=traffic,
        )

    def keep_states(self, result: RoundResult, is_finite: Sequence[bool]) -> None:
        """Do nothing: nodes store the states of their clients.

        Args:
            result: Result of the round.
            is_finite: Which states are finite.
        """

    def server_draws(self, algorithm: Algorithm, round: int) -> State:
        """Draw the random tensors of server scope.

        Args:
            algorithm: The algorithm.
            round: Current round, from 0.

        Returns:
            Tensors by name.
        """
        return self._setup.simulator.server_draws(algorithm, round)

    def client_losses(
        self, weights: Params, client_ids: Sequence[int], round: int, loss_over: LossOver
    ) -> list[float]:
        """Refuse: nodes are not asked for losses. Setup checks refuse such experiments.

        Args:
            weights: Parameters and buffers.
            client_ids: The clients.
            round: Current round, from 0.
            loss_over: Which training examples to use.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError("Flower nodes do not report losses of the global model.")

    def survey(self, algorithm: Algorithm, server: State, round: int) -> State:
        """Survey all connected nodes, to prepare the server's model for its evaluation.

        Args:
            algorithm: The algorithm.
            server: The server state after the round.
            round: Current round, from 0.

        Returns:
            The server state; as it was, if too few nodes answered.
        """
        simulator = self._setup.simulator
        weights = algorithm.server_model(server)
        config = {"round": round, "run": self._run, SURVEY_KEY: True}
        content = {
            MODEL_RECORD: to_array_record(weights),
            REQUEST_RECORD: ConfigRecord(cast(Any, config)),
        }
        nodes = self._connected_nodes(list(range(simulator.cohort.data.num_clients)))
        template = simulator.survey_template(algorithm, weights)
        collect = self._masked_part if self._setup.secure_scale else self._clear_part
        meter = TrafficMeter(self._grid)
        try:
            total, refused = collect(content, template, nodes, meter, round)
        except NoAnswer as error:
            warnings.warn(f"round {round + 1} has no survey of the clients: {error}", stacklevel=2)
            return server
        for client_id, reason in sorted(refused.items()):
            warnings.warn(
                f"the survey of round {round + 1} is without client {client_id}: {reason}",
                stacklevel=2,
            )
        on_device = tree.to(total, simulator.cohort.data.device)
        return simulator.use_survey(algorithm, server, on_device, round)

    def evaluate_clients(
        self, algorithm: Algorithm, server: State, round: int
    ) -> ClientEvaluation | None:
        """Ask all connected nodes how models do on their own test examples.

        Args:
            algorithm: The algorithm.
            server: The server state after the round.
            round: Current round, from 0.

        Returns:
            Statistics of the nodes that answered, or their sum; None if too few did.
        """
        config = {
            "round": round,
            "lr": 0.0,
            EVALUATE_KEY: False,
            EVALUATE_ONLY_KEY: True,
            "run": self._run,
            "shape": list(self._setup.simulator.cohort.model.input_shape),
        }
        content = {
            BROADCAST_RECORD: to_array_record(algorithm.broadcast(server)),
            MODEL_RECORD: to_array_record(algorithm.server_model(server)),
            REQUEST_RECORD: ConfigRecord(cast(Any, config)),
        }
        nodes = self._connected_nodes(list(range(self._setup.simulator.cohort.data.num_clients)))
        collect = self._collect_masked_counts if self._setup.secure_scale else self._collect_counts
        try:
            evaluation, refused = collect(content, nodes, round)
        except NoAnswer as error:
            warnings.warn(f"round {round + 1} is not evaluated at clients: {error}", stacklevel=2)
            return None
        for client_id, reason in sorted(refused.items()):
            warnings.warn(
                f"round {round + 1} is evaluated without client {client_id}: {reason}", stacklevel=2
            )
        return evaluation

    def _evaluation_template(self) -> ClientEvaluation:
        """Return an evaluation of one client with the expected shapes and dtypes."""
        simulator = self._setup.simulator
        task = simulator.cohort.task
        stats = torch.zeros_like(simulator.max_class_stats)[None]
        models = ["global", *(["personal"] if is_personalized(self._setup.algorithm) else [])]
        calibration = None
        if simulator.metrics.has_calibration:
            calibration = torch.zeros(1, 3, NUM_CALIBRATION_BINS, dtype=torch.float64)
        return ClientEvaluation(
            client_ids=[0],
            class_counts=torch.zeros(1, task.num_classes, dtype=torch.int64),
            num_examples=torch.zeros(1, dtype=torch.int64),
            class_stats=dict.fromkeys(models, stats),
            calibration=calibration,
        )

    def _collect_counts(
        self, content: Messages, nodes: dict[int, int], round: int
    ) -> tuple[ClientEvaluation, dict[int, str]]:
        """Ask nodes for evaluations in clear; return them, and why others were refused."""
        template = evaluation_state(self._evaluation_template())
        task = self._setup.simulator.cohort.task
        meter = TrafficMeter(self._grid)
        heard, refused = self._ask(
            content, EVALUATE, nodes, meter, lambda reply: read_evaluation(reply, template, task)
        )
        answers = {id: answer for id, answer in heard.items() if int(answer["num_examples"])}
        if not answers:
            raise NoAnswer(f"no node gave a usable answer. {_listed(refused)}")
        ids = sorted(answers)
        joined = tree.stack([answers[client_id] for client_id in ids])
        evaluation = ClientEvaluation(
            client_ids=ids,
            class_counts=joined["class_counts"],
            num_examples=joined["num_examples"],
            class_stats=joined["class_stats"],
            calibration=joined.get("calibration"),
        )
        return evaluation, refused

    def _ask(
        self,
        content: Messages,
        message_type: str,
        nodes: dict[int, int],
        meter: TrafficMeter,
        read: Callable[[Message], State],
    ) -> tuple[dict[int, State], dict[int, str]]:
        """Send one message to all nodes; return valid answers, and why others were refused."""
        messages = [
            Message(RecordDict(content), dst_node_id=node, message_type=message_type)
            for node in nodes.values()
        ]
        client_of = {node: client_id for client_id, node in nodes.items()}
        refused = dict.fromkeys(nodes, NO_REPLY)
        answers: dict[int, State] = {}
        for reply in meter.send_and_receive(messages, timeout=self._timeout):
            client_id = client_of[meter.sender(reply)]
            try:
                answers[client_id] = read(reply)
                del refused[client_id]
            except InvalidPayload as error:
                refused[client_id] = str(error)
        return answers, refused

    def _collect_masked_counts(
        self, content: Messages, nodes: dict[int, int], round: int
    ) -> tuple[ClientEvaluation, dict[int, str]]:
        """Add up the nodes' counts by SecAgg+, which reveals nothing but the sum."""
        task = self._setup.simulator.cohort.task
        template = masked_counts(self._evaluation_template(), task)
        meter = TrafficMeter(self._grid)
        masked = self._add_masked(content, nodes, round, template, meter)
        like = tree.apply(torch.Tensor.double, template)
        total, _ = secure_aggregation.from_vector(masked.total, like, COUNT_BOUNDS, 1.0)
        return summed_evaluation(total, masked.client_ids), masked.refused

    def _add_masked(
        self,
        content: Messages,
        nodes: dict[int, int],
        round: int,
        template: State,
        meter: TrafficMeter,
    ) -> MaskedSum:
        """Add up what nodes answer by SecAgg+; raise NoAnswer if too few stay until its end."""
        protocol = SecAggRound(len(nodes), content, self._timeout)
        heard, mean = protocol.run(cast(Grid, meter), self._context, round, nodes.values())
        refused = {
            client_id: meter.failures.get(node, NO_REPLY)
            for client_id, node in nodes.items()
            if node not in heard
        }
        if mean is None or len(mean) != secure_aggregation.vector_size(template):
            raise NoAnswer(
                f"secure aggregation failed in round {round + 1}: of {len(nodes)} clients "
                f"{protocol.threshold} must stay until its end. {_listed(refused)}"
            )
        client_of = {node: client_id for client_id, node in nodes.items()}
        client_ids = sorted(client_of[node] for node in heard)
        return MaskedSum(mean * len(heard), client_ids, refused)

    def _request_content(self, request: RoundRequest) -> Messages:
        """Create the records that every node receives."""
        config = {
            "round": request.round,
            "lr": request.lr,
            EVALUATE_KEY: request.stats_before is not None,
            "run": self._run,
            "shape": list(self._setup.simulator.cohort.model.input_shape),
        }
        return {
            BROADCAST_RECORD: to_array_record(request.broadcast),
            REQUEST_RECORD: ConfigRecord(cast(Any, config)),
        }

    def _aggregate(
        self, request: RoundRequest, nodes: dict[int, int], meter: TrafficMeter
    ) -> RoundResult:
        """Ask nodes for payloads in clear, and add up those that pass the checks."""
        simulator = self._setup.simulator
        is_private = simulator.cohort.privacy is not None
        answers, refused = self._collect_answers(request, nodes, meter, is_private)
        client_ids = sorted(answers)
        if is_private:
            total = add_totals([answers[client_id]["total"] for client_id in client_ids])
            return RoundResult(client_ids, total, None, Timings(), refused=refused)
        weights = torch.stack([answers[client_id]["total"]["weight"] for client_id in client_ids])
        joined = join_single_clients([answer_result(answers[id]) for id in client_ids])
        result = simulator.round_result(client_ids, joined, [])
        assert result.findings is not None
        findings = result.findings._replace(weight=weights)
        return RoundResult(client_ids, result.total, findings, Timings(), refused=refused)

    def _collect_answers(
        self, request: RoundRequest, nodes: dict[int, int], meter: TrafficMeter, is_private: bool
    ) -> tuple[dict[int, State], dict[int, str]]:
        """Return the valid answers by client, and why the others were refused."""
        simulator = self._setup.simulator
        template = simulator.answer_template(request.algorithm, request.broadcast)
        if is_private:
            template = {"total": template["total"]}
        content = self._request_content(request)
        messages = [
            Message(RecordDict(content), dst_node_id=node, message_type=TRAIN)
            for node in nodes.values()
        ]
        client_of = {node: client_id for client_id, node in nodes.items()}
        answers: dict[int, State] = {}
        not_finite: list[int] = []
        refused = dict.fromkeys(nodes, NO_REPLY)
        for reply in meter.send_and_receive(messages, timeout=self._timeout):
            client_id = client_of[meter.sender(reply)]
            try:
                answer = read_answer(reply, template, request.stats_before is not None)
                _check_class_stats(answer, simulator.max_class_stats)
                answers[client_id] = answer
                del refused[client_id]
            except InvalidPayload as error:
                refused[client_id] = str(error)
                if isinstance(error, NotFinite):
                    not_finite.append(client_id)
        if not answers and not_finite:
            raise Diverged(sorted(not_finite), request.round)
        if not answers:
            raise NoAnswer(
                f"no node gave a usable answer in round {request.round + 1}. {_listed(refused)}"
            )
        return answers, refused

    def _aggregate_masked(
        self, request: RoundRequest, nodes: dict[int, int], meter: TrafficMeter
    ) -> RoundResult:
        """Run SecAgg+, which reveals nothing but the sum."""
        simulator = self._setup.simulator
        algorithm = request.algorithm
        template = simulator.answer_template(algorithm, request.broadcast)["total"]
        content = self._request_content(request)
        masked = self._add_masked(content, nodes, request.round, template, meter)
        total, loss = secure_aggregation.from_vector(
            masked.total, template, algorithm.payload_bounds, self._setup.secure_scale
        )
        mean_loss = math.nan
        if simulator.cohort.privacy is None:
            mean_loss = loss / float(total["weight"])
        return RoundResult(
            client_ids=masked.client_ids,
            total=tree.to(total, simulator.cohort.data.device),
            findings=None,
            timings=Timings(),
            mean_loss=mean_loss,
            refused=masked.refused,
        )

    def _resum(
        self,
        request: RoundRequest,
        result: RoundResult,
        nodes: dict[int, int],
        meter: TrafficMeter,
    ) -> RoundResult:
        """Add up the further sums that the algorithm needs, over the nodes that answered.

        A node that fails now keeps its part in the first sum and has none in the further ones.
        """
        algorithm = request.algorithm
        if not algorithm.num_resums:
            return result
        payload = self._setup.simulator.payload_template(algorithm, request.broadcast)
        total = result.total
        heard = {client_id: nodes[client_id] for client_id in result.client_ids}
        refused: dict[int, str] = {}
        for number in range(1, algorithm.num_resums + 1):
            broadcast = algorithm.resum_broadcast(total)
            config = {"round": request.round, "run": self._run, RESUM_KEY: number}
            content = {
                BROADCAST_RECORD: to_array_record(broadcast),
                REQUEST_RECORD: ConfigRecord(cast(Any, config)),
            }
            on_meta = [tree.apply(_to_meta, state) for state in (payload, broadcast)]
            template = algorithm.resum_payload(*on_meta)
            collect = self._masked_part if self._setup.secure_scale else self._clear_part
            part, failed = collect(content, template, heard, meter, request.round)
            refused |= failed
            heard = {id: node for id, node in heard.items() if id not in failed}
            total = total | tree.to(part, self._setup.simulator.cohort.data.device)
        for client_id, reason in sorted(refused.items()):
            warnings.warn(
                f"round {request.round + 1} weights the others without client {client_id}: "
                f"{reason}",
                stacklevel=3,
            )
        return dataclasses.replace(result, total=total)

    def _clear_part(
        self,
        content: Messages,
        template: State,
        nodes: dict[int, int],
        meter: TrafficMeter,
        round: int,
    ) -> tuple[State, dict[int, str]]:
        """Add up what nodes send in clear; return it, and why others were refused."""
        parts, refused = self._ask(
            content, TRAIN, nodes, meter, lambda reply: read_part(reply, template)
        )
        if not parts:
            raise NoAnswer(
                f"no node gave a usable part of a further sum in round {round + 1}. "
                f"{_listed(refused)}"
            )
        return add_totals([parts[client_id] for client_id in sorted(parts)]), refused

    def _masked_part(
        self,
        content: Messages,
        template: State,
        nodes: dict[int, int],
        meter: TrafficMeter,
        round: int,
    ) -> tuple[State, dict[int, str]]:
        """Add up what nodes send by SecAgg+; return it, and why others were refused."""
        masked = self._add_masked(content, nodes, round, template, meter)
        bounds = self._setup.algorithm.payload_bounds
        part, _ = secure_aggregation.from_vector(
            masked.total, template, bounds, self._setup.secure_scale
        )
        return part, masked.refused

    def _connected_nodes(self, client_ids: list[int]) -> dict[int, int]:
        """Return the connected nodes by client.

        The first round waits for all of them, later rounds for any.
        """
        deadline = self._deadline()
        while True:
            online = set(self._grid.get_node_ids())
            self._nodes = {id: node for id, node in self._nodes.items() if node in online}
            self._query_partitions(online - set(self._nodes.values()))
            nodes = {id: self._nodes[id] for id in client_ids if id in self._nodes}
            is_late = time.monotonic() > deadline
            if len(nodes) == len(client_ids) or (nodes and (self._has_started or is_late)):
                self._has_started = True
                return nodes
            if is_late:
                missing = ", ".join(map(str, client_ids))
                raise NoAnswer(f"no node holds partition {missing}: are the SuperNodes running?")
            self._pause()

    def _query_partitions(self, nodes: set[int]) -> None:
        """Ask nodes which partition they hold."""
        messages = [Message(RecordDict(), dst_node_id=node, message_type=QUERY) for node in nodes]
        if not messages:
            return
        timeout = None
        if self._timeout is not None:
            timeout = min(self._timeout, QUERY_TIMEOUT_SECONDS)
        num_clients = self._setup.simulator.cohort.data.num_clients
        for reply in self._grid.send_and_receive(messages, timeout=timeout):
            record: Any = None if reply.has_error() else reply.content.get("node")
            partition = record.get("partition-id") if isinstance(record, ConfigRecord) else None
            if not isinstance(partition, int) or not 0 <= partition < num_clients:
                continue
            if partition in self._nodes:
                warnings.warn(
                    f"two nodes hold partition {partition}: the second one is ignored.",
                    stacklevel=2,
                )
            self._nodes.setdefault(partition, reply.metadata.src_node_id)

    def _deadline(self) -> float:
        """Return when a wait that starts now ends, in seconds of `time.monotonic`."""
        return time.monotonic() + (math.inf if self._timeout is None else self._timeout)

    def _pause(self) -> None:
        time.sleep(0.1 if self._timeout is None else 1.0)


class SecAggRound(SecAggPlusWorkflow):
    """One round of Flower's SecAgg+.

    Flower's own workflow loses the round when a client drops out before it has shared secrets; this
    one removes such a client.

    Attributes:
        threshold: Number of clients that must stay until the end.
    """

    def __init__(self, num_clients: int, content: Messages, timeout: float | None) -> None:
        """Create a round.

        Args:
            num_clients: Number of clients.
            content: Records that every client receives.
            timeout: Seconds to wait for answers; None waits forever.

        Raises:
            NoAnswer: If there are too few clients.
        """
        if num_clients < MIN_SECAGG_CLIENTS:
            raise NoAnswer(
                f"secure aggregation needs {MIN_SECAGG_CLIENTS} clients per round, "
                f"but {num_clients} are connected."
            )
        num_shares = min(num_clients, MAX_NEIGHBORS)
        self.threshold = max(MIN_SECAGG_CLIENTS, num_shares // 2 + 1)
        self._content = content
        self._mean: torch.Tensor | None = None
        self._heard: set[int] = set()
        super().__init__(
            num_shares,
            self.threshold if self.threshold < num_shares else 1.0,
            max_weight=1.0,
            timeout=timeout,
            clipping_range=1.0,
            quantization_range=secure_aggregation.num_levels(num_clients),
            modulus_range=secure_aggregation.MODULUS,
        )

    def run(
        self, grid: Grid, context: Context, round: int, nodes: Iterable[int]
    ) -> tuple[set[int], torch.Tensor | None]:
        """Run the protocol.

        Args:
            grid: Connection to the nodes.
            context: Flower's context of the server app.
            round: Current round, from 0.
            nodes: The nodes.

        Returns:
            The nodes in the sum, and the mean of their vectors; None if too few stayed.
        """
        nothing = FitIns(Parameters([], "numpy.ndarray"), {})
        proxies = [(SimpleNamespace(node_id=node), nothing) for node in nodes]
        strategy = SimpleNamespace(configure_fit=lambda *_: proxies, aggregate_fit=self._store_mean)
        manager = SimpleNamespace(num_available=lambda: len(proxies))
        legacy = LegacyContext(
            context, strategy=cast(Any, strategy), client_manager=cast(Any, manager)
        )
        legacy.state.config_records[MAIN_CONFIGS_RECORD] = ConfigRecord(
            {Key.CURRENT_ROUND: round + 1}
        )
        legacy.state.array_records[MAIN_PARAMS_RECORD] = ArrayRecord()
        self(grid, legacy)
        return self._heard, self._mean

    def _store_mean(
        self, _: int, results: list[tuple[Any, FitRes]], __: Any
    ) -> tuple[None, dict[str, Any]]:
        self._heard = {proxy.node_id for proxy, _ in results}
        self._mean = torch.from_numpy(parameters_to_ndarrays(results[0][1].parameters)[0])
        return None, {}

    def setup_stage(self, grid: Grid, context: Any, state: Any) -> bool:
        """Run Flower's stage, with our records as what clients train on.

        Args:
            grid: Connection to the nodes.
            context: Flower's context.
            state: State of the protocol.

        Returns:
            Whether to continue.
        """
        can_continue = bool(super().setup_stage(grid, context, state))
        state.nid_to_fitins = {node: RecordDict(self._content) for node in state.nid_to_fitins}
        return _remove_dropouts(state) and can_continue

    def share_keys_stage(self, grid: Grid, context: Any, state: Any) -> bool:
        """Run Flower's stage, then remove clients that dropped out.

        Args:
            grid: Connection to the nodes.
            context: Flower's context.
            state: State of the protocol.

        Returns:
            Whether to continue.
        """
        can_continue = bool(super().share_keys_stage(grid, context, state))
        return can_continue and _remove_dropouts(state)


def _remove_dropouts(state: Any) -> bool:
    """Remove clients that dropped out before any mask used their secrets.

    Returns:
        Whether enough clients are left.
    """
    active = state.active_node_ids
    state.sampled_node_ids = set(active)
    state.nid_to_neighbours = {
        node: neighbors & active
        for node, neighbors in state.nid_to_neighbours.items()
        if node in active
    }
    return all(len(own) >= state.threshold for own in state.nid_to_neighbours.values())


def _check_class_stats(answer: State, max_class_stats: torch.Tensor) -> None:
    """Refuse class statistics that no model can have."""
    stats = answer.get(CLASS_STATS_KEY, max_class_stats)
    if not bool(((stats >= 0) & (stats <= max_class_stats)).all()):
        raise InvalidPayload("the answer has negative or impossibly large class statistics.")


def server_app(
    serve: Callable[[dict[str, Any], Callable[[NodeSetup, str, float], FlowerBackend]], None],
) -> ServerApp:
    """Create the app that runs at the server.

    Args:
        serve: Receives the app's settings and a function that creates the backend.

    Returns:
        Flower's server app.
    """
    app = ServerApp()

    @app.main()
    def _main(grid: Grid, context: Context) -> None:
        serve(dict(context.run_config), functools.partial(FlowerBackend, grid, context))

    return app


def simulate(
    serve: Callable[[FlowerBackend], None], setup: NodeSetup, set_up_node: Callable[[], NodeSetup]
) -> None:
    """Run a federation in Flower's simulation engine, one node per client, one core per node.

    Args:
        serve: Runs as the server.
        setup: The experiment, as the server set it up.
        set_up_node: Sets the experiment up in a node's process.
    """
    from flwr.simulation import run_simulation  # takes a second, which every node would wait for

    server = ServerApp()

    @server.main()
    def _main(grid: Grid, context: Context) -> None:
        serve(FlowerBackend(grid, context, setup))

    resources: dict[str, Any] = {"num_cpus": 1, "num_gpus": 0.0}
    with _quiet_flower():
        run_simulation(
            server,
            client_app(lambda _: set_up_node()),
            num_supernodes=setup.simulator.cohort.data.num_clients,
            backend_config={
                "client_resources": resources,
                "init_args": {"num_cpus": os.cpu_count() or 1},
            },
        )


def _to_meta(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor without data, with the same shape and dtype."""
    return torch.empty(value.shape, dtype=value.dtype, device="meta")


def _listed(refused: dict[int, str]) -> str:
    return "; ".join(f"client {id}: {reason}" for id, reason in sorted(refused.items()))


@contextlib.contextmanager
def _quiet_flower() -> Iterator[None]:
    """Log only Flower's errors, and restore the SIGTERM handler that Ray replaces."""
    logger = logging.getLogger("flwr")
    level = logger.level
    handler = signal.getsignal(signal.SIGTERM)
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
        is_main_thread = threading.current_thread() is threading.main_thread()
        if is_main_thread and handler is not None:
            signal.signal(signal.SIGTERM, handler)
