"""Commands about the paper: reproduce, theory."""

import argparse
import shlex
from pathlib import Path
from typing import NamedTuple

from fedcog.cli import console, flags, output
from fedcog.cli.commands.common import command_text, explains_continuation
from fedcog.cli.console import print_note, print_result
from fedcog.cli.progress import CommandProgress
from fedcog.core import settings
from fedcog.core.settings import ConfigError
from fedcog.data import DATASETS, registry
from fedcog.runs.config.experiment import Experiment
from fedcog.runs.environment import torch_settings
from fedcog.runs.records.run_directory import check_writable
from fedcog.studies import job_planning, job_queue, paper, smoke, theory
from fedcog.studies.result_store import Job, Results
from fedcog.studies.study import Study

EXIT_FAILED = 1
EXIT_WORK_LEFT = 3
EXIT_INTERRUPTED = 130
MAX_TIME_BUDGET = 1e9
MAX_SHARD_DIGITS = 5
THEORY_LIMITS = {
    "clients": (5, 100),  # every digit needs a client
    "rounds": (1, 10_000),
    "steps": (1, 10_000),
    "batch": (1, 10_000),
    "repeats": (1, 10_000),
}
THEORY_FLAGS = {"steps": "local-steps", "batch": "batch-size"}


class Request(NamedTuple):
    """What the user asked to reproduce.

    Attributes:
        known: All tables and figures, with the requested seeds.
        chosen: Those to work on.
        part: Which shard.
        num_parts: Number of shards.
    """

    known: list[Study]
    chosen: list[Study]
    part: int
    num_parts: int


def reproduce_command(options: argparse.Namespace, rest: list[str]) -> int:
    """Run the paper's tables and figures again.

    Args:
        options: The parsed command line.
        rest: What no flag took.

    Returns:
        The exit code.
    """
    flags.refuse_rest(rest)
    request = _read_request(options)
    results = Results(options.results or ("results-smoke" if options.smoke else "results"))
    if options.status or not (options.names or options.render):
        progress = job_planning.progress_of(
            request.chosen,
            results,
            options.datasets or (),
            options.data_dir or "",
            options.algorithms or (),
        )
        output.print_study_progress(request.chosen, progress, results.path)
        return 0
    out = Path(options.out or results.path)
    if options.out:
        check_writable(out, "--out")
    if options.render and not results.path.is_dir():
        raise ConfigError(
            [f"there are no results in {results.path}: name another folder with --results."]
        )
    if not options.out:
        check_writable(out, "--results")
    exit_code = 0
    if not options.render:
        check_writable(results.path, "--results")
        exit_code = _run_jobs(options, request, results)
    from fedcog.report import reproduction  # imports matplotlib, which takes a second

    reproduction.write(request.chosen, results, out)
    print_result(
        f"tables and figures: {out / 'results.html'}, results.md, results.tex, figures/",
        options.style,
    )
    return exit_code


def theory_command(options: argparse.Namespace, rest: list[str]) -> int:
    """Compare the paper's convergence bound with measurements.

    Args:
        options: The parsed command line.
        rest: What no flag took.

    Returns:
        The exit code.
    """
    flags.refuse_rest(rest)
    values = {name: getattr(options, name) for name in THEORY_LIMITS}
    faults = []
    for name, value in values.items():
        low, high = THEORY_LIMITS[name]
        if not low <= value <= high:
            flag = THEORY_FLAGS.get(name, name)
            faults.append(f"{flag} needs an integer from {low} to {high}, not {value}.")
    if not 0 <= options.seed < 2**63:
        faults.append(f"seed needs an integer from 0 to 2^63 - 1, not {options.seed}.")
    if not 0 <= options.lr <= 1e6:
        faults.append(f"lr needs a number from 0 to 1e6, not {options.lr:g}.")
    if faults:
        raise ConfigError(faults)
    plan = theory.TheoryPlan(**values, seed=options.seed)
    networks: list[theory.Network] = ["linear", "mlp"]
    if options.network != "both":
        networks = [options.network]
    with torch_settings(Experiment(threads=1)):  # tensors are too small for several threads
        for network in networks:
            name = "a linear model" if network == "linear" else "a small network"
            print_note(
                f"measuring {name}: {plan.repeats} runs of {plan.rounds} rounds, a minute or two",
                options.style,
            )
            result = theory.measure(network, registry.load("digits"), plan, options.lr)
            output.print_theory(result, plan, options.style)
    return 0


def _read_request(options: argparse.Namespace) -> Request:
    """Check the flags of `reproduce`, and raise all faults at once."""
    faults: list[str] = []
    known = paper.studies()
    for name in options.names:
        if name not in ("all", *known):
            faults.append(settings.unknown_name("table or figure", name, ["all", *known]))
    has_filter = options.seeds or options.datasets or options.algorithms
    shows_status = options.status or not (options.render or options.smoke or has_filter)
    if not options.names and not options.render and not shows_status:
        faults.append("name what to run: all, or some of what `fedcog reproduce` lists.")
    seeds = flags.read_seeds(options.seeds or [], faults)
    part, num_parts = _read_shard(options.shard, faults)
    if options.smoke:
        known = {name: smoke.smoke_version(study) for name, study in known.items()}
        if options.datasets:
            faults.append("--smoke uses digits only: remove --datasets.")
    if seeds:
        known = {name: study._replace(seeds=tuple(seeds)) for name, study in known.items()}
    min_budget = job_queue.RESERVED_SECONDS
    budget = options.time_budget
    if budget is not None and not min_budget < budget < MAX_TIME_BUDGET:
        faults.append(
            f"time-budget needs more than the {min_budget:g} seconds that are reserved for writing "
            f"results, not {budget:g}."
        )
    if faults:
        raise ConfigError(faults)
    names = {*options.names}
    chosen = [study for name, study in known.items() if {name, "all"} & names]
    return Request(list(known.values()), chosen or list(known.values()), part, num_parts)


def _run_jobs(options: argparse.Namespace, request: Request, results: Results) -> int:
    """Run the jobs of the chosen studies as far as time allows; return the exit code."""
    data_dir = options.data_dir or ""
    datasets = options.datasets or ()
    algorithms = options.algorithms or ()
    jobs: dict[Job, None] = {}
    for study in request.chosen:
        jobs |= dict.fromkeys(job_planning.jobs_of(study, datasets, data_dir, algorithms))
    _check_datasets({job.experiment.dataset for job in jobs}, options.data_dir)
    planned: dict[Job, None] = {}
    for study in request.known:
        planned |= dict.fromkeys(job_planning.jobs_of(study, datasets, data_dir))
    stacks = job_planning.shard(
        job_planning.stack_jobs(list(jobs)), request.part, request.num_parts
    )
    # The recorded command names no folders, which differ between machines.
    words = ["fedcog", "reproduce", *options.names]
    if options.smoke:
        words.append("--smoke")
    rounds_left = job_planning.rounds_left(stacks, results)
    with CommandProgress(rounds_left, 0, options.style) as progress:
        queue = job_queue.JobQueue(
            results,
            budget=options.time_budget,
            callbacks=[progress.show_round],
            should_stop=progress.should_stop,
            say=lambda text: print_note(text, options.style),
            command=shlex.join(words),
            planned=list(planned),
        )
        with explains_continuation(command_text(options)):
            outcome = queue.work(stacks)
    console.print_faults(outcome.failures)
    if outcome.num_left:
        print_note(f"{outcome.num_left} left; continue with: {command_text(options)}")
    if outcome.failures:
        return EXIT_FAILED
    if progress.should_stop():
        return EXIT_INTERRUPTED
    return EXIT_WORK_LEFT if outcome.num_left else 0


def _read_shard(text: str | None, faults: list[str]) -> tuple[int, int]:
    """Parse I/N, such as 0/4."""
    part, _, num_parts = (text or "0/1").partition("/")
    is_valid = all(
        word.isascii() and word.isdecimal() and len(word) <= MAX_SHARD_DIGITS
        for word in (part, num_parts)
    )
    if not is_valid or int(part) >= int(num_parts):
        faults.append(f"shard needs i/n with i from 0 to n - 1, such as 0/4, not '{text}'.")
        return 0, 1
    return int(part), int(num_parts)


def _check_datasets(names: set[str], data_dir: str | None) -> None:
    """Refuse to start without all data sets, and say how to get them."""
    missing = [
        name
        for name in sorted(names)
        if not DATASETS[name].package and registry.locate(name, data_dir) is None
    ]
    flag = f" --data-dir {shlex.quote(data_dir)}" if data_dir else ""
    if missing:
        raise ConfigError(
            [
                f"{name} is missing: fedcog data get {name}{flag}, or exclude it with --datasets."
                for name in missing
            ]
        )
