"""Progress of a command: rounds, which Ctrl-C stops, and downloads."""

import signal
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any, Self

from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from fedcog.cli.console import Style, err, is_live, print_note
from fedcog.runs.progress import Display, RunProgress


class CommandProgress(RunProgress):
    """Shows rounds as they finish. The first Ctrl-C stops after the round, the second at once."""

    def __init__(
        self, num_rounds: int, num_done: int, style: Style, varying: Sequence[str] = ()
    ) -> None:
        """Create a progress display.

        Args:
            num_rounds: Number of all rounds.
            num_done: Number of rounds that are already finished.
            style: How much to print.
            varying: Settings that differ between runs, to show with each.
        """
        display: Display = "bar" if is_live(style) else "lines"
        if style == "quiet":
            display = "none"
        super().__init__(num_rounds, num_done, display, console=err, varying=varying)
        self._should_stop = False

    def __enter__(self) -> Self:
        super().__enter__()
        self._handlers = {
            number: signal.signal(number, self._request_stop)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, where)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def should_stop(self) -> bool:
        """Return whether the user asked to stop."""
        return self._should_stop

    def _request_stop(self, number: int, frame: FrameType | None) -> None:
        if self._should_stop:
            raise KeyboardInterrupt
        self._should_stop = True
        print_note("stopping after this round; press again to stop at once.")


class DownloadProgress:
    """Shows the bytes of downloads."""

    def __init__(self) -> None:
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TimeRemainingColumn(),
            console=err,
            disable=not err.is_terminal,
        )
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def show(self, name: str, num_done: int, total: int | None) -> None:
        """Show the progress of one file.

        Args:
            name: The file.
            num_done: Bytes so far.
            total: Bytes in all, if known.
        """
        if name not in self._tasks:
            self._tasks[name] = self._bar.add_task(name, total=total)
        self._bar.update(self._tasks[name], completed=num_done, total=total)
