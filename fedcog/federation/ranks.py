"""Several processes, on one machine or many, that each train their share of a round's clients: started by torchrun.

The first leads: it alone holds the server, the record and what clients keep. The others follow: they are sent their
share of a round, and their payloads are added up by an all-reduce. What is sent is never pickled.
"""

import contextlib
import datetime
import itertools
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fedcog import tree
from fedcog.algorithms import Algorithm
from fedcog.federation import messages
from fedcog.federation.outcomes import Outcome, side_by_side
from fedcog.federation.payloads import joined
from fedcog.federation.rounds import Gathered, Work
from fedcog.federation.simulation import Simulation
from fedcog.tree import State

PATIENCE = datetime.timedelta(days=2)  # a round may take long, and who dies is noticed at once


class RankDied(Exception):
    """Another process of the run ended in the midst of it."""


class Ranks:
    """This process and the others that torchrun has started beside it."""

    def __init__(self) -> None:
        if not dist.is_initialized():
            if torch.cuda.is_available():
                torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
            dist.init_process_group("gloo", timeout=PATIENCE)
        self._group = dist.new_group(backend="gloo", timeout=PATIENCE)
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self._form: State | None = None

    def gather(self, simulation: Simulation, algorithm: Algorithm, work: Work) -> Gathered:
        """What comes of a round, every process having trained its share of the clients."""
        shares = [work.clients[part] for part in _parts(len(work.clients), self.count)]
        states = {client: simulation.kept(algorithm, work.shared, client) for client in work.clients}
        what = {"shared": work.shared, "round": work.round, "lr": work.lr, "score": work.before is not None}
        for rank, share in enumerate(shares[1:], 1):
            self._send(rank, what | {"kept": {str(client): states[client] for client in share}})
        outcome, kept = _train(
            simulation, algorithm, work.shared, {client: states[client] for client in shares[0]}, what
        )
        assert outcome is not None, "the leader's share is never empty"
        total, parts = self._sum(simulation, algorithm, work.shared, outcome), [outcome]
        for rank, share in enumerate(shares[1:], 1):
            told = self._receive(rank)
            if share:
                known = {name: value for name, value in told["done"].items() if value is not None}
                parts.append(_outcome(tree.to(known, simulation.cohort.data.device)))
                kept |= {client: _filled(states[client], told["kept"].get(str(client), {})) for client in share}
        each = joined([{"each": part.total["each"]} for part in parts if "each" in part.total])
        whole = side_by_side([part._replace(total={}) for part in parts])
        whole = whole._replace(total=total | each, seconds=outcome.seconds)
        return simulation.gathered(work.clients, work.round, work.before, whole, [kept[one] for one in work.clients])

    def follow(self, simulation: Simulation, algorithm: Algorithm, form: State) -> State:
        """Train what this process is sent, until the leader says that it is over; what it says then.

        `form` is what clients are sent, of whatever content.
        """
        self._form, device = None, simulation.cohort.data.device
        while "over" not in (what := self._receive(0)):
            shared = tree.to(_filled(form, what["shared"]), device)
            newcomer = algorithm.client_init(shared)
            states = {int(client): tree.to(_filled(newcomer, own), device) for client, own in what["kept"].items()}
            outcome, kept = _train(simulation, algorithm, shared, states, what)
            self._sum(simulation, algorithm, shared, outcome)
            told: State = {}
            if outcome is not None:
                told = outcome._replace(
                    total={"each": outcome.total["each"]} if "each" in outcome.total else {}
                )._asdict()
                told.pop("seconds")
            self._send(0, {"done": told, "kept": {str(client): own for client, own in kept.items()}})
        over: State = what["over"]
        return over

    def end(self, words: dict[str, Any]) -> None:
        """Tell all who follow that it is over."""
        self._form = None
        for rank in range(1, self.count):
            self._send(rank, {"over": words})

    def _sum(self, simulation: Simulation, algorithm: Algorithm, shared: State, outcome: Outcome | None) -> State:
        """The sum over all processes of what each has summed; what comes client by client is left out."""
        if self._form is None:
            self._form = simulation.form(algorithm, shared)["total"]
        form = {name: part for name, part in self._form.items() if name != "each"}
        heard = outcome is not None and bool(outcome.sound.any())  # else what is not finite would spoil the others'
        flat = tree.flatten(outcome.total) if outcome is not None and heard else {}
        wanted = tree.flatten(form)
        zeros = {name: torch.zeros(like.shape, dtype=like.dtype) for name, like in wanted.items()}
        vector = torch.cat([(flat if heard else zeros)[name].detach().double().cpu().flatten() for name in wanted])
        with _alive():
            dist.all_reduce(vector, group=self._group)
        parts = torch.split(vector, [like.numel() for like in wanted.values()])
        place = simulation.cohort.data.device
        whole = {
            name: part.reshape(like.shape).to(place, like.dtype)
            for (name, like), part in zip(wanted.items(), parts, strict=True)
        }
        return tree.filled(form, whole)

    def _send(self, rank: int, message: State) -> None:
        data = torch.frombuffer(bytearray(messages.pack(_in_host_memory(message))), dtype=torch.uint8)
        with _alive():
            dist.send(torch.tensor([len(data)]), rank, group=self._group)
            dist.send(data, rank, group=self._group)

    def _receive(self, rank: int) -> State:
        size = torch.zeros(1, dtype=torch.int64)
        with _alive():
            dist.recv(size, rank, group=self._group)
            data = torch.empty(int(size), dtype=torch.uint8)
            dist.recv(data, rank, group=self._group)
        return messages.unpack(data.numpy().tobytes())


def started() -> bool:
    """Has torchrun started this process beside others?"""
    return dist.is_available() and "MASTER_ADDR" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def follows() -> bool:
    """Is this such a process, and not the first?"""
    return started() and os.environ.get("RANK", "0") != "0"


def _train(
    simulation: Simulation, algorithm: Algorithm, shared: State, own: dict[int, State], what: State
) -> tuple[Outcome | None, dict[int, State]]:
    """What comes of the round of some clients, who had kept so much, and what they keep; nothing, if there are none."""
    if not own:
        return None, {}
    outcome, kept = simulation.part(algorithm, shared, own, what["round"], what["lr"], what["score"])
    return outcome, dict(zip(own, kept, strict=True))


def _outcome(told: State) -> Outcome:
    """What a process told of its share; without right answers, where none were counted."""
    rest: State = {"hits": None, "seconds": dict}
    return Outcome(**(rest | told))


def _parts(count: int, processes: int) -> list[slice]:
    """So many clients in parts for so many processes, as even as can be; some may be empty, but not the first."""
    ends = [-(-count * process // processes) for process in range(processes + 1)]
    return [slice(*two) for two in itertools.pairwise(ends)]


def _filled(form: State, state: State) -> State:
    """A state that came as a message, which forgets what is empty, in the nesting of `form`."""
    return tree.filled(form, tree.flatten(state))


def _in_host_memory(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _in_host_memory(inside) for name, inside in value.items()}
    return value.cpu() if isinstance(value, Tensor) else value


@contextlib.contextmanager
def _alive() -> Iterator[None]:
    """Within it, a line that breaks means a process that died."""
    try:
        yield
    except RuntimeError as error:
        raise RankDied(
            "another process of this run has ended: its own words are above, and this run's last checkpoint is intact. "
            "Continue with --resume."
        ) from error
