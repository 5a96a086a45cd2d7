"""Settings of the test session: one thread, markers, and which worker runs which tests.

Markers name what a test needs beside Python: `ray`, `browser`, `processes` (servers, nodes or
workers as real processes), `compiler`, `gpu`; `slow` marks other tests that take seconds.
`make quick` runs the tests without any marker. `make test` leaves out `long`, the three largest
networks of `runs/test_networks_tried.py`: run them with `pytest -m long`.
"""

import os
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    # Triton reads this when it is imported: without a GPU, its interpreter runs the kernels.
    os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile(
    "fedcog",
    deadline=None,  # a busy machine is no error
    suppress_health_check=[HealthCheck.too_slow],
    derandomize="CI" in os.environ,
)
settings.load_profile("fedcog")


ONE_WORKER = (
    ("deploy/test_deployment",),
    ("test_flower_backend", "test_hostile_clients"),
    ("test_cuda_graphs", "engine/test_stacking"),
    ("test_trackers",),
    ("test_dashboard",),
    ("report/test_browser",),
    ("test_docs",),
    ("test_export",),
    ("test_run_directory",),
    ("tuning/test_sweep",),
    ("studies/test_theory",),
)
"""Groups of modules that one worker runs one after another: their tests start a dozen processes
each, or share a fixture that takes long to make."""

FIRST = (
    "test_existing_flower_client",
    "deploy/test_deployment",
    "test_flower_backend",
    "test_hostile_clients",
    "test_smoke",
    "test_examples",
    "test_cuda_graphs",
    "test_job_queue",
    "test_torchrun",
    "test_docs",
)
"""Tests that take longest and mostly wait. They start first, so that other tests run at the same
time. The first three go to three workers; one of them behind another would double the wait."""


FIXTURE_MARKERS = {"browser": "browser", "site": "compiler"}
"""Markers of the tests that use a fixture: `browser` starts Chromium, `site` builds the docs."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest modules first, and mark tests by their fixtures."""
    items.sort(key=_position)
    for item in items:
        for fixture, marker in FIXTURE_MARKERS.items():
            if fixture in getattr(item, "fixturenames", ()):
                item.add_marker(marker)


def _position(item: pytest.Item) -> int:
    for position, name in enumerate(FIRST):
        if name in item.nodeid:
            return position
    return len(FIRST)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each group of `ONE_WORKER` to one worker; other tests go to whoever is free."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            for group in ONE_WORKER:
                if any(name in nodeid for name in group):
                    return group[0]
            return nodeid

        def remove_node(self, node: Any) -> str | None:
            """Take back the tests of a worker that crashed, without those that have run.

            xdist queues a crashed worker's finished tests again. Another worker then receives
            nothing to do, and the session never ends.
            """
            work = self.assigned_work[node]
            self.assigned_work[node] = {
                scope: tests for scope, tests in work.items() if not all(tests.values())
            }
            crashed: str | None = super().remove_node(node)
            return crashed

        def _reschedule(self, node: Any) -> None:
            """Assign work; a worker starts a test only when it knows the next one."""
            super()._reschedule(node)
            if self.workqueue and self._pending_of(self.assigned_work[node]) < 2:
                super()._reschedule(node)

    return Scheduling(config, log)


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Use one thread: small tensors are several times slower on more."""
    torch.set_num_threads(1)
