"""One thread: small tensors are several times slower on more. Hypothesis without a stop-watch: machines are busy."""

import os
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is loaded: kernels are tried without a GPU, too

settings.register_profile(
    "fedcog", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize="CI" in os.environ
)
settings.load_profile("fedcog")


TOGETHER = (
    ("test_deployment",),
    ("flower", "test_secure"),
    ("test_graphs", "federation/test_together"),
    *((name,) for name in ("test_track", "test_watch", "test_browser", "test_docs", "test_export")),
)
"""Tests that one worker has, one after another: of a dozen processes each, or of something that takes long to make."""
LONG = (
    "test_deployment",
    "flower",
    "test_secure",
    "test_smoke",
    "test_graphs",
    "test_reproduce",
    "test_ranks",
    "test_docs",
)
"""Tests that take longest, and mostly wait: they come first, in this order, and the others are done beside them."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What would keep one worker busy when the others are done does not come last."""
    items.sort(key=lambda item: next((place for place, name in enumerate(LONG) if name in item.nodeid), len(LONG)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Who has which tests. (xdist's own marks of groups say nothing to it with pytest 9.)"""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return next((some[0] for some in TOGETHER if any(name in nodeid for name in some)), nodeid)

    return Scheduling(config, log)


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)
