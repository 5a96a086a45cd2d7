"""VHL (Tang et al., ICML 2022, eq. 6): shared virtual data, to align features across clients."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedcog.algorithms.types import Batch, ClientContext, Draw, ExtraData, FederationInit
from fedcog.algorithms.wrapper import Wrapper
from fedcog.core.settings import setting
from fedcog.core.tree import Params, State
from fedcog.models import generators
from fedcog.models.checks import ModelError
from fedcog.models.functional import Model


@dataclass(frozen=True)
class VHL(Wrapper):
    """Any algorithm, with labeled noise that all clients share and align their features with.

    The noise is drawn once for the whole federation. As published, its classes are outputs of their
    own besides the natural ones (initialized to zero here), and predictions use the natural ones
    only. The alignment is a supervised contrastive loss of real features with the virtual ones of
    the same class, which are detached. It is active during the first epochs of every round. `style`
    replaces noise by images of a style generator with random weights.
    """

    needs_full_model: ClassVar[bool] = True
    needs_features: ClassVar[bool] = True
    single_label_reason: ClassVar[str] = (
        "vhl aligns the features of an example with virtual ones of its class, "
        "so an example must have exactly one class."
    )
    alpha: float = setting(1.0, "weight of the loss on virtual data", ">= 0")
    lambda_align: float = setting(1.0, "weight of aligning real features with virtual ones", ">= 0")
    kappa: float = setting(0.1, "weight of the contrastive loss among virtual features", ">= 0")
    temperature: float = setting(0.07, "temperature of both contrastive losses", "> 0")
    align_epochs: int = setting(
        5, "number of local epochs with alignment, from the start of a round", ">= 0"
    )
    virtual: int = setting(2000, "number of virtual examples", "> 0")
    source: Literal["noise", "style"] = setting(
        "noise", "virtual data: smoothed noise, or images of a style generator"
    )
    labels: Literal["separate", "shared"] = setting(
        "separate", "virtual classes: additional outputs, or the natural classes"
    )

    def request_draws(self, round: int, model: Model, batch_size: int) -> dict[str, Draw]:
        """Request the numbers that virtual data are made of, the same in every round.

        Returns:
            Requests by name.
        """
        shapes: dict[str, tuple[int, ...]]
        if self.source == "style":
            if len(model.continuous_shape) != 3:
                raise ModelError(
                    "vhl.source 'style' makes images, but inputs here have shape "
                    f"{model.continuous_shape}: set it to noise."
                )
            sizes = generators.style_shapes(model.continuous_shape[0])
            shapes = {
                "virtual_mean": (model.num_classes, generators.STYLE_LATENT_SIZE),
                "virtual_noise": (self.virtual, generators.STYLE_LATENT_SIZE),
                "virtual_weights": (sum(math.prod(size) for size in sizes),),
            }
        else:
            shape = generators.noise_shape(model.continuous_shape)
            shapes = {
                "virtual_mean": (model.num_classes, *shape),
                "virtual_noise": (self.virtual, *shape),
            }
        inner = self.inner.request_draws(round, model, batch_size)
        return inner | {name: Draw(shape, "federation") for name, shape in shapes.items()}

    def server_init(self, init: FederationInit) -> State:
        """Add a head for the virtual classes."""
        if self.labels == "shared":
            return self.inner.server_init(init)
        num_classes = init.model.num_classes
        head = {
            ".virtual.weight": init.num_clients.new_zeros(num_classes, init.model.num_features),
            ".virtual.bias": init.num_clients.new_zeros(num_classes),
        }
        params = dict(sorted((init.params | head).items()))
        return self.inner.server_init(init._replace(params=params))

    def server_model(self, server: State) -> Params:
        """Remove the head for the virtual classes."""
        weights = self.inner.server_model(server)
        return {name: value for name, value in weights.items() if not name.startswith(".virtual.")}

    def unpack_broadcast(self, broadcast: State, draws: State, model: Model) -> State:
        """Add the virtual examples.

        Returns:
            What the hooks see of the broadcast.
        """
        index = torch.arange(self.virtual, device=draws["virtual_mean"].device)
        labels = index * model.num_classes // self.virtual
        mean = draws["virtual_mean"][labels]
        noise = draws["virtual_noise"]
        if self.source == "style":
            latent = 0.5 * mean + 0.3 * noise
            x = generators.style_images(latent, draws["virtual_weights"], model.continuous_shape)
        else:
            x = generators.noise_images(mean, noise, model.continuous_shape)
        unpacked = self.inner.unpack_broadcast(broadcast, draws, model)
        return unpacked | {"virtual": {"x": x, "y": labels}}

    def extra_data(self, client: ClientContext, gen_state: State) -> ExtraData:
        """Add the virtual examples.

        Returns:
            Batches by group, and artifacts.
        """
        inner = self.inner.extra_data(client, gen_state)
        virtual = client.broadcast["virtual"]
        return ExtraData(inner.groups | {"virtual": virtual}, inner.artifacts)

    def outputs(self, params: Params, batch: Batch, client: ClientContext) -> State:
        """Add the outputs on virtual examples, and those of the virtual head on both.

        Returns:
            Outputs by name.
        """
        outputs = self.inner.outputs(params, batch, client)
        virtual = self.inner.outputs(params, batch | batch["virtual"], client)
        return outputs | {
            "natural": self._all_logits(outputs, params),
            "virtual": virtual | {"logits": self._all_logits(virtual, params)},
        }

    def data_loss(self, outputs: State, batch: Batch, client: ClientContext) -> Tensor:
        """Return the inner loss over all classes + alpha * the loss on virtual examples.

        Returns:
            A 0-d tensor.
        """
        labels = batch["virtual"]["y"]
        if self.labels == "separate":
            labels = labels + client.model.num_classes
        virtual_loss = client.task.loss(outputs["virtual"]["logits"], labels).mean()
        all_outputs = outputs | {"logits": outputs["natural"]}
        return self.inner.data_loss(all_outputs, batch, client) + self.alpha * virtual_loss

    def penalty(
        self, params: Params, outputs: State, batch: Batch, client: ClientContext
    ) -> Tensor:
        """Add lambda * contrast(real, detached virtual) + kappa * contrast(virtual) at first.

        Returns:
            A 0-d tensor.
        """
        virtual = outputs["virtual"]["features"]
        virtual_labels = batch["virtual"]["y"]
        features = torch.cat([outputs["features"], virtual.detach()])
        labels = torch.cat([batch["y"], virtual_labels])
        alignment = self.lambda_align * self.contrast(features, labels)
        alignment = alignment + self.kappa * self.contrast(virtual, virtual_labels)
        epoch = client.step * client.batch_size // client.class_counts.sum()
        is_active = epoch < self.align_epochs
        return self.inner.penalty(params, outputs, batch, client) + is_active * alignment

    def contrast(self, features: Tensor, labels: Tensor) -> Tensor:
        """Compute the supervised contrastive loss (Khosla et al., NeurIPS 2020, eq. 2).

        Args:
            features: `(N, F)`.
            labels: `(N,)`. An example whose label is unique contributes 0 to the mean.

        Returns:
            A 0-d tensor.
        """
        if len(labels) == 1:
            return features.sum() * 0
        unit = F.normalize(features, dim=-1)
        is_self = torch.eye(len(labels), dtype=torch.bool, device=labels.device)
        similarity = (unit @ unit.T / self.temperature).masked_fill(is_self, -torch.inf)
        log_prob = similarity - similarity.logsumexp(-1, keepdim=True)
        is_positive = (labels[:, None] == labels) & ~is_self
        positive_log_prob = torch.where(is_positive, log_prob, 0).sum(-1)
        return -(positive_log_prob / is_positive.sum(-1).clamp(min=1)).mean()

    def _all_logits(self, outputs: State, params: Params) -> Tensor:
        """Return the logits of natural classes and, where separate, of virtual ones."""
        logits: Tensor = outputs["logits"]
        if self.labels == "shared":
            return logits
        virtual = F.linear(outputs["features"], params[".virtual.weight"], params[".virtual.bias"])
        return torch.cat([logits, virtual], -1)
