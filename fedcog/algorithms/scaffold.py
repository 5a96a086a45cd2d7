"""SCAFFOLD (Karimireddy et al., ICML 2020, algorithm 1, option II): control variates against client drift."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedcog import tree
from fedcog.algorithms.base import Algorithm, Batch, Effort, Loss, Origin, Site
from fedcog.settings import setting
from fedcog.tree import Params, State


@dataclass(frozen=True)
class SCAFFOLD(Algorithm):
    """FedAvg whose clients step along g - c_k + c: their own mean gradient taken off, everybody's put in its place.

    The new variate is the client's mean gradient, (G - theta) / length less the correction; length is the sum of its
    step sizes, momentum counted in, without which the variates grow tenfold at momentum 0.9. The model moves by the
    mean change as in FedAvg (by examples; a global step size of 1). The server's c stays the plain mean of all clients'
    c_k, whatever their weights: it moves by their changes over the whole population, present or not.
    """

    needs_sgd: ClassVar[bool] = True
    whole: ClassVar[bool] = True
    scales: ClassVar[dict[str, float]] = Algorithm.scales | {"control": 1024.0}
    strength: float = setting(1.0, "share of the correction that is applied; 0: FedAvg", ">= 0", "<= 1")

    def server_init(self, origin: Origin) -> State:
        """c = 0."""
        return super().server_init(origin) | {"control": tree.zeros(origin.params), "population": origin.population}

    def broadcast(self, server: State) -> State:
        """The model, and c."""
        return super().broadcast(server) | {"control": server["control"]}

    def server_update(self, server: State, total: State, draws: State) -> State:
        """c + sum of the changes / N."""
        step = tree.scale(1 / server["population"], total["control"])
        return super().server_update(server, total, draws) | {"control": tree.add(server["control"], step)}

    def client_init(self, shared: State) -> State:
        """c_k = 0."""
        return super().client_init(shared) | {"control": tree.zeros(shared["control"])}

    def local_grad(self, loss: Loss, params: Params, batch: Batch, site: Site) -> tuple[Params, Tensor]:
        """g - c_k + c."""
        grads, value = super().local_grad(loss, params, batch, site)
        return tree.add(grads, self._correction(site)), value

    def client_update(self, params: Params, site: Site, effort: Effort) -> tuple[State, State]:
        """c_k becomes (G - theta) / length - (c - c_k), and its change is sent, unweighted."""
        own, payload = super().client_update(params, site, effort)
        slope = tree.scale(-1 / effort.length, tree.change(site.shared["params"], params))
        control = tree.subtract(slope, self._correction(site))
        change = tree.change(site.own["control"], control)
        return own | {"control": control}, payload | {"control": change}

    def _correction(self, site: Site) -> Params:
        return tree.scale(self.strength, tree.change(site.own["control"], site.shared["control"]))
