"""The commands of the command line and their flags. It is built from the schema, without torch."""

import argparse
from collections.abc import Mapping
from typing import Any

import fedcog
from fedcog.cli import completion
from fedcog.cli.flags import Parser, add_experiment_flags, all_settings
from fedcog.cli.schema import Schema, load_schema
from fedcog.core.settings import Setting

DASHBOARD_PORT = 8080
SUPERLINK_PORT = 9092
DESCRIPTION = (
    "Federated learning with consensus-oriented generation (FedCOG), rival methods, and a fast "
    "simulator."
)


def build_parser(user_classes: Mapping[str, Any] | None = None) -> argparse.ArgumentParser:
    """Build the parser of all commands.

    Args:
        user_classes: The user's algorithms, which get flags too.

    Returns:
        A parser whose result has the command's name as `command`.
    """
    schema = load_schema()
    known = all_settings(dict(user_classes or {}))
    root = Parser(prog="fedcog", description=DESCRIPTION)
    root.add_argument("--version", action="version", version=f"fedcog {fedcog.__version__}")
    commands = root.add_subparsers(
        title="commands", metavar="COMMAND", required=True, dest="command"
    )
    _add_run(commands, schema, known)
    _add_compare(commands, schema, known)
    _add_sweep(commands, schema, known)
    _add_report(commands)
    _add_table(commands, schema)
    _add_plot(commands)
    _add_watch(commands)
    _add_export(commands, schema)
    _add_audit(commands, schema)
    _add_reproduce(commands, schema)
    _add_list(commands)
    _add_partition(commands, known)
    _add_theory(commands, schema)
    _add_deploy(commands, known)
    _add_data(commands, schema)
    _add_doctor(commands)
    _add_completion(commands)
    return root


def _add_run(commands: Any, schema: Schema, known: Mapping[str, Setting]) -> None:
    run = _command(commands, "run", "run one experiment, or continue one", "[FILE.toml]")
    run.add_argument("--resume", metavar="DIR", help="continue the run in DIR")
    _add_augmentation(run)
    run.add_argument(
        "--out", metavar="DIR", help="run directory (default: runs/DATASET-ALGORITHM-SEED)"
    )
    _add_track(run, schema)
    add_experiment_flags(run, known)


def _add_compare(commands: Any, schema: Schema, known: Mapping[str, Setting]) -> None:
    compare = _command(
        commands, "compare", "run several algorithms over several seeds", "[FILE.toml]"
    )
    _add_algorithms(compare)
    compare.add_argument(
        "--seeds", nargs="+", metavar="SEED", default=["0", "1", "2"], help="default: 0 1 2"
    )
    compare.add_argument(
        "--out", metavar="DIR", help="folder of the runs (default: runs/compare-DATASET)"
    )
    _add_augmentation(compare)
    _add_track(compare, schema)
    add_experiment_flags(compare, known, refused=("--algorithm", "--fedcog", "--seed"))


def _add_sweep(commands: Any, schema: Schema, known: Mapping[str, Setting]) -> None:
    sweep = _command(
        commands,
        "sweep",
        "tune several algorithms with equal budgets, then evaluate the best on the test set",
        "[FILE.toml]",
    )
    _add_algorithms(sweep)
    _add_augmentation(sweep)
    sweep.add_argument(
        "--space",
        metavar="SPACE.toml",
        help="search space: settings with lists or ranges of values",
    )
    sweep.add_argument(
        "--search", choices=schema.searches, default="random", help="default: random"
    )
    sweep.add_argument(
        "--trials", type=int, default=8, metavar="N", help="trials per algorithm (default: 8)"
    )
    sweep.add_argument(
        "--trial-seeds",
        nargs="+",
        metavar="SEED",
        default=["100"],
        help="seeds of every trial (default: 100)",
    )
    sweep.add_argument(
        "--seeds",
        nargs="+",
        metavar="SEED",
        default=["0", "1", "2"],
        help="seeds of the final runs (default: 0 1 2)",
    )
    sweep.add_argument(
        "--out",
        metavar="DIR",
        help="folder of all runs, which a stopped sweep continues (default: runs/sweep-DATASET)",
    )
    refused = ("--algorithm", "--fedcog")
    add_experiment_flags(sweep, known, refused=refused, validation=schema.validation)


def _add_report(commands: Any) -> None:
    report = _command(commands, "report", "write one report about the runs in some folders")
    report.add_argument(
        "directories", nargs="+", metavar="DIR", help="a run, or a folder with runs below it"
    )
    report.add_argument(
        "--out",
        metavar="FILE.html",
        help="the report (default: report.html in DIR; for a sweep, runs.html)",
    )
    report.add_argument(
        "--table", metavar="FILE", help="also write a table, as fedcog table: .tex, .md or .csv"
    )
    report.add_argument(
        "--target", type=float, metavar="ACCURACY", help="also show rounds to this accuracy (0.6)"
    )


def _add_table(commands: Any, schema: Schema) -> None:
    table = _command(
        commands, "table", "write a table of runs: methods by data set, over seeds, for a paper"
    )
    _add_runs(table)
    table.add_argument(
        "--format",
        choices=schema.table_formats,
        help=f"{', '.join(schema.table_formats)} (default: by the suffix of --out, else markdown)",
    )
    table.add_argument(
        "--out", metavar="FILE", help="a .tex, .md or .csv file (default: print the table)"
    )
    rounds = table.add_mutually_exclusive_group()
    rounds.add_argument(
        "--best", action="store_true", help="the best round, which is chosen on the test set"
    )
    rounds.add_argument(
        "--last", dest="best", action="store_false", help="the last round (default)"
    )
    table.add_argument(
        "--baseline",
        default="",
        metavar="NAME",
        help="the method to subtract, seed by seed (default: fedavg, else the first)",
    )


def _add_plot(commands: Any) -> None:
    plot = _command(commands, "plot", "draw learning curves of runs, for one column of a paper")
    _add_runs(plot)
    plot.add_argument(
        "--out", metavar="FILE", required=True, help="a .pdf, .svg or .png file (300 dpi)"
    )


def _add_runs(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "directories", nargs="+", metavar="RUNS", help="a run, or a folder with runs below it"
    )
    command.add_argument(
        "--metric",
        default="",
        metavar="KEY",
        help="key of the rounds' lines, such as loss or local_test/accuracy_mean (default: the "
        "main metric on the test set)",
    )


def _add_watch(commands: Any) -> None:
    watch = _command(commands, "watch", "serve a page, on this machine only, that shows runs live")
    watch.add_argument(
        "directories",
        nargs="*",
        default=["runs"],
        metavar="DIR",
        help="folders with runs (default: runs)",
    )
    watch.add_argument(
        "--port",
        type=int,
        default=DASHBOARD_PORT,
        metavar="N",
        help=f"default: {DASHBOARD_PORT}; 0: any free port",
    )
    watch.add_argument("--open", action="store_true", help="open the page in a browser")


def _add_export(commands: Any, schema: Schema) -> None:
    export = _command(commands, "export", "write the global model of a run to a file")
    export.add_argument("run", metavar="RUN", help="run directory")
    export.add_argument(
        "--format",
        choices=schema.formats,
        help="default: by the suffix of --out, else safetensors",
    )
    export.add_argument(
        "--out", metavar="FILE", help="a .safetensors, .pt or .onnx file (default: model.* in RUN)"
    )
    export.add_argument(
        "--algorithm", metavar="NAME", help="your own algorithm of the run: FILE.py:Class"
    )
    export.add_argument("--model", metavar="NAME", help="your own network of the run: FILE.py:Name")


def _add_audit(commands: Any, schema: Schema) -> None:
    audit = _command(commands, "audit", "measure what a run leaks", "RUN")
    audit.epilog = (
        "Writes audit.json and audit.html into RUN: gradient inversion of one client's update and "
        "of the sum of the round's updates, and membership inference. An attack that fails proves "
        "no privacy."
    )
    audit.add_argument("run", nargs="?", metavar="RUN", help="run directory")
    audit.add_argument(
        "--client",
        type=int,
        metavar="N",
        help="the client to attack (default: the first that the server samples next)",
    )
    audit.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help="local steps of audited clients (default: three cases; the run's own is the last)",
    )
    audit.add_argument(
        "--examples",
        type=int,
        metavar="N",
        help="examples in a local step; --steps 1 --examples 1 is the strongest attack",
    )
    defaults = schema.audit
    audit.add_argument(
        "--iterations",
        type=int,
        default=defaults["iterations"],
        metavar="N",
        help=f"iterations of each attack (default: {defaults['iterations']})",
    )
    audit.add_argument(
        "--tv",
        type=float,
        default=defaults["tv"],
        metavar="WEIGHT",
        help=f"weight of the images' total variation (default: {defaults['tv']:g})",
    )
    audit.add_argument(
        "--labels",
        choices=("inferred", "optimized"),
        default=defaults["labels"],
        help=f"the attacker's labels: of the head's gradient, or optimized (default: "
        f"{defaults['labels']})",
    )
    audit.add_argument(
        "--seed",
        type=int,
        default=defaults["seed"],
        metavar="N",
        help=f"seed of the attacks (default: {defaults['seed']})",
    )
    audit.add_argument("--device", default="", metavar="NAME", help="default: as the run")
    audit.add_argument("--data-dir", default="", metavar="DIR", help="default: as the run")
    _add_own_code(audit)


def _add_own_code(command: argparse.ArgumentParser) -> None:
    """Add flags for code of the user that a recorded run used."""
    command.add_argument(
        "--algorithm", metavar="NAME", help="your own algorithm of the run: FILE.py:Class"
    )
    command.add_argument(
        "--model", metavar="NAME", help="your own network of the run: FILE.py:Name"
    )
    command.add_argument(
        "--dataset", metavar="NAME", help="your own data of the run: FILE.py:Name or MODULE:Name"
    )
    command.add_argument(
        "--augmentation", metavar="CODE", help="your own augmentation of the run: FILE.py:Name"
    )


def _add_reproduce(commands: Any, schema: Schema) -> None:
    reproduce = _command(
        commands, "reproduce", "run the paper's tables and figures again", "[NAME ...]"
    )
    reproduce.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"all, or some of: {', '.join(schema.studies)}; none: show the progress",
    )
    reproduce.add_argument(
        "--results", metavar="DIR", help="folder of the results (default: results)"
    )
    reproduce.add_argument("--data-dir", metavar="DIR", help="folder with the data sets")
    reproduce.add_argument(
        "--datasets",
        nargs="+",
        choices=schema.datasets,
        metavar="NAME",
        help="only runs on these data sets",
    )
    reproduce.add_argument(
        "--algorithms",
        nargs="+",
        choices=list(schema.algorithms),
        metavar="NAME",
        help="only runs with one of these algorithms, alone or wrapped",
    )
    reproduce.add_argument(
        "--seeds", nargs="+", metavar="SEED", help="other seeds than each table's own"
    )
    reproduce.add_argument(
        "--time-budget",
        type=float,
        metavar="SECONDS",
        help="stop in time; exit code 3 if work is left",
    )
    reproduce.add_argument(
        "--shard",
        metavar="I/N",
        help="only this part of the work, such as 0/4, for several machines",
    )
    reproduce.add_argument(
        "--status", action="store_true", help="run nothing; show how much is done"
    )
    reproduce.add_argument(
        "--render", action="store_true", help="run nothing; write tables and figures"
    )
    reproduce.add_argument(
        "--out", metavar="DIR", help="folder of tables and figures (default: the results' folder)"
    )
    reproduce.add_argument(
        "--smoke", action="store_true", help="everything tiny, on the embedded digits, on a CPU"
    )


def _add_list(commands: Any) -> None:
    listing = _command(
        commands, "list", "show algorithms, data sets, models and partitions with their settings"
    )
    kinds = ("algorithms", "data", "models", "partitions", "settings")
    listing.add_argument(
        "what", nargs="?", choices=kinds, metavar="WHAT", help=f"{', '.join(kinds)}; default: all"
    )
    listing.add_argument(
        "--markdown", action="store_true", help="algorithms, settings: as a page for the docs"
    )
    listing.add_argument("--data-dir", metavar="DIR", help="folder with the data sets")


def _add_partition(commands: Any, known: Mapping[str, Setting]) -> None:
    partition = _command(
        commands, "partition", "show how a partition splits the training set", "[FILE.toml]"
    )
    partition.add_argument("--figure", metavar="FILE.svg", help="also draw it")
    add_experiment_flags(partition, known)


def _add_theory(commands: Any, schema: Schema) -> None:
    theory = _command(
        commands,
        "theory",
        "compare the paper's convergence bound with measurements, under its assumptions, on digits",
    )
    theory.add_argument(
        "--network",
        choices=("linear", "mlp", "both"),
        default="both",
        help="a convex problem, a small network, or both",
    )
    names = {
        "clients": "clients",
        "rounds": "rounds",
        "local-steps": "steps",
        "batch-size": "batch",
        "repeats": "repeats",
    }
    for flag, name in names.items():
        default = schema.theory[name]
        theory.add_argument(
            f"--{flag}",
            dest=name,
            type=int,
            default=default,
            metavar="N",
            help=f"default: {default}",
        )
    theory.add_argument("--seed", type=int, default=0, help="default: 0")
    theory.add_argument(
        "--lr",
        type=float,
        default=0.0,
        help="default: 80 %% of the largest step that the theorem allows after a first run",
    )


def _add_deploy(commands: Any, known: Mapping[str, Setting]) -> None:
    deploy = commands.add_parser("deploy", help="create a federation of real machines on Flower")
    actions = deploy.add_subparsers(title="actions", metavar="ACTION", required=True)
    init = _command(
        actions, "init", "write certificates, node keys, settings and commands of a federation"
    )
    init.usage = "fedcog deploy init DIR [FILE.toml] [flags]"
    init.add_argument(
        "directory", metavar="DIR", help="a new folder; --clients sets the number of nodes"
    )
    init.add_argument(
        "--host", default="127.0.0.1", help="where nodes reach the server (default: 127.0.0.1)"
    )
    init.add_argument("--port", type=int, default=SUPERLINK_PORT, help=f"default: {SUPERLINK_PORT}")
    init.add_argument(
        "--classes", metavar="A,B,...", help="if nodes have their own data: names of all classes"
    )
    init.add_argument(
        "--test-data",
        metavar="PLACE",
        help="and the server's test examples: folder, .npz, MODULE:FUNCTION",
    )
    init.add_argument(
        "--input-shape",
        metavar="CxHxW",
        help="instead of --test-data, with --local-test: shape of one input, such as 3x32x32",
    )
    add_experiment_flags(init, known)


def _add_data(commands: Any, schema: Schema) -> None:
    data = commands.add_parser("data", help="list data sets, get one, or show where they are")
    actions = data.add_subparsers(title="actions", metavar="ACTION", required=True, dest="action")
    texts = {
        "list": "show all data sets and where they are",
        "get": "download a data set",
        "path": "show the folders that are searched",
    }
    for action, text in texts.items():
        parser = actions.add_parser(action, help=text, description=text)
        if action == "get":
            parser.add_argument(
                "name", choices=schema.datasets, metavar="NAME", help=", ".join(schema.datasets)
            )
        parser.add_argument("--data-dir", metavar="DIR", help="folder of the data sets")


def _add_doctor(commands: Any) -> None:
    doctor = _command(commands, "doctor", "check the installation, and say how to fix problems")
    doctor.add_argument("--data-dir", metavar="DIR", help="folder with the data sets")


def _add_completion(commands: Any) -> None:
    parser = commands.add_parser("completion", help="print a shell completion script")
    parser.add_argument(
        "shell",
        choices=list(completion.SCRIPTS),
        metavar="SHELL",
        help=", ".join(completion.SCRIPTS),
    )


def _add_algorithms(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--algorithms", nargs="+", metavar="NAME", help="such as: fedavg fedprox fedprox+fedcog"
    )


def _add_augmentation(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--augmentation",
        metavar="CODE",
        help="your function that augments training examples: FILE.py:Name or MODULE:Name",
    )


def _add_track(command: argparse.ArgumentParser, schema: Schema) -> None:
    names = schema.trackers
    command.add_argument(
        "--track",
        action="append",
        default=[],
        choices=names,
        metavar="NAME",
        help=f"log to {', '.join(names[:-1])} or {names[-1]}; may be repeated",
    )


def _command(commands: Any, name: str, text: str, arguments: str = "") -> argparse.ArgumentParser:
    """Add a command with the flags that all commands have."""
    usage = f"fedcog {name} {arguments} [flags]" if arguments else None
    command: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=f"{text[0].upper()}{text[1:]}.", usage=usage
    )
    style = command.add_mutually_exclusive_group()
    style.add_argument(
        "--quiet", dest="style", action="store_const", const="quiet", help="print errors only"
    )
    style.add_argument(
        "--plain", dest="style", action="store_const", const="plain", help="plain lines, for logs"
    )
    command.set_defaults(style="auto", flags=())
    return command
