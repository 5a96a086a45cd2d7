"""FedBABU (Oh et al., ICLR 2022): only the body is trained and averaged."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from fedcog.algorithms.base import Algorithm
from fedcog.algorithms.types import Batch, ClientContext, Loss, StepGradient
from fedcog.core import tree
from fedcog.core.settings import setting
from fedcog.core.tree import Params


@dataclass(frozen=True)
class FedBABU(Algorithm):
    """FedAvg whose last layer stays as it was initialized, at the server and at all clients.

    A fixed head cannot adopt a client's class frequencies. The authors then tune every client's
    model for a few epochs and test that: continue the run with `fedavg` and local steps alone
    (docs/howto/personalise.md). The head is frozen against momentum and weight decay too.
    """

    needs_features: ClassVar[bool] = True
    frozen: Literal["head", "none"] = setting("head", "what is never trained; none is FedAvg")

    def local_grad(
        self, loss: Loss, params: Params, batch: Batch, client: ClientContext
    ) -> StepGradient:
        """Return the gradient of the body, and zeros for the head.

        Returns:
            Gradient, loss and running statistics.
        """
        step = super().local_grad(loss, params, batch, client)
        return step._replace(grads=self._freeze(step.grads, tree.zeros(step.grads), client))

    def after_step(
        self, before: Params, after: Params, batch: Batch, client: ClientContext
    ) -> Params:
        """Restore the head.

        Returns:
            The parameters that the step ends with.
        """
        return self._freeze(super().after_step(before, after, batch, client), before, client)

    def _freeze(self, params: Params, frozen: Params, client: ClientContext) -> Params:
        """Take the head from `frozen`."""
        if self.frozen == "none":
            return params
        return params | {name: frozen[name] for name in client.model.head_names}
