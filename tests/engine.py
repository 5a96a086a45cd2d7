"""Flower's simulation engine, where it can run."""

import sys

import pytest


def needed() -> None:
    """Skip a test, or a whole module of them, where there is no Ray, or where it could start nothing."""
    pytest.importorskip("ray")
    if any(letter.isspace() for letter in sys.executable):
        pytest.skip("Ray starts no process by a path with a space", allow_module_level=True)
