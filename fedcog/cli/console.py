"""Output of the command line: results on stdout, notes and errors on stderr."""

import contextlib
import io
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.text import Text

import fedcog

Style = Literal["auto", "plain", "quiet"]
"""How much to print: tables and bars, plain lines, or errors only."""
PIPE_WIDTH = 160
"""Columns of tables that are not printed to a terminal."""
PACKAGE = Path(fedcog.__file__).parent
EXIT_USAGE = 2


class Stream(Console):
    """A console whose reader may close the pipe: the run continues without output.

    Control characters, which names in data files may contain, do not reach the terminal.
    """

    def render_str(self, text: str, **options: Any) -> Text:
        """Convert a text with markup; control characters become spaces."""
        shown = (one if one.isprintable() or one in "\n\t" else " " for one in text)
        return super().render_str("".join(shown), **options)

    def on_broken_pipe(self) -> None:
        """Write to nowhere from now on."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


out = Stream(
    highlight=False,
    width=None if sys.stdout and sys.stdout.isatty() else PIPE_WIDTH,
    file=None if sys.stdout else io.StringIO(),  # stdout may be closed
)
err = Stream(
    stderr=True, highlight=False, soft_wrap=True, file=None if sys.stderr else io.StringIO()
)


def print_result(text: str, style: Style) -> None:
    """Print a line of results.

    Args:
        text: The line.
        style: Quiet prints nothing.
    """
    if style != "quiet":
        out.print(text, markup=False, soft_wrap=True)


def print_note(text: str, style: Style = "auto") -> None:
    """Print a note besides the results.

    Args:
        text: The note.
        style: Quiet prints nothing.
    """
    if style != "quiet":
        err.print(f"fedcog: {text}", markup=False)


def print_faults(faults: Sequence[str]) -> int:
    """Print errors, one per line, and return the exit code for them."""
    for fault in faults:
        err.print(f"fedcog: {fault}", markup=False)
    return EXIT_USAGE


def is_live(style: Style) -> bool:
    """Return whether to draw progress bars."""
    return style == "auto" and err.is_terminal


@contextlib.contextmanager
def warnings_as_notes() -> Iterator[None]:
    """Print this package's warnings as notes, without file and line."""
    with warnings.catch_warnings():
        show_usual = warnings.showwarning

        def _show(
            message: Warning | str, category: type[Warning], filename: str, *rest: Any, **more: Any
        ) -> None:
            if issubclass(category, UserWarning) and Path(filename).is_relative_to(PACKAGE):
                print_note(str(message))
            else:
                show_usual(message, category, filename, *rest, **more)

        warnings.showwarning = _show
        yield
