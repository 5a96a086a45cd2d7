"""The state of a client at its own node, between rounds and between Flower runs."""

import os
import re
from pathlib import Path

import torch

from fedcog.core import serialization, tree
from fedcog.core.tree import Params, State
from fedcog.engine.aggregation import InvalidPayload, match_template

RUN_NAME = re.compile(r"[0-9a-f]{1,64}")


class NodeState:
    """A client's state before and after the last round it took part in.

    Both are kept, because a server that was killed may repeat its last round. Flower deletes a
    node's state when a new run starts. With a folder, the state is also stored there in a file
    named after run and client.
    """

    def __init__(
        self, folder: object, run: str, client_id: int, answers_once: bool = False
    ) -> None:
        """Create the state of a node.

        Args:
            folder: Where to store it; empty or None stores it in Flower's context only.
            run: Hexadecimal name of the run.
            client_id: The client at this node.
            answers_once: Whether to refuse a repeated round, which would spend more privacy than
                is accounted for.
        """
        self._answers_once = answers_once
        self._file: Path | None = None
        if folder and RUN_NAME.fullmatch(run):
            self._file = Path(str(folder)) / f"{run}-{client_id}.kept"
        self._known: Params = {}

    def restore(self, flat: Params) -> None:
        """Restore the flattened result of `save`."""
        self._known = flat

    def before_round(self, round: int, new_state: State) -> State:
        """Return the client's state before a round.

        Args:
            round: The round, from 0.
            new_state: The state of a client before its first round.

        Returns:
            The state, in the form of `new_state`.

        Raises:
            InvalidPayload: If the node is past this round, or its file is damaged.
        """
        known = self._known
        if not known and self._file is not None and self._file.exists():
            known = self._read(self._file)
        if not known:
            return new_state
        last_round = int(known["round"])
        if self._answers_once and round <= last_round:
            raise InvalidPayload(
                f"this node already answered in round {last_round + 1}, and for privacy it "
                "answers only once."
            )
        if round < last_round:
            raise InvalidPayload(
                f"this node already completed round {last_round + 1} and cannot return to round "
                f"{round + 1}."
            )
        prefix = "before::" if round == last_round else "after::"
        state = {
            name.removeprefix(prefix): value
            for name, value in known.items()
            if name.startswith(prefix)
        }
        return match_template(new_state, state)

    def save(self, round: int, before: State, after: State) -> State:
        """Store the states of a finished round.

        Args:
            round: The round, from 0.
            before: The client's state before it.
            after: The client's state after it.

        Returns:
            All of it as one state.
        """
        content: State = {"round": torch.tensor(round), "before": before, "after": after}
        if self._file is not None and (self._answers_once or tree.flatten(after)):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            temporary = self._file.with_suffix(".new")
            with temporary.open("wb") as file:
                file.write(serialization.pack(content))
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self._file)
        return content

    @staticmethod
    def _read(file: Path) -> Params:
        try:
            return tree.flatten(serialization.unpack(file.read_bytes()))
        except Exception as error:
            raise InvalidPayload(
                f"{file}, the state of this client, is damaged: remove it to start anew."
            ) from error
