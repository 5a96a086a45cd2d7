"""FedReg (Xu et al., ICLR 2022, algorithm 1): generated pseudo data against forgetting."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedcog import tree
from fedcog.algorithms.base import Algorithm, Batch, Draw, Extra, Loss, Site
from fedcog.models import Model
from fedcog.settings import setting
from fedcog.tree import Params, State


@dataclass(frozen=True)
class FedReg(Algorithm):
    """FedAvg whose clients undo what each step forgets on inputs made of their own.

    A round starts with some of the client's own examples moved uphill in the global model's loss: far (pseudo inputs,
    labelled with that model's outputs) and a little (perturbed inputs, with their true labels). Gradients are taken
    between theta and G; after each step, the rise of both losses since G is projected out, over the whole model and
    outside of momentum. The authors move all local examples, here `count` of them a round. FedCOG's authors give gamma
    and one step length, 1e-3: taken here for the perturbed inputs, as FedReg's authors have it beside 0.1 for pseudo
    ones. (Pseudo inputs that near to the real ones forbid to learn from these: on digits nothing was learnt.)
    """

    optimises_inputs: ClassVar[bool] = True
    one_label: ClassVar[str] = (
        "fedreg moves examples out of their class, and one of several labels has no class to leave: its authors define "
        "it for one label, and the paper has no number of it for more."
    )
    gamma: float = setting(0.5, "where gradients are taken: gamma * theta + (1 - gamma) * G", ">= 0", "<= 1")
    strength: float = setting(1.0, "share of the correction that is applied; 0, and gamma 1: FedAvg", ">= 0", "<= 1")
    steps: int = setting(10, "uphill steps of the inputs", ">= 0")
    pseudo_lr: float = setting(0.1, "length of an uphill step of pseudo inputs", ">= 0")
    perturbed_lr: float = setting(1e-3, "length of an uphill step of perturbed inputs", ">= 0")
    count: int = setting(512, "own examples moved each round", "> 0")

    def draws(self, round: int, model: Model, batch_size: int) -> dict[str, Draw]:
        """Some of its own examples."""
        return super().draws(round, model, batch_size) | {"own": Draw((self.count,), kind="examples")}

    def extra_data(self, site: Site, draft: State) -> Extra:
        """Pseudo inputs with the global model's logits, perturbed inputs with their labels."""
        extra = super().extra_data(site, draft)
        sent = site.shared["params"] | site.shared["buffers"]
        x, y = draft["own"]["x"], draft["own"]["y"]
        far, near = (self._uphill(x, y, lr, sent, site) for lr in (self.pseudo_lr, self.perturbed_lr))
        made = {"far": far, "logits": site.model.predict(sent, far), "near": near, "y": y}
        return Extra(extra.groups | {"pseudo": made}, extra.exhibit)

    def local_grad(self, loss: Loss, params: Params, batch: Batch, site: Site) -> tuple[Params, Tensor]:
        """The gradient at gamma * theta + (1 - gamma) * G."""
        back = tree.scale(self.gamma - 1, tree.subtract(params, site.shared["params"]))
        return super().local_grad(loss, tree.add(params, back), batch, site)

    def after_step(self, before: Params, after: Params, batch: Batch, site: Site) -> Params:
        """The step less its part along the two losses' gradients midway to G, where that part is a rise."""
        after, made = super().after_step(before, after, batch, site), batch["pseudo"]
        drift = tree.subtract(after, site.shared["params"])
        midway, still = tree.add(site.shared["params"], tree.scale(0.5, drift)), site.still
        far = site.gradient(lambda p, b: site.task.distil(b["logits"], still.logits(p, b["far"])).mean(), midway, made)
        near = site.gradient(lambda p, b: site.task.loss(still.logits(p, b["near"]), b["y"]).mean(), midway, made)
        rise = tree.scale(_along(drift, far[0]), far[0])
        rest = tree.subtract(drift, rise)
        rise = tree.add(rise, tree.scale(_along(rest, near[0]), near[0]))
        return tree.subtract(after, tree.scale(self.strength, rise))

    def _uphill(self, x: Tensor, y: Tensor, lr: float, sent: Params, site: Site) -> Tensor:
        def loss(inputs: Params, batch: Batch) -> Tensor:
            return site.task.loss(site.model.predict(sent, inputs["x"]), batch["y"]).sum()

        for _ in range(self.steps):
            slope, _ = site.gradient(loss, {"x": x}, {"y": y})
            x = x + lr * slope["x"].sign()
        return x


def _along(drift: Params, slope: Params) -> Tensor:
    """How many times `slope` lies in `drift`, if it points that way at all."""
    return (tree.dot(drift, slope) / (tree.dot(slope, slope) + 1e-30)).clamp(min=0)
