"""An experiment made ready: its data shared out, its network built, its device found."""

import contextlib
import functools
import hashlib
import importlib.util
import multiprocessing
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fedcog.data import DataError, Dataset, FederatedData, partition, shifts, sources
from fedcog.experiments.config import Experiment, Recorded, RecordedWrapper, generating, layers, name_of
from fedcog.experiments.own import known_by, own_code
from fedcog.experiments.pretrained import pretrained, ready_generator
from fedcog.federation import evaluate, graphs
from fedcog.federation.cohort import Cohort, Mapping
from fedcog.federation.privacy import Privacy
from fedcog.federation.rounds import Schedule, round_half_up
from fedcog.federation.selection import PowerOfChoice, Selection, Uniform
from fedcog.federation.simulation import Simulation
from fedcog.fitness import TOKENS
from fedcog.models import Model, build
from fedcog.optimiser import Optimiser
from fedcog.settings import ConfigError
from fedcog.task import Measure, task_of
from fedcog.tree import Params, State

SHORT = 10**7
"""Floating-point operations of a client's forward passes in a round, up to which the round counts as short."""


class Prepared:
    """An experiment with its data and network in place, ready for round 1.

    `data`, `module` and `generator` are your own. In a real federation clients are `remote`, and most of their data
    elsewhere: `held` says which examples are whose of those that are here.
    """

    def __init__(
        self,
        experiment: Experiment,
        data: Dataset | None = None,
        module: nn.Module | None = None,
        generator: nn.Module | None = None,
        held: dict[int, Tensor] | None = None,
        remote: bool = False,
    ) -> None:
        self.experiment = experiment
        self.device = find_device(experiment.device)
        if experiment.mapping == "graph" and self.device.type != "cuda":
            raise ConfigError(
                [f"mapping 'graph' records CUDA graphs, and this would run on '{self.device}': set --mapping auto."]
            )
        if self.device.type == "cuda" and experiment.mapping in ("auto", "graph"):
            graphs.get_ready()
        if faults := check_runnable(experiment):
            raise ConfigError(faults)
        if (data is None and experiment.dataset == "custom") or (module is None and experiment.model == "custom"):
            raise ConfigError(
                ["this run has data or a network of your own: continue it from Python, fedcog.run(..., resume=True)."]
            )
        self.dataset = data if data is not None else sources.load(experiment.dataset, experiment.data_dir or None)
        nothing = torch.empty(0, dtype=torch.int64)
        self.indices = (
            share_out(experiment, self.dataset)
            if held is None
            else [held.get(client, nothing) for client in range(experiment.clients)]
        )
        self.dataset = altered(experiment, self.dataset, self.indices)
        dtype = getattr(torch, experiment.precision)
        stored = torch.float32 if dtype == torch.bfloat16 else dtype
        augment = {"auto": self.dataset.augment, "on": True, "off": False}[experiment.augment]
        if augment and not (self.dataset.train_x.dim() == 4 and self.dataset.train_x.dtype == torch.uint8):
            raise ConfigError(["augment is on, but only images (uint8) can be cropped and flipped: set --augment off."])
        self.data = FederatedData(
            self.dataset,
            self.indices,
            seed=experiment.seed,
            validation=experiment.validation,
            augment=augment,
            device=self.device,
            dtype=stored,
        )
        if not (experiment.evaluate_test or remote or len(self.data.validation)):
            raise ConfigError(
                [f"no client has examples enough to hold one out: raise --validation above {experiment.validation:g}."]
            )
        shape, classes = self.dataset.input_shape, len(self.dataset.classes)
        self.model_name = "custom" if module is not None else model_name(experiment, shape)
        if module is None:
            module = build(self.model_name, shape, classes, experiment.seed)
        self.network = known_by(module)
        if experiment.pretrained:
            module, digest = pretrained(module, experiment.pretrained, classes)
            self.network += digest
        maker = self._generator(generator)
        self.model = Model(module, shape, classes, experiment.batch_size, maker).to(self.device, dtype)
        self.task = task_of(classes, self.dataset.several)
        if self.dataset.several and (single := _single(experiment)):
            raise ConfigError(single)
        mapping, threads = self._mapping()
        self.privacy = privacy(experiment, self.data.clients, simulated=not remote)
        if self.privacy and importlib.util.find_spec("dp_accounting") is None:
            raise ConfigError(["privacy needs an accountant: pip install 'fedcog[privacy]'."])
        cohort = Cohort(
            self.model,
            self.task,
            self.data,
            Optimiser(experiment.optimizer, experiment.momentum, experiment.weight_decay),
            batch_size=experiment.batch_size,
            grad_clip=experiment.grad_clip,
            mapping=mapping,
            workers=workers(experiment.workers) if self.device.type == "cpu" else 1,
            threads=threads,
            privacy=self.privacy,
        )
        self.backend = Simulation(
            cohort,
            local_steps=experiment.local_steps,
            local_epochs=experiment.local_epochs,
            weight_cap=experiment.weight_cap,
            weights=("uniform" if self.privacy or experiment.selection == "power-of-choice" else "examples")
            if experiment.weights == "auto"
            else experiment.weights,
            skip_diverged=experiment.on_divergence == "skip",
            devices=experiment.kinds,
        )
        self.schedule = Schedule(
            rounds=experiment.rounds,
            selection=selection(experiment, self.data.sizes.tolist()),
            lr=experiment.lr,
            lr_decay=experiment.lr_decay,
            evaluate_every=experiment.evaluate_every,
            evaluate_local=experiment.evaluate_local,
        )
        if self.model.head is None and any(layer.needs_head for _, layer in layers(experiment.algorithm)):
            wanting = ", ".join(name for name, layer in layers(experiment.algorithm) if layer.needs_head)
            raise ConfigError(
                [
                    f"{wanting} looks at features, and this network has none to tell: its outputs must be those of one "
                    "nn.Linear, called once and last, whose weights are its own. Change the network, or the algorithm."
                ]
            )
        wanting = ", ".join(name for name, layer in layers(experiment.algorithm) if layer.optimises_inputs)
        if wanting and not self.model.smooth:
            raise ConfigError(
                [
                    f"{wanting} optimises inputs, and this network's outputs have no gradient with respect to its own. "
                    f"{TOKENS} Or choose another algorithm."
                ]
            )
        self.server = self.backend.begin(experiment.algorithm)

    def _generator(self, own: nn.Module | None) -> nn.Module | None:
        """The network that makes inputs, where it does not begin afresh."""
        experiment, cog = self.experiment, generating(self.experiment.algorithm)
        if own is not None and cog.generator != "custom":
            raise ConfigError(["a generator of your own is for FedCOG(generator='custom'): say so, or give none."])
        found, name = ready_generator(cog, own, experiment.pretrained_generator, self.dataset.input_shape)
        self.network += name
        return found

    def _mapping(self) -> tuple[Mapping, int]:
        """How clients are trained, and on how many threads (0: as many as there are), where the experiment leaves it.

        On a CPU one after another, but for rounds so short that handing out clients would cost more than training them:
        those go together, on one thread, if network and algorithms are ours and so known to be mappable.
        """
        experiment = self.experiment
        if experiment.mapping != "auto":
            return experiment.mapping, 0
        if self.device.type == "cuda":
            return "graph", 0
        steps = experiment.local_steps
        if experiment.local_epochs:
            steps = int(experiment.local_epochs * int(self.data.sizes.max()) / experiment.batch_size) + 1
        ours = all(type(layer).__module__.startswith("fedcog.") for _, layer in layers(experiment.algorithm))
        if not ours or "custom" in (self.model_name, generating(experiment.algorithm).generator):
            return "loop", 0
        return ("vmap", 1) if self.model.cost * experiment.batch_size * steps <= SHORT else ("loop", 0)

    @property
    def measure(self) -> Measure:
        """What its models are judged by first."""
        return self.task.measure

    def hits(self, server: State) -> Params:
        """How the server's model does by class, on the test set and on what is held out for validation; its marks."""
        data, weights = self.data, self.experiment.algorithm.server_model(server)
        sets = {"test": (data.test_x, data.test_y)} if self.experiment.evaluate_test else {}
        if len(data.validation):
            held_out = data.validation.to(data.train_x.device)
            sets["validation"] = data.train_x[held_out], data.train_y[data.validation]
        marks: Params = {}
        if self.dataset.several and "test" in sets:  # whose marks need all outputs at once
            x, y = sets.pop("test")
            logits = evaluate.outputs(self.model, data, weights, x)
            marks = {"test": self.task.hits(logits, y)} | self.task.marks(logits, y)
        found = {name: evaluate.hits(self.model, self.task, data, weights, x, y) for name, (x, y) in sets.items()}
        return found | marks

    def scores(self, hits: Params) -> dict[str, float]:
        """Its scores on the test set, and on the held-out validation examples where there are any."""
        found = {name: float(value) for name, value in hits.items() if name not in ("test", "validation")}
        if "test" in hits:
            found[self.measure] = self.task.score(hits["test"], self.backend.totals)
        if "validation" in hits:
            totals = self.task.counts(self.data.train_y[self.data.validation]).cpu()
            found[f"validation_{self.measure}"] = self.task.score(hits["validation"], totals)
        return found

    @functools.cached_property
    def about(self) -> dict[str, Any]:
        """What a checkpoint belongs to."""
        return {
            "experiment": self.experiment.identity,
            "data": self._fingerprint(),
            "model": self.model_name,
            "network": hashlib.sha256(self.network.encode()).hexdigest()[:16],
            "code": hashlib.sha256(self._code().encode()).hexdigest()[:16],
            "input_shape": list(self.model.input_shape),
            "classes": self.model.classes,
        }

    def federation(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Examples per client and class, a few real pictures of each class, and their names."""
        tensors = {"counts": self.backend.counts}
        if self.dataset.train_x.dtype == torch.uint8 and self.dataset.train_x.dim() == 4:
            labels = self.dataset.train_y
            rows = labels.T if self.dataset.several else (labels == label for label in range(self.model.classes))
            of_class = [torch.nonzero(row)[:8, 0] for row in rows]
            tensors["real_images"] = self.dataset.train_x[torch.cat(of_class)]
            tensors["real_labels"] = torch.cat([torch.full_like(own, label) for label, own in enumerate(of_class)])
        return tensors, {
            "dataset": self.dataset.name,
            "classes": list(self.dataset.classes),
            "several": self.dataset.several,
            "mean": list(self.dataset.mean),
            "std": list(self.dataset.std),
            "test_examples": len(self.dataset.test_y),
            "parameters": sum(value.numel() for value in self.model.params.values()),
            "model": self.model_name,
        }

    def shown(self, exhibit: dict[str, Tensor]) -> dict[str, Tensor]:
        """What a report should show, with inputs as pictures again."""
        return {name: self.data.pictures(value) if name == "images" else value for name, value in exhibit.items()}

    def _code(self) -> str:
        return own_code(type(layer) for _, layer in layers(self.experiment.algorithm))

    def _fingerprint(self) -> str:
        digest = hashlib.sha256(self.dataset.fingerprint.encode())
        for part in self.indices:
            digest.update(f"{part.dtype} {list(part.shape)}".encode())
            digest.update(part.contiguous().numpy().data)
        return digest.hexdigest()[:16]


def share_out(experiment: Experiment, dataset: Dataset) -> list[Tensor]:
    """Every client's examples: as given with the data, or as the experiment's partition says."""
    if experiment.partition == "given":
        if dataset.indices is None:
            raise ConfigError(["partition 'given' is for your own data with `indices` per client: choose another."])
        return list(dataset.indices)
    users = None if dataset.users is None else dataset.users.numpy()
    shares = partition.split(experiment.partition, dataset.train_y.numpy(), users, experiment.rule, _seed(experiment))
    return [torch.from_numpy(share) for share in shares]


def altered(experiment: Experiment, dataset: Dataset, shares: list[Tensor]) -> Dataset:
    """The data as the clients have it: shifted, with wrong labels, if the experiment says so."""
    how = experiment.shift, experiment.shift_strength, experiment.label_noise
    return shifts.shifted(dataset, shares, *how, _seed(experiment))


def _seed(experiment: Experiment) -> int:
    """Of who holds what."""
    return experiment.seed if experiment.partition_seed < 0 else experiment.partition_seed


def selection(experiment: Experiment, sizes: list[int]) -> Selection:
    """How the clients of a round are chosen, given how many examples each holds."""
    count = max(1, round_half_up(experiment.participation * len(sizes)))
    if experiment.selection == "uniform":
        return Uniform(len(sizes), count, experiment.seed)
    pool = experiment.candidates or min(2 * count, len(sizes))
    if not count <= pool <= len(sizes):
        raise ConfigError(
            [
                f"candidates needs a number from {count} (the clients of a round) to {len(sizes)} (all there are), "
                f"not {pool}."
            ]
        )
    return PowerOfChoice(tuple(sizes), count, pool, experiment.seed, experiment.choice_loss)


def privacy(experiment: Experiment, clients: int, simulated: bool) -> Privacy | None:
    """What protects so many clients, if anything."""
    if experiment.privacy == "off":
        return None
    return Privacy(
        experiment.privacy,
        clip=experiment.dp_clip,
        noise=experiment.dp_noise,
        delta=experiment.dp_delta,
        clients=clients,
        count=max(1, round_half_up(experiment.participation * clients)),
        seed=experiment.seed,
        simulated=simulated,
    )


def model_name(experiment: Experiment, shape: tuple[int, ...]) -> str:
    """The network's name; `auto` is the paper's for the data set, and for others what fits the shape."""
    if experiment.model != "auto":
        return experiment.model
    known = {"digits": "small", "fashion-mnist": "cnn", "cifar10": "cnn", "cifar100": "cnn3"}
    known |= {"digit-mosaics": "small", "mosaics": "resnet18", "flair": "resnet18"}
    return known.get(experiment.dataset, "cnn" if len(shape) == 3 and min(shape[1:]) >= 16 else "mlp")


def find_device(name: str) -> torch.device:
    """The device called `name`; never another one in its place."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
        if device.type not in ("cpu", "cuda", "mps"):
            raise RuntimeError("nothing can be trained there")
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError([f"device '{name}' cannot be used here ({reason}): choose --device auto or cpu."]) from error
    return device


def stacked(experiment: Experiment) -> bool:
    """Do several seeds train as one? On a GPU, where ten clients leave most of it idle, if their data are the same."""
    if experiment.shift != "none" or experiment.label_noise:
        return False
    return find_device(experiment.device).type == "cuda" and experiment.mapping in ("auto", "graph")


def workers(wanted: int) -> int:
    """How many processes train clients side by side on a CPU; 0: one for each thread that has a core, where it is safe.

    It is not outside Linux, whose forks alone keep their system libraries; nor where torch sees a GPU, since autograd
    then has threads that a fork leaves behind. In a pool of somebody's own the cores are shared out already.
    """
    barred = sys.platform != "linux" or multiprocessing.current_process().daemon
    if wanted > 1 and barred:
        raise ConfigError(["workers are forks of this process, which here may have none: set --workers 1."])
    if wanted or barred or torch.accelerator.is_available():
        return wanted or 1
    return min(torch.get_num_threads(), len(os.sched_getaffinity(0)))


def check_runnable(experiment: Experiment) -> list[str]:
    """What stands in the way of a run read from a record: algorithms that are only names here."""
    strangers = [name for name, layer in layers(experiment.algorithm) if isinstance(layer, Recorded | RecordedWrapper)]
    parts = [f"FILE.py:{part}" if part in strangers else part for part in name_of(experiment.algorithm).split("+")]
    return [
        f"{name} is an algorithm of your own: say where it is, --algorithm {'+'.join(parts)}, or continue it from "
        "Python, fedcog.run(...)."
        for name in strangers[:1]
    ]


def _single(experiment: Experiment) -> list[str]:
    """Why its algorithms cannot do with examples of several labels."""
    whys = [layer.one_label for _, layer in layers(experiment.algorithm) if layer.one_label]
    return [f"{why} Choose another algorithm for examples of several labels." for why in whys]


def check_ready(experiment: Experiment) -> list[str]:
    """What stands in the way of a run outside its settings: missing data, labels of another kind, an absent device."""
    faults = []
    if experiment.dataset in sources.SOURCES and sources.SOURCES[experiment.dataset].several:
        faults += _single(experiment)
    try:
        find_device(experiment.device)
    except ConfigError as error:
        faults += error.faults
    if (
        experiment.dataset in sources.SOURCES
        and sources.locate(experiment.dataset, experiment.data_dir or None) is None
    ):
        try:
            sources.load(experiment.dataset, experiment.data_dir or None)
        except DataError as error:
            faults.append(str(error))
    return faults


@contextlib.contextmanager
def surroundings(threads: int, tf32: bool = False) -> Iterator[None]:
    """The torch settings a run computes under, whatever the caller's are; those are put back at the end."""
    before = torch.get_num_threads(), torch.get_default_dtype()
    products = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    try:
        torch.set_num_threads(threads or before[0])
        torch.set_default_dtype(torch.float32)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
        with torch.inference_mode(False), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            yield
    finally:
        torch.set_num_threads(before[0])
        torch.set_default_dtype(before[1])
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = products
