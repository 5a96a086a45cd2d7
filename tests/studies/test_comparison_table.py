"""Tests of tables of runs: means and paired differences against an independent calculation."""

import csv
import dataclasses
import io
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

import fedcog
from fedcog import ConfigError, Experiment, FedAvg, FedProx, RecordError, Run
from fedcog.cli.main import main
from fedcog.runs.records.metric_series import is_cost
from fedcog.runs.records.run_directory import RunDirectory
from fedcog.studies.comparison_table import table_format

FEDAVG = {0: [0.2, 0.5, 0.4], 1: [0.3, 0.6, 0.55], 2: [0.1, 0.4, 0.45]}
TRIAL = {"evaluate_test": False, "evaluate_local": False}
FEDPROX = {0: [0.3, 0.45, 0.6], 2: [0.2, 0.7, 0.5], 3: [0.1, 0.9, 0.8]}


def make_run(scores: list[float], metric: str = "accuracy", **changes: Any) -> Run:
    """A run with these scores, round by round."""
    settings = {"rounds": len(scores)} | changes
    lines: list[dict[str, Any]] = [
        {"round": number, metric: score, "loss": 1 - score, "local": []}
        for number, score in enumerate(scores, 1)
    ]
    return Run(Path(f"{changes}"), dataclasses.replace(Experiment(), **settings), lines)


def two_methods(**changes: Any) -> list[Run]:
    fedavg = [make_run(one, seed=seed, **changes) for seed, one in FEDAVG.items()]
    fedprox = [
        make_run(one, seed=seed, algorithm=FedProx(), **changes) for seed, one in FEDPROX.items()
    ]
    return fedprox + fedavg


def write_runs(folder: Path) -> Path:
    """Write the two methods as run directories."""
    for run in two_methods(partition="iid"):
        name = run.experiment.to_dict()["algorithm"]
        directory = RunDirectory(folder / name / f"seed-{run.experiment.seed}")
        directory.path.mkdir(parents=True)
        directory.begin(run.experiment, {})
        for line in run.lines:
            directory.append(line)
    return folder


def cells(markdown: str) -> dict[str, list[str]]:
    """Return the cells of a Markdown table by the first of their row."""
    rows = [line[2:-2].split(" | ") for line in markdown.splitlines() if line[:1] == "|"]
    return {row[0]: [cell.strip() for cell in row[1:]] for row in rows}


def spread_text(values: list[float], sign: str = "") -> str:
    mean = f"{100 * statistics.fmean(values):{sign}.2f}"
    return f"{mean} ± {100 * statistics.stdev(values):.2f}"


@pytest.mark.parametrize("best", [False, True])
def test_cells_are_means_and_paired_differences_over_seeds(best: bool) -> None:
    fedavg, fedprox = (
        {seed: max(scores) if best else scores[-1] for seed, scores in one.items()}
        for one in (FEDAVG, FEDPROX)
    )
    rows = cells(fedcog.table(two_methods(partition="dirichlet"), best=best))
    assert rows["fedavg"][0] == spread_text([*fedavg.values()])
    assert rows["fedprox"][0] == f"**{spread_text([*fedprox.values()])}**", "the best is bold"
    differences = [fedprox[seed] - fedavg[seed] for seed in (0, 2)]
    assert rows["fedprox"][1] == f"{spread_text(differences, '+')} (n = 2)", "common seeds only"
    assert rows["method"] == ["digits, dirichlet, beta 0.1 (%)", "minus fedavg"]


def test_csv_has_plain_numbers() -> None:
    lines = csv.DictReader(io.StringIO(fedcog.table(two_methods(), "csv", baseline="fedprox")))
    fedprox, fedavg = lines
    last = [scores[-1] for scores in FEDAVG.values()]
    assert float(fedavg["mean"]) == pytest.approx(100 * statistics.fmean(last))
    assert float(fedavg["std"]) == pytest.approx(100 * statistics.stdev(last))
    assert (fedavg["n"], fedavg["unit"], fedavg["pairs"]) == ("3", "%", "2")
    differences = [FEDAVG[seed][-1] - FEDPROX[seed][-1] for seed in (0, 2)]
    assert float(fedavg["difference"]) == pytest.approx(100 * statistics.fmean(differences))
    assert float(fedavg["difference_std"]) == pytest.approx(100 * statistics.stdev(differences))
    assert fedprox["difference"] == "" and fedprox["baseline"] == "fedprox"


def test_columns_are_settings_of_the_data_and_rows_what_differs_within() -> None:
    """The rounds differ between the columns only, so no row names them."""
    runs = [
        make_run([0.5] * rounds, partition=partition, lr=lr, algorithm=algorithm)
        for partition, rounds in (("iid", 2), ("label-skew", 3))
        for algorithm, lr in ((FedAvg(), 0.1), (FedAvg(), 0.2), (FedProx(), 0.1))
    ]
    rows = cells(fedcog.table(runs[:-1]))
    assert rows["method"][::2] == ["digits, iid (%)", "digits, label-skew, 2 classes each (%)"]
    assert [*rows][2:] == ["fedavg (lr 0.1)", "fedavg (lr 0.2)", "fedprox (lr 0.1)"]
    assert rows["fedprox (lr 0.1)"] == ["**50.00**", "+0.00 (n = 1)", "-", ""]


def test_less_of_a_loss_is_better_and_no_percentage() -> None:
    rows = cells(fedcog.table(two_methods(), metric="loss"))
    losses = [1 - scores[-1] for scores in FEDPROX.values()]
    text = f"{statistics.fmean(losses):.4g} ± {statistics.stdev(losses):.4g}"
    assert rows["fedprox"][0] == f"**{text}**"
    best = cells(fedcog.table(two_methods(), metric="loss", best=True))["fedavg"][0]
    assert best.startswith(f"{statistics.fmean(1 - max(one) for one in FEDAVG.values()):.4g} ±")


@pytest.mark.parametrize(
    ("metric", "is_less_better"),
    [
        ("loss", True),
        ("local_test/accuracy_deviation", True),
        ("metrics/ece", True),
        ("metrics/piece_count", False),
        ("local_test/accuracy_worst", False),
    ],
)
def test_direction_of_a_metric_is_found_by_whole_words(metric: str, is_less_better: bool) -> None:
    assert is_cost(metric) == is_less_better


def test_metrics_of_evaluations_have_keys_as_trackers_have_them() -> None:
    run = make_run([0.5])
    run.lines[0] |= {"local_test": {"accuracy_mean": 0.25}, "metrics": {"ece": 0.125}}
    assert cells(fedcog.table([run], metric="local_test/accuracy_mean"))["fedavg"] == ["25.00"]
    assert cells(fedcog.table([run], metric="metrics/ece"))["fedavg"] == ["0.125"]
    with pytest.raises(ConfigError, match="unknown metric 'acuracy': did you mean accuracy"):
        fedcog.table([run], metric="acuracy")


def test_diverged_run_has_no_last_value() -> None:
    fine = make_run([0.5, 0.6])
    diverged = dataclasses.replace(make_run([0.9], seed=1, rounds=2), diverged="in round 2")
    assert cells(fedcog.table([fine, diverged]))["fedavg"] == ["60.00 (1 of 2 diverged)"]
    trial = dataclasses.replace(diverged, lines=[], path=Path("trial"))
    trial = dataclasses.replace(
        trial, experiment=dataclasses.replace(trial.experiment, validation=0.2, **TRIAL)
    )
    assert list(cells(fedcog.table([fine, trial])))[2:] == ["fedavg"], "trials have no row"
    only = cells(fedcog.table([fine, dataclasses.replace(diverged, lines=[])], best=True))
    assert only["fedavg"] == ["60.00 (1 of 2 diverged)"]


def test_unfinished_runs_and_repeated_seeds_are_warned_of() -> None:
    again = dataclasses.replace(make_run([0.9]), path=Path("again"))
    with pytest.warns(UserWarning, match="1 of 5 rounds") as warned:
        text = fedcog.table([make_run([0.5], rounds=5), dataclasses.replace(again)])
    assert "50.00" not in cells(text), "runs of other lengths are other rows"
    with pytest.warns(UserWarning, match="several runs with seed 0, the first counts"):
        assert cells(fedcog.table([make_run([0.5]), again]))["fedavg"] == ["50.00"]
    assert Path(warned[0].filename) == Path(__file__)


def test_latex_escapes_names_and_balances_its_braces() -> None:
    runs = [make_run([0.5], algorithm=FedProx(mu=mu), seed=0) for mu in (0.1, 0.2)]
    text = fedcog.table([*runs, make_run([0.7], pretrained="a_b & {100%} #1 $")], "latex")
    lines = [line for line in text.splitlines() if not line.startswith("%")]
    body = "\n".join(lines)
    assert lines[0] == "\\begin{tabular}{lrr}" and lines[1] == "\\toprule"
    assert r"a\_b \& \{100\%\} \#1 \$" in body and r"\textbf{70.00}" in body
    assert r"$-$20.00 (n = 1)" in body and not re.search(r"(?<!\\)[%#_]", body)
    plain = re.sub(r"\\.", "", body)
    assert plain.count("{") == plain.count("}") and plain.count("$") % 2 == 0
    assert all(line.count(" & ") == 2 for line in lines if line.endswith("\\\\"))


def test_baseline_is_fedavg_or_the_first_or_the_named_one() -> None:
    runs = [make_run([0.5], algorithm=FedProx(mu=mu)) for mu in (0.1, 0.2)]
    assert cells(fedcog.table(runs))["fedprox (fedprox.mu 0.2)"][1] == "+0.00 (n = 1)"
    with pytest.raises(ConfigError, match="unknown baseline 'fedprox'"):
        fedcog.table(runs, baseline="fedprox")
    second = "fedprox (fedprox.mu 0.2)"
    assert cells(fedcog.table(runs, baseline=second))[second][1] == ""


@pytest.mark.parametrize(
    ("name", "format", "outcome"),
    [
        ("t.tex", None, "latex"),
        ("t.MD", None, "markdown"),
        ("t.csv", "csv", "csv"),
        ("t.tex", "csv", "which is latex, not csv: remove --format"),
        ("t.pdf", None, "For a figure, use fedcog plot"),
        ("t", None, "choose a name that ends in .tex, .md or .csv"),
    ],
)
def test_suffix_decides_the_format(name: str, format: str | None, outcome: str) -> None:
    if outcome in ("latex", "markdown", "csv"):
        assert table_format(name, format) == outcome
    else:
        with pytest.raises(ConfigError, match=re.escape(outcome)):
            table_format(name, format)


def test_command_prints_or_writes_the_table_of_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_runs(tmp_path / "c")
    assert main(["table", "c"]) == 0
    assert capsys.readouterr().out == fedcog.table("c")
    assert main(["table", "c", "--best", "--metric", "loss", "--out", "t.csv"]) == 0
    assert Path("t.csv").read_text() == fedcog.table("c", "csv", metric="loss", best=True)
    for suffix, format in ((".tex", "latex"), (".md", "markdown"), (".csv", "csv")):
        assert main(["report", "c", "--quiet", "--table", f"r{suffix}"]) == 0
        assert Path(f"r{suffix}").read_text() == fedcog.table("c", format)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("table c --out t.pdf", "use fedcog plot"),
        ("table c --out t.tex --format markdown", "remove --format"),
        ("table c --format html", "invalid choice"),
        ("table c --metric f1", "unknown metric 'f1'"),
        ("table c --baseline scaffold", "unknown baseline"),
        ("report c --out x.pdf", "ends in .html"),
        ("report c --out x.html --table t.xlsx", "choose a name that ends in .tex, .md or .csv"),
        ("plot c --out x.html", "choose a name that ends in .pdf, .svg or .png"),
        ("plot c --out x.tex", "use fedcog table"),
        ("plot c", "required: --out"),
    ],
)
def test_wrong_names_are_refused_before_anything_is_written(
    arguments: str,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_runs(tmp_path / "c")
    before = sorted(tmp_path.rglob("*"))
    assert main(arguments.split()) == 2
    assert reason in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_damaged_run_is_skipped_with_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_runs(tmp_path / "c")
    Path("c/fedprox/seed-0/rounds.jsonl").write_text("no line\n")
    assert main(["table", "c"]) == 2
    captured = capsys.readouterr()
    assert "skipped: " in captured.err and "| fedprox | " in captured.out
    with pytest.warns(UserWarning, match="skipped: "):
        assert len(fedcog.read_all("c")) == 5
    with pytest.raises(RecordError, match="there is no run"):
        fedcog.read_all(tmp_path / "c" / "fedprox" / "nothing")


def test_unfinished_runs_are_left_out_with_a_warning() -> None:
    runs = two_methods()
    cut = dataclasses.replace(runs[-1], lines=runs[-1].lines[:1])
    with pytest.warns(UserWarning, match=r"is not finished: 1 of \d rounds\. It is left out"):
        partial = fedcog.table([*runs[:-1], cut])
    assert partial == fedcog.table(runs[:-1])
    with pytest.warns(UserWarning, match=r"is not finished: 1 of \d rounds\.$"):
        assert "fedavg" in fedcog.table([cut])


def test_runs_of_other_objects_are_other_rows() -> None:
    plain = make_run([0.5])
    augmented = dataclasses.replace(
        plain, path=Path("augmented"), user_objects={"augmentation": "fade-12ab"}
    )
    rows = cells(fedcog.table([plain, augmented]))
    assert {"fedavg (augmentation none)", "fedavg (augmentation fade-12ab)"} <= rows.keys()
    assert [len(each.runs) for each in fedcog.group([plain, augmented])] == [1, 1]


def test_data_sets_are_columns_and_never_paired_even_under_one_name() -> None:
    places = ("/studies/a/data.npz", "/studies/b/data.npz")
    scores = dict(zip(places, (0.8, 0.4), strict=True))
    shared = {"partition": "iid"}
    runs = [make_run([score], dataset=place, **shared) for place, score in scores.items()]
    runs.append(make_run([0.5], dataset=places[1], algorithm=FedProx(), **shared))
    rows = cells(fedcog.table(runs))
    assert rows["method"][::2] == ["a/data, iid (%)", "b/data, iid (%)"]
    assert rows["fedavg"] == ["**80.00**", "", "40.00", ""]
    assert rows["fedprox"] == ["-", "", "**50.00**", "+10.00 (n = 1)"]
    assert [each.label for each in fedcog.group(runs)] == [
        "fedavg (dataset a/data)",
        "fedavg (dataset b/data)",
        "fedprox (dataset b/data)",
    ]


def test_data_sets_of_ones_own_are_columns() -> None:
    runs = [
        dataclasses.replace(
            make_run([score], dataset="custom"), path=Path(name), user_objects={"data": name}
        )
        for name, score in {"mine-01ab": 0.5, "mine-77cd": 0.6, "other-01ab": 0.7}.items()
    ]
    header = cells(fedcog.table(runs))["method"]
    names = [column.partition(",")[0] for column in header]
    assert names == ["mine-01ab", "mine-77cd", "other"]


def test_runs_without_the_metric_are_left_out_with_a_warning() -> None:
    runs = two_methods()
    runs[0].lines[-1]["metrics"] = {"class_accuracy": [0.25, None]}
    with pytest.warns(UserWarning, match=f"{len(runs) - 1} of {len(runs)} runs have no metrics/"):
        rows = cells(fedcog.table(runs, metric="metrics/class_accuracy/0"))
    assert rows["fedprox"] == ["25.00"]
    with pytest.raises(ConfigError, match="there are no runs"):
        fedcog.table([])


def test_scores_on_clients_tests_are_named() -> None:
    run = make_run([0.5])
    lines = [line | {"evaluated_on": "clients"} for line in run.lines]
    page = fedcog.table([dataclasses.replace(run, lines=lines)])
    assert "Values are accuracy on the clients' own test examples in %" in page


def test_scores_on_other_examples_are_other_columns() -> None:
    run = make_run([0.5])
    lines = [line | {"evaluated_on": "clients"} for line in run.lines]
    others = [make_run([0.6]), make_run([0.7], algorithm=FedProx())]
    runs = [dataclasses.replace(run, path=Path("other"), lines=lines), *others]
    header = cells(fedcog.table(runs))["method"]
    assert header[0].endswith("the clients' own test examples (%)")
    assert header[2].endswith("the test set (%)")


def test_other_contents_at_one_location_are_other_columns() -> None:
    runs = [
        dataclasses.replace(
            make_run([score], dataset="/data/a.npz"), path=Path(name), user_objects={"data": name}
        )
        for name, score in {"a-01ab": 0.5, "a-77cd": 0.6}.items()
    ]
    header = cells(fedcog.table(runs))["method"]
    assert [name.partition(",")[0] for name in header] == ["a-01ab", "a-77cd"]
    assert [each.label for each in fedcog.group(runs)] == [
        "fedavg (data a-01ab)",
        "fedavg (data a-77cd)",
    ]
    assert cells(fedcog.table(runs[:1]))["method"][0].startswith("a,")


def test_metric_without_a_number_in_the_last_round_has_no_last_value() -> None:
    run = make_run([0.5] * 3)
    for line, value in zip(run.lines, (0.2, 0.3, None), strict=True):
        line["metrics"] = {"odd": value}
    with pytest.warns(UserWarning, match="metrics/odd was NaN or infinite in the last evaluated"):
        last = [*csv.DictReader(io.StringIO(fedcog.table(run, "csv", metric="metrics/odd")))]
    assert [one["mean"] for one in last] == [""]
    best = fedcog.table(run, "csv", metric="metrics/odd", best=True)
    assert [one["mean"] for one in csv.DictReader(io.StringIO(best))] == ["0.3"]
