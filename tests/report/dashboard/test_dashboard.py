"""Tests of the server of `fedcog watch`: what it reads, serves and refuses."""

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

import fedcog
from fedcog import Experiment, FedCOG, FedProx
from fedcog.cli.main import main
from fedcog.report.dashboard import DashboardServer, run_index, run_labels, web_server
from fedcog.report.dashboard.run_follower import RunFollower, RunGone
from fedcog.runs.records.recorded_run import Run
from fedcog.runs.records.run_directory import DirectoryBusy, RunDirectory
from tests.support.browser import browser, console_messages, open_page, run_script, save_screenshot
from tests.support.dashboard import (
    FEDCOG,
    QUICK,
    finished_run,
    refresh_always,
    serve,
    wait_for,
    write_run,
)

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

__all__ = ["browser", "finished_run", "refresh_always"]


HOSTILE = "<img src=x onerror='window.hacked=1'>&amp;\u202e\"'"
FITS_WIDTH = "const page = document.documentElement; return page.scrollWidth <= page.clientWidth"
GENERATED_TITLE = "return document.querySelector('#generated h3').innerText"
ROWS = "return [...document.querySelectorAll('#runs li')].map(r => r.innerText)"
STATUS = "return document.getElementById('status').innerText"
POINTS = "return [...document.querySelectorAll('#score path')].map(path => +path.dataset.points)"


class Answer(NamedTuple):
    """A response with its body."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes


def request(server: DashboardServer, target: str, method: str = "GET", **headers: str) -> Answer:
    host, port = server.url.removeprefix("http://").rstrip("/").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=20)
    connection.putrequest(method, target, skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders()
    response = connection.getresponse()
    answer = Answer(response.status, response.headers, response.read())
    connection.close()
    return answer


def run_list(server: DashboardServer) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(request(server, "/runs.json").body)
    return answer


def wait_for_points(browser: "Chrome", counts: list[int], what: str) -> None:
    """Wait until the curves have this many points, in ascending order."""
    wait_for(lambda: sorted(run_script(browser, POINTS)) == counts, what)


def wait_for_images(browser: "Chrome", title: str) -> None:
    wait_for(lambda: title in run_script(browser, GENERATED_TITLE), f"images of {title}")


@pytest.mark.slow
@pytest.mark.parametrize("width", ["desktop", "phone"])
def test_page_follows_a_live_run_without_reload(
    browser: "Chrome", tmp_path: Path, finished_run: Path, width: str
) -> None:
    shutil.copytree(finished_run, tmp_path / "done")
    gate = threading.Semaphore(0)
    results = []

    def wait_at_gate(*_: object) -> None:
        gate.acquire(timeout=60)

    def train() -> None:
        experiment = Experiment(algorithm=FEDCOG, **QUICK | {"seed": 1})
        live = tmp_path / "live"
        results.append(fedcog.run(experiment, live, callbacks=wait_at_gate, report=False))

    with serve(tmp_path) as server:
        open_page(browser, server.url, width)
        run_script(browser, "window.same = 'page'")
        wait_for(lambda: run_script(browser, POINTS) == [4], "the finished run is drawn")
        thread = threading.Thread(target=train)
        thread.start()
        for round in (1, 2, 3, 4):
            wait_for_points(browser, sorted([4, round]), f"round {round}")
            if round == 2:
                rows = {row.split("\n")[0]: row for row in run_script(browser, ROWS)}
                assert "running" in rows["seed 1"] and "2 of 4" in rows["seed 1"]
                assert "live: fedavg+fedcog on digits" in rows["seed 1"]
                assert "finished" in rows["seed 0"] and list(rows) == ["seed 1", "seed 0"]
                browser.find_elements("css selector", "#runs button")[0].click()
            if round > 1:
                wait_for_images(browser, f"round {round}")
                assert len(browser.find_elements("css selector", "#generated .sheet img")) >= round
            gate.release()
        thread.join(timeout=60)
        wait_for(lambda: "2 finished" in run_script(browser, STATUS), "both runs are finished")
        loaded = (
            "return [...document.querySelectorAll('img')].every(image => "
            "image.complete && image.naturalWidth > 20)"
        )
        wait_for(lambda: run_script(browser, loaded), "the partition and all images are loaded")
        cells = run_script(
            browser,
            "return [...document.querySelectorAll('#comparison tbody tr')].map(row => "
            "row.innerText)",
        )
        assert len(cells) == 1 and "±" in cells[0] and "fedavg+fedcog" in cells[0]
        assert (
            run_script(browser, FITS_WIDTH) and run_script(browser, "return window.same") == "page"
        )
        save_screenshot(browser, f"watch-{width}")
        assert console_messages(browser) == []
    assert len(results[0].lines) == 4


@pytest.mark.slow
def test_page_shows_empty_folder_new_and_removed_runs_and_dark_mode(
    browser: "Chrome", tmp_path: Path
) -> None:
    with serve(tmp_path) as server:
        open_page(browser, server.url, "phone")
        wait_for(
            lambda: run_script(
                browser, "return document.getElementById('empty').checkVisibility()"
            ),
            "the page says that there are no runs",
        )
        write_run(tmp_path / "a", 3, 9)
        write_run(tmp_path / "b", 2, 9)
        wait_for_points(browser, [2, 3], "new runs appear")
        shutil.rmtree(tmp_path / "a")
        wait_for(lambda: run_script(browser, POINTS) == [2], "the removed run disappears")
        assert run_script(browser, STATUS) == "1 stopped"

        light = run_script(browser, "return getComputedStyle(document.body).backgroundColor")
        browser.execute_cdp_cmd(
            "Emulation.setEmulatedMedia",
            {"features": [{"name": "prefers-color-scheme", "value": "dark"}]},
        )
        assert (
            run_script(browser, "return getComputedStyle(document.body).backgroundColor") != light
        )
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
        assert run_script(browser, FITS_WIDTH) and console_messages(browser) == []


def test_page_escapes_names_and_thins_long_curves(browser: "Chrome", tmp_path: Path) -> None:
    write_run(tmp_path / HOSTILE.replace("/", "_") / ("x" * 200), 6000, 9000)
    write_run(tmp_path / "bad", 1, 2).record_failure(f"<script>window.hacked=1</script>{HOSTILE}")
    with serve(tmp_path) as server:
        open_page(browser, server.url, "phone")
        wait_for(lambda: len(run_script(browser, POINTS)) == 2, "both runs are drawn")
        assert 100 < max(run_script(browser, POINTS)) < 1500
        for button in browser.find_elements("css selector", "#runs button"):
            button.click()
        shown = run_script(browser, "return document.body.innerText")
        assert "<img src=x" in shown and "<script>window.hacked" in shown
        assert run_script(
            browser,
            "return window.hacked === undefined && document.querySelectorAll('#runs img').length "
            "=== 0",
        )
        wait_for(lambda: run_script(browser, FITS_WIDTH), "the page fits a phone")
        assert console_messages(browser) == []


def test_server_is_read_only_and_answers_local_hosts_only(
    tmp_path: Path, finished_run: Path
) -> None:
    before = {file: file.stat().st_mtime_ns for file in finished_run.rglob("*")}
    with serve(finished_run.parent) as server:
        assert server.url.startswith("http://127.0.0.1:")
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
            refused = request(server, "/runs.json", method)
            assert refused.status == 405 and refused.headers["Allow"] == "GET, HEAD"
        assert request(server, "/", "BREW").status == 501
        port = server.url.rsplit(":", 1)[1].rstrip("/")
        for host in (
            "evil.example",
            f"evil.example:{port}",
            "127.0.0.1.evil.example",
            "",
            "localhost:1:2",
        ):
            assert request(server, "/runs.json", Host=host).status == 421, host
        # A tunnel may have another port.
        for host in ("localhost", f"localhost:{port}", "127.0.0.1:9"):
            assert request(server, "/runs.json", Host=host).status == 200, host
        run = run_list(server)["runs"][0]["id"]
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
            assert request(server, target).status == 404, target
        page = request(server, "/")
        policy = page.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "script-src 'self';" in policy
        assert "unsafe" not in policy
        assert page.headers["X-Content-Type-Options"] == "nosniff"
        etag = request(server, "/runs.json").headers["ETag"]
        assert request(server, "/runs.json", If_None_Match=etag).status == 304
        head = request(server, "/", "HEAD")
        assert head.status == 200 and head.body == b""
        assert int(head.headers["Content-Length"]) > 500
        figure = request(server, f"/runs/{run}/partition.svg")
        assert figure.headers["Content-Type"].startswith("image/svg") and b"<svg" in figure.body
        odd_query = f"/runs/{run}/curves.json?first=-1&generation={'1' * 50}&first=x"
        assert len(json.loads(request(server, odd_query).body)["loss"]) == 4
        missing = json.loads(request(server, f"/runs/{run}/generated/77.json").body)
        assert missing == {"none": True}
    assert before == {file: file.stat().st_mtime_ns for file in finished_run.rglob("*")}


def test_idle_connections_do_not_block_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_server, "MAX_CONNECTIONS", 5)
    with serve(tmp_path) as server:
        host, port = server.url.removeprefix("http://").rstrip("/").split(":")
        idle = [socket.create_connection((host, int(port)), timeout=20) for _ in range(12)]
        for connection in idle[-3:]:
            connection.sendall(b"GET / HTTP/1.1\r\nX: ")  # an unfinished request
        assert run_list(server)["runs"] == [] and run_list(server)["runs"] == []
        assert idle[0].recv(1) == b"", "the server closes the oldest connection"
        for connection in idle:
            connection.close()


def test_request_body_is_not_read_as_another_request(tmp_path: Path) -> None:
    with serve(tmp_path) as server:
        host, port = server.url.removeprefix("http://").rstrip("/").split(":")
        for header in (b"Content-Length: 42", b"Transfer-Encoding: chunked"):
            with socket.create_connection((host, int(port)), timeout=20) as connection:
                inner = b"GET /inner HTTP/1.1\r\nHost: localhost\r\n\r\n"
                connection.sendall(
                    b"GET /runs.json HTTP/1.1\r\nHost: localhost\r\n" + header + b"\r\n\r\n" + inner
                )
                answers = b""
                with suppress(ConnectionResetError):  # the server leaves the body unread
                    while chunk := connection.recv(65536):
                        answers += chunk
            assert answers.count(b"HTTP/1.1 200") == 1 and b"404" not in answers


def test_follower_reads_only_new_complete_lines(tmp_path: Path) -> None:
    file = write_run(tmp_path / "a", 5000, 9000).path / "rounds.jsonl"
    run = RunFollower(tmp_path / "a", "a")
    run.refresh()
    assert len(run.lines) == 5000 and run.state == "stopped" and run.generation == 1
    with open(file, "r+b") as stream:  # lines read before are not read again
        stream.write(b"x" * 1000)
    line = json.dumps({"round": 5001, "loss": 0.5, "accuracy": None, "local": []})
    with open(file, "a") as stream:
        stream.write(line[:20])
    run.refresh()
    assert len(run.lines) == 5000 and run.fault == ""
    with open(file, "a") as stream:
        stream.write(line[20:] + "\n")
    run.refresh()
    assert len(run.lines) == 5001 and run.lines[-1]["loss"] == 0.5 and run.generation == 1


def test_rewound_run_starts_a_new_generation(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "a", 5, 6)
    with serve(tmp_path) as server:
        (before,) = run_list(server)["runs"]
        directory.rewind(3)
        (after,) = run_list(server)["runs"]
        assert (before["done"], after["done"]) == (5, 3)
        assert after["generation"] > before["generation"]
        target = f"/runs/{before['id']}/curves.json?generation={before['generation']}&first=2"
        curves = json.loads(request(server, target).body)
        # The page's rounds are outdated, so the server sends all.
        assert curves["first"] == 0 and len(curves["loss"]) == 3
        target = f"/runs/{before['id']}/curves.json?generation={after['generation']}&first=2"
        assert json.loads(request(server, target).body)["loss"] == [1 / 3]
        shutil.rmtree(directory.path)
        assert run_list(server)["runs"] == []
        assert json.loads(request(server, target).body) == {"gone": True}


def test_run_state_is_read_from_its_record(tmp_path: Path) -> None:
    rounds = {"finished": 4, "stopped": 2, "running": 2, "diverged": 1, "torn": 2, "strange": 1}
    for name, count in rounds.items():
        write_run(tmp_path / name, count, 4)
    RunDirectory(tmp_path / "diverged").record_failure("client 3 is not finite")
    (tmp_path / "torn" / "rounds.jsonl").write_text('{"round": 1}\n[]\n')
    (tmp_path / "strange" / "experiment.toml").write_text("rounds = 'many'")
    with serve(tmp_path) as server, RunDirectory(tmp_path / "running").locked():
        runs = {run["name"]: run for run in run_list(server)["runs"]}
        expected = {name: name for name in ("finished", "stopped", "running", "diverged")}
        expected |= {"torn": "damaged", "strange": "damaged"}
        assert {name: run["state"] for name, run in runs.items()} == expected
        assert runs["running"]["left"] == pytest.approx(4.0) and runs["stopped"]["left"] is None
        assert runs["torn"]["done"] == 1 and "line 2" in runs["torn"]["why"]
        assert "rounds" in runs["strange"]["why"]
        assert runs["diverged"]["why"] == "client 3 is not finite"
        assert {row["cells"][0] for row in run_list(server)["table"]} == {"fedavg"}
    (tmp_path / "strange" / "experiment.toml").write_bytes(b"#" * 2**21)
    run = RunFollower(tmp_path / "strange", "strange")
    run.refresh()
    assert "too large" in run.fault
    (tmp_path / "strange" / "experiment.toml").unlink()
    with pytest.raises(RunGone):
        run.refresh()


def test_validation_score_is_shown_without_test_evaluation(tmp_path: Path) -> None:
    settings = QUICK | {"rounds": 2, "validation": 0.2, "evaluate_test": False}
    # The trials of a sweep run like this.
    run = fedcog.run(Experiment(**settings), tmp_path / "trial", report=False)
    scores = [line["validation_accuracy"] for line in run.lines]
    with serve(tmp_path) as server:
        (entry,) = run_list(server)["runs"]
        assert (entry["last"], entry["best"]) == (scores[-1], max(scores))
        assert entry["measure"] == "Validation accuracy"
        follower = server.runs.find(entry["id"])
        assert follower is not None and server.runs.curves(follower, 0, 0)["score"] == scores


def test_checking_the_lock_does_not_block_writers(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "a", 1, 2)
    stop = threading.Event()
    (directory.path / ".lock").touch()

    def check_lock() -> None:
        while not stop.wait(0.001):
            directory.is_busy()

    thread = threading.Thread(target=check_lock)
    thread.start()
    try:
        with directory.locked():
            assert directory.is_busy()
            with (
                pytest.raises(DirectoryBusy, match="another run is writing"),
                RunDirectory(directory.path).locked(),
            ):
                pass
        for _ in range(200):
            with directory.locked():
                pass
    finally:
        stop.set()
        thread.join()


def test_server_survives_invalid_tensors_and_named_pipes(
    tmp_path: Path, finished_run: Path
) -> None:
    run = tmp_path / "run"
    pipe = tmp_path / "waits"
    shutil.copytree(finished_run, run)
    shutil.copytree(finished_run, pipe)
    artifacts = sorted((run / "exhibits").iterdir())[-1]
    tensors = load_file(artifacts)
    save_file(tensors | {"labels": tensors["labels"] * 0 - 99}, artifacts)
    save_file({"counts": torch.full((2, 2), float("inf"))}, run / "federation.safetensors")
    (pipe / "rounds.jsonl").unlink()
    os.mkfifo(pipe / "rounds.jsonl")  # opening it blocks until a writer comes
    with serve(tmp_path) as server:
        runs = json.loads(server.answer("/runs.json").body)["runs"]
        states = [(entry["name"], entry["state"]) for entry in runs]
        assert states == [("run", "finished"), ("waits", "damaged")]
        run_id = runs[0]["id"]
        assert b"<svg" in server.answer(f"/runs/{run_id}/partition.svg").body
        assert json.loads(
            server.answer(f"/runs/{run_id}/generated/{int(artifacts.stem)}.json").body
        )


def test_number_of_runs_is_limited_to_the_latest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_index, "MAX_RUNS", 3)
    for number in range(5):
        directory = write_run(tmp_path / f"run-{number}", 1, 2)
        os.utime(directory.path / "rounds.jsonl", (1e9 + number, 1e9 + number))
    (tmp_path / ".hidden").mkdir()
    write_run(tmp_path / ".hidden" / "run", 1, 2)
    with serve(tmp_path, tmp_path / "run-0") as server:
        answer = run_list(server)
        assert [run["name"] for run in answer["runs"]] == ["run-2", "run-3", "run-4"]
        assert answer["more"] == 2


def test_linked_runs_are_listed_and_link_cycles_ignored(tmp_path: Path) -> None:
    write_run(tmp_path / "elsewhere" / "a", 1, 2)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "a").symlink_to(tmp_path / "elsewhere" / "a")
    (tmp_path / "runs" / "ring").symlink_to(tmp_path / "runs")
    with serve(tmp_path / "runs") as server:
        assert [run["name"] for run in run_list(server)["runs"]] == ["a"]


def test_running_runs_come_first_and_others_are_grouped_by_folder(tmp_path: Path) -> None:
    for name in ("a/one", "a/two", "b/one", "alone"):
        write_run(tmp_path / "runs" / name, 1, 2)
    with RunDirectory(tmp_path / "runs/b/two").locked():
        write_run(tmp_path / "runs/b/three", 1, 2)
        RunDirectory(tmp_path / "runs/b/two").begin(Experiment(), {})
        index = run_index.RunIndex([tmp_path / "runs"])
        listed = [(run["section"], run["name"]) for run in index.overview()["runs"]]
    assert listed == [
        ("running", "b/two"),
        ("runs/a", "a/one"),
        ("runs/a", "a/two"),
        ("runs", "alone"),
        ("runs/b", "b/one"),
        ("runs/b", "b/three"),
    ]


def test_labels_show_what_differs_and_never_coincide() -> None:
    def labels(*experiments: Experiment | None) -> list[str]:
        runs = [
            (number, f"folder/{number}", Run(Path(), one, []) if one else None)
            for number, one in enumerate(experiments, 1)
        ]
        return run_labels.short_labels(runs)

    seeds = [Experiment(seed=seed) for seed in (0, 1)]
    assert labels(*seeds) == ["seed 0", "seed 1"]
    assert labels(*seeds, Experiment(FedProx(mu=0.5), lr=0.1), None) == [
        "fedavg, lr 0.01, seed 0",
        "fedavg, lr 0.01, seed 1",
        "fedprox, lr 0.1, seed 0",
        "folder/4",
    ]
    assert labels(Experiment(), Experiment()) == ["fedavg #1", "fedavg #2"]
    long = [
        Experiment(FedCOG(FedProx(mu=mu), lambda_dis=weight), lr=lr, beta=beta, seed=seed)
        for mu in (0.01, 0.1)
        for weight in (0.1, 1.0)
        for lr in (0.01, 0.02)
        for beta in (0.1, 0.5)
        for seed in (0, 1)
    ]
    found = labels(*long)
    assert len(set(found)) == len(long) == 32
    assert all(len(label) <= 30 for label in found)


def test_equal_labels_show_what_tells_their_runs_apart() -> None:
    usual = {"dataset": "cifar10", "local_steps": 100, "batch_size": 32, "weight_decay": 0.001}
    experiments = [Experiment(lr=lr, rounds=5) for lr in (0.1, 0.2)]
    experiments += [Experiment(FedProx(), grad_clip=clip, **usual) for clip in (1.0, 2.0)]  # type: ignore[arg-type]
    runs = [(number, "", Run(Path(), one, [])) for number, one in enumerate(experiments, 1)]
    found = run_labels.short_labels(runs)
    assert found[2:] == ["fedprox, grad_clip 1.0", "fedprox, grad_clip 2.0"]
    assert len(set(found)) == 4


def test_long_labels_show_unusual_settings_alone() -> None:
    usual = {"local_steps": 100, "batch_size": 32, "rounds": 20, "weight_decay": 0.001}
    experiments = [
        Experiment(seed=0, **usual),  # type: ignore[arg-type]
        Experiment(seed=1, **usual),  # type: ignore[arg-type]
        Experiment(model="mlp", **usual),  # type: ignore[arg-type]
        Experiment(local_steps=7, batch_size=8, rounds=3, weight_decay=0.0),
    ]
    runs = [(number, "", Run(Path(), one, [])) for number, one in enumerate(experiments, 1)]
    assert run_labels.short_labels(runs) == [
        "fedavg, seed 0",
        "fedavg, seed 1",
        "mlp, seed 0",
        "batch_size 8, loc… 0.0, seed 0",
    ]


def test_runs_of_other_networks_are_other_groups(tmp_path: Path) -> None:
    x = torch.eye(6)
    data = fedcog.from_arrays(x, torch.arange(6) % 2, x, torch.arange(6) % 2)
    shared: dict[str, Any] = {"clients": 2, "partition": "iid", "min_examples": 1, "rounds": 1}
    for seed, activation in enumerate((torch.relu, torch.tanh)):
        experiment = Experiment(local_steps=1, batch_size=2, threads=1, seed=seed, **shared)
        fedcog.run(
            experiment,
            tmp_path / activation.__name__,
            data=data,
            model=lambda activation=activation: WithActivation(activation),
            report=False,
        )
    overview = run_index.RunIndex([tmp_path]).overview()
    assert len(overview["groups"]) == 2
    labels = [run["label"] for run in overview["runs"]]
    assert all(re.fullmatch(r"lambda-[0-9a-f]{6}, seed \d", label) for label in labels), labels


class WithActivation(torch.nn.Module):
    """A network whose function is no layer, so neither structure nor source shows it."""

    def __init__(self, activation: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(6, 2)
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.activation(self.layer(x))


@pytest.mark.slow
def test_page_notices_a_restarted_server(browser: "Chrome", tmp_path: Path) -> None:
    write_run(tmp_path / "a" / "first", 3, 9)
    write_run(tmp_path / "b" / "other", 5, 9)
    with serve(tmp_path / "a") as server:
        open_page(browser, server.url, "desktop")
        wait_for(lambda: run_script(browser, POINTS) == [3], "the run of the first server")
        port = int(server.url.rsplit(":", 1)[1].rstrip("/"))
    wait_for(lambda: "not connected" in run_script(browser, STATUS), "the server is gone")
    server = DashboardServer([tmp_path / "b"], port)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        wait_for(lambda: run_script(browser, POINTS) == [5], "the run of the second server")
        names = "return [...document.querySelectorAll('#runs button')].map(name => name.title)"
        assert run_script(browser, names) == ["other"]
    finally:
        server.stop()
        thread.join(timeout=10)


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_command_prints_its_address_and_stops_on_a_signal(
    tmp_path: Path, number: signal.Signals
) -> None:
    command = [sys.executable, "-m", "fedcog", "watch", str(tmp_path), "--port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            port = int(line.split("http://127.0.0.1:")[1].split("/")[0])
            # An idle connection must not delay the end.
            with socket.create_connection(("127.0.0.1", port), timeout=10) as idle:
                process.send_signal(number)
                assert process.wait(timeout=20) == 130
                assert process.stderr is not None and process.stderr.read() == "fedcog: stopped.\n"
                idle.close()
        finally:
            process.kill()


def test_watch_reports_port_in_use_and_missing_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["watch", str(tmp_path), "--port", str(taken.getsockname()[1])]) == 2
        assert "choose another --port" in capsys.readouterr().err
    assert main(["watch", str(tmp_path / "none")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert main(["watch", str(tmp_path), "--port", "70000"]) == 2
    assert "from 0 (any free port) to 65535" in capsys.readouterr().err
