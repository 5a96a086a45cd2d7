"""FedAdam and the other FedOpt rules (Reddi et al., ICLR 2021, algorithm 2): adaptive steps at the server."""

from dataclasses import dataclass
from typing import Literal

import torch

from fedcog import tree
from fedcog.algorithms.base import Algorithm, Origin
from fedcog.settings import setting
from fedcog.tree import State


@dataclass(frozen=True)
class FedAdam(Algorithm):
    """FedAvg whose server takes the mean change for a gradient: Adam without bias correction, v starting at tau^2.

    `rule` chooses Yogi, Adagrad or plain SGD instead. The authors tune lr; at 1 every weight would move by about 1.
    """

    rule: Literal["adam", "yogi", "adagrad", "sgd"] = setting("adam", "how the server steps")
    lr: float = setting(0.01, "the server's learning rate", "> 0")
    beta1: float = setting(0.9, "decay of the mean; with rule sgd and lr 1, 0 is FedAvg", ">= 0", "< 1")
    beta2: float = setting(0.99, "decay of the square", ">= 0", "< 1")
    tau: float = setting(1e-3, "added to the root of the square", "> 0")

    def server_init(self, origin: Origin) -> State:
        """m = 0, v = tau^2."""
        square = {name: torch.full_like(value, self.tau**2) for name, value in origin.params.items()}
        return super().server_init(origin) | {"mean": tree.zeros(origin.params), "square": square}

    def server_update(self, server: State, total: State, draws: State) -> State:
        """The model moved by lr * m / (sqrt(v) + tau)."""
        change = self.mean(total)["delta"]
        mean = tree.add(tree.scale(self.beta1, server["mean"]), tree.scale(1 - self.beta1, change))
        square = tree.apply(self._squared, server["square"], change)
        step = mean if self.rule == "sgd" else tree.apply(lambda m, v: m / (v.sqrt() + self.tau), mean, square)
        params = tree.add(server["params"], tree.scale(self.lr, step))
        return super().server_update(server, total, draws) | {"params": params, "mean": mean, "square": square}

    def _squared(self, square: torch.Tensor, change: torch.Tensor) -> torch.Tensor:
        fresh = change * change
        if self.rule == "adagrad":
            return square + fresh
        if self.rule == "yogi":
            return square - (1 - self.beta2) * fresh * (square - fresh).sign()
        return self.beta2 * square + (1 - self.beta2) * fresh
