"""Write your own algorithms: one with a penalty, one with client state and an extra payload.

fedcog run --algorithm examples/my_method.py:Sparse --Sparse.strength 0.001
fedcog run --algorithm examples/my_method.py:Eager+fedcog --start-round 5
python examples/my_method.py          # checks both against the contract
"""

from dataclasses import dataclass

from torch import Tensor

from fedcog import (
    Algorithm,
    Batch,
    ClientContext,
    FederationInit,
    LocalWork,
    Params,
    State,
    setting,
    tree,
)
from fedcog.testing import check_algorithm


@dataclass(frozen=True)
class Sparse(Algorithm):
    """FedAvg with an L1 penalty."""

    strength: float = setting(1e-4, "weight of the penalty", ">= 0")

    def penalty(
        self, params: Params, outputs: State, batch: Batch, client: ClientContext
    ) -> Tensor:
        l1_norm = sum((value.abs().sum() for value in params.values()), start=client.lr * 0)
        return super().penalty(params, outputs, batch, client) + self.strength * l1_norm


@dataclass(frozen=True)
class Eager(Algorithm):
    """FedAvg whose clients start from the global model plus a fraction of their last update."""

    share: float = setting(0.1, "fraction of the last update to start with", ">= 0", "< 1")

    def client_init(self, broadcast: State) -> State:  # the state of a new client
        return {"last": tree.zeros(broadcast["params"])}

    def start_params(self, client: ClientContext) -> Params:
        return tree.add(super().start_params(client), tree.scale(self.share, client.state["last"]))

    def client_update(
        self, params: Params, client: ClientContext, work: LocalWork
    ) -> tuple[State, State]:
        _, payload = super().client_update(params, client, work)
        update = tree.change(client.broadcast["params"], params)
        square = client.weight * tree.dot(update, update)
        return {"last": update}, payload | {"square": square}  # (state, payload)

    def server_init(self, init: FederationInit) -> State:
        return super().server_init(init) | {"readings": {"square": init.num_clients * 0}}

    def server_update(self, server: State, total: State, draws: State) -> State:
        mean = total["square"] / total["weight"]
        readings = {"square": mean}  # a metric in rounds.jsonl
        return super().server_update(server, total, draws) | {"readings": readings}


if __name__ == "__main__":
    check_algorithm(Sparse(strength=0.1), neutral=Sparse(strength=0.0))
    check_algorithm(Eager(share=0.5), neutral=Eager(share=0.0))
    print("both keep the contract")
