"""Probes: measurements that training does not record (client time, generated images, privacy)."""

import base64
import io
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from fedcog.algorithms import Algorithm, FedCOG, generation
from fedcog.core import rng, tree
from fedcog.core.tasks import LabelChoice
from fedcog.core.timing import Stopwatch
from fedcog.core.tree import Params, State
from fedcog.data import Dataset
from fedcog.engine.cohort import RoundSpec
from fedcog.engine.local_training import autograd_gradient
from fedcog.runs.config.experiment import Experiment
from fedcog.runs.config.user_objects import UserObjects
from fedcog.runs.records.run_directory import RecordError, RunDirectory
from fedcog.runs.setup import ExperimentSetup

ProbeKind = Literal["client-time", "generation-time", "partition", "pictures", "privacy"]

Measurement = dict[str, Any]
"""What a probe measures, as it is stored: numbers, strings, lists and tables of them."""

TIMING_REPEATS = 3
PAPER_STEPS = (0, 100, 200, 500, 1000)
"""Generation steps after which the paper shows images."""
MAX_COMPARED_IMAGES = 10_000
"""Number of test images that generated images are compared with, at most."""


class FederationState(NamedTuple):
    """A federation after some rounds, ready for the next one."""

    prepared: ExperimentSetup
    server: State
    round: int  # the next round, from 0
    warm_start: Experiment | None  # the run that led here

    @property
    def shared(self) -> State:
        """What the server would send to the clients in the next round."""
        shared: State = self.prepared.experiment.algorithm.broadcast(self.server)
        return shared

    @property
    def weights(self) -> Params:
        """The parameters of the global model."""
        return self.prepared.experiment.algorithm.server_model(self.server)


def measure(
    kind: ProbeKind, experiment: Experiment, after: Path | None, data: Dataset | None
) -> Measurement:
    """Run a probe on an experiment.

    Args:
        kind: What to measure.
        experiment: The experiment.
        after: Run directory of the finished run that the experiment continues, if any.
        data: The data set, if it is loaded already.

    Returns:
        The measurement.

    Raises:
        RecordError: The run in `after` has no checkpoint.
    """
    prepared = ExperimentSetup(experiment, UserObjects(preloaded=data))
    if after is None:
        return PROBES[kind](FederationState(prepared, prepared.server_state, 0, None))
    directory = RunDirectory(after)
    warm_start = directory.experiment()
    checkpoint = directory.load()
    if checkpoint is None:
        raise RecordError(f"the run in {after} has no checkpoint to measure on: run it again.")
    server = tree.to(checkpoint.server, prepared.device)
    prepared.simulator.client_states.restore(checkpoint.clients)
    return PROBES[kind](FederationState(prepared, server, checkpoint.round, warm_start))


def _client_time(state: FederationState) -> Measurement:
    """Seconds of each client on its own: in all rounds, and in one round of the algorithm."""
    algorithm: Algorithm = state.prepared.experiment.algorithm
    start_algorithm = algorithm if state.warm_start is None else state.warm_start.algorithm
    start_seconds = _round_seconds(state, start_algorithm, state.round - 1)
    last_seconds = _round_seconds(state, algorithm)
    total_seconds = [
        state.round * start + last for start, last in zip(start_seconds, last_seconds, strict=True)
    ]
    return {"seconds": total_seconds, "round": last_seconds}


def _generation_time(state: FederationState) -> Measurement:
    """Seconds in which each client on its own generates its inputs."""
    algorithm = state.prepared.experiment.algorithm
    return {"seconds": _round_seconds(state, algorithm, part="generation")}


def _round_seconds(
    state: FederationState, algorithm: Algorithm, round: int | None = None, part: str = ""
) -> list[float]:
    """Seconds of a round, or of a part of it, for each client on its own.

    It is the median of a few repeats, after a first one that is not counted.
    """
    simulator = state.prepared.simulator
    round_index = state.round if round is None else max(round, 0)
    shared = algorithm.broadcast(state.server)
    spec = RoundSpec(algorithm, shared, round_index, state.prepared.experiment.lr, False)
    medians = []
    for client in range(len(simulator.weights)):
        client_state = simulator.client_state(algorithm, shared, client)
        kept = {name: client_state[name] for name in algorithm.client_init(shared)}
        times = []
        for _ in range(TIMING_REPEATS + 1):
            clock = Stopwatch(state.prepared.device)
            result, _ = simulator.train_client(spec, client, kept)
            clock.lap("all")
            times.append(result.timings.seconds()[part] if part else clock.seconds()["all"])
        medians.append(statistics.median(times[1:]))
    return medians


def _partition(state: FederationState) -> Measurement:
    """Number of examples per client and class."""
    return {
        "counts": state.prepared.simulator.class_counts.tolist(),
        "classes": list(state.prepared.dataset.classes),
    }


def _pictures(state: FederationState) -> Measurement:
    """One generated image of each class after several steps, and a real image of the class."""
    prepared = state.prepared
    dataset = prepared.dataset
    recipe = _fedcog(state).generation_config
    marks = tuple(step for step in PAPER_STEPS if step <= recipe.steps)
    labels = _target_labels(state, 0, "uniform")
    classes = sorted(set(labels.tolist()))
    shown = tuple(int((labels == label).nonzero()[0, 0]) for label in classes)
    generated = _generate(state, 0, labels, recipe._replace(marks=marks, shown=shown))
    rows = {
        f"step {mark}": _png_strip(prepared.data.to_images(row))
        for mark, row in zip(marks, generated["trail"], strict=True)
    }
    real = [int((dataset.train_y == label).nonzero()[0, 0]) for label in classes]
    rows["real"] = _png_strip(dataset.train_x[real])
    return {"classes": [dataset.classes[label] for label in classes], "rows": rows}


def _png_strip(images: Tensor) -> str:
    """Join uint8 images (N, C, H, W) side by side into a PNG, as base64."""
    from PIL import Image

    pixels = torch.cat(list(images.cpu()), dim=-1).permute(1, 2, 0).contiguous().numpy()
    image = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
    file = io.BytesIO()
    image.save(file, format="PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode()


class LabeledInputs(NamedTuple):
    """Inputs (N, C, H, W) and their labels (N)."""

    x: Tensor
    y: Tensor


def _privacy(state: FederationState) -> Measurement:
    """How close generated images are to training images (members) and to as many test images.

    Members are drawn to have the class counts of the test images. To estimate chance, the test
    images are split in halves, and the probe counts how often the first half is closer.
    """
    model = state.prepared.model
    task = state.prepared.task
    generated = _generate_for_all(state)
    members, others = _members_and_others(state)
    views: dict[str, Callable[[Tensor], Tensor]] = {
        "pixels": lambda inputs: inputs.flatten(1),
        "features": lambda inputs: model.features(state.weights, inputs),
    }
    found: Measurement = {
        "generated": len(generated.x),
        "members": len(members.y),
        "others": len(others.y),
    }
    with torch.no_grad():
        for name, view in views.items():
            found[name] = _nearness(view, generated, members, others)
        scores = [
            -task.loss(model.predict(state.weights, inputs), labels)
            for inputs, labels in (members, others)
        ]
    found["model"] = {"auc": _auc(*scores)}
    return found


def _nearness(
    view: Callable[[Tensor], Tensor],
    generated: LabeledInputs,
    members: LabeledInputs,
    others: LabeledInputs,
) -> dict[str, float]:
    """Compare the distances of generated images to members and to others, in one view."""
    x = view(generated.x)
    to_members = _distances(x, generated.y, view(members.x), members.y)
    to_others = _distances(x, generated.y, view(others.x), others.y)
    nearest_member = to_members.min(1).values
    nearest_other = to_others.min(1).values
    first_half = to_others[:, 0::2].min(1).values
    second_half = to_others[:, 1::2].min(1).values
    scores = [
        (-distances.min(0).values).nan_to_num(neginf=-1e30) for distances in (to_members, to_others)
    ]
    return {
        "to_members": float(nearest_member.mean()),
        "to_others": float(nearest_other.mean()),
        "nearer_to_members": float((nearest_member < nearest_other).double().mean()),
        "nearer_by_chance": float((first_half < second_half).double().mean()),
        "auc": _auc(*scores),
    }


def _auc(member_scores: Tensor, other_scores: Tensor) -> float:
    """Area under the ROC curve of telling members from others by their scores."""
    from sklearn.metrics import roc_auc_score  # imported here: loading it takes a second

    truth = [1] * len(member_scores) + [0] * len(other_scores)
    return float(roc_auc_score(truth, torch.cat([member_scores, other_scores]).cpu().numpy()))


def _generate_for_all(state: FederationState) -> LabeledInputs:
    """Generate the inputs of every client, as in a round."""
    algorithm = _fedcog(state)
    inputs = []
    labels = []
    for client in range(state.prepared.data.num_clients):
        client_labels = _target_labels(state, client, algorithm.labels)
        inputs.append(_generate(state, client, client_labels, algorithm.generation_config)["x"])
        labels.append(client_labels)
    return LabeledInputs(torch.cat(inputs), torch.cat(labels))


def _members_and_others(state: FederationState) -> tuple[LabeledInputs, LabeledInputs]:
    """Training images with the class counts of the test images, and the test images."""
    data = state.prepared.data
    seed = state.prepared.experiment.seed
    order = rng.permutation(seed, "privacy", 0, len(data.train_y)).to(data.device)
    test_labels = data.test_y[:MAX_COMPARED_IMAGES]
    counts = state.prepared.task.class_counts(test_labels).tolist()
    chosen = torch.cat(
        [order[data.train_y[order] == label][:count] for label, count in enumerate(counts)]
    )
    member_inputs = data.to_inputs(data.train_x[chosen.to(data.train_x.device)])
    members = LabeledInputs(member_inputs, data.train_y[chosen])
    others = LabeledInputs(data.to_inputs(data.test_x[:MAX_COMPARED_IMAGES]), test_labels)
    return members, others


def _distances(x: Tensor, y: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
    """Distances (generated, images); infinite where the classes differ."""
    return torch.cdist(x, inputs).masked_fill(y[:, None] != labels, torch.inf)


def _fedcog(state: FederationState) -> FedCOG:
    algorithm = state.prepared.experiment.algorithm
    assert type(algorithm).__name__ == "FedCOG", "probes of generated inputs need FedCOG outermost"
    return cast(FedCOG, algorithm)


def _target_labels(state: FederationState, client: int, rule: LabelChoice) -> Tensor:
    """The labels for which a client generates inputs, as in a round."""
    prepared = state.prepared
    random_tensors = _random_tensors(state, client)
    counts = prepared.simulator.class_counts[client]
    sizes = prepared.simulator.label_set_sizes[client]
    return prepared.task.targets(counts, sizes, rule, random_tensors["asked"])


def _random_tensors(state: FederationState, client: int) -> State:
    """A client's random tensors in the round."""
    client_ids = torch.tensor([client])
    cohort = state.prepared.simulator.cohort
    return tree.take(cohort.draws(_fedcog(state), "client", state.round, client_ids), 0)


def _generate(
    state: FederationState, client: int, labels: Tensor, recipe: generation.GenerationConfig
) -> Params:
    """Generate inputs with the given labels for one client, as in a round."""
    prepared = state.prepared
    client_state = prepared.simulator.client_state(_fedcog(state), state.shared, client)
    noise = _random_tensors(state, client)["noise"]
    models = generation.Models(
        prepared.task, prepared.model, state.weights, client_state["previous"]
    )
    with torch.no_grad():
        return generation.generate(models, labels, noise, recipe, autograd_gradient)


PROBES: dict[ProbeKind, Callable[[FederationState], Measurement]] = {
    "client-time": _client_time,
    "generation-time": _generation_time,
    "partition": _partition,
    "pictures": _pictures,
    "privacy": _privacy,
}
