"""A real browser to look with: headless Chromium, driven by its own driver."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service

WIDTHS = {"phone": (390, 844), "desktop": (1280, 900)}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    """Chromium, with everything it says to its console kept; where there is none, the test is skipped.

    With FEDCOG_BROWSER=required, as in continuous integration, it fails instead.
    """
    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if program is None or driver is None:
        why = "no chromium and chromedriver to look with"
        if os.environ.get("FEDCOG_BROWSER") == "required":
            pytest.fail(why)
        pytest.skip(why)
    options = ChromeOptions()
    options.binary_location = program
    home = tmp_path_factory.mktemp("browser")
    words = ["headless=new", "no-sandbox", "disable-gpu", "no-first-run", "disable-background-networking"]
    words += ["disable-component-update", "disable-sync", "force-color-profile=srgb", f"user-data-dir={home}"]
    for word in words:
        options.add_argument(f"--{word}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    opened = Chrome(options=options, service=Service(driver))
    try:
        opened.set_page_load_timeout(60)
        opened.set_script_timeout(30)
        yield opened
    finally:
        opened.quit()


def look(browser: Chrome, page: Path | str, width: str, media: str = "") -> None:
    """Open a page, a file or one that is served, as wide as a phone or a desktop, on a screen or on paper."""
    across, down = WIDTHS[width]
    size = {"width": across, "height": down, "deviceScaleFactor": 1, "mobile": width == "phone"}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media})
    browser.get_log("browser")  # what the page before it said
    browser.get(page if isinstance(page, str) else page.as_uri())


def said(browser: Chrome) -> list[str]:
    """What the page told the console: nothing, if all is well."""
    return [str(entry["message"]) for entry in browser.get_log("browser")]


def ask(browser: Chrome, script: str) -> Any:
    """What a script in the page returns."""
    return browser.execute_script(script)


def shoot(browser: Chrome, name: str) -> None:
    """Keep a picture of what is seen, in the folder $FEDCOG_SCREENSHOTS, if that is set."""
    if folder := os.environ.get("FEDCOG_SCREENSHOTS"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        browser.save_screenshot(str(Path(folder) / f"{name}.png"))
