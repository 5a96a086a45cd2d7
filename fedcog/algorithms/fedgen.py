"""FedGen (Zhu et al., ICML 2021, eqs. 4 and 5): the server learns a generator of features from the clients' heads."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedcog import generators
from fedcog.algorithms.base import Algorithm, Batch, Draw, Effort, Origin, Site, Uplink
from fedcog.models import Model
from fedcog.settings import setting
from fedcog.tree import Params, State


@dataclass(frozen=True)
class FedGen(Algorithm):
    """FedAvg whose clients also learn on features that the server's generator makes of labels.

    The generator is taught by each client's own head, weighed by what share of a label's examples the client holds: so
    the server must see heads and label counts one by one, and sums are not enough. As in the published code, its loss
    is the weighted sum of the heads' losses (the paper has that of their mean). The counts are those expected among the
    examples drawn, plus one. Clients add two terms from the second round on: cross-entropy on generated features
    (the paper's), and the published code's, that real inputs be classified like features generated for their labels.
    The authors weigh both by 10 and train by plain SGD; momentum 0.9 makes steps ten times as long, so here it is 1.
    """

    whole: ClassVar[bool] = True
    uplink: ClassVar[Uplink] = "each"
    needs_head: ClassVar[bool] = True
    one_label: ClassVar[str] = "fedgen makes features of one label at a time, and weighs heads by their share of it."
    alpha: float = setting(1.0, "weight of the loss on generated features", ">= 0")
    beta: float = setting(1.0, "weight of agreeing with generated features; with alpha 0, too: FedAvg", ">= 0")
    decay: float = setting(0.98, "factor on both weights, and on the generator's lr, after every round", "> 0", "<= 1")
    steps: int = setting(50, "steps of the generator each round", "> 0")
    batch: int = setting(32, "labels in a step of the generator", ">= 2")
    lr: float = setting(3e-4, "learning rate of the generator (Adam)", "> 0")
    weight_decay: float = setting(1e-2, "weight decay of the generator", ">= 0")
    diversity: float = setting(1.0, "weight of keeping features of different noise apart", ">= 0")
    hidden: int = setting(256, "hidden units of the generator", "> 0")
    noise: int = setting(32, "random numbers that go into the generator", "> 0")

    def draws(self, round: int, model: Model, batch_size: int) -> dict[str, Draw]:
        """The generator's first weights; what it is taught on; what it makes features of at the clients."""
        shapes = generators.feature_sizes(self.noise, model.classes, self.hidden, model.width)
        return {
            "generator": Draw((sum(a * b for a, b in shapes),), "federation"),
            "server_labels": Draw((self.steps, self.batch), "server", "uniform"),
            "server_eps": Draw((self.steps, self.batch, self.noise), "server", "uniform"),
            "made_labels": Draw((batch_size,), "step", "uniform"),
            "made_eps": Draw((batch_size, self.noise), "step", "uniform"),
            "real_eps": Draw((batch_size, self.noise), "step", "uniform"),
        }

    def server_init(self, origin: Origin) -> State:
        """An untaught generator."""
        sizes = self.noise, origin.model.classes, self.hidden, origin.model.width
        made = generators.feature_generator(origin.draws["generator"], *sizes)
        none = torch.zeros_like(made["3.bias"][0])
        taught = {"generator": made, "motion": generators.at_rest(made), "round": none}
        return super().server_init(origin) | taught | {"readings": {"generator_loss": none}}

    def broadcast(self, server: State) -> State:
        """The model, the generator, and the number of the round."""
        return super().broadcast(server) | {key: server[key] for key in ("generator", "round")}

    def client_update(self, params: Params, site: Site, effort: Effort) -> tuple[State, State]:
        """Besides FedAvg's sum, the client's own head and label counts."""
        own, payload = super().client_update(params, site, effort)
        drawn = site.counts / site.counts.sum() * (effort.steps * site.batch_size)
        return own, payload | {"each": {"head": site.model.head_of(params), "counts": 1 + drawn.to(site.lr.dtype)}}

    def server_update(self, server: State, total: State, draws: State) -> State:
        """FedAvg's, after the generator was taught by the heads."""
        heads, counts = total["each"]["head"], total["each"]["counts"]
        shares, there = counts / counts.sum(0), torch.nonzero((counts > 1).any(0))[:, 0]

        def loss(made: Tensor, eps: Tensor, labels: Tensor) -> Tensor:
            """sum_k mean_b share_k(y_b) CE(h_k(z_b), y_b) + diversity * exp(-mean_ij |eps_i - eps_j|^2 |z_i - z_j|)."""
            logits = made @ heads["weight"].mT + (heads["bias"][:, None] if "bias" in heads else 0)
            chance = logits.log_softmax(-1)[:, torch.arange(len(labels), device=labels.device), labels]
            apart = (eps[:, None] - eps).square().mean(-1) * (made[:, None] - made).abs().mean(-1)
            taught: Tensor = -(shares[:, labels] * chance).mean(-1).sum()
            return taught + self.diversity * (-apart.mean()).exp()

        labels = there[(draws["server_labels"] * len(there)).long().clamp(max=len(there) - 1)]
        lr, eps = self.lr * self.decay ** float(server["round"]), draws["server_eps"]
        generator, motion, value = generators.teach(
            server["generator"], server["motion"], loss, eps, labels, counts.shape[1], lr, self.weight_decay
        )
        after = {"generator": generator, "motion": motion, "round": server["round"] + 1}
        return super().server_update(server, total, draws) | after | {"readings": {"generator_loss": value}}

    def data_loss(self, outputs: State, batch: Batch, site: Site) -> Tensor:
        """CE + A_r CE(h(G(y')), y') + B_r KL(p(h(G(y))) || p(f(x))), the last two from the second round on."""
        drawn, classes, generator = batch["draws"], site.model.classes, site.shared["generator"]
        asked = (drawn["made_labels"] * classes).long().clamp(max=classes - 1)
        made = site.model.classify(outputs["params"], generators.features(generator, drawn["made_eps"], asked, classes))
        like = generators.features(generator, drawn["real_eps"], batch["y"], classes)
        wanted = site.model.classify(outputs["params"], like).detach()
        natural = outputs["logits"][..., :classes]  # a wrapper may have added more
        learnt = self._weight(self.alpha, site) * site.task.loss(made, asked).mean()
        agreed = self._weight(self.beta, site) * site.task.distil(wanted, natural).mean()
        return super().data_loss(outputs, batch, site) + learnt + agreed

    def outputs(self, params: Params, batch: Batch, site: Site) -> State:
        """FedAvg's, and the parameters, whose head the generated features go into."""
        return super().outputs(params, batch, site) | {"params": params}

    def _weight(self, weight: float, site: Site) -> Tensor:
        """The weight in this round: none in the first, then less and less, but never below the code's 1e-4."""
        round: Tensor = site.shared["round"]
        return (round > 0) * (weight * self.decay**round).clamp(min=1e-4 if weight else 0.0)
