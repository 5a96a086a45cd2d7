"""The types that an algorithm's hooks receive and return."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from torch import Tensor

from fedcog.core.tasks import Task
from fedcog.core.tree import Params, State
from fedcog.models.checks import ModelError
from fedcog.models.functional import ForwardResult, Model
from fedcog.models.ops.keyed_random import StepKey

Batch = dict[str, Any]
"""The data of one local step.

`"x"` holds inputs `(B, *input_shape)` and `"y"` their labels. Every group that `extra_data`
returned has a batch of the same kind under its own name. `"draws"` holds the random tensors of step
scope.
"""

Scope = Literal["step", "client", "federation", "server", "survey"]
"""How often a random tensor is drawn: see `Draw`."""

Uplink = Literal["sum", "per_client"]
"""What the server needs of the payloads: their sum, or the payload of every client."""

UPDATE_PARTS = ("delta", "buffers")
"""The parts of a payload that are the client's update, times its weight."""

Loss = Callable[[Params, Batch], tuple[Tensor, Params]]
"""The loss of one local step: (params, batch) to (loss, buffers after the forward pass)."""


class Gradient(Protocol):
    """Differentiate a loss with respect to `params`."""

    def __call__(
        self, loss: Callable[..., Any], params: Params, batch: Batch, has_aux: bool = False
    ) -> tuple[Params, Any]:
        """Return the gradient and the loss.

        Args:
            loss: Function of (params, batch) that returns a 0-d tensor. With `has_aux` it returns a
                pair whose second part is not differentiated.
            params: Where to differentiate, by name.
            batch: Passed on to `loss`.
            has_aux: Whether `loss` returns a pair.

        Returns:
            (gradient by name, loss), or (gradient by name, (loss, aux)) with `has_aux`.
        """


class StepGradient(NamedTuple):
    """The gradient of one local step.

    Attributes:
        grads: Gradient by parameter name.
        loss: Loss of the step, a 0-d tensor.
        buffers: Running statistics after the step's forward pass, by name.
    """

    grads: Params
    loss: Tensor
    buffers: Params


class Draw(NamedTuple):
    """A random tensor that an algorithm requests by name in `request_draws`.

    Randomness is a function of (seed, name, round, client), so a run never stores generator states.

    Attributes:
        shape: Shape of the tensor. For kind `"examples"`, `(n,)`: the number of examples.
        scope: `"step"`: a new tensor for every local step, in `batch["draws"]`. `"client"`: one per
            client and round, passed to `generation_init`. `"server"`: one per round, passed to
            `server_update`. `"survey"`: one per evaluated round, passed to `use_survey`.
            `"federation"`: one for the whole run, the same at every client, passed
            to `server_init` and `unpack_broadcast`.
        kind: `"normal"` (standard normal), `"uniform"` (between 0 and 1), or `"examples"`: a batch
            of the client's own training examples, without repetition until all were drawn.
    """

    shape: tuple[int, ...]
    scope: Scope = "client"
    kind: Literal["normal", "uniform", "examples"] = "normal"


class ExtraData(NamedTuple):
    """Data that a client trains on besides its own examples.

    Attributes:
        groups: Batches by group name. Every local step receives a random batch of each group.
        artifacts: Tensors to save with the run and show in reports, such as generated images.
    """

    groups: dict[str, Batch]
    artifacts: Params


class LocalWork(NamedTuple):
    """How much a client trained in a round. All fields are 0-d tensors.

    Attributes:
        num_steps: Number of local steps.
        lr: Learning rate of the round.
        effective_step_size: Sum of the effective step sizes, momentum included: how far a constant
            gradient of length 1 would have moved the parameters.
    """

    num_steps: Tensor
    lr: Tensor
    effective_step_size: Tensor


class GeneratorConfig(NamedTuple):
    """The generator network that an algorithm uses to generate inputs.

    Attributes:
        kind: `"none"`: no generator, `"conv"`: the built-in one, `"custom"`: the user's network.
        noise_size: Length of the noise vector that the generator turns into one input.
    """

    kind: Literal["none", "conv", "custom"] = "none"
    noise_size: int = 0


class FederationInit(NamedTuple):
    """What the server state is initialized from.

    Attributes:
        model: The network.
        params: Initial parameters of the network, and those that wrappers added.
        num_clients: Number of clients of the federation, a 0-d floating tensor.
        draws: The random tensors of federation scope.
    """

    model: Model
    params: Params
    num_clients: Tensor
    draws: State


@dataclass(frozen=True)
class ClientContext:
    """Read-only view of one client that every client hook receives.

    There is no client axis: the engine maps hooks over the clients of a cohort. Numbers are 0-d
    tensors.

    Attributes:
        model: The network as a pure function of its parameters.
        task: What a label means: loss, distillation loss, decision.
        broadcast: What the server sent in this round, after `unpack_broadcast`.
        state: What this client kept from its last round.
        buffers: Running statistics (BatchNorm) before this step, by name.
        weight: This client's weight in the server's sum, in (0, 1].
        class_counts: Number of the client's training examples of each class, `(C,)`.
        label_set_sizes: Number of its examples with 0, 1, 2, ... labels, `(C + 1,)`.
        round: Current round, from 0.
        step: Current local step, or generation step, from 0.
        num_steps: Number of local steps of this client in this round.
        lr: Local learning rate of this round.
        batch_size: Number of examples in a batch.
        gradient: Differentiates a loss with respect to parameters or inputs: see `Gradient`.
        step_key: What dropout masks of this step depend on.
    """

    model: Model
    task: Task
    broadcast: State
    state: State
    buffers: Params
    weight: Tensor
    class_counts: Tensor
    label_set_sizes: Tensor
    round: Tensor
    step: Tensor
    num_steps: Tensor
    lr: Tensor
    batch_size: int
    gradient: Gradient
    step_key: StepKey | None = None

    def forward(self, params: Params, x: Tensor, buffers: Params | None = None) -> ForwardResult:
        """Run the network in training mode. `outputs` calls it on the client's own examples.

        Every pass with this method in a step uses the same dropout masks. So a second gradient of
        the same loss, as in SAM, is that of the same function.

        Args:
            params: Parameters by name.
            x: Inputs `(B, *input_shape)`.
            buffers: Running statistics before the pass; `self.buffers` by default.

        Returns:
            Logits `(B, C)`, features `(B, F)`, and the running statistics after the pass. They
            become the client's only if a hook returns them.
        """
        before = self.buffers if buffers is None else buffers
        return self.model.forward(params, before, x, self.step_key)

    def logits(self, params: Params, x: Tensor) -> Tensor:
        """Compute outputs on further inputs as in training, without moving running statistics.

        Args:
            params: Parameters by name.
            x: Inputs `(B, *input_shape)`.

        Returns:
            Logits `(B, C)`. BatchNorm normalizes by the batch's own statistics. Dropout is active,
            with other masks than in `forward`.
        """
        step_key = None if self.step_key is None else self.step_key._replace(stream=1)
        return self.model.forward(params, self.buffers, x, step_key).logits

    def teacher_logits(self, x: Tensor) -> Tensor:
        """Compute the outputs of the global model, as a teacher for distillation.

        The global model is that of the broadcast, in evaluation mode: BatchNorm uses its running
        statistics, dropout is off, and nothing is written.

        Args:
            x: Inputs `(B, *input_shape)`.

        Returns:
            Logits `(B, C)`, without a gradient.

        Raises:
            ModelError: If the algorithm does not broadcast the whole model, as FedRep.
        """
        weights = self.broadcast["params"] | self.broadcast["buffers"]
        if missing := sorted(self.model.params.keys() - weights.keys()):
            raise ModelError(
                f"the broadcast lacks {', '.join(missing)}, which stay at the client, so there is "
                "no global teacher: use client.model.predict(self.start_params(client) | "
                "self.start_buffers(client), x)."
            )
        return self.model.predict(weights, x).detach()

    def step_gradient(self, loss: Loss, params: Params, batch: Batch) -> StepGradient:
        """Differentiate the loss of a local step.

        Args:
            loss: The step's loss; `local_grad` receives it.
            params: Where to differentiate.
            batch: The step's data.

        Returns:
            Gradient, loss, and the running statistics after the forward pass.
        """
        grads, (value, buffers) = self.gradient(loss, params, batch, has_aux=True)
        return StepGradient(grads, value, buffers)

    def transmitted(self, params: Params) -> Params:
        """Select the part of the client's model that the server also has.

        Args:
            params: The client's parameters, including those that stay at the client.

        Returns:
            Parameters and buffers under the names that the server sent.
        """
        names = self.broadcast["params"].keys() | self.broadcast["buffers"].keys()
        return {name: value for name, value in (params | self.buffers).items() if name in names}

    def replace(self, **changes: Any) -> "ClientContext":
        """Return a copy with some fields changed."""
        return dataclasses.replace(self, **changes)
