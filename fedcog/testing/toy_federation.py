"""A small federation on random data in float64, fast enough to run by the dozen in tests."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from fedcog.algorithms import Algorithm
from fedcog.core import tree
from fedcog.core.integers import round_half_up
from fedcog.core.lr_schedules import LRSchedule
from fedcog.core.optimizers import Optimizer
from fedcog.core.tasks import make_task
from fedcog.core.tree import Params, State
from fedcog.data import Dataset, FederatedData, from_arrays
from fedcog.data.client_batches import Augmentation
from fedcog.engine.cohort import Cohort, CohortConfig, Mapping
from fedcog.federation.backend import RoundRequest, RoundResult
from fedcog.federation.client_sampling import Uniform
from fedcog.federation.server import FinishedRound, Schedule, Server
from fedcog.federation.simulator import LocalWorkload, Simulator
from fedcog.models.functional import Model
from fedcog.models.initialization import Network, make_network
from fedcog.models.zoo import build
from fedcog.runs.scoring import ModelScorer

NUM_CLASSES = 4


def random_images(
    num_train: int = 90,
    num_test: int = 20,
    shape: tuple[int, ...] = (1, 8, 8),
    seed: int = 0,
) -> Dataset:
    """Create random images with random labels; training examples are sorted by label.

    Args:
        num_train: Number of training examples.
        num_test: Number of test examples.
        shape: Shape of one image.
        seed: Seed.

    Returns:
        The data set.
    """
    draw = torch.Generator().manual_seed(seed)
    total = num_train + num_test
    x = torch.randint(0, 256, (total, *shape), dtype=torch.uint8, generator=draw)
    y = torch.randint(0, NUM_CLASSES, (total,), generator=draw)
    y[:num_train] = y[:num_train].sort()[0]  # so that clients have different label mixes
    names = [str(label) for label in range(NUM_CLASSES)]
    train = (x[:num_train], y[:num_train])
    return from_arrays(*train, x[num_train:], y[num_train:], classes=names, augment=True)


def random_multi_label(
    num_train: int = 90,
    num_test: int = 20,
    shape: tuple[int, ...] = (1, 8, 8),
    seed: int = 0,
) -> Dataset:
    """Create random images with random sets of labels.

    Args:
        num_train: Number of training examples.
        num_test: Number of test examples.
        shape: Shape of one image.
        seed: Seed.

    Returns:
        The data set.
    """
    draw = torch.Generator().manual_seed(seed)
    total = num_train + num_test
    x = torch.randint(0, 256, (total, *shape), dtype=torch.uint8, generator=draw)
    frequency = torch.linspace(0.2, 0.7, NUM_CLASSES)
    y = torch.rand(total, NUM_CLASSES, generator=draw) < frequency
    return from_arrays(x[:num_train], y[:num_train], x[num_train:], y[num_train:])


def random_tokens(
    num_train: int = 90, num_test: int = 20, length: int = 6, seed: int = 0
) -> Dataset:
    """Create random sequences of tokens below 12 with random labels.

    Args:
        num_train: Number of training examples.
        num_test: Number of test examples.
        length: Number of tokens of an example.
        seed: Seed.

    Returns:
        The data set.
    """
    draw = torch.Generator().manual_seed(seed)
    total = num_train + num_test
    x = torch.randint(0, 12, (total, length), generator=draw)
    y = torch.randint(0, NUM_CLASSES, (total,), generator=draw)
    names = [str(label) for label in range(NUM_CLASSES)]
    return from_arrays(x[:num_train], y[:num_train], x[num_train:], y[num_train:], classes=names)


def random_vectors(
    num_train: int = 60, num_test: int = 12, size: int = 5, seed: int = 0
) -> Dataset:
    """Create random vectors with random labels.

    Args:
        num_train: Number of training examples.
        num_test: Number of test examples.
        size: Length of a vector.
        seed: Seed.

    Returns:
        The data set.
    """
    draw = torch.Generator().manual_seed(seed)
    total = num_train + num_test
    x = torch.randn(total, size, generator=draw)
    y = torch.randint(0, NUM_CLASSES, (total,), generator=draw)
    names = [str(label) for label in range(NUM_CLASSES)]
    train = (x[:num_train], y[:num_train])
    return from_arrays(*train, x[num_train:], y[num_train:], classes=names)


def norm_dropout_network() -> nn.Module:
    """Build a network for `random_images` with BatchNorm and two kinds of dropout."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout2d(0.2),
        nn.Flatten(),
        nn.Linear(36, 8),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Linear(8, NUM_CLASSES),
    )


class ToyConfig(NamedTuple):
    """The settings of a toy federation.

    Attributes:
        dataset: The data set; random images by default.
        module: The network, or a function that builds it; a small CNN by default.
        generator: A generator network.
        sizes: Number of training examples of each client.
        dtype: Precision.
        steps: Number of local steps.
        epochs: Number of local epochs, instead of steps if above 0.
        batch: Number of examples in a batch.
        optimizer: The local optimizer; SGD with momentum by default.
        participation: Fraction of the clients in a round.
        rounds: Number of rounds.
        clip: Largest L2 norm of a gradient; 0 means no limit.
        lr: Learning rate.
        device: torch device.
        skip_diverged: Whether to leave diverged clients out.
        seed: Seed.
        augmentation: Changes the training examples of every batch.
    """

    dataset: Dataset | None = None
    module: Network | None = None
    generator: nn.Module | None = None
    sizes: Sequence[int] = (50, 30, 10)
    dtype: torch.dtype = torch.float64
    steps: int = 3
    epochs: float = 0.0
    batch: int = 6
    optimizer: Optimizer | None = None
    participation: float = 1.0
    rounds: int = 2
    clip: float = 0.0
    lr: float = 0.05
    device: str = "cpu"
    skip_diverged: bool = False
    seed: int = 3
    augmentation: Augmentation | None = None


class ToyFederation:
    """A federation of three clients with 50, 30 and 10 random images.

    Attributes:
        algorithm: The algorithm.
        dataset: The data set.
        data: The federated data set.
        model: The network.
        task: What a label means.
        simulator: Trains the clients.
        schedule: When things happen.
        server: The server.
    """

    def __init__(self, algorithm: Algorithm, mapping: Mapping = "loop", **settings: Any) -> None:
        """Create a federation.

        Args:
            algorithm: The algorithm.
            mapping: How clients train.
            **settings: Fields of `ToyConfig`.
        """
        config = ToyConfig(**settings)
        self.algorithm = algorithm
        self.dataset = config.dataset or random_images()
        device = torch.device(config.device)
        sizes = list(config.sizes)
        self.data = FederatedData(
            self.dataset,
            list(torch.split(torch.arange(sum(sizes)), sizes)),
            seed=config.seed,
            augment=self.dataset.augment,
            device=device,
            dtype=config.dtype,
            augmentation=config.augmentation,
        )
        shape = self.dataset.input_shape
        if config.module is None:
            module = build("small", shape, NUM_CLASSES, seed=config.seed - 2)
        else:
            module = make_network(config.module, shape, NUM_CLASSES, config.seed)
        model = Model(module, shape, NUM_CLASSES, generator=config.generator)
        self.model = model.to(device, config.dtype)
        self.task = make_task(NUM_CLASSES, self.dataset.multi_label)
        cohort = Cohort(
            self.model,
            self.task,
            self.data,
            config.optimizer or Optimizer(momentum=0.9),
            CohortConfig(batch_size=config.batch, grad_clip=config.clip, mapping=mapping),
        )
        workload = LocalWorkload(local_steps=config.steps, local_epochs=config.epochs)
        self.simulator = Simulator(cohort, workload)
        count = max(1, round_half_up(config.participation * len(sizes)))
        self.schedule = Schedule(
            rounds=config.rounds,
            sampling=Uniform(len(sizes), count, seed=config.seed),
            lr=config.lr,
            client_lr=LRSchedule(),
            evaluate_every=1,
            evaluate_local=True,
            skip_diverged=config.skip_diverged,
        )
        self.server = Server(
            algorithm,
            self.simulator,
            ModelScorer(algorithm, self.simulator, use_test_set=True),
            self.schedule,
            self.simulator.init_server(algorithm),
        )

    def run(self, start: int = 0) -> list[FinishedRound]:
        """Run all rounds from `start` on."""
        return [self.server.run_round(round) for round in range(start, self.schedule.rounds)]

    def run_clients(
        self, client_ids: list[int], round: int, broadcast: State, lr: float = 0.05
    ) -> RoundResult:
        """Train some clients for a round and store their states; the server does not change.

        Args:
            client_ids: The clients.
            round: The round, from 0.
            broadcast: What the clients receive.
            lr: Learning rate.

        Returns:
            What the clients returned.
        """
        request = RoundRequest(
            self.algorithm, round, client_ids, client_ids, broadcast, lr, None, 0.0
        )
        result = self.simulator.run_round(request)
        assert result.findings is not None
        self.simulator.keep_states(result, result.findings.all_finite.tolist())
        return result

    def final_state(self, start: int = 0) -> Params:
        """Run all rounds, and return the server state and all client states, flat."""
        self.run(start)
        server = tree.flatten({"server": self.server.state})
        return server | self.simulator.client_states.flatten()


def max_difference(first: Params, second: Params) -> float:
    """Return the largest absolute difference of two flat dicts of tensors; NaN counts.

    Args:
        first: Tensors by name.
        second: Tensors by the same names.

    Returns:
        The largest difference.
    """
    assert first.keys() == second.keys(), (
        f"the names differ: {sorted(first.keys() ^ second.keys())}"
    )
    differences = [
        (first[name] - second[name]).abs().max().cpu() for name in first if first[name].numel()
    ]
    return float(torch.stack(differences).max())  # Python's max would ignore NaN
