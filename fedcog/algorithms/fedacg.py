"""FedACG (Kim et al., CVPR 2024, algorithm 1): clients start ahead of the server's momentum."""

from dataclasses import dataclass

from torch import Tensor

from fedcog.algorithms.server_rule import ServerRule
from fedcog.algorithms.types import Batch, ClientContext, FederationInit
from fedcog.core import tree
from fedcog.core.settings import setting
from fedcog.core.tree import Params, State


@dataclass(frozen=True)
class FedACG(ServerRule):
    """Any algorithm, whose clients start from G + beta v and stay near it.

    v is the server's momentum: v = beta v + mean update, and G moves by v. The mean update is that
    from G + beta v, so momentum and clients' progress add up. G is evaluated, not what is sent; to
    wrappers such as FedCOG, the global model is what is sent. The penalty is mu |theta - sent|^2
    without a factor 1/2, as published.
    """

    beta: float = setting(0.85, "server momentum", ">= 0", "< 1")
    mu: float = setting(
        1e-3, "weight of the squared distance to what was sent; 0 with beta 0 is FedAvg", ">= 0"
    )

    def penalty_curvature(self) -> dict[str, float]:
        """Return the curvature of the penalty."""
        return {"mu": 2 * self.mu}

    def server_init(self, init: FederationInit) -> State:
        """Start with v = 0."""
        server = self.inner.server_init(init)
        return server | {"velocity": tree.zeros(server["params"])}

    def broadcast(self, server: State) -> State:
        """Send G + beta v."""
        ahead = tree.add(server["params"], tree.scale(self.beta, server["velocity"]))
        return self.inner.broadcast(server | {"params": ahead})

    def server_update(self, server: State, total: State, draws: State) -> State:
        """Move the model by v = beta v + mean update.

        Returns:
            The server state after the round.
        """
        update = self.mean_update(total)["delta"]
        velocity = tree.add(tree.scale(self.beta, server["velocity"]), update)
        return self.inner.server_update(server, total, draws) | {
            "params": tree.add(server["params"], velocity),
            "velocity": velocity,
        }

    def penalty(
        self, params: Params, outputs: State, batch: Batch, client: ClientContext
    ) -> Tensor:
        """Add mu |theta - sent|^2.

        Returns:
            A 0-d tensor.
        """
        inner = self.inner.penalty(params, outputs, batch, client)
        drift = tree.change(client.broadcast["params"], params)
        return inner + self.mu * tree.dot(drift, drift)
