"""Kernels compiled before they are launched, by processes beside this one: those of torch's compiler, which has them
anyway. They leave what they make in Triton's cache, where the launch finds it."""

import contextlib
import os
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, NamedTuple

import torch
from torch import Tensor

_begun: dict[Any, "Future[None]"] = {}


class Form(NamedTuple):
    """All that a kernel is compiled for of a tensor."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, value: Tensor) -> "Form":
        """That of a tensor, or of what stands in for one."""
        return cls(tuple(value.shape), value.stride(), value.dtype)

    @property
    def empty(self) -> Tensor:
        """A tensor of this form and no content."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device="meta")


def begin(device: torch.device, launcher: Callable[..., Tensor], *args: Any) -> None:
    """Have compiled what `launcher(*args)` would launch, unless that has begun already.

    Where it cannot be done beside, it is done at the launch.
    """
    forms = tuple(Form.of(value) if isinstance(value, Tensor) else value for value in args)
    if (launcher, forms) in _begun:
        return
    with contextlib.suppress(Exception):
        from torch._inductor.async_compile import AsyncCompile
        from torch._inductor.runtime import compile_tasks
        from torch._inductor.runtime.cache_dir_utils import triton_cache_dir

        for name in ("_set_triton_ptxas_path", "_set_triton_libdevice_path"):  # as those processes have them: a cached
            getattr(compile_tasks, name, lambda: None)()  # kernel is found again by the tools that made it
        folder = os.environ.setdefault("TRITON_CACHE_DIR", triton_cache_dir(device.index or 0))
        major, minor = torch.cuda.get_device_capability(device)
        beside = AsyncCompile.process_pool()
        _begun[launcher, forms] = beside.submit(_compile, folder, 10 * major + minor, launcher, *forms)


def finish(seconds: float = 60.0) -> None:
    """Wait for what has begun; what takes longer is left to the launch, and not waited for again."""
    late = wait(_begun.values(), timeout=seconds).not_done
    for job in [job for job, future in _begun.items() if future in late]:
        del _begun[job]


def _compile(folder: str, capability: int, launcher: Callable[..., Tensor], *args: Any) -> None:
    """The other process's part: launches compile, and launch nothing."""
    import triton
    from triton.runtime.jit import JITFunction

    os.environ["TRITON_CACHE_DIR"] = folder
    triton.runtime.driver.set_active(_Absent(capability))

    def compiled(kernel: Any, grid: Any) -> Callable[..., Any]:
        def run(*given: Any, **options: Any) -> None:
            made = kernel.run(*given, grid=grid, warmup=True, **options)
            with contextlib.suppress(Exception):  # the small C program that launches it is not Triton's to promise
                from triton.backends.nvidia.driver import CudaLauncher

                CudaLauncher(made.src, made.metadata)

        return run

    usual = JITFunction.__getitem__
    try:
        JITFunction.__getitem__ = compiled
        launcher(*(value.empty if isinstance(value, Form) else value for value in args))
    finally:
        JITFunction.__getitem__ = usual


class _Absent:
    """A GPU that is not there: all that a compiler asks of one."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0
