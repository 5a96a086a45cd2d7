"""Worker processes on a CPU: forks of this one that each do a share of a round, client by client.

Being forks, they know the network, the data and the algorithm without being sent them, wherever those are defined.
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

from fedcog.federation import messages
from fedcog.tree import State

Duty = Callable[[State], State]
"""What is done for one item: from a message to a message."""

WATCH = 0.5  # seconds between looks at whether the parent is alive


class WorkerDied(Exception):
    """A worker process that ended in the midst of its work: says how, and what to do."""


class Workers:
    """So many processes, each computing on `threads` threads, until `close`, or the end of this object or process.

    `begin` makes of what all items of a round have in common the duty that is done for each. On Linux alone: elsewhere
    system libraries do not survive a fork.
    """

    def __init__(self, count: int, threads: int, begin: Callable[[State], Duty]) -> None:
        self._crew: dict[Connection, ForkProcess] = {}
        self.close = weakref.finalize(self, _end, self._crew, os.getpid())
        fork = multiprocessing.get_context("fork")
        ours = {signal.SIGINT, signal.SIGTERM}
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ours)  # until a child has handlers of its own
        try:
            for _ in range(count):
                here, there = fork.Pipe()
                self._crew[here] = fork.Process(target=_work, args=(there, threads, begin, os.getpid()), daemon=True)
                with warnings.catch_warnings():  # Python 3.12 warns of other threads' locks: a worker needs none
                    warnings.simplefilter("ignore", DeprecationWarning)
                    self._crew[here].start()
                there.close()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    @property
    def ended(self) -> bool:
        """Are they gone?"""
        return not self.close.alive

    def map(self, common: State, items: Sequence[State], order: Sequence[int]) -> list[State]:
        """What comes of every item, handed out in `order`, each to whoever is free.

        What a worker raises is raised here. However this fails, all workers are ended and what they did is lost.
        """
        found: list[State] = [{} for _ in items]
        left, busy, shared = deque(order), dict[Connection, int](), messages.pack({"common": common})

        def hand_out(line: Connection) -> None:
            busy[line] = left.popleft()
            with self._listening(line):
                line.send_bytes(messages.pack({"item": items[busy[line]]}))

        try:
            for line in list(self._crew)[: len(items)]:
                with self._listening(line):
                    line.send_bytes(shared)
                hand_out(line)
            while busy:
                for ready in wait(list(busy)):
                    line = ready  # type: ignore[assignment]
                    with self._listening(line):
                        answer = line.recv_bytes()
                    found[busy.pop(line)] = _checked(messages.unpack(answer))
                    if left:
                        hand_out(line)
        except BaseException:
            self.close()
            raise
        return found

    @contextlib.contextmanager
    def _listening(self, line: Connection) -> Iterator[None]:
        """Within it, a line that ends means a worker that died."""
        try:
            yield
        except (EOFError, ConnectionError) as error:
            process = self._crew[line]
            process.join(timeout=1)
            raise WorkerDied(_last_words(process.exitcode)) from error


def _end(crew: dict[Connection, ForkProcess], owner: int) -> None:
    """End all workers at once: they have nothing to lose."""
    if os.getpid() != owner:  # in a fork, say a worker: they are not its own
        return
    for line, process in crew.items():
        if process.pid is not None:
            process.kill()
            process.join()
        line.close()


def _last_words(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        with contextlib.suppress(ValueError):
            how = f"was killed by {signal.Signals(-exit_code).name}"
            why = ", most likely because memory ran out" if exit_code == -signal.SIGKILL else ""
            return f"a process that trained clients {how}{why}: try fewer --workers, or a smaller --batch-size."
    return f"a process that trained clients ended of itself (exit code {exit_code}): try --workers 1, which tells more."


def _work(line: Connection, threads: int, begin: Callable[[State], Duty], parent: int) -> None:
    """A worker's life: it ends with its line, or when its parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    gc.freeze()  # what was inherited is the parent's to finalise
    os.closerange(3, line.fileno())  # a lock on a directory, others' lines: all of them would outlive the parent
    os.closerange(line.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
    # A progress bar's, or any stream's lock may have been held by another thread of the parent: nobody will release it.
    sys.stdout, sys.stderr = (_stream(number) for number in (1, 2))
    watch, answer = functools.partial(_watch, parent), functools.partial(_answer, line, threads, begin)
    # OpenMP keeps its threads by the thread that asks for them: this one remembers some that the fork left behind, and
    # would wait for them; a new one starts its own. But what needs no others is faster here, where memory is at hand.
    here, beside = (answer, watch) if threads == 1 else (watch, answer)
    threading.Thread(target=beside, daemon=True).start()
    here()


def _watch(parent: int) -> None:
    """End when the parent has."""
    while os.getppid() == parent:
        time.sleep(WATCH)
    os._exit(1)


def _stream(number: int) -> TextIO:
    """A stream of this process alone to a file that is open already; to nowhere, if it is not."""
    try:
        return open(number, "w", buffering=1, closefd=False)
    except OSError:
        return open(os.devnull, "w")


def _answer(line: Connection, threads: int, begin: Callable[[State], Duty]) -> None:
    """Do item after item as they come."""
    duty: Duty | None = None
    try:
        torch.set_num_threads(threads)
        while True:
            message = messages.unpack(line.recv_bytes())
            try:
                if "common" in message:
                    duty = begin(message["common"])
                    continue
                assert duty is not None, "what items have in common comes before them"
                answer = messages.pack(duty(message["item"]))
            except BaseException as error:
                answer = messages.pack({"error": _told(error)})
            line.send_bytes(answer)
    finally:  # also when the line ends: nobody is left to work for
        os._exit(0)


def _told(error: BaseException) -> State:
    """An exception as a message."""
    kind, trace = type(error), "".join(traceback.format_exception(error))
    first = error.args[0] if len(error.args) == 1 and isinstance(error.args[0], str) else str(error)
    return {"module": kind.__module__, "name": kind.__qualname__, "first": first, "text": str(error), "trace": trace}


def _checked(answer: State) -> State:
    """An answer, unless it tells of an exception: that is raised, as what it was wherever it can be made again."""
    if "error" not in answer:
        return answer
    told = answer["error"]
    error: BaseException = RuntimeError(f"{told['name']}: {told['text']}")
    with contextlib.suppress(Exception):  # a class that cannot be found, or takes other arguments
        kind: Any = sys.modules[told["module"]]
        for part in told["name"].split("."):
            kind = getattr(kind, part)
        again = kind(told["first"])
        if isinstance(again, BaseException) and str(again) == told["text"]:
            error = again
    error.add_note(f"In a worker process:\n{told['trace']}")
    raise error
