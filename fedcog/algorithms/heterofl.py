"""HeteroFL (Diao et al., ICLR 2021): clients train networks as wide as their devices allow."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedcog.algorithms.types import Batch, ClientContext, LocalWork
from fedcog.algorithms.wrapper import Wrapper, name_of
from fedcog.core import tree
from fedcog.core.settings import ConfigError, setting
from fedcog.core.tree import Params, State
from fedcog.models.functional import Model


@dataclass(frozen=True)
class HeteroFL(Wrapper):
    """Any algorithm, with clients that train the first `width` of every hidden layer's channels.

    Each device type sets its own width (`--devices`). Narrow networks are wide ones with zeros in
    them here, which computes the same. The new value of a weight is the mean over the clients that
    have it; a weight that no client has stays unchanged. Each client also sends its weight wherever
    it has nothing, so the server needs only sums. The published method also rescales activations
    and masks the logits of absent classes; this one does not.
    """

    per_device_settings: ClassVar[tuple[str, ...]] = ("width",)
    needs_features: ClassVar[bool] = True
    sends_coverage: ClassVar[bool] = True

    width: float = setting(
        1.0, "fraction of every hidden layer's channels that a client trains", "> 0", "<= 1"
    )

    def __post_init__(self) -> None:
        """Refuse inner algorithms that need the full model at every client."""
        super().__post_init__()
        for layer in reversed(self.inner.layers):
            if layer.needs_full_model:
                raise ConfigError(
                    [
                        f"heterofl goes around algorithms that work with parts of the model, and "
                        f"{name_of(layer)} needs all of it at every client: choose "
                        "another algorithm."
                    ]
                )

    @property
    def payload_bounds(self) -> dict[str, float]:  # type: ignore[override]
        """The inner bounds, and that of the weights where a client has nothing."""
        return self.inner.payload_bounds | {"lacks": 1.0}

    def unpack_broadcast(self, broadcast: State, draws: State, model: Model) -> State:
        """Zero the channels that a client of this width lacks, and add the mask.

        Returns:
            What the hooks see of the broadcast.
        """
        mask = model.width_mask(self.width)
        narrow = _apply_mask(broadcast, mask)
        return self.inner.unpack_broadcast(narrow, draws, model) | {"held": mask}

    def after_step(
        self, before: Params, after: Params, batch: Batch, client: ClientContext
    ) -> Params:
        """Keep absent channels at zero.

        Returns:
            The parameters that the step ends with.
        """
        adjusted = self.inner.after_step(before, after, batch, client)
        return _apply_mask(adjusted, client.broadcast["held"])

    def client_update(
        self, params: Params, client: ClientContext, work: LocalWork
    ) -> tuple[State, State]:
        """Also send the client's weight wherever it has nothing.

        Returns:
            (state, payload).
        """
        state, payload = self.inner.client_update(params, client, work)
        masks = client.broadcast["held"]
        lacks = {name: client.weight * (1 - mask) for name, mask in masks.items()}
        buffers = _apply_mask({"buffers": payload["buffers"]}, masks)
        return state, payload | buffers | {"lacks": lacks}

    def aggregate(self, total: State) -> State:
        """Rescale sums as if every client had sent the mean of those that have a weight."""
        weight = total["weight"]
        min_weight = 1e-5 * weight  # rounding leaves less than this where no client has a weight

        def _rescale(name: str, value: Tensor) -> Tensor:
            if name not in total["lacks"]:
                return value
            present = weight - total["lacks"][name]
            scaled = value * (weight / present.clamp(min=min_weight))
            return torch.where(present > min_weight, scaled, 0)

        rest = {key: value for key, value in total.items() if key != "lacks"}
        sums = {
            key: {name: _rescale(name, value) for name, value in total[key].items()}
            for key in ("delta", "buffers")
        }
        return self.inner.aggregate(rest | sums)


def _apply_mask(state: State, masks: Params) -> State:
    """Multiply every model in a state by the masks, secondary models (`aside..name`) included."""
    flat = tree.flatten(state)
    for path, value in flat.items():
        name = path.rpartition("::")[2].rpartition("..")[2]
        mask = masks.get(name)
        if mask is not None and mask.shape == value.shape:
            flat[path] = value * mask
    return tree.unflatten_like(state, flat)
