"""Repeated steps over tensors: one by one, or recorded once as a CUDA graph and replayed.

A step is a pure function of what it changes (`state`) and what stays constant (`fixed`). To record
it, both are copied into memory of their own. The step is traced to plain operators, fused by
torch's compiler, and captured together with the writing of its results over its state. A round then
copies its numbers in, replays the graph, and copies the results out.
"""

import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from fedcog.core import tree
from fedcog.core.tree import State
from fedcog.models.ops.kernels import ahead_of_time

if TYPE_CHECKING:  # importing it takes seconds: `preload_compiler` does it in the background
    from torch._subclasses import FakeTensor

Step = Callable[[State, State], State]
"""A step: (state, fixed) to the new state."""

STEPS_PER_LAUNCH = 16
"""Number of steps that one launch replays, if that many are left."""
MAX_RECORDINGS = 8
"""Number of recordings that a cohort keeps."""
NUM_WARMUP_STEPS = 2
COMPILER_OPTIONS = {
    "triton.cudagraphs": False,
    "triton.autotune_pointwise": False,
    "triton.coalesce_tiling_analysis": False,
    "shape_padding": False,
    "loop_ordering_after_fusion": False,
    "emulate_precision_casts": True,
}
"""Options of torch's compiler. Graphs are recorded here, and the disabled analyses take seconds to
save microseconds per step. The last option keeps a product and a sum apart that are in one kernel,
so that fusion does not change rounding."""


def preload_compiler() -> None:
    """Import the compiler and start its workers in the background, which takes seconds."""
    threading.Thread(target=_import_compiler, daemon=True).start()


def _import_compiler() -> None:
    from torch._inductor.async_compile import AsyncCompile

    AsyncCompile.warm_pool()  # first, because the workers import as much themselves
    from torch._inductor.compile_fx import compile_fx_inner  # noqa: F401


def repeat_eagerly(step: Step, key: Hashable, state: State, fixed: State, num_steps: int) -> State:
    """Take steps one by one.

    Args:
        step: The step.
        key: Ignored; for the signature of `GraphCache.repeat`.
        state: State before the first step.
        fixed: What stays constant.
        num_steps: Number of steps.

    Returns:
        The state after the last step.
    """
    for _ in range(num_steps):
        state = step(state, fixed)
    return state


class StepBuffers:
    """State and constants of a step in memory of their own, and the step that writes over them.

    The constant `"dataset"` is large and never changes, so it is not copied.
    """

    def __init__(self, step: Step, state: State, fixed: State) -> None:
        self.state = tree.apply(_copy, state)
        self.fixed = {
            name: value if name == "dataset" else _copy_tree(value) for name, value in fixed.items()
        }
        self._step = step
        self._state_tensors = tree.flatten(self.state)
        self._fixed_tensors = tree.flatten(self.fixed)
        self.tensors = [*self._state_tensors.values(), *self._fixed_tensors.values()]
        self.initial = list(tree.flatten(state).values())

    def fill(self, state: State, fixed: State) -> None:
        """Copy a round's numbers in.

        Args:
            state: State before the first step.
            fixed: What stays constant.
        """
        _copy_changed(self._state_tensors, tree.flatten(state))
        _copy_changed(self._fixed_tensors, tree.flatten(fixed))

    def write_step(self, *tensors: Tensor) -> tuple[()]:
        """Take one step on `tensors` and write its results over those of the state."""
        remaining = iter(tensors)
        state = tree.apply(lambda _: next(remaining), self.state)
        fixed = tree.apply(lambda _: next(remaining), self.fixed)
        after = tree.flatten(self._step(state, fixed))
        for name, target in tree.flatten(state).items():
            target.copy_(after[name])
        return ()

    def trace(self) -> "tuple[torch.fx.GraphModule, list[FakeTensor]]":
        """Trace the step to a graph of plain operators, without computing anything.

        The graph writes nothing in place but the state at its end. Networks and torch's own rules
        do so with temporaries, and the compiler would reorder such writes.

        Returns:
            The graph, and fake tensors that stand for its inputs.
        """
        from torch._inductor import lowering  # noqa: F401  (fills the table of decompositions)
        from torch._inductor.decomposition import select_decomp_table
        from torch._subclasses import FakeTensorMode
        from torch.func import functionalize
        from torch.fx.experimental.proxy_tensor import make_fx
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        fakes = [mode.from_tensor(value, static_shapes=True) for value in self.tensors]
        table = select_decomp_table()
        graph = make_fx(self.write_step, table)(*fakes)
        # After the first pass, custom gradient rules are plain operators and can be functionalized.
        return make_fx(functionalize(graph), table)(*fakes), fakes

    def reset(self) -> None:
        """Restore the initial state: its step count must not run past the end of the plan."""
        for target, value in zip(self._state_tensors.values(), self.initial, strict=True):
            target.copy_(value)


class MemoryPool:
    """Temporary memory of recordings. Nothing in it outlives a step, so all recordings share it."""

    def __init__(self) -> None:
        self.handle = torch.cuda.graph_pool_handle()

    @staticmethod
    def current() -> "MemoryPool":
        """Return the pool of the current GPU, shared while any recording uses it."""
        device = torch.cuda.current_device()
        pool = _pools.get(device)
        if pool is None:
            pool = _pools[device] = MemoryPool()
        return pool


_pools: WeakValueDictionary[int, MemoryPool] = WeakValueDictionary()


class Recording:
    """A step captured as CUDA graphs, of many steps and of one."""

    def __init__(self, buffers: StepBuffers, run: Callable[..., object]) -> None:
        self._buffers = buffers
        self._pool = MemoryPool.current()
        side_stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side_stream):
            for _ in range(NUM_WARMUP_STEPS):
                run(*buffers.tensors)
                buffers.reset()
        torch.cuda.current_stream().wait_stream(side_stream)
        self._graphs = {size: self._capture(run, size) for size in (STEPS_PER_LAUNCH, 1)}
        buffers.initial.clear()

    def _capture(self, run: Callable[..., object], num_steps: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool.handle):
            for _ in range(num_steps):
                run(*self._buffers.tensors)
        return graph

    def replay(self, state: State, fixed: State, num_steps: int) -> State:
        """Replay steps.

        Args:
            state: State before the first step.
            fixed: What stays constant.
            num_steps: Number of steps.

        Returns:
            A copy of the state after the last step.
        """
        self._buffers.fill(state, fixed)
        for size, graph in self._graphs.items():
            for _ in range(num_steps // size):
                graph.replay()
            num_steps %= size
        return tree.apply(torch.clone, self._buffers.state)


class GraphCache:
    """The recordings of a cohort, by step and by shapes."""

    def __init__(self, fuse: bool = True) -> None:
        self.fuse = fuse
        self._recordings: OrderedDict[Hashable, Recording | None] = OrderedDict()

    def repeat(
        self, step: Step, key: Hashable, state: State, fixed: State, num_steps: int
    ) -> State:
        """Take steps as a CUDA graph. What cannot be recorded runs step by step, with a warning.

        Args:
            step: The step.
            key: What identifies the step besides the shapes of its tensors.
            state: State before the first step.
            fixed: What stays constant.
            num_steps: Number of steps.

        Returns:
            The state after the last step.
        """
        full_key = (key, _shapes(state), _shapes(fixed))
        if full_key not in self._recordings:
            self._recordings[full_key] = self._record(step, state, fixed)
        self._recordings.move_to_end(full_key)
        while len(self._recordings) > MAX_RECORDINGS:
            self._recordings.popitem(last=False)
        recording = self._recordings[full_key]
        if recording is None:
            return repeat_eagerly(step, key, state, fixed, num_steps)
        return recording.replay(state, fixed, num_steps)

    def clear(self) -> None:
        """Release the memory of all recordings."""
        self._recordings.clear()
        torch.cuda.empty_cache()

    def _record(self, step: Step, state: State, fixed: State) -> Recording | None:
        buffers = StepBuffers(step, state, fixed)
        reason = ""
        if self.fuse:
            try:
                return Recording(buffers, compile_step(buffers))
            except torch.cuda.OutOfMemoryError:  # the cohort retries with fewer clients
                raise
            except Exception as error:  # from the compiler, or from a user's network or algorithm
                reason = f"not fused ({_first_line(error)})"
        try:
            recording = Recording(buffers, buffers.write_step)
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:
            warnings.warn(
                f"the GPU runs step by step, not as a CUDA graph: {_first_line(error)}",
                stacklevel=2,
            )
            return None
        if reason:
            warnings.warn(f"the GPU runs a CUDA graph, but {reason}.", stacklevel=2)
        return recording


def compile_step(buffers: StepBuffers) -> Callable[..., object]:
    """Compile a step with torch's compiler, entered where it turns a plain graph into kernels.

    The kernels that the step launches itself compile at the same time.
    """
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner

    graph, fakes = buffers.trace()
    options = {name: value for name, value in COMPILER_OPTIONS.items() if hasattr(config, name)}
    with (
        config.patch(options),
        tracing(TracingContext(fakes[0].fake_mode)),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # about TF32, which is off on purpose
        compiled = compile_fx_inner(graph, fakes)
    ahead_of_time.wait_for_compilations()
    return lambda *tensors: compiled(list(tensors))


def _copy_changed(targets: dict[str, Tensor], sources: dict[str, Tensor]) -> None:
    names = [name for name in targets if targets[name] is not sources[name]]
    if names:
        torch._foreach_copy_([targets[name] for name in names], [sources[name] for name in names])


def _copy_tree(value: Tensor | State) -> Tensor | State:
    return tree.apply(_copy, value) if isinstance(value, dict) else _copy(value)


def _copy(value: Tensor) -> Tensor:
    return value.clone(memory_format=torch.contiguous_format)


def _shapes(state: State) -> tuple[tuple[str, torch.Size, torch.dtype], ...]:
    flat = tree.flatten(state)
    return tuple(sorted((name, value.shape, value.dtype) for name, value in flat.items()))


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
