"""FedReg (Xu et al., ICLR 2022, algorithm 1): generated pseudo data against forgetting."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedcog.algorithms.base import Algorithm
from fedcog.algorithms.types import Batch, ClientContext, Draw, ExtraData, Loss, StepGradient
from fedcog.core import tree
from fedcog.core.settings import setting
from fedcog.core.tree import Params, State
from fedcog.models.functional import Model


@dataclass(frozen=True)
class FedReg(Algorithm):
    """FedAvg whose clients undo, after each step, what it forgets on pseudo data.

    A round starts with some of the client's own examples moved uphill in the global model's loss:
    far (pseudo inputs, labeled with that model's outputs) and a little (perturbed inputs, with
    their true labels). Gradients are taken between theta and G. After each step, the rise of both
    losses since G is projected out, over the whole model and outside of momentum. The authors move
    all local examples, here it is `count` per round. FedCOG's authors give gamma and one step size,
    1e-3; it is used for the perturbed inputs, as FedReg's authors do besides 0.1 for pseudo inputs.
    (Pseudo inputs that close to the real ones prevent learning: on digits nothing was learned.)
    """

    needs_input_gradients: ClassVar[bool] = True
    single_label_reason: ClassVar[str] = (
        "fedreg moves examples out of their class, and a multi-label example has no class to "
        "leave: its authors define it for one label, and the paper reports no number for more."
    )
    gamma: float = setting(
        0.5, "where gradients are taken: gamma * theta + (1 - gamma) * G", ">= 0", "<= 1"
    )
    strength: float = setting(
        1.0, "fraction of the correction that is applied; 0 with gamma 1 is FedAvg", ">= 0", "<= 1"
    )
    steps: int = setting(10, "number of uphill steps of the inputs", ">= 0")
    pseudo_lr: float = setting(0.1, "step size of pseudo inputs", ">= 0")
    perturbed_lr: float = setting(1e-3, "step size of perturbed inputs", ">= 0")
    count: int = setting(512, "number of the client's examples that are moved each round", "> 0")

    def request_draws(self, round: int, model: Model, batch_size: int) -> dict[str, Draw]:
        """Request some of the client's own examples.

        Returns:
            Requests by name.
        """
        return super().request_draws(round, model, batch_size) | {
            "own": Draw((self.count,), kind="examples")
        }

    def extra_data(self, client: ClientContext, gen_state: State) -> ExtraData:
        """Return pseudo inputs with the global model's logits, and perturbed inputs with labels.

        Returns:
            Batches by group, and artifacts.
        """
        inherited = super().extra_data(client, gen_state)
        global_model = client.broadcast["params"] | client.broadcast["buffers"]
        examples = gen_state["own"]
        pseudo_x = self._move_uphill(examples, self.pseudo_lr, global_model, client)
        perturbed_x = self._move_uphill(examples, self.perturbed_lr, global_model, client)
        pseudo = {
            "far": pseudo_x,
            "logits": client.model.predict(global_model, pseudo_x),
            "near": perturbed_x,
            "y": examples["y"],
        }
        return ExtraData(inherited.groups | {"pseudo": pseudo}, inherited.artifacts)

    def local_grad(
        self, loss: Loss, params: Params, batch: Batch, client: ClientContext
    ) -> StepGradient:
        """Return the gradient at gamma * theta + (1 - gamma) * G.

        Returns:
            Gradient, loss and running statistics.
        """
        drift = tree.subtract(params, client.broadcast["params"])
        between = tree.add(params, tree.scale(self.gamma - 1, drift))
        return super().local_grad(loss, between, batch, client)

    def after_step(
        self, before: Params, after: Params, batch: Batch, client: ClientContext
    ) -> Params:
        """Subtract the part of the drift that increases the two losses midway to G.

        Returns:
            The parameters that the step ends with.
        """
        after = super().after_step(before, after, batch, client)
        pseudo = batch["pseudo"]
        drift = tree.subtract(after, client.broadcast["params"])
        midway = tree.add(client.broadcast["params"], tree.scale(0.5, drift))

        def _pseudo_loss(params: Params, data: Batch) -> Tensor:
            return client.task.distillation_loss(
                data["logits"], client.logits(params, data["far"])
            ).mean()

        def _perturbed_loss(params: Params, data: Batch) -> Tensor:
            return client.task.loss(client.logits(params, data["near"]), data["y"]).mean()

        pseudo_grads, _ = client.gradient(_pseudo_loss, midway, pseudo)
        perturbed_grads, _ = client.gradient(_perturbed_loss, midway, pseudo)
        rise = tree.scale(_coefficient(drift, pseudo_grads), pseudo_grads)
        rest = tree.subtract(drift, rise)
        rise = tree.add(rise, tree.scale(_coefficient(rest, perturbed_grads), perturbed_grads))
        return tree.subtract(after, tree.scale(self.strength, rise))

    def _move_uphill(
        self, examples: Batch, lr: float, weights: Params, client: ClientContext
    ) -> Tensor:
        """Move inputs by signed gradient ascent on the loss of a model."""

        def _loss(inputs: Params, batch: Batch) -> Tensor:
            return client.task.loss(client.model.predict(weights, inputs["x"]), batch["y"]).sum()

        x: Tensor = client.model.embed(weights, examples["x"])
        for _ in range(self.steps):
            grads, _ = client.gradient(_loss, {"x": x}, {"y": examples["y"]})
            x = x + lr * grads["x"].sign()
        return x


def _coefficient(drift: Params, grads: Params) -> Tensor:
    """Return the coefficient of the projection of `drift` on `grads`, at least 0."""
    return (tree.dot(drift, grads) / (tree.dot(grads, grads) + 1e-30)).clamp(min=0)
