"""Tests of traced, compiled and recorded training steps, and of CUDA graphs on a GPU."""

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
from fedcog.testing import ToyFederation, max_difference, random_multi_label, random_tokens
from tests.support.engine_doubles import TracedGraphCache
from tests.support.user_models import USER_MODELS, Recurrent, Tokens, jitter, user_generator

pytestmark = pytest.mark.compiler

FEDCOG = FedCOG(count=8, steps=3, start_round=1, lr=0.1)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


CASES: dict[str, tuple[Algorithm, dict[str, Any]]] = {
    "fedavg": (FedAvg(), {}),
    "unequal steps": (SCAFFOLD(), {"epochs": 0.5}),
    "batch norm": (FedAvg(), {"module": USER_MODELS["batch-norm"]()}),
    "adamw": (FedProx(mu=0.1), {"optimizer": Optimizer("adamw")}),
    "statistics": (
        dataclasses.replace(FEDCOG, lambda_bn=0.5),
        {"module": USER_MODELS["batch-norm"]()},
    ),
    "generator": (
        dataclasses.replace(FEDCOG, lambda_bn=0.5, generator="custom", noise=5),
        {
            "module": USER_MODELS["batch-norm"](),
            "generator": generators.check_generator(user_generator(), 5, (1, 8, 8)),
        },
    ),
    "clipped": (dataclasses.replace(FEDCOG, inner=MOON()), {"clip": 1.0}),
    "dropout": (FEDCOG, {"module": USER_MODELS["dropout"]()}),
    "tokens": (FEDCOG, {"module": Tokens, "dataset": random_tokens()}),
    "augmentation": (FEDCOG, {"augmentation": jitter}),
    "recurrent": (FEDCOG, {"module": Recurrent}),
    "several labels": (
        dataclasses.replace(FEDCOG, inner=MOON()),
        {"dataset": random_multi_label()},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_traced_steps_equal_eager_steps(name: str) -> None:
    algorithm, settings = CASES[name]
    plain, traced = (ToyFederation(algorithm, "vmap", **settings) for _ in range(2))
    traced.simulator.cohort._repeat = TracedGraphCache().repeat
    with torch.no_grad():
        assert max_difference(plain.final_state(), traced.final_state()) < 1e-12


@pytest.mark.parametrize("name", CASES)
def test_traced_steps_write_only_the_state_in_place(name: str) -> None:
    """The compiler relies on this and does not check it."""
    algorithm, settings = CASES[name]
    toy = ToyFederation(algorithm, "vmap", rounds=1, **settings)
    graphs = list[torch.fx.GraphModule]()

    def repeat(
        step: cuda_graphs.Step, key: Hashable, state: State, fixed: State, num_steps: int
    ) -> State:
        graphs.append(cuda_graphs.StepBuffers(step, state, fixed).trace()[0])
        return cuda_graphs.repeat_eagerly(step, key, state, fixed, num_steps)

    toy.simulator.cohort._repeat = repeat
    toy.final_state()
    for graph in graphs:
        operators = [node for node in graph.graph.nodes if getattr(node.target, "_schema", None)]
        writes = [node for node in operators if node.target._schema.is_mutable]
        assert writes and all(node.target is torch.ops.aten.copy_.default for node in writes)
        assert all(node.args[0].op == "placeholder" for node in writes)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's compiler needs g++ on a CPU")
def test_compiled_steps_equal_eager_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use multi-label data: torch computes the gradient of that loss in place."""
    if any(letter.isspace() for letter in sys.prefix):
        pytest.skip("torch's compiler passes include paths with a space to g++ unquoted")
    # Skip the search for vector instructions: it compiles a dozen programs, each for seconds.
    monkeypatch.setattr("torch._inductor.cpu_vec_isa.valid_vec_isa_list", list, raising=False)
    settings = {"dataset": random_multi_label(), "rounds": 2}
    plain, compiled = (
        ToyFederation(FedAvg(), "vmap", module=USER_MODELS["frozen"](), **settings)
        for _ in range(2)
    )
    compiled_steps: list[tuple[cuda_graphs.StepBuffers, Callable[..., object]]] = []

    def repeat(
        step: cuda_graphs.Step, key: Hashable, state: State, fixed: State, num_steps: int
    ) -> State:
        if not compiled_steps:
            buffers = cuda_graphs.StepBuffers(step, state, fixed)
            compiled_steps.append((buffers, cuda_graphs.compile_step(buffers)))
        buffers, run = compiled_steps[0]
        buffers.fill(state, fixed)
        for _ in range(num_steps):
            run(*buffers.tensors)
        return tree.apply(torch.clone, buffers.state)

    compiled.simulator.cohort._repeat = repeat
    with torch.no_grad():
        assert max_difference(plain.final_state(), compiled.final_state()) < 1e-12


def test_step_buffers_run_reset_and_refill() -> None:
    def step(state: State, fixed: State) -> State:
        return {"sum": state["sum"] + fixed["part"]["one"], "step": state["step"] + 1}

    state = {"sum": torch.zeros(2), "step": torch.zeros((), dtype=torch.int64)}
    dataset = torch.ones(2)
    buffers = cuda_graphs.StepBuffers(
        step, state, {"part": {"one": torch.ones(2)}, "dataset": {"all": dataset}}
    )
    assert buffers.fixed["dataset"]["all"] is dataset and buffers.state["sum"] is not state["sum"]
    buffers.write_step(*buffers.tensors)
    assert buffers.state["sum"].tolist() == [1, 1] and int(buffers.state["step"]) == 1
    buffers.reset()
    assert buffers.state["sum"].tolist() == [0, 0] and state["sum"].tolist() == [0, 0]
    buffers.fill(
        {"sum": torch.ones(2), "step": torch.tensor(5)},
        {"part": {"one": 2 * torch.ones(2)}, "dataset": {"all": dataset}},
    )
    buffers.write_step(*buffers.tensors)
    assert buffers.state["sum"].tolist() == [3, 3] and int(buffers.state["step"]) == 6


@dataclasses.dataclass(frozen=True)
class SynchronizingAlgorithm(Algorithm):
    """Reads a number from the device within a step, which a CUDA graph cannot record."""

    def penalty(
        self, params: Params, outputs: State, batch: Batch, client: ClientContext
    ) -> Tensor:
        return torch.zeros_like(client.lr) * float(client.lr)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_gpu_graphs_agree_with_cpu(name: str, fuse: bool) -> None:
    algorithm, settings = CASES[name]
    on_cpu = ToyFederation(algorithm, **settings)
    on_gpu = ToyFederation(algorithm, "graph", device="cuda", **settings)
    on_gpu.simulator.cohort._repeat = cuda_graphs.GraphCache(fuse).repeat
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        gpu_state = {name: value.cpu() for name, value in on_gpu.final_state().items()}
    assert max_difference(on_cpu.final_state(), gpu_state) < 1e-5


@pytest.mark.gpu
@needs_gpu
def test_step_that_cannot_be_recorded_runs_eagerly_with_a_warning() -> None:
    algorithm = SynchronizingAlgorithm()
    with pytest.warns(UserWarning, match="step by step"):
        final_state = ToyFederation(algorithm, "graph", device="cuda").final_state()
    gpu_state = {name: value.cpu() for name, value in final_state.items()}
    assert max_difference(ToyFederation(algorithm).final_state(), gpu_state) < 1e-6


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("limit", [1, 2])
def test_chunked_cohort_equals_full_cohort(limit: int) -> None:
    full, chunked = (ToyFederation(FEDCOG, "graph", device="cuda") for _ in range(2))
    chunked.simulator.cohort.max_clients = limit
    assert max_difference(full.final_state(), chunked.final_state()) < 1e-9


@pytest.mark.gpu
@needs_gpu
def test_graphs_share_one_memory_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two large steps need the temporary memory of one, in any order of replay."""

    def step(state: State, fixed: State) -> State:
        wide = state["x"][:, None] * fixed["y"]  # over 64 MiB of temporary memory
        return {"x": (wide.sin().cumsum(1) * wide.cos()).sum(1) / fixed["y"].numel()}

    inputs = [
        ({"x": torch.rand(4096, device="cuda")}, {"y": torch.rand(width, device="cuda")})
        for width in (4096, 4095)
    ]
    # A new pool, without the graphs of other tests.
    monkeypatch.setattr(cuda_graphs, "_pools", WeakValueDictionary())

    def pool_bytes() -> int:
        torch.cuda.empty_cache()
        return sum(
            int(segment["total_size"])
            for segment in torch.cuda.memory_snapshot()
            if tuple(segment["segment_pool_id"]) == pool.handle
        )

    caches = [cuda_graphs.GraphCache(fuse=False) for _ in inputs]
    pool = cuda_graphs.MemoryPool.current()
    sizes = list[int]()
    for cache, (state, fixed) in zip(caches, inputs, strict=True):
        cache.repeat(step, "", state, fixed, 3)
        sizes.append(pool_bytes())
    assert 2**26 < sizes[0] == sizes[1]
    for index in (0, 1, 0, 0, 1):
        state, fixed = inputs[index]
        replayed = caches[index].repeat(step, "", state, fixed, 17)["x"]
        assert torch.equal(replayed, cuda_graphs.repeat_eagerly(step, "", state, fixed, 17)["x"])
    for cache in caches:
        cache.clear()
    assert pool_bytes() == 0
    assert torch.equal(
        cuda_graphs.GraphCache(fuse=False).repeat(step, "", *inputs[0], 3)["x"],
        cuda_graphs.repeat_eagerly(step, "", *inputs[0], 3)["x"],
    )


@pytest.mark.gpu
@needs_gpu
def test_round_reads_the_device_at_most_twice() -> None:
    toy = ToyFederation(FedAvg(), "graph", device="cuda", rounds=3, dtype=torch.float32)
    for round in range(2):
        toy.server.run_round(round)
    server = Server(toy.algorithm, toy.simulator, toy.server.scorer, toy.schedule, toy.server.state)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    ) as profiler:
        server.run_round(2)
    copies = [event.name for event in profiler.events() if "Memcpy DtoH" in event.name]
    # One copy per round; a new server also reads the evaluation of the model that it sends.
    assert len(copies) <= 2, copies
