"""FedAdam and other FedOpt rules (Reddi et al., ICLR 2021, algorithm 2): adaptive server steps."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fedcog.algorithms.server_rule import ServerRule
from fedcog.algorithms.types import FederationInit
from fedcog.core import tree
from fedcog.core.settings import setting
from fedcog.core.tree import State


@dataclass(frozen=True)
class FedAdam(ServerRule):
    """Any algorithm, whose server treats the mean update as a gradient for Adam.

    There is no bias correction, and v starts at tau^2. `rule` selects Yogi, Adagrad or plain SGD
    instead. The authors tune lr; at 1 every weight would move by about 1.
    """

    rule: Literal["adam", "yogi", "adagrad", "sgd"] = setting("adam", "server optimizer")
    lr: float = setting(0.01, "server learning rate", "> 0")
    beta1: float = setting(
        0.9, "decay of the first moment; 0 with rule sgd and lr 1 is FedAvg", ">= 0", "< 1"
    )
    beta2: float = setting(0.99, "decay of the second moment", ">= 0", "< 1")
    tau: float = setting(1e-3, "added to the square root of the second moment", "> 0")

    def server_init(self, init: FederationInit) -> State:
        """Start with m = 0 and v = tau^2."""
        server = self.inner.server_init(init)
        params = server["params"]
        square = tree.apply(lambda value: value.new_full(value.shape, self.tau**2), params)
        return server | {"mean": tree.zeros(params), "square": square}

    def server_update(self, server: State, total: State, draws: State) -> State:
        """Move the model by lr * m / (sqrt(v) + tau).

        Returns:
            The server state after the round.
        """
        update = self.mean_update(total)["delta"]
        mean = tree.add(tree.scale(self.beta1, server["mean"]), tree.scale(1 - self.beta1, update))
        square = tree.apply(self._second_moment, server["square"], update)
        step = mean
        if self.rule != "sgd":
            step = tree.apply(lambda m, v: m / (v.sqrt() + self.tau), mean, square)
        return self.inner.server_update(server, total, draws) | {
            "params": tree.add(server["params"], tree.scale(self.lr, step)),
            "mean": mean,
            "square": square,
        }

    def _second_moment(self, square: Tensor, update: Tensor) -> Tensor:
        fresh = update * update
        if self.rule == "adagrad":
            return square + fresh
        if self.rule == "yogi":
            return square - (1 - self.beta2) * fresh * (square - fresh).sign()
        return self.beta2 * square + (1 - self.beta2) * fresh
