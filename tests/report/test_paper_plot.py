"""Tests of learning curves for papers: what is drawn, sizes, fonts and formats."""

import dataclasses
import re
import statistics
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from PIL import Image

import fedcog
from fedcog import ConfigError, FedProx, Run
from fedcog.report import paper_plot
from tests.studies.test_comparison_table import FEDAVG, make_run, two_methods


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are drawn."""
    drawn: list[Figure] = []
    draw = paper_plot.curves_figure

    def record(*args: object, **keywords: object) -> Figure:
        drawn.append(draw(*args, **keywords))  # type: ignore[arg-type]
        return drawn[-1]

    monkeypatch.setattr(paper_plot, "curves_figure", record)
    return drawn


def legend_texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_lines_are_means_and_bands_are_deviations(tmp_path: Path, figures: list[Figure]) -> None:
    fedcog.plot(two_methods(), tmp_path / "curves.png")
    (axes,) = figures[0].axes
    assert legend_texts(figures[0]) == ["fedprox", "fedavg"]
    by_round = [list(values) for values in zip(*FEDAVG.values(), strict=True)]
    means = [100 * statistics.fmean(values) for values in by_round]
    line = axes.lines[1]
    assert list(line.get_xdata()) == [1, 2, 3]
    assert list(line.get_ydata()) == pytest.approx(means)
    outline = axes.collections[1].get_paths()[0].vertices
    deviation = 100 * statistics.stdev(by_round[0])
    first_round = [y for x, y in outline if x == 1]
    assert min(first_round) == pytest.approx(means[0] - deviation)
    assert max(first_round) == pytest.approx(means[0] + deviation)
    assert axes.get_ylabel() == "test accuracy (%)" and axes.get_xlabel() == "round"


def test_trials_of_a_sweep_do_not_lengthen_labels(tmp_path: Path, figures: list[Figure]) -> None:
    trial = make_run([0.3], metric="validation_accuracy", lr=0.5, evaluate_local=False)
    fedcog.plot([make_run([0.4], lr=0.1), trial], tmp_path / "curves.png")
    assert legend_texts(figures[0]) == ["fedavg"]


def test_png_is_one_column_wide_at_300_dpi(tmp_path: Path) -> None:
    with Image.open(fedcog.plot(two_methods(), tmp_path / "curves.png")) as image:
        assert image.width == round(3.3 * 300) and 500 < image.height < 900
        assert image.info["dpi"] == pytest.approx((300, 300), abs=0.1)


def test_pdf_embeds_truetype_and_names_no_date(tmp_path: Path) -> None:
    content = fedcog.plot(two_methods(), tmp_path / "curves.pdf").read_bytes()
    assert content.startswith(b"%PDF") and b"/FontFile2" in content
    assert b"/Type3" not in content and b"CreationDate" not in content


@pytest.mark.parametrize("suffix", [".pdf", ".svg", ".png", ".PNG"])
def test_equal_runs_give_equal_files(tmp_path: Path, suffix: str) -> None:
    files = [fedcog.plot(two_methods(), tmp_path / f"{name}{suffix}") for name in ("a", "b")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_other_metrics_are_drawn_by_their_key(tmp_path: Path, figures: list[Figure]) -> None:
    fedcog.plot(two_methods(), tmp_path / "loss.svg", metric="loss")
    assert figures[0].axes[0].get_ylabel() == "loss"
    losses = [1 - scores[0] for scores in FEDAVG.values()]
    assert figures[0].axes[0].lines[1].get_ydata()[0] == pytest.approx(statistics.fmean(losses))
    with pytest.raises(ConfigError, match="unknown metric 'lost': did you mean loss"):
        fedcog.plot(two_methods(), tmp_path / "loss.svg", metric="lost")


def test_one_evaluated_round_is_a_point_with_an_error_bar(
    tmp_path: Path, figures: list[Figure]
) -> None:
    fedcog.plot([make_run([0.4], seed=0), make_run([0.6], seed=1)], tmp_path / "one.png")
    axes = figures[0].axes[0]
    (bar,) = (one for container in axes.containers for one in container.lines[2])
    ends = bar.get_segments()[0][:, 1]
    deviation = 100 * statistics.stdev([0.4, 0.6])
    assert list(ends) == pytest.approx([50 - deviation, 50 + deviation])
    assert list(axes.get_xticks()) == [1]


def long_runs() -> list[Run]:
    return [
        make_run([0.1 * mu, mu], algorithm=FedProx(mu=mu), lr=lr, momentum=momentum)
        for mu in (0.1, 0.2, 0.3)
        for lr in (0.01, 0.02)
        for momentum in (0.5, 0.9)
    ]


def test_long_labels_and_many_groups_stay_inside_the_figure(
    tmp_path: Path, figures: list[Figure]
) -> None:
    fedcog.plot(long_runs(), tmp_path / "many.png")
    (figure,) = figures
    labels = legend_texts(figure)
    assert len(set(labels)) == 12
    assert labels[0].replace("\n", " ") == "fedprox (mu=0.1, lr=0.01, momentum=0.5)"
    figure.canvas.draw()
    legend = figure.legends[0].get_window_extent()
    axes = figure.axes[0].get_window_extent()
    assert legend.x0 >= 0 and legend.x1 <= figure.bbox.width
    assert legend.y1 <= figure.bbox.height + 1
    assert axes.y1 <= legend.y0, "the legend is above the curves"
    assert axes.height > 1.2 * figure.dpi


@pytest.mark.parametrize("metric", ["", "local_test/personal_accuracy_deviation"])
def test_axis_label_stays_inside_the_figure(
    tmp_path: Path, figures: list[Figure], metric: str
) -> None:
    lines = {"evaluated_on": "clients", "local_test": {"personal_accuracy_deviation": 0.1}}
    runs = [
        dataclasses.replace(run, lines=[line | lines for line in run.lines])
        for run in two_methods()
    ]
    fedcog.plot(runs, tmp_path / "x.png", metric)
    (figure,) = figures
    figure.dpi = paper_plot.DPI  # texts keep the sizes that they had when the file was written
    figure.canvas.draw()
    label = figure.axes[0].yaxis.label
    expected = metric or "accuracy on the clients' own test examples"
    assert label.get_text().replace("\n", "" if metric else " ") == f"{expected} (%)"
    extent = label.get_window_extent()
    assert extent.y0 >= 0 and extent.y1 <= figure.bbox.height and extent.x0 >= 0


@pytest.mark.parametrize("name", ["x.html", "x", "x.tex", "x.jpg"])
def test_other_suffixes_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=re.escape("ends in .pdf, .svg or .png")):
        fedcog.plot(two_methods(), tmp_path / name)
    assert not list(tmp_path.iterdir())
