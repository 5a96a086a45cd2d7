"""MOON (Li et al., CVPR 2021, eq. 3): features drawn to the global model's, away from the previous local one's."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedcog.algorithms.base import Algorithm, Batch, Effort, Site
from fedcog.settings import setting
from fedcog.tree import Params, State


@dataclass(frozen=True)
class MOON(Algorithm):
    """FedAvg with a contrast of penultimate features: near the global model's, far from the previous local model's.

    There is no projection head, which would change the network all others are compared on. A client that never took
    part has the global model for its previous one: the contrast is then ln 2 with no gradient. MOON's authors choose mu
    between 1 and 10; the default is FedCOG's.
    """

    needs_head: ClassVar[bool] = True
    mu: float = setting(0.01, "weight of the contrast", ">= 0")
    temperature: float = setting(0.5, "temperature of the contrast", "> 0")

    def client_init(self, shared: State) -> State:
        """previous = global."""
        return super().client_init(shared) | {"previous": shared["params"] | shared["buffers"]}

    def penalty(self, params: Params, outputs: State, batch: Batch, site: Site) -> Tensor:
        """mu * -log(e^(cos(z, z_G) / T) / (e^(cos(z, z_G) / T) + e^(cos(z, z_prev) / T)))."""
        near, far = (
            F.cosine_similarity(outputs["features"], site.model.features(weights, batch["x"]).detach(), dim=-1)
            for weights in (site.shared["params"] | site.shared["buffers"], site.own["previous"])
        )
        pair = torch.stack([near, far], dim=-1) / self.temperature
        contrast = -pair.log_softmax(-1)[..., 0].mean()
        return super().penalty(params, outputs, batch, site) + self.mu * contrast

    def client_update(self, params: Params, site: Site, effort: Effort) -> tuple[State, State]:
        """The local model is kept as the next round's previous one."""
        own, payload = super().client_update(params, site, effort)
        return own | {"previous": site.local(params)}, payload
