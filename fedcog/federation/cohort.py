"""A cohort: clients trained together on one device, all at once (vmap) or one after another (loop), same result."""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fedcog import streams, tree
from fedcog.algorithms import Algorithm, Effort, Scope
from fedcog.data.federated import FederatedData
from fedcog.federation import evaluate
from fedcog.federation.clock import Clock
from fedcog.federation.course import Course, Members, alone, autograd, functional, together
from fedcog.federation.graphs import Graphs, in_turn
from fedcog.federation.payloads import joined, one_alone, summed
from fedcog.models import Model, ModelError
from fedcog.optimiser import Optimiser
from fedcog.task import Task
from fedcog.tree import Params, State

Mapping = Literal["loop", "vmap", "graph"]


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
    a CUDA graph and played back ("graph"). `horizon` is the largest number of steps any client may be asked for.
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
    ) -> None:
        self.model = model if mapping == "loop" else model.side_by_side
        self.task, self.data, self.optimiser = task, data, optimiser
        self.batch_size, self.grad_clip, self.mapping = batch_size, grad_clip, mapping
        self.horizon = 0
        self._repeat = Graphs().repeat if mapping == "graph" else in_turn

    @torch.no_grad()
    def train(
        self, algorithm: Algorithm, shared: State, members: Members, round: int, lr: float, score: bool = True
    ) -> Outcome:
        """One round of all members; with `score`, their local models are also tried on the test set."""
        shared = algorithm.unpack(shared, self.common(algorithm, "federation"), self.model)
        if self.mapping == "loop":
            ones = [members.one(row) for row in range(len(members.number))]
            return _one_after_another([self._train(algorithm, shared, one, round, lr, score) for one in ones])
        try:
            return self._train(algorithm, shared, members, round, lr, score)
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

    def _train(
        self, algorithm: Algorithm, shared: State, members: Members, round: int, lr: float, score: bool
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

        plan = self.data.plan(round, numbers, steps, self.batch_size)
        drawn = self.draws(algorithm, "step", round, numbers, steps)
        sizes = {group: next(iter(part.values())).shape[int(stacked)] for group, part in extra.groups.items()}

        def led(plan: Tensor) -> Tensor:
            """A plan [client, step, ...] with the step leading, and no client axis for one alone."""
            return plan.transpose(0, 1) if stacked else plan[0]

        fixed |= {
            "stock": self.data.stock,
            "picks": led(plan.picks),
            "moves": {} if plan.moves is None else {"all": led(plan.moves)},
            "extra": extra.groups,
            "served": {group: led(self._windows(group, size, numbers, round, steps)) for group, size in sizes.items()},
            "drawn": tree.apply(led, drawn),
        }
        state = course.start(fixed, buffers, zero)
        state = self._repeat(course.advance, ("training", algorithm, course.uneven), state, fixed, longest)
        length = self.optimiser.length(members.steps, lr).to(dtype)
        done = course.finish(state, fixed, Effort(members.steps, torch.full_like(members.weight, lr), length))
        total = summed(done.payload, done.sound) if stacked else one_alone(done.payload)
        clock.lap("training")
        hits = None
        if score:
            data, each = self.data, course.each
            hits = evaluate.hits(self.model, self.task, data, done.local, data.test_x, data.test_y, each)
        clock.lap("evaluation")
        exhibit = tree.pick(extra.exhibit, 0) if stacked else extra.exhibit
        loss = state["loss"] / members.steps
        return Outcome(
            *(done.kept, total, done.sound, done.keepable, loss, done.distance, hits, exhibit, clock.seconds)
        )

    def _windows(self, group: str, size: int, numbers: Tensor, round: int, steps: int) -> Tensor:
        """[client, step, place]: which of a group's extra examples each step is served."""
        sizes, length = torch.full_like(numbers, size), steps * self.batch_size
        index = streams.windows(self.data.seed, f"extra/{group}", round, numbers.to(self.data.device), sizes, length)
        return index.reshape(len(numbers), steps, self.batch_size)


def _one_after_another(done: list[Outcome]) -> Outcome:
    """The outcomes of clients that were trained alone, as that of a cohort."""
    return Outcome(
        kept=tree.stack([outcome.kept for outcome in done]),
        total=joined([outcome.total for outcome in done if outcome.sound]),
        sound=torch.stack([outcome.sound for outcome in done]),
        keepable=torch.stack([outcome.keepable for outcome in done]),
        loss=torch.stack([outcome.loss for outcome in done]),
        distance=torch.stack([outcome.distance for outcome in done]),
        hits=torch.stack([outcome.hits for outcome in done if outcome.hits is not None])
        if done[0].hits is not None
        else None,
        exhibit=done[0].exhibit,
        seconds=lambda: {part: sum(one.seconds()[part] for one in done) for part in done[0].seconds()},
    )
