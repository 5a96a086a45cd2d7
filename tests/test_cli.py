"""The command line, as a person types it."""

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch

import fedcog
from fedcog import cli, console, grammar, settings
from fedcog.algorithms import ALGORITHMS
from fedcog.cli import COMMANDS, main
from fedcog.experiments.config import Experiment
from fedcog.experiments.record import RunDirectory

FAST = [*"--rounds 2 --local-steps 2 --batch-size 8 --clients 4 --partition iid --threads 1".split()]  # noqa: SIM905


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("FEDCOG_DATA", raising=False)


def test_the_whole_command_of_a_researcher_is_understood(capsys: pytest.CaptureFixture[str]) -> None:
    """Every flag of the documented command; only the data are not there, and the message says how to get them."""
    words = (
        "run --dataset cifar10 --model cnn --partition dirichlet --beta 0.1 --clients 10 --participation 1.0 "
        "--rounds 70 --local-steps 400 --batch-size 64 --lr 0.01 --algorithm fedprox --fedcog --start-round 50 "
        "--seed 0 --device auto --data-dir data --out runs/x --fedprox.mu 0.01 --fedcog.lambda-dis 0.1"
    )
    assert main(words.split()) == 2
    said = capsys.readouterr().err
    assert said.count("fedcog: ") == 1
    assert "fedcog data get cifar10 --data-dir data" in said
    assert not Path("runs").exists()


def test_every_setting_is_a_flag_with_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["run", "--help"])
    assert stop.value.code == 0
    said = capsys.readouterr().out
    for setting in settings.settings(Experiment).values():
        assert f"--{setting.flag}" in said
    for name, cls in ALGORITHMS.items():
        for setting in settings.settings(cls).values():
            assert f"--{name}.{setting.flag}" in said
    assert "--start-round" in said


@pytest.mark.parametrize("command", ["compare", "sweep"])
def test_several_algorithms_are_not_told_of_flags_for_one(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    said = {line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  --")}
    assert {"--algorithms", "--fedprox.mu"} < said and not {"--algorithm", "--fedcog"} & said
    assert ("--seed" in said) == (command == "sweep")
    assert main([command, "--algorithm", "fedavg", "--algorithms", "fedavg"]) == 2
    assert f"{command} takes --algorithms" in capsys.readouterr().err


def test_every_command_of_the_grammar_is_carried_out() -> None:
    (commands,) = [action for action in grammar.parser()._actions if action.dest == "command"]
    assert list(commands.choices or ()) == list(COMMANDS)


def test_flags_reach_the_experiment(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", *FAST, "--algorithm", "fedprox", "--fedprox.mu", "0.5", "--fedcog", "--fedcog.count", "6"]
    assert main([*words, "--fedcog.steps", "2", "--start-round", "1", "--no-balance", "--out", "x"]) == 0
    experiment = RunDirectory("x").experiment()
    assert experiment.algorithm == fedcog.FedCOG(fedcog.FedProx(mu=0.5), count=6, steps=2, start_round=1)
    assert experiment.rounds == 2 and not experiment.balance
    said = capsys.readouterr()
    assert "fedprox+fedcog on digits: 4 clients (iid), 2 rounds of 2 steps" in said.out
    assert "fedcog: count 6, steps 2" in said.out
    assert "fedprox+fedcog seed 0, round 2 of 2: loss" in said.err and "left" in said.err  # no terminal: plain lines
    assert "report: x/report.html" in said.out
    assert {"experiment.toml", "rounds.jsonl", "checkpoint.safetensors", "report.html"} <= set(os.listdir("x"))


def test_a_file_and_flags_and_flags_win() -> None:
    Path("one.toml").write_text('rounds = 9\nlr = 0.5\nalgorithm = "fedprox"\n[fedprox]\nmu = 0.25\n')
    assert main(["run", *FAST, "--lr", "0.125", "one.toml", "--out", "x", "--quiet"]) == 0
    experiment = RunDirectory("x").experiment()
    assert (experiment.rounds, experiment.lr) == (2, 0.125)
    assert experiment.algorithm == fedcog.FedProx(mu=0.25)


def test_a_file_may_hold_the_settings_of_other_algorithms() -> None:
    Path("one.toml").write_text("[fedprox]\nmu = 0.25\n[fedcog]\ncount = 3\n")
    assert main(["run", *FAST, "one.toml", "--out", "x", "--quiet"]) == 0
    assert RunDirectory("x").experiment().algorithm == fedcog.FedAvg()
    assert main(["run", *FAST, "one.toml", "--algorithm", "fedprox", "--out", "y", "--quiet"]) == 0
    assert RunDirectory("y").experiment().algorithm == fedcog.FedProx(mu=0.25)


def test_a_runs_own_file_runs_again_to_the_same_result() -> None:
    assert main(["run", *FAST, "--out", "x", "--quiet"]) == 0
    assert main(["run", "x/experiment.toml", "--out", "y", "--quiet"]) == 0
    assert Path("x/checkpoint.safetensors").read_bytes() == Path("y/checkpoint.safetensors").read_bytes()


def test_all_faults_at_once_and_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    words = "run --clents 5 --lr -1 --rounds many --dataset cifar10 --fedprox.mu 1 --momentum --device cuda:99"
    assert main(words.split()) == 2
    said = capsys.readouterr().err
    for text in (
        "unknown flag '--clents': did you mean --clients?",
        "lr needs a number > 0, not -1.0",
        "rounds needs a whole number >= 1, not 'many'",
        "momentum needs a number >= 0 and < 1",
        "fedprox has settings, but the algorithm is fedavg",
        "device 'cuda:99' cannot be used here",
        "fedcog data get cifar10",
    ):
        assert text in said, text
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("", "COMMAND"),
        ("fly", "invalid choice"),
        ("run nowhere.toml", "cannot read nowhere.toml"),
        ("run a.toml b.toml", "one TOML file at most"),
        ("run --resume nowhere", "there is no run in nowhere"),
        ("run --clients 400 --min-examples 10", "lower --clients or --min-examples"),
        ("run --model cnn", "too small"),
        ("run --partition natural", "needs to know whose"),
        ("run --partition given", "is for your own data"),
        ("report nowhere", "there is no run in or below nowhere"),
        ("data get mnist", "invalid choice: 'mnist'"),
        ("data get cifar100 --data-dir /proc/nowhere", "cannot be written"),
        ("compare", "compare needs at least one algorithm"),
        ("compare --algorithms fedavg --fedcog", "compare takes --algorithms and --seeds"),
        ("compare --algorithms fedavg --seed 3", "compare takes --algorithms and --seeds"),
        ("compare --algorithms fedavg --seeds ²", "seeds needs whole numbers"),
        ("run --algorithm fedcog+fedcog", "goes around itself"),
        ("run --algorithm +", "unknown algorithm"),
        ("run --algorithm FedCOG", "did you mean fedcog?"),
        ("run --seed 99999999999999999999", "seed needs a whole number"),
        ("run --lr 1e999", "lr needs a number"),
        ("run --threads 100000", "threads needs a whole number"),
        ("run --device meta", "cannot be used here"),
        ("run --out file", "cannot write to file"),
        ("run --resume file", "there is no run in file"),
        ("run --data-dir ~nosuchuser --dataset cifar10", "is not here"),
        ("run --local-steps 100000000000 --rounds 1", "out of memory"),
        ("report file --target 2", "target needs a share"),
        ("run --count 3", "did you mean --fedcog.count or --fedreg.count?"),
        ("compare --algorithms fedavg fedmagic", "unknown algorithm 'fedmagic'"),
        ("compare --algorithms fedavg --seeds one", "seeds needs whole numbers"),
        (
            "compare --algorithms fedavg --fedprox.mu 1",
            "fedprox has settings, but the algorithm is fedavg: add fedprox",
        ),
        ("list everything", "invalid choice"),
    ],
)
def test_faults_end_with_2_and_say_what_to_do(words: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").touch()
    assert main(words.split()) == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["lr = 1" + 400 * "0", "seed = 1" + 5000 * "0", "dataset = [1]", "x = " + 3000 * "[", "rounds = 2026-01-01"]
)
def test_odd_files_are_faults(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("odd.toml").write_text(text)
    assert main(["run", "odd.toml"]) == 2
    assert capsys.readouterr().err.startswith("fedcog: ")


def test_compare_prints_a_table_and_makes_a_report(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compare", *FAST, "--algorithms", "fedavg", "fedprox+fedcog", "--seeds", "0", "1", "--out", "c"]
    words += ["--fedcog.count", "6", "--fedcog.steps", "2", "--start-round", "1"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "comparing fedavg, fedprox+fedcog over seeds 0, 1" in said
    assert "mean ± standard deviation over seeds" in said
    runs = [fedcog.read(f"c/fedavg/seed-{seed}") for seed in (0, 1)]
    mean = sum(run.last for run in runs) / 2
    assert f"{100 * mean:.2f} ±" in said
    assert Path("c/report.html").exists()
    assert main(words) == 0, "started twice it finds everything done"
    assert main([*words, "--lr", "0.5"]) == 2, "and does not mix experiments"
    assert main(["report", "c", "--out", "page.html", "--target", "0.2"]) == 0
    assert "<html" in Path("page.html").read_text()


def test_what_cannot_be_compared_is_said_before_anything_runs(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--dataset", "digit-mosaics", "--partition", "natural", "--clients", "4", "--rounds", "1", "--out", "c"]
    assert main(["compare", *words, "--algorithms", "fedavg", "fedgen", "--seeds", "0"]) == 2
    assert "fedgen makes features of one label" in " ".join(capsys.readouterr().err.split())
    assert main(["run", *words, "--algorithm", "vhl"]) == 2
    assert not Path("c").exists()


def test_tables_of_no_results_are_not_made(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "all", "--render", "--results", "typo"]) == 2
    assert "there are no results in typo" in capsys.readouterr().err and not Path("typo").exists()


def test_a_damaged_run_does_not_keep_the_others_from_a_report(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compare", *FAST, "--algorithms", "fedavg", "--seeds", "0", "1", "--out", "c"]
    assert main(words) == 0
    Path("c/fedavg/seed-0/rounds.jsonl").write_text("no line of ours\n")
    capsys.readouterr()
    assert main(["report", "c", "--out", "page.html", "--table", "t.md"]) == 2
    said = capsys.readouterr()
    assert "fedcog: left out: " in said.err and "seed-0" in said.err and "report: page.html" in said.out
    assert "seed-1" not in said.err and "fedavg" in Path("t.md").read_text()
    Path("c/fedavg/seed-1/experiment.toml").write_text("[")
    assert main(["report", "c", "--out", "none.html"]) == 2
    assert not Path("none.html").exists(), "there is nothing to show"


def test_list_and_data_and_partition(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    said = capsys.readouterr().out
    for word in ("fedavg", "fedprox", "fedcog", "--fedcog.lambda-dis", "cifar100", "label-skew", "cnn3"):
        assert word in said
    assert main(["data", "list"]) == 0
    assert "fedcog data get cifar10" in capsys.readouterr().out
    assert main(["data", "path"]) == 0
    assert capsys.readouterr().out.split() == [str(Path.home() / ".cache/fedcog")]
    assert main(["data", "path", "--data-dir", "d"]) == 0
    assert capsys.readouterr().out.split() == ["d"]
    assert main(["data", "get", "digits"]) == 0
    assert main(["partition", "--partition", "label-skew", "--figure", "p.svg"]) == 0
    said = capsys.readouterr().out
    assert "1442" in said and "figure: p.svg" in said
    console.partition(torch.ones(3, 100, dtype=torch.int64), [f"class {number}" for number in range(100)])
    assert "100" in capsys.readouterr().out
    assert main(["run", *FAST, "--plain", "--out", "x"]) == 0
    said = capsys.readouterr().out
    assert "fedavg: last" in said and "┃" not in said
    assert "<svg" in Path("p.svg").read_text()


def test_a_dormant_fedcog_is_pointed_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *FAST, "--fedcog", "--out", "x"]) == 0
    assert "it stays dormant (--start-round)" in capsys.readouterr().err


def test_quiet_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *FAST, "--quiet", "--out", "x"]) == 0
    said = capsys.readouterr()
    assert said.out == "" and said.err == ""


def test_ctrl_c_finishes_the_round_and_says_how_to_go_on() -> None:
    words = [sys.executable, "-m", "fedcog", "run", "--out", "x", "--rounds", "500", "--local-steps", "2"]
    process = subprocess.Popen([*words, "--batch-size", "8", "--threads", "1"], stderr=subprocess.PIPE, text=True)
    rounds = Path("x/rounds.jsonl")
    deadline = time.monotonic() + 60
    while not (rounds.exists() and rounds.read_text().count("\n") >= 2) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    try:
        said = process.communicate(timeout=60)[1]
    finally:
        process.kill()
    assert process.returncode == 130
    assert "finishing this round" in said
    assert "fedcog run --resume x" in said
    checkpoint = RunDirectory("x").load()
    assert checkpoint is not None
    lines = [json.loads(line) for line in rounds.read_text().splitlines()]
    assert lines[-1]["round"] == len(lines) == checkpoint.round
    assert f"stopped after round {len(lines)} of 500" in said
    assert main(["run", "--resume", "x", "--rounds", str(len(lines) + 1), "--quiet"]) == 0
    assert len(RunDirectory("x").lines()) == len(lines) + 1


def test_resume_keeps_the_settings_and_refuses_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *FAST, "--out", "x", "--quiet"]) == 0
    assert main(["run", "--resume", "x", "--lr", "0.9"]) == 2
    assert "belongs to another experiment, which differs in lr" in capsys.readouterr().err
    assert main(["run", *FAST, "--out", "x"]) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert main(["run", "--resume", "x"]) == 0
    assert main(["report", "x", "elsewhere"]) == 2
    assert "there is no run in or below elsewhere." in capsys.readouterr().err  # not left out in silence


def test_what_is_run_again_counts_as_not_done(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *FAST, "--out", "x", "--quiet"]) == 0
    (Path("x") / "checkpoint.safetensors").unlink()
    capsys.readouterr()
    assert main(["run", "--resume", "x", "--plain"]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "s left" in line]
    assert lines and not any("-" in line.rpartition("; ")[2] for line in lines) and lines[-1].endswith("; 0 s left)")


def test_only_a_lack_of_memory_is_called_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def stumble(*anything: object) -> None:
        raise RuntimeError("The size of tensor a (3) must match the size of tensor b (4)")

    monkeypatch.setattr(console, "catalogue", stumble)
    with pytest.raises(RuntimeError, match="must match"):
        main(["list"])


def test_a_reader_that_had_enough() -> None:
    command = f"{sys.executable} -m fedcog list | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr


def test_our_warnings_are_sentences_and_others_are_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings(record=True, action="always") as others, console.heard():
        warnings.warn_explicit("look here", UserWarning, cli.__file__, 7)
        warnings.warn_explicit("of a library", UserWarning, pytest.__file__, 7)
        warnings.warn_explicit("old", DeprecationWarning, cli.__file__, 7)
    assert capsys.readouterr().err == "fedcog: look here\n"
    assert [str(one.message) for one in others] == ["of a library", "old"]
