"""Ditto (Li et al., ICML 2021, algorithm 1): a personal model per client, near the global one."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedcog.algorithms.types import (
    Batch,
    ClientContext,
    FederationInit,
    LocalWork,
    Loss,
    StepGradient,
)
from fedcog.algorithms.wrapper import Wrapper
from fedcog.core import tree
from fedcog.core.settings import setting
from fedcog.core.tree import Params, State
from fedcog.models.checks import ModelError


@dataclass(frozen=True)
class Ditto(Wrapper):
    """Any algorithm, with a personal model that every client trains on the same batches.

    The personal loss is the client's plus lambda_pull/2 |v - G|^2, where G is the model sent in
    this round. The personal model v is never sent. It has its own momentum and running statistics
    and leaves the global model exactly as it would be without it. It starts as the first model that
    the client receives.
    """

    is_personalized: ClassVar[bool] = True
    lambda_pull: float = setting(
        1.0, "weight of the penalty that pulls the personal model to the global one", ">= 0"
    )

    def penalty_curvature(self) -> dict[str, float]:
        """Return the curvature of the penalty."""
        return {"lambda_pull": self.lambda_pull}

    def server_init(self, init: FederationInit) -> State:
        """Refuse inner algorithms that keep a part of the model at the clients."""
        server = self.inner.server_init(init)
        if kept := sorted(init.params.keys() - server["params"].keys()):
            raise ModelError(
                f"ditto trains a copy of the model that the server sends, but the algorithm inside "
                f"keeps {', '.join(kept)} at the clients: use one or the other."
            )
        return server

    def client_init(self, broadcast: State) -> State:
        """Start the personal model as the first global model."""
        personal = broadcast["params"] | broadcast["buffers"]
        return self.inner.client_init(broadcast) | {"personal": personal}

    def start_params(self, client: ClientContext) -> Params:
        """Add the personal parameters."""
        personal = {name: client.state["personal"][name] for name in client.broadcast["params"]}
        return self.inner.start_params(client) | _add_prefix(personal)

    def start_buffers(self, client: ClientContext) -> Params:
        """Add the personal running statistics."""
        personal = {name: client.state["personal"][name] for name in client.broadcast["buffers"]}
        return self.inner.start_buffers(client) | _add_prefix(personal)

    def outputs(self, params: Params, batch: Batch, client: ClientContext) -> State:
        """Run the inner algorithm's forward passes.

        Returns:
            Outputs by name.
        """
        return self.inner.outputs(_global_part(params), batch, client)

    def penalty(
        self, params: Params, outputs: State, batch: Batch, client: ClientContext
    ) -> Tensor:
        """Return the inner algorithm's penalty.

        Returns:
            A 0-d tensor.
        """
        return self.inner.penalty(_global_part(params), outputs, batch, client)

    def local_grad(
        self, loss: Loss, params: Params, batch: Batch, client: ClientContext
    ) -> StepGradient:
        """Return the inner gradient for the global model, and the personal loss's for v.

        Returns:
            Gradient, loss and running statistics.
        """

        def _personal_loss(v: Params, batch: Batch) -> tuple[Tensor, Params]:
            drift = tree.change(client.broadcast["params"], v)
            logits, _, buffers = client.forward(v, batch["x"], _personal_part(client.buffers))
            data_loss = client.task.loss(logits, batch["y"]).mean()
            return data_loss + self.lambda_pull / 2 * tree.dot(drift, drift), buffers

        step = self.inner.local_grad(loss, _global_part(params), batch, client)
        personal = client.step_gradient(_personal_loss, _personal_part(params), batch)
        return StepGradient(
            grads=step.grads | _add_prefix(personal.grads),
            loss=step.loss,
            buffers=step.buffers | _add_prefix(personal.buffers),
        )

    def after_step(
        self, before: Params, after: Params, batch: Batch, client: ClientContext
    ) -> Params:
        """Adjust the global model as the inner algorithm does.

        Returns:
            The parameters that the step ends with.
        """
        adjusted = self.inner.after_step(_global_part(before), _global_part(after), batch, client)
        return adjusted | _add_prefix(_personal_part(after))

    def client_update(
        self, params: Params, client: ClientContext, work: LocalWork
    ) -> tuple[State, State]:
        """Keep the personal model at the client.

        Returns:
            (state, payload).
        """
        state, payload = self.inner.client_update(_global_part(params), client, work)
        return state | {"personal": self.client_model(params, client)}, payload

    def client_model(self, params: Params, client: ClientContext) -> Params:
        """Return the personal model.

        Returns:
            Parameters and buffers together.
        """
        return _personal_part(params) | _personal_part(client.buffers)


_PREFIX = "personal.."


def _add_prefix(params: Params) -> Params:
    return {_PREFIX + name: value for name, value in params.items()}


def _personal_part(params: Params) -> Params:
    return {
        name.removeprefix(_PREFIX): value
        for name, value in params.items()
        if name.startswith(_PREFIX)
    }


def _global_part(params: Params) -> Params:
    return {name: value for name, value in params.items() if not name.startswith(_PREFIX)}
