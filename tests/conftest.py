"""One thread: small tensors are several times slower on more. Hypothesis without a stop-watch: machines are busy."""

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is loaded: kernels are tried without a GPU, too

settings.register_profile(
    "fedcog", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize="CI" in os.environ
)
settings.load_profile("fedcog")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest, and mostly waits, comes first: the others are done beside it."""
    items.sort(key=lambda item: "test_deployment" not in item.nodeid)


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)
