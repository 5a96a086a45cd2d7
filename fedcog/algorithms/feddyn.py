"""FedDyn (Acar et al., ICLR 2021, algorithm 1): penalties that line local optima up with the global one."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedcog import tree
from fedcog.algorithms.base import Algorithm, Batch, Effort, Origin, Site
from fedcog.settings import setting
from fedcog.tree import Params, State


@dataclass(frozen=True)
class FedDyn(Algorithm):
    """FedAvg with a linear and a quadratic term in each client's loss, from a memory of its past drifts.

    Both memories are kept divided by alpha: g_k / alpha = -(sum of the client's past changes), h / alpha the same of
    everybody's mean. h moves by |S|/N of the round's mean change, weighted as the mean is, so that both agree; with
    equal weights that is the published rule. The model sent out, not the clients' mean, is what is evaluated. The rule
    supposes that clients come near to their minimum; where they stop early, an alpha above the authors' steadies it.
    """

    whole: ClassVar[bool] = True
    alpha: float = setting(0.01, "strength of the linear and quadratic terms", ">= 0")
    correction: float = setting(1.0, "share of h / alpha the server takes off; 0, and alpha 0: FedAvg", ">= 0", "<= 1")

    def stiffness(self) -> dict[str, float]:
        """That of the quadratic term."""
        return {"alpha": self.alpha}

    def server_init(self, origin: Origin) -> State:
        """h = 0."""
        return super().server_init(origin) | {"memory": tree.zeros(origin.params), "population": origin.population}

    def server_update(self, server: State, total: State, draws: State) -> State:
        """h / alpha - |S|/N * mean change; and the mean model less the new h / alpha."""
        present = total["count"] / server["population"]
        memory = tree.subtract(server["memory"], tree.scale(present, self.mean(total)["delta"]))
        server = super().server_update(server, total, draws)
        params = tree.subtract(server["params"], tree.scale(self.correction, memory))
        return server | {"params": params, "memory": memory}

    def client_init(self, shared: State) -> State:
        """g_k = 0."""
        return super().client_init(shared) | {"memory": tree.zeros(shared["params"])}

    def penalty(self, params: Params, outputs: State, batch: Batch, site: Site) -> Tensor:
        """alpha/2 |theta - G|^2 - <g_k, theta>."""
        drift = tree.subtract(params, site.shared["params"])
        pull = tree.dot(drift, drift) / 2 - tree.dot(params, site.own["memory"])
        return super().penalty(params, outputs, batch, site) + self.alpha * pull

    def client_update(self, params: Params, site: Site, effort: Effort) -> tuple[State, State]:
        """g_k / alpha less the client's change."""
        own, payload = super().client_update(params, site, effort)
        change = tree.change(site.shared["params"], params)
        return own | {"memory": tree.subtract(site.own["memory"], change)}, payload
