"""What documents show: their fenced blocks, and the flags of the commands in them."""

import argparse
import functools
import re
import shlex
from collections.abc import Iterator
from typing import NamedTuple

from fedcog import grammar

FENCE = re.compile(r"^( *)```(.*)\n((?:.*\n)*?)\1```$", re.MULTILINE)


class Block(NamedTuple):
    """A fenced block: its language, its text, and the line where it begins."""

    language: str
    text: str
    line: int


def blocks(text: str) -> list[Block]:
    """All fenced blocks of a document, in order."""
    found = []
    for fence in FENCE.finditer(text):
        indent, language, inside = fence.groups()
        plain = "".join(line.removeprefix(indent) for line in inside.splitlines(keepends=True))
        found.append(Block(language.strip(), plain, text[: fence.start()].count("\n") + 2))
    return found


@functools.cache
def _flags() -> tuple[set[str], dict[str, set[str]]]:
    """All flags there are, and those of each command."""
    parser = grammar.parser()
    by_command = dict[str, set[str]]()
    for action in parser._actions:
        for name, inner in (action.choices or {}).items() if isinstance(action.choices, dict) else ():
            by_command[name] = {flag for one in _parsers(inner) for flag in one._option_string_actions}
    return {flag for one in _parsers(parser) for flag in one._option_string_actions}, by_command


def unknown_flags(text: str) -> list[str]:
    """Flags of commands beginning with `fedcog ` that the command does not have, and commands that there are not."""
    every, by_command = _flags()
    found = []
    for command in re.findall(r"^fedcog .*(?:\\\n.*)*", text, re.MULTILINE):
        plain = command.split("#")[0]
        first = plain.split()[1]
        known = every if first.startswith("-") else by_command.get(first, set())
        own = re.findall(r"\.py:(\w+)", plain)  # settings of an algorithm in a file are known once that is read
        found += [] if known else [f"no such command: {command}"]
        for flag in re.findall(r"(?<=\s)--[A-Za-z0-9.-]+", plain):
            if flag not in known and flag.removeprefix("--").split(".")[0] not in own:
                found.append(f"{flag} in: {command}")
    return found


def commands(text: str) -> list[str]:
    """The commands of ours that a document shows, by name."""
    return re.findall(r"^fedcog (\w+)", text, re.MULTILINE)


def _parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(getattr(action, "choices", None), dict):
            for inner in action.choices.values():  # type: ignore[union-attr]
                yield from _parsers(inner)


def lines(text: str) -> Iterator[list[str]]:
    """The commands of a shell's block as their words, comments left out; one may go over several lines."""
    whole = ""
    for line in text.splitlines():
        whole += line + "\n"
        try:
            words = shlex.split(whole.replace("\\\n", " "), comments=True)
        except ValueError:  # a quotation that is not closed yet
            continue
        if not line.endswith("\\"):
            yield from [words] if words else []
            whole = ""
    assert not whole, f"not the whole of a command: {whole}"
