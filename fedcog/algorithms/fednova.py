"""FedNova (Wang et al., NeurIPS 2020, eq. 5): updates normalized by the number of local steps."""

from dataclasses import dataclass
from typing import ClassVar

from fedcog.algorithms.base import Algorithm
from fedcog.algorithms.types import ClientContext, LocalWork
from fedcog.core import tree
from fedcog.core.settings import setting
from fedcog.core.tree import Params, State


@dataclass(frozen=True)
class FedNova(Algorithm):
    """FedAvg whose clients send their update divided by their effective number of steps a.

    The server multiplies the mean of those by the mean a; a includes momentum. Clients with equal
    numbers of steps (and no running statistics) give FedAvg. With unequal ones (--local-epochs and
    a partition of unequal sizes) no client weighs more because it takes more steps. With momentum,
    the update of a client that takes one or two steps is stretched to the mean a, which momentum
    makes ten times the mean number of steps.
    """

    payload_bounds: ClassVar[dict[str, float]] = Algorithm.payload_bounds | {
        "delta": 1024.0,
        "length": 65536.0,
    }
    strength: float = setting(1.0, "exponent of the number of steps; 0 is FedAvg", ">= 0", "<= 1")

    def client_update(
        self, params: Params, client: ClientContext, work: LocalWork
    ) -> tuple[State, State]:
        """Send update / a, and a.

        Returns:
            (state, payload).
        """
        state, payload = super().client_update(params, client, work)
        num_effective_steps = (work.effective_step_size / work.lr) ** self.strength
        return state, payload | {
            "delta": tree.scale(1 / num_effective_steps, payload["delta"]),
            "length": client.weight * num_effective_steps,
        }

    def aggregate(self, total: State) -> State:
        """Multiply the sum of update / a by the mean of a."""
        delta = tree.scale(total["length"] / total["weight"], total["delta"])
        return super().aggregate(total | {"delta": delta})
