"""Composed algorithms by name: "fedprox+fedcog" is FedCOG around FedProx."""

from collections.abc import Mapping, Sequence
from typing import Any

from fedcog.algorithms import ALGORITHMS, Algorithm, RecordedAlgorithm, RecordedWrapper
from fedcog.core import settings
from fedcog.core.settings import ConfigError

AlgorithmClasses = Mapping[str, type[Algorithm]]
"""Algorithm classes by name."""


def named_layers(algorithm: Algorithm) -> list[tuple[str, Algorithm]]:
    """Return an algorithm and those inside it, outermost first, each with its name.

    FedAvg inside a wrapper whose name implies it, such as fedavgm, is left out.
    """
    names = {cls: name for name, cls in ALGORITHMS.items()}
    layers = list(algorithm.layers)
    if len(layers) > 1 and layers[-2].implies_fedavg and type(layers[-1]) is Algorithm:
        layers.pop()
    return [(names.get(type(layer), layer.class_name), layer) for layer in layers]


def algorithm_name(algorithm: Algorithm) -> str:
    """Return the name of a composed algorithm, innermost first, such as fedprox+fedcog."""
    return "+".join(reversed([name for name, _ in named_layers(algorithm)]))


def make_algorithm(
    name: str,
    tables: Mapping[str, Any] | None = None,
    known: AlgorithmClasses = ALGORITHMS,
) -> Algorithm:
    """Create a composed algorithm.

    Args:
        name: A base and the wrappers around it, such as "fedprox+fedcog". The name of a wrapper
            alone wraps FedAvg.
        tables: Settings by algorithm name.
        known: Algorithm classes by name.

    Returns:
        The algorithm.

    Raises:
        ConfigError: If a name is unknown, a setting is invalid, or the order is wrong.

    Example:
        ```python
        import fedcog

        algorithm = fedcog.make_algorithm("fedprox+fedcog", {"fedprox": {"mu": 0.1}})
        ```
    """
    tables = tables or {}
    faults = [
        f"settings of '{table}': no algorithm has this name; write "
        "{'fedprox': {'mu': 0.1}}, for example."
        for table in tables
        if table not in known
    ]
    algorithm: Algorithm | None = None
    parts = [part.strip() for part in name.split("+")]
    for part in parts:
        cls = known.get(part)
        if cls is None:
            faults.append(_unknown_algorithm(part, known))
            continue
        values, problems = read_table(part, tables, known)
        faults += problems
        if cls.is_wrapper:
            values["inner"] = algorithm or Algorithm()
        if cls.is_wrapper or algorithm is None:
            algorithm = cls(**values)
        else:
            faults.append(_misplaced(parts, part, known))
    if faults or algorithm is None:
        raise ConfigError(list(dict.fromkeys(faults)))
    return algorithm


def make_recorded_algorithm(values: Mapping[str, Any], known: AlgorithmClasses) -> Algorithm:
    """Create an algorithm from a run's record, with placeholders for unknown classes.

    Args:
        values: The recorded settings, with `"algorithm"` and a table per layer.
        known: Algorithm classes by name.

    Returns:
        The algorithm.
    """
    algorithm = Algorithm()
    for place, part in enumerate(str(values["algorithm"]).split("+")):
        if part in known:
            layer_values, _ = read_table(part, values, known)
            cls = known[part]
            if cls.is_wrapper:
                layer_values["inner"] = algorithm
            algorithm = cls(**layer_values)
            continue
        table = values.get(part, {})
        recorded = tuple(table.items()) if isinstance(table, Mapping) else ()
        if place:
            algorithm = RecordedWrapper(algorithm, part, recorded)
        else:
            algorithm = RecordedAlgorithm(part, recorded)
    return algorithm


def read_table(
    name: str, tables: Mapping[str, Any], known: AlgorithmClasses
) -> tuple[dict[str, Any], list[str]]:
    """Check the settings of one algorithm.

    Args:
        name: The algorithm.
        tables: Settings by algorithm name.
        known: Algorithm classes by name.

    Returns:
        (valid settings, faults of the others).
    """
    table = tables.get(name, {})
    if not isinstance(table, Mapping):
        return {}, [
            f"'{name}' holds the settings of an algorithm: write {name}.SETTING, or a table "
            f"[{name}]."
        ]
    return settings.read(known[name], table, f"{name}.")


def _misplaced(parts: Sequence[str], part: str, known: AlgorithmClasses) -> str:
    """Describe an algorithm that is no wrapper and does not come first."""
    name = "+".join(parts)
    first = known.get(parts[0])
    if first is not None and not first.is_wrapper:
        return (
            f"algorithm '{name}': {parts[0]} and {part} both say how clients train, and neither is "
            "a wrapper: keep one of them."
        )
    others = [other for other in parts if other != part]
    return (
        f"algorithm '{name}': '{part}' is not a wrapper, so it must come first: write "
        f"{'+'.join([part, *others])}."
    )


def _unknown_algorithm(name: str, known: AlgorithmClasses) -> str:
    """Describe an unknown algorithm; a settings file may not name code to run."""
    if not name:
        return "algorithm: a name is missing before or after a +, as in fedprox+fedcog."
    if ".py:" in name:
        return (
            f"algorithm '{name}': a settings file cannot name code to run; name the file on the "
            f"command line, --algorithm {name}."
        )
    if name.endswith(".py"):
        return f"algorithm '{name}': name the class in the file too, {name}:Class."
    return settings.unknown_name("algorithm", name, known)
