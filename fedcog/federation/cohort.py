"""A cohort: clients trained together on one device, all at once (vmap) or one after another (loop), same result."""

import contextlib
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from fedcog import streams, tree
from fedcog.algorithms import Algorithm, Effort, Extra, Scope
from fedcog.data.federated import FederatedData
from fedcog.federation import evaluate
from fedcog.federation.clock import Clock
from fedcog.federation.course import Course, Members, alone, autograd, functional, together
from fedcog.federation.graphs import BURST, Graphs, in_turn
from fedcog.federation.memory import clients_that_fit
from fedcog.federation.outcomes import Outcome, one_after_another
from fedcog.federation.parties import Party, everybody, outcomes, rates_of, sent
from fedcog.federation.payloads import one_alone
from fedcog.federation.privacy import Privacy
from fedcog.federation.workers import Duty, Workers
from fedcog.fitness import ModelError
from fedcog.models import Model
from fedcog.optimiser import Optimiser
from fedcog.task import Task
from fedcog.tree import Params, State

Mapping = Literal["loop", "vmap", "graph"]
CREWS = 4  # of kinds of devices so many have processes waiting for their next round


class Cohort:
    """The clients that train together on one device, and how they train.

    `mapping` is the way: one after another ("loop"), all at once ("vmap"), or all at once with every step recorded as
    a CUDA graph and played back ("graph"). `horizon` is the largest number of steps any client may be asked for, and
    `limit` how many clients are trained at once, where memory does not suffice for more (None: not yet known). On a
    CPU, the loop may run in several `workers`, and clients that train together on so many `threads` (0: on all).
    """

    def __init__(
        self,
        model: Model,
        task: Task,
        data: FederatedData,
        optimiser: Optimiser,
        *,
        batch_size: int,
        grad_clip: float = 0.0,
        mapping: Mapping = "loop",
        workers: int = 1,
        threads: int = 0,
        privacy: Privacy | None = None,
    ) -> None:
        self._alone, self.model = model, model if mapping == "loop" else model.side_by_side
        self.privacy = privacy
        self.task, self.data, self.optimiser = task, data, optimiser
        self.batch_size, self.grad_clip, self.mapping, self.workers = batch_size, grad_clip, mapping, workers
        self.threads, self.horizon = threads, 0
        self.limit: int | None = None
        self._crews: dict[Algorithm, Workers] = {}
        self._graphs = Graphs()
        self._repeat = self._graphs.repeat if mapping == "graph" else in_turn

    @torch.no_grad()
    def train(
        self,
        algorithm: Algorithm,
        shared: State,
        members: Members,
        round: int,
        lr: float,
        score: bool = True,
        size: int = 0,
    ) -> Outcome:
        """One round of all members; with `score`, their local models are also tried on the test set.

        Where there are fewer than `size` members, copies of the last one are trained along and thrown away: a recording
        is of one size.
        """
        if self.mapping == "loop" and self.workers > 1 and len(members.number) > 1:
            return self._in_processes(algorithm, shared, members, round, lr, score)
        shared = self.unpacked(algorithm, shared)
        if self.mapping == "loop":
            ones = [members.one(row) for row in range(len(members.number))]
            return one_after_another([self._train(algorithm, shared, one, round, lr, score) for one in ones])
        count = len(members.number)
        rows = torch.arange(max(size, count)).clamp(max=count - 1)
        members = members if len(rows) == count else members.some(rows)
        with self._together():
            return self._train(algorithm, shared, members, round, lr, score, count)

    @torch.no_grad()
    def train_together(
        self, algorithm: Algorithm, parties: Sequence[Party], round: int, rates: Sequence[float], score: bool
    ) -> list[Outcome]:
        """One round of several federations' clients at once: of the same network and data, but each of its own seed.

        Each has its learning rate.
        """
        ready = [party._replace(shared=party.cohort.unpacked(algorithm, party.shared)) for party in parties]
        with self._together():
            return self._train_parties(algorithm, ready, round, rates, score)

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """Within it clients are trained at once; what vmap cannot do is told with a remedy."""
        try:
            with _on_threads(self.threads):
                yield
        except RuntimeError as error:
            if not any(word in str(error) for word in ("vmap", "functorch", "transform", "channels_last")):
                raise
            if "randomness" in str(error):
                raise ModelError(
                    "the algorithm or the network draws random numbers of its own, which nobody could repeat: an "
                    "algorithm asks for them in `draws` and is handed them."
                ) from error
            reason = str(error).strip().splitlines()[0]
            raise ModelError(f"clients cannot be trained together here ({reason}): set --mapping loop.") from error

    def _in_processes(
        self, algorithm: Algorithm, shared: State, members: Members, round: int, lr: float, score: bool
    ) -> Outcome:
        """The loop's round in worker processes; whoever has most steps goes first, so that all end at about a time."""
        began = time.perf_counter()
        if algorithm not in self._crews or self._crews[algorithm].ended:
            self.close(algorithm, *list(self._crews)[CREWS - 1 :])
            count = min(self.workers, len(members.number))

            @torch.no_grad()
            def begin(common: State) -> Duty:
                shared = self.unpacked(algorithm, common["shared"])
                members, rest = Members(own={}, **common["members"]), (common["round"], common["lr"], common["score"])

                @torch.no_grad()
                def train(item: State) -> State:
                    one = members.one(item["row"])._replace(own=item["own"])
                    done = self._train(algorithm, shared, one, *rest)
                    return done._asdict() | {"seconds": done.seconds()}

                return train

            self._crews[algorithm] = Workers(count, max(1, torch.get_num_threads() // count), begin)
        known = {name: value for name, value in members._asdict().items() if name != "own"}
        common = {"shared": shared, "members": known, "round": round, "lr": lr, "score": score}
        items = [{"row": row, "own": tree.pick(members.own, row)} for row in range(len(members.number))]
        order = members.steps.argsort(descending=True, stable=True).tolist()
        found = self._crews[algorithm].map(common, items, order)
        parts = {part: sum(one["seconds"][part] for one in found) for part in found[0]["seconds"]}
        share = (time.perf_counter() - began) / sum(parts.values())
        seconds = {part: share * value for part, value in parts.items()}
        done = one_after_another([Outcome(**one) for one in found])
        return done._replace(seconds=lambda: seconds)

    def close(self, *algorithms: Algorithm) -> None:
        """End the worker processes of some algorithms, or all there are; the next round would start others."""
        for algorithm in algorithms or tuple(self._crews):
            if crew := self._crews.pop(algorithm, None):
                crew.close()

    def draws(self, algorithm: Algorithm, scope: Scope, round: int, numbers: Tensor, steps: int = 1) -> State:
        """The random tensors of one scope that the algorithm asks for in a round, one for each of `numbers`."""
        drawn: State = {}
        there = numbers.to(self.data.device)
        for name, (shape, wanted, kind) in algorithm.draws(round, self.model, self.batch_size).items():
            purpose = f"draw/{name}"
            if wanted != scope:
                continue
            if kind == "examples":
                count = steps * shape[0] if scope == "step" else shape[0]
                some = self.data.examples(self.data.pick(purpose, round, numbers, count))
                if scope == "step":
                    parts = len(numbers), steps, shape[0]
                    some = {key: value.reshape(*parts, *value.shape[2:]) for key, value in some.items()}
                drawn[name] = some
                continue
            source = streams.normal if kind == "normal" else streams.uniform
            whole = (steps, *shape) if scope == "step" else shape
            drawn[name] = source(self.data.seed, purpose, round, there, whole).to(self.data.dtype)
        return drawn

    def common(self, algorithm: Algorithm, scope: Literal["federation", "server"], round: int = 0) -> State:
        """The random tensors that there is one of: for the whole federation, or for the server in a round."""
        nobody = torch.zeros(1, dtype=torch.int64)
        return tree.pick(self.draws(algorithm, scope, round, nobody), 0)

    def unpacked(self, algorithm: Algorithm, shared: State) -> State:
        """What clients make of what they were sent."""
        return algorithm.unpack(shared, self.common(algorithm, "federation"), self.model)

    def newcomer(self, algorithm: Algorithm, shared: State) -> State:
        """What a client keeps before it has ever taken part."""
        return algorithm.client_init(self.unpacked(algorithm, shared))

    def course(self, algorithm: Algorithm, uneven: bool = False, apart: bool = False) -> Course:
        """A round of these clients, as functions of tensors."""
        how = (alone, autograd) if self.mapping == "loop" else (together, functional)
        own = self.model, self.task, self.data, self.optimiser, self.batch_size, self.grad_clip
        return Course(*own, algorithm, *how, uneven, apart)

    @torch.no_grad()
    def form(self, algorithm: Algorithm, shared: State, members: Members) -> State:
        """What the first member's payload looks like as a sum of one, without content; nothing is computed."""
        from torch._subclasses import FakeTensorMode  # takes a second to load

        one = members.one(0)
        course = self.course(algorithm)._replace(each=alone)
        zero, rate = torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=self.data.dtype)
        draws = self.common(algorithm, "federation")  # drawn by numpy, which takes no stand-ins
        with FakeTensorMode(allow_non_fake_inputs=True):
            shared = algorithm.unpack(shared, draws, self.model)
            fixed: State = {"members": one._asdict(), "shared": shared, "lr": rate, "round": zero}
            state = course.start(fixed, course.buffers(fixed, zero), zero)
            length = self.optimiser.length(one.steps, 1.0).to(rate.dtype)
            made = one_alone(course.finish(state, fixed, Effort(one.steps, rate, length)).payload)
        return tree.apply(lambda value: torch.empty(value.shape, dtype=value.dtype, device="meta"), made)

    def parts(self, count: int) -> list[slice]:
        """So many clients in parts that are trained at once: all of them, if memory suffices."""
        if self.limit is None:
            together = self.mapping != "loop"
            self.limit = clients_that_fit(self._alone, self.data, self.batch_size) if together else sys.maxsize
        size = -(-count // -(-count // min(self.limit, count)))  # parts as even as can be
        return [slice(start, min(start + size, count)) for start in range(0, count, size)]

    def shrink(self, count: int) -> bool:
        """Make do with half of so many clients at once; False where one is too much already."""
        if count <= 1 or self.mapping == "loop":
            return False
        self.limit = -(-count // 2)
        warnings.warn(f"memory ran out: from now on {self.limit} clients at most train at once.", stacklevel=2)
        self._graphs.forget()
        return True

    def _train(
        self, algorithm: Algorithm, shared: State, members: Members, round: int, lr: float, score: bool, count: int = 1
    ) -> Outcome:
        """One party's round; of its members the first `count` are meant."""
        done = self._train_parties(algorithm, [Party(self, shared, members)], round, [lr], score, count)
        return done[0]

    def _train_parties(
        self,
        algorithm: Algorithm,
        parties: Sequence[Party],
        round: int,
        rates: Sequence[float],
        score: bool,
        count: int = 0,
    ) -> list[Outcome]:
        device, dtype, data = self.data.device, self.data.dtype, self.data
        members, numbers = everybody(parties), [party.members.number.reshape(-1) for party in parties]
        clock, longest, stacked = Clock(device), int(members.steps.max()), members.number.dim() == 1
        horizon = max(party.cohort.horizon for party in parties)
        steps = max(longest, horizon) if self.mapping == "graph" else longest  # a recording needs one size for all
        course = self.course(algorithm, uneven=bool((members.steps != steps).any()), apart=len(parties) > 1)
        members = members._replace(number=members.number.to(device), steps=members.steps.to(device))
        zero = torch.zeros((), dtype=torch.int64, device=device)
        lr = rates_of(rates, parties)
        rate = lr.to(device, dtype)
        fixed: State = {"members": members._asdict(), "shared": sent(parties), "lr": rate, "round": zero + round}

        buffers = course.buffers(fixed, zero)
        draws = tree.join(
            [party.cohort.draws(algorithm, "client", round, own) for party, own in zip(parties, numbers, strict=True)]
        )
        draft = course.draft(fixed, buffers, zero, draws if stacked else tree.pick(draws, 0))
        if times := algorithm.redrafts(round):
            begun, given = {"draft": draft, "step": zero}, fixed | {"buffers": buffers}
            named = "generation", algorithm, course.apart
            draft = self._repeat(course.redraft, named, begun, given, times)["draft"]
        extra = course.extra(fixed, buffers, zero, draft)
        clock.lap("generation")

        plans = tree.join(
            [
                party.cohort._plan(algorithm, round, own, steps, extra, stacked)
                for party, own in zip(parties, numbers, strict=True)
            ]
        )
        plan = tree.apply(lambda value: value.transpose(0, 1) if stacked else value[0], plans)
        fixed |= {"extra": extra.groups, "stock": data.stock}
        state = course.start(fixed, buffers, zero)
        for first, times, part, staged in self._parts(plan, longest):
            given = fixed | {"plan": part, "staged": staged, "first": zero + first}
            key = "training", algorithm, course.uneven, course.apart
            state = self._repeat(course.advance, key, state, given, times)
        length = self.optimiser.length(members.steps, lr.to(device)).to(dtype)
        done = course.finish(state, fixed, Effort(members.steps, rate.expand_as(members.weight), length))
        loss = state["loss"] / members.steps
        clock.lap("training")
        hits = None
        if score:
            hits = evaluate.hits(self.model, self.task, data, done.local, data.test_x, data.test_y, course.each)
        clock.lap("evaluation")
        found: State = {"done": done._asdict(), "loss": loss, "exhibit": extra.exhibit}
        found |= {} if hits is None else {"hits": hits}
        return outcomes(found if stacked else tree.stack([found]), parties, round, count, stacked, clock)

    def _plan(
        self, algorithm: Algorithm, round: int, numbers: Tensor, steps: int, extra: Extra, stacked: bool
    ) -> State:
        """Everything that the steps of a round are served, laid out beforehand: [client, step, ...]."""
        own, there = self.data.plan(round, numbers, steps, self.batch_size), numbers.to(self.data.device)
        served = {}
        for group, part in extra.groups.items():
            sizes = torch.full_like(numbers, next(iter(part.values())).shape[int(stacked)])
            length = steps * self.batch_size
            index = streams.windows(self.data.seed, f"extra/{group}", round, there, sizes, length)
            served[group] = index.reshape(len(numbers), steps, self.batch_size)
        plan = {"picks": own.picks, "served": served, "drawn": self.draws(algorithm, "step", round, numbers, steps)}
        return plan | ({} if own.moves is None else {"moves": own.moves})

    def _parts(self, plan: State, steps: int) -> Iterator[tuple[int, int, State, Params]]:
        """The plan by parts: (first step, steps, plan, what is staged for it); of data at hand there is one part."""
        if not self.data.streamed:
            yield 0, steps, plan, {}
            return
        for first in range(0, steps, BURST):
            rows = torch.arange(first, first + BURST, device=self.data.device).clamp(max=len(plan["picks"]) - 1)
            part = tree.apply(lambda value, rows=rows: value[rows], plan)
            staged = self.data.staged(part["picks"])
            order = torch.arange(part["picks"].numel(), device=self.data.device)
            yield first, min(BURST, steps - first), part | {"picks": order.reshape(part["picks"].shape)}, staged


@contextlib.contextmanager
def _on_threads(count: int) -> Iterator[None]:
    """Within it, torch computes on so many threads; 0: as before."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(count or before)
        yield
    finally:
        torch.set_num_threads(before)
