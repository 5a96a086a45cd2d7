"""A cohort: clients that train on one device, at once (vmap) or one after another (loop)."""

import contextlib
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fedcog.algorithms import Algorithm, ExtraData, LocalWork, Scope
from fedcog.core import rng, tree
from fedcog.core.integers import ceil_div
from fedcog.core.optimizers import Optimizer
from fedcog.core.tasks import Task
from fedcog.core.timing import Stopwatch, Timings
from fedcog.core.tree import Params, State
from fedcog.data.client_batches import FederatedData
from fedcog.engine import batching_errors
from fedcog.engine.aggregation import add_totals, sum_of_one, sum_payloads
from fedcog.engine.cohort_results import CohortResult, join_single_clients
from fedcog.engine.cuda_graphs import STEPS_PER_LAUNCH, GraphCache, repeat_eagerly
from fedcog.engine.evaluation import Evaluator
from fedcog.engine.local_training import (
    CohortClients,
    LocalTraining,
    RoundInputs,
    TrainingState,
    autograd_gradient,
    functional_gradient,
    single_client,
    vmap_clients,
)
from fedcog.engine.memory import max_clients_in_memory
from fedcog.engine.privacy import Privacy
from fedcog.engine.stacking import (
    StackedRun,
    StackOutputs,
    all_clients,
    separate,
    stacked_broadcast,
    stacked_lr,
)
from fedcog.engine.workers import WorkerPool, WorkFunction
from fedcog.models.checks import ModelError
from fedcog.models.functional import Model

Mapping = Literal["loop", "vmap", "graph"]
MAX_WORKER_POOLS = 4
"""Number of algorithms (one per device type) whose worker processes stay alive between rounds."""
VMAP_ERROR_WORDS = ("vmap", "functorch", "transform", "channels_last")
"""Words in torch's errors about functions that cannot be vmapped."""


class CohortConfig(NamedTuple):
    """How the clients of a cohort train.

    Attributes:
        batch_size: Number of examples in a batch.
        grad_clip: Largest L2 norm of a client's gradient; 0 means no limit.
        mapping: One client after another (`loop`), all at once (`vmap`), or all at once with every
            step replayed as a CUDA graph (`graph`).
        num_workers: CPU, loop: processes that train clients in parallel.
        num_threads: CPU threads for clients that train at once; 0 leaves torch's setting.
    """

    batch_size: int
    grad_clip: float = 0.0
    mapping: Mapping = "loop"
    num_workers: int = 1
    num_threads: int = 0


class RoundSpec(NamedTuple):
    """What clients need to know to train in a round.

    Attributes:
        algorithm: The algorithm.
        broadcast: What the server sent.
        round: Current round, from 0.
        lr: Learning rate.
        evaluate_local: Whether to evaluate the local models on the test set.
        keep_payloads: Whether results hold every client's payload in place of their sum.
    """

    algorithm: Algorithm
    broadcast: State
    round: int
    lr: float
    evaluate_local: bool
    keep_payloads: bool = False


class Cohort:
    """Clients that train together on one device.

    Attributes:
        max_steps: Largest number of steps of any client; a CUDA graph needs it beforehand.
        max_clients: Number of clients that fit into memory at once; None until it is known.
    """

    def __init__(
        self,
        model: Model,
        task: Task,
        data: FederatedData,
        optimizer: Optimizer,
        config: CohortConfig,
        privacy: Privacy | None = None,
    ) -> None:
        """Create a cohort.

        Args:
            model: The network.
            task: What a label means.
            data: The federated data set.
            optimizer: The local optimizer.
            config: How clients train.
            privacy: Differential privacy of what clients send.
        """
        self.model = model if config.mapping == "loop" else model.vmappable
        self.task = task
        self.data = data
        self.optimizer = optimizer
        self.config = config
        self.privacy = privacy
        self.evaluator = Evaluator(self.model, task, data)
        self.max_steps = 0
        self.max_clients: int | None = None
        self._single_model = model
        self._worker_pools: dict[Algorithm, WorkerPool] = {}
        self._graphs = GraphCache()
        self._repeat = self._graphs.repeat if config.mapping == "graph" else repeat_eagerly

    @torch.no_grad()
    def train(self, spec: RoundSpec, clients: CohortClients, stack_size: int = 0) -> CohortResult:
        """Train clients for one round.

        Args:
            spec: The round.
            clients: The clients.
            stack_size: Smallest number of clients to train at once. Copies of the last client fill
                the stack and are discarded, because a CUDA graph has a fixed size.

        Returns:
            States, summed payloads and statistics of all clients.
        """
        num_clients = len(clients.client_ids)
        if self.config.mapping == "loop":
            if self.config.num_workers > 1 and num_clients > 1:
                return self._train_in_workers(spec, clients)
            broadcast = self.unpack(spec.algorithm, spec.broadcast)
            results = []
            for row in range(num_clients):
                run = StackedRun(self, broadcast, clients.single(row), spec.lr)
                results += self._train_stack(spec, [run])
            return join_single_clients(results)
        broadcast = self.unpack(spec.algorithm, spec.broadcast)
        if stack_size > num_clients:
            clients = clients.select(torch.arange(stack_size).clamp(max=num_clients - 1))
        run = StackedRun(self, broadcast, clients, spec.lr)
        with self._training_at_once():
            (result,) = self._train_stack(spec, [run], num_clients)
        return result

    @torch.no_grad()
    def train_stacked(self, spec: RoundSpec, runs: Sequence[StackedRun]) -> list[CohortResult]:
        """Train the clients of several runs at once.

        The runs share network and data, and differ in seed and learning rate.

        Args:
            spec: The round; broadcast and learning rate are those of each run.
            runs: The runs, with their broadcasts as sent.

        Returns:
            One result per run.
        """
        unpacked = [
            run._replace(broadcast=run.cohort.unpack(spec.algorithm, run.broadcast)) for run in runs
        ]
        with self._training_at_once():
            return self._train_stack(spec, unpacked)

    def sum_payloads(self, payloads: Sequence[State], is_finite: Sequence[bool]) -> State:
        """Sum payloads of single clients in the order in which `train` sums those of a cohort.

        Args:
            payloads: The payload of each client.
            is_finite: Which of them to sum.

        Returns:
            The sum; empty if the clients train one by one and none is finite.
        """
        if self.config.mapping == "loop":
            pairs = zip(payloads, is_finite, strict=True)
            return add_totals([sum_of_one(payload) for payload, finite in pairs if finite])
        mask = torch.tensor(is_finite, device=self.data.device)
        return sum_payloads(tree.stack(payloads), mask)

    def close(self, *algorithms: Algorithm) -> None:
        """End the worker processes of some algorithms, or all; the next round starts new ones."""
        for algorithm in algorithms or tuple(self._worker_pools):
            if pool := self._worker_pools.pop(algorithm, None):
                pool.close()

    def draws(
        self, algorithm: Algorithm, scope: Scope, round: int, client_ids: Tensor, num_steps: int = 1
    ) -> State:
        """Draw the random tensors of one scope that an algorithm requests.

        Args:
            algorithm: The algorithm.
            scope: Which tensors to draw.
            round: Current round, from 0.
            client_ids: `(K,)`, in host memory.
            num_steps: Number of steps; for step scope.

        Returns:
            `(K, *shape)` by name, or `(K, S, *shape)` for step scope.
        """
        drawn: State = {}
        device_ids = client_ids.to(self.data.device)
        requests = algorithm.request_draws(round, self.model, self.config.batch_size)
        for name, (shape, requested_scope, kind) in requests.items():
            if requested_scope != scope:
                continue
            purpose = f"draw/{name}"
            steps = (num_steps,) if scope == "step" else ()
            if kind == "examples":
                count = num_steps * shape[0] if scope == "step" else shape[0]
                examples = self.data.examples(
                    self.data.draw_indices(purpose, round, client_ids, count)
                )
                leading = (len(client_ids), *steps, shape[0])
                drawn[name] = {
                    key: value.reshape(*leading, *value.shape[2:])
                    for key, value in examples.items()
                }
            else:
                draw = rng.normal if kind == "normal" else rng.uniform
                values = draw(self.data.seed, purpose, round, device_ids, (*steps, *shape))
                drawn[name] = values.to(self.data.dtype)
        return drawn

    def shared_draws(
        self, algorithm: Algorithm, scope: Literal["federation", "server", "survey"], round: int = 0
    ) -> State:
        """Draw the random tensors of the whole federation, or of the server in a round.

        Args:
            algorithm: The algorithm.
            scope: Which tensors to draw.
            round: Current round, from 0.

        Returns:
            Tensors by name, without a client axis.
        """
        server = torch.zeros(1, dtype=torch.int64)
        return tree.take(self.draws(algorithm, scope, round, server), 0)

    def unpack(self, algorithm: Algorithm, broadcast: State) -> State:
        """Apply the `unpack_broadcast` hook.

        Args:
            algorithm: The algorithm.
            broadcast: What the server sent.

        Returns:
            What the clients' hooks see.
        """
        draws = self.shared_draws(algorithm, "federation")
        return algorithm.unpack_broadcast(broadcast, draws, self.model)

    def new_client_state(self, algorithm: Algorithm, broadcast: State) -> State:
        """Return the state of a client before its first round.

        Args:
            algorithm: The algorithm.
            broadcast: What the server sent.

        Returns:
            The result of the `client_init` hook.
        """
        return algorithm.client_init(self.unpack(algorithm, broadcast))

    def local_training(
        self,
        algorithm: Algorithm,
        variable_steps: bool = False,
        per_client_broadcast: bool = False,
    ) -> LocalTraining:
        """Return local training of these clients as functions of tensors.

        Args:
            algorithm: The hooks.
            variable_steps: Whether some clients take fewer steps than others.
            per_client_broadcast: Whether each client received its own broadcast.

        Returns:
            The functions.
        """
        is_loop = self.config.mapping == "loop"
        return LocalTraining(
            model=self.model,
            task=self.task,
            data=self.data,
            optimizer=self.optimizer,
            batch_size=self.config.batch_size,
            grad_clip=self.config.grad_clip,
            algorithm=algorithm,
            map_clients=single_client if is_loop else vmap_clients,
            gradient=autograd_gradient if is_loop else functional_gradient,
            variable_steps=variable_steps,
            per_client_broadcast=per_client_broadcast,
        )

    @torch.no_grad()
    def payload_template(
        self, algorithm: Algorithm, broadcast: State, clients: CohortClients
    ) -> State:
        """Return names, shapes and dtypes of a client's payload, without computing it.

        Args:
            algorithm: The algorithm.
            broadcast: What the server sent.
            clients: Clients; the first one is used.

        Returns:
            The payload as a sum of one, as meta tensors.
        """
        from torch._subclasses import FakeTensorMode  # takes a second to import

        client = clients.single(0)
        training = self.local_training(algorithm)._replace(map_clients=single_client)
        zero = torch.zeros((), dtype=torch.int64)
        lr = torch.zeros((), dtype=self.data.dtype)
        draws = self.shared_draws(algorithm, "federation")  # numpy cannot draw fake tensors
        with FakeTensorMode(allow_non_fake_inputs=True):
            unpacked = algorithm.unpack_broadcast(broadcast, draws, self.model)
            inputs = RoundInputs(client, unpacked, lr, zero)
            state = training.init_state(inputs, training.start_buffers(inputs, zero), zero)
            step_size = self.optimizer.effective_step_size(client.num_steps, 1.0).to(lr.dtype)
            work = LocalWork(client.num_steps, lr, step_size)
            payload = sum_of_one(training.finish(state, inputs, work).payload)
        return tree.apply(
            lambda value: torch.empty(value.shape, dtype=value.dtype, device="meta"), payload
        )

    @torch.no_grad()
    def personal_stats(self, spec: RoundSpec, clients: CohortClients) -> Tensor:
        """Evaluate the models that clients would use now on their own test examples.

        A client's model is what it would start its next round from, without training.

        Args:
            spec: The round, with the newest broadcast.
            clients: The clients, with their states.

        Returns:
            Class statistics `(K, ..., C)`.
        """
        broadcast = self.unpack(spec.algorithm, spec.broadcast)
        client_ids = clients.client_ids
        if self.config.mapping == "loop":
            stats = []
            for row in range(len(client_ids)):
                weights = self._personal_models(spec, broadcast, clients.single(row))
                stats.append(self.evaluator.own_stats(weights, client_ids[row : row + 1]))
            return torch.stack(stats)
        with self._training_at_once():
            weights = self._personal_models(spec, broadcast, clients)
            return self.evaluator.own_stats(weights, client_ids, vmap_clients)

    def _personal_models(self, spec: RoundSpec, broadcast: State, clients: CohortClients) -> Params:
        """Return the weights that clients would use now."""
        training = self.local_training(spec.algorithm)
        device = self.data.device
        zero = torch.zeros((), dtype=torch.int64, device=device)
        lr = torch.zeros((), dtype=self.data.dtype, device=device)
        clients = clients._replace(
            client_ids=clients.client_ids.to(device), num_steps=clients.num_steps.to(device)
        )
        return training.current_models(RoundInputs(clients, broadcast, lr, zero + spec.round), zero)

    def chunk_size(self, num_clients: int) -> int:
        """Return how many of `num_clients` clients train at once: all, if memory suffices."""
        if self.max_clients is None:
            if self.config.mapping == "loop":
                self.max_clients = sys.maxsize
            else:
                self.max_clients = max_clients_in_memory(
                    self._single_model, self.data, self.config.batch_size
                )
        num_chunks = ceil_div(num_clients, min(self.max_clients, num_clients))
        return ceil_div(num_clients, num_chunks)

    def halve_chunks(self, num_clients: int) -> bool:
        """Train at most half of `num_clients` at once from now on.

        Returns:
            False if a single client is already too much.
        """
        if num_clients <= 1 or self.config.mapping == "loop":
            return False
        self.max_clients = ceil_div(num_clients, 2)
        warnings.warn(
            f"out of memory: from now on at most {self.max_clients} clients train at once.",
            stacklevel=2,
        )
        self._graphs.clear()
        return True

    def _train_stack(
        self, spec: RoundSpec, runs: Sequence[StackedRun], num_clients: int = 0
    ) -> list[CohortResult]:
        """Train a stack of runs, or one client: generation, local steps, payloads, evaluation."""
        device = self.data.device
        stopwatch = Stopwatch(device)
        clients = all_clients(runs)
        longest = int(clients.num_steps.max())
        num_steps = longest
        if self.config.mapping == "graph":  # a recording needs one size for all rounds
            num_steps = max(longest, *(run.cohort.max_steps for run in runs))
        training = self.local_training(
            spec.algorithm,
            variable_steps=bool((clients.num_steps != num_steps).any()),
            per_client_broadcast=len(runs) > 1,
        )
        clients = clients._replace(
            client_ids=clients.client_ids.to(device), num_steps=clients.num_steps.to(device)
        )
        zero = torch.zeros((), dtype=torch.int64, device=device)
        lr = stacked_lr(runs)
        rate = lr.to(device, self.data.dtype)
        inputs = RoundInputs(clients, stacked_broadcast(runs), rate, zero + spec.round)

        buffers = training.start_buffers(inputs, zero)
        extra = self._generate(spec, training, inputs, buffers, runs)
        stopwatch.lap("generation")

        state = training.init_state(inputs, buffers, zero)._asdict()
        inputs = inputs._replace(extra=extra.groups, dataset=self.data.example_store)
        plan = self._plan_of_runs(spec, runs, num_steps, extra)
        key = ("training", spec.algorithm, training.variable_steps, training.per_client_broadcast)
        for chunk in self._plan_chunks(plan, longest):
            fixed = inputs.with_plan(chunk.plan, chunk.staged, chunk.first_step)
            state = self._repeat(training.train_step, key, state, fixed.to_tree(), chunk.num_steps)
        trained = TrainingState(**state)
        step_size = self.optimizer.effective_step_size(clients.num_steps, lr.to(device))
        work = LocalWork(
            clients.num_steps, rate.expand_as(clients.weight), step_size.to(self.data.dtype)
        )
        results = training.finish(trained, inputs, work)
        loss = trained.loss / clients.num_steps
        stopwatch.lap("training")

        class_stats = None
        if spec.evaluate_local:
            class_stats = self.evaluator.class_stats(
                results.model, self.data.test_x, self.data.test_y, training.map_clients
            )
        stopwatch.lap("evaluation")
        outputs = StackOutputs(results, loss, extra.artifacts, class_stats)
        return separate(outputs, runs, spec.round, num_clients, stopwatch, spec.keep_payloads)

    def _generate(
        self,
        spec: RoundSpec,
        training: LocalTraining,
        inputs: RoundInputs,
        buffers: Params,
        runs: Sequence[StackedRun],
    ) -> ExtraData:
        """Generate the clients' extra data."""
        zero = torch.zeros_like(inputs.round)
        per_run = [
            run.cohort.draws(
                spec.algorithm, "client", spec.round, run.clients.client_ids.reshape(-1)
            )
            for run in runs
        ]
        draws = tree.concatenate(per_run)
        if not runs[0].clients.client_ids.dim():
            draws = tree.take(draws, 0)
        gen_state = training.generation_init(inputs, buffers, zero, draws)
        if num_generation_steps := spec.algorithm.num_generation_steps(spec.round):
            key = ("generation", spec.algorithm, training.per_client_broadcast)
            gen_state = self._repeat(
                training.generation_step,
                key,
                {"gen_state": gen_state, "step": zero},
                inputs._replace(buffers=buffers).to_tree(),
                num_generation_steps,
            )["gen_state"]
        return training.extra_data(inputs, buffers, zero, gen_state)

    def _plan_of_runs(
        self, spec: RoundSpec, runs: Sequence[StackedRun], num_steps: int, extra: ExtraData
    ) -> State:
        """Plan every step of a round: indices and random tensors, `(S, K, ...)`.

        A single client has no axis K.
        """
        has_client_axis = runs[0].clients.client_ids.dim() == 1
        plans = tree.concatenate(
            [run.cohort._plan(spec, run.clients, num_steps, extra) for run in runs]
        )
        if has_client_axis:
            return tree.apply(lambda value: value.transpose(0, 1), plans)
        return tree.take(plans, 0)

    def _plan(
        self, spec: RoundSpec, clients: CohortClients, num_steps: int, extra: ExtraData
    ) -> State:
        """Plan every step for the clients of one run: indices and random tensors, `(K, S, ...)`."""
        batch_size = self.config.batch_size
        client_ids = clients.client_ids.reshape(-1)
        device_ids = client_ids.to(self.data.device)
        real = self.data.plan_batches(spec.round, client_ids, num_steps, batch_size)
        extra_indices = {}
        for group, examples in extra.groups.items():
            axis = clients.client_ids.dim()
            sizes = torch.full_like(client_ids, next(iter(examples.values())).shape[axis])
            index = rng.epoch_indices(
                self.data.seed,
                f"extra/{group}",
                spec.round,
                device_ids,
                sizes,
                num_steps * batch_size,
            )
            extra_indices[group] = index.reshape(len(client_ids), num_steps, batch_size)
        draws = self.draws(spec.algorithm, "step", spec.round, client_ids, num_steps)
        plan: State = {"indices": real.indices, "extra_indices": extra_indices, "draws": draws}
        return plan if real.crops is None else plan | {"crops": real.crops}

    def _plan_chunks(self, plan: State, num_steps: int) -> "Iterator[PlanChunk]":
        """Split the plan if the data set is streamed from host memory; else yield it whole."""
        if not self.data.is_streamed:
            yield PlanChunk(0, num_steps, plan, {})
            return
        device = self.data.device
        for first_step in range(0, num_steps, STEPS_PER_LAUNCH):
            rows = torch.arange(first_step, first_step + STEPS_PER_LAUNCH, device=device)
            rows = rows.clamp(max=len(plan["indices"]) - 1)
            part = tree.take(plan, rows)
            staged = self.data.stage(part["indices"])
            order = torch.arange(part["indices"].numel(), device=device)
            part |= {"indices": order.reshape(part["indices"].shape)}
            steps = min(STEPS_PER_LAUNCH, num_steps - first_step)
            yield PlanChunk(first_step, steps, part, staged)

    def _train_in_workers(self, spec: RoundSpec, clients: CohortClients) -> CohortResult:
        """Train clients in worker processes; those with most steps start first."""
        began = time.perf_counter()
        pool = self._worker_pool(spec.algorithm, len(clients.client_ids))
        common = {
            "broadcast": spec.broadcast,
            "clients": {
                name: value for name, value in clients._asdict().items() if name != "state"
            },
            "round": spec.round,
            "lr": spec.lr,
            "evaluate_local": spec.evaluate_local,
            "keep_payloads": spec.keep_payloads,
        }
        items = [
            {"row": row, "state": tree.take(clients.state, row)}
            for row in range(len(clients.client_ids))
        ]
        order = clients.num_steps.argsort(descending=True, stable=True).tolist()
        answers = pool.map(common, items, order)
        worker_seconds = [answer.pop("seconds") for answer in answers]
        parts = {part: sum(one[part] for one in worker_seconds) for part in worker_seconds[0]}
        scale = (time.perf_counter() - began) / sum(parts.values())
        timings = Timings({part: scale * value for part, value in parts.items()})
        results = [CohortResult(**answer, timings=timings) for answer in answers]
        return join_single_clients(results)._replace(timings=timings)

    def _worker_pool(self, algorithm: Algorithm, num_clients: int) -> WorkerPool:
        """Return the worker processes of an algorithm, started anew if they have ended."""
        pool = self._worker_pools.get(algorithm)
        if pool is not None and not pool.has_ended:
            return pool
        self.close(algorithm, *list(self._worker_pools)[MAX_WORKER_POOLS - 1 :])
        count = min(self.config.num_workers, num_clients)

        @torch.no_grad()
        def start_round(common: State) -> WorkFunction:
            broadcast = self.unpack(algorithm, common["broadcast"])
            clients = CohortClients(state={}, **common["clients"])
            spec = RoundSpec(
                algorithm,
                broadcast,
                common["round"],
                common["lr"],
                common["evaluate_local"],
                common["keep_payloads"],
            )

            @torch.no_grad()
            def train(item: State) -> State:
                client = clients.single(item["row"])._replace(state=item["state"])
                run = StackedRun(self, broadcast, client, spec.lr)
                (result,) = self._train_stack(spec, [run])
                fields = result._asdict()
                timings: Timings = fields.pop("timings")
                return fields | {"seconds": timings.seconds()}

            return train

        threads = max(1, torch.get_num_threads() // count)
        self._worker_pools[algorithm] = WorkerPool(count, threads, start_round)
        return self._worker_pools[algorithm]

    @contextlib.contextmanager
    def _training_at_once(self) -> Iterator[None]:
        """Set the threads for training clients at once, and explain errors of vmap."""
        try:
            with _torch_threads(self.config.num_threads):
                yield
        except Exception as error:
            if explanation := batching_errors.explain(error):
                raise ModelError(explanation) from error
            is_runtime_error = isinstance(error, RuntimeError)
            if not is_runtime_error or not any(word in str(error) for word in VMAP_ERROR_WORDS):
                raise
            if "randomness" in str(error):
                raise ModelError(
                    "the algorithm or the network draws its own random numbers, which cannot be "
                    "repeated: an algorithm requests them in `request_draws`."
                ) from error
            reason = str(error).strip().splitlines()[0]
            raise ModelError(
                f"clients cannot train at once here ({reason}): set --mapping loop."
            ) from error


class PlanChunk(NamedTuple):
    """A part of a round's plan.

    Attributes:
        first_step: The step at which it begins.
        num_steps: Number of its steps.
        plan: Indices and random tensors of the steps.
        staged: Examples copied to the device for these steps.
    """

    first_step: int
    num_steps: int
    plan: State
    staged: Params


@contextlib.contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    """Set torch's number of threads; 0 leaves it."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(count or before)
        yield
    finally:
        torch.set_num_threads(before)
