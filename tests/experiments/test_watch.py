"""`fedcog watch`: the page in a real browser while a real run writes; what it reads, and whom it refuses."""

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from selenium.webdriver import Chrome

import fedcog
from fedcog import Experiment, FedAvg, FedCOG
from fedcog.cli import main
from fedcog.experiments.record import Busy, RunDirectory
from fedcog.experiments.watch import Server, collection
from fedcog.experiments.watch import server as watch_server
from fedcog.experiments.watch.following import Followed, Gone
from tests.browser import ask, browser, look, said, shoot

__all__ = ["browser"]


QUICK: dict[str, Any] = {"dataset": "digits", "partition": "label-skew", "clients": 5, "local_steps": 2, "lr": 0.05}
QUICK |= {"batch_size": 8, "threads": 1, "mapping": "vmap", "rounds": 4, "evaluate_local": False}
COG = FedCOG(FedAvg(), start_round=1, count=8, steps=4)
HOSTILE = "<img src=x onerror='window.hacked=1'>&amp;\u202e\"'"
WIDE = "const page = document.documentElement; return page.scrollWidth <= page.clientWidth"
LATEST = "return document.querySelector('#generated h3').innerText"
POINTS = "return [...document.querySelectorAll('#score path')].map(path => +path.dataset.points)"


@contextmanager
def serving(*roots: Path) -> Iterator[Server]:
    server = Server(roots, 0)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(timeout=10)
        assert not thread.is_alive()


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is older than the moment it is asked for."""
    monkeypatch.setattr(collection, "PAUSE", 0.0)
    monkeypatch.setattr(collection, "SEARCH", 0.0)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that generated pictures, and is over."""
    return fedcog.run(Experiment(algorithm=COG, **QUICK), tmp_path_factory.mktemp("runs") / "a", report=False).path


def write(path: Path, rounds: int, of: int, name: str = "fedavg") -> RunDirectory:
    """A run's record, as it would be written."""
    directory = RunDirectory(path)
    directory.path.mkdir(parents=True)
    directory.begin(Experiment(**QUICK | {"rounds": of}), {})
    lines = [
        {"round": n, "loss": 1 / n, "accuracy": 1 - 1 / n, "local": [], "seconds": {"total": 2.0}}
        for n in range(1, rounds + 1)
    ]
    (path / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory


def ask_for(server: Server, target: str, method: str = "GET", **headers: str) -> http.client.HTTPResponse:
    host, port = server.url.removeprefix("http://").rstrip("/").split(":")
    line = http.client.HTTPConnection(host, int(port), timeout=20)
    line.putrequest(method, target, skip_host="Host" in headers)
    for name, value in headers.items():
        line.putheader(name.replace("_", "-"), value)
    line.endheaders()
    answer = line.getresponse()
    answer.body = answer.read()  # type: ignore[attr-defined]
    line.close()
    return answer


def told(server: Server) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(ask_for(server, "/runs.json").body)  # type: ignore[attr-defined]
    return found


def wait(wanted: Callable[[], Any], what: str, seconds: float = 25) -> None:
    until = time.monotonic() + seconds
    while not wanted():
        assert time.monotonic() < until, what
        time.sleep(0.1)


@pytest.mark.parametrize("width", ["desktop", "phone"])
def test_curves_and_pictures_grow_without_a_reload_while_a_run_writes(
    browser: Chrome, tmp_path: Path, finished: Path, width: str
) -> None:
    shutil.copytree(finished, tmp_path / "done")
    gate, ended = threading.Semaphore(0), []

    def go() -> None:
        watch = lambda *_: gate.acquire(timeout=60)  # noqa: E731
        ended.append(
            fedcog.run(Experiment(algorithm=COG, **QUICK | {"seed": 1}), tmp_path / "live", watch=watch, report=False)
        )

    with serving(tmp_path) as server:
        look(browser, server.url, width)
        ask(browser, "window.same = 'page'")
        wait(lambda: ask(browser, POINTS) == [4], "what is there is drawn")
        run = threading.Thread(target=go)
        run.start()
        for done in (1, 2, 3, 4):
            wait(lambda done=done: sorted(ask(browser, POINTS)) == sorted([4, done]), f"round {done}")  # type: ignore[misc]
            if done == 2:
                rows = {
                    row.split("\n")[0]: row
                    for row in ask(browser, "return [...document.querySelectorAll('#runs li')].map(r => r.innerText)")
                }
                assert "running" in rows["live"] and "2 of 4" in rows["live"] and "finished" in rows["done"]
                browser.find_elements("css selector", "#runs button")[1].click()
            if done > 1:
                wait(lambda done=done: f"round {done}" in ask(browser, LATEST), f"pictures of {done}")  # type: ignore[misc]
                assert len(browser.find_elements("css selector", "#generated .sheet img")) >= done
            gate.release()
        run.join(timeout=60)
        wait(lambda: "2 finished" in ask(browser, "return document.getElementById('status').innerText"), "it is over")
        loaded = "return [...document.querySelectorAll('img')].every(one => one.complete && one.naturalWidth > 20)"
        wait(lambda: ask(browser, loaded), "the partition and all pictures are seen")
        cells = ask(browser, "return [...document.querySelectorAll('#comparison tbody tr')].map(row => row.innerText)")
        assert len(cells) == 1 and "±" in cells[0] and "fedavg+fedcog" in cells[0]
        assert ask(browser, WIDE) and ask(browser, "return window.same") == "page"
        shoot(browser, f"watch-{width}")
        assert said(browser) == []
    assert len(ended[0].lines) == 4


def test_a_run_that_vanishes_an_empty_folder_and_the_dark(browser: Chrome, tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        look(browser, server.url, "phone")
        wait(lambda: ask(browser, "return document.getElementById('empty').checkVisibility()"), "says that it is empty")
        write(tmp_path / "a", 3, 9)
        write(tmp_path / "b", 2, 9)
        wait(lambda: sorted(ask(browser, POINTS)) == [2, 3], "they show up by themselves")
        shutil.rmtree(tmp_path / "a")
        wait(lambda: ask(browser, POINTS) == [2], "one vanishes")
        assert ask(browser, "return document.getElementById('status').innerText") == "1 stopped"
        light = ask(browser, "return getComputedStyle(document.body).backgroundColor")
        browser.execute_cdp_cmd(
            "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
        )
        assert ask(browser, "return getComputedStyle(document.body).backgroundColor") != light
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
        assert ask(browser, WIDE) and said(browser) == []


def test_names_are_only_names_and_thousands_of_rounds_are_thinned(browser: Chrome, tmp_path: Path) -> None:
    write(tmp_path / HOSTILE.replace("/", "_") / ("x" * 200), 6000, 9000)
    write(tmp_path / "bad", 1, 2).fail(f"<script>window.hacked=1</script>{HOSTILE}")
    with serving(tmp_path) as server:
        look(browser, server.url, "phone")
        wait(lambda: len(ask(browser, POINTS)) == 2, "both are drawn")
        assert 100 < max(ask(browser, POINTS)) < 1500
        for button in browser.find_elements("css selector", "#runs button"):
            button.click()
        shown = ask(browser, "return document.body.innerText")
        assert "<img src=x" in shown and "<script>window.hacked" in shown
        assert ask(browser, "return window.hacked === undefined && document.querySelectorAll('#runs img').length === 0")
        wait(lambda: ask(browser, WIDE), "nothing is wider than a phone")
        assert said(browser) == []


def test_only_reading_and_only_as_this_machine(tmp_path: Path, finished: Path) -> None:
    before = {file: file.stat().st_mtime_ns for file in finished.rglob("*")}
    with serving(finished.parent) as server:
        assert server.url.startswith("http://127.0.0.1:")
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
            refused = ask_for(server, "/runs.json", method)
            assert refused.status == 405 and refused.headers["Allow"] == "GET, HEAD"
        assert ask_for(server, "/", "BREW").status == 501
        port = server.url.rsplit(":", 1)[1].rstrip("/")
        for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "", "localhost:1:2"):
            assert ask_for(server, "/runs.json", Host=host).status == 421, host
        for host in ("localhost", f"localhost:{port}", "127.0.0.1:9"):  # a tunnel may have another port
            assert ask_for(server, "/runs.json", Host=host).status == 200, host
        run = told(server)["runs"][0]["id"]
        for target in (
            "/../secret.json",
            "/runs/1/../../secret.json",
            f"/runs/{run}/generated/..%2f..%2fsecret.json",
            f"/runs/{run}/experiment.toml",
            "/page.py",
            "/runs/999/curves.json",
            "/runs/0/curves.json",
            f"/runs/{'9' * 4000}/curves.json",
            "/runs/1/curves.json?" + "&".join("a" * 50),
            "/%00",
        ):
            assert ask_for(server, target).status == 404, target
        page = ask_for(server, "/")
        policy = page.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "script-src 'self';" in policy and "unsafe" not in policy
        assert page.headers["X-Content-Type-Options"] == "nosniff"
        assert ask_for(server, "/runs.json", If_None_Match=ask_for(server, "/runs.json").headers["ETag"]).status == 304
        head = ask_for(server, "/", "HEAD")
        assert head.status == 200 and head.body == b"" and int(head.headers["Content-Length"]) > 500  # type: ignore[attr-defined]
        drawn = ask_for(server, f"/runs/{run}/partition.svg")
        assert drawn.headers["Content-Type"].startswith("image/svg") and b"<svg" in drawn.body  # type: ignore[attr-defined]
        strange = f"/runs/{run}/curves.json?first=-1&generation={'1' * 50}&first=x"
        assert len(json.loads(ask_for(server, strange).body)["loss"]) == 4  # type: ignore[attr-defined]
        none = json.loads(ask_for(server, f"/runs/{run}/generated/77.json").body)  # type: ignore[attr-defined]
        assert none == {"none": True}
    assert before == {file: file.stat().st_mtime_ns for file in finished.rglob("*")}


def test_who_keeps_lines_open_keeps_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_server, "VISITORS", 5)
    with serving(tmp_path) as server:
        host, port = server.url.removeprefix("http://").rstrip("/").split(":")
        idle = [socket.create_connection((host, int(port)), timeout=20) for _ in range(12)]
        for line in idle[-3:]:
            line.sendall(b"GET / HTTP/1.1\r\nX: ")  # and nothing more
        assert told(server)["runs"] == [] and told(server)["runs"] == []
        assert idle[0].recv(1) == b"", "who came first was hung up on"
        for line in idle:
            line.close()


def test_what_comes_with_a_question_is_not_another(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        host, port = server.url.removeprefix("http://").rstrip("/").split(":")
        for kind in (b"Content-Length: 42", b"Transfer-Encoding: chunked"):
            with socket.create_connection((host, int(port)), timeout=20) as line:
                inner = b"GET /inner HTTP/1.1\r\nHost: localhost\r\n\r\n"
                line.sendall(b"GET /runs.json HTTP/1.1\r\nHost: localhost\r\n" + kind + b"\r\n\r\n" + inner)
                answers = b""
                with suppress(ConnectionResetError):  # what was not read is thrown back
                    while more := line.recv(65536):
                        answers += more
            assert answers.count(b"HTTP/1.1 200") == 1 and b"404" not in answers


def test_only_what_is_new_is_read_and_what_is_half_written_waits(tmp_path: Path) -> None:
    file = write(tmp_path / "a", 5000, 9000).path / "rounds.jsonl"
    run = Followed(tmp_path / "a", "a")
    run.refresh()
    assert len(run.lines) == 5000 and run.state == "stopped" and run.generation == 1
    with open(file, "r+b") as opened:  # nobody looks there again
        opened.write(b"x" * 1000)
    line = json.dumps({"round": 5001, "loss": 0.5, "accuracy": None, "local": []})
    with open(file, "a") as opened:
        opened.write(line[:20])
    run.refresh()
    assert len(run.lines) == 5000 and run.fault == ""
    with open(file, "a") as opened:
        opened.write(line[20:] + "\n")
    run.refresh()
    assert len(run.lines) == 5001 and run.lines[-1]["loss"] == 0.5 and run.generation == 1


def test_rounds_that_are_taken_back_are_another_generation(tmp_path: Path) -> None:
    directory = write(tmp_path / "a", 5, 6)
    with serving(tmp_path) as server:
        (one,) = told(server)["runs"]
        directory.rewind(3)
        (again,) = told(server)["runs"]
        assert (one["done"], again["done"]) == (5, 3) and again["generation"] > one["generation"]
        target = f"/runs/{one['id']}/curves.json?generation={one['generation']}&first=2"
        news = json.loads(ask_for(server, target).body)  # type: ignore[attr-defined]
        assert news["first"] == 0 and len(news["loss"]) == 3, "all, for what the page had is no more"
        target = f"/runs/{one['id']}/curves.json?generation={again['generation']}&first=2"
        assert json.loads(ask_for(server, target).body)["loss"] == [1 / 3]  # type: ignore[attr-defined]
        shutil.rmtree(directory.path)
        assert told(server)["runs"] == []
        assert json.loads(ask_for(server, target).body) == {"gone": True}  # type: ignore[attr-defined]


def test_what_a_record_tells_of_its_state(tmp_path: Path) -> None:
    for name, rounds in {"finished": 4, "stopped": 2, "running": 2, "diverged": 1, "torn": 2, "strange": 1}.items():
        write(tmp_path / name, rounds, 4)
    RunDirectory(tmp_path / "diverged").fail("client 3 is not finite")
    (tmp_path / "torn" / "rounds.jsonl").write_text('{"round": 1}\n[]\n')
    (tmp_path / "strange" / "experiment.toml").write_text("rounds = 'many'")
    with serving(tmp_path) as server, RunDirectory(tmp_path / "running").locked():
        found = {run["name"]: run for run in told(server)["runs"]}
        wanted = {name: name for name in ("finished", "stopped", "running", "diverged")}
        assert {name: run["state"] for name, run in found.items()} == wanted | dict.fromkeys(
            ("torn", "strange"), "damaged"
        )
        assert found["running"]["left"] == pytest.approx(4.0) and found["stopped"]["left"] is None
        assert found["torn"]["done"] == 1 and "line 2" in found["torn"]["why"]
        assert "rounds" in found["strange"]["why"] and found["diverged"]["why"] == "client 3 is not finite"
        assert {row["cells"][0] for row in told(server)["table"]} == {"fedavg"}
    (tmp_path / "strange" / "experiment.toml").write_bytes(b"#" * 2**21)
    run = Followed(tmp_path / "strange", "strange")
    run.refresh()
    assert "too large" in run.fault
    (tmp_path / "strange" / "experiment.toml").unlink()
    with pytest.raises(Gone):
        run.refresh()


def test_where_the_test_set_is_left_alone_validation_is_shown(tmp_path: Path) -> None:
    settings = QUICK | {"rounds": 2, "validation": 0.2, "evaluate_test": False}
    run = fedcog.run(Experiment(**settings), tmp_path / "trial", report=False)  # as a sweep's trials are
    wanted = [line["validation_accuracy"] for line in run.lines]
    with serving(tmp_path) as server:
        (one,) = told(server)["runs"]
        assert (one["last"], one["best"], one["measure"]) == (wanted[-1], max(wanted), "Validation accuracy")
        found = server.runs.find(one["id"])
        assert found is not None and server.runs.curves(found, 0, 0)["score"] == wanted


def test_whoever_asks_keeps_nobody_from_writing(tmp_path: Path) -> None:
    directory, asked = write(tmp_path / "a", 1, 2), threading.Event()
    (directory.path / ".lock").touch()

    def ask_again() -> None:
        while not asked.wait(0.001):
            directory.busy()

    thread = threading.Thread(target=ask_again)
    thread.start()
    try:
        with directory.locked():
            assert directory.busy()
            with pytest.raises(Busy, match="another run is writing"), RunDirectory(directory.path).locked():
                pass
        for _ in range(200):
            with directory.locked():
                pass
    finally:
        asked.set()
        thread.join()


def test_tensors_that_make_no_sense_and_what_is_no_file_are_borne(tmp_path: Path, finished: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "waits"
    shutil.copytree(finished, run)
    shutil.copytree(finished, other)
    exhibit = sorted((run / "exhibits").iterdir())[-1]
    tensors = load_file(exhibit)
    save_file(tensors | {"labels": tensors["labels"] * 0 - 99}, exhibit)
    save_file({"counts": torch.full((2, 2), float("inf"))}, run / "federation.safetensors")
    (other / "rounds.jsonl").unlink()
    os.mkfifo(other / "rounds.jsonl")  # whoever opens it waits until somebody writes
    with serving(tmp_path) as server:
        told = json.loads(server.answer("/runs.json").body)["runs"]
        assert [(one["name"], one["state"]) for one in told] == [("run", "finished"), ("waits", "damaged")]
        number = told[0]["id"]
        assert b"<svg" in server.answer(f"/runs/{number}/partition.svg").body
        assert json.loads(server.answer(f"/runs/{number}/generated/{int(exhibit.stem)}.json").body)


def test_runs_are_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collection, "RUNS", 3)
    for number in range(5):
        directory = write(tmp_path / f"run-{number}", 1, 2)
        os.utime(directory.path / "rounds.jsonl", (1e9 + number, 1e9 + number))
    (tmp_path / ".hidden").mkdir()
    write(tmp_path / ".hidden" / "run", 1, 2)
    with serving(tmp_path, tmp_path / "run-0") as server:
        found = told(server)
        assert [run["name"] for run in found["runs"]] == ["run-2", "run-3", "run-4"] and found["more"] == 2


def test_a_run_that_is_a_link_is_found_and_a_ring_of_links_borne(tmp_path: Path) -> None:
    write(tmp_path / "elsewhere" / "a", 1, 2)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "a").symlink_to(tmp_path / "elsewhere" / "a")
    (tmp_path / "runs" / "ring").symlink_to(tmp_path / "runs")
    with serving(tmp_path / "runs") as server:
        assert [run["name"] for run in told(server)["runs"]] == ["a"]


def test_a_server_that_begins_anew_is_not_mistaken_for_the_one_before(browser: Chrome, tmp_path: Path) -> None:
    write(tmp_path / "a" / "first", 3, 9)
    write(tmp_path / "b" / "other", 5, 9)
    with serving(tmp_path / "a") as server:
        look(browser, server.url, "desktop")
        wait(lambda: ask(browser, POINTS) == [3], "the first")
        port = int(server.url.rsplit(":", 1)[1].rstrip("/"))
    wait(lambda: "not connected" in ask(browser, "return document.getElementById('status').innerText"), "it is gone")
    server = Server([tmp_path / "b"], port)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        wait(lambda: ask(browser, POINTS) == [5], "the other")
        assert ask(browser, "return document.querySelector('#runs').innerText").startswith("other")
    finally:
        server.stop()
        thread.join(timeout=10)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_says_where_and_stops_when_asked(tmp_path: Path, number: signal.Signals) -> None:
    words = [sys.executable, "-m", "fedcog", "watch", str(tmp_path), "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            port = int(line.split("http://127.0.0.1:")[1].split("/")[0])
            with socket.create_connection(("127.0.0.1", port), timeout=10) as idle:  # somebody who says nothing
                process.send_signal(number)
                assert process.wait(timeout=20) == 130
                assert process.stderr is not None and process.stderr.read() == "fedcog: stopped.\n"
                idle.close()
        finally:
            process.kill()


def test_what_cannot_be_served_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["watch", str(tmp_path), "--port", str(taken.getsockname()[1])]) == 2
        assert "choose another --port" in capsys.readouterr().err
    assert main(["watch", str(tmp_path / "none")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert main(["watch", str(tmp_path), "--port", "70000"]) == 2
    assert "from 0 (any that is free) to 65535" in capsys.readouterr().err
