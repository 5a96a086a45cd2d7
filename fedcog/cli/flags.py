"""Command-line flags for settings: their names, help texts, and how they are read back."""

import argparse
import shutil
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from fedcog.cli.schema import load_schema
from fedcog.core import settings
from fedcog.core.settings import ConfigError, Setting
from fedcog.core.toml import read_toml

if TYPE_CHECKING:
    from fedcog.runs.config.user_code import UserClasses

NO_VALUE = object()
"""Stands for the value of a flag that was given without one."""
FIRST_OF_GROUP = {
    "dataset": "data",
    "model": "federation",
    "local_steps": "local training",
    "seed": "execution",
}
"""Titles of groups of flags, by the setting that starts each."""
ALIASES = {"fedcog.start_round": "--start-round"}
CUSTOM = "custom"
"""Stands in a run's record for an object of the user's."""
MAX_HELP_WIDTH = 120
HELP_COLUMN = 36


class HelpFormatter(argparse.HelpFormatter):
    """Formats help texts to the width of the terminal."""

    def __init__(self, prog: str) -> None:
        width = min(MAX_HELP_WIDTH, shutil.get_terminal_size().columns - 2)
        super().__init__(prog, max_help_position=HELP_COLUMN, width=width)

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        """Show no brackets: values are optional only for the sake of better errors."""
        if action.nargs == "?":
            return str(action.metavar)
        return super()._format_args(action, default_metavar)


class Parser(argparse.ArgumentParser):
    """A parser that raises ConfigError instead of exiting."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(formatter_class=HelpFormatter, allow_abbrev=False, **keywords)

    def error(self, message: str) -> NoReturn:
        """Raise an error.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError([f"{message}. See {self.prog} --help."])


class UserCode(NamedTuple):
    """Code of the user that words of the command line name.

    Attributes:
        algorithms: Algorithm classes by name.
        objects: Objects by their field in `UserObjects`, such as "model".
        data_functions: Functions that make the data set, as text; the last one counts.
    """

    algorithms: "UserClasses"
    objects: dict[str, Any]
    data_functions: list[str]


def load_user_code(words: Sequence[str]) -> tuple[list[str], UserCode]:
    """Load what words of the command line name as FILE.py:NAME.

    Only the command line names code: settings files and run directories never do.

    Args:
        words: The command line.

    Returns:
        The command line with names in place of code, and the code.

    Raises:
        ConfigError: If code cannot be loaded, or two algorithms have the same name.
    """
    plain: list[str] = []
    code = UserCode({}, {}, [])
    last_flag = ""
    for word in words:
        flag, equals, text = word.partition("=")
        if word.startswith("--"):
            last_flag = flag
        else:
            flag = ""
            equals = ""
            text = word
        if ".py:" in text and last_flag in ("--algorithm", "--algorithms"):
            text = _load_algorithms(text, code.algorithms)
        elif ".py:" in text and last_flag == "--model":
            from fedcog.runs.config.user_code import load_network

            code.objects["model"] = load_network(text)
            text = CUSTOM
        elif text and last_flag == "--augmentation":
            from fedcog.runs.config.user_code import load_function

            code.objects["augmentation"] = load_function(text)
        elif last_flag == "--dataset" and ":" in text:
            from fedcog.data.sources.locations import location_kind

            if location_kind(text) == "code":
                code.data_functions.append(text)
                text = CUSTOM
        plain.append(f"{flag}{equals}{text}")
    return plain, code


def _load_algorithms(text: str, known: "UserClasses") -> str:
    """Load the algorithms in a name such as mine.py:Mine+fedcog, and return their names."""
    from fedcog.runs.config.user_code import resolve

    text, found = resolve(text)
    for name in found.keys() & known.keys():
        if found[name] is not known[name]:
            raise ConfigError([f"two of your algorithms are called {name}: rename one of them."])
    known |= found
    return text


def all_settings(user_classes: "UserClasses") -> dict[str, Setting]:
    """Return every setting that has a flag; an algorithm's as ALGORITHM.SETTING."""
    schema = load_schema()
    tables = dict(schema.algorithms)
    tables |= {name: settings.settings(cls) for name, cls in user_classes.items()}
    found = dict(schema.settings)
    for name, table in tables.items():
        found |= {f"{name}.{key}": setting for key, setting in table.items()}
    return found


def add_experiment_flags(
    parser: argparse.ArgumentParser,
    known: Mapping[str, Setting],
    refused: Collection[str] = (),
    **defaults: object,
) -> None:
    """Add a flag for every setting, in groups.

    Args:
        parser: The parser of a command.
        known: The settings by name.
        refused: Flags that the command replaces by better ones; they are hidden.
        **defaults: Defaults of this command that differ from the settings' own.
    """
    group = parser.add_argument_group("algorithm")
    group.add_argument(
        "--algorithm",
        metavar="NAME",
        help="base and wrappers, such as fedprox+fedcog (default: fedavg); your own: FILE.py:Class",
    )
    group.add_argument("--fedcog", action="store_true", help="wrap the algorithm in FedCOG")
    for key, setting in known.items():
        table = key.rpartition(".")[0]
        title = f"settings of {table}" if table else FIRST_OF_GROUP.get(key)
        if title and group.title != title:
            group = parser.add_argument_group(title)
        names = [f"--{table}.{setting.flag}" if table else f"--{setting.flag}"]
        if key in ALIASES:
            names.append(ALIASES[key])
        _add_flag(group, names, key, setting, defaults.get(key, setting.default))
    for flag in refused:
        parser._option_string_actions[flag].help = argparse.SUPPRESS
    parser.set_defaults(flags=visible_flags(parser))


def _add_flag(
    group: Any, names: Sequence[str], key: str, setting: Setting, default: object
) -> None:
    """Add the flag of one setting."""
    if setting.type is bool:
        text = f"{setting.help} (default: {default})"
        action = argparse.BooleanOptionalAction
        group.add_argument(*names, dest=key, action=action, default=None, help=text)
        return
    if setting.choices:
        metavar = "{" + ",".join(setting.choices) + "}"
    else:
        metavar = setting.type.__name__.upper()
    facts = []
    if setting.bounds:
        facts.append(", ".join(f"{sign} {limit:g}" for sign, limit in setting.bounds))
    if default != "":
        facts.append(f"default: {default}")
    text = f"{setting.help} ({'; '.join(facts)})" if facts else setting.help
    group.add_argument(
        *names, dest=key, nargs="?", const=NO_VALUE, metavar=metavar, help=text.replace("%", "%%")
    )


def visible_flags(parser: argparse.ArgumentParser) -> list[str]:
    """Return the flags that a parser's help shows."""
    actions = parser._option_string_actions.items()
    return [
        flag
        for flag, action in actions
        if flag.startswith("--") and action.help != argparse.SUPPRESS
    ]


def read_values(options: argparse.Namespace, rest: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Read the settings of a settings file and of flags; flags win.

    Args:
        options: The parsed command line.
        rest: What no flag took.

    Returns:
        (settings by name, faults).

    Raises:
        ConfigError: If a flag is unknown.
    """
    files, unknown_flags = split_rest(rest)
    faults = [
        settings.unknown_name("flag", flag.split("=")[0], sorted(options.flags))
        for flag in unknown_flags
    ]
    if len(files) > 1:
        faults.append(f"at most one TOML file, not {', '.join(files)}.")
    file_values: dict[str, Any] = {}
    for file in files[:1]:
        try:
            file_values = read_toml(file)
        except ConfigError as error:
            faults += error.faults
    flag_values, flag_faults = _read_flags(options)
    faults += flag_faults
    values = merge(file_values, flag_values)
    if options.fedcog:
        base = str(values.get("algorithm", "fedavg"))
        values["algorithm"] = base if "fedcog" in base.split("+") else f"{base}+fedcog"
    names = getattr(options, "algorithms", None) or [str(values.get("algorithm", "fedavg"))]
    used = {part for name in names for part in name.split("+")}
    for table in (*load_schema().algorithms, *options.user_classes):
        if table in flag_values and table not in used:  # a file may have settings of others
            faults.append(
                f"{table} has settings, but the algorithm is {', '.join(names)}: add {table}, or "
                "remove them."
            )
    if unknown_flags:  # answer at once, without torch
        raise ConfigError(faults)
    return values, faults


def _read_flags(options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Read the settings that flags set."""
    values: dict[str, Any] = {}
    faults: list[str] = []
    for key, setting in all_settings(options.user_classes).items():
        text = getattr(options, key)
        if text is None:
            continue
        table, _, name = key.rpartition(".")
        try:
            if text is NO_VALUE:
                raise ValueError(f"needs {setting.expected}")
            value = text if isinstance(text, bool) else settings.parse(setting, text)
        except ValueError as error:
            faults.append(f"{key} {error}.")
            continue
        target = values.setdefault(table, {}) if table else values
        target[name] = value
    if options.algorithm is not None:
        values["algorithm"] = options.algorithm
    return values, faults


def merge(base: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Merge settings; tables are merged key by key.

    Args:
        base: Settings.
        overrides: Settings that win.

    Returns:
        All settings.
    """
    merged = dict(base)
    for key, value in overrides.items():
        both_tables = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merged[key] | value if both_tables else value
    return merged


def split_rest(rest: list[str]) -> tuple[list[str], list[str]]:
    """Split what no flag took into file names and unknown flags, whose values are dropped."""
    files: list[str] = []
    unknown_flags: list[str] = []
    is_value = False
    for word in rest:
        if word.startswith("-") and len(word) > 1:
            unknown_flags.append(word)
            is_value = "=" not in word
        elif is_value and not word.endswith(".toml"):
            is_value = False
        else:
            files.append(word)
    return files, unknown_flags


def refuse_rest(rest: list[str]) -> None:
    """Refuse words that a command does not take.

    Raises:
        ConfigError: If there are any.
    """
    if rest:
        raise ConfigError([f"unexpected arguments: {' '.join(rest)}. See fedcog --help."])


def read_seeds(texts: list[str], faults: list[str]) -> list[int]:
    """Parse seeds.

    Args:
        texts: What the user wrote.
        faults: Problems are appended here.

    Returns:
        The seeds without repetition.
    """
    seeds = []
    for text in texts:
        if text.isascii() and text.isdigit() and len(text) < 19:
            seeds.append(int(text))
        else:
            faults.append(f"seeds needs integers >= 0, not '{text[:30]}'.")
    return list(dict.fromkeys(seeds))
