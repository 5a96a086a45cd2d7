"""Flower's parts, where they can run."""

import sys

import pytest


def needed() -> None:
    """Skip what runs in Flower's simulation engine, a test or a whole module, where there is no Ray for it."""
    pytest.importorskip("ray")
    no_space()


def no_space() -> None:
    """Skip where a path with a space leads to this Python: Ray then starts nothing, and the server finds no tables."""
    if any(letter.isspace() for letter in sys.executable):
        pytest.skip("Flower does not work by a path with a space", allow_module_level=True)
