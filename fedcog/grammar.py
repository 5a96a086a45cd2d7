"""The grammar of the command line: its commands, and the flags that each of them takes."""

import argparse
from collections.abc import Mapping
from typing import Any, get_args

import fedcog
from fedcog import completion, flags
from fedcog.algorithms import ALGORITHMS, Algorithm
from fedcog.data import SOURCES
from fedcog.experiments import paper, sweep, theory, track
from fedcog.experiments.export import SUFFIXES
from fedcog.experiments.search import Search
from fedcog.flags import Parser

PORT = 8080
"""Where a page about runs is served."""


def parser(algorithms: Mapping[str, type[Algorithm]] = ALGORITHMS) -> argparse.ArgumentParser:
    """A parser of all commands, with flags for the settings of these algorithms.

    What it makes of words has the command's name as `command`: who carries that out is not the grammar's to know.
    """
    top = Parser(prog="fedcog", description=fedcog.__doc__)
    top.add_argument("--version", action="version", version=f"fedcog {fedcog.__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True, dest="command")

    one = _command_parser(commands, "run", "run one experiment, or continue one", "[FILE.toml]")
    one.add_argument("--resume", metavar="DIR", help="continue the run in DIR")
    one.add_argument("--out", metavar="DIR", help="where the run goes (default: runs/DATASET-ALGORITHM-SEED)")
    _add_track(one)
    flags.add_experiment(one, algorithms)

    several = _command_parser(commands, "compare", "run several algorithms over several seeds", "[FILE.toml]")
    several.add_argument("--algorithms", nargs="+", metavar="NAME", help="such as: fedavg fedprox fedprox+fedcog")
    several.add_argument("--seeds", nargs="+", metavar="SEED", default=["0", "1", "2"], help="default: 0 1 2")
    several.add_argument("--out", metavar="DIR", help="where the runs go (default: runs/compare-DATASET)")
    _add_track(several)
    flags.add_experiment(several, algorithms, refused=("--algorithm", "--fedcog", "--seed"))

    words = "tune several algorithms by as many trials each, and try what is chosen on the test set"
    fair = _command_parser(commands, "sweep", words, "[FILE.toml]")
    fair.add_argument("--algorithms", nargs="+", metavar="NAME", help="such as: fedavg fedprox fedprox+fedcog")
    fair.add_argument(
        "--space", metavar="SPACE.toml", help="what may be chosen: settings with lists or ranges of values"
    )
    fair.add_argument("--search", choices=list(get_args(Search)), default="random", help="default: random")
    fair.add_argument("--trials", type=int, default=8, metavar="N", help="trials of each algorithm (default: 8)")
    fair.add_argument(
        "--trial-seeds", nargs="+", metavar="SEED", default=["100"], help="seeds of every trial (default: 100)"
    )
    fair.add_argument(
        "--seeds", nargs="+", metavar="SEED", default=["0", "1", "2"], help="seeds of what is chosen (default: 0 1 2)"
    )
    fair.add_argument("--out", metavar="DIR", help="where all goes, and is gone on with (default: runs/sweep-DATASET)")
    flags.add_experiment(fair, algorithms, refused=("--algorithm", "--fedcog"), validation=sweep.SHARE)

    look = _command_parser(commands, "report", "make one page of the runs in some directories")
    look.add_argument("directories", nargs="+", metavar="DIR", help="a run, or a folder with runs anywhere below")
    look.add_argument("--out", metavar="FILE", help="the page (default: report.html in DIR; of a sweep, runs.html)")
    look.add_argument("--table", metavar="FILE.md", help="the results as a Markdown table, too")
    look.add_argument("--target", type=float, metavar="ACCURACY", help="accuracy to count rounds to, such as 0.6")

    live = _command_parser(commands, "watch", "serve a page, to this machine alone, that shows runs as they go")
    live.add_argument(
        "directories", nargs="*", default=["runs"], metavar="DIR", help="folders with runs (default: runs)"
    )
    live.add_argument("--port", type=int, default=PORT, metavar="N", help=f"default: {PORT}; 0: any that is free")
    live.add_argument("--open", action="store_true", help="open it in a browser")

    away = _command_parser(commands, "export", "write a run's global model to a file, for use elsewhere")
    away.add_argument("run", metavar="RUN", help="the run's directory")
    away.add_argument("--format", choices=list(SUFFIXES), default="safetensors", help="default: safetensors")
    away.add_argument("--out", metavar="FILE", help="the file (default: model.safetensors, .pt or .onnx in RUN)")
    away.add_argument("--algorithm", metavar="NAME", help="if the run's is of your own: where it is, FILE.py:Class")

    again = _command_parser(commands, "reproduce", "run the paper's tables and figures again", "[NAME ...]")
    names = ", ".join(paper.studies())
    again.add_argument("names", nargs="*", metavar="NAME", help=f"all, or some of: {names}; none: how far things are")
    again.add_argument("--results", metavar="DIR", help="where results go and are found again (default: results)")
    again.add_argument("--data-dir", metavar="DIR", help="folder with the data sets")
    again.add_argument("--datasets", nargs="+", choices=list(SOURCES), metavar="NAME", help="only what runs on these")
    again.add_argument(
        "--algorithms",
        nargs="+",
        choices=list(ALGORITHMS),
        metavar="NAME",
        help="only runs with one of these in them, such as scaffold for SCAFFOLD bare and with FedCOG around it",
    )
    again.add_argument("--seeds", nargs="+", metavar="SEED", help="other seeds than each table's own")
    again.add_argument("--time-budget", type=float, metavar="SECONDS", help="stop in time; exit code 3 if more is left")
    again.add_argument("--shard", metavar="I/N", help="only this part of the work, such as 0/4: for several machines")
    again.add_argument("--status", action="store_true", help="run nothing; tell how much of each table is done")
    again.add_argument("--render", action="store_true", help="run nothing; make tables and figures of what there is")
    again.add_argument("--out", metavar="DIR", help="where tables and figures go (default: where the results are)")
    again.add_argument("--smoke", action="store_true", help="everything tiny, on the embedded digits, on a CPU")

    every = _command_parser(commands, "list", "show algorithms, data sets, models and partitions with their settings")
    kinds = ("algorithms", "data", "models", "partitions")
    every.add_argument("what", nargs="?", choices=kinds, metavar="WHAT", help=f"{', '.join(kinds)}; default: all")
    every.add_argument("--markdown", action="store_true", help="algorithms: as a page, such as docs/algorithms.md")
    every.add_argument("--data-dir", metavar="DIR", help="folder with the data sets")

    shares = _command_parser(commands, "partition", "show who would hold what", "[FILE.toml]")
    shares.add_argument("--figure", metavar="FILE.svg", help="draw it, too")
    flags.add_experiment(shares, algorithms)

    words = (
        "the paper's convergence bound and largest step beside what is measured, under its own assumptions, on digits"
    )
    bound = _command_parser(commands, "theory", words)
    usual = theory.Plan()
    bound.add_argument(
        "--network",
        choices=("linear", "mlp", "both"),
        default="both",
        help="a convex problem, a small network, or both",
    )
    for flag, name in {"clients": "clients", "rounds": "rounds", "local-steps": "steps", "batch-size": "batch"}.items():
        default = getattr(usual, name)
        bound.add_argument(f"--{flag}", dest=name, type=int, default=default, metavar="N", help=f"default: {default}")
    bound.add_argument(
        "--repeats",
        type=int,
        default=usual.repeats,
        metavar="N",
        help=f"runs that are averaged over (default: {usual.repeats})",
    )
    bound.add_argument("--seed", type=int, default=0, help="default: 0")
    bound.add_argument(
        "--lr",
        type=float,
        default=0.0,
        help="default: four fifths of the largest step that the theorem admits with the constants of a first run",
    )

    there = commands.add_parser("deploy", help="lay out a federation of real machines, on Flower")
    steps = there.add_subparsers(title="actions", metavar="ACTION", required=True)
    text = "write certificates, node keys, settings and commands for a small federation"
    lay = _command_parser(steps, "init", text)
    lay.usage = "fedcog deploy init DIR [FILE.toml] [flags]"
    lay.add_argument("directory", metavar="DIR", help="a new folder; --clients says for how many nodes")
    lay.add_argument("--host", default="127.0.0.1", help="where nodes reach the server (default: 127.0.0.1)")
    lay.add_argument("--port", type=int, default=9092, help="and at which port (default: 9092)")
    lay.add_argument("--classes", metavar="A,B,...", help="if nodes bring data of their own: the names of all classes")
    lay.add_argument(
        "--test-data", metavar="PLACE", help="and the server's test examples: folder, .npz, MODULE:FUNCTION"
    )
    flags.add_experiment(lay, algorithms)

    data = commands.add_parser("data", help="list data sets, get one, or show where they are looked for")
    actions = data.add_subparsers(title="actions", metavar="ACTION", required=True, dest="action")
    for action, text in {
        "list": "which data sets there are, and where they lie",
        "get": "fetch a data set",
        "path": "the folders that are looked in",
    }.items():
        part = actions.add_parser(action, help=text, description=text)
        if action == "get":
            part.add_argument("name", choices=list(SOURCES), metavar="NAME", help=", ".join(SOURCES))
        part.add_argument("--data-dir", metavar="DIR", help="folder for data sets")

    well = _command_parser(commands, "doctor", "tell what works here, what is missing, and how to get it")
    well.add_argument("--data-dir", metavar="DIR", help="folder with the data sets")

    shells = commands.add_parser("completion", help="print a script with which a shell completes fedcog's words")
    shells.add_argument("shell", choices=list(completion.SCRIPTS), metavar="SHELL", help=", ".join(completion.SCRIPTS))
    return top


def _add_track(command: argparse.ArgumentParser) -> None:
    kinds = list(track.TRACKERS)
    words = f"follow it live in {', '.join(kinds[:-1])} or {kinds[-1]}; may be given again for another"
    command.add_argument("--track", action="append", default=[], choices=kinds, metavar="NAME", help=words)


def _command_parser(commands: Any, name: str, text: str, words: str = "") -> argparse.ArgumentParser:
    usage = f"fedcog {name} {words} [flags]".replace("  ", " ") if words else None
    command: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=f"{text[0].upper()}{text[1:]}.", usage=usage
    )
    style = command.add_mutually_exclusive_group()
    style.add_argument("--quiet", dest="style", action="store_const", const="quiet", help="print nothing but faults")
    style.add_argument("--plain", dest="style", action="store_const", const="plain", help="plain lines, for logs")
    command.set_defaults(style="auto", flags=())
    return command
