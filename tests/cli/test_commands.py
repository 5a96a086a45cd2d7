"""Tests of the command line: flags, files, errors, exit codes and output."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fedcog
from fedcog import FedCOG, FedProx, FedRep, Tuned
from fedcog.algorithms import ALGORITHMS
from fedcog.cli import console, output, parser, schema
from fedcog.cli.execution import COMMANDS
from fedcog.cli.main import main
from fedcog.core import settings
from fedcog.runs.config.experiment import Experiment
from fedcog.runs.records.run_directory import RunDirectory
from fedcog.studies import catalog
from fedcog.studies.tuning import search_space
from fedcog.studies.tuning.sweep import SweepPlan, Trial
from tests.support.paths import REPO

FAST = ["--rounds", "2", "--local-steps", "2", "--batch-size", "8", "--clients", "4"]
FAST += ["--partition", "iid", "--threads", "1"]


@pytest.fixture(autouse=True)
def isolated_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("FEDCOG_DATA", raising=False)


def test_documented_command_parses_and_reports_missing_data(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The parser accepts every flag; the error says how to download the missing dataset."""
    arguments = (
        "run --dataset cifar10 --model cnn --partition dirichlet --beta 0.1 --clients 10 "
        "--participation 1.0 "
        "--rounds 70 --local-steps 400 --batch-size 64 --lr 0.01 --algorithm fedprox --fedcog "
        "--start-round 50 "
        "--seed 0 --device auto --data-dir data --out runs/x --fedprox.mu 0.01 "
        "--fedcog.lambda-dis 0.1"
    )
    assert main(arguments.split()) == 2
    stderr = capsys.readouterr().err
    assert stderr.count("fedcog: ") == 1
    assert "fedcog data get cifar10 --data-dir data" in stderr
    assert not Path("runs").exists()


def test_every_setting_is_a_flag_with_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["run", "--help"])
    assert stop.value.code == 0
    stdout = capsys.readouterr().out
    for setting in settings.settings(Experiment).values():
        assert f"--{setting.flag}" in stdout
    for name, cls in ALGORITHMS.items():
        for setting in settings.settings(cls).values():
            assert f"--{name}.{setting.flag}" in stdout
    assert "--start-round" in stdout


@pytest.mark.parametrize("command", ["compare", "sweep"])
def test_compare_and_sweep_hide_flags_of_a_single_algorithm(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    lines = capsys.readouterr().out.splitlines()
    flags = {line.split()[0] for line in lines if line.startswith("  --")}
    assert {"--algorithms", "--fedprox.mu"} < flags
    assert not {"--algorithm", "--fedcog"} & flags
    assert ("--seed" in flags) == (command == "sweep")
    assert main([command, "--algorithm", "fedavg", "--algorithms", "fedavg"]) == 2
    assert f"{command} takes --algorithms" in capsys.readouterr().err


def test_every_command_of_the_parser_has_a_handler() -> None:
    (commands,) = [action for action in parser.build_parser()._actions if action.dest == "command"]
    assert {*(commands.choices or ())} == {*COMMANDS, "completion"}  # `main` handles completion


def test_flags_reach_the_experiment(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["run", *FAST, "--algorithm", "fedprox", "--fedprox.mu", "0.5"]
    arguments += ["--fedcog", "--fedcog.count", "6", "--fedcog.steps", "2", "--start-round", "1"]
    assert main([*arguments, "--no-balance", "--out", "x"]) == 0
    experiment = RunDirectory("x").experiment()
    assert experiment.algorithm == fedcog.FedCOG(
        fedcog.FedProx(mu=0.5), count=6, steps=2, start_round=1
    )
    assert experiment.rounds == 2 and not experiment.balance
    captured = capsys.readouterr()
    assert "fedprox+fedcog on digits: 4 clients (iid), 2 rounds of 2 steps" in captured.out
    assert "fedcog: count 6, steps 2" in captured.out
    # Without a terminal, progress is plain lines.
    assert "fedprox+fedcog seed 0, round 2 of 2: loss" in captured.err
    assert "left" in captured.err
    assert "report: x/report.html" in captured.out
    expected = {"experiment.toml", "rounds.jsonl", "checkpoint.safetensors", "report.html"}
    assert expected <= set(os.listdir("x"))


def test_flags_override_the_toml_file() -> None:
    Path("one.toml").write_text(
        'rounds = 9\nlr = 0.5\nalgorithm = "fedprox"\n[fedprox]\nmu = 0.25\n'
    )
    assert main(["run", *FAST, "--lr", "0.125", "one.toml", "--out", "x", "--quiet"]) == 0
    experiment = RunDirectory("x").experiment()
    assert (experiment.rounds, experiment.lr) == (2, 0.125)
    assert experiment.algorithm == fedcog.FedProx(mu=0.25)


@pytest.mark.slow
def test_toml_file_may_hold_settings_of_other_algorithms() -> None:
    Path("one.toml").write_text("[fedprox]\nmu = 0.25\n[fedcog]\ncount = 3\n")
    assert main(["run", *FAST, "one.toml", "--out", "x", "--quiet"]) == 0
    assert RunDirectory("x").experiment().algorithm == fedcog.FedAvg()
    assert main(["run", *FAST, "one.toml", "--algorithm", "fedprox", "--out", "y", "--quiet"]) == 0
    assert RunDirectory("y").experiment().algorithm == fedcog.FedProx(mu=0.25)


@pytest.mark.slow
def test_recorded_experiment_file_reproduces_the_run() -> None:
    assert main(["run", *FAST, "--out", "x", "--quiet"]) == 0
    assert main(["run", "x/experiment.toml", "--out", "y", "--quiet"]) == 0
    assert (
        Path("x/checkpoint.safetensors").read_bytes()
        == Path("y/checkpoint.safetensors").read_bytes()
    )


def test_all_configuration_errors_are_reported_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (
        "run --lr -1 --rounds many --dataset cifar10 --fedprox.mu 1 --momentum --device cuda:99"
    )
    assert main(arguments.split()) == 2
    stderr = capsys.readouterr().err
    flag_errors = [
        "rounds needs an integer >= 1, not 'many'",
        "momentum needs a number >= 0 and < 1",
        "fedprox has settings, but the algorithm is fedavg",
    ]
    for text in (
        *flag_errors,
        "lr needs a number > 0, not -1.0",
        "device 'cuda:99' cannot be used here",
        "fedcog data get cifar10",
    ):
        assert text in stderr, text
    assert "Traceback" not in stderr
    # Unknown flags are reported before setup, so without its errors.
    assert main([*arguments.split(), "--clents", "5"]) == 2
    stderr = capsys.readouterr().err
    for text in (*flag_errors, "unknown flag '--clents': did you mean --clients?"):
        assert text in stderr, text
    assert "Traceback" not in stderr


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("", "COMMAND"),
        ("fly", "invalid choice"),
        ("run nowhere.toml", "cannot read nowhere.toml"),
        ("run a.toml b.toml", "at most one TOML file"),
        ("run --resume nowhere", "there is no run in nowhere"),
        ("run --clients 400 --min-examples 10", "lower --clients or --min-examples"),
        ("run --model cnn", "too small"),
        ("run --partition natural", "needs the user of each example"),
        ("run --partition given", "name a file with --indices"),
        ("report nowhere", "there is no run in or below nowhere"),
        ("data get mnist", "invalid choice: 'mnist'"),
        ("data get cifar100 --data-dir /proc/nowhere", "cannot be written"),
        ("compare --rounds 3", "compare needs at least one algorithm"),
        ("compare --algorithms fedavg --fedcog", "compare takes --algorithms and --seeds"),
        ("compare --algorithms fedavg --seed 3", "compare takes --algorithms and --seeds"),
        ("compare --algorithms fedavg --seeds ²", "seeds needs integers"),
        ("run --algorithm fedcog+fedcog", "fedcog wraps itself"),
        ("run --algorithm +", "a name is missing before or after a +"),
        ("run --algorithm FedCOG", "did you mean fedcog?"),
        ("run --seed 99999999999999999999", "seed needs an integer"),
        ("run --lr 1e999", "lr needs a number"),
        ("run --threads 100000", "threads needs an integer"),
        ("run --device meta", "cannot be used here"),
        ("run --out file", "cannot write to file"),
        ("run --resume file", "there is no run in file"),
        ("run --data-dir ~nosuchuser --dataset cifar10", "is not here"),
        ("run --local-steps 100000000000 --rounds 1", "out of memory"),
        ("report file --target 2", "target needs a number > 0 and <= 1"),
        ("run --count 3", "did you mean --fedcog.count or --fedreg.count?"),
        ("compare --algorithms fedavg fedmagic", "unknown algorithm 'fedmagic'"),
        ("compare --algorithms fedavg --seeds one", "seeds needs integers"),
        (
            "compare --algorithms fedavg --fedprox.mu 1",
            "fedprox has settings, but the algorithm is fedavg: add fedprox",
        ),
        ("list everything", "invalid choice"),
        ("partition --figure p.pdf", "choose a name that ends in .svg, not p.pdf"),
    ],
)
def test_errors_exit_with_2_and_say_what_to_do(
    arguments: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("file").touch()
    assert main(arguments.split()) == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        "lr = 1" + 400 * "0",
        "seed = 1" + 5000 * "0",
        "dataset = [1]",
        "x = " + 3000 * "[",
        "rounds = 2026-01-01",
    ],
)
def test_malformed_toml_values_are_errors(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("odd.toml").write_text(text)
    assert main(["run", "odd.toml"]) == 2
    assert capsys.readouterr().err.startswith("fedcog: ")


@pytest.mark.slow
def test_compare_prints_a_table_and_writes_a_report(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["compare", *FAST, "--algorithms", "fedavg", "fedprox+fedcog"]
    arguments += ["--seeds", "0", "1", "--out", "c"]
    arguments += ["--fedcog.count", "6", "--fedcog.steps", "2", "--start-round", "1"]
    assert main(arguments) == 0
    stdout = capsys.readouterr().out
    assert "comparing fedavg, fedprox+fedcog over seeds 0, 1" in stdout
    assert "mean ± standard deviation over seeds" in stdout
    runs = [fedcog.read(f"c/fedavg/seed-{seed}") for seed in (0, 1)]
    mean = sum(run.last for run in runs) / 2
    assert f"{100 * mean:.2f} ±" in stdout
    assert Path("c/report.html").exists()
    assert main(arguments) == 0, "a second start finds all runs finished"
    assert main([*arguments, "--lr", "0.5"]) == 2, "one folder must not mix experiments"
    assert main(["report", "c", "--out", "page.html", "--target", "0.2"]) == 0
    assert "<html" in Path("page.html").read_text()


def test_incompatible_algorithm_is_refused_before_any_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--dataset", "digit-mosaics", "--partition", "natural", "--clients", "4"]
    arguments += ["--rounds", "1", "--out", "c"]
    assert main(["compare", *arguments, "--algorithms", "fedavg", "fedgen", "--seeds", "0"]) == 2
    assert "fedgen makes features of one label" in " ".join(capsys.readouterr().err.split())
    assert main(["run", *arguments, "--algorithm", "vhl"]) == 2
    assert not Path("c").exists()


def test_rendering_without_results_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "all", "--render", "--results", "typo"]) == 2
    assert "there are no results in typo" in capsys.readouterr().err and not Path("typo").exists()


@pytest.mark.slow
def test_report_skips_a_damaged_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["compare", *FAST, "--algorithms", "fedavg", "--seeds", "0", "1", "--out", "c"]
    assert main(arguments) == 0
    Path("c/fedavg/seed-0/rounds.jsonl").write_text("no line of ours\n")
    capsys.readouterr()
    assert main(["report", "c", "--out", "page.html", "--table", "t.md"]) == 2
    captured = capsys.readouterr()
    assert "fedcog: skipped: " in captured.err and "seed-0" in captured.err
    assert "report: page.html" in captured.out
    assert "seed-1" not in captured.err and "fedavg" in Path("t.md").read_text()
    Path("c/fedavg/seed-1/experiment.toml").write_text("[")
    assert main(["report", "c", "--out", "none.html"]) == 2
    assert not Path("none.html").exists(), "no readable run is left"


@pytest.mark.slow
def test_list_data_and_partition_commands_print_their_tables(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["list"]) == 0
    stdout = capsys.readouterr().out
    algorithms = ("fedavg", "fedprox", "fedcog", "--fedcog.lambda-dis")
    for word in (*algorithms, "cifar100", "label-skew", "cnn3"):
        assert word in stdout
    assert main(["data", "list"]) == 0
    assert "fedcog data get cifar10" in capsys.readouterr().out
    assert main(["data", "path"]) == 0
    assert capsys.readouterr().out.split() == [str(Path.home() / ".cache/fedcog")]
    assert main(["data", "path", "--data-dir", "d"]) == 0
    assert capsys.readouterr().out.split() == ["d"]
    assert main(["data", "get", "digits"]) == 0
    assert main(["partition", "--partition", "label-skew", "--figure", "p.svg"]) == 0
    stdout = capsys.readouterr().out
    assert "1442" in stdout and "figure: p.svg" in stdout
    class_names = [f"class {number}" for number in range(100)]
    output.print_partition(torch.ones(3, 100, dtype=torch.int64), class_names)
    assert "100" in capsys.readouterr().out
    assert main(["run", *FAST, "--plain", "--out", "x"]) == 0
    stdout = capsys.readouterr().out
    assert "fedavg: last" in stdout and "┃" not in stdout
    assert "<svg" in Path("p.svg").read_text()


@pytest.mark.parametrize("command", ["run", "compare", "sweep"])
@pytest.mark.parametrize("style", [[], ["--quiet"], ["--plain"]])
def test_bare_command_prints_its_help_and_runs_nothing(
    command: str, style: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, *style]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith(f"usage: fedcog {command} [FILE.toml] [flags]")
    assert "--local-steps" in captured.out and captured.err == ""
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("style", [[], ["--quiet"], ["--plain"]])
def test_bare_audit_prints_its_help(style: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", *style]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("usage: fedcog audit RUN [flags]") and captured.err == ""
    assert "An attack that fails proves no privacy" in " ".join(captured.out.split())


def test_audit_prints_tables_and_writes_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *FAST, "--out", "x", "--quiet"]) == 0
    short = ["audit", "x", "--steps", "1", "--examples", "1", "--iterations", "2", "--client", "2"]
    assert main(short) == 0
    captured = capsys.readouterr()
    assert "sum of 4" in captured.out and "audit: x/audit.html" in captured.out
    assert "1 step, 1 example, sum (2 of 4 iterations)" in captured.err
    assert "proves no privacy" in captured.err
    record = json.loads(Path("x/audit.json").read_text())
    assert record["settings"]["client"] == 2
    assert record["provenance"]["command"] == "fedcog " + " ".join(short)
    assert Path("x/audit.html").read_text().startswith("<!DOCTYPE html>")
    assert main([*short, "--plain"]) == 0
    assert "gradient inversion, 1 step, 1 example: attacked one client" in capsys.readouterr().out
    assert main([*short, "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["nowhere"], "there is no run in nowhere"),
        (["x", "--client", "9"], "client 9 is unknown: this run has clients 0 to 3."),
        (["x", "--steps", "0"], "steps needs an integer >= 1, not 0."),
        (["x", "--model", "cnn"], "--model names what is your own"),
        (["--seed", "1"], "audit needs a run directory"),
        (["x", "more"], "unexpected arguments: more"),
    ],
)
def test_audit_explains_what_is_wrong(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *FAST, "--out", "x", "--quiet"]) == 0
    assert main(["audit", *arguments]) == 2
    stderr = capsys.readouterr().err
    assert reason in stderr and len(stderr.splitlines()) == 1


def test_list_reads_sizes_that_were_measured_before(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("it measures")

    monkeypatch.setattr(catalog, "_exchange", refuse)
    assert main(["list", "algorithms", "--markdown"]) == 0
    assert capsys.readouterr().out == (REPO / "docs/algorithms.md").read_text()
    assert main(["list", "algorithms"]) == 0
    assert "control (1.00)" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        "list",
        "list settings",
        "data list --data-dir a/folder/with/a/long/name/that/fits/no/column/of/a/narrow/table",
        "partition",
        "reproduce --status --results nothing",
        "doctor",
    ],
)
def test_narrow_terminals_show_names_in_full(
    arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console.out, "width", 80)
    assert main(arguments.split()) == 0
    stdout = capsys.readouterr().out
    assert stdout and "…" not in stdout
    assert all(len(line.rstrip()) <= 80 for line in stdout.splitlines())
    if arguments.startswith("list"):
        names = settings.settings(Experiment) if "settings" in arguments else ALGORITHMS
        words = set(re.split(r"[^\w.+-]+", stdout))
        assert {*names} <= words


@pytest.mark.parametrize(("width", "num_tables"), [(200, 1), (80, 2), (60, 3), (30, 0)])
def test_results_are_divided_into_tables_on_narrow_terminals(
    width: int,
    num_tables: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    experiment = Experiment(
        FedRep(), rounds=1, clients=4, partition="iid", local_steps=1, local_test=0.2, threads=1
    )
    options: dict[str, Any] = {"seeds": [0, 1], "progress": False}
    runs = fedcog.compare([experiment], out="runs", **options)
    runs += fedcog.compare([replace(experiment, algorithm=FedProx())], out="more", **options)
    monkeypatch.setattr(console.out, "width", width)
    output.print_results(runs, "auto")
    stdout = capsys.readouterr().out
    assert stdout.count("┏") == num_tables and "…" not in stdout
    if not num_tables:
        assert "\nfedrep: last " in stdout
        return
    assert all(len(line.rstrip()) <= width for line in stdout.splitlines())
    lines = [line.split() for line in stdout.splitlines()]
    assert sum("fedrep" in line for line in lines) == num_tables
    for score in ("accuracy", "worst"):
        values = [run.last for run in runs[:2]]
        if score == "worst":
            values = [run.local_test("accuracy_worst")[-1][1] for run in runs[:2]]
        assert any(f"{50 * sum(values):.2f}" in line for line in lines if "fedrep" in line)


def test_tuned_methods_are_named_in_full_on_narrow_terminals(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    point = {"lr": 0.01, "fedprox.mu": 0.1, "fedcog.lambda_dis": 0.1}
    experiment = Experiment(FedCOG(FedProx()), validation=0.2)
    trials = [Trial(1, point, experiment, 0.5, 3, False)]
    space = search_space.read_space(
        {"lr": [0.001, 0.01, 0.1], "fedprox": {"mu": [0.1]}, "fedcog": {"lambda_dis": [0.1, 1]}}
    )
    tuned = Tuned(experiment, space, trials, trials[0], [])
    plan = SweepPlan((experiment,), space, trials=1, seeds=(0,))
    for width in (80, 160):
        monkeypatch.setattr(console.out, "width", width)
        output.print_tuned(plan, [tuned], "auto")
        stdout = capsys.readouterr().out
        assert "fedprox+fedcog" in stdout and "fedcog.lambda_dis 0.1" in stdout
        assert "…" not in stdout and ("┃" in stdout) == (width == 160)
        assert tuned.edges[0] in stdout, "the chosen lambda_dis is the smallest"


def test_inactive_fedcog_prints_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *FAST, "--fedcog", "--out", "x"]) == 0
    assert "it stays inactive (--start-round)" in capsys.readouterr().err


@pytest.mark.slow
def test_quiet_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *FAST, "--quiet", "--out", "x"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err == ""


@pytest.mark.processes
def test_ctrl_c_finishes_the_round_and_prints_the_resume_command() -> None:
    command = [sys.executable, "-m", "fedcog", "run", "--out", "x", "--rounds", "500"]
    command += ["--local-steps", "2", "--batch-size", "8", "--threads", "1"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    rounds = Path("x/rounds.jsonl")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if rounds.exists() and rounds.read_text().count("\n") >= 2:
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    try:
        stderr = process.communicate(timeout=60)[1]
    finally:
        process.kill()
    assert process.returncode == 130
    assert "stopping after this round" in stderr
    assert "fedcog run --resume x" in stderr
    checkpoint = RunDirectory("x").load()
    assert checkpoint is not None
    lines = [json.loads(line) for line in rounds.read_text().splitlines()]
    assert lines[-1]["round"] == len(lines) == checkpoint.round
    assert f"stopped after round {len(lines)} of 500" in stderr
    assert main(["run", "--resume", "x", "--rounds", str(len(lines) + 1), "--quiet"]) == 0
    assert len(RunDirectory("x").lines()) == len(lines) + 1


@pytest.mark.slow
def test_resume_keeps_the_settings_and_refuses_changed_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["run", *FAST, "--out", "x", "--quiet"]) == 0
    assert main(["run", "--resume", "x", "--lr", "0.9"]) == 2
    assert "belongs to another experiment, which differs in lr" in capsys.readouterr().err
    assert main(["run", *FAST, "--out", "x"]) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert main(["run", "--resume", "x"]) == 0
    assert main(["report", "x", "elsewhere"]) == 2
    # A folder without runs is an error, even next to one with runs.
    assert "there is no run in or below elsewhere." in capsys.readouterr().err


@pytest.mark.slow
def test_remaining_time_counts_repeated_rounds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *FAST, "--out", "x", "--quiet"]) == 0
    (Path("x") / "checkpoint.safetensors").unlink()
    capsys.readouterr()
    assert main(["run", "--resume", "x", "--plain"]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "s left" in line]
    assert lines
    assert not any("-" in line.rpartition("; ")[2] for line in lines), "no negative time"
    assert lines[-1].endswith("; 0 s left)")


def test_other_runtime_errors_are_not_reported_as_out_of_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("The size of tensor a (3) must match the size of tensor b (4)")

    monkeypatch.setattr(output, "print_catalog", fail)
    with pytest.raises(RuntimeError, match="must match"):
        main(["list"])


@pytest.mark.processes
def test_closed_pipe_ends_command_without_traceback() -> None:
    python = shlex.quote(sys.executable)
    command = f"{python} -m fedcog list | head -1; exit ${{PIPESTATUS[0]}}"
    process = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert process.returncode == 0
    assert "Traceback" not in process.stderr and "BrokenPipe" not in process.stderr


def test_only_warnings_of_fedcog_are_printed_as_notes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with (
        warnings.catch_warnings(record=True, action="always") as recorded,
        console.warnings_as_notes(),
    ):
        warnings.warn_explicit("look here", UserWarning, console.__file__, 7)
        warnings.warn_explicit("of a library", UserWarning, pytest.__file__, 7)
        warnings.warn_explicit("old", DeprecationWarning, console.__file__, 7)
    assert capsys.readouterr().err == "fedcog: look here\n"
    assert [str(warning.message) for warning in recorded] == ["of a library", "old"]


def test_stored_schema_is_up_to_date() -> None:
    file = Path(schema.__file__).with_name(schema.FILE)
    assert file.read_text() == schema.schema_text(), "regenerate it: python -m fedcog.cli.schema"


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ("--version", 0, f"fedcog {fedcog.__version__}"),
        ("--help", 0, "COMMAND"),
        ("run --help", 0, "--fedcog.lambda-dis"),
        ("completion bash", 0, "complete -o default -F _fedcog fedcog"),
        ("run --clents 5", 2, "unknown flag '--clents': did you mean --clients?"),
        ("fly", 2, "invalid choice"),
    ],
)
def test_light_commands_do_not_import_torch(arguments: str, code: int, text: str) -> None:
    """Importing torch takes seconds; help, version and flag errors must be immediate."""
    program = (
        "import sys\n"
        "from fedcog.cli.main import main\n"
        "try:\n"
        "    code = main()\n"
        "except SystemExit as stop:\n"
        "    code = stop.code\n"
        "assert 'torch' not in sys.modules, 'torch was loaded'\n"
        "sys.exit(code)\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", program, *arguments.split()],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert process.returncode == code, process.stderr
    assert text in process.stdout + process.stderr
