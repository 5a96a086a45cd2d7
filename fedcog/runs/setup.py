"""The setup of an experiment: data split among clients, network built, device found."""

import functools
import hashlib
import importlib.util
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from fedcog.core.metrics import FurtherMetrics, check_functions, parse_names
from fedcog.core.optimizers import Optimizer
from fedcog.core.settings import ConfigError
from fedcog.core.tasks import make_task
from fedcog.core.tree import Params
from fedcog.data import DataError, Dataset, FederatedData, local_tests, registry, shifts
from fedcog.data.datasets import DataWarning
from fedcog.data.local_tests import LocalTests
from fedcog.data.sources import locations
from fedcog.engine import cuda_graphs
from fedcog.engine.cohort import Cohort, CohortConfig, Mapping
from fedcog.engine.privacy import Privacy
from fedcog.federation.client_sampling import ClientSampling, PowerOfChoice, Uniform
from fedcog.federation.device_types import has_speeds
from fedcog.federation.server import Schedule, Server
from fedcog.federation.simulator import LocalWorkload, Simulator, WeightRule
from fedcog.federation.virtual_time.async_simulator import AsyncRule, AsyncSimulator
from fedcog.federation.virtual_time.clock import VirtualClock, client_durations
from fedcog.models.behavior import Behavior, network_behavior, summarize
from fedcog.models.checks import TOKENS_HINT, ModelError
from fedcog.models.functional import Model
from fedcog.models.initialization import Network, make_network, start_alike
from fedcog.models.libraries import input_note, name_fault
from fedcog.models.tokens import check_tokens, continuous_shape
from fedcog.models.zoo import MODELS, build
from fedcog.runs.config.composition import named_layers
from fedcog.runs.config.device_config import prepare_attack
from fedcog.runs.config.experiment import Experiment
from fedcog.runs.config.object_names import object_names
from fedcog.runs.config.user_code import describe_network, function_source, user_source
from fedcog.runs.config.user_objects import UserObjects, check_objects
from fedcog.runs.environment import find_device, num_workers
from fedcog.runs.experiment_data import (
    adapt_dataset,
    apply_shifts,
    augmentation_batching_error,
    check_augmentation,
    client_names,
    partition_seed,
    read_dataset,
    resolve_clients,
    split_dataset,
)
from fedcog.runs.pretrained import load_pretrained, prepare_generator
from fedcog.runs.scoring import ModelScorer

MAX_VMAP_FLOPS = 10**7
"""CPU: rounds with fewer floating-point operations per client train all clients at once."""
WeightsSource = Literal["seed", "given", "function"]
"""Where initial weights come from: the seed, a given network, or a function, alike for all seeds.
"""
NUM_SAMPLE_IMAGES = 8
"""Number of real images per class that a report shows."""
AUTO_MODELS = {
    "digits": "small",
    "fashion-mnist": "cnn",
    "cifar10": "cnn",
    "cifar100": "cnn3",
    "digit-mosaics": "small",
    "mosaics": "resnet18",
    "flair": "resnet18",
}
"""The network of `model = "auto"`, by data set."""


def load_data(experiment: Experiment, objects: UserObjects) -> Dataset:
    """Return the data set of an experiment: the user's, or the one that it names.

    Args:
        experiment: Names the data set, image size, subset and indices.
        objects: Objects of the user.

    Returns:
        The data set.
    """
    if objects.data is not None:
        return adapt_dataset(objects.data, experiment)
    return read_dataset(experiment)


class RemoteClients(NamedTuple):
    """A real federation, in which most data are elsewhere.

    Attributes:
        indices: The clients' examples that are here, by client id; None if all are here.
    """

    indices: dict[int, Tensor] | None = None


class ExperimentSetup:
    """An experiment with data, network and backend in place, ready for round 1.

    Attributes:
        experiment: The experiment.
        device: Where it computes.
        dataset: The data set, after shifts and label noise.
        indices: Training examples of each client.
        data: The federated data set on the device.
        model_name: Name of the network; "custom" if it is the user's.
        input_note: How the network adapts its inputs, in words; empty if it does not.
        model: The network.
        task: What a label means.
        privacy: Differential privacy of what clients send.
        user_object_names: Names of the user's own data, network and augmentation, with digests.
        simulator: Trains clients here; other backends use it too.
        scorer: Evaluates models.
        schedule: When things happen.
        clock: Virtual time; None if rounds are synchronous and devices have no speeds.
        server_state: The server state before the next round.
    """

    def __init__(
        self,
        experiment: Experiment,
        objects: UserObjects | None = None,
        remote: RemoteClients | None = None,
    ) -> None:
        """Set an experiment up.

        Args:
            experiment: The experiment.
            objects: Objects of the user, instead of what the experiment names.
            remote: Given if clients are remote, and where their examples are.

        Raises:
            ConfigError: If settings, data and network do not fit together.
            ModelError: If the network cannot be trained.
        """
        objects = objects or UserObjects()
        self.experiment = experiment
        self.device = self._find_device()
        check_objects(experiment, objects)
        self._set_up_data(objects, remote)
        self._set_up_model(objects)
        self.task = make_task(len(self.dataset.classes), self.dataset.multi_label)
        if self.task.multi_label and (faults := single_label_faults(experiment)):
            raise ConfigError(faults)
        if faults := [*experiment.too_few_clients(self.data.num_clients)]:
            raise ConfigError(faults)
        self.privacy = make_privacy(experiment, self.data.num_clients, simulated=remote is None)
        if self.privacy and importlib.util.find_spec("dp_accounting") is None:
            raise ConfigError(["privacy needs an accountant: pip install 'fedcog[privacy]'."])
        self.simulator = Simulator(self._make_cohort(), self._workload(), self._metrics(objects))
        has_test_set = len(self.data.test_y) > 0
        use_test_set = experiment.evaluate_test and has_test_set
        self.scorer = ModelScorer(experiment.algorithm, self.simulator, use_test_set)
        self.schedule = replace(
            make_schedule(experiment, self.data.sizes.tolist()),
            evaluate_local=experiment.evaluate_local and has_test_set,
            evaluate_clients=self._evaluates_clients,
        )
        self._check_model()
        self.clock = self._make_clock(is_remote=remote is not None)
        self.server_state = self.simulator.init_server(experiment.algorithm)

    def make_server(self) -> Server:
        """Create the server, with the simulator as its backend."""
        return Server(
            self.experiment.algorithm,
            self._make_backend(),
            self.scorer,
            self.schedule,
            self.server_state,
            self.privacy,
            self.clock,
        )

    def _make_clock(self, is_remote: bool) -> VirtualClock | None:
        """Return the virtual clock; remote clients have the time of the real one."""
        device_types = self.experiment.device_types
        needs_clock = self.experiment.async_buffer > 0 or has_speeds(device_types)
        if is_remote or not needs_clock:
            return None
        return VirtualClock(client_durations(self.simulator.num_steps.tolist(), device_types))

    def _make_backend(self) -> Simulator | AsyncSimulator:
        """Return the simulator, or the one around it that does not wait for slow clients."""
        experiment = self.experiment
        if not experiment.async_buffer or self.clock is None:
            return self.simulator
        num_clients = self.data.num_clients
        count = clients_per_round(experiment, num_clients)
        rule = AsyncRule(
            buffer_size=experiment.async_buffer,
            exponent=experiment.async_staleness,
            sampling=Uniform(num_clients, count, experiment.seed),
        )
        return AsyncSimulator(self.simulator, self.clock, rule)

    @functools.cached_property
    def checkpoint_info(self) -> dict[str, Any]:
        """What a checkpoint belongs to: a run resumes only if all of it is the same."""
        return {
            "experiment": self.experiment.identity,
            "data": self._data_fingerprint(),
            "model": self.model_name,
            "network": hashlib.sha256(self._network_text.encode()).hexdigest()[:16],
            "code": hashlib.sha256(self._algorithm_source().encode()).hexdigest()[:16],
            "input_shape": list(self.model.input_shape),
            "classes": self.model.num_classes,
            "behavior": self._behavior,
        }

    def federation_record(self) -> tuple[Params, dict[str, Any]]:
        """Return what `federation.safetensors` holds: counts per client, some real images."""
        tensors = {"counts": self.simulator.class_counts.cpu()}
        images = self.dataset.train_x
        has_examples = any(len(part) for part in self.indices) or len(self.dataset.test_y) > 0
        if has_examples and images.dtype == torch.uint8 and images.dim() == 4:
            labels = self.dataset.train_y
            if self.dataset.multi_label:
                rows = list(labels.T)
            else:
                rows = [labels == label for label in range(self.model.num_classes)]
            samples = [torch.nonzero(row)[:NUM_SAMPLE_IMAGES, 0] for row in rows]
            tensors["real_images"] = images[torch.cat(samples)]
            tensors["real_labels"] = torch.cat(
                [torch.full_like(own, label) for label, own in enumerate(samples)]
            )
        about: dict[str, Any] = {
            "dataset": self.dataset.name,
            "client_names": client_names(self.experiment, self.dataset, self.indices),
            "classes": list(self.dataset.classes),
            "several": self.dataset.multi_label,
            "mean": list(self.dataset.mean),
            "std": list(self.dataset.std),
            "test_examples": len(self.dataset.test_y),
            "local_test_examples": self._local_test_sizes(),
            "parameters": sum(value.numel() for value in self.model.params.values()),
            "model": self.model_name,
            "initial_weights": self._weights_source,
            "augmentation": getattr(self._augmentation, "__name__", ""),
        }
        if self.input_note:
            about["input_note"] = self.input_note
        return tensors, about

    def _local_test_sizes(self) -> list[int]:
        """Return the number of test examples of each client; empty without client-side tests."""
        tests = self.data.local_tests
        return [] if tests is None else tests.sizes.tolist()

    def displayable(self, artifacts: Params) -> Params:
        """Return artifacts with normalized inputs turned back into images."""
        return {
            name: self.data.to_images(value) if name == "images" else value
            for name, value in artifacts.items()
        }

    def _find_device(self) -> torch.device:
        device = find_device(self.experiment.device)
        mapping = self.experiment.mapping
        if mapping == "graph" and device.type != "cuda":
            raise ConfigError(
                [
                    "mapping 'graph' records CUDA graphs, but this run would use "
                    f"'{device}': set --mapping auto."
                ]
            )
        if device.type == "cuda" and mapping in ("auto", "graph"):
            cuda_graphs.preload_compiler()
        return device

    def _set_up_data(self, objects: UserObjects, remote: RemoteClients | None) -> None:
        """Load the data set, split it among clients, and copy it to the device."""
        dataset = self._load_data(objects)
        self._original_dataset = dataset
        experiment = self.experiment
        if remote is None or remote.indices is None:
            self.indices = split_dataset(experiment, dataset)
        else:
            nothing = torch.empty(0, dtype=torch.int64)
            self.indices = [
                remote.indices.get(client_id, nothing) for client_id in range(experiment.clients)
            ]
        self.dataset = apply_shifts(experiment, dataset, self.indices)
        tests = self._split_local_tests(dataset)
        augment = {"auto": self.dataset.augment, "on": True, "off": False}[experiment.augment]
        is_images = self.dataset.train_x.dim() == 4 and self.dataset.train_x.dtype == torch.uint8
        if augment and not is_images:
            raise ConfigError(
                ["augment is on, but only images (uint8) can be augmented: set --augment off."]
            )
        self.data = FederatedData(
            self.dataset,
            self.indices,
            seed=experiment.seed,
            validation=experiment.validation,
            augment=augment,
            device=self.device,
            dtype=torch.float64 if experiment.precision == "float64" else torch.float32,
            local_tests=tests,
            augmentation=objects.augmentation,
        )
        self._behavior: dict[str, Behavior] = {}
        if objects.augmentation is not None:
            changed = check_augmentation(objects.augmentation, self.data)
            self._behavior["augmentation"] = summarize(changed)
        self._augmentation = objects.augmentation
        self._check_evaluation(remote)

    def _load_data(self, objects: UserObjects) -> Dataset:
        """Return the data set, and complete the experiment with what it implies."""
        dataset = objects.preloaded
        if dataset is None:
            dataset = load_data(self.experiment, objects)
        self.experiment = resolve_clients(self.experiment, dataset)
        return dataset

    def _split_local_tests(self, original: Dataset) -> LocalTests | None:
        """Hold out each client's test examples, or find those that the data set gives it.

        Args:
            original: The data set before shifts and label noise.
        """
        experiment = self.experiment
        seed = partition_seed(experiment)
        if not experiment.evaluate_test:
            return None
        has_own_tests = original.test_users is not None and experiment.partition == "natural"
        if has_own_tests and experiment.privacy != "off":
            warnings.warn(
                "users' own test examples are a test set of the server here: privacy does not "
                "account for reports of single clients.",
                DataWarning,
                stacklevel=2,
            )
            return None
        if experiment.local_test and has_own_tests:
            raise ConfigError(
                [
                    "users have test examples of their own in this data set: remove --local-test, "
                    "or choose another --partition than natural."
                ]
            )
        if experiment.local_test:
            self.indices, held_out = local_tests.hold_out(self.indices, experiment.local_test, seed)
            return local_tests.from_training(self.dataset, original.train_y, held_out)
        if not has_own_tests:
            return None

        def _shift(x: Tensor, client: int) -> Tensor:
            return shifts.shift_inputs(
                original, x, client, experiment.shift, experiment.shift_strength, seed
            )

        return local_tests.from_test_set(original, self.indices, _shift)

    def _check_evaluation(self, remote: RemoteClients | None) -> None:
        """Refuse experiments that would evaluate on nothing."""
        experiment = self.experiment
        if not (experiment.evaluate_test or remote is not None or len(self.data.validation)):
            raise ConfigError(
                [
                    "no client has enough examples to hold one out for validation: raise "
                    f"--validation above {experiment.validation:g}."
                ]
            )
        if not (experiment.evaluate_test and remote is None):
            return
        tests = self.data.local_tests
        if tests is not None and not len(tests.y) and not experiment.local_test:
            raise ConfigError(
                [
                    "no client has test examples: no user of the training examples is among the "
                    "test_users. Name users alike in both splits, or hold out --local-test 0.2 "
                    "of data without test_users."
                ]
            )
        if tests is not None and not len(tests.y):
            raise ConfigError(
                [
                    "no client has enough examples to hold one out for testing: raise "
                    f"--local-test above {experiment.local_test:g}; a client with one example "
                    "keeps it for training."
                ]
            )
        if tests is None and not len(self.data.test_y):
            remedy = (
                "hold out test examples at every client with --local-test 0.2, or validate with "
                "--validation 0.2 --no-evaluate-test --no-evaluate-local."
            )
            if experiment.privacy != "off":
                remedy = "give it one; privacy does not account for reports of clients."
            raise ConfigError([f"the data set '{self.dataset.name}' has no test set: {remedy}"])

    def _set_up_model(self, objects: UserObjects) -> None:
        """Build the network, load pretrained weights, and move it to the device."""
        experiment = self.experiment
        shape = self.dataset.input_shape
        num_classes = len(self.dataset.classes)
        if objects.model is None and self.dataset.train_x.dtype == torch.int64:
            raise ModelError(
                f"the inputs are int64 tokens of shape {shape}, which no network by name takes: "
                "give your own, --model FILE.py:Name (Python: model=...), with embed(tokens) and "
                "forward_embedded(x); or give floats if the inputs are no tokens."
            )
        if objects.model is None:
            self.model_name = resolve_model_name(experiment, shape)
            module = build(self.model_name, shape, num_classes, experiment.seed)
        else:
            self.model_name = "custom"
            module = make_network(objects.model, shape, num_classes, experiment.seed)
        check_tokens(module, self.dataset.train_x, self.dataset.test_x)
        self._weights_source, reference = self._initial_weights(objects.model, module)
        self._network_text = repr(module)
        if objects.model is not None:
            self._network_text = describe_network(module)
        self.input_note = input_note(module)
        if experiment.pretrained:
            module, digest = load_pretrained(module, experiment.pretrained, num_classes)
            self._network_text += digest
        config = experiment.algorithm.generator_config
        if objects.generator is not None and config.kind != "custom":
            raise ConfigError(
                [
                    "your own generator needs FedCOG(generator='custom'): set it, or pass no "
                    "generator."
                ]
            )
        generator, description = prepare_generator(
            config,
            objects.generator,
            experiment.pretrained_generator,
            continuous_shape(module, shape),
        )
        self._network_text += description
        model = Model(module, shape, num_classes, experiment.batch_size, generator)
        self.model = model.to(self.device, getattr(torch, experiment.precision))
        if objects.model is not None:
            _check_precision(self.model, experiment.precision)
        if objects.model is not None:
            self._behavior["network"] = network_behavior(model)
        if objects.model is not None and reference is not module:
            model = Model(reference, shape, num_classes, experiment.batch_size)
        self.user_object_names = object_names(
            experiment, objects, self._original_dataset, self._network_text, model
        )

    def _initial_weights(
        self, network: Network | None, module: nn.Module
    ) -> tuple[WeightsSource, nn.Module]:
        """Return where initial weights come from, and the network as seed 0 initializes it.

        Args:
            network: The user's network, if there is one.
            module: The network as the experiment's seed initializes it.
        """
        if network is None:
            return "seed", module
        if isinstance(network, nn.Module):
            return "given", module
        seed = self.experiment.seed
        other = make_network(
            network, self.dataset.input_shape, len(self.dataset.classes), seed=int(seed == 0)
        )
        source: WeightsSource = "function" if start_alike(module, other) else "seed"
        return source, module if seed == 0 else other

    @property
    def network_notes(self) -> list[str]:
        """Sentences on what the user may not expect of the network."""
        notes = [f"{self.model_name}: {self.input_note}."] if self.input_note else []
        if self._weights_source == "function":
            notes.append(
                "your network starts from the same weights with every seed: what builds it sets a "
                "seed of its own, or loads weights."
            )
        return notes

    @property
    def _evaluates_clients(self) -> bool:
        """Whether models are evaluated on the clients' own test examples, here or at nodes."""
        experiment = self.experiment
        has_local_tests = experiment.local_test > 0 or self.data.local_tests is not None
        return experiment.evaluate_test and has_local_tests

    def _metrics(self, objects: UserObjects) -> FurtherMetrics:
        """Return the metrics that are recorded besides the main one."""
        names = parse_names(self.experiment.metrics)
        faults = check_functions(objects.metrics)
        if names and self.task.multi_label:
            faults.append(
                f"metrics: {', '.join(names)} are for examples of one label each: remove them."
            )
        is_remote = self.experiment.backend == "flower" or self.experiment.secure_aggregation
        if objects.metrics and is_remote and not len(self.data.test_y):
            faults.append(
                "metrics of your own need a test set at the server, because Flower nodes do not "
                "know them: give one, or set --backend simulator."
            )
        if faults:
            raise ConfigError(faults)
        if objects.metrics and is_remote and self._evaluates_clients:
            warnings.warn(
                "metrics of your own are computed on the server's test set only, because Flower "
                "nodes do not know them.",
                DataWarning,
                stacklevel=2,
            )
        return FurtherMetrics(tuple(names), objects.metrics)

    def _make_cohort(self) -> Cohort:
        experiment = self.experiment
        mapping, num_threads = self._choose_mapping()
        config = CohortConfig(
            batch_size=experiment.batch_size,
            grad_clip=experiment.grad_clip,
            mapping=mapping,
            num_workers=num_workers(experiment.workers) if self.device.type == "cpu" else 1,
            num_threads=num_threads,
        )
        optimizer = Optimizer(experiment.optimizer, experiment.momentum, experiment.weight_decay)
        return Cohort(self.model, self.task, self.data, optimizer, config, self.privacy)

    def _workload(self) -> LocalWorkload:
        experiment = self.experiment
        weights: WeightRule = "examples"
        if experiment.weights != "auto":
            weights = experiment.weights
        elif self.privacy or experiment.selection == "power-of-choice":
            weights = "uniform"
        return LocalWorkload(
            local_steps=experiment.local_steps,
            local_epochs=experiment.local_epochs,
            weights=weights,
            weight_cap=experiment.weight_cap,
            device_types=[
                prepare_attack(device, self.dataset, self.data, self.model.num_classes)
                for device in experiment.device_types
            ],
        )

    def _choose_mapping(self) -> tuple[Mapping, int]:
        """Return how clients train, and on how many threads; 0 means all.

        A CPU trains one client after another. Rounds so short that distributing clients would cost
        more than training them train all clients at once on one thread, if network and algorithms
        are built-in and so known to work with vmap.
        """
        experiment = self.experiment
        if experiment.mapping == "loop":
            return "loop", 0
        if experiment.mapping != "auto" or self.device.type == "cuda":
            return self._batched_mapping(), 0
        generator = experiment.algorithm.generator_config.kind
        if self._augmentation_error():
            return "loop", 0
        if self.model_name not in MODELS or generator == "custom" or not is_built_in(experiment):
            return "loop", 0
        num_steps = experiment.local_steps
        if experiment.local_epochs:
            num_examples = int(self.data.sizes.max())
            num_steps = int(experiment.local_epochs * num_examples / experiment.batch_size) + 1
        flops = self.model.flops_per_example * experiment.batch_size * num_steps
        return ("vmap", 1) if flops <= MAX_VMAP_FLOPS else ("loop", 0)

    def _batched_mapping(self) -> Mapping:
        """Return how clients train at once, if torch can map the network over clients."""
        mapping = self.experiment.mapping
        if reason := self._augmentation_error():
            if mapping != "auto":
                raise ConfigError(
                    [
                        f"mapping '{mapping}' trains several clients at once, which torch cannot "
                        f"do with this augmentation ({reason}): write it without Python decisions "
                        "on values, such as torch.where(flip, x.flip(3), x), or set --mapping loop."
                    ]
                )
            return "loop"
        if self.model_name not in MODELS:
            reason = self.model.batching_error(self.experiment.batch_size)
        if mapping == "auto":
            return "loop" if reason else "graph"
        if reason:
            raise ModelError(
                f"mapping '{mapping}' trains the networks of several clients at once, which torch "
                f"cannot do with this one ({reason}): set --mapping loop."
            )
        return mapping

    def _augmentation_error(self) -> str:
        """Return why the user's augmentation cannot be mapped over clients; empty if it can."""
        if self._augmentation is None:
            return ""
        return augmentation_batching_error(self._augmentation, self.data)

    def _check_model(self) -> None:
        """Refuse networks that the algorithm cannot use."""
        layers = named_layers(self.experiment.algorithm)
        names = ", ".join(name for name, layer in layers if layer.needs_features)
        if names and self.model.head is None:
            raise ConfigError(
                [
                    f"{names} uses features, but this network has none to offer: its outputs must "
                    "be those of one nn.Linear, called once and last, with its own weights. Change "
                    "the network, or the algorithm."
                ]
            )
        names = ", ".join(name for name, layer in layers if layer.needs_input_gradients)
        if names and not self.model.has_input_gradient:
            raise ConfigError(
                [
                    f"{names} optimizes inputs, but this network's outputs have no gradient with "
                    f"respect to its inputs. {TOKENS_HINT} Or choose another algorithm."
                ]
            )

    def _algorithm_source(self) -> str:
        source = user_source(type(layer) for layer in self.experiment.algorithm.layers)
        return source + function_source(self._augmentation)

    def _data_fingerprint(self) -> str:
        digest = hashlib.sha256(self.dataset.fingerprint.encode())
        for part in self.indices:
            digest.update(f"{part.dtype} {list(part.shape)}".encode())
            digest.update(part.contiguous().numpy().data)
        return digest.hexdigest()[:16]


def make_schedule(experiment: Experiment, sizes: list[int]) -> Schedule:
    """Create the schedule of an experiment.

    Args:
        experiment: The experiment.
        sizes: Number of training examples of each client.

    Returns:
        The schedule.
    """
    return Schedule(
        rounds=experiment.rounds,
        sampling=make_sampling(experiment, sizes),
        lr=experiment.lr,
        client_lr=experiment.client_lr,
        server_lr=experiment.server_lr,
        evaluate_every=experiment.evaluate_every,
        evaluate_local=experiment.evaluate_local,
        skip_diverged=experiment.on_divergence == "skip",
    )


def make_sampling(experiment: Experiment, sizes: list[int]) -> ClientSampling:
    """Create the rule that samples the clients of a round.

    Args:
        experiment: Names the rule.
        sizes: Number of training examples of each client.

    Returns:
        The sampling rule.

    Raises:
        ConfigError: If the number of candidates is out of range.
    """
    num_clients = len(sizes)
    count = clients_per_round(experiment, num_clients)
    if experiment.selection == "uniform":
        return Uniform(num_clients, count, experiment.seed)
    pool = experiment.candidates or min(2 * count, num_clients)
    if not count <= pool <= num_clients:
        raise ConfigError(
            [
                f"candidates needs an integer from {count} (the clients of a round) to "
                f"{num_clients} (all clients), not {pool}."
            ]
        )
    return PowerOfChoice(tuple(sizes), count, pool, experiment.seed, experiment.choice_loss)


def clients_per_round(experiment: Experiment, num_clients: int) -> int:
    """Return how many of `num_clients` clients take part in a round, at least 1.

    Args:
        experiment: Has the participation.
        num_clients: Number of all clients.

    Returns:
        The number of clients in a round.
    """
    return experiment.clients_per_round(num_clients)


def make_privacy(experiment: Experiment, num_clients: int, simulated: bool) -> Privacy | None:
    """Create the privacy mechanism of an experiment.

    Args:
        experiment: Has the settings.
        num_clients: Number of all clients.
        simulated: Whether noise comes from the seed.

    Returns:
        The mechanism; None if privacy is off.
    """
    if experiment.privacy == "off":
        return None
    return Privacy(
        experiment.privacy,
        clip=experiment.dp_clip,
        noise=experiment.dp_noise,
        delta=experiment.dp_delta,
        num_clients=num_clients,
        clients_per_round=clients_per_round(experiment, num_clients),
        seed=experiment.seed,
        simulated=simulated,
    )


def resolve_model_name(experiment: Experiment, input_shape: tuple[int, ...]) -> str:
    """Return the network's name; `auto` is the paper's for the data set, or one that fits.

    Args:
        experiment: Names network and data set.
        input_shape: Shape of one input.

    Returns:
        A name that `fedcog.models.zoo.build` takes.
    """
    if experiment.model != "auto":
        return experiment.model
    is_large_image = len(input_shape) == 3 and min(input_shape[1:]) >= 16
    return AUTO_MODELS.get(experiment.dataset, "cnn" if is_large_image else "mlp")


def is_built_in(experiment: Experiment) -> bool:
    """Return whether all layers of the algorithm are part of fedcog."""
    layers = experiment.algorithm.layers
    return all(type(layer).__module__.startswith("fedcog.") for layer in layers)


def single_label_faults(experiment: Experiment) -> list[str]:
    """Return why the algorithm cannot train on multi-label examples."""
    reasons = [layer.single_label_reason for layer in experiment.algorithm.layers]
    return [
        f"{reason} Choose another algorithm for multi-label examples."
        for reason in reasons
        if reason
    ]


def check_ready(experiment: Experiment) -> list[str]:
    """Return what prevents a run apart from its settings: missing data, labels, device."""
    faults: list[str] = []
    if fault := name_fault(experiment.model):
        faults.append(fault)
    source = registry.DATASETS.get(experiment.dataset)
    if source is not None and source.multi_label:
        faults += single_label_faults(experiment)
    try:
        find_device(experiment.device)
    except ConfigError as error:
        faults += error.faults
    data_dir = experiment.data_dir or None
    if source is not None and registry.locate(experiment.dataset, data_dir) is None:
        try:
            registry.load(experiment.dataset, data_dir)
        except DataError as error:
            faults.append(str(error))
    if fault := locations.missing_location(experiment.dataset):
        faults.append(fault)
    if experiment.indices and not Path(experiment.indices).expanduser().is_file():
        faults.append(f"there is no file {experiment.indices}: change --indices.")
    return faults


def _check_precision(model: Model, precision: str) -> None:
    """Refuse a network of the user that computes in a floating type of its own."""
    like = next(iter(model.params.values()))
    x = torch.zeros((2, *model.continuous_shape), dtype=like.dtype, device=like.device)
    try:
        with torch.no_grad():
            model.predict(model.params | model.buffers, x)
    except RuntimeError as error:
        raise ModelError(
            f"the network does not compute in {precision} ({str(error).splitlines()[0]}): remove "
            "conversions such as x.half() from its forward, and set --precision instead."
        ) from error
