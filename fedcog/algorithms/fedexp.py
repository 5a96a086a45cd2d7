"""FedExP (Jhunjhunwala et al., ICLR 2023, eq. 11): the server steps further where clients disagree."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from fedcog import tree
from fedcog.algorithms.base import Algorithm, Effort, Origin, Site
from fedcog.settings import setting
from fedcog.tree import Params, State


@dataclass(frozen=True)
class FedExP(Algorithm):
    """FedAvg whose server step is max(1, mean |change|^2 / (2 (|mean change|^2 + epsilon))).

    Published for 20 local steps; with hundreds, changes are long and nearly orthogonal and the step grows until
    training is unstable, as the FedCOG paper reports. The step taken is in the record. The authors evaluate the mean of
    the last two models, which hides half of the oscillation: `average` does so.
    """

    scales: ClassVar[dict[str, float]] = Algorithm.scales | {"square": 1024.0}
    epsilon: float = setting(1e-3, "added to the mean change's square; large: FedAvg", ">= 0")
    average: bool = setting(False, "evaluate the mean of the last two models")

    def server_init(self, origin: Origin) -> State:
        """A step of 1."""
        server = super().server_init(origin)
        one = torch.ones_like(origin.population)
        return server | {"before": origin.params, "readings": {"server_step": one}}

    def client_update(self, params: Params, site: Site, effort: Effort) -> tuple[State, State]:
        """Besides its change, the change's square."""
        own, payload = super().client_update(params, site, effort)
        change = tree.change(site.shared["params"], params)
        return own, payload | {"square": site.weight * tree.dot(change, change)}

    def server_update(self, server: State, total: State, draws: State) -> State:
        """The mean change, stretched."""
        mean = self.mean(total)["delta"]
        step = (total["square"] / total["weight"] / (2 * (tree.dot(mean, mean) + self.epsilon))).clamp(min=1)
        after = super().server_update(server, total, draws)
        params = tree.add(server["params"], tree.scale(step, mean))
        return after | {"params": params, "before": server["params"], "readings": {"server_step": step}}

    def server_model(self, server: State) -> Params:
        """The last model, or the mean of the last two."""
        weights = super().server_model(server)
        if not self.average:
            return weights
        return weights | tree.scale(0.5, tree.add(server["params"], server["before"]))
