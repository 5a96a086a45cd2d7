"""Worker processes on a CPU: forks of this process that each train some clients of a round.

As forks they know the network, the data and the algorithm without receiving them, wherever those
are defined.
"""

import contextlib
import functools
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any, TextIO

import torch

from fedcog.core import serialization
from fedcog.core.tree import State

WorkFunction = Callable[[State], State]
"""Processes one item: a message to a message."""

StartRound = Callable[[State], WorkFunction]
"""Turns what all items of a round share into the function that processes each."""

PARENT_CHECK_SECONDS = 0.5
"""Seconds between checks whether the parent process is alive."""


class WorkerDied(Exception):
    """A worker process ended during its work."""


class WorkerPool:
    """Worker processes, alive until `close` or the end of this object or process.

    They exist on Linux only: elsewhere system libraries do not survive a fork.
    """

    def __init__(self, count: int, num_threads: int, start_round: StartRound) -> None:
        """Start worker processes.

        Args:
            count: Number of processes.
            num_threads: Number of torch threads of each.
            start_round: Turns what all items of a round share into the function that processes
                each.
        """
        self._processes: dict[Connection, ForkProcess] = {}
        self.close = weakref.finalize(self, _kill_all, self._processes, os.getpid())
        fork = multiprocessing.get_context("fork")
        # Signals wait until the child has its own handlers.
        signals = {signal.SIGINT, signal.SIGTERM}
        previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        try:
            for _ in range(count):
                here, there = fork.Pipe()
                arguments = (there, num_threads, start_round, os.getpid())
                process = fork.Process(target=_worker_main, args=arguments, daemon=True)
                self._processes[here] = process
                with warnings.catch_warnings():
                    # Python 3.12 warns about locks of other threads, which a worker does not need.
                    warnings.simplefilter("ignore", DeprecationWarning)
                    process.start()
                there.close()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)

    @property
    def has_ended(self) -> bool:
        """Whether the processes are gone."""
        return not self.close.alive

    def map(self, common: State, items: Sequence[State], order: Sequence[int]) -> list[State]:
        """Process items, each in the next free worker.

        If this fails in any way, all workers end and their results are lost.

        Args:
            common: What all items share.
            items: What differs.
            order: Indices of the items in the order in which to start them.

        Returns:
            One result per item.

        Raises:
            WorkerDied: If a worker ends unexpectedly.
            BaseException: What a worker raises is raised here.
        """
        results: list[State] = [{} for _ in items]
        waiting = deque(order)
        busy: dict[Connection, int] = {}
        common_message = serialization.pack({"common": common})

        def send_next(connection: Connection) -> None:
            busy[connection] = waiting.popleft()
            with self._death_noticed(connection):
                connection.send_bytes(serialization.pack({"item": items[busy[connection]]}))

        try:
            for connection in list(self._processes)[: len(items)]:
                with self._death_noticed(connection):
                    connection.send_bytes(common_message)
                send_next(connection)
            while busy:
                for ready in wait(list(busy)):
                    connection = ready  # type: ignore[assignment]
                    with self._death_noticed(connection):
                        answer = connection.recv_bytes()
                    results[busy.pop(connection)] = _raise_error(serialization.unpack(answer))
                    if waiting:
                        send_next(connection)
        except BaseException:
            self.close()
            raise
        return results

    @contextlib.contextmanager
    def _death_noticed(self, connection: Connection) -> Iterator[None]:
        """Explain a closed connection, which means that a worker died."""
        try:
            yield
        except (EOFError, ConnectionError) as error:
            process = self._processes[connection]
            process.join(timeout=1)
            raise WorkerDied(_death_message(process.exitcode)) from error


def _kill_all(processes: dict[Connection, ForkProcess], owner: int) -> None:
    """Kill all workers, which have nothing to save."""
    if os.getpid() != owner:  # a fork, such as a worker, does not own them
        return
    for connection, process in processes.items():
        if process.pid is not None:
            process.kill()
            process.join()
        connection.close()


def _death_message(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        with contextlib.suppress(ValueError):
            name = signal.Signals(-exit_code).name
            cause = ", probably because memory ran out" if exit_code == -signal.SIGKILL else ""
            return (
                f"a worker process was killed by {name}{cause}: "
                "try fewer --workers, or a smaller --batch-size."
            )
    return (
        f"a worker process ended unexpectedly (exit code {exit_code}): "
        "try --workers 1, which shows the error."
    )


def _worker_main(
    connection: Connection, num_threads: int, start_round: StartRound, parent: int
) -> None:
    """Run a worker until its connection closes or its parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    gc.freeze()  # inherited objects are the parent's to finalize
    # Locks on directories and the connections of other workers must not outlive the parent.
    os.closerange(3, connection.fileno())
    os.closerange(connection.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
    # Another thread of the parent, such as a progress bar, may hold the lock of a stream for ever.
    sys.stdout = _open_stream(1)
    sys.stderr = _open_stream(2)
    watch_parent = functools.partial(_watch_parent, parent)
    answer_items = functools.partial(_answer_items, connection, num_threads, start_round)
    # OpenMP keeps threads per calling thread. This thread remembers some that the fork left behind
    # and would wait for them, while a new thread starts its own. With one thread none are needed,
    # and the main thread is faster because its memory is warm.
    if num_threads == 1:
        threading.Thread(target=watch_parent, daemon=True).start()
        answer_items()
    else:
        threading.Thread(target=answer_items, daemon=True).start()
        watch_parent()


def _watch_parent(parent: int) -> None:
    """End this process when the parent has ended."""
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_SECONDS)
    os._exit(1)


def _open_stream(descriptor: int) -> TextIO:
    """Open a new stream on an open file descriptor, or on nothing if it is closed."""
    try:
        return open(descriptor, "w", buffering=1, closefd=False)
    except OSError:
        return open(os.devnull, "w")


def _answer_items(connection: Connection, num_threads: int, start_round: StartRound) -> None:
    """Process items as they arrive."""
    process_item: WorkFunction | None = None
    try:
        torch.set_num_threads(num_threads)
        while True:
            message = serialization.unpack(connection.recv_bytes())
            try:
                if "common" in message:
                    process_item = start_round(message["common"])
                    continue
                assert process_item is not None, "what items share arrives before them"
                answer = serialization.pack(process_item(message["item"]))
            except BaseException as error:
                answer = serialization.pack({"error": _error_message(error)})
            connection.send_bytes(answer)
    finally:  # also when the connection closes, because then there is nothing left to do
        os._exit(0)


def _error_message(error: BaseException) -> State:
    """Encode an exception as a message."""
    first = str(error)
    if len(error.args) == 1 and isinstance(error.args[0], str):
        first = error.args[0]
    return {
        "module": type(error).__module__,
        "name": type(error).__qualname__,
        "first": first,
        "text": str(error),
        "trace": "".join(traceback.format_exception(error)),
    }


def _raise_error(answer: State) -> State:
    """Return an answer, or raise the exception that it holds, of its own class if possible."""
    if "error" not in answer:
        return answer
    message = answer["error"]
    error: BaseException = RuntimeError(f"{message['name']}: {message['text']}")
    with contextlib.suppress(Exception):  # the class is not importable, or takes other arguments
        cls: Any = sys.modules[message["module"]]
        for part in message["name"].split("."):
            cls = getattr(cls, part)
        recreated = cls(message["first"])
        if isinstance(recreated, BaseException) and str(recreated) == message["text"]:
            error = recreated
    error.add_note(f"In a worker process:\n{message['trace']}")
    raise error
