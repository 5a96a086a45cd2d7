"""Where and how a run computes: device, threads, worker processes, torch's global settings."""

import contextlib
import multiprocessing
import os
import sys
from collections.abc import Iterator

import torch

from fedcog.core.settings import ConfigError
from fedcog.runs.config.experiment import Experiment

DEVICE_TYPES = ("cpu", "cuda", "mps")


def find_device(name: str) -> torch.device:
    """Return the device of a name such as "auto" or "cuda:1", never another one instead.

    Raises:
        ConfigError: If the device cannot be used.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
        if device.type not in DEVICE_TYPES:
            raise RuntimeError("it cannot train")
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            [f"device '{name}' cannot be used here ({reason}): set --device auto or cpu."]
        ) from error
    return device


def stacks_seeds(experiment: Experiment) -> bool:
    """Return whether several seeds train as one cohort.

    They do on a GPU, which ten clients leave mostly idle, if all seeds share their data.
    """
    if experiment.shift != "none" or experiment.label_noise:
        return False
    is_graph = experiment.mapping in ("auto", "graph")
    return is_graph and find_device(experiment.device).type == "cuda"


def num_workers(requested: int) -> int:
    """Return the number of processes that train clients in parallel on a CPU.

    Workers are forks. Forks are safe only on Linux, and only if torch sees no GPU, because autograd
    then has threads that a fork would lose. In a pool of another library the cores are taken.

    Args:
        requested: The setting; 0 means one for each thread that has a core, where it is safe.

    Raises:
        ConfigError: If workers are requested where they are not possible.
    """
    cannot_fork = sys.platform != "linux" or multiprocessing.current_process().daemon
    if requested > 1 and cannot_fork:
        raise ConfigError(
            ["worker processes are forks, which are not possible here: set --workers 1."]
        )
    if requested or cannot_fork or torch.accelerator.is_available():
        return requested or 1
    return min(torch.get_num_threads(), len(os.sched_getaffinity(0)))


@contextlib.contextmanager
def torch_settings(experiment: Experiment) -> Iterator[None]:
    """Set torch's global settings for a run, and restore the caller's at the end."""
    num_threads = torch.get_num_threads()
    dtype = torch.get_default_dtype()
    matmul_tf32 = torch.backends.cuda.matmul.allow_tf32
    cudnn_tf32 = torch.backends.cudnn.allow_tf32
    try:
        torch.set_num_threads(experiment.threads or num_threads)
        torch.set_default_dtype(torch.float32)
        torch.backends.cuda.matmul.allow_tf32 = experiment.tf32
        torch.backends.cudnn.allow_tf32 = experiment.tf32
        with (
            torch.inference_mode(False),
            torch.autocast("cpu", enabled=False),
            torch.autocast("cuda", enabled=False),
        ):
            yield
    finally:
        torch.set_num_threads(num_threads)
        torch.set_default_dtype(dtype)
        torch.backends.cuda.matmul.allow_tf32 = matmul_tf32
        torch.backends.cudnn.allow_tf32 = cudnn_tf32
