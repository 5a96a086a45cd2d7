"""FedGen (Zhu et al., ICML 2021, eqs. 4 and 5): the server trains a feature generator."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedcog.algorithms.base import Algorithm
from fedcog.algorithms.types import (
    Batch,
    ClientContext,
    Draw,
    FederationInit,
    LocalWork,
    Uplink,
)
from fedcog.core.settings import setting
from fedcog.core.tree import Params, State
from fedcog.models import generators
from fedcog.models.functional import Model


@dataclass(frozen=True)
class FedGen(Algorithm):
    """FedAvg whose clients also train on features that the server's generator makes from labels.

    The generator learns from each client's head, weighted by the client's share of a label's
    examples. So the server must see heads and label counts per client, and sums are not enough. As
    in the published code, its loss is the weighted sum of the heads' losses (the paper uses the
    loss of their mean). The counts are those expected among the examples drawn, plus one. Clients
    add two terms from the second round on: cross-entropy on generated features (the paper's), and
    the published code's, that real inputs be classified like features generated for their labels.
    The authors weight both by 10 and train with plain SGD; momentum 0.9 makes steps ten times as
    long, so the default here is 1.
    """

    needs_full_model: ClassVar[bool] = True
    uplink: ClassVar[Uplink] = "per_client"
    needs_features: ClassVar[bool] = True
    single_label_reason: ClassVar[str] = (
        "fedgen makes features of one label at a time and weights heads by their share of it."
    )
    alpha: float = setting(1.0, "weight of the loss on generated features", ">= 0")
    beta: float = setting(
        1.0, "weight of agreement with generated features; 0 with alpha 0 is FedAvg", ">= 0"
    )
    decay: float = setting(
        0.98, "factor per round on both weights and on the generator's lr", "> 0", "<= 1"
    )
    steps: int = setting(50, "number of generator steps per round", "> 0")
    batch: int = setting(32, "number of labels in a generator step", ">= 2")
    lr: float = setting(3e-4, "learning rate of the generator (Adam)", "> 0")
    weight_decay: float = setting(1e-2, "weight decay of the generator", ">= 0")
    diversity: float = setting(1.0, "weight of the diversity loss", ">= 0")
    hidden: int = setting(256, "number of hidden units of the generator", "> 0")
    noise: int = setting(32, "size of the generator's noise input", "> 0")

    def _generator_size(self, model: Model) -> generators.FeatureGeneratorSize:
        return generators.FeatureGeneratorSize(
            self.noise, model.num_classes, self.hidden, model.num_features
        )

    def request_draws(self, round: int, model: Model, batch_size: int) -> dict[str, Draw]:
        """Request the generator's initial weights, its training data, and the clients' noise.

        Returns:
            Requests by name.
        """
        shapes = generators.feature_generator_shapes(self._generator_size(model))
        return {
            "generator": Draw((sum(a * b for a, b in shapes),), "federation"),
            "server_labels": Draw((self.steps, self.batch), "server", "uniform"),
            "server_eps": Draw((self.steps, self.batch, self.noise), "server", "uniform"),
            "made_labels": Draw((batch_size,), "step", "uniform"),
            "made_eps": Draw((batch_size, self.noise), "step", "uniform"),
            "real_eps": Draw((batch_size, self.noise), "step", "uniform"),
        }

    def server_init(self, init: FederationInit) -> State:
        """Add an untrained generator."""
        size = self._generator_size(init.model)
        generator = generators.init_feature_generator(init.draws["generator"], size)
        zero = torch.zeros_like(generator["3.bias"][0])
        return super().server_init(init) | {
            "generator": generator,
            "motion": generators.init_optimizer_state(generator),
            "round": zero,
            "readings": {"generator_loss": zero},
        }

    def broadcast(self, server: State) -> State:
        """Send the model, the generator and the round."""
        return super().broadcast(server) | {key: server[key] for key in ("generator", "round")}

    def client_update(
        self, params: Params, client: ClientContext, work: LocalWork
    ) -> tuple[State, State]:
        """Also send the client's head and label counts.

        Returns:
            (state, payload).
        """
        state, payload = super().client_update(params, client, work)
        num_drawn = work.num_steps * client.batch_size
        expected = client.class_counts / client.class_counts.sum() * num_drawn
        return state, payload | {
            "per_client": {
                "head": client.model.head_of(params),
                "counts": 1 + expected.to(client.lr.dtype),
            }
        }

    def server_update(self, server: State, total: State, draws: State) -> State:
        """Train the generator with the clients' heads, then update as FedAvg does.

        Returns:
            The server state after the round.
        """
        heads = total["per_client"]["head"]
        counts = total["per_client"]["counts"]
        shares = counts / counts.sum(0)
        present = torch.nonzero((counts > 1).any(0))[:, 0]

        def _loss(features: Tensor, eps: Tensor, labels: Tensor) -> Tensor:
            """Return sum_k mean_b share_k(y_b) CE(h_k(z_b), y_b) + diversity * exp(-spread)."""
            bias = heads["bias"][:, None] if "bias" in heads else 0
            logits = features @ heads["weight"].mT + bias
            rows = torch.arange(len(labels), device=labels.device)
            log_prob = logits.log_softmax(-1)[:, rows, labels]
            noise_distance = (eps[:, None] - eps).square().mean(-1)
            spread = noise_distance * (features[:, None] - features).abs().mean(-1)
            cross_entropy: Tensor = -(shares[:, labels] * log_prob).mean(-1).sum()
            return cross_entropy + self.diversity * (-spread.mean()).exp()

        index = (draws["server_labels"] * len(present)).long().clamp(max=len(present) - 1)
        generator, motion, value = generators.train_feature_generator(
            server["generator"],
            server["motion"],
            _loss,
            draws["server_eps"],
            present[index],
            self.lr * self.decay ** float(server["round"]),
            self.weight_decay,
        )
        return super().server_update(server, total, draws) | {
            "generator": generator,
            "motion": motion,
            "round": server["round"] + 1,
            "readings": {"generator_loss": value},
        }

    def data_loss(self, outputs: State, batch: Batch, client: ClientContext) -> Tensor:
        """Return CE + A_r CE(h(G(y')), y') + B_r KL(p(h(G(y))) || p(f(x))).

        The last two terms are active from the second round on.

        Returns:
            A 0-d tensor.
        """
        draws = batch["draws"]
        num_classes = client.model.num_classes
        generator = client.broadcast["generator"]
        params = outputs["params"]
        labels = (draws["made_labels"] * num_classes).long().clamp(max=num_classes - 1)
        made = generators.generate_features(generator, draws["made_eps"], labels)
        made_loss = client.task.loss(client.model.classify(params, made), labels).mean()
        like_real = generators.generate_features(generator, draws["real_eps"], batch["y"])
        target = client.model.classify(params, like_real).detach()
        natural = outputs["logits"][..., :num_classes]  # a wrapper may add outputs
        agreement = client.task.distillation_loss(target, natural).mean()
        made_term = self._weight(self.alpha, client) * made_loss
        agreement_term = self._weight(self.beta, client) * agreement
        return super().data_loss(outputs, batch, client) + made_term + agreement_term

    def outputs(self, params: Params, batch: Batch, client: ClientContext) -> State:
        """Add the parameters, whose head classifies generated features.

        Returns:
            Outputs by name.
        """
        return super().outputs(params, batch, client) | {"params": params}

    def _weight(self, weight: float, client: ClientContext) -> Tensor:
        """Return a term's weight: 0 in the first round, then decaying to the code's 1e-4."""
        round: Tensor = client.broadcast["round"]
        min_weight = 1e-4 if weight else 0.0
        return (round > 0) * (weight * self.decay**round).clamp(min=min_weight)
