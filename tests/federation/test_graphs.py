"""Recorded steps: what is traced of a round does what the round does; a GPU plays it back."""

import dataclasses
import shutil
import warnings
from collections.abc import Callable, Hashable
from typing import Any
from weakref import WeakValueDictionary

import pytest
import torch
from torch import Tensor

from fedcog import generators, tree
from fedcog.algorithms import MOON, SCAFFOLD, Algorithm, Batch, FedAvg, FedCOG, FedProx, Site
from fedcog.federation import graphs
from fedcog.optimiser import Optimiser
from fedcog.testing import Small, several, worst
from fedcog.tree import Params, State
from tests.user_models import USER_MODELS, own_generator

COG = FedCOG(count=8, steps=3, start_round=1, lr=0.1)
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Traced(graphs.Graphs):
    """Steps traced as for a recording, but run as plain operators."""

    def repeat(self, step: graphs.Step, key: Hashable, state: State, fixed: State, times: int) -> State:
        layout = graphs.Layout(step, state, fixed)
        graph, _ = layout.traced()
        for _ in range(times):
            graph(*layout.tensors)
        return layout.state


CASES: dict[str, tuple[Algorithm, dict[str, Any]]] = {
    "fedavg": (FedAvg(), {}),
    "unequal steps": (SCAFFOLD(), {"epochs": 0.5}),
    "batch norm": (FedAvg(), {"module": USER_MODELS["batch-norm"]()}),
    "adamw": (FedProx(mu=0.1), {"optimiser": Optimiser("adamw")}),
    "statistics": (dataclasses.replace(COG, lambda_bn=0.5), {"module": USER_MODELS["batch-norm"]()}),
    "generator": (
        dataclasses.replace(COG, lambda_bn=0.5, generator="custom", noise=5),
        {"module": USER_MODELS["batch-norm"](), "generator": generators.usable(own_generator(), 5, (1, 8, 8))},
    ),
    "clipped": (dataclasses.replace(COG, inner=MOON()), {"clip": 1.0}),
    "several labels": (dataclasses.replace(COG, inner=MOON()), {"dataset": several()}),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_traced_does_what_the_round_does(name: str) -> None:
    algorithm, settings = CASES[name]
    plain, traced = (Small(algorithm, "vmap", **settings) for _ in range(2))
    traced.backend.cohort._repeat = Traced().repeat
    with torch.no_grad():
        assert worst(plain.everything(), traced.everything()) < 1e-12


@pytest.mark.parametrize("name", CASES)
def test_what_is_traced_writes_over_the_state_alone(name: str) -> None:
    """A compiler takes it that nothing else is written in place, and says nothing if something is."""
    algorithm, settings = CASES[name]
    small, seen = Small(algorithm, "vmap", rounds=1, **settings), list[torch.fx.GraphModule]()

    def repeat(step: graphs.Step, key: Hashable, state: State, fixed: State, times: int) -> State:
        seen.append(graphs.Layout(step, state, fixed).traced()[0])
        return graphs.in_turn(step, key, state, fixed, times)

    small.backend.cohort._repeat = repeat
    small.everything()
    for graph in seen:
        writes = [node for node in graph.graph.nodes if getattr(node.target, "_schema", None)]
        writes = [node for node in writes if node.target._schema.is_mutable]
        assert writes and all(node.target is torch.ops.aten.copy_.default for node in writes)
        assert all(node.args[0].op == "placeholder" for node in writes)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's compiler needs g++ on a CPU")
def test_what_is_compiled_does_what_the_round_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several labels, whose loss torch differentiates in place."""
    # what this processor can do at once is found out by a dozen programs, and each operator takes g++ seconds
    monkeypatch.setattr("torch._inductor.cpu_vec_isa.valid_vec_isa_list", list, raising=False)
    settings = {"dataset": several(), "rounds": 2}
    plain, compiled = (Small(FedAvg(), "vmap", module=USER_MODELS["frozen"](), **settings) for _ in range(2))
    made: list[tuple[graphs.Layout, Callable[..., object]]] = []

    def repeat(step: graphs.Step, key: Hashable, state: State, fixed: State, times: int) -> State:
        if not made:
            layout = graphs.Layout(step, state, fixed)
            made.append((layout, graphs.fused(layout)))
        layout, run = made[0]
        layout.fill(state, fixed)
        for _ in range(times):
            run(*layout.tensors)
        return tree.apply(torch.clone, layout.state)

    compiled.backend.cohort._repeat = repeat
    with torch.no_grad():
        assert worst(plain.everything(), compiled.everything()) < 1e-12


def test_a_step_is_laid_out_and_put_back() -> None:
    def step(state: State, fixed: State) -> State:
        return {"sum": state["sum"] + fixed["part"]["one"], "step": state["step"] + 1}

    state = {"sum": torch.zeros(2), "step": torch.zeros((), dtype=torch.int64)}
    stock = torch.ones(2)
    layout = graphs.Layout(step, state, {"part": {"one": torch.ones(2)}, "stock": {"all": stock}})
    assert layout.fixed["stock"]["all"] is stock and layout.state["sum"] is not state["sum"]
    layout.write(*layout.tensors)
    assert layout.state["sum"].tolist() == [1, 1] and int(layout.state["step"]) == 1
    layout.reset()
    assert layout.state["sum"].tolist() == [0, 0] and state["sum"].tolist() == [0, 0]
    layout.fill(
        {"sum": torch.ones(2), "step": torch.tensor(5)}, {"part": {"one": 2 * torch.ones(2)}, "stock": {"all": stock}}
    )
    layout.write(*layout.tensors)
    assert layout.state["sum"].tolist() == [3, 3] and int(layout.state["step"]) == 6


@dataclasses.dataclass(frozen=True)
class Peeking(Algorithm):
    """Looks at a number in the midst of a step, which no recording can."""

    def penalty(self, params: Params, outputs: State, batch: Batch, site: Site) -> Tensor:
        return torch.zeros_like(site.lr) * float(site.lr)


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_gpu_plays_back_what_a_cpu_computes(name: str, fuse: bool) -> None:
    algorithm, settings = CASES[name]
    here, there = Small(algorithm, **settings), Small(algorithm, "graph", device="cuda", **settings)
    there.backend.cohort._repeat = graphs.Graphs(fuse).repeat
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        there_is = there.everything()
    assert worst(here.everything(), {name: value.cpu() for name, value in there_is.items()}) < 1e-5


@pytest.mark.gpu
@GPU
def test_what_cannot_be_recorded_runs_all_the_same_and_says_why() -> None:
    with pytest.warns(UserWarning, match="step by step"):
        there = Small(Peeking(), "graph", device="cuda").everything()
    assert worst(Small(Peeking()).everything(), {name: value.cpu() for name, value in there.items()}) < 1e-6


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("limit", [1, 2])
def test_parts_of_a_cohort_come_to_the_whole(limit: int) -> None:
    whole, parts = (Small(COG, "graph", device="cuda") for _ in range(2))
    parts.backend.cohort.limit = limit
    assert worst(whole.everything(), parts.everything()) < 1e-9


@pytest.mark.gpu
@GPU
def test_recordings_share_the_memory_they_play_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one needs while it plays is nobody's afterwards: two large steps take the room of one, in any order."""

    def step(state: State, fixed: State) -> State:
        wide = state["x"][:, None] * fixed["y"]  # 64 MiB and more, on the way to 16 KiB
        return {"x": (wide.sin().cumsum(1) * wide.cos()).sum(1) / fixed["y"].numel()}

    given = [
        ({"x": torch.rand(4096, device="cuda")}, {"y": torch.rand(width, device="cuda")}) for width in (4096, 4095)
    ]
    monkeypatch.setattr(graphs, "_pools", WeakValueDictionary())  # no other test's recordings lie in it

    def taken() -> int:
        torch.cuda.empty_cache()
        found = [one for one in torch.cuda.memory_snapshot() if tuple(one["segment_pool_id"]) == pool.handle]
        return sum(int(one["total_size"]) for one in found)

    both, pool = [graphs.Graphs(fuse=False) for _ in given], graphs.Pool.here()
    sizes = list[int]()
    for one, (state, fixed) in zip(both, given, strict=True):
        one.repeat(step, "", state, fixed, 3)
        sizes.append(taken())
    assert 2**26 < sizes[0] == sizes[1]
    for turn in (0, 1, 0, 0, 1):
        state, fixed = given[turn]
        played = both[turn].repeat(step, "", state, fixed, 17)["x"]
        assert torch.equal(played, graphs.in_turn(step, "", state, fixed, 17)["x"])
    for one in both:
        one.forget()
    assert taken() == 0
    assert torch.equal(
        graphs.Graphs(fuse=False).repeat(step, "", *given[0], 3)["x"], graphs.in_turn(step, "", *given[0], 3)["x"]
    )


@pytest.mark.gpu
@GPU
def test_a_round_reads_the_device_once() -> None:
    small = Small(FedAvg(), "graph", device="cuda", rounds=3, dtype=torch.float32)
    rounds = []
    from fedcog.federation.rounds import federate

    for done in federate(small.algorithm, small.backend, small, small.schedule, small.server, 0):
        rounds.append(done)
        if len(rounds) == 2:
            break
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    ) as seen:
        small.run(2)
    down = [event for event in seen.events() if "Memcpy DtoH" in event.name]
    assert len(down) <= 2, [event.name for event in down]  # a fresh start looks at the sent model's hits once more
