"""Recorded steps: what is traced of a round does what the round does; a GPU plays it back."""

import dataclasses
import shutil
import sys
import warnings
from collections.abc import Callable, Hashable
from typing import Any
from weakref import WeakValueDictionary

import pytest
import torch
from torch import Tensor

from fedcog.algorithms import (
    MOON,
    SCAFFOLD,
    Algorithm,
    Batch,
    ClientContext,
    FedAvg,
    FedCOG,
    FedProx,
)
from fedcog.core import tree
from fedcog.core.optimizers import Optimizer
from fedcog.core.tree import Params, State
from fedcog.engine import cuda_graphs
from fedcog.federation.server import Server
from fedcog.models import generators
from fedcog.testing import ToyFederation, max_difference, random_multi_label
from tests.support.engine_doubles import TracedGraphCache
from tests.support.user_models import USER_MODELS, user_generator

COG = FedCOG(count=8, steps=3, start_round=1, lr=0.1)
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


CASES: dict[str, tuple[Algorithm, dict[str, Any]]] = {
    "fedavg": (FedAvg(), {}),
    "unequal steps": (SCAFFOLD(), {"epochs": 0.5}),
    "batch norm": (FedAvg(), {"module": USER_MODELS["batch-norm"]()}),
    "adamw": (FedProx(mu=0.1), {"optimizer": Optimizer("adamw")}),
    "statistics": (
        dataclasses.replace(COG, lambda_bn=0.5),
        {"module": USER_MODELS["batch-norm"]()},
    ),
    "generator": (
        dataclasses.replace(COG, lambda_bn=0.5, generator="custom", noise=5),
        {
            "module": USER_MODELS["batch-norm"](),
            "generator": generators.check_generator(user_generator(), 5, (1, 8, 8)),
        },
    ),
    "clipped": (dataclasses.replace(COG, inner=MOON()), {"clip": 1.0}),
    "several labels": (dataclasses.replace(COG, inner=MOON()), {"dataset": random_multi_label()}),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_traced_does_what_the_round_does(name: str) -> None:
    algorithm, settings = CASES[name]
    plain, traced = (ToyFederation(algorithm, "vmap", **settings) for _ in range(2))
    traced.simulator.cohort._repeat = TracedGraphCache().repeat
    with torch.no_grad():
        assert max_difference(plain.final_state(), traced.final_state()) < 1e-12


@pytest.mark.parametrize("name", CASES)
def test_what_is_traced_writes_over_the_state_alone(name: str) -> None:
    """A compiler assumes that nothing else is written in place, and does not check it."""
    algorithm, settings = CASES[name]
    toy = ToyFederation(algorithm, "vmap", rounds=1, **settings)
    seen = list[torch.fx.GraphModule]()

    def repeat(
        step: cuda_graphs.Step, key: Hashable, state: State, fixed: State, num_steps: int
    ) -> State:
        seen.append(cuda_graphs.StepBuffers(step, state, fixed).trace()[0])
        return cuda_graphs.repeat_eagerly(step, key, state, fixed, num_steps)

    toy.simulator.cohort._repeat = repeat
    toy.final_state()
    for graph in seen:
        writes = [node for node in graph.graph.nodes if getattr(node.target, "_schema", None)]
        writes = [node for node in writes if node.target._schema.is_mutable]
        assert writes and all(node.target is torch.ops.aten.copy_.default for node in writes)
        assert all(node.args[0].op == "placeholder" for node in writes)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's compiler needs g++ on a CPU")
def test_what_is_compiled_does_what_the_round_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several labels, whose loss torch differentiates in place."""
    if any(letter.isspace() for letter in sys.prefix):
        pytest.skip("torch's compiler passes include paths with a space to g++ unquoted")
    # what this processor can do at once is found out by a dozen programs, and each operator takes
    # g++ seconds
    monkeypatch.setattr("torch._inductor.cpu_vec_isa.valid_vec_isa_list", list, raising=False)
    settings = {"dataset": random_multi_label(), "rounds": 2}
    plain, compiled = (
        ToyFederation(FedAvg(), "vmap", module=USER_MODELS["frozen"](), **settings)
        for _ in range(2)
    )
    made: list[tuple[cuda_graphs.StepBuffers, Callable[..., object]]] = []

    def repeat(
        step: cuda_graphs.Step, key: Hashable, state: State, fixed: State, num_steps: int
    ) -> State:
        if not made:
            buffers = cuda_graphs.StepBuffers(step, state, fixed)
            made.append((buffers, cuda_graphs.compile_step(buffers)))
        buffers, run = made[0]
        buffers.fill(state, fixed)
        for _ in range(num_steps):
            run(*buffers.tensors)
        return tree.apply(torch.clone, buffers.state)

    compiled.simulator.cohort._repeat = repeat
    with torch.no_grad():
        assert max_difference(plain.final_state(), compiled.final_state()) < 1e-12


def test_a_step_is_laid_out_and_put_back() -> None:
    def step(state: State, fixed: State) -> State:
        return {"sum": state["sum"] + fixed["part"]["one"], "step": state["step"] + 1}

    state = {"sum": torch.zeros(2), "step": torch.zeros((), dtype=torch.int64)}
    stock = torch.ones(2)
    buffers = cuda_graphs.StepBuffers(
        step, state, {"part": {"one": torch.ones(2)}, "stock": {"all": stock}}
    )
    assert buffers.fixed["stock"]["all"] is stock and buffers.state["sum"] is not state["sum"]
    buffers.write_step(*buffers.tensors)
    assert buffers.state["sum"].tolist() == [1, 1] and int(buffers.state["step"]) == 1
    buffers.reset()
    assert buffers.state["sum"].tolist() == [0, 0] and state["sum"].tolist() == [0, 0]
    buffers.fill(
        {"sum": torch.ones(2), "step": torch.tensor(5)},
        {"part": {"one": 2 * torch.ones(2)}, "stock": {"all": stock}},
    )
    buffers.write_step(*buffers.tensors)
    assert buffers.state["sum"].tolist() == [3, 3] and int(buffers.state["step"]) == 6


@dataclasses.dataclass(frozen=True)
class Peeking(Algorithm):
    """Looks at a number in the midst of a step, which no recording can."""

    def penalty(
        self, params: Params, outputs: State, batch: Batch, client: ClientContext
    ) -> Tensor:
        return torch.zeros_like(client.lr) * float(client.lr)


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_gpu_plays_back_what_a_cpu_computes(name: str, fuse: bool) -> None:
    algorithm, settings = CASES[name]
    here = ToyFederation(algorithm, **settings)
    there = ToyFederation(algorithm, "graph", device="cuda", **settings)
    there.simulator.cohort._repeat = cuda_graphs.GraphCache(fuse).repeat
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        there_is = there.final_state()
    assert (
        max_difference(here.final_state(), {name: value.cpu() for name, value in there_is.items()})
        < 1e-5
    )


@pytest.mark.gpu
@GPU
def test_what_cannot_be_recorded_runs_all_the_same_and_says_why() -> None:
    with pytest.warns(UserWarning, match="step by step"):
        there = ToyFederation(Peeking(), "graph", device="cuda").final_state()
    assert (
        max_difference(
            ToyFederation(Peeking()).final_state(),
            {name: value.cpu() for name, value in there.items()},
        )
        < 1e-6
    )


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("limit", [1, 2])
def test_parts_of_a_cohort_come_to_the_whole(limit: int) -> None:
    whole, parts = (ToyFederation(COG, "graph", device="cuda") for _ in range(2))
    parts.simulator.cohort.max_clients = limit
    assert max_difference(whole.final_state(), parts.final_state()) < 1e-9


@pytest.mark.gpu
@GPU
def test_recordings_share_the_memory_they_play_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one needs while it plays is nobody's afterwards: two large steps take the room of one,
    in any order.
    """

    def step(state: State, fixed: State) -> State:
        wide = state["x"][:, None] * fixed["y"]  # 64 MiB and more, on the way to 16 KiB
        return {"x": (wide.sin().cumsum(1) * wide.cos()).sum(1) / fixed["y"].numel()}

    given = [
        ({"x": torch.rand(4096, device="cuda")}, {"y": torch.rand(width, device="cuda")})
        for width in (4096, 4095)
    ]
    monkeypatch.setattr(
        cuda_graphs, "_pools", WeakValueDictionary()
    )  # no other test's recordings lie in it

    def taken() -> int:
        torch.cuda.empty_cache()
        found = [
            one
            for one in torch.cuda.memory_snapshot()
            if tuple(one["segment_pool_id"]) == pool.handle
        ]
        return sum(int(one["total_size"]) for one in found)

    both = [cuda_graphs.GraphCache(fuse=False) for _ in given]
    pool = cuda_graphs.MemoryPool.current()
    sizes = list[int]()
    for one, (state, fixed) in zip(both, given, strict=True):
        one.repeat(step, "", state, fixed, 3)
        sizes.append(taken())
    assert 2**26 < sizes[0] == sizes[1]
    for turn in (0, 1, 0, 0, 1):
        state, fixed = given[turn]
        played = both[turn].repeat(step, "", state, fixed, 17)["x"]
        assert torch.equal(played, cuda_graphs.repeat_eagerly(step, "", state, fixed, 17)["x"])
    for one in both:
        one.clear()
    assert taken() == 0
    assert torch.equal(
        cuda_graphs.GraphCache(fuse=False).repeat(step, "", *given[0], 3)["x"],
        cuda_graphs.repeat_eagerly(step, "", *given[0], 3)["x"],
    )


@pytest.mark.gpu
@GPU
def test_a_round_reads_the_device_once() -> None:
    toy = ToyFederation(FedAvg(), "graph", device="cuda", rounds=3, dtype=torch.float32)
    for round in range(2):
        toy.server.run_round(round)
    server = Server(toy.algorithm, toy.simulator, toy.server.scorer, toy.schedule, toy.server.state)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    ) as seen:
        server.run_round(2)
    down = [event for event in seen.events() if "Memcpy DtoH" in event.name]
    assert len(down) <= 2, [
        event.name for event in down
    ]  # a fresh start looks at the sent model's hits once more
