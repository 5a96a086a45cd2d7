"""The content of a checkpoint. `RunDirectory.save` writes it, `RunDirectory.load` reads it."""

from typing import Any, NamedTuple

from fedcog.core import tree
from fedcog.core.tree import Params, State
from fedcog.federation.virtual_time.answers import VirtualState

LARGE_CHECKPOINT_BYTES = 1 << 30
"""Checkpoints of this size are written less often, and deleted early: the states of 200 ResNet-18
clients have 9 GB."""


class Checkpoint(NamedTuple):
    """The state of a run after a round.

    Attributes:
        round: Number of finished rounds.
        server: The server state.
        clients: All client states, flat; names start with the client id.
        info: What the checkpoint belongs to: experiment, data, network, code.
        virtual: Virtual time, and the answers that wait in it; None without a virtual clock.
    """

    round: int
    server: State
    clients: Params
    info: dict[str, Any]
    virtual: VirtualState | None = None

    @property
    def nbytes(self) -> int:
        """Number of bytes of all tensors."""
        tensors = [*tree.flatten(self.server).values(), *self.clients.values()]
        if self.virtual is not None:
            tensors += self.virtual.to_tensors().values()
        return sum(value.nbytes for value in tensors)

    @property
    def is_large(self) -> bool:
        """Whether it is written less often."""
        return self.nbytes >= LARGE_CHECKPOINT_BYTES

    @property
    def client_ids(self) -> set[int]:
        """The clients that have taken part."""
        return {int(name.split("::")[0]) for name in self.clients}
