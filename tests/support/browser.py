"""Drive headless Chromium with Selenium, which is imported only when a browser starts."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

WINDOW_SIZES = {"phone": (390, 844), "desktop": (1280, 900)}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    """Start Chromium with console logging.

    Without Selenium or Chromium the test is skipped, or fails if FEDCOG_BROWSER=required (as in
    CI).
    """
    if importlib.util.find_spec("selenium") is None:
        _skip_or_fail("selenium is not installed")
    program = shutil.which("chromium")
    driver = shutil.which("chromedriver")
    if program is None or driver is None:
        _skip_or_fail("chromium and chromedriver are not installed")
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    options = ChromeOptions()
    options.binary_location = program
    profile = tmp_path_factory.mktemp("browser")
    arguments = [
        "headless=new",
        "no-sandbox",
        "disable-gpu",
        "no-first-run",
        "disable-background-networking",
        "disable-component-update",
        "disable-sync",
        "force-color-profile=srgb",
        f"user-data-dir={profile}",
    ]
    for argument in arguments:
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver_session = Chrome(options=options, service=Service(driver))
    try:
        driver_session.set_page_load_timeout(60)
        driver_session.set_script_timeout(30)
        yield driver_session
    finally:
        driver_session.quit()


def _skip_or_fail(reason: str) -> NoReturn:
    if os.environ.get("FEDCOG_BROWSER") == "required":
        pytest.fail(reason)
    pytest.skip(reason)


def open_page(browser: Chrome, page: Path | str, width: str, media: str = "") -> None:
    """Open a file or URL in a window of the given size; `media` emulates "screen" or "print"."""
    pixels_wide, pixels_high = WINDOW_SIZES[width]
    metrics = {
        "width": pixels_wide,
        "height": pixels_high,
        "deviceScaleFactor": 1,
        "mobile": width == "phone",
    }
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media})
    browser.get_log("browser")  # drops messages of the previous page
    browser.get(page if isinstance(page, str) else page.as_uri())


def console_messages(browser: Chrome) -> list[str]:
    """Return the messages that the page logged to the console."""
    return [str(entry["message"]) for entry in browser.get_log("browser")]


def run_script(browser: Chrome, script: str) -> Any:
    """Run JavaScript in the page and return its result."""
    return browser.execute_script(script)


def save_screenshot(browser: Chrome, name: str) -> None:
    """Save a screenshot in $FEDCOG_SCREENSHOTS, if that is set."""
    if folder := os.environ.get("FEDCOG_SCREENSHOTS"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        browser.save_screenshot(str(Path(folder) / f"{name}.png"))
