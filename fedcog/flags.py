"""Flags made of settings: how the command line names them, explains them, and reads them back."""

import argparse
import shutil
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

from fedcog import settings
from fedcog.algorithms import Algorithm
from fedcog.experiments.config import Experiment, read_toml
from fedcog.experiments.own import Classes, resolve
from fedcog.settings import ConfigError, Setting

MISSING = object()
GROUPS = {"dataset": "data", "model": "federation", "local_steps": "local training", "seed": "running"}
ALIASES = {"fedcog.start_round": "--start-round"}


class _Help(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=36, width=min(120, shutil.get_terminal_size().columns - 2))

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        """A flag's value without brackets: it is only for better faults that it may be left out."""
        return str(action.metavar) if action.nargs == "?" else super()._format_args(action, default_metavar)


class Parser(argparse.ArgumentParser):
    """A parser whose faults are told like all others."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(formatter_class=_Help, allow_abbrev=False, **keywords)

    def error(self, message: str) -> NoReturn:
        """Not an exit: a fault."""
        raise ConfigError([f"{message}. See {self.prog} --help."])


def own_algorithms(words: Sequence[str]) -> tuple[list[str], Classes]:
    """The words with plain names for algorithms given as FILE.py:Class, and those classes."""
    plain, classes, named = list[str](), Classes(), False
    for word in words:
        flag, equals, text = word.partition("=")
        if word.startswith("--"):
            named = flag in ("--algorithm", "--algorithms")
        else:
            flag, equals, text = "", "", word
        if named and ".py:" in text:
            text, found = resolve(text)
            for name in found.keys() & classes.keys():
                if found[name] is not classes[name]:
                    raise ConfigError([f"two algorithms of your own are called {name}: rename one of them."])
            classes |= found
        plain.append(f"{flag}{equals}{text}")
    return plain, classes


def add_experiment(
    parser: argparse.ArgumentParser,
    algorithms: Mapping[str, type[Algorithm]],
    refused: Collection[str] = (),
    **defaults: object,
) -> None:
    """A flag for every setting, in groups, with help, bounds and default: its own, unless the command has another.

    Those that the command has better ones for, and refuses with a word about them, are not shown.
    """
    group = parser.add_argument_group("algorithm")
    group.add_argument(
        "--algorithm",
        metavar="NAME",
        help="base and wrappers, such as fedprox+fedcog (default: fedavg); of your own: FILE.py:Class",
    )
    group.add_argument("--fedcog", action="store_true", help="wrap the algorithm in FedCOG")
    for key, setting in known(algorithms).items():
        table = key.rpartition(".")[0]
        title = f"settings of {table}" if table else GROUPS.get(key)
        if title and (not group or group.title != title):
            group = parser.add_argument_group(title)
        flags = [f"--{table}.{setting.flag}" if table else f"--{setting.flag}"]
        flags += [ALIASES[key]] if key in ALIASES else []
        usual = defaults.get(key, setting.default)
        if setting.type is bool:
            action: Any = argparse.BooleanOptionalAction
            group.add_argument(*flags, dest=key, action=action, help=f"{setting.help} (default: {usual})")
            continue
        kind = "{" + ",".join(setting.choices) + "}" if setting.choices else setting.type.__name__.upper()
        limits = ", ".join(f"{sign} {limit:g}" for sign, limit in setting.bounds)
        facts = [part for part in (limits, f"default: {usual}" if usual != "" else "") if part]
        note = f"{setting.help} ({'; '.join(facts)})" if facts else setting.help
        group.add_argument(*flags, dest=key, nargs="?", const=MISSING, metavar=kind, help=note.replace("%", "%%"))
    for flag in refused:
        parser._option_string_actions[flag].help = argparse.SUPPRESS
    parser.set_defaults(flags=shown(parser))


def shown(parser: argparse.ArgumentParser) -> list[str]:
    """The flags that a parser tells of."""
    there = parser._option_string_actions.items()
    return [flag for flag, action in there if flag.startswith("--") and action.help != argparse.SUPPRESS]


def given(options: argparse.Namespace, rest: list[str]) -> tuple[dict[str, Any], list[str]]:
    """The settings that a file and flags give, flags first, and the faults among them."""
    values, faults = dict[str, Any](), list[str]()
    files, flags = leftovers(rest)
    for flag in flags:
        faults.append(settings.unknown("flag", flag.split("=")[0], sorted(options.flags)))
    if len(files) > 1:
        faults.append(f"one TOML file at most, not {', '.join(files)}.")
    for file in files[:1]:
        try:
            values = read_toml(file)
        except ConfigError as error:
            faults += error.faults
    found: dict[str, Any] = {}
    for key, setting in known(options.known).items():
        text = getattr(options, key)
        if text is None:
            continue
        table, _, name = key.rpartition(".")
        try:
            if text is MISSING:
                raise ValueError(f"needs {setting.kind}")
            value = text if isinstance(text, bool) else settings.parse(setting, text)
        except ValueError as error:
            faults.append(f"{key} {error}.")
            continue
        (found.setdefault(table, {}) if table else found)[name] = value
    if options.algorithm is not None:
        found["algorithm"] = options.algorithm
    values = merge(values, found)
    if options.fedcog:
        base = str(values.get("algorithm", "fedavg"))
        values["algorithm"] = base if "fedcog" in base.split("+") else f"{base}+fedcog"
    names = getattr(options, "algorithms", None) or [str(values.get("algorithm", "fedavg"))]
    used = {part for name in names for part in name.split("+")}
    for table in options.known:  # a file may hold the settings of others, but a flag is meant
        if table in found and table not in used:
            faults.append(f"{table} has settings, but the algorithm is {', '.join(names)}: add {table}, or leave them.")
    return values, faults


def merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """The settings of both; where they meet, those above."""
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merged[key] | value if both else value
    return merged


def leftovers(rest: list[str]) -> tuple[list[str], list[str]]:
    """What no flag took: file names, and unknown flags (each with the value that follows it)."""
    files, flags, after_flag = list[str](), list[str](), False
    for word in rest:
        if word.startswith("-") and len(word) > 1:
            flags.append(word)
            after_flag = "=" not in word
        elif after_flag and not word.endswith(".toml"):
            after_flag = False
        else:
            files.append(word)
    return files, flags


def known(algorithms: Mapping[str, type[Algorithm]]) -> dict[str, Setting]:
    """Every setting there is a flag for, an algorithm's own under its name."""
    found = settings.settings(Experiment)
    for name, cls in algorithms.items():
        found |= {f"{name}.{key}": setting for key, setting in settings.settings(cls).items()}
    return found
