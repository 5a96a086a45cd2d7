"""fedcog run | compare | report | list | partition | data: parse, call, print."""

import argparse
import contextlib
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

import fedcog
from fedcog import console, settings
from fedcog.algorithms import ALGORITHMS
from fedcog.data import SOURCES, DataError, PartitionError, sources
from fedcog.experiments import record
from fedcog.experiments.compare import compare, place
from fedcog.experiments.config import Experiment, read_experiment, read_toml
from fedcog.experiments.prepare import check_ready, share_out
from fedcog.experiments.record import RecordError, RunDirectory
from fedcog.experiments.run import Interrupted, default_out, read, run
from fedcog.models import ModelError
from fedcog.settings import ConfigError, Setting

MISSING = object()
GROUPS = {"dataset": "data", "model": "federation", "local_steps": "local training", "seed": "running"}
ALIASES = {"fedcog.start_round": "--start-round"}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        options, rest = _parser().parse_known_args(words)
        options.words = words
        code: int = options.call(options, rest)
        return code
    except ConfigError as error:
        return console.faults(error.faults)
    except (DataError, PartitionError, ModelError, RecordError) as error:
        return console.faults([str(error)])
    except torch.OutOfMemoryError as error:
        return console.faults([f"out of memory ({error}): lower --batch-size, or set --mapping loop."])
    except Interrupted as stop:
        console.note(str(stop))
        return 130
    except KeyboardInterrupt:
        console.note("stopped.")
        return 130
    except BrokenPipeError:  # the reader of a pipe had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(options: argparse.Namespace, rest: list[str]) -> int:
    values, faults = _given(options, rest)
    if options.resume is not None:
        there = RunDirectory(options.resume).experiment().to_dict()
        faults += [f"--resume continues the run in {options.resume}: leave --out out."] if options.out else []
        values = _merge(there, values)
    experiment = _ready(values, faults)
    out = Path(options.resume or options.out or default_out(experiment))
    with console.Progress(experiment.rounds, _recorded(out), options.style) as progress:
        console.experiment(experiment, out, options.style)
        with _onward(f"fedcog run --resume {shlex.quote(str(out))}"):
            done = run(
                experiment,
                out,
                resume=options.resume is not None,
                watch=progress.advance,
                stopping=progress.stopping,
                command=_command(options),
            )
    console.results([done], options.style)
    console.say(f"report: {out / 'report.html'}", options.style)
    return 0


def _compare(options: argparse.Namespace, rest: list[str]) -> int:
    values, faults = _given(options, rest)
    names = options.algorithms or [values.get("algorithm", "fedavg")]
    experiments, unready = [], list[str]()
    for name in dict.fromkeys(names):
        used = set(name.split("+"))
        tables = {key: table for key, table in values.items() if key not in ALGORITHMS or key in used}
        try:
            experiments.append(read_experiment(tables | {"algorithm": name}))
        except ConfigError as error:
            unready += [fault for fault in error.faults if fault not in unready]
    mentioned = {part for name in names for part in name.split("+")}
    for table in set(values) & set(ALGORITHMS) - mentioned:
        faults.append(f"{table} has settings, but is not among --algorithms {' '.join(names)}: add it, or leave them.")
    seeds = _seeds(options.seeds, faults)
    if experiments and not faults and not unready:
        unready = check_ready(experiments[0])
    if faults or unready:
        raise ConfigError(faults + unready)
    out = Path(options.out or Path("runs") / f"compare-{experiments[0].dataset}")
    total = sum(experiment.rounds for experiment in experiments) * len(seeds)
    done = sum(_recorded(place(out, experiment, seed)) for experiment in experiments for seed in seeds)
    with console.Progress(total, done, options.style) as progress:
        console.comparison(experiments, seeds, out, options.style)
        with _onward(_command(options)):
            runs = compare(
                experiments, seeds, out, watch=progress.advance, stopping=progress.stopping, command=_command(options)
            )
    console.results(runs, options.style)
    console.say(f"report: {out / 'report.html'}", options.style)
    return 0


def _recorded(path: Path) -> int:
    """How many rounds of a run are already there."""
    return len(RunDirectory(path).lines())


@contextlib.contextmanager
def _onward(command: str) -> Iterator[None]:
    """Whatever stops the work, say how to go on with it."""
    try:
        yield
    except (Interrupted, KeyboardInterrupt) as stop:
        raise Interrupted(f"{str(stop) or 'stopped at once'}; continue with: {command}") from None


def _report(options: argparse.Namespace, rest: list[str]) -> int:
    _nothing_else(rest)
    from fedcog.experiments.report import page  # draws: loads matplotlib

    found = record.runs_below(options.directories)
    out = Path(options.out) if options.out else Path(options.directories[0]) / "report.html"
    if len(options.directories) > 1 and not options.out:
        out = Path("report.html")
    record.write_file(out, page(found, target=options.target).encode())
    console.results([read(path) for path in found], options.style)
    console.say(f"report: {out}", options.style)
    return 0


def _list(options: argparse.Namespace, rest: list[str]) -> int:
    _nothing_else(rest)
    console.catalogue()
    return 0


def _partition(options: argparse.Namespace, rest: list[str]) -> int:
    values, faults = _given(options, rest)
    experiment = _ready(values, faults)
    dataset = sources.load(experiment.dataset, experiment.data_dir or None)
    shares = share_out(experiment, dataset)
    counts = torch.stack([torch.bincount(dataset.train_y[one], minlength=len(dataset.classes)) for one in shares])
    console.partition(counts, dataset.classes)
    if options.figure:
        from fedcog.experiments.report import partition_figure  # draws: loads matplotlib

        record.write_file(Path(options.figure), partition_figure(counts, dataset.classes).encode())
        console.say(f"figure: {options.figure}", "auto")
    return 0


def _data(options: argparse.Namespace, rest: list[str]) -> int:
    _nothing_else(rest)
    if options.action == "list":
        console.data_sets(options.data_dir)
    elif options.action == "path":
        for place in sources.search_path(options.data_dir):
            print(place)
    else:
        with console.Download() as download:
            where = sources.fetch(options.name, options.data_dir, progress=download.advance, log=console.note)
        print(f"{options.name}: {where}")
    return 0


def _ready(values: dict[str, Any], faults: list[str]) -> Experiment:
    """The experiment that the settings describe, with its data and device there; else every fault."""
    try:
        experiment = read_experiment(values, faults)
    except ConfigError as error:
        partial = {key: values[key] for key in ("dataset", "data_dir", "device") if isinstance(values.get(key), str)}
        known = values.get("dataset", "digits") in SOURCES
        raise ConfigError(error.faults + (check_ready(Experiment(**partial)) if known else [])) from None
    if unready := check_ready(experiment):
        raise ConfigError(unready)
    return experiment


def _given(options: argparse.Namespace, rest: list[str]) -> tuple[dict[str, Any], list[str]]:
    """The settings that a file and flags give, flags first, and the faults among them."""
    values, faults = dict[str, Any](), list[str]()
    files, flags = _leftovers(rest)
    for flag in flags:
        faults.append(settings.unknown("flag", flag.split("=")[0], sorted(options.flags)))
    if len(files) > 1:
        faults.append(f"one TOML file at most, not {', '.join(files)}.")
    for file in files[:1]:
        try:
            values = read_toml(file)
        except ConfigError as error:
            faults += error.faults
    given: dict[str, Any] = {}
    for key, setting in _known().items():
        text = getattr(options, key)
        if text is None:
            continue
        table, _, name = key.rpartition(".")
        try:
            if text is MISSING:
                raise ValueError(f"needs {setting.kind}")
            value = text if isinstance(text, bool) else settings.parse(setting, text)
        except ValueError as error:
            faults.append(f"{key} {error}.")
            continue
        (given.setdefault(table, {}) if table else given)[name] = value
    if options.algorithm is not None:
        given["algorithm"] = options.algorithm
    values = _merge(values, given)
    if options.fedcog:
        base = str(values.get("algorithm", "fedavg"))
        values["algorithm"] = base if "fedcog" in base.split("+") else f"{base}+fedcog"
    return values, faults


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merged[key] | value if both else value
    return merged


def _leftovers(rest: list[str]) -> tuple[list[str], list[str]]:
    """What no flag took: file names, and unknown flags (each with the value that follows it)."""
    files, flags, after_flag = list[str](), list[str](), False
    for word in rest:
        if word.startswith("-") and len(word) > 1:
            flags.append(word)
            after_flag = "=" not in word
        elif after_flag and not word.endswith(".toml"):
            after_flag = False
        else:
            files.append(word)
    return files, flags


def _nothing_else(rest: list[str]) -> None:
    if rest:
        raise ConfigError([f"did not understand: {' '.join(rest)}. See --help."])


def _seeds(texts: list[str], faults: list[str]) -> list[int]:
    seeds = []
    for text in texts:
        if text.isdigit():
            seeds.append(int(text))
        else:
            faults.append(f"seeds needs whole numbers >= 0, not '{text}'.")
    return list(dict.fromkeys(seeds))


def _command(options: argparse.Namespace) -> str:
    return shlex.join(["fedcog", *options.words])


def _known() -> dict[str, Setting]:
    """Every setting there is a flag for, an algorithm's own under its name."""
    known = settings.settings(Experiment)
    for name, cls in ALGORITHMS.items():
        known |= {f"{name}.{key}": setting for key, setting in settings.settings(cls).items()}
    return known


class _Help(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=36, width=min(120, shutil.get_terminal_size().columns - 2))

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        """A flag's value without brackets: it is only for better faults that it may be left out."""
        return str(action.metavar) if action.nargs == "?" else super()._format_args(action, default_metavar)


class _Parser(argparse.ArgumentParser):
    def __init__(self, **keywords: Any) -> None:
        super().__init__(formatter_class=_Help, allow_abbrev=False, **keywords)

    def error(self, message: str) -> NoReturn:
        raise ConfigError([f"{message}. See {self.prog} --help."])


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="fedcog", description=fedcog.__doc__)
    parser.add_argument("--version", action="version", version=f"fedcog {fedcog.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    one = _command_parser(commands, "run", _run, "run one experiment, or continue one", "[FILE.toml]")
    one.add_argument("--resume", metavar="DIR", help="continue the run in DIR")
    one.add_argument("--out", metavar="DIR", help="where the run goes (default: runs/DATASET-ALGORITHM-SEED)")
    _experiment_flags(one)

    several = _command_parser(commands, "compare", _compare, "run several algorithms over several seeds", "[FILE.toml]")
    several.add_argument("--algorithms", nargs="+", metavar="NAME", help="such as: fedavg fedprox fedprox+fedcog")
    several.add_argument("--seeds", nargs="+", metavar="SEED", default=["0", "1", "2"], help="default: 0 1 2")
    several.add_argument("--out", metavar="DIR", help="where the runs go (default: runs/compare-DATASET)")
    _experiment_flags(several)

    look = _command_parser(commands, "report", _report, "make one page of the runs in some directories")
    look.add_argument("directories", nargs="+", metavar="DIR", help="a run, or a folder with runs anywhere below")
    look.add_argument("--out", metavar="FILE", help="the page (default: report.html in DIR)")
    look.add_argument("--target", type=float, metavar="ACCURACY", help="accuracy to count rounds to, such as 0.6")

    _command_parser(commands, "list", _list, "show algorithms, data sets, models and partitions with their settings")

    shares = _command_parser(commands, "partition", _partition, "show who would hold what", "[FILE.toml]")
    shares.add_argument("--figure", metavar="FILE.svg", help="draw it, too")
    _experiment_flags(shares)

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
        part.set_defaults(call=_data)
    return parser


def _command_parser(commands: Any, name: str, call: Any, text: str, words: str = "") -> argparse.ArgumentParser:
    usage = f"fedcog {name} {words} [flags]".replace("  ", " ") if words else None
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=f"{text[0].upper()}{text[1:]}.", usage=usage
    )
    style = parser.add_mutually_exclusive_group()
    style.add_argument("--quiet", dest="style", action="store_const", const="quiet", help="print nothing but faults")
    style.add_argument("--plain", dest="style", action="store_const", const="plain", help="plain lines, for logs")
    parser.set_defaults(call=call, style="auto", flags=())
    return parser


def _experiment_flags(parser: argparse.ArgumentParser) -> None:
    """A flag for every setting, in groups, with help, bounds and default."""
    group = parser.add_argument_group("algorithm")
    group.add_argument(
        "--algorithm", metavar="NAME", help="base and wrappers, such as fedprox+fedcog (default: fedavg)"
    )
    group.add_argument("--fedcog", action="store_true", help="wrap the algorithm in FedCOG")
    for key, setting in _known().items():
        table = key.rpartition(".")[0]
        title = f"settings of {table}" if table else GROUPS.get(key)
        if title and (not group or group.title != title):
            group = parser.add_argument_group(title)
        flags = [f"--{table}.{setting.flag}" if table else f"--{setting.flag}"]
        flags += [ALIASES[key]] if key in ALIASES else []
        shown = setting.default if setting.default != "" else "none"
        if setting.type is bool:
            action: Any = argparse.BooleanOptionalAction
            group.add_argument(*flags, dest=key, action=action, help=f"{setting.help} (default: {shown})")
            continue
        kind = "{" + ",".join(setting.choices) + "}" if setting.choices else setting.type.__name__.upper()
        limits = ", ".join(f"{sign} {limit:g}" for sign, limit in setting.bounds)
        note = f"{setting.help} ({limits}; default: {shown})" if limits else f"{setting.help} (default: {shown})"
        group.add_argument(*flags, dest=key, nargs="?", const=MISSING, metavar=kind, help=note.replace("%", "%%"))
    parser.set_defaults(flags=[flag for flag in parser._option_string_actions if flag.startswith("--")])
