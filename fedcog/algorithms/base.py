"""What an algorithm is: its difference from FedAvg, written for one client with no client axis."""

import dataclasses
import difflib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, final

import torch
from torch import Tensor

from fedcog import tree
from fedcog.fitness import ModelError
from fedcog.models import Model
from fedcog.task import Task
from fedcog.tree import Params, State

Batch = dict[str, Any]
"""One step's examples: "x", "y", under its own name a dict of the same kind for whatever extra_data added, and under
"draws" the random tensors of this step."""

Scope = Literal["step", "client", "federation", "server"]
Uplink = Literal["sum", "each"]


Loss = Callable[..., Tensor]
"""A loss of (params, batch); with track=False as a third argument running statistics do not move."""


class Gradient(Protocol):
    """d loss / d params, and the loss; without `track` running statistics do not move."""

    def __call__(self, loss: Loss, params: Params, batch: Batch, track: bool = True) -> tuple[Params, Tensor]:
        """(d loss / d params, loss) on a batch."""


class Draw(NamedTuple):
    """Random tensors that an algorithm asks for by name.

    A fresh one for every local step, one a client and round, one for the server each round, or one for the whole
    federation, the same at every client in every round. Of kind "examples" it is a batch of the client's own training
    examples, `shape` saying how many, each once before any comes twice.
    """

    shape: tuple[int, ...]
    scope: Scope = "client"
    kind: Literal["normal", "uniform", "examples"] = "normal"


class Extra(NamedTuple):
    """What a client has beside its real examples: more examples by group, and what a report should show of them."""

    groups: dict[str, Batch]
    exhibit: Params


class Effort(NamedTuple):
    """How much a client trained: steps, learning rate, and the sum of effective step sizes, momentum included."""

    steps: Tensor
    lr: Tensor
    length: Tensor


class Origin(NamedTuple):
    """What a federation starts from."""

    model: Model
    params: Params  # the network's, and what wrappers have added to them
    population: Tensor  # the number of clients in all
    draws: State  # of federation scope


@dataclass(frozen=True)
class Site:
    """What one client has in hand during a round. Numbers are 0-d tensors."""

    model: Model
    task: Task
    shared: State  # what the server sent, and what `unpack` made of it
    own: State  # what this client kept
    buffers: Params  # running statistics of the model being trained
    weight: Tensor  # this client's weight in the sum, in (0, 1]
    counts: Tensor  # its examples of each class
    sizes: Tensor  # its examples with no label, one, two, and so on
    round: Tensor  # from 0
    step: Tensor
    steps: Tensor
    lr: Tensor
    batch_size: int
    gradient: Gradient

    def logits(self, params: Params, x: Tensor) -> Tensor:
        """The outputs while training; running statistics move."""
        return self.model.forward(params, self.buffers, x)[0]

    def local(self, params: Params) -> Params:
        """The client's model as far as it travels, parameters and buffers together."""
        sent = self.shared["params"].keys() | self.shared["buffers"].keys()
        return {name: value for name, value in (params | self.buffers).items() if name in sent}

    @property
    def still(self) -> "Site":
        """The same, with running statistics that nobody will see move."""
        return dataclasses.replace(self, buffers={name: value.clone() for name, value in self.buffers.items()})


@dataclass(frozen=True)
class Algorithm:
    """FedAvg (McMahan et al., AISTATS 2017). Every other algorithm is a few overridden hooks.

    Hooks are pure: randomness is an argument, nothing is written in place, and none knows of other clients. Parameters
    may be more than the network's, under names no network can have: ".part.name" is a part of the same model,
    "ASIDE..name" belongs to another one that rides along, is trained like the first and clipped apart from it.
    """

    uplink: ClassVar[Uplink] = "sum"  # "each": the payload's "each" reaches the server client by client, not as a sum
    needs_head: ClassVar[bool] = False  # does it look at features, or at the last layer?
    optimises_inputs: ClassVar[bool] = False  # does it follow gradients of networks with respect to their inputs?
    personalises: ClassVar[bool] = False  # is the clients' own model what it is about?
    one_label: ClassVar[str] = ""  # why an example must have one label and no more, if it must
    local: ClassVar[tuple[str, ...]] = ()  # settings that may be other at clients of another kind of device
    whole: ClassVar[bool] = False  # does it go wrong where some clients have but a part of the model?
    needs_sgd: ClassVar[bool] = False  # does it take the way a client went for a sum of gradients?
    # What no number of a payload's part exceeds, by the part's name: secure aggregation has to know.
    scales: ClassVar[dict[str, float]] = {"delta": 64.0, "buffers": 4096.0, "weight": 1.0, "count": 1.0}

    def __init_subclass__(cls) -> None:
        """Refuse to lose a rule: `local_loss` is composed of hooks so that wrappers can scale its data term."""
        if "local_loss" in cls.__dict__:
            raise TypeError(
                f"{cls.__name__} overrides local_loss. Override data_loss (what is learnt from examples) or penalty "
                "(what is added to it) instead: only then does FedCOG around it keep both."
            )
        hooks = {name: value for name, value in vars(Algorithm).items() if inspect.isfunction(value) and name[0] != "_"}
        for name, value in cls.__dict__.items():
            if name[0] == "_" or not inspect.isfunction(value):
                continue
            if name not in hooks and (near := difflib.get_close_matches(name, hooks, n=1, cutoff=0.85)):
                raise TypeError(f"{cls.__name__}.{name} is no hook, so nobody would call it: did you mean {near[0]}?")
            wanted, given = (inspect.signature(one) for one in (hooks.get(name, value), value))
            try:
                given.bind(*wanted.parameters)
            except TypeError:
                raise TypeError(f"{cls.__name__}.{name} takes {given}, and is called with {wanted}.") from None

    def draws(self, round: int, model: Model, batch_size: int) -> dict[str, Draw]:
        """The random tensors wanted in a round; rounds count from 0."""
        return {}

    def stiffness(self) -> dict[str, float]:
        """The curvature that its penalties add, by the setting that decides it: too much, and steps overshoot."""
        return {}

    # The server.

    def server_init(self, origin: Origin) -> State:
        """What the server keeps from round to round. 0-d tensors under "readings" go into the record."""
        return {"params": origin.params, "buffers": origin.model.buffers}

    def broadcast(self, server: State) -> State:
        """What every client of a round is sent."""
        return {"params": server["params"], "buffers": server["buffers"]}

    def server_update(self, server: State, total: State, draws: State) -> State:
        """The server after a round, from the sum of the payloads and nothing else."""
        mean = self.mean(total)
        return server | {
            "params": tree.add(server["params"], mean["delta"]),
            "buffers": tree.add(server["buffers"], mean["buffers"]),
        }

    @staticmethod
    def mean(total: State) -> State:
        """The clients' mean change of parameters ("delta") and of buffers, by their weights."""
        changes = {key: total.get(key, {}) for key in ("delta", "buffers")}
        return tree.apply(lambda value: value / total["weight"], changes)

    def server_model(self, server: State) -> Params:
        """The weights the server would deploy, parameters and buffers together."""
        weights: Params = server["params"] | server["buffers"]
        return weights

    # One client.

    def unpack(self, shared: State, draws: State, model: Model) -> State:
        """What clients make of what they were sent, where it is the same at all: done once for a cohort."""
        return shared

    def client_init(self, shared: State) -> State:
        """What a client keeps before it has ever taken part."""
        return {}

    def client_start(self, site: Site) -> Params:
        """The parameters that local training starts from."""
        params: Params = site.shared["params"]
        return params

    def client_buffers(self, site: Site) -> Params:
        """The running statistics that local training starts from."""
        buffers: Params = site.shared["buffers"]
        return buffers

    def draft(self, site: Site, draws: State) -> State:
        """What extra data is made of, as it begins: the random tensors of client scope, and what is made of them."""
        return draws

    def redrafts(self, round: int) -> int:
        """How often a draft is improved in a round."""
        return 0

    def redraft(self, draft: State, site: Site) -> State:
        """The draft, improved once, in the same form; `site.step` counts from 0.

        A wrapper may have it called more often than `redrafts` says: leave the draft alone from that step on.
        """
        return draft

    def extra_data(self, site: Site, draft: State) -> Extra:
        """More examples by group; each step is served a batch of every group beside its real one."""
        return Extra({}, {})

    def outputs(self, params: Params, batch: Batch, site: Site) -> State:
        """The forward passes of a step, shared by the terms of its loss."""
        logits, features = site.model.forward(params, site.buffers, batch["x"])
        return {"logits": logits, "features": features}

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
        parts = {
            "data_loss": self.data_loss(outputs, batch, site),
            "penalty": self.penalty(params, outputs, batch, site),
        }
        for hook, part in parts.items():
            if part.dim():
                told = f"{type(self).__name__}.{hook} gave {list(part.shape)} numbers"
                raise ModelError(f"{told}, and a step's loss is one: take their mean, as in .mean().")
        return parts["data_loss"] + parts["penalty"]

    def local_grad(self, loss: Loss, params: Params, batch: Batch, site: Site) -> tuple[Params, Tensor]:
        """The direction of one step, and the loss. `loss` is given: under a wrapper it is not this object's own."""
        return site.gradient(loss, params, batch)

    def after_step(self, before: Params, after: Params, batch: Batch, site: Site) -> Params:
        """The parameters a step ends with: for frozen parts, masks and projections."""
        return after

    def client_update(self, params: Params, site: Site, effort: Effort) -> tuple[State, State]:
        """(what the client keeps, what it sends): its change times its weight, and the weight."""
        change = {
            "delta": tree.change(site.shared["params"], params),
            "buffers": tree.change(site.shared["buffers"], site.buffers),
        }
        payload = tree.apply(lambda value: site.weight * value, change)
        return site.own, payload | {"weight": site.weight, "count": torch.ones_like(site.weight)}

    def client_model(self, params: Params, site: Site) -> Params:
        """The weights this client would use itself, parameters and buffers together."""
        return params | site.buffers
