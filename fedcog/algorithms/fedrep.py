"""FedRep (Collins et al., ICML 2021, algorithm 1): a shared representation, a head per client."""

from dataclasses import dataclass
from typing import Literal

import torch

from fedcog.algorithms.fedper import FedPer
from fedcog.algorithms.types import Batch, ClientContext, Loss, StepGradient
from fedcog.core import tree
from fedcog.core.settings import setting
from fedcog.core.tree import Params


@dataclass(frozen=True)
class FedRep(FedPer):
    """FedAvg of all layers but the last, which stays at the client and is trained first.

    The frozen part is masked in the gradient and after the step. One momentum runs through both
    phases; the frozen part accumulates nothing but weight decay. A new client starts with the
    initial head. The server's own accuracy is that of the shared layers under the initial head
    (sent in every round for new clients) and means nothing: look at the label mix.
    """

    head_share: float = setting(
        2 / 3, "fraction of the local steps, the first ones, that train the head", ">= 0", "<= 1"
    )
    personal: Literal["head", "none"] = setting(
        "head", "what stays at the client; none with head_share 0 is FedAvg"
    )

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

    def _select(self, trained: Params, frozen: Params, client: ClientContext) -> Params:
        """Take `trained` for the part that this step trains, `frozen` for the other."""
        trains_head = client.step < (self.head_share * client.num_steps).round()
        head = client.state.get("head", {})
        return {
            name: torch.where(trains_head == (name in head), value, frozen[name])
            for name, value in trained.items()
        }
