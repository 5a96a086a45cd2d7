"""Tests of sweeps: equal trials for all algorithms, no use of the test set, and resuming."""

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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

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
from fedcog.studies.result_store import Job, Results
from fedcog.studies.tuning import sweep_tables
from fedcog.studies.tuning.sweep import Sweep, plan_sweep
from tests.support.paths import REPO

pytestmark = pytest.mark.slow

SMALL: dict[str, Any] = {
    "rounds": 3,
    "local_steps": 8,
    "clients": 3,
    "batch_size": 16,
    "beta": 1.0,
    "model": "mlp",
}
SMALL |= {"threads": 1, "workers": 1, "mapping": "loop"}
METHODS = [Experiment(algorithm=algorithm, **SMALL) for algorithm in (FedAvg(), FedProx())]
SPACE = {"lr": {"low": 0.001, "high": 0.5, "log": True}, "fedprox": {"mu": [0.001, 0.1]}}
SWEEP_OPTIONS: dict[str, Any] = {"trials": 3, "seeds": [0, 1], "trial_seeds": [7]}


@pytest.fixture(scope="module")
def finished_sweep(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Tuned]]:
    out = tmp_path_factory.mktemp("sweep")
    return out, fedcog.sweep(METHODS, SPACE, out, **SWEEP_OPTIONS)


def seeds_by_file(folder: Path) -> dict[str, list[int]]:
    """Seeds in each result file, line by line."""
    files = [
        file
        for file in sorted(folder.rglob("*.jsonl"))
        if "runs" not in file.relative_to(folder).parts
    ]
    return {
        file.name: [json.loads(line)["seed"] for line in file.read_bytes().splitlines()[1:]]
        for file in files
    }


def test_every_algorithm_gets_the_same_number_of_trials(
    finished_sweep: tuple[Path, list[Tuned]],
) -> None:
    out, sweep_results = finished_sweep
    assert [tuned.name for tuned in sweep_results] == ["fedavg", "fedprox"]
    for tuned in sweep_results:
        assert [trial.number for trial in tuned.trials] == [1, 2, 3]
        assert len({trial.experiment for trial in tuned.trials}) == 3
        assert all(trial.rounds == 3 and not trial.diverged for trial in tuned.trials)
        assert [run.experiment.seed for run in tuned.runs] == [0, 1]
    assert sorted(len(seeds) for seeds in seeds_by_file(out).values()) == [1] * 6 + [2] * 2


def test_sweep_chooses_the_same_trial_as_a_plain_loop(
    finished_sweep: tuple[Path, list[Tuned]], tmp_path: Path
) -> None:
    _, (_, fedprox) = finished_sweep
    scores = {}
    for trial in fedprox.trials:
        algorithm = FedProx(mu=trial.point["fedprox.mu"])
        experiment = dataclasses.replace(
            METHODS[1],
            algorithm=algorithm,
            lr=trial.point["lr"],
            validation=0.2,
            seed=7,
            evaluate_local=False,
        )
        run = fedcog.run(experiment, tmp_path / str(trial.number), report=False)
        scores[trial.number] = run.lines[-1]["validation_accuracy"]
        assert scores[trial.number] == pytest.approx(trial.score, abs=1e-6)
    assert fedprox.chosen.number == max(scores, key=scores.__getitem__)
    assert len(set(scores.values())) == 3
    final = dataclasses.replace(
        METHODS[1],
        algorithm=FedProx(mu=fedprox.chosen.point["fedprox.mu"]),
        lr=fedprox.chosen.point["lr"],
        seed=1,
    )
    assert fedcog.run(final, tmp_path / "final", report=False).last == fedprox.runs[1].last
    assert fedprox.runs[1].experiment.validation == 0 and len(fedprox.runs[1].lines) == 3


def shifted_digits(label_shift: int) -> Dataset:
    """Digits with shifted test labels. With a shift of 1, better models score worse."""
    data = registry.load("digits")
    test_y = (data.test_y + label_shift) % 10
    return from_arrays(data.train_x, data.train_y, data.test_x, test_y, classes=data.classes)


def test_test_set_does_not_affect_the_choice(tmp_path: Path) -> None:
    space = {"lr": [0.0001, 0.2, 0.05]}
    options: dict[str, Any] = {"search": "grid", "trials": 3, "seeds": [0], "trial_seeds": [7]}
    methods = [dataclasses.replace(METHODS[0], rounds=4, local_steps=30)]
    (true_labels,) = fedcog.sweep(methods, space, tmp_path / "0", data=shifted_digits(0), **options)
    (shifted_labels,) = fedcog.sweep(
        methods, space, tmp_path / "1", data=shifted_digits(1), **options
    )
    assert [(trial.point, trial.score) for trial in true_labels.trials] == [
        (trial.point, trial.score) for trial in shifted_labels.trials
    ]
    assert true_labels.chosen.point == shifted_labels.chosen.point
    # Only the final runs use the test set.
    assert true_labels.runs[0].last > 0.6 and shifted_labels.runs[0].last < 0.1
    test_scores = {}  # test accuracy of each trial; choosing by it would give another trial
    for trial in shifted_labels.trials:
        with_test = dataclasses.replace(trial.experiment, evaluate_test=True, seed=7)
        test_scores[trial.number] = fedcog.run(
            with_test, tmp_path / f"look-{trial.number}", data=shifted_digits(1), report=False
        ).last
    assert max(test_scores, key=test_scores.__getitem__) != shifted_labels.chosen.number
    for file in (tmp_path / "1" / "runs").rglob("rounds.jsonl"):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        is_trial = "evaluate_test = false" in (file.parent / "experiment.toml").read_text()
        assert all(("accuracy" in line) != is_trial for line in lines)
        assert all(("validation_accuracy" in line) == is_trial for line in lines)
    with pytest.raises(
        RecordError,
        match="holds another sweep \\(it differs in data, networks or algorithms of your own\\)",
    ):
        fedcog.sweep(methods, space, tmp_path / "1", data=shifted_digits(0), **options)


def test_stopped_sweep_resumes_with_the_same_result(
    finished_sweep: tuple[Path, list[Tuned]], tmp_path: Path
) -> None:
    reference_folder, reference = finished_sweep
    rounds: list[int] = []
    for num_rounds in (2, 8, 19):  # during a trial, between trials, during a final run
        with pytest.raises(Interrupted):
            fedcog.sweep(
                METHODS,
                SPACE,
                tmp_path,
                callbacks=lambda experiment, line: rounds.append(line["round"]),
                should_stop=lambda num_rounds=num_rounds: len(rounds) >= num_rounds,
                **SWEEP_OPTIONS,
            )
        rounds_left = Sweep(plan_sweep(METHODS, SPACE, **SWEEP_OPTIONS), tmp_path).rounds_left()
        assert rounds_left == 30 - len(rounds)
    resumed = fedcog.sweep(
        METHODS,
        SPACE,
        tmp_path,
        callbacks=lambda experiment, line: rounds.append(line["round"]),
        **SWEEP_OPTIONS,
    )
    assert len(rounds) == 2 * (3 + 2) * 3  # no round is lost or repeated
    assert [tuned.trials for tuned in resumed] == [tuned.trials for tuned in reference]
    assert [[run.last for run in tuned.runs] for tuned in resumed] == [
        [run.last for run in tuned.runs] for tuned in reference
    ]
    assert (tmp_path / "sweep.md").read_text() == (reference_folder / "sweep.md").read_text()
    assert seeds_by_file(tmp_path) == seeds_by_file(reference_folder)
    extended = fedcog.sweep(METHODS, SPACE, tmp_path, **(SWEEP_OPTIONS | {"seeds": [0, 1, 2]}))
    assert [len(tuned.runs) for tuned in extended] == [3, 3] and [
        tuned.chosen for tuned in extended
    ] == [tuned.chosen for tuned in resumed]


FLAGS = [
    *(f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()),
    "--search=optuna",
    "--trials=4",
]
FLAGS += ["--algorithms", "fedavg", "fedprox", "--seeds", "0", "--plain"]


def test_killed_optuna_sweep_resumes_with_the_same_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("optuna")
    space_file = tmp_path / "space.toml"
    space_file.write_text(
        "lr = {low = 0.001, high = 0.5, log = true}\n[fedprox]\nmu = [0.001, 0.01, 0.1]\n"
    )
    arguments = ["sweep", *FLAGS, "--space", str(space_file)]
    assert main([*arguments, "--out", str(tmp_path / "whole")]) == 0
    output = capsys.readouterr()
    assert (
        "algorithm fedprox; chosen lr " in output.out
        and "Every method got 4 trials, chosen by Optuna's TPE" in output.out
    )
    trials = set(
        re.findall(r"fedcog: fedprox lr (\S+) fedprox\.mu (\S+) seed 100, round 1 ", output.err)
    )
    assert len(trials) == 4, "each line names its trial"
    report_html = (tmp_path / "whole" / "report.html").read_bytes()
    assert (
        main(["report", str(tmp_path / "whole")]) == 0
        and "whole/runs.html" in capsys.readouterr().out
    )
    assert (tmp_path / "whole" / "report.html").read_bytes() == report_html, (
        "the report of the sweep is unchanged"
    )
    out = tmp_path / "killed"
    process = subprocess.Popen(
        [sys.executable, "-m", "fedcog", *arguments, "--out", str(out)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": str(REPO)},
    )
    try:
        deadline = time.monotonic() + 60
        while (
            len(seeds_by_file(out)) < 5 and process.poll() is None and time.monotonic() < deadline
        ):
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(30)
    assert 5 <= len(seeds_by_file(out)) < 10  # killed before the end
    assert main([*arguments, "--out", str(out)]) == 0
    assert (out / "sweep.md").read_text() == (tmp_path / "whole" / "sweep.md").read_text()
    assert seeds_by_file(out) == seeds_by_file(tmp_path / "whole")


def test_diverged_trial_counts_and_ranks_last(tmp_path: Path) -> None:
    (tuned,) = fedcog.sweep(
        METHODS[:1], {"lr": [1e15, 0.1]}, tmp_path, search="grid", trials=2, seeds=[0]
    )
    assert [(trial.diverged, trial.score > 0) for trial in tuned.trials] == [
        (True, False),
        (False, True),
    ]
    assert tuned.chosen.number == 2
    markdown = sweep_tables.markdown(
        plan_sweep(METHODS[:1], {"lr": [1e15, 0.1]}, search="grid", trials=2, seeds=[0]), [tuned]
    )
    assert (
        "1 of its 2 trials diverged; a diverged trial counts against" in markdown
        and "| 1 | 1e+15 | diverged |" in markdown
    )


def test_trial_score_is_mean_of_seeds_that_train_stacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {
        "search": "grid",
        "trials": 2,
        "trial_seeds": [7, 8],
        "seeds": [0, 1],
    }
    separate_folder = tmp_path / "alone"
    stacked_folder = tmp_path / "together"
    methods = [dataclasses.replace(METHODS[0], mapping="vmap", local_steps=4)]
    (separate,) = fedcog.sweep(methods, {"lr": [0.1, 0.2]}, separate_folder, **options)
    scores = [
        results["validation_accuracy"][-1]
        for results in first_trial_results(separate_folder, separate)
    ]
    assert separate.trials[0].score == pytest.approx(sum(scores) / 2) and scores[0] != scores[1]
    monkeypatch.setattr(job_planning, "stacks_seeds", lambda experiment: True)
    plan = plan_sweep(methods, {"lr": [0.1, 0.2]}, **options)
    sweep = Sweep(plan, stacked_folder)
    (stack,) = job_planning.stack_jobs(sweep.jobs(sweep.available_trials()))
    assert {(job.seed, job.experiment.lr) for job in stack} == {
        (7, 0.1),
        (7, 0.2),
        (8, 0.1),
        (8, 0.2),
    }
    (stacked,) = fedcog.sweep(methods, {"lr": [0.1, 0.2]}, stacked_folder, **options)
    for trial, stacked_trial in zip(separate.trials, stacked.trials, strict=True):
        assert trial.score == pytest.approx(stacked_trial.score, abs=0.01)


def first_trial_results(folder: Path, tuned: Tuned) -> list[dict[str, list[float]]]:
    """Results of the first trial, one for each seed."""
    plan = plan_sweep(
        [tuned.experiment], {"lr": [0.1, 0.2]}, search="grid", trials=2, trial_seeds=[7, 8]
    )
    sweep = Sweep(plan, folder)
    results = Results(folder)
    jobs = sweep.jobs(sweep.available_trials()[:1])
    return [results.by_seed(job)[job.seed] for job in jobs]


def test_report_shows_the_budget_and_every_trial(finished_sweep: tuple[Path, list[Tuned]]) -> None:
    out, sweep_results = finished_sweep
    report_html = (out / "report.html").read_text()
    table = (out / "sweep.md").read_text()
    for tuned in sweep_results:
        for trial in tuned.trials:
            assert f"{100 * trial.score:.2f}" in report_html and f"{100 * trial.score:.2f}" in table
            assert (
                f">{trial.point['lr']:g}<" in report_html and f"| {trial.point['lr']:g} |" in table
            )
        assert (
            f"Trials of {tuned.name}" in report_html
            and tuned.group.last.percent() in report_html
            and tuned.group.last.percent() in table
        )
    assert (
        report_html.count('<td class="number">chosen</td>') == 2
        and "Every method got 3 trials, chosen by random search" in report_html
    )
    assert "looks at the test set" in report_html and (out / "chosen.html").exists()


def test_values_at_an_edge_are_reported_everywhere(
    finished_sweep: tuple[Path, list[Tuned]],
) -> None:
    """Each method chose between two values of mu, so one of them is at an edge."""
    out, tuned = finished_sweep
    (mu,) = (text for text in tuned[1].edges if "fedprox.mu" in text)
    edge = "smallest" if tuned[1].chosen.point["fedprox.mu"] == 0.001 else "largest"
    assert mu.startswith(f"fedprox: the chosen fedprox.mu {tuned[1].chosen.point['fedprox.mu']:g}")
    assert f"is the {edge} of its grid: try " in mu
    diverged = tuned[1]._replace(chosen=tuned[1].chosen._replace(diverged=True))
    assert diverged.edges == []
    tied = [trial._replace(score=0.5) for trial in tuned[1].trials]
    assert tuned[1]._replace(trials=tied).edges == []
    for file in ("sweep.md", "report.html"):
        assert mu in (out / file).read_text()


def test_folder_of_another_sweep_is_refused(finished_sweep: tuple[Path, list[Tuned]]) -> None:
    for change in ({"trials": 4}, {"seed": 1}, {"trial_seeds": [8]}):
        with pytest.raises(
            RecordError, match=f"holds another sweep \\(it differs in {next(iter(change))}"
        ):
            fedcog.sweep(METHODS, SPACE, finished_sweep[0], **(SWEEP_OPTIONS | change))
    with pytest.raises(RecordError, match="differs in space"):
        fedcog.sweep(METHODS, {"lr": [0.1, 0.2, 0.3]}, finished_sweep[0], **SWEEP_OPTIONS)


def test_changed_code_of_a_user_algorithm_is_another_sweep(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise trials would use the old code, and added seeds the new code."""
    monkeypatch.chdir(tmp_path)
    Path("space.toml").write_text("lr = [0.1, 0.2]\n")
    sweep_options = (
        "--algorithms mine.py:Mine --space space.toml --trials 2 --seeds 0 --out out --quiet"
    )
    run_options = "--dataset digits --clients 3 --rounds 1 --local-steps 1 --threads 1"
    code = "import fedcog\n\n\nclass Mine(fedcog.Algorithm):\n    strength = {}\n"
    for strength, exit_code in ((1.0, 0), (1.0, 0), (2.0, 2)):
        Path("mine.py").write_text(code.format(strength))
        for name in [name for name in sys.modules if name.startswith("fedcog_own_")]:
            monkeypatch.delitem(sys.modules, name)  # as in a new process
        linecache.clearcache()
        assert main(["sweep", *sweep_options.split(), *run_options.split()]) == exit_code
    assert "differs in data, networks or algorithms of your own" in capsys.readouterr().err


def test_sweep_command_reports_all_faults_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", "--algorithms", "fedavgg", "--validation", "0", "--seeds", "x"]) == 2
    stderr = capsys.readouterr().err
    for message in (
        "unknown algorithm 'fedavgg'",
        "--validation above 0",
        "--space FILE.toml",
        "not 'x'",
    ):
        assert message in stderr
    space_file = tmp_path / "space.toml"
    space_file.write_text("lr = [0.1, 0.2]\n")
    arguments = [
        "sweep",
        "--algorithms",
        "fedavg",
        "--space",
        str(space_file),
        "--out",
        str(tmp_path / "out"),
    ]
    assert (
        main([*arguments, "--trials", "3"]) == 2
        and "fewer than 3 trials" in capsys.readouterr().err
    )
    assert (
        main([*arguments, "--trials", "0"]) == 2
        and "trials needs an integer from 1" in capsys.readouterr().err
    )
    assert main([*arguments, "--trials", "2", "--algorithm", "fedprox"]) == 2
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"search": "bayes"}, "unknown search 'bayes': choose one of grid, random, optuna"),
        ({"seeds": [0, -1]}, "seeds needs an integer >= 0, not -1"),
        ({"seeds": [0.5]}, "seeds needs an integer >= 0, not 0.5"),
        ({"trial_seeds": ["a"]}, "trial_seeds needs an integer >= 0, not 'a'"),
        ({"seed": 2**70}, "seed needs an integer >= 0, and a smaller one"),
    ],
)
def test_invalid_sweep_options_are_refused_before_trials(
    options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_sweep(METHODS, {"lr": [0.1, 0.2]}, **({"trials": 2} | options))


@pytest.mark.parametrize("search", ["random", "optuna"])
def test_range_too_narrow_for_trials_is_refused_by_plan(search: str) -> None:
    with pytest.raises(ConfigError, match="1 different points of lr were found"):
        plan_sweep(METHODS, {"lr": {"low": 0.1, "high": 0.10001}}, search=search, trials=3)


def test_deleted_runs_can_be_repeated(tmp_path: Path) -> None:
    options: dict[str, Any] = {"trials": 1, "seeds": [0], "trial_seeds": [7]}
    (before,) = fedcog.sweep(METHODS[:1], {"lr": [0.1, 0.2]}, tmp_path, **options)
    shutil.rmtree(tmp_path / "runs")
    with pytest.raises(RecordError, match="is missing, but its result is stored") as caught:
        fedcog.sweep(METHODS[:1], {"lr": [0.1, 0.2]}, tmp_path, **options)
    Path(str(caught.value).split("delete ")[1].split(" and start")[0]).unlink()
    (after,) = fedcog.sweep(METHODS[:1], {"lr": [0.1, 0.2]}, tmp_path, **options)
    assert after.runs[0].last == before.runs[0].last


def test_trials_without_validation_examples_are_refused(tmp_path: Path) -> None:
    methods = [dataclasses.replace(METHODS[0], validation=1e-4)]
    with pytest.raises(
        ConfigError,
        match=(
            "no client has enough examples to hold one out for validation: raise --validation above"
        ),
    ):
        fedcog.sweep(methods, {"lr": [0.1, 0.2]}, tmp_path, trials=2)
    assert not seeds_by_file(tmp_path)


def test_evaluate_test_off_needs_validation() -> None:
    with pytest.raises(ConfigError, match="set --validation"):
        Experiment(evaluate_test=False)
    with pytest.raises(ConfigError, match="no-evaluate-local"):
        Experiment(evaluate_test=False, validation=0.1)
    assert Experiment(evaluate_test=False, validation=0.1, evaluate_local=False)


@pytest.mark.parametrize("kind", ["cosine", "linear", "step", "constant"])
def test_schedules_with_warmup_can_be_swept(kind: str, tmp_path: Path) -> None:
    more = {"lr_step": 2, "lr_decay": 0.5} if kind == "step" else {}
    experiment = Experiment(
        rounds=4, local_steps=2, clients=3, validation=0.2, lr_schedule=kind, lr_warmup=2, **more
    )
    (tuned,) = fedcog.sweep([experiment], {"lr": [0.01, 0.1]}, tmp_path, trials=2, seeds=[0])
    assert len(tuned.runs[0].lines) == 4


def test_shorter_run_of_a_fading_schedule_is_no_prefix() -> None:
    def job(rounds: int, kind: str) -> Job:
        return Job(Experiment(lr_schedule=kind, rounds=rounds, evaluate_local=False))  # type: ignore[arg-type]

    assert not job_planning.is_prefix(job(3, "linear"), job(9, "linear"))
    assert job_planning.is_prefix(job(3, "exponential"), job(9, "exponential"))


def test_sweep_on_data_without_tests_is_refused_before_the_first_trial(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    data = from_arrays(generator.normal(size=(60, 4)).astype("f4"), np.arange(60) % 3)
    experiment = Experiment(rounds=1, local_steps=1, clients=2, partition="iid", validation=0.2)
    with pytest.raises(ConfigError, match=r"final runs of a sweep need one.*--local-test 0.2"):
        fedcog.sweep([experiment], {"lr": [0.01, 0.1]}, tmp_path, trials=2, data=data)
    assert not list(tmp_path.iterdir())


def test_plan_names_the_partition_that_the_data_set_implies() -> None:
    plan = plan_sweep([Experiment(rounds=1)], {"lr": [0.01, 0.1]}, trials=2)
    assert [(one.partition, one.clients) for one in plan.experiments] == [("dirichlet", 10)]


def test_sweep_does_not_go_on_with_other_data_or_networks(tmp_path: Path) -> None:
    def save(shift: int) -> None:
        y = (np.arange(60) + shift) % 2
        x = np.eye(6, dtype="f4").repeat(10, 0)
        np.savez(tmp_path / "a.npz", train_x=x, train_y=y, test_x=x, test_y=y)

    def network(width: int) -> Callable[[], nn.Module]:
        return lambda: nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 2))

    shared: dict[str, Any] = {"rounds": 1, "local_steps": 1, "batch_size": 4, "threads": 1}
    experiment = Experiment(dataset=str(tmp_path / "a.npz"), clients=2, partition="iid", **shared)
    options: dict[str, Any] = {"trials": 2, "seeds": [0], "search": "grid"}
    space = {"lr": [0.01, 0.1]}
    save(0)
    out = tmp_path / "out"
    first = fedcog.sweep([experiment], space, out, model=network(3), **options)
    again = fedcog.sweep([experiment], space, out, model=network(3), **options)
    assert again[0].runs[0].last == first[0].runs[0].last
    assert again[0].runs[0].path.is_relative_to(out)
    with pytest.raises(RecordError, match="data, networks or algorithms of your own"):
        fedcog.sweep([experiment], space, out, model=network(4), **options)
    save(1)
    with pytest.raises(RecordError, match="data, networks or algorithms of your own"):
        fedcog.sweep([experiment], space, out, model=network(3), **options)
