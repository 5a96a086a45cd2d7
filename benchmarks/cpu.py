"""Wall time of a FedAvg round on a CPU: fedcog, Flower's simulation engine, pfl, and by hand.

python benchmarks/cpu.py [--data-dir DIR] [--cases digits digits-32 cifar10] [--repeats 3]

Install Flower and pfl for comparison: pip install "flwr[simulation]==1.41.0" pfl==0.6.0. Without
them their rows say "not installed".

All contenders train the same network from the same initial weights on the same clients' data, with
the same number of steps and batch size, SGD with momentum 0.9 and weight decay 1e-5, without
augmentation and evaluation. All have their data as normalized floats beforehand. After one round,
the losses of the global models on the whole training set are compared.

Each contender runs in a separate process, --repeats times. Startup and the first rounds do not
count. Contenders take turns round by round, so that a busy machine slows all of them alike. Flower
is measured after the others, because its idle processes would disturb them. "By hand" runs with
both memory layouts of images, and the faster one counts. fedcog runs with its defaults: it trains
all clients at once in rounds as short as those of digits, and in worker processes in longer ones.
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
from typing import NamedTuple

import torch
import torch.nn.functional as F
from contenders import (
    CASES,
    CONTENDERS,
    NUM_CLIENTS,
    NUM_CORES,
    fedcog_rounds,
    handwritten_rounds,
    load_inputs,
    run_flower,
    run_pfl,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

import fedcog
from fedcog.runs.records.provenance import commit

TURN_GROUPS = ([name for name in CONTENDERS if name != "Flower"], ["Flower"])
"""Contenders of a group take turns round by round; the groups run one after another."""

SOCKET_FILE = "socket"
LOG_FILE = "log.txt"
MODEL_FILE = "model.safetensors"


class Measurement(NamedTuple):
    """What one process of a contender measured.

    Attributes:
        round_seconds: Seconds of every timed round.
        loss: Training loss of the global model after one round.
        distance: L2 distance of that model from the initial one.
    """

    round_seconds: list[float]
    loss: float
    distance: float


def run_contender(contender: str, case: str, folder: Path) -> None:
    """Run one contender in this process.

    After every round it sends the seconds to the parent and waits for its next turn. It saves the
    global model of the first round.

    Args:
        contender: Key of `CONTENDERS`.
        case: Key of `CASES`.
        folder: Holds the parent's socket, and receives the model.
    """
    connection = socket.socket(socket.AF_UNIX)
    num_rounds = CASES[case].num_rounds
    num_finished = 0
    start_time = time.perf_counter()

    def record_round(params: dict[str, Tensor]) -> bool:
        nonlocal num_finished, start_time
        if os.environ.get("RANK", "0") != "0":  # under torchrun, only the first process reports
            return False
        seconds = time.perf_counter() - start_time
        num_finished += 1
        if num_finished == 1:
            tensors = {name: value.detach().contiguous() for name, value in params.items()}
            save_file(tensors, folder / MODEL_FILE)
            connection.connect(str(folder / SOCKET_FILE))
        connection.sendall(struct.pack("d", seconds))
        if num_finished < num_rounds and not connection.recv(1):
            raise SystemExit(f"{contender}: the benchmark has closed the connection")
        start_time = time.perf_counter()
        return num_finished == num_rounds

    if contender.startswith("pfl"):
        torch.set_num_threads(1 if contender == "pfl, a process a core" else NUM_CORES)
        run_pfl(case, record_round)
    elif contender == "Flower":
        run_flower(case, record_round)
    else:
        if contender == "fedcog":
            rounds = fedcog_rounds(CASES[case].experiment)
        else:
            rounds = handwritten_rounds(case, contender == "by hand, channels last")
        while not record_round(next(rounds)):
            pass


class ContenderProcess:
    """A contender that runs in a separate process, one round at a time.

    Args:
        contender: Key of `CONTENDERS`.
        case: Key of `CASES`.
        folder: An empty folder for its socket, log and model.
    """

    def __init__(self, contender: str, case: str, folder: Path) -> None:
        self.contender = contender
        self.case = case
        self.folder = folder
        self.round_seconds = list[float]()
        script = Path(__file__).resolve()
        command = [sys.executable]
        if contender == "pfl, a process a core":
            command += ["-m", "torch.distributed.run"]
            command += [f"--nproc-per-node={NUM_CORES}", "--standalone"]
        command += [str(script), "--play", contender, "--cases", case, "--out", str(folder)]
        paths = [str(script.parent), str(script.parent.parent), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(paths),
            "FLWR_TELEMETRY_ENABLED": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        with socket.socket(socket.AF_UNIX) as listener, (folder / LOG_FILE).open("wb") as log:
            listener.bind(str(folder / SOCKET_FILE))
            listener.listen(1)
            listener.settimeout(1)
            self.process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT
            )
            while True:
                with contextlib.suppress(TimeoutError):
                    self.connection = listener.accept()[0]
                    break
                if self.process.poll() is not None:
                    raise self.failure()
        self.connection.settimeout(600)
        self.wait_for_round()

    def wait_for_round(self) -> None:
        """Wait until the round has ended, and store its seconds."""
        message = self.connection.recv(8)
        if not message:
            raise self.failure()
        self.round_seconds += struct.unpack("d", message)

    def run_round(self) -> None:
        """Let the contender run one round."""
        self.connection.sendall(b".")
        self.wait_for_round()

    def failure(self) -> RuntimeError:
        """Return an error with the end of the contender's log."""
        log = (self.folder / LOG_FILE).read_text()
        return RuntimeError(f"{self.contender} failed on {self.case}:\n{log[-4000:]}")

    def finish(self) -> Measurement:
        """End the process and return what it measured."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            # The exit status does not matter: pfl's processes may abort.
            self.process.wait(timeout=60)
        self.close()
        params = load_file(self.folder / MODEL_FILE)
        inputs = load_inputs(self.case)
        initial_params = dict(inputs.network.named_parameters())
        with torch.no_grad():
            losses = [
                F.cross_entropy(torch.func.functional_call(inputs.network, params, x), y)
                for x, y in inputs.client_data
            ]
            updates = [params[name] - value for name, value in initial_params.items()]
            distance = torch.cat([update.flatten() for update in updates]).norm()
        return Measurement(
            self.round_seconds[CASES[self.case].num_warmup :],
            float(torch.stack(losses).mean()),
            float(distance),
        )

    def close(self) -> None:
        """End the process."""
        self.connection.close()
        self.process.kill()
        self.process.wait()


def measure_in_turns(contenders: list[str], case: str) -> dict[str, Measurement]:
    """Run contenders that take turns round by round.

    Args:
        contenders: Keys of `CONTENDERS`.
        case: Key of `CASES`.

    Returns:
        The measurement of each contender.
    """
    with tempfile.TemporaryDirectory() as parent_folder, contextlib.ExitStack() as stack:
        processes = []
        for number, contender in enumerate(contenders):
            folder = Path(parent_folder) / str(number)
            folder.mkdir()
            processes.append(ContenderProcess(contender, case, folder))
            stack.callback(processes[-1].close)
        for _ in range(CASES[case].num_rounds - 1):
            for process in processes:
                process.run_round()
        return {process.contender: process.finish() for process in processes}


def measure_repeatedly(
    case: str, num_repeats: int, is_available: dict[str, bool]
) -> dict[str, Measurement]:
    """Run all available contenders several times.

    Args:
        case: Key of `CASES`.
        num_repeats: How often each contender runs.
        is_available: Whether the package of each contender is installed.

    Returns:
        By contender, the rounds of all repeats with loss and distance of the last.
    """
    measurements: dict[str, Measurement] = {}
    for _ in range(num_repeats):
        for group in TURN_GROUPS:
            contenders = [name for name in group if is_available[name]]
            for name, measurement in measure_in_turns(contenders, case).items():
                earlier = measurements[name].round_seconds if name in measurements else []
                round_seconds = earlier + measurement.round_seconds
                measurements[name] = measurement._replace(round_seconds=round_seconds)
                median_ms = 1e3 * statistics.median(measurement.round_seconds)
                print(
                    f"{case}, {name}: {median_ms:.0f} ms, loss {measurement.loss:.4f}", flush=True
                )
    return measurements


def check_same_training(measurements: dict[str, Measurement]) -> None:
    """Check that losses and distances after a round are similar for all contenders."""
    losses = {name: measurement.loss for name, measurement in measurements.items()}
    distances = {name: measurement.distance for name, measurement in measurements.items()}
    for values in (losses, distances):
        spread = max(values.values()) / min(values.values())
        assert spread < 1.5, (
            f"the contenders do not train alike: after a round they differ by a factor of "
            f"{spread:.2f}: {values}"
        )


def case_report(case: str, measurements: dict[str, Measurement]) -> list[str]:
    """Format the section of one case.

    Args:
        case: Key of `CASES`.
        measurements: The measurement of each contender that ran.

    Returns:
        The lines of the report.
    """
    experiment = CASES[case].experiment
    medians = {
        name: statistics.median(measurement.round_seconds)
        for name, measurement in measurements.items()
    }
    num_params = sum(value.numel() for value in load_inputs(case).network.parameters())
    lines = [
        f"## {experiment.dataset}, {NUM_CLIENTS} clients x {experiment.local_steps} steps x batch "
        f"{experiment.batch_size}",
        "",
        f"A network of {num_params:,} parameters.",
        "",
        "| | ms a round, median | quartiles | rounds | beside fedcog | training loss, way gone "
        "after round 1 |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name in CONTENDERS:
        if name not in measurements:
            lines.append(f"| {name} | not installed | | | | |")
            continue
        round_seconds, loss, distance = measurements[name]
        lower, _, upper = statistics.quantiles(round_seconds, n=4)
        lines.append(
            f"| {name} | {1e3 * medians[name]:.0f} | {1e3 * lower:.0f} to {1e3 * upper:.0f} | "
            f"{len(round_seconds)} "
            f"| {medians[name] / medians['fedcog']:.2f} | {loss:.4f}, {distance:.4f} |"
        )
    by_hand = min(median for name, median in medians.items() if name.startswith("by hand"))
    ratio = medians["fedcog"] / by_hand
    return [*lines, "", f"fedcog / the faster one by hand: {ratio:.2f}.", ""]


def describe_run(options: argparse.Namespace) -> list[str]:
    """Return the top of the report: date, machine, versions and command line."""
    packages = [name for name in ("torch", "flwr", "ray", "pfl") if importlib.util.find_spec(name)]
    versions = [f"Python {platform.python_version()}", f"fedcog {fedcog.__version__}"]
    versions += [f"{name} {importlib.metadata.version(name)}" for name in packages]
    # Paths describe only this machine.
    path_arguments = ("--data-dir", options.data_dir, "--out", str(options.out))
    arguments = [argument for argument in sys.argv[1:] if argument not in path_arguments]
    command = shlex.join(["python", "benchmarks/cpu.py", *arguments])
    return [
        "# A FedAvg round on a CPU",
        "",
        f"{datetime.date.today()}; {_cpu_name()}, {NUM_CORES} cores; {', '.join(versions)}.",
        "",
        f"`{command}`, at commit {commit()}.",
        "",
    ]


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def main() -> None:
    """Run all contenders in turns, and write the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", help="folder with CIFAR-10 (default: $FEDCOG_DATA)")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--repeats", type=int, default=3, help="how often each contender runs")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "cpu.md")
    parser.add_argument("--play", choices=CONTENDERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.data_dir:
        os.environ["FEDCOG_DATA"] = options.data_dir
    if options.play:
        run_contender(options.play, options.cases[0], options.out)
        return
    is_available = {
        name: package is None or importlib.util.find_spec(package) is not None
        for name, package in CONTENDERS.items()
    }
    lines = describe_run(options)
    for case in options.cases:
        measurements = measure_repeatedly(case, options.repeats, is_available)
        check_same_training(measurements)
        lines += case_report(case, measurements)
    options.out.write_text("\n".join(lines).rstrip() + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
