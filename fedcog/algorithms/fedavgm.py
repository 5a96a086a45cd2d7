"""FedAvgM (Hsu et al., 2019, section 4.3): server momentum."""

from dataclasses import dataclass
from typing import Literal

from fedcog.algorithms.server_rule import ServerRule
from fedcog.algorithms.types import FederationInit
from fedcog.core import tree
from fedcog.core.settings import setting
from fedcog.core.tree import State


@dataclass(frozen=True)
class FedAvgM(ServerRule):
    """Any algorithm, with server momentum: v = beta v + mean update, and the model moves by v.

    Several rules have this name; the plain one is the default. `damped` multiplies the mean update
    by 1 - beta, `nesterov` moves the model by the mean update + beta v.
    """

    beta: float = setting(0.1, "server momentum; 0 is FedAvg", ">= 0", "< 1")
    variant: Literal["plain", "damped", "nesterov"] = setting("plain", "momentum rule")

    def server_init(self, init: FederationInit) -> State:
        """Start with v = 0."""
        server = self.inner.server_init(init)
        return server | {"velocity": tree.zeros(server["params"])}

    def server_update(self, server: State, total: State, draws: State) -> State:
        """Move the model by v.

        Returns:
            The server state after the round.
        """
        update = self.mean_update(total)["delta"]
        fresh = tree.scale(1 - self.beta, update) if self.variant == "damped" else update
        velocity = tree.add(tree.scale(self.beta, server["velocity"]), fresh)
        step = velocity
        if self.variant == "nesterov":
            step = tree.add(update, tree.scale(self.beta, velocity))
        return self.inner.server_update(server, total, draws) | {
            "params": tree.add(server["params"], step),
            "velocity": velocity,
        }
