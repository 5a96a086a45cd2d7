"""The federated loop: who takes part, what comes of it, and how good it is."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fedcog import tree
from fedcog.algorithms import Algorithm
from fedcog.federation.clock import Clock
from fedcog.federation.payloads import finite
from fedcog.federation.privacy import Privacy, takes_part_most
from fedcog.federation.selection import Asked, Selection
from fedcog.task import Measure
from fedcog.tree import Params, State


class Diverged(Exception):
    """Training that left the numbers: whose update is not finite, in which round, and what may help."""

    def __init__(self, clients: Sequence[int], round: int, advice: str = "") -> None:
        self.clients, self.round, self.advice = list(clients), round, advice
        who = ", ".join(str(client) for client in clients)
        whose = f"the updates of clients {who} are" if len(clients) > 1 else f"the update of client {who} is"
        whose = whose if clients else "what the server made of finite updates is"
        super().__init__(f"training diverged in round {round + 1}: {whose} not finite. {advice}".strip())


class NoAnswer(RuntimeError):
    """A round that came to nothing, for want of clients that answered: who did not, and why."""


class Report(NamedTuple):
    """What is known of a round besides the sum of its payloads."""

    loss: float  # mean over clients, by their weight
    local: list[dict[str, float | int]]  # what the record says of each client
    seconds: dict[str, float]
    exhibit: Params  # what a report should show
    skipped: list[int]  # clients left out because their update was not finite
    forgot: list[int]  # clients whose update was fine, but not what they would have kept
    refused: dict[int, str]  # clients whose answer was not what it must be, and why


class Gathered(NamedTuple):
    """What came of a round's clients, still where it was computed."""

    total: State  # the sum of the payloads
    findings: State  # tensors to be read when the device has finished
    settle: Callable[[State], Report]  # what is made of them, once read; raises Diverged

    def report(self) -> Report:
        """What is known of the round, read now."""
        return self.settle(tree.read(self.findings))


class Backend(Protocol):
    """Where clients train: here, on several GPUs, or in a real federation."""

    def gather(
        self, algorithm: Algorithm, shared: State, clients: Sequence[int], round: int, lr: float, before: Tensor | None
    ) -> Gathered:
        """The sum of the payloads, and what the record wants to know."""

    def draws(self, algorithm: Algorithm, round: int) -> State:
        """The random tensors of the server in a round."""

    def losses(self, weights: Params, clients: Sequence[int], round: int, over: Asked) -> list[float]:
        """The loss of a model at each client."""


class Scorer(Protocol):
    """How the server's model is judged."""

    def hits(self, server: State) -> Params:
        """The task's hits of each class, on the test set ("test") and wherever else, and what else scores need."""

    def scores(self, hits: Params) -> dict[str, float]:
        """Its scores by name."""

    @property
    def measure(self) -> Measure:
        """Which of them comes first."""


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


class Work(NamedTuple):
    """What a round asks of its clients."""

    round: int
    clients: list[int]
    candidates: list[int]
    shared: State
    lr: float
    before: Tensor | None  # the sent model's hits, if local models are to be scored
    began: float


class Federation:
    """A server and its rounds: what each asks of clients, and what comes of the answer."""

    def __init__(
        self,
        algorithm: Algorithm,
        backend: Backend,
        scorer: Scorer,
        schedule: Schedule,
        server: State,
        privacy: Privacy | None = None,
    ) -> None:
        self.algorithm, self.backend, self.scorer, self.privacy = algorithm, backend, scorer, privacy
        self.schedule, self.server = schedule, server
        self._hits: Params | None = None

    def ask(self, round: int) -> Work:
        """Who takes part in a round, and what they are sent."""
        began, schedule, before = time.perf_counter(), self.schedule, None
        if schedule.evaluates(round) and schedule.evaluate_local:
            known = tree.read(self.scorer.hits(self.server)) if self._hits is None else self._hits
            before = known["test"]
        clients = candidates = schedule.selection.candidates(round)
        if schedule.selection.asks != "nothing":
            weights = self.algorithm.server_model(self.server)
            losses = self.backend.losses(weights, candidates, round, schedule.selection.asks)
            clients = schedule.selection.choose(candidates, losses)
        lr = schedule.lr * schedule.lr_decay**round
        return Work(round, clients, candidates, self.algorithm.broadcast(self.server), lr, before, began)

    def answer(self, work: Work, gathered: Gathered) -> Round:
        """The round finished; its line counts rounds from 1."""
        round, clients, candidates = work.round, work.clients, work.candidates
        clock = Clock(next(iter(tree.flatten(self.server).values())).device)
        with torch.no_grad():
            total = self.privacy.released(gathered.total, round) if self.privacy else gathered.total
            server = self.algorithm.server_update(self.server, total, self.backend.draws(self.algorithm, round))
        clock.lap("server")
        due = self.schedule.evaluates(round)
        found = {"client": gathered.findings, "finite": finite(server), "readings": server.get("readings", {})}
        found |= {"hits": self.scorer.hits(server)} if due else {}
        read = tree.read(found)  # the round's only look at the device
        clock.lap("evaluation")
        report = gathered.settle(read.get("client", {}))
        heard = max(len(clients) - len(report.skipped), 1)
        sizes: dict[str, float | int] = {"down": tree.nbytes(work.shared), "up": _share(gathered.total, heard)}
        local = [sizes | line for line in report.local]  # where it was measured on the wire, that counts
        if not read["finite"]:
            raise Diverged([], round)
        self.server, self._hits = server, read.get("hits")
        line: dict[str, Any] = {"round": round + 1, "clients": clients, "loss": report.loss}
        line |= {"candidates": candidates} if len(candidates) > len(clients) else {}
        line |= {"skipped": report.skipped} if report.skipped else {}
        line |= {"forgot": report.forgot} if report.forgot else {}
        refused = [{"client": client, "why": why} for client, why in sorted(report.refused.items())]
        line |= {"refused": refused} if refused else {}
        if self.privacy:
            line |= {"privacy": self._budget(self.privacy, round + 1)}
        line |= {name: float(value) for name, value in read.get("readings", {}).items()}
        if self._hits is not None:
            line |= self.scorer.scores(self._hits)
            measure = self.scorer.measure
            personal = [float(client[f"own_{measure}"]) for client in report.local if f"own_{measure}" in client]
            line |= {f"personal_{measure}": sum(personal) / len(personal)} if personal else {}
        seconds = dict(report.seconds)
        seconds["evaluation"] += clock.seconds()["evaluation"] if due else 0.0
        line |= {"local": local, "seconds": seconds | {"total": time.perf_counter() - work.began}}
        return Round(line, server, report.exhibit)

    def _budget(self, privacy: Privacy, rounds: int) -> dict[str, Any]:
        """What of a client's privacy is spent after so many rounds."""
        chosen = [self.schedule.selection.candidates(round) for round in range(rounds)]
        spent = privacy.spent(rounds, takes_part_most(chosen))
        return {"epsilon": spent, "delta": privacy.delta, "simulated": privacy.simulated}


def _share(total: State, clients: int) -> int:
    """The bytes that each of so many clients sent, given the sum: of what comes client by client its share."""
    each = total.get("each", {})
    return tree.nbytes(total) - tree.nbytes(each) + tree.nbytes(each) // clients


def federate(
    algorithm: Algorithm, backend: Backend, scorer: Scorer, schedule: Schedule, server: State, start: int
) -> Iterator[Round]:
    """Rounds `start`, `start` + 1, ... of a federation, one by one."""
    federation = Federation(algorithm, backend, scorer, schedule, server)
    for round in range(start, schedule.rounds):
        work = federation.ask(round)
        gathered = backend.gather(algorithm, work.shared, work.clients, round, work.lr, work.before)
        yield federation.answer(work, gathered)
