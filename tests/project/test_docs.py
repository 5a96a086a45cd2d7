"""The documentation is true: its Python runs, its commands exist, and it becomes a site that needs
no other.
"""

import functools
import http.server
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from selenium.webdriver import Chrome

from fedcog.cli.main import main
from tests.support import documents
from tests.support.browser import browser, console_messages, open_page, run_script, save_screenshot  # noqa: F401 - a fixture
from tests.support.documents import blocks, unknown_flags
from tests.support.example_output import EXPECTED_OUTPUT
from tests.support.paths import REPO

DOCS = REPO / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
SNIPPET = re.compile(r"--8<--\n(.+)\n--8<--\n")  # on three lines: on one, ruff takes it for Python
RUN_ELSEWHERE = {f"examples/{name}.py" for name in [*EXPECTED_OUTPUT, "deploy"]} | {
    f"examples/existing-flower-client/{name}.py" for name in ("client_app", "task")
}


def name(page: Path) -> str:
    return str(page.relative_to(DOCS))


def test_every_block_says_what_it_is() -> None:
    kinds = {block.language for page in PAGES for block in blocks(page.read_text())}
    assert kinds == {"python", "sh", "toml"}


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if any(one.language == "python" for one in blocks(page.read_text()))],
    ids=name,
)
def test_the_python_of_a_page_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From top to bottom, as somebody would type it. What is a program of the examples is run by
    their tests.
    """
    monkeypatch.chdir(tmp_path)
    here: dict[str, object] = {"__name__": "page"}
    monkeypatch.setitem(sys.modules, "page", type(sys)("page"))  # dataclasses look their module up
    for block in blocks(page.read_text()):
        if block.language != "python":
            continue
        if included := SNIPPET.fullmatch(block.text):
            assert included[1] in RUN_ELSEWHERE
            continue
        exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec"), here)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_the_commands_of_a_page_exist(page: Path) -> None:
    assert not unknown_flags(page.read_text())


def test_a_flag_or_a_command_that_is_not_there_is_found() -> None:
    assert unknown_flags("fedcog run --nonsense 3  # --more\n") == [
        "--nonsense in: fedcog run --nonsense 3  # --more"
    ]
    assert unknown_flags("fedcog watch runs --rounds 3\n") and unknown_flags("fedcog fly\n")
    assert not unknown_flags(
        "fedcog run --algorithm mine.py:Mine \\\n  --Mine.strength 1 --rounds 3\n"
    )


SMALL = [
    "--dataset",
    "digits",
    "--local-steps",
    "1",
    "--batch-size",
    "8",
    "--threads",
    "1",
    "--plain",
]
WAKE = ["--start-round", "1", "--fedcog.count", "4", "--fedcog.steps", "1"]
USERS = ["--dataset", "digit-mosaics", "--clients", "4", "--participation", "1"]
NOT_HERE = {
    "get": "the network",
    "watch": "serves until it is stopped: tests/report/dashboard/test_dashboard.py",
    "reproduce": "tests/studies/test_smoke.py and test_reproduce.py, at length",
    "flower": "Flower's engine: tests/federation/test_flower_backend.py",
    "wandb": "tests/runs/tracking/test_trackers.py, with nobody's account",
    "...": "no command, but how one looks",
    "NAME": "no command, but how one looks",
    "runs/study": "half an hour's work: make study",
}


def shown(page: Path) -> list[list[str]]:
    """The commands of a page that can be carried out, as they are or small: few steps, on the
    embedded digits.
    """
    found = []
    for block in blocks(page.read_text()):
        for words in documents.shell_commands(block.text) if block.language == "sh" else ():
            if words[0] != "fedcog" or {*words} & {*NOT_HERE}:
                continue
            words = words[
                1 : words.index(">") if ">" in words else None
            ]  # what a shell does with it is the shell's
            if words[0] in ("run", "compare", "sweep") and "--resume" not in words:
                rounds = [
                    "--rounds",
                    "2",
                    *(["--trials", "2", "--seeds", "0"] if words[0] == "sweep" else []),
                ]
                awake = (
                    WAKE
                    if any("fedcog" in word.split("+") for word in words) or "--fedcog" in words
                    else []
                )
                users = USERS if {"mosaics", "flair"} & {*words} else []
                words += [*SMALL, *rounds, *awake, *users]
            elif "--resume" in words:
                words += ["--rounds", "3"]
            elif words[0] == "theory":
                words += ["--network", "linear", "--rounds", "2", "--repeats", "1"]
            found.append(words)
    return found


TYPED = [page for page in (REPO / "README.md", *PAGES) if shown(page)]


@pytest.mark.parametrize("page", TYPED, ids=lambda page: page.stem)
def test_the_commands_of_a_page_are_carried_out(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From top to bottom, with all their flags, in a folder that has the examples."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    Path("examples").symlink_to(REPO / "examples")
    if page.stem == "resume":  # which speaks of a run that there is
        assert main(["run", *SMALL, "--rounds", "2", "--out", "runs/x"]) == 0
    for words in shown(page):
        assert main(words) == 0, (words, capsys.readouterr().err)


def test_every_example_has_a_page() -> None:
    shown = {file for page in PAGES for file in SNIPPET.findall(page.read_text())}
    assert {f"examples/{one.name}" for one in (REPO / "examples").glob("*.py")} <= shown


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built with every warning an error. No proxy leads out: what it tried to fetch would
    fail.
    """
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    nowhere = dict.fromkeys(
        ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"),
        "http://127.0.0.1:9",
    )
    around = {**os.environ, **nowhere, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, cwd=REPO, env=around, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out


class Assets(HTMLParser):
    """What a page has a browser load, and what it says instead of its pictures."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.loads, self.mute = list[str](), list[str]()
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        own = dict(attrs)
        if tag in ("img", "script", "iframe", "source", "video", "audio", "embed", "object"):
            self.loads += [own[key] or "" for key in ("src", "data") if own.get(key)]
        if tag == "link" and "canonical" not in (own.get("rel") or ""):
            self.loads.append(own.get("href") or "")
        if tag == "img" and not own.get("alt"):
            self.mute.append(own.get("src") or "")


def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) >= len(PAGES)
    for page in pages:
        found = Assets(page)
        assert found.loads and not found.mute, page
        for address in found.loads:
            parts = urlsplit(address)
            assert not parts.netloc and parts.scheme in ("", "data"), f"{page}: {address}"
            assert (
                page.name == "404.html" or not parts.path or (page.parent / parts.path).exists()
            ), f"{page}: {address}"
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*[\"']?(https?:)?//", sheet.read_text()), sheet


def test_pages_show_the_examples_as_they_are(site: Path) -> None:
    page = re.sub(r"<[^>]+>", "", (site / "howto/scaffold.html").read_text())
    assert "around = fedcog.FedCOG(inner, start_round=6" in page and "--8&lt;--" not in page
    assert "from_folder" in (site / "api.html").read_text()


class Silent(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture(scope="module")
def served(site: Path) -> Iterator[str]:
    """The site at an address of this machine."""
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Silent, directory=str(site))
    )
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


@pytest.mark.parametrize("width", ["phone", "desktop"])
def test_a_browser_shows_it(browser: Chrome, served: str, width: str) -> None:  # noqa: F811 - the fixture
    for page in ("index", "concepts", "howto/images", "algorithms"):
        open_page(browser, f"{served}/{page}.html", width)
        save_screenshot(browser, f"docs-{page.replace('/', '-')}-{width}")
        assert run_script(browser, "return document.documentElement.scrollWidth <= innerWidth"), (
            f"{page} is too wide"
        )
        assert run_script(
            browser,
            "return [...document.images].every(one => one.complete && one.naturalWidth > 0)",
        ), page
        hosts = run_script(
            browser,
            "return performance.getEntriesByType('resource').map(one => new URL(one.name).host)",
        )
        assert hosts and set(hosts) <= {urlsplit(served).netloc, ""}, hosts
        assert console_messages(browser) == []
