"""Attacks: what a malicious client changes, around the algorithm that all clients run."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedcog.algorithms.payloads import scale_update
from fedcog.algorithms.types import (
    Batch,
    ClientContext,
    ExtraData,
    LocalWork,
    Loss,
    StepGradient,
)
from fedcog.algorithms.wrapper import Wrapper
from fedcog.core.settings import setting
from fedcog.core.tree import Params, State

AttackKind = Literal["none", "label-flip", "sign-flip", "backdoor", "replacement"]

TRIGGER_SIZE = 4
"""Height and width of the backdoor's trigger, in pixels."""


@dataclass(frozen=True)
class Attack(Wrapper):
    """A client that follows the algorithm and attacks, as one kind of device (`--devices`).

    `label-flip` trains with label C - 1 - y in place of y, or with the target class in place of the
    source class. `sign-flip` sends the update times -scale. `backdoor` stamps a trigger into a
    share of every batch, a square of the brightest value in a corner, and labels these examples as
    the target class. `replacement` does the same and sends the update times scale, so that the
    mean becomes this client's model when the others have converged: with equal weights, scale is
    the number of clients of a round. The trigger is stamped after normalization and augmentation.
    Class counts follow false labels, except under a backdoor. Weights, masks and privacy of what
    the client sends stay as they are.
    """

    kind: AttackKind = setting("none", "what this kind of client does")
    scale: float = setting(
        1.0, "factor on the update; for a replacement, the number of clients of a round", "> 0"
    )
    share: float = setting(
        0.5, "backdoor: share of every batch that carries the trigger", ">= 0", "<= 1"
    )
    target: int = setting(
        0, "class that the backdoor, or the flipped source class, leads to", ">= 0"
    )
    source: int = setting(-1, "label-flip: class to relabel; -1: all, to C - 1 - y", ">= -1")
    until: int = setting(0, "rounds with attacks, from the first; 0: all", ">= 0")
    brightest: tuple[float, ...] = ()
    """The largest normalized value of each color channel; the setup fills it in."""

    @property
    def has_trigger(self) -> bool:
        """Whether it stamps a trigger into images."""
        return self.kind in ("backdoor", "replacement")

    @property
    def used_settings(self) -> tuple[str, ...]:
        """The settings, besides the kind, that this kind of attack has."""
        own: dict[str, tuple[str, ...]] = {
            "label-flip": ("source", "target"),
            "sign-flip": ("scale",),
            "backdoor": ("share", "target"),
            "replacement": ("scale", "share", "target"),
        }
        return (*own.get(self.kind, ()), "until")

    def success(self, decisions: Tensor, labels: Tensor, num_classes: int) -> Tensor:
        """Measure how often a model decides as the attack wants.

        Args:
            decisions: What it decides on test examples, stamped for a backdoor, `(N,)`.
            labels: Their labels, `(N,)`.
            num_classes: Number of classes.

        Returns:
            A 0-d tensor, the share among the examples whose label the attack wants changed; NaN if
            there are none.
        """
        wanted = torch.full_like(labels, self.target)
        if self.kind == "label-flip":
            wanted = self.flipped(labels, num_classes)
        is_victim = wanted != labels
        return (decisions == wanted)[is_victim].double().mean()

    @property
    def has_success(self) -> bool:
        """Whether `success` means anything: a sign flip only lowers the accuracy."""
        return self.kind not in ("none", "sign-flip")

    def generation_init(self, client: ClientContext, draws: State) -> State:
        """Call the inner hook with false class counts.

        Returns:
            The generation state.
        """
        return self.inner.generation_init(self._deceived(client), draws)

    def generation_step(self, gen_state: State, client: ClientContext) -> State:
        """Call the inner hook with false class counts.

        Returns:
            The generation state after the step.
        """
        return self.inner.generation_step(gen_state, self._deceived(client))

    def extra_data(self, client: ClientContext, gen_state: State) -> ExtraData:
        """Call the inner hook with false class counts.

        Returns:
            Batches by group, and artifacts.
        """
        return self.inner.extra_data(self._deceived(client), gen_state)

    def data_loss(self, outputs: State, batch: Batch, client: ClientContext) -> Tensor:
        """Call the inner hook with false class counts.

        Returns:
            A 0-d tensor.
        """
        return self.inner.data_loss(outputs, batch, self._deceived(client))

    def penalty(
        self, params: Params, outputs: State, batch: Batch, client: ClientContext
    ) -> Tensor:
        """Call the inner hook with false class counts.

        Returns:
            A 0-d tensor.
        """
        return self.inner.penalty(params, outputs, batch, self._deceived(client))

    def local_grad(
        self, loss: Loss, params: Params, batch: Batch, client: ClientContext
    ) -> StepGradient:
        """Return the inner direction on poisoned examples.

        Returns:
            Gradient, loss and running statistics.
        """
        poisoned = self.poison(batch, client.model.num_classes, self._is_active(client))
        return self.inner.local_grad(loss, params, poisoned, self._deceived(client))

    def after_step(
        self, before: Params, after: Params, batch: Batch, client: ClientContext
    ) -> Params:
        """Call the inner hook with poisoned examples.

        Returns:
            The parameters that the step ends with.
        """
        poisoned = self.poison(batch, client.model.num_classes, self._is_active(client))
        return self.inner.after_step(before, after, poisoned, self._deceived(client))

    def client_update(
        self, params: Params, client: ClientContext, work: LocalWork
    ) -> tuple[State, State]:
        """Multiply the update.

        Returns:
            (state, payload).
        """
        state, payload = self.inner.client_update(params, self._deceived(client), work)
        factor = {"sign-flip": -self.scale, "replacement": self.scale}.get(self.kind, 1.0)
        if factor == 1:
            return state, payload
        return state, scale_update(torch.where(self._is_active(client), factor, 1.0), payload)

    def poison(self, batch: Batch, num_classes: int, is_active: Tensor | bool = True) -> Batch:
        """Change a batch as the attack does.

        Args:
            batch: `"x"` `(B, ...)` and `"y"` `(B,)`; other entries stay.
            num_classes: Number of classes.
            is_active: Whether the attack happens.

        Returns:
            The batch that the client trains on.
        """
        labels = batch["y"]
        if self.kind == "label-flip":
            false_labels = self.flipped(labels, num_classes)
            return batch | {"y": torch.where(_as_tensor(is_active, labels), false_labels, labels)}
        if not self.has_trigger:
            return batch
        row = torch.arange(len(labels), device=labels.device)
        is_poisoned = (row < round(self.share * len(labels))) & _as_tensor(is_active, labels)
        images = batch["x"]
        mask = is_poisoned.reshape(-1, *[1] * (images.dim() - 1))
        return batch | {
            "x": torch.where(mask, self.stamp(images), images),
            "y": torch.where(is_poisoned, self.target, labels),
        }

    def flipped(self, labels: Tensor, num_classes: int) -> Tensor:
        """Return the false labels that a label flip trains with.

        Args:
            labels: True labels, `(N,)`.
            num_classes: Number of classes.
        """
        if self.source < 0:
            return num_classes - 1 - labels
        return torch.where(labels == self.source, self.target, labels)

    def stamp(self, images: Tensor) -> Tensor:
        """Put the trigger into the lower right corner of normalized images `(B, C, H, W)`."""
        height, width = images.shape[-2:]
        rows = torch.arange(height, device=images.device)[:, None] >= height - TRIGGER_SIZE
        columns = torch.arange(width, device=images.device) >= width - TRIGGER_SIZE
        bright = images.new_tensor(self.brightest)[:, None, None]
        return torch.where(rows & columns, bright, images)

    def _deceived(self, client: ClientContext) -> ClientContext:
        """Return the client with the class counts of its false labels."""
        if self.kind != "label-flip":
            return client
        counts = client.class_counts
        if self.source < 0:
            false_counts = counts.flip(-1)
        else:
            classes = torch.arange(len(counts), device=counts.device)
            moved = counts[self.source]
            false_counts = counts + moved * (classes == self.target)
            false_counts = false_counts - moved * (classes == self.source)
        is_active = self._is_active(client)
        return client.replace(class_counts=torch.where(is_active, false_counts, counts))

    def _is_active(self, client: ClientContext) -> Tensor:
        if not self.until:
            return torch.ones_like(client.round, dtype=torch.bool)
        return client.round < self.until


def _as_tensor(is_active: Tensor | bool, like: Tensor) -> Tensor:
    """Return a boolean as a tensor on the device of another."""
    return torch.as_tensor(is_active, device=like.device)
