"""The backend that trains all clients on this machine."""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fedcog.algorithms import Algorithm, FederationInit
from fedcog.core import tree
from fedcog.core.metrics import FurtherMetrics
from fedcog.core.tree import Params, State
from fedcog.engine.aggregation import add_totals
from fedcog.engine.cohort import Cohort, RoundSpec
from fedcog.engine.cohort_results import CohortResult, join_cohorts
from fedcog.engine.evaluation import BATCH_SIZE
from fedcog.engine.local_training import CohortClients
from fedcog.engine.stacking import StackedRun
from fedcog.federation.backend import (
    ClientEvaluation,
    ClientFindings,
    RoundRequest,
    RoundResult,
    Traffic,
)
from fedcog.federation.client_sampling import LossOver
from fedcog.federation.client_states import ClientStates
from fedcog.federation.device_types import DeviceType, merge_by_training
from fedcog.models.ops.keyed_random import seed_words

WeightRule = Literal["examples", "uniform"]
"""How clients are weighted in the server's sum: by their number of examples, or alike."""


class LocalWorkload(NamedTuple):
    """How much clients train, and how they are weighted.

    Attributes:
        local_steps: Number of local steps per round.
        local_epochs: Number of local epochs per round, instead of steps if above 0.
        weights: How clients are weighted in the server's sum.
        weight_cap: Number of examples beyond which a client weighs no more; 0 means the largest
            client's.
        device_types: Types of devices, first those of the first clients; empty if all are alike.
    """

    local_steps: int
    local_epochs: float = 0.0
    weights: WeightRule = "examples"
    weight_cap: int = 0
    device_types: Sequence[DeviceType] = ()


class DeviceGroup(NamedTuple):
    """The clients of a round that have one type of device.

    Attributes:
        spec: The round, with the device type's variant of the algorithm.
        client_ids: The clients.
        max_clients: Largest number of such clients in any round; a CUDA graph has a fixed size.
    """

    spec: RoundSpec
    client_ids: list[int]
    max_clients: int


class TrainedChunk(NamedTuple):
    """Clients that trained at once: their result without states, and each client's new state."""

    result: CohortResult
    new_states: list[State]


class Simulator:
    """The backend that trains all clients on this machine.

    Attributes:
        cohort: Trains clients on the device.
        client_states: What clients keep between rounds.
        class_counts: Training examples of each class, `(K, C)`.
        label_set_sizes: Training examples with 0, 1, 2, ... labels, by client.
        test_class_counts: Test examples of each class, `(C,)`, in host memory.
        max_class_stats: Largest possible class statistics on the test set.
        weights: Weight of each client in the server's sum, `(K,)`.
        num_steps: Number of local steps of each client, `(K,)`.
        device_types: Types of devices that train differently; one if all train alike.
        metrics: Metrics to compute besides the main one.
    """

    def __init__(
        self,
        cohort: Cohort,
        workload: LocalWorkload,
        metrics: FurtherMetrics = FurtherMetrics(),  # noqa: B008 - immutable
    ) -> None:
        self.metrics = metrics
        data = cohort.data
        task = cohort.task
        self.cohort = cohort
        self.client_states = ClientStates(data.device)
        labels = [data.client_labels(client_id) for client_id in range(data.num_clients)]
        self.class_counts = torch.stack([task.class_counts(own) for own in labels]).to(data.device)
        self.label_set_sizes = torch.stack([task.label_set_sizes(own) for own in labels]).to(
            data.device
        )
        self.test_class_counts = task.class_counts(data.test_y).cpu()
        self.max_class_stats = task.max_class_stats(self.test_class_counts, len(data.test_y))
        self.weights = _client_weights(cohort, workload)
        self.device_types = merge_by_training(workload.device_types)
        if not self.device_types:
            self.device_types = [DeviceType("", data.num_clients)]
        counts = torch.tensor([device.num_clients for device in self.device_types])
        self._type_of_client = torch.arange(len(counts)).repeat_interleave(counts).tolist()
        sizes = torch.split(data.sizes, counts.tolist())
        self.num_steps = torch.cat(
            [
                _num_local_steps(workload, device, own_sizes, cohort.config.batch_size)
                for device, own_sizes in zip(self.device_types, sizes, strict=True)
            ]
        )
        cohort.max_steps = int(self.num_steps.max())
        self._dropout_words = seed_words(data.seed).to(data.device)

    # Backend protocol

    def run_round(self, request: RoundRequest) -> RoundResult:
        """Train the clients of a round here."""
        num_resums = request.algorithm.num_resums
        spec = request.spec._replace(keep_payloads=num_resums > 0)
        result, new_states = self.train(spec, request.client_ids)
        if not num_resums:
            return self.round_result(request.client_ids, result, new_states)
        return self.resummed_result(request, result, new_states)

    def resummed_result(
        self, request: RoundRequest, result: CohortResult, new_states: list[State]
    ) -> RoundResult:
        """Return the result of a round whose algorithm needs further sums.

        Args:
            request: What the clients were asked.
            result: What they computed, with their payloads.
            new_states: What they keep.

        Returns:
            The result of the round, with what each client received and sent.
        """
        total, traffic = self.sum_repeatedly(request.algorithm, result)
        summed = result._replace(total=total, payloads={})
        received = tree.nbytes(request.broadcast) + traffic.received
        traffic_of = dict.fromkeys(request.client_ids, Traffic(received, traffic.sent))
        finished = self.round_result(request.client_ids, summed, new_states)
        return dataclasses.replace(finished, traffic=traffic_of)

    def keep_states(self, result: RoundResult, is_finite: Sequence[bool]) -> None:
        """Store the clients' new states.

        Args:
            result: Result of the round.
            is_finite: Which states to store, one per client.
        """
        if result.new_states:
            self.client_states.put(result.client_ids, result.new_states, is_finite)

    def server_draws(self, algorithm: Algorithm, round: int) -> State:
        """Draw the random tensors of server scope.

        Args:
            algorithm: The algorithm.
            round: Current round, from 0.

        Returns:
            Tensors by name.
        """
        return self.cohort.shared_draws(algorithm, "server", round)

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
        data = self.cohort.data
        losses = []
        for client_id in client_ids:
            if loss_over == "all":
                index = data.client_indices(client_id)
            else:
                size = min(self.cohort.config.batch_size, int(data.sizes[client_id]))
                index = data.draw_indices("choice", round, torch.tensor([client_id]), size)[0]
            losses.append(self.cohort.evaluator.mean_loss(weights, index))
        return losses

    def survey(self, algorithm: Algorithm, server: State, round: int) -> State:
        """Survey all clients, to prepare the server's model for its evaluation.

        Args:
            algorithm: The algorithm.
            server: The server state after the round.
            round: Current round, from 0.

        Returns:
            The server state.
        """
        total = self.survey_clients(algorithm, algorithm.server_model(server))
        return self.use_survey(algorithm, server, total, round)

    def evaluate_clients(self, algorithm: Algorithm, server: State, round: int) -> ClientEvaluation:
        """Evaluate the global model, and personal ones, on every client's own test examples.

        Args:
            algorithm: The algorithm.
            server: The server state after the round.
            round: Current round, from 0.

        Returns:
            Class statistics of all clients with test examples.
        """
        weights = algorithm.server_model(server)
        return self.evaluate_models(algorithm, weights, algorithm.broadcast(server), round)

    # Parts that other backends use

    def use_survey(self, algorithm: Algorithm, server: State, total: State, round: int) -> State:
        """Apply an algorithm's `use_survey`.

        Args:
            algorithm: The algorithm.
            server: The server state after the round.
            total: Sum of the clients' surveys.
            round: Current round, from 0.

        Returns:
            The server state.
        """
        draws = self.cohort.shared_draws(algorithm, "survey", round)
        return algorithm.use_survey(server, total, draws, self.cohort.model)

    def survey_template(self, algorithm: Algorithm, weights: Params) -> State:
        """Return names, shapes and dtypes of a survey.

        Args:
            algorithm: The algorithm.
            weights: Parameters and buffers of the server's model.

        Returns:
            A survey of one example of zeros.
        """
        model = self.cohort.model
        data = self.cohort.data
        x = torch.zeros(1, *model.input_shape, dtype=data.dtype, device=data.device)
        batch = {"x": x, "y": torch.zeros(1, dtype=torch.int64, device=data.device)}
        return algorithm.survey(weights, batch, model)

    def survey_clients(
        self, algorithm: Algorithm, weights: Params, client_ids: Sequence[int] | None = None
    ) -> State:
        """Sum an algorithm's survey over the training examples of some clients.

        Args:
            algorithm: The algorithm.
            weights: Parameters and buffers of the server's model.
            client_ids: The clients; by default all.

        Returns:
            The sum.
        """
        data = self.cohort.data
        model = self.cohort.model
        ids = range(data.num_clients) if client_ids is None else client_ids
        index = torch.cat([data.client_indices(client_id) for client_id in ids])
        parts = [
            algorithm.survey(weights, data.examples(rows), model)
            for rows in torch.split(index, BATCH_SIZE)
        ]
        return functools.reduce(functools.partial(tree.apply, torch.add), parts)

    def evaluate_models(
        self,
        algorithm: Algorithm,
        weights: Params,
        broadcast: State,
        round: int,
        client_ids: Sequence[int] | None = None,
    ) -> ClientEvaluation:
        """Evaluate a model, and personal ones, on the clients' own test examples.

        Args:
            algorithm: The algorithm.
            weights: Parameters and buffers of the global model.
            broadcast: What clients would receive; personal models start from it.
            round: Current round, from 0.
            client_ids: The clients; by default all that have test examples.

        Returns:
            Statistics of the clients.
        """
        cohort = self.cohort
        tests = cohort.data.local_tests
        assert tests is not None, "the server asks for them only if clients have test examples"
        ids = tests.client_ids if client_ids is None else torch.tensor(client_ids)
        rows = ids.to(cohort.data.device)
        metrics = self.metrics
        results = cohort.evaluator.client_results(
            weights, metrics.functions, metrics.has_calibration
        )
        stats = {"global": results.class_stats[rows]}
        if is_personalized(algorithm):
            stats["personal"] = self._personal_stats(algorithm, broadcast, ids, round)
        calibration = None
        if results.calibration is not None:
            calibration = results.calibration[rows].cpu()
        values = None
        if results.values is not None:
            values = {name: value[ids] for name, value in results.values.items()}
        labels = torch.split(tests.y, tests.sizes.tolist())
        counts = torch.stack([cohort.task.class_counts(labels[int(id)]) for id in ids])
        return ClientEvaluation(
            client_ids=ids.tolist(),
            class_counts=counts.cpu(),
            num_examples=tests.sizes[ids],
            class_stats=tree.to_host(stats),
            calibration=calibration,
            values=values,
        )

    def _personal_stats(
        self, algorithm: Algorithm, broadcast: State, client_ids: Tensor, round: int
    ) -> Tensor:
        """Return the class statistics of the clients' own models, `(K, ..., C)`."""
        spec = RoundSpec(algorithm, broadcast, round, 0.0, evaluate_local=False)
        found = []
        for group in self._device_groups(spec, client_ids.tolist()):
            size = self.cohort.chunk_size(len(group.client_ids))
            for start in range(0, len(group.client_ids), size):
                ids = group.client_ids[start : start + size]
                clients = self.clients(group.spec.algorithm, broadcast, ids)
                found.append(self.cohort.personal_stats(group.spec, clients))
        return torch.cat(found)

    def init_server(self, algorithm: Algorithm) -> State:
        """Return the server state before the first round."""
        return algorithm.server_init(self.federation_init(algorithm))

    def federation_init(self, algorithm: Algorithm) -> FederationInit:
        """Return what the server state is initialized from."""
        model = self.cohort.model
        return FederationInit(
            model=model,
            params=model.params,
            num_clients=self.weights.new_tensor(len(self.weights)),
            draws=self.cohort.shared_draws(algorithm, "federation"),
        )

    def train(
        self, spec: RoundSpec, client_ids: Sequence[int], max_clients: int = 0
    ) -> tuple[CohortResult, list[State]]:
        """Train clients, one device type after another, in chunks that fit into memory.

        Args:
            spec: The round.
            client_ids: The clients, in ascending order.
            max_clients: Largest number of clients in any call, if the number varies; 0 if not.

        Returns:
            The joined result without states, and each client's new state.
        """
        trained: list[TrainedChunk] = []
        pending = self._device_groups(spec, client_ids, max_clients)
        while pending:
            own_spec, group, max_group_size = pending[0]
            size = self.cohort.chunk_size(max_group_size)
            group_trained: list[TrainedChunk] = []
            out_of_memory: torch.cuda.OutOfMemoryError | None = None
            try:
                for start in range(0, len(group), size):
                    ids = group[start : start + size]
                    # No local name: after an error it would hold memory that the retry needs.
                    group_trained.append(
                        self._split_states(
                            ids,
                            self.cohort.train(
                                own_spec,
                                self.clients(own_spec.algorithm, own_spec.broadcast, ids),
                                stack_size=size,
                            ),
                        )
                    )
            except torch.cuda.OutOfMemoryError as error:
                out_of_memory = error.with_traceback(None)  # its frames hold what did not fit
                group_trained = []
            if out_of_memory is None:
                trained += group_trained
                pending = pending[1:]
            elif not (self.client_states.move_to_host() or self.cohort.halve_chunks(size)):
                raise out_of_memory
        new_states = [state for chunk in trained for state in chunk.new_states]
        return join_cohorts([chunk.result for chunk in trained]), new_states

    def sum_payloads(
        self,
        spec: RoundSpec,
        client_ids: Sequence[int],
        payloads: Sequence[State],
        is_finite: Sequence[bool],
    ) -> State:
        """Sum payloads of single clients, rounded as the sum of `train` is.

        Args:
            spec: The round.
            client_ids: The clients, in ascending order.
            payloads: The payload of each client.
            is_finite: Which of them to sum. If none is, all are summed, so that the sum shows it.

        Returns:
            The sum.
        """
        if not any(is_finite):
            is_finite = [True] * len(is_finite)
        totals = []
        group_start = 0
        for group in self._device_groups(spec, client_ids):
            size = self.cohort.chunk_size(group.max_clients)
            group_end = group_start + len(group.client_ids)
            for start in range(group_start, group_end, size):
                rows = slice(start, min(start + size, group_end))
                totals.append(self.cohort.sum_payloads(payloads[rows], is_finite[rows]))
            group_start = group_end
        return add_totals([total for total in totals if total])

    def train_from(
        self, spec: RoundSpec, states: dict[int, State]
    ) -> tuple[CohortResult, list[State]]:
        """Train clients whose states come from elsewhere.

        Args:
            spec: The round.
            states: Each client's state before the round, by client id.

        Returns:
            The joined result without states, and each client's new state.
        """
        self.client_states.put(list(states), list(states.values()), [True] * len(states))
        return self.train(spec, list(states))

    def train_client(
        self, spec: RoundSpec, client_id: int, state: State
    ) -> tuple[CohortResult, State]:
        """Train one client whose state comes from elsewhere.

        Args:
            spec: The round.
            client_id: The client.
            state: Its state before the round.

        Returns:
            The result, and the client's state after the round: the old one if it diverged.
        """
        result, (new_state,) = self.train_from(spec, {client_id: state})
        is_finite = bool(result.update_finite & result.state_finite)
        return result, new_state if is_finite else state

    def sum_repeatedly(self, algorithm: Algorithm, result: CohortResult) -> tuple[State, Traffic]:
        """Sum the payloads of a round, and as often again as the algorithm needs it.

        Args:
            algorithm: The algorithm.
            result: Result of the round, with the clients' payloads.

        Returns:
            The last sum, and what each client received after the broadcast and sent in all.
        """
        is_finite = result.update_finite.tolist()
        rows = [row for row, finite in enumerate(is_finite) if finite]
        payloads = [tree.take(result.payloads, row) for row in rows or range(len(is_finite))]
        summed = [True] * len(payloads)
        first = [algorithm.first_payload(payload) for payload in payloads]
        total = self.cohort.sum_payloads(first, summed)
        received = 0
        sent = tree.nbytes(first[0])
        for _ in range(algorithm.num_resums):
            broadcast = algorithm.resum_broadcast(total)
            parts = [algorithm.resum_payload(payload, broadcast) for payload in payloads]
            total = total | self.cohort.sum_payloads(parts, summed)
            payloads = [last | part for last, part in zip(payloads, parts, strict=True)]
            received += tree.nbytes(broadcast)
            sent += tree.nbytes(parts[0])
        return total, Traffic(received, sent)

    def round_result(
        self, client_ids: Sequence[int], result: CohortResult, new_states: list[State]
    ) -> RoundResult:
        """Combine the result of a cohort with what is known of its clients.

        Args:
            client_ids: The clients.
            result: What they computed.
            new_states: What they keep, if it is kept here.

        Returns:
            The result of the round.
        """
        rows = torch.tensor(client_ids).to(self.class_counts.device)
        state_finite = result.state_finite.to(result.update_finite.device)
        findings = ClientFindings(
            update_finite=result.update_finite,
            all_finite=result.update_finite & state_finite,
            loss=result.loss,
            distance=result.distance,
            weight=self.weights[rows],
            class_counts=self.class_counts[rows],
            class_stats=result.class_stats,
        )
        return RoundResult(
            client_ids=list(client_ids),
            total=result.total,
            findings=findings,
            timings=result.timings,
            new_states=new_states,
            artifacts=result.artifacts,
        )

    def payload_template(self, algorithm: Algorithm, broadcast: State) -> State:
        """Return names, shapes and dtypes of one client's payload, as meta tensors.

        Args:
            algorithm: The algorithm.
            broadcast: What the server sends.

        Returns:
            The payload as a sum of one, with what clients withhold from the first sum.
        """
        clients = self.clients(algorithm, broadcast, [0])
        return self.cohort.payload_template(algorithm, broadcast, clients)

    def answer_template(self, algorithm: Algorithm, broadcast: State) -> State:
        """Return names, shapes and dtypes of one client's answer, as meta tensors.

        Args:
            algorithm: The algorithm.
            broadcast: What the server sends.

        Returns:
            `"total"`, `"loss"`, `"distance"` and `"class_stats"`.
        """
        like = next(iter(broadcast["params"].values()))
        stats_shape = (1, *self.max_class_stats.shape)
        return {
            "loss": like.new_empty(1, device="meta"),
            "distance": like.new_empty(1, device="meta"),
            "total": algorithm.first_payload(self.payload_template(algorithm, broadcast)),
            "class_stats": torch.empty(stats_shape, dtype=torch.int64, device="meta"),
        }

    def clients(
        self, algorithm: Algorithm, broadcast: State, client_ids: Sequence[int]
    ) -> CohortClients:
        """Return clients with their states, weights and counts.

        Args:
            algorithm: The algorithm.
            broadcast: What the server sends.
            client_ids: The clients.

        Returns:
            The clients, stacked.
        """
        ids = torch.tensor(client_ids)
        rows = ids.to(self.class_counts.device)
        state = self.client_states.stacked(
            client_ids, lambda: self.cohort.new_client_state(algorithm, broadcast)
        )
        return CohortClients(
            client_ids=ids,
            state=state,
            weight=self.weights[rows],
            class_counts=self.class_counts[rows],
            label_set_sizes=self.label_set_sizes[rows],
            num_steps=self.num_steps[ids],
            dropout_words=self._dropout_words.expand(len(ids), 2),
        )

    def new_client_state(self, algorithm: Algorithm, broadcast: State, client_id: int) -> State:
        """Return a client's state before its first round, on its type of device.

        Args:
            algorithm: The algorithm.
            broadcast: What the server sends.
            client_id: The client.

        Returns:
            The result of the `client_init` hook.
        """
        device = self.device_types[self._type_of_client[client_id]]
        return self.cohort.new_client_state(device.adapt(algorithm), broadcast)

    def client_state(self, algorithm: Algorithm, broadcast: State, client_id: int) -> State:
        """Return what a client keeps, or would keep before its first round.

        Args:
            algorithm: The algorithm.
            broadcast: What the server sends.
            client_id: The client.

        Returns:
            The client's state.
        """
        stacked = self.client_states.stacked(
            [client_id], lambda: self.new_client_state(algorithm, broadcast, client_id)
        )
        return tree.take(stacked, 0)

    def _split_states(self, client_ids: list[int], result: CohortResult) -> TrainedChunk:
        """Split the new states of clients from what else they computed."""
        new_states = self.client_states.unstack(client_ids, result.states)
        return TrainedChunk(result._replace(states={}), new_states)

    def _device_groups(
        self, spec: RoundSpec, client_ids: Sequence[int], max_clients: int = 0
    ) -> list[DeviceGroup]:
        """Group clients by device type, each with its variant of the algorithm.

        If the number of clients varies, CUDA graphs have powers of two as sizes: few recordings,
        of less than twice the clients.
        """
        varies = max_clients > 0 and self.cohort.config.mapping == "graph"
        groups = []
        for index, members in itertools.groupby(client_ids, self._type_of_client.__getitem__):
            device = self.device_types[index]
            own_spec = spec._replace(algorithm=device.adapt(spec.algorithm))
            group = list(members)
            size = min(len(client_ids), device.num_clients)
            if varies:
                power = 1 << (len(group) - 1).bit_length()
                size = min(power, max_clients, device.num_clients)
            groups.append(DeviceGroup(own_spec, group, size))
        return groups


def is_personalized(algorithm: Algorithm) -> bool:
    """Return whether clients have models of their own."""
    return any(layer.is_personalized for layer in algorithm.layers)


def run_stacked_round(
    simulators: Sequence[Simulator], requests: Sequence[RoundRequest]
) -> list[RoundResult]:
    """Train the clients of several runs, as one larger cohort if that fits.

    Args:
        simulators: Simulators of one experiment that differ in seed and learning rate only.
        requests: What each of them is asked, in the same round.

    Returns:
        One result per run.
    """
    first = simulators[0]
    num_clients = sum(len(request.client_ids) for request in requests)
    can_stack = (
        len(requests) > 1
        and not requests[0].algorithm.num_resums
        and len(first.device_types) == 1
        and first.cohort.config.mapping != "loop"
        and first.cohort.chunk_size(num_clients) == num_clients
        and _share_constants(simulators)
    )
    if can_stack:
        with contextlib.suppress(torch.cuda.OutOfMemoryError):
            return _run_as_one(simulators, requests)
        moved = [simulator.client_states.move_to_host() for simulator in simulators]
        if any(moved):
            return run_stacked_round(simulators, requests)
        first.cohort.halve_chunks(num_clients)
    return [
        simulator.run_round(request)
        for simulator, request in zip(simulators, requests, strict=True)
    ]


def _share_constants(simulators: Sequence[Simulator]) -> bool:
    """Return whether the networks of several runs differ in trained weights only."""
    first = simulators[0].cohort.model
    return all(first.has_same_constants(other.cohort.model) for other in simulators[1:])


def _run_as_one(
    simulators: Sequence[Simulator], requests: Sequence[RoundRequest]
) -> list[RoundResult]:
    """Train the clients of several runs as one cohort."""
    spec = requests[0].spec
    algorithm = simulators[0].device_types[0].adapt(spec.algorithm)
    runs = [
        StackedRun(
            cohort=simulator.cohort,
            broadcast=request.broadcast,
            clients=simulator.clients(algorithm, request.broadcast, request.client_ids),
            lr=request.lr,
        )
        for simulator, request in zip(simulators, requests, strict=True)
    ]
    results = simulators[0].cohort.train_stacked(spec._replace(algorithm=algorithm), runs)
    return [
        simulator.round_result(
            request.client_ids, *simulator._split_states(request.client_ids, result)
        )
        for simulator, request, result in zip(simulators, requests, results, strict=True)
    ]


def _client_weights(cohort: Cohort, workload: LocalWorkload) -> Tensor:
    """Return the clients' weights in the server's sum, in (0, 1]."""
    data = cohort.data
    if workload.weights == "uniform":
        return torch.ones(len(data.sizes), dtype=data.dtype, device=data.device)
    cap = workload.weight_cap or int(data.sizes.max())
    return (data.sizes.clamp(max=cap).to(data.dtype) / cap).to(data.device)


def _num_local_steps(
    workload: LocalWorkload, device: DeviceType, sizes: Tensor, batch_size: int
) -> Tensor:
    """Return the number of local steps of clients with one type of device."""
    epochs = device.local_epochs
    if epochs is None and device.local_steps is None:
        epochs = workload.local_epochs
    if epochs:
        num_batches = sizes.double() * epochs / batch_size
        return (num_batches - 1e-9).ceil().clamp(min=1).long()
    return torch.full_like(sizes, device.local_steps or workload.local_steps)
