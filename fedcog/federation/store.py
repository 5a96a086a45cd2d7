"""What the clients keep between rounds."""

from collections.abc import Sequence

import torch

from fedcog import tree
from fedcog.algorithms import Algorithm
from fedcog.tree import Params, State


class Store:
    """Every client's kept state, by client number; who never took part has none yet."""

    def __init__(self) -> None:
        self._kept: dict[int, State] = {}

    def take(self, clients: Sequence[int], algorithm: Algorithm, shared: State) -> State:
        """The clients' states, stacked; a newcomer's is what the algorithm starts one with."""
        newcomer = algorithm.client_init(shared)
        return tree.stack([self._kept.get(client, newcomer) for client in clients])

    def put(self, clients: Sequence[int], kept: State, sound: Sequence[bool]) -> None:
        """Keep the clients' stacked states, but for those that are not sound: theirs stay as they were."""
        for row, client in enumerate(clients):
            if sound[row]:
                self._kept[client] = tree.apply(torch.clone, tree.pick(kept, row))

    def flatten(self) -> Params:
        """Everything, as one flat dict of tensors."""
        return tree.flatten({str(client): state for client, state in sorted(self._kept.items())})

    def restore(self, flat: Params) -> None:
        """Everything again, from what `flatten` gave."""
        self._kept = {int(client): state for client, state in tree.unflatten(flat).items()}
