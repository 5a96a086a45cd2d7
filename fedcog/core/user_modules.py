"""Loading of Python code that the user names on the command line, as FILE.py:NAME or MODULE:NAME.

Nothing else calls it: no settings file, run directory or message names code to run.
"""

import importlib
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from fedcog.core.settings import ConfigError

PATTERN = re.compile(r"(?P<file>.+\.py|[A-Za-z_][\w.]*):(?P<name>[A-Za-z_]\w*)")
"""FILE.py:NAME or MODULE:NAME."""


def names_code(text: str) -> bool:
    """Return whether a text has the form FILE.py:NAME or MODULE:NAME."""
    return PATTERN.fullmatch(text) is not None


def load_object(text: str) -> Any:
    """Import a module or execute a file, and return what it defines under a name.

    Args:
        text: FILE.py:NAME or MODULE:NAME, as the user typed it.

    Returns:
        The object.

    Raises:
        ConfigError: If the file, the module or the name is missing, or the code fails.
    """
    match = PATTERN.fullmatch(text)
    if match is None:
        raise ConfigError([f"'{text}' names no code: write FILE.py:NAME or MODULE:NAME."])
    place = match["file"]
    name = match["name"]
    module = load_file(Path(place)) if place.endswith(".py") else _import_module(place)
    if not hasattr(module, name):
        own = [key for key, value in vars(module).items() if _is_own(value, module)]
        hint = f"it defines {', '.join(own)}" if own else "it defines nothing to call"
        raise ConfigError([f"{place} has nothing called '{name}': {hint}."])
    return getattr(module, name)


def load_file(path: Path) -> ModuleType:
    """Execute a Python file, once per process.

    Args:
        path: The file.

    Returns:
        Its module.

    Raises:
        ConfigError: If there is no such file, or it fails.
    """
    module_name = f"fedcog_own_{re.sub(r'[^0-9A-Za-z_]', '_', str(path.resolve()))}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ConfigError([f"there is no file {path}: write FILE.py:NAME."])
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


def _is_own(value: object, module: ModuleType) -> bool:
    return callable(value) and getattr(value, "__module__", "") == module.__name__
