"""What the clients keep between rounds."""

import sys
import warnings
from collections.abc import Callable, Sequence

import torch

from fedcog import tree
from fedcog.tree import Params, State


class Store:
    """Every client's kept state, by client number; who never took part has none yet.

    States stay on the device they come from while they take up no more than `room` bytes there (by default a quarter
    of what is free on a GPU); those of further clients go to host memory and are fetched when their turn comes.
    """

    def __init__(self, device: torch.device | None = None, room: int | None = None) -> None:
        self._device = device or torch.device("cpu")
        free = torch.cuda.mem_get_info(self._device)[0] // 4 if self._device.type == "cuda" else sys.maxsize
        self._room = free if room is None else room
        self._kept: dict[int, State] = {}

    def take(self, clients: Sequence[int], newcomer: Callable[[], State]) -> State:
        """The clients' states, stacked; of who never took part, what `newcomer` tells."""
        fresh = {} if self._kept.keys() >= set(clients) else newcomer()
        return tree.stack([tree.to(self._kept.get(client, fresh), self._device) for client in clients])

    def put(self, clients: Sequence[int], kept: Sequence[State], sound: Sequence[bool]) -> None:
        """Keep the clients' states, but for those that are not sound: theirs stay as they were."""
        for client, state, whole in zip(clients, kept, sound, strict=True):
            if whole:
                self._kept[client] = state

    def rows(self, clients: Sequence[int], kept: State) -> list[State]:
        """Stacked states one by one, each where there is room for it."""
        size = tree.nbytes(kept) // max(len(clients), 1)
        near = sorted(self._kept.keys() | set(clients))[: self._room // max(size, 1)]
        here, host = set(near), torch.device("cpu")
        states = [tree.apply(torch.clone, tree.pick(kept, row)) for row in range(len(clients))]
        return [
            state if client in here else tree.to(state, host) for client, state in zip(clients, states, strict=True)
        ]

    def retreat(self) -> bool:
        """Leave the device to others, now and from now on; False, if nothing was kept there."""
        states, host = list(self._kept.items()), torch.device("cpu")
        if all(value.device == host for _, state in states for value in tree.flatten(state).values()):
            return False
        warnings.warn("memory ran out: from now on what clients keep goes to host memory.", stacklevel=2)
        self._room, self._kept = 0, {client: tree.to(state, host) for client, state in states}
        return True

    def flatten(self) -> Params:
        """Everything, as one flat dict of tensors."""
        return tree.flatten({str(client): state for client, state in sorted(self._kept.items())})

    def restore(self, flat: Params) -> None:
        """Everything again, from what `flatten` gave; it stays where it is, until its client's turn comes."""
        self._kept = {int(client): state for client, state in tree.unflatten(flat).items()}
