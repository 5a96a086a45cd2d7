"""A real deployment on loopback: TLS, nodes that prove who they are, and everything that goes wrong."""
# ruff: noqa: E402

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests import engine

certificates = pytest.importorskip("fedcog.experiments.certificates")
pytest.importorskip("flwr")
engine.no_space()

import fedcog
from fedcog import tree
from fedcog.algorithms import FedCOG
from fedcog.experiments.record import RunDirectory
from tests.federation.link import Link, federation

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower-app"


def test_a_deployment_comes_to_what_the_simulator_comes_to(tmp_path: Path) -> None:
    """The app of the examples, with an algorithm whose clients keep two things and send two. Two nodes tell enough."""
    out, here = tmp_path / "there", tmp_path / "here"
    with federation(tmp_path, 2) as link:
        shutil.rmtree(tmp_path / "fed" / "app")
        shutil.copytree(EXAMPLE, tmp_path / "fed" / "app")
        for number in range(2):
            link.start(f"node-{number}", f"nodes/node-{number}/start.sh", "", "cpu")
        link.run(algorithm="scaffold+fedcog", clients=2, out=str(out), threads=1)
        link.wait_for_rounds(2, out=out)
        link.wait(lambda: "report.html" in link.said("run"), 60, "the run is done")
    experiment, lines = RunDirectory(out).experiment(), RunDirectory(out).lines()
    assert isinstance(experiment.algorithm, FedCOG) and experiment.algorithm.start_round == 1  # round 2 generates
    one = replace(experiment, backend="simulator", mapping="loop", threads=1, device="cpu")
    assert [line["accuracy"] for line in fedcog.run(one, here, report=False).lines] == [
        one["accuracy"] for one in lines
    ]
    servers = [tree.flatten(RunDirectory(run).load().server) for run in (out, here)]  # type: ignore[union-attr]
    for key, value in servers[0].items():
        torch.testing.assert_close(value, servers[1][key], atol=1e-5, rtol=0)
    assert all(len(line["local"]) == 2 and "refused" not in line for line in lines)


CLASSES = ["dark", "light"]


def pictures(count: int, seed: int, side: int = 8) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    labels = np.arange(count) % 2
    return (draw.integers(0, 100, (count, side, side)) + 150 * labels[:, None, None]).astype(np.uint8), labels


def lay_out(folder: Path) -> dict[str, str]:
    """Everybody's data: a folder of images, a NumPy file, a function; a wrong one; and the server's."""
    x, y = pictures(40, 0)
    for number, (image, label) in enumerate(zip(x, y, strict=True)):
        place = folder / "images" / CLASSES[label]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(place / f"{number}.png")
    for name, own in {"numbers": pictures(30, 1), "wrong": pictures(10, 2, side=9), "test": pictures(50, 3)}.items():
        np.savez(folder / f"{name}.npz", x=own[0], y=own[1])
    (folder / "mine.py").write_text(
        "import numpy as np\n\ndef load():\n    file = np.load(__file__.replace('mine.py', 'numbers.npz'))\n"
        "    return file['x'][:20], file['y'][:20]\n"
    )
    places = {name: str(folder / f"{name}.npz") for name in ("numbers", "wrong", "test")}
    return places | {"images": str(folder / "images"), "function": "mine:load", "missing": str(folder / "nowhere")}


def test_a_federation_with_data_of_its_own_bears_what_goes_wrong(tmp_path: Path) -> None:
    """Round 1: one node's data are missing, another's of another shape, and a stranger knocks. Round 2: all is well.

    Round 3: a node is killed while it trains. Then the server is killed, and goes on with round 4 and everybody.
    """
    data = lay_out(tmp_path)
    words = [
        "--algorithm",
        "scaffold",
        "--local-steps",
        "3",
        "--batch-size",
        "8",
        "--weight-cap",
        "40",
        "--threads",
        "1",
    ]
    words += ["--classes", ",".join(CLASSES), "--test-data", data["test"]]

    with federation(tmp_path, 3, *words) as link:

        def node(number: int, place: str) -> None:
            here = f"{Path(__file__).parents[2]}:{tmp_path}"
            link.start(f"node-{number}", f"nodes/node-{number}/start.sh", data[place], "cpu", PYTHONPATH=here)

        def done(rounds: int) -> None:
            link.wait_for_rounds(rounds)
            link.wait(lambda: link.said("run").count("report.html") >= (1 if rounds == 1 else 2), 60, "it is done")
            link.end("run")

        node(0, "images")
        node(1, "missing")
        node(2, "wrong")
        stranger(link)
        link.run(rounds=1, patience=120.0)
        done(1)
        for number, place in ((1, "numbers"), (2, "function")):
            link.stop(f"node-{number}")
            node(number, place)
        link.run(rounds=4, patience=60.0)
        link.wait_for_rounds(2)
        link.wait(lambda: link.said("node-1").count("Receiving: train") >= 3, 60, "node 1 is asked again")
        link.end("node-1")
        link.wait_for_rounds(3)
        link.wait(lambda: kept(link) >= 3, 60, "round 3 is kept")  # or it would happen again, with everybody
        link.end("server")
        link.end("run")
        node(1, "numbers")
        link.serve()
        link.run(rounds=4, patience=120.0)
        done(4)
        refusals = link.said("stranger")
    first, second, third, fourth = link.lines()
    missing, wrong = first["refused"]
    assert missing["client"] == 1 and "there is no folder" in missing["why"] and "nowhere" in missing["why"], missing
    assert wrong["client"] == 2 and "shape [1, 9, 9], and the federation's of [1, 8, 8]" in wrong["why"], wrong
    assert "refused" not in second and [one["client"] for one in second["local"]] == [0, 1, 2]
    assert 1 in [one["client"] for one in third["refused"]], third  # on a busy machine another may be late, too
    assert "refused" not in fourth and [one["client"] for one in fourth["local"]] == [0, 1, 2]
    assert fourth["accuracy"] > 0.9
    assert "SuperNode ID" not in refusals and "server does not know its key" in refusals, refusals[-2000:]


def kept(link: Link) -> int:
    """The rounds that the server's checkpoint is of."""
    checkpoint = RunDirectory(link.out).load()
    return checkpoint.round if checkpoint else 0


def stranger(link: Link) -> None:
    """A node whose key the server has never been told of."""
    nodes = link.folder / "fed" / "nodes"
    (nodes / "stranger").mkdir()
    (nodes / "stranger" / "ca.crt").write_bytes((nodes / "node-0" / "ca.crt").read_bytes())
    (nodes / "stranger" / "key").write_bytes(certificates.openssh(certificates.new_key()))
    start = (nodes / "node-0" / "start.sh").read_text()
    (nodes / "stranger" / "start.sh").write_text(start.replace(f"--port {link.port + 1}", f"--port {link.port + 4}"))
    link.start("stranger", "nodes/stranger/start.sh")
