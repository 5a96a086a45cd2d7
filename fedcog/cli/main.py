"""The entry point of the command line. Parsing needs no torch; commands import it when they run."""

import contextlib
import sys
from collections.abc import Sequence

from fedcog.cli import flags, parser
from fedcog.core.settings import ConfigError

EXIT_USAGE = 2
COMMANDS_WITH_HELP = ("run", "compare", "sweep", "audit")
"""Commands that print their help if nothing is said about what to run: they would run long."""
STYLE_FLAGS = {"--quiet", "--plain"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        plain, code = flags.load_user_code(words)
        root = parser.build_parser(code.algorithms)
        options, rest = root.parse_known_args(plain)
        options.words = words
        options.user_classes = code.algorithms
        if getattr(options, "flags", ()) and flags.split_rest(rest)[1]:
            flags.read_values(options, rest)  # raises: a flag is unknown
    except ConfigError as error:
        for fault in error.faults:
            print(f"fedcog: {fault}", file=sys.stderr)
        return EXIT_USAGE
    if options.command in COMMANDS_WITH_HELP and {*words[1:]} <= STYLE_FLAGS:
        with contextlib.suppress(SystemExit):
            root.parse_args([options.command, "--help"])
        return 0
    if options.command == "completion":
        flags.refuse_rest(rest)
        return _print_completion(options.shell)
    from fedcog.algorithms import ALGORITHMS  # imports torch
    from fedcog.cli.execution import COMMANDS, errors_explained
    from fedcog.data import load_dataset
    from fedcog.runs.config.user_objects import UserObjects

    options.known = ALGORITHMS | code.algorithms
    options.data_function = (code.data_functions or [""])[-1]
    with errors_explained() as outcome:
        data = load_dataset(options.data_function) if options.data_function else None
        options.user_objects = UserObjects(**code.objects, data=data)
        outcome.exit_code = COMMANDS[options.command](options, rest)
    return outcome.exit_code


def _print_completion(shell: str) -> int:
    from fedcog.cli import completion
    from fedcog.cli.schema import load_schema

    schema = load_schema()
    names = {
        "--algorithm": list(schema.algorithms),
        "--algorithms": list(schema.algorithms),
        "--dataset": schema.datasets,
        "--model": schema.models,
    }
    print(completion.script(shell, parser.build_parser(), names), end="")
    return 0
