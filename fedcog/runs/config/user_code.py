"""The user's own code: what a command line names as FILE.py:Name, and its source."""

import contextlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from fedcog.algorithms import ALGORITHMS, Algorithm
from fedcog.core import settings
from fedcog.core.settings import ConfigError
from fedcog.models.initialization import Network
from fedcog.runs.config.experiment import Experiment

UserClasses = dict[str, type[Algorithm]]
"""The user's algorithm classes by class name."""
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
    module = _load_module(path)
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


@dataclass(frozen=True)
class FileNetwork:
    """A class or function that builds a network, in a Python file.

    It may be sent to another process, which loads the file itself. The signature is that of the
    class or function.

    Attributes:
        path: Absolute path of the file.
        name: Name of the class or function.
    """

    path: str
    name: str

    def __str__(self) -> str:
        return f"{self.path}:{self.name}"

    def __call__(self, **arguments: Any) -> nn.Module:
        """Build the network."""
        network: nn.Module = self._load()(**arguments)
        return network

    @property
    def __name__(self) -> str:
        return self.name

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._load())

    def _load(self) -> Any:
        return getattr(_load_module(Path(self.path)), self.name, None)


def load_network(text: str) -> FileNetwork:
    """Load a class or function that builds a network from a Python file, which is executed.

    Args:
        text: A name such as "mine.py:Net", which the user wrote on the command line.

    Returns:
        What builds the network.

    Raises:
        ConfigError: If the file, the class or the function is missing.
    """
    path, _, name = text.rpartition(":")
    module = _load_module(Path(path))
    network = getattr(module, name, None)
    if isinstance(network, nn.Module):
        raise ConfigError(
            [f"{path}: {name} is one network with its weights: name its class, or a function."]
        )
    if not (inspect.isclass(network) and issubclass(network, nn.Module)) and not (
        inspect.isfunction(network)
    ):
        candidates = [
            key
            for key, value in vars(module).items()
            if (inspect.isclass(value) and issubclass(value, nn.Module))
            or inspect.isfunction(value)
            if value.__module__ == module.__name__
        ]
        hint = f"it defines {', '.join(candidates)}" if candidates else "it defines none"
        raise ConfigError([f"{path} has no network called '{name}': {hint}."])
    return FileNetwork(str(Path(path).resolve()), name)


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
    try:
        return inspect.getsource(network)
    except (OSError, TypeError):  # defined in an interactive session
        return str(getattr(network, "__qualname__", type(network).__qualname__))


def _load_module(path: Path) -> ModuleType:
    """Execute a Python file once per process."""
    module_name = f"fedcog_own_{re.sub(r'[^0-9A-Za-z_]', '_', str(path.resolve()))}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ConfigError([f"there is no file {path}: write FILE.py:Name."])
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses look their module up
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)  # as for a script, which may import its neighbors, also later
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[module_name]
        sys.path.remove(folder)
        if not isinstance(error, Exception | SystemExit):
            raise
        raise ConfigError([f"{path} failed: {type(error).__name__}: {error}."]) from error
    return module
