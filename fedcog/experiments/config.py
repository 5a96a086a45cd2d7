"""An experiment as one dataclass, to and from TOML."""

import dataclasses
import hashlib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fedcog import data, settings
from fedcog.algorithms import ALGORITHMS, Algorithm, FedCOG, HeteroFL, Wrapper
from fedcog.data import borrowed
from fedcog.data.rules import Rule
from fedcog.data.shifts import Shift
from fedcog.experiments import devices
from fedcog.federation.devices import Device
from fedcog.models import MODELS
from fedcog.optimiser import Kind
from fedcog.settings import ConfigError, setting

Ours = Literal["iid", "dirichlet", "label-skew", "label-quantity", "quantity", "natural", "given"]
Flower = Literal[
    "flwr-dirichlet",
    "flwr-inner-dirichlet",
    "flwr-pathological",
    "flwr-shard",
    "flwr-iid",
    "flwr-linear",
    "flwr-square",
    "flwr-exponential",
]
Partition = Literal[Ours, Flower]
"""The ways to share examples out: ours, and those that are flwr-datasets'."""


@dataclass(frozen=True)
class Recorded(Algorithm):
    """An algorithm of somebody's own, as its record tells of it: a name and settings, but no rule to run."""

    name: str = ""
    own: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class RecordedWrapper(Wrapper):
    """The same of a wrapper of somebody's own."""

    name: str = ""
    own: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Experiment:
    """Everything that decides what a run computes. Defaults are the paper's."""

    algorithm: Algorithm = dataclasses.field(default_factory=Algorithm)

    dataset: str = setting("digits", "data set: see `fedcog list`")
    data_dir: str = setting("", "folder with the data sets (else $FEDCOG_DATA, else ~/.cache/fedcog)", identity=False)
    partition: Partition = setting(
        "dirichlet", "how the training set is shared out among clients; fedcog list partitions"
    )
    clients: int = setting(10, "number of clients", ">= 1")
    beta: float = setting(0.1, "dirichlet, quantity, label-quantity: concentration; small is very unequal", "> 0")
    balance: bool = setting(True, "dirichlet: a client holding its even share gets no more of the next class")
    classes_per_client: int = setting(2, "label-skew, label-quantity: classes each client holds, at most", ">= 1")
    min_examples: int = setting(10, "examples that every client must hold at least", ">= 1")
    partition_args: str = setting(
        "", "flwr-shard, flwr-pathological: more arguments of theirs, such as 'shard_size=50'"
    )
    partition_seed: int = setting(-1, "seed of the partition; -1: the same as --seed", ">= -1")
    shift: Shift = setting("none", "what sets clients' inputs apart: each has its own angle, noise or tint")
    shift_strength: float = setting(0.5, "how far: a share of half a turn, or of the range of values", ">= 0", "<= 1")
    label_noise: float = setting(0.0, "chance of each of a client's labels to be wrong", ">= 0", "<= 1")
    validation: float = setting(0.0, "share of each client's training data held out for validation", ">= 0", "< 1")
    augment: Literal["auto", "on", "off"] = setting("auto", "random crop and flip in training; auto: as the data set")

    model: str = setting("auto", "network: see `fedcog list`; auto: the paper's for the data set")
    pretrained: str = setting("", "safetensors file with the weights that the network begins with")
    pretrained_generator: str = setting("", "safetensors file with the weights that FedCOG's generator begins with")
    rounds: int = setting(70, "communication rounds", ">= 1", identity=False)
    participation: float = setting(1.0, "share of the clients that takes part in a round", "> 0", "<= 1")
    selection: Literal["uniform", "power-of-choice"] = setting("uniform", "how the clients of a round are chosen")
    candidates: int = setting(0, "power-of-choice: clients asked for their loss; 0: twice those that take part", ">= 0")
    choice_loss: Literal["all", "batch"] = setting("all", "power-of-choice: loss over all examples, or over one batch")
    weights: Literal["auto", "examples", "uniform"] = setting(
        "auto", "clients count by their examples, or alike; auto: alike under power-of-choice alone"
    )
    weight_cap: int = setting(0, "examples beyond which a client weighs no more; 0: the largest client's", ">= 0")
    devices: str = setting("", "kinds of devices: 'phone: clients=6 local_steps=50; server: clients=4' and so on")

    local_steps: int = setting(400, "local steps per round", ">= 1")
    local_epochs: float = setting(0.0, "local epochs per round, in place of steps where above 0", ">= 0")
    batch_size: int = setting(64, "examples in a batch, real and generated alike", ">= 1")
    optimizer: Kind = setting("sgd", "local optimiser, started afresh each round")
    lr: float = setting(0.01, "local learning rate", "> 0")
    momentum: float = setting(0.9, "sgd: momentum", ">= 0", "< 1")
    weight_decay: float = setting(1e-5, "weight decay", ">= 0")
    lr_decay: float = setting(1.0, "factor on the learning rate after every round", "> 0", "<= 1")
    grad_clip: float = setting(0.0, "limit on the length of a client's gradient; 0: none", ">= 0")

    seed: int = setting(0, "seed of everything random", ">= 0")
    on_divergence: Literal["stop", "skip"] = setting(
        "stop", "when a client's update is not finite: stop, or leave that client out of the round", identity=False
    )
    evaluate_every: int = setting(1, "rounds between evaluations; the last is always evaluated", ">= 1")
    evaluate_local: bool = setting(True, "evaluate the clients' local models too")
    evaluate_test: bool = setting(True, "evaluate on the test set; if not, on what is held out for validation alone")
    checkpoint_every: int = setting(
        1, "rounds between checkpoints; those of a gigabyte and more are written more seldom", ">= 1", identity=False
    )
    device: str = setting("auto", "where to compute: auto, cpu, cuda, cuda:1, ...", identity=False)
    mapping: Literal["auto", "loop", "vmap", "graph"] = setting(
        "auto",
        "clients one after another, together, or as recorded CUDA graphs; auto: graph on a GPU, else what is faster",
        identity=False,
    )
    backend: Literal["simulator", "flower"] = setting(
        "simulator", "who plays the clients: this simulator, or nodes of Flower's simulation engine", identity=False
    )
    secure_aggregation: bool = setting(
        False, "on Flower: clients mask what they send (SecAgg+), so that the server learns nothing but the sum"
    )
    secure_scale: float = setting(
        1.0, "secure aggregation: factor on the largest numbers that algorithms declare to send", "> 0"
    )
    privacy: Literal["off", "central", "local"] = setting(
        "off", "differential privacy of a client: noise on the sum, or on what each client sends"
    )
    dp_clip: float = setting(1.0, "privacy: length to which all that a client sends is scaled down", "> 0")
    dp_noise: float = setting(1.0, "privacy: standard deviation of the noise, in clips", ">= 0")
    dp_delta: float = setting(1e-5, "privacy: the delta that epsilon is told for", "> 0", "< 1")
    precision: Literal["float32", "bfloat16", "float64"] = setting(
        "float32", "of parameters and arithmetic; bfloat16: products only, the rest in float32"
    )
    tf32: bool = setting(False, "GPU: make float32 products in TF32, which is faster and has 10 bits of fraction")
    threads: int = setting(
        0, "CPU threads, of all workers together; 0: as torch chooses", ">= 0", "<= 1024", identity=False
    )
    workers: int = setting(
        0, "CPU: processes that train clients side by side; 0: as many as pay", ">= 0", "<= 1024", identity=False
    )

    def __post_init__(self) -> None:
        """Refuse what cannot work, all faults at once."""
        values = {name: getattr(self, name) for name in settings.settings(Experiment)}
        faults = settings.read(Experiment, values)[1]
        for name, layer in layers(self.algorithm):
            if not isinstance(layer, Algorithm):
                faults.append(
                    f"{layer!r} is no Algorithm: give FedCOG(FedProx()), say, or make_algorithm('fedprox+fedcog')."
                )
                continue
            if not isinstance(layer, Recorded | RecordedWrapper):
                faults += [f"{name}: {trouble}" for trouble in settings.unsound(type(layer), besides={"inner"})]
                faults += settings.read(type(layer), own_settings(layer), f"{name}.")[1]
        for name, layer in layers(self.algorithm):
            if getattr(layer, "needs_sgd", False) and self.optimizer != "sgd":
                faults.append(
                    f"{name} reads the mean gradient off the way it went, which steps of {self.optimizer} do not "
                    "show: set --optimizer sgd, or choose another algorithm."
                )
        if self.pretrained_generator and generating(self.algorithm).generator == "none":
            faults.append("pretrained_generator is for FedCOG with a generator: set --fedcog.generator conv.")
        try:
            borrowed.arguments(str(self.partition), str(self.partition_args))
        except ValueError as error:
            faults.append(f"partition_args: {error}.")
        if not self.evaluate_test and (self.evaluate_local or not self.validation):
            faults.append(
                "without the test set there are the examples held out for validation, and clients' local models are "
                "not tried on those: set --validation 0.2, say, and --no-evaluate-local."
            )
        if self.privacy != "off":
            faults += self._bars_to_privacy()
        named = [name for name, _ in layers(self.algorithm)]
        for name in {name for name in named if named.count(name) > 1}:
            faults.append(f"{name} goes around itself: name each algorithm once.")
        if self.dataset != "custom" and self.dataset not in data.SOURCES:
            faults.append(settings.unknown("data set", self.dataset, data.SOURCES))
        if self.model not in ("auto", "custom", *MODELS):
            faults.append(settings.unknown("model", self.model, ["auto", *MODELS]))
        unknown = any(isinstance(layer, Recorded | RecordedWrapper) for _, layer in layers(self.algorithm))
        if not faults and not unknown:
            faults += self._kinds()[1]
        if faults:
            raise ConfigError(faults)

    def _kinds(self) -> tuple[list[Device], list[str]]:
        found, faults = devices.read(self.devices, self.clients, layers(self.algorithm), settings.settings(Experiment))
        base = generating(self.algorithm)
        given = base.generator == "custom" or self.pretrained_generator
        for device in found:
            own = device.changes.get(FedCOG, {})
            if given and (own.get("generator", "none") not in ("none", base.generator) or "noise" in own):
                faults.append(
                    f"devices, {device.name}: where a generator is given, a kind has that one or none: leave "
                    "fedcog.noise out, and set fedcog.generator=none or nothing."
                )
            if not given and own.get("generator") == "custom":
                faults.append(f"devices, {device.name}: set --fedcog.generator custom for all, and none for others.")
        return found, faults

    @property
    def kinds(self) -> list[Device]:
        """The kinds of devices that its clients have, first those of the first clients; none, if all are alike."""
        return self._kinds()[0]

    def _bars_to_privacy(self) -> Iterator[str]:
        """What a client would tell beside its clipped and noisy payload."""
        if self.algorithm.uplink != "sum":
            yield (
                f"{name_of(self.algorithm)} needs what every client sends apart, and privacy is that of a sum: choose "
                "an algorithm whose uplink is a sum (fedcog list algorithms)."
            )
        if self.selection != "uniform":
            yield "power-of-choice needs every client's loss in clear, which privacy forbids: set --selection uniform."
        if any(isinstance(layer, HeteroFL) for _, layer in layers(self.algorithm)):
            yield "heterofl sends who has what, which privacy would clip and blur: choose another algorithm."
        if self.weights == "examples":
            yield "with privacy every client counts as one, or its size would be told: set --weights auto."

    def to_dict(self) -> dict[str, Any]:
        """All settings, an algorithm's own in a table of its name."""
        values: dict[str, Any] = {"algorithm": name_of(self.algorithm)}
        values |= {name: getattr(self, name) for name in settings.settings(Experiment)}
        for name, layer in layers(self.algorithm):
            if own := own_settings(layer):
                values[name] = own
        return values

    def to_toml(self) -> str:
        """All settings as a TOML file that `read_toml` reads."""
        values = self.to_dict()
        lines = [f"{key} = {toml(value)}" for key, value in values.items() if not isinstance(value, dict)]
        for name, table in values.items():
            if isinstance(table, dict):
                lines += ["", f"[{_key(name)}]", *(f"{_key(key)} = {toml(value)}" for key, value in table.items())]
        return "\n".join(lines) + "\n"

    @property
    def rule(self) -> Rule:
        """The settings that its partition goes by."""
        return Rule(
            self.clients, self.beta, self.balance, self.classes_per_client, self.min_examples, self.partition_args
        )

    @property
    def partition_rule(self) -> str:
        """How examples are shared out, in words."""
        if self.partition in borrowed.BORROWED:
            return borrowed.in_words(self.partition, self.rule)
        beta, classes = f"beta {self.beta:g}", f"{self.classes_per_client} classes each"
        more = {"dirichlet": [beta], "quantity": [beta], "label-skew": [classes], "label-quantity": [classes, beta]}
        return ", ".join([self.partition, *more.get(self.partition, [])])

    def telling(self) -> dict[str, Any]:
        """The settings that decide the results, an algorithm's own in a table of its name."""
        free = {field.name for field in dataclasses.fields(self) if not field.metadata.get("identity", True)}
        return {name: value for name, value in self.to_dict().items() if name not in free}

    @property
    def identity(self) -> str:
        """A digest of what decides the results; runs of equal identity may continue each other."""
        return hashlib.sha256(json.dumps(self.telling(), sort_keys=True).encode()).hexdigest()[:16]


def _key(name: str) -> str:
    """A name in TOML: bare where it may be."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else toml(name)


def toml(value: Any) -> str:
    """A value in TOML, which JSON is but for one character."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def layers(algorithm: Algorithm) -> list[tuple[str, Algorithm]]:
    """An algorithm and those inside it, outermost first, each with its name."""
    names = {cls: name for name, cls in ALGORITHMS.items()}
    name = names.get(type(algorithm), type(algorithm).__name__)
    if isinstance(algorithm, Recorded | RecordedWrapper):
        name = algorithm.name
    inside = layers(algorithm.inner) if isinstance(algorithm, Wrapper) else []
    return [(name, algorithm), *inside]


def generating(algorithm: Algorithm) -> FedCOG:
    """The layer that generates inputs; where there is none, one that has no generator."""
    return next((layer for _, layer in layers(algorithm) if isinstance(layer, FedCOG)), FedCOG())


def own_settings(layer: Algorithm) -> dict[str, Any]:
    """The settings of one layer, by name."""
    if isinstance(layer, Recorded | RecordedWrapper):
        return dict(layer.own)
    known = settings.settings(type(layer))
    values = {key: getattr(layer, key) for key in known}  # a whole number will do for a float, but is recorded as one
    whole = {key for key, value in values.items() if known[key].type is float and type(value) is int}
    return {key: float(value) if key in whole else value for key, value in values.items()}


def name_of(algorithm: Algorithm) -> str:
    """The name of a composed algorithm, base first, as in the paper: fedprox+fedcog."""
    return "+".join(reversed([name for name, _ in layers(algorithm)]))


def make_algorithm(
    name: str, tables: Mapping[str, Any] | None = None, known: Mapping[str, type[Algorithm]] = ALGORITHMS
) -> Algorithm:
    """The algorithm called `name`, such as fedprox+fedcog: a base, then what is wrapped around it.

    `tables` holds settings by algorithm, `known` the classes by name. A wrapper's name alone goes around FedAvg.
    """
    tables, faults = tables or {}, list[str]()
    algorithm: Algorithm | None = None
    for part in name.split("+"):
        cls = known.get(part)
        if cls is None:
            faults.append(
                f"algorithm '{part}': nothing that a settings file names is run; name the file on the command line, "
                f"--algorithm {part}."
                if ".py:" in part
                else f"algorithm '{part}': say which class of the file it is, {part}:Class."
                if part.endswith(".py")
                else settings.unknown("algorithm", part, known)
            )
            continue
        own, trouble = _read_table(part, tables, known)
        faults += trouble
        if issubclass(cls, Wrapper):
            algorithm = cls(inner=algorithm or Algorithm(), **own)
        elif algorithm is None:
            algorithm = cls(**own)
        else:
            faults.append(
                f"algorithm '{name}': '{part}' is not a wrapper, so it comes first; wrappers are "
                f"{', '.join(key for key, one in known.items() if issubclass(one, Wrapper))}."
            )
    if faults or algorithm is None:
        raise ConfigError(faults)
    return algorithm


def _read_table(
    name: str, tables: Mapping[str, Any], known: Mapping[str, type[Algorithm]]
) -> tuple[dict[str, Any], list[str]]:
    table = tables.get(name, {})
    if not isinstance(table, Mapping):
        return {}, [f"'{name}' holds the settings of an algorithm; write {name}.SETTING, or a table [{name}]."]
    return settings.read(known[name], table, f"{name}.")


def read_recorded(values: Mapping[str, Any], known: Mapping[str, type[Algorithm]] = ALGORITHMS) -> Experiment:
    """The experiment in a run's record: like `read_experiment`, but algorithms that are unknown here are let stand."""
    strangers = {part for part in str(values.get("algorithm")).split("+") if part not in known}
    if not strangers:
        return read_experiment(values, known=known)
    plain = {k: v for k, v in values.items() if k not in {"algorithm", "devices", *strangers, *known}}
    experiment = read_experiment(plain)
    algorithm = Algorithm()
    for place, part in enumerate(str(values["algorithm"]).split("+")):
        table = values.get(part, {})
        own = tuple(table.items()) if isinstance(table, Mapping) else ()
        if part in known:
            inside: dict[str, Any] = {"inner": algorithm} if issubclass(known[part], Wrapper) else {}
            algorithm = known[part](**inside, **_read_table(part, values, known)[0])
        else:
            algorithm = RecordedWrapper(algorithm, part, own) if place else Recorded(part, own)
    return dataclasses.replace(experiment, algorithm=algorithm, devices=str(values.get("devices", "")))


def read_experiment(
    values: Mapping[str, Any],
    faults: list[str] | None = None,
    known: Mapping[str, type[Algorithm]] = ALGORITHMS,
) -> Experiment:
    """The experiment that settings by name describe; every fault at once, after those already found."""
    faults = list(faults or [])
    tables = {name: value for name, value in values.items() if name in known}
    name = values.get("algorithm", "fedavg")
    algorithm: Algorithm | None = None
    try:
        algorithm = make_algorithm(name, tables, known) if isinstance(name, str) else None
        if algorithm is None:
            faults.append(f"algorithm needs text, such as 'fedprox+fedcog', not {name!r}.")
    except ConfigError as error:
        faults += error.faults
    for table in tables.keys() - set(str(name).split("+")):  # of no use here, but not to be wrong either
        faults += _read_table(table, tables, known)[1]
    good, trouble = settings.read(Experiment, {k: v for k, v in values.items() if k not in {"algorithm", *tables}})
    faults += trouble
    try:
        experiment = Experiment(algorithm=algorithm or Algorithm(), **good)
    except ConfigError as error:
        raise ConfigError(faults + error.faults) from None
    if faults:
        raise ConfigError(faults)
    return experiment


def read_toml(path: str | Path) -> dict[str, Any]:
    """The settings in a TOML file, not yet checked."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError([f"cannot read {path}: {error.strerror or error}."]) from error
    except (ValueError, RecursionError) as error:  # what tomllib raises, and what it lets through
        raise ConfigError([f"{path} is not a TOML file: {error}."]) from error
