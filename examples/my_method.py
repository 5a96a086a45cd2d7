"""Algorithms of your own, one with a penalty, one with state at the clients and one more number in what they send.

fedcog run --algorithm examples/my_method.py:Sparse --Sparse.strength 0.001
fedcog run --algorithm examples/my_method.py:Eager+fedcog --start-round 5
python examples/my_method.py          # puts both to every test of the contract
"""

from dataclasses import dataclass

from torch import Tensor

from fedcog import Algorithm, tree
from fedcog.algorithms import Batch, Effort, Origin, Site
from fedcog.settings import setting
from fedcog.testing import check_algorithm
from fedcog.tree import Params, State


@dataclass(frozen=True)
class Sparse(Algorithm):
    """FedAvg with a penalty on the sum of the weights' sizes."""

    strength: float = setting(1e-4, "weight of the penalty", ">= 0")

    def penalty(self, params: Params, outputs: State, batch: Batch, site: Site) -> Tensor:
        size = sum((value.abs().sum() for value in params.values()), start=site.lr * 0)
        return super().penalty(params, outputs, batch, site) + self.strength * size


@dataclass(frozen=True)
class Eager(Algorithm):
    """FedAvg whose clients start a little along the way they went last time; the server records how far they go."""

    share: float = setting(0.1, "share of its last change that a client starts with", ">= 0", "< 1")

    def client_init(self, shared: State) -> State:  # what a client keeps before it ever took part
        return {"last": tree.zeros(shared["params"])}

    def client_start(self, site: Site) -> Params:
        return tree.add(super().client_start(site), tree.scale(self.share, site.own["last"]))

    def client_update(self, params: Params, site: Site, effort: Effort) -> tuple[State, State]:
        _, payload = super().client_update(params, site, effort)
        change = tree.change(site.shared["params"], params)
        return {"last": change}, payload | {"square": site.weight * tree.dot(change, change)}  # kept, and sent: a sum

    def server_init(self, origin: Origin) -> State:
        return super().server_init(origin) | {"readings": {"square": origin.population * 0}}

    def server_update(self, server: State, total: State, draws: State) -> State:
        mean = total["square"] / total["weight"]
        return super().server_update(server, total, draws) | {"readings": {"square": mean}}  # goes into rounds.jsonl


if __name__ == "__main__":
    check_algorithm(Sparse(strength=0.1), neutral=Sparse(strength=0.0))
    check_algorithm(Eager(share=0.5), neutral=Eager(share=0.0))
    print("both keep the contract")
