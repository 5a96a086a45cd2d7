"""Extract fenced code blocks, shell commands and flags from documents."""

import argparse
import functools
import re
import shlex
from collections.abc import Iterator
from typing import NamedTuple

from fedcog.cli import parser

FENCE = re.compile(r"^( *)```(.*)\n((?:.*\n)*?)\1```$", re.MULTILINE)


class Block(NamedTuple):
    """A fenced code block: its language, its text, and its first line number."""

    language: str
    text: str
    line: int


def blocks(text: str) -> list[Block]:
    """Return all fenced blocks of a document, in order."""
    parsed = []
    for fence in FENCE.finditer(text):
        indent, language, inside = fence.groups()
        plain = "".join(line.removeprefix(indent) for line in inside.splitlines(keepends=True))
        parsed.append(Block(language.strip(), plain, text[: fence.start()].count("\n") + 2))
    return parsed


@functools.cache
def _flags() -> tuple[set[str], dict[str, set[str]]]:
    """Return all flags, and the flags of each command."""
    root = parser.build_parser()
    by_command = dict[str, set[str]]()
    for action in root._actions:
        if isinstance(action.choices, dict):
            for name, subparser in action.choices.items():
                by_command[name] = _own_and_nested_flags(subparser)
    return _own_and_nested_flags(root), by_command


def _own_and_nested_flags(parser: argparse.ArgumentParser) -> set[str]:
    return {flag for nested in _parsers(parser) for flag in nested._option_string_actions}


def unknown_flags(text: str) -> list[str]:
    """Return unknown commands and flags in the lines that start with `fedcog `."""
    all_flags, by_command = _flags()
    unknown = []
    for command in re.findall(r"^fedcog .*(?:\\\n.*)*", text, re.MULTILINE):
        plain = command.split("#")[0]
        first = plain.split()[1]
        known = all_flags if first.startswith("-") else by_command.get(first, set())
        # The settings of an algorithm in a user's file are known only once that file is read.
        user_algorithms = re.findall(r"\.py:(\w+)", plain)
        if not known:
            unknown.append(f"no such command: {command}")
        for flag in re.findall(r"(?<=\s)--[A-Za-z0-9.-]+", plain):
            if flag not in known and flag.removeprefix("--").split(".")[0] not in user_algorithms:
                unknown.append(f"{flag} in: {command}")
    return unknown


def commands(text: str) -> list[str]:
    """Return the names of the fedcog commands in a document, in order."""
    return re.findall(r"^fedcog (\w+)", text, re.MULTILINE)


def _parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(getattr(action, "choices", None), dict):
            for inner in action.choices.values():  # type: ignore[union-attr]
                yield from _parsers(inner)


def shell_commands(text: str) -> Iterator[list[str]]:
    """Yield the commands of a shell block as lists of words, without comments.

    Backslashes and open quotes continue a command on the next line.
    """
    command = ""
    for line in text.splitlines():
        command += line + "\n"
        try:
            words = shlex.split(command.replace("\\\n", " "), comments=True)
        except ValueError:  # a quote is still open
            continue
        if not line.endswith("\\"):
            if words:
                yield words
            command = ""
    assert not command, f"incomplete command: {command}"
