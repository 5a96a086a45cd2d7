"""Kinds of devices: clients that differ in what they can do, and so in some settings."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

from fedcog.algorithms import Algorithm, Wrapper

Some = TypeVar("Some", bound=Algorithm)


class Device(NamedTuple):
    """A kind of device: how many clients have one, how long they train, and their algorithm's own settings.

    `changes` are settings by an algorithm's class. Steps and epochs are None where they are as everybody's.
    """

    name: str
    clients: int
    steps: int | None = None
    epochs: float | None = None
    changes: Mapping[type[Algorithm], Mapping[str, Any]] = {}

    @property
    def words(self) -> str:
        """What is its own."""
        own: dict[str, Any] = {"local_steps": self.steps, "local_epochs": self.epochs}
        own = {name: value for name, value in own.items() if value is not None}
        for changes in self.changes.values():
            own |= changes
        return ", ".join(f"{name} {value}" for name, value in own.items()) or "as everybody's"

    def adapt(self, algorithm: Some) -> Some:
        """The algorithm as it runs on this kind of device."""
        changes = dict(self.changes.get(type(algorithm), {}))
        if isinstance(algorithm, Wrapper):
            changes["inner"] = self.adapt(algorithm.inner)
        return dataclasses.replace(algorithm, **changes) if changes else algorithm
