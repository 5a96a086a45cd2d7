"""FedNova (Wang et al., NeurIPS 2020, eq. 5): changes normalised by how far each client stepped."""

from dataclasses import dataclass
from typing import ClassVar

from fedcog import tree
from fedcog.algorithms.base import Algorithm, Effort, Site
from fedcog.settings import setting
from fedcog.tree import Params, State


@dataclass(frozen=True)
class FedNova(Algorithm):
    """FedAvg whose clients send their change divided by their effective number of steps a, momentum included.

    The server multiplies the mean of those by the mean a. Clients with equal numbers of steps (and no running
    statistics to average) give FedAvg again; with unequal ones (--local-epochs and a partition of unequal sizes)
    nobody pulls harder for having stepped more often. Beware of momentum there: the change of a client that stepped
    once or twice is stretched to the mean a, which momentum makes ten times the mean number of steps.
    """

    scales: ClassVar[dict[str, float]] = Algorithm.scales | {"delta": 1024.0, "length": 65536.0}
    strength: float = setting(1.0, "exponent on the number of steps; 0: FedAvg", ">= 0", "<= 1")

    def client_update(self, params: Params, site: Site, effort: Effort) -> tuple[State, State]:
        """change / a, and a."""
        own, payload = super().client_update(params, site, effort)
        length = (effort.length / effort.lr) ** self.strength
        return own, payload | {"delta": tree.scale(1 / length, payload["delta"]), "length": site.weight * length}

    def server_update(self, server: State, total: State, draws: State) -> State:
        """The mean of change / a, times the mean of a."""
        delta = tree.scale(total["length"] / total["weight"], total["delta"])
        return super().server_update(server, total | {"delta": delta}, draws)
