"""The base class of all algorithms. As it stands it is FedAvg.

Subclasses override a few hooks and call `super()`. Hooks are written for one client: no client
axis, no loop over clients, no optimizer. The engine calls them in this order:

    request_draws                           every round, wherever random tensors are needed
    server_init                             once, at the server
    broadcast                               every round, at the server
    unpack_broadcast, client_init           every round, at the clients
    start_params, start_buffers
    generation_init, num_generation_steps, generation_step ..., extra_data
    outputs, data_loss, penalty             every local step; together they are local_loss
    local_grad, after_step
    client_update, client_model             after the last local step
    resum_broadcast, resum_payload          as often as num_resums, at the server and the clients
    aggregate, server_update, server_model  every round, at the server
    survey, use_survey                      before an evaluation, at all clients and the server
"""

import difflib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from fedcog.algorithms.types import (
    Batch,
    ClientContext,
    Draw,
    ExtraData,
    FederationInit,
    GeneratorConfig,
    LocalWork,
    Loss,
    StepGradient,
    Uplink,
)
from fedcog.core import settings, tree
from fedcog.core.tree import Params, State
from fedcog.models.checks import ModelError
from fedcog.models.functional import Model


@dataclass(frozen=True)
class Algorithm:
    """FedAvg (McMahan et al., AISTATS 2017), and the base class of every other algorithm.

    An algorithm is a frozen dataclass: its fields are its hyperparameters, declared with
    `fedcog.setting`. It overrides hooks where it differs from FedAvg. Hooks are pure functions:
    they receive randomness as arguments, return new states, and write nothing in place.

    Parameters may include more than the network's own. The engine trains them all:
    a name such as `.part.name` is another part of the same model; a name such as `aside..name`
    belongs to a second model that is trained alongside and clipped separately.

    Example:
        ```python
        from dataclasses import dataclass

        from fedcog import Algorithm, setting, tree


        @dataclass(frozen=True)
        class Proximal(Algorithm):
            mu: float = setting(0.01, "weight of the proximal term", ">= 0")

            def penalty(self, params, outputs, batch, client):
                drift = tree.change(client.broadcast["params"], params)
                proximal = self.mu / 2 * tree.dot(drift, drift)
                return super().penalty(params, outputs, batch, client) + proximal
        ```

    Attributes:
        uplink: `"sum"`: the server needs only the sum of the payloads. `"per_client"`: the part of
            the payload under `"per_client"` reaches the server for each client.
        needs_features: Whether it uses features, or the last layer, of the network.
        needs_input_gradients: Whether it differentiates networks with respect to their inputs.
        is_personalized: Whether its result is a model per client.
        single_label_reason: Why it cannot train on multi-label examples; empty if it can.
        per_device_settings: Names of the settings that may differ between device types.
        needs_full_model: Whether it fails when some clients train only a part of the model.
        needs_sgd: Whether it derives the mean gradient from the change of the parameters.
        sends_coverage: Whether payloads reveal which parts of the model a client has.
        is_wrapper: Whether it wraps another algorithm, its `inner`.
        implies_fedavg: Whether the name of this wrapper, alone, stands for it around FedAvg in
            tables and records: `fedavgm`, but `fedavg+fedcog`.
        is_server_rule: Whether this wrapper decides how far the server's model moves.
        is_mean_rule: Whether this wrapper replaces the mean of the clients' updates.
        has_server_step: Whether a schedule may scale the server's update of the model; not so if
            other state follows the model.
        applies_mean: Whether the server applies the weighted mean of the clients' updates.
        needs_mean: Whether its rule assumes that the server applies that mean.
        is_recorded: Whether it stands for a user's algorithm whose code is not available.
        payload_bounds: Upper bound on the absolute values of each part of the payload, by key.
            Secure aggregation quantizes within these bounds.
    """

    uplink: ClassVar[Uplink] = "sum"
    needs_features: ClassVar[bool] = False
    needs_input_gradients: ClassVar[bool] = False
    is_personalized: ClassVar[bool] = False
    single_label_reason: ClassVar[str] = ""
    per_device_settings: ClassVar[tuple[str, ...]] = ()
    needs_full_model: ClassVar[bool] = False
    needs_sgd: ClassVar[bool] = False
    sends_coverage: ClassVar[bool] = False
    is_wrapper: ClassVar[bool] = False
    implies_fedavg: ClassVar[bool] = False
    is_server_rule: ClassVar[bool] = False
    is_mean_rule: ClassVar[bool] = False
    has_server_step: ClassVar[bool] = True
    applies_mean: ClassVar[bool] = True
    needs_mean: ClassVar[bool] = False
    is_recorded: ClassVar[bool] = False
    payload_bounds: ClassVar[dict[str, float]] = {
        "delta": 64.0,
        "buffers": 4096.0,
        "weight": 1.0,
        "count": 1.0,
    }

    def __init_subclass__(cls) -> None:
        """Refuse subclasses whose rules the engine would not call."""
        if "local_loss" in cls.__dict__:
            raise TypeError(
                f"{cls.__name__} overrides local_loss. Override data_loss (the loss on examples) "
                "or penalty (what is added to it) instead, so that FedCOG can wrap it."
            )
        _check_hooks(cls)

    @property
    def layers(self) -> "tuple[Algorithm, ...]":
        """This algorithm and those inside it, outermost first."""
        return (self,)

    @property
    def class_name(self) -> str:
        """The name of its class; for a recorded algorithm, of the class that is missing."""
        return type(self).__name__

    @property
    def setting_values(self) -> dict[str, Any]:
        """The settings by name, without the inner algorithm's.

        An integer given for a floating-point setting is a float.
        """
        values = {}
        for name, setting in settings.settings(type(self)).items():
            value = getattr(self, name)
            is_integer_for_float = setting.type is float and type(value) is int
            values[name] = float(value) if is_integer_for_float else value
        return values

    def map_layers(self, change: "Callable[[Algorithm], Algorithm]") -> "Algorithm":
        """Apply `change` to every layer, innermost first."""
        return change(self)

    @property
    def generator_config(self) -> GeneratorConfig:
        """The generator network that generates inputs, if any."""
        return GeneratorConfig()

    @property
    def generation_start(self) -> int | None:
        """The first round, from 0, in which clients generate inputs; None if they never do."""
        return None

    def request_draws(self, round: int, model: Model, batch_size: int) -> dict[str, Draw]:
        """Request random tensors.

        Args:
            round: Current round, from 0.
            model: The network, for the shapes of its inputs.
            batch_size: Number of examples in a batch.

        Returns:
            The random tensors that the hooks need in this round, by name.
        """
        return {}

    def penalty_curvature(self) -> dict[str, float]:
        """Return the curvature that penalties add to the loss, by the setting that controls it.

        A local step overshoots when the learning rate times this curvature exceeds 2. The error
        about diverged training names the setting.
        """
        return {}

    # Server hooks

    def server_init(self, init: FederationInit) -> State:
        """Create the server state before the first round.

        Args:
            init: The network, its initial parameters and the number of clients.

        Returns:
            The state that the server keeps between rounds. It holds at least `"params"` and
            `"buffers"`. 0-d tensors under `"readings"` are recorded as metrics of the round.
        """
        return {"params": init.params, "buffers": init.model.buffers}

    def broadcast(self, server: State) -> State:
        """Select what the server sends to every client of a round.

        Args:
            server: The server state.

        Returns:
            What clients receive: at least `"params"` and `"buffers"`.
        """
        return {"params": server["params"], "buffers": server["buffers"]}

    @property
    def min_clients(self) -> int:
        """The fewest clients of a round that its rule is made for."""
        return 1

    @property
    def num_resums(self) -> int:
        """The number of further sums over the same clients that a round needs."""
        return 0

    @property
    def withheld_parts(self) -> tuple[str, ...]:
        """The parts of the payload that clients send for the first further sum, not before."""
        return ()

    def first_payload(self, payload: State) -> State:
        """Leave out what clients withhold from the first sum.

        Args:
            payload: The payload that `client_update` returned.

        Returns:
            What the client sends first.
        """
        return {key: value for key, value in payload.items() if key not in self.withheld_parts}

    def resum_broadcast(self, total: State) -> State:
        """Select what clients need to compute their part of the next sum.

        Args:
            total: The last sum.

        Returns:
            What the server sends for it.
        """
        return {}

    def resum_payload(self, payload: State, broadcast: State) -> State:
        """Compute a client's part of the next sum from its last one.

        Args:
            payload: What the client sent last.
            broadcast: Result of `resum_broadcast`.

        Returns:
            The new values of some parts of the payload. The others are not sent again.
        """
        return {}

    def aggregate(self, total: State) -> State:
        """Correct the sum of the payloads, so that delta / weight is the update to apply.

        The engine passes the result to `server_update`. So rules for the mean, such as a median,
        and rules for the step, such as server momentum, compose in any order.

        Args:
            total: Sum of the clients' payloads, key by key; `"per_client"` is stacked instead.

        Returns:
            The corrected sum.
        """
        return total

    def server_update(self, server: State, total: State, draws: State) -> State:
        """Update the server state from the sum of the payloads.

        Args:
            server: The server state before the round.
            total: Result of `aggregate`.
            draws: The random tensors of server scope.

        Returns:
            The server state after the round.
        """
        mean = self.mean_update(total)
        return server | {
            "params": tree.add(server["params"], mean["delta"]),
            "buffers": tree.add(server["buffers"], mean["buffers"]),
        }

    @staticmethod
    def mean_update(total: State) -> State:
        """Divide the summed updates by the total weight.

        Args:
            total: Sum of the clients' payloads.

        Returns:
            The weighted mean of the clients' updates: `"delta"` (parameters) and `"buffers"`.
        """
        updates = {key: total.get(key, {}) for key in ("delta", "buffers")}
        return tree.apply(lambda value: value / total["weight"], updates)

    @property
    def needs_survey(self) -> bool:
        """Whether all clients are asked for a sum over their examples before an evaluation."""
        return False

    def survey(self, weights: Params, batch: Batch, model: Model) -> State:
        """Compute a batch's part of a sum over the training examples of all clients.

        Args:
            weights: Parameters and buffers of the server's model.
            batch: Some of a client's training examples: `"x"` and `"y"`.
            model: The network.

        Returns:
            Tensors by name, which are added up over batches and clients.
        """
        return {}

    def use_survey(self, server: State, total: State, draws: State, model: Model) -> State:
        """Prepare the server's model for its evaluation.

        Args:
            server: The server state after the round.
            total: Sum of what `survey` returned.
            draws: The random tensors of survey scope.
            model: The network.

        Returns:
            The server state, with the same keys and shapes.
        """
        return server

    def server_model(self, server: State) -> Params:
        """Return the weights to evaluate and deploy, parameters and buffers together."""
        weights: Params = server["params"] | server["buffers"]
        return weights

    # Client hooks

    def unpack_broadcast(self, broadcast: State, draws: State, model: Model) -> State:
        """Derive what clients need from the broadcast, once for a cohort.

        Args:
            broadcast: What the server sent.
            draws: The random tensors of federation scope.
            model: The network.

        Returns:
            What the hooks find in `client.broadcast`.
        """
        return broadcast

    def client_init(self, broadcast: State) -> State:
        """Create the state of a client that takes part for the first time.

        Args:
            broadcast: What the server sent, after `unpack_broadcast`.

        Returns:
            The state that the client keeps between its rounds.
        """
        return {}

    def start_params(self, client: ClientContext) -> Params:
        """Return the parameters that local training starts from."""
        params: Params = client.broadcast["params"]
        return params

    def start_buffers(self, client: ClientContext) -> Params:
        """Return the running statistics that local training starts from."""
        buffers: Params = client.broadcast["buffers"]
        return buffers

    def generation_init(self, client: ClientContext, draws: State) -> State:
        """Initialize the generation of extra data.

        Args:
            client: The client.
            draws: The random tensors of client scope.

        Returns:
            The generation state that `generation_step` optimizes.
        """
        return draws

    def num_generation_steps(self, round: int) -> int:
        """Return how many generation steps every client takes in a round, from 0."""
        return 0

    def generation_step(self, gen_state: State, client: ClientContext) -> State:
        """Improve the generation state by one step.

        A wrapper may call this more often than `num_generation_steps` returns. Return `gen_state`
        unchanged from that step on.

        Args:
            gen_state: The generation state.
            client: The client; `client.step` counts generation steps from 0.

        Returns:
            The generation state after the step, with the same keys and shapes.
        """
        return gen_state

    def extra_data(self, client: ClientContext, gen_state: State) -> ExtraData:
        """Return the data that this client trains on besides its own examples.

        Args:
            client: The client.
            gen_state: The generation state after the last generation step.

        Returns:
            Batches by group, and artifacts for the report.
        """
        return ExtraData({}, {})

    def outputs(self, params: Params, batch: Batch, client: ClientContext) -> State:
        """Run the forward passes of a local step. All loss terms share the result.

        Args:
            params: Parameters of the client's model.
            batch: Data of the step.
            client: The client.

        Returns:
            `"logits"` `(B, C)`, `"features"` `(B, F)` or None, and `"buffers"`: the running
            statistics after the pass.
        """
        logits, features, buffers = client.forward(params, batch["x"])
        return {"logits": logits, "features": features, "buffers": buffers}

    def data_loss(self, outputs: State, batch: Batch, client: ClientContext) -> Tensor:
        """Compute the loss on the examples of a batch.

        Args:
            outputs: Result of `outputs`.
            batch: Data of the step.
            client: The client.

        Returns:
            A 0-d tensor. Wrappers such as FedCOG rescale this term.
        """
        return client.task.loss(outputs["logits"], batch["y"]).mean()

    def penalty(
        self, params: Params, outputs: State, batch: Batch, client: ClientContext
    ) -> Tensor:
        """Compute a regularization term. Wrappers never rescale it.

        Args:
            params: Parameters of the client's model.
            outputs: Result of `outputs`.
            batch: Data of the step.
            client: The client.

        Returns:
            A 0-d tensor that is added to the data loss.
        """
        return torch.zeros((), dtype=client.lr.dtype, device=client.lr.device)

    @final
    def local_loss(
        self, params: Params, batch: Batch, client: ClientContext
    ) -> tuple[Tensor, Params]:
        """Compute the loss of one local step: `data_loss` + `penalty`.

        Args:
            params: Parameters of the client's model.
            batch: Data of the step.
            client: The client.

        Returns:
            The loss, a 0-d tensor, and the running statistics after the forward pass.

        Raises:
            ModelError: If a term is not a single number.
        """
        outputs = self.outputs(params, batch, client)
        terms = {
            "data_loss": self.data_loss(outputs, batch, client),
            "penalty": self.penalty(params, outputs, batch, client),
        }
        for hook, term in terms.items():
            if term.dim():
                raise ModelError(
                    f"{type(self).__name__}.{hook} returned a tensor of shape {list(term.shape)}, "
                    "but the loss of a step is a single number: reduce it, for example with "
                    ".mean()."
                )
        return terms["data_loss"] + terms["penalty"], outputs["buffers"]

    def local_grad(
        self, loss: Loss, params: Params, batch: Batch, client: ClientContext
    ) -> StepGradient:
        """Compute the direction of one local step.

        Args:
            loss: The loss of the step. Under a wrapper it is the wrapper's loss, so use this one.
            params: Parameters of the client's model.
            batch: Data of the step.
            client: The client.

        Returns:
            Gradient, loss, and the running statistics after the forward pass.
        """
        return client.step_gradient(loss, params, batch)

    def after_step(
        self, before: Params, after: Params, batch: Batch, client: ClientContext
    ) -> Params:
        """Adjust the parameters after an optimizer step: frozen parts, masks, projections.

        Args:
            before: Parameters before the step.
            after: Parameters after the step.
            batch: Data of the step.
            client: The client; `client.buffers` are those after the step.

        Returns:
            The parameters that the step ends with.
        """
        return after

    def client_update(
        self, params: Params, client: ClientContext, work: LocalWork
    ) -> tuple[State, State]:
        """Create the client's new state and its payload after local training.

        `"delta"` and `"buffers"` are multiplied by the client's weight, so the server adds payloads
        and divides once by the total weight.

        Args:
            params: Parameters after the last local step.
            client: The client; `client.buffers` are those after the last step.
            work: How much the client trained.

        Returns:
            (state, payload): what the client keeps, and what it sends: `"delta"` (change of the
            parameters), `"buffers"`, `"weight"`, `"count"` (1), and what subclasses add.
        """
        update = {
            "delta": tree.change(client.broadcast["params"], params),
            "buffers": tree.change(client.broadcast["buffers"], client.buffers),
        }
        payload = tree.apply(lambda value: client.weight * value, update)
        payload |= {"weight": client.weight, "count": torch.ones_like(client.weight)}
        return client.state, payload

    def client_model(self, params: Params, client: ClientContext) -> Params:
        """Return the weights that this client would use itself.

        Args:
            params: Parameters after the last local step.
            client: The client.

        Returns:
            Parameters and buffers together.
        """
        return params | client.buffers


def _check_hooks(cls: type[Algorithm]) -> None:
    """Check that overridden hooks exist and take the arguments that the engine passes.

    Raises:
        TypeError: If a method's name is close to a hook's, or its arguments differ.
    """
    hooks = {
        name: value
        for name, value in vars(Algorithm).items()
        if inspect.isfunction(value) and not name.startswith("_")
    }
    for name, value in cls.__dict__.items():
        if name.startswith("_") or not inspect.isfunction(value):
            continue
        if name not in hooks and (
            close := difflib.get_close_matches(name, hooks, n=1, cutoff=0.85)
        ):
            raise TypeError(
                f"{cls.__name__}.{name} is not a hook, so it would never be called: "
                f"did you mean {close[0]}?"
            )
        expected = inspect.signature(hooks.get(name, value))
        actual = inspect.signature(value)
        try:
            actual.bind(*expected.parameters)
        except TypeError:
            raise TypeError(
                f"{cls.__name__}.{name} takes {actual}, but the engine calls it with {expected}."
            ) from None
