"""FedBABU (Oh et al., ICLR 2022): only the body is trained and averaged."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from fedcog.algorithms.fedper import FedPer
from fedcog.algorithms.types import Batch, ClientContext, Loss, StepGradient
from fedcog.core import tree
from fedcog.core.settings import setting
from fedcog.core.tree import Params, State


@dataclass(frozen=True)
class FedBABU(FedPer):
    """FedAvg of all layers but the last, which stays as it was initialized, everywhere.

    A fixed head cannot adopt a client's class frequencies. Clients receive it and never send it, so
    it is frozen against momentum, weight decay and noise. The authors then tune every client's
    model for a few epochs and test that; here the global model is evaluated.
    """

    is_personalized: ClassVar[bool] = False
    personal: Literal["head", "none"] = setting("head", "what is never trained; none is FedAvg")

    def client_init(self, broadcast: State) -> State:
        """Keep nothing: the head is in every broadcast."""
        return {}

    def start_params(self, client: ClientContext) -> Params:
        """Start from the shared body and the initial head."""
        params: Params = client.broadcast["params"] | client.broadcast["head"]
        return params

    def local_grad(
        self, loss: Loss, params: Params, batch: Batch, client: ClientContext
    ) -> StepGradient:
        """Return the gradient of the body, and zeros for the head.

        Returns:
            Gradient, loss and running statistics.
        """
        step = super().local_grad(loss, params, batch, client)
        head = tree.zeros(client.broadcast["head"])
        return step._replace(grads=step.grads | head)

    def after_step(
        self, before: Params, after: Params, batch: Batch, client: ClientContext
    ) -> Params:
        """Restore the head.

        Returns:
            The parameters that the step ends with.
        """
        head: Params = client.broadcast["head"]
        return super().after_step(before, after, batch, client) | head
