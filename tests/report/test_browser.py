"""Pages in a real browser: nothing on the console, figures to be seen at two widths, tables that
sort.

FEDCOG_SCREENSHOTS=docs/figures python -m pytest tests/report/test_browser.py makes the
pictures in the docs.
"""

from pathlib import Path

import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.support.ui import WebDriverWait

from fedcog.report import reproduction
from fedcog.studies import paper
from fedcog.studies.result_store import Results
from tests.support.browser import browser, console_messages, open_page, run_script, save_screenshot
from tests.support.paths import REPO

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
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page about the results that are in this repository."""
    results = Results(REPO / "results")
    studies = list(paper.studies().values())
    place = tmp_path_factory.mktemp("page") / "results.html"
    place.write_text(
        reproduction.page(reproduction.parts_of(studies, results), results), encoding="utf-8"
    )
    return place


@pytest.mark.parametrize("width", ["phone", "desktop"])
def test_figures_are_seen_and_nothing_is_said_or_cut_off(
    browser: Chrome, file: Path, width: str
) -> None:
    open_page(browser, file, width)
    WebDriverWait(browser, 30).until(
        lambda page: run_script(page, "return document.readyState") == "complete"
    )
    found = run_script(browser, FIGURES)
    assert len(found) >= 8
    for across, down, seen, strokes in found:
        assert seen and across > 200 and down > 100 and strokes > 5
    across, room, down = run_script(browser, SIZES)
    assert across <= room and down > 5000
    run_script(browser, "document.querySelector('#main figure').scrollIntoView()")
    save_screenshot(browser, f"page-{width}")
    assert console_messages(browser) == []


def test_a_table_sorts_by_the_column_that_is_clicked(browser: Chrome, file: Path) -> None:
    open_page(browser, file, "desktop")
    place = run_script(
        browser,
        """return [...document.querySelectorAll("#main table")].findIndex(table =>
            [...table.tBodies[0].rows].some(row => /^[0-9]/.test(row.cells[1].textContent)))""",
    )
    before = browser.execute_script(COLUMN, place)
    numbers = sorted(float(cell.split()[0]) for cell in before if cell[0].isdigit())
    assert (
        len(numbers) > 5
        and [float(cell.split()[0]) for cell in before if cell[0].isdigit()] != numbers
    )
    button = browser.find_elements("css selector", "#main table")[place].find_elements(
        "css selector", "th button"
    )[1]
    for expected in (numbers, numbers[::-1]):
        button.click()
        after = browser.execute_script(COLUMN, place)
        assert [float(cell.split()[0]) for cell in after if cell[0].isdigit()] == expected
        assert sorted(after) == sorted(before)
    heads = browser.find_elements("css selector", "th[aria-sort]")
    assert [head.get_attribute("aria-sort") for head in heads] == ["descending"]
    assert console_messages(browser) == []


def test_a_fault_on_a_page_would_be_heard(browser: Chrome, tmp_path: Path) -> None:
    broken = tmp_path / "broken.html"
    broken.write_text(
        '<!DOCTYPE html><link rel="icon" href="data:,"><script>nobody.knows()</script>'
    )
    open_page(browser, broken, "desktop")
    assert any("nobody is not defined" in line for line in console_messages(browser))
