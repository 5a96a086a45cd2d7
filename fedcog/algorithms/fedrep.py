"""FedRep (Collins et al., ICML 2021, algorithm 1): a shared representation, a head per client."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from fedcog.algorithms.base import Algorithm
from fedcog.algorithms.types import (
    Batch,
    ClientContext,
    FederationInit,
    LocalWork,
    Loss,
    StepGradient,
)
from fedcog.core import tree
from fedcog.core.settings import setting
from fedcog.core.tree import Params, State
from fedcog.models.checks import ModelError


@dataclass(frozen=True)
class FedRep(Algorithm):
    """FedAvg of all layers but the last, which stays at the client and is trained first.

    The frozen part is masked in the gradient and after the step. One momentum runs through both
    phases; the frozen part accumulates nothing but weight decay. A new client starts with the
    initial head. The server's own accuracy is that of the shared layers under the initial head
    (sent in every round for new clients) and means nothing: look at the personalized accuracy.
    """

    needs_features: ClassVar[bool] = True
    is_personalized: ClassVar[bool] = True
    head_share: float = setting(
        2 / 3, "fraction of the local steps, the first ones, that train the head", ">= 0", "<= 1"
    )
    personal: Literal["head", "none"] = setting(
        "head", "what stays at the client; none with head_share 0 is FedAvg"
    )

    def server_init(self, init: FederationInit) -> State:
        """Split the parameters into the shared body and the initial head."""
        head_names = init.model.head_names if self.personal == "head" else []
        head = {name: init.params[name] for name in head_names}
        body = {name: value for name, value in init.params.items() if name not in head}
        if not body:
            raise ModelError(
                "fedrep shares all layers but the last, but this network trains no other layer."
            )
        return super().server_init(init._replace(params=body)) | {"head": head}

    def broadcast(self, server: State) -> State:
        """Send the body and the initial head."""
        return super().broadcast(server) | {"head": server.get("head", {})}

    def server_model(self, server: State) -> Params:
        """Return the body with the initial head."""
        weights: Params = super().server_model(server) | server.get("head", {})
        return weights

    def client_init(self, broadcast: State) -> State:
        """Start with the initial head."""
        return super().client_init(broadcast) | {"head": broadcast["head"]}

    def start_params(self, client: ClientContext) -> Params:
        """Start from the shared body and the client's own head."""
        params: Params = super().start_params(client) | client.state.get("head", {})
        return params

    def local_grad(
        self, loss: Loss, params: Params, batch: Batch, client: ClientContext
    ) -> StepGradient:
        """Return the gradient of the part that is being trained.

        Returns:
            Gradient, loss and running statistics.
        """
        step = super().local_grad(loss, params, batch, client)
        return step._replace(grads=self._select(step.grads, tree.zeros(step.grads), client))

    def after_step(
        self, before: Params, after: Params, batch: Batch, client: ClientContext
    ) -> Params:
        """Move only the part that is being trained.

        Returns:
            The parameters that the step ends with.
        """
        return self._select(super().after_step(before, after, batch, client), before, client)

    def client_update(
        self, params: Params, client: ClientContext, work: LocalWork
    ) -> tuple[State, State]:
        """Keep the head at the client.

        Returns:
            (state, payload).
        """
        state, payload = super().client_update(params, client, work)
        head = {name: params[name] for name in client.state.get("head", {})}
        return state | {"head": head}, payload

    def _select(self, trained: Params, frozen: Params, client: ClientContext) -> Params:
        """Take `trained` for the part that this step trains, `frozen` for the other."""
        trains_head = client.step < (self.head_share * client.num_steps).round()
        head = client.state.get("head", {})
        return {
            name: torch.where(trains_head == (name in head), value, frozen[name])
            for name, value in trained.items()
        }
