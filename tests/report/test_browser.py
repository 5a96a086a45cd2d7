"""Tests of the results page in a real browser.

FEDCOG_SCREENSHOTS=docs/figures python -m pytest tests/report/test_browser.py writes the images of
the docs.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fedcog.report import reproduction
from fedcog.studies import paper
from fedcog.studies.result_store import Results
from tests.support.browser import browser, console_messages, open_page, run_script, save_screenshot
from tests.support.paths import REPO

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

pytestmark = pytest.mark.browser

__all__ = ["browser"]

FIGURES = """return [...document.querySelectorAll("figure > svg")].map(svg => {
    const box = svg.getBoundingClientRect();
    return [box.width, box.height, svg.checkVisibility(), svg.querySelectorAll("path, use").length];
})"""
SIZES = (
    "const page = document.documentElement; return [page.scrollWidth, page.clientWidth, "
    "page.scrollHeight]"
)
COLUMN = """return [...document.querySelectorAll("#main table")[arguments[0]].tBodies[0].rows]
    .map(row => row.cells[1].textContent)"""


@pytest.fixture(scope="module")
def results_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page about the results in this repository."""
    results = Results(REPO / "results")
    studies = list(paper.studies().values())
    path = tmp_path_factory.mktemp("page") / "results.html"
    path.write_text(
        reproduction.page(reproduction.parts_of(studies, results), results), encoding="utf-8"
    )
    return path


@pytest.mark.parametrize("width", ["phone", "desktop"])
def test_figures_are_visible_and_the_page_fits_the_width(
    browser: "Chrome", results_page: Path, width: str
) -> None:
    open_page(browser, results_page, width)
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(browser, 30).until(
        lambda page: run_script(page, "return document.readyState") == "complete"
    )
    figures = run_script(browser, FIGURES)
    assert len(figures) >= 8
    for figure_width, figure_height, is_visible, num_shapes in figures:
        assert is_visible and figure_width > 200 and figure_height > 100 and num_shapes > 5
    page_width, window_width, page_height = run_script(browser, SIZES)
    assert page_width <= window_width and page_height > 5000
    run_script(browser, "document.querySelector('#main figure').scrollIntoView()")
    save_screenshot(browser, f"page-{width}")
    assert console_messages(browser) == []


def leading_numbers(cells: list[str]) -> list[float]:
    """The first number of every cell that begins with one."""
    return [float(cell.split()[0]) for cell in cells if cell[0].isdigit()]


def test_table_sorts_by_the_clicked_column(browser: "Chrome", results_page: Path) -> None:
    open_page(browser, results_page, "desktop")
    index = run_script(
        browser,
        """return [...document.querySelectorAll("#main table")].findIndex(table =>
            [...table.tBodies[0].rows].some(row => /^[0-9]/.test(row.cells[1].textContent)))""",
    )
    before = browser.execute_script(COLUMN, index)
    numbers = sorted(leading_numbers(before))
    assert len(numbers) > 5 and leading_numbers(before) != numbers
    table = browser.find_elements("css selector", "#main table")[index]
    button = table.find_elements("css selector", "th button")[1]
    for expected in (numbers, numbers[::-1]):
        button.click()
        after = browser.execute_script(COLUMN, index)
        assert leading_numbers(after) == expected
        assert sorted(after) == sorted(before)
    headers = browser.find_elements("css selector", "th[aria-sort]")
    assert [header.get_attribute("aria-sort") for header in headers] == ["descending"]
    assert console_messages(browser) == []


def test_script_errors_appear_in_console_messages(browser: "Chrome", tmp_path: Path) -> None:
    broken = tmp_path / "broken.html"
    broken.write_text(
        '<!DOCTYPE html><link rel="icon" href="data:,"><script>nobody.knows()</script>'
    )
    open_page(browser, broken, "desktop")
    assert any("nobody is not defined" in line for line in console_messages(browser))
