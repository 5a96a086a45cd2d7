"""Validation of stored results, which may come from any source."""

from collections.abc import Callable
from typing import Any

from fedcog.core.tasks import FORMER_KEYS, SCORE_KEYS
from fedcog.studies.probes import ProbeKind

MAX_MAGNITUDE = 1e300

PRIVACY_KEYS = ("to_members", "to_others", "nearer_to_members", "nearer_by_chance", "auc")


def check_result(line: Any, probe: ProbeKind | None) -> None:
    """Check one parsed line of a result file.

    Args:
        line: The parsed JSON value.
        probe: The kind of measurement, or None for a training run.

    Raises:
        ValueError: A value has a wrong type or is out of range.
        KeyError: A value is missing.
    """
    if not (
        isinstance(line, dict)
        and type(line["seed"]) is int
        and isinstance(line["provenance"], dict)
    ):
        raise ValueError("a line is not a result")
    if probe is None:
        _check_training(line)
    elif not (isinstance(line["found"], dict) and PROBE_CHECKS[probe](line["found"])):
        raise ValueError(f"the measurement is not a valid {probe}")


def _check_training(line: dict[str, Any]) -> None:
    """Check scores and losses by round, and the clients of the last round."""
    if line.get("loss") == [] and "diverged" not in line:
        raise ValueError("the run has no rounds")
    for name in ("loss", *SCORE_KEYS, *FORMER_KEYS):
        values = [value for value in _as_list(line.get(name, [])) if value is not None]
        if not _are_numbers(values):
            raise ValueError(f"{name} is not a list of numbers")
        if name != "loss" and not all(0 <= value <= 1 for value in values):
            raise ValueError(f"{name} is not a list of numbers from 0 to 1")
    for client in _as_list(line["clients"]):
        is_record = isinstance(client, dict) and "client" in client
        if not (is_record and _are_numbers([*client.values()])):
            raise ValueError("an entry of clients is not a table of numbers")


def _as_list(values: Any) -> list[Any]:
    if not isinstance(values, list):
        raise ValueError(f"expected a list, not {type(values).__name__}")
    return values


def _are_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(
        type(value) in (int, float) and abs(value) < MAX_MAGNITUDE for value in values
    )


def _are_strings(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def _is_partition(found: dict[str, Any]) -> bool:
    """Whether there is a number of examples for every client and class."""
    classes = found["classes"]
    rows = _as_list(found["counts"])
    if not rows or not _are_strings(classes):
        return False
    return all(_are_numbers(row) and len(row) == len(classes) for row in rows)


def _is_privacy(found: dict[str, Any]) -> bool:
    keys_by_view = {"pixels": PRIVACY_KEYS, "features": PRIVACY_KEYS, "model": ("auc",)}
    return all(
        _are_numbers([found[view][key] for key in keys]) for view, keys in keys_by_view.items()
    )


PROBE_CHECKS: dict[ProbeKind, Callable[[dict[str, Any]], bool]] = {
    "client-time": lambda found: _are_numbers(found["seconds"]) and _are_numbers(found["round"]),
    "generation-time": lambda found: _are_numbers(found["seconds"]),
    "partition": _is_partition,
    "pictures": lambda found: (
        _are_strings(found["classes"]) and _are_strings(list(found["rows"].values()))
    ),
    "privacy": _is_privacy,
}
