"""Flower's parts, where they can run."""

import sys
from collections.abc import Callable
from typing import Any

import pytest


def needed() -> None:
    """Skip what runs in Flower's simulation engine, a test or a whole module, where there is no Ray for it."""
    pytest.importorskip("ray")
    no_space()


def no_space() -> None:
    """Skip where a path with a space leads to this Python: Ray then starts nothing, and the server finds no tables."""
    if any(letter.isspace() for letter in sys.executable):
        pytest.skip("Flower does not work by a path with a space", allow_module_level=True)


class Here:
    """In the place of Flower's backend: what Ray would carry to another process is copied in this one."""

    num_workers = 1

    def __init__(self, config: dict[str, Any]) -> None:
        pass

    def build(self, app: Callable[[], Any]) -> None:
        self._app = app

    def is_worker_idle(self) -> bool:
        return True

    def process_message(self, message: Any, context: Any) -> tuple[Any, Any]:
        from flwr.simulation.ray_transport.ray_actor import VirtualClientEngineActor
        from ray import cloudpickle

        app, message, context = cloudpickle.loads(cloudpickle.dumps((self._app, message, context)))
        done = VirtualClientEngineActor().run(app, message, "", context)
        return cloudpickle.loads(cloudpickle.dumps(done))[1:]  # type: ignore[no-any-return]

    def terminate(self) -> None:
        pass


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower's simulation engine with its nodes in this process: Ray takes a dozen others, each with torch to load."""
    monkeypatch.setattr("flwr.server.superlink.fleet.vce.backend.raybackend.RayBackend", Here)
