"""MOON (Li et al., CVPR 2021, eq. 3): model-contrastive learning."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedcog.algorithms.base import Algorithm
from fedcog.algorithms.types import Batch, ClientContext, LocalWork
from fedcog.core.settings import setting
from fedcog.core.tree import Params, State


@dataclass(frozen=True)
class MOON(Algorithm):
    """FedAvg with a contrastive loss: features near the global model's, far from the previous ones.

    The negatives are the features of the client's own model of its last round. There is no
    projection head, because it would change the network that all algorithms are compared on. A
    client that takes part for the first time uses the global model as its previous one: the loss is
    then ln 2 without a gradient. MOON's authors choose mu between 1 and 10; the default is
    FedCOG's.
    """

    needs_features: ClassVar[bool] = True
    mu: float = setting(0.01, "weight of the contrastive loss", ">= 0")
    temperature: float = setting(0.5, "temperature of the contrastive loss", "> 0")

    def client_init(self, broadcast: State) -> State:
        """Use the global model as the previous one."""
        previous = broadcast["params"] | broadcast["buffers"]
        return super().client_init(broadcast) | {"previous": previous}

    def penalty(
        self, params: Params, outputs: State, batch: Batch, client: ClientContext
    ) -> Tensor:
        """Return mu * -log(e^(cos(z, z_G) / T) / (e^(cos(z, z_G) / T) + e^(cos(z, z_prev) / T))).

        Returns:
            A 0-d tensor.
        """
        global_model = client.broadcast["params"] | client.broadcast["buffers"]
        positive = self._similarity(outputs, global_model, batch, client)
        negative = self._similarity(outputs, client.state["previous"], batch, client)
        pair = torch.stack([positive, negative], dim=-1) / self.temperature
        contrastive = -pair.log_softmax(-1)[..., 0].mean()
        return super().penalty(params, outputs, batch, client) + self.mu * contrastive

    def client_update(
        self, params: Params, client: ClientContext, work: LocalWork
    ) -> tuple[State, State]:
        """Keep the local model as the next round's previous one.

        Returns:
            (state, payload).
        """
        state, payload = super().client_update(params, client, work)
        return state | {"previous": client.transmitted(params)}, payload

    def _similarity(
        self, outputs: State, weights: Params, batch: Batch, client: ClientContext
    ) -> Tensor:
        """Return the cosine similarity of the features with those of another model, `(B,)`."""
        features = client.model.features(weights, batch["x"]).detach()
        return F.cosine_similarity(outputs["features"], features, dim=-1)
