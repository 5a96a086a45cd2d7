"""The user's own code: what a command line names as FILE.py:Name, and its source."""

import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from fedcog.algorithms import ALGORITHMS, Algorithm
from fedcog.core import settings
from fedcog.core.settings import ConfigError
from fedcog.data.sources.named_code import NamedCode, find_code, load_file
from fedcog.models.initialization import Network
from fedcog.runs.config.experiment import Experiment

UserClasses = dict[str, type[Algorithm]]
"""The user's algorithm classes by class name."""
PLAIN_TYPES = (int, float, str)
"""Types of values that describe a function."""
LIBRARY_PACKAGES = ("fedcog", "torch", "builtins", "abc", "typing")
"""Packages whose source is not the user's."""


def resolve(
    text: str, known: Mapping[str, type[Algorithm]] = ALGORITHMS
) -> tuple[str, UserClasses]:
    """Load the files that an algorithm's name contains.

    Args:
        text: A name such as "mine.py:Mine+fedcog".
        known: Algorithm classes by name.

    Returns:
        The name with class names only, and the loaded classes.

    Raises:
        ConfigError: If a file or class cannot be loaded.
    """
    names: list[str] = []
    classes: UserClasses = {}
    rest = text
    while rest:
        part = rest.split("+")[0]
        match = None if part in known else re.match(r"(.+?\.py):(\w*)(?=\+|$)", rest)
        if match:
            cls = load_algorithm(Path(match[1]), match[2])
            if classes.get(cls.__name__, cls) is not cls:
                raise ConfigError(
                    [f"two of your algorithms are called {cls.__name__}: rename one of them."]
                )
            classes[cls.__name__] = cls
            names.append(cls.__name__)
            part = match[0]
        else:
            names.append(part)
        rest = rest[len(part) :].removeprefix("+")
    return "+".join(names), classes


def load_algorithm(path: Path, name: str) -> type[Algorithm]:
    """Load an algorithm class from a Python file, which is executed.

    Args:
        path: A file that the user named on the command line.
        name: Name of the class.

    Returns:
        The class.

    Raises:
        ConfigError: If the file or the class is missing or invalid.
    """
    module = load_file(path)
    cls = getattr(module, name, None)
    if not (inspect.isclass(cls) and issubclass(cls, Algorithm)):
        candidates = [
            key
            for key, value in vars(module).items()
            if inspect.isclass(value)
            and issubclass(value, Algorithm)
            and value.__module__ == module.__name__
        ]
        hint = "it defines none; subclass fedcog.Algorithm"
        if candidates:
            hint = f"it defines {', '.join(candidates)}"
        raise ConfigError([f"{path} has no algorithm called '{name}': {hint}."])
    if faults := settings.check_class(cls, ignored={"inner"}):
        raise ConfigError([f"{path}: {cls.__name__}: {fault}" for fault in faults])
    if cls.__name__ in {*ALGORITHMS, *settings.settings(Experiment), "algorithm"}:
        raise ConfigError([f"{path}: the name {cls.__name__} is taken: rename your algorithm."])
    return cls


def load_network(text: str) -> NamedCode:
    """Load a class or function that builds a network from a Python file, which is executed.

    Args:
        text: A name such as "mine.py:Net", which the user wrote on the command line.

    Returns:
        What builds the network.

    Raises:
        ConfigError: If the file, the class or the function is missing.
    """
    code = find_code(text)
    network = code.load()
    if isinstance(network, nn.Module):
        raise ConfigError(
            [f"{text} is one network with its weights: name its class, or a function."]
        )
    is_class = inspect.isclass(network) and issubclass(network, nn.Module)
    if not is_class and not inspect.isfunction(network):
        raise ConfigError([f"{text} is no network: name a class of nn.Module, or a function."])
    return code


def load_function(text: str) -> NamedCode:
    """Load a function that the user wrote on the command line, such as an augmentation.

    Args:
        text: FILE.py:Name or MODULE:Name.

    Returns:
        What is called.

    Raises:
        ConfigError: If it is missing, or cannot be called.
    """
    code = find_code(text)
    if not callable(code.load()):
        raise ConfigError([f"{text} is no function."])
    return code


def user_source(classes: Iterable[type]) -> str:
    """Return the source of classes and their bases, as far as it is the user's and available."""
    bases = dict.fromkeys(base for cls in classes for base in cls.__mro__)
    source = ""
    for base in bases:
        if base.__module__.partition(".")[0] not in LIBRARY_PACKAGES:
            with contextlib.suppress(OSError, TypeError):
                source += inspect.getsource(base)
    return source


def describe_network(network: Network | None) -> str:
    """Return what identifies a network: its structure, and the user's source in it.

    Args:
        network: An instance, or a class or function that builds one.

    Returns:
        The description; empty without a network.
    """
    if network is None:
        return ""
    if isinstance(network, nn.Module):
        return repr(network) + user_source(type(part) for part in network.modules())
    return function_source(network)


def function_source(function: Callable[..., Any] | None) -> str:
    """Return the source of a user's function or class, and the values it has; empty without one.

    Args:
        function: The function. One that was defined in an interactive session is described by name.
    """
    if function is None:
        return ""
    if isinstance(function, NamedCode):
        function = function.load()
    if isinstance(function, functools.partial):
        values = _plain_values([*function.args, *function.keywords.items()])
        return f"{function_source(function.func)}{values}"
    if getattr(function, "__name__", "") == "<lambda>":  # its source is that of the whole line
        return f"lambda{_own_values(function)}"
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):
        source = str(getattr(function, "__qualname__", type(function).__qualname__))
    return f"{source}{_own_values(function)}"


def _own_values(function: Callable[..., Any]) -> str:
    """Return the numbers and texts that a function has from where it was made."""
    values = []
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # it is empty
            values.append(cell.cell_contents)
    return _plain_values([*values, *(getattr(function, "__defaults__", None) or ())])


def _plain_values(values: Iterable[object]) -> str:
    """Return numbers and texts in words; other objects are left out."""
    plain = [value for value in values if _is_plain(value)]
    return repr(plain) if plain else ""


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, PLAIN_TYPES)
