"""Who takes part in `cpu.py`: a FedAvg round by fedcog, by Flower's simulation engine, by pfl, and
written by hand.
"""

import copy
import functools
import multiprocessing
import os
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedcog.models.zoo import build
from fedcog.runs.config.experiment import Experiment
from fedcog.runs.environment import torch_settings
from fedcog.runs.setup import ExperimentSetup

LR = 0.01
MOMENTUM = 0.9
DECAY = 1e-5
CLIENTS = 10
CORES = len(os.sched_getaffinity(0))


class Case(NamedTuple):
    """What is trained, and how long it is watched."""

    experiment: Experiment
    warm_up: int  # rounds
    timed: int  # rounds


COMMON: dict[str, Any] = {
    **{"clients": CLIENTS, "partition": "iid", "augment": "off", "device": "cpu", "rounds": 10**6},
    **{
        "lr": LR,
        "momentum": MOMENTUM,
        "weight_decay": DECAY,
        "evaluate_every": 10**6,
        "evaluate_local": False,
    },
}
CASES = {
    "digits": Case(Experiment(dataset="digits", local_steps=3, batch_size=16, **COMMON), 5, 20),
    "digits-32": Case(Experiment(dataset="digits", local_steps=4, batch_size=32, **COMMON), 5, 20),
    "cifar10": Case(Experiment(dataset="cifar10", local_steps=20, batch_size=64, **COMMON), 1, 6),
}


class Material(NamedTuple):
    """What every contender gets: the initial network, and each client's inputs and labels."""

    module: nn.Module
    clients: list[tuple[Tensor, Tensor]]


@functools.cache
def prepared(case: str) -> ExperimentSetup:
    """Our own preparation, which all share: the data directory comes in by the environment
    ($FEDCOG_DATA).
    """
    return ExperimentSetup(CASES[case].experiment)


@functools.cache
def material(case: str) -> Material:
    """The same for the others, with inputs as the network sees them."""
    ours = prepared(case)
    module = build(
        ours.model_name, ours.dataset.input_shape, len(ours.dataset.classes), ours.experiment.seed
    )
    data = ours.data
    owned = [data.client_indices(client) for client in range(CLIENTS)]
    return Material(
        module, [(data.to_inputs(data.train_x[index]), data.train_y[index]) for index in owned]
    )


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
    with torch_settings(experiment):
        server = ExperimentSetup(experiment).make_server()
        for round in range(experiment.rounds):
            yield server.run_round(round).server["params"]


def by_hand(case: str, channels_last: bool) -> Rounds:
    """One-thread processes, one a core, that loop over their share of the clients and send the sum
    of their models.
    """
    given = material(case)
    settings = CASES[case].experiment
    layout = torch.channels_last if channels_last else torch.contiguous_format
    clients = [(x.contiguous(memory_format=layout), y) for x, y in given.clients]

    def work(line: Connection, own: list[int]) -> None:
        torch.set_num_threads(1)
        module = copy.deepcopy(given.module)
        while True:
            start = torch.frombuffer(bytearray(line.recv_bytes()), dtype=torch.float32)
            total = torch.zeros_like(start)
            for client in own:
                nn.utils.vector_to_parameters(
                    start.clone(), module.parameters()
                )  # they become views
                train(module, *clients[client], settings.local_steps, settings.batch_size)
                total += nn.utils.parameters_to_vector(module.parameters()).detach()
            line.send_bytes(total.numpy().tobytes())

    fork = multiprocessing.get_context("fork")
    lines = list[Connection]()
    for core in range(CORES):
        here, there = fork.Pipe()
        fork.Process(
            target=work, args=(there, list(range(core, CLIENTS, CORES))), daemon=True
        ).start()
        lines.append(here)
    model = nn.utils.parameters_to_vector(given.module.parameters()).detach()
    names = [(name, value.shape) for name, value in given.module.named_parameters()]
    while True:
        for line in lines:
            line.send_bytes(model.numpy().tobytes())
        sums = [
            torch.frombuffer(bytearray(line.recv_bytes()), dtype=torch.float32) for line in lines
        ]
        model = torch.stack(sums).sum(0) / CLIENTS
        parts = torch.split(model, [shape.numel() for _, shape in names])
        yield {name: part.reshape(shape) for (name, shape), part in zip(names, parts, strict=True)}


def flower_client(message: Any, context: Any) -> Any:
    """Flower's client: `train` on its partition, which stays in the memory of the process that
    plays it.
    """
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

    torch.set_num_threads(1)
    case = message.content["config"]["case"]
    given = material(case)
    settings = CASES[case].experiment
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
    """Flower's simulation engine with FedAvg: as many one-core clients at a time as there are
    cores.
    """
    # this file by its name, so that Ray's processes find the client and keep what it has loaded
    import contenders
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

    server = ServerApp()
    client = ClientApp()
    client.train()(contenders.flower_client)

    @server.main()
    def main(grid: Any, context: Any) -> None:
        strategy = Watched(fraction_evaluate=0.0, min_available_nodes=CLIENTS)
        start = ArrayRecord(material(case).module.state_dict())
        rounds = CASES[case].warm_up + CASES[case].timed
        strategy.start(grid, start, num_rounds=rounds, train_config=ConfigRecord({"case": case}))

    resources: dict[str, Any] = {
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {"num_cpus": CORES},
    }
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

    given = material(case)
    settings = CASES[case].experiment
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
        def after_central_iteration(
            self, metrics: Any, model: Any, *, central_iteration: int
        ) -> tuple[bool, Metrics]:
            record(dict(model.pytorch_model.inner.named_parameters()))
            if (
                torch.distributed.is_initialized()
            ):  # nobody begins the next round while the first process waits
                torch.distributed.barrier()
            return False, Metrics()

    network = Network()
    model = PyTorchModel(
        network,
        functools.partial(torch.optim.SGD, momentum=MOMENTUM, weight_decay=DECAY),
        central_optimizer=torch.optim.SGD(network.parameters(), lr=1.0),
    )
    users = [
        PyTorchTensorDataset(part, user_id=str(client)) for client, part in enumerate(given.clients)
    ]
    people = FederatedDataset(
        lambda user: users[user], get_user_sampler("minimize_reuse", list(range(CLIENTS)))
    )
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
