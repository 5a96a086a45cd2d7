"""What an algorithm is: its difference from FedAvg, written for one client with no client axis."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, final

import torch
from torch import Tensor

from fedcog import tree
from fedcog.models import Model
from fedcog.task import Task
from fedcog.tree import Params, State

Batch = dict[str, Any]
"""One step's examples: "x", "y", and under its own name a dict of the same kind for whatever extra_data added."""

Loss = Callable[[Params, Batch], Tensor]


class Draw(NamedTuple):
    """Standard normal numbers that an algorithm asks for, one tensor a client and round."""

    shape: tuple[int, ...]


class Extra(NamedTuple):
    """What a client has beside its real examples: more examples by group, and what a report should show of them."""

    groups: dict[str, Batch]
    exhibit: Params


class Effort(NamedTuple):
    """How much a client trained: steps, learning rate, and the sum of effective step sizes, momentum included."""

    steps: Tensor
    lr: Tensor
    length: Tensor


@dataclass(frozen=True)
class Site:
    """What one client has in hand during a round. Numbers are 0-d tensors."""

    model: Model
    task: Task
    shared: State  # what the server sent
    own: State  # what this client kept
    buffers: Params  # running statistics of the model being trained
    weight: Tensor  # this client's weight in the sum, in (0, 1]
    counts: Tensor  # its examples of each class
    step: Tensor
    steps: Tensor
    lr: Tensor
    gradient: Callable[[Loss, Params, Batch], tuple[Params, Tensor]]  # d loss / d params, and the loss

    def logits(self, params: Params, x: Tensor, track: bool = True) -> Tensor:
        """The outputs while training; only with `track` do running statistics move."""
        buffers = self.buffers if track else {name: value.clone() for name, value in self.buffers.items()}
        return self.model.logits(params, buffers, x)


@dataclass(frozen=True)
class Algorithm:
    """FedAvg (McMahan et al., AISTATS 2017). Every other algorithm is a few overridden hooks.

    Hooks are pure: randomness is an argument, nothing is written in place, and none knows of other clients.
    """

    uplink: ClassVar[Literal["sum", "each"]] = "sum"

    def __init_subclass__(cls) -> None:
        """Refuse to lose a rule: `local_loss` is composed of hooks so that wrappers can scale its data term."""
        if "local_loss" in cls.__dict__:
            raise TypeError(
                f"{cls.__name__} overrides local_loss. Override data_loss (what is learnt from examples) or penalty "
                "(what is added to it) instead: only then does FedCOG around it keep both."
            )

    # The server.

    def server_init(self, params: Params, buffers: Params, population: int) -> State:
        """What the server keeps from round to round; `population` is the number of clients in all."""
        return {"params": params, "buffers": buffers}

    def broadcast(self, server: State) -> State:
        """What every client of a round is sent."""
        return {"params": server["params"], "buffers": server["buffers"]}

    def server_update(self, server: State, total: State) -> State:
        """The server after a round, from the sum of the payloads and nothing else."""
        mean = tree.apply(lambda value: value / total["weight"], {key: total[key] for key in ("delta", "buffers")})
        return server | {
            "params": tree.add(server["params"], mean["delta"]),
            "buffers": tree.add(server["buffers"], mean["buffers"]),
        }

    # One client.

    def draws(self, round: int, model: Model) -> dict[str, Draw]:
        """The random tensors wanted in a round; rounds count from 0."""
        return {}

    def client_init(self, shared: State) -> State:
        """What a client keeps before it has ever taken part."""
        return {}

    def client_start(self, site: Site) -> Params:
        """Where local training starts."""
        params: Params = site.shared["params"]
        return params

    def extra_data(self, site: Site, draws: Params) -> Extra:
        """More examples by group; each step is served a batch of every group beside its real one."""
        return Extra({}, {})

    def outputs(self, params: Params, batch: Batch, site: Site) -> State:
        """The forward passes of a step, shared by the terms of its loss."""
        return {"logits": site.logits(params, batch["x"])}

    def data_loss(self, outputs: State, batch: Batch, site: Site) -> Tensor:
        """What is learnt from examples."""
        return site.task.loss(outputs["logits"], batch["y"]).mean()

    def penalty(self, params: Params, outputs: State, batch: Batch, site: Site) -> Tensor:
        """What is added to it: regularisers, which no wrapper rescales."""
        return torch.zeros((), dtype=site.lr.dtype, device=site.lr.device)

    @final
    def local_loss(self, params: Params, batch: Batch, site: Site) -> Tensor:
        """The loss of one step."""
        outputs = self.outputs(params, batch, site)
        return self.data_loss(outputs, batch, site) + self.penalty(params, outputs, batch, site)

    def local_grad(self, loss: Loss, params: Params, batch: Batch, site: Site) -> tuple[Params, Tensor]:
        """The direction of one step, and the loss. `loss` is given: under a wrapper it is not this object's own."""
        return site.gradient(loss, params, batch)

    def after_step(self, before: Params, after: Params, batch: Batch, site: Site) -> Params:
        """The parameters a step ends with: for frozen parts, masks and projections."""
        return after

    def client_update(self, params: Params, site: Site, effort: Effort) -> tuple[State, State]:
        """(what the client keeps, what it sends): its change times its weight, and the weight."""
        change = {
            "delta": tree.subtract(params, site.shared["params"]),
            "buffers": tree.subtract(site.buffers, site.shared["buffers"]),
        }
        payload = tree.apply(lambda value: site.weight * value, change)
        return site.own, payload | {"weight": site.weight, "count": torch.ones_like(site.weight)}

    def client_model(self, params: Params, site: Site) -> Params:
        """The weights this client would use itself, parameters and buffers together."""
        return params | site.buffers


@dataclass(frozen=True)
class Wrapper(Algorithm):
    """An algorithm around another: every hook defers to `inner`."""

    inner: Algorithm = field(default_factory=Algorithm)

    def server_init(self, params: Params, buffers: Params, population: int) -> State:
        """Inner's."""
        return self.inner.server_init(params, buffers, population)

    def broadcast(self, server: State) -> State:
        """Inner's."""
        return self.inner.broadcast(server)

    def server_update(self, server: State, total: State) -> State:
        """Inner's."""
        return self.inner.server_update(server, total)

    def draws(self, round: int, model: Model) -> dict[str, Draw]:
        """Inner's."""
        return self.inner.draws(round, model)

    def client_init(self, shared: State) -> State:
        """Inner's."""
        return self.inner.client_init(shared)

    def client_start(self, site: Site) -> Params:
        """Inner's."""
        return self.inner.client_start(site)

    def extra_data(self, site: Site, draws: Params) -> Extra:
        """Inner's."""
        return self.inner.extra_data(site, draws)

    def outputs(self, params: Params, batch: Batch, site: Site) -> State:
        """Inner's."""
        return self.inner.outputs(params, batch, site)

    def data_loss(self, outputs: State, batch: Batch, site: Site) -> Tensor:
        """Inner's."""
        return self.inner.data_loss(outputs, batch, site)

    def penalty(self, params: Params, outputs: State, batch: Batch, site: Site) -> Tensor:
        """Inner's."""
        return self.inner.penalty(params, outputs, batch, site)

    def local_grad(self, loss: Loss, params: Params, batch: Batch, site: Site) -> tuple[Params, Tensor]:
        """Inner's, of the loss that is given."""
        return self.inner.local_grad(loss, params, batch, site)

    def after_step(self, before: Params, after: Params, batch: Batch, site: Site) -> Params:
        """Inner's."""
        return self.inner.after_step(before, after, batch, site)

    def client_update(self, params: Params, site: Site, effort: Effort) -> tuple[State, State]:
        """Inner's."""
        return self.inner.client_update(params, site, effort)

    def client_model(self, params: Params, site: Site) -> Params:
        """Inner's."""
        return self.inner.client_model(params, site)
