"""Settings as dataclass fields with help and bounds, read from files and flags alike."""

import dataclasses
import difflib
import functools
import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

MAX_NUMBER = 2**60
"""Upper bound on every number: larger ones would overflow in integer arithmetic."""

MAX_SUGGESTION_GAP = 0.15
"""How much less similar than the best match a second suggestion may be."""
MIN_SUGGESTION_SIMILARITY = 0.6
"""How similar a name must be to be suggested, between 0 and 1."""


class ConfigError(Exception):
    """Invalid settings.

    Attributes:
        faults: Every problem found, each with its remedy.
    """

    def __init__(self, faults: Iterable[str]) -> None:
        """Create the error.

        Args:
            faults: Every problem found. The message has one line for each.
        """
        self.faults = list(faults)
        super().__init__("\n".join(self.faults))


class Setting(NamedTuple):
    """One setting of a dataclass.

    Attributes:
        name: The field's name.
        type: int, float, bool, str, or a Literal of strings.
        default: Default value.
        help: What it means.
        bounds: Comparisons that a number must satisfy, such as (">=", 0.0).
    """

    name: str
    type: Any
    default: Any
    help: str
    bounds: tuple[tuple[str, float], ...]

    @property
    def choices(self) -> tuple[str, ...]:
        """The allowed values of a Literal; empty for other types."""
        return get_args(self.type) if get_origin(self.type) is Literal else ()

    @property
    def flag(self) -> str:
        """The name as a command-line flag, without dashes in front."""
        return self.name.replace("_", "-")

    @property
    def default_text(self) -> str:
        """The default value for help texts."""
        return f"{self.default:.4g}" if isinstance(self.default, float) else str(self.default)

    @property
    def expected(self) -> str:
        """The type and bounds in words, such as "a number > 0"."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        words = {int: "an integer", float: "a number", bool: "true or false", str: "text"}
        limits = " and ".join(f"{sign} {limit:g}" for sign, limit in self.bounds)
        return f"{words[self.type]} {limits}".strip()


_COMPARISONS = {
    ">": lambda value, limit: value > limit,
    ">=": lambda value, limit: value >= limit,
    "<": lambda value, limit: value < limit,
    "<=": lambda value, limit: value <= limit,
}


def setting(
    default: Any, help: str, *bounds: str, identity: bool | Literal["if set"] = True
) -> Any:
    """Declare a setting as a dataclass field.

    Args:
        default: Default value: int, float, bool or str.
        help: What it means, for `--help` and the docs.
        *bounds: Comparisons that a number must satisfy, such as ">= 0".
        identity: Whether it decides the results. If False, it may change when a run resumes.
            "if set": it decides the results only if it differs from its default. Settings that are
            added later say so, and runs that were recorded before them can still resume.

    Returns:
        A dataclass field.

    Example:
        ```python
        from dataclasses import dataclass

        from fedcog import Algorithm, setting


        @dataclass(frozen=True)
        class Mine(Algorithm):
            mu: float = setting(0.01, "weight of my penalty", ">= 0")
        ```
    """
    limits = []
    for bound in bounds:
        sign, limit = bound.split()
        limits.append((sign, float(limit)))
    metadata = {"help": help, "bounds": tuple(limits), "identity": identity}
    return dataclasses.field(default=default, metadata=metadata)


def settings(cls: type) -> dict[str, Setting]:
    """Return the settings of a dataclass by name: its fields of a plain type."""
    return dict(_settings(cls))


@functools.cache
def _settings(cls: type) -> dict[str, Setting]:
    types = get_type_hints(cls)
    found = {}
    for field in dataclasses.fields(cls):
        field_type = types[field.name]
        if field_type in (int, float, bool, str) or _is_word_choice(field_type):
            help = field.metadata.get("help", "")
            bounds = field.metadata.get("bounds", ())
            found[field.name] = Setting(field.name, field_type, field.default, help, bounds)
    return found


def _is_word_choice(field_type: Any) -> bool:
    """Return whether a type is a Literal of strings."""
    if get_origin(field_type) is not Literal:
        return False
    return all(isinstance(choice, str) for choice in get_args(field_type))


def check_class(cls: type, ignored: set[str]) -> list[str]:
    """Check that the settings of a class can be recorded and read again.

    Args:
        cls: A user's dataclass.
        ignored: Names of fields that are not settings.

    Returns:
        The problems found.
    """
    has_own_fields = "__init__" in vars(cls) or inspect.get_annotations(cls)
    if "__dataclass_fields__" not in vars(cls) and has_own_fields:
        return [
            f"{cls.__name__} has settings but is not a dataclass: "
            "put @dataclass(frozen=True) above it."
        ]
    known = settings(cls) if dataclasses.is_dataclass(cls) else {}
    faults = [
        f"setting {field.name} is neither int, float, bool, str nor a Literal of strings: "
        "it cannot be recorded."
        for field in dataclasses.fields(cls)
        if field.name not in {*known, *ignored}
    ]
    for name, one in known.items():
        if one.default is dataclasses.MISSING:
            faults.append(f"setting {name} has no default: give it one.")
    return faults


def parse(setting: Setting, text: str) -> Any:
    """Parse the text of a flag.

    Args:
        setting: The setting that the flag sets.
        text: What the user wrote.

    Returns:
        The value, not yet checked against the bounds.

    Raises:
        ValueError: If the text is not of the setting's type.
    """
    try:
        text.encode()
        if setting.type is bool:
            return {"true": True, "false": False}[text.lower()]
        return setting.type(text) if setting.type in (int, float) else text
    except (ValueError, KeyError):
        raise ValueError(f"needs {setting.expected}, not '{text}'") from None


def fault(setting: Setting, value: Any) -> str | None:
    """Check a value against a setting's type and bounds.

    Args:
        setting: The setting.
        value: The value.

    Returns:
        What is wrong, such as "needs a number > 0, not -1", or None.
    """
    if setting.type is float and type(value) is int and abs(value) < 1e300:
        value = float(value)
    is_valid = value in setting.choices if setting.choices else type(value) is setting.type
    if is_valid and setting.type in (int, float):
        is_valid = abs(value) < MAX_NUMBER and all(
            _COMPARISONS[sign](value, limit) for sign, limit in setting.bounds
        )
    if is_valid:
        return None
    if type(value) in (int, float) and MAX_NUMBER <= abs(value) < math.inf:
        return f"needs {setting.expected}, and a smaller one"
    return f"needs {setting.expected}, not {value!r}"


def read(
    cls: type, values: Mapping[str, Any], prefix: str = ""
) -> tuple[dict[str, Any], list[str]]:
    """Check values against the settings of a dataclass.

    Args:
        cls: The dataclass.
        values: Values by setting name.
        prefix: Put before names in the faults, such as "fedcog.".

    Returns:
        (valid values, faults of the others).
    """
    known = settings(cls)
    valid: dict[str, Any] = {}
    faults: list[str] = []
    for name, value in values.items():
        if name not in known:
            names = [prefix + key for key in known]
            faults.append(unknown_name("setting", f"{prefix}{name}", names))
        elif problem := fault(known[name], value):
            faults.append(f"{prefix}{name} {problem}.")
        else:
            valid[name] = float(value) if known[name].type is float else value
    return valid, faults


def unknown_name(what: str, name: str, known: Iterable[str]) -> str:
    """Describe an unknown name, with suggestions.

    Args:
        what: What the name is of, such as "setting".
        name: The unknown name.
        known: All known names.

    Returns:
        An error message that suggests similar names, or lists all of them.
    """
    known = list(known)
    last_part = name.lstrip("-").rpartition(".")[2]
    suggestions = [other for other in known if other.lstrip("-").rpartition(".")[2] == last_part]
    suggestions = suggestions or _similar(name, known)
    if suggestions:
        return f"unknown {what} '{name}': did you mean {' or '.join(suggestions)}?"
    if not known:
        return f"unknown {what} '{name}': there is none to choose."
    return f"unknown {what} '{name}': choose one of {', '.join(known)}."


def _similar(name: str, known: Sequence[str]) -> list[str]:
    """Return the most similar name, case ignored, and a second one that is about as similar."""
    similarity = {
        other: difflib.SequenceMatcher(None, other.lower(), name.lower()).ratio() for other in known
    }
    best = sorted(known, key=lambda other: -similarity[other])[:2]
    return [
        other
        for other in best
        if similarity[other]
        >= max(MIN_SUGGESTION_SIMILARITY, similarity[best[0]] - MAX_SUGGESTION_GAP)
    ]
