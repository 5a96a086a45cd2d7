"""The federated loop: who takes part, what comes of it, and how good it is."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fedcog import tree
from fedcog.algorithms import Algorithm
from fedcog.federation.selection import Asked, Selection
from fedcog.tree import Params, State


class Diverged(Exception):
    """Training that left the numbers: whose update is not finite, in which round, and what may help."""

    def __init__(self, clients: Sequence[int], round: int, advice: str = "") -> None:
        self.clients, self.round, self.advice = list(clients), round, advice
        who = ", ".join(str(client) for client in clients)
        whose = f"the updates of clients {who} are" if len(clients) > 1 else f"the update of client {who} is"
        whose = whose if clients else "what the server made of finite updates is"
        super().__init__(f"training diverged in round {round + 1}: {whose} not finite. {advice}".strip())


class Report(NamedTuple):
    """What is known of a round besides the sum of its payloads."""

    loss: float  # mean over clients, by their weight
    local: list[dict[str, float | int]]  # what the record says of each client
    seconds: dict[str, float]
    exhibit: Params  # what a report should show
    skipped: list[int]  # clients left out because their update was not finite
    forgot: list[int]  # clients whose update was fine, but not what they would have kept


class Backend(Protocol):
    """Where clients train: here, on several GPUs, or in a real federation."""

    def gather(
        self, algorithm: Algorithm, shared: State, clients: Sequence[int], round: int, lr: float, before: Tensor | None
    ) -> tuple[State, Report]:
        """The sum of the payloads, and what the record wants to know."""

    def draws(self, algorithm: Algorithm, round: int) -> State:
        """The random tensors of the server in a round."""

    def losses(self, weights: Params, clients: Sequence[int], round: int, over: Asked) -> list[float]:
        """The loss of a model at each client."""


class Scorer(Protocol):
    """How the server's model is judged."""

    def hits(self, server: State) -> Tensor:
        """Its right answers of each class on the test set."""

    def scores(self, hits: Tensor, server: State) -> dict[str, float]:
        """Its accuracies by name."""


class Round(NamedTuple):
    """A finished round: its line in the record, the server's state after it, and what a report should show."""

    line: dict[str, Any]
    server: State
    exhibit: Params


@dataclass(frozen=True)
class Schedule:
    """When things happen."""

    rounds: int
    selection: Selection
    lr: float
    lr_decay: float
    evaluate_every: int
    evaluate_local: bool

    def evaluates(self, round: int) -> bool:
        """Is this round scored? The last one always is."""
        return (round + 1) % self.evaluate_every == 0 or round + 1 == self.rounds


def round_half_up(number: float) -> int:
    """The nearest whole number; half a client counts as one."""
    return int(number + 0.5)


def federate(
    algorithm: Algorithm, backend: Backend, scorer: Scorer, schedule: Schedule, server: State, start: int
) -> Iterator[Round]:
    """Rounds `start`, `start` + 1, ... of a federation, one by one; each line counts rounds from 1."""
    hits: Tensor | None = None
    for round in range(start, schedule.rounds):
        began = time.perf_counter()
        due = schedule.evaluates(round)
        before = None
        if due and schedule.evaluate_local:
            before = scorer.hits(server) if hits is None else hits
        clients = candidates = schedule.selection.candidates(round)
        if schedule.selection.asks != "nothing":
            weights = algorithm.server_model(server)
            losses = backend.losses(weights, candidates, round, schedule.selection.asks)
            clients = schedule.selection.choose(candidates, losses)
        lr = schedule.lr * schedule.lr_decay**round
        shared = algorithm.broadcast(server)
        total, report = backend.gather(algorithm, shared, clients, round, lr, before)
        with torch.no_grad():
            server = algorithm.server_update(server, total, backend.draws(algorithm, round))
        if not all(value.isfinite().all() for value in tree.flatten(server).values()):
            raise Diverged([], round)
        line: dict[str, Any] = {"round": round + 1, "clients": clients, "loss": report.loss}
        line |= {"candidates": candidates} if len(candidates) > len(clients) else {}
        line |= {"skipped": report.skipped} if report.skipped else {}
        line |= {"forgot": report.forgot} if report.forgot else {}
        line |= {name: float(value) for name, value in server.get("readings", {}).items()}
        seconds, evaluated, hits = dict(report.seconds), time.perf_counter(), None
        if due:
            hits = scorer.hits(server)
            line |= scorer.scores(hits, server)
            personal = [float(client["own_accuracy"]) for client in report.local if "own_accuracy" in client]
            line |= {"personal_accuracy": sum(personal) / len(personal)} if personal else {}
        now = time.perf_counter()
        seconds["evaluation"] += now - evaluated
        line |= {"local": report.local, "seconds": seconds | {"total": now - began}}
        yield Round(line, server, report.exhibit)
