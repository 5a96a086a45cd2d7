"""Sweeps: as many trials for every method, no look at the test set, and the same again after a
kill.
"""

import dataclasses
import json
import linecache
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import fedcog
from fedcog import (
    ConfigError,
    Dataset,
    Experiment,
    FedAvg,
    FedProx,
    RecordError,
    Tuned,
    from_arrays,
)
from fedcog.cli.main import main
from fedcog.core.errors import Interrupted
from fedcog.data import registry
from fedcog.studies import job_planning
from fedcog.studies.result_store import Results
from fedcog.studies.tuning import sweep_tables
from fedcog.studies.tuning.sweep import Sweep, plan_sweep
from tests.support.paths import REPO

SMALL = {"rounds": 3, "local_steps": 8, "clients": 3, "batch_size": 16, "beta": 1.0, "model": "mlp"}
SMALL |= {"threads": 1, "workers": 1, "mapping": "loop"}
METHODS = [Experiment(algorithm=one, **SMALL) for one in (FedAvg(), FedProx())]  # type: ignore[arg-type]
SPACE = {"lr": {"low": 0.001, "high": 0.5, "log": True}, "fedprox": {"mu": [0.001, 0.1]}}
HOW = {"trials": 3, "seeds": [0, 1], "trial_seeds": [7]}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Tuned]]:
    out = tmp_path_factory.mktemp("sweep")
    return out, fedcog.sweep(METHODS, SPACE, out, **HOW)  # type: ignore[arg-type]


def results_in(out: Path) -> dict[str, list[int]]:
    """The seeds that every file of results tells of, line by line."""
    files = [
        file for file in sorted(out.rglob("*.jsonl")) if "runs" not in file.relative_to(out).parts
    ]
    return {
        file.name: [json.loads(line)["seed"] for line in file.read_bytes().splitlines()[1:]]
        for file in files
    }


def test_every_method_gets_the_same_number_of_different_trials(
    done: tuple[Path, list[Tuned]],
) -> None:
    out, found = done
    assert [one.name for one in found] == ["fedavg", "fedprox"]
    for one in found:
        assert [trial.number for trial in one.trials] == [1, 2, 3]
        assert len({trial.experiment for trial in one.trials}) == 3
        assert all(trial.rounds == 3 and not trial.diverged for trial in one.trials)
        assert [run.experiment.seed for run in one.runs] == [0, 1]
    assert sorted(len(seeds) for seeds in results_in(out).values()) == [1] * 6 + [2] * 2


def test_the_choice_is_that_of_a_plain_loop(done: tuple[Path, list[Tuned]], tmp_path: Path) -> None:
    _, (_, prox) = done
    values = {}
    for trial in prox.trials:
        algorithm = FedProx(mu=trial.point["fedprox.mu"])
        one = dataclasses.replace(
            METHODS[1],
            algorithm=algorithm,
            lr=trial.point["lr"],
            validation=0.2,
            seed=7,
            evaluate_local=False,
        )
        run = fedcog.run(one, tmp_path / str(trial.number), report=False)
        values[trial.number] = run.lines[-1]["validation_accuracy"]
        assert values[trial.number] == pytest.approx(trial.score, abs=1e-6)
    assert prox.chosen.number == max(values, key=values.__getitem__)
    assert len(set(values.values())) == 3
    final = dataclasses.replace(
        METHODS[1],
        algorithm=FedProx(mu=prox.chosen.point["fedprox.mu"]),
        lr=prox.chosen.point["lr"],
        seed=1,
    )
    assert fedcog.run(final, tmp_path / "final", report=False).last == prox.runs[1].last
    assert prox.runs[1].experiment.validation == 0 and len(prox.runs[1].lines) == 3


def digits(shifted: int) -> Dataset:
    """The digits, with test labels that are off by so much: at 1, the better a model the worse it
    looks.
    """
    data = registry.load("digits")
    wrong = (data.test_y + shifted) % 10
    return from_arrays(data.train_x, data.train_y, data.test_x, wrong, classes=data.classes)


def test_the_test_set_has_no_say_in_what_is_chosen(tmp_path: Path) -> None:
    offered = {"lr": [0.0001, 0.2, 0.05]}
    how = {"search": "grid", "trials": 3, "seeds": [0], "trial_seeds": [7]}
    method = [dataclasses.replace(METHODS[0], rounds=4, local_steps=30)]
    ((honest,), (spoilt,)) = (
        fedcog.sweep(method, offered, tmp_path / str(off), data=digits(off), **how)
        for off in (0, 1)
    )
    assert [(trial.point, trial.score) for trial in honest.trials] == [
        (trial.point, trial.score) for trial in spoilt.trials
    ]
    assert honest.chosen.point == spoilt.chosen.point
    assert (
        honest.runs[0].last > 0.6 and spoilt.runs[0].last < 0.1
    )  # the test set is looked at in the end
    by_test = {}  # what would have been chosen, had anybody looked
    for trial in spoilt.trials:
        open_eyed = dataclasses.replace(trial.experiment, evaluate_test=True, seed=7)
        by_test[trial.number] = fedcog.run(
            open_eyed, tmp_path / f"look-{trial.number}", data=digits(1), report=False
        ).last
    assert max(by_test, key=by_test.__getitem__) != spoilt.chosen.number
    for file in (tmp_path / "1" / "runs").rglob("rounds.jsonl"):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        trial_run = "evaluate_test = false" in (file.parent / "experiment.toml").read_text()
        assert all(("accuracy" in line) != trial_run for line in lines)
        assert all(("validation_accuracy" in line) == trial_run for line in lines)
    with pytest.raises(
        RecordError,
        match="holds another sweep \\(it differs in data, networks or algorithms of your own\\)",
    ):
        fedcog.sweep(method, offered, tmp_path / "1", data=digits(0), **how)  # type: ignore[arg-type]


def test_stopped_and_gone_on_with_it_ends_the_same(
    done: tuple[Path, list[Tuned]], tmp_path: Path
) -> None:
    whole, found = done
    rounds: list[int] = []
    for after in (2, 8, 19):  # in a trial, between trials, in what was chosen
        with pytest.raises(Interrupted):
            fedcog.sweep(
                METHODS,
                SPACE,
                tmp_path,
                callbacks=lambda experiment, line: rounds.append(line["round"]),
                should_stop=lambda after=after: len(rounds) >= after,
                **HOW,  # type: ignore[arg-type]
            )
        left = Sweep(plan_sweep(METHODS, SPACE, **HOW), tmp_path).rounds_left()
        assert left == 30 - len(rounds)
    again = fedcog.sweep(
        METHODS,
        SPACE,
        tmp_path,
        callbacks=lambda experiment, line: rounds.append(line["round"]),
        **HOW,  # type: ignore[arg-type]
    )
    assert len(rounds) == 2 * (3 + 2) * 3  # nothing lost, and nothing done twice
    assert [one.trials for one in again] == [one.trials for one in found]
    assert [[run.last for run in one.runs] for one in again] == [
        [run.last for run in one.runs] for one in found
    ]
    assert (tmp_path / "sweep.md").read_text() == (whole / "sweep.md").read_text()
    assert results_in(tmp_path) == results_in(whole)
    more = fedcog.sweep(METHODS, SPACE, tmp_path, **(HOW | {"seeds": [0, 1, 2]}))  # type: ignore[arg-type]
    assert [len(one.runs) for one in more] == [3, 3] and [one.chosen for one in more] == [
        one.chosen for one in again
    ]


FLAGS = [
    *(f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()),
    "--search=optuna",
    "--trials=4",
]
FLAGS += ["--algorithms", "fedavg", "fedprox", "--seeds", "0", "--plain"]


def test_killed_at_any_time_a_sweep_of_optunas_goes_on_as_if_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("optuna")
    file = tmp_path / "space.toml"
    file.write_text(
        "lr = {low = 0.001, high = 0.5, log = true}\n[fedprox]\nmu = [0.001, 0.01, 0.1]\n"
    )
    words = ["sweep", *FLAGS, "--space", str(file)]
    assert main([*words, "--out", str(tmp_path / "whole")]) == 0
    said = capsys.readouterr()
    assert (
        "algorithm fedprox; chosen lr " in said.out
        and "Every method got 4 trials, chosen by Optuna's TPE" in said.out
    )
    trials = set(
        re.findall(r"fedcog: fedprox lr (\S+) fedprox\.mu (\S+) seed 100, round 1 ", said.err)
    )
    assert len(trials) == 4, "a line tells which trial it is of"
    page = (tmp_path / "whole" / "report.html").read_bytes()
    assert (
        main(["report", str(tmp_path / "whole")]) == 0
        and "whole/runs.html" in capsys.readouterr().out
    )
    assert (tmp_path / "whole" / "report.html").read_bytes() == page, "a sweep's own report stays"
    out = tmp_path / "killed"
    process = subprocess.Popen(
        [sys.executable, "-m", "fedcog", *words, "--out", str(out)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": str(REPO)},
    )
    try:
        end = time.monotonic() + 60
        while len(results_in(out)) < 5 and process.poll() is None and time.monotonic() < end:
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(30)
    assert 5 <= len(results_in(out)) < 10  # it was at it
    assert main([*words, "--out", str(out)]) == 0
    assert (out / "sweep.md").read_text() == (tmp_path / "whole" / "sweep.md").read_text()
    assert results_in(out) == results_in(tmp_path / "whole")


def test_what_diverges_counts_as_used_and_as_worst(tmp_path: Path) -> None:
    (one,) = fedcog.sweep(
        METHODS[:1], {"lr": [1e15, 0.1]}, tmp_path, search="grid", trials=2, seeds=[0]
    )
    assert [(trial.diverged, trial.score > 0) for trial in one.trials] == [
        (True, False),
        (False, True),
    ]
    assert one.chosen.number == 2
    words = sweep_tables.markdown(
        plan_sweep(METHODS[:1], {"lr": [1e15, 0.1]}, search="grid", trials=2, seeds=[0]), [one]
    )
    assert (
        "1 of its 2 trials diverged; a diverged trial counts against" in words
        and "| 1 | 1e+15 | diverged |" in words
    )


def test_trials_of_several_seeds_are_judged_by_their_mean_and_train_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = {"search": "grid", "trials": 2, "trial_seeds": [7, 8], "seeds": [0, 1]}
    alone = tmp_path / "alone"
    together = tmp_path / "together"
    methods = [dataclasses.replace(METHODS[0], mapping="vmap", local_steps=4)]
    (one,) = fedcog.sweep(methods, {"lr": [0.1, 0.2]}, alone, **how)  # type: ignore[arg-type]
    seeds = [results["validation_accuracy"][-1] for results in _of(alone, one)]
    assert one.trials[0].score == pytest.approx(sum(seeds) / 2) and seeds[0] != seeds[1]
    monkeypatch.setattr(job_planning, "stacks_seeds", lambda experiment: True)
    what = plan_sweep(methods, {"lr": [0.1, 0.2]}, **how)  # type: ignore[arg-type]
    running = Sweep(what, together)
    (stack,) = job_planning.stack_jobs(running.jobs(running.available_trials()))
    assert {(job.seed, job.experiment.lr) for job in stack} == {
        (7, 0.1),
        (7, 0.2),
        (8, 0.1),
        (8, 0.2),
    }
    (other,) = fedcog.sweep(methods, {"lr": [0.1, 0.2]}, together, **how)  # type: ignore[arg-type]
    for mine, theirs in zip(one.trials, other.trials, strict=True):
        assert mine.score == pytest.approx(theirs.score, abs=0.01)


def _of(out: Path, one: Tuned) -> list[dict[str, list[float]]]:
    """What the results tell of the first trial, seed by seed."""
    what = plan_sweep(
        [one.experiment], {"lr": [0.1, 0.2]}, search="grid", trials=2, trial_seeds=[7, 8]
    )
    running = Sweep(what, out)
    results = Results(out)
    jobs = running.jobs(running.available_trials()[:1])
    return [results.by_seed(job)[job.seed] for job in jobs]


def test_a_report_shows_the_budget_and_every_trial(done: tuple[Path, list[Tuned]]) -> None:
    out, found = done
    page = (out / "report.html").read_text()
    table = (out / "sweep.md").read_text()
    for one in found:
        for trial in one.trials:
            assert f"{100 * trial.score:.2f}" in page and f"{100 * trial.score:.2f}" in table
            assert f">{trial.point['lr']:g}<" in page and f"| {trial.point['lr']:g} |" in table
        assert (
            f"Trials of {one.name}" in page
            and one.group.last.percent() in page
            and one.group.last.percent() in table
        )
    assert (
        page.count('<td class="number">chosen</td>') == 2
        and "Every method got 3 trials, chosen by random search" in page
    )
    assert "looks at the test set" in page and (out / "chosen.html").exists()


def test_another_sweep_in_the_same_folder_is_refused(done: tuple[Path, list[Tuned]]) -> None:
    for change in ({"trials": 4}, {"seed": 1}, {"trial_seeds": [8]}):
        with pytest.raises(
            RecordError, match=f"holds another sweep \\(it differs in {next(iter(change))}"
        ):
            fedcog.sweep(METHODS, SPACE, done[0], **(HOW | change))  # type: ignore[arg-type]
    with pytest.raises(RecordError, match="differs in space"):
        fedcog.sweep(METHODS, {"lr": [0.1, 0.2, 0.3]}, done[0], **HOW)  # type: ignore[arg-type]


def test_other_code_of_an_algorithm_of_ones_own_is_another_sweep(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its trials would be those of the old code, and seeds that are added of the new."""
    monkeypatch.chdir(tmp_path)
    Path("space.toml").write_text("lr = [0.1, 0.2]\n")
    what = "--algorithms mine.py:Mine --space space.toml --trials 2 --seeds 0 --out out --quiet"
    small = "--dataset digits --clients 3 --rounds 1 --local-steps 1 --threads 1"
    code = "import fedcog\n\n\nclass Mine(fedcog.Algorithm):\n    strength = {}\n"
    for factor, wanted in ((1.0, 0), (1.0, 0), (2.0, 2)):
        Path("mine.py").write_text(code.format(factor))
        for name in [name for name in sys.modules if name.startswith("fedcog_own_")]:
            monkeypatch.delitem(sys.modules, name)  # as in another process
        linecache.clearcache()
        assert main(["sweep", *what.split(), *small.split()]) == wanted
    assert "differs in data, networks or algorithms of your own" in capsys.readouterr().err


def test_the_command_tells_all_faults_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", "--algorithms", "fedavgg", "--validation", "0", "--seeds", "x"]) == 2
    said = capsys.readouterr().err
    for words in (
        "unknown algorithm 'fedavgg'",
        "--validation above 0",
        "--space FILE.toml",
        "not 'x'",
    ):
        assert words in said
    file = tmp_path / "space.toml"
    file.write_text("lr = [0.1, 0.2]\n")
    words = [
        "sweep",
        "--algorithms",
        "fedavg",
        "--space",
        str(file),
        "--out",
        str(tmp_path / "out"),
    ]
    assert main([*words, "--trials", "3"]) == 2 and "fewer than 3 trials" in capsys.readouterr().err
    assert (
        main([*words, "--trials", "0"]) == 2
        and "trials needs an integer from 1" in capsys.readouterr().err
    )
    assert main([*words, "--trials", "2", "--algorithm", "fedprox"]) == 2
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"search": "bayes"}, "unknown search 'bayes': choose one of grid, random, optuna"),
        ({"seeds": [0, -1]}, "seeds needs an integer >= 0, not -1"),
        ({"seeds": [0.5]}, "seeds needs an integer >= 0, not 0.5"),
        ({"trial_seeds": ["a"]}, "trial_seeds needs an integer >= 0, not 'a'"),
        ({"seed": 2**70}, "seed needs an integer >= 0, and a smaller one"),
    ],
)
def test_what_would_fail_after_all_trials_is_told_before_them(
    how: dict[str, object], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        plan_sweep(METHODS, {"lr": [0.1, 0.2]}, **({"trials": 2} | how))


@pytest.mark.parametrize("search", ["random", "optuna"])
def test_a_range_too_narrow_for_so_many_trials_is_told_before_them(search: str) -> None:
    with pytest.raises(ConfigError, match="1 different points of lr were found"):
        plan_sweep(METHODS, {"lr": {"low": 0.1, "high": 0.10001}}, search=search, trials=3)


def test_runs_that_are_gone_can_be_had_again(tmp_path: Path) -> None:
    how = {"trials": 1, "seeds": [0], "trial_seeds": [7]}
    (before,) = fedcog.sweep(METHODS[:1], {"lr": [0.1, 0.2]}, tmp_path, **how)  # type: ignore[arg-type]
    shutil.rmtree(tmp_path / "runs")
    with pytest.raises(RecordError, match="is missing, but its result is stored") as told:
        fedcog.sweep(METHODS[:1], {"lr": [0.1, 0.2]}, tmp_path, **how)  # type: ignore[arg-type]
    Path(str(told.value).split("delete ")[1].split(" and start")[0]).unlink()
    (after,) = fedcog.sweep(METHODS[:1], {"lr": [0.1, 0.2]}, tmp_path, **how)  # type: ignore[arg-type]
    assert after.runs[0].last == before.runs[0].last


def test_trials_that_nothing_is_held_out_for_are_refused_before_they_train(tmp_path: Path) -> None:
    scarce = [dataclasses.replace(METHODS[0], validation=1e-4)]
    with pytest.raises(
        ConfigError,
        match=(
            "no client has enough examples to hold one out for validation: raise --validation above"
        ),
    ):
        fedcog.sweep(scarce, {"lr": [0.1, 0.2]}, tmp_path, trials=2)
    assert not results_in(tmp_path)


def test_no_test_set_without_validation() -> None:
    with pytest.raises(ConfigError, match="set --validation"):
        Experiment(evaluate_test=False)
    with pytest.raises(ConfigError, match="no-evaluate-local"):
        Experiment(evaluate_test=False, validation=0.1)
    assert Experiment(evaluate_test=False, validation=0.1, evaluate_local=False)
