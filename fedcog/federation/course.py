"""A round of a cohort as functions of tensors: what is done once, and what is repeated step by step.

Nothing here knows a round's numbers but through its arguments, so that a step may be recorded once and played back.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import unwrap_if_dead  # what a gradient left in the running statistics is still wrapped
from torch.func import grad_and_value, vmap

from fedcog import tree
from fedcog.algorithms import Algorithm, Batch, Effort, Extra, Gradient, Loss, Site
from fedcog.data.federated import FederatedData
from fedcog.federation.payloads import finite
from fedcog.models import Model
from fedcog.optimiser import Motion, Optimiser, clip
from fedcog.task import Task
from fedcog.tree import Params, State

Each = Callable[[Callable[..., Any]], Callable[..., Any]]


class Members(NamedTuple):
    """The clients of a cohort: everything that differs between them, with a leading client axis."""

    number: Tensor  # who they are, in all streams
    own: State
    weight: Tensor
    counts: Tensor
    sizes: Tensor
    steps: Tensor

    def some(self, rows: Tensor) -> "Members":
        """Some of them, in this order; `rows` lie in host memory, as numbers and steps do."""
        there = rows.to(self.weight.device)
        own = tree.pick(self.own, there)
        return Members(
            self.number[rows], own, self.weight[there], self.counts[there], self.sizes[there], self.steps[rows]
        )

    def one(self, row: int) -> "Members":
        """One of them alone, with no client axis; its state lies in memory as if it had never been in a stack."""
        own = tree.apply(torch.clone, tree.pick(self.own, row))
        return Members(self.number[row], own, self.weight[row], self.counts[row], self.sizes[row], self.steps[row])


class Finish(NamedTuple):
    """What a client's round comes to."""

    kept: State
    payload: State
    local: Params
    distance: Tensor
    sound: Tensor
    keepable: Tensor


class Course(NamedTuple):
    """One client's round as an algorithm has it, mapped over the members by `each`.

    `fixed` is what does not change in a round: the members, what they were sent ("shared"), the learning rate ("lr"),
    the round, and for training all steps' batches. `uneven` says that some members may be done before others, `apart`
    that each was sent something of its own: members of several federations are trained at once, and may then have a
    learning rate each.
    """

    model: Model
    task: Task
    data: FederatedData
    optimiser: Optimiser
    batch_size: int
    grad_clip: float
    algorithm: Algorithm
    each: Each
    gradient: Gradient
    uneven: bool
    apart: bool = False

    def over(self, function: Callable[..., Any], fixed: State, *mapped: Any) -> Any:
        """`function(member, fixed, ...)` of every member."""
        members = Members(**fixed["members"])
        if not self.apart:
            return self.each(lambda member, *rest: function(member, fixed, *rest))(members, *mapped)

        theirs = {name: fixed[name] for name in ("shared", "lr") if name == "shared" or fixed[name].dim()}

        def own(member: Members, theirs: State, *rest: Any) -> Any:
            return function(member, fixed | theirs, *rest)

        return self.each(own)(members, theirs, *mapped)

    def usual(self, hook: str) -> bool:
        """Does the algorithm leave a hook as it is? Mapping over members what does nothing takes a millisecond."""
        return getattr(type(self.algorithm), hook) is getattr(Algorithm, hook)

    def site(self, member: Members, fixed: State, buffers: Params, step: Tensor) -> Site:
        """What a member has in hand at a step."""
        return Site(
            model=self.model,
            task=self.task,
            shared=fixed["shared"],
            own=member.own,
            buffers=buffers,
            weight=member.weight,
            counts=member.counts,
            sizes=member.sizes,
            round=fixed["round"],
            step=step,
            steps=member.steps,
            lr=fixed["lr"],
            batch_size=self.batch_size,
            gradient=self.gradient,
        )

    def buffers(self, fixed: State, step: Tensor) -> Params:
        """The running statistics that the members start from, to be written to."""

        def begin(member: Members, fixed: State) -> Params:
            return self.algorithm.client_buffers(self.site(member, fixed, fixed["shared"]["buffers"], step))

        return tree.apply(torch.clone, self.over(begin, fixed))

    def draft(self, fixed: State, buffers: Params, step: Tensor, draws: State) -> State:
        """What the members' extra data is made of, as it begins."""
        if self.usual("draft"):
            return draws

        def begin(member: Members, fixed: State, buffers: Params, draws: State) -> State:
            return self.algorithm.draft(self.site(member, fixed, buffers, step), draws)

        drafts: State = self.over(begin, fixed, buffers, draws)
        return drafts

    def redraft(self, state: State, fixed: State) -> State:
        """The members' drafts {"draft"}, improved once; "step" goes on."""

        def improve(member: Members, fixed: State, buffers: Params, draft: State) -> State:
            return self.algorithm.redraft(draft, self.site(member, fixed, buffers, state["step"]))

        draft = self.over(improve, fixed, fixed["buffers"], state["draft"])
        return {"draft": draft, "step": state["step"] + 1}

    def extra(self, fixed: State, buffers: Params, step: Tensor, draft: State) -> Extra:
        """The members' extra data."""
        if self.usual("extra_data"):
            return Extra({}, {})

        def end(member: Members, fixed: State, buffers: Params, draft: State) -> Extra:
            return self.algorithm.extra_data(self.site(member, fixed, buffers, step), draft)

        extra: Extra = self.over(end, fixed, buffers, draft)
        return extra

    def start(self, fixed: State, buffers: Params, step: Tensor) -> State:
        """All that training moves, as it begins."""

        def begin(member: Members, fixed: State, buffers: Params) -> Params:
            return self.algorithm.client_start(self.site(member, fixed, buffers, step))

        params: Params = self.over(begin, fixed, buffers)
        motion = self.optimiser.start(params)._replace(step=step)
        loss = torch.zeros_like(fixed["members"]["weight"])
        return {"params": params, "buffers": buffers, "loss": loss} | motion._asdict()

    def advance(self, state: State, fixed: State) -> State:
        """One local step of all members."""
        step, params, motion = state["step"], state["params"], Motion(state["first"], state["second"], state["step"])
        buffers = tree.apply(torch.clone, state["buffers"])  # some networks write over them
        batch = self.batch(fixed, step)

        def slope(
            member: Members, fixed: State, params: Params, buffers: Params, batch: Batch
        ) -> tuple[Params, Tensor, Params]:
            here = self.site(member, fixed, buffers, step)

            def loss(params: Params, batch: Batch, track: bool = True) -> Tensor:
                return self.algorithm.local_loss(params, batch, here if track else here.still)

            grads, value = self.algorithm.local_grad(loss, params, batch, here)
            return (
                (clip(grads, self.grad_clip) if self.grad_clip else grads),
                value,
                tree.apply(unwrap_if_dead, here.buffers),
            )

        def settle(
            member: Members, fixed: State, before: Params, after: Params, buffers: Params, batch: Batch
        ) -> Params:
            return self.algorithm.after_step(before, after, batch, self.site(member, fixed, buffers, step))

        grads, value, buffers = self.over(slope, fixed, params, buffers, batch)
        after, moved = self.optimiser.step(params, grads, motion, fixed["lr"])
        if not self.usual("after_step"):
            after = self.over(settle, fixed, params, after, buffers, batch)
        new = {"params": {name: after[name] for name in params}, "buffers": buffers, "loss": state["loss"] + value}
        new |= {"first": moved.first, "second": moved.second}
        if self.uneven:
            busy = step < fixed["members"]["steps"]
            new = tree.apply(lambda one, other: torch.where(_like(busy, one), one, other), new, state)
        return new | {"step": moved.step}

    def batch(self, fixed: State, step: Tensor) -> Batch:
        """What the members are served at a step: real examples, extra ones by group, and random tensors."""
        now = (step - fixed["first"]).reshape(1)  # the plan at hand may begin with a later step
        plan: State = tree.apply(lambda value: value.index_select(0, now)[0], fixed["plan"])
        stock = fixed["stock"] | fixed["staged"]
        batch: Batch = self.data.examples(plan["picks"], plan.get("moves"), stock)
        for group, index in plan["served"].items():
            batch[group] = self.each(tree.pick)(fixed["extra"][group], index)
        return batch | {"draws": plan["drawn"]}

    def finish(self, state: State, fixed: State, effort: Effort) -> Finish:
        """What the members keep and send, the models they would use, and whether all of it is finite."""

        def end(member: Members, fixed: State, params: Params, buffers: Params, effort: Effort) -> Finish:
            here = self.site(member, fixed, buffers, state["step"])
            kept, payload = self.algorithm.client_update(params, here, effort)
            distance = tree.norm(tree.change(here.shared["params"], params))
            local = self.algorithm.client_model(params, here)
            return Finish(kept, payload, local, distance, finite(payload), finite(kept))

        found: Finish = self.over(end, fixed, state["params"], state["buffers"], effort)
        return found


def _like(busy: Tensor, value: Tensor) -> Tensor:
    return busy.reshape(-1, *[1] * (value.dim() - 1))


def together(function: Callable[..., Any]) -> Callable[..., Any]:
    """The mapping over members that are trained at once."""
    return vmap(function)


def alone(function: Callable[..., Any]) -> Callable[..., Any]:
    """The mapping over one client with no client axis: none at all."""
    return function


def autograd(loss: Loss, params: Params, batch: Batch, track: bool = True) -> tuple[Params, Tensor]:
    """Gradient and loss by plain autograd: the fastest way for one client."""
    leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
    with torch.enable_grad():
        value = loss(leaves, batch) if track else loss(leaves, batch, track=False)
    grads = torch.autograd.grad(value, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, grads, strict=True)), value.detach()


def functional(loss: Loss, params: Params, batch: Batch, track: bool = True) -> tuple[Params, Tensor]:
    """Gradient and loss as a function transform, which vmap can map over clients."""
    grads, value = grad_and_value(loss if track else lambda p, b: loss(p, b, track=False))(params, batch)
    return grads, value
