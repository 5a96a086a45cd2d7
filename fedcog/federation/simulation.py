"""A federation in one process: every client's data and kept state on this machine."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedcog.algorithms import Algorithm
from fedcog.federation.cohort import Cohort, Members
from fedcog.federation.evaluate import accuracy, own_accuracy
from fedcog.federation.rounds import Report
from fedcog.federation.store import Store
from fedcog.tree import State


class Simulation:
    """The backend that trains the round's clients here."""

    def __init__(self, cohort: Cohort, *, local_steps: int, local_epochs: float, weight_cap: int) -> None:
        self.cohort, self.store = cohort, Store()
        data, task = cohort.data, cohort.task
        self.counts = torch.stack([task.counts(data.labels(client)) for client in range(data.clients)])
        self.totals = task.counts(data.test_y).cpu()
        cap = weight_cap or int(data.sizes.max())
        self.weights = data.sizes.clamp(max=cap).to(data.dtype) / cap
        if local_epochs:
            self.steps = (data.sizes.double() * local_epochs / cohort.batch_size - 1e-9).ceil().clamp(min=1).long()
        else:
            self.steps = torch.full_like(data.sizes, local_steps)

    def gather(
        self,
        algorithm: Algorithm,
        shared: State,
        clients: Sequence[int],
        round: int,
        lr: float,
        before: Tensor | None,
    ) -> tuple[State, Report]:
        """The sum of the clients' payloads, and a report. `before`: the sent model's hits, where scores are wanted."""
        number = torch.tensor(clients, device=self.counts.device)
        own = self.store.take(clients, algorithm, shared)
        members = Members(number, own, self.weights[number], self.counts[number], self.steps[number])
        outcome = self.cohort.train(algorithm, shared, members, round, lr, score=before is not None)
        self.store.put(clients, outcome.kept)
        loss, distance = outcome.loss.tolist(), outcome.distance.tolist()
        local: list[dict[str, float | int]] = [
            {"client": client, "loss": loss[row], "distance": distance[row]} for row, client in enumerate(clients)
        ]
        if before is not None and outcome.hits is not None:
            for row, (hits, counts) in enumerate(zip(outcome.hits, members.counts.cpu(), strict=True)):
                local[row]["accuracy"] = accuracy(hits, self.totals)
                local[row]["own_accuracy"] = own_accuracy(hits, self.totals, counts)
                local[row]["own_accuracy_before"] = own_accuracy(before, self.totals, counts)
        mean = float((outcome.loss * members.weight).sum() / members.weight.sum())
        return outcome.total, Report(mean, local, outcome.seconds, outcome.exhibit)
