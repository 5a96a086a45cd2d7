"""What a client keeps at its own node: between rounds, and between runs of Flower that continue one another."""

import os
import re
from pathlib import Path

import torch

from fedcog import tree
from fedcog.federation import messages
from fedcog.federation.payloads import Unfit, fitted
from fedcog.tree import Params, State


class Keepsake:
    """What a client kept before and after the last round it took part in.

    Both, since a server that was killed may ask for its last round again. Flower forgets what a node keeps when a new
    run begins: with a `folder`, it also lies there in a file, by the run's name and the client's number. A client that
    answers `once` goes through no round again: it would spend more of its privacy than is counted.
    """

    def __init__(self, folder: object, run: str, client: int, once: bool = False) -> None:
        self._once = once
        self._file: Path | None = None
        if folder and re.fullmatch(r"[0-9a-f]{1,64}", run):
            self._file = Path(str(folder)) / f"{run}-{client}.kept"
        self._known: Params = {}

    def given(self, flat: Params) -> None:
        """What is known already, as `keep` told it."""
        self._known = flat

    def before(self, round: int, newcomer: State) -> State:
        """What the client has before a round, in the form of what it would have if it were its first."""
        known = self._known
        if not known and self._file is not None and self._file.exists():
            known = self._read(self._file)
        if not known:
            return newcomer
        last = int(known["round"])
        if self._once and round <= last:
            raise Unfit(f"this node has answered in round {last + 1} already, and for its privacy it does so once.")
        if round < last:
            raise Unfit(f"this node has been through round {last + 1} already and cannot go back to {round + 1}.")
        wanted = "before" if round == last else "after"
        own = {name.partition("::")[2]: value for name, value in known.items() if name.startswith(f"{wanted}::")}
        return fitted(newcomer, own)

    def keep(self, round: int, before: State, after: State) -> State:
        """All that is to be known of a round that is over."""
        now: State = {"round": torch.tensor(round), "before": before, "after": after}
        if self._file is not None and (self._once or tree.flatten(after)):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            fresh = self._file.with_suffix(".new")
            with fresh.open("wb") as file:
                file.write(messages.pack(now))
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(self._file)
        return now

    @staticmethod
    def _read(file: Path) -> Params:
        try:
            return tree.flatten(messages.unpack(file.read_bytes()))
        except Exception as error:
            raise Unfit(
                f"{file}, which holds what this client kept, is damaged: take it away to begin anew."
            ) from error
