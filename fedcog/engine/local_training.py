"""Local training of a cohort as functions of tensors.

The functions know a round only through their arguments, so a CUDA graph can record a step once and
replay it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from fedcog.algorithms import Algorithm, Batch, ClientContext, ExtraData, Gradient, LocalWork
from fedcog.core import tree
from fedcog.core.optimizers import Optimizer, OptimizerState, clip_grads
from fedcog.core.tasks import Task
from fedcog.core.tree import Params, State
from fedcog.data.client_batches import FederatedData
from fedcog.engine.aggregation import is_finite
from fedcog.models.functional import Model
from fedcog.models.ops.keyed_random import AUGMENTATION_STREAM, KeyedRandom, StepKey

MapClients = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Turns a function of one client into one of a cohort: `vmap_clients` or `single_client`."""


class CohortClients(NamedTuple):
    """Everything that differs between the clients of a cohort, with a leading client axis.

    Attributes:
        client_ids: `(K,)`, in host memory until training starts.
        state: What each client kept, stacked.
        weight: Weight in the server's sum, `(K,)`.
        class_counts: Training examples of each class, `(K, C)`.
        label_set_sizes: Training examples with 0, 1, 2, ... labels.
        num_steps: Number of local steps, `(K,)`, in host memory until training starts.
        dropout_words: Words of the run's seed that key dropout masks, `(K, 2)`.
    """

    client_ids: Tensor
    state: State
    weight: Tensor
    class_counts: Tensor
    label_set_sizes: Tensor
    num_steps: Tensor
    dropout_words: Tensor

    def select(self, rows: Tensor) -> "CohortClients":
        """Return the clients in these rows (in host memory), in this order."""
        device_rows = rows.to(self.weight.device)
        return CohortClients(
            client_ids=self.client_ids[rows],
            state=tree.take(self.state, device_rows),
            weight=self.weight[device_rows],
            class_counts=self.class_counts[device_rows],
            label_set_sizes=self.label_set_sizes[device_rows],
            num_steps=self.num_steps[rows],
            dropout_words=self.dropout_words[device_rows],
        )

    def single(self, row: int) -> "CohortClients":
        """Return one client without the client axis; its state is copied out of the stack."""
        return CohortClients(
            client_ids=self.client_ids[row],
            state=tree.apply(torch.clone, tree.take(self.state, row)),
            weight=self.weight[row],
            class_counts=self.class_counts[row],
            label_set_sizes=self.label_set_sizes[row],
            num_steps=self.num_steps[row],
            dropout_words=self.dropout_words[row],
        )


class RoundInputs(NamedTuple):
    """What stays constant while the clients of a cohort train in a round.

    CUDA graphs and worker processes handle dicts of tensors: `to_tree` and `from_tree` convert.

    Attributes:
        clients: The clients.
        broadcast: What they received; with a client axis if runs are stacked.
        lr: Learning rate: 0-d, or `(K,)` if stacked runs have different ones.
        round: Current round, from 0, a 0-d tensor.
        buffers: Running statistics at the start of the round; for generation.
        plan: Batch indices, crops and random tensors of all steps, `(S, K, ...)`; for training.
        dataset: The data set; large, and never copied.
        staged: The examples of this plan, if the data set is streamed from host memory.
        extra: Extra data by group, `(K, N, ...)`.
        first_step: The step at which `plan` begins, a 0-d tensor.
    """

    clients: CohortClients
    broadcast: State
    lr: Tensor
    round: Tensor
    buffers: Params | None = None
    plan: State | None = None
    dataset: Params | None = None
    staged: Params | None = None
    extra: dict[str, Batch] | None = None
    first_step: Tensor | None = None

    def with_plan(self, plan: State, staged: Params, first_step: int) -> "RoundInputs":
        """Return these inputs for some steps of the round.

        Args:
            plan: Batch indices, crops and random tensors of the steps.
            staged: Their examples, if the data set is streamed.
            first_step: The step at which the plan begins.

        Returns:
            The inputs of `LocalTraining.train_step`.
        """
        start = torch.zeros_like(self.round) + first_step
        return self._replace(plan=plan, staged=staged, first_step=start)

    def to_tree(self) -> State:
        """Convert to a dict of tensors; fields that are None are left out."""
        fields = {name: value for name, value in self._asdict().items() if value is not None}
        return fields | {"clients": self.clients._asdict()}

    @classmethod
    def from_tree(cls, fields: State) -> "RoundInputs":
        """Convert back from `to_tree`."""
        return cls(**(fields | {"clients": CohortClients(**fields["clients"])}))


class TrainingState(NamedTuple):
    """What local steps change.

    Attributes:
        params: Parameters of the clients' models.
        buffers: Their running statistics.
        loss: Sum of the losses of all steps so far, `(K,)`.
        first: First moments of the optimizer.
        second: Second moments of the optimizer.
        step: Number of steps taken, a 0-d tensor.
    """

    params: Params
    buffers: Params
    loss: Tensor
    first: Params
    second: Params
    step: Tensor


class ClientResults(NamedTuple):
    """What the clients of a cohort end a round with.

    Attributes:
        state: What they keep.
        payload: What they send.
        model: The weights they would use themselves.
        distance: L2 norm of their change of the parameters, `(K,)`.
        update_finite: Whether the payload is finite, `(K,)`.
        state_finite: Whether the state is finite, `(K,)`.
    """

    state: State
    payload: State
    model: Params
    distance: Tensor
    update_finite: Tensor
    state_finite: Tensor


class LocalTraining(NamedTuple):
    """Local training of one client, mapped over the cohort by `map_clients`.

    Attributes:
        model: The network.
        task: What a label means.
        data: The federated data set.
        optimizer: The local optimizer.
        batch_size: Number of examples in a batch.
        grad_clip: Largest L2 norm of a client's gradient; 0 means no limit.
        algorithm: The hooks.
        map_clients: vmap, or the identity for one client.
        gradient: How losses are differentiated.
        variable_steps: Whether some clients take fewer steps than others.
        per_client_broadcast: Whether each client received its own broadcast: the clients belong to
            several stacked runs, which may have different learning rates.
    """

    model: Model
    task: Task
    data: FederatedData
    optimizer: Optimizer
    batch_size: int
    grad_clip: float
    algorithm: Algorithm
    map_clients: MapClients
    gradient: Gradient
    variable_steps: bool
    per_client_broadcast: bool = False

    def over_clients(self, function: Callable[..., Any], inputs: RoundInputs, *mapped: Any) -> Any:
        """Apply `function(client, inputs, ...)` to every client.

        Args:
            function: Function of one client, without a client axis.
            inputs: Inputs of the round.
            *mapped: Further arguments with a client axis.

        Returns:
            The results with a client axis.
        """
        if not self.per_client_broadcast:
            each = self.map_clients(lambda client, *rest: function(client, inputs, *rest))
            return each(inputs.clients, *mapped)
        own: State = {"broadcast": inputs.broadcast}
        if inputs.lr.dim():
            own["lr"] = inputs.lr

        def _with_own(client: CohortClients, own: State, *rest: Any) -> Any:
            return function(client, inputs._replace(**own), *rest)

        return self.map_clients(_with_own)(inputs.clients, own, *mapped)

    def uses_default(self, hook: str) -> bool:
        """Return whether the algorithm does not override a hook.

        The engine then skips mapping the hook over clients, which costs a millisecond.
        """
        return getattr(type(self.algorithm), hook) is getattr(Algorithm, hook)

    def context(
        self, client: CohortClients, inputs: RoundInputs, buffers: Params, step: Tensor
    ) -> ClientContext:
        """Create what the hooks see of a client.

        Args:
            client: One client, without a client axis.
            inputs: Inputs of the round.
            buffers: The client's running statistics.
            step: Current local or generation step.

        Returns:
            The view for the hooks.
        """
        return ClientContext(
            model=self.model,
            task=self.task,
            broadcast=inputs.broadcast,
            state=client.state,
            buffers=buffers,
            weight=client.weight,
            class_counts=client.class_counts,
            label_set_sizes=client.label_set_sizes,
            round=inputs.round,
            step=step,
            num_steps=client.num_steps,
            lr=inputs.lr,
            batch_size=self.batch_size,
            gradient=self.gradient,
            step_key=_step_key(client, inputs, step),
        )

    def start_buffers(self, inputs: RoundInputs, step: Tensor) -> Params:
        """Return the running statistics that the clients start from.

        Args:
            inputs: Inputs of the round.
            step: Zero, a 0-d tensor.

        Returns:
            New tensors with a client axis.
        """

        def _start(client: CohortClients, inputs: RoundInputs) -> Params:
            context = self.context(client, inputs, inputs.broadcast["buffers"], step)
            return self.algorithm.start_buffers(context)

        return tree.apply(torch.clone, self.over_clients(_start, inputs))

    def generation_init(
        self, inputs: RoundInputs, buffers: Params, step: Tensor, draws: State
    ) -> State:
        """Initialize the generation of extra data.

        Args:
            inputs: Inputs of the round.
            buffers: Running statistics at the start of the round.
            step: Zero, a 0-d tensor.
            draws: The random tensors of client scope.

        Returns:
            The generation states of all clients.
        """
        if self.uses_default("generation_init"):
            return draws

        def _start(
            client: CohortClients, inputs: RoundInputs, buffers: Params, draws: State
        ) -> State:
            context = self.context(client, inputs, buffers, step)
            return self.algorithm.generation_init(context, draws)

        gen_states: State = self.over_clients(_start, inputs, buffers, draws)
        return gen_states

    def generation_step(self, state: State, fixed: State) -> State:
        """Take one generation step.

        Args:
            state: `"gen_state"`, the generation states of all clients, and `"step"`.
            fixed: `RoundInputs` as a tree.

        Returns:
            The state after the step.
        """
        inputs = RoundInputs.from_tree(fixed)
        step = state["step"]

        def _improve(
            client: CohortClients, inputs: RoundInputs, buffers: Params, gen_state: State
        ) -> State:
            context = self.context(client, inputs, buffers, step)
            return self.algorithm.generation_step(gen_state, context)

        gen_state = self.over_clients(_improve, inputs, inputs.buffers, state["gen_state"])
        return {"gen_state": gen_state, "step": step + 1}

    def extra_data(
        self, inputs: RoundInputs, buffers: Params, step: Tensor, gen_state: State
    ) -> ExtraData:
        """Return the clients' extra data.

        Args:
            inputs: Inputs of the round.
            buffers: Running statistics at the start of the round.
            step: Zero, a 0-d tensor.
            gen_state: The generation states of all clients.

        Returns:
            Batches by group and artifacts, with a client axis.
        """
        if self.uses_default("extra_data"):
            return ExtraData({}, {})

        def _finish(
            client: CohortClients, inputs: RoundInputs, buffers: Params, gen_state: State
        ) -> ExtraData:
            context = self.context(client, inputs, buffers, step)
            return self.algorithm.extra_data(context, gen_state)

        extra: ExtraData = self.over_clients(_finish, inputs, buffers, gen_state)
        return extra

    def init_state(self, inputs: RoundInputs, buffers: Params, step: Tensor) -> TrainingState:
        """Return the training state before the first local step.

        Args:
            inputs: Inputs of the round.
            buffers: Running statistics at the start of the round.
            step: Zero, a 0-d tensor.

        Returns:
            Start parameters, and an optimizer that has taken no step.
        """

        def _start(client: CohortClients, inputs: RoundInputs, buffers: Params) -> Params:
            return self.algorithm.start_params(self.context(client, inputs, buffers, step))

        params: Params = self.over_clients(_start, inputs, buffers)
        optimizer = self.optimizer.init(params)
        loss = torch.zeros_like(inputs.clients.weight)
        return TrainingState(params, buffers, loss, optimizer.first, optimizer.second, step)

    def current_models(self, inputs: RoundInputs, step: Tensor) -> Params:
        """Return the weights that the clients would use before they train.

        Args:
            inputs: Inputs of the round.
            step: Zero, a 0-d tensor.

        Returns:
            Parameters and buffers with a client axis.
        """

        def _model(client: CohortClients, inputs: RoundInputs, buffers: Params) -> Params:
            context = self.context(client, inputs, buffers, step)
            return self.algorithm.client_model(self.algorithm.start_params(context), context)

        models: Params = self.over_clients(_model, inputs, self.start_buffers(inputs, step))
        return models

    def train_step(self, state: State, fixed: State) -> State:
        """Take one local step with all clients.

        Args:
            state: `TrainingState` as a tree.
            fixed: `RoundInputs` as a tree.

        Returns:
            The training state after the step, as a tree.
        """
        inputs = RoundInputs.from_tree(fixed)
        before = TrainingState(**state)
        batch = self.batch(inputs, before.step)
        grads, loss, buffers = self.over_clients(
            self._gradient_of(before.step), inputs, before.params, before.buffers, batch
        )
        optimizer = OptimizerState(before.first, before.second, before.step)
        params, optimizer = self.optimizer.step(before.params, grads, optimizer, inputs.lr)
        if not self.uses_default("after_step"):
            adjust = self._adjust_after(before.step)
            params = self.over_clients(adjust, inputs, before.params, params, buffers, batch)
        after: State = {
            "params": {name: params[name] for name in before.params},
            "buffers": buffers,
            "loss": before.loss + loss,
            "first": optimizer.first,
            "second": optimizer.second,
        }
        if self.variable_steps:
            is_active = before.step < inputs.clients.num_steps
            after = tree.apply(
                lambda new, old: torch.where(_expand_dims(is_active, new), new, old), after, state
            )
        return after | {"step": optimizer.step}

    def _gradient_of(self, step: Tensor) -> Callable[..., tuple[Params, Tensor, Params]]:
        """Return the function that computes one client's clipped gradient, loss and buffers."""

        def _gradient(
            client: CohortClients,
            inputs: RoundInputs,
            params: Params,
            buffers: Params,
            batch: Batch,
        ) -> tuple[Params, Tensor, Params]:
            context = self.context(client, inputs, buffers, step)

            def _loss(params: Params, batch: Batch) -> tuple[Tensor, Params]:
                return self.algorithm.local_loss(params, batch, context)

            grads, value, after = self.algorithm.local_grad(_loss, params, batch, context)
            if self.grad_clip:
                grads = clip_grads(grads, self.grad_clip)
            return grads, value, after

        return _gradient

    def _adjust_after(self, step: Tensor) -> Callable[..., Params]:
        """Return the function that applies the `after_step` hook to one client."""

        def _adjust(
            client: CohortClients,
            inputs: RoundInputs,
            before: Params,
            after: Params,
            buffers: Params,
            batch: Batch,
        ) -> Params:
            context = self.context(client, inputs, buffers, step)
            return self.algorithm.after_step(before, after, batch, context)

        return _adjust

    def batch(self, inputs: RoundInputs, step: Tensor) -> Batch:
        """Return the clients' data of a step: real examples, extra data by group, random tensors.

        Args:
            inputs: Inputs of the round.
            step: Current step, a 0-d tensor.

        Returns:
            The batch with a client axis.
        """
        assert inputs.plan is not None
        assert inputs.extra is not None
        assert inputs.first_step is not None
        row = (step - inputs.first_step).reshape(1)
        plan: State = tree.apply(lambda value: value.index_select(0, row)[0], inputs.plan)
        examples = (inputs.dataset or {}) | (inputs.staged or {})
        batch: Batch = self.data.examples(plan["indices"], plan.get("crops"), examples)
        if self.data.augmentation is not None:
            batch["x"] = self._augmented(inputs, batch["x"], step)
        for group, index in plan["extra_indices"].items():
            batch[group] = self.map_clients(tree.take)(inputs.extra[group], index)
        return batch | {"draws": plan["draws"]}

    def _augmented(self, inputs: RoundInputs, x: Tensor, step: Tensor) -> Tensor:
        """Apply the user's augmentation to the examples of a step, then normalize them.

        Args:
            inputs: Inputs of the round.
            x: Examples with a client axis, not normalized yet.
            step: Current step.

        Returns:
            Inputs with a client axis.
        """
        is_mapped = self.map_clients is not single_client

        def _augment(client: CohortClients, inputs: RoundInputs, x: Tensor) -> Tensor:
            key = _step_key(client, inputs, step)._replace(stream=AUGMENTATION_STREAM)
            assert self.data.augmentation is not None
            return self.data.augmentation(x, KeyedRandom(key, is_mapped))

        augmented: Tensor = self.over_clients(_augment, inputs, x)
        return self.data.normalize(augmented)

    def finish(self, state: TrainingState, inputs: RoundInputs, work: LocalWork) -> ClientResults:
        """Compute what the clients keep and send.

        Args:
            state: The training state after the last step.
            inputs: Inputs of the round.
            work: How much each client trained.

        Returns:
            States, payloads and models, and whether they are finite.
        """

        def _end(
            client: CohortClients,
            inputs: RoundInputs,
            params: Params,
            buffers: Params,
            work: LocalWork,
        ) -> ClientResults:
            context = self.context(client, inputs, buffers, state.step)
            kept, payload = self.algorithm.client_update(params, context, work)
            return ClientResults(
                state=kept,
                payload=payload,
                model=self.algorithm.client_model(params, context),
                distance=tree.norm(tree.change(inputs.broadcast["params"], params)),
                update_finite=is_finite(payload),
                state_finite=is_finite(kept),
            )

        results: ClientResults = self.over_clients(_end, inputs, state.params, state.buffers, work)
        return results


def _step_key(client: CohortClients, inputs: RoundInputs, step: Tensor) -> StepKey:
    """Return what the random numbers of a client's step depend on."""
    return StepKey(client.dropout_words, inputs.round, client.client_ids, step)


def _expand_dims(mask: Tensor, value: Tensor) -> Tensor:
    """Reshape a mask `(K,)` so that it broadcasts against `value` `(K, ...)`."""
    return mask.reshape(-1, *[1] * (value.dim() - 1))


def vmap_clients(function: Callable[..., Any]) -> Callable[..., Any]:
    """Map a function over clients that train at once."""
    return vmap(function)


def single_client(function: Callable[..., Any]) -> Callable[..., Any]:
    """Leave a function as it is, for one client without a client axis."""
    return function


def autograd_gradient(
    loss: Callable[..., Any], params: Params, batch: Batch, has_aux: bool = False
) -> tuple[Params, Any]:
    """Differentiate with plain autograd, the fastest way for one client. See `Gradient`.

    Returns:
        (gradient, loss), or (gradient, (loss, aux)) with `has_aux`.
    """
    leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
    with torch.enable_grad():
        result = loss(leaves, batch)
    value, aux = result if has_aux else (result, {})
    grads = torch.autograd.grad(
        value, list(leaves.values()), allow_unused=True, materialize_grads=True
    )
    by_name = dict(zip(leaves, grads, strict=True))
    if has_aux:
        return by_name, (value.detach(), tree.apply(torch.detach, aux))
    return by_name, value.detach()


def functional_gradient(
    loss: Callable[..., Any], params: Params, batch: Batch, has_aux: bool = False
) -> tuple[Params, Any]:
    """Differentiate with a function transform, which vmap can map over clients. See `Gradient`.

    Returns:
        (gradient, loss), or (gradient, (loss, aux)) with `has_aux`.
    """
    grads, value = grad_and_value(loss, has_aux=has_aux)(params, batch)
    return grads, value
