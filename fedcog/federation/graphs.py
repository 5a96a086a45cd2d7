"""Steps over tensors, repeated: one by one, or recorded once as a CUDA graph and played back.

A step is a pure function of what it moves (`state`) and what stays (`fixed`). To record it, both are laid out in memory
of their own; the step is traced down to plain operators, fused by torch's compiler, and captured together with the
writing of its results over its state. From then on a round is: copy in, play so many times, copy out.
"""

import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from fedcog import tree
from fedcog.kernels import ahead
from fedcog.tree import State

if TYPE_CHECKING:  # to load it takes seconds: `get_ready` does it beside other things
    from torch._subclasses import FakeTensor

Step = Callable[[State, State], State]
BURST = 16  # steps played by one launch, where so many are left
KEPT = 8  # recordings kept ready
OPTIONS = {
    "triton.cudagraphs": False,
    "triton.autotune_pointwise": False,
    "triton.coalesce_tiling_analysis": False,
    "shape_padding": False,
    "loop_ordering_after_fusion": False,
    "emulate_precision_casts": True,
}
"""Of torch's compiler: graphs are recorded here, and what is left out takes seconds for a few microseconds a step.

The last one keeps a product and a sum apart that happen to be in one kernel: what is fused with what is no matter of
rounding.
"""


def get_ready() -> None:
    """Load the compiler and start its workers, beside whatever else a run begins with: they take some seconds."""
    threading.Thread(target=_load, daemon=True).start()


def _load() -> None:
    from torch._inductor.async_compile import AsyncCompile

    AsyncCompile.warm_pool()  # first: the workers have as much to load themselves
    from torch._inductor.compile_fx import compile_fx_inner  # noqa: F401


def in_turn(step: Step, key: Hashable, state: State, fixed: State, times: int) -> State:
    """The state after so many steps, taken one by one."""
    for _ in range(times):
        state = step(state, fixed)
    return state


class Layout:
    """State and fixed tensors of a step in memory of their own, and the step as a function that writes over the state.

    What is fixed under "stock" stays where it lies: the data, which is large and never changes.
    """

    def __init__(self, step: Step, state: State, fixed: State) -> None:
        self.state = tree.apply(_own, state)
        self.fixed = {name: value if name == "stock" else _owned(value) for name, value in fixed.items()}
        self._step = step
        self._moving, self._still = tree.flatten(self.state), tree.flatten(self.fixed)
        self.tensors = [*self._moving.values(), *self._still.values()]
        self.begun = list(tree.flatten(state).values())

    def fill(self, state: State, fixed: State) -> None:
        """Put a round's numbers in place."""
        for places, given in ((self._moving, tree.flatten(state)), (self._still, tree.flatten(fixed))):
            names = [name for name in places if places[name] is not given[name]]
            if names:
                torch._foreach_copy_([places[name] for name in names], [given[name] for name in names])

    def write(self, *tensors: Tensor) -> tuple[()]:
        """One step on `tensors`, its results written over those of the state."""
        given = iter(tensors)
        state, fixed = (tree.apply(lambda _: next(given), part) for part in (self.state, self.fixed))
        after, places = tree.flatten(self._step(state, fixed)), tree.flatten(state)
        for name, place in places.items():
            place.copy_(after[name])
        return ()

    def traced(self) -> "tuple[torch.fx.GraphModule, list[FakeTensor]]":
        """The same as a graph of plain operators, mapping and differentiation done with, and stand-ins for its tensors.

        Nothing is computed. Nothing is written in place, either, but the state at the end: networks and torch's own
        rules do so with what they need no more, and a compiler moves such writes as if nobody looked.
        """
        from torch._inductor import lowering  # noqa: F401  (the table needs it, and does not load it)
        from torch._inductor.decomposition import select_decomp_table
        from torch._subclasses import FakeTensorMode
        from torch.func import functionalize
        from torch.fx.experimental.proxy_tensor import make_fx
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        fake = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        stand_ins = [fake.from_tensor(value, static_shapes=True) for value in self.tensors]
        table = select_decomp_table()
        graph = make_fx(self.write, table)(*stand_ins)
        return make_fx(functionalize(graph), table)(*stand_ins), stand_ins  # custom rules of gradients are gone by now

    def reset(self) -> None:
        """Put the state back as it was given: it may hold a place in a plan, which must not run over its end."""
        for place, given in zip(self._moving.values(), self.begun, strict=True):
            place.copy_(given)


class Pool:
    """Memory for what recordings need while they play: nothing of it outlives a step, so all of them share it."""

    def __init__(self) -> None:
        self.handle = torch.cuda.graph_pool_handle()

    @staticmethod
    def here() -> "Pool":
        """The current GPU's, for as long as somebody has recordings in it."""
        device = torch.cuda.current_device()
        pool = _pools.get(device)
        if pool is None:
            pool = _pools[device] = Pool()
        return pool


_pools: WeakValueDictionary[int, Pool] = WeakValueDictionary()


class Recording:
    """A step captured as CUDA graphs, of many steps and of one, ready to be played."""

    def __init__(self, layout: Layout, run: Callable[..., object]) -> None:
        self._layout, self._pool = layout, Pool.here()
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(2):  # whatever is done at the first call only is done now
                run(*layout.tensors)
                layout.reset()
        torch.cuda.current_stream().wait_stream(aside)
        self._graphs = {size: self._capture(run, size) for size in (BURST, 1)}
        layout.begun.clear()

    def _capture(self, run: Callable[..., object], size: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool.handle):
            for _ in range(size):
                run(*self._layout.tensors)
        return graph

    def play(self, state: State, fixed: State, times: int) -> State:
        """The state after so many steps."""
        self._layout.fill(state, fixed)
        for size, graph in self._graphs.items():
            for _ in range(times // size):
                graph.replay()
            times %= size
        return tree.apply(torch.clone, self._layout.state)


class Graphs:
    """The recordings of a cohort, by what is done and by the shapes it is done on."""

    def __init__(self, fuse: bool = True) -> None:
        self.fuse = fuse
        self._kept: OrderedDict[Hashable, Recording | None] = OrderedDict()

    def repeat(self, step: Step, key: Hashable, state: State, fixed: State, times: int) -> State:
        """The state after so many steps; what cannot be recorded is taken step by step, and says why."""
        key = key, _form(state), _form(fixed)
        if key not in self._kept:
            self._kept[key] = self._record(step, state, fixed)
        self._kept.move_to_end(key)
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        recording = self._kept[key]
        return in_turn(step, key, state, fixed, times) if recording is None else recording.play(state, fixed, times)

    def forget(self) -> None:
        """Give back the memory of all recordings."""
        self._kept.clear()
        torch.cuda.empty_cache()

    def _record(self, step: Step, state: State, fixed: State) -> Recording | None:
        layout, reason = Layout(step, state, fixed), ""
        if self.fuse:
            try:
                return Recording(layout, fused(layout))
            except torch.cuda.OutOfMemoryError:  # fewer clients at once will do
                raise
            except Exception as error:  # of a compiler, or of a network or an algorithm of somebody's own
                reason = f"not fused ({_first_line(error)})"
        try:
            recording = Recording(layout, layout.write)
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:
            warnings.warn(f"the GPU works step by step, not as a recorded graph: {_first_line(error)}", stacklevel=2)
            return None
        if reason:
            warnings.warn(f"the GPU works as a recorded graph, but {reason}.", stacklevel=2)
        return recording


def fused(layout: Layout) -> Callable[..., object]:
    """The step compiled: its graph is plain already, so torch's compiler is entered where it makes kernels of one.

    Meanwhile what else the step launches is compiled beside.
    """
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner

    graph, tensors = layout.traced()
    options = {name: value for name, value in OPTIONS.items() if hasattr(config, name)}  # a torch may not have all
    with config.patch(options), tracing(TracingContext(tensors[0].fake_mode)), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that TF32 is off: it is on purpose
        compiled = compile_fx_inner(graph, tensors)
    ahead.finish()
    return lambda *given: compiled(list(given))


def _owned(value: Tensor | State) -> Tensor | State:
    return tree.apply(_own, value) if isinstance(value, dict) else _own(value)


def _own(value: Tensor) -> Tensor:
    return value.clone(memory_format=torch.contiguous_format)


def _form(state: State) -> tuple[tuple[str, torch.Size, torch.dtype], ...]:
    return tuple(sorted((name, value.shape, value.dtype) for name, value in tree.flatten(state).items()))


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
