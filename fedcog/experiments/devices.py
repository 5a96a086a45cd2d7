"""Kinds of devices as settings tell them: 'phone: clients=6 local_steps=50 heterofl.width=0.5; server: clients=4'."""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fedcog import settings
from fedcog.algorithms import ALGORITHMS, Algorithm
from fedcog.federation.devices import Device
from fedcog.settings import Setting

PLAIN = ("clients", "local_steps", "local_epochs")


def without(text: str, others: Collection[str]) -> str:
    """The same devices for an algorithm that is compared with others: settings of those are left out."""
    return re.sub(rf"\s({'|'.join(map(re.escape, others))})\.\S+", "", text) if others else text


def read(
    text: str, clients: int, layers: Sequence[tuple[str, Algorithm]], usual: Mapping[str, Setting]
) -> tuple[list[Device], list[str]]:
    """The devices that a text tells of, one after a semicolon or on a line each, and what is wrong with it.

    A kind may have of an experiment's `usual` settings those in PLAIN, and of its algorithm's those that are local.
    """
    known = {name: usual[name] for name in PLAIN}
    for name, layer in layers:
        own = settings.settings(type(layer))
        known |= {f"{name}.{key}": own[key] for key in layer.local if key in own}
    found, faults = list[Device](), list[str]()
    told = re.sub(r"#.*", "", text).strip()
    for part in filter(str.strip, re.split(r"[;\n]", told)):
        name, colon, words = (piece.strip() for piece in part.partition(":"))
        if not colon or not name or "=" in name:
            faults.append(f"devices: '{part.strip()}' must begin with a name and a colon, as in phone: clients=6.")
            continue
        values = dict[str, Any]()
        for word in words.split():
            key, _, value = word.partition("=")
            whose = key.partition(".")[0]
            setting = key.partition(".")[2]
            if key not in known and (key in usual or _common(whose, setting)):
                faults.append(f"devices, {name}: {key} is the same for all devices.")
                continue
            if key not in known and whose in ALGORITHMS and whose not in dict(layers):
                faults.append(
                    f"devices, {name}: {key} is for an algorithm with {whose}: add +{whose}, or leave it out."
                )
                continue
            if key not in known or key in values:
                why = "is told twice." if key in values else settings.unknown("setting", key, known)
                faults.append(f"devices, {name}: {key} {why}" if key in values else f"devices, {name}: {why}")
                continue
            try:
                values[key] = settings.parse(known[key], value)
                trouble = settings.fault(known[key], values[key])
            except ValueError as error:
                trouble = str(error)
            faults += [f"devices, {name}: {key} {trouble}."] if trouble else []
        if {"local_steps", "local_epochs"} <= values.keys():
            faults.append(f"devices, {name}: local_steps and local_epochs contradict each other: leave one out.")
        if "clients" not in values:
            faults.append(f"devices, {name}: say how many clients have one, as in clients=6.")
            continue
        changes = dict[type[Algorithm], dict[str, Any]]()
        for layer_name, layer in layers:
            own = {key.rpartition(".")[2]: value for key, value in values.items() if key.startswith(f"{layer_name}.")}
            changes |= {type(layer): own} if own else {}
        found.append(Device(name, values["clients"], values.get("local_steps"), values.get("local_epochs"), changes))
    if told and not found and not faults:
        faults.append(f"devices: there is no kind of them in '{told}'; it is written as phone: clients=6.")
    names = [device.name for device in found]
    faults += [f"devices: two kinds are called {name}." for name in {*names} if names.count(name) > 1]
    total = sum(device.clients for device in found)
    if found and not faults and total != clients:
        faults.append(f"devices: they are of {total} clients, and there are {clients}: set --clients {total}.")
    return found, faults


def _common(algorithm: str, setting: str) -> bool:
    """Is it a setting of an algorithm that does not go by the device?"""
    one = ALGORITHMS.get(algorithm)
    return one is not None and setting in settings.settings(one) and setting not in one.local
