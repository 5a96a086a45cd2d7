"""Ahead-of-time compilation of kernels in the worker processes of torch's compiler.

The workers write to Triton's cache, where a later launch finds the kernel.
"""

import contextlib
import os
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, NamedTuple

import torch
from torch import Tensor

_compilations: dict[Any, "Future[None]"] = {}


class TensorSpec(NamedTuple):
    """The properties of a tensor that a kernel is compiled for."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def from_tensor(cls, value: Tensor) -> "TensorSpec":
        """Return the properties of a tensor, real or fake."""
        return cls(tuple(value.shape), value.stride(), value.dtype)

    @property
    def meta_tensor(self) -> Tensor:
        """A tensor with these properties and no content."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device="meta")


def start_compiling(device: torch.device, launcher: Callable[..., Tensor], *args: Any) -> None:
    """Start to compile the kernels of `launcher(*args)`, unless that has been started already.

    If it fails, the kernels are compiled at the launch.

    Args:
        device: The GPU.
        launcher: Function that launches kernels.
        *args: Its arguments; only the shapes of tensors matter.
    """
    specs = tuple(
        TensorSpec.from_tensor(value) if isinstance(value, Tensor) else value for value in args
    )
    if (launcher, specs) in _compilations:
        return
    with contextlib.suppress(Exception):
        from torch._inductor.async_compile import AsyncCompile
        from torch._inductor.runtime import compile_tasks
        from torch._inductor.runtime.cache_dir_utils import triton_cache_dir

        # The workers use these tools, and the cache distinguishes kernels by tools.
        for name in ("_set_triton_ptxas_path", "_set_triton_libdevice_path"):
            getattr(compile_tasks, name, lambda: None)()
        folder = os.environ.setdefault("TRITON_CACHE_DIR", triton_cache_dir(device.index or 0))
        major, minor = torch.cuda.get_device_capability(device)
        pool = AsyncCompile.process_pool()
        _compilations[launcher, specs] = pool.submit(
            _compile, folder, 10 * major + minor, launcher, *specs
        )


def wait_for_compilations(seconds: float = 60.0) -> None:
    """Wait for started compilations; unfinished ones are left to the launch and forgotten."""
    unfinished = wait(_compilations.values(), timeout=seconds).not_done
    for job in [job for job, future in _compilations.items() if future in unfinished]:
        del _compilations[job]


def _compile(folder: str, capability: int, launcher: Callable[..., Tensor], *args: Any) -> None:
    """Call a launcher in a worker process, where launches compile but run nothing."""
    import triton
    from triton.runtime.jit import JITFunction

    os.environ["TRITON_CACHE_DIR"] = folder
    triton.runtime.driver.set_active(_FakeDriver(capability))

    def _compile_only(kernel: Any, grid: Any) -> Callable[..., Any]:
        def run(*kernel_args: Any, **options: Any) -> None:
            compiled = kernel.run(*kernel_args, grid=grid, warmup=True, **options)
            # The C launcher of a kernel is not part of Triton's public interface.
            with contextlib.suppress(Exception):
                from triton.backends.nvidia.driver import CudaLauncher

                CudaLauncher(compiled.src, compiled.metadata)

        return run

    original = JITFunction.__getitem__
    try:
        JITFunction.__getitem__ = _compile_only
        launcher(*(value.meta_tensor if isinstance(value, TensorSpec) else value for value in args))
    finally:
        JITFunction.__getitem__ = original


class _FakeDriver:
    """What the compiler asks of a GPU driver, without a GPU."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0
