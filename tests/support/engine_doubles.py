"""Test doubles of the engine: traced steps without a GPU, a device that runs out of memory."""

from collections.abc import Hashable, Sequence
from typing import Any

import pytest
import torch

from fedcog.core.tree import State
from fedcog.engine import cuda_graphs
from fedcog.engine.cohort import Cohort, RoundSpec
from fedcog.engine.stacking import StackedRun
from fedcog.federation.client_states import ClientStates


class TracedGraphCache(cuda_graphs.GraphCache):
    """Trace steps as for a CUDA graph, but run them as plain operators."""

    def repeat(
        self, step: cuda_graphs.Step, key: Hashable, state: State, fixed: State, num_steps: int
    ) -> State:
        buffers = cuda_graphs.StepBuffers(step, state, fixed)
        graph, _ = buffers.trace()
        for _ in range(num_steps):
            graph(*buffers.tensors)
        return buffers.state


def simulate_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list[ClientStates]]:
    """Make round 2 run out of memory until client states move to the host.

    Returns two lists that grow: the number of clients of each attempt, and the stores that moved.
    """
    attempts = list[int]()
    moved = list[ClientStates]()
    train_stack = Cohort._train_stack
    real_move_to_host = ClientStates.move_to_host

    def limited_train_stack(
        self: Cohort, spec: RoundSpec, runs: Sequence[StackedRun], *rest: Any
    ) -> Any:
        attempts.append(sum(len(run.clients.client_ids) for run in runs))
        if spec.round == 1 and not moved:
            raise torch.cuda.OutOfMemoryError("out of memory")
        return train_stack(self, spec, runs, *rest)

    def move_to_host(self: ClientStates) -> bool:
        assert not real_move_to_host(self) and self._states  # states on a CPU cannot move
        moved.append(self)
        return True

    monkeypatch.setattr(Cohort, "_train_stack", limited_train_stack)
    monkeypatch.setattr(ClientStates, "move_to_host", move_to_host)
    return attempts, moved
