"""Commands on recorded runs: report, table, plot, watch, export."""

import argparse
import signal
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from fedcog.cli import console, flags, output
from fedcog.cli.console import print_result
from fedcog.core.settings import ConfigError
from fedcog.runs.config.user_objects import check_runnable
from fedcog.runs.records.export import export
from fedcog.runs.records.recorded_run import read_readable
from fedcog.runs.records.run_directory import (
    RecordError,
    RunDirectory,
    runs_below,
    write_file,
)
from fedcog.studies.comparison_table import TableFormat, table, table_format

MAX_PORT = 65535


def report_command(options: argparse.Namespace, rest: list[str]) -> int:
    """Write one report about the runs in some folders.

    Args:
        options: The parsed command line.
        rest: What no flag took.

    Returns:
        The exit code.
    """
    flags.refuse_rest(rest)
    from fedcog.report import page  # imports matplotlib, which takes a second

    if options.target is not None and not 0 < options.target <= 1:
        raise ConfigError(
            [f"target needs a number > 0 and <= 1, such as 0.6, not {options.target:g}."]
        )
    _check_report_names(options)
    paths = runs_below(options.directories)
    folder = Path(options.directories[0]) if len(options.directories) == 1 else Path()
    is_sweep = (folder / "sweep.json").exists()  # which has its own report.html
    out = Path(options.out or folder / ("runs.html" if is_sweep else "report.html"))
    runs, damaged = read_readable(paths)
    write_file(out, page([run.path for run in runs], target=options.target).encode())
    if options.table:
        text = table(runs, table_format(options.table))
        write_file(Path(options.table), text.encode())
    output.print_results(runs, options.style)
    if options.target is not None:
        output.print_costs(runs, options.target, options.style)
    print_result(f"report: {out}", options.style)
    return _print_skipped(damaged)


def _check_report_names(options: argparse.Namespace) -> None:
    """Refuse names of files whose suffix promises another format."""
    if options.out and Path(options.out).suffix.lower() not in (".html", ".htm"):
        raise ConfigError(
            [
                f"a report is a page: choose an --out that ends in .html, not {options.out}. For "
                "a figure or a table alone, use fedcog plot or fedcog table."
            ]
        )
    if options.table:
        table_format(options.table)


def _print_skipped(damaged: Sequence[RecordError]) -> int:
    """Print the runs that cannot be read, and return the exit code."""
    return console.print_faults([f"skipped: {error}" for error in damaged]) if damaged else 0


def table_command(options: argparse.Namespace, rest: list[str]) -> int:
    """Write a table of runs.

    Args:
        options: The parsed command line.
        rest: What no flag took.

    Returns:
        The exit code.
    """
    flags.refuse_rest(rest)
    format: TableFormat = options.format or "markdown"
    if options.out:
        format = table_format(options.out, options.format)
    runs, damaged = read_readable(runs_below(options.directories))
    text = table(runs, format, metric=options.metric, best=options.best, baseline=options.baseline)
    if options.out:
        write_file(Path(options.out), text.encode())
        print_result(f"table: {options.out}", options.style)
    else:
        print(text, end="")
    return _print_skipped(damaged)


def plot_command(options: argparse.Namespace, rest: list[str]) -> int:
    """Draw learning curves of runs.

    Args:
        options: The parsed command line.
        rest: What no flag took.

    Returns:
        The exit code.
    """
    flags.refuse_rest(rest)
    from fedcog.report import paper_plot  # imports matplotlib, which takes a second

    paper_plot.check_figure_name(options.out)
    runs, damaged = read_readable(runs_below(options.directories))
    paper_plot.write_curves(runs, options.out, options.metric)
    print_result(f"figure: {options.out}", options.style)
    return _print_skipped(damaged)


def watch_command(options: argparse.Namespace, rest: list[str]) -> int:
    """Serve a page that shows runs live.

    Args:
        options: The parsed command line.
        rest: What no flag took.

    Returns:
        The exit code.
    """
    flags.refuse_rest(rest)
    if not 0 <= options.port <= MAX_PORT:
        raise ConfigError(
            [f"port needs an integer from 0 (any free port) to {MAX_PORT}, not {options.port}."]
        )
    from fedcog.report.dashboard import DashboardServer  # imports matplotlib

    server = DashboardServer(options.directories, options.port)
    # A shell starts background processes with SIGINT ignored.
    signals = (signal.SIGINT, signal.SIGTERM)
    handlers = [signal.signal(number, signal.default_int_handler) for number in signals]
    try:
        folders = ", ".join(options.directories)
        print_result(f"watching {folders} at {server.url} (Ctrl-C stops)", options.style)
        if options.open:
            webbrowser.open(server.url)
        server.serve()
    finally:
        for number, handler in zip(signals, handlers, strict=True):
            signal.signal(number, handler)
    return 0


def export_command(options: argparse.Namespace, rest: list[str]) -> int:
    """Write the global model of a run to a file.

    Args:
        options: The parsed command line.
        rest: What no flag took.

    Returns:
        The exit code.
    """
    flags.refuse_rest(rest)
    experiment = RunDirectory(options.run).experiment(options.known)
    model = options.user_objects.model
    if options.model is not None and model is None:
        raise ConfigError(
            ["--model names the run's own network, FILE.py:Name; networks by name need no flag."]
        )
    if not_runnable := check_runnable(experiment):
        raise ConfigError(not_runnable)
    exported = export(
        options.run, options.out, options.format, model=model, algorithm=experiment.algorithm
    )
    output.print_exported(exported, experiment, options.style)
    return 0
