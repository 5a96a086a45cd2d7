"""The one local-training loop: a cohort of clients at once (vmap) or one after another (loop), same result."""

import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from fedcog import streams, tree
from fedcog.algorithms import Algorithm, Batch, Effort, Extra, Gradient, Loss, Scope, Site
from fedcog.data.federated import FederatedData, Plan
from fedcog.federation import evaluate
from fedcog.federation.evaluate import Each
from fedcog.federation.payloads import finite, joined, one_alone, summed
from fedcog.federation.workers import Duty, Workers
from fedcog.models import Model, ModelError
from fedcog.optimiser import Motion, Optimiser, clip
from fedcog.task import Task
from fedcog.tree import Params, State

Mapping = Literal["loop", "vmap"]


class Members(NamedTuple):
    """The clients of a cohort: everything that differs between them, with a leading client axis."""

    number: Tensor  # who they are, in all streams
    own: State
    weight: Tensor
    counts: Tensor
    steps: Tensor

    def one(self, row: int) -> "Members":
        """One of them alone, with no client axis; its state lies in memory as if it had never been in a stack."""
        own = tree.apply(torch.clone, tree.pick(self.own, row))
        return Members(self.number[row], own, self.weight[row], self.counts[row], self.steps[row])


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
    seconds: dict[str, float]


class Cohort:
    """The clients that train together on one device, and how they train."""

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
    ) -> None:
        self.model, self.task, self.data, self.optimiser = model, task, data, optimiser
        self.batch_size, self.grad_clip, self.mapping, self.workers = batch_size, grad_clip, mapping, workers
        self._crew: tuple[Algorithm, Workers] | None = None

    @torch.no_grad()
    def train(
        self, algorithm: Algorithm, shared: State, members: Members, round: int, lr: float, score: bool = True
    ) -> Outcome:
        """One round of all members; with `score`, their local models are also tried on the test set."""
        if self.mapping == "loop" and self.workers > 1 and len(members.number) > 1:
            return self._side_by_side(algorithm, shared, members, round, lr, score)
        shared = algorithm.unpack(shared, self.common(algorithm, "federation"), self.model)
        if self.mapping == "vmap":
            try:
                return self._train(vmap, _functional, algorithm, shared, members, round, lr, score)
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
        ones = [members.one(row) for row in range(len(members.number))]
        done = [self._train(_alone, autograd, algorithm, shared, one, round, lr, score) for one in ones]
        return _together(done)

    def _side_by_side(
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
                    return self._train(_alone, autograd, algorithm, shared, one, *rest)._asdict()

                return train

            self._crew = algorithm, Workers(count, max(1, torch.get_num_threads() // count), begin)
        known = {name: value for name, value in members._asdict().items() if name != "own"}
        common = {"shared": shared, "members": known, "round": round, "lr": lr, "score": score}
        items = [{"row": row, "own": tree.pick(members.own, row)} for row in range(len(members.number))]
        order = members.steps.argsort(descending=True, stable=True).tolist()
        done = _together([Outcome(**one) for one in self._crew[1].map(common, items, order)])
        share = (time.perf_counter() - began) / sum(done.seconds.values())
        return done._replace(seconds={part: share * seconds for part, seconds in done.seconds.items()})

    def close(self) -> None:
        """End the worker processes, if there are any; the next round would start others."""
        if self._crew is not None:
            self._crew[1].close()
        self._crew = None

    def draws(self, algorithm: Algorithm, scope: Scope, round: int, numbers: Tensor, steps: int = 1) -> State:
        """The random tensors of one scope that the algorithm asks for in a round, one for each of `numbers`."""
        drawn: State = {}
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
            drawn[name] = source(self.data.seed, purpose, round, numbers, whole).to(self.data.dtype)
        return drawn

    def common(self, algorithm: Algorithm, scope: Literal["federation", "server"], round: int = 0) -> State:
        """The random tensors that there is one of: for the whole federation, or for the server in a round."""
        nobody = torch.zeros(1, dtype=torch.int64, device=self.data.device)
        return tree.pick(self.draws(algorithm, scope, round, nobody), 0)

    def _train(
        self,
        each: Each,
        gradient: Gradient,
        algorithm: Algorithm,
        shared: State,
        members: Members,
        round: int,
        lr: float,
        score: bool,
    ) -> Outcome:
        clock = _Clock(self.data.device)
        site = self.sites(gradient, shared, lr)
        longest, stacked = int(members.steps.max()), members.number.dim() == 1
        ticks = torch.arange(longest + 1, device=self.data.device)
        numbers = members.number.reshape(-1)
        draws = self.draws(algorithm, "client", round, numbers)
        draws = draws if stacked else tree.pick(draws, 0)
        buffers: Params = each(lambda m: algorithm.client_buffers(site(m, shared["buffers"], ticks[0])))(members)
        buffers = tree.apply(torch.clone, buffers)  # they are written to
        extra: Extra = each(lambda m, b, d: algorithm.extra_data(site(m, b, ticks[0]), d))(members, buffers, draws)
        clock.lap("generation")

        uneven = bool((members.steps != longest).any())
        plan = self._plan(members, round, longest)
        served = {group: self._windows(group, part, members, round, longest) for group, part in extra.groups.items()}
        drawn = tree.apply(
            lambda value: _by_step(value, members), self.draws(algorithm, "step", round, numbers, longest)
        )
        params: Params = each(lambda m, b: algorithm.client_start(site(m, b, ticks[0])))(members, buffers)
        motion = self.optimiser.start(params)
        loss = torch.zeros_like(members.weight)

        def slope(params: Params, buffers: Params, batch: Batch, member: Members) -> tuple[Params, Tensor]:
            here = site(member, buffers, ticks[step])

            def loss(params: Params, batch: Batch, track: bool = True) -> Tensor:
                return algorithm.local_loss(params, batch, here if track else here.still)

            grads, value = algorithm.local_grad(loss, params, batch, here)
            return (clip(grads, self.grad_clip) if self.grad_clip else grads), value

        def settle(before: Params, after: Params, buffers: Params, batch: Batch, member: Members) -> Params:
            return algorithm.after_step(before, after, batch, site(member, buffers, ticks[step]))

        for step in range(longest):
            batch: Batch = self.data.examples(plan.picks[step], None if plan.moves is None else plan.moves[step])
            for group, index in served.items():
                batch[group] = each(tree.pick)(extra.groups[group], index[step])
            batch["draws"] = tree.pick(drawn, step)
            statistics = tree.apply(torch.clone, buffers) if uneven else buffers
            grads, value = each(slope)(params, buffers, batch, members)
            after, next_motion = self.optimiser.step(params, grads, motion, lr)
            after = each(settle)(params, after, buffers, batch, members)
            after = {name: after[name] for name in params}  # momentum goes by their order
            if uneven:
                busy = step < members.steps
                after, next_motion = _where(busy, after, params), _keep_motion(busy, next_motion, motion)
                buffers, value = _where(busy, buffers, statistics), torch.where(busy, value, 0)
            params, motion, loss = after, next_motion, loss + value
        length = self.optimiser.length(members.steps, lr).to(self.data.dtype)
        effort = Effort(members.steps, torch.full_like(members.weight, lr), length)

        def finish(params: Params, buffers: Params, member: Members, effort: Effort) -> tuple[Any, ...]:
            here = site(member, buffers, ticks[longest])
            kept, payload = algorithm.client_update(params, here, effort)
            distance = tree.norm(tree.change(shared["params"], params))
            return kept, payload, algorithm.client_model(params, here), distance, finite(payload), finite(kept)

        kept, payload, local, distance, sound, keepable = each(finish)(params, buffers, members, effort)
        total = summed(payload, sound) if stacked else one_alone(payload)
        clock.lap("training")
        hits = None
        if score:
            data = self.data
            hits = evaluate.hits(self.model, self.task, data, local, data.test_x, data.test_y, each)
        clock.lap("evaluation")
        exhibit = tree.pick(extra.exhibit, 0) if stacked else extra.exhibit
        return Outcome(kept, total, sound, keepable, loss / members.steps, distance, hits, exhibit, clock.seconds)

    def sites(self, gradient: Gradient, shared: State, lr: float) -> Callable[[Members, Params, Tensor], Site]:
        """What a member has in hand in a round, as a function of the member, its running statistics and the step."""
        rate = torch.tensor(lr, dtype=self.data.dtype, device=self.data.device)

        def site(member: Members, buffers: Params, step: Tensor) -> Site:
            return Site(
                model=self.model,
                task=self.task,
                shared=shared,
                own=member.own,
                buffers=buffers,
                weight=member.weight,
                counts=member.counts,
                step=step,
                steps=member.steps,
                lr=rate,
                batch_size=self.batch_size,
                gradient=gradient,
            )

        return site

    def _plan(self, members: Members, round: int, steps: int) -> Plan:
        """The members' batches, step by step: the step axis leads."""
        plan = self.data.plan(round, members.number.reshape(-1), steps, self.batch_size)
        moves = None if plan.moves is None else _by_step(plan.moves, members)
        return Plan(_by_step(plan.picks, members), moves)

    def _windows(self, group: str, part: Batch, members: Members, round: int, steps: int) -> Tensor:
        """Which of a group's extra examples each step is served; the step axis leads."""
        numbers, stacked = members.number.reshape(-1), members.number.dim() == 1
        size = len(next(iter(part.values()))[0] if stacked else next(iter(part.values())))
        sizes = torch.full_like(numbers, size)
        index = streams.windows(self.data.seed, f"extra/{group}", round, numbers, sizes, steps * self.batch_size)
        return _by_step(index.reshape(len(numbers), steps, self.batch_size), members)


def _together(done: Sequence[Outcome]) -> Outcome:
    """The outcomes of clients that trained alone, as that of a cohort."""
    hits = [outcome.hits for outcome in done if outcome.hits is not None]
    return Outcome(
        kept=tree.stack([outcome.kept for outcome in done]),
        total=joined([outcome.total for outcome in done if outcome.sound]),
        sound=torch.stack([outcome.sound for outcome in done]),
        keepable=torch.stack([outcome.keepable for outcome in done]),
        loss=torch.stack([outcome.loss for outcome in done]),
        distance=torch.stack([outcome.distance for outcome in done]),
        hits=torch.stack(hits) if hits else None,
        exhibit=done[0].exhibit,
        seconds={part: sum(outcome.seconds[part] for outcome in done) for part in done[0].seconds},
    )


class _Clock:
    """Seconds by part, read off after the device has finished."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.seconds = device, dict[str, float]()
        self.last = time.perf_counter()

    def lap(self, part: str) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        self.seconds[part], self.last = now - self.last, now


def _by_step(plan: Tensor, members: Members) -> Tensor:
    """A plan [client, step, ...] with the step leading, and no client axis for one alone."""
    return plan.transpose(0, 1) if members.number.dim() else plan[0]


def _alone(function: Callable[..., Any]) -> Callable[..., Any]:
    """The mapping over one client with no client axis: none at all."""
    return function


def autograd(loss: Loss, params: Params, batch: Batch, track: bool = True) -> tuple[Params, Tensor]:
    """Gradient and loss by plain autograd: the fastest way for one client."""
    leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
    with torch.enable_grad():
        value = loss(leaves, batch) if track else loss(leaves, batch, track=False)
    grads = torch.autograd.grad(value, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, grads, strict=True)), value.detach()


def _functional(loss: Loss, params: Params, batch: Batch, track: bool = True) -> tuple[Params, Tensor]:
    """Gradient and loss as a function transform, which vmap can map over clients."""
    grads, value = grad_and_value(loss if track else lambda p, b: loss(p, b, track=False))(params, batch)
    return grads, value


def _where(busy: Tensor, after: Params, before: Params) -> Params:
    """`after` for the clients still at work, `before` for those that are done."""
    return {name: torch.where(_like(busy, value), value, before[name]) for name, value in after.items()}


def _keep_motion(busy: Tensor, after: Motion, before: Motion) -> Motion:
    first, second = (
        [torch.where(_like(busy, new), new, old) for new, old in zip(news, olds, strict=True)]
        for news, olds in ((after.first, before.first), (after.second, before.second))
    )
    return Motion(first, second, after.step)


def _like(busy: Tensor, value: Tensor) -> Tensor:
    return busy.reshape(-1, *[1] * (value.dim() - 1))
