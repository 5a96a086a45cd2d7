"""Other commands: list, partition, deploy, data, doctor."""

import argparse
from pathlib import Path

import torch

from fedcog.cli import console, doctor, flags, output
from fedcog.cli.commands.common import ready_experiment
from fedcog.cli.console import print_note, print_result
from fedcog.cli.progress import DownloadProgress
from fedcog.core.settings import ConfigError
from fedcog.core.tasks import make_task
from fedcog.data import registry
from fedcog.deploy import project
from fedcog.runs.config.experiment import read_experiment
from fedcog.runs.experiment_data import (
    apply_shifts,
    client_names,
    resolve_clients,
    split_dataset,
)
from fedcog.runs.records.run_directory import write_file
from fedcog.runs.setup import load_data
from fedcog.studies.catalog import markdown, settings_markdown


def list_command(options: argparse.Namespace, rest: list[str]) -> int:
    """Show algorithms, data sets, models and partitions.

    Args:
        options: The parsed command line.
        rest: What no flag took.

    Returns:
        The exit code.
    """
    flags.refuse_rest(rest)
    if options.markdown:
        if options.what == "algorithms":
            print(markdown(output.described_algorithms()), end="")
        elif options.what == "settings":
            print(settings_markdown(), end="")
        else:
            raise ConfigError(
                ["--markdown is for algorithms and settings: fedcog list algorithms --markdown."]
            )
        return 0
    output.print_catalog(options.what, options.data_dir)
    return 0


def partition_command(options: argparse.Namespace, rest: list[str]) -> int:
    """Show how a partition splits the training set.

    Args:
        options: The parsed command line.
        rest: What no flag took.

    Returns:
        The exit code.
    """
    values, faults = flags.read_values(options, rest)
    if options.figure and Path(options.figure).suffix.lower() != ".svg":
        faults.append(
            f"--figure draws an SVG: choose a name that ends in .svg, not {options.figure}."
        )
    experiment = ready_experiment(values, faults, options.known)
    dataset = load_data(experiment, options.user_objects)
    experiment = resolve_clients(experiment, dataset)
    indices = split_dataset(experiment, dataset)
    names = client_names(experiment, dataset, indices)
    dataset = apply_shifts(experiment, dataset, indices)
    task = make_task(len(dataset.classes), dataset.multi_label)
    counts = torch.stack([task.class_counts(dataset.train_y[own]) for own in indices])
    noun = "labels" if dataset.multi_label else "examples"
    output.print_partition(counts, dataset.classes, noun, names)
    used = {index for own in indices for index in own.tolist()}
    if num_unused := len(dataset.train_y) - len(used):
        print_note(f"{num_unused} of the {len(dataset.train_y)} training examples are not used.")
    if options.figure:
        from fedcog.report import partition_figure  # imports matplotlib, which takes a second

        figure = partition_figure(counts, dataset.classes, noun, names)
        write_file(Path(options.figure), figure.encode())
        print_result(f"figure: {options.figure}", "auto")
    return 0


def deploy_command(options: argparse.Namespace, rest: list[str]) -> int:
    """Create the files of a federation of real machines.

    Args:
        options: The parsed command line.
        rest: What no flag took.

    Returns:
        The exit code.
    """
    values, faults = flags.read_values(options, rest)
    if options.data_function:
        faults.append(
            "deploy init copies no code: nodes name the function that makes their data when they "
            "start; give --classes, and remove --dataset."
        )
    if options.user_objects.model is not None:
        faults.append(
            "deploy init copies no code: give your network in federation.py of the new folder, "
            "server_app(network=...) and client_app(network=...), and remove --model."
        )
    experiment = read_experiment(values, faults, options.known)
    folder = Path(options.directory)
    project.init(
        folder,
        experiment,
        host=options.host,
        port=options.port,
        data=options.test_data or "",
        classes=options.classes or "",
        shape=options.input_shape or "",
    )
    print_result(
        f"a federation of {experiment.num_clients} nodes: {folder / 'README.md'}", options.style
    )
    return 0


def data_command(options: argparse.Namespace, rest: list[str]) -> int:
    """List data sets, get one, or show where they are.

    Args:
        options: The parsed command line.
        rest: What no flag took.

    Returns:
        The exit code.
    """
    flags.refuse_rest(rest)
    if options.action == "list":
        output.print_datasets(options.data_dir)
    elif options.action == "path":
        for folder in registry.data_dirs(options.data_dir):
            print(folder)
    else:
        with DownloadProgress() as progress:
            folder = registry.fetch(
                options.name, options.data_dir, progress=progress.show, log=print_note
            )
            message = registry.prepare(options.name, options.data_dir, progress=progress.show)
        print(f"{options.name}: {folder}")
        if message:
            print_note(message)
    return 0


def doctor_command(options: argparse.Namespace, rest: list[str]) -> int:
    """Check the installation.

    Args:
        options: The parsed command line.
        rest: What no flag took.

    Returns:
        The exit code.
    """
    flags.refuse_rest(rest)
    checks = list(doctor.run_checks(options.data_dir))
    output.print_checks(checks, options.style)
    failed = [check for check in checks if check.is_failure]
    console.print_faults(
        [f"{check.name} is required, but {check.state}: {check.remedy}" for check in failed]
    )
    return 1 if failed else 0
