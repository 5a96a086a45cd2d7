"""An experiment carried out: data and model made ready, rounds run, each one written down."""

import dataclasses
import datetime
import hashlib
import json
import platform
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fedcog
from fedcog import tree
from fedcog.data import DataError, Dataset, FederatedData, partition, sources
from fedcog.data.partition import Rule
from fedcog.experiments.config import Experiment, name_of
from fedcog.experiments.record import Checkpoint, RecordError, RunDirectory
from fedcog.federation import evaluate
from fedcog.federation.cohort import Cohort
from fedcog.federation.optimiser import Optimiser
from fedcog.federation.rounds import Schedule, federate
from fedcog.federation.simulation import Simulation
from fedcog.models import Model, build
from fedcog.settings import ConfigError
from fedcog.task import SingleLabel
from fedcog.tree import State

Watch = Callable[[Experiment, dict[str, Any]], None]


class Interrupted(Exception):
    """A run that was asked to stop, and did so after a whole round."""


@dataclasses.dataclass(frozen=True)
class Run:
    """A run as it was recorded."""

    path: Path
    experiment: Experiment
    lines: list[dict[str, Any]]

    @property
    def accuracies(self) -> list[tuple[int, float]]:
        """(round, test accuracy) wherever it was measured."""
        return [(line["round"], line["accuracy"]) for line in self.lines if line.get("accuracy") is not None]

    @property
    def last(self) -> float:
        """Test accuracy after the last round."""
        return self.accuracies[-1][1]

    @property
    def best(self) -> float:
        """The highest test accuracy of any round: what papers print, and more than one can hope for."""
        return max(accuracy for _, accuracy in self.accuracies)


class Prepared:
    """An experiment with its data and network in place, ready for round 1."""

    def __init__(self, experiment: Experiment, data: Dataset | None = None, module: nn.Module | None = None) -> None:
        self.experiment = experiment
        self.device = find_device(experiment.device)
        if experiment.threads:
            torch.set_num_threads(experiment.threads)
        if (data is None and experiment.dataset == "custom") or (module is None and experiment.model == "custom"):
            raise ConfigError(
                ["this run has data or a network of your own: continue it from Python, fedcog.run(..., resume=True)."]
            )
        self.dataset = data if data is not None else sources.load(experiment.dataset, experiment.data_dir or None)
        self.indices = share_out(experiment, self.dataset)
        dtype = getattr(torch, experiment.precision)
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
            dtype=dtype,
        )
        shape, classes = self.dataset.input_shape, len(self.dataset.classes)
        self.model_name = "custom" if module is not None else model_name(experiment, shape)
        if module is None:
            module = build(self.model_name, shape, classes, experiment.seed)
        self.model = Model(module, shape, classes).to(self.device, dtype)
        self.task = SingleLabel(classes)
        cohort = Cohort(
            self.model,
            self.task,
            self.data,
            Optimiser(experiment.optimizer, experiment.momentum, experiment.weight_decay),
            batch_size=experiment.batch_size,
            grad_clip=experiment.grad_clip,
            mapping=("vmap" if self.device.type == "cuda" else "loop")
            if experiment.mapping == "auto"
            else experiment.mapping,
        )
        self.backend = Simulation(
            cohort,
            local_steps=experiment.local_steps,
            local_epochs=experiment.local_epochs,
            weight_cap=experiment.weight_cap,
        )
        self.schedule = Schedule(
            rounds=experiment.rounds,
            clients=self.data.clients,
            participation=experiment.participation,
            seed=experiment.seed,
            lr=experiment.lr,
            lr_decay=experiment.lr_decay,
            evaluate_every=experiment.evaluate_every,
            evaluate_local=experiment.evaluate_local,
        )
        self.server = experiment.algorithm.server_init(self.model.params, self.model.buffers, self.data.clients)

    def hits(self, server: State) -> Tensor:
        """Right answers of the server's model per class on the test set."""
        return self._hits(server, self.data.test_x, self.data.test_y)

    def scores(self, hits: Tensor, server: State) -> dict[str, float]:
        """Its accuracy on the test set, and on the held-out validation examples where there are any."""
        found = {"accuracy": evaluate.accuracy(hits, self.backend.totals)}
        held_out = self.data.validation
        if len(held_out):
            x, y = self.data.train_x[held_out], self.data.train_y[held_out]
            found["validation_accuracy"] = evaluate.accuracy(self._hits(server, x, y), self.task.counts(y))
        return found

    def about(self) -> dict[str, Any]:
        """What a checkpoint belongs to."""
        return {
            "experiment": self.experiment.identity,
            "data": self._fingerprint(),
            "model": self.model_name,
            "input_shape": list(self.model.input_shape),
            "classes": self.model.classes,
        }

    def federation(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Examples per client and class, a few real pictures of each class, and their names."""
        tensors = {"counts": self.backend.counts}
        if self.dataset.train_x.dtype == torch.uint8 and self.dataset.train_x.dim() == 4:
            of_class = [torch.nonzero(self.dataset.train_y == label)[:8, 0] for label in range(self.model.classes)]
            tensors["real_images"] = self.dataset.train_x[torch.cat(of_class)]
            tensors["real_labels"] = self.dataset.train_y[torch.cat(of_class)]
        return tensors, {
            "dataset": self.dataset.name,
            "classes": list(self.dataset.classes),
            "test_examples": len(self.dataset.test_y),
            "parameters": sum(value.numel() for value in self.model.params.values()),
            "model": self.model_name,
        }

    def _hits(self, server: State, x: Tensor, y: Tensor) -> Tensor:
        weights = server["params"] | server["buffers"]
        return evaluate.hits(self.model, self.task, self.data, weights, x, y, lambda function: function)

    def _fingerprint(self) -> str:
        digest = hashlib.sha256(
            json.dumps([list(self.dataset.train_x.shape), str(self.dataset.train_x.dtype)]).encode()
        )
        for part in (self.dataset.train_y, self.dataset.test_y, *self.indices):
            digest.update(part.numpy().tobytes() + b"|")
        return digest.hexdigest()[:16]


def run(
    experiment: Experiment,
    out: str | Path | None = None,
    *,
    data: Dataset | None = None,
    model: nn.Module | None = None,
    resume: bool = False,
    report: bool = True,
    watch: Watch | None = None,
    stopping: Callable[[], bool] | None = None,
    command: str | None = None,
) -> Run:
    """Carry out an experiment in the directory `out` (by default runs/DATASET-ALGORITHM-SEED).

    `data` and `model` are your own, in place of those the experiment names. With `resume` a run that lies there is
    continued after its last checkpoint; one that is finished is only read. `watch` is called with the experiment and
    every new round's line; once `stopping` says so, the run ends with `Interrupted` after a whole round.
    """
    experiment = dataclasses.replace(
        experiment,
        dataset=experiment.dataset if data is None else "custom",
        model=experiment.model if model is None else "custom",
    )
    directory = RunDirectory(out or default_out(experiment))
    with directory.locked():
        if directory.exists():
            _check_same(directory, experiment, resume)
        prepared = Prepared(experiment, data, model)
        start = _restore(directory, prepared) if directory.exists() else 0
        directory.begin(experiment, directory.provenance() or _provenance(command, prepared.device))
        directory.save_federation(*prepared.federation())
        directory.rewind(start)
        done = federate(experiment.algorithm, prepared.backend, prepared, prepared.schedule, prepared.server, start)
        for line, server, exhibit in done:
            if exhibit:
                shown = exhibit | {"images": prepared.data.pictures(exhibit["images"])}
                directory.save_exhibit(line["round"], shown)
            directory.append(line)
            stop = stopping is not None and stopping() and line["round"] < experiment.rounds
            if line["round"] % experiment.checkpoint_every == 0 or line["round"] == experiment.rounds or stop:
                clients = prepared.backend.store.flatten()
                directory.save(Checkpoint(line["round"], server, clients, prepared.about()))
            if watch:
                watch(experiment, line)
            if stop:
                raise Interrupted(f"stopped after round {line['round']} of {experiment.rounds}")
        finished = Run(directory.path, experiment, directory.lines())
        if report:
            from fedcog.experiments.report import page  # draws: loads matplotlib

            directory.save_report(page([directory.path]))
        return finished


def load(path: str | Path, model: nn.Module | None = None) -> nn.Module:
    """The trained global model of a run, in evaluation mode; `model` is your own network where the run used one."""
    directory = RunDirectory(path)
    experiment, checkpoint = directory.experiment(), directory.load()
    if checkpoint is None:
        raise RecordError(f"the run in {path} has no checkpoint yet: wait for its first, or continue it.")
    name = checkpoint.about["model"]
    if model is None:
        if name == "custom":
            raise RecordError(
                f"the run in {path} trained a network of your own: load({str(path)!r}, model=YourNetwork())."
            )
        model = build(name, tuple(checkpoint.about["input_shape"]), checkpoint.about["classes"], experiment.seed)
    weights = checkpoint.server["params"] | checkpoint.server["buffers"]
    known = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    trained = {name for name, value in model.named_parameters() if value.requires_grad}
    if not trained <= weights.keys() <= known:
        raise RecordError(f"the network given is not the one the run in {path} trained: its parameters differ in name.")
    try:
        model.to(getattr(torch, experiment.precision)).load_state_dict(weights, strict=False)
    except RuntimeError as error:
        raise RecordError(f"the network given is not the one the run in {path} trained: {error}") from error
    return model.eval()


def read(path: str | Path) -> Run:
    """A run as it is recorded in a directory, finished or not."""
    directory = RunDirectory(path)
    return Run(directory.path, directory.experiment(), directory.lines())


def default_out(experiment: Experiment) -> Path:
    """Where a run goes that was not told."""
    return Path("runs") / f"{experiment.dataset}-{name_of(experiment.algorithm)}-{experiment.seed}"


def share_out(experiment: Experiment, dataset: Dataset) -> list[Tensor]:
    """Every client's examples: as given with the data, or as the experiment's partition says."""
    if dataset.indices is not None:
        return list(dataset.indices)
    rule = Rule(
        experiment.clients, experiment.beta, experiment.balance, experiment.classes_per_client, experiment.min_examples
    )
    seed = experiment.seed if experiment.partition_seed < 0 else experiment.partition_seed
    users = None if dataset.users is None else dataset.users.numpy()
    shares = partition.split(experiment.partition, dataset.train_y.numpy(), users, rule, seed)
    return [torch.from_numpy(share) for share in shares]


def model_name(experiment: Experiment, shape: tuple[int, ...]) -> str:
    """The network's name; `auto` is the paper's for the data set, and for others what fits the shape."""
    if experiment.model != "auto":
        return experiment.model
    known = {"digits": "small", "fashion-mnist": "cnn", "cifar10": "cnn", "cifar100": "cnn3"}
    return known.get(experiment.dataset, "cnn" if len(shape) == 3 and min(shape[1:]) >= 16 else "mlp")


def find_device(name: str) -> torch.device:
    """The device called `name`; never another one in its place."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError([f"device '{name}' cannot be used here ({reason}): choose --device auto or cpu."]) from error
    return device


def check_ready(experiment: Experiment) -> list[str]:
    """What stands in the way of a run outside its settings: missing data, an absent device."""
    faults = []
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


def _check_same(directory: RunDirectory, experiment: Experiment, resume: bool) -> None:
    there, rounds = directory.experiment(), len(directory.lines())
    if not resume:
        raise RecordError(
            f"{directory.path} already holds a run ({rounds} of {there.rounds} rounds). Continue it with: fedcog run "
            f"--resume {directory.path}   or choose another --out."
        )
    if there.identity != experiment.identity:
        mine, theirs = experiment.to_dict(), there.to_dict()
        differ = [key for key in {**mine, **theirs} if mine.get(key) != theirs.get(key)]
        raise RecordError(
            f"{directory.path} belongs to another experiment: {', '.join(differ)} differ. Choose another --out, or "
            "leave those settings as they were."
        )


def _restore(directory: RunDirectory, prepared: Prepared) -> int:
    """The rounds already done, with the server's and the clients' state put back as they were then."""
    checkpoint = directory.load()
    if checkpoint is None:
        return 0
    if checkpoint.round > prepared.experiment.rounds:
        raise RecordError(
            f"the run in {directory.path} has {checkpoint.round} rounds already: --rounds {prepared.experiment.rounds} "
            "would take some away. Choose another --out."
        )
    about = prepared.about()
    if checkpoint.about.get("experiment") != about["experiment"] or checkpoint.about.get("data") != about["data"]:
        raise RecordError(
            f"{directory.path / 'checkpoint.safetensors'} was made by another experiment or on other data than this: "
            "choose another --out."
        )
    fresh, found = prepared.server, checkpoint.server
    shapes = [{name: value.shape for name, value in tree.flatten(state).items()} for state in (fresh, found)]
    if shapes[0] != shapes[1]:
        raise RecordError(f"{directory.path / 'checkpoint.safetensors'} is of another network: choose another --out.")
    prepared.server = tree.to(found, prepared.device)
    prepared.backend.store.restore(tree.to(checkpoint.clients, prepared.device))
    return checkpoint.round


def _provenance(command: str | None, device: torch.device) -> dict[str, Any]:
    return {
        "command": command or shlex.join(["python", *sys.argv]),
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "fedcog": fedcog.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "system": platform.system(),
    }
