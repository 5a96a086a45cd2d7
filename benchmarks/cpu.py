"""Wall time of a FedAvg round on a CPU: fedcog beside Flower's simulation engine, pfl, and processes written by hand.

    python benchmarks/cpu.py [--data-dir DIR] [--cases digits digits-32 cifar10] [--repeats 3]

Flower and pfl are wanted beside fedcog: pip install "flwr[simulation]==1.41.0" pfl==0.6.0 (their lines say so where
they are not). All train the same network from the same start on the same clients' data, with the same number of steps
on batches of the same size, SGD with momentum 0.9 and weight decay 1e-5, no augmentation and no evaluation. After one
round the loss of every global model over the whole training set is compared. Each contender runs in a process of its
own, some times over; neither its start nor its first rounds are counted. They take turns round by round, so that all
meet the same moods of the machine; Flower, whose idle processes would disturb the others, is measured after them. The
others get their data as normalised floats beforehand; fedcog, as always, normalises every batch. Processes written by
hand run twice, with their images' channels in either place, and the faster ones count. fedcog runs by its defaults:
rounds as short as those of digits train all clients together, longer ones side by side in worker processes.
"""

import argparse
import contextlib
import copy
import datetime
import functools
import importlib.metadata
import importlib.util
import multiprocessing
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
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import common
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fedcog
from fedcog.experiments.config import Experiment
from fedcog.experiments.prepare import Prepared, surroundings
from fedcog.federation.rounds import federate
from fedcog.models import build

LR, MOMENTUM, DECAY, CLIENTS = 0.01, 0.9, 1e-5, 10
CORES = len(os.sched_getaffinity(0))


class Case(NamedTuple):
    """What is trained, and how long it is watched."""

    experiment: Experiment
    warm_up: int  # rounds
    timed: int  # rounds


COMMON: dict[str, Any] = {
    **{"clients": CLIENTS, "partition": "iid", "augment": "off", "device": "cpu", "rounds": 10**6},
    **{"lr": LR, "momentum": MOMENTUM, "weight_decay": DECAY, "evaluate_every": 10**6, "evaluate_local": False},
}
CASES = {
    "digits": Case(Experiment(dataset="digits", local_steps=3, batch_size=16, **COMMON), 5, 20),
    "digits-32": Case(Experiment(dataset="digits", local_steps=4, batch_size=32, **COMMON), 5, 20),
    "cifar10": Case(Experiment(dataset="cifar10", local_steps=20, batch_size=64, **COMMON), 1, 6),
}


class Material(NamedTuple):
    """What every contender is given: the network at its start, and each client's inputs and labels."""

    module: nn.Module
    clients: list[tuple[Tensor, Tensor]]


@functools.cache
def prepared(case: str) -> Prepared:
    """Our own preparation, which all share: the data directory comes in by the environment ($FEDCOG_DATA)."""
    return Prepared(CASES[case].experiment)


@functools.cache
def material(case: str) -> Material:
    """The same for the others, with inputs as the network sees them."""
    ours = prepared(case)
    module = build(ours.model_name, ours.dataset.input_shape, len(ours.dataset.classes), ours.experiment.seed)
    data = ours.data
    owned = [data.own(client) for client in range(CLIENTS)]
    return Material(module, [(data.inputs(data.train_x[index]), data.train_y[index]) for index in owned])


def train(module: nn.Module, x: Tensor, y: Tensor, steps: int, batch: int) -> None:
    """A client's local training as one would write it."""
    optimiser = torch.optim.SGD(module.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    for index in torch.randperm(len(y))[: steps * batch].reshape(steps, batch):
        loss = F.cross_entropy(module(x[index]), y[index])
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()


Rounds = Iterator[dict[str, Tensor]]
"""A contender: the global model after every round."""


def ours(experiment: Experiment) -> Rounds:
    """The engine as a run uses it."""
    with surroundings(experiment.threads):
        ready = Prepared(experiment)
        for round in federate(experiment.algorithm, ready.backend, ready, ready.schedule, ready.server, 0):
            yield round.server["params"]


def by_hand(case: str, channels_last: bool) -> Rounds:
    """One-thread processes, one a core, that loop over their share of the clients and send the sum of their models."""
    given, settings = material(case), CASES[case].experiment
    layout = torch.channels_last if channels_last else torch.contiguous_format
    clients = [(x.contiguous(memory_format=layout), y) for x, y in given.clients]

    def work(line: Connection, own: list[int]) -> None:
        torch.set_num_threads(1)
        module = copy.deepcopy(given.module)
        while True:
            start = torch.frombuffer(bytearray(line.recv_bytes()), dtype=torch.float32)
            total = torch.zeros_like(start)
            for client in own:
                nn.utils.vector_to_parameters(start.clone(), module.parameters())  # they become views
                train(module, *clients[client], settings.local_steps, settings.batch_size)
                total += nn.utils.parameters_to_vector(module.parameters()).detach()
            line.send_bytes(total.numpy().tobytes())

    fork, lines = multiprocessing.get_context("fork"), list[Connection]()
    for core in range(CORES):
        here, there = fork.Pipe()
        fork.Process(target=work, args=(there, list(range(core, CLIENTS, CORES))), daemon=True).start()
        lines.append(here)
    model = nn.utils.parameters_to_vector(given.module.parameters()).detach()
    names = [(name, value.shape) for name, value in given.module.named_parameters()]
    while True:
        for line in lines:
            line.send_bytes(model.numpy().tobytes())
        sums = [torch.frombuffer(bytearray(line.recv_bytes()), dtype=torch.float32) for line in lines]
        model = torch.stack(sums).sum(0) / CLIENTS
        parts = torch.split(model, [shape.numel() for _, shape in names])
        yield {name: part.reshape(shape) for (name, shape), part in zip(names, parts, strict=True)}


def flower_client(message: Any, context: Any) -> Any:
    """Flower's client: `train` on its partition, which stays in the memory of the process that plays it."""
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

    torch.set_num_threads(1)
    case = message.content["config"]["case"]
    given, settings = material(case), CASES[case].experiment
    module = copy.deepcopy(given.module)
    module.load_state_dict(message.content["arrays"].to_torch_state_dict())
    x, y = given.clients[int(context.node_config["partition-id"])]
    train(module, x, y, settings.local_steps, settings.batch_size)
    content: dict[str, Any] = {
        "arrays": ArrayRecord(module.state_dict()),
        "metrics": MetricRecord({"num-examples": len(y)}),
    }
    return Message(content=RecordDict(content), reply_to=message)


def flower(case: str, record: Callable[[dict[str, Tensor]], bool]) -> None:
    """Flower's simulation engine with FedAvg: as many one-core clients at a time as there are cores."""
    import cpu  # this file by its name, so that Ray's processes find the client and keep what it has loaded
    from flwr.app import ArrayRecord, ConfigRecord
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    class Watched(FedAvg):
        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            arrays, metrics = super().aggregate_train(server_round, replies)
            assert arrays is not None
            record(arrays.to_torch_state_dict())
            return arrays, metrics

    server, client = ServerApp(), ClientApp()
    client.train()(cpu.flower_client)

    @server.main()
    def main(grid: Any, context: Any) -> None:
        strategy = Watched(fraction_evaluate=0.0, min_available_nodes=CLIENTS)
        start = ArrayRecord(material(case).module.state_dict())
        rounds = CASES[case].warm_up + CASES[case].timed
        strategy.start(grid, start, num_rounds=rounds, train_config=ConfigRecord({"case": case}))

    resources: dict[str, Any] = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": CORES}}
    run_simulation(server, client, num_supernodes=CLIENTS, backend_config=resources)


def pfl(case: str, record: Callable[[dict[str, Tensor]], bool]) -> None:
    """pfl's FederatedAveraging: in this process, or in several that torchrun has started."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.pytorch import PyTorchTensorDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam.base import NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    given, settings = material(case), CASES[case].experiment
    rounds = CASES[case].warm_up + CASES[case].timed

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = copy.deepcopy(given.module)

        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.train().inner(x), y)

        def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
            return {}

    class Watch(TrainingProcessCallback):  # type: ignore[misc]
        def after_central_iteration(self, metrics: Any, model: Any, *, central_iteration: int) -> tuple[bool, Metrics]:
            record(dict(model.pytorch_model.inner.named_parameters()))
            if torch.distributed.is_initialized():  # nobody begins the next round while the first process waits
                torch.distributed.barrier()
            return False, Metrics()

    network = Network()
    model = PyTorchModel(
        network,
        functools.partial(torch.optim.SGD, momentum=MOMENTUM, weight_decay=DECAY),
        central_optimizer=torch.optim.SGD(network.parameters(), lr=1.0),
    )
    users = [PyTorchTensorDataset(part, user_id=str(client)) for client, part in enumerate(given.clients)]
    people = FederatedDataset(lambda user: users[user], get_user_sampler("minimize_reuse", list(range(CLIENTS))))
    FederatedAveraging().run(
        NNAlgorithmParams(rounds, 10**6, train_cohort_size=CLIENTS, val_cohort_size=0),
        SimulatedBackend(people, people),
        model,
        NNTrainHyperParams(
            local_batch_size=settings.batch_size,
            local_num_epochs=None,
            local_num_steps=settings.local_steps,
            local_learning_rate=LR,
        ),
        callbacks=[Watch()],
    )


CONTENDERS = {
    "fedcog": None,
    "by hand, a process a core": None,
    "by hand, channels last": None,
    "pfl, one process": "pfl",
    "pfl, a process a core": "pfl",
    "Flower": "flwr",
}
TURNS = [name for name in CONTENDERS if name != "Flower"], ["Flower"]
"""Who takes turns with whom."""


def play(contender: str, case: str, out: Path) -> None:
    """Let one contender run: it tells how long each round took, and waits for its turn; its first model is kept."""
    line = socket.socket(socket.AF_UNIX)
    rounds, done, begun = CASES[case].warm_up + CASES[case].timed, 0, time.perf_counter()

    def record(model: dict[str, Tensor]) -> bool:
        nonlocal done, begun
        if os.environ.get("RANK", "0") != "0":  # the first of several processes speaks for all
            return False
        seconds, done = time.perf_counter() - begun, done + 1
        if done == 1:
            save_file({name: value.detach().contiguous() for name, value in model.items()}, out / "model.safetensors")
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
        self.contender, self.case, self.folder, self.seconds = contender, case, folder, list[float]()
        words = [sys.executable]
        if contender == "pfl, a process a core":
            words += ["-m", "torch.distributed.run", f"--nproc-per-node={CORES}", "--standalone"]
        here = Path(__file__).resolve().parent
        quiet = {"PYTHONPATH": os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])}
        quiet |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
        words += [str(Path(__file__).resolve()), "--play", contender, "--cases", case, "--out", str(folder)]
        with socket.socket(socket.AF_UNIX) as door, (folder / "said").open("wb") as said:
            door.bind(str(folder / "line"))
            door.listen(1)
            door.settimeout(1)
            self.process = subprocess.Popen(words, env=os.environ | quiet, stdout=said, stderr=subprocess.STDOUT)
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
        return RuntimeError(f"{self.contender} failed on {self.case}:\n{(self.folder / 'said').read_text()[-4000:]}")

    def result(self) -> tuple[list[float], float, float]:
        """Its seconds by round; after one round its loss, and how far it went."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=60)  # what becomes of it from here on does not matter: pfl's may abort
        self.close()
        model, given = load_file(self.folder / "model.safetensors"), material(self.case)
        with torch.no_grad():
            parts = [F.cross_entropy(torch.func.functional_call(given.module, model, x), y) for x, y in given.clients]
            start = dict(given.module.named_parameters())
            moved = torch.cat([(model[name] - value).flatten() for name, value in start.items()]).norm()
        return self.seconds[CASES[self.case].warm_up :], float(torch.stack(parts).mean()), float(moved)

    def close(self) -> None:
        """End it."""
        self.line.close()
        self.process.kill()
        self.process.wait()


def measure(contenders: list[str], case: str) -> dict[str, tuple[list[float], float, float]]:
    """What comes of contenders that take turns: seconds by round, and after one round the loss and the way gone."""
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


def table(case: str, times: dict[str, list[float]], losses: dict[str, float], moved: dict[str, float]) -> list[str]:
    """A case's part of the report."""
    settings, median = CASES[case].experiment, {name: statistics.median(one) for name, one in times.items() if one}
    size = sum(value.numel() for value in material(case).module.parameters())
    lines = [
        f"## {settings.dataset}, {CLIENTS} clients x {settings.local_steps} steps x batch {settings.batch_size}",
        "",
        f"A network of {size:,} parameters.",
        "",
        "| | ms a round, median | quartiles | rounds | beside fedcog | training loss, way gone after round 1 |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, seconds in times.items():
        if not seconds:
            lines.append(f"| {name} | not installed | | | | |")
            continue
        low, _, high = statistics.quantiles(seconds, n=4)
        lines.append(
            f"| {name} | {1e3 * median[name]:.0f} | {1e3 * low:.0f} to {1e3 * high:.0f} | {len(seconds)} "
            f"| {median[name] / median['fedcog']:.2f} | {losses[name]:.4f}, {moved[name]:.4f} |"
        )
    hand = min(median[name] for name in median if name.startswith("by hand"))
    return [*lines, "", f"fedcog / the faster one by hand: {median['fedcog'] / hand:.2f}.", ""]


def main() -> None:
    """Run all contenders in turn, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    there = {name: needs is None or importlib.util.find_spec(needs) is not None for name, needs in CONTENDERS.items()}
    others = [name for name in ("torch", "flwr", "ray", "pfl") if importlib.util.find_spec(name)]
    found = [f"Python {platform.python_version()}", f"fedcog {fedcog.__version__}"]
    found += [f"{name} {importlib.metadata.version(name)}" for name in others]
    own = ("--data-dir", options.data_dir, "--out", str(options.out))  # where things lie here is nobody's business
    words = [word for word in sys.argv[1:] if word not in own]
    lines = [
        "# A FedAvg round on a CPU",
        "",
        f"{datetime.date.today()}; {_processor()}, {CORES} cores; {', '.join(found)}.",
        "",
        f"`{shlex.join(['python', 'benchmarks/cpu.py', *words])}`, at commit {common.commit()}.",
        "",
    ]
    for case in options.cases:
        times: dict[str, list[float]] = {name: [] for name in CONTENDERS}
        losses, moved = dict[str, float](), dict[str, float]()
        for _ in range(options.repeats):
            for group in TURNS:
                for name, (seconds, loss, way) in measure([name for name in group if there[name]], case).items():
                    times[name] += seconds
                    losses[name], moved[name] = loss, way
                    print(f"{case}, {name}: {1e3 * statistics.median(seconds):.0f} ms, loss {loss:.4f}", flush=True)
        for what in (losses, moved):
            spread = max(what.values()) / min(what.values())
            assert spread < 1.5, (
                f"after a round they differ by a factor of {spread:.2f}, so not the same is done: {what}"
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
