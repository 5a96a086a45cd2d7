"""Python code that the user names on the command line, as FILE.py:Name or MODULE:Name.

Only the command line and `fedcog.load_dataset` load it: no settings file, run directory or message
names code to run.
"""

import functools
import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from fedcog.core.settings import ConfigError

PATTERN = re.compile(r"(?P<place>.+\.py|[A-Za-z_][\w.]*):(?P<name>[A-Za-z_]\w*)")
"""FILE.py:Name or MODULE:Name."""


@dataclass(frozen=True)
class NamedCode:
    """A class or function in a Python file or module.

    It is called like the class or function itself, and has its signature. It may be sent to another
    process, which then loads it there.

    Attributes:
        place: Absolute path of the file, or name of the module.
        name: Name of the class or function.
    """

    place: str
    name: str

    def __str__(self) -> str:
        return f"{self.place}:{self.name}"

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Call the class or function."""
        return self.load()(*arguments, **keywords)

    @property
    def __name__(self) -> str:
        return self.name

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.load())

    def load(self) -> Any:
        """Load the class or function.

        Raises:
            ConfigError: If the file, the module or the name is missing, or the code fails.
        """
        is_file = self.place.endswith(".py")
        module = load_file(Path(self.place)) if is_file else _import_module(self.place)
        if not hasattr(module, self.name):
            own = own_names(module)
            hint = f"it defines {', '.join(own)}" if own else "it defines nothing to call"
            raise ConfigError([f"{self.place} has nothing called '{self.name}': {hint}."])
        return getattr(module, self.name)


def names_code(text: str) -> bool:
    """Return whether a text has the form FILE.py:Name or MODULE:Name."""
    return PATTERN.fullmatch(text) is not None


def find_code(text: str) -> NamedCode:
    """Load what a text names, and return a reference to it.

    Args:
        text: FILE.py:Name or MODULE:Name, as the user typed it.

    Returns:
        The reference, with an absolute path.

    Raises:
        ConfigError: If the file, the module or the name is missing, or the code fails.
    """
    match = PATTERN.fullmatch(text)
    if match is None:
        raise ConfigError([f"'{text}' names no code: write FILE.py:Name or MODULE:Name."])
    place = match["place"]
    if place.endswith(".py"):
        place = str(Path(place).expanduser().resolve())
    code = NamedCode(place, match["name"])
    code.load()
    return code


def load_file(path: Path) -> ModuleType:
    """Execute a Python file, once per process.

    Args:
        path: The file.

    Returns:
        Its module.

    Raises:
        ConfigError: If there is no such file, or it fails.
    """
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]
    module_name = f"fedcog_own_{re.sub(r'[^0-9A-Za-z_]', '_', path.stem)}_{digest}"
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
        from fedcog.models.libraries import call_with_torchvision  # only where it is needed

        call_with_torchvision(functools.partial(spec.loader.exec_module, module))
    except BaseException as error:
        del sys.modules[module_name]
        sys.path.remove(folder)
        if not isinstance(error, Exception | SystemExit):
            raise
        raise ConfigError([f"{path} failed: {type(error).__name__}: {error}."]) from error
    return module


def own_names(module: ModuleType) -> list[str]:
    """Return the names of the classes and functions that a module itself defines."""
    return [
        name
        for name, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", "") == module.__name__
    ]


def _import_module(name: str) -> ModuleType:
    """Import a module, which may lie in the current folder."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise ConfigError(
            [f"module {name} cannot be imported: {type(error).__name__}: {error}."]
        ) from error
