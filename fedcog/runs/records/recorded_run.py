"""Recorded runs: their rounds and scores, and the trained model."""

import dataclasses
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fedcog.algorithms import Algorithm
from fedcog.core.tasks import Metric, metric_of
from fedcog.models.checks import copy_network
from fedcog.models.initialization import Network, make_network
from fedcog.models.tokens import accept_embeddings, takes_tokens
from fedcog.models.zoo import build, is_network_name
from fedcog.runs.config.composition import algorithm_name
from fedcog.runs.config.experiment import Experiment
from fedcog.runs.config.user_objects import check_runnable
from fedcog.runs.records.checkpoint import Checkpoint
from fedcog.runs.records.run_directory import RecordError, RunDirectory, runs_below
from fedcog.runs.setup import make_privacy

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclasses.dataclass(frozen=True, repr=False)
class Run:
    """A recorded run.

    Attributes:
        path: The run directory.
        experiment: The experiment.
        lines: One dict per round, as in `rounds.jsonl`.
        diverged: Why training stopped early; empty if it did not.
        user_objects: Names of the user's own `data`, `network` and `augmentation`, each with a
            digest, such as "Net-77ab"; settings do not describe them.
    """

    path: Path
    experiment: Experiment
    lines: list[dict[str, Any]]
    diverged: str = ""
    user_objects: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __repr__(self) -> str:
        scores = f", last {self.last:.4f}, best {self.best:.4f}" if self.scores else ""
        name = algorithm_name(self.experiment.algorithm)
        return f"Run({str(self.path)!r}, {name}, {len(self.lines)} rounds{scores})"

    @property
    def metric(self) -> Metric:
        """The main metric: accuracy, or micro F1 if examples have several labels."""
        names = (metric_of(line) for line in self.lines)
        lines = zip(names, self.lines, strict=False)
        return next((name for name, line in lines if name in line), "accuracy")

    @property
    def scores(self) -> list[tuple[int, float]]:
        """(round, score on the test set) of every evaluated round; rounds count from 1."""
        name = self.metric
        return [(line["round"], line[name]) for line in self.lines if line.get(name) is not None]

    @property
    def test_examples(self) -> str:
        """The examples that scores are of, in words: the server's, or all clients' own."""
        if any(line.get("evaluated_on") == "clients" for line in self.lines):
            return "the clients' own test examples"
        return "the test set"

    @property
    def last(self) -> float:
        """The score on the test set after the last round."""
        return self.scores[-1][1]

    @property
    def best(self) -> float:
        """The highest score of any round: what papers report, and an optimistic number."""
        return max(score for _, score in self.scores)

    @property
    def label_mix(self) -> list[float]:
        """Scores of the clients' models on the test set, weighted by each client's label mix.

        They are averaged over the clients of a round. For a personalized algorithm these are the
        personal models; for others the local models before aggregation, that is the fine-tuned
        global model. Scores on a client's own test examples are `local_test`.
        """
        name = f"label_mix_{self.metric}"
        return [line[name] for line in self.lines if line.get(name) is not None]

    def local_test(self, name: str = "") -> list[tuple[int, float]]:
        """Return scores on the clients' own test examples.

        Args:
            name: Key in `local_test` of `rounds.jsonl`, such as "accuracy_mean", "accuracy_worst"
                or "personal_accuracy"; by default the main metric of the global model over all
                test examples.

        Returns:
            (round, score) of every evaluated round; empty if it was not measured.
        """
        key = name or self.metric
        found = [(line["round"], (line.get("local_test") or {}).get(key)) for line in self.lines]
        return [(round, score) for round, score in found if score is not None]

    @property
    def client_names(self) -> list[str]:
        """Names of the users that the clients are, by client id; empty if they have no names."""
        return RunDirectory(self.path).client_names(self.experiment.clients)

    @property
    def privacy(self) -> str:
        """The privacy budget spent, in words; empty without differential privacy."""
        spent = self.lines[-1].get("privacy") if self.lines else None
        if not isinstance(spent, dict):
            return ""
        is_simulated = bool(spent.get("simulated", True))
        privacy = make_privacy(self.experiment, self.experiment.clients, is_simulated)
        if privacy is None:
            return ""
        epsilon = "infinite" if spent.get("epsilon") is None else f"{spent['epsilon']:.3g}"
        kind = "privacy"
        if privacy.simulated:
            kind = "simulated privacy (its noise comes from the seed)"
        return (
            f"{kind}: epsilon {epsilon} at delta {privacy.delta:g} after {len(self.lines)} rounds, "
            f"{privacy.noise_at} ({privacy.neighboring}); clipping norm {privacy.clip:g}, noise "
            f"multiplier {privacy.noise:g}"
        )

    def to_frame(self) -> "DataFrame":
        """Return the rounds as a pandas DataFrame, one row per round; see `fedcog.frame`.

        Raises:
            ConfigError: If pandas is not installed.
        """
        from fedcog.runs.records.frames import frame  # which imports this module

        return frame([self])


def read(path: str | Path) -> Run:
    """Read a recorded run, finished or not.

    Raises:
        RecordError: If there is no run, or its record is damaged.
    """
    directory = RunDirectory(path)
    return Run(
        directory.path,
        directory.experiment(),
        directory.lines(),
        directory.failure(),
        directory.user_objects(),
    )


def read_all(folder: str | Path) -> list[Run]:
    """Read all runs in or below a folder, in the order of their paths.

    A damaged run is left out with a warning.

    Args:
        folder: A run directory, or a folder with runs below it.

    Returns:
        The runs, finished or not.

    Raises:
        RecordError: If there is no run, or all are damaged.

    Example:
        ```python
        import fedcog

        experiment = fedcog.Experiment(rounds=2, local_steps=5)
        fedcog.compare([experiment], seeds=[0, 1], out="runs/seeds")
        print([run.last for run in fedcog.read_all("runs/seeds")])
        ```
    """
    runs, damaged = read_readable(runs_below([folder]))
    for error in damaged:
        warnings.warn(f"skipped: {error}", stacklevel=2)
    return runs


def read_readable(paths: Iterable[Path]) -> tuple[list[Run], list[RecordError]]:
    """Read the runs that are not damaged.

    Args:
        paths: The run directories.

    Returns:
        The runs, and why others cannot be read.

    Raises:
        RecordError: If no run can be read.
    """
    runs: list[Run] = []
    damaged: list[RecordError] = []
    for path in paths:
        try:
            runs.append(read(path))
        except RecordError as error:
            damaged.append(error)
    if damaged and not runs:
        raise damaged[0]
    return runs, damaged


def load(
    path: str | Path, model: Network | None = None, algorithm: Algorithm | None = None
) -> nn.Module:
    """Load the trained global model of a run.

    Args:
        path: The run directory.
        model: Your network, if the run trained one of yours: an instance, which is copied, or its
            class or a function that builds it.
        algorithm: Your algorithm, if the run used one of yours.

    Returns:
        The network in evaluation mode. It takes normalized inputs, as in training; `export` with
        format "onnx" makes one that takes bytes.

    Raises:
        RecordError: If the run has no checkpoint, or the network does not fit it.

    Example:
        ```python
        import fedcog

        run = fedcog.run(fedcog.Experiment(rounds=1, local_steps=5), "runs/first")
        network = fedcog.load(run.path)
        ```
    """
    return load_with_checkpoint(RunDirectory(path), model, algorithm)[0]


def load_with_checkpoint(
    directory: RunDirectory, model: Network | None = None, algorithm: Algorithm | None = None
) -> tuple[nn.Module, Checkpoint]:
    """Load the trained global model of a run, and the checkpoint that it is from.

    Args:
        directory: The run directory.
        model: Your network, if the run trained one of yours: an instance, which is copied, or its
            class or a function that builds it.
        algorithm: Your algorithm, if the run used one of yours.

    Returns:
        The network in evaluation mode, and the checkpoint.

    Raises:
        RecordError: If the run has no checkpoint, or the network does not fit it.
    """
    path = directory.path
    experiment = directory.experiment()
    checkpoint = directory.load()
    if checkpoint is None:
        raise RecordError(
            f"the run in {path} has no checkpoint yet: wait for its first, or continue it."
        )
    if model is None:
        network = _build_network(path, experiment, checkpoint)
    else:
        network = _own_network(model, checkpoint, experiment.seed)
    if algorithm is None and (faults := check_runnable(experiment)):
        raise RecordError(
            f"{faults[0].partition(':')[0]}: pass it with fedcog.load({str(path)!r}, "
            "algorithm=...), or to fedcog.export."
        )
    weights = (algorithm or experiment.algorithm).server_model(checkpoint.server)
    network = network.to(torch.float64 if experiment.precision == "float64" else torch.float32)
    targets = dict(network.named_parameters()) | dict(network.named_buffers())
    trainable = {name for name, value in network.named_parameters() if value.requires_grad}
    if not trainable <= weights.keys() <= targets.keys():
        raise RecordError(
            f"this network is not the one that the run in {path} trained: its parameters have "
            "other names."
        )
    for name, value in weights.items():
        if targets[name].shape != value.shape:
            raise RecordError(
                f"this network is not the one that the run in {path} trained: '{name}' has another "
                "shape."
            )
        with torch.no_grad():
            targets[name].copy_(value)
    return network.eval(), checkpoint


def _own_network(model: Network, checkpoint: Checkpoint, seed: int) -> nn.Module:
    """Copy the user's network, or build it from the run's seed."""
    shape = tuple(checkpoint.info.get("input_shape", ()))
    num_classes = int(checkpoint.info.get("classes", 0))
    network = copy_network(make_network(model, shape, num_classes, seed))
    if takes_tokens(network) and type(network).forward is nn.Module.forward:
        accept_embeddings(network)
    return network


def _build_network(path: Path, experiment: Experiment, checkpoint: Checkpoint) -> nn.Module:
    """Build the network that a checkpoint names."""
    try:
        name = checkpoint.info["model"]
        shape = checkpoint.info["input_shape"]
        num_classes = checkpoint.info["classes"]
        if name != "custom" and not is_network_name(name):
            raise KeyError(name)
    except (AttributeError, KeyError, TypeError) as error:
        raise RecordError(
            f"{path / 'checkpoint.safetensors'} names no network that is known here."
        ) from error
    if name == "custom":
        raise RecordError(
            f"the run in {path} trained your own network: pass it with "
            f"fedcog.load({str(path)!r}, model=YourNetwork), or to fedcog.export; "
            "on the command line, --model FILE.py:Name."
        )
    return build(name, tuple(shape), num_classes, experiment.seed)
