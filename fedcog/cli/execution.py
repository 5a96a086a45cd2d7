"""The function of every command, and how its exceptions become messages and exit codes."""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from fedcog.cli import console
from fedcog.cli.commands import audit, results, studies, training, utilities
from fedcog.core.errors import Interrupted
from fedcog.core.settings import ConfigError
from fedcog.data import DataError, PartitionError
from fedcog.engine.workers import WorkerDied
from fedcog.federation.backend import Diverged, NoAnswer
from fedcog.federation.torchrun import RankDied
from fedcog.models.checks import ModelError
from fedcog.runs.records.run_directory import RecordError

EXIT_DIVERGED = 1
EXIT_INTERRUPTED = 130
USER_ERRORS = (
    DataError,
    PartitionError,
    ModelError,
    NoAnswer,
    RankDied,
    RecordError,
    WorkerDied,
)
"""Exceptions whose message is all that a user needs."""
MEMORY_ERROR_TEXTS = ("out of memory", "allocate memory", "Storage size calculation overflowed")

COMMANDS: dict[str, Callable[[argparse.Namespace, list[str]], int]] = {
    "run": training.run_command,
    "compare": training.compare_command,
    "sweep": training.sweep_command,
    "report": results.report_command,
    "table": results.table_command,
    "plot": results.plot_command,
    "watch": results.watch_command,
    "export": results.export_command,
    "audit": audit.audit_command,
    "reproduce": studies.reproduce_command,
    "theory": studies.theory_command,
    "list": utilities.list_command,
    "partition": utilities.partition_command,
    "deploy": utilities.deploy_command,
    "data": utilities.data_command,
    "doctor": utilities.doctor_command,
}
"""The function of each command."""


@dataclass
class Outcome:
    """How a command ended."""

    exit_code: int = 0


@contextlib.contextmanager
def errors_explained() -> Iterator[Outcome]:
    """Print the errors of a command as messages, and turn them into exit codes.

    Yields:
        The outcome, whose exit code an error sets.
    """
    outcome = Outcome()
    try:
        with console.warnings_as_notes():
            yield outcome
    except ConfigError as error:
        outcome.exit_code = console.print_faults(error.faults)
    except USER_ERRORS as error:
        outcome.exit_code = console.print_faults([str(error)])
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        is_memory = isinstance(error, MemoryError)
        if not is_memory and not any(text in str(error) for text in MEMORY_ERROR_TEXTS):
            raise
        reason = str(error).strip().splitlines()[0]
        outcome.exit_code = console.print_faults(
            [f"out of memory ({reason}): lower --local-steps, --batch-size or --fedcog.count."]
        )
    except Diverged as error:
        console.print_faults([str(error)])
        outcome.exit_code = EXIT_DIVERGED
    except Interrupted as stop:
        console.print_note(str(stop))
        outcome.exit_code = EXIT_INTERRUPTED
    except KeyboardInterrupt:
        console.print_note("stopped.")
        outcome.exit_code = EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        outcome.exit_code = 0
