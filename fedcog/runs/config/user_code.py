"""The user's own code: what a command line names as FILE.py:Name, and its source."""

import contextlib
import functools
import hashlib
import inspect
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedcog.algorithms import ALGORITHMS, Algorithm
from fedcog.core import settings
from fedcog.core.settings import ConfigError
from fedcog.data.sources.named_code import NamedCode, find_code, load_file
from fedcog.models.initialization import Network
from fedcog.runs.config.experiment import Experiment

UserClasses = dict[str, type[Algorithm]]
"""The user's algorithm classes by class name."""
LIBRARY_PACKAGES = ("fedcog", "torch", "builtins", "abc", "typing")
"""Packages whose source is not the user's."""
PLAIN_TYPES = (str, bytes, int, float, complex, bool, type(None), Path)
"""Types that a representation describes."""


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
    """Return the source of a user's function or class; empty without one.

    Args:
        function: The function. One that was defined in an interactive session is described by name.
    """
    if function is None:
        return ""
    if isinstance(function, NamedCode):
        function = function.load()
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return str(getattr(function, "__qualname__", type(function).__qualname__))


def digest_of(thing: Any) -> str:
    """Return a digest of a user's object that changes with its code and the values that it uses.

    Args:
        thing: A function, class, network, tensor, or other object. Weights of networks do not
            count.

    Returns:
        16 hexadecimal digits. They are the same in another process.
    """
    return _Digests().of(thing)[:16]


class _Digests:
    """Digests of objects and of what they hold: source, values that functions read, attributes."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, str]] = {}  # keeps objects alive, so ids stay theirs

    def of(self, thing: Any) -> str:
        """Return the digest of an object."""
        if isinstance(thing, NamedCode):
            thing = thing.load()
        if id(thing) not in self._known:
            self._known[id(thing)] = thing, "a cycle"
            text = "\n".join((type(thing).__qualname__, *self._facts(thing)))
            self._known[id(thing)] = thing, hashlib.sha256(text.encode()).hexdigest()
        return self._known[id(thing)][1]

    def _facts(self, thing: Any) -> Iterator[str]:
        if isinstance(thing, PLAIN_TYPES):
            yield repr(thing)
        elif isinstance(thing, Tensor):
            content = thing.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            yield f"{thing.dtype} {list(thing.shape)}"
            yield hashlib.sha256(content.numpy().data).hexdigest()
        elif isinstance(thing, np.ndarray):
            yield f"{thing.dtype} {thing.shape}"
            is_plain = thing.dtype != object
            yield (
                hashlib.sha256(thing.tobytes()).hexdigest() if is_plain else self.of([*thing.flat])
            )
        elif isinstance(thing, Mapping):
            for key, value in thing.items():
                yield from (self.of(key), self.of(value))
        elif isinstance(thing, list | tuple):
            yield from map(self.of, thing)
        elif isinstance(thing, set | frozenset):
            yield from sorted(map(self.of, thing))
        elif isinstance(thing, functools.partial):
            yield from map(self.of, (thing.func, thing.args, thing.keywords))
        elif inspect.ismethod(thing):
            yield from map(self.of, (thing.__func__, thing.__self__))
        elif inspect.isfunction(thing):
            yield from self._function_facts(thing)
        elif inspect.isclass(thing):
            yield from self._class_facts(thing)
        elif isinstance(thing, nn.Module):
            yield repr(thing)
            for part in thing.modules():
                if _is_users(type(part)):
                    held = {name: value for name, value in vars(part).items() if _is_setting(value)}
                    yield from map(self.of, (type(part), held))
        elif _is_users(type(thing)):
            yield from map(self.of, (type(thing), getattr(thing, "__dict__", {})))

    def _function_facts(self, function: types.FunctionType) -> Iterator[str]:
        """Describe a function: its source, and the values and user code that it reads."""
        yield function.__qualname__
        if not _is_users(function):
            return
        with contextlib.suppress(OSError, TypeError):
            yield inspect.getsource(function)
        yield from map(self.of, (function.__defaults__, function.__kwdefaults__))
        try:
            read = inspect.getclosurevars(function)
        except ValueError:  # a variable of the enclosing function has no value yet
            return
        for name, value in sorted({**read.globals, **read.nonlocals}.items()):
            yield name
            if not inspect.ismodule(value):
                yield self.of(value)

    def _class_facts(self, cls: type) -> Iterator[str]:
        """Describe a class: the source of the user's part of it, and what its methods read."""
        yield cls.__qualname__
        for base in cls.__mro__:
            if not _is_users(base):
                continue
            with contextlib.suppress(OSError, TypeError):
                yield inspect.getsource(base)
            for name, value in vars(base).items():
                if inspect.isfunction(value):
                    yield self.of(value)
                elif isinstance(value, PLAIN_TYPES) and not name.startswith("__"):
                    yield f"{name} {value!r}"


def _is_setting(value: Any) -> bool:
    """Whether an attribute of a layer is a setting, and no weight or layer."""
    return isinstance(value, (*PLAIN_TYPES, tuple, list)) or callable(value)


def _is_users(code: Any) -> bool:
    """Whether a class or function is the user's, and of no library."""
    package = (getattr(code, "__module__", None) or "builtins").partition(".")[0]
    if package in LIBRARY_PACKAGES or package in sys.stdlib_module_names - {"__main__"}:
        return False
    file = getattr(sys.modules.get(package), "__file__", None) or ""
    return "site-packages" not in file and "dist-packages" not in file
