"""FedAvgM (Hsu et al., 2019, section 4.3): momentum at the server."""

from dataclasses import dataclass
from typing import Literal

from fedcog import tree
from fedcog.algorithms.base import Algorithm, Origin
from fedcog.settings import setting
from fedcog.tree import State


@dataclass(frozen=True)
class FedAvgM(Algorithm):
    """FedAvg whose server keeps going the way it went: v = beta v + mean change, and the model moves by v.

    Several rules go by this name; the plain one is the default. `damped` weighs the new change by 1 - beta, `nesterov`
    moves by the change + beta v.
    """

    beta: float = setting(0.1, "the server's momentum; 0: FedAvg", ">= 0", "< 1")
    variant: Literal["plain", "damped", "nesterov"] = setting("plain", "which rule of that name")

    def server_init(self, origin: Origin) -> State:
        """v = 0."""
        return super().server_init(origin) | {"velocity": tree.zeros(origin.params)}

    def server_update(self, server: State, total: State, draws: State) -> State:
        """The model moved by v."""
        change = self.mean(total)["delta"]
        fresh = tree.scale(1 - self.beta, change) if self.variant == "damped" else change
        velocity = tree.add(tree.scale(self.beta, server["velocity"]), fresh)
        step = tree.add(change, tree.scale(self.beta, velocity)) if self.variant == "nesterov" else velocity
        params = tree.add(server["params"], step)
        return super().server_update(server, total, draws) | {"params": params, "velocity": velocity}
