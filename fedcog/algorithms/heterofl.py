"""HeteroFL (Diao et al., ICLR 2021): clients whose networks are as wide as their devices bear."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedcog import tree
from fedcog.algorithms.base import Batch, Effort, Site
from fedcog.algorithms.wrapper import Wrapper
from fedcog.models import Model
from fedcog.settings import ConfigError, setting
from fedcog.tree import Params, State


@dataclass(frozen=True)
class HeteroFL(Wrapper):
    """Any algorithm, with clients that have of every hidden layer the first channels alone, the share `width` of them.

    Which share is for each kind of device to say (`--devices`). Here narrow networks are wide ones with zeros in them,
    which computes the same. A number's new value is the mean over the clients that have it, and what nobody has stays
    as it was: beside its sums each client sends its weight wherever it has nothing, and the server needs no more than
    the sum of both. The published method also rescales activations and masks the logits of absent classes; this one
    does not.
    """

    local: ClassVar[tuple[str, ...]] = ("width",)
    needs_head: ClassVar[bool] = True

    width: float = setting(1.0, "share of every hidden layer's channels that a client has", "> 0", "<= 1")

    def __post_init__(self) -> None:
        """Refuse what keeps or sends more by number than its change."""
        if self.inner.whole:
            raise ConfigError(
                [
                    "heterofl goes around algorithms whose clients send changes of the model and nothing else of its "
                    "size: not around scaffold, feddyn, fedgen or vhl. Choose another."
                ]
            )

    @property
    def scales(self) -> dict[str, float]:  # type: ignore[override]
        """Inner's, and of the weights where nothing is."""
        return self.inner.scales | {"lacks": 1.0}

    def unpack(self, shared: State, draws: State, model: Model) -> State:
        """Inner's, of what a client of this width has; beside it 1 or 0 by number."""
        held = model.held(self.width)
        return self.inner.unpack(_cut(shared, held), draws, model) | {"held": held}

    def after_step(self, before: Params, after: Params, batch: Batch, site: Site) -> Params:
        """Inner's; what is not there does not move."""
        return _cut(self.inner.after_step(before, after, batch, site), site.shared["held"])

    def client_update(self, params: Params, site: Site, effort: Effort) -> tuple[State, State]:
        """Inner's, and the client's weight wherever it has nothing."""
        own, payload = self.inner.client_update(params, site, effort)
        held = site.shared["held"]
        lacks = {name: site.weight * (1 - mask) for name, mask in held.items()}
        return own, payload | _cut({"buffers": payload["buffers"]}, held) | {"lacks": lacks}

    def server_update(self, server: State, total: State, draws: State) -> State:
        """Inner's, of sums as if all had sent what those sent on average who have it."""
        weight, least = total["weight"], 1e-5 * total["weight"]  # rounding leaves less than that of nothing

        def fair(name: str, value: Tensor) -> Tensor:
            if name not in total["lacks"]:
                return value
            there = weight - total["lacks"][name]
            return torch.where(there > least, value * (weight / there.clamp(min=least)), 0)

        rest = {key: value for key, value in total.items() if key != "lacks"}
        sums = {key: {name: fair(name, value) for name, value in total[key].items()} for key in ("delta", "buffers")}
        return self.inner.server_update(server, rest | sums, draws)


def _cut(state: State, held: Params) -> State:
    """A state with zeros wherever there is nothing, in all its models: those that ride along as in the first."""
    flat = tree.flatten(state)
    for path, value in flat.items():
        mask = held.get(path.rpartition("::")[2].rpartition("..")[2])
        if mask is not None and mask.shape == value.shape:
            flat[path] = value * mask
    return tree.filled(state, flat)
