"""The states that clients keep between rounds."""

import sys
import warnings
from collections.abc import Callable, Sequence

import torch

from fedcog.core import tree
from fedcog.core.tree import Params, State


class ClientStates:
    """Every client's state by client id; clients that never took part have none.

    States stay on the device while they fit into `max_bytes` there. Those of further clients go to
    host memory and return when their client trains.
    """

    def __init__(self, device: torch.device | None = None, max_bytes: int | None = None) -> None:
        """Create an empty store.

        Args:
            device: Where clients train; the CPU by default.
            max_bytes: Memory for states on the device; a quarter of a GPU's free memory by default.
        """
        self._device = device or torch.device("cpu")
        if max_bytes is None:
            max_bytes = sys.maxsize
            if self._device.type == "cuda":
                max_bytes = torch.cuda.mem_get_info(self._device)[0] // 4
        self._max_bytes = max_bytes
        self._states: dict[int, State] = {}

    def stacked(self, client_ids: Sequence[int], new_state: Callable[[], State]) -> State:
        """Return the states of some clients, stacked on the device.

        Args:
            client_ids: The clients.
            new_state: Creates the state of clients that never took part.

        Returns:
            States with a client axis.
        """
        fresh = {} if self._states.keys() >= set(client_ids) else new_state()
        states = [self._states.get(client_id, fresh) for client_id in client_ids]
        return tree.stack([tree.to(state, self._device) for state in states])

    def put(
        self, client_ids: Sequence[int], states: Sequence[State], is_finite: Sequence[bool]
    ) -> None:
        """Store new states.

        Args:
            client_ids: The clients.
            states: Their new states.
            is_finite: Which of them to store; the others stay as they were.
        """
        for client_id, state, finite in zip(client_ids, states, is_finite, strict=True):
            if finite:
                self._states[client_id] = state

    def unstack(self, client_ids: Sequence[int], stacked: State) -> list[State]:
        """Split stacked states, each on the device or in host memory.

        Args:
            client_ids: The clients.
            stacked: Their states with a client axis.

        Returns:
            One state per client.
        """
        size = tree.nbytes(stacked) // max(len(client_ids), 1)
        num_on_device = self._max_bytes // max(size, 1)
        on_device = set(sorted(self._states.keys() | set(client_ids))[:num_on_device])
        host = torch.device("cpu")
        states = []
        for row, client_id in enumerate(client_ids):
            state = tree.apply(torch.clone, tree.take(stacked, row))
            states.append(state if client_id in on_device else tree.to(state, host))
        return states

    def move_to_host(self) -> bool:
        """Move all states to host memory, now and from now on.

        Returns:
            False if no state was on the device.
        """
        host = torch.device("cpu")
        tensors = [
            value for state in self._states.values() for value in tree.flatten(state).values()
        ]
        if all(value.device == host for value in tensors):
            return False
        warnings.warn("out of memory: from now on client states stay in host memory.", stacklevel=2)
        self._max_bytes = 0
        self._states = {
            client_id: tree.to(state, host) for client_id, state in self._states.items()
        }
        return True

    def flatten(self) -> Params:
        """Return all states as one flat dict of tensors."""
        return tree.flatten(
            {str(client_id): state for client_id, state in sorted(self._states.items())}
        )

    def restore(self, flat: Params) -> None:
        """Restore all states from the result of `flatten`; they move when their client trains."""
        self._states = {int(client_id): state for client_id, state in tree.unflatten(flat).items()}
