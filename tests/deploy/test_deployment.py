"""Tests of real deployments on loopback: TLS, authenticated nodes, failures and restarts."""
# ruff: noqa: E402

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.support import flower_engine
from tests.support.paths import REPO

certificates = pytest.importorskip("fedcog.deploy.certificates")
pytest.importorskip("flwr")
flower_engine.skip_if_python_path_has_space()

import fedcog
from fedcog.algorithms import FedCOG
from fedcog.core import tree
from fedcog.core.tree import Params
from fedcog.runs.records.run_directory import RunDirectory
from tests.support.superlink import Link, federation

pytestmark = pytest.mark.processes

EXAMPLE = REPO / "examples" / "flower-app"


def test_deployment_matches_the_simulator(tmp_path: Path) -> None:
    """Runs the example app with an algorithm whose clients hold state and send two tensors."""
    deployed = tmp_path / "deployed"
    simulated = tmp_path / "simulated"
    with federation(tmp_path, 2) as link:
        shutil.rmtree(tmp_path / "fed" / "app")
        shutil.copytree(EXAMPLE, tmp_path / "fed" / "app")
        for number in range(2):
            link.start(f"node-{number}", f"nodes/node-{number}/start.sh", "", "cpu")
        link.run(algorithm="scaffold+fedcog", clients=2, out=str(deployed), threads=1)
        link.wait_for_rounds(2, out=deployed)
        link.wait(lambda: "report.html" in link.log("run"), 60, "the run ends")
    experiment = RunDirectory(deployed).experiment()
    lines = RunDirectory(deployed).lines()
    assert isinstance(experiment.algorithm, FedCOG)
    assert experiment.algorithm.start_round == 1  # round 2 generates
    local = replace(experiment, backend="simulator", mapping="loop", threads=1, device="cpu")
    run = fedcog.run(local, simulated, report=False)
    assert [line["accuracy"] for line in run.lines] == [line["accuracy"] for line in lines]
    expected = server_state(simulated)
    for key, value in server_state(deployed).items():
        torch.testing.assert_close(value, expected[key], atol=1e-5, rtol=0)
    assert all(len(line["local"]) == 2 and "refused" not in line for line in lines)


def server_state(path: Path) -> Params:
    return tree.flatten(RunDirectory(path).load().server)  # type: ignore[union-attr]


CLASSES = ["dark", "light"]


def make_images(count: int, seed: int, side: int = 8) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    labels = np.arange(count) % 2
    images = rng.integers(0, 100, (count, side, side)) + 150 * labels[:, None, None]
    return images.astype(np.uint8), labels


def write_node_data(folder: Path) -> dict[str, str]:
    """Write a node's data in every format, one of a wrong shape, and the server's test data."""
    x, y = make_images(40, 0)
    for number, (image, label) in enumerate(zip(x, y, strict=True)):
        class_folder = folder / "images" / CLASSES[label]
        class_folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(class_folder / f"{number}.png")
    arrays = {
        "numbers": make_images(30, 1),
        "wrong": make_images(10, 2, side=9),
        "test": make_images(50, 3),
    }
    for name, (images, labels) in arrays.items():
        np.savez(folder / f"{name}.npz", x=images, y=labels)
    (folder / "mine.py").write_text(
        "import numpy as np\n\n"
        "def load():\n"
        "    file = np.load(__file__.replace('mine.py', 'numbers.npz'))\n"
        "    return file['x'][:20], file['y'][:20]\n"
    )
    sources = {name: str(folder / f"{name}.npz") for name in arrays}
    return sources | {
        "images": str(folder / "images"),
        "function": "mine:load",
        "missing": str(folder / "nowhere"),
    }


def test_deployment_with_own_data_survives_failures(tmp_path: Path) -> None:
    """Nodes with their own data fail, are replaced, and rejoin.

    Round 1: one node's data are missing, another's have a wrong shape, and an unregistered node
    connects. Round 2: all nodes train. Round 3: a node is killed while it trains. Then the server
    is killed; after its restart all nodes train in round 4.
    """
    data = write_node_data(tmp_path)
    flags = ["--algorithm", "scaffold", "--local-steps", "3", "--batch-size", "8"]
    flags += ["--weight-cap", "40", "--threads", "1"]
    flags += ["--classes", ",".join(CLASSES), "--test-data", data["test"]]

    with federation(tmp_path, 3, *flags) as link:

        def start_node(number: int, source: str) -> None:
            link.start(
                f"node-{number}",
                f"nodes/node-{number}/start.sh",
                data[source],
                "cpu",
                PYTHONPATH=f"{REPO}:{tmp_path}",
            )

        def finish_run(rounds: int) -> None:
            link.wait_for_rounds(rounds)
            link.wait(
                lambda: link.log("run").count("report.html") >= (1 if rounds == 1 else 2),
                60,
                "the run ends",
            )
            link.kill("run")

        start_node(0, "images")
        start_node(1, "missing")
        start_node(2, "wrong")
        start_unregistered_node(link)
        link.run(rounds=1, patience=120.0)
        finish_run(1)
        for number, source in ((1, "numbers"), (2, "function")):
            link.stop(f"node-{number}")
            start_node(number, source)
        link.run(rounds=4, patience=60.0)
        link.wait_for_rounds(2)
        link.wait(
            lambda: link.log("node-1").count("Receiving: train") >= 3,
            60,
            "node 1 receives round 3",
        )
        link.kill("node-1")
        link.wait_for_rounds(3)
        # Without a checkpoint of round 3, the restarted server would repeat it with all nodes.
        link.wait(lambda: checkpointed_rounds(link) >= 3, 60, "round 3 is checkpointed")
        link.kill("server")
        link.kill("run")
        start_node(1, "numbers")
        link.start_server()
        link.run(rounds=4, patience=120.0)
        finish_run(4)
        refusals = link.log("stranger")
    first, second, third, fourth = link.lines()
    missing, wrong = first["refused"]
    assert missing["client"] == 1, missing
    assert "there is no folder" in missing["why"] and "nowhere" in missing["why"], missing
    assert wrong["client"] == 2, wrong
    assert "shape [1, 9, 9], but the federation's have [1, 8, 8]" in wrong["why"], wrong
    assert "refused" not in second
    assert [client["client"] for client in second["local"]] == [0, 1, 2]
    # On a busy machine another node may be late, too.
    assert 1 in [client["client"] for client in third["refused"]], third
    assert "refused" not in fourth
    assert [client["client"] for client in fourth["local"]] == [0, 1, 2]
    assert fourth["accuracy"] > 0.9
    assert "SuperNode ID" not in refusals, refusals[-2000:]
    assert "server does not know its key" in refusals, refusals[-2000:]


def test_deployment_without_a_test_set_evaluates_at_the_nodes(tmp_path: Path) -> None:
    """The server has no example at all: it knows the shape of an input and the classes."""
    flags = ["--local-steps", "10", "--batch-size", "8", "--lr", "0.1", "--threads", "1"]
    flags += ["--weights", "uniform", "--local-test", "0.3", "--metrics", "balanced_accuracy"]
    flags += ["--classes", ",".join(CLASSES), "--input-shape", "1x8x8", "--model", "mlp"]
    for number in range(2):
        images, labels = make_images(40 + 10 * number, number)
        np.savez(tmp_path / f"{number}.npz", x=images, y=labels)
    with federation(tmp_path, 2, *flags) as link:
        for number in range(2):
            source = str(tmp_path / f"{number}.npz")
            link.start(f"node-{number}", f"nodes/node-{number}/start.sh", source, "cpu")
        link.run(rounds=2, patience=120.0)
        link.wait_for_rounds(2)
        link.wait(lambda: "report.html" in link.log("run"), 60, "the run ends")
    last = link.lines()[-1]
    assert last["local_test"]["clients"]["examples"] == [12, 15]
    assert last["accuracy"] == last["local_test"]["accuracy"] > 0.9
    assert last["local_test"]["balanced_accuracy"] > 0.9
    assert last["evaluated_on"] == "clients"


def checkpointed_rounds(link: Link) -> int:
    """Number of rounds in the server's checkpoint."""
    checkpoint = RunDirectory(link.out).load()
    return checkpoint.round if checkpoint else 0


def start_unregistered_node(link: Link) -> None:
    """Start a node whose key is not registered with the server."""
    nodes = link.folder / "fed" / "nodes"
    (nodes / "stranger").mkdir()
    (nodes / "stranger" / "ca.crt").write_bytes((nodes / "node-0" / "ca.crt").read_bytes())
    (nodes / "stranger" / "key").write_bytes(
        certificates.openssh_private_key(certificates.new_key())
    )
    start = (nodes / "node-0" / "start.sh").read_text()
    (nodes / "stranger" / "start.sh").write_text(
        start.replace(f"--port {link.port + 1}", f"--port {link.port + 4}")
    )
    link.start("stranger", "nodes/stranger/start.sh")
