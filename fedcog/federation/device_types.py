"""Device types: groups of clients that differ in compute, and so in some settings."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar, cast

from fedcog.algorithms import Algorithm

AnyAlgorithm = TypeVar("AnyAlgorithm", bound=Algorithm)


class DeviceType(NamedTuple):
    """A type of device.

    Attributes:
        name: Its name.
        num_clients: Number of clients that have such a device.
        local_steps: Number of local steps; None means as all others.
        local_epochs: Number of local epochs; None means as all others.
        changes: Settings that differ on this device, by algorithm class.
    """

    name: str
    num_clients: int
    local_steps: int | None = None
    local_epochs: float | None = None
    changes: Mapping[type[Algorithm], Mapping[str, Any]] = {}

    @property
    def description(self) -> str:
        """The settings that differ on this device, in words."""
        own: dict[str, Any] = {"local_steps": self.local_steps, "local_epochs": self.local_epochs}
        own = {name: value for name, value in own.items() if value is not None}
        for changes in self.changes.values():
            own |= changes
        return ", ".join(f"{name} {value}" for name, value in own.items()) or "no changes"

    def adapt(self, algorithm: AnyAlgorithm) -> AnyAlgorithm:
        """Return the algorithm with this device's settings."""
        if not self.changes:
            return algorithm
        return cast(AnyAlgorithm, algorithm.map_layers(self._adapt_layer))

    def _adapt_layer(self, layer: Algorithm) -> Algorithm:
        changes = self.changes.get(type(layer), {})
        return dataclasses.replace(layer, **changes) if changes else layer
