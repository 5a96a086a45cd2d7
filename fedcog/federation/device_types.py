"""Device types: groups of clients that differ in compute, in some settings, or attack."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

from fedcog.algorithms import Algorithm, Attack

AnyAlgorithm = TypeVar("AnyAlgorithm", bound=Algorithm)


class DeviceType(NamedTuple):
    """A type of device.

    Attributes:
        name: Its name.
        num_clients: Number of clients that have such a device.
        local_steps: Number of local steps; None means as all others.
        local_epochs: Number of local epochs; None means as all others.
        changes: Settings that differ on this device, by algorithm class.
        speed: Local steps per virtual second; None means 1.
        attack: How these clients attack; None if they are honest.
    """

    name: str
    num_clients: int
    local_steps: int | None = None
    local_epochs: float | None = None
    changes: Mapping[type[Algorithm], Mapping[str, Any]] = {}
    speed: float | None = None
    attack: Attack | None = None

    @property
    def description(self) -> str:
        """The settings that differ on this device, in words."""
        own: dict[str, Any] = {
            "local_steps": self.local_steps,
            "local_epochs": self.local_epochs,
            "speed": self.speed,
        }
        if self.attack is not None:
            own["attack"] = self.attack.kind
        own = {name: value for name, value in own.items() if value is not None}
        for changes in self.changes.values():
            own |= changes
        return ", ".join(f"{name} {value}" for name, value in own.items()) or "no changes"

    def adapt(self, algorithm: AnyAlgorithm) -> AnyAlgorithm:
        """Return the algorithm with this device's settings, and around it the attack, if any."""
        adapted = algorithm
        if self.changes:
            adapted = cast(AnyAlgorithm, algorithm.map_layers(self._adapt_layer))
        if self.attack is None:
            return adapted
        return cast(AnyAlgorithm, dataclasses.replace(self.attack, inner=adapted))

    def trains_like(self, other: "DeviceType") -> bool:
        """Return whether no setting but the speed differs from another type's."""
        mine = (self.local_steps, self.local_epochs, self.changes, self.attack)
        return mine == (other.local_steps, other.local_epochs, other.changes, other.attack)

    def _adapt_layer(self, layer: Algorithm) -> Algorithm:
        changes = self.changes.get(type(layer), {})
        return dataclasses.replace(layer, **changes) if changes else layer


def has_speeds(device_types: Sequence[DeviceType]) -> bool:
    """Return whether some type says how fast its clients are."""
    return any(device.speed is not None for device in device_types)


def merge_by_training(device_types: Sequence[DeviceType]) -> list[DeviceType]:
    """Merge neighboring types that differ in name and speed only, so that they train together.

    Without any speed the types stay as they are.

    Args:
        device_types: The types, first those of the first clients.

    Returns:
        Types with the same clients in the same order.
    """
    if not has_speeds(device_types):
        return list(device_types)
    merged: list[DeviceType] = []
    for device in device_types:
        if merged and device.trains_like(merged[-1]):
            num_clients = merged[-1].num_clients + device.num_clients
            merged[-1] = merged[-1]._replace(num_clients=num_clients)
        else:
            merged.append(device)
    return merged
