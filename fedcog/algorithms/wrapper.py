"""An algorithm around another: it overrides a few hooks and leaves the others to the inner one."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from fedcog.algorithms.base import Algorithm
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
from fedcog.core.settings import ConfigError
from fedcog.core.tree import Params, State
from fedcog.models.functional import Model


@dataclass(frozen=True)
class Wrapper(Algorithm):
    """An algorithm around another: every hook calls that of `inner`.

    Attributes:
        inner: The wrapped algorithm, itself possibly a wrapper.
    """

    is_wrapper: ClassVar[bool] = True

    inner: Algorithm = field(default_factory=Algorithm)

    def __post_init__(self) -> None:
        """Refuse an inner algorithm that is none."""
        if not hasattr(self.inner, "layers"):
            name = type(self).__name__
            raise ConfigError(
                [
                    f"{self.inner!r} is not an Algorithm: the first argument of {name} is the "
                    f"algorithm that it wraps, as in {name}(FedProx()); give settings by name."
                ]
            )

    @property
    def layers(self) -> tuple[Algorithm, ...]:
        """This algorithm and those inside it, outermost first."""
        return (self, *self.inner.layers)

    def map_layers(self, change: Callable[[Algorithm], Algorithm]) -> Algorithm:
        """Apply `change` to every layer, innermost first."""
        return change(dataclasses.replace(self, inner=self.inner.map_layers(change)))

    @property
    def uplink(self) -> Uplink:  # type: ignore[override]
        """The inner uplink."""
        return self.inner.uplink

    @property
    def payload_bounds(self) -> dict[str, float]:  # type: ignore[override]
        """The inner bounds."""
        return self.inner.payload_bounds

    @property
    def needs_full_model(self) -> bool:  # type: ignore[override]
        """The inner requirement."""
        return self.inner.needs_full_model

    @property
    def applies_mean(self) -> bool:  # type: ignore[override]
        """Whether the inner server applies the mean."""
        return self.inner.applies_mean

    @property
    def generator_config(self) -> GeneratorConfig:
        """The inner generator."""
        return self.inner.generator_config

    @property
    def generation_start(self) -> int | None:
        """The inner start of generation."""
        return self.inner.generation_start

    def request_draws(self, round: int, model: Model, batch_size: int) -> dict[str, Draw]:
        """Call the inner hook.

        Returns:
            Requests by name.
        """
        return self.inner.request_draws(round, model, batch_size)

    def server_init(self, init: FederationInit) -> State:
        """Call the inner hook."""
        return self.inner.server_init(init)

    def broadcast(self, server: State) -> State:
        """Call the inner hook."""
        return self.inner.broadcast(server)

    @property
    def min_clients(self) -> int:
        """The fewest clients of a round that the inner rule is made for."""
        return self.inner.min_clients

    @property
    def num_resums(self) -> int:
        """The inner number of further sums."""
        return self.inner.num_resums

    @property
    def withheld_parts(self) -> tuple[str, ...]:
        """What the inner algorithm withholds."""
        return self.inner.withheld_parts

    def resum_broadcast(self, total: State) -> State:
        """Call the inner hook."""
        return self.inner.resum_broadcast(total)

    def resum_payload(self, payload: State, broadcast: State) -> State:
        """Call the inner hook.

        Returns:
            The new values of some parts of the payload.
        """
        return self.inner.resum_payload(payload, broadcast)

    def aggregate(self, total: State) -> State:
        """Call the inner hook."""
        return self.inner.aggregate(total)

    def server_update(self, server: State, total: State, draws: State) -> State:
        """Call the inner hook.

        Returns:
            The server state after the round.
        """
        return self.inner.server_update(server, total, draws)

    @property
    def needs_survey(self) -> bool:
        """Whether the inner algorithm needs a survey."""
        return self.inner.needs_survey

    def survey(self, weights: Params, batch: Batch, model: Model) -> State:
        """Call the inner hook.

        Returns:
            Tensors by name.
        """
        return self.inner.survey(weights, batch, model)

    def use_survey(self, server: State, total: State, draws: State, model: Model) -> State:
        """Call the inner hook.

        Returns:
            The server state.
        """
        return self.inner.use_survey(server, total, draws, model)

    def server_model(self, server: State) -> Params:
        """Call the inner hook."""
        return self.inner.server_model(server)

    def unpack_broadcast(self, broadcast: State, draws: State, model: Model) -> State:
        """Call the inner hook.

        Returns:
            What the hooks see of the broadcast.
        """
        return self.inner.unpack_broadcast(broadcast, draws, model)

    def client_init(self, broadcast: State) -> State:
        """Call the inner hook."""
        return self.inner.client_init(broadcast)

    def start_params(self, client: ClientContext) -> Params:
        """Call the inner hook."""
        return self.inner.start_params(client)

    def start_buffers(self, client: ClientContext) -> Params:
        """Call the inner hook."""
        return self.inner.start_buffers(client)

    def generation_init(self, client: ClientContext, draws: State) -> State:
        """Call the inner hook.

        Returns:
            The generation state.
        """
        return self.inner.generation_init(client, draws)

    def num_generation_steps(self, round: int) -> int:
        """Call the inner hook."""
        return self.inner.num_generation_steps(round)

    def generation_step(self, gen_state: State, client: ClientContext) -> State:
        """Call the inner hook.

        Returns:
            The generation state after the step.
        """
        return self.inner.generation_step(gen_state, client)

    def extra_data(self, client: ClientContext, gen_state: State) -> ExtraData:
        """Call the inner hook.

        Returns:
            Batches by group, and artifacts.
        """
        return self.inner.extra_data(client, gen_state)

    def outputs(self, params: Params, batch: Batch, client: ClientContext) -> State:
        """Call the inner hook.

        Returns:
            Outputs by name.
        """
        return self.inner.outputs(params, batch, client)

    def data_loss(self, outputs: State, batch: Batch, client: ClientContext) -> Tensor:
        """Call the inner hook.

        Returns:
            A 0-d tensor.
        """
        return self.inner.data_loss(outputs, batch, client)

    def penalty(
        self, params: Params, outputs: State, batch: Batch, client: ClientContext
    ) -> Tensor:
        """Call the inner hook.

        Returns:
            A 0-d tensor.
        """
        return self.inner.penalty(params, outputs, batch, client)

    def local_grad(
        self, loss: Loss, params: Params, batch: Batch, client: ClientContext
    ) -> StepGradient:
        """Call the inner hook.

        Returns:
            Gradient, loss and running statistics.
        """
        return self.inner.local_grad(loss, params, batch, client)

    def after_step(
        self, before: Params, after: Params, batch: Batch, client: ClientContext
    ) -> Params:
        """Call the inner hook.

        Returns:
            The parameters that the step ends with.
        """
        return self.inner.after_step(before, after, batch, client)

    def client_update(
        self, params: Params, client: ClientContext, work: LocalWork
    ) -> tuple[State, State]:
        """Call the inner hook.

        Returns:
            (state, payload).
        """
        return self.inner.client_update(params, client, work)

    def client_model(self, params: Params, client: ClientContext) -> Params:
        """Call the inner hook.

        Returns:
            Parameters and buffers together.
        """
        return self.inner.client_model(params, client)


def name_of(algorithm: Algorithm) -> str:
    """Return the name of an algorithm's outermost layer in commands, such as multi-krum."""
    from fedcog.algorithms import ALGORITHMS  # the table imports every algorithm

    names = {cls: name for name, cls in ALGORITHMS.items()}
    return names.get(type(algorithm), algorithm.class_name)


class _Recorded:
    """Name and settings of a class whose code is not available."""

    is_recorded: ClassVar[bool] = True
    name: str
    recorded: tuple[tuple[str, Any], ...]

    @property
    def class_name(self) -> str:
        """The name of the class that is missing."""
        return self.name

    @property
    def setting_values(self) -> dict[str, Any]:
        """The settings that the run directory records."""
        return dict(self.recorded)


@dataclass(frozen=True)
class RecordedAlgorithm(_Recorded, Algorithm):
    """A user's algorithm as a run directory records it: name and settings, but no code.

    Attributes:
        name: The class name.
        recorded: Setting names and values.
    """

    name: str = ""
    recorded: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class RecordedWrapper(_Recorded, Wrapper):
    """A user's wrapper as a run directory records it: name and settings, but no code.

    Attributes:
        name: The class name.
        recorded: Setting names and values.
    """

    name: str = ""
    recorded: tuple[tuple[str, Any], ...] = ()
