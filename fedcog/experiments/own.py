"""What is your own: algorithms named on the command line, FILE.py:Class; and by what such things are known again."""

import contextlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import nn

from fedcog import settings
from fedcog.algorithms import ALGORITHMS, Algorithm
from fedcog.experiments.config import Experiment
from fedcog.settings import ConfigError

Classes = dict[str, type[Algorithm]]


def resolve(text: str, known: Mapping[str, type[Algorithm]] = ALGORITHMS) -> tuple[str, Classes]:
    """An algorithm's name in which files may stand, such as mine.py:Mine+fedcog: the plain name, and the classes."""
    names, classes, rest = list[str](), Classes(), text
    while rest:
        first = rest.split("+")[0]
        match = None if first in known else re.match(r"(.+?\.py):(\w*)(?=\+|$)", rest)
        if match:
            found = load(Path(match[1]), match[2])
            if classes.get(found.__name__, found) is not found:
                raise ConfigError([f"two algorithms of your own are called {found.__name__}: rename one of them."])
            classes[found.__name__], first = found, match[0]
            names.append(found.__name__)
        else:
            names.append(first)
        rest = rest[len(first) :].removeprefix("+")
    return "+".join(names), classes


def load(path: Path, name: str) -> type[Algorithm]:
    """The algorithm called `name` that a Python file defines. The file is run: it is you who names it."""
    module_name = f"fedcog_own_{re.sub(r'[^0-9A-Za-z_]', '_', str(path.resolve()))}"
    module = sys.modules.get(module_name)
    if module is None:
        spec = importlib.util.spec_from_file_location(module_name, path)
        if spec is None or spec.loader is None or not path.is_file():
            raise ConfigError([f"there is no file {path}: name it as FILE.py:Class."])
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module  # dataclasses look their module up
        sys.path.insert(0, str(path.resolve().parent))  # as for a script: it may import what lies beside it, also later
        try:
            spec.loader.exec_module(module)
        except BaseException as error:
            del sys.modules[module_name]
            sys.path.remove(str(path.resolve().parent))
            if not isinstance(error, Exception | SystemExit):
                raise
            raise ConfigError([f"{path} cannot be run: {type(error).__name__}: {error}."]) from error
    found = getattr(module, name, None)
    if not (inspect.isclass(found) and issubclass(found, Algorithm)):
        there = [
            key
            for key, value in vars(module).items()
            if inspect.isclass(value) and issubclass(value, Algorithm) and value.__module__ == module_name
        ]
        hint = f"it has {', '.join(there)}" if there else "it has none; subclass fedcog.Algorithm"
        raise ConfigError([f"{path} has no algorithm called '{name}': {hint}."])
    if trouble := settings.unsound(found, besides={"inner"}):
        raise ConfigError([f"{path}: {found.__name__}: {fault}" for fault in trouble])
    if found.__name__ in {*ALGORITHMS, *settings.settings(Experiment), "algorithm"}:
        raise ConfigError([f"{path}: an algorithm of your own cannot be called {found.__name__}; that name is taken."])
    return found


def own_code(classes: Iterable[type]) -> str:
    """The source of classes, and of what they derive from, as far as that is yours and can be had."""
    found = dict.fromkeys(base for one in classes for base in one.__mro__)
    code = ""
    for one in found:
        if one.__module__.partition(".")[0] not in ("fedcog", "torch", "builtins", "abc", "typing"):
            with contextlib.suppress(OSError, TypeError):
                code += inspect.getsource(one)
    return code


def known_by(network: nn.Module | None) -> str:
    """What tells a network from others: how it is built, and the code of your own in it."""
    return "" if network is None else repr(network) + own_code(type(part) for part in network.modules())
