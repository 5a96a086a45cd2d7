"""The command that audits a recorded run."""

import argparse
from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from fedcog import api
from fedcog.cli import flags
from fedcog.cli.commands.common import command_text
from fedcog.cli.console import Style, err, is_live, out, print_note, print_result
from fedcog.core.settings import ConfigError
from fedcog.runs.config.user_objects import check_runnable
from fedcog.runs.progress import AuditProgress, Display
from fedcog.runs.records.run_directory import RunDirectory
from fedcog.studies.audit.audit import Audit, AuditSettings, audit_run


def audit_command(options: argparse.Namespace, rest: list[str]) -> int:
    """Measure what a run leaks.

    Args:
        options: The parsed command line.
        rest: What no flag took.

    Returns:
        The exit code.
    """
    flags.refuse_rest(rest)
    if options.run is None:
        raise ConfigError(["audit needs a run directory: fedcog audit runs/x."])
    experiment = RunDirectory(options.run).experiment(options.known)
    faults = check_runnable(experiment)
    given = {"model": options.user_objects.model, "dataset": options.user_objects.data}
    faults += [
        f"--{name} names what is your own, FILE.py:Name; other names need no flag."
        for name, value in given.items()
        if getattr(options, name) is not None and value is None
    ]
    if faults:
        raise ConfigError(faults)
    names = AuditSettings.__dataclass_fields__
    settings = AuditSettings(**{name: getattr(options, name) for name in names})
    display: Display = "bar" if is_live(options.style) else "lines"
    if options.style == "quiet":
        display = "none"
    with AuditProgress(display, err) as progress:
        found = audit_run(
            options.run,
            settings,
            options.user_objects,
            experiment.algorithm,
            command=command_text(options),
            on_progress=progress.show,
        )
    _, page = api.write_audit(found)
    print_audit(found, options.style)
    print_result(f"audit: {page}", options.style)
    return 0


def print_audit(found: Audit, style: Style) -> None:
    """Print the tables of an audit, and what they do not prove.

    Args:
        found: The audit.
        style: How much to print.
    """
    from fedcog.report.audit import table  # imports matplotlib, which takes a second

    if found.inversion_note:
        print_note(f"gradient inversion does not apply. {found.inversion_note}", style)
    for attack in found.attacks:
        if attack.problem:
            print_note(f"{attack.case}, {attack.target}: {attack.problem}", style)
    if "note" in found.membership:
        print_note(found.membership["note"], style)
    rows = table.attack_rows(found)
    _print_table("gradient inversion", table.ATTACK_COLUMNS, rows, style)
    rows = table.membership_rows(found)
    _print_table("membership inference", table.MEMBERSHIP_COLUMNS, rows, style)
    print_note(found.notes[-1], style)


def _print_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], style: Style
) -> None:
    """Print a table, or a line for each row in plain style."""
    from fedcog.report.audit.table import used_columns
    from fedcog.report.markup import NO_VALUE

    if not rows or style == "quiet":
        return
    used = used_columns(columns, rows)
    if style == "plain":
        for row in rows:
            known = [index for index in used[1:] if row[index] != NO_VALUE]
            cells = ", ".join(f"{columns[index]} {row[index]}" for index in known)
            print_result(f"{title}, {row[0]}: {cells}", style)
        return
    print_result(f"{title}:", style)  # a title would break in a narrow table
    printed = Table()
    for index in used:
        printed.add_column(columns[index], overflow="fold", no_wrap=index == 0)
    for row in rows:
        printed.add_row(*(escape(row[index]) for index in used))
    out.print(printed)
