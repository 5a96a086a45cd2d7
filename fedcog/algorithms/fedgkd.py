"""FedGKD (Yao et al., IEEE Transactions on Computers 2023): distillation of past global models."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedcog.algorithms.base import Algorithm
from fedcog.algorithms.types import Batch, ClientContext, FederationInit
from fedcog.core import tree
from fedcog.core.settings import setting
from fedcog.core.tree import Params, State


@dataclass(frozen=True)
class FedGKD(Algorithm):
    """FedAvg whose clients distill the mean of the last global models on their own examples.

    The teacher's parameters and running statistics are the means over the last `models` global
    models, the present one included. With one model nothing more than FedAvg's is sent. The penalty
    is gamma T^2 KL(teacher || local), as in the published code; that the paper writes gamma / 2 is
    from memory.
    """

    gamma: float = setting(0.1, "weight of the distillation; 0 is FedAvg", ">= 0")
    temperature: float = setting(1.0, "temperature of both softmaxes", "> 0")
    models: int = setting(5, "number of global models that the teacher is the mean of", "> 0")

    def server_init(self, init: FederationInit) -> State:
        """Start without past models."""
        server = super().server_init(init)
        if self.models == 1:
            return server
        num_past = self.models - 1
        weights = self._weights(server)
        return server | {
            "history": tree.apply(lambda value: value.new_zeros(num_past, *value.shape), weights),
            "num_past": torch.zeros_like(init.num_clients),
        }

    def broadcast(self, server: State) -> State:
        """Send the model and the teacher."""
        sent = super().broadcast(server)
        if self.models == 1:
            return sent
        past = tree.apply(lambda value: value.sum(0), server["history"])
        total = tree.add(past, self._weights(server))
        return sent | {"teacher": tree.scale(1 / (server["num_past"] + 1), total)}

    def server_update(self, server: State, total: State, draws: State) -> State:
        """Keep the model of this round among the past ones.

        Returns:
            The server state after the round.
        """
        after = super().server_update(server, total, draws)
        if self.models == 1:
            return after
        return after | {
            "history": _append(server["history"], self._weights(server)),
            "num_past": (server["num_past"] + 1).clamp(max=self.models - 1),
        }

    def penalty(
        self, params: Params, outputs: State, batch: Batch, client: ClientContext
    ) -> Tensor:
        """Add gamma T^2 KL(teacher || local).

        Returns:
            A 0-d tensor.
        """
        inherited = super().penalty(params, outputs, batch, client)
        if self.models == 1:
            teacher = client.teacher_logits(batch["x"])
        else:
            teacher = client.model.predict(client.broadcast["teacher"], batch["x"]).detach()
        student = outputs["logits"] / self.temperature
        divergence = client.task.distillation_loss(teacher / self.temperature, student).mean()
        return inherited + self.gamma * self.temperature**2 * divergence

    @staticmethod
    def _weights(server: State) -> Params:
        """Return parameters and running statistics together."""
        weights: Params = server["params"] | server["buffers"]
        return weights


def _append(history: Params, weights: Params) -> Params:
    """Drop the oldest of the stacked models and add one."""
    return tree.apply(lambda past, new: torch.cat([past[1:], new[None]]), history, weights)
