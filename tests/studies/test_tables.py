"""Tests of result tables, captions and statistics, checked against hand calculations."""

import itertools
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedcog.algorithms import Algorithm, FedCOG, FedProx
from fedcog.report import reproduction
from fedcog.runs.config.experiment import Experiment
from fedcog.runs.records.run_directory import RecordError
from fedcog.runs.warm_start import changed_settings
from fedcog.studies import paper, statistics, tables
from fedcog.studies.job_planning import job_of
from fedcog.studies.paper import analyses, comparisons, experiments, numbers
from fedcog.studies.result_store import Results
from fedcog.studies.study import Cell, Study
from tests.support.paths import REPO

PROVENANCE = {
    "command": "fedcog reproduce x",
    "started": "2026-02-03T04:05:06+00:00",
    "device": "a GPU",
    "torch": "2.0",
}
STUDY = Study(
    "x",
    "Some study",
    "Table 9",
    "Three rounds.",
    (
        Cell("one", "FedAvg", Experiment(), None, 41.0, 0.5),
        Cell("one", "FedCOG", Experiment(algorithm=FedCOG())),
        Cell("one", "FedProx", Experiment(algorithm=FedProx())),
        Cell("two", "FedAvg", Experiment(dataset="cifar10"), None, 12.0),
    ),
)


def add_result(
    results: Results, cell: Cell, seed: int, accuracies: list[float], **entries: Any
) -> None:
    results.add(
        job_of(cell, seed),
        {"accuracy": accuracies, "clients": [], "provenance": PROVENANCE | {"commit": "abc"}}
        | entries,
    )


@pytest.fixture
def results(tmp_path: Path) -> Results:
    """FedAvg: last 30, 40, 50 and best 40, 50, 60. FedCOG: last 1, 2 and 3 points higher."""
    results = Results(tmp_path / "results")
    for seed in range(3):
        add_result(results, STUDY.cells[0], seed, [0.2, 0.4 + seed / 10, 0.3 + seed / 10])
        add_result(results, STUDY.cells[1], seed, [0.2, 0.25, 0.31 + 0.11 * seed])
    return results


def test_means_and_differences_match_hand_calculation(results: Results) -> None:
    first, second = tables.tables_of(STUDY, results)
    assert first.header == ["", "last", "best", "paper", "best - paper", "FedCOG - this"]
    rows = {row[0]: row[1:] for row in first.rows}
    # Differences 1, 2, 3 have mean 2 and standard deviation 1. Half the width of the interval is
    # t(0.975, 2) / sqrt(3) = 4.3027 / 1.7321.
    assert rows["FedAvg"] == [
        "40.00 ± 10.00",
        "50.00 ± 10.00",
        "41.00 ± 0.50",
        "+9.00",
        "+2.00 ± 2.48",
    ]
    assert rows["FedCOG"] == ["42.00 ± 11.00", "42.00 ± 11.00", "", "", ""]
    assert rows["FedProx"] == ["not run", "not run", "", "", ""]
    assert second.rows == [["FedAvg", "not run", "not run", "12.00", "", ""]]


@given(st.lists(st.integers(-4, 4), min_size=1, max_size=9))
def test_p_value_matches_enumeration_of_all_signs(percent_gaps: list[int]) -> None:
    # As with accuracies, equal gaps differ by rounding errors.
    gaps = [0.7 + 0.01 * gap - 0.7 for gap in percent_gaps]
    nonzero = np.array([gap for gap in percent_gaps if gap])
    ranks = stats.rankdata(np.abs(nonzero))
    rank_sums = [
        ranks[np.array(signs, dtype=bool)].sum()
        for signs in itertools.product((0, 1), repeat=len(nonzero))
    ]
    rank_sum = ranks[nonzero > 0].sum()
    num_extreme = min(
        sum(value <= rank_sum for value in rank_sums), sum(value >= rank_sum for value in rank_sums)
    )
    assert statistics.signed_rank_p_value(gaps) == pytest.approx(
        min(1.0, 2 * num_extreme / len(rank_sums))
    )
    if len(nonzero) == len(percent_gaps) == len(set(np.abs(nonzero))):
        assert statistics.signed_rank_p_value(gaps) == pytest.approx(
            stats.wilcoxon(gaps, method="exact").pvalue
        )


def test_p_value_needs_six_pairs() -> None:
    five = statistics.paired_difference(
        dict(enumerate([1.0] * 5)), dict(enumerate([0.5, 0.4, 0.3, 0.2, 0.1]))
    )
    six = statistics.paired_difference(
        dict(enumerate([1.0] * 6)), dict(enumerate([0.5, 0.4, 0.3, 0.2, 0.1, 0.0]))
    )
    assert five is not None and five.p_value is None and "p =" not in five.text()
    # All six on one side: 1 of 2^6 sign patterns, times two sides.
    assert six is not None and six.p_value == pytest.approx(2 / 2**6)
    assert "(p = 0.031, n = 6)" in six.text()
    single = statistics.paired_difference({0: 3.0}, {0: 1.0, 1: 7.0})
    assert single is not None and single.text() == "+2.00" and single.half_width is None
    assert statistics.paired_difference({0: 1.0}, {1: 1.0}) is None


def test_average_needs_all_settings_and_pools_pairs(tmp_path: Path) -> None:
    study = comparisons.main_comparison()
    results = Results(tmp_path)
    for i, block in enumerate(experiments.SETTINGS):
        for cell in study.cells:
            # FedAvg has no results in the first setting.
            if (
                cell.block == block
                and cell.row in ("FedAvg", "FedCOG")
                and (i or cell.row == "FedCOG")
            ):
                gain = 0.01 if cell.row == "FedCOG" else 0.0
                for seed in range(3):
                    add_result(results, cell, seed, [0.1 * i + 0.001 * seed + gain])
    rows = {row[0]: row[1:] for row in tables.tables_of(study, results)[-1].rows}
    # The mean of 1, 11, ..., 51 is 26; each seed adds 0.1.
    assert rows["FedCOG"][0] == "26.10 ± 0.10"
    assert rows["FedAvg"][0] == "not run"  # one setting is missing
    assert rows["FedAvg"][4].startswith("+1.00 ± 0.00 (p = ") and rows["FedAvg"][4].endswith(
        "n = 15 in 5 settings)"
    )
    assert rows["FedAvg"][2] == "53.68"


def test_table_marks_diverged_seeds(results: Results) -> None:
    add_result(results, STUDY.cells[2], 0, [0.5, 0.1], diverged="training diverged in round 3")
    rows = [row[0] for row in tables.tables_of(STUDY, results)[0].rows]
    assert rows[2] == "FedProx (1 of 1 seeds diverged)"
    # A diverged run has no last round.
    assert tables.tables_of(STUDY, results)[0].rows[2][1:3] == ["not run", "50.00"]


def test_caption_states_seeds_date_device_and_command(results: Results) -> None:
    caption = tables.caption(STUDY, results)
    assert caption == (
        "Table 9. Three rounds. Seeds 0, 1, 2; 2026-02-03, a GPU, torch 2.0, commit abc, by "
        "`fedcog reproduce x`."
    )
    assert "Nothing of it was run" in tables.caption(STUDY, Results(results.path / "nothing"))


def test_caption_names_rows_with_another_warm_start(
    tmp_path: Path,
) -> None:
    results = Results(tmp_path)
    study = comparisons.niid2_gain()
    cells = [cell for cell in study.cells if cell.block == "CIFAR-100, NIID-2"]
    for cell in cells:
        for seed in range(6):
            other_noise = (cell.row, seed) in {("plain noise", 0), ("plain noise", 4)}
            other_start = other_noise or cell.row == "FedAvg"
            add_result(
                results,
                cell,
                seed,
                [0.5] * 70,
                loss=[2.0 + 0.1 * other_start] * 50 + [float(len(cell.row))] * 20,
            )
    assert tables.caption(study, results).endswith(
        " From another run of their start than the others, with its own rounding: plain noise "
        "(CIFAR-100, NIID-2), "
        "seeds 0, 4; FedAvg (CIFAR-100, NIID-2), all seeds."
    )


def test_markdown_latex_and_notes_show_results(results: Results) -> None:
    assert (
        "| FedAvg | 40.00 ± 10.00 | 50.00 ± 10.00 | 41.00 ± 0.50 | +9.00 | +2.00 ± 2.48 |"
        in tables.markdown(STUDY, results)
    )
    latex = tables.latex(STUDY, results)
    assert (
        r"FedAvg & 40.00 $\pm$ 10.00 & 50.00 $\pm$ 10.00 & 41.00 $\pm$ 0.50 & $+$9.00 & $+$2.00 "
        r"$\pm$ 2.48 \\" in latex
    )
    assert latex.count(r"\begin{tabular}") == latex.count(r"\end{tabular}") == 2
    notes = (
        "At {{x | one | FedAvg | last}}, so {{x | one | FedCOG - FedAvg | last}}; {{x | one | "
        "FedProx | best}}."
    )
    with pytest.raises(RecordError, match="no row FedOops"):
        tables.fill_notes("{{x | one | FedOops | last}}", {"x": STUDY}, results)
    with pytest.raises(RecordError, match="not of the form"):
        tables.fill_notes("{{x | one}}", {"x": STUDY}, results)
    assert (
        tables.fill_notes(notes, {"x": STUDY}, results)
        == "At 40.00 ± 10.00, so +2.00 ± 2.48; not run."
    )


def test_provenance_is_escaped_in_captions(tmp_path: Path) -> None:
    results = Results(tmp_path)
    provenance = {
        "command": "x\n\\input{/etc/passwd} <script>|`*",
        "started": "2026",
        "device": "a&b",
        "torch": "$1",
        "commit": "~^",
    }
    results.add(
        job_of(STUDY.cells[0], 0), {"accuracy": [0.5], "clients": [], "provenance": provenance}
    )
    latex = tables.latex(STUDY, results)
    caption = tables.caption(STUDY, results)
    assert (
        latex.splitlines()[0].startswith("% Some study")
        and r"\textbackslash{}input\{/etc/passwd\}" in latex.splitlines()[0]
    )
    assert "\\input" not in latex and "<script>" not in caption and "|" not in caption
    assert caption.count("`") == 2 and "\n" not in caption


def test_best_score_ignores_warm_start_rounds(tmp_path: Path) -> None:
    results = Results(tmp_path)
    study = comparisons.plug_and_play()
    add_result(results, study.cells[0], 0, [0.9] * 50 + [0.4])
    assert tables.tables_of(study, results)[0].rows[0][1:3] == ["40.00", "40.00"]


def test_multi_label_scores_have_separate_tables_and_bests(
    tmp_path: Path,
) -> None:
    results = Results(tmp_path)
    study = comparisons.flair()
    cells = {(cell.block, cell.row): cell for cell in study.cells}
    # Scores of the warm start, which must not count as an algorithm's best.
    warm_start_scores = [0.99 if round % 20 == 0 else None for round in range(1, 401)]
    for row, gain in (("FedAvg", 0.0), ("FedCOG", 0.04)):
        for seed in (0, 1):
            scores = {
                "c_p": [*warm_start_scores, 0.3, 0.2, 0.2, 0.2, 0.1 + gain],
                "o_f1": [*warm_start_scores, 0.4, 0.4, 0.4, 0.5, 0.42 + gain * seed],
            }
            line = scores | {"clients": [], "provenance": PROVENANCE}
            # One run supplies the scores of all blocks.
            results.add(job_of(cells["FLAIR, C-P", row], seed), line)
    results.add(
        job_of(cells["FLAIR, C-P", "FedExP"], 0),
        {"diverged": "x", "clients": [], "provenance": PROVENANCE},
    )
    grids = {
        grid.title: {row[0]: row[1:] for row in grid.rows}
        for grid in tables.tables_of(study, results)
    }
    assert (
        list(grids)[:4] == ["FLAIR, C-P", "Mosaics, C-P", "FLAIR, C-R", "Mosaics, C-R"]
        and len(grids) == 10
    )
    assert grids["FLAIR, C-P"]["FedAvg"] == [
        "10.00 ± 0.00",
        "30.00 ± 0.00",
        "30.76",
        "-0.76",
        "+4.00 ± 0.00",
    ]
    assert grids["FLAIR, O-F1"]["FedAvg"][:4] == ["42.00 ± 0.00", "50.00 ± 0.00", "44.53", "+5.47"]
    assert grids["FLAIR, O-F1"]["FedAvg"][4].startswith("+2.00 ± ")
    assert grids["FLAIR, C-R"]["FedAvg"] == ["not run", "not run", "14.23", "", ""]
    assert grids["FLAIR, mAP"]["FedCOG"][2] == ""  # the paper reports no mAP
    assert grids["FLAIR, C-P"]["FedExP (1 of 1 seeds diverged)"][:2] == ["not run", "not run"]
    assert grids["Mosaics, C-P"]["FedCOG, lambda_kd = 0.01"] == ["not run", "not run", "", "", ""]
    assert not {"VHL", "FedReg", "FedGen"} & {
        cell.row for cell in study.cells
    } and "VHL" in tables.caption(study, results)


def test_one_row_study_is_one_table(tmp_path: Path) -> None:
    study = analyses.generation_steps()
    results = Results(tmp_path)
    add_result(results, study.cells[1], 0, [0.5])
    (grid,) = tables.tables_of(study, results)
    assert grid.header[0] == "generation steps"
    assert [row[0] for row in grid.rows] == ["0", "50", "100", "500", "1000"]
    assert grid.rows[1] == ["50", "50.00", "50.00", "65.40", "-15.40"]


def test_seconds_are_means_over_clients(tmp_path: Path) -> None:
    study = analyses.generation_time()
    results = Results(tmp_path)
    results.add(
        job_of(study.cells[0], 0), {"found": {"seconds": [0.5, 1.5]}, "provenance": PROVENANCE}
    )
    (grid,) = tables.tables_of(study, results)
    assert grid.header == ["inputs", "ours (s)", "paper (s)"]
    assert grid.rows[0] == ["16", "1.00 ± 0.71", "0.72"]


def test_training_time_counts_all_rounds_except_for_fedcog(tmp_path: Path) -> None:
    study = analyses.training_time()
    results = Results(tmp_path)
    for cell in study.cells[:4]:
        findings = {"seconds": [1.0, 3.0], "round": [0.1, 0.1]}
        results.add(job_of(cell, 0), {"found": findings, "provenance": PROVENANCE})
    rows = {row[0]: row[1] for row in tables.tables_of(study, results)[0].rows}
    assert rows["FedAvg"] == rows["FedCOG"] == "2.00 ± 1.41"
    assert rows["FedProx"] == rows["MOON"] == rows["FedCOG in every round"] == "5.10 ± 0.00"


def test_paper_averages_follow_from_paper_numbers() -> None:
    # The paper's averages over six settings follow from its columns, up to rounding.
    known_errors = {"FedReg": 0.035}  # 49.555, where the paper prints 49.52
    for row, text in numbers.MAIN_COMPARISON.items():
        gap = sum(numbers.parse_numbers(text)[::2]) / 6 - numbers.MAIN_AVERAGES[row]
        assert math.isclose(gap, known_errors.get(row, 0.0), abs_tol=0.006), row
    assert all(len(numbers.parse_numbers(text)) == 12 for text in numbers.MAIN_COMPARISON.values())
    assert all(len(numbers.parse_numbers(text)) == 8 for text in numbers.PLUG_AND_PLAY.values())
    assert all(len(numbers.parse_numbers(text)) == 4 for text in numbers.FLAIR.values())
    assert len(numbers.MAIN_COMPARISON) == 12 and len(experiments.SETTINGS) == 6


def test_studies_use_the_papers_settings() -> None:
    for study in paper.studies().values():
        for cell in study.cells:
            is_multi_label = cell.experiment.dataset in ("flair", "mosaics")
            if is_multi_label:
                warm_rounds = 400
                allowed_rounds = (403, 405)
            else:
                warm_rounds = 50
                allowed_rounds = (51, 70)
            assert cell.experiment.rounds in allowed_rounds and cell.experiment.lr == 0.01
            algorithm = cell.experiment.algorithm
            if cell.warm_start is not None:
                start = cell.warm_start.experiment_before(cell.experiment)
                assert start.rounds == warm_rounds and not changed_settings(cell.experiment, start)
                if isinstance(start.algorithm, FedCOG):
                    assert start.algorithm.start_round == warm_rounds
                else:  # an algorithm that no study wraps with FedCOG
                    assert is_multi_label and start.algorithm == algorithm
            if isinstance(algorithm, FedCOG):
                # FedCOG's clients need a previous model.
                assert cell.warm_start is not None and algorithm.start_round >= warm_rounds
    fractions = {cell.experiment.participation for cell in paper.studies()["participation"].cells}
    assert fractions == {0.1, 0.2, 0.3, 0.4}


@pytest.mark.slow
def test_results_page_is_rendered_from_results(tmp_path: Path) -> None:
    """`fedcog reproduce all --render --out docs` gives docs/results.md and .tex."""
    results = Results(REPO / "results")
    studies = paper.studies()
    parts = reproduction.parts_of(list(studies.values()), results)
    assert (REPO / "docs/results.md").read_text(encoding="utf-8") == reproduction.markdown(
        parts, results
    )
    assert (REPO / "docs/results.tex").read_text(encoding="utf-8") == reproduction.latex(
        parts, results
    )
    for part in parts:
        for name in part.figures:
            assert all(
                (REPO / "docs/figures" / f"{name}.{kind}").stat().st_size > 1000
                for kind in ("svg", "png")
            )
    changed_results = Results(tmp_path)  # one changed number changes the table
    shutil.copytree(
        REPO / "results", tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("runs")
    )
    cell = next(cell for cell in studies["main"].cells if results.has(job_of(cell, 0)))
    (file,) = [
        file for file in tmp_path.rglob("*.jsonl") if file.stem.endswith(job_of(cell, 0).key)
    ]
    head, first, *rest = file.read_text().splitlines(keepends=True)
    i = first.index("]", first.index('"accuracy":['))
    file.write_text("".join([head, first[:i] + ",0.99" + first[i:], *rest]))
    assert tables.markdown(studies["main"], changed_results) != tables.markdown(
        studies["main"], results
    )


def test_results_contain_no_local_paths() -> None:
    for file in (REPO / "results").rglob("*.jsonl"):
        if "runs" not in file.relative_to(REPO).parts:
            text = file.read_text()
            assert "/root" not in text and "/tmp" not in text and "/home" not in text, file


def test_fedavg_row_is_plain_fedavg() -> None:
    cell = next(cell for cell in comparisons.main_comparison().cells if cell.row == "FedAvg")
    assert type(cell.experiment.algorithm) is Algorithm
