"""FedPer (Arivazhagan et al., 2019): shared layers, and a last layer that stays at the client."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from fedcog.algorithms.base import Algorithm
from fedcog.algorithms.types import ClientContext, FederationInit, LocalWork
from fedcog.algorithms.wrapper import name_of
from fedcog.core.settings import setting
from fedcog.core.tree import Params, State
from fedcog.models.checks import ModelError


@dataclass(frozen=True)
class FedPer(Algorithm):
    """FedAvg of all layers but the last, which stays at the client; both are trained together.

    A new client starts with the initial head. The server's own accuracy is that of the shared
    layers under the initial head (sent in every round for new clients) and means nothing: look at
    the label mix.
    """

    needs_features: ClassVar[bool] = True
    is_personalized: ClassVar[bool] = True
    personal: Literal["head", "none"] = setting("head", "what stays at the client; none is FedAvg")

    def server_init(self, init: FederationInit) -> State:
        """Split the parameters into the shared body and the initial head."""
        head_names = init.model.head_names if self.personal == "head" else []
        head = {name: init.params[name] for name in head_names}
        body = {name: value for name, value in init.params.items() if name not in head}
        if not body:
            raise ModelError(
                f"{name_of(self)} shares all layers but the last, but this network "
                "trains no other layer."
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

    def client_update(
        self, params: Params, client: ClientContext, work: LocalWork
    ) -> tuple[State, State]:
        """Keep the head at the client.

        Returns:
            (state, payload).
        """
        state, payload = super().client_update(params, client, work)
        if "head" not in client.state:
            return state, payload
        head = {name: params[name] for name in client.state["head"]}
        return state | {"head": head}, payload
