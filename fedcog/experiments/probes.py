"""What is measured beside accuracy: seconds of a client by itself, generated images, and what those give away."""

import base64
import io
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fedcog import generation, streams, tree
from fedcog.algorithms import Algorithm, FedCOG
from fedcog.data import Dataset
from fedcog.experiments.config import Experiment
from fedcog.experiments.prepare import Prepared
from fedcog.experiments.record import RecordError, RunDirectory
from fedcog.federation.clock import Clock
from fedcog.federation.course import autograd
from fedcog.task import Labels
from fedcog.tree import Params, State

Kind = Literal["client-time", "generation-time", "partition", "pictures", "privacy"]
Found = dict[str, Any]
REPEATS = 3
MARKS = (0, 100, 200, 500, 1000)  # generation steps that the paper shows
SOME = 10_000  # images that generated ones are compared with


class Scene(NamedTuple):
    """A federation as it stands: who holds what, the server's state, and the round that would come next."""

    prepared: Prepared
    server: State
    round: int
    begun: Experiment | None  # the run that led here

    @property
    def shared(self) -> State:
        """What its clients would be sent."""
        shared: State = self.prepared.experiment.algorithm.broadcast(self.server)
        return shared

    @property
    def weights(self) -> Params:
        """The global model."""
        return self.prepared.experiment.algorithm.server_model(self.server)


def measure(kind: Kind, experiment: Experiment, after: Path | None, data: Dataset | None) -> Found:
    """What a probe of that kind finds in an experiment, after the finished run `after` where there is one."""
    prepared = Prepared(experiment, data)
    server, round, begun = prepared.server, 0, None
    if after is not None:
        begun, checkpoint = RunDirectory(after).experiment(), RunDirectory(after).load()
        if checkpoint is None:
            raise RecordError(f"the run in {after} has no checkpoint to measure on.")
        server, round = tree.to(checkpoint.server, prepared.device), checkpoint.round
        prepared.backend.store.restore(checkpoint.clients)
    return PROBES[kind](Scene(prepared, server, round, begun))


def _client_time(scene: Scene) -> Found:
    """Seconds of each client by itself in all rounds: those of the start, and one of the method."""
    before: Algorithm = scene.begun.algorithm if scene.begun is not None else scene.prepared.experiment.algorithm
    plain, last = _seconds(scene, before, scene.round - 1), _seconds(scene, scene.prepared.experiment.algorithm)
    return {"seconds": [scene.round * one + other for one, other in zip(plain, last, strict=True)], "round": last}


def _generation_time(scene: Scene) -> Found:
    """Seconds in which each client by itself generates its inputs."""
    return {"seconds": _seconds(scene, scene.prepared.experiment.algorithm, part="generation")}


def _seconds(scene: Scene, algorithm: Algorithm, round: int | None = None, part: str = "") -> list[float]:
    """What a round takes each client by itself, or a part of it: the median of a few, after one that is not counted."""
    backend, now, found = scene.prepared.backend, scene.round if round is None else max(round, 0), []
    shared = algorithm.broadcast(scene.server)
    for client in range(len(backend.weights)):
        own = backend.kept(algorithm, shared, client)
        kept = {name: own[name] for name in algorithm.client_init(shared)}
        times = []
        for _ in range(REPEATS + 1):
            clock = Clock(scene.prepared.device)
            outcome, _ = backend.alone(algorithm, shared, client, kept, now, scene.prepared.experiment.lr, False)
            clock.lap("all")
            times.append(outcome.seconds()[part] if part else clock.seconds()["all"])
        found.append(statistics.median(times[1:]))
    return found


def _partition(scene: Scene) -> Found:
    """Examples per client and class."""
    return {"counts": scene.prepared.backend.counts.tolist(), "classes": list(scene.prepared.dataset.classes)}


def _pictures(scene: Scene) -> Found:
    """One input of each class on its way from noise, and a real image of the class."""
    prepared = scene.prepared
    marks = tuple(mark for mark in MARKS if mark <= _cog(scene).recipe.steps)
    labels = _labels(scene, 0, "uniform")
    classes = sorted(set(labels.tolist()))
    shown = tuple(int((labels == label).nonzero()[0, 0]) for label in classes)
    made = _generate(scene, 0, labels, _cog(scene).recipe._replace(marks=marks, shown=shown))
    rows = {f"step {mark}": _strip(prepared.data.pictures(row)) for mark, row in zip(marks, made["trail"], strict=True)}
    real = [int((prepared.dataset.train_y == label).nonzero()[0, 0]) for label in classes]
    rows["real"] = _strip(prepared.dataset.train_x[real])
    return {"classes": [prepared.dataset.classes[label] for label in classes], "rows": rows}


def _strip(images: Tensor) -> str:
    """Images [n, C, H, W] of uint8 side by side, as a PNG in base64."""
    from PIL import Image

    row = torch.cat(list(images.cpu()), dim=-1).permute(1, 2, 0).contiguous().numpy()
    file = io.BytesIO()
    Image.fromarray(row[:, :, 0] if row.shape[2] == 1 else row).save(file, format="PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode()


def _privacy(scene: Scene) -> Found:
    """How near generated images come to images that were trained on, and to as many that were not.

    Members are drawn to have the classes of the others. As a measure of chance, the others are also halved, and counted
    is how often the first half is the nearer one.
    """
    from sklearn.metrics import roc_auc_score  # takes a second to load

    prepared, data, model, task = scene.prepared, scene.prepared.data, scene.prepared.model, scene.prepared.task
    made = []
    for client in range(data.clients):
        labels = _labels(scene, client, _cog(scene).labels)
        made.append(_generate(scene, client, labels, _cog(scene).recipe) | {"y": labels})
    x, y = torch.cat([one["x"] for one in made]), torch.cat([one["y"] for one in made])
    order = streams.permutation(prepared.experiment.seed, "privacy", 0, len(data.train_y)).to(data.device)
    wanted = task.counts(data.test_y[:SOME]).tolist()
    chosen = torch.cat([order[data.train_y[order] == label][:count] for label, count in enumerate(wanted)])
    sets = {
        "members": (data.inputs(data.train_x[chosen.to(data.train_x.device)]), data.train_y[chosen]),
        "others": (data.inputs(data.test_x[:SOME]), data.test_y[:SOME]),
    }
    views: dict[str, Callable[[Tensor], Tensor]] = {
        "pixels": lambda inputs: inputs.flatten(1),
        "features": lambda inputs: model.features(scene.weights, inputs),
    }
    sizes = {name: len(labels) for name, (_, labels) in sets.items()}
    found: Found = {"generated": len(x)} | sizes
    truth = [1] * sizes["members"] + [0] * sizes["others"]
    with torch.no_grad():
        for view, look in views.items():
            gaps = {name: _gaps(look(x), y, look(inputs), labels) for name, (inputs, labels) in sets.items()}
            near = {name: gap.min(1).values for name, gap in gaps.items()}
            halves = [gaps["others"][:, start::2].min(1).values for start in (0, 1)]
            scores = torch.cat([-gap.min(0).values for gap in gaps.values()]).nan_to_num(neginf=-1e30)
            found[view] = {
                "to_members": float(near["members"].mean()),
                "to_others": float(near["others"].mean()),
                "nearer_to_members": float((near["members"] < near["others"]).double().mean()),
                "nearer_by_chance": float((halves[0] < halves[1]).double().mean()),
                "auc": float(roc_auc_score(truth, scores.cpu().numpy())),
            }
        losses = [-task.loss(model.predict(scene.weights, inputs), labels) for inputs, labels in sets.values()]
    found["model"] = {"auc": float(roc_auc_score(truth, torch.cat(losses).cpu().numpy()))}
    return found


def _gaps(x: Tensor, y: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
    """Distances [generated, images], without end where the classes differ."""
    return torch.cdist(x, inputs).masked_fill(y[:, None] != labels, torch.inf)


def _cog(scene: Scene) -> FedCOG:
    algorithm = scene.prepared.experiment.algorithm
    assert isinstance(algorithm, FedCOG), "what is generated can only be seen where FedCOG is the outermost"
    return algorithm


def _labels(scene: Scene, client: int, rule: Labels) -> Tensor:
    """What a client asks for, as in a round."""
    prepared, drawn = scene.prepared, _drawn(scene, client)
    counts, sizes = prepared.backend.counts[client], prepared.backend.sizes[client]
    return prepared.task.targets(counts, sizes, rule, drawn["asked"])


def _drawn(scene: Scene, client: int) -> State:
    """A client's random tensors in the round."""
    number = torch.tensor([client])
    return tree.pick(scene.prepared.backend.cohort.draws(_cog(scene), "client", scene.round, number), 0)


def _generate(scene: Scene, client: int, labels: Tensor, recipe: generation.Recipe) -> Params:
    """What a client generates for labels, as in a round."""
    prepared, algorithm = scene.prepared, _cog(scene)
    own = prepared.backend.kept(algorithm, scene.shared, client)
    noise = _drawn(scene, client)["noise"]
    with torch.no_grad():
        return generation.generate(
            prepared.task, prepared.model, scene.weights, own["previous"], labels, noise, recipe, autograd
        )


PROBES: dict[Kind, Callable[[Scene], Found]] = {
    "client-time": _client_time,
    "generation-time": _generation_time,
    "partition": _partition,
    "pictures": _pictures,
    "privacy": _privacy,
}
