"""A federation in one process: every client's data and kept state on this machine."""

import contextlib
import itertools
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from fedcog import tree
from fedcog.algorithms import Algorithm, Origin
from fedcog.federation import evaluate
from fedcog.federation.cohort import Cohort
from fedcog.federation.course import Members
from fedcog.federation.devices import Device
from fedcog.federation.outcomes import Outcome, side_by_side
from fedcog.federation.parties import Party
from fedcog.federation.rounds import Diverged, Gathered, Report, Work
from fedcog.federation.selection import Asked
from fedcog.federation.store import Store
from fedcog.tree import Params, State

Weights = Literal["examples", "uniform"]


class Simulation:
    """The backend that trains the round's clients here."""

    def __init__(
        self,
        cohort: Cohort,
        *,
        local_steps: int,
        local_epochs: float,
        weight_cap: int,
        weights: Weights = "examples",
        skip_diverged: bool = False,
        devices: Sequence[Device] = (),
    ) -> None:
        self.cohort, self.store, self.skip_diverged = cohort, Store(cohort.data.device), skip_diverged
        data, task = cohort.data, cohort.task
        self.counts, self.sizes = (
            torch.stack([count(data.labels(client)) for client in range(data.clients)]).to(data.device)
            for count in (task.counts, task.sizes)
        )
        self.totals = task.counts(data.test_y).cpu()
        self.most = task.most(self.totals, len(data.test_y))
        cap = weight_cap or int(data.sizes.max())
        self.weights = (data.sizes.clamp(max=cap).to(data.dtype) / cap).to(data.device)
        if weights == "uniform":
            self.weights = torch.ones_like(self.weights)
        self.devices = devices or [Device("", data.clients)]
        kinds = torch.tensor([device.clients for device in self.devices])
        self._kind = torch.arange(len(kinds)).repeat_interleave(kinds).tolist()

        def steps(device: Device, sizes: Tensor) -> Tensor:
            epochs = local_epochs if device.epochs is None and device.steps is None else device.epochs
            if epochs:
                return (sizes.double() * epochs / cohort.batch_size - 1e-9).ceil().clamp(min=1).long()
            return torch.full_like(sizes, device.steps or local_steps)

        own = torch.split(data.sizes, kinds.tolist())
        self.steps = torch.cat([steps(device, sizes) for device, sizes in zip(self.devices, own, strict=True)])
        cohort.horizon = int(self.steps.max())

    def begin(self, algorithm: Algorithm) -> State:
        """The server before the first round."""
        return algorithm.server_init(self.origin(algorithm))

    def origin(self, algorithm: Algorithm) -> Origin:
        """What a server is made of."""
        model, draws = self.cohort.model, self.cohort.common(algorithm, "federation")
        return Origin(model, model.params, self.weights.new_tensor(len(self.weights)), draws)

    def draws(self, algorithm: Algorithm, round: int) -> State:
        """The random tensors of the server in a round."""
        return self.cohort.common(algorithm, "server", round)

    def gather(
        self,
        algorithm: Algorithm,
        shared: State,
        clients: Sequence[int],
        round: int,
        lr: float,
        before: Tensor | None,
    ) -> Gathered:
        """The sum of the clients' payloads, and findings. `before`: the sent model's hits, if scores are wanted."""
        outcome, kept = self._train(algorithm, shared, clients, round, lr, before is not None)
        return self.gathered(clients, round, before, outcome, kept)

    def gathered(
        self, clients: Sequence[int], round: int, before: Tensor | None, outcome: Outcome, kept: list[State]
    ) -> Gathered:
        """What is gathered when so much has come of the clients' round, and each keeps so much, if here."""
        rows = torch.tensor(clients).to(self.counts.device)
        findings: State = {
            "sound": outcome.sound,
            "whole": outcome.sound & outcome.keepable.to(outcome.sound.device),
            "loss": outcome.loss,
            "distance": outcome.distance,
            "weight": self.weights[rows],
            "counts": self.counts[rows],
            "exhibit": outcome.exhibit,
        }
        findings |= {} if outcome.hits is None else {"hits": outcome.hits}

        def settle(read: State) -> Report:
            return self._settle(clients, round, before, read, outcome, kept)

        return Gathered(outcome.total, findings, settle)

    def alone(
        self, algorithm: Algorithm, shared: State, client: int, kept: State, round: int, lr: float, score: bool
    ) -> tuple[Outcome, State]:
        """One client's round, who had kept so much before it, and what it keeps after it."""
        outcome, (after,) = self.part(algorithm, shared, {client: kept}, round, lr, score)
        return outcome, after if bool(outcome.sound & outcome.keepable) else kept

    def part(
        self, algorithm: Algorithm, shared: State, own: dict[int, State], round: int, lr: float, score: bool
    ) -> tuple[Outcome, list[State]]:
        """The round of some clients, who had kept so much before it, and what they would keep after it."""
        self.store.put(list(own), list(own.values()), [True] * len(own))
        return self._train(algorithm, shared, list(own), round, lr, score)

    def form(self, algorithm: Algorithm, shared: State) -> State:
        """What one client's answer to `shared` looks like, as tensors of the right shape and type without content."""
        some = next(iter(shared["params"].values()))
        one = {name: some.new_empty(1, device="meta") for name in ("loss", "distance")}
        hits = torch.empty((1, *self.most.shape), dtype=torch.int64, device="meta")
        members = self.members(algorithm, shared, [0])
        return one | {"total": self.cohort.form(algorithm, shared, members), "hits": hits}

    def members(self, algorithm: Algorithm, shared: State, clients: Sequence[int]) -> Members:
        """Clients with all that they have of their own."""
        number, own = torch.tensor(clients), self.store.take(clients, lambda: self.cohort.newcomer(algorithm, shared))
        rows = number.to(self.counts.device)
        return Members(number, own, self.weights[rows], self.counts[rows], self.sizes[rows], self.steps[number])

    def _train(
        self, algorithm: Algorithm, shared: State, clients: Sequence[int], round: int, lr: float, score: bool
    ) -> tuple[Outcome, list[State]]:
        """What comes of the clients' round, and what each would keep; kinds of devices apart.

        Where memory asks for it, a kind's clients are trained part by part.
        """
        done, kept = list[Outcome](), list[State]()
        for kind, same in itertools.groupby(clients, self._kind.__getitem__):
            some, chosen = list(same), self.devices[kind].adapt(algorithm)
            most = min(len(clients), self.devices[kind].clients)  # as many as may ever come of this kind
            outcomes, states = self._train_alike(chosen, shared, some, round, lr, score, most)
            done, kept = [*done, *outcomes], [*kept, *states]
        return side_by_side(done), kept

    def _train_alike(
        self, algorithm: Algorithm, shared: State, clients: list[int], round: int, lr: float, score: bool, most: int
    ) -> tuple[list[Outcome], list[State]]:
        size, given = self.cohort.parts(most)[0].stop, (algorithm, shared, clients, round, lr, score)
        try:
            return self._train_by(size, *given)
        except torch.cuda.OutOfMemoryError as error:
            short = error.with_traceback(None)  # whose frames hold what did not fit
        if not (self.store.retreat() or self.cohort.shrink(size)):
            raise short
        return self._train_alike(*given, most)

    def _train_by(
        self, size: int, algorithm: Algorithm, shared: State, clients: list[int], round: int, lr: float, score: bool
    ) -> tuple[list[Outcome], list[State]]:
        """Clients alike, so many at a time."""
        done, kept = list[Outcome](), list[State]()
        for start in range(0, len(clients), size):
            some = clients[start : start + size]
            members = self.members(algorithm, shared, some)
            outcome = self.cohort.train(algorithm, shared, members, round, lr, score, size=size)
            kept += self.store.rows(some, outcome.kept)
            done.append(outcome._replace(kept={}))
        return done, kept

    def newcomer(self, algorithm: Algorithm, shared: State, client: int) -> State:
        """What a client keeps before it has ever taken part."""
        return self.cohort.newcomer(self.devices[self._kind[client]].adapt(algorithm), shared)

    def kept(self, algorithm: Algorithm, shared: State, client: int) -> State:
        """What a client keeps, or would, had it taken part."""
        return tree.pick(self.store.take([client], lambda: self.newcomer(algorithm, shared, client)), 0)

    def _settle(
        self,
        clients: Sequence[int],
        round: int,
        before: Tensor | None,
        read: State,
        outcome: Outcome,
        kept: list[State],
    ) -> Report:
        """What is known of the round, from its findings as read; the clients' states are kept if all is well."""
        sound, whole = read["sound"].tolist(), read["whole"].tolist()
        lost = [client for row, client in enumerate(clients) if not sound[row]]
        odd = [client for row, client in enumerate(clients) if not whole[row]]
        if odd and (not self.skip_diverged or len(lost) == len(clients)):
            raise Diverged(odd, round)
        if kept:
            self.store.put(clients, kept, whole)
        loss, distance = read["loss"].tolist(), read["distance"].tolist()
        local: list[dict[str, float | int]] = [
            {"client": client, "loss": loss[row], "distance": distance[row]} for row, client in enumerate(clients)
        ]
        task, name = self.cohort.task, self.cohort.task.measure
        if before is not None and "hits" in read:
            for row, (hits, counts) in enumerate(zip(read["hits"], read["counts"], strict=True)):
                if not whole[row]:
                    continue
                local[row][name] = task.score(hits, self.totals)
                local[row][f"own_{name}"] = task.score(hits, self.totals, counts)
                local[row][f"own_{name}_before"] = task.score(before, self.totals, counts)
                absent = (counts == 0).to(counts.dtype)
                if name == "accuracy" and bool((absent * self.totals).any()):
                    local[row][f"absent_{name}"] = task.score(hits, self.totals, absent)
                    local[row][f"absent_{name}_before"] = task.score(before, self.totals, absent)
        present = torch.where(read["sound"], read["weight"], 0)
        mean = float(torch.where(read["sound"], read["loss"] * read["weight"], 0).sum() / present.sum())
        exhibit = read.get("exhibit", {})
        return Report(mean, local, outcome.seconds(), exhibit, lost, sorted({*odd} - {*lost}), {})

    def losses(self, weights: Params, clients: Sequence[int], round: int, over: Asked) -> list[float]:
        """The mean loss of a model over all training examples of each client, or over one batch of them."""
        data, size = self.cohort.data, self.cohort.batch_size
        found = []
        for client in clients:
            one = torch.tensor([client])
            some = min(size, int(data.sizes[client]))
            index = data.own(client) if over == "all" else data.pick("choice", round, one, some)[0]
            found.append(evaluate.loss(self.cohort.model, self.cohort.task, data, weights, index))
        return found


def gather_together(simulations: Sequence[Simulation], algorithm: Algorithm, works: Sequence[Work]) -> list[Gathered]:
    """What each of several simulations would gather, their clients trained as one larger cohort where that fits.

    They are simulations of one experiment that differ in their seed and learning rate alone, in the same round.
    """
    first, kinds = simulations[0].cohort, simulations[0].devices
    count = sum(len(one.clients) for one in works)
    if len(kinds) == 1 and len(works) > 1 and first.mapping != "loop" and len(first.parts(count)) == 1:
        with contextlib.suppress(torch.cuda.OutOfMemoryError):
            return _gather_as_one(simulations, kinds[0].adapt(algorithm), works)
        left = [simulation.store.retreat() for simulation in simulations]
        if any(left):
            return gather_together(simulations, algorithm, works)
        first.shrink(count)
    return [
        simulation.gather(algorithm, one.shared, one.clients, one.round, one.lr, one.before)
        for simulation, one in zip(simulations, works, strict=True)
    ]


def _gather_as_one(simulations: Sequence[Simulation], algorithm: Algorithm, works: Sequence[Work]) -> list[Gathered]:
    first, work = simulations[0].cohort, works[0]
    parties = [
        Party(simulation.cohort, one.shared, simulation.members(algorithm, one.shared, one.clients))
        for simulation, one in zip(simulations, works, strict=True)
    ]
    done = first.train_together(algorithm, parties, work.round, [one.lr for one in works], work.before is not None)
    return [
        simulation.gathered(
            *(one.clients, one.round, one.before, outcome._replace(kept={})),
            simulation.store.rows(one.clients, outcome.kept),
        )
        for simulation, one, outcome in zip(simulations, works, done, strict=True)
    ]
