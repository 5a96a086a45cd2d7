"""FedRep (Collins et al., ICML 2021, algorithm 1): one representation for all, a head for each."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedcog.algorithms.base import Algorithm, Batch, Effort, Loss, Origin, Site
from fedcog.fitness import ModelError
from fedcog.settings import setting
from fedcog.tree import Params, State


@dataclass(frozen=True)
class FedRep(Algorithm):
    """FedAvg of all layers but the last, which every client keeps for itself: first it trains that one, then the rest.

    The frozen part is masked in the gradient and in the step; one momentum runs through both phases, in which the part
    that is frozen gathers nothing but weight decay. A newcomer has the initial head. The server's own accuracy is that
    of the shared layers under the initial head (sent out each round for newcomers) and means nothing: look at the
    personalised one.
    """

    needs_head: ClassVar[bool] = True
    personalises: ClassVar[bool] = True
    head_share: float = setting(2 / 3, "share of the local steps, the first ones, that train the head", ">= 0", "<= 1")
    personal: Literal["head", "none"] = setting("head", "what stays at home; none, and head_share 0: FedAvg")

    def server_init(self, origin: Origin) -> State:
        """The body travels; the head is sent out, as it was at first, for newcomers."""
        names = origin.model.head_names if self.personal == "head" else []
        head = {name: origin.params[name] for name in names}
        body = {name: value for name, value in origin.params.items() if name not in head}
        if not body:
            raise ModelError("fedrep shares all layers but the last, and this network trains no other.")
        return super().server_init(origin._replace(params=body)) | {"head": head}

    def broadcast(self, server: State) -> State:
        """The body, and the initial head."""
        return super().broadcast(server) | {"head": server.get("head", {})}

    def server_model(self, server: State) -> Params:
        """The body under the initial head."""
        weights: Params = super().server_model(server) | server.get("head", {})
        return weights

    def client_init(self, shared: State) -> State:
        """The initial head."""
        return super().client_init(shared) | {"head": shared["head"]}

    def client_start(self, site: Site) -> Params:
        """The shared body with the client's own head."""
        params: Params = super().client_start(site) | site.own.get("head", {})
        return params

    def local_grad(self, loss: Loss, params: Params, batch: Batch, site: Site) -> tuple[Params, Tensor]:
        """The gradient of the part whose turn it is."""
        grads, value = super().local_grad(loss, params, batch, site)
        return self._turn(grads, {name: torch.zeros_like(grad) for name, grad in grads.items()}, site), value

    def after_step(self, before: Params, after: Params, batch: Batch, site: Site) -> Params:
        """Only the part whose turn it is has moved."""
        return self._turn(super().after_step(before, after, batch, site), before, site)

    def client_update(self, params: Params, site: Site, effort: Effort) -> tuple[State, State]:
        """The head stays here."""
        own, payload = super().client_update(params, site, effort)
        return own | {"head": {name: params[name] for name in site.own.get("head", {})}}, payload

    def _turn(self, moving: Params, still: Params, site: Site) -> Params:
        """`moving` for the part whose turn it is, `still` for the other."""
        first = site.step < (self.head_share * site.steps).round()
        heads = site.own.get("head", {})
        return {n: torch.where(first == (n in heads), value, still[n]) for n, value in moving.items()}
