"""VHL (Tang et al., ICML 2022, eq. 6): virtual data, the same at every client, to line features up with."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedcog import generators
from fedcog.algorithms.base import Batch, Draw, Extra, Origin, Site
from fedcog.algorithms.wrapper import Wrapper
from fedcog.fitness import ModelError
from fedcog.models import Model
from fedcog.settings import setting
from fedcog.tree import Params, State


@dataclass(frozen=True)
class VHL(Wrapper):
    """Any algorithm, with labelled noise that all clients share: learnt beside the real data, and aligned with it.

    The noise is drawn once, for the whole federation. As published, its classes are outputs of their own beside the
    natural ones (starting at zero here), and predictions are among the natural ones alone. Alignment is a supervised
    contrast of real features with the virtual ones of the same number, those standing still; it lasts for the first
    epochs of every round. `style` is a style generator with random weights in place of clouds of noise.
    """

    whole: ClassVar[bool] = True
    needs_head: ClassVar[bool] = True
    one_label: ClassVar[str] = (
        "vhl lines an example's features up with virtual ones of its class, and it must have one."
    )
    alpha: float = setting(1.0, "weight of the loss on virtual data", ">= 0")
    lambda_align: float = setting(1.0, "weight of aligning real features with virtual ones", ">= 0")
    kappa: float = setting(0.1, "weight of the contrast among virtual features", ">= 0")
    temperature: float = setting(0.07, "temperature of both contrasts", "> 0")
    align_epochs: int = setting(5, "local epochs, from the start of a round, with alignment", ">= 0")
    virtual: int = setting(2000, "virtual examples in all", "> 0")
    source: Literal["noise", "style"] = setting("noise", "what virtual data are: clouds of noise, or styled images")
    labels: Literal["separate", "shared"] = setting("separate", "virtual classes: beside the natural ones, or the same")

    def draws(self, round: int, model: Model, batch_size: int) -> dict[str, Draw]:
        """The numbers that virtual data are made of: the same in every round, at every client."""
        shape = generators.noise_shape(model.input_shape)
        drawn = {"virtual_mean": (model.classes, *shape), "virtual_noise": (self.virtual, *shape)}
        if self.source == "style":
            if len(model.input_shape) != 3:
                raise ModelError(
                    f"vhl.source style makes images, and inputs here have shape {model.input_shape}: take noise."
                )
            latent, sizes = generators.LATENT, generators.style_sizes(model.input_shape[0])
            weights = sum(torch.Size(size).numel() for size in sizes)
            drawn = {"virtual_mean": (model.classes, latent), "virtual_noise": (self.virtual, latent)}
            drawn["virtual_weights"] = (weights,)
        inner = self.inner.draws(round, model, batch_size)
        return inner | {name: Draw(shape, "federation") for name, shape in drawn.items()}

    def server_init(self, origin: Origin) -> State:
        """Inner's, with a head for the virtual classes beside the natural one."""
        if self.labels == "shared":
            return self.inner.server_init(origin)
        like, classes = origin.population, origin.model.classes
        head = {
            ".virtual.weight": like.new_zeros(classes, origin.model.width),
            ".virtual.bias": like.new_zeros(classes),
        }
        return self.inner.server_init(origin._replace(params=dict(sorted((origin.params | head).items()))))

    def server_model(self, server: State) -> Params:
        """Inner's, without the head for the virtual classes."""
        return {n: value for n, value in self.inner.server_model(server).items() if not n.startswith(".virtual.")}

    def unpack(self, shared: State, draws: State, model: Model) -> State:
        """Inner's, and the virtual examples."""
        place = torch.arange(self.virtual, device=draws["virtual_mean"].device)
        labels = place * model.classes // self.virtual
        mean, noise = draws["virtual_mean"][labels], draws["virtual_noise"]
        if self.source == "style":
            x = generators.style_images(0.5 * mean + 0.3 * noise, draws["virtual_weights"], model.input_shape)
        else:
            x = generators.noise_images(mean, noise, model.input_shape)
        return self.inner.unpack(shared, draws, model) | {"virtual": {"x": x, "y": labels}}

    def extra_data(self, site: Site, draft: State) -> Extra:
        """Inner's, and the virtual examples."""
        extra = self.inner.extra_data(site, draft)
        return Extra(extra.groups | {"virtual": site.shared["virtual"]}, extra.exhibit)

    def outputs(self, params: Params, batch: Batch, site: Site) -> State:
        """Inner's, those on virtual examples, and on both those of the virtual head."""
        outputs = self.inner.outputs(params, batch, site)
        made = self.inner.outputs(params, batch | batch["virtual"], site.still)
        return outputs | {
            "natural": self._wide(outputs, params),
            "virtual": made | {"logits": self._wide(made, params)},
        }

    def data_loss(self, outputs: State, batch: Batch, site: Site) -> Tensor:
        """Inner's, over natural and virtual classes alike, + alpha * the loss on virtual examples."""
        labels = batch["virtual"]["y"] + (site.model.classes if self.labels == "separate" else 0)
        virtual = site.task.loss(outputs["virtual"]["logits"], labels).mean()
        return self.inner.data_loss(outputs | {"logits": outputs["natural"]}, batch, site) + self.alpha * virtual

    def penalty(self, params: Params, outputs: State, batch: Batch, site: Site) -> Tensor:
        """Inner's + lambda * contrast(real, virtual at rest) + kappa * contrast(virtual), in the first epochs."""
        made, labels = outputs["virtual"]["features"], batch["virtual"]["y"]
        both = torch.cat([outputs["features"], made.detach()]), torch.cat([batch["y"], labels])
        aligned = self.lambda_align * self.contrast(*both) + self.kappa * self.contrast(made, labels)
        early = site.step * site.batch_size // site.counts.sum() < self.align_epochs
        return self.inner.penalty(params, outputs, batch, site) + early * aligned

    def _wide(self, outputs: State, params: Params) -> Tensor:
        """The logits of natural classes, and where they are apart, of virtual ones."""
        logits: Tensor = outputs["logits"]
        if self.labels == "shared":
            return logits
        return torch.cat(
            [logits, F.linear(outputs["features"], params[".virtual.weight"], params[".virtual.bias"])], -1
        )

    def contrast(self, features: Tensor, labels: Tensor) -> Tensor:
        """Supervised contrast (Khosla et al., NeurIPS 2020, eq. 2); who has no fellow counts nothing, but counts."""
        if len(labels) == 1:
            return features.sum() * 0
        unit = F.normalize(features, dim=-1)
        myself = torch.eye(len(labels), dtype=torch.bool, device=labels.device)
        near = (unit @ unit.T / self.temperature).masked_fill(myself, -torch.inf)
        chance = near - near.logsumexp(-1, keepdim=True)
        fellows = (labels[:, None] == labels) & ~myself
        of_fellows = torch.where(fellows, chance, 0).sum(-1)
        return -(of_fellows / fellows.sum(-1).clamp(min=1)).mean()
