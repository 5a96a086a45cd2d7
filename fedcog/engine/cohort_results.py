"""The result of a cohort's round, and how the results of several cohorts are joined."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedcog.core import tree
from fedcog.core.timing import Timings
from fedcog.core.tree import Params, State
from fedcog.engine.aggregation import add_totals


class CohortResult(NamedTuple):
    """What the clients of a cohort return from a round, still on the device.

    Attributes:
        states: What the clients keep, stacked.
        total: Sum of the finite payloads; empty if the round keeps payloads.
        payloads: Every client's payload, stacked; empty unless the round keeps payloads.
        update_finite: Whether each payload is finite, `(K,)`.
        state_finite: Whether each state is finite, `(K,)`.
        loss: Mean loss over each client's steps, `(K,)`.
        distance: L2 norm of each client's change of the parameters, `(K,)`.
        class_stats: Class statistics of the local models on the test set, `(K, ..., C)`; None if
            they were not evaluated.
        artifacts: Artifacts of the first client.
        timings: Seconds per part.
    """

    states: State
    total: State
    payloads: State
    update_finite: Tensor
    state_finite: Tensor
    loss: Tensor
    distance: Tensor
    class_stats: Tensor | None
    artifacts: Params
    timings: Timings


def join_single_clients(results: list[CohortResult]) -> CohortResult:
    """Join the results of clients that trained one after another.

    Payloads that are not finite are left out, unless all are: then the sum shows it.
    """
    none_finite = not any(result.update_finite for result in results)
    return join_cohorts(
        [
            result if result.update_finite or none_finite else result._replace(total={})
            for result in results
        ]
    )


def join_cohorts(results: Sequence[CohortResult]) -> CohortResult:
    """Join the results of parts of a cohort, in order."""
    if len(results) == 1:
        return results[0]
    class_stats = [one.class_stats for one in results if one.class_stats is not None]
    return CohortResult(
        states=tree.concatenate([one.states for one in results]),
        total=add_totals([one.total for one in results if one.total]),
        payloads=tree.concatenate([one.payloads for one in results]),
        update_finite=torch.cat([one.update_finite for one in results]),
        state_finite=torch.cat([one.state_finite for one in results]),
        loss=torch.cat([one.loss for one in results]),
        distance=torch.cat([one.distance for one in results]),
        class_stats=torch.cat(class_stats) if class_stats else None,
        artifacts=next((one.artifacts for one in results if one.artifacts), {}),
        timings=Timings.concatenate([one.timings for one in results]),
    )
