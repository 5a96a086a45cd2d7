"""Tests of the documentation: its Python and commands run, and its site is self-contained."""

import functools
import http.server
import os
import pkgutil
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

from fedcog import FedCOG
from fedcog.cli.main import main
from tests.support import documents
from tests.support.browser import browser, console_messages, open_page, run_script, save_screenshot
from tests.support.documents import blocks, unknown_flags
from tests.support.example_output import EXPECTED_OUTPUT
from tests.support.paths import REPO

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

__all__ = ["browser"]

DOCS = REPO / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
# An included file, on three lines: ruff would read one line as Python.
SNIPPET = re.compile(r"--8<--\n(.+)\n--8<--\n")
RUN_ELSEWHERE = {f"examples/{name}.py" for name in [*EXPECTED_OUTPUT, "deploy"]} | {
    f"examples/existing-flower-client/{name}.py" for name in ("client_app", "task")
}


GUIDES = [*PAGES, *(REPO / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md"))]
SOURCE_PATH = re.compile(r"`((?:tests|fedcog|examples|benchmarks|docs)/[\w./-]+)`")
PYTHON_NAME = re.compile(r"`(fedcog(?:\.\w+)+)(?:\(.*?\))?`")
PLACEHOLDERS = {"fedcog/algorithms/mymethod.py"}


def page_id(page: Path) -> str:
    return str(page.relative_to(DOCS))


def has_python(page: Path) -> bool:
    return any(block.language == "python" for block in blocks(page.read_text()))


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: str(guide.relative_to(REPO)))
def test_files_that_a_guide_names_exist(guide: Path) -> None:
    named = set(SOURCE_PATH.findall(guide.read_text())) - PLACEHOLDERS
    assert [path for path in named if not (REPO / path).exists()] == []
    test_files = {path.name for path in (REPO / "tests").rglob("test_*.py")}
    assert set(re.findall(r"\btest_\w+\.py\b", guide.read_text())) - test_files == set()


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: str(guide.relative_to(REPO)))
def test_python_names_in_a_guide_exist(guide: Path) -> None:
    settings = {f"fedcog.{name}" for name in FedCOG().setting_values}
    for name in set(PYTHON_NAME.findall(guide.read_text())) - settings:
        assert pkgutil.resolve_name(name) is not None, name


def test_every_block_has_a_known_language() -> None:
    languages = {block.language for page in PAGES for block in blocks(page.read_text())}
    assert languages == {"python", "sh", "toml"}


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if has_python(page)], ids=page_id)
def test_python_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the blocks from top to bottom, without included examples, which have their own tests."""
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "page"}
    monkeypatch.setitem(sys.modules, "page", type(sys)("page"))  # dataclasses look up their module
    for block in blocks(page.read_text()):
        if block.language != "python":
            continue
        if included := SNIPPET.fullmatch(block.text):
            assert included[1] in RUN_ELSEWHERE
            continue
        exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_commands_of_a_page_exist(page: Path) -> None:
    assert not unknown_flags(page.read_text())


def test_unknown_flags_and_commands_are_detected() -> None:
    assert unknown_flags("fedcog run --nonsense 3  # --more\n") == [
        "--nonsense in: fedcog run --nonsense 3  # --more"
    ]
    assert unknown_flags("fedcog watch runs --rounds 3\n") and unknown_flags("fedcog fly\n")
    assert not unknown_flags(
        "fedcog run --algorithm mine.py:Mine \\\n  --Mine.strength 1 --rounds 3\n"
    )


SMALL_FLAGS = ["--dataset", "digits", "--local-steps", "1", "--batch-size", "8"]
SMALL_FLAGS += ["--threads", "1", "--plain"]
FEDCOG_FLAGS = ["--start-round", "1", "--fedcog.count", "4", "--fedcog.steps", "1"]
MULTI_LABEL_FLAGS = ["--dataset", "digit-mosaics", "--clients", "4", "--participation", "1"]
SKIPPED_WORDS = {
    "get": "needs the network",
    "watch": "serves until it is stopped: tests/report/dashboard/test_dashboard.py",
    "reproduce": "takes long: tests/studies/test_smoke.py and test_reproduce.py",
    "flower": "starts Flower's engine: tests/federation/test_flower_backend.py",
    "wandb": "needs an account: tests/runs/tracking/test_trackers.py",
    "...": "a placeholder, not a command",
    "NAME": "a placeholder, not a command",
    "runs/study": "takes half an hour: make study",
}
"""Words of commands that are not run here -> why."""


def runnable_commands(page: Path) -> list[list[str]]:
    """Return the commands of a page without `fedcog`, with flags that make them small."""
    commands = []
    for block in blocks(page.read_text()):
        if block.language != "sh":
            continue
        for words in documents.shell_commands(block.text):
            if words[0] == "fedcog" and not {*words} & {*SKIPPED_WORDS}:
                end = words.index(">") if ">" in words else None  # drops a redirection
                command = words[1:end]
                commands.append([*command, *small_flags(command)])
    return commands


def small_flags(command: list[str]) -> list[str]:
    """Return the flags that limit a command to a few steps on the embedded digits."""
    if command[0] in ("run", "compare", "sweep") and "--resume" not in command:
        flags = [*SMALL_FLAGS, "--rounds", "2"]
        if command[0] == "sweep":
            flags += ["--trials", "2", "--seeds", "0"]
        if "--fedcog" in command or any("fedcog" in word.split("+") for word in command):
            flags += FEDCOG_FLAGS
        if {"mosaics", "flair"} & {*command}:
            flags += MULTI_LABEL_FLAGS
        return flags
    if "--resume" in command:
        return ["--rounds", "3"]
    if command[0] == "audit":
        return ["--iterations", "2"]
    if command[0] == "theory":
        return ["--network", "linear", "--rounds", "2", "--repeats", "1"]
    return []


PAGES_WITH_COMMANDS = [page for page in (REPO / "README.md", *PAGES) if runnable_commands(page)]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES_WITH_COMMANDS, ids=lambda page: page.stem)
def test_commands_of_a_page_succeed(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run them from top to bottom, with all their flags, in a folder that has the examples."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    Path("examples").symlink_to(REPO / "examples")
    if page.stem == "resume":  # the page resumes an existing run
        assert main(["run", *SMALL_FLAGS, "--rounds", "2", "--out", "runs/x"]) == 0
    for command in runnable_commands(page):
        assert main(command) == 0, (command, capsys.readouterr().err)


def test_every_example_has_a_page() -> None:
    included = {file for page in PAGES for file in SNIPPET.findall(page.read_text())}
    assert {f"examples/{path.name}" for path in (REPO / "examples").glob("*.py")} <= included


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site with warnings as errors, and with proxies that fail every download."""
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    dead_proxies = dict.fromkeys(
        ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"),
        "http://127.0.0.1:9",
    )
    environment = {**os.environ, **dead_proxies, "NO_MKDOCS_2_WARNING": "1"}
    build = subprocess.run(
        command, cwd=REPO, env=environment, capture_output=True, text=True, timeout=120
    )
    assert build.returncode == 0, build.stdout + build.stderr
    return out


class Assets(HTMLParser):
    """The addresses that a page loads, and its images without alternative text."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.addresses = list[str]()
        self.images_without_alt = list[str]()
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        if tag in ("img", "script", "iframe", "source", "video", "audio", "embed", "object"):
            self.addresses += [
                attributes[key] or "" for key in ("src", "data") if attributes.get(key)
            ]
        if tag == "link" and "canonical" not in (attributes.get("rel") or ""):
            self.addresses.append(attributes.get("href") or "")
        if tag == "img" and not attributes.get("alt"):
            self.images_without_alt.append(attributes.get("src") or "")


@pytest.mark.slow
def test_site_loads_nothing_from_other_hosts(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) >= len(PAGES)
    for page in pages:
        assets = Assets(page)
        assert assets.addresses and not assets.images_without_alt, page
        for address in assets.addresses:
            parts = urlsplit(address)
            assert not parts.netloc and parts.scheme in ("", "data"), f"{page}: {address}"
            assert (
                page.name == "404.html" or not parts.path or (page.parent / parts.path).exists()
            ), f"{page}: {address}"
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*[\"']?(https?:)?//", sheet.read_text()), sheet


def test_site_includes_the_examples(site: Path) -> None:
    page = re.sub(r"<[^>]+>", "", (site / "howto/scaffold.html").read_text())
    assert (
        "scaffold_fedcog = fedcog.FedCOG(scaffold, start_round=6" in page
        and "--8&lt;--" not in page
    )
    assert "from_folder" in (site / "api.html").read_text()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def site_url(site: Path) -> Iterator[str]:
    """Serve the site from this machine."""
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(QuietHandler, directory=str(site))
    )
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


@pytest.mark.slow
@pytest.mark.parametrize("width", ["phone", "desktop"])
def test_browser_shows_the_site(browser: "Chrome", site_url: str, width: str) -> None:
    for page in ("index", "concepts", "howto/images", "algorithms"):
        open_page(browser, f"{site_url}/{page}.html", width)
        save_screenshot(browser, f"docs-{page.replace('/', '-')}-{width}")
        assert run_script(browser, "return document.documentElement.scrollWidth <= innerWidth"), (
            f"{page} is too wide"
        )
        assert run_script(
            browser,
            "return [...document.images].every(image => image.complete && image.naturalWidth > 0)",
        ), page
        hosts = run_script(
            browser,
            "return performance.getEntriesByType('resource').map(item => new URL(item.name).host)",
        )
        assert hosts and set(hosts) <= {urlsplit(site_url).netloc, ""}, hosts
        assert console_messages(browser) == []
