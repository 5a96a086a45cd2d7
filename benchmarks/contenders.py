"""FedAvg rounds for `cpu.py`: by fedcog, by Flower's simulation engine, by pfl, and by hand."""

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
WEIGHT_DECAY = 1e-5
NUM_CLIENTS = 10
NUM_CORES = len(os.sched_getaffinity(0))

CONTENDERS = {
    "fedcog": None,
    "by hand, a process a core": None,
    "by hand, channels last": None,
    "pfl, one process": "pfl",
    "pfl, a process a core": "pfl",
    "Flower": "flwr",
}
"""The package that each contender needs besides fedcog, by the contender's name."""


class Case(NamedTuple):
    """What is trained, and for how many rounds."""

    experiment: Experiment
    num_warmup: int
    num_timed: int

    @property
    def num_rounds(self) -> int:
        """Rounds of warm-up and timed rounds together."""
        return self.num_warmup + self.num_timed


COMMON_SETTINGS: dict[str, Any] = {
    "clients": NUM_CLIENTS,
    "partition": "iid",
    "augment": "off",
    "device": "cpu",
    "rounds": 10**6,
    "lr": LR,
    "momentum": MOMENTUM,
    "weight_decay": WEIGHT_DECAY,
    "evaluate_every": 10**6,
    "evaluate_local": False,
}
CASES = {
    "digits": Case(
        Experiment(dataset="digits", local_steps=3, batch_size=16, **COMMON_SETTINGS),
        num_warmup=5,
        num_timed=20,
    ),
    "digits-32": Case(
        Experiment(dataset="digits", local_steps=4, batch_size=32, **COMMON_SETTINGS),
        num_warmup=5,
        num_timed=20,
    ),
    "cifar10": Case(
        Experiment(dataset="cifar10", local_steps=20, batch_size=64, **COMMON_SETTINGS),
        num_warmup=1,
        num_timed=6,
    ),
}


class TrainingInputs(NamedTuple):
    """The initial network, and the normalized inputs and labels of each client."""

    network: nn.Module
    client_data: list[tuple[Tensor, Tensor]]


Params = dict[str, Tensor]
Rounds = Iterator[Params]
"""The parameters of the global model after every round."""

RecordRound = Callable[[Params], bool]
"""Receives the global model after a round; returns whether it was the last round."""


@functools.cache
def load_inputs(case: str) -> TrainingInputs:
    """Load what all contenders train with; $FEDCOG_DATA is the folder with the data."""
    setup = ExperimentSetup(CASES[case].experiment)
    network = build(
        setup.model_name,
        setup.dataset.input_shape,
        len(setup.dataset.classes),
        setup.experiment.seed,
    )
    data = setup.data
    client_data = []
    for client in range(NUM_CLIENTS):
        indices = data.client_indices(client)
        client_data.append((data.to_inputs(data.train_x[indices]), data.train_y[indices]))
    return TrainingInputs(network, client_data)


def train_client(network: nn.Module, x: Tensor, y: Tensor, num_steps: int, batch_size: int) -> None:
    """Train a client's network in place, in plain PyTorch.

    Args:
        network: The network.
        x: The client's inputs.
        y: The client's labels.
        num_steps: Local steps.
        batch_size: Examples in a batch.
    """
    optimizer = torch.optim.SGD(
        network.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY
    )
    order = torch.randperm(len(y))[: num_steps * batch_size]
    for indices in order.reshape(num_steps, batch_size):
        loss = F.cross_entropy(network(x[indices]), y[indices])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def fedcog_rounds(experiment: Experiment) -> Rounds:
    """Run the engine as `fedcog run` does."""
    with torch_settings(experiment):
        server = ExperimentSetup(experiment).make_server()
        for round in range(experiment.rounds):
            yield server.run_round(round).server["params"]


def handwritten_rounds(case: str, channels_last: bool) -> Rounds:
    """Run one process per core, with one thread each, that trains its share of the clients.

    A process sends the sum of its clients' models.

    Args:
        case: Key of `CASES`.
        channels_last: Whether images are stored with their channels last.

    Yields:
        The parameters of the global model after every round.
    """
    inputs = load_inputs(case)
    experiment = CASES[case].experiment
    layout = torch.channels_last if channels_last else torch.contiguous_format
    client_data = [(x.contiguous(memory_format=layout), y) for x, y in inputs.client_data]

    def train_clients(connection: Connection, clients: list[int]) -> None:
        torch.set_num_threads(1)
        network = copy.deepcopy(inputs.network)
        while True:
            global_vector = _receive_vector(connection)
            total = torch.zeros_like(global_vector)
            for client in clients:
                # The parameters become views of the vector, so every client needs a copy.
                nn.utils.vector_to_parameters(global_vector.clone(), network.parameters())
                x, y = client_data[client]
                train_client(network, x, y, experiment.local_steps, experiment.batch_size)
                total += nn.utils.parameters_to_vector(network.parameters()).detach()
            connection.send_bytes(total.numpy().tobytes())

    fork = multiprocessing.get_context("fork")
    connections = list[Connection]()
    for core in range(NUM_CORES):
        connection, worker_connection = fork.Pipe()
        clients = list(range(core, NUM_CLIENTS, NUM_CORES))
        fork.Process(target=train_clients, args=(worker_connection, clients), daemon=True).start()
        connections.append(connection)
    global_vector = nn.utils.parameters_to_vector(inputs.network.parameters()).detach()
    shapes = {name: value.shape for name, value in inputs.network.named_parameters()}
    sizes = [shape.numel() for shape in shapes.values()]
    while True:
        for connection in connections:
            connection.send_bytes(global_vector.numpy().tobytes())
        totals = [_receive_vector(connection) for connection in connections]
        global_vector = torch.stack(totals).sum(0) / NUM_CLIENTS
        values = torch.split(global_vector, sizes)
        yield {
            name: value.reshape(shape)
            for (name, shape), value in zip(shapes.items(), values, strict=True)
        }


def _receive_vector(connection: Connection) -> Tensor:
    return torch.frombuffer(bytearray(connection.recv_bytes()), dtype=torch.float32)


def flower_client(message: Any, context: Any) -> Any:
    """Train one client of Flower on its partition, which stays in the memory of its process.

    Args:
        message: Flower's message with the global model.
        context: Flower's context with the number of the partition.

    Returns:
        Flower's message with the trained model.
    """
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

    torch.set_num_threads(1)
    case = message.content["config"]["case"]
    inputs = load_inputs(case)
    experiment = CASES[case].experiment
    network = copy.deepcopy(inputs.network)
    network.load_state_dict(message.content["arrays"].to_torch_state_dict())
    x, y = inputs.client_data[int(context.node_config["partition-id"])]
    train_client(network, x, y, experiment.local_steps, experiment.batch_size)
    content: dict[str, Any] = {
        "arrays": ArrayRecord(network.state_dict()),
        "metrics": MetricRecord({"num-examples": len(y)}),
    }
    return Message(content=RecordDict(content), reply_to=message)


def run_flower(case: str, record_round: RecordRound) -> None:
    """Run FedAvg in Flower's simulation engine, with one client per core at a time.

    Args:
        case: Key of `CASES`.
        record_round: Called with the global model after every round.
    """
    # Import this file by its name, so that Ray's processes find the client and keep its data.
    import contenders
    from flwr.app import ArrayRecord, ConfigRecord
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    class RecordingFedAvg(FedAvg):
        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            arrays, metrics = super().aggregate_train(server_round, replies)
            assert arrays is not None
            record_round(arrays.to_torch_state_dict())
            return arrays, metrics

    server = ServerApp()
    client = ClientApp()
    client.train()(contenders.flower_client)

    @server.main()
    def main(grid: Any, context: Any) -> None:
        strategy = RecordingFedAvg(fraction_evaluate=0.0, min_available_nodes=NUM_CLIENTS)
        strategy.start(
            grid,
            ArrayRecord(load_inputs(case).network.state_dict()),
            num_rounds=CASES[case].num_rounds,
            train_config=ConfigRecord({"case": case}),
        )

    resources: dict[str, Any] = {
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {"num_cpus": NUM_CORES},
    }
    run_simulation(server, client, num_supernodes=NUM_CLIENTS, backend_config=resources)


def run_pfl(case: str, record_round: RecordRound) -> None:
    """Run pfl's FederatedAveraging, in this process or in several started by torchrun.

    Args:
        case: Key of `CASES`.
        record_round: Called with the global model after every round.
    """
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

    inputs = load_inputs(case)
    experiment = CASES[case].experiment

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = copy.deepcopy(inputs.network)

        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.train().inner(x), y)

        def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
            return {}

    class RecordingCallback(TrainingProcessCallback):  # type: ignore[misc]
        def after_central_iteration(
            self, metrics: Any, model: Any, *, central_iteration: int
        ) -> tuple[bool, Metrics]:
            record_round(dict(model.pytorch_model.inner.named_parameters()))
            if torch.distributed.is_initialized():
                # No process starts the next round while the first one waits for its turn.
                torch.distributed.barrier()
            return False, Metrics()

    network = Network()
    model = PyTorchModel(
        network,
        functools.partial(torch.optim.SGD, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY),
        central_optimizer=torch.optim.SGD(network.parameters(), lr=1.0),
    )
    users = [
        PyTorchTensorDataset(data, user_id=str(client))
        for client, data in enumerate(inputs.client_data)
    ]
    sampler = get_user_sampler("minimize_reuse", list(range(NUM_CLIENTS)))
    dataset = FederatedDataset(lambda user: users[user], sampler)
    FederatedAveraging().run(
        NNAlgorithmParams(
            CASES[case].num_rounds, 10**6, train_cohort_size=NUM_CLIENTS, val_cohort_size=0
        ),
        SimulatedBackend(dataset, dataset),
        model,
        NNTrainHyperParams(
            local_batch_size=experiment.batch_size,
            local_num_epochs=None,
            local_num_steps=experiment.local_steps,
            local_learning_rate=LR,
        ),
        callbacks=[RecordingCallback()],
    )
