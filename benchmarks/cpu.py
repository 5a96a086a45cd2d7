"""Wall time of a FedAvg round on a CPU: fedcog beside Flower's simulation engine, pfl, and
processes written by hand.

python benchmarks/cpu.py [--data-dir DIR] [--cases digits digits-32 cifar10] [--repeats 3]

Flower and pfl are wanted beside fedcog: pip install "flwr[simulation]==1.41.0" pfl==0.6.0 (their
lines say so where they are not). All train the same network from the same start on the same
clients' data, with the same number of steps on batches of the same size, SGD with momentum 0.9 and
weight decay 1e-5, no augmentation and no evaluation. After one round the loss of every global model
over the whole training set is compared. Each contender runs in a process of its own, some times
over; neither its start nor its first rounds are counted. They take turns round by round, so that
all meet the same moods of the machine; Flower, whose idle processes would disturb the others, is
measured after them. All have their data as normalised floats beforehand. Processes written by hand
run twice, with their images' channels in either place, and the faster ones count. fedcog runs by
its defaults: rounds as short as those of digits train all clients together, longer ones side by
side in worker processes.
"""

import argparse
import contextlib
import datetime
import importlib.metadata
import importlib.util
import os
import platform
import shlex
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from contenders import CASES, CLIENTS, CONTENDERS, CORES, by_hand, flower, material, ours, pfl
from safetensors.torch import load_file, save_file
from torch import Tensor

import fedcog
from fedcog.runs.records.provenance import commit

TURNS = [name for name in CONTENDERS if name != "Flower"], ["Flower"]
"""Who takes turns with whom."""


def play(contender: str, case: str, out: Path) -> None:
    """Let one contender run: it tells how long each round took, and waits for its turn; its first
    model is kept.
    """
    line = socket.socket(socket.AF_UNIX)
    rounds = CASES[case].warm_up + CASES[case].timed
    done = 0
    begun = time.perf_counter()

    def record(model: dict[str, Tensor]) -> bool:
        nonlocal done, begun
        if os.environ.get("RANK", "0") != "0":  # the first of several processes speaks for all
            return False
        seconds = time.perf_counter() - begun
        done = done + 1
        if done == 1:
            save_file(
                {name: value.detach().contiguous() for name, value in model.items()},
                out / "model.safetensors",
            )
            line.connect(str(out / "line"))
        line.sendall(struct.pack("d", seconds))
        if done < rounds and not line.recv(1):
            raise SystemExit(f"{contender}: nobody is listening")
        begun = time.perf_counter()
        return done == rounds

    if contender.startswith("pfl"):
        torch.set_num_threads(1 if contender == "pfl, a process a core" else CORES)
        pfl(case, record)
    elif contender == "Flower":
        flower(case, record)
    else:
        last = contender == "by hand, channels last"
        models = ours(CASES[case].experiment) if contender == "fedcog" else by_hand(case, last)
        while not record(next(models)):
            pass


class Player:
    """A contender at play in a process of its own."""

    def __init__(self, contender: str, case: str, folder: Path) -> None:
        self.contender = contender
        self.case = case
        self.folder = folder
        self.seconds = list[float]()
        words = [sys.executable]
        if contender == "pfl, a process a core":
            words += ["-m", "torch.distributed.run", f"--nproc-per-node={CORES}", "--standalone"]
        here = Path(__file__).resolve().parent
        quiet = {
            "PYTHONPATH": os.pathsep.join(
                [str(here), str(here.parent), os.environ.get("PYTHONPATH", "")]
            )
        }
        quiet |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
        words += [
            str(Path(__file__).resolve()),
            "--play",
            contender,
            "--cases",
            case,
            "--out",
            str(folder),
        ]
        with socket.socket(socket.AF_UNIX) as door, (folder / "said").open("wb") as said:
            door.bind(str(folder / "line"))
            door.listen(1)
            door.settimeout(1)
            self.process = subprocess.Popen(
                words, env=os.environ | quiet, stdout=said, stderr=subprocess.STDOUT
            )
            while True:
                with contextlib.suppress(TimeoutError):
                    self.line = door.accept()[0]
                    break
                if self.process.poll() is not None:
                    raise self.failure()
        self.line.settimeout(600)
        self.listen()

    def listen(self) -> None:
        """Until its round is over."""
        told = self.line.recv(8)
        if not told:
            raise self.failure()
        self.seconds += struct.unpack("d", told)

    def turn(self) -> None:
        """Let it play a round."""
        self.line.sendall(b".")
        self.listen()

    def failure(self) -> RuntimeError:
        """What it said before it ended."""
        return RuntimeError(
            f"{self.contender} failed on {self.case}:\n{(self.folder / 'said').read_text()[-4000:]}"
        )

    def result(self) -> tuple[list[float], float, float]:
        """Its seconds by round; after one round its loss, and how far it went."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(
                timeout=60
            )  # what becomes of it from here on does not matter: pfl's may abort
        self.close()
        model = load_file(self.folder / "model.safetensors")
        given = material(self.case)
        with torch.no_grad():
            parts = [
                F.cross_entropy(torch.func.functional_call(given.module, model, x), y)
                for x, y in given.clients
            ]
            start = dict(given.module.named_parameters())
            moved = torch.cat(
                [(model[name] - value).flatten() for name, value in start.items()]
            ).norm()
        return (
            self.seconds[CASES[self.case].warm_up :],
            float(torch.stack(parts).mean()),
            float(moved),
        )

    def close(self) -> None:
        """End it."""
        self.line.close()
        self.process.kill()
        self.process.wait()


def measure(contenders: list[str], case: str) -> dict[str, tuple[list[float], float, float]]:
    """What comes of contenders that take turns: seconds by round, and after one round the loss and
    the way gone.
    """
    rounds = CASES[case].warm_up + CASES[case].timed
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as around:
        players = []
        for number, name in enumerate(contenders):
            place = Path(folder) / str(number)
            place.mkdir()
            players.append(Player(name, case, place))
            around.callback(players[-1].close)
        for _ in range(rounds - 1):
            for player in players:
                player.turn()
        return {player.contender: player.result() for player in players}


def table(
    case: str, times: dict[str, list[float]], losses: dict[str, float], moved: dict[str, float]
) -> list[str]:
    """A case's part of the report."""
    settings = CASES[case].experiment
    median = {name: statistics.median(one) for name, one in times.items() if one}
    size = sum(value.numel() for value in material(case).module.parameters())
    lines = [
        (
            f"## {settings.dataset}, {CLIENTS} clients x {settings.local_steps} steps x batch "
            f"{settings.batch_size}"
        ),
        "",
        f"A network of {size:,} parameters.",
        "",
        (
            "| | ms a round, median | quartiles | rounds | beside fedcog | training loss, way gone "
            "after round 1 |"
        ),
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, seconds in times.items():
        if not seconds:
            lines.append(f"| {name} | not installed | | | | |")
            continue
        low, _, high = statistics.quantiles(seconds, n=4)
        lines.append(
            f"| {name} | {1e3 * median[name]:.0f} | {1e3 * low:.0f} to {1e3 * high:.0f} | "
            f"{len(seconds)} "
            f"| {median[name] / median['fedcog']:.2f} | {losses[name]:.4f}, {moved[name]:.4f} |"
        )
    hand = min(median[name] for name in median if name.startswith("by hand"))
    return [*lines, "", f"fedcog / the faster one by hand: {median['fedcog'] / hand:.2f}.", ""]


def main() -> None:
    """Run all contenders in turn, and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", help="where CIFAR-10 lies (else $FEDCOG_DATA)")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--repeats", type=int, default=3, help="times each contender is run")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "cpu.md")
    parser.add_argument("--play", choices=CONTENDERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.data_dir:
        os.environ["FEDCOG_DATA"] = options.data_dir
    if options.play:
        play(options.play, options.cases[0], options.out)
        return
    there = {
        name: needs is None or importlib.util.find_spec(needs) is not None
        for name, needs in CONTENDERS.items()
    }
    others = [name for name in ("torch", "flwr", "ray", "pfl") if importlib.util.find_spec(name)]
    found = [f"Python {platform.python_version()}", f"fedcog {fedcog.__version__}"]
    found += [f"{name} {importlib.metadata.version(name)}" for name in others]
    own = (
        "--data-dir",
        options.data_dir,
        "--out",
        str(options.out),
    )  # where things lie here is nobody's business
    words = [word for word in sys.argv[1:] if word not in own]
    lines = [
        "# A FedAvg round on a CPU",
        "",
        f"{datetime.date.today()}; {_processor()}, {CORES} cores; {', '.join(found)}.",
        "",
        f"`{shlex.join(['python', 'benchmarks/cpu.py', *words])}`, at commit {commit()}.",
        "",
    ]
    for case in options.cases:
        times: dict[str, list[float]] = {name: [] for name in CONTENDERS}
        losses = dict[str, float]()
        moved = dict[str, float]()
        for _ in range(options.repeats):
            for group in TURNS:
                for name, (seconds, loss, way) in measure(
                    [name for name in group if there[name]], case
                ).items():
                    times[name] += seconds
                    losses[name] = loss
                    moved[name] = way
                    print(
                        (
                            f"{case}, {name}: {1e3 * statistics.median(seconds):.0f} ms, loss "
                            f"{loss:.4f}"
                        ),
                        flush=True,
                    )
        for what in (losses, moved):
            spread = max(what.values()) / min(what.values())
            assert spread < 1.5, (
                f"after a round they differ by a factor of {spread:.2f}, so not the same is "
                f"done: {what}"
            )
        lines += table(case, times, losses, moved)
    options.out.write_text("\n".join(lines).rstrip() + "\n")
    print("\n".join(lines))


def _processor() -> str:
    try:
        words = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in words if line.startswith("model name")]
    return names[0] if names else platform.machine()


if __name__ == "__main__":
    main()
