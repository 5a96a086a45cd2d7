"""A cohort: clients trained together on one device, all at once (vmap) or one after another (loop), same result."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fedcog import streams, tree
from fedcog.algorithms import Algorithm, Effort, Extra, Scope
from fedcog.data.federated import FederatedData
from fedcog.federation import evaluate
from fedcog.federation.clock import Clock
from fedcog.federation.course import Course, Finish, Members, alone, autograd, functional, together
from fedcog.federation.graphs import BURST, Graphs, in_turn
from fedcog.federation.payloads import joined, one_alone, summed
from fedcog.federation.workers import Duty, Workers
from fedcog.models import Model, ModelError
from fedcog.optimiser import Optimiser
from fedcog.task import Task
from fedcog.tree import Params, State

Mapping = Literal["loop", "vmap", "graph"]

PASSES, STATES = 4, 12
"""What a client is reckoned to take up on a GPU: so many forward and backward passes, and so many times its parameters.
Algorithms differ; where it turns out too little, fewer clients are trained at once."""


class Outcome(NamedTuple):
    """What a cohort's round comes to."""

    kept: State  # stacked, client by client
    total: State  # the sum of the sound payloads
    sound: Tensor  # [clients], is all that the client sends finite?
    keepable: Tensor  # [clients], is all that it keeps finite?
    loss: Tensor  # [clients], mean over the client's steps
    distance: Tensor  # [clients], of the local model from the one it was sent
    hits: Tensor | None  # [clients, classes], the local models' right answers on the test set
    exhibit: Params  # what a report should show of the first client
    seconds: Callable[[], dict[str, float]]  # by part; to be asked for when the device has finished


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
    ) -> None:
        self._alone, self.model = model, model if mapping == "loop" else model.side_by_side
        self.task, self.data, self.optimiser = task, data, optimiser
        self.batch_size, self.grad_clip, self.mapping, self.workers = batch_size, grad_clip, mapping, workers
        self.threads, self.horizon = threads, 0
        self.limit: int | None = None
        self._crew: tuple[Algorithm, Workers] | None = None
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
        shared = algorithm.unpack(shared, self.common(algorithm, "federation"), self.model)
        if self.mapping == "loop":
            ones = [members.one(row) for row in range(len(members.number))]
            return _one_after_another([self._train(algorithm, shared, one, round, lr, score) for one in ones])
        try:
            count = len(members.number)
            rows = torch.arange(max(size, count)).clamp(max=count - 1)
            members = members if len(rows) == count else members.some(rows)
            with _on_threads(self.threads):
                return self._train(algorithm, shared, members, round, lr, score, count)
        except RuntimeError as error:
            if not any(word in str(error) for word in ("vmap", "functorch", "transform")):
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
        if self._crew is None or self._crew[0] is not algorithm or self._crew[1].ended:
            self.close()
            count = min(self.workers, len(members.number))

            @torch.no_grad()
            def begin(common: State) -> Duty:
                shared = algorithm.unpack(common["shared"], self.common(algorithm, "federation"), self.model)
                members, rest = Members(own={}, **common["members"]), (common["round"], common["lr"], common["score"])

                @torch.no_grad()
                def train(item: State) -> State:
                    one = members.one(item["row"])._replace(own=item["own"])
                    done = self._train(algorithm, shared, one, *rest)
                    return done._asdict() | {"seconds": done.seconds()}

                return train

            self._crew = algorithm, Workers(count, max(1, torch.get_num_threads() // count), begin)
        known = {name: value for name, value in members._asdict().items() if name != "own"}
        common = {"shared": shared, "members": known, "round": round, "lr": lr, "score": score}
        items = [{"row": row, "own": tree.pick(members.own, row)} for row in range(len(members.number))]
        order = members.steps.argsort(descending=True, stable=True).tolist()
        found = self._crew[1].map(common, items, order)
        parts = {part: sum(one["seconds"][part] for one in found) for part in found[0]["seconds"]}
        share = (time.perf_counter() - began) / sum(parts.values())
        seconds = {part: share * value for part, value in parts.items()}
        done = _one_after_another([Outcome(**one) for one in found])
        return done._replace(seconds=lambda: seconds)

    def close(self) -> None:
        """End the worker processes, if there are any; the next round would start others."""
        if self._crew is not None:
            self._crew[1].close()
        self._crew = None

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

    def course(self, algorithm: Algorithm, uneven: bool = False) -> Course:
        """A round of these clients, as functions of tensors."""
        how = (alone, autograd) if self.mapping == "loop" else (together, functional)
        own = self.model, self.task, self.data, self.optimiser, self.batch_size, self.grad_clip
        return Course(*own, algorithm, *how, uneven)

    def parts(self, count: int) -> list[slice]:
        """So many clients in parts that are trained at once: all of them, if memory suffices."""
        if self.limit is None:
            self.limit = self._limit(count)
        size = -(-count // -(-count // min(self.limit, count)))  # parts as even as can be
        return [slice(start, min(start + size, count)) for start in range(0, count, size)]

    def shrink(self) -> bool:
        """Make do with half as many clients at once; False where one is too much already."""
        if self.limit is None or self.limit <= 1 or self.mapping == "loop":
            return False
        self.limit = -(-self.limit // 2)
        self._graphs.forget()
        return True

    def _limit(self, count: int) -> int:
        """How many clients fit into what is free of a GPU, by what one forward and backward pass of one takes up."""
        device = self.data.device
        if self.mapping == "loop" or device.type != "cuda":
            return max(count, 1)
        torch.cuda.empty_cache()
        before, free = torch.cuda.memory_allocated(device), torch.cuda.mem_get_info(device)[0]
        torch.cuda.reset_peak_memory_stats(device)
        x = torch.zeros((self.batch_size, *self.model.input_shape), dtype=self.data.dtype, device=device)
        buffers = {name: value.clone() for name, value in self.model.buffers.items()}
        autograd(
            lambda params, batch: self._alone.forward(params, buffers, batch["x"])[0].sum(), self.model.params, {"x": x}
        )
        passes = torch.cuda.max_memory_allocated(device) - before
        state = sum(value.nbytes for value in self.model.params.values())
        return max(1, min(count, int(0.8 * free) // (PASSES * passes + STATES * state)))

    def _train(
        self, algorithm: Algorithm, shared: State, members: Members, round: int, lr: float, score: bool, count: int = 1
    ) -> Outcome:
        device, dtype = self.data.device, self.data.dtype
        clock, longest = Clock(device), int(members.steps.max())
        steps = max(longest, self.horizon) if self.mapping == "graph" else longest  # a recording needs one size for all
        course = self.course(algorithm, uneven=bool((members.steps != steps).any()))
        numbers, stacked = members.number.reshape(-1), members.number.dim() == 1
        members = members._replace(number=members.number.to(device), steps=members.steps.to(device))
        zero = torch.zeros((), dtype=torch.int64, device=device)
        fixed: State = {
            "members": members._asdict(),
            "shared": shared,
            "lr": torch.tensor(lr, dtype=dtype, device=device),
        }

        buffers = course.buffers(fixed, zero)
        draws = self.draws(algorithm, "client", round, numbers)
        draft = course.draft(fixed, buffers, zero, draws if stacked else tree.pick(draws, 0))
        if times := algorithm.redrafts(round):
            given = fixed | {"buffers": buffers}
            state = self._repeat(
                course.redraft, ("generation", algorithm), {"draft": draft, "step": zero}, given, times
            )
            draft = state["draft"]
        extra = course.extra(fixed, buffers, zero, draft)
        clock.lap("generation")

        plan = self._plan(algorithm, round, numbers, steps, extra, stacked)
        fixed |= {"extra": extra.groups, "stock": self.data.stock}
        state = course.start(fixed, buffers, zero)
        for first, times, part, staged in self._parts(plan, longest):
            given = fixed | {"plan": part, "staged": staged, "first": zero + first}
            state = self._repeat(course.advance, ("training", algorithm, course.uneven), state, given, times)
        length = self.optimiser.length(members.steps, lr).to(dtype)
        done = course.finish(state, fixed, Effort(members.steps, torch.full_like(members.weight, lr), length))
        loss = state["loss"] / members.steps
        if len(numbers) > count:
            done, loss = Finish(**tree.pick(done._asdict(), slice(count))), loss[:count]
        total = summed(done.payload, done.sound) if stacked else one_alone(done.payload)
        clock.lap("training")
        hits = None
        if score:
            data, each = self.data, course.each
            hits = evaluate.hits(self.model, self.task, data, done.local, data.test_x, data.test_y, each)
        clock.lap("evaluation")
        exhibit = tree.pick(extra.exhibit, 0) if stacked else extra.exhibit
        return Outcome(
            *(done.kept, total, done.sound, done.keepable, loss, done.distance, hits, exhibit, clock.seconds)
        )

    def _plan(
        self, algorithm: Algorithm, round: int, numbers: Tensor, steps: int, extra: Extra, stacked: bool
    ) -> State:
        """Everything that the steps of a round are served, laid out beforehand; the step axis leads."""
        own, there = self.data.plan(round, numbers, steps, self.batch_size), numbers.to(self.data.device)
        served = {}
        for group, part in extra.groups.items():
            sizes = torch.full_like(numbers, next(iter(part.values())).shape[int(stacked)])
            length = steps * self.batch_size
            index = streams.windows(self.data.seed, f"extra/{group}", round, there, sizes, length)
            served[group] = index.reshape(len(numbers), steps, self.batch_size)
        plan = {"picks": own.picks, "served": served, "drawn": self.draws(algorithm, "step", round, numbers, steps)}
        plan |= {} if own.moves is None else {"moves": own.moves}
        return tree.apply(lambda value: value.transpose(0, 1) if stacked else value[0], plan)

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


def _one_after_another(done: list[Outcome]) -> Outcome:
    """The outcomes of clients that were trained alone, as that of a cohort."""
    nobody = not any(one.sound for one in done)  # then what is not finite is summed, and found to be so
    ones = [
        one._replace(
            kept=tree.stack([one.kept]),
            total=one.total if one.sound or nobody else {},
            hits=None if one.hits is None else one.hits[None],
            **{name: getattr(one, name)[None] for name in ("sound", "keepable", "loss", "distance")},
        )
        for one in done
    ]
    return side_by_side(ones)


def side_by_side(done: Sequence[Outcome]) -> Outcome:
    """The outcomes of parts of a cohort, as that of the whole."""
    if len(done) == 1:
        return done[0]
    hits = [one.hits for one in done if one.hits is not None]
    together = {
        name: torch.cat([getattr(one, name) for one in done]) for name in ("sound", "keepable", "loss", "distance")
    }
    return Outcome(
        kept=tree.apply(lambda *parts: torch.cat(parts), *(one.kept for one in done)),
        total=joined([one.total for one in done if one.total]),
        hits=torch.cat(hits) if hits else None,
        exhibit=done[0].exhibit,
        seconds=lambda: {part: sum(one.seconds()[part] for one in done) for part in done[0].seconds()},
        **together,
    )
