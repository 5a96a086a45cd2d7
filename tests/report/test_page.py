"""Tests of the HTML report, on run directories written by the tests."""

import html
import re
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import pytest
import torch
from matplotlib.figure import Figure
from torch import Tensor

from fedcog.algorithms import Algorithm, FedCOG
from fedcog.report import figures, page, partition_figure, run_values
from fedcog.report.figures import Curve, curves_figure
from fedcog.runs.config.experiment import Experiment
from fedcog.runs.records.recorded_run import read
from fedcog.runs.records.run_directory import RecordError, RunDirectory
from fedcog.runs.records.summary import Spread, group
from tests.support.browser import browser, console_messages, open_page, run_script

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

__all__ = ["browser"]

torch.set_num_threads(1)

COUNTS = torch.tensor([[5, 0, 3], [0, 7, 1]])
CLASSES = ["cat", "dog", "ox"]


def round_line(round: int, accuracy: float | None, clients: int = 2) -> dict[str, Any]:
    """The recorded line of a round; it was not evaluated if `accuracy` is None."""
    local: list[dict[str, Any]] = [
        {"client": client, "loss": 1.0 / round, "distance": 0.5 + client}
        for client in range(clients)
    ]
    line = {
        "round": round,
        "clients": list(range(clients)),
        "loss": 1.0 / round,
        "local": local,
        "seconds": {"generation": 0.5, "training": 1.0, "evaluation": 0.25, "total": 2.0},
    }
    if accuracy is None:
        return line
    for client in local:
        client |= {
            "accuracy": accuracy,
            "own_accuracy": 0.9,
            "own_accuracy_before": None if client["client"] else 0.4,
        }
    return line | {"accuracy": accuracy, "label_mix_accuracy": accuracy + 0.1}


def write_run(
    path: Path,
    accuracies: list[float | None],
    *,
    algorithm: Algorithm | None = None,
    seed: int = 0,
    counts: Tensor | None = COUNTS,
    classes: list[str] = CLASSES,
    artifacts: tuple[int, ...] | None = None,
    command: str = "fedcog run",
    rounds: int | None = None,
) -> Path:
    """Write a run directory with these accuracies, round by round."""
    directory = RunDirectory(path)
    experiment = Experiment(
        algorithm=algorithm or Algorithm(), seed=seed, rounds=rounds or max(1, len(accuracies))
    )
    directory.begin(
        experiment, {"command": command, "started": "2026-01-02T03:04:05+00:00", "torch": "2.0"}
    )
    if counts is not None:
        tensors = {"counts": counts}
        if artifacts:
            tensors |= {"real_images": torch.full((6, *artifacts), 200, dtype=torch.uint8)}
            tensors |= {"real_labels": torch.arange(3).repeat(2)}
        about = {
            "dataset": "animals",
            "classes": classes,
            "test_examples": 30,
            "parameters": 1234,
            "model": "small",
        }
        directory.save_federation(tensors, about)
    for round, accuracy in enumerate(accuracies, 1):
        directory.append(round_line(round, accuracy, 2 if counts is None else counts.shape[0]))
    if artifacts:
        images = (
            torch.arange(3 * 8, dtype=torch.uint8)
            .view(3, 8, *(1 for _ in artifacts))
            .expand(3, 8, *artifacts)
        )
        labels = torch.arange(8) % 3
        steps = torch.tensor([0, 5, 10])
        directory.save_artifacts(
            len(accuracies), {"images": images, "labels": labels, "steps": steps}
        )
    return path


def visible_text(text: str) -> str:
    """The text of a page outside figures, without markup."""
    text = re.sub(r"<(style|svg).*?</\1>", "", text, flags=re.DOTALL)
    return html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", text)))


def result_cells(text: str, label: str) -> list[str]:
    """The cells of the results' row that starts with `label`."""
    rows = re.findall(r"<tr>.*?</tr>", text, re.DOTALL)
    row = next(row for row in rows if visible_text(row).split()[0] == label)
    return [visible_text(cell).strip() for cell in re.findall(r"<td.*?</td>", row, re.DOTALL)]


@pytest.fixture(scope="module")
def six_runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Runs of FedAvg and FedCOG, three seeds each."""
    tmp_path = tmp_path_factory.mktemp("six")
    fedavg_scores = [[0.2, 0.4, 0.3], [0.2, 0.5, 0.4], [0.2, 0.6, 0.5]]
    fedcog_scores = [[0.2, 0.5, 0.6], [0.2, 0.4, 0.7], [0.2, 0.3, 0.35]]
    paths = [
        write_run(tmp_path / f"a{seed}", [*scores], seed=seed)
        for seed, scores in enumerate(fedavg_scores)
    ]
    fedcog = FedCOG(start_round=1)
    return paths + [
        write_run(
            tmp_path / f"b{seed}",
            [*scores],
            seed=seed,
            algorithm=fedcog,
            artifacts=(1, 8, 8),
            command="fedcog run --b",
        )
        for seed, scores in enumerate(fedcog_scores)
    ]


@pytest.fixture(scope="module")
def report_html(six_runs: list[Path]) -> str:
    """The page about the six runs."""
    return page(six_runs)


@pytest.fixture
def without_drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Create figures without drawing them, which takes most of the time of a page."""
    monkeypatch.setattr(Figure, "savefig", lambda figure, file, **_: file.write("<svg></svg>"))


def test_results_are_means_and_sample_deviations_over_seeds(report_html: str) -> None:
    # FedAvg ends at 30, 40 and 50 % with best rounds of 40, 50 and 60 %. So the target is 40 %,
    # and every seed reaches it in round 2.
    assert result_cells(report_html, "fedavg") == [
        "40.00 ± 10.00",
        "50.00 ± 10.00",
        "50.00 ± 10.00",
        "2",
        "0, 1 and 2",
        "2",
    ]
    deviation = 100 * statistics.stdev([0.6, 0.7, 0.35])
    last = f"55.00 ± {deviation:.2f}"
    assert result_cells(report_html, "fedavg+fedcog")[:2] == [last, last]
    assert result_cells(report_html, "fedavg+fedcog")[3:5] == ["2 (2 of 3 seeds)", "0, 1 and 2"]
    assert "Rounds to 40 %" in visible_text(report_html)
    assert "optimistic" in visible_text(report_html)


@pytest.mark.usefixtures("without_drawing")
def test_target_reached_by_few_or_no_seeds(six_runs: list[Path]) -> None:
    report_html = page(six_runs, target=0.65)
    assert result_cells(report_html, "fedavg")[3] == "never"
    assert result_cells(report_html, "fedavg+fedcog")[3] == "> 3 (1 of 3 seeds)"


@pytest.mark.usefixtures("without_drawing")
@pytest.mark.parametrize(
    ("last", "target"), [(0.65, "65 %"), (0.64, "60 %"), (0.15, "15 %"), (0.034, "3 %")]
)
def test_target_is_the_last_accuracy_rounded_down(tmp_path: Path, last: float, target: str) -> None:
    assert f"Rounds to {target}" in visible_text(page([write_run(tmp_path, [last])]))


@pytest.mark.parametrize("target", [0.0, 60.0])
def test_target_must_be_a_fraction(tmp_path: Path, target: float) -> None:
    with pytest.raises(ValueError, match=r"such as 0\.6"):
        page([write_run(tmp_path, [0.5])], target=target)


def test_page_is_self_contained(report_html: str) -> None:
    addresses = set(re.findall(r"\w+://[^\s\"'<>)]+", report_html))
    # These are XML namespaces; browsers do not fetch them.
    assert addresses == {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert re.findall(r'(?:src|href)="(?!data:|#)[^"]*', report_html) == []
    assert not re.search(
        r"@import|url\((?!#)|<script|<link (?!rel=\"icon\" href=\"data:,\")", report_html
    )
    assert 'lang="en"' in report_html
    assert "width=device-width" in report_html


@pytest.mark.usefixtures("without_drawing")
def test_title_can_be_set(six_runs: list[Path], report_html: str) -> None:
    assert "<h1>fedavg and fedavg+fedcog on animals</h1>" in report_html
    assert "<h1>Six runs</h1>" in page(six_runs, title="Six runs")


@pytest.mark.usefixtures("without_drawing")
def test_headline_names_the_compared_algorithms(
    six_runs: list[Path], report_html: str, tmp_path: Path
) -> None:
    assert "Compared here: fedavg and fedavg+fedcog. Data: animals" in visible_text(report_html)
    assert "Compared" not in visible_text(page(six_runs[:3]))
    late_start = write_run(tmp_path, [0.1], algorithm=FedCOG(start_round=2))
    assert "Compared here: 2 settings of fedavg+fedcog. Data" in visible_text(
        page([six_runs[3], late_start])
    )
    assert "Compared here: 3 settings of fedavg and fedavg+fedcog. Data" in visible_text(
        page([six_runs[0], six_runs[3], late_start])
    )


def test_figures_have_labels_captions_and_unique_ids(report_html: str) -> None:
    figure_tags = re.findall(r"<figure>.*?</figure>", report_html, re.DOTALL)
    assert len(figure_tags) == 2 + 1 + 1 + 1 + 2 * 2 + 1
    for figure in figure_tags:
        assert re.search(r'<svg role="img" aria-label="[^"]{20,}"|<img [^>]*alt="[^"]+"', figure)
        assert "<figcaption>" in figure
    ids = re.findall(r'\bid="([^"]+)"', report_html)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', report_html)) <= set(ids)


def test_page_is_deterministic(six_runs: list[Path], report_html: str) -> None:
    assert page(six_runs) == report_html


@pytest.mark.usefixtures("without_drawing")
def test_repeated_directory_counts_once(six_runs: list[Path]) -> None:
    assert page([six_runs[0], six_runs[0]]) == page([six_runs[0]])


def test_first_round_of_fedcog_is_marked(report_html: str, tmp_path: Path) -> None:
    assert "FedCOG from round 2" in report_html
    inactive = write_run(tmp_path / "late", [0.1, 0.2], algorithm=FedCOG(start_round=2))
    assert "FedCOG from round" not in page([inactive])


def test_hostile_names_are_escaped(tmp_path: Path) -> None:
    class_names = [
        "<script>alert(1)</script>",
        '"><img src=x onerror=alert(2)>',
        '$\\frac{1}{$ & \x00\ud800 id="x',
    ]
    path = write_run(
        tmp_path,
        [0.5],
        classes=class_names,
        artifacts=(3, 4, 4),
        command="fedcog <script>alert(3)</script> & more",
    )
    report_html = page([path], title="<b>bold</b>")
    assert "<script" not in report_html
    assert not re.search(r"<img (?!(class=\"small\" )?alt=)", report_html)
    assert "<b>" not in report_html
    assert "fedcog <script>alert(3)</script> & more" in visible_text(report_html)
    assert "<script>alert(1)</script>" in visible_text(report_html)
    report_html.encode()


def test_generated_images_are_shown_with_real_ones(report_html: str) -> None:
    section = report_html.split('<section id="generated">')[1].split("</section>")[0]
    rows = re.findall(r"<tr.*?</tr>", section, re.DOTALL)
    assert [visible_text(row).split() for row in rows] == [
        ["cat", "dog", "ox", "cat", "dog", "ox", "cat", "dog"],
        ["step", "0"],
        ["step", "5"],
        ["step", "10"],
        ["real"],
    ]
    assert all(row.count("data:image/png;base64,") == 8 for row in rows[1:])
    assert "client 0 generated in round 3 (fedavg+fedcog, seed 0)" in section


@pytest.mark.usefixtures("without_drawing")
@pytest.mark.parametrize("shape", [(2, 5, 7), (4, 6, 6), (3, 70, 70)])
def test_images_may_have_any_number_of_channels(tmp_path: Path, shape: tuple[int, ...]) -> None:
    report_html = page(
        [write_run(tmp_path, [0.5], algorithm=FedCOG(start_round=0), artifacts=shape)]
    )
    assert report_html.count('src="data:image/png') == 4 * 8
    assert ('class="small"' in report_html) == (max(shape) < 64)


@pytest.mark.usefixtures("without_drawing")
def test_inputs_that_are_not_images_are_not_drawn(tmp_path: Path) -> None:
    assert "not pictures" in visible_text(page([write_run(tmp_path, [0.5], artifacts=(6,))]))


def test_unevaluated_rounds_and_nan_losses_are_accepted(tmp_path: Path) -> None:
    path = write_run(tmp_path, [None, 0.5, None])
    RunDirectory(path).append(round_line(4, None) | {"loss": float("nan"), "local": []})
    report_html = page([path])
    assert result_cells(report_html, "fedavg")[:2] == ["50.00", "50.00"]


@pytest.mark.usefixtures("without_drawing")
def test_unfinished_run_is_marked(tmp_path: Path) -> None:
    path = write_run(tmp_path, [0.1, 0.2], rounds=5)
    with open(path / "rounds.jsonl", "a") as file:
        file.write('{"round": 3, "accur')
    report_html = page([path], target=0.9)
    assert "Unfinished: fedavg, seed 0: 2 of 5 rounds." in visible_text(report_html)
    assert result_cells(report_html, "fedavg")[3] == "not yet"


def test_run_without_rounds_has_no_results(tmp_path: Path) -> None:
    page_text = visible_text(page([write_run(tmp_path, [])]))
    assert "0 of 1 rounds" in page_text
    assert "no results" in page_text
    assert "no time has been measured" in page_text


@pytest.mark.usefixtures("without_drawing")
def test_repeated_seeds_are_noted(tmp_path: Path) -> None:
    same_seed = [write_run(tmp_path / name, [0.5]) for name in "ab"]
    with pytest.warns(UserWarning, match="of several runs with seed 0, the first counts"):
        page_text = visible_text(page(same_seed))
    assert "fedavg: of several runs with seed 0, the first counts" in page_text


@pytest.mark.usefixtures("without_drawing")
def test_missing_or_damaged_files_are_named(tmp_path: Path) -> None:
    path = write_run(tmp_path, [0.5], counts=None)
    (path / "provenance.json").unlink()
    (path / "exhibits").mkdir()
    (path / "exhibits" / "00001.safetensors").write_bytes(b"rubbish")
    page_text = visible_text(page([path]))
    assert "federation.safetensors is missing" in page_text
    assert "provenance.json is missing" in page_text
    assert "The file is damaged" in page_text


def test_page_without_runs_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"experiment\.toml is missing"):
        page([tmp_path])
    with pytest.raises(ValueError, match="at least one"):
        page([])


def test_scores_are_drawn_against_virtual_seconds(tmp_path: Path) -> None:
    """A point is a round: the mean score over seeds, at the mean of their virtual times."""
    timed = [write_run(tmp_path / f"timed-{seed}", [], seed=seed, rounds=2) for seed in (0, 1)]
    for path, times, scores in zip(
        timed, [(10, 20), (13, 28)], [(0.2, 0.5), (0.4, 0.7)], strict=True
    ):
        for round, (time, score) in enumerate(zip(times, scores, strict=True), 1):
            RunDirectory(path).append(round_line(round, score) | {"virtual_seconds": time})
    plain = write_run(tmp_path / "plain", [0.3, 0.6], algorithm=FedCOG())
    groups = group([read(path) for path in [plain, *timed]])
    (curve,) = run_values.curves_over_virtual_time(groups, lambda line: [line.get("accuracy")])
    assert curve.label == "fedavg" and curve.style == figures.line_style(1)
    assert [x for x, _ in curve.points] == [11.5, 24]
    assert [value.mean for _, value in curve.points] == pytest.approx([0.3, 0.6])
    with_times = visible_text(page([plain, *timed]))
    assert "against virtual time" in with_times and "over virtual seconds: fedavg" in page(timed)
    assert "virtual seconds" not in page([plain])


@pytest.mark.usefixtures("without_drawing")
@pytest.mark.parametrize(("last", "scale"), [(3.0, "linear"), (1e7, "log"), (0.0, "linear")])
def test_log_scale_is_used_only_for_diverged_curves(last: float, scale: str) -> None:
    normal = Curve(
        "calm", [(round, Spread(1 / round, 0.1, 3)) for round in range(1, 5)], figures.line_style(0)
    )
    other = Curve("other", [*normal.points[:3], (4, Spread(last, last, 3))], figures.line_style(1))
    plot = curves_figure([normal, other], "training loss")
    axes = plot.figure.axes[0]
    assert axes.get_yscale() == scale
    plot.figure.draw_without_rendering()
    tick_labels = [tick.get_text() for tick in axes.get_yticklabels()]
    assert any(tick_labels)
    assert not any("mathdefault" in tick_label for tick_label in tick_labels)
    assert scale == "linear" or axes.get_ylim()[0] == pytest.approx(1 / 8)


@pytest.mark.slow
def test_at_most_six_distinct_partitions_are_shown(tmp_path: Path) -> None:
    same_partition = [write_run(tmp_path / f"s{seed}", [0.5], seed=seed) for seed in range(2)]
    assert page(same_partition).count("<summary>") == 1
    distinct_partitions = [
        write_run(tmp_path / f"o{n}", [0.5], seed=n, counts=torch.full((n + 1, 3), 4))
        for n in range(8)
    ]
    report_html = page(distinct_partitions)
    assert report_html.count("<summary>") == 6
    assert "2 more partitions are not shown" in report_html


@pytest.mark.usefixtures("without_drawing")
def test_large_table_is_left_out(tmp_path: Path) -> None:
    report_html = page(
        [write_run(tmp_path, [0.5], counts=torch.ones(201, 100, dtype=torch.int64), classes=[])]
    )
    assert "A table of 20,100 numbers is left out" in report_html
    assert "<summary>" not in report_html


def test_differing_settings_come_first(report_html: str) -> None:
    differing = re.findall(r'<tr class="differs">.*?</tr>', report_html, re.DOTALL)
    assert visible_text(differing[0]).split() == ["algorithm", "fedavg", "fedavg+fedcog"]
    assert any("fedcog.start_round" in row for row in differing)
    shared_settings = report_html.split("The same for all")[1]
    assert re.search(r"seed</code></th><td>0, 1, 2</td>", shared_settings)
    assert (
        report_html.count("<code>fedcog run</code>")
        == report_html.count("<code>fedcog run --b</code>")
        == 1
    )


@pytest.mark.parametrize(
    ("num_clients", "num_classes", "shows_numbers"),
    [(1, 1, True), (10, 10, True), (100, 100, False)],
)
def test_partition_figure_is_a_standalone_svg(
    num_clients: int, num_classes: int, shows_numbers: bool
) -> None:
    counts = torch.arange(num_clients * num_classes).view(num_clients, num_classes) % 997
    svg = partition_figure(counts, [f"class {c} & <more>" for c in range(num_classes)])
    root = ElementTree.fromstring(svg)
    assert f"{num_clients} clients" in root.attrib["aria-label"]
    texts = [
        "".join(element.itertext()).strip()
        for element in root.iter("{http://www.w3.org/2000/svg}text")
    ]
    assert "class 0 & <more>" in texts
    assert ("99" in texts) == (shows_numbers and num_clients > 1)
    assert len(svg) < 300_000


@pytest.mark.parametrize(
    ("num_clients", "labels"),
    [(3, {"0 ann", "1 <b>", "2 ann"}), (60, {"0 ann", "5 <b>", "10 ann"})],
)
def test_partition_figure_names_users(num_clients: int, labels: set[str]) -> None:
    names = [("ann", "<b>")[client % 2] for client in range(num_clients)]
    svg = partition_figure(torch.ones(num_clients, 2), ["a", "b"], names=names)
    texts = {
        "".join(element.itertext()).strip()
        for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    }
    assert labels <= texts
    assert ("1 <b>" in texts) == (num_clients == 3), "labels that do not fit are left out"


TABLES_VISIBLE = """return [...document.querySelectorAll("details table")]
    .map(table => table.checkVisibility())"""
SIZES = (
    "const page = document.documentElement; return [page.scrollWidth, page.clientWidth, "
    "page.scrollHeight]"
)


@pytest.mark.slow
def test_page_fits_a_phone_and_prints_tables_that_fit(
    browser: "Chrome", six_runs: list[Path], tmp_path: Path
) -> None:
    wide_table = write_run(
        tmp_path / "wide",
        [0.5],
        counts=torch.ones(40, 60, dtype=torch.int64),
        classes=["longish" * 9] * 60,
        command="x" * 500,
    )
    report_html = page([*six_runs, wide_table])
    (tmp_path / "open.html").write_text(
        report_html.replace("<details>", "<details open>"), encoding="utf-8"
    )
    open_page(browser, tmp_path / "open.html", "phone")
    page_width, window_width, page_height = run_script(browser, SIZES)
    assert 300 < window_width <= 390
    assert page_width <= window_width
    assert page_height > 3000
    assert run_script(browser, TABLES_VISIBLE) == [True, True]
    (tmp_path / "page.html").write_text(report_html, encoding="utf-8")
    open_page(browser, tmp_path / "page.html", "desktop")
    assert run_script(browser, TABLES_VISIBLE) == [False, False]
    open_page(browser, tmp_path / "page.html", "desktop", media="print")
    # The table of sixty classes is too wide for paper.
    assert run_script(browser, TABLES_VISIBLE) == [True, False]
    assert console_messages(browser) == []
