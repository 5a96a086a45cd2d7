"""The command line: parse, call, print."""

import argparse
import contextlib
import os
import shlex
import signal
import sys
import warnings
import webbrowser
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fedcog import completion, console, flags, grammar, settings
from fedcog.algorithms import ALGORITHMS, Algorithm
from fedcog.data import SOURCES, DataError, PartitionError, sources
from fedcog.data.datasets import DataWarning
from fedcog.experiments import (
    deploy,
    devices,
    doctor,
    paper,
    plan,
    record,
    reproduce,
    smoke,
    summary,
    sweep,
    theory,
    track,
)
from fedcog.experiments.catalogue import catalogue, markdown
from fedcog.experiments.compare import compare, places
from fedcog.experiments.config import Experiment, name_of, read_experiment, read_toml
from fedcog.experiments.export import export
from fedcog.experiments.prepare import altered, check_ready, check_runnable, share_out, surroundings
from fedcog.experiments.record import RecordError, RunDirectory
from fedcog.experiments.results import Results
from fedcog.experiments.run import Run, default_out, read, run
from fedcog.experiments.study import Study
from fedcog.experiments.turns import Interrupted
from fedcog.federation import ranks
from fedcog.federation.ranks import RankDied
from fedcog.federation.rounds import Diverged, NoAnswer
from fedcog.federation.workers import WorkerDied
from fedcog.fitness import ModelError
from fedcog.models import MODELS
from fedcog.settings import ConfigError
from fedcog.task import task_of

LEFT = 3
"""The exit code of a queue whose time is over before its work."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        plain, own = flags.own_algorithms(words)
        options, rest = grammar.parser(ALGORITHMS | own).parse_known_args(plain)
        options.words, options.known = words, ALGORITHMS | own
        with console.heard():
            return COMMANDS[options.command](options, rest)
    except ConfigError as error:
        return console.faults(error.faults)
    except (DataError, PartitionError, ModelError, NoAnswer, RankDied, RecordError, WorkerDied) as error:
        return console.faults([str(error)])
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        signs = ("out of memory", "allocate memory", "Storage size calculation overflowed")
        if not isinstance(error, MemoryError) and not any(sign in str(error) for sign in signs):
            raise
        reason = str(error).strip().splitlines()[0]
        return console.faults([f"out of memory ({reason}): lower --local-steps, --batch-size or --fedcog.count."])
    except Diverged as error:
        console.faults([str(error)])
        return 1
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
    values, faults = flags.given(options, rest)
    if options.resume is not None:
        recorded = RunDirectory(options.resume).experiment(options.known)
        if strange := check_runnable(recorded):
            raise ConfigError(strange)
        there = recorded.to_dict()
        faults += [f"--resume continues the run in {options.resume}: leave --out out."] if options.out else []
        values = flags.merge(there, values)
    experiment, trackers = _ready(values, faults, options.known), track.chosen(options.track)
    out = Path(options.resume or options.out or default_out(experiment))
    if ranks.follows():
        with contextlib.suppress(Diverged, Interrupted):
            run(experiment, out)  # what there is to say, the process that leads says
        return 0
    with console.Progress(experiment.rounds, _recorded(out), options.style) as progress:
        console.experiment(experiment, out, options.style)
        again = ["fedcog", "run", "--resume", str(out), *(word for name in trackers for word in ("--track", name))]
        with _onward(shlex.join(again)), _trackers_heard():
            done = run(
                experiment,
                out,
                resume=options.resume is not None,
                watch=progress.advance,
                stopping=progress.stopping,
                command=_command(options),
                track=trackers,
            )
    console.results([done], options.style)
    console.say(f"report: {out / 'report.html'}", options.style)
    return 0


def _compare(options: argparse.Namespace, rest: list[str]) -> int:
    values, faults = flags.given(options, rest)
    if ranks.started():
        raise ConfigError(["torchrun is for one run: start fedcog run under it, run by run, or compare without it."])
    if options.fedcog or options.algorithm is not None or options.seed is not None:
        faults.append("compare takes --algorithms and --seeds, not --algorithm, --fedcog or --seed.")
    if not options.algorithms:
        faults.append("compare needs at least one algorithm, such as: --algorithms fedavg fedprox fedprox+fedcog.")
    experiments = _methods(options, values, faults)
    seeds = _seeds(options.seeds, faults)
    if experiments and not faults:
        faults = _unready(experiments)
    if faults:
        raise ConfigError(faults)
    trackers = track.chosen(options.track)
    _prepare(experiments[0])
    out = Path(options.out or Path("runs") / f"compare-{experiments[0].dataset}")
    planned = places(out, experiments, seeds)
    total, done = sum(experiment.rounds for experiment, _ in planned), sum(_recorded(place) for _, place in planned)
    with console.Progress(total, done, options.style) as progress:
        console.comparison(experiments, seeds, out, options.style)
        with _onward(_command(options)), warnings.catch_warnings(action="ignore"):  # those that diverge are told below
            warnings.simplefilter("default", DataWarning)
            with _trackers_heard():
                runs = compare(
                    experiments,
                    seeds,
                    out,
                    watch=progress.advance,
                    stopping=progress.stopping,
                    command=_command(options),
                    track=trackers,
                )
    console.results(runs, options.style)
    console.say(f"report: {out / 'report.html'}", options.style)
    lost = [one for one in runs if one.diverged]
    console.faults([f"{name_of(one.experiment.algorithm)}, seed {one.experiment.seed}: {one.diverged}" for one in lost])
    return 1 if lost else 0


def _sweep(options: argparse.Namespace, rest: list[str]) -> int:
    values, faults = flags.given(options, rest)
    if ranks.started():
        raise ConfigError(["torchrun is for one run: start fedcog sweep without it."])
    if options.fedcog or options.algorithm is not None:
        faults.append("sweep takes --algorithms, not --algorithm or --fedcog.")
    if not options.algorithms:
        faults.append("sweep needs at least one algorithm, such as: --algorithms fedavg fedprox fedcog.")
    if values.get("validation") == 0:
        faults.append(f"trials are judged by what is held out: set --validation above 0, such as {sweep.SHARE:g}.")
    experiments = _methods(options, values, faults)
    offered = dict[str, Any]()
    if options.space is None:
        faults.append("sweep needs to know what may be chosen: --space FILE.toml, with lists or ranges for settings.")
    else:
        try:
            offered = read_toml(options.space)
        except ConfigError as error:
            faults += error.faults
    seeds, trial_seeds = _seeds(options.seeds, faults), _seeds(options.trial_seeds, faults)
    if faults:
        raise ConfigError(faults)
    how = {"search": options.search, "trials": options.trials, "seed": int(values.get("seed", 0))}
    what = sweep.planned(experiments, offered, **how, trial_seeds=trial_seeds, seeds=seeds)
    if unready := _unready(experiments):
        raise ConfigError(unready)
    _prepare(experiments[0])
    out = Path(options.out or Path("runs") / f"sweep-{experiments[0].dataset}")
    record.check_writable(out, "--out")
    left = sweep.Sweep(what, out).left()
    with console.Progress(what.rounds, what.rounds - left, options.style, tuple(what.space)) as progress:
        console.sweeping(what, out, options.style)
        with _onward(_command(options)):
            heard: dict[str, Any] = {
                "watch": progress.advance,
                "stopping": progress.stopping,
                "command": _command(options),
            }
            found = sweep.carry_out(what, out, **heard)
    console.tuned(what, found, options.style)
    console.say(f"report: {out / 'report.html'}, and every trial in {out / 'sweep.md'}", options.style)
    lost = [run for one in found for run in one.runs if run.diverged]
    console.faults([f"{name_of(one.experiment.algorithm)}, seed {one.experiment.seed}: {one.diverged}" for one in lost])
    return 1 if lost else 0


def _methods(options: argparse.Namespace, values: dict[str, Any], faults: list[str]) -> list[Experiment]:
    """An experiment of each algorithm that was named; what is wrong with one is added to the faults, once."""
    found, wrong = list[Experiment](), list[str]()
    parts = {name: set(name.split("+")) for name in options.algorithms or []}
    for name, own in parts.items():
        given = values | {"algorithm": name}
        if isinstance(kinds := values.get("devices"), str):
            given["devices"] = devices.without(kinds, set[str]().union(*parts.values()) - own)
        try:
            found.append(read_experiment(given, known=options.known))
        except ConfigError as error:
            wrong += [fault for fault in error.faults if fault not in wrong]
    faults += wrong
    return found


def _recorded(path: Path) -> int:
    """How many rounds of a run need not be run again: those up to its checkpoint."""
    return RunDirectory(path).rounds()


@contextlib.contextmanager
def _onward(command: str) -> Iterator[None]:
    """Whatever stops the work, say how to go on with it."""
    try:
        yield
    except (Interrupted, KeyboardInterrupt) as stop:
        raise Interrupted(f"{str(stop) or 'stopped at once'}; continue with: {command}") from None


@contextlib.contextmanager
def _trackers_heard() -> Iterator[None]:
    """Within it, whatever is warned of a tracker is told, as often as it is."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", track.TrackWarning)
        yield


def _report(options: argparse.Namespace, rest: list[str]) -> int:
    _nothing_else(rest)
    from fedcog.experiments.report import page  # draws: loads matplotlib

    if options.target is not None and not 0 < options.target <= 1:
        raise ConfigError([f"target needs a share > 0 and <= 1, such as 0.6, not {options.target:g}."])
    found = record.runs_below(options.directories)
    place = Path(options.directories[0]) if len(options.directories) == 1 else Path()
    name = "report.html" if not (place / "sweep.json").exists() else "runs.html"  # a sweep has a report of its own
    out = Path(options.out or place / name)
    runs, damaged = list[Run](), list[RecordError]()
    for path in found:
        try:
            runs.append(read(path))
        except RecordError as error:
            damaged.append(error)
    if damaged and not runs:
        raise damaged[0]
    record.write_file(out, page([run.path for run in runs], target=options.target).encode())
    if options.table:
        record.write_file(Path(options.table), summary.markdown(runs).encode())
    console.results(runs, options.style)
    if options.target is not None:
        console.costs(runs, options.target, options.style)
    console.say(f"report: {out}", options.style)
    return console.faults([f"left out: {error}" for error in damaged]) if damaged else 0


def _watch(options: argparse.Namespace, rest: list[str]) -> int:
    _nothing_else(rest)
    if not 0 <= options.port < 2**16:
        raise ConfigError([f"port needs a number from 0 (any that is free) to 65535, not {options.port}."])
    from fedcog.experiments.watch import Server  # draws: loads matplotlib

    server = Server(options.directories, options.port)
    stops = signal.SIGINT, signal.SIGTERM  # the first is ignored at the start of what a shell puts in the background
    before = [signal.signal(stop, signal.default_int_handler) for stop in stops]
    try:
        console.say(f"watching {', '.join(options.directories)} at {server.url} (Ctrl-C stops)", options.style)
        if options.open:
            webbrowser.open(server.url)
        server.serve()
    finally:
        for stop, handler in zip(stops, before, strict=True):
            signal.signal(stop, handler)
    return 0


def _export(options: argparse.Namespace, rest: list[str]) -> int:
    _nothing_else(rest)
    recorded = RunDirectory(options.run).experiment(options.known)
    if strange := check_runnable(recorded):
        raise ConfigError(strange)
    found = export(options.run, options.out, options.format, algorithm=recorded.algorithm)
    console.exported(found, recorded, options.style)
    return 0


def _reproduce(options: argparse.Namespace, rest: list[str]) -> int:
    _nothing_else(rest)
    faults, known = list[str](), paper.studies()
    for name in options.names:
        faults += [settings.unknown("table or figure", name, ["all", *known])] if name not in ("all", *known) else []
    limited = options.seeds or options.datasets or options.algorithms
    telling = options.status or not (options.render or options.smoke or limited)
    if not options.names and not options.render and not telling:
        faults.append("say what to run: all, or some of those that fedcog reproduce lists.")
    seeds = _seeds(options.seeds or [], faults)
    part, parts = _shard(options.shard, faults)
    if options.smoke:
        known = {name: smoke.tiny(study) for name, study in known.items()}
        faults += ["--smoke is on digits alone: leave --datasets out."] if options.datasets else []
    if seeds:
        known = {name: study._replace(seeds=tuple(seeds)) for name, study in known.items()}
    chosen = [study for name, study in known.items() if {name, "all"} & {*options.names}] or list(known.values())
    if options.time_budget is not None and not reproduce.RESERVE < options.time_budget < 1e9:
        faults.append(
            f"time-budget needs more seconds than the {reproduce.RESERVE:g} that are kept back to write things down, "
            f"not {options.time_budget:g}."
        )
    if faults:
        raise ConfigError(faults)
    results = Results(options.results or ("results-smoke" if options.smoke else "results"))
    if options.status or not (options.names or options.render):
        limits = options.datasets or (), options.data_dir or "", options.algorithms or ()
        console.progress_of(chosen, plan.status(chosen, results, *limits), results.path)
        return 0
    out, code = Path(options.out or results.path), 0
    if options.out:
        record.check_writable(out, "--out")
    if options.render and not results.path.is_dir():
        raise ConfigError([f"there are no results in {results.path}: name the folder of some with --results."])
    if not options.out:
        record.check_writable(out, "--results")
    if not options.render:
        record.check_writable(results.path, "--results")
        code = _work(options, chosen, list(known.values()), results, part, parts)
    from fedcog.experiments.report import reproduction  # draws: loads matplotlib

    reproduction.write(chosen, results, out)
    console.say(f"tables and figures: {out / 'results.html'}, results.md, results.tex, figures/", options.style)
    return code


def _work(
    options: argparse.Namespace, chosen: list[Study], known: list[Study], results: Results, part: int, parts: int
) -> int:
    """What is to be run of some studies of those that are known, as far as time allows; the exit code."""
    limits = options.datasets or (), options.data_dir or ""
    some = options.algorithms or ()
    wanted = list(dict.fromkeys(job for study in chosen for job in plan.jobs(study, *limits, some)))
    _check_there({job.experiment.dataset for job in wanted}, options.data_dir)
    stacks = plan.share(plan.stacks(wanted), part, parts)
    words = ["fedcog", "reproduce", *options.names, *(["--smoke"] if options.smoke else [])]
    with console.Progress(plan.rounds_left(stacks, results), 0, options.style) as progress:
        queue = reproduce.Queue(
            results,
            budget=options.time_budget,
            watch=progress.advance,
            stopping=progress.stopping,
            say=lambda text: console.aside(text, options.style),
            command=shlex.join(words),  # where things lie is nobody's business
            planned=list(dict.fromkeys(job for study in known for job in plan.jobs(study, *limits))),
        )
        with _onward(_command(options)):
            ended = queue.work(stacks)
    console.faults(ended.failed)
    if ended.left:
        console.note(f"{ended.left} left; go on with: {_command(options)}")
    return 1 if ended.failed else 130 if progress.stopping() else LEFT if ended.left else 0


def _shard(text: str | None, faults: list[str]) -> tuple[int, int]:
    """Which part of how many: 0/4 to 3/4."""
    part, _, parts = (text or "0/1").partition("/")
    short = all(word.isascii() and word.isdecimal() and len(word) < 6 for word in (part, parts))
    if not short or int(part) >= int(parts):
        faults.append(f"shard needs i/n with i from 0 to n - 1, such as 0/4, not '{text}'.")
        return 0, 1
    return int(part), int(parts)


def _check_there(datasets: set[str], data_dir: str | None) -> None:
    """All data sets are here; else how to get each that is not."""
    lacking = [name for name in sorted(datasets) if not SOURCES[name].package]
    lacking = [name for name in lacking if sources.locate(name, data_dir) is None]
    if lacking:
        where = f" --data-dir {shlex.quote(data_dir)}" if data_dir else ""
        raise ConfigError(
            [f"{name} is not here: fedcog data get {name}{where}, or leave it out with --datasets." for name in lacking]
        )


def _list(options: argparse.Namespace, rest: list[str]) -> int:
    _nothing_else(rest)
    if options.markdown:
        if options.what != "algorithms":
            raise ConfigError(["--markdown is for algorithms: fedcog list algorithms --markdown."])
        print(markdown(catalogue()), end="")
        return 0
    console.catalogue(options.what, options.data_dir)
    return 0


def _partition(options: argparse.Namespace, rest: list[str]) -> int:
    values, faults = flags.given(options, rest)
    experiment = _ready(values, faults, options.known)
    dataset = sources.load(experiment.dataset, experiment.data_dir or None)
    shares = share_out(experiment, dataset)
    dataset = altered(experiment, dataset, shares)
    task = task_of(len(dataset.classes), dataset.several)
    counts = torch.stack([task.counts(dataset.train_y[one]) for one in shares])
    noun = "labels" if dataset.several else "examples"
    console.partition(counts, dataset.classes, noun)
    nobodys = len(dataset.train_y) - len({index for share in shares for index in share.tolist()})
    if nobodys:
        console.note(f"{nobodys} of the {len(dataset.train_y)} training examples go to nobody.")
    if options.figure:
        from fedcog.experiments.report import partition_figure  # draws: loads matplotlib

        record.write_file(Path(options.figure), partition_figure(counts, dataset.classes, noun).encode())
        console.say(f"figure: {options.figure}", "auto")
    return 0


def _theory(options: argparse.Namespace, rest: list[str]) -> int:
    _nothing_else(rest)
    numbers = {name: getattr(options, name) for name in ("clients", "rounds", "steps", "batch", "repeats")}
    flag = {"steps": "local-steps", "batch": "batch-size"}
    limits = dict.fromkeys(numbers, (1, 10_000)) | {"clients": (5, 100)}  # every digit is somebody's
    faults = [
        f"{flag.get(name, name)} needs a whole number from {limits[name][0]} to {limits[name][1]}, not {number}."
        for name, number in numbers.items()
        if not limits[name][0] <= number <= limits[name][1]
    ]
    if not 0 <= options.seed < 2**63:
        faults.append(f"seed needs a whole number from 0 to 2^63 - 1, not {options.seed}.")
    if not 0 <= options.lr <= 1e6:
        faults.append(f"lr needs a number from 0 to a million, not {options.lr:g}.")
    if faults:
        raise ConfigError(faults)
    plan = theory.Plan(**numbers, seed=options.seed)
    networks: list[theory.Network] = ["linear", "mlp"] if options.network == "both" else [options.network]
    with surroundings(1):  # of numbers so few, one thread makes short work
        for network in networks:
            what = "a linear model" if network == "linear" else "a small network"
            console.aside(
                f"measuring {what}: {plan.repeats} runs of {plan.rounds} rounds, a minute or two", options.style
            )
            found = theory.measure(network, sources.load("digits"), plan, options.lr)
            console.theory(found, plan, options.style)
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
            said = sources.prepare(options.name, options.data_dir, progress=download.advance)
        print(f"{options.name}: {where}")
        if said:
            console.note(said)
    return 0


def _completion(options: argparse.Namespace, rest: list[str]) -> int:
    _nothing_else(rest)
    several = dict.fromkeys(("--algorithm", "--algorithms"), ALGORITHMS)
    parser = grammar.parser()
    print(completion.script(options.shell, parser, several | {"--dataset": SOURCES, "--model": MODELS}), end="")
    return 0


def _doctor(options: argparse.Namespace, rest: list[str]) -> int:
    _nothing_else(rest)
    parts = list(doctor.examine(options.data_dir))
    console.doctor(parts, options.style)
    if ailing := [part for part in parts if part.ails]:
        console.faults([f"{part.name} is needed, and {part.state}: {part.remedy}" for part in ailing])
        return 1
    return 0


def _deploy(options: argparse.Namespace, rest: list[str]) -> int:
    values, faults = flags.given(options, rest)
    experiment = read_experiment(values, faults, options.known)
    own = {"data": options.test_data or "", "classes": options.classes or ""}
    deploy.init(Path(options.directory), experiment, host=options.host, port=options.port, **own)
    console.say(f"a federation of {experiment.clients} nodes: {Path(options.directory) / 'README.md'}", options.style)
    return 0


def _unready(experiments: Sequence[Experiment]) -> list[str]:
    """What stands in the way of any of them, each thing once."""
    return list(dict.fromkeys(fault for one in experiments for fault in check_ready(one)))


def _ready(values: dict[str, Any], faults: list[str], known: Mapping[str, type[Algorithm]]) -> Experiment:
    """The experiment that the settings describe, with its data and device there; else every fault."""
    try:
        experiment = read_experiment(values, faults, known)
    except ConfigError as error:
        partial = {key: values[key] for key in ("dataset", "data_dir", "device") if isinstance(values.get(key), str)}
        there = str(values.get("dataset", "digits")) in SOURCES
        raise ConfigError(error.faults + (check_ready(Experiment(**partial)) if there else [])) from None
    if unready := check_ready(experiment):
        raise ConfigError(unready)
    _prepare(experiment)
    return experiment


def _prepare(experiment: Experiment) -> None:
    """Do what the data set needs done once, and show how far it is."""
    if experiment.dataset in SOURCES:
        with surroundings(experiment.threads), console.Download() as bar:
            sources.prepare(experiment.dataset, experiment.data_dir or None, progress=bar.advance)


def _nothing_else(rest: list[str]) -> None:
    if rest:
        raise ConfigError([f"did not understand: {' '.join(rest)}. See fedcog --help."])


def _seeds(texts: list[str], faults: list[str]) -> list[int]:
    seeds = []
    for text in texts:
        if text.isascii() and text.isdigit() and len(text) < 19:
            seeds.append(int(text))
        else:
            faults.append(f"seeds needs whole numbers >= 0, not '{text[:30]}'.")
    return list(dict.fromkeys(seeds))


def _command(options: argparse.Namespace) -> str:
    return shlex.join(["fedcog", *options.words])


COMMANDS: dict[str, Callable[[argparse.Namespace, list[str]], int]] = {
    "run": _run,
    "compare": _compare,
    "sweep": _sweep,
    "report": _report,
    "watch": _watch,
    "export": _export,
    "reproduce": _reproduce,
    "list": _list,
    "partition": _partition,
    "theory": _theory,
    "deploy": _deploy,
    "data": _data,
    "doctor": _doctor,
    "completion": _completion,
}
"""What carries out each command of the grammar."""
