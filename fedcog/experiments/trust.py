"""Whether a line of results is one: files may come from anywhere."""

from collections.abc import Callable
from typing import Any

from fedcog.experiments.probes import Kind
from fedcog.task import SCORES

GAPS = ("to_members", "to_others", "nearer_to_members", "nearer_by_chance", "auc")


def check(line: Any, probe: Kind | None) -> None:
    """A ValueError, or a KeyError for what is missing, says what is wrong with a line."""
    if not (isinstance(line, dict) and type(line["seed"]) is int and isinstance(line["provenance"], dict)):
        raise ValueError("a line is no result")
    if probe is None:
        _trained(line)
    elif not (isinstance(line["found"], dict) and FORMS[probe](line["found"])):
        raise ValueError(f"what was found is no {probe}")


def _trained(line: dict[str, Any]) -> None:
    """What came of training: scores and losses by round, and clients."""
    if line.get("loss") == [] and "diverged" not in line:
        raise ValueError("it has no rounds")
    for name in ("loss", *SCORES):
        values = [value for value in _listed(line.get(name, [])) if value is not None]
        if not _numbers(values):
            raise ValueError(f"{name} is no list of numbers")
        if name != "loss" and not all(0 <= value <= 1 for value in values):
            raise ValueError(f"{name} is no list of shares")
    for client in _listed(line["clients"]):
        if not (isinstance(client, dict) and "client" in client and _numbers([*client.values()])):
            raise ValueError("its clients are no tables of numbers")


def _listed(values: Any) -> list[Any]:
    if not isinstance(values, list):
        raise ValueError("what should be a list is none")
    return values


def _numbers(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) in (int, float) and abs(value) < 1e300 for value in values)


def _texts(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def _counts(found: dict[str, Any]) -> bool:
    """Examples by client and class: a table without gaps."""
    classes, rows = found["classes"], _listed(found["counts"])
    return bool(rows) and _texts(classes) and all(_numbers(row) and len(row) == len(classes) for row in rows)


def _privacy(found: dict[str, Any]) -> bool:
    needed = {"pixels": GAPS, "features": GAPS, "model": ("auc",)}
    return all(_numbers([found[view][name] for name in names]) for view, names in needed.items())


FORMS: dict[Kind, Callable[[dict[str, Any]], bool]] = {
    "client-time": lambda found: _numbers(found["seconds"]) and _numbers(found["round"]),
    "generation-time": lambda found: _numbers(found["seconds"]),
    "partition": _counts,
    "pictures": lambda found: _texts(found["classes"]) and _texts(list(found["rows"].values())),
    "privacy": _privacy,
}
