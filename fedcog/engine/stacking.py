"""Stacking: clients of several runs train as one larger cohort, and their results are separated."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fedcog.core import tree
from fedcog.core.timing import Stopwatch, Timings
from fedcog.core.tree import Params, State
from fedcog.engine.aggregation import sum_of_one, sum_payloads
from fedcog.engine.cohort_results import CohortResult
from fedcog.engine.local_training import ClientResults, CohortClients

if TYPE_CHECKING:
    from fedcog.engine.cohort import Cohort


class StackedRun(NamedTuple):
    """The clients of one run in a stack.

    Attributes:
        cohort: The run's cohort, which knows its data and seed.
        broadcast: What the clients received, unpacked.
        clients: The clients.
        lr: Learning rate.
    """

    cohort: "Cohort"
    broadcast: State
    clients: CohortClients
    lr: float


class StackOutputs(NamedTuple):
    """What a stack of runs computed, with a client axis over all of its clients.

    Attributes:
        results: States, payloads and models.
        loss: Mean loss over the steps, `(K,)`.
        artifacts: Artifacts of every client.
        class_stats: Class statistics on the test set, if evaluated.
    """

    results: ClientResults
    loss: Tensor
    artifacts: Params
    class_stats: Tensor | None

    def to_tree(self) -> State:
        """Convert to a dict of tensors."""
        fields: State = {
            "results": self.results._asdict(),
            "loss": self.loss,
            "artifacts": self.artifacts,
        }
        return fields if self.class_stats is None else fields | {"class_stats": self.class_stats}

    @classmethod
    def from_tree(cls, fields: State) -> "StackOutputs":
        """Convert back from `to_tree`."""
        results = ClientResults(**fields["results"])
        return cls(results, fields["loss"], fields["artifacts"], fields.get("class_stats"))


def all_clients(runs: Sequence[StackedRun]) -> CohortClients:
    """Return the clients of all runs, one run after another."""
    if len(runs) == 1:
        return runs[0].clients
    return CohortClients(**tree.concatenate([run.clients._asdict() for run in runs]))


def stacked_broadcast(runs: Sequence[StackedRun]) -> State:
    """Return one broadcast for all clients, or, of several runs, a copy for each client."""
    if len(runs) == 1:
        return runs[0].broadcast
    copies = [tree.expand(run.broadcast, len(run.clients.client_ids)) for run in runs]
    return tree.concatenate(copies)


def stacked_lr(runs: Sequence[StackedRun]) -> Tensor:
    """Return the learning rate, float64: 0-d if all runs share it, else one per client, `(K,)`."""
    rates = [run.lr for run in runs]
    if len({*rates}) == 1:
        return torch.tensor(rates[0], dtype=torch.float64)
    sizes = torch.tensor([len(run.clients.client_ids) for run in runs])
    return torch.tensor(rates, dtype=torch.float64).repeat_interleave(sizes)


def separate(
    outputs: StackOutputs,
    runs: Sequence[StackedRun],
    round: int,
    num_clients: int,
    stopwatch: Stopwatch,
    keep_payloads: bool = False,
) -> list[CohortResult]:
    """Separate the outputs of a stack into the results of its runs.

    Args:
        outputs: What the stack computed; without a client axis if it is a single client.
        runs: The runs, in order.
        round: Current round, from 0.
        num_clients: Number of clients to keep of each run; 0 means all.
        stopwatch: Times the parts of the round.
        keep_payloads: Whether to return every client's payload in place of their sum.

    Returns:
        One result per run.
    """
    has_client_axis = runs[0].clients.client_ids.dim() == 1
    fields = outputs.to_tree() if has_client_axis else tree.stack([outputs.to_tree()])
    timings = Timings(stopwatches=[stopwatch], divisor=len(runs))
    separated = []
    start = 0
    for run in runs:
        client_ids = run.clients.client_ids.reshape(-1)
        size = num_clients or len(client_ids)
        own = StackOutputs.from_tree(tree.take(fields, slice(start, start + size)))
        start += len(client_ids)
        payload = own.results.payload
        kept: State = {}
        if privacy := run.cohort.privacy:
            payload = privacy.protect_payloads(payload, client_ids[:size], round)
        total: State = {}
        if keep_payloads:
            kept = payload
        elif has_client_axis:
            total = sum_payloads(payload, own.results.update_finite)
        else:
            total = sum_of_one(tree.take(payload, 0))
        separated.append(
            CohortResult(
                states=own.results.state,
                total=total,
                payloads=kept,
                update_finite=own.results.update_finite,
                state_finite=own.results.state_finite,
                loss=own.loss,
                distance=own.results.distance,
                class_stats=own.class_stats,
                artifacts=tree.take(own.artifacts, 0),
                timings=timings,
            )
        )
    return separated
