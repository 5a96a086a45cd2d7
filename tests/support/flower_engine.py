"""Run Flower's simulation engine in tests, with Ray or in this process."""

import sys
from collections.abc import Callable
from typing import Any

import pytest


def skip_without_ray() -> None:
    """Skip the test or module if Ray, which Flower's simulation engine needs, is missing."""
    pytest.importorskip("ray")
    skip_if_python_path_has_space()


def skip_if_python_path_has_space() -> None:
    """Skip if the path of this Python has a space: Ray and Flower's server then fail to start."""
    if any(letter.isspace() for letter in sys.executable):
        pytest.skip("Flower does not work from a path with a space", allow_module_level=True)


class InProcessBackend:
    """Replace Flower's Ray backend: messages are pickled as Ray does, but stay in this process."""

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
        result = VirtualClientEngineActor().run(app, message, "", context)
        return cloudpickle.loads(cloudpickle.dumps(result))[1:]  # type: ignore[no-any-return]

    def terminate(self) -> None:
        pass


@pytest.fixture
def in_process_flower(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run Flower's nodes in this process: Ray starts a dozen processes that each import torch."""
    monkeypatch.setattr(
        "flwr.server.superlink.fleet.vce.backend.raybackend.RayBackend", InProcessBackend
    )
