"""Settings as dataclass fields: each with its help and its bounds, readable from files and flags alike."""

import dataclasses
import difflib
import functools
import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

LARGEST = 2**60  # no number is meant to be larger, and arithmetic on one that were would wrap


class ConfigError(Exception):
    """Settings that cannot work: every fault at once, each with its remedy."""

    def __init__(self, faults: Iterable[str]) -> None:
        self.faults = list(faults)
        super().__init__("\n".join(self.faults))


class Setting(NamedTuple):
    """One setting of a dataclass."""

    name: str
    type: Any
    default: Any
    help: str
    bounds: tuple[tuple[str, float], ...]

    @property
    def choices(self) -> tuple[str, ...]:
        """The values it can take, where they are counted."""
        return get_args(self.type) if get_origin(self.type) is Literal else ()

    @property
    def flag(self) -> str:
        """Its name as a flag."""
        return self.name.replace("_", "-")

    @property
    def shown(self) -> str:
        """Its default, as people read it."""
        return f"{self.default:.4g}" if isinstance(self.default, float) else str(self.default)

    @property
    def kind(self) -> str:
        """What it wants, in words."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[self.type]
        limits = " and ".join(f"{sign} {limit:g}" for sign, limit in self.bounds)
        return f"{words} {limits}" if limits else words


_HOLDS = {
    ">": lambda value, limit: value > limit,
    ">=": lambda value, limit: value >= limit,
    "<": lambda value, limit: value < limit,
    "<=": lambda value, limit: value <= limit,
}


def setting(default: Any, help: str, *bounds: str, identity: bool = True) -> Any:
    """A dataclass field with help and bounds such as ">= 0"; without `identity` it may change between resumes."""
    limits = tuple((sign, float(limit)) for sign, limit in (bound.split() for bound in bounds))
    metadata = {"help": help, "bounds": limits, "identity": identity}
    return dataclasses.field(default=default, metadata=metadata)


def settings(cls: type) -> dict[str, Setting]:
    """The settings of a dataclass by name: its fields of a plain type."""
    return dict(_settings(cls))


@functools.cache
def _settings(cls: type) -> dict[str, Setting]:
    types = get_type_hints(cls)
    return {
        field.name: Setting(
            field.name,
            types[field.name],
            field.default,
            field.metadata.get("help", ""),
            field.metadata.get("bounds", ()),
        )
        for field in dataclasses.fields(cls)
        if types[field.name] in (int, float, bool, str) or _words(types[field.name])
    }


def _words(kind: Any) -> bool:
    """Is it a choice of words?"""
    return get_origin(kind) is Literal and all(isinstance(choice, str) for choice in get_args(kind))


def unsound(cls: type, besides: set[str]) -> list[str]:
    """Why the settings of a class could not be written down and read again, if so."""
    known = settings(cls) if dataclasses.is_dataclass(cls) else {}
    if "__dataclass_fields__" not in vars(cls) and ("__init__" in vars(cls) or inspect.get_annotations(cls)):
        return [f"{cls.__name__} has settings of its own but is no dataclass: put @dataclass(frozen=True) above it."]
    odd = [field.name for field in dataclasses.fields(cls) if field.name not in {*known, *besides}]
    bare = [name for name, one in known.items() if one.default is dataclasses.MISSING]
    return [
        *(
            f"setting {name} is neither int, float, bool, str nor a Literal of words: it cannot be recorded."
            for name in odd
        ),
        *(f"setting {name} has no default: give it one." for name in bare),
    ]


def parse(setting: Setting, text: str) -> Any:
    """The value that a flag's text means; a ValueError says what was wanted."""
    try:
        text.encode()
        if setting.type is bool:
            return {"true": True, "false": False}[text.lower()]
        return setting.type(text) if setting.type in (int, float) else text
    except (ValueError, KeyError):
        raise ValueError(f"needs {setting.kind}, not '{text}'") from None


def fault(setting: Setting, value: Any) -> str | None:
    """What is wrong with a value, if anything."""
    if setting.type is float and type(value) is int and abs(value) < 1e300:
        value = float(value)
    fits = value in setting.choices if setting.choices else type(value) is setting.type
    if fits and setting.type in (int, float):
        fits = abs(value) < LARGEST and all(_HOLDS[sign](value, limit) for sign, limit in setting.bounds)
    if not fits and type(value) in (int, float) and LARGEST <= abs(value) < math.inf:
        return f"needs {setting.kind}, and not one so large"
    return None if fits else f"needs {setting.kind}, not {value!r}"


def read(cls: type, values: Mapping[str, Any], prefix: str = "") -> tuple[dict[str, Any], list[str]]:
    """The values that fit a dataclass, and the faults of those that do not."""
    known, good, faults = settings(cls), dict[str, Any](), list[str]()
    for name, value in values.items():
        if name not in known:
            faults.append(unknown("setting", f"{prefix}{name}", [prefix + key for key in known]))
        elif trouble := fault(known[name], value):
            faults.append(f"{prefix}{name} {trouble}.")
        else:
            good[name] = float(value) if known[name].type is float else value
    return good, faults


def _close(name: str, known: Sequence[str]) -> list[str]:
    """The name that comes nearest, large letters or small, and another where it comes as near."""
    likeness = {one: difflib.SequenceMatcher(None, one.lower(), name.lower()).ratio() for one in known}
    best = sorted(known, key=lambda one: -likeness[one])[:2]
    return [one for one in best if likeness[one] >= max(0.6, likeness[best[0]] - 0.15)]


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """The fault of a name that nobody knows, with those that come near, or all."""
    known = list(known)
    last = name.lstrip("-").rpartition(".")[2]
    near = [one for one in known if one.lstrip("-").rpartition(".")[2] == last]
    near = near or _close(name, known)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(known)}."
    return f"unknown {what} '{name}': {hint}"
