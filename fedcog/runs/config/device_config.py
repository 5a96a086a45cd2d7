"""Device types as text: 'phone: clients=6 local_steps=50 heterofl.width=0.5; server: clients=4'."""

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from fedcog.algorithms import ALGORITHMS, Algorithm, Attack
from fedcog.algorithms.attack import TRIGGER_SIZE
from fedcog.core import settings
from fedcog.core.settings import ConfigError, Setting
from fedcog.data import Dataset, FederatedData
from fedcog.federation.device_types import DeviceType

EXPERIMENT_SETTINGS = ("clients", "local_steps", "local_epochs")
"""Settings of an experiment that a device type may change."""
SPEED = Setting("speed", float, 1.0, "local steps per virtual second", ((">", 0.0),))
"""The speed, which only device types have."""
ATTACK_SETTINGS = settings.settings(Attack)
"""The settings of an attack: `attack=KIND` sets the kind, `attack.NAME=VALUE` the others."""


def without_algorithms(text: str, names: Collection[str]) -> str:
    """Remove the settings of some algorithms from a text, for a comparison with others.

    Args:
        text: Device types.
        names: Algorithms whose settings to remove.

    Returns:
        The text without them.
    """
    if not names:
        return text
    alternatives = "|".join(map(re.escape, names))
    return re.sub(rf"\s({alternatives})\.\S+", "", text)


def read_device_types(
    text: str,
    num_clients: int,
    layers: Sequence[tuple[str, Algorithm]],
    experiment_settings: Mapping[str, Setting],
) -> tuple[list[DeviceType], list[str]]:
    """Parse device types, separated by semicolons or line breaks.

    Args:
        text: Device types.
        num_clients: Number of all clients.
        layers: The layers of the algorithm with their names.
        experiment_settings: The settings of an experiment by name.

    Returns:
        (device types, faults).
    """
    reader = _Reader(layers, experiment_settings)
    text = re.sub(r"#.*", "", text).strip()
    for part in filter(str.strip, re.split(r"[;\n]", text)):
        reader.read_type(part)
    devices = reader.devices
    faults = reader.faults
    if text and not devices and not faults:
        faults.append(f"devices: '{text}' names no type; write phone: clients=6.")
    names = [device.name for device in devices]
    for name in {name for name in names if names.count(name) > 1}:
        faults.append(f"devices: two types are called {name}.")
    total = sum(device.num_clients for device in devices)
    if devices and not faults and total != num_clients:
        faults.append(
            f"devices: the types have {total} clients, but there are {num_clients}: "
            f"set --clients {total}."
        )
    return devices, faults


def prepare_attack(
    device: DeviceType, dataset: Dataset, data: FederatedData, num_classes: int
) -> DeviceType:
    """Check a device type's attack against the data, and add what its trigger needs of them.

    Args:
        device: The device type.
        dataset: The data set.
        data: The same, as clients have it.
        num_classes: Number of classes.

    Returns:
        The device type.

    Raises:
        ConfigError: If these data cannot be attacked so.
    """
    attack = device.attack
    if attack is None:
        return device
    if dataset.multi_label and attack.kind != "sign-flip":
        raise ConfigError(
            [f"devices, {device.name}: {attack.kind} needs examples with one label each."]
        )
    largest = max(attack.target, attack.source)
    if "target" in attack.used_settings and largest >= num_classes:
        raise ConfigError(
            [
                f"devices, {device.name}: there is no class {largest}: classes are 0 to "
                f"{num_classes - 1}."
            ]
        )
    if not attack.has_trigger:
        return device
    images = dataset.train_x
    if images.dim() != 4 or min(images.shape[-2:]) < TRIGGER_SIZE:
        raise ConfigError(
            [
                f"devices, {device.name}: a trigger needs images of at least {TRIGGER_SIZE} x "
                f"{TRIGGER_SIZE} pixels: choose label-flip or sign-flip."
            ]
        )
    if images.dtype == torch.uint8:
        images = torch.full_like(images[:1], 255)
    brightest = data.to_inputs(images).amax((0, 2, 3))
    attack = dataclasses.replace(attack, brightest=tuple(brightest.tolist()))
    return device._replace(attack=attack)


class _Reader:
    """Parses device types one by one, and collects all faults."""

    def __init__(
        self,
        layers: Sequence[tuple[str, Algorithm]],
        experiment_settings: Mapping[str, Setting],
    ) -> None:
        self.devices: list[DeviceType] = []
        self.faults: list[str] = []
        self._layers = layers
        self._experiment_settings = experiment_settings
        self._known = {name: experiment_settings[name] for name in EXPERIMENT_SETTINGS}
        self._known[SPEED.name] = SPEED
        for key, one in ATTACK_SETTINGS.items():
            self._known["attack" if key == "kind" else f"attack.{key}"] = one
        for name, layer in layers:
            own = settings.settings(type(layer))
            for key in layer.per_device_settings:
                if key in own:
                    self._known[f"{name}.{key}"] = own[key]

    def read_type(self, text: str) -> None:
        """Parse one type, such as 'phone: clients=6 local_steps=50'."""
        name, colon, words = (piece.strip() for piece in text.partition(":"))
        if not colon or not name or "=" in name:
            self.faults.append(
                f"devices: '{text.strip()}' must start with a name and a colon, as in "
                "phone: clients=6."
            )
            return
        values: dict[str, Any] = {}
        for word in words.split():
            self._read_setting(name, word, values)
        if {"local_steps", "local_epochs"} <= values.keys():
            self.faults.append(
                f"devices, {name}: local_steps and local_epochs contradict each other: "
                "remove one of them."
            )
        if "clients" not in values:
            self.faults.append(f"devices, {name}: set the number of clients, as in clients=6.")
            return
        self.devices.append(
            DeviceType(
                name,
                values["clients"],
                values.get("local_steps"),
                values.get("local_epochs"),
                self._algorithm_changes(values),
                values.get(SPEED.name),
                self._attack(name, values),
            )
        )

    def _attack(self, device: str, values: Mapping[str, Any]) -> Attack | None:
        """Return the attack of a device type."""
        kind = values.get("attack", "none")
        given = {
            key.removeprefix("attack."): value
            for key, value in values.items()
            if key.startswith("attack.")
        }
        if kind == "none":
            if given:
                self.faults.append(
                    f"devices, {device}: attack.{next(iter(given))} needs an attack: add "
                    "attack=backdoor, for example."
                )
            return None
        attack = Attack(kind=kind, **given)
        if kind == "label-flip" and attack.source == attack.target:
            self.faults.append(
                f"devices, {device}: attack.source and attack.target are both {attack.target}, "
                "which flips nothing: choose two classes."
            )
        if kind == "label-flip" and attack.source < 0 and "target" in given:
            self.faults.append(
                f"devices, {device}: attack.target needs attack.source, the class to relabel; "
                "without it every class is relabeled as C - 1 - y."
            )
        if unused := sorted(given.keys() - set(attack.used_settings)):
            self.faults.append(
                f"devices, {device}: {kind} has no {', '.join(unused)}; it has "
                f"{', '.join(attack.used_settings)}."
            )
        return attack

    def _read_setting(self, device: str, word: str, values: dict[str, Any]) -> None:
        """Parse one setting, such as 'local_steps=50', into `values`."""
        key, _, text = word.partition("=")
        fault = self._key_fault(key, values)
        if fault is None:
            try:
                values[key] = settings.parse(self._known[key], text)
                problem = settings.fault(self._known[key], values[key])
            except ValueError as error:
                problem = str(error)
            fault = f"{key} {problem}." if problem else None
        if fault is not None:
            self.faults.append(f"devices, {device}: {fault}")

    def _key_fault(self, key: str, values: dict[str, Any]) -> str | None:
        """Return why a device type cannot have this setting."""
        if key in values:
            return f"{key} is set twice."
        if key in self._known:
            return None
        algorithm, _, setting = key.partition(".")
        if key in self._experiment_settings or _is_common_setting(algorithm, setting):
            return f"{key} is the same for all devices."
        if algorithm in ALGORITHMS and algorithm not in dict(self._layers):
            return f"{key} needs an algorithm with {algorithm}: add +{algorithm}, or remove it."
        return settings.unknown_name("setting", key, self._known)

    def _algorithm_changes(
        self, values: Mapping[str, Any]
    ) -> dict[type[Algorithm], dict[str, Any]]:
        """Group the settings of algorithms by class."""
        changes: dict[type[Algorithm], dict[str, Any]] = {}
        for name, layer in self._layers:
            prefix = f"{name}."
            own = {
                key.removeprefix(prefix): value
                for key, value in values.items()
                if key.startswith(prefix)
            }
            if own:
                changes[type(layer)] = own
        return changes


def _is_common_setting(algorithm: str, setting: str) -> bool:
    """Return whether an algorithm's setting must be the same on all devices."""
    cls = ALGORITHMS.get(algorithm)
    if cls is None or setting not in settings.settings(cls):
        return False
    return setting not in cls.per_device_settings
