"""The configuration of an experiment as one dataclass, to and from TOML."""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from fedcog import data
from fedcog.algorithms import ALGORITHMS, Algorithm
from fedcog.core import settings
from fedcog.core.integers import round_half_up
from fedcog.core.lr_schedules import LRSchedule, ScheduleKind
from fedcog.core.metrics import METRICS, parse_names
from fedcog.core.optimizers import OptimizerKind
from fedcog.core.settings import ConfigError, setting
from fedcog.core.toml import to_toml_key, to_toml_value
from fedcog.data.partitions import flwr_partitions, schemes
from fedcog.data.partitions.base import PartitionConfig
from fedcog.data.shifts import Shift
from fedcog.data.sources import locations
from fedcog.federation.device_types import DeviceType
from fedcog.models.libraries import LIBRARIES
from fedcog.models.zoo import MODELS, is_network_name
from fedcog.runs.config.composition import (
    AlgorithmClasses,
    algorithm_name,
    make_algorithm,
    make_recorded_algorithm,
    named_layers,
    read_table,
)
from fedcog.runs.config.device_config import read_device_types

if TYPE_CHECKING:
    PartitionName = str
else:
    PartitionName = Literal[("auto", *schemes.PARTITIONS, "given", *schemes.FLWR_PARTITIONS)]
"""Names of partitions: those of the tables, and 'given' for the data set's own `indices`."""
LIBRARY_NAMES = [f"{library}:NAME" for library in LIBRARIES]
"""The form of the names of torchvision's and timm's networks."""

MIN_LR = 1e-37
"""A smaller learning rate is 0, or loses digits, in float32."""
DEFAULT_CLIENTS = 10
DEFAULT_PARTITION = "dirichlet"
DEFAULT_MIN_EXAMPLES = PartitionConfig(1).min_examples
"""What 0 and "auto" mean for a data set without users and indices."""


@dataclass(frozen=True)
class Experiment:
    """Everything that decides what a run computes. Defaults are the paper's.

    Every field but `algorithm` is also a command-line flag and a key of settings files.

    Attributes:
        algorithm: The algorithm, such as `FedCOG(FedProx(mu=0.1))`.

    Raises:
        ConfigError: If settings are invalid; it lists all problems at once.

    Example:
        ```python
        from fedcog import Experiment, FedCOG, FedProx

        experiment = Experiment(FedCOG(FedProx(mu=0.1)), dataset="digits", clients=5, rounds=3)
        print(experiment.to_toml())
        ```
    """

    algorithm: Algorithm = dataclasses.field(default_factory=Algorithm)

    dataset: str = setting(
        "digits",
        "data set: a name of `fedcog list data`, a folder of images, a .npz file, or hub:NAME; on "
        "the command line also a function, FILE.py:Name or MODULE:Name",
    )
    data_dir: str = setting(
        "",
        "folder with the data sets; default: $FEDCOG_DATA, else ~/.cache/fedcog",
        identity=False,
    )
    image_size: int = setting(
        0,
        "side in pixels to which images are resized on reading; 0: as they are",
        ">= 0",
        "<= 4096",
        identity="if set",
    )
    subset: int = setting(
        0,
        "number of training examples to use, and of test examples at most; 0: all",
        ">= 0",
        identity="if set",
    )
    input_column: str = setting(
        "", "hub: column of inputs; default: found by its type", identity="if set"
    )
    label_column: str = setting(
        "", "hub: column of labels; default: found by its type", identity="if set"
    )
    user_column: str = setting(
        "", "hub: column of users, each of whom becomes a client", identity="if set"
    )
    partition: PartitionName = setting(
        "auto",
        "how the training set is split among clients; see `fedcog list partitions`; auto: natural "
        "if the data set has users, given if it has indices, else dirichlet",
    )
    indices: str = setting(
        "", "given: .json or .npz file with the training examples of each client", identity="if set"
    )
    clients: int = setting(
        0, "number of clients; 0: all users, as many as there are indices, else 10", ">= 0"
    )
    beta: float = setting(
        0.1,
        "dirichlet, quantity, label-quantity: concentration; smaller is more heterogeneous",
        "> 0",
    )
    balance: bool = setting(
        True, "dirichlet: a client that has its even share gets no examples of further classes"
    )
    classes_per_client: int = setting(
        2, "label-skew, label-quantity: maximum number of classes per client", ">= 1"
    )
    min_examples: int = setting(
        0, "minimum number of examples per client; 0: 10, or fewer if all users are clients", ">= 0"
    )
    partition_args: str = setting(
        "", "flwr-shard, flwr-pathological: further arguments, such as 'shard_size=50'"
    )
    partition_seed: int = setting(-1, "seed of the partition; -1: the same as --seed", ">= -1")
    shift: Shift = setting(
        "none", "feature shift between clients: each has its own rotation, noise or color"
    )
    shift_strength: float = setting(
        0.5, "size of the shift: fraction of 180 degrees, or of the value range", ">= 0", "<= 1"
    )
    label_noise: float = setting(0.0, "probability that a label is wrong", ">= 0", "<= 1")
    validation: float = setting(
        0.0, "fraction of each client's training data held out for validation", ">= 0", "< 1"
    )
    local_test: float = setting(
        0.0,
        "fraction of each client's training data held out as its own test set",
        ">= 0",
        "< 1",
        identity="if set",
    )
    augment: Literal["auto", "on", "off"] = setting(
        "auto", "random crop and flip in training; auto: as usual for the data set"
    )

    model: str = setting(
        "auto",
        "network: see `fedcog list`; torchvision:NAME, timm:NAME; auto: the paper's for the data "
        "set; on the command line also your own, FILE.py:Name",
    )
    pretrained: str = setting("", "safetensors file with the network's initial weights")
    pretrained_generator: str = setting(
        "", "safetensors file with the initial weights of FedCOG's generator"
    )
    rounds: int = setting(70, "number of communication rounds", ">= 1", identity=False)
    participation: float = setting(
        1.0, "fraction of the clients that take part in a round", "> 0", "<= 1"
    )
    selection: Literal["uniform", "power-of-choice"] = setting("uniform", "client sampling rule")
    candidates: int = setting(
        0,
        "power-of-choice: number of clients that report their loss; 0: twice the clients per round",
        ">= 0",
    )
    choice_loss: Literal["all", "batch"] = setting(
        "all", "power-of-choice: loss over all examples, or over one batch"
    )
    weights: Literal["auto", "examples", "uniform"] = setting(
        "auto",
        "client weights: by number of examples, or equal; auto: equal under power-of-choice only",
    )
    weight_cap: int = setting(
        0, "examples beyond which a client's weight does not grow; 0: no cap", ">= 0"
    )
    devices: str = setting(
        "",
        "device types: 'phone: clients=6 local_steps=50; server: clients=4 speed=2' and so on; "
        "speed: local steps per virtual second; attack=sign-flip and others: malicious clients",
    )
    async_buffer: int = setting(
        0,
        "answers that the server aggregates at a time, without waiting for slower clients; "
        "0: rounds are synchronous",
        ">= 0",
        identity="if set",
    )
    async_staleness: float = setting(
        0.5,
        "async_buffer: an update is multiplied by (1 + age)^-N, age in server versions; 0: by 1",
        ">= 0",
        identity="if set",
    )

    local_steps: int = setting(400, "number of local steps per round", ">= 1")
    local_epochs: float = setting(
        0.0, "number of local epochs per round, instead of steps if above 0", ">= 0"
    )
    batch_size: int = setting(64, "number of examples in a batch, real and generated alike", ">= 1")
    optimizer: OptimizerKind = setting("sgd", "local optimizer, restarted every round")
    lr: float = setting(0.01, "local learning rate", "> 0")
    momentum: float = setting(0.9, "sgd: momentum", ">= 0", "< 1")
    weight_decay: float = setting(1e-5, "weight decay", ">= 0")
    lr_decay: float = setting(
        1.0,
        "factor on the learning rate after every round, or every lr_step rounds",
        "> 0",
        "<= 1",
    )
    lr_schedule: ScheduleKind = setting(
        "exponential",
        "learning rate over rounds; exponential, step: by lr_decay; cosine, linear: to lr_final",
        identity="if set",
    )
    lr_warmup: int = setting(
        0, "rounds in which the learning rate rises linearly", ">= 0", identity="if set"
    )
    lr_step: int = setting(
        0, "schedule step: number of rounds between steps", ">= 0", identity="if set"
    )
    lr_final: float = setting(
        0.01,
        "schedules cosine, linear: factor on the learning rate in the last round",
        "> 0",
        "<= 1",
        identity="if set",
    )
    lr_rounds: int = setting(
        0,
        "schedules cosine, linear: number of rounds until lr_final; 0: --rounds",
        ">= 0",
        identity="if set",
    )
    grad_clip: float = setting(0.0, "max L2 norm of a client's gradient; 0: no limit", ">= 0")

    server_lr_schedule: ScheduleKind = setting(
        "constant",
        "factor on the server's update over rounds; as lr_schedule, with server_lr_decay",
        identity="if set",
    )
    server_lr_decay: float = setting(
        1.0,
        "factor on the server's update after every round, or every lr_step rounds",
        "> 0",
        "<= 1",
        identity="if set",
    )
    server_lr_warmup: int = setting(
        0, "rounds in which the factor on the server's update rises", ">= 0", identity="if set"
    )

    seed: int = setting(0, "seed of all randomness", ">= 0")
    on_divergence: Literal["stop", "skip"] = setting(
        "stop",
        "if a client's update is not finite: stop, or leave that client out of the round",
        identity=False,
    )
    evaluate_every: int = setting(
        1, "number of rounds between evaluations; the last round is always evaluated", ">= 1"
    )
    evaluate_local: bool = setting(True, "evaluate the clients' local models too")
    evaluate_test: bool = setting(
        True, "evaluate on test examples; if not, on the validation examples only"
    )
    metrics: str = setting(
        "",
        "further metrics, separated by commas: balanced_accuracy, class_accuracy, ece",
        identity=False,
    )
    checkpoint_every: int = setting(
        1,
        "number of rounds between checkpoints; those above 1 GB are written less often",
        ">= 1",
        identity=False,
    )
    device: str = setting("auto", "torch device: auto, cpu, cuda, cuda:1, ...", identity=False)
    mapping: Literal["auto", "loop", "vmap", "graph"] = setting(
        "auto",
        "clients one by one, at once, or as CUDA graphs; auto: graph on a GPU, else the fastest",
        identity=False,
    )
    backend: Literal["simulator", "flower"] = setting(
        "simulator",
        "what trains the clients: this simulator, or Flower's simulation engine",
        identity=False,
    )
    secure_aggregation: bool = setting(
        False, "Flower: clients mask their payloads (SecAgg+), so the server sees only the sum"
    )
    secure_scale: float = setting(
        1.0, "secure aggregation: factor on the payload bounds of the algorithm", "> 0"
    )
    privacy: Literal["off", "central", "local"] = setting(
        "off", "client-level differential privacy: noise on the sum, or on each payload"
    )
    dp_clip: float = setting(1.0, "privacy: clipping norm of a client's payload", "> 0")
    dp_noise: float = setting(1.0, "privacy: noise multiplier", ">= 0")
    dp_delta: float = setting(1e-5, "privacy: delta at which epsilon is reported", "> 0", "< 1")
    precision: Literal["float32", "bfloat16", "float64"] = setting(
        "float32", "precision; bfloat16: of products only, the rest stays float32"
    )
    tf32: bool = setting(
        False, "GPU: float32 products in TF32, which is faster and has 10 mantissa bits"
    )
    threads: int = setting(
        0,
        "CPU threads of all workers together; 0: torch's default",
        ">= 0",
        "<= 1024",
        identity=False,
    )
    workers: int = setting(
        0,
        "CPU: processes that train clients in parallel; 0: chosen automatically",
        ">= 0",
        "<= 1024",
        identity=False,
    )

    def __post_init__(self) -> None:
        """Check all settings and raise all faults at once."""
        faults = settings.read(Experiment, self._own_values())[1]
        algorithm_faults = list(self._algorithm_faults())
        faults += algorithm_faults
        if not algorithm_faults:
            faults += self._combination_faults()
        if not faults:
            faults += self._schedule_faults()
        faults += self._data_faults()
        if self.model not in ("auto", "custom") and not is_network_name(str(self.model)):
            faults.append(_unknown_model(str(self.model)))
        if not faults and not any(layer.is_recorded for layer in self.algorithm.layers):
            faults += self._read_devices()[1]
        if faults:
            raise ConfigError(faults)

    @property
    def device_types(self) -> list[DeviceType]:
        """The device types, first those of the first clients; empty if all clients are alike."""
        return self._read_devices()[0]

    @property
    def num_clients(self) -> int:
        """The number of clients; the default if it depends on data that are not loaded yet."""
        return self.clients or DEFAULT_CLIENTS

    def clients_per_round(self, num_clients: int) -> int:
        """Return how many of `num_clients` clients train in a round, or at the same time."""
        return max(1, round_half_up(self.participation * num_clients))

    @property
    def partition_config(self) -> PartitionConfig:
        """The settings of the partition."""
        return PartitionConfig(
            clients=self.num_clients,
            beta=self.beta,
            balance=self.balance,
            classes_per_client=self.classes_per_client,
            min_examples=self.min_examples or DEFAULT_MIN_EXAMPLES,
            arguments=self.partition_args,
        )

    @property
    def partition_rule(self) -> str:
        """The partition and its settings in words, such as 'dirichlet, beta 0.1'."""
        return schemes.describe(self.partition, self.partition_config)

    @property
    def identity(self) -> str:
        """A digest of what decides the results; a run resumes only with the same one."""
        text = json.dumps(self.identifying_settings(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def client_lr(self) -> LRSchedule:
        """The schedule of the local learning rate."""
        return LRSchedule(
            kind=self.lr_schedule,
            decay=self.lr_decay,
            step=self.lr_step,
            final=self.lr_final,
            warmup=self.lr_warmup,
            horizon=self.lr_rounds or self.rounds,
        )

    @property
    def server_lr(self) -> LRSchedule:
        """The schedule of the factor on the server's update."""
        return replace(
            self.client_lr,
            kind=self.server_lr_schedule,
            decay=self.server_lr_decay,
            warmup=self.server_lr_warmup,
        )

    def identifying_settings(self) -> dict[str, Any]:
        """Return the settings that decide the results; an algorithm's are in its own table.

        `lr_rounds` is the number of rounds over which learning rates decay, if a schedule uses it.
        """
        values = self.to_dict()
        ignored = free_settings() | self._unset_settings()
        if self.partition == "auto":
            values["partition"] = DEFAULT_PARTITION
        values["clients"] = self.num_clients
        values["min_examples"] = self.partition_config.min_examples
        kind = locations.location_kind(self.dataset)
        if kind in ("folder", "file"):  # data may move: a fingerprint says whether it is the same
            values["dataset"] = kind
        if self.indices:
            values["indices"] = "file"
        if self.client_lr.uses_horizon or self.server_lr.uses_horizon:
            values["lr_rounds"] = self.client_lr.horizon
            ignored.discard("lr_rounds")
        return {name: value for name, value in values.items() if name not in ignored}

    def _unset_settings(self) -> set[str]:
        """Return the settings that decide the results only if set, and have their default."""
        return {
            field.name
            for field in dataclasses.fields(self)
            if field.metadata.get("identity") == "if set"
            and getattr(self, field.name) == field.default
        }

    def to_dict(self) -> dict[str, Any]:
        """Return all settings; an algorithm's are in a table of its name."""
        values: dict[str, Any] = {"algorithm": algorithm_name(self.algorithm)}
        values |= self._own_values()
        for name, layer in named_layers(self.algorithm):
            if table := layer.setting_values:
                values[name] = table
        return values

    def to_toml(self) -> str:
        """Return all settings as TOML."""
        values = self.to_dict()
        lines = [
            f"{key} = {to_toml_value(value)}"
            for key, value in values.items()
            if not isinstance(value, dict)
        ]
        for name, table in values.items():
            if isinstance(table, dict):
                lines += ["", f"[{to_toml_key(name)}]"]
                lines += [
                    f"{to_toml_key(key)} = {to_toml_value(value)}" for key, value in table.items()
                ]
        return "\n".join(lines) + "\n"

    def _own_values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in settings.settings(Experiment)}

    def _data_faults(self) -> Iterator[str]:
        """Check the data set's name or location, and settings that only some partitions use."""
        text = str(self.dataset)
        kind = locations.location_kind(text)
        if kind == "code":
            yield (
                f"dataset '{text}' names code, which is run only if you name it on the command "
                f"line, --dataset {text}, or call it in Python: fedcog.run(experiment, "
                "data=fedcog.load_dataset(...))."
            )
        elif kind == "unknown" and text != "custom":
            known = settings.unknown_name("data set", text, data.DATASETS)
            forms = locations.FORMS
            if text.endswith(".py"):
                forms = f"the name of a function in the file, --dataset {text}:Name"
            elif text.endswith((".csv", ".tsv", ".npy", ".parquet", ".json")):
                forms = (
                    "arrays: read the file in a function, --dataset FILE.py:Name, or save its "
                    "arrays with np.savez as a .npz file"
                )
            yield f"{known} Or give {forms}."
        columns = (self.input_column, self.label_column, self.user_column)
        if any(columns) and kind != "hub":
            yield (
                "input_column, label_column and user_column are for data sets of the hub: set "
                "--dataset hub:NAME, or remove them."
            )
        if self.indices and self.partition not in ("auto", "given"):
            yield f"indices are for --partition given, not {self.partition}: remove one of them."
        if self.indices and self.subset:
            yield "indices number all training examples: remove --subset."

    def _algorithm_faults(self) -> Iterator[str]:
        """Check that every layer is an algorithm with valid settings."""
        layer: Any = self.algorithm
        while layer is not None:
            if not isinstance(layer, Algorithm):
                yield (
                    f"{layer!r} is not an Algorithm: pass FedCOG(FedProx()), for example, or "
                    "make_algorithm('fedprox+fedcog')."
                )
                return
            layer = getattr(layer, "inner", None)
        for name, layer in named_layers(self.algorithm):
            if layer.is_recorded:
                continue
            for fault in settings.check_class(type(layer), ignored={"inner"}):
                yield f"{name}: {fault}"
            yield from settings.read(type(layer), layer.setting_values, f"{name}.")[1]

    def _combination_faults(self) -> Iterator[str]:
        """Check settings that exclude each other."""
        layers = named_layers(self.algorithm)
        for name, layer in layers:
            if layer.needs_sgd and self.optimizer != "sgd":
                yield (
                    f"{name} derives the mean gradient from the change of the parameters, which "
                    f"{self.optimizer} does not allow: set --optimizer sgd, or choose another "
                    "algorithm."
                )
        if self.pretrained_generator and self.algorithm.generator_config.kind == "none":
            yield (
                "pretrained_generator needs FedCOG with a generator: set --fedcog.generator conv."
            )
        try:
            flwr_partitions.parse_arguments(str(self.partition), str(self.partition_args))
        except ValueError as error:
            yield f"partition_args: {error}."
        if not self.evaluate_test and (self.evaluate_local or not self.validation):
            yield (
                "without the test set, only validation examples are left, and local models are not "
                "evaluated on those: set --validation 0.2, for example, and --no-evaluate-local."
            )
        if self.privacy != "off":
            yield from self._privacy_faults()
        if self.async_buffer:
            yield from self._async_faults()
        for name in parse_names(str(self.metrics)):
            if name not in METRICS:
                yield settings.unknown_name("metric", name, METRICS)
        if self.clients:
            yield from self.too_few_clients(self.clients)
        names = [name for name, _ in layers]
        for name in {name for name in names if names.count(name) > 1}:
            yield f"{name} wraps itself: use each algorithm once."

    def too_few_clients(self, num_clients: int) -> Iterator[str]:
        """Check that enough clients train for the rule that replaces their mean.

        Args:
            num_clients: Number of all clients.

        Yields:
            A fault with a remedy.
        """
        count = self.async_buffer or self.clients_per_round(num_clients)
        if self.algorithm.min_clients > count:
            yield (
                f"{algorithm_name(self.algorithm)} needs at least {self.algorithm.min_clients} "
                f"clients in a round, not {count}: lower attackers or trim, or let more clients "
                "take part."
            )

    def _schedule_faults(self) -> Iterator[str]:
        """Check the schedules of the learning rates."""
        client_faults = self.client_lr.faults()
        yield from client_faults
        last = 1.0 if client_faults else self.lr * self.client_lr.factor(self.rounds - 1)
        if last < MIN_LR:
            yield (
                f"lr_decay {self.lr_decay:g} lowers the learning rate to {last:g} in the last "
                "round, which is 0 in float32: raise --lr-decay."
            )
        yield from self.server_lr.faults("server_")
        if self.server_lr.is_constant:
            return
        for name, layer in named_layers(self.algorithm):
            if not layer.has_server_step:
                yield (
                    f"{name} has no server step that a schedule could scale, since other state "
                    "follows the model: set --server-lr-schedule constant, and no "
                    "--server-lr-warmup."
                )

    def _privacy_faults(self) -> Iterator[str]:
        """Check for what a client would reveal besides its clipped and noisy payload."""
        if self.algorithm.uplink != "sum":
            yield (
                f"{algorithm_name(self.algorithm)} needs every client's payload, but privacy "
                "protects a sum: choose an algorithm whose uplink is a sum (fedcog list "
                "algorithms)."
            )
        if self.algorithm.needs_survey:
            yield (
                f"{algorithm_name(self.algorithm)} asks all clients for sums over their examples, "
                "which privacy does not account for: choose another algorithm."
            )
        if self.algorithm.num_resums:
            yield (
                f"{algorithm_name(self.algorithm)} weights the updates after they are clipped, and "
                "so beyond what privacy accounts for: choose another rule for the mean."
            )
        if self.selection != "uniform":
            yield (
                "power-of-choice needs every client's loss in clear, which privacy forbids: set "
                "--selection uniform."
            )
        for name, layer in named_layers(self.algorithm):
            if layer.sends_coverage:
                yield (
                    f"{name} sends which weights a client has, which privacy would clip and blur: "
                    "choose another algorithm."
                )
        if self.local_test:
            yield (
                "every client would report how models do on its own test examples, which privacy "
                "does not account for: set --local-test 0."
            )
        if self.weights == "examples":
            yield (
                "with privacy every client counts alike, or its number of examples would be "
                "revealed: set --weights auto."
            )

    def _async_faults(self) -> Iterator[str]:
        """Check that asynchronous rounds are simulated here, and that enough clients train."""
        if self.backend == "flower" or self.secure_aggregation:
            yield (
                "async_buffer simulates time, but Flower nodes answer in real time and wait for "
                "each other: set --backend simulator and --no-secure-aggregation, or "
                "--async-buffer 0."
            )
        if self.privacy != "off":
            yield (
                "privacy accounts for rounds in which every client sends once, but under "
                "async_buffer a fast client sends several times: set --privacy off or "
                "--async-buffer 0."
            )
        if self.selection != "uniform":
            yield (
                "power-of-choice compares the losses of all candidates, but under async_buffer "
                "some are training: set --selection uniform or --async-buffer 0."
            )
        if self.algorithm.num_resums:
            yield (
                f"{algorithm_name(self.algorithm)} asks the clients of a round again, but under "
                "async_buffer they have gone on by then: choose another rule for the mean, or set "
                "--async-buffer 0."
            )
        for name, layer in named_layers(self.algorithm):
            if layer.needs_mean:
                yield (
                    f"{name} steps the further the longer the updates are, but staleness shortens "
                    "only their mean: choose another server rule, or set --async-buffer 0."
                )
        count = self.clients_per_round(self.clients)
        if self.clients and self.async_buffer > count:
            yield (
                f"async_buffer is {self.async_buffer}, but only {count} clients train at the same "
                f"time: set --async-buffer to at most {count}, or raise --participation."
            )

    def _read_devices(self) -> tuple[list[DeviceType], list[str]]:
        """Parse the device types and check their generators."""
        device_types, faults = read_device_types(
            self.devices,
            self.num_clients,
            named_layers(self.algorithm),
            settings.settings(Experiment),
        )
        base = self.algorithm.generator_config
        has_given_generator = base.kind == "custom" or bool(self.pretrained_generator)
        for device in device_types:
            config = device.adapt(self.algorithm).generator_config
            if has_given_generator and (
                config.kind not in ("none", base.kind) or config.noise_size != base.noise_size
            ):
                faults.append(
                    f"devices, {device.name}: if a generator is given, a device type uses it or "
                    "none: remove fedcog.noise, and set fedcog.generator=none or nothing."
                )
            if not has_given_generator and config.kind == "custom":
                faults.append(
                    f"devices, {device.name}: set --fedcog.generator custom for all, and none for "
                    "the others."
                )
        return device_types, faults


def _unknown_model(name: str) -> str:
    """Describe an unknown network."""
    if ".py:" in name:
        return (
            f"model '{name}' is code, which only a command line names: --model {name}. From "
            "Python pass the class, fedcog.run(..., model=YourNetwork)."
        )
    if name.endswith(".py"):
        return f"model '{name}' names no class in the file: add it, --model {name}:Name."
    return settings.unknown_name("model", name, ["auto", *MODELS, *LIBRARY_NAMES])


def free_settings() -> set[str]:
    """Return the settings of an experiment that may change when a run resumes."""
    fields = dataclasses.fields(Experiment)
    return {field.name for field in fields if not field.metadata.get("identity", True)}


def read_experiment(
    values: Mapping[str, Any],
    faults: list[str] | None = None,
    known: AlgorithmClasses = ALGORITHMS,
) -> Experiment:
    """Create an experiment from settings by name.

    Args:
        values: Settings; those of an algorithm are in a table of its name.
        faults: Problems that were already found.
        known: Algorithm classes by name.

    Returns:
        The experiment.

    Raises:
        ConfigError: If any setting is invalid; it lists all problems at once.
    """
    faults = list(faults or [])
    tables = {name: value for name, value in values.items() if name in known}
    name = values.get("algorithm", "fedavg")
    algorithm: Algorithm | None = None
    if isinstance(name, str):
        try:
            algorithm = make_algorithm(name, tables, known)
        except ConfigError as error:
            faults += error.faults
    else:
        faults.append(f"algorithm needs text such as 'fedprox+fedcog', not {name!r}.")
    for table in tables.keys() - set(str(name).split("+")):  # unused, but checked all the same
        faults += read_table(table, tables, known)[1]
    own_values = {key: value for key, value in values.items() if key not in {"algorithm", *tables}}
    for table in [name for name, value in own_values.items() if isinstance(value, Mapping)]:
        if table not in settings.settings(Experiment):
            del own_values[table]
            faults.append(settings.unknown_name("table", table, known))
    valid, problems = settings.read(Experiment, own_values)
    faults += problems
    try:
        experiment = Experiment(algorithm=algorithm or Algorithm(), **valid)
    except ConfigError as error:
        raise ConfigError(faults + error.faults) from None
    if faults:
        raise ConfigError(faults)
    return experiment


def read_recorded(values: Mapping[str, Any], known: AlgorithmClasses = ALGORITHMS) -> Experiment:
    """Create the experiment of a run's record; unknown algorithms become placeholders.

    Args:
        values: The recorded settings.
        known: Algorithm classes by name.

    Returns:
        The experiment.

    Raises:
        ConfigError: If any setting is invalid.
    """
    parts = str(values.get("algorithm")).split("+")
    unknown = {part for part in parts if part not in known}
    if not unknown:
        return read_experiment(values, known=known)
    ignored = {"algorithm", "devices", *unknown, *known}
    experiment = read_experiment(
        {key: value for key, value in values.items() if key not in ignored}
    )
    return dataclasses.replace(
        experiment,
        algorithm=make_recorded_algorithm(values, known),
        devices=str(values.get("devices", "")),
    )
