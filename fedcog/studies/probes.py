"""Probes: measurements that training does not record (client time, generated images, privacy)."""

import base64
import io
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from fedcog.algorithms import Algorithm
from fedcog.core.timing import Stopwatch
from fedcog.data import Dataset
from fedcog.engine.cohort import RoundSpec
from fedcog.runs.config.experiment import Experiment
from fedcog.runs.config.user_objects import UserObjects
from fedcog.runs.records.run_directory import RecordError, RunDirectory
from fedcog.runs.setup import ExperimentSetup
from fedcog.studies.audit.federation_state import FederationState, Measurement, restore
from fedcog.studies.audit.membership import (
    fedcog_of,
    generate_inputs,
    measure_membership,
    target_labels,
)

ProbeKind = Literal["client-time", "generation-time", "partition", "pictures", "privacy"]

TIMING_REPEATS = 3
PAPER_STEPS = (0, 100, 200, 500, 1000)
"""Generation steps after which the paper shows images."""


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
    return PROBES[kind](restore(prepared, checkpoint, warm_start))


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
    recipe = fedcog_of(state).generation_config
    marks = tuple(step for step in PAPER_STEPS if step <= recipe.steps)
    labels = target_labels(state, 0, "uniform")
    classes = sorted(set(labels.tolist()))
    shown = tuple(int((labels == label).nonzero()[0, 0]) for label in classes)
    generated = generate_inputs(state, 0, labels, recipe._replace(marks=marks, shown=shown))
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


PROBES: dict[ProbeKind, Callable[[FederationState], Measurement]] = {
    "client-time": _client_time,
    "generation-time": _generation_time,
    "partition": _partition,
    "pictures": _pictures,
    "privacy": measure_membership,
}
